"""The parameters of a module as one flat parameter or several, without sharding."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.engine.tree import units_below
from fairshard.nn.data_parallel.wrapper.forwarding import Forwarding
from fairshard.utils.layout import FlatLayout

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
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be an nn.Module, but is {type(module).__name__}.")
        lists = [_slots(module, params) for params in _lists(param_list)]
        _check_disjoint(lists)
        names = _names(flat_param_names, len(lists))
        for slots in lists:
            _check_alike(slots)
        self.module = module
        self._lines = [_Line(name, slots) for name, slots in zip(names, lists, strict=True)]
        self._is_flat = True
        self._loading = ExitStack()
        flat_params = [line.flattened() for line in self._lines]
        for slot in self._slots:
            slot.note_order()
        for slot in self._slots:
            slot.remove()
        for line, flat in zip(self._lines, flat_params, strict=True):
            self.register_parameter(line.name, flat)
        self.register_load_state_dict_post_hook(_end_loading)  # type: ignore[no-untyped-call]
        self._attach()

    @property
    def flat_param_names(self) -> list[str]:
        """The names of the flat parameters."""
        return [line.name for line in self._lines]

    @property
    def flat_params(self) -> list[nn.Parameter]:
        """The flat parameters; none inside `unflatten_params`."""
        found = [self._parameters[line.name] for line in self._lines]
        return [flat for flat in found if flat is not None]

    @property
    def _slots(self) -> list[_Slot]:
        return [slot for line in self._lines for slot in line.slots]

    def _find_inside(self, name: str) -> Any:
        if name == _NAME and len(self._lines) == 1 and self._lines[0].name in self._parameters:
            return self._parameters[self._lines[0].name]
        return super()._find_inside(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on views of ``flat_param``."""
        self._loading.close()
        if not self._is_flat:
            return self.module(*args, **kwargs)
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
        if not self._is_flat and flat_params is not None:
            raise ValueError("Only the outermost `unflatten_params` may be given `flat_params`, but an inner one was.")
        if not self._is_flat or not self._slots:
            yield
            return
        flats = self.flat_params
        data = [flat.data for flat in flats] if flat_params is None else self._checked(flat_params)
        params = [
            [nn.Parameter(view, flat.requires_grad) for view in line.views(values)]
            for line, flat, values in zip(self._lines, flats, data, strict=True)
        ]
        self._is_flat = False
        for line, shown in zip(self._lines, params, strict=True):
            self._parameters[line.name] = None
            line.register(shown)
        try:
            yield
        finally:
            with torch.no_grad():
                for line, flat, shown in zip(self._lines, flats, params, strict=True):
                    line.unregister(shown)
                    if flat_params is None:
                        line.add_grads(flat, shown)
                    self._parameters[line.name] = flat
            self._is_flat = True
            self._attach()

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state dict of the module as if its parameters had never been flattened."""
        if args:  # nn.Module still accepts them by position
            positional = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
            destination = positional.get("destination", destination)
            prefix, keep_vars = positional.get("prefix", prefix), positional.get("keep_vars", keep_vars)
        with self.unflatten_params():
            return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def flat_state_dict(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """State dict with ``flat_param``, and other entries under their own names; `load_state_dict` accepts it."""
        state = super().state_dict(prefix=prefix, keep_vars=keep_vars)
        inside = f"{prefix}module."
        return {prefix + name[len(inside) :] if name.startswith(inside) else name: state[name] for name in state}

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        self._loading.close()
        for slot in self._slots if self._is_flat else ():
            slot.attach(torch.empty(0, device="cpu"))  # views have an autograd graph, which cannot be copied
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        for wrapper in (self, copied):
            wrapper._attach()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self._loading.close()
        return {**self.__dict__, "_loading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_loading": ExitStack()})  # type: ignore[no-untyped-call]
        self._attach()

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._attach()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._loading.close()
        flat_keys = {f"{prefix}{line.name}" for line in self._lines}
        for key in [key for key in state_dict if key.startswith(prefix) and key not in flat_keys]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        if not flat_keys & state_dict.keys():
            self._loading.enter_context(self.unflatten_params())
        self._loaded_prefix = prefix
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _attach(self, together: bool = False) -> None:
        """Set the module's attributes to views of the flat parameter.

        Views made ``together`` share one backward, but cannot be read after an optimizer has stepped.
        """
        with torch.inference_mode(False), torch.enable_grad():
            for line in self._lines:
                flat = self._parameters[line.name]
                if flat is not None:
                    for slot, view in zip(line.slots, line.views(flat, together), strict=True):
                        slot.attach(view)

    def _checked(self, flat_params: Sequence[Tensor]) -> list[Tensor]:
        shapes, wanted = [tuple(flat.shape) for flat in flat_params], [(line.numel,) for line in self._lines]
        if shapes != wanted:
            what = f"one tensor of shape {wanted[0]}, like `flat_param`" if len(wanted) == 1 else f"of shapes {wanted}"
            raise ValueError(f"`flat_params` must be {what}, but has shapes {shapes}.")
        return [flat.detach() for flat in flat_params]


class _Line:
    """Some parameters laid end to end, and the name of the flat parameter that holds them."""

    def __init__(self, name: str, slots: list[_Slot]) -> None:
        self.name, self.slots = name, slots
        self._layout = FlatLayout([slot.shape.numel() for slot in slots], world_size=1)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._layout.numel

    def flattened(self) -> nn.Parameter | None:
        """A flat parameter with the values of the parameters; None if there are none."""
        if not self.slots:
            return None
        line = torch.cat([slot.param.detach().reshape(-1) for slot in self.slots])
        return nn.Parameter(line, requires_grad=self.slots[0].param.requires_grad)

    def views(self, line: Tensor, together: bool = True) -> list[Tensor]:
        """Views of ``line``, in the parameters' shapes; see `FlattenParamsWrapper._attach`."""
        layout = self._layout
        if together:
            runs = list(torch.split_with_sizes(line, list(layout.numels)))
        else:
            runs = [line.narrow(0, *place) for place in zip(layout.offsets, layout.numels, strict=True)]
        return [run.view(slot.shape) for slot, run in zip(self.slots, runs, strict=True)]

    def register(self, params: list[nn.Parameter]) -> None:
        """Register ``params`` in place of the original parameters."""
        for slot, param in zip(self.slots, params, strict=True):
            slot.register(param)

    def unregister(self, params: list[nn.Parameter]) -> None:
        """Undo `register`."""
        for slot, param in zip(self.slots, params, strict=True):
            slot.unregister(param)

    def add_grads(self, flat: nn.Parameter, params: list[nn.Parameter]) -> None:
        """Add the gradients of ``params`` to that of ``flat``, if there are any."""
        if any(param.grad is not None for param in params):
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            line = torch.cat([grad.reshape(-1) for grad in grads])
            flat.grad = line if flat.grad is None else flat.grad + line


