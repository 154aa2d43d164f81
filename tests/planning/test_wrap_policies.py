"""Policies decide as FSDP1's and fairscale's do, and are called with the arguments that they expect."""

import functools
import inspect
import warnings

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import fairshard.nn.wrap as ours
from fairshard.planning.choice import Chooser, ModuleTree
from fairshard.planning.policies import call_policy
from fairshard.setup.ignored import resolve_ignored
from fairshard.setup.survey import Survey


class Linears(nn.Sequential):
    """Four Linears of 110 parameters each, in a pair of pairs."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) for _ in range(2)))


def chosen(module, policy, ignored=(), include_root=False):
    """What ``policy`` wraps, by fqn, outer modules last; a warning is an error."""
    tree = ModuleTree(module, resolve_ignored(Survey(module), ignored, None, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {tree.fqns[c.module]: c.overrides for c in Chooser(tree, policy).choose(include_root)}


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        (
            "size_based_auto_wrap_policy",
            {"min_num_params": 10**8, "force_leaf_modules": None, "exclude_wrap_modules": None},
        ),
        ("transformer_auto_wrap_policy", {}),
        ("lambda_auto_wrap_policy", {}),
        ("_or_policy", {}),
        ("always_wrap_policy", {}),
        ("ModuleWrapPolicy", {}),
        ("CustomPolicy", {}),
        ("enable_wrap", None),
        ("wrap", {}),
    ],
)
def test_names_and_defaults_are_those_of_fsdp1(name, defaults):
    """The arguments have torch's names, in its order; fairscale's ``enable_wrap`` takes a policy before them."""
    own, other = (inspect.signature(getattr(module, name)).parameters for module in (ours, theirs))
    if defaults is None:
        assert list(own)[-2:] == list(other)
        return
    assert list(own) == list(other)
    assert {p.name: p.default for p in own.values() if p.default is not p.empty} == defaults


def test_fairscales_default_policy_has_its_names():
    """``default_auto_wrap_policy`` takes fairscale's arguments, and says which modules it exempts."""
    names = list(inspect.signature(ours.default_auto_wrap_policy).parameters)
    assert names[:5] == ["module", "recurse", "unwrapped_params", "is_root", "min_num_params"]
    assert names[5:] == ["force_leaf_modules", "exclude_wrap_modules", "skip_params_check_for_root"]
    assert {nn.ModuleList, nn.ModuleDict} == ours.default_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert {nn.MultiheadAttention} == ours.size_based_auto_wrap_policy.FORCE_LEAF_MODULES


@pytest.mark.parametrize("source", [ours, theirs])
@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (441, set()),
        (221, set()),  # the pairs hold 220; the policy is not asked about the root
        (220, {"0", "1"}),
        (111, {"0", "1"}),  # a Linear holds 110
        (110, {"0.0", "0.1", "1.0", "1.1"}),  # no parameters are left for the pairs
    ],
)
def test_size_based(source, least, expected):
    """A module is wrapped if the parameters outside its inner wrappers reach the size; the caller wraps the root."""
    policy = functools.partial(source.size_based_auto_wrap_policy, min_num_params=least)
    assert chosen(Linears(), policy).keys() == expected


def test_size_based_exemptions():
    """ModuleList is not wrapped but searched, MultiheadAttention is not searched; both sets can be given."""
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(10, 10)]), "attention": nn.MultiheadAttention(10, 1)})
    policy = functools.partial(ours.size_based_auto_wrap_policy, min_num_params=100)
    assert chosen(model, policy).keys() == {"list.0"}
    assert chosen(model, functools.partial(policy, force_leaf_modules={nn.ModuleList})).keys() == {"attention"}
    assert chosen(model, functools.partial(policy, exclude_wrap_modules={nn.Linear})).keys() == set()


