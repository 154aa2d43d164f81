"""One call of a unit in a forward: the hooks that say when a backward reaches it, and when it is done with it.

The hooks sit on graph nodes, and a Python object must not hold the node that holds it: the garbage collector does not
see through the C++ side of such a circle. So each hooked output has a `_Probe` of its own, which holds only nodes
*before* that output, and the probes hold the call::

    input node <-- nodes of the call <-- output node --hook--> probe --> call
                          ^---------------------------------------'

A call lives as long as its graph does: when the last output is dropped, no backward can reach the call any more.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor

from fairshard.utils.autograd import (
    hook_first,
    is_accumulation,
    is_custom,
    is_older,
    newest_node,
    nodes_before,
    reached,
)


class Listener(Protocol):
    """Whoever runs the backward of a call."""

    def reach(self, call: Call) -> None:
        """The backward has reached an output of ``call``."""

    def finish(self, call: Call) -> None:
        """The backward is about to go on before the inputs of ``call``: all gradients inside it are done."""


class Call:
    """One call of a unit with grad enabled; made before it computes, given its outputs after.

    Attributes:
        bracket: the call's place in the record of the forward; set by whoever records.
        versions: of the shards that it computes with.
        probes: of the outputs that a backward can be seen to reach; weak.
    """

    __slots__ = ("__weakref__", "_began", "_inputs", "bracket", "is_custom", "listener", "probes", "versions")

    def __init__(self, listener: Listener, versions: list[int]) -> None:
        self.listener = listener
        self.versions = versions
        self.bracket: Any = None
        self.probes: list[weakref.ref[_Probe]] = []
        self.is_custom = False  # an output is that of a Python function
        self._began = newest_node()
        self._inputs: list[Any] = []  # only until the outputs are known

    def watch_input(self, tensor: Tensor) -> Tensor:
        """Notice when the backward goes on to ``tensor``, whose graph is older than that of the call.

        Autograd runs what is ready from the newest node to the oldest: when it comes to any input, it is done with the
        call. The gradient of a leaf shows nothing, for leaves are handed theirs at once.
        """
        if tensor.requires_grad:
            node = tensor.grad_fn
            self._inputs.append(tensor if node is None else node)
            if node is not None:
                call = weakref.ref(self)  # the node is older than the call, and may outlive it

                def on_input(_grad: Tensor) -> None:
                    known = call()
                    if known is not None:
                        known.listener.finish(known)

                hook_first(tensor, on_input)
        return tensor

    def note_input(self, tensor: Tensor) -> Tensor:
        """As `watch_input`, where something else tells when the backward goes on to ``tensor``."""
        if tensor.requires_grad:
            self._inputs.append(tensor if tensor.grad_fn is None else tensor.grad_fn)
        return tensor

    def watch_output(self, tensor: Tensor) -> Tensor:
        """Notice when a backward reaches ``tensor``; inputs handed through are none of the call's work."""
        if tensor.requires_grad:
            node = tensor.grad_fn
            own = tensor if node is None else node
            if not any(own is given for given in self._inputs):
                probe = _Probe(self, node, self._inputs)
                self.is_custom = self.is_custom or is_custom(node)
                tensor.register_hook(probe)
                self.probes.append(weakref.ref(probe))
        return tensor

    def end(self) -> bool:
        """The outputs are known; returns whether a backward could reach the call without being seen to."""
        is_unseen = not self.probes and bool(self._inputs)
        self._inputs = []
        return is_unseen

    def is_reached(self) -> bool:
        """Whether the running graph task will execute a part of the call."""
        for reference in self.probes:
            probe = reference()
            if probe is not None and any(reached(probe.nodes)):
                return True
        return False


    def makes_graphs(self) -> bool:
        """Whether a Python function is part of the call, whose backward may make a graph, as reentrant checkpoints do.

        Looks at every node of the call.
        """
        if self.is_custom:
            return True
        probes = [probe for reference in self.probes if (probe := reference()) is not None]
        waiting = [node for probe in probes for node in probe.nodes]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if is_older(node, self._began):
                continue
            if is_custom(node):
                return True
            new = set(nodes_before(node)) - seen
            seen |= new
            waiting += new
        return False


class _Probe:
    """The hook on one output; ``nodes`` are some before it that no other output needs, as far as there are such."""

    __slots__ = ("__weakref__", "call", "nodes")

    def __init__(self, call: Call, node: Any, inputs: list[Any]) -> None:
        self.call = call
        before = [] if node is None else nodes_before(node)
        inside = [one for one in before if not any(one is given for given in inputs)]
        self.nodes = [one for one in inside if not is_accumulation(one)] or inside or before

    def __call__(self, _grad: Tensor) -> None:
        self.call.listener.reach(self.call)
