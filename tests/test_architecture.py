"""The house rules that can be checked by reading the source, and the one that needs a training step."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fairshard
from tests.kit.gauge import Figures, Package
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import sgd

PACKAGE = Path(fairshard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The most that one must know to know a module: the figures of all files that it reaches, which
# `python -m tests.kit.gauge MODULE` prints. A limit may only fall: lower it in the commit that makes the code smaller.
LIMITS = {
    "fairshard.engine.root": Figures(statements=3148, branches=1058, shared=22, flags=30),
    "fairshard.nn.data_parallel.running": Figures(statements=4286, branches=1524, shared=26, flags=34, patches=1),
}

UTILS = "fairshard.utils"

# Files that still import each other, directly or not.
CIRCLES: list[set[str]] = []

COMMUNICATING = [f"{UTILS}.{name}" for name in ("collectives", "groups", "messages", "unequal_rows")]

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


KNOWN = {module_name(file): file for file in FILES}


@functools.cache
def tree_of(path):
    """The syntax tree of a file, which no test changes."""
    return ast.parse(path.read_text())


def in_each_file(check):
    """A test that calls ``check(path)`` for each file of the package, and names all that fail."""

    def test():
        problems = []
        for name, path in KNOWN.items():
            try:
                check(path)
            except AssertionError as error:
                problems.append(f"{name}: {error}")
        assert not problems, "\n".join(problems)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def imports(path):
    """``(line, module)`` of every import of a fairshard module, type-only imports included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in KNOWN else node.module for name in full]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "fairshard")


def circles(graph):
    """The sets of two or more nodes of ``graph`` that reach each other."""
    reached = {start: {start} for start in graph}
    for start, found in reached.items():
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
    together = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return {nodes for nodes in together if len(nodes) > 1}


def test_circles_are_found():
    """A circle of two nodes and one of three are found; nodes that only lead into or out of a circle are in none."""
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c", "f"}, "f": set(), "g": {"a"}}
    assert circles(graph) == {frozenset("ab"), frozenset("cde")}


def test_no_two_files_import_each_other():
    """No imports form a circle, type-only imports included: each file can be read after those it imports."""
    graph = {name: {target for _, target in imports(file)} & KNOWN.keys() - {name} for name, file in KNOWN.items()}
    assert circles(graph) == {frozenset(names) for names in CIRCLES}


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


