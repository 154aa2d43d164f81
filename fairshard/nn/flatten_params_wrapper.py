"""The parameters of a module as one flat parameter or several, without sharding."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.checks.shards import stepped_of
from fairshard.nn.data_parallel.wrapper.attributes import Forwarding
from fairshard.settings.check import require
from fairshard.utils.names import join

_NAME = "flat_param"


class FlattenParamsWrapper(Forwarding):
    """Holds the parameters of ``module``, or those in ``param_list``, as one 1-D parameter, ``flat_param``.

    If ``param_list`` holds lists of parameters, there is a flat parameter for each list that is not empty, so that an
    optimizer can step the lists with different settings: ``flat_param_0``, ``flat_param_1``, ..., or
    ``flat_param_<name>`` for each of ``flat_param_names``. `flat_params` has all of them.

    An optimizer then steps one tensor. The module's attributes become views of it, renewed by every forward; a
    parameter that the module accesses other than through attributes must not be flattened. ``state_dict`` and
    ``load_state_dict`` use the original names. No process group is needed. Pickle the wrapper with ``torch.save``:
    plain ``pickle`` writes ``flat_param`` once per view.

    >>> import torch
    >>> from fairshard.nn import FlattenParamsWrapper
    >>> model = FlattenParamsWrapper(torch.nn.Linear(3, 2))
    >>> [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    [('flat_param', (8,))]
    >>> list(model.state_dict())
    ['weight', 'bias']
    >>> layer = torch.nn.Linear(3, 2)
    >>> model = FlattenParamsWrapper(layer, [[layer.weight], [layer.bias]], flat_param_names=["decay", "no_decay"])
    >>> [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    [('flat_param_decay', (6,)), ('flat_param_no_decay', (2,))]

    Raises:
        TypeError: ``module`` is not a module, or ``param_list`` holds both parameters and lists.
        ValueError: parameters of one list differ in dtype, device or ``requires_grad``; or a parameter does not belong
            to the module, is in two lists, is a shard, or is already flattened by another wrapper; or
            ``flat_param_names`` are not one name for each list.

    Source: fairscale's class of the same name.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Iterable[nn.Parameter] | Iterable[Iterable[nn.Parameter]] | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        require(
            isinstance(module, nn.Module), f"`module` must be an nn.Module, but is {type(module).__name__}.", TypeError
        )
        lists = [_slots(module, params) for params in _lists(param_list)]
        names = _names(flat_param_names, len(lists))
        _check(lists)
        self.module = module
        self._lines = dict(zip(names, lists, strict=True))  # by flat parameter, the parameters that lie in it
        self._is_flat = True
        self._loading = ExitStack()  # `unflatten_params`, while a state dict is loaded
        for name, slots in self._lines.items():
            params = [slot.shown for slot in slots]
            line = torch.cat([param.detach().reshape(-1) for param in params]) if params else None
            self.register_parameter(name, None if line is None else nn.Parameter(line, params[0].requires_grad))
        self.register_load_state_dict_post_hook(_end_loading)  # type: ignore[no-untyped-call]
        self._attach()

    @property
    def flat_param_names(self) -> list[str]:
        """The names of the flat parameters."""
        return list(self._lines)

    @property
    def flat_params(self) -> list[nn.Parameter]:
        """The flat parameters; none inside `unflatten_params`."""
        return [flat for name in self._lines if (flat := self._parameters[name]) is not None]

    def _find_inside(self, name: str) -> Any:
        if name == _NAME and len(self._lines) == 1 and (own := self.flat_param_names[0]) in self._parameters:
            return self._parameters[own]
        return super()._find_inside(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on views of ``flat_param``."""
        self._loading.close()
        self._attach(together=True)
        try:
            return self.module(*args, **kwargs)
        finally:
            self._attach()

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Register the parameters under their own names and shapes inside the ``with`` block.

        They share memory with ``flat_param``, so that writes and gradients are kept. If given, ``flat_params``, a list
        of one tensor like each flat parameter, is shown instead.

        Raises:
            ValueError: ``flat_params`` are not tensors of the right sizes, or parameters are already unflattened.
        """
        self._loading.close()
        require(
            self._is_flat or flat_params is None,
            "Only the outermost `unflatten_params` may be given `flat_params`, but an inner one was.",
        )
        if not self._is_flat:
            yield
            return
        flats = {name: flat for name in self._lines if (flat := self._parameters[name]) is not None}
        values = self.flat_params if flat_params is None else self._checked(flat_params)
        shown: dict[_Slot, nn.Parameter] = {}
        for (name, flat), line in zip(flats.items(), values, strict=True):
            for slot, view in zip(self._lines[name], _views(line.data, self._lines[name]), strict=True):
                shown[slot] = nn.Parameter(view, flat.requires_grad)
                slot.show(shown[slot])
            self._parameters[name] = None
        self._is_flat = False
        try:
            yield
        finally:
            with torch.no_grad():
                for slot, param in shown.items():
                    slot.copy_assigned(param)
                for name, flat in flats.items():
                    if flat_params is None:
                        _add_grads(flat, [shown[slot] for slot in self._lines[name]])
                    self._parameters[name] = flat
            self._is_flat = True
            self._attach()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the module as if its parameters had never been flattened."""
        with self.unflatten_params():
            return self.module.state_dict(*args, **kwargs)

    def flat_state_dict(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """State dict with ``flat_param``, and other entries under their own names; `load_state_dict` accepts it."""
        state = super().state_dict(prefix=prefix, keep_vars=keep_vars)
        return {_outside(name, prefix): state[name] for name in state}

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        self._loading.close()
        for slot in chain(*self._lines.values()) if self._is_flat else ():
            slot.show(torch.empty(0, device="cpu"))  # views have an autograd graph, which cannot be copied
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        for wrapper in (self, copied):
            wrapper._attach()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self._loading.close()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach()

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._attach()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._loading.close()
        flat_keys = {prefix + name for name in self._lines}
        for key in [key for key in state_dict if key.startswith(prefix) and key not in flat_keys]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        if not flat_keys & state_dict.keys():
            self._loading.enter_context(self.unflatten_params())
        self._loaded_prefix = prefix
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _attach(self, together: bool = False) -> None:
        """Set the module's attributes to views of the flat parameters, unless parameters are unflattened.

        Views made ``together`` share one backward, but cannot be read after an optimizer has stepped.
        """
        with torch.inference_mode(False), torch.enable_grad():
            for name, slots in self._lines.items():
                flat = self._parameters[name]
                if flat is not None:
                    for slot, view in zip(slots, _views(flat, slots, together), strict=True):
                        slot.show(view)

    def _checked(self, flat_params: Sequence[Tensor]) -> list[Tensor]:
        shapes, wanted = [tuple(flat.shape) for flat in flat_params], [tuple(flat.shape) for flat in self.flat_params]
        what = f"one tensor of shape {wanted[0]}, like `flat_param`" if len(wanted) == 1 else f"of shapes {wanted}"
        require(shapes == wanted, f"`flat_params` must be {what}, but has shapes {shapes}.")
        return [flat.detach() for flat in flat_params]


@dataclass(eq=False)
class _Slot:
    """One parameter: its name, its shape, and the modules that refer to it."""

    fqn: str
    shape: torch.Size
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def shown(self) -> Any:
        """What the modules have now: a parameter or a view."""
        return getattr(*self.owners[0])

    def show(self, value: Tensor) -> None:
        """Give the modules ``value``: register a parameter; set a view as attribute, and None in its place."""
        param = value if isinstance(value, nn.Parameter) else None
        for module, name in self.owners:
            module.__dict__.pop(name, None)
            module._parameters[name] = param
            if param is None:
                module.__dict__[name] = value
            if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:  # its list of weights
                module._flat_weights[module._flat_weights_names.index(name)] = value

    def copy_assigned(self, param: nn.Parameter) -> None:
        """If ``load_state_dict(assign=True)`` has replaced ``param`` in a module, copy the new value into it."""
        for module, name in self.owners:
            found = module._parameters[name]
            if found is not None and found is not param:
                param.copy_(found)


def _views(line: Tensor, slots: list[_Slot], together: bool = True) -> list[Tensor]:
    """Views of ``line`` in the shapes of ``slots``; see `FlattenParamsWrapper._attach`."""
    numels = [slot.shape.numel() for slot in slots]
    starts = accumulate(numels, initial=0)
    runs = line.split(numels) if together else [line.narrow(0, *place) for place in zip(starts, numels, strict=False)]
    return [run.view(slot.shape) for slot, run in zip(slots, runs, strict=True)]


def _add_grads(flat: nn.Parameter, params: list[nn.Parameter]) -> None:
    """Add the gradients of ``params`` to that of ``flat``, if there are any."""
    if any(param.grad is not None for param in params):
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        line = torch.cat([grad.reshape(-1) for grad in grads])
        flat.grad = line if flat.grad is None else flat.grad + line


def _lists(param_list: Any) -> list[Any]:
    """The lists of parameters to flatten, each together; None means all parameters."""
    if param_list is None:
        return [None]
    given = list(param_list)
    are_params = [isinstance(one, nn.Parameter) for one in given]
    if all(are_params):
        return [given]
    text = "`param_list` must hold parameters only or lists of parameters only, but holds both."
    require(not any(are_params), text, TypeError)
    return [params for params in map(list, given) if params] or [[]]


def _names(given: Sequence[str] | None, num_lists: int) -> list[str]:
    """The names of the flat parameters of ``num_lists`` lists."""
    if given is None:
        return [_NAME] if num_lists == 1 else [f"{_NAME}_{index}" for index in range(num_lists)]
    names = list(given)
    require(
        len(names) == num_lists == len(set(names)) and not any("." in name for name in names),
        f"`flat_param_names` must be one name without dots for each list of parameters that is not empty, all "
        f"different, but for {num_lists} are {names}.",
    )
    return [f"{_NAME}_{name}" for name in names]


def _slots(module: nn.Module, param_list: Iterable[nn.Parameter] | None) -> list[_Slot]:
    wanted = None if param_list is None else {id(param): param for param in param_list}
    slots: dict[int, _Slot] = {}
    for fqn, part in module.named_modules():
        for name, param in part._parameters.items():
            if param is None or (wanted is not None and id(param) not in wanted):
                continue
            full_name = join(fqn, name)
            require(
                not isinstance(part, FlattenParamsWrapper) or name not in part.flat_param_names,
                f"A parameter must be flattened once, but `{full_name}` belongs to another FlattenParamsWrapper. Pass "
                "a `param_list` without it.",
            )
            require(
                stepped_of(param) is None,
                f"Parameters must be whole to be flattened, but `{full_name}` is a shard. Leave the units out of "
                "`param_list`; they flatten their parameters themselves.",
            )
            slots.setdefault(id(param), _Slot(full_name, param.shape)).owners.append((part, name))
    strangers = [] if wanted is None else [tuple(wanted[key].shape) for key in wanted.keys() - slots.keys()]
    require(not strangers, f"`param_list` must hold parameters of the module, but some of shapes {strangers} are not.")
    return list(slots.values())


def _check(lists: list[list[_Slot]]) -> None:
    """Raise if a parameter is in two of ``lists``, or if the parameters of one list cannot lie in one line."""
    seen: set[int] = set()
    for first, slot in ((slots[0], slot) for slots in lists for slot in slots):
        require(
            id(slot.shown) not in seen, f"Lists of parameters must not overlap, but `{slot.fqn}` is in two of them."
        )
        seen.add(id(slot.shown))
        for what in ("dtype", "device", "requires_grad"):
            wanted, found = getattr(first.shown, what), getattr(slot.shown, what)
            require(
                found == wanted,
                f"Parameters must have one {what} to be flattened together, but `{first.fqn}` has {wanted} and "
                f"`{slot.fqn}` has {found}. Flatten them in two wrappers, each with its `param_list`.",
            )


def _outside(name: str, prefix: str) -> str:
    """``name``, that of a wrapper's state dict with ``prefix``, without the wrapper."""
    inside = f"{prefix}module."
    return prefix + name[len(inside) :] if name.startswith(inside) else name


def _end_loading(wrapper: FlattenParamsWrapper, keys: Any) -> None:
    """Close the context of `_load_from_state_dict`, and strip the wrapper from missing and unexpected names."""
    wrapper._loading.close()
    prefix = wrapper.__dict__.pop("_loaded_prefix", "")
    for names in keys:
        names[:] = [_outside(name, prefix) for name in names]
