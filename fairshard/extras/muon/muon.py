"""Muon over shards: matrices that are cut among ranks are orthogonalised whole, each on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from fairshard.errors import ShardOptimizerError
from fairshard.extras.muon.matrix_exchange import Block, MatrixExchange, blocks_of
from fairshard.extras.muon.newton_schulz import DEFAULT_COEFFICIENTS, orthogonalized
from fairshard.extras.muon.own_part import OwnPart, layout_of, own_parts
from fairshard.state.optim_params import is_matrix
from fairshard.utils.collectives import Communicator
from fairshard.utils.keywords import named_keywords

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Optimizer):
    """``torch.optim.Muon`` for sharded models: the weights that it computes in one process, bit for bit.

    >>> import torch
    >>> from fairshard.nn import fully_shard
    >>> from fairshard.optim import Muon
    >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    >>> model = fully_shard(model)
    >>> embed, hidden, head = (list(layer.parameters()) for layer in model)
    >>> groups = [{"params": hidden}, {"params": embed + head, "use_muon": False, "lr": 1e-3}]
    >>> optimizer = Muon(groups, lr=0.02, adamw_lr_ratio=0.05)
    >>> model(torch.arange(8)).sum().backward()
    >>> optimizer.step()

    ``params`` are those of `fully_shard`, of the wrapper in any layout, or plain tensors. What is a matrix is decided
    by the *original* shape, also inside a flat shard:

    - two dimensions: a matrix, orthogonalised by Newton-Schulz in bf16;
    - three dimensions ``[e, m, n]``: a stack of ``e`` matrices (experts), each orthogonalised by itself;
    - any other number, and everything in a param group with ``use_muon=False``: AdamW, with the group's
      ``weight_decay``, ``adamw_betas`` and ``adamw_eps``. Its rate is the group's ``lr`` with ``use_muon=False``, and
      ``lr * adamw_lr_ratio`` for what is no matrix in any other group, so that schedulers of ``lr`` change both.

    Embeddings and output heads have two dimensions: put them, and weights of ``Conv1d``, in a group with
    ``use_muon=False``.

    `step` is **collective** if a matrix is cut among ranks: one small message, by which ranks agree on the gradients
    that exist, and two all-to-alls of 2 bytes an element: to an owner for each matrix, balanced over the ranks longest
    first, and back. Momentum stays on the shards. Matrices that a rank has whole are computed there; without any other,
    only the first step sends one message, and none does if all are placed by `Owned`. Newton-Schulz runs on the device
    that computes; its bits depend on the number of threads.

    The same bits as torch's for fp32 and fp16 parameters. For bf16 ones, torch rounds the last elements of a tensor
    differently, which a part of it does not show; and with ``nesterov=False`` torch (2.13) overwrites their momentum by
    its normalised value, which this class does not. A flat shard (without ``use_orig_params``) has one gradient:
    parameters of it that had no part in the loss are stepped with zeros. If it has matrices and others, it keeps the
    state of both for all its elements.

    Args:
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            ``torch.optim.Muon``; ``lr`` may be a tensor of one element.
        use_muon: False steps everything by AdamW.
        adamw_lr_ratio: AdamW's rate relative to ``lr``.
        adamw_betas, adamw_eps: as in ``torch.optim.AdamW``.

    Raises:
        ValueError: an argument is out of range.
        ShardOptimizerError: a parameter is a DTensor that fairshard has not sharded, a tensor subclass, or a matrix
            that tensor parallelism cuts as well.
    """

    finds_parts = True
    """Optimizers with this find the original parameters of shards themselves: they are allowed on all shards."""

    @named_keywords("Muon")
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = DEFAULT_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        adamw_lr_ratio: float = 1.0,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"`params` must be parameters or param groups, but is a {type(params).__name__}. Pass "
                "`model.parameters()`."
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "adamw_lr_ratio": adamw_lr_ratio,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        self._plan: _Plan | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, whose options are those of the constructor."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None
        for group in self.param_groups:  # those that torch's Muon has saved lack ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plan": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. **Collective** at first, and if a matrix is cut among ranks.

        Raises:
            RanksDisagreeError: on all ranks and before anything has changed, if ranks hold different matrices, or if a
                matrix has a gradient on some ranks only.
            RuntimeError: a gradient is sparse.
            ShardOptimizerError: loaded state is cut differently than its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plan is None or not self._plan.fits(self.param_groups):
            self._plan = _Plan(self.param_groups, self.state)
        plan = self._plan
        found = plan.agree()
        matrices = zip(self.param_groups, plan.matrices, strict=True)
        group_of = {part: group for group, parts in matrices for part in parts if part in found}
        updates = {part: self._direction(part, group) for part, group in group_of.items()}
        for exchange in plan.exchanges:
            exchange.start(updates)
        for group, parts in zip(self.param_groups, plan.others, strict=True):
            self._step_others(parts, group)
        for block in plan.here:
            if block.part in updates:
                block.apply(partial(_orthogonalized, group=group_of[block.part]), updates[block.part])
        for exchange in plan.exchanges:
            exchange.finish(updates, lambda matrix, part: _orthogonalized(matrix, group_of[part]))
        for part, update in updates.items():
            _apply(part, update, group_of[part])
        return loss

    def _direction(self, part: OwnPart, group: dict[str, Any]) -> Tensor:
        """Update the momentum of ``part``; returns this rank's elements of the matrices to orthogonalise, bf16."""
        buffer = part.own(self._kept(part.param, "momentum_buffer"))
        grad = part.grad()
        if grad is None:  # of a rank without elements
            grad = torch.zeros_like(buffer)
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(device=part.device, dtype=torch.bfloat16, copy=not group["nesterov"])

    def _kept(self, param: nn.Parameter, name: str) -> Tensor:
        """State ``name`` of ``param``, one value per element; zeros at first."""
        state = self.state[param]
        if name not in state:
            state[name] = torch.zeros_like(param.detach(), memory_format=torch.preserve_format)
        value: Tensor = state[name]
        return value

    def _step_others(self, parts: list[OwnPart], group: dict[str, Any]) -> None:
        """Step what is no matrix by AdamW."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        averages: list[Tensor] = []
        squares: list[Tensor] = []
        counts: dict[nn.Parameter, Tensor] = {}
        steps: list[Tensor] = []
        for part in parts:
            grad = part.grad()
            if grad is None:
                continue
            param = part.param
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            # Parameters of a flat shard share a count, which must be incremented once.
            steps.append(counts[param].clone() if param in counts else state["step"])
            counts.setdefault(param, state["step"].clone())
            params.append(part.own(param))
            grads.append(grad)
            averages.append(part.own(self._kept(param, "exp_avg")))
            squares.append(part.own(self._kept(param, "exp_avg_sq")))
            _note_written(param)
        if params:
            beta1, beta2 = group["adamw_betas"]
            adamw(
                params, grads, averages, squares, [], steps, amsgrad=False, maximize=False,
                lr=group["lr"] * (group["adamw_lr_ratio"] if group["use_muon"] else 1), beta1=beta1, beta2=beta2,
                weight_decay=group["weight_decay"], eps=group["adamw_eps"],
            )  # fmt: skip


class _Plan:
    """The work of a step, as long as the parameters and their layouts stay the same.

    Attributes:
        matrices, others: for each param group the parts that are matrices or stacks of them, and all other parts.
        here: matrices that this rank has whole.
        exchanges: one for each process group whose ranks cut matrices, in the same order on all ranks, larger ones
            later.
    """

    def __init__(self, param_groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]) -> None:
        every = [[part for param in group["params"] for part in own_parts(param)] for group in param_groups]
        self._key = _key_of(param_groups)
        self._layouts = [part.layout for parts in every for part in parts]
        self._params = [param for group in param_groups for param in group["params"]]
        self._misplaced = _misplaced_state(self._params, state)
        self.matrices = [
            [part for part in parts if group["use_muon"] and is_matrix(part.shape)]
            for group, parts in zip(param_groups, every, strict=True)
        ]
        self.others = [
            [part for part in parts if not (group["use_muon"] and is_matrix(part.shape))]
            for group, parts in zip(param_groups, every, strict=True)
        ]
        blocks = {part: blocks_of(part) for parts in self.matrices for part in parts}
        self.here = [block for own in blocks.values() for block in own if block.holder == block.part.rank]
        self._cut = {part: part.comm for part, own in blocks.items() if any(block.is_cut for block in own)}
        together: dict[tuple[Communicator, torch.device], list[Block]] = {}
        for part in (part for parts in every for part in parts if len(part.spans) > 1):
            if part in self._cut or part.is_connected:
                assert part.comm is not None
                # Also matrices that one rank has whole: they are work for that rank.
                together.setdefault((part.comm, part.device), []).extend(blocks.get(part, ()))
        # Ranks without cut matrices agree once that they have none: others would wait. Owned ones are never cut.
        asked = [key for key, own in together.items() if not own or not all(block.part.is_owned for block in own)]
        asked.sort(key=_place_of)  # the same order on all ranks, in whatever order they list their parameters
        every_exchange = [MatrixExchange(comm, device, together[comm, device]) for comm, device in asked]
        self.exchanges = [exchange for exchange in every_exchange if exchange.has_cut]
        # A rank may make a plan alone, for example to load its own state: it must not ask again what is agreed.
        self._asked = [exchange for exchange in every_exchange if exchange.has_cut or not exchange.is_agreed]
        self._not_nested = _not_nested([exchange.comm for exchange in self._asked])

    def fits(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether the plan is the one of ``param_groups``."""
        return self._key == _key_of(param_groups)

    def agree(self) -> set[OwnPart]:
        """The matrices that have a gradient. **Collective** at first, and with `exchanges`; raises on all ranks."""
        error: Exception | None = self._misplaced or self._not_nested
        if any(param.grad is not None and param.grad.is_sparse for param in self._params):
            error = RuntimeError("Muon needs dense gradients, but one is sparse. Build the embedding without `sparse`.")
        found: set[OwnPart] = set()
        for exchange in self._asked:  # the largest last: it contains the others, and tells all their ranks of an error
            try:
                found |= exchange.agree(error)
            except (RuntimeError, ValueError, KeyError, TypeError) as refused:  # by all ranks of this group
                error = refused
        if error is not None:
            raise error
        self._asked = self.exchanges
        every = (part for parts in self.matrices for part in parts)
        return found | {part for part in every if part not in self._cut and part.has_grad}


