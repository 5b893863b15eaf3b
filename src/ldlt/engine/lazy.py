"""A weight in factored form: ``diag(rows) U F^{-1}``, applied to a batch without being multiplied out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from ldlt.engine.linalg import full_precision

__all__ = ["FactoredWeight"]


class FactoredWeight(Tensor):
    """A matrix (n, k) that ``F.linear`` applies factor by factor, and everything else sees multiplied out.

    When a batch has fewer samples than the layer has neurons, solving with ``F`` for the batch is less work than
    forming the matrix. The user's own ``Linear`` layers get this instead of a plain weight.

    Args:
        shape: (n, k).
        divide: ``x -> F^{-1} x`` for columns x (k, batch).
        product: ``x -> x U^*`` for rows x (batch, k).
        dense: The explicit matrix, when it is asked for.
        rows: Scaling of the rows (n,).
    """

    divide_by: Callable[[Tensor], Tensor]
    product: Callable[[Tensor], Tensor]
    dense: Callable[[], Tensor]
    rows: Tensor

    def __new__(  # noqa: D102
        cls,
        shape: torch.Size,
        divide: Callable[[Tensor], Tensor],
        product: Callable[[Tensor], Tensor],
        dense: Callable[[], Tensor],
        rows: Tensor,
    ) -> FactoredWeight:
        self: FactoredWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=rows.dtype, device=rows.device, requires_grad=False
        )
        self.divide_by, self.product, self.dense, self.rows = divide, product, dense, rows
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def multiplied_out(self) -> Tensor:
        """The explicit matrix; factorisations need the full precision, also where autocast is on."""
        with full_precision(self.rows):
            return self.dense()

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x F^{-*} U^* diag(rows) + bias`` for x (batch, k), in the precision of the weight."""
        with full_precision(self.rows):
            y = self.product(self.divide_by(x.to(self.rows.dtype).mT).mT)
            return y * self.rows if bias is None else torch.addcmul(bias, y, self.rows)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = dict(kwargs or {})
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | options
            x, weight = given["input"], given["weight"]
            if isinstance(weight, FactoredWeight) and type(x) is Tensor and x.ndim == 2:
                return weight.apply_to(x, given.get("bias"))
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "stride", "is_floating_point"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        return cls.__torch_dispatch__(func, types, args, options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map(
            lambda a: a.multiplied_out() if isinstance(a, FactoredWeight) else a, (tuple(args), dict(kwargs or {}))
        )
        return func(*plain[0], **plain[1])
