"""``FlattenParamsWrapper`` has one flat parameter to step, and otherwise the module's own names and numbers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fairshard.nn import FlattenParamsWrapper
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import SavedTransposed, Tiny, tiny_batch, tiny_loss
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, sgd


def built(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def train(model, num_steps=3):
    """Some steps of SGD with momentum; returns the losses."""
    optimizer, losses = sgd(model), []
    torch.manual_seed(7)
    for _ in range(num_steps):
        loss = model(torch.randn(6, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_trains_as_the_plain_module():
    """Losses and state are equal, bit for bit, while the optimizer sees one tensor."""
    plain, flat = built(), FlattenParamsWrapper(built())
    numel = sum(param.numel() for param in plain.parameters())
    assert [(name, tuple(param.shape)) for name, param in flat.named_parameters()] == [("flat_param", (numel,))]
    assert train(flat) == train(plain)
    assert_same_state(flat.state_dict(), plain.state_dict())


def test_tied_weights_and_modules_that_run_twice():
    """A weight with two names is stored once, and the gradients of both uses add up."""
    plain = Tiny()
    flat = FlattenParamsWrapper(copy.deepcopy(plain))
    assert flat.flat_param.numel() == sum(param.numel() for param in plain.parameters())
    assert flat.module.head.weight is flat.module.embed.weight
    for step in range(3):
        *inputs, targets = tiny_batch(step)
        for model in (plain, flat):
            tiny_loss(model(*inputs), targets).backward()
    grads = torch.cat([param.grad.flatten() for param in plain.parameters()])
    torch.testing.assert_close(flat.flat_param.grad, grads, rtol=1e-6, atol=1e-7)  # added up in another order


def test_a_list_of_parameters():
    """Parameters in the list are flattened, the others stay, and the state dict keeps the order of names."""
    plain, model = built(), built()
    flat = FlattenParamsWrapper(model, param_list=[model[3].bias, model[0].weight])
    names = [name for name, _ in flat.named_parameters()]
    assert names == ["flat_param", "module.0.bias", "module.1.weight", "module.1.bias", "module.3.weight"]
    assert flat.flat_param.numel() == 4 + 32
    assert_same_state(flat.state_dict(), plain.state_dict())
    assert train(flat) == train(plain)
    assert_same_state(flat.state_dict(), plain.state_dict())


def two_lists(names=None):
    """A model whose biases and other parameters are flattened apart, in another order than the module's."""
    model = built()
    lists = [[model[3].bias, model[0].bias], iter([]), [model[3].weight, model[1].weight, model[0].weight]]
    return FlattenParamsWrapper(model, lists, flat_param_names=names)


def test_several_lists_of_parameters():
    """Each list is a flat parameter, for a param group of its own; names, state and training are the plain module's."""
    plain, flat = built(), two_lists(["bias", "other"])
    assert flat.flat_param_names == ["flat_param_bias", "flat_param_other"]
    shapes = {name: tuple(param.shape) for name, param in flat.named_parameters()}
    assert shapes == {"flat_param_bias": (4 + 8,), "flat_param_other": (32 + 8 + 32,), "module.1.bias": (8,)}
    assert flat.flat_params == [flat.flat_param_bias, flat.flat_param_other]
    with pytest.raises(AttributeError):
        flat.flat_param  # noqa: B018
    assert_same_state(flat.state_dict(), plain.state_dict())
    groups = [{"params": [flat.flat_param_bias], "lr": 0.5}, {"params": [flat.flat_param_other, flat.module[1].bias]}]
    names = ["0.bias", "3.bias"]
    of_plain = [
        {"params": [plain.get_parameter(name) for name in names], "lr": 0.5},
        {"params": [param for name, param in plain.named_parameters() if name not in names]},
    ]
    for model, own in ((plain, of_plain), (flat, groups)):
        optimizer = torch.optim.SGD(own, lr=0.01, momentum=0.9)
        torch.manual_seed(7)
        for _ in range(3):
            model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(flat.state_dict(), plain.state_dict())


