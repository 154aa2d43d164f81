"""``--policy``: which modules become units."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch import nn

from fairshard.cli.option_error import OptionError

POLICIES = "blocks: repeated modules; class:NAME[,NAME]: those classes; size:N: at least N parameters; none: one unit"


def check_policy(flag: str, text: str) -> None:
    """Check the form of a policy; class names are looked up when there is a model.

    Raises:
        OptionError: it is in no known form.
    """
    kind, _, value = text.partition(":")
    if kind == "size":
        _size(flag, value)
    elif text not in ("none", "blocks") and not (kind == "class" and value):
        raise OptionError(f"{flag} must be size:N, class:NAME, blocks or none, but is {text}.")


def policy_of(flag: str, text: str, model: nn.Module) -> Any:
    """The policy that ``text`` describes for ``model``; None for one unit.

    Raises:
        OptionError: ``model`` has no such class, or no blocks.
    """
    from fairshard.nn.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy

    kind, _, value = text.partition(":")
    if kind == "size":
        return partial(size_based_auto_wrap_policy, min_num_params=_size(flag, value))
    if text == "none":
        return None
    if text == "blocks":
        chosen = set(blocks(model))
        return partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in chosen) if chosen else None
    classes = {type(part) for part in model.modules()}
    names = {cls.__name__ for cls in classes}
    wanted = value.split(",")
    missing = [name for name in wanted if name not in names]
    if missing:
        raise OptionError(
            f"{flag} class:{missing[0]} must be a class of a module of this model, which has "
            f"{', '.join(sorted(names))}."
        )
    return ModuleWrapPolicy(cls for cls in classes if cls.__name__ in wanted)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated modules of ``model``, outermost only.

    Those are the modules that transformers does not split between devices, if the model says which; otherwise modules
    with parameters of which a ``ModuleList`` or a ``Sequential`` has two of the same class.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [part for part in model.modules() if type(part).__name__ in names and part is not model]
    return found or _repeated(model)


def _repeated(module: nn.Module) -> list[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counts = Counter(type(child) for child in children)
        found = [child for child in children if counts[type(child)] > 1]
        found = [child for child in found if type(child).forward is not nn.Module.forward]
        if found:
            return found
    return [block for child in children for block in _repeated(child)]


def _size(flag: str, value: str) -> int:
    try:
        size = float(value)
    except ValueError:
        size = 0.0
    if not 1 <= size < float("inf"):
        raise OptionError(f"{flag} size:N needs a number of parameters of at least 1, but N is {value!r}.")
    return int(size)
