"""``parameters()`` of a unit's modules: gathered parameters while the modules compute or rest, otherwise shards."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fairshard.errors import ShardChangedError
from fairshard.params.flat_param import FlatParam
from fairshard.params.following import Following
from fairshard.params.slot import ParamSlot
from fairshard.utils.user_line import level_of_user

# Parameters and attributes of a module, a name, the registered parameter, the leaf, the placeholder.
_Params = dict[str, nn.Parameter | None]
_Place = tuple[_Params, dict[str, Any], str, nn.Parameter | None, nn.Parameter | None, object]

# Of slots, for `map`: few calls.
_VERSION, _SHOWS_OTHER = attrgetter("leaf._version"), attrgetter("shows_other")
_LEAF, _SHOWN = attrgetter("leaf"), attrgetter("shown")


class Listing:
    """Registers the leaves of ``flat_params`` in place of their shards, while it is on.

    It is *at rest* while on although the modules do not compute: the unit stays gathered, and shows whole parameters.

    While on, a shard that is registered for several parameters together is not registered, and a leaf is not an
    attribute of its module, because an attribute would hide a tensor that ``functional_call`` puts there. While off,
    a gathered leaf is an attribute beside the registered parameter.

    Attributes:
        following: adopts flags that users set on the leaves, before they see the shards again, and the reverse.
        has_lost: whether a write to a leaf is lost when the unit is freed.
        is_computing: whether it is on for modules that compute.
        left: `versions` when the modules finished computing, if the unit stays gathered.

    *Invariant*: a tensor that other code (``functional_call``) has put in a parameter's place stays there.
    """

    __slots__ = (
        "_are_plain", "_is_shard", "_places", "_slots",
        "following", "has_lost", "is_at_rest", "is_computing", "is_on", "left",
    )  # fmt: skip

    def __init__(self, flat_params: Sequence[FlatParam] = ()) -> None:
        self.is_on = self.is_at_rest = self.is_computing = self.has_lost = False
        self.following = Following(flat_params)
        self._slots = [slot for flat_param in flat_params for slot in flat_param.slots]
        self._are_plain = all(type(slot) is ParamSlot for slot in self._slots)
        self._is_shard = [flat_param.computes_on_shard for flat_param in flat_params for _ in flat_param.slots]
        self.left: list[int] | None = None
        self._places: list[_Place] = [
            (module._parameters, module.__dict__, name, slot.registered, slot.leaf, slot.placeholder)
            for flat_param in flat_params
            for slot in flat_param.slots
            for module, name in slot.owners
        ]
        for flat_param in flat_params:
            holder, key = flat_param.shows.holder, flat_param.shows.key
            if holder is not None:
                self._places.append((holder._parameters, {}, key, flat_param.shard, None, None))

    def versions(self) -> list[int]:
        """The version counter of each leaf."""
        return list(map(_VERSION, self._slots))

    def check_unwritten(self, before: list[int]) -> None:
        """Raise if a user has written to a leaf in place, or assigned to its ``.data``, since `versions`.

        Does not check leaves that are no longer registered: a backward inside the forward has freed them.

        Raises:
            ShardChangedError: names the first such parameter.
        """
        if not self.is_on:
            return
        if self.left is not None and self.left != before:
            self.warn_if_written(is_pass=True)
        self.left = before
        if self.versions() == before and not self._shows_other():
            return
        for slot, version in zip(self._slots, before, strict=True):
            if slot.leaf._version != version or slot.shows_other:
                raise ShardChangedError(
                    f"Parameter `{slot.fqn}` must not be written to inside the forward of its unit, but was (also "
                    "`nn.Embedding(max_norm=...)` does that): the change is lost when the gathered parameters are "
                    "freed. Compute with a changed value instead (`torch.nn.utils.parametrize`), or write between "
                    "steps: inside `summon_full_params`, or to the DTensor of `fully_shard`."
                )

    @property
    def is_written(self) -> bool:
        """Whether a user has written to a leaf since it was gathered; see `warn_if_written`."""
        return self.has_lost or (self.left is not None and self.left != self.versions())

    def warn_if_written(self, is_pass: bool) -> None:
        """Warn if a user has written to a leaf since the modules last computed, and its memory is freed or refilled.

        Looks for assignments to ``.data`` only where a new pass begins (``is_pass``): a backward undoes them. Then it
        also looks for what that pass writes.
        """
        left, self.left = self.left, self.versions() if is_pass else None
        self.has_lost = self.has_lost and is_pass
        if left is None or not (is_pass or self.versions() != left):
            return
        fqn = self.written_since(left)
        if fqn is not None:
            self.has_lost = is_pass
            warnings.warn(
                f"Whole parameters must not be written to while their unit stays gathered, but `{fqn}` was: the change "
                "is lost when they are freed. Write inside `summon_full_params`, or to the shards that `parameters()` "
                "yields after the backward, or, with `fully_shard`, after `reshard()`.",
                stacklevel=level_of_user(),
            )

    def written_since(self, before: list[int]) -> str | None:
        """The name of a leaf that was written to, or whose ``.data`` was assigned, since `versions`; None if none was.

        Skips writes to leaves that lie in the shard itself, which are kept.
        """
        for slot, version, is_shard in zip(self._slots, before, self._is_shard):  # noqa: B905 (host time)
            if slot.shows_other or (slot.leaf._version != version and not is_shard):
                return slot.fqn
        return None

    def _shows_other(self) -> bool:
        """Whether the user has assigned to ``.data`` of a leaf."""
        if not self._are_plain:
            return True in map(_SHOWS_OTHER, self._slots)
        shown = map(Tensor.data_ptr, map(_SHOWN, self._slots))
        return list(shown) != list(map(Tensor.data_ptr, map(_LEAF, self._slots)))

    def rest(self) -> None:
        """Turn on, or stay on, while the modules do not compute."""
        if not self.is_on:
            self.following.settle()
            self.show()
        self.is_at_rest, self.is_computing = True, False

    def end_rest(self) -> bool:
        """`hide` if at rest; returns whether it was."""
        was_at_rest = self.is_at_rest
        if was_at_rest:
            self.hide()
        return was_at_rest

    def show(self) -> None:
        """Register the leaves, which show gathered memory, whether or not they are attributes already."""
        self.is_on, self.is_at_rest, self.is_computing = True, False, True
        for params, attributes, name, registered, leaf, placeholder in self._places:  # few calls, to save host time
            if name not in params:
                continue  # the user has deleted it
            if params[name] is registered:
                params[name] = leaf
            elif name not in attributes or (attributes[name] is not leaf and attributes[name] is not placeholder):
                continue
            if name in attributes:  # it would hide the leaf, or what the user has put there
                del attributes[name]

    def hide(self) -> None:
        """Register the shards again, and make the leaves attributes; no-op if off."""
        if self.is_on:
            self.following.settle()
            self.is_on = self.is_at_rest = self.is_computing = False
            for params, attributes, name, registered, leaf, _ in self._places:
                if name in params and params[name] is leaf:
                    params[name] = registered
                    attributes[name] = leaf

    def show_placeholders(self) -> None:
        """As `hide`, but the attributes are the placeholders, not the leaves."""
        self.following.settle()
        self.is_on = self.is_at_rest = self.is_computing = False
        for params, attributes, name, registered, leaf, placeholder in self._places:
            if name in params and params[name] is leaf:
                params[name] = registered
                if placeholder is not None:
                    attributes[name] = placeholder