class _Slot:
    """One parameter, and the modules that refer to it."""

    def __init__(self, param: nn.Parameter, fqn: str) -> None:
        self.param: nn.Parameter = param  # until `remove`
        self.fqn = fqn
        self.shape = param.shape
        self.owners: list[tuple[nn.Module, str]] = []
        self._order: list[list[str]] = []

    def note_order(self) -> None:
        """Record the order of the parameters of its modules; before any is removed."""
        self._order = [list(module._parameters) for module, _ in self.owners]

    def remove(self) -> None:
        """Remove the parameter from its modules."""
        del self.param
        for module, name in self.owners:
            module._parameters.pop(name, None)

    def attach(self, view: Tensor) -> None:
        """Set ``view`` as an attribute of the modules, through ``setattr``, which recurrent modules rely on."""
        for module, name in self.owners:
            setattr(module, name, view)

    def detach(self) -> None:
        """Remove the attribute from the modules."""
        for module, name in self.owners:
            module.__dict__.pop(name, None)

    def register(self, param: nn.Parameter) -> None:
        """Register ``param`` in place of the original parameter, in the original order."""
        self.detach()
        for (module, name), order in zip(self.owners, self._order, strict=True):
            setattr(module, name, param)
            for other in order[order.index(name) + 1 :]:
                if other in module._parameters:
                    module._parameters[other] = module._parameters.pop(other)

    def unregister(self, param: nn.Parameter) -> None:
        """Undo `register`; if ``load_state_dict(assign=True)`` has replaced ``param``, copy the new value into it."""
        for module, name in self.owners:
            found = module._parameters.pop(name, None)
            if found is not None and found is not param:
                param.copy_(found)