def _misplaced_state(params: list[nn.Parameter], state: Mapping[Any, dict[str, Any]]) -> ShardOptimizerError | None:
    """An error that names the first state that is cut differently than its parameter, as another layout's is."""
    for param in params:
        for name, value in state.get(param, {}).items():
            if name != "step" and _placed(value) != _placed(param):
                shape, cut = _placed(value)
                parts = ", ".join(part.name for part in own_parts(param))
                return ShardOptimizerError(
                    f"State of an optimizer must be cut like its parameter, but `{name}` of {parts} is {shape}, cut by "
                    f"{cut}, and the parameter is {_placed(param)[0]}, cut by {_placed(param)[1]}. Load checkpoints by "
                    "`fairshard.checkpoint.load`, and the state of another layout through "
                    "`FullyShardedDataParallel.full_optim_state_dict` and `shard_full_optim_state_dict`."
                )
    return None


def _placed(value: Tensor) -> tuple[tuple[int, ...], Any]:
    return tuple(value.shape), value.placements if isinstance(value, DTensor) else None


def _place_of(asked: tuple[Communicator, torch.device]) -> tuple[int, list[int], str, str]:
    """The place of a process group among others, the same on all ranks; larger ones come later."""
    group = asked[0].group
    ranks = dist.get_process_group_ranks(group)
    return len(ranks), ranks, group.group_name, asked[1].type


