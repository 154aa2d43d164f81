"""One call of a unit in a forward: the hooks that say when a backward reaches it, and when it is done with it.

The hooks sit on graph nodes, and a Python object must not hold the node that holds it: the garbage collector does not
see through the C++ side of such a circle. So each hooked output has a `Probe` of its own, which holds only nodes
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
    goes_through,
    hook_first,
    inner_nodes,
    is_custom,
    nodes_before,
    reached,
    sequence_number,
)


class Listener(Protocol):
    """What a call notifies of the backward that goes through it."""

    def reach(self, probe: Probe) -> None:
        """The backward has reached the output of a call that ``probe`` is on."""

    def finish(self, call: Call) -> None:
        """The backward is about to go on before the inputs of ``call``: all gradients inside it are done."""


class Call:
    """One call of a unit with grad enabled; made before it computes, given its outputs after.

    Attributes:
        bracket: the call's place in the record of the forward.
        versions: of the shards that it computes with.
        probes: of the outputs that a backward can be seen to reach; weak.
    """

    __slots__ = ("__weakref__", "_inputs", "_leaves", "bracket", "is_custom", "listener", "probes", "versions")

    def __init__(self, listener: Listener, versions: list[int], bracket: Any) -> None:
        self.listener = listener
        self.versions = versions
        self.bracket = bracket
        self.probes: list[weakref.ref[Probe]] = []
        self.is_custom = False  # an output is that of a Python function
        self._inputs: list[Any] = []  # their graph nodes, and ...
        self._leaves: list[Tensor] = []  # ... those that are leaves, only until the outputs are known

    def watch_input(self, tensor: Tensor) -> Tensor:
        """Notice when the backward goes on to ``tensor``, whose graph is older than that of the call.

        Autograd runs what is ready from the newest node to the oldest: when it comes to any input, it is done with the
        call. The gradient of a leaf shows nothing, for leaves are handed theirs at once.
        """
        self.note_input(tensor)
        if tensor.grad_fn is not None:
            call = weakref.ref(self)  # the node is older than the call, and may outlive it

            def on_input(_grad: Tensor) -> None:
                known = call()
                if known is not None:
                    known.listener.finish(known)

            hook_first(tensor, on_input)
        return tensor

    def note_input(self, tensor: Tensor) -> None:
        """As `watch_input`, for a tensor on which another hook already notices that."""
        node = tensor.grad_fn
        if node is not None:
            self._inputs += (node,)
        elif tensor.requires_grad:
            self._leaves += (tensor,)

    def watch_output(self, tensor: Tensor) -> Tensor:
        """Notice when a backward reaches ``tensor``; an input that is returned as it is counts as no output."""
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node in self._inputs or (node is None and any(tensor is leaf for leaf in self._leaves)):
                return tensor
            nodes, inside = ([], []) if node is None else inner_nodes(node, self._inputs)
            probe = Probe(self, nodes, inside)
            self.is_custom = self.is_custom or is_custom(node)
            tensor.register_hook(probe)
            self.probes += (weakref.ref(probe),)
        return tensor

    def end(self) -> bool:
        """The outputs are known; returns whether a backward could reach the call unnoticed by any hook."""
        self.bracket.reaches_inputs = bool(self._inputs)
        is_unseen = not self.probes and bool(self._inputs or self._leaves)
        self._inputs, self._leaves = [], []
        return is_unseen

    def is_reached(self, by_inputs: bool = False) -> bool:
        """Whether the running graph task will execute a part of the call.

        ``by_inputs``: also count a call whose inputs get a gradient. A task that was asked for few gradients may go
        through a call to those, and compute none inside of it that a plain backward does.
        """
        for reference in self.probes:
            probe = reference()
            if probe is None:
                continue
            if 1 in reached(probe.inside) or (by_inputs and any(map(goes_through, probe.nodes))):
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
        nodes: those that come right before the output's.
        inside: those of them that no other output needs, as far as there are such.
    """

    __slots__ = ("__weakref__", "call", "inside", "nodes")

    def __init__(self, call: Call, nodes: list[Any], inside: list[Any]) -> None:
        self.call = call
        self.nodes = nodes
        self.inside = inside

    def __call__(self, _grad: Tensor) -> None:
        """The backward has reached the output."""
        self.call.listener.reach(self)

    def is_restricted(self) -> bool:
        """Whether the running graph task, which has come to the output, leaves out something before it."""
        return 0 in reached(self.nodes)
