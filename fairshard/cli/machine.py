"""The least that a run of ``fairshard train`` needs of this machine, checked before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from fairshard.utils.host import free_host_memory, visible_cpus

MAX_PER_CPU = 4
MIN_MAX = 64
"""Ranks on a host, and threads of a rank: 64, or 4 per CPU if that is more."""

RANK_NBYTES = 200 * 10**6
"""Bytes of Python with torch."""

_FLOAT, _INDEX = 4, 8
_KEPT_PER_BLOCK = 12  # times the width: what backward needs of a token in a block, at least


@dataclass(frozen=True)
class Sizes:
    """The causes of a rank's memory: the model, its batch, and whether the host holds them."""

    layers: int
    dim: int
    context: int
    vocab_size: int
    batch_size: int
    is_on_cpu: bool


def max_processes() -> int:
    """The largest sensible number of ranks here, and of threads of a rank."""
    return max(MIN_MAX, MAX_PER_CPU * visible_cpus())


def num_parameters(layers: int, dim: int, context: int, vocab_size: int) -> int:
    """Elements of the GPT of ``fairshard train``."""
    return (2 * vocab_size + context + 2) * dim + layers * (12 * dim**2 + 4 * dim)


def least_nbytes(sizes: Sizes, world_size: int, text_nbytes: int) -> int:
    """Bytes of host memory that a rank takes at least: it builds the whole model before that is sharded.

    Then it has its part of the weights and gradients, and the activations of ``batch_size`` sequences. Every rank reads
    ``text_nbytes``.
    """
    weights = _FLOAT * num_parameters(sizes.layers, sizes.dim, sizes.context, sizes.vocab_size)
    tokens = sizes.batch_size * sizes.context
    kept = tokens * (_INDEX + _FLOAT * (sizes.layers * _KEPT_PER_BLOCK * sizes.dim + 2 * sizes.vocab_size))
    passes = kept + 2 * weights // world_size if sizes.is_on_cpu else 0
    return RANK_NBYTES + text_nbytes + max(weights, passes)


def shortage(needed: int) -> str | None:
    """The error text if the machine has less free memory than ``needed`` bytes; None if it has enough."""
    try:
        free = free_host_memory()
    except (OSError, KeyError):  # not Linux
        return None
    if needed <= free:
        return None
    return f"{_gb(needed)} GB of memory here at least, but {_gb(free)} GB are free"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 10**9:,.1f}" if nbytes < 10**15 else f"{nbytes // 10**9:,}"