def _not_nested(comms: list[Communicator]) -> ShardOptimizerError | None:
    """An error if the last of ``comms``, the largest, does not contain the ranks of the others.

    All ranks of all of them raise it: those of a group that is not contained pass it on.
    """
    ranks = [dist.get_process_group_ranks(comm.group) for comm in comms]
    outside = next((own for own in ranks if not set(own) <= set(ranks[-1])), None)
    if outside is None:
        return None
    return ShardOptimizerError(
        f"Of the process groups that cut the matrices of a Muon, one must contain the others, but ranks {outside} and "
        f"ranks {ranks[-1]} do not contain each other. Build a Muon for the matrices of each group."
    )


def _key_of(param_groups: list[dict[str, Any]]) -> list[Any]:
    """The inputs of a `_Plan`; the plan keeps the objects alive that are compared by their ids."""
    return [
        (group["use_muon"], [(id(param), id(layout_of(param))) for param in group["params"]]) for group in param_groups
    ]


def _orthogonalized(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    return orthogonalized(matrix, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])


def _apply(part: OwnPart, update: Tensor, group: dict[str, Any]) -> None:
    """Decay this rank's elements of ``part``, and subtract ``update``."""
    own = part.own(part.param)
    if not own.numel():
        return
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.dim():
        lr = lr.squeeze()
    rate = lr * _adjustment(group["adjust_lr_fn"], part.shape)
    own.mul_(1 - lr * group["weight_decay"])
    update = update.to(own.device)
    if own.dtype == torch.bfloat16 and update.shape != part.shape:
        # torch rounds the rate to bf16, and in the last elements of a tensor, but not of a part of it, the product too.
        rounded = torch.tensor(float(rate), dtype=own.dtype, device="cpu").item()
        own.copy_(own.float().add_(update, alpha=-rounded))
    else:
        own.add_(update, alpha=-rate)
    _note_written(part.param)


