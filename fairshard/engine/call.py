"""One call of a unit: the hooks that tell it when a backward comes to what went out, and is done with what came in."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fairshard.utils.autograd import at_end_of_task, current_task, hook_first, input_node, num_reached


class _FlatParam(Protocol):
    requires_grad: bool


class _Origin(Protocol):
    @property
    def trains_ignored(self) -> bool: ...


class CalledUnit(Protocol):
    """The unit, as its calls see it."""

    versions: list[int]

    @property
    def origin(self) -> _Origin:
        """Whether it ignores something that is trained."""

    @property
    def flat_params(self) -> Sequence[_FlatParam]:
        """What is gathered for the call."""

    def pre_backward(self, call: Call, task: int) -> None:
        """The backward of graph task ``task`` has come to an output of ``call``."""

    def close_call(self, call: Call) -> None:
        """The gradients of the inputs of ``call`` are done."""


class Call:
    """One call of a unit in a forward with grad enabled: its hooks on outputs and inputs.

    Attributes:
        versions: of the shards that it computes with.
        is_later: an earlier forward awaits its backward, in which the unit may be gathered again: it is freed between.
    """

    __slots__ = (
        *("__weakref__", "_awaited", "_awaited_nodes", "_input_nodes", "_task"),
        *("is_later", "num_outputs", "unit", "versions"),
    )

    def __init__(self, unit: CalledUnit) -> None:
        self.unit = unit
        self.versions = unit.versions
        self.is_later = False
        self.num_outputs = 0
        self._input_nodes: list[Any] = []
        self._awaited_nodes: list[Any] = []  # those whose gradient is the last thing that the call computes
        self._awaited = 0
        self._task: int | None = None

    def watch_output(self, tensor: Tensor) -> Tensor:
        """Tell the unit when a backward comes to ``tensor``."""
        if tensor.requires_grad and not (self._input_nodes and input_node(tensor) in self._input_nodes):
            tensor.register_hook(self._on_output)  # inputs handed through are none of the unit's work
            self.num_outputs += 1
        return tensor

    def watch_input(self, tensor: Tensor) -> Tensor:
        """Tell the unit when the gradient of ``tensor`` is done.

        That of a leaf tells nothing: autograd runs what is ready from the newest node to the oldest, so that nodes
        from before the call come after all of the call's, but it hands leaves their gradients at once. The unit that
        ``tensor`` comes from is told afterwards, so that this one has given back its memory by then.
        """
        if tensor.requires_grad:
            self._input_nodes.append(input_node(tensor))
            if tensor.is_leaf:
                return tensor
            # Weak: the hook belongs to the node that is kept here, a cycle which the garbage collector cannot see.
            call = weakref.ref(self)

            def on_input(grad: Tensor) -> None:
                known = call()
                if known is not None:
                    known.close_input()

            hook_first(tensor, on_input)
            self._awaited_nodes.append(self._input_nodes[-1])
        return tensor

    @property
    def lacks_outputs(self) -> bool:
        """Whether a backward could come to the unit without passing any output seen here."""
        trainable = any(flat_param.requires_grad for flat_param in self.unit.flat_params)
        return not self.num_outputs and (trainable or bool(self._input_nodes))

    def await_inputs(self, to_the_end: bool) -> bool:
        """Count the inputs that the running graph task computes gradients of; they close the call.

        Gradients of what the unit ignores, which it does not see, may come after those, as if there were no inputs.
        Then, with ``to_the_end``, the end of the task closes the call. Returns whether anything does.
        """
        self._awaited = 0 if self.unit.origin.trains_ignored else num_reached(self._awaited_nodes)
        if not self._awaited and to_the_end:
            at_end_of_task(lambda: self.unit.close_call(self))
        return self._awaited > 0 or to_the_end

    def _on_output(self, grad: Tensor) -> None:
        task = current_task()
        if task != self._task:
            self._task = task
            self.unit.pre_backward(self, task)

    def close_input(self) -> None:
        """The gradient of one input is done."""
        self._awaited -= 1
        if self._awaited == 0:
            self.unit.close_call(self)
