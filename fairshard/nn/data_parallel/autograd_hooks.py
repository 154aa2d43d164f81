"""The only file that touches autograd's private API.

What is used, and what stands in for it where torch lacks it:

- ``torch._C._will_engine_execute_node`` (torch >= 2.1): which leaves the running backward will reach. Without it
  every leaf counts as reached, so that a unit with an unused one is finished at the end of the backward: later,
  with the same result (``tests/nn/data_parallel/test_autograd_hooks.py`` compares the two).
- ``torch._C._current_graph_task_id``: tells one backward from another, and from none (-1).
- ``Variable._execution_engine.queue_callback``: a call at the end of the running graph task, which holds what it calls
  until it is over, well or not.
- ``Tensor._backward_hooks``: a dictionary of hooks, called in the order in which they are kept. Where torch keeps them
  elsewhere a hook is called last: a unit's memory is given back a moment later.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

NO_BACKWARD = -1

_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
current_task: Callable[[], int] = torch._C._current_graph_task_id


def accumulate_node(leaf: Tensor) -> Any:
    """The graph node that adds to ``leaf.grad``; it is the same for as long as someone holds it."""
    with torch.inference_mode(False), torch.enable_grad():
        grad_fn = leaf.view_as(leaf).grad_fn
    assert grad_fn is not None
    return grad_fn.next_functions[0][0]


def num_reached(nodes: Sequence[Any]) -> int:
    """How many of ``nodes`` the running graph task executes, those it has executed included.

    0 inside ``torch.autograd.grad``, which hands gradients out instead of accumulating them.
    """
    if _will_execute is None:
        return len(nodes)
    try:
        return sum(map(_will_execute, nodes))
    except RuntimeError:  # raised for leaves that autograd.grad() captures
        return 0


def at_end_of_task(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running graph task ends well; never after an exception."""
    Variable._execution_engine.queue_callback(callback)


class AlwaysAtEnd:
    """Calls ``callback`` when the running graph task is over, also if it raised, once or several times.

    The engine drops its callbacks with the task, whatever has become of that.
    """

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        at_end_of_task(self)

    def __call__(self) -> None:
        """The task has ended well."""
        self._callback()

    def __del__(self) -> None:
        self._callback()


def hook_first(tensor: Tensor, hook: Callable[[Tensor], object]) -> None:
    """``tensor.register_hook(hook)``, to be called before the hooks that are there already."""
    handle = tensor.register_hook(hook)
    hooks: dict[int, Any] = getattr(tensor, "_backward_hooks", None) or {}
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def input_node(tensor: Tensor) -> Any:
    """The graph node that receives the gradient of ``tensor``, which requires grad."""
    return tensor.grad_fn if tensor.grad_fn is not None else accumulate_node(tensor)
