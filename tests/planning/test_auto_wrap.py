"""Wrapping by a policy, by ``enable_wrap`` and by ``auto_wrap_bn``: the same units as by hand, the same bits."""

import copy
import functools
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fairshard.engine.tree import units_below
from fairshard.nn import FSDP, MixedPrecision, ShardingStrategy
from fairshard.nn.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)
from fairshard.planning.summary import unit_table
from tests.kit import fake_group
from tests.models import Block, loss_of_tiny, mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike

SIZE = functools.partial(size_based_auto_wrap_policy, min_num_params=40)


@pytest.fixture
def group():
    """A group of two whose collectives do nothing."""
    with fake_group(2) as found:
        yield found


def units(model):
    """The units of ``model`` by fqn."""
    return dict(units_below(model))


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("policy", "kwargs"),
    [
        (ModuleWrapPolicy({Block}), {}),
        (TorchModuleWrapPolicy({Block}), {"reshard_after_forward": False}),
        (SIZE, {"bucket_cap_mb": 0}),
        (always_wrap_policy, {"flatten_parameters": False}),
        (always_wrap_policy, {"cpu_offload": True}),
    ],
    ids=["class", "torch", "size", "always", "offload"],
)
def test_wrapped_by_a_policy_a_model_trains_as_it_is(policy, kwargs):
    """Under any policy a model with tied weights and a module that runs twice gives the bits of the plain model."""

    def wrapped(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FSDP(model, auto_wrap_policy=policy, **kwargs)

    train_alike(tiny(), wrapped, loss_of_tiny)


def test_inner_units_get_the_outer_arguments(group):
    """Inner units get all of the outer wrapper's arguments, except those that the policy overrides."""
    policy = CustomPolicy(lambda m: {"reshard_after_forward": True} if m is model[2] else isinstance(m, nn.Linear))
    model = mlp(4, 4, 4)
    wrapped = FSDP(
        model,
        process_group=group,
        reshard_after_forward=False,
        mixed_precision=True,
        compute_dtype=torch.bfloat16,
        bucket_cap_mb=3,
        auto_wrap_policy=policy,
    )
    found = units(wrapped)
    assert found.keys() == {"", "0", "2"}
    assert found["0"].config == wrapped.config
    assert found["2"].config.reshard_after_forward
    assert found["2"].config.bucket_cap_mb == 3
    assert all(unit.groups.shard.group is group for unit in found.values())


def test_every_argument_reaches_inner_units():
    """The wrapper passes all of its arguments to inner units, except its module and its policy."""
    given = {}

    def remember(module, policy, wrapper_cls, arguments, **kwargs):
        given.update(arguments)
        return kwargs["ignored"]

    with fake_group(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairshard.planning.units.auto_wrap_children", remember)
        FSDP(nn.Linear(1, 1), auto_wrap_policy=always_wrap_policy)
    own = set(inspect.signature(FSDP).parameters) - {"module", "auto_wrap_policy"}
    # Ignored parameters are passed separately, as one list, and `move_params_to_cpu` as `cpu_offload`.
    own -= {"ignored_modules", "ignored_states", "ignored_parameters", "move_params_to_cpu"}
    assert own == given.keys()


@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_strategies_reach_inner_units(group, strategy):
    """Every unit gets the strategy of the outer wrapper."""
    wrapped = FSDP(mlp(4, 4, 4), sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert {unit.config.sharding_strategy for unit in units(wrapped).values()} == {strategy}


def test_a_module_that_holds_a_unit_is_refused(group):
    """The error names the inner unit; nothing else has been wrapped."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(FSDP(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match=r"a module without units, but `1\.0` is wrapped already"):
        FSDP(model, auto_wrap_policy=always_wrap_policy)
    assert isinstance(model[0], nn.Linear)


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda m: m[2].half(), TypeError, r"`2\.weight` is torch.float16"),
        (lambda m: m[2].register_parameter("n", nn.Parameter(torch.ones(1).int(), False)), TypeError, r"`2\.n` has"),
        (lambda m: setattr(m, "forward", None), TypeError, "must be True or False"),
    ],
    ids=["half", "int", "argument"],
)
def test_what_cannot_be_sharded_is_found_before_anything_is_wrapped(group, spoil, error, match):
    """A fault in the last unit, or in the arguments of one, leaves the module as it was."""
    model = mlp(4, 5, 6)
    spoil(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    is_argument = "True or False" in match
    says = {"flatten_parameters": 3} if is_argument else True
    policy = CustomPolicy(lambda module: isinstance(module, nn.Linear) and (says if module is model[2] else True))
    with pytest.raises(error, match=match):
        FSDP(model, mixed_precision=True, auto_wrap_policy=policy)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("widths", "policy", "says"),
    [
        ((4, 5, 6), ModuleWrapPolicy({nn.Conv2d}), "matches no module"),
        ((4, 50, 6), ModuleWrapPolicy({nn.Tanh}), "matches no module"),
        ((4, 5, 99), ModuleWrapPolicy({nn.Linear}), "leaves much in one unit"),
        ((4, 4, 4), ModuleWrapPolicy({nn.Linear}), None),
    ],
)
def test_bad_policies_are_warned_of_with_the_table_of_units(group, widths, policy, says):
    """A policy that matches nothing, or leaves more than half of the model in a unit, warns with the table of units."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = FSDP(mlp(*widths), auto_wrap_policy=policy)
    if says is None:
        assert [row.numel for row in unit_table(wrapped)] == [0, 20, 20]
        assert not caught
        return
    (warning,) = caught
    text = str(warning.message)
    assert says in text
    assert "warning: unit" in text.splitlines()[-1]
    for row in unit_table(wrapped):
        assert any(line.split()[:2] == [row.fqn or "(root)", f"{row.numel:,}"] for line in text.splitlines())


class Normed(nn.Module):
    """A BatchNorm and a LayerNorm between Linears."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.batch = nn.BatchNorm1d(8)
        self.layer = nn.LayerNorm(8)
        self.down = nn.Linear(8, 3)
        self.weights, self.outputs = {}, {}
        for name, module in self.named_children():
            module.register_forward_hook(functools.partial(self.note, name))

    def note(self, name, module, args, output):
        self.weights[name] = module.weight.dtype

    def forward(self, x):
        for name in ("up", "batch", "layer", "down"):
            x = getattr(self, name)(x)
            self.outputs[name] = x.dtype
        return x


@on_ranks(2)
@pytest.mark.parametrize("classes", [None, (nn.BatchNorm1d, nn.LayerNorm)], ids=["default", "both"])
def test_norms_are_wrapped_apart_without_mixed_precision(classes):
    """Norms compute with fp32 weights and the modules around them in bf16; one warning names the norms."""
    torch.manual_seed(0)
    given = {} if classes is None else {"_module_classes_to_ignore": classes}
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=False, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = FSDP(Normed(), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    names = ["batch"] if classes is None else ["batch", "layer"]
    (text,) = [str(warning.message) for warning in caught if "_module_classes_to_ignore" in str(warning.message)]
    assert text.endswith(f": {', '.join(names)}.")
    assert {fqn for fqn, unit in units(model).items() if not unit.config.mixed_precision} == set(names)
    model(randn(6, 4, key=dist.get_rank())).float().square().mean().backward()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in model.parameters())
    low, full = torch.bfloat16, torch.float32
    weights = {"up": low, "batch": full, "layer": low if classes is None else full, "down": low}
    assert model.module.weights == weights
    assert model.module.outputs == dict.fromkeys(weights, low)


def test_norms_are_not_wrapped_apart_in_full_precision(group):
    """Without mixed precision a policy does not wrap norms separately."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert units(FSDP(Normed(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))).keys() == {"", "up", "down"}


def test_enable_wrap(group):
    """Inside `enable_wrap` ``wrap`` wraps, with overrides; outside it does nothing; the innermost context counts."""
    layer = nn.Linear(2, 2)
    assert wrap(layer) is layer
    assert auto_wrap(layer, always_wrap_policy) is layer
    with enable_wrap(wrapper_cls=FSDP, bucket_cap_mb=7, flatten_parameters=False):
        wrapped = wrap(nn.Sequential(wrap(nn.Linear(2, 2), bucket_cap_mb=8)))
        configured = nn.Linear(2, 2)
        configured.wrapper_config = {"bucket_cap_mb": 9}
        assert wrap(configured).config.bucket_cap_mb == 9
        with enable_wrap(wrapper_cls=nn.Sequential):
            assert type(wrap(nn.Linear(2, 2))) is nn.Sequential
        assert isinstance(wrap(nn.Linear(2, 2)), FSDP)
    assert [unit.config.bucket_cap_mb for unit in units(wrapped).values()] == [7, 8]
    assert not wrapped.config.flatten_parameters
    with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=FSDP):
        raise ZeroDivisionError
    assert wrap(layer) is layer


def test_auto_wrap(group):
    """The policy of the call overrides that of the context; it is asked about the outermost module as well."""
    with enable_wrap(ModuleWrapPolicy({nn.Linear}), wrapper_cls=FSDP, bucket_cap_mb=7):
        by_context = auto_wrap(mlp(4, 5, 6), bucket_cap_mb=8)
        by_call = auto_wrap(mlp(4, 5, 6), always_wrap_policy)
        with pytest.raises(ValueError, match="a module without wrappers, but `0` is"):
            auto_wrap(by_context)
    assert isinstance(by_context, nn.Sequential)
    assert {fqn: unit.config.bucket_cap_mb for fqn, unit in units(by_context).items()} == {"0": 8, "2": 8}
    assert units(by_call).keys() == {"", "0", "2"}
    with enable_wrap(wrapper_cls=FSDP):  # fairscale's default policy: nothing under 100 million
        assert not units(auto_wrap(mlp(4, 5, 6)))


def test_auto_wrap_takes_any_wrapper(group):
    """The wrapper may be another class, or a function; instances of the class inside the module raise."""
    with enable_wrap(ModuleWrapPolicy({nn.Linear}), wrapper_cls=nn.Sequential):
        model = auto_wrap(nn.ModuleList([nn.Linear(2, 2)]))
        assert isinstance(model[0], nn.Sequential)
        with pytest.raises(ValueError, match="but `0` is"):
            auto_wrap(model)


@on_ranks(1, 2)
def test_what_auto_wrap_made_trains_as_the_plain_model():
    """A model wrapped as in fairscale, parts by `auto_wrap` and then the whole, trains as the plain model."""

    def wrapped(model):
        with enable_wrap(wrapper_cls=FSDP), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wrap(auto_wrap(model, SIZE))

    train_alike(tiny(), wrapped, loss_of_tiny)


@on_ranks(2)
@pytest.mark.parametrize("alone", [False, True])
def test_auto_wrap_bn(alone):
    """Each BatchNorm is a unit in fp32, kept gathered, not flattened; alone on its rank or over the group."""
    model = FSDP(
        auto_wrap_bn(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), single_rank_pg=alone),
        mixed_precision=True,
        compute_dtype=torch.bfloat16,
    )
    unit = units(model)["1"]
    assert (unit.config.mixed_precision, unit.config.flatten_parameters, unit.config.bucket_cap_mb) == (False, False, 0)
    assert not unit.config.reshard_after_forward
    assert unit.groups.shard.world_size == (1 if alone else 2)
    model(randn(6, 4, key=dist.get_rank())).float().square().mean().backward()
    mine = model.module[1].module.weight.grad
    assert mine.shape == (8 if alone else 4,)
    assert mine.dtype == torch.float32


def test_auto_wrap_bn_of_one_module_and_of_configs(group):
    """A BatchNorm itself comes back wrapped; ``wrap_it=False`` leaves that to ``config_auto_wrap_policy``."""
    assert isinstance(auto_wrap_bn(nn.BatchNorm2d(3)), FSDP)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert auto_wrap_bn(model, fsdp_config={"bucket_cap_mb": 5}, wrap_it=False) is model
    assert not units(model)
    with pytest.raises(AssertionError, match="already"):
        auto_wrap_bn(model)
    auto_wrap_bn(model, fsdp_config={"bucket_cap_mb": 6}, wrap_it=False, assert_on_collision=False)
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FSDP):
        auto_wrap(model)
    assert {fqn: unit.config.bucket_cap_mb for fqn, unit in units(model).items()} == {"1": 6}
    with pytest.raises(ValueError, match="`process_group` must be left out"):
        auto_wrap_bn(nn.BatchNorm1d(2), single_rank_pg=True, process_group=group)


def test_checkpointed_calls_do_not_matter(group):
    """A policy looks at modules, not at how they are called."""
    model = tiny()
    model.first.forward = functools.partial(checkpoint, model.first.forward, use_reentrant=False)
    assert units(FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))).keys() == {"", "first", "second"}
