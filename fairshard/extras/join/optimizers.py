"""Optimizers inside ``join``: a rank that is done still owns a shard of every parameter, and steps it with the others.

Before each step, a computing rank announces the optimizer's shard names, number of steps and hyperparameters. A rank
that is done finds its own matching optimizer, which was passed as ``stateful`` or has stepped before, and steps it. At
the end it adopts the state of other ``stateful`` objects, such as schedulers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairshard.engine.root import Root
from fairshard.errors import FairshardError
from fairshard.extras.join.join import Join
from fairshard.utils.graph_breaks import untraced

_Key = tuple[tuple[str, ...], ...]
_Settings = list[dict[str, Any]]

_open: weakref.WeakSet[JoinedOptimizers] = weakref.WeakSet()
_num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


class JoinedOptimizers:
    """The optimizers of the shards of ``root`` on this rank; ``stateful``: objects that the user has passed."""

    def __init__(self, root: Root, stateful: Iterable[Any]) -> None:
        given = list(stateful)
        for one in given:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(
                    f"`stateful` must hold optimizers, schedulers and other objects with state_dict() and "
                    f"load_state_dict(), but {type(one).__name__} does not have them."
                )
        self._given = [one for one in given if isinstance(one, Optimizer)]
        self._others = [one for one in given if not isinstance(one, Optimizer)]
        self._names: dict[nn.Parameter, str] = {
            one.shard: one.name for unit in root.units for flat_param in unit.flat_params for one in flat_param.stepped
        }
        self._stepped: dict[Optimizer, None] = {}  # in this block
        self._root = root
        self._rank = root.units[0].group.rank
        self.join: Join | None = None

    def open(self, join: Join) -> None:
        """Announce each step in ``join`` from now on."""
        self.join = join
        _open.add(self)

    def close(self) -> None:
        """End the block."""
        _open.discard(self)

    # ---- a rank that computes

    def before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Announce that ``optimizer`` steps next."""
        join = self.join
        if join is None or not self._is_open or join.is_done or not self._holds(optimizer):
            return
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):
            join.needs_all("optimizer.step(closure)")
            return
        join.announce_call("step", lambda: (self._key(optimizer), _num_steps[optimizer], _settings(optimizer)))
        self._stepped[optimizer] = None

    # ---- a rank that is done

    def follow(self, key: _Key, num_steps: int, settings: _Settings) -> Callable[[], object]:
        """A function that runs this rank's part of the optimizer's step number ``num_steps``.

        Raises:
            FairshardError: no optimizer or several match; or its hyperparameters differ.
        """
        own = self._find(key, num_steps)
        if not self._others:
            self._compare(own, settings)
        return partial(self._step, own, settings)

    def finish(self) -> None:
        """After all ranks are done, adopt the ``stateful`` states and hyperparameters of the last rank. **Collective.**

        Raises:
            FairshardError: on all ranks, if hyperparameters differ and ``stateful`` holds nothing that sets them.
        """
        join = self.join
        assert join is not None
        if not join.was_short:
            return
        stepped = {self._key(one): one for one in self._stepped}
        settings = {key: _settings(one) for key, one in stepped.items()}
        answers = join.gather_states((settings, [one.state_dict() for one in self._others]))
        last, states = answers[0]
        problem = ""
        if len(states) != len(self._others):
            problem = "`stateful` must hold the same objects on all ranks, but does not."
        shared = [(one, last[key]) for key, one in stepped.items() if key in last and join.has_followed]
        try:
            for one, theirs in () if self._others else shared:
                self._compare(one, theirs)
        except FairshardError as error:
            problem = problem or str(error)
        join.agree(problem)
        if join.has_followed:
            for other, state in zip(self._others, states, strict=True):
                other.load_state_dict(state)
            for one, theirs in shared:
                _set(one, theirs)

    # ---- private

    @property
    def _is_open(self) -> bool:
        """Whether the root is in this block: an exception ends PyTorch's ``Join`` without a call of its hook."""
        return self._root.join is self.join

    def _step(self, optimizer: Optimizer, settings: _Settings) -> None:
        self._stepped[optimizer] = None
        _set(optimizer, settings)
        foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in self._names]
        with without_grads(foreign):
            optimizer.step()

    def _holds(self, optimizer: Optimizer) -> bool:
        return any(param in self._names for group in optimizer.param_groups for param in group["params"])

    def _key(self, optimizer: Optimizer) -> _Key:
        groups = optimizer.param_groups
        return tuple(tuple(self._names[p] for p in group["params"] if p in self._names) for group in groups)

    def _find(self, key: _Key, num_steps: int) -> Optimizer:
        found = [one for one in self._given if self._key(one) == key]
        if not found:  # the number of steps excludes older optimizers of the same parameters
            seen = [one for one, number in _num_steps.items() if number == num_steps - 1]
            found = [one for one in seen if self._key(one) == key]
        if len(found) == 1:
            return found[0]
        count = f"{len(found)} optimizers match" if found else "none has stepped before"
        raise FairshardError(
            "A rank that has run out of batches must step its shards with the others, but on rank "
            f"{self._rank} {count}. Pass the optimizer: model.join(stateful=[optimizer])."
        )

    def _compare(self, optimizer: Optimizer, settings: _Settings) -> None:
        for own, theirs in zip(_settings(optimizer), settings, strict=True):
            for name, value in theirs.items():
                if own.get(name) != value:
                    raise FairshardError(
                        f"Hyperparameters must be the same on all ranks, but `{name}` is {value} on ranks that train, "
                        f"and {own.get(name)} on rank {self._rank}, which has run out of batches. Pass its scheduler: "
                        "model.join(stateful=[scheduler]); or set it outside the block."
                    )


@contextmanager
def without_grads(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the gradients of ``params`` inside the ``with`` block: this rank contributes none."""
    kept = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad


def _settings(optimizer: Optimizer) -> _Settings:
    """For each group, the hyperparameters that are plain values or numbers in tensors."""
    groups: _Settings = []
    for group in optimizer.param_groups:
        plain = {name: _plain(value) for name, value in group.items() if name != "params"}
        groups.append({name: value for name, value in plain.items() if isinstance(value, _PLAIN)})
    return groups


_PLAIN = (bool, int, float, str, tuple, list, type(None))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value


def _set(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    for group, theirs in zip(optimizer.param_groups, settings, strict=bool(settings)):
        for name, value in theirs.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            elif _plain(group.get(name)) != value:
                group[name] = value


@untraced
def _before_step(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    _num_steps[optimizer] = _num_steps.get(optimizer, 0) + 1
    for joined in list(_open):
        joined.before_step(optimizer, args, kwargs)


register_optimizer_step_pre_hook(_before_step)