def _lists(param_list: Any) -> list[Any]:
    """The lists of parameters to flatten, each together; None means all parameters."""
    if param_list is None:
        return [None]
    given = list(param_list)
    are_params = [isinstance(one, nn.Parameter) for one in given]
    if all(are_params):
        return [given]
    if any(are_params):
        raise TypeError("`param_list` must hold parameters only or lists of parameters only, but holds both.")
    return [params for params in map(list, given) if params] or [[]]


def _names(given: Sequence[str] | None, num_lists: int) -> list[str]:
    """The names of the flat parameters of ``num_lists`` lists."""
    if given is None:
        return [_NAME] if num_lists == 1 else [f"{_NAME}_{index}" for index in range(num_lists)]
    names = list(given)
    if len(names) != num_lists or len(set(names)) < len(names) or any("." in name for name in names):
        raise ValueError(
            f"`flat_param_names` must be one name without dots for each list of parameters that is not empty, all "
            f"different, but for {num_lists} are {names}."
        )
    return [f"{_NAME}_{name}" for name in names]


def _check_disjoint(lists: list[list[_Slot]]) -> None:
    seen: set[int] = set()
    for slot in (slot for slots in lists for slot in slots):
        if id(slot.param) in seen:
            raise ValueError(f"Lists of parameters must not overlap, but `{slot.fqn}` is in two of them.")
        seen.add(id(slot.param))


def _slots(module: nn.Module, param_list: Iterable[nn.Parameter] | None) -> list[_Slot]:
    wanted = None if param_list is None else {id(param): param for param in param_list}
    units = [unit for _, unit in units_below(module)]
    shards = {id(shard) for unit in units for flat_param in unit.flat_params for shard in flat_param.shows.registered}
    slots: dict[int, _Slot] = {}
    for fqn, part in module.named_modules():
        for name, param in part._parameters.items():
            if param is None or (wanted is not None and id(param) not in wanted):
                continue
            full_name = f"{fqn}.{name}" if fqn else name
            if isinstance(part, FlattenParamsWrapper) and name in part.flat_param_names:
                raise ValueError(
                    f"A parameter must be flattened once, but `{full_name}` belongs to another FlattenParamsWrapper. "
                    "Pass a `param_list` without it."
                )
            if id(param) in shards:
                raise ValueError(
                    f"Parameters must be whole to be flattened, but `{full_name}` is a shard. Leave the units out of "
                    "`param_list`; they flatten their parameters themselves."
                )
            slots.setdefault(id(param), _Slot(param, full_name)).owners.append((part, name))
    if wanted is not None and (strangers := wanted.keys() - slots.keys()):
        shapes = [tuple(wanted[key].shape) for key in strangers]
        raise ValueError(f"`param_list` must hold parameters of the module, but some of shapes {shapes} are not.")
    return list(slots.values())


def _check_alike(slots: list[_Slot]) -> None:
    for what in ("dtype", "device", "requires_grad"):
        for slot in slots[1:]:
            first, other = getattr(slots[0].param, what), getattr(slot.param, what)
            if first != other:
                raise ValueError(
                    f"Parameters must have one {what} to be flattened together, but `{slots[0].fqn}` has {first} and "
                    f"`{slot.fqn}` has {other}. Flatten them in two wrappers, each with its `param_list`."
                )


def _end_loading(wrapper: FlattenParamsWrapper, keys: Any) -> None:
    """Close the context of `_load_from_state_dict`, and strip the wrapper from missing and unexpected names."""
    wrapper._loading.close()
    prefix = wrapper.__dict__.pop("_loaded_prefix", "")
    inside = f"{prefix}module."
    for names in keys:
        names[:] = [prefix + name[len(inside) :] if name.startswith(inside) else name for name in names]