def test_fairscales_policy_may_take_a_small_root():
    """``skip_params_check_for_root`` wraps the outermost module even if few parameters are left for it."""
    policy = functools.partial(ours.default_auto_wrap_policy, min_num_params=220)
    assert chosen(Linears(), policy, include_root=True).keys() == {"0", "1"}
    policy = functools.partial(policy, skip_params_check_for_root=True)
    assert chosen(Linears(), policy, include_root=True).keys() == {"0", "1", ""}


@pytest.mark.parametrize("source", [ours, theirs])
def test_by_class(source):
    """ModuleWrapPolicy and transformer_auto_wrap_policy wrap their classes and subclasses of these."""
    for policy in (
        source.ModuleWrapPolicy({nn.Sequential}),
        functools.partial(source.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
        functools.partial(source.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Sequential)),
    ):
        assert chosen(Linears(), policy).keys() == {"0", "1"}
        assert chosen(Linears(), policy, include_root=True).keys() == {"0", "1", ""}


def test_one_class_needs_no_set():
    """Both policies of classes take one class, too."""
    for policy in (
        ours.ModuleWrapPolicy(nn.Sequential),
        functools.partial(ours.transformer_auto_wrap_policy, transformer_layer_cls=nn.Sequential),
    ):
        assert chosen(Linears(), policy).keys() == {"0", "1"}


@pytest.mark.parametrize("source", [ours, theirs])
def test_custom_policy_may_override_arguments(source):
    """True wraps with the outer arguments, a dict with others, False not at all."""
    model = Linears()
    says = {model[0]: True, model[1]: {"mixed_precision": True}}
    policy = source.CustomPolicy(lambda module: says.get(module, False))
    assert chosen(model, policy) == {"0": {}, "1": {"mixed_precision": True}}
    with pytest.raises(ValueError, match=r"must return a bool or a dict|should return"):
        chosen(model, source.CustomPolicy(lambda module: 1))


@pytest.mark.parametrize("source", [ours, theirs])
def test_always_and_or(source):
    """``always_wrap_policy`` wraps all modules with parameters; ``_or_policy`` wraps what any of its policies wraps."""
    assert len(chosen(Linears(), source.always_wrap_policy)) == 6
    first, second = (
        functools.partial(source.lambda_auto_wrap_policy, lambda_fn=lambda m, n=num: getattr(m, "out_features", 0) == n)
        for num in (3, 4)
    )
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    assert chosen(model, functools.partial(source._or_policy, policies=[first, second])).keys() == {"0", "1"}
    both = functools.partial(source._or_policy, policies=[first, source.ModuleWrapPolicy({nn.Linear})])
    assert chosen(model, both).keys() == {"0", "1", "2"}


class Recorder:
    """A policy with a given signature that records its calls."""

    def __init__(self):
        self.calls = []

    def new(self, module, recurse, nonwrapped_numel):
        self.calls.append((recurse, nonwrapped_numel))
        return True

    def old(self, module, recurse, unwrapped_params):
        return self.new(module, recurse, unwrapped_params)

    def fairscale(self, module, recurse, unwrapped_params, is_root, extra=1):
        assert is_root == isinstance(module, Linears)
        return self.new(module, recurse, unwrapped_params)

    def open(self, module, recurse, **kwargs):
        assert kwargs.keys() == {"nonwrapped_numel"}
        return self.new(module, recurse, **kwargs)


@pytest.mark.parametrize("form", ["new", "old", "fairscale", "open"])
def test_policies_are_called_by_the_names_they_have(form):
    """A policy may take FSDP1's third argument, by its new or old name, fairscale's ``is_root``, or ``**kwargs``."""
    recorder = Recorder()
    chosen(Linears(), getattr(recorder, form))
    assert recorder.calls[:2] == [(True, 440), (True, 220)]
    assert recorder.calls[-1] == (False, 0)


@pytest.mark.parametrize("policy", [lambda m, r, n: True, lambda module: True, lambda module, recurse: True, print])
def test_a_policy_with_other_names_is_refused(policy):
    """The error says which names a policy must have."""
    with pytest.raises(TypeError, match="must take `module`, `recurse` and `nonwrapped_numel`"):
        call_policy(policy, nn.Linear(1, 1), True, 1)