def test_several_flat_parameters_are_saved_copied_and_shown():
    """Flat and plain state dicts, deepcopy, `unflatten_params` and its gradients work with several flat parameters."""
    flat = two_lists()
    expected = flat.state_dict()
    assert list(flat.flat_state_dict())[:2] == ["flat_param_0", "flat_param_1"]
    for state in (flat.flat_state_dict(), expected):
        other = two_lists()
        other.load_state_dict({name: torch.zeros_like(value) for name, value in other.state_dict().items()})
        other.load_state_dict(state)
        assert_same_state(other.state_dict(), expected)
    assert_same_state(copy.deepcopy(flat).state_dict(), expected)
    with flat.unflatten_params():
        assert [name for name, _ in flat.named_parameters()] == [f"module.{n}" for n, _ in built().named_parameters()]
        assert flat.flat_params == []
        flat.module[0].bias.grad = torch.ones(8)
    assert flat.flat_param_0.grad.tolist() == [1.0] * 8 + [0.0] * 4
    assert flat.flat_param_1.grad is None
    zeros = [torch.zeros(12), torch.zeros(72)]
    with flat.unflatten_params(zeros):
        assert not flat.module[3].weight.any()
    assert_same_state(flat.state_dict(), expected)
    with pytest.raises(ValueError, match=r"must be of shapes \[\(12,\), \(72,\)\], but has shapes \[\(12,\)\]"):
        flat.unflatten_params(zeros[:1]).__enter__()


def test_one_flat_parameter_with_a_name():
    """A name of its own does not take ``flat_param`` away; a list of no parameters has none."""
    named = FlattenParamsWrapper(built(), flat_param_names=["all"])
    assert named.flat_param is named.flat_param_all
    assert train(named) == train(built())
    for nothing in ([], [[], []]):
        assert FlattenParamsWrapper(built(), nothing).flat_params == []


def test_recurrent_modules():
    """An LSTM, which keeps a list of its weights, uses the flattened ones."""
    torch.manual_seed(0)
    plain = nn.LSTM(4, 5, num_layers=2)
    flat = FlattenParamsWrapper(copy.deepcopy(plain))
    x = torch.randn(3, 2, 4)
    for model in (plain, flat):
        model(x)[0].square().sum().backward()
    assert torch.equal(flat.flat_param.grad, torch.cat([param.grad.flatten() for param in plain.parameters()]))
    assert torch.equal(copy.deepcopy(flat)(x)[0], plain(x)[0])


def test_a_recurrent_module_with_a_parameter_of_its_own():
    """A parameter that an LSTM does not have in its list of weights is flattened like any other."""

    class Scaled(nn.LSTM):
        def __init__(self):
            super().__init__(4, 5)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return super().forward(x)[0] * self.scale

    flat = FlattenParamsWrapper(Scaled())
    flat(torch.ones(3, 2, 4)).sum().backward()
    assert flat.flat_param.grad[-1] != 0


def test_unflattened_parameters_are_the_modules_own():
    """Inside the block names, shapes and memory are the module's own; writes are kept."""
    plain, flat = built(), FlattenParamsWrapper(built())
    before = flat.flat_param
    with flat.unflatten_params():
        named = dict(flat.module.named_parameters())
        assert list(named) == list(dict(plain.named_parameters()))
        assert all(torch.equal(named[name], param) for name, param in plain.named_parameters())
        with torch.no_grad():
            named["3.bias"].fill_(3)
        x = torch.ones(2, 4)
        flat.eval()(x)  # a forward inside works
    assert flat.flat_param is before
    assert torch.equal(before[-4:], torch.full((4,), 3.0))
    assert list(dict(flat.named_parameters())) == ["flat_param"]
    assert torch.equal(flat.module[3].bias, torch.full((4,), 3.0))


def test_another_line_may_be_shown():
    """``unflatten_params([line])`` gives names and shapes to any line of the right size, here averaged weights."""
    flat = FlattenParamsWrapper(built())
    average = flat.flat_param.detach() * 2
    with flat.unflatten_params([average]):
        doubled = {name: param.clone() for name, param in flat.module.named_parameters()}
    for name, param in built().named_parameters():
        assert torch.equal(doubled[name], param * 2)
    with pytest.raises(ValueError, match=r"must be one tensor of shape \(92,\)"), flat.unflatten_params([average[1:]]):
        pass


