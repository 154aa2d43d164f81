"""``--factory package.module:function``: a model and a loss of your own.

The function takes no arguments. It returns the model, or the model and its loss::

    def build() -> nn.Module | tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]: ...

- The **model** is a plain module, not sharded, on the CPU, with the same weights on every rank: the function is called
  with torch's generator set to ``--seed``. Its weights should be fp32; ``--precision`` says what computes.
- The **loss** is called as ``loss(model, tokens)`` with the sharded model and this rank's part of the batch, int64
  ``[rows, context + 1]`` on the model's device: bytes of ``--data``, or ids of ``--tokens``. It returns the mean loss
  over the rows as a 0-d tensor that has a gradient. It calls the model, not methods of it. Without a loss, the model
  maps ``[rows, context]`` to logits ``[rows, context, vocabulary]``, or to an object with such ``logits``, and the loss
  is the cross-entropy of each next token.
- Modules of one class in a ``ModuleList`` or ``Sequential`` become units; ``--policy`` chooses others.

``fairshard plan --factory`` calls the same function on torch's meta device.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fairshard.cli.option_error import OptionError

Loss = Callable[[nn.Module, Tensor], Tensor]
"""A loss of the model and the tokens ``[rows, context + 1]``."""


def imported(text: str) -> Callable[[], Any]:
    """The function ``package.module:function``; modules in the current folder are found.

    Raises:
        OptionError: there is no such function.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise OptionError(f"--factory must be PKG.MOD:FN, but is {text}.")
    sys.path.insert(0, "")  # as with `python -m`: finds the user's own modules
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise OptionError(f"--factory {text} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(function):
        raise OptionError(f"--factory {text} must be a function, but is {type(function).__name__}.")
    made: Callable[[], Any] = function
    return made


def parts_of(text: str, made: object) -> tuple[nn.Module, Loss | None]:
    """The model and the loss that the function ``text`` returned as ``made``.

    Raises:
        OptionError: it returned something else.
    """
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise OptionError(f"--factory {text} must return a module, but returned {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise OptionError(f"--factory {text} must return a function as its loss, but returned {type(loss).__name__}.")
    return model, loss
