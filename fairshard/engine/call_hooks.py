"""The hooks on the outputs of one call of a unit, which report when a backward reaches the call.

Graph nodes hold the hooks. A Python object must not refer to the node that holds it, because the garbage collector
cannot detect a reference cycle through C++. So each hooked output has its own `Probe`, which refers only to nodes
*before* that output, and to the call::

    input node <-- nodes of the call <-- output node --hook--> probe --> call
                          ^---------------------------------------'

They live as long as the graph: once the last output is dropped, no backward can reach the call.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from fairshard.engine.record import Sight
from fairshard.utils.autograd import (
    has_custom_node,
    hook_last,
    inner_nodes,
    is_custom,
    newest_node,
    reached,
    reaches,
)
from fairshard.utils.dynamo import not_traced, set_tracer
from fairshard.utils.nested import apply_to_tensors


class CallHooks:
    """The hooks of one call; created before the unit computes.

    Attributes:
        engine: is told when a backward reaches an output.
        record: the call's place in its pass, a `CallRecord`.
        token: keeps the pass alive.
        probes: weak references to the hooks.
    """

    __slots__ = ("__weakref__", "_began", "_inputs", "_leaves", "engine", "probes", "record", "token")

    def __init__(self, engine: Any, record: Any, token: Any) -> None:
        self.engine, self.record, self.token = engine, record, token
        self.probes: list[weakref.ref[Probe]] = []
        self._began = newest_node()  # no graph node of the call has a smaller sequence number
        self._inputs: list[Any] = []  # graph nodes of the inputs, until the outputs are known
        self._leaves: list[Tensor] = []  # inputs that are leaves, until the outputs are known

    def see_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record which nodes and leaves the call was given."""
        for value in (*args, *kwargs.values()):
            if type(value) is Tensor:
                self._see_input(value)
            else:
                apply_to_tensors(self._see_input, value)

    def _see_input(self, tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        if node is not None:
            self._inputs.append(node)
        elif tensor.requires_grad:
            self._leaves.append(tensor)
        return tensor

    def watch_output(self, tensor: Tensor) -> Tensor:
        """Report when a backward reaches ``tensor``; returns it, or a copy (see `Unit.copied_out`).

        An input that is returned unchanged does not count as output.
        """
        tensor = self.record.unit.copied_out(tensor)
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node in self._inputs or (node is None and any(tensor is leaf for leaf in self._leaves)):
                return tensor
            nodes, inside = ([], []) if node is None else inner_nodes(node, self._inputs)
            probe = Probe(self, nodes, inside, is_custom(node))
            hook_last(tensor, probe)
            self.probes.append(weakref.ref(probe))
        return tensor

    def end(self) -> None:
        """All outputs are known: set what shows whether a backward reaches the call."""
        self._inputs.clear()
        self._leaves.clear()
        if self.probes:
            self.record.hooks, self.record.sight = weakref.ref(self), Sight.HOOKS
        elif any(flat_param.requires_grad for flat_param in self.record.unit.flat_params):
            self.record.sight = Sight.LEAVES

    def is_reached(self, by_inputs: bool) -> bool:
        """Whether the running graph task will execute a part of the call.

        ``by_inputs``: also count a call whose inputs get a gradient. A task that computes only some gradients may go
        through a call to its inputs without executing any node of `Probe.inside`.
        """
        for probe in self._living():
            if 1 in reached(probe.inside) or (by_inputs and any(reaches(node, True) for node in probe.nodes)):
                return True
        return False

    def makes_graphs(self) -> bool:
        """Whether the call's backward may build a graph, as a reentrant checkpoint does."""
        probes = self._living()
        nodes = [node for probe in probes for node in probe.nodes]
        return any(probe.is_custom for probe in probes) or has_custom_node(nodes, self._began)

    def _living(self) -> list[Probe]:
        return [probe for reference in self.probes if (probe := reference()) is not None]


class Probe:
    """The hook on one output.

    Attributes:
        nodes: graph nodes right before the output's own.
        inside: those of ``nodes`` that show most reliably that the output's node runs; see `inner_nodes`.
        is_custom: a `torch.autograd.Function` computed the output.
    """

    __slots__ = ("__weakref__", "hooks", "inside", "is_custom", "nodes")

    def __init__(self, hooks: CallHooks, nodes: list[Any], inside: list[Any], is_custom: bool) -> None:
        self.hooks, self.nodes, self.inside, self.is_custom = hooks, nodes, inside, is_custom

    @not_traced
    def __call__(self, _grad: Tensor) -> None:
        """The backward has reached the output."""
        tracer = set_tracer(None)
        try:
            self.hooks.engine.reach(self)
        finally:
            set_tracer(tracer)

    def is_restricted(self) -> bool:
        """Whether the running graph task, which has reached the output, skips a node right before it."""
        return 0 in reached(self.nodes)
