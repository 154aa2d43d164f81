"""Wrapping policies, ours and those of other libraries, which decide what modules become units.

A policy is a function of ``module``, ``recurse`` and ``nonwrapped_numel``, the number of parameter elements below
``module`` that no inner wrapper has sharded. It is first called with ``recurse=True``: whether to look inside
``module``. If so, it is called again after the children with ``recurse=False``: whether to wrap ``module``. A policy
may also be an object, such as `ModuleWrapPolicy`, that decides by the module alone.

Source: fairscale (``fairscale.nn.wrap``) and PyTorch's FSDP (``torch.distributed.fsdp.wrap``), for the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

# Names of the third argument: in FSDP1; in fairscale and early versions of FSDP1.
_NUMEL_NAMES = ("nonwrapped_numel", "unwrapped_params")

ModuleClasses = Collection[type[nn.Module]]


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: ModuleClasses | None = None,
    exclude_wrap_modules: ModuleClasses | None = None,
) -> bool:
    """Wrap modules with at least ``min_num_params`` elements that are not wrapped yet.

    The policy never looks inside ``force_leaf_modules`` (default: ``MultiheadAttention``, which reads the weights of
    its children without calling them) and never wraps ``exclude_wrap_modules`` (default: ``ModuleList`` and
    ``ModuleDict``, which are never called).
    """
    if not isinstance(min_num_params, (int, float)):
        raise TypeError(f"`min_num_params` must be a number of elements, but is {min_num_params!r}. Pass 1e7, say.")
    own: Any = size_based_auto_wrap_policy
    leaves = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    is_root: bool = False,
    min_num_params: int = int(1e8),
    force_leaf_modules: ModuleClasses | None = None,
    exclude_wrap_modules: ModuleClasses | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """fairscale's form of `size_based_auto_wrap_policy`.

    With ``skip_params_check_for_root`` the outermost module is always wrapped.
    """
    own: Any = default_auto_wrap_policy
    leaves = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    if not recurse and is_root and skip_params_check_for_root:
        min_num_params = 0
    return size_based_auto_wrap_policy(module, recurse, unwrapped_params, min_num_params, leaves, excluded)


default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, is_root: bool = False) -> bool:
    """Wrap modules with an attribute ``wrapper_config``, a dict of arguments for their wrapper."""
    return recurse or wrapper_config(module) is not None


def wrapper_config(module: nn.Module) -> Mapping[str, Any] | None:
    """The attribute ``wrapper_config`` of ``module``, arguments for its wrapper; None if missing.

    Raises:
        TypeError: ``wrapper_config`` is not a dict.
    """
    config = vars(module).get("wrapper_config", getattr(type(module), "wrapper_config", None))
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(
            f"`wrapper_config` of a module must be a dict of arguments for its wrapper, but for a "
            f"{type(module).__name__} is {config!r}."
        )
    return config


def _classes_of(given: Any) -> tuple[Any, ...]:
    """The classes that were ``given``, several or one."""
    return tuple(given) if isinstance(given, Iterable) else (given,)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: ModuleClasses
) -> bool:
    """Wrap instances of ``transformer_layer_cls``, the blocks of a transformer."""
    return recurse or isinstance(module, _classes_of(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap modules for which ``lambda_fn`` is true."""
    return recurse or bool(lambda_fn(module))


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module that is called and holds parameters."""
    return True


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Sequence[Callable[..., bool]]
) -> bool:
    """Wrap modules that any of ``policies`` would wrap."""
    asked = [call_policy(policy, module, recurse, nonwrapped_numel) for policy in policies]
    return any(asked)


class ModuleWrapPolicy:
    """Wraps instances of the given classes, such as the blocks of a model.

    Raises:
        TypeError: ``module_classes`` are not module classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = _classes_of(module_classes)
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise TypeError(f"`module_classes` must be classes of modules, such as {{Block}}, but hold {cls!r}.")
        self._classes = classes

    def overrides(self, module: nn.Module) -> dict[str, Any] | None:
        """An empty dict for an instance of the classes; None for other modules, which are not wrapped."""
        return {} if isinstance(module, self._classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """The policy as a function, for `_or_policy`."""
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(cls.__name__ for cls in self._classes)}}})"


class CustomPolicy:
    """Decides by ``lambda_fn(module)``: False, True, or a dict of arguments that override the outer wrapper's."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def overrides(self, module: nn.Module) -> dict[str, Any] | None:
        """Arguments for the wrapper of ``module`` that differ from the outer wrapper's; None: do not wrap it.

        Raises:
            ValueError: ``lambda_fn`` returned neither a bool nor a dict.
        """
        answer = self._lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise ValueError(
                f"The function of a CustomPolicy must return a bool or a dict of arguments, but returned {answer!r} "
                f"for a {type(module).__name__}."
            )
        return dict(answer) if isinstance(answer, dict) else {} if answer else None


def call_policy(
    policy: Callable[..., bool], module: nn.Module, recurse: bool, numel: int, is_root: bool = False
) -> bool:
    """Call a policy function by keyword, with the names in its signature.

    Raises:
        TypeError: its signature cannot be read, arguments of a policy are missing from it, or it needs others.
    """
    arguments: dict[str, Any] = {"module": module, "recurse": recurse, "is_root": is_root}
    arguments.update(dict.fromkeys(_NUMEL_NAMES, numel))
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"A policy must be a function whose signature can be read, but is {policy!r}.") from error
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)}
    wanted = named & arguments.keys()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        wanted |= {"module", "recurse"}
        if not wanted & set(_NUMEL_NAMES):
            wanted.add(_NUMEL_NAMES[0])
    missing = {"module", "recurse"} - wanted
    if missing or not wanted & set(_NUMEL_NAMES):
        raise TypeError(
            "A policy must take `module`, `recurse` and `nonwrapped_numel` (or `unwrapped_params`) by these names, but "
            f"{policy!r} takes ({', '.join(p.name for p in parameters)}). Pass CustomPolicy or ModuleWrapPolicy to "
            "decide by the module alone."
        )
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unset = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name not in wanted]
    if unset:
        name = getattr(policy, "__name__", repr(policy))
        raise TypeError(
            f"A policy must need no arguments but those of every policy, but {name} also needs `{unset[0]}`. Pass "
            f"functools.partial({name}, {unset[0]}=...)."
        )
    return bool(policy(**{name: arguments[name] for name in wanted}))
