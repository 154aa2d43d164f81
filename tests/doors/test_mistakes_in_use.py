"""Mistakes in the use of a sharded model: each error says what is wrong, where, and what to do."""

import tempfile

import pytest
from torch import nn
from torch.optim import SGD, AdamW

import fairshard.checkpoint
from fairshard import FullyShardedDataParallel as FSDP
from fairshard import fully_shard
from fairshard.errors import (
    CheckpointError,
    GradRequiresGradError,
    HeldGradientError,
    NotRootError,
    ParameterShardedError,
    ShardChangedError,
    StaleOptimizerError,
    TrainingStateError,
)
from fairshard.nn import StateDictType, observe
from tests.doors.mistakes import BATCH, check, layer, loss_of, two
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.behaviour("mistakes in use")


def inner():
    """A wrapped model with an inner wrapper."""
    return FSDP(nn.Sequential(FSDP(layer())))


def prefixed(prefix):
    return {f"{prefix}{name}": value for name, value in two().state_dict().items()}


class SavesInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.around = layer(), []

    def forward(self, x):
        return self.around[0].state_dict()


def save_in_forward():
    saves = SavesInForward()
    model = FSDP(saves)
    saves.around.append(model)
    model(BATCH)


def step_of_an_optimizer_built_before(shard):
    model = layer()
    optimizer = SGD(model.parameters(), lr=0.1)
    loss_of(shard(model)).backward()
    optimizer.step()


def backward_after_a_step():
    model = FSDP(two())
    optimizer = SGD(model.parameters(), lr=0.1)
    first, second = loss_of(model), loss_of(model)
    first.backward()
    optimizer.step()
    second.backward()


def step_without_the_held_gradients():
    model = FSDP(layer(), cpu_offload=True, move_grads_to_cpu=False)
    optimizer = AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()


def forward_in_summon():
    model = FSDP(layer())
    with model.summon_full_params():
        model(BATCH)


def trained(model, optimizer_class, **hyperparameters):
    optimizer = optimizer_class(model.parameters(), lr=0.1, **hyperparameters)
    loss_of(model).backward()
    optimizer.step()
    return model, optimizer