def _adjustment(name: str | None, shape: torch.Size) -> float:
    """Factor of the learning rate for a matrix of ``shape``, or for each of a stack; as in torch's Muon."""
    rows, columns = shape[-2:]
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _note_written(param: nn.Parameter) -> None:
    """Count a write to the elements of ``param`` that its version counter has not seen."""
    if isinstance(param, DTensor):
        increment_version(param)


def _check_group(group: dict[str, Any]) -> None:
    """Raise if a param group has options out of range, or parameters that cannot be stepped."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"`lr` must have one element if it is a tensor, but has shape {tuple(lr.shape)}.")
    for name in ("lr", "momentum", "weight_decay", "adamw_lr_ratio", "adamw_eps"):
        if not group[name] >= 0.0:  # also refuses NaN
            raise ValueError(f"`{name}` must not be negative, but is {group[name]}.")
    if not all(0.0 <= beta < 1.0 for beta in group["adamw_betas"]):
        raise ValueError(f"`adamw_betas` must be in [0, 1), but are {group['adamw_betas']}.")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(f"`adjust_lr_fn` must be one of {_ADJUSTMENTS}, but is {group['adjust_lr_fn']!r}.")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"`ns_coefficients` must be three numbers, but are {group['ns_coefficients']}.")
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"`ns_steps` must be from 0 to 99, but is {group['ns_steps']}.")
    for param in group["params"]:
        if param.is_complex():
            raise ValueError(f"Muon's parameters must be real, but one of shape {tuple(param.shape)} is {param.dtype}.")
        for part in own_parts(param):
            if part.is_part_of_dtensor and group["use_muon"] and is_matrix(part.shape):
                raise ShardOptimizerError(
                    f"Muon needs whole matrices, but {part.name} is also cut by tensor parallelism, of which this rank "
                    f"has {tuple(part.shape)}. Use torch.optim.Muon, which gathers DTensors, or put the parameter in a "
                    "param group with `use_muon=False`."
                )
