"""AdamW on parameters that are the rows of one matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused

__all__ = ["adamw"]


def adamw(
    flat: Tensor, grad: Tensor, first: Tensor, second: Tensor, rate: Tensor, step: int, weight_decay: float
) -> None:
    """One step of AdamW (Loshchilov & Hutter, 2019) on all rows in place, each with its own step size.

    Computes what ``torch.optim.AdamW`` does with β = (0.9, 0.999), ε = 1e-8; that one has a single step size per
    group of tensors, and n groups cost n times the Python.

    Args:
        flat: Parameters (n, P).
        grad: Gradients (n, P); overwritten.
        first: Moving average of the gradient (n, P).
        second: Moving average of its square (n, P).
        rate: Step sizes (n, 1).
        step: Number of this step, from 1.
        weight_decay: λ.
    """
    if len(flat) == 1:  # one wide network: the library's kernel passes over the memory once
        rates: dict[str, Any] = {"lr": float(rate), "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        before = [torch.tensor(float(step - 1))]
        fused(
            [flat],
            [grad],
            [first],
            [second],
            [],
            before,
            fused=True,
            amsgrad=False,
            weight_decay=weight_decay,
            maximize=False,
            **rates,
        )
        return
    first.lerp_(grad, 1 - 0.9)
    second.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
    torch.sqrt(second, out=grad)
    grad.mul_((1 - 0.999**step) ** -0.5).add_(1e-8)
    torch.div(first, grad, out=grad)
    flat.mul_(1 - rate * weight_decay)
    flat.addcmul_(grad, rate, value=-1 / (1 - 0.9**step))
