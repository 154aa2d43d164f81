"""Orthogonalise matrices by Newton-Schulz iterations in bf16, with the bits of torch's Muon."""

from __future__ import annotations

import torch
from torch import Tensor

DEFAULT_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic whose slope at zero is as large as it can be."""


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Nearly ``U V^T`` for ``matrix`` ``[m, n]`` with the singular vectors ``U`` and ``V``; bf16, new memory.

    ``matrix`` is bf16 and is not changed. A stack ``[e, m, n]`` is orthogonalised matrix by matrix. The same bits as
    ``torch.optim.Muon`` at the same number of threads, because the operators and their order are the same.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/; ``torch/optim/_muon.py`` of torch 2.13.
    """
    if matrix.dim() > 2:
        return torch.stack([orthogonalized(each, coefficients, num_steps, eps) for each in matrix])
    if not matrix.numel():
        return matrix.clone()
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    ortho = matrix.T if is_tall else matrix
    ortho = ortho.div(ortho.norm().clamp(min=eps))  # the spectral norm is at most 1
    for _ in range(num_steps):
        gram = ortho @ ortho.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        ortho = torch.addmm(ortho, polynomial, ortho, beta=a)
    return ortho.T if is_tall else ortho


def num_flops(num_matrices: int, rows: int, columns: int) -> int:
    """Floating-point operations of one iteration on ``num_matrices`` matrices ``[rows, columns]``."""
    short, long = sorted((rows, columns))
    return num_matrices * 2 * short * short * (2 * long + short)
