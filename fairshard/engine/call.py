"""One call of a unit in a forward: hooks that report when a backward reaches the call, and when it has finished it.

Graph nodes hold the hooks. A Python object must not refer to the node that holds it, because the garbage collector
cannot detect a reference cycle through C++. So each hooked output has its own `Probe`, which refers only to nodes
*before* that output, and to the call::

    input node <-- nodes of the call <-- output node --hook--> probe --> call
                          ^---------------------------------------'

A call lives as long as its graph: once the last output is dropped, no backward can reach the call.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor

from fairshard.utils.autograd import (
    goes_through,
    hook_first,
    hook_last,
    inner_nodes,
    is_custom,
    nodes_before,
    reached,
    sequence_number,
)
from fairshard.utils.dynamo import not_traced, set_tracer
from fairshard.utils.nested import apply_to_tensors


class Listener(Protocol):
    """Is notified when a backward reaches or finishes a call."""

    def reach(self, probe: Probe) -> None:
        """The backward has reached the output that ``probe`` is attached to."""

    def finish(self, call: Call) -> None:
        """The backward is about to go past the inputs of ``call``: all gradients inside the call are computed."""


class Call:
    """One call of a unit with grad enabled; created before the unit computes.

    Attributes:
        bracket: the call's place in the record of the forward.
        versions: version counters of the unit's shards when they were gathered.
        probes: weak references to the probes of the hooked outputs.
    """

    __slots__ = ("__weakref__", "_inputs", "_leaves", "bracket", "is_custom", "listener", "probes", "versions")

    def __init__(self, listener: Listener, versions: list[int], bracket: Any) -> None:
        self.listener = listener
        self.versions = versions
        self.bracket = bracket
        self.probes: tuple[weakref.ref[Probe], ...] = ()
        self.is_custom = False  # a `torch.autograd.Function` computed an output
        self._inputs: tuple[Any, ...] = ()  # graph nodes of the inputs, until the outputs are known
        self._leaves: tuple[Tensor, ...] = ()  # inputs that are leaves, until the outputs are known

    def watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], last: Tensor | None) -> None:
        """Call `_watch_input` on all, except ``last``, an output of another call whose hook reports the same event."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value is last and last is not None:
                self._note_input(last)
            elif type(value) is Tensor:
                self._watch_input(value)
            else:
                apply_to_tensors(self._watch_input, value)

    def _watch_input(self, tensor: Tensor) -> Tensor:
        """Report when the backward goes on to ``tensor``, whose graph is older than the call's.

        Of the nodes that are ready, autograd runs the newest first: when it reaches any input, it has finished the
        call. The gradient of a leaf shows nothing, because a leaf gets its gradient immediately.
        """
        self._note_input(tensor)
        if tensor.grad_fn is not None:
            call = weakref.ref(self)  # the node is older than the call, and may outlive it

            @not_traced
            def on_input(_grad: Tensor) -> None:
                known = call()
                if known is not None:
                    tracer = set_tracer(None)
                    try:
                        known.listener.finish(known)
                    finally:
                        set_tracer(tracer)

            hook_first(tensor, on_input)
        return tensor

    def _note_input(self, tensor: Tensor) -> None:
        """Like `_watch_input`, for a tensor on which another hook already reports the same event."""
        node = tensor.grad_fn
        if node is not None:
            self._inputs += (node,)
        elif tensor.requires_grad:
            self._leaves += (tensor,)

    def watch_output(self, tensor: Tensor) -> Tensor:
        """Report when a backward reaches ``tensor``; an input that is returned unchanged does not count as output."""
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node in self._inputs or (node is None and any(tensor is leaf for leaf in self._leaves)):
                return tensor
            nodes, inside = ([], []) if node is None else inner_nodes(node, self._inputs)
            probe = Probe(self, nodes, inside)
            self.is_custom = self.is_custom or is_custom(node)
            hook_last(tensor, probe)
            self.probes += (weakref.ref(probe),)
        return tensor

    def end(self) -> bool:
        """All outputs are known; returns whether a backward could reach the call without triggering a hook."""
        self.bracket.reaches_inputs = bool(self._inputs)
        is_unseen = not self.probes and bool(self._inputs or self._leaves)
        self._inputs = self._leaves = ()
        return is_unseen

    def is_reached(self, by_inputs: bool = False) -> bool:
        """Whether the running graph task will execute a part of the call.

        ``by_inputs``: also count a call whose inputs get a gradient. A task that computes only some gradients may go
        through a call to its inputs without executing any node of `Probe.inside`.
        """
        for reference in self.probes:
            probe = reference()
            if probe is None:
                continue
            if 1 in reached(probe.inside) or (by_inputs and any(map(goes_through, probe.nodes))):
                return True
        return False

    def makes_graphs(self) -> bool:
        """Whether a ``torch.autograd.Function`` in the call may build a graph in backward, as reentrant checkpoints do.

        Visits every node of the call.
        """
        if self.is_custom:
            return True
        probes = [probe for reference in self.probes if (probe := reference()) is not None]
        waiting = [node for probe in probes for node in probe.nodes]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if sequence_number(node) < self.bracket.began:
                continue
            if is_custom(node):
                return True
            new = set(nodes_before(node)) - seen
            seen |= new
            waiting += new
        return False


class Probe:
    """The hook on one output.

    Attributes:
        nodes: graph nodes right before the output's own.
        inside: those of ``nodes`` that show most reliably that the output's node runs; see `inner_nodes`.
    """

    __slots__ = ("__weakref__", "call", "inside", "nodes")

    def __init__(self, call: Call, nodes: list[Any], inside: list[Any]) -> None:
        self.call = call
        self.nodes = nodes
        self.inside = inside

    @not_traced
    def __call__(self, _grad: Tensor) -> None:
        """The backward has reached the output."""
        tracer = set_tracer(None)
        try:
            self.call.listener.reach(self)
        finally:
            set_tracer(tracer)

    def is_restricted(self) -> bool:
        """Whether the running graph task, which has reached the output, skips a node right before it."""
        return 0 in reached(self.nodes)
