"""A weight in factored form: ``diag(rows) U F^{-1}``, applied to a batch without being multiplied out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ldlt.engine.linalg import full_precision
from ldlt.weights import ActingWeight

Verb = Callable[..., Tensor]


class FactoredWeight(ActingWeight):
    """A matrix (n, k) that ``F.linear`` applies factor by factor.

    For a batch that is smaller than the layer, solving with ``F`` for the batch is less work than forming the matrix.

    Args:
        shape: (n, k).
        rows: Scaling of the rows (n,).
        divide: ``x -> F^{-1} x`` for columns x (k, batch).
        product: ``x -> x U^*`` for rows x (batch, k).
        dense: The explicit matrix, when it is asked for.
    """

    calls = frozenset({F.linear})

    def __new__(cls, shape: torch.Size, rows: Tensor, *_: Verb) -> FactoredWeight:  # noqa: D102
        return super().__new__(cls, shape, rows)  # type: ignore[return-value]

    def __init__(self, shape: torch.Size, rows: Tensor, divide: Verb, product: Verb, dense: Verb) -> None:
        super().__init__()
        self.rows, self.divide_by, self.product, self.dense = rows, divide, product, dense

    def multiplied_out(self) -> Tensor:  # noqa: D102
        with full_precision(self.rows):
            return self.dense()

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """``x F^{-*} U^* diag(rows) + bias`` for x (batch, k), in the precision of the weight."""
        if type(x) is not Tensor or x.ndim != 2:
            return None
        with full_precision(self.rows):
            y = self.product(self.divide_by(x.to(self.rows.dtype).mT).mT)
            return y * self.rows if bias is None else torch.addcmul(bias, y, self.rows)
