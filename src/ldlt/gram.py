"""The Gram matrix ``W^*W``, with half the work in its gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["gram"]


class _Gram(torch.autograd.Function):
    """``W^*W``: ``W̄ = W (Ḡ + Ḡ^*)`` is one product, where the rule of a product of two matrices takes two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return weight.mH @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return cast(Tensor, weight @ (grads[0] + grads[0].mH))


def gram(weight: Tensor) -> Tensor:
    """Return ``W^*W`` ``(..., n, n)`` of W ``(..., m, n)``, real or complex.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.],
                [2., 4.]])
    """
    if torch.compiler.is_compiling():  # the compiler breaks its graph at functions with a gradient of their own
        return weight.mH @ weight
    return cast(Tensor, _Gram.apply(weight))
