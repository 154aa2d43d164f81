"""The house rules that can be checked by reading the source, and the one that needs a training step."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn

import fairshard
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import sgd

PACKAGE = Path(fairshard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES, MAX_LINES_OF_CORE = 400, 2000

UTILS, DATA_PARALLEL = "fairshard.utils", "fairshard.nn.data_parallel"

# The path that a reader must know, bottom up.
CORE = [
    *(f"{UTILS}.{name}" for name in ("span", "layout", "device", "collectives", "reduce_scatter_bucketer")),
    *(f"{DATA_PARALLEL}.{name}" for name in ("flat_param", "unit", "root")),
]

# Top to bottom; a module imports from its own layer and from those below, at run time.
LAYERS = [
    ["fairshard.cli"],
    [
        "fairshard.nn",
        "fairshard.nn.wrap",
        f"{DATA_PARALLEL}",
        f"{DATA_PARALLEL}.forward_methods",
        f"{DATA_PARALLEL}.fully_sharded_data_parallel",
        f"{DATA_PARALLEL}.fully_shard",
        f"{DATA_PARALLEL}.fsdp_module",
        f"{DATA_PARALLEL}.whole_values",
        f"{DATA_PARALLEL}.scalar_state",
    ],
    ["fairshard.checkpoint", "fairshard.optim"],
    [
        f"{DATA_PARALLEL}.state_methods",
        f"{DATA_PARALLEL}.state_dict",
        f"{DATA_PARALLEL}.assigned_values",
        f"{DATA_PARALLEL}.local_state_dict",
        f"{DATA_PARALLEL}.fairscale_shards",
        f"{DATA_PARALLEL}.full_params",
        f"{DATA_PARALLEL}.grad_methods",
        f"{DATA_PARALLEL}.join_methods",
        f"{DATA_PARALLEL}.joined_optimizers",
        f"{DATA_PARALLEL}.prefetch_methods",
        f"{DATA_PARALLEL}.comm_hooks",
        f"{DATA_PARALLEL}.comm_methods",
        f"{DATA_PARALLEL}.optim_state_methods",
        f"{DATA_PARALLEL}.optim_state_dict",
        f"{DATA_PARALLEL}.optim_state_loading",
        f"{DATA_PARALLEL}.optim_state_keys",
        f"{DATA_PARALLEL}.optim_params",
        f"{DATA_PARALLEL}.grad_norm",
        f"{DATA_PARALLEL}.construction",
        f"{DATA_PARALLEL}.registration",
        f"{DATA_PARALLEL}.conversion",
        f"{DATA_PARALLEL}.running",
        f"{DATA_PARALLEL}.sharding",
        f"{DATA_PARALLEL}.summary",
        f"{DATA_PARALLEL}.optimizer_check",
        f"{DATA_PARALLEL}.unit_plan",
        f"{DATA_PARALLEL}.bucket_bytes",
        f"{DATA_PARALLEL}.memory_plan",
        f"{DATA_PARALLEL}.method_calls",
        f"{DATA_PARALLEL}.methods_in_place",
        f"{DATA_PARALLEL}.observer",
        f"{DATA_PARALLEL}.unit_attributes",
        "fairshard.nn.checkpoint",
        "fairshard.nn.flatten_params_wrapper",
    ],
    [f"{DATA_PARALLEL}.claim"],
    [f"{DATA_PARALLEL}.settling", f"{DATA_PARALLEL}.one_model"],
    [f"{DATA_PARALLEL}.root"],
    [
        f"{DATA_PARALLEL}.agreement",
        f"{DATA_PARALLEL}.join",
        f"{DATA_PARALLEL}.nan_check",
        f"{DATA_PARALLEL}.order_check",
        f"{DATA_PARALLEL}.placement",
    ],
    [f"{DATA_PARALLEL}.unit"],
    [f"{DATA_PARALLEL}.materialize", f"{DATA_PARALLEL}.origin"],
    [f"{DATA_PARALLEL}.wrap_choice"],
    [f"{DATA_PARALLEL}.ignored", f"{DATA_PARALLEL}.shared_params"],
    [f"{DATA_PARALLEL}.tree"],
    [f"{DATA_PARALLEL}.groups"],
    [f"{DATA_PARALLEL}.rows_flat_param", f"{DATA_PARALLEL}.rows_grad"],
    [f"{DATA_PARALLEL}.dtensor_flat_param"],
    [f"{DATA_PARALLEL}.routed_flat_param"],
    [f"{DATA_PARALLEL}.viewed_flat_param", f"{DATA_PARALLEL}.grad_notes", f"{DATA_PARALLEL}.shard_versions"],
    [f"{DATA_PARALLEL}.flat_param", f"{DATA_PARALLEL}.orig_param"],
    [f"{DATA_PARALLEL}.saved_group", f"{DATA_PARALLEL}.saved_mesh"],
    [f"{DATA_PARALLEL}.flat_line", f"{DATA_PARALLEL}.viewed_grad"],
    [
        f"{DATA_PARALLEL}.advice",
        f"{DATA_PARALLEL}.unit_call",
        f"{DATA_PARALLEL}.joint_gather",
        f"{DATA_PARALLEL}.members",
        f"{DATA_PARALLEL}.backward_errors",
        f"{DATA_PARALLEL}.bucket_plan",
        f"{DATA_PARALLEL}.call",
        f"{DATA_PARALLEL}.shard_grad",
        f"{DATA_PARALLEL}.kept_part",
        f"{DATA_PARALLEL}.kept_sum",
        f"{DATA_PARALLEL}.listing",
        f"{DATA_PARALLEL}.param_slot",
        f"{DATA_PARALLEL}.buffers",
        f"{DATA_PARALLEL}.exec_order",
        f"{DATA_PARALLEL}.forwarding",
        f"{DATA_PARALLEL}.config",
        f"{DATA_PARALLEL}.options",
        f"{DATA_PARALLEL}.policies",
        f"{DATA_PARALLEL}.prefetch",
        f"{DATA_PARALLEL}.refuse_tracing",
        f"{DATA_PARALLEL}.wrap_policies",
        f"{DATA_PARALLEL}.state_dict_config",
        f"{DATA_PARALLEL}.late_options",
        f"{DATA_PARALLEL}.training_state",
        f"{DATA_PARALLEL}.autograd_hooks",
    ],
    [UTILS],
    ["fairshard.errors", "fairshard"],
]

COLLECTIVES = {
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_object",
        "all_gather_coalesced",
    ),
    *(
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
    ),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier"),
    *(
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    ),
    *("scatter_object_list", "send"),
}

PRIVATE_AUTOGRAD = {
    *("_will_engine_execute_node", "_current_graph_task_id", "_current_autograd_node", "_execution_engine"),
    *(
        "queue_callback",
        "_engine_run_backward",
        "_is_checkpoint_valid",
        "next_functions",
        "_ImperativeEngine",
    ),
}


def module_name(path):
    """The dotted name of the module at ``path``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_nodes(tree):
    """Every node of ``tree`` except those under ``if TYPE_CHECKING:``."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def imports(path):
    """``(line, module)`` of every import of a module of fairshard at run time."""
    known = {module_name(file) for file in FILES}
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names = [node.module]
            names += [f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in known]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "fairshard")


def layer_of(name):
    """The index of the layer of module ``name``: the one with the longest prefix of it."""
    matches = [
        (len(entry), index)
        for index, layer in enumerate(LAYERS)
        for entry in layer
        if name == entry or (name.startswith(f"{entry}.") and entry not in ("fairshard", DATA_PARALLEL, "fairshard.nn"))
    ]
    return max(matches)[1] if matches else None


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path):
    """A module imports from its own layer and from those below, never from above."""
    name = module_name(path)
    own = layer_of(name)
    assert own is not None, f"{name} has no layer: say in LAYERS where it belongs"
    for line, target in imports(path):
        below = layer_of(target)
        assert below is not None, f"{path}:{line}: {target} has no layer"
        assert below >= own, f"{path}:{line}: {name} imports {target}, which lies above it"


def test_span_imports_nothing():
    """The arithmetic of spans depends on nothing but the language's own types."""
    tree = ast.parse((PACKAGE / "utils" / "span.py").read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imported <= {"__future__", "typing", "dataclasses"}


def test_utils_have_never_heard_of_modules():
    """Nothing in ``fairshard.utils`` names ``torch.nn.Module``."""
    for path in (PACKAGE / "utils").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr == "Module"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_are_short(path):
    """No file has more lines than one can keep in mind."""
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_the_path_a_reader_must_know_is_an_afternoon():
    """Span, layout, device, collectives, bucketer, flat_param, unit and root together stay short."""
    lines = {name: len((PACKAGE.parent / f"{name.replace('.', '/')}.py").read_text().splitlines()) for name in CORE}
    assert sum(lines.values()) < MAX_LINES_OF_CORE, lines


def dotted(node):
    """``a.b.c`` of an attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return ""


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_cuda_is_named_in_one_file(path):
    """``torch.cuda`` stands in ``utils/device.py`` only."""
    if module_name(path) == f"{UTILS}.device":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        named = dotted(node) == "torch.cuda"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            named = any(alias.name.startswith("torch.cuda") for alias in node.names)
            named |= (getattr(node, "module", None) or "").startswith("torch.cuda")
            named |= getattr(node, "module", None) == "torch" and any(a.name == "cuda" for a in node.names)
        assert not named, f"{path}:{node.lineno} names torch.cuda"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_collectives_are_called_in_two_files(path):
    """Collectives and groups of torch.distributed are used in ``utils/collectives.py`` and ``messages.py`` only."""
    if module_name(path) in (f"{UTILS}.collectives", f"{UTILS}.messages", f"{UTILS}.testing", f"{UTILS}.rank_pool"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = dotted(node.value)
            assert owner not in ("dist", "torch.distributed", "distributed_c10d", "c10d"), f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            names = {alias.name for alias in node.names}
            assert not names & COLLECTIVES, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_private_autograd_is_used_in_one_file(path):
    """Private names of autograd stand in ``autograd_hooks.py`` only."""
    if module_name(path) == f"{DATA_PARALLEL}.autograd_hooks":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = {getattr(node, "attr", None), getattr(node, "id", None)}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        assert not names & PRIVATE_AUTOGRAD, f"{path}:{getattr(node, 'lineno', 0)}: {names & PRIVATE_AUTOGRAD}"


PARAMETER_NAMES = {"p", "param", "parameter", "leaf", "shard", "full", "tensor", "weight", "grad"}
TENSOR_ATTRIBUTES = {"data", "grad", "grad_dtype", "requires_grad"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_nothing_is_stuck_on_parameters(path):
    """What is assigned on a parameter is one of torch's own attributes: state has one owner."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and dotted(target.value).split(".")[-1] in PARAMETER_NAMES:
                assert target.attr in TENSOR_ATTRIBUTES, f"{path}:{node.lineno} sets .{target.attr}"
        if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "object.__setattr__"):
            owner = dotted(node.args[0]).split(".")[-1]
            assert owner not in PARAMETER_NAMES, f"{path}:{node.lineno} sets an attribute of {owner}"


