"""The only file that uses autograd's private API.

The names it uses, and what happens if torch does not have them:

- ``torch._C._will_engine_execute_node`` (torch >= 2.1): which leaves the running backward will reach. Without it every
  leaf counts as reached, so that a unit with an unused leaf is finished at the end of the backward: later, with the
  same result (``tests/utils/test_autograd_hooks.py`` compares the two).
- ``torch._C._current_graph_task_id``: identifies the running backward; -1 outside of any backward.
- ``Variable._execution_engine.queue_callback``: a call at the end of the running graph task. The task holds the
  callback until it is over, with or without an exception.
- The frame of ``torch.autograd.Function.apply``: which custom function is the outermost. Without it, a reentrant
  checkpoint of several units with another one inside raises in its backward.
- ``torch._C._autograd._top_saved_tensors_default_hooks`` (torch >= 2.7): which checkpoint runs, if it is not reentrant.
  Without it the frame of ``torch.utils.checkpoint.checkpoint`` tells.
- ``Tensor._backward_hooks``: a dictionary of hooks, called in its order, and ``Node._register_hook_dict``, which makes
  autograd read it. If torch keeps hooks elsewhere, a hook is called last, and a unit's memory is freed a moment later.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

NO_BACKWARD = -1
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

_will_execute: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda _node: True)
current_task: Callable[[], int] = torch._C._current_graph_task_id


class _Use(torch.autograd.Function):
    """A use of a tensor that calls no function of its class: a tensor subclass need not support any view."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def accumulate_node(leaf: Tensor) -> Any:
    """The graph node that adds to ``leaf.grad``; stays the same object as long as something refers to it."""
    with torch.inference_mode(False), torch.enable_grad():
        used: Tensor = _Use.apply(leaf)  # type: ignore[no-untyped-call]
        assert used.grad_fn is not None  # it ends with its tensor before torch 2.7
        return used.grad_fn.next_functions[0][0]


def reaches(node: Any, is_captured: bool = False) -> bool:
    """Whether the running graph task executes ``node``, or has executed it.

    ``is_captured``: the answer for leaves in ``torch.autograd.grad``, which returns gradients instead of accumulating.
    """
    try:
        return _will_execute(node)
    except RuntimeError:  # raised for leaves that autograd.grad() captures
        return is_captured


def reached(nodes: Sequence[Any]) -> bytearray:
    """`reaches` of each of ``nodes``, 1 or 0."""
    try:
        return bytearray(map(_will_execute, nodes))
    except RuntimeError:
        return bytearray(map(reaches, nodes))


def inner_nodes(node: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The graph nodes to which ``node`` passes its gradients, and those of them that best show that ``node`` runs.

    The second list leaves out nodes that are ``given``, and nodes of leaves unless there are no others; if nothing is
    left, it is the first list.
    """
    nodes: list[Any] = []
    inside: list[Any] = []
    leaves: list[Any] = []
    for one, _ in node.next_functions:  # comprehensions are calls before Python 3.12
        if one is not None:
            nodes += (one,)
        if one is not None and one not in given:
            own = leaves if type(one) is _ACCUMULATION else inside
            own += (one,)
    return nodes, inside or leaves or nodes


def is_custom(node: Any) -> bool:
    """Whether ``node`` belongs to a ``torch.autograd.Function``."""
    return isinstance(node, BackwardCFunction)


def has_custom_node(nodes: Sequence[Any], oldest: int) -> bool:
    """Whether ``nodes``, or nodes before them not older than the sequence number ``oldest``, have a custom function.

    The numbers grow with every graph node that a thread makes; nodes of leaves have the largest.
    """
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() >= oldest:
            if is_custom(node):
                return True
            new = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= new
            waiting += new
    return False


newest_node: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""The sequence number that the next graph node of this thread will have; 0 if torch does not report it."""


_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _is_tracing: None)
_CHECKPOINT = "_checkpoint_hook."
_CALL = None if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") else unwrap(checkpoint).__code__


def current_checkpoint() -> Any:
    """An object that is the same for all that one call of a checkpoint runs, the outermost if they are nested; or None.

    A checkpoint that is not reentrant packs saved tensors with hooks of its own; inside a reentrant one it packs none.
    A reentrant one is a custom function, inside of which torch records no gradients of either mode: only its frame
    tells it from those inside it. Every other custom function that computes without a graph counts as one: it may
    recompute, too.
    """
    hooks: list[Any] = []  # the stack of saved-tensor hooks, which stays as it is
    while (top := _top_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    found = None
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        if found is None and getattr(pack, "__qualname__", "").startswith(_CHECKPOINT):
            found = pack
    if found is None and _CALL is not None:
        found = _outermost(_CALL)
    return _outermost(_APPLY) if found is None and is_recorded_later() else found


def _outermost(code: Any) -> Any:
    """The outermost frame of this thread that runs ``code``."""
    frame, found = sys._getframe(), None
    while frame is not None:
        if frame.f_code is code:
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return found


def is_recorded_later() -> bool:
    """Whether a custom function computes without a graph, which its backward may make by computing again."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def at_end_of_task(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running graph task ends, but not after an exception."""
    Variable._execution_engine.queue_callback(callback)


def hook_last(output: Any, hook: Callable[[Tensor], object]) -> None:
    """``output.register_hook(hook)`` for a hook that is never removed: without a handle, which takes most time."""
    if type(output) is not Tensor or output.grad_fn is None or getattr(output, "_backward_hooks", ()) is not None:
        output.register_hook(hook)
    else:
        hooks: Any = OrderedDict([(id(hook), hook)])
        output._backward_hooks = hooks
        output.grad_fn._register_hook_dict(output)


_ACCUMULATION: type = type(accumulate_node(torch.empty(0, requires_grad=True, device="cpu")))
