"""Checks on the free parameters that the constructions of this package share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ldlt.errors import OptionError, ShapeError

__all__ = ["Alpha", "alpha_values", "check_chain", "check_multipliers"]

Alpha = float | Tensor | Sequence[float | Tensor]


def _visible() -> bool:
    """Whether values can be looked at: under ``vmap`` they cannot."""
    return not torch._C._are_functorch_transforms_active()


def alpha_values(alpha: Alpha, count: int, like: Tensor) -> list[Tensor]:
    """One scalar tensor for each free matrix, from one common number or one number each."""
    single = isinstance(alpha, (int, float)) or (isinstance(alpha, Tensor) and alpha.dim() == 0)
    values = [alpha] * count if single else list(alpha)  # type: ignore[arg-type]
    if len(values) != count:
        raise ShapeError(f"{count} values of alpha are needed (skip, hidden maps, output), not {len(values)}")
    tensors = [torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values]
    for k, value in enumerate(tensors):
        if not _visible():
            continue
        positive = bool(value.detach() > 0) or (k == count - 1 and bool(value.detach() == 0))
        if value.dim() != 0 or not positive or not bool(torch.isfinite(value.detach())):
            raise OptionError(f"alpha[{k}] = {value.tolist()} is not a positive finite number")
    return tensors


def check_chain(W_A: Tensor, W: Sequence[Tensor], W_B: Tensor) -> None:
    """Refuse free matrices that do not form a residual block."""
    if not W:
        raise ShapeError("a residual block needs at least one hidden map")
    if any(matrix.dim() != 2 for matrix in (W_A, *W, W_B)):
        raise ShapeError("free parameters must be matrices")
    widths = [W_A.shape[1], *(matrix.shape[0] for matrix in W)]
    if [matrix.shape[1] for matrix in (*W, W_B)] != widths or W_B.shape[0] != W_A.shape[0]:
        shapes = [tuple(matrix.shape) for matrix in (W_A, *W, W_B)]
        raise ShapeError(f"free matrices of shapes {shapes} do not form a residual block")


def check_multipliers(W: Sequence[Tensor], multipliers: Sequence[Tensor]) -> None:
    """Refuse multipliers that are not one positive vector for each hidden layer."""
    for j, (weight, diagonal) in enumerate(zip(W, multipliers, strict=True)):
        if diagonal.shape != (weight.shape[0],):
            raise ShapeError(f"multipliers[{j}] has shape {tuple(diagonal.shape)}, not {(weight.shape[0],)}")
        values = diagonal.detach()
        if _visible() and not bool((torch.isfinite(values) & (values > 0)).all()):
            raise OptionError(f"multipliers[{j}] has an entry that is not positive and finite")