def test_no_function_takes_a_state_first():
    """Methods, not free functions with a ``state``, change state; comm hooks are torch's own form."""
    for path in FILES:
        if module_name(path).endswith(".comm_hooks"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.args.args:
                first = node.args.args[0].arg
                assert first not in ("state", "_state"), f"{path}:{node.lineno}: {node.name}({first}, ...)"


# A wrapped module's own dictionary may gain the names of its parameters: the leaf while gathered, a
# placeholder while not. Where shards are registered no placeholder can hide them: a hook before the forward refuses to
# compute with them. Nothing else.
@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", [True, False])
def test_wrapping_and_training_leave_no_attributes(flatten):
    """After a wrap and a step, parameters have no new attributes, modules only their parameters' names, and a guard."""
    model = tiny()
    modules = dict(model.named_modules())
    before = {name: set(vars(module)) for name, module in modules.items()}
    own = {name: set(dict(module.named_parameters(recurse=False))) for name, module in modules.items()}
    originals = list(model.parameters())
    hooks = {name: _num_hooks(module) for name, module in modules.items()}
    wrapped = wrap_tiny(model, flatten_parameters=flatten)
    optimizer = sgd(wrapped)
    for step in range(2):
        *inputs, targets = tiny_batch(step)
        tiny_loss(wrapped(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in [*originals, *wrapped.parameters()]:
        assert vars(param) == {}, vars(param)
    for name, module in modules.items():
        gained = set(vars(module)) - before[name]
        assert gained <= own[name], f"{name or 'the root'} gained {gained - own[name]}"
        assert not before[name] - set(vars(module))
        if own[name] and not flatten:
            hooks[name]["_forward_pre_hooks"] += 1
        assert _num_hooks(module) == hooks[name]


def _num_hooks(module):
    return {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}


def public_objects():
    """``(qualified name, object)`` of every public module, class, function and method of fairshard."""
    for found in pkgutil.walk_packages([str(PACKAGE)], "fairshard."):
        if found.name.rsplit(".", 1)[-1] == "__main__":
            continue
        module = importlib.import_module(found.name)
        yield found.name, module
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != found.name:
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{found.name}.{name}", value
            if inspect.isclass(value):
                yield from public_members(f"{found.name}.{name}", value)


def public_members(prefix, cls):
    """``(qualified name, object)`` of the public methods and properties that ``cls`` itself defines."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
            yield f"{prefix}.{name}", member


def test_every_public_name_has_a_docstring():
    """What has no underscore says what it is for; what overrides a method of torch inherits its docstring."""
    silent = [name for name, value in public_objects() if not inspect.getdoc(value)]
    inherited = {name for name in silent if name.rsplit(".", 1)[-1] in dir(nn.Module)}
    assert not set(silent) - inherited


def test_python_is_clean_of_debugging():
    """No ``print`` outside of the command line, no ``breakpoint``, no empty ``except``."""
    for path in FILES:
        in_cli = module_name(path).startswith("fairshard.cli")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert dotted(node.func) != "breakpoint", f"{path}:{node.lineno}"
                assert in_cli or dotted(node.func) != "print", f"{path}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}"


def test_torch_is_recent_enough():
    """The tests run on a torch that fairshard promises to work with."""
    assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)