def load_the_state_of_sgd(shard):
    """A checkpoint of SGD, loaded into AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        fairshard.checkpoint.save(f"{folder}/saved", *trained(shard(layer()), SGD, momentum=0.9))
        model = shard(layer())
        fairshard.checkpoint.load(f"{folder}/saved", model, AdamW(model.parameters()))


def convert_the_state_of_adam():
    state = FSDP.optim_state_dict(*trained(FSDP(layer()), AdamW))
    model = FSDP(layer())
    FSDP.optim_state_dict_to_load(model, SGD(model.parameters(), lr=0.1, momentum=0.9), state)


def load_a_deeper_model():
    with tempfile.TemporaryDirectory() as folder:
        fairshard.checkpoint.save(f"{folder}/saved", FSDP(two()))
        fairshard.checkpoint.load(f"{folder}/saved", FSDP(nn.Sequential(layer())))


def draw(timeline):
    with timeline:
        raise AssertionError("a mistake must be noticed before the block runs")


def join_an_optimizer():
    model = FSDP(layer())
    with model.join(SGD(model.parameters(), lr=0.1)):
        pass


def sync_inner():
    with inner().module[0].no_sync():
        pass


# As in test_mistakes.
MISTAKES = {
    "wrapper: checkpoint of DDP": (
        RuntimeError,
        ("Missing key(s)", '"0.weight"', "Unexpected key(s)", '"module.0.weight"'),
        lambda: FSDP(two()).load_state_dict(prefixed("module.")),
    ),
    "fully_shard: checkpoint of DDP": (
        RuntimeError,
        ("Missing key(s)", '"0.weight"', "Unexpected key(s)", '"module.0.weight"'),
        lambda: fully_shard(two()).load_state_dict(prefixed("module.")),
    ),
    "fully_shard: checkpoint of a compiled model": (
        RuntimeError,
        ("Missing key(s)", '"0.weight"', "Unexpected key(s)", '"_orig_mod.0.weight"'),
        lambda: fully_shard(two()).load_state_dict(prefixed("_orig_mod.")),
    ),
    "wrapper: state dict of fully_shard": (
        RuntimeError,
        ("must hold whole values", "`0.weight` is a DTensor", "full_state_dict=True"),
        lambda: FSDP(two()).load_state_dict(fully_shard(two()).state_dict()),
    ),
    "fully_shard: local state dict": (
        RuntimeError,
        ("Missing key(s)", '"0.weight"', "Unexpected key(s)", '"flat_param_0"'),
        lambda: fully_shard(two()).load_state_dict(FSDP(two()).local_state_dict()),
    ),
    "whole checkpoint for a state dict": (
        RuntimeError,
        ("Missing key(s)", '"0.weight"', "Unexpected key(s)", '"model", "step"'),
        lambda: FSDP(two()).load_state_dict({"model": two().state_dict(), "step": 3}),
    ),
    "state dict of a deeper model": (
        RuntimeError,
        ("Unexpected key(s) in state_dict:", '"1.weight", "1.bias"'),
        lambda: FSDP(nn.Sequential(layer())).load_state_dict(two().state_dict()),
    ),
    "checkpoint of a deeper model": (
        CheckpointError,
        ("saved must be a checkpoint of this model", "`1.weight` is not in the model", "choose another checkpoint"),
        load_a_deeper_model,
    ),
    "checkpoint that is not there": (
        CheckpointError,
        ("must be a folder with .metadata in it, or with a file `latest`", "nowhere has neither"),
        lambda: fairshard.checkpoint.load("nowhere", FSDP(layer())),
    ),
    "checkpoint: model before the folder": (
        TypeError,
        ("`model` must be an nn.Module, but is str", "after the folder"),
        lambda: fairshard.checkpoint.save(FSDP(layer()), "nowhere"),
    ),
    "checkpoint: a state dict for the model": (
        TypeError,
        ("`model` must be an nn.Module, but is OrderedDict", "not its state dict"),
        lambda: fairshard.checkpoint.save("nowhere", layer().state_dict()),
    ),
    "checkpoint: a state dict for the optimizer": (
        TypeError,
        ("`optimizer` must be an optimizer or None, but is dict", "not its state dict"),
        lambda: fairshard.checkpoint.load("nowhere", layer(), SGD(layer().parameters()).state_dict()),
    ),
    "Checkpointer: a string for a number": (
        TypeError,
        ("`every` must be a number of steps, but is '10'",),
        lambda: fairshard.Checkpointer("nowhere", every="10"),
    ),
    "Checkpointer: the step last": (
        TypeError,
        ("`step` must be a number of steps, but is Sequential", "Call `maybe_save(step, model, optimizer)`"),
        lambda: fairshard.Checkpointer("nowhere").maybe_save(two(), None, 1),
    ),
    "wrapper: checkpoint of another optimizer": (
        ValueError,
        ("to load into AdamW must be of the same optimizer", "has no `amsgrad`, `betas`", "`momentum`", "was saved"),
        lambda: load_the_state_of_sgd(FSDP),
    ),
    "fully_shard: checkpoint of another optimizer": (
        ValueError,
        ("to load into AdamW must be of the same optimizer", "has no `amsgrad`, `betas`", "`momentum`", "was saved"),
        lambda: load_the_state_of_sgd(fully_shard),
    ),
    "optimizer state of another optimizer": (
        ValueError,
        ("to load into SGD must be of the same optimizer", "group 0 has no `dampening`, `momentum`", "was saved"),
        convert_the_state_of_adam,
    ),
    "optimizer state: the optimizer first": (
        TypeError,
        ("`model` must be an nn.Module, but is SGD", "Pass the model first"),
        lambda: FSDP.full_optim_state_dict(SGD(layer().parameters()), FSDP(layer())),
    ),
    "state dict type: the type first": (
        TypeError,
        ("`state_dict_type` must be one of", "is FullyShardedDataParallel. It comes after the model"),
        lambda: FSDP.set_state_dict_type(StateDictType.FULL_STATE_DICT, FSDP(layer())),
    ),
    "state dict: its path": (
        TypeError,
        ("`state_dict` must be a dictionary, but is str", "torch.load(path)"),
        lambda: FSDP(layer()).load_state_dict("model.pt"),
    ),
    "summary of an optimizer": (
        TypeError,
        ("`model` must be an nn.Module, but is SGD", "Pass the model first"),
        lambda: fairshard.summary(SGD(layer().parameters())),
    ),
    "observe: the function first": (
        TypeError,
        ("`model` must be an nn.Module, but is builtin_function_or_method", "Pass the model first"),
        lambda: observe(print, print),
    ),
    "timeline: the path first": (
        TypeError,
        ("`model` must be an nn.Module, but is str", "Pass the model first"),
        lambda: draw(fairshard.timeline("step.png", FSDP(layer()))),
    ),
    "timeline into no folder": (
        ValueError,
        ("The folder of a timeline must exist, but nowhere does not", "Make it first"),
        lambda: draw(fairshard.timeline(FSDP(layer()), "nowhere/step.png")),
    ),
    "timeline in an unknown format": (
        ValueError,
        ("A path of a timeline must end in .json, .png, .pdf, .svg, but is 'step.pngg'",),
        lambda: draw(fairshard.timeline(FSDP(layer()), "step.pngg")),
    ),
    "timeline into a folder": (
        ValueError,
        ("A path of a timeline must end in .json, .png, .pdf, .svg, but is '/tmp'",),
        lambda: draw(fairshard.timeline(FSDP(layer()), "/tmp")),
    ),
    "a mesh that is a number": (
        TypeError,
        ("`device_mesh` must be a DeviceMesh, but is int", "init_device_mesh"),
        lambda: FSDP(layer(), device_mesh=5),
    ),
    "clipping with torch's arguments": (
        TypeError,
        ("`max_norm` of clip_grad_norm_ must be a number, but is a generator", "`model.clip_grad_norm_(max_norm)`"),
        lambda: FSDP(layer()).clip_grad_norm_((param for param in ()), 1.0),
    ),
    "optimizer before the wrapper": (
        StaleOptimizerError,
        ("SGD holds the original parameter `weight`", "built before sharding: build it afterwards"),
        lambda: step_of_an_optimizer_built_before(FSDP),
    ),
    "optimizer before fully_shard": (
        StaleOptimizerError,
        ("SGD holds the original parameter `weight`", "built before sharding: build it afterwards"),
        lambda: step_of_an_optimizer_built_before(fully_shard),
    ),
    "optimizer without the gradients": (
        HeldGradientError,
        ("the gradient of `flat_param_0` stays on the compute device", "Use fairshard.optim.CPUOptimizer"),
        step_without_the_held_gradients,
    ),
    "step between forward and backward": (
        ShardChangedError,
        ("between its forward and its backward, but those of `flat_param_0` (rank 0) did", "Run the backward before"),
        backward_after_a_step,
    ),
    "double backward": (
        GradRequiresGradError,
        ("the root", "create_graph=True", "on a module that is not sharded"),
        lambda: loss_of(FSDP(layer())).backward(create_graph=True),
    ),
    "submodule called": (
        ParameterShardedError,
        ("`0.weight` must be gathered", "`0` was not reached through its wrapper", "Call the wrapped module itself"),
        lambda: FSDP(two()).module[0](BATCH),
    ),
    "parameter used outside of the forward": (
        ParameterShardedError,
        ("`0.weight` must be gathered", "summon_full_params"),
        lambda: FSDP(two()).module[0].weight.sum(),
    ),
    "forward inside summon_full_params": (
        TrainingStateError,
        ("must not run inside summon_full_params, but unit `root`", "Leave the `with` block"),
        forward_in_summon,
    ),
    "state dict inside a forward": (
        TrainingStateError,
        ("`state_dict` must be called between passes", "unit `root` is in FORWARD", "after the backward"),
        save_in_forward,
    ),
    "clipping of an inner wrapper": (
        NotRootError,
        ("`clip_grad_norm_` must be called on the outermost wrapper", "`0`", "on the model that wraps this one"),
        lambda: inner().module[0].clip_grad_norm_(1.0),
    ),
    "join of an optimizer": (
        TypeError,
        ("`divide_by_initial_world_size` must be True or False, but is SGD", "as `stateful=[...]`"),
        join_an_optimizer,
    ),
    "no_sync of an inner wrapper": (
        NotRootError,
        ("`no_sync` must be called on the outermost wrapper", "`0`", "on the model that wraps this one"),
        sync_inner,
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_to_do(name):
    """The error of each mistake says what is wrong, where, and what to do."""
    check(MISTAKES[name])


OF_WRAPPER = {
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "no_sync": "model.set_requires_gradient_sync(False)",
    "summon_full_params": "param.full_tensor()",
    "module": "The model itself",
}
OF_FULLY_SHARD = {"set_requires_gradient_sync": "model.no_sync()", "unshard": "model.summon_full_params()"}


@on_ranks(1)
def test_names_of_the_other_api_have_a_cure():
    """A method that only the other API has raises an AttributeError with the cure; ``hasattr`` is False, as before."""
    for model, cures in (
        (fully_shard(two()), OF_WRAPPER),
        (FSDP(two()), OF_FULLY_SHARD),
        (FSDP(FSDP(two())), OF_FULLY_SHARD),
    ):
        for name, cure in cures.items():
            assert not hasattr(model, name)
            with pytest.raises(AttributeError) as caught:
                getattr(model, name)
            assert cure in str(caught.value)
        with pytest.raises(AttributeError, match=r"has no attribute 'other'$"):
            model.other  # noqa: B018


class Own(nn.Linear):
    """Has attributes under the names of the other API."""

    def no_sync(self):
        return "own"

    def unshard(self):
        return "own"


@on_ranks(1)
def test_a_module_may_have_such_names():
    """A user's own method of such a name is called."""
    assert fully_shard(Own(4, 4)).no_sync() == "own"
    assert FSDP(Own(4, 4)).unshard() == "own"


@on_ranks(1)
@pytest.mark.parametrize("shard", [FSDP, fully_shard])
def test_names_that_are_the_models_own_load(shard):
    """A model with a child `module` loads its state dict; ``strict=False`` ignores any names."""
    plain = nn.ModuleDict({"module": layer()})
    model = nn.Sequential()
    model.module = plain["module"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model = shard(model)
    assert all(name.startswith("module.") for name in state)
    model.load_state_dict(state)
    keys = shard(two()).load_state_dict(prefixed("module."), strict=False)
    assert len(keys.missing_keys) == 4
