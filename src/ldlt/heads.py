"""Output maps ``U`` (k, n): the last contraction of the rule, where norm one is allowed."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ldlt.contraction import Contraction
from ldlt.errors import InfeasibleError, OptionError
from ldlt.grid import Cells, row_norms
from ldlt.scalars import smallest
from ldlt.triangular import gram_cholesky

__all__ = ["HEADS", "Head", "get_head"]


class Head(ABC):
    """Free matrix to output contraction."""

    name: str
    joint: bool  # whether ‖U‖ ≤ 1, so that the whole map has the declared bound

    def __init__(self, contraction: Contraction) -> None:
        self.contraction = contraction

    def initial(self, rows: int, alpha: float) -> dict[str, Tensor]:
        """Free parameters beside the matrix, by role."""
        return {}

    def free_gain(self, gain: float, alpha: float) -> float:
        """Norm of the free matrix at the start."""
        return gain

    @abstractmethod
    def __call__(self, weight: Tensor, extra: dict[str, Tensor], cells: Cells = None) -> Tensor:
        """``U`` (k, n) for a free matrix (k, n); on a grid (``cells``) one of each per frequency."""

    def settle(self, matrix: Tensor, cells: Cells = None) -> Tensor:
        """``U`` after it was softly projected once more."""
        return matrix

    @abstractmethod
    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Free parameters that give this ``U``."""


class Joint(Head):
    """``‖U‖ < 1`` by the network's contraction: the whole map has the declared bound."""

    name, joint = "joint", True

    def initial(self, rows: int, alpha: float) -> dict[str, Tensor]:
        return self.contraction.initial(rows, alpha)

    def free_gain(self, gain: float, alpha: float) -> float:
        return self.contraction.free_gain(gain, alpha)

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], cells: Cells = None) -> Tensor:
        return self.contraction(weight, extra, straight=True).matrix

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.contraction.invert(matrix, extra)


class Orthogonal(Head):
    """Orthonormal rows (columns, if there are more outputs than directions): the matrix inequality is tight.

    ``U = M^{-1} W`` with ``MM^* = αI + WW^*``, α a few rounding units of ``‖W‖²``: rows of W that depend on each other
    are no special case.
    """

    name, joint = "orthogonal", True

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], cells: Cells = None) -> Tensor:
        tall = weight.shape[-2] > weight.shape[-1]
        least = weight.real.new_tensor(smallest(self.contraction.unit))
        found = gram_cholesky(weight.mH if tall else weight, least, self.contraction.unit).matrix
        return found.mH if tall else found

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        _require(self(matrix, extra), matrix, "orthonormal rows")
        return matrix, extra


class Rows(Head):
    """Every row has norm one: each output is ℓ-Lipschitz, each pair has its own constant, the map has ``ℓ‖U‖``."""

    name, joint = "rows", False

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], cells: Cells = None) -> Tensor:
        # A row of zeros stays zero: constant outputs are Lipschitz with any bound.
        return weight / row_norms(weight, cells, smallest(self.contraction.unit) ** 2)[:, None]

    def settle(self, matrix: Tensor, cells: Cells = None) -> Tensor:
        # A row keeps norm one, but one that was projected to almost nothing is not blown up.
        return matrix / row_norms(matrix, cells, self.contraction.unit)[:, None]

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        _require(self(matrix, extra), matrix, "rows of norm one")
        return matrix, extra


def _require(projected: Tensor, matrix: Tensor, what: str) -> None:
    tolerance = 64 * torch.finfo(matrix.dtype).eps * max(matrix.shape)
    if float((projected - matrix).abs().max()) > tolerance:
        raise InfeasibleError(f"the normalised output map does not have {what}; use head='joint'")


HEADS: dict[str, type[Head]] = {h.name: h for h in (Joint, Orthogonal, Rows)}


def get_head(name: str, contraction: Contraction) -> Head:
    """The head of that name, or :class:`OptionError`."""
    if not isinstance(name, str) or name not in HEADS:
        raise OptionError(f"head must be one of {', '.join(map(repr, HEADS))}, not {name!r}")
    return HEADS[name](contraction)