def test_after_an_exception_it_is_flat():
    """An exception inside the block leaves the wrapper as it was."""
    flat = FlattenParamsWrapper(built())
    with pytest.raises(KeyError), flat.unflatten_params():
        raise KeyError
    assert train(flat) == train(built())


def test_flat_state_dict_and_back():
    """The flat form has the flat parameter and the buffers; both it and the whole form load."""
    trained = FlattenParamsWrapper(built())
    train(trained)
    state = trained.flat_state_dict()
    assert list(state) == ["flat_param", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for form in (trained.flat_state_dict(), trained.state_dict()):
        other = FlattenParamsWrapper(built(seed=1))
        keys = other.load_state_dict(form)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        assert torch.equal(other.flat_param, trained.flat_param)
        assert_same_state(other.state_dict(), trained.state_dict())


def test_state_of_a_wrapper_inside_other_modules():
    """Names, loading and errors are those of the unwrapped model, also for wrappers in wrappers."""
    plain = nn.Sequential(built(), nn.Linear(4, 4))
    model = nn.Sequential(FlattenParamsWrapper(built(1)), nn.Linear(4, 4))
    model[0].module[0] = FlattenParamsWrapper(nn.Linear(4, 8))
    model = FlattenParamsWrapper(model, param_list=[model[1].weight])
    model.load_state_dict(plain.state_dict())
    assert_same_state(model.state_dict(), plain.state_dict())
    state = dict(plain.state_dict(), stray=torch.ones(1))
    del state["0.1.weight"]
    keys = model.load_state_dict(state, strict=False)
    assert keys.missing_keys == ["0.1.weight"]
    assert keys.unexpected_keys == ["stray"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.1\.weight"'):
        model.load_state_dict(state)
    model(torch.ones(2, 4)).sum().backward()


def test_loading_by_assignment():
    """With ``assign=True`` the values of the assigned parameters reach the flat parameter."""
    trained, flat = built(1), FlattenParamsWrapper(built())
    flat.load_state_dict(trained.state_dict(), assign=True)
    assert_same_state(flat.state_dict(), trained.state_dict())
    assert train(flat) == train(trained)


def test_modules_with_their_own_state():
    """A module with its own way to save and load its weight uses it."""

    class Own(SavedTransposed, nn.Linear):
        pass

    flat = FlattenParamsWrapper(nn.Sequential(Own(4, 3)))
    state = flat.state_dict()
    assert list(state) == ["0.bias", "0.transposed"]
    other = FlattenParamsWrapper(nn.Sequential(Own(4, 3)))
    other.load_state_dict(state)
    assert torch.equal(other.flat_param, flat.flat_param)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_copy_trains_like_the_original(copied_by, num_steps):
    """deepcopy and pickle, before and after some steps; no memory is shared."""
    flat = FlattenParamsWrapper(built())
    train(flat, num_steps)
    copied = copied_by(nn.Sequential(flat))[0]
    assert copied.module[0].weight.grad_fn is not None
    state = copy.deepcopy(flat.state_dict())
    losses = train(copied)
    assert_same_state(flat.state_dict(), state)
    assert train(flat) == losses
    assert_same_state(copied.state_dict(), flat.state_dict())


def test_conversions_reach_the_module():
    """After ``.double()`` the module computes with the converted parameter."""
    flat = nn.Sequential(FlattenParamsWrapper(built())).double()[0]
    assert flat.flat_param.dtype == torch.float64
    assert flat.module[0].weight.dtype == torch.float64
    assert torch.equal(flat.module[0].weight.flatten(), flat.flat_param[:32])
    flat(torch.ones(2, 4).double()).sum().backward()


def test_reading_and_calling_a_part_gives_gradients():
    """Outside a forward parameters can be read, and computing with them gives gradients, even after an evaluation."""
    flat = FlattenParamsWrapper(built())
    with torch.inference_mode():
        flat(torch.ones(2, 4))
    flat.module[0](torch.ones(2, 4)).sum().backward()
    assert flat.flat_param.grad[:32].eq(2).all()


def test_modules_without_parameters():
    """A module without parameters works."""
    flat = FlattenParamsWrapper(nn.ReLU())
    assert flat.flat_param is None
    assert list(flat.parameters()) == []
    assert torch.equal(flat(torch.ones(2)), torch.ones(2))
    assert flat.state_dict() == {}
    copy.deepcopy(flat)


def test_attributes_are_the_modules():
    """Attributes and indices are the module's; a missing attribute raises."""
    flat = FlattenParamsWrapper(built())
    assert flat[0].out_features == 8
    assert FlattenParamsWrapper(nn.Linear(4, 3)).out_features == 3
    with pytest.raises(AttributeError, match="missing"):
        flat.missing  # noqa: B018


def test_what_is_done_to_unflattened_parameters_stays():
    """Gradients of a backward inside the block add to the flat parameter's; showing a second line inside raises."""
    flat = FlattenParamsWrapper(built())
    x = torch.randn(6, 4)
    flat(x).square().sum().backward()
    expected = flat.flat_param.grad * 2
    with flat.unflatten_params():
        flat(x).square().sum().backward()
        with pytest.raises(ValueError, match="outermost"), flat.unflatten_params([torch.zeros(80)]):
            pass
    assert torch.equal(flat.flat_param.grad, expected)


def test_parameters_can_be_read_when_an_optimizer_has_stepped():
    """After an in-place step, parameters read outside a forward have the new values."""
    flat = FlattenParamsWrapper(built())
    train(flat, 1)
    assert torch.equal(flat.module[0].weight, flat.flat_param[:32].view(8, 4))


REFUSED = {
    "overlap": (
        ValueError,
        "`0.bias` is in two of them",
        lambda net: (net, [[net[0].weight, net[0].bias], [net[0].bias]]),
    ),
    "both": (TypeError, "but holds both", lambda net: (net, [net[0].weight, [net[0].bias]])),
    "few names": (ValueError, r"for 2 are \['a'\]", lambda net: (net, [[net[0].weight], [net[0].bias]], ["a"])),
    "a name twice": (
        ValueError,
        r"are \['a', 'a'\]",
        lambda net: (net, [[net[0].weight], [net[0].bias]], ["a", "a"]),
    ),
    "a dot": (ValueError, r"for 1 are \['a.b'\]", lambda net: (net, None, ["a.b"])),
    "twice": (
        ValueError,
        "must be flattened once, but `flat_param_inner`",
        lambda net: (FlattenParamsWrapper(net, flat_param_names=["inner"]),),
    ),
    "a part twice": (
        ValueError,
        r"flattened once, but `1\.flat_param` belongs to another",
        lambda net: (nn.Sequential(net, FlattenParamsWrapper(nn.Linear(2, 2))),),
    ),
    "partly frozen": (
        ValueError,
        r"one requires_grad .* `0\.weight` has True and `1\.weight` has False",
        lambda net: (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),),
    ),
    "two dtypes": (
        ValueError,
        r"one dtype .* `0\.weight` .* `1\.weight` has torch\.float64",
        lambda net: (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),),
    ),
    "a stranger": (
        ValueError,
        r"parameters of the module, but some of shapes \[\(7,\)\]",
        lambda net: (net, [nn.Parameter(torch.ones(7))]),
    ),
    "a list": (TypeError, r"must be an nn\.Module", lambda net: ([net],)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_flattened_is_refused(name):
    """Parameters that differ, overlap or are another module's are refused by name or shape; nothing changes."""
    kind, text, arguments = REFUSED[name]
    given = arguments(model := built())
    before = dict(model.named_parameters())
    with pytest.raises(kind, match=text):
        FlattenParamsWrapper(*given)
    assert all(param is before[name] for name, param in model.named_parameters())


@on_ranks(2)
def test_beside_units():
    """Units and `FlattenParamsWrapper` cannot contain each other: both refusals name the parameter or module."""
    model = nn.Sequential(FSDP(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"must be whole to be flattened, but `0\.flat_param_0` is a shard"):
        FlattenParamsWrapper(model)
    FlattenParamsWrapper(model, list(model[1].parameters()))(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"`0` is wrapped by fairshard\.nn\.flatten_params_wrapper"):
        FSDP(nn.Sequential(FlattenParamsWrapper(nn.Linear(4, 4))))
