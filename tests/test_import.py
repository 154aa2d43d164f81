"""What importing fairshard costs, in modules, and what it offers."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fairshard
from tests.test_architecture import FILES, dotted, module_name

# Slow to import, and needed by few programs.
UNWANTED = (
    *("torch.distributed.checkpoint", "torch.distributed.elastic", "matplotlib", "tqdm", "transformers"),
    *("fairshard.checkpoint", "fairshard.cli", "fairshard.integrations", "fairshard.planning", "fairshard.extras.muon"),
    "fairshard.extras.planning",
    *("fairshard.optim.cpu_optimizer", "fairshard.extras.observe.observer", "fairshard.nn.wrap"),
    *("fairshard.state.fairscale_shards", "fairshard.checks.histories"),
)
MAX_MODULES_OF_BOTH_DOORS = 190  # were 288

COSTS = """
import json, sys
before = set(sys.modules)
import fairshard
alone = sorted(set(sys.modules) - before)
import torch.distributed.fsdp
before = set(sys.modules)
import fairshard.nn, fairshard.optim
folders = sorted(set(sys.modules) - before)
from fairshard import FSDP, fully_shard
print(json.dumps([alone, folders, sorted(set(sys.modules) - before)]))
"""


def test_importing_costs_little():
    """`import fairshard` brings neither torch nor numpy, its folders next to nothing, and the doors what they need."""
    run = subprocess.run([sys.executable, "-c", COSTS], capture_output=True, text=True, check=True)
    alone, folders, doors = json.loads(run.stdout)
    assert not {"torch", "numpy"} & set(alone)
    assert len(folders) < 10
    unwanted = [name for name in doors for found in UNWANTED if name == found or name.startswith(f"{found}.")]
    assert not unwanted
    assert len(doors) <= MAX_MODULES_OF_BOTH_DOORS


WITHOUT_WINGS = """
import sys
wings = tuple("fairshard." + name for name in ("extras", "checkpoint", "integrations", "cli"))
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(wings):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from fairshard.nn import FullyShardedDataParallel, fully_shard
from fairshard.optim import CPUOptimizer, ShardedGradScaler
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for door in (FullyShardedDataParallel, fully_shard):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[0] = door(model[0])
    model = door(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    assert not torch.equal(model.state_dict()["1.bias"], before["1.bias"])
print(sorted(name for name in sys.modules if name.startswith(wings)))
"""


def test_both_doors_train_without_any_wing():
    """A wing is imported when a user asks for it, never to train: each can be deleted."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_WINGS], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


def lazy_packages():
    """The packages whose names are imported when they are used, and the source of each."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.Call) and dotted(node.func) == "lazy" for node in ast.walk(tree)):
            yield module_name(path), tree


def typed_names(tree):
    """The names that type checkers see, ``{name: (module, name there)}``, and the modules of which they see all."""
    names, whole = {}, []
    block = next(node for node in tree.body if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING")
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            if alias.name == "*":
                whole.append(node.module)
            else:
                names[alias.asname or alias.name] = node.module, alias.name
    return names, whole


@pytest.mark.parametrize(("package", "tree"), [pytest.param(*each, id=each[0]) for each in lazy_packages()])
def test_type_checkers_see_what_is_offered(package, tree):
    """The imports under ``TYPE_CHECKING`` are those that happen on first use, of the same objects, and are public."""
    module = importlib.import_module(package)
    names, whole = typed_names(tree)
    for other in whole:
        names.update((name, (other, name)) for name in importlib.import_module(other).__all__)
    assert names.keys() == module._HOMES.keys()
    assert names.keys() <= set(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name, (home, there) in names.items():
        source = importlib.import_module(home)
        known = getattr(source, there, None) or importlib.import_module(f"{home}.{there}")
        assert getattr(module, name) is known, name


def test_the_package_offers_the_names_of_the_first_day():
    """What a first script needs is one import away; a name that does not exist is refused by the module's name."""
    assert fairshard.FSDP is fairshard.FullyShardedDataParallel
    for name in ("fully_shard", "FSDPModule", "CPUOptimizer", "Checkpointer", "summary", "plan", "timeline"):
        assert callable(getattr(fairshard, name)), name
    with pytest.raises(AttributeError, match="module 'fairshard' has no attribute 'FSPD'"):
        _ = fairshard.FSPD


def test_importing_a_folder_does_not_hide_a_name():
    """No folder or file directly below the package has the name of something else that the package offers."""
    below = {path.stem for path in Path(fairshard.__file__).parent.iterdir()}
    assert not below & set(fairshard.__all__)
