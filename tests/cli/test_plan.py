"""``fairshard plan``: what it prints, and one-line errors for what cannot be planned."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from fairshard.cli.gpt import GPT, Block, GPTConfig
from fairshard.cli.main import main
from fairshard.nn import Owned, RowBlocks, ShardingStrategy
from fairshard.nn.wrap import ModuleWrapPolicy, describe, size_based_auto_wrap_policy
from fairshard.utils.size_text import size_text

FACTORY = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x))

def build():
    assert torch.empty(1).is_meta
    return nn.Sequential(Part(), Part())

def fails():
    raise RuntimeError("two\\nlines")

number = 3
two = lambda: 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a module of the user's and two configurations."""
    (tmp_path / "planned_models.py").write_text(FACTORY)
    for name, config in {
        "llama": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        "unknown": {"model_type": "no such type"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line, capfd):
    """Exit code, and what was printed as (stdout, stderr)."""
    code = main(["plan", *line.split()])
    return code, *capfd.readouterr()


@pytest.mark.parametrize(
    ("line", "policy", "kwargs"),
    [
        ("", None, {}),
        ("--policy class:Block", ModuleWrapPolicy({Block}), {}),
        ("--policy class:Embedding,Linear", ModuleWrapPolicy({nn.Embedding, nn.Linear}), {}),
        ("--policy size:1e4", partial(size_based_auto_wrap_policy, min_num_params=10_000), {}),
        ("--precision bf16", None, {"mixed_precision": True, "compute_dtype": torch.bfloat16}),
        ("--no-reshard-after-forward", None, {"reshard_after_forward": False}),
        ("--reshard-to 3 --sharding-strategy FULL_SHARD", None, {"reshard_after_forward": 3}),
        ("--sharding-strategy NO_SHARD", None, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        (
            "--sharding-strategy HYBRID_SHARD --replicas 2",
            None,
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "num_replicas": 2},
        ),
        ("--cpu-offload --no-move-grads-to-cpu", None, {"cpu_offload": True, "move_grads_to_cpu": False}),
        ("--optimizer sgd --bucket-cap-mb 0.5", None, {"optimizer": "sgd", "bucket_cap_mb": 0.5}),
        ("--placement row-blocks", None, {"placement_fn": lambda param: RowBlocks(1)}),
        ("--placement owned", None, {"placement_fn": lambda param: Owned()}),
        ("--placement row-blocks:16", None, {"placement_fn": lambda param: RowBlocks(16)}),
    ],
)
def test_the_plan_of_the_gpt(line, policy, kwargs, capfd):
    """The options are those of ``describe``; the JSON is its result, and the text has the same figures."""
    common = "--model gpt --layers 3 --dim 32 --heads 2 --world-size 3 --device cuda"
    plan = describe(GPT(GPTConfig(3, 32, 2, 64)), policy, 3, device="cuda", **kwargs)
    code, out, err = run(f"{common} {line} --json", capfd)
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(plan.as_dict()))
    assert run(f"{common} {line}", capfd) == (0, f"{plan}\n", "")
    assert size_text(plan.peak_nbytes) in str(plan)


def test_the_plan_of_a_users_model(folder, capfd):
    """A function in a module in the working directory builds the model, on the meta device."""
    code, out, _ = run("--factory planned_models:build --policy class:Part --world-size 2 --json", capfd)
    assert code == 0
    assert {unit["fqn"]: unit["numel"] for unit in json.loads(out)["units"]} == {"": 0, "0": 144, "1": 144}


def test_the_plan_of_a_hugging_face_model(folder, capfd):
    """A configuration suffices: it gives the causal language model of its type, without weights."""
    pytest.importorskip("transformers")
    code, out, _ = run("--hf llama --policy class:LlamaDecoderLayer --world-size 4 --json", capfd)
    assert code == 0
    assert [unit["fqn"] for unit in json.loads(out)["units"]] == ["", "model.layers.0", "model.layers.1"]


BAD = {
    "no world size": ("", "--world-size"),
    "pictures, of 0.6": ("--world-size 2 --png plan.png", "Run the command once for each wrapping"),
    "no ranks": ("--world-size 0", "--world-size must be 1 to 100,000, but is 0"),
    "hybrid without replicas": ("--world-size 2 --sharding-strategy HYBRID_SHARD", "`num_replicas`"),
    "two ways to reshard": ("--world-size 2 --reshard-to 2 --no-reshard-after-forward", "Remove one of them"),
    "unknown policy": ("--world-size 2 --policy rows", "--policy must be size:N, class:NAME, blocks or none"),
    "class without a name": ("--world-size 2 --policy class:", "--policy must be size:N, class:NAME, blocks or none"),
    "size without a number": ("--world-size 2 --policy size:big", "but N is 'big'"),
    "size not a number": ("--world-size 2 --policy size:nan", "but N is 'nan'"),
    "unknown placement": ("--world-size 2 --placement rows", "--placement must be flat, owned or row-blocks[:N]"),
    "blocks of no rows": ("--world-size 2 --placement row-blocks:0", "N at least 1, but is row-blocks:0"),
    "class that is not there": ("--world-size 2 --policy class:Layer", "class:Layer must be a class of a module"),
    "heads that do not fit": ("--world-size 2 --dim 30 --heads 4", "--dim must be a multiple of --heads"),
    "size of another model": ("--world-size 2 --factory planned_models:build --dim 8", "--dim describes the GPT"),
    "two models": ("--world-size 2 --model gpt --factory planned_models:build", "not allowed with"),
    "factory without a function": ("--world-size 2 --factory planned_models", "must be PKG.MOD:FN"),
    "factory that is not there": ("--world-size 2 --factory nowhere:build", "cannot be imported: No module"),
    "function that is not there": ("--world-size 2 --factory planned_models:x", "cannot be imported"),
    "factory that is no function": ("--world-size 2 --factory planned_models:number", "must be a function, but is int"),
    "factory of something else": ("--world-size 2 --factory planned_models:two", "must return a module, but"),
    "factory that fails": ("--world-size 2 --factory planned_models:fails", "RuntimeError: two lines"),
    "hf without a config": ("--world-size 2 --hf nowhere", "a folder with a config.json, but nowhere has none"),
    "limit without a unit": ("--world-size 2 --device-memory 80", "1 MB or more, but is 80 B. Write 80GB"),
    "limit that is no size": ("--world-size 2 --device-memory much", "a size must be a number with kB, MB, GB"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, folder, capfd):
    """The line says which option is wrong and how."""
    line, says = BAD[case]
    code, out, err = run(line, capfd)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err


def test_hugging_face_needs_transformers_and_a_type_that_it_knows(folder, capfd, monkeypatch):
    """Without the package the line says what to install; for an unknown type it has the message of transformers."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("--world-size 2 --hf llama", capfd) == (
        2,
        "",
        "fairshard: error: --hf needs transformers. Run: pip install 'fairshard[hf]'\n",
    )
    monkeypatch.undo()
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    code, _, err = run("--world-size 2 --hf unknown", capfd)
    assert code == 2
    assert "--hf unknown cannot be read" in err.splitlines()[-1]