def test_utils_do_not_name_modules():
    """Nothing in ``fairshard.utils`` names ``torch.nn.Module``."""
    for path in (PACKAGE / "utils").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            assert not (isinstance(node, ast.Attribute) and node.attr == "Module"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("module", LIMITS)
def test_what_a_module_reaches_does_not_grow(module):
    """The files that one must know to know a module have no more code, branches and state than `LIMITS` says."""
    package = Package(PACKAGE)
    grown = package.figures(package.reached_from(module)).above(LIMITS[module])
    assert not grown, f"{module} reaches more than before, (now, limit): {grown}"


def dotted(node):
    """``a.b.c`` of an attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return ""


VENDORS = ("cuda", "hip", "rocm", "nccl", "xpu", "mps", "npu", "hpu")


@in_each_file
def test_vendors_are_named_in_one_file(path):
    """Only ``utils/device.py`` decides by the vendor of a device; other code asks what the device can do.

    Code is what runs: names, attributes and whole strings. Vendors may be named in messages and docstrings.
    """
    if module_name(path) == f"{UTILS}.device":
        return
    allowed = {"NCCL"} if module_name(path) == "fairshard.nn.data_parallel.in_place.comm" else set()  # torch's default
    for node in ast.walk(tree_of(path)):
        words = [getattr(node, name, None) for name in ("id", "attr", "arg", "module", "value", "name")]
        for word in words:
            if isinstance(word, str) and " " not in word and word not in allowed:
                parts = re.split(r"[._:]", word.lower())
                assert not set(parts) & set(VENDORS), f"{path}:{node.lineno}: {word}"


FACTORIES = {f"torch.{name}" for name in ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")}
FACTORIES |= {f"torch.{name}" for name in ("rand", "randint", "randn", "randperm")}


@in_each_file
def test_new_tensors_name_their_device(path):
    """The engine's own tensors are not moved by ``torch.set_default_device``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and dotted(node.func) in FACTORIES:
            names = {keyword.arg for keyword in node.keywords}
            assert "device" in names, f"{path}:{node.lineno}: {dotted(node.func)} without `device`"


@in_each_file
def test_collectives_are_called_in_few_files(path):
    """Collectives and groups of torch.distributed are used in the files of `COMMUNICATING` only."""
    if module_name(path) in COMMUNICATING:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = dotted(node.value)
            assert owner not in ("dist", "torch.distributed", "distributed_c10d", "c10d"), f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            names = {alias.name for alias in node.names}
            assert not names & COLLECTIVES, f"{path}:{node.lineno}"


def check_does_not_name(path, forbidden):
    """Check that no name, attribute, import or string in the file is one of ``forbidden``."""
    for node in ast.walk(tree_of(path)):
        names = {getattr(node, "attr", None), getattr(node, "id", None)}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        assert not names & forbidden, f"{path}:{getattr(node, 'lineno', 0)}: {names & forbidden}"


@in_each_file
def test_private_autograd_is_used_in_one_file(path):
    """Private names of autograd appear only in ``utils/autograd.py``."""
    if module_name(path) == f"{UTILS}.autograd":
        return
    check_does_not_name(path, PRIVATE_AUTOGRAD)


# What `torch.compile` reads and calls.
PRIVATE_DYNAMO = {"eval_frame", "set_eval_frame", "set_code_exec_strategy", "skip_code", "_torchdynamo_disable"}


@in_each_file
def test_private_names_of_dynamo_are_used_in_two_files(path):
    """Private names of torch's tracer appear only in ``utils/dynamo.py`` and ``utils/graph_breaks.py``."""
    if module_name(path) not in (f"{UTILS}.dynamo", f"{UTILS}.graph_breaks"):
        check_does_not_name(path, PRIVATE_DYNAMO)


# What torch's code, and that of others, looks for on sharded modules.
TORCHS_MARKS = {"_is_fsdp_managed_module", "_fsdp_use_orig_params"}
TORCHS_KEYS = {"STATE_KEY", "REGISTRY_KEY", "_module_state_mapping", "_insert_module_state", *TORCHS_MARKS}


@in_each_file
def test_torchs_keys_are_named_in_one_file(path):
    """State and keys that torch's code looks for on modules appear only in ``nn/data_parallel/torch_state.py``."""
    if module_name(path) == "fairshard.nn.data_parallel.torch_state":
        return
    check_does_not_name(path, TORCHS_KEYS)


PARAMETER_NAMES = {"p", "param", "parameter", "leaf", "shard", "full", "tensor", "weight", "grad"}
TENSOR_ATTRIBUTES = {"data", "grad", "grad_dtype", "requires_grad", "_local_tensor", "_spec"}


@in_each_file
def test_no_attributes_are_added_to_parameters(path):
    """Code assigns only torch's own attributes on a parameter: state has one owner."""
    for node in ast.walk(tree_of(path)):
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
    """Methods change state, not free functions with a ``state`` argument; comm hooks follow torch's signature."""
    for path in FILES:
        if module_name(path).endswith(".comm_hooks"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.args.args:
                first = node.args.args[0].arg
                assert first not in ("state", "_state"), f"{path}:{node.lineno}: {node.name}({first}, ...)"


# A wrapped module's own dictionary may gain only the marks of torch and the names of its parameters: the leaf while
# gathered, otherwise a placeholder. No placeholder can hide registered shards: a pre-forward hook refuses to compute
# with them.
@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", [True, False])
def test_wrapping_and_training_leave_no_attributes(flatten):
    """A wrap and a step add no attributes to parameters; modules gain only their parameters' names, guards and marks.

    Guards are hooks: before the forward, where a shard is registered under a parameter's name, and before state dicts
    of modules with parameters in them. Marks are read by torch's and other libraries' code.
    """
    model = tiny()
    modules = dict(model.named_modules())
    before = {name: set(vars(module)) for name, module in modules.items()}
    own = {name: set(dict(module.named_parameters(recurse=False))) for name, module in modules.items()}
    originals = list(model.parameters())
    hooks = {name: _num_hooks(module) for name, module in modules.items()}
    for name, module in modules.items():
        for kind in ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
            hooks[name][kind] += bool(list(module.parameters()))
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
        gained = set(vars(module)) - before[name] - TORCHS_MARKS
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
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # an integration whose package is not installed
            assert found.name.startswith("fairshard.integrations.")
            continue
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
    """Every name without an underscore has a docstring; a method that overrides torch's may inherit it."""
    silent = [name for name, value in public_objects() if not inspect.getdoc(value)]
    inherited = {name for name in silent if name.rsplit(".", 1)[-1] in dir(nn.Module)}
    assert not set(silent) - inherited


def test_python_is_clean_of_debugging():
    """No ``print`` outside the command line and ``python -m``, no ``breakpoint``, no empty ``except``."""
    for path in FILES:
        prints = module_name(path).startswith("fairshard.cli")
        last = tree_of(path).body[-1:]
        as_script = {node for each in last if _asks_for_main(each) for node in ast.walk(each)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                assert dotted(node.func) != "breakpoint", f"{path}:{node.lineno}"
                assert prints or node in as_script or dotted(node.func) != "print", f"{path}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}"


def _asks_for_main(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def test_torch_is_recent_enough():
    """The tests run on a torch that fairshard promises to work with."""
    assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)