@pytest.mark.parametrize("policy", [3, {nn.Linear}, "Linear"])
def test_other_objects_are_no_policy(policy):
    """A set of classes is not a policy; the error says what to pass."""
    with pytest.raises(TypeError, match=r"pass ModuleWrapPolicy\({Block}\)"):
        chosen(Linears(), policy)


def test_classes_must_be_modules():
    """A class that is not a module's, or an instance, is refused when the policy is made."""
    for classes in ({int}, [nn.Linear(1, 1)], nn.Linear):
        if classes is nn.Linear:
            assert repr(ours.ModuleWrapPolicy([nn.Linear])) == "ModuleWrapPolicy({Linear})"
        else:
            with pytest.raises(TypeError, match="must be classes of modules"):
                ours.ModuleWrapPolicy(classes)


class Tied(nn.Module):
    """Two branches that share a weight, and each have another weight of their own."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.right = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.right[0].weight = self.left[0].weight

    def forward(self, x):
        return self.right(self.left(x))


def test_a_parameter_of_two_modules_goes_to_the_unit_around_both():
    """Neither module that shares it, nor one around only one of them, becomes a unit; one around both may."""
    model = nn.Sequential(Tied(), nn.Linear(4, 4))
    tree = ModuleTree(model)
    with pytest.warns(UserWarning, match=r"`0\.left\.0`, `0\.left`, `0\.right\.0`, `0\.right` share one"):
        found = Chooser(tree, ours.always_wrap_policy).choose()
    assert {tree.fqns[choice.module] for choice in found} == {"0.left.1", "0.right.1", "0", "1"}


def test_a_module_in_two_places_is_one_unit():
    """A module in two places is wrapped once and asked about once; a module around one of its places is not wrapped."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(shared), shared)
    recorder = Recorder()
    assert chosen(model, recorder.new).keys() == {"0.0", "0.1", "0", "1"}
    assert len(recorder.calls) == 2 * 4 + 1
    tree = ModuleTree(model)
    with pytest.warns(UserWarning, match="`0`, `1` share one"):
        assert not Chooser(tree, ours.ModuleWrapPolicy({nn.Sequential})).choose()
    by = nn.Identity()
    tree.replace(shared, by)
    assert [model[0][0], model[1][0], model[2]] == [by] * 3


def test_what_cannot_be_a_unit_is_never_chosen():
    """Modules without parameters, containers that are not called, and children that attention does not call."""
    model = nn.Sequential(
        nn.ReLU(),
        nn.BatchNorm1d(4, affine=False),
        nn.ModuleList([nn.Linear(4, 4)]),
        nn.ParameterList([torch.zeros(3)]),
        nn.MultiheadAttention(4, 1),
    )
    assert chosen(model, ours.always_wrap_policy).keys() == {"2.0", "4"}


def test_ignored_modules_are_not_looked_at():
    """The policy is not asked about ignored modules or modules below them, and their parameters do not count."""
    model = Linears()
    policy = functools.partial(ours.size_based_auto_wrap_policy, min_num_params=220)
    assert chosen(model, policy, ignored=[model[0][0]]).keys() == {"1"}
    assert chosen(model, ours.always_wrap_policy, ignored=[model[0]]).keys() == {"1.0", "1.1", "1"}


def test_a_wrapper_config_must_be_a_dict():
    """``config_auto_wrap_policy`` wraps modules with a ``wrapper_config``, which must be a dict."""
    model = Linears()
    model[0].wrapper_config = {"bucket_cap_mb": 1}
    assert chosen(model, ours.config_auto_wrap_policy) == {"0": {}}
    model[1].wrapper_config = 3
    with pytest.raises(TypeError, match="`wrapper_config` of a module must be a dict"):
        chosen(model, ours.config_auto_wrap_policy)
