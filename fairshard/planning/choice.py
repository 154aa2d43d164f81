"""Choose the modules of a tree that a policy wraps; modules and parameters may be registered in several places."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fairshard.engine.tree import unit_of
from fairshard.planning.policies import call_policy
from fairshard.setup.origin import NOTHING, Ignored
from fairshard.utils.names import join
from fairshard.utils.user_line import level_of_user

# Reads the weights of its children without calling them, so no child can be a unit.
_READS_CHILDREN = (nn.MultiheadAttention,)


class ModuleTree:
    """The modules below ``root`` that are not ``ignored``, and the places of modules and parameters.

    ``fqns`` has every module once, inner ones before outer ones. ``places[m]`` is the number of paths from the root
    to ``m``; ``below[m][p]`` is the number of paths from ``m`` to the parameter ``p``.
    """

    def __init__(self, root: nn.Module, ignored: Ignored = NOTHING) -> None:
        self.root = root
        self.ignored = set(ignored.modules)
        self.ignored_params = set(ignored.params)
        self.fqns: dict[nn.Module, str] = {}
        self.below: dict[nn.Module, Counter[nn.Parameter]] = {}
        self._holders: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._descend(root, "", set())
        self.places = Counter({root: 1})
        for module in reversed(self.fqns):
            for child in self.children(module):
                self.places[child] += self.places[module]

    def _descend(self, module: nn.Module, fqn: str, entered: set[nn.Module]) -> None:
        entered.add(module)
        params = [param for param in module._parameters.values() if param is not None]
        below = Counter(param for param in params if param not in self.ignored_params)
        for name, child in module._modules.items():
            if child is None or child in self.ignored:
                continue
            self._holders.setdefault(child, []).append((module, name))
            if child not in entered:
                self._descend(child, join(fqn, name), entered)
            below.update(self.below.get(child, ()))
        self.below[module] = below
        self.fqns[module] = fqn

    def children(self, module: nn.Module) -> list[nn.Module]:
        """Direct children of ``module``, in order; a child under two names appears twice."""
        return [child for child in module._modules.values() if child is not None and child not in self.ignored]

    def holds_all_of(self, module: nn.Module, param: nn.Parameter) -> bool:
        """Whether every place of ``param`` is below ``module``."""
        return self.places[module] * self.below[module][param] == self.below[self.root][param]

    def replace(self, module: nn.Module, by: nn.Module) -> None:
        """Register ``by`` in every place of ``module``."""
        for holder, name in self._holders[module]:
            holder._modules[name] = by

    def find_unit(self, also: type[nn.Module] | None = None) -> str | None:
        """The fqn of a module that is already a unit or an instance of ``also``; None if not found."""
        for module, fqn in self.fqns.items():
            if unit_of(module) is not None or (also is not None and isinstance(module, also)):
                return fqn or "the module itself"
        return None


@dataclass(frozen=True)
class Choice:
    """A module to wrap; ``overrides`` are arguments that differ from the outer wrapper's."""

    module: nn.Module
    overrides: dict[str, Any]


class Chooser:
    """Asks a policy about the modules of a tree, inner ones first.

    Some modules cannot be units and are never chosen: those without parameters, without a ``forward``
    (``ModuleList``), children of ``MultiheadAttention``, and modules that share a parameter with modules outside;
    that parameter belongs to the unit around all of them.

    Raises:
        TypeError: ``policy`` is not a policy.
    """

    def __init__(self, tree: ModuleTree, policy: Any) -> None:
        self._tree = tree
        self._looks_inside, self._overrides = _questions(tree, policy)
        self._chosen: dict[nn.Module, dict[str, Any]] = {}
        self._asked: set[nn.Module] = set()
        self._taken: set[nn.Parameter] = set()
        self._tied: list[str] = []

    def choose(self, include_root: bool = False) -> list[Choice]:
        """The modules to wrap, inner ones first; with ``include_root`` the policy is also asked about the root."""
        self._ask(self._tree.root, include_root)
        if self._tied:
            warnings.warn(
                f"A parameter belongs to one unit, but {', '.join(self._tied)} share one with other modules. They are "
                "not wrapped on their own; their parameters go to the unit around them.",
                stacklevel=level_of_user(),
            )
        return [Choice(module, self._chosen[module]) for module in self._tree.fqns if module in self._chosen]

    def take(self, classes: Collection[type[nn.Module]], overrides: Callable[[nn.Module], dict[str, Any]]) -> list[str]:
        """Choose every instance of ``classes`` with parameters, before `choose`; returns their fqns."""
        fqns = []
        for module, fqn in self._tree.fqns.items():
            if module is not self._tree.root and isinstance(module, tuple(classes)) and self._can_be_unit(module):
                self._choose(module, overrides(module))
                fqns.append(fqn)
        return fqns

    def _ask(self, module: nn.Module, may_choose: bool) -> None:
        self._asked.add(module)
        is_root = module is self._tree.root
        if module in self._chosen or not self._looks_inside(module, _numel(self._tree.below[module]), is_root):
            return
        if not isinstance(module, _READS_CHILDREN):
            for child in self._tree.children(module):
                if child not in self._asked:
                    self._ask(child, may_choose=True)
        if may_choose:
            overrides = self._overrides(module, _numel(self._left(module)), is_root)
            if overrides is not None and self._can_be_unit(module):
                self._choose(module, overrides)

    def _can_be_unit(self, module: nn.Module) -> bool:
        has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
        if not self._tree.below[module] or not has_forward:
            return False
        if all(self._tree.holds_all_of(module, param) for param in self._left(module)):
            return True
        self._tied.append(f"`{self._tree.fqns[module]}`")
        return False

    def _choose(self, module: nn.Module, overrides: dict[str, Any]) -> None:
        self._chosen[module] = overrides
        self._taken |= self._left(module)

    def _left(self, module: nn.Module) -> set[nn.Parameter]:
        return self._tree.below[module].keys() - self._taken


def _questions(
    tree: ModuleTree, policy: Any
) -> tuple[Callable[[nn.Module, int, bool], bool], Callable[[nn.Module, int, bool], dict[str, Any] | None]]:
    """Two functions that ask ``policy`` whether to look inside a module, and for its overrides (None: do not wrap)."""
    if hasattr(policy, "_run_policy"):  # torch.distributed.fsdp.wrap's objects
        found = policy._run_policy(tree.root, tree.ignored, {})
        return lambda *_: True, lambda module, *_: found.get(module)
    if hasattr(policy, "overrides"):
        return lambda *_: True, lambda module, *_: policy.overrides(module)
    if not callable(policy):
        raise TypeError(
            f"A policy must be a function, a ModuleWrapPolicy or a CustomPolicy, but is {policy!r}. For classes of "
            "modules pass ModuleWrapPolicy({Block})."
        )

    def ask(module: nn.Module, recurse: bool, numel: int, is_root: bool) -> bool:
        return call_policy(policy, module, recurse, numel, is_root)

    return (
        lambda module, numel, is_root: ask(module, True, numel, is_root),
        lambda module, numel, is_root: {} if ask(module, False, numel, is_root) else None,
    )


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)
