r"""Contractions: free matrices to matrices ``U`` of norm below one, with the root of what they leave over; and heads.

A contraction hands the rule (``ldlt.engine.rule``) the pair ``(U, K)`` with :math:`K^*K = (I - UU^*)^{-1}`, ``W`` and
``U`` (n, k), ``K`` (n, n). On a grid all of them are stacks of matrices, one per frequency, with the same α for all.

=============  =====================================================  ==============  ====================
contraction    ``U``                                                  ``K``           ``K U``
=============  =====================================================  ==============  ====================
``cholesky``   ``M^{-1} W``, ``M M' = αI + WW'``, M lower triangular  ``M/√α``        ``W/√α``
``symmetric``  ``M^{-1} W``, ``M = (αI + WW')^{1/2}``                 ``M/√α``        ``W/√α``
``cayley``     rows ``[U A]`` orthonormal by the Cayley transform     ``A^{-1}``      ``A^{-1} U``
=============  =====================================================  ==============  ====================

A head is the last contraction, of the output, where norm one is allowed. To add one of either, subclass
:class:`Contraction` or :class:`Head` and put it into :data:`CONTRACTIONS` or :data:`HEADS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ldlt.cayley import CayleyMap
from ldlt.check import choice
from ldlt.engine.linalg import SHARE, gram_cholesky, positive, smallest, unbounded
from ldlt.errors import InfeasibleError
from ldlt.images.grids import Cells, Layout, row_norms

Verb = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Square:
    """An invertible ``F = diag(scale) N^*`` (n, n), known through what one can do with it.

    Attributes:
        scale: (n,), or one number.
        root: Makes ``N``.
        over: ``x -> x N^{-*}``, x (m, n).
        under: ``x -> N^{-*} x``, x (n, m).
        soften: ``x -> x P``, x (m, n), with the soft projection on directions that are more than a floor (None: all).
        singular: Whether ``N`` may be infinite: it is then never asked for.
        identity: Whether ``N = I``.
    """

    scale: Tensor | float
    root: Callable[[], Tensor]
    over: Verb
    under: Verb
    soften: Verb | None = None
    singular: bool = False
    identity: bool = False

    @staticmethod
    def diagonal(layout: Layout, scale: Tensor) -> Square:
        """``N = I`` for features that lie on a grid like that."""
        one = lambda: layout.diagonal(torch.ones_like(scale))  # noqa: E731
        return Square(scale, one, lambda x: x, lambda x: x, identity=True)

    def times(self, scale: Tensor) -> Square:
        """``diag(scale) F``."""
        return replace(self, scale=scale * self.scale)

    def dense(self) -> Tensor:
        """``F^*`` (n, n)."""
        return self.root() * self.scale

    def right_divide(self, x: Tensor) -> Tensor:
        """``x F^{-1}``, x (m, n)."""
        return self.over(x) / self.scale

    def divide(self, x: Tensor) -> Tensor:
        """``F^{-1} x``, x (n, m)."""
        return self.under(x / (self.scale if isinstance(self.scale, float) else self.scale[..., None]))


class Contracted:
    """``(U, K)``, each of its parts made when it is asked for.

    Args:
        shape: Of ``U`` (n, k).
        make: Makes ``U``.
        root: ``K^*``.
        spread: ``y -> K U y``, y (k, m).
        product: ``x -> x U^*`` for rows x (batch, k), where there is a better way than the matrix.
    """

    def __init__(
        self, shape: torch.Size, make: Callable[[], Tensor], root: Square, spread: Verb, product: Verb | None = None
    ) -> None:
        self.shape, self.root, self.spread, self._make = shape, root, spread, make
        self.product = product or (lambda x: x @ self.matrix.mH)
        self._matrix: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """``U`` (n, k), norm below one; made once."""
        if self._matrix is None:
            self._matrix = self._make()
        return self._matrix


def gap(matrix: Tensor, strict: bool = False) -> Tensor:
    """Cholesky factor of ``I − UU^*``; where there is none NaN, or with ``strict`` :class:`InfeasibleError`."""
    eye = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    factor, info = torch.linalg.cholesky_ex(eye - matrix @ matrix.mH)
    if strict and (int(info.max()) != 0 or not bool(torch.isfinite(factor).all())):
        norm = float(torch.linalg.matrix_norm(matrix, 2).max())
        raise InfeasibleError(
            f"a map is not strictly feasible for these multipliers: its normalised form has norm {norm:.6g}, which "
            "must be below 1; raise the bound or change the multipliers"
        )
    return torch.where((info == 0)[..., None, None], factor, torch.nan)


def given(matrix: Tensor, lower: Tensor | None = None) -> Contracted:
    """``(U, L^{-1})`` for a given ``U``, ``LL^* = I − UU^*``; NaN if its norm is not below 1."""
    lower = gap(matrix) if lower is None else lower

    def dense() -> Tensor:
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)

    root = Square(1.0, dense, lambda x: x @ lower.mH, lambda x: lower.mH @ x)  # dividing by it is a product
    spread = lambda y: torch.linalg.solve_triangular(lower, matrix @ y, upper=False)  # noqa: E731
    return Contracted(matrix.shape, lambda: matrix, root, spread)


class Contraction(ABC):
    """A smooth map from free parameters onto the matrices of norm below one.

    Args:
        unit: Rounding unit of the stored parameters, for safeguards, whatever precision the map is evaluated in.
    """

    name: str

    def __init__(self, unit: float = torch.finfo(torch.float64).eps) -> None:
        self.unit = unit

    @abstractmethod
    def initial(self, rows: int, alpha: float) -> dict[str, Tensor]:
        """The free parameters beside ``W`` at their start, by role."""

    @abstractmethod
    def free_gain(self, gain: float, alpha: float) -> float:
        """The norm of ``W`` for which the norm of ``U`` is ``gain/√(1 + gain²)``."""

    @abstractmethod
    def __call__(self, weight: Tensor, extra: dict[str, Tensor], straight: bool = False) -> Contracted:
        """``W`` (n, k) and the other free parameters to ``(U, K)``; ``straight``: ``K`` is only divided by."""

    @abstractmethod
    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Free parameters that give this ``U``; raises :class:`InfeasibleError` if its norm is not below one."""


class Cholesky(Contraction):
    """One Gram matrix, one Cholesky factorisation, one triangular solve."""

    name = "cholesky"

    def initial(self, rows: int, alpha: float) -> dict[str, Tensor]:
        return {"log_alpha": unbounded(math.log(alpha))}

    def free_gain(self, gain: float, alpha: float) -> float:
        return gain * math.sqrt(alpha)

    @property
    def share(self) -> float:  # of ``‖W‖²_F`` that is added to α
        return SHARE * self.unit

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], straight: bool = False) -> Contracted:
        found = gram_cholesky(weight, positive(extra["log_alpha"]), self.unit)
        scale, lower = found.alpha.sqrt(), found.factor
        root = Square(1 / scale, lower.dense, lambda x: lower.solve(x.mH).mH, lower.solve_adjoint)
        return Contracted(weight.shape, lambda: found.matrix, root, lambda y: (weight @ y) / scale, found.apply)

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # I − UU^* = α M^{-1} M^{-*}: with LL^* = I − UU^*, M = √α L^{-1} and W = M U, or W = (LL^*)^{-1/2} √α U.
        weight = self._unit_root(matrix, gap(matrix, strict=True))
        share = self.share * float(weight.abs().square().sum())  # the α in use is larger than the one that is stored
        if share >= 1:
            raise InfeasibleError("the weights are too close to the boundary of the feasible set for this precision")
        return weight * (positive(extra["log_alpha"]) / (1 - share)).sqrt(), extra

    def _unit_root(self, matrix: Tensor, lower: Tensor) -> Tensor:
        """``W`` for α = 1."""
        return torch.linalg.solve_triangular(lower, matrix, upper=False)


class _Sqrt(torch.autograd.Function):
    """``A -> (A^{1/2}, A^{-1/2})``, A ≻ 0; ``S = d(A^{1/2})`` from ``MS + SM = dA``, safe for equal eigenvalues."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        # Rounding must not make an eigenvalue negative; A has none below that share of the largest.
        root = torch.maximum(values, torch.finfo(values.dtype).eps * values[..., -1:]).sqrt()
        half = (vectors * root[..., None, :].to(vectors.dtype)) @ vectors.mH
        inverse = (vectors / root[..., None, :].to(vectors.dtype)) @ vectors.mH
        return half, inverse, root, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        _, inverse, root, vectors = output
        ctx.mark_non_differentiable(root, vectors)
        ctx.save_for_backward(inverse, root, vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        inverse, root, vectors = ctx.saved_tensors
        total = grads[0] - inverse @ grads[1] @ inverse
        total = (total + total.mH) / 2
        inner = vectors.mH @ total @ vectors / (root[..., :, None] + root[..., None, :])
        return vectors @ inner @ vectors.mH


class Symmetric(Cholesky):
    """The paper's symmetric square roots, by an eigendecomposition.

    The product of the inverse root with ``W`` is rounded by ``ε‖W‖/√α``, not backward stably as a triangular solve is:
    with a share of ``ε^{2/3}`` in α that is less than what α leaves below one.
    """

    name = "symmetric"

    @property
    def share(self) -> float:
        return SHARE * self.unit ** (2 / 3)

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], straight: bool = False) -> Contracted:
        gram = weight @ weight.mH
        energy = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).amax()
        alpha = positive(extra["log_alpha"]) + self.share * energy
        gram = gram + torch.diag_embed(alpha.to(gram.dtype).expand(gram.shape[:-1]))
        half, inverse, _, _ = _Sqrt.apply(gram)  # type: ignore[misc]
        scale = alpha.sqrt()
        root = Square(1 / scale, lambda: half, lambda x: x @ inverse, lambda x: inverse @ x)
        return Contracted(weight.shape, lambda: inverse @ weight, root, lambda y: (weight @ y) / scale)

    def _unit_root(self, matrix: Tensor, lower: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(lower @ lower.mH)
        return (vectors / values.sqrt()) @ (vectors.mH @ matrix)


class Cayley(Contraction):
    r"""Rows ``[U A]`` with ``UU^* + AA^* = I`` by the Cayley transform.

    With ``Z = X^* − X + WW^*`` (X is the square ``skew`` parameter): ``[U A] = (I + Z)^{-1} [−2W, I − Z]``. On a
    chain this is the Sandwich layer (Wang & Manchester, 2023).

    Rounding costs ``ε‖Z‖`` of orthogonality, so the two parts of ``Z`` are scaled down where they exceed
    ``ε^{-1/3}``; all contractions are reached with ``‖W‖ ≤ 1`` already. ``A`` may be singular. Off a chain, where
    ``K`` itself is needed, ``U`` is therefore shortened a little: ``U ← √(1−η) U`` leaves
    ``I − UU^* = (1−η) AA^* + ηI = LL^*``, ``η = ε^{2/3}``, and ``K = L^{-1}``.
    """

    name = "cayley"

    def initial(self, rows: int, alpha: float) -> dict[str, Tensor]:
        return {"skew": torch.zeros(rows, rows)}

    def free_gain(self, gain: float, alpha: float) -> float:
        return math.tan(math.atan(gain) / 2)  # ‖U‖ = 2g/(1 + g²) = sin(2 atan g)

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], straight: bool = False) -> Contracted:
        found = CayleyMap(extra["skew"].to(weight.dtype), weight.mH, self.unit ** (-1 / 3))
        if straight:
            # K = A^{-1} is asked for when a sweep runs backwards only, from weights that are strictly feasible; few
            # vectors are solved for, many are multiplied.
            few = lambda count: count < found.rows and not weight.is_complex()  # noqa: E731
            inverse = lambda: torch.linalg.inv_ex(found.a()).inverse  # noqa: E731
            root = Square(
                1.0,
                inverse,
                lambda x: found.apply_a(x) if few(x.shape[-2]) else x @ found.a().mH,
                lambda x: found.adjoint_a(x.mT).mT if few(x.shape[-1]) else found.a().mH @ x,
                singular=True,
            )
            product = None if weight.is_complex() else found.apply_b
            return Contracted(weight.shape, found.b, root, lambda y: inverse() @ (found.b() @ y), product)
        share = self.unit ** (2 / 3)
        long = math.sqrt(1 - share)
        lower = gram_cholesky(long * found.a(), weight.real.new_tensor(share), 0.0).factor.dense()
        return given(long * found.b(), lower)

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # A = (I + Z)^{-1}(I − Z) gives Z = (I − A)(I + A)^{-1}, and U = −2(I + Z)^{-1} W. A is free up to a rotation:
        # take the triangular one, whose positive diagonal keeps I + A invertible.
        lower = gap(matrix, strict=True)
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        z = torch.linalg.solve(eye + lower, eye - lower)
        weight = -(eye + z) @ matrix / 2
        skew = z - weight @ weight.mH  # = X^* − X
        return weight, {"skew": -skew / 2}


CONTRACTIONS: dict[str, type[Contraction]] = {c.name: c for c in (Cholesky, Symmetric, Cayley)}


class Head(ABC):
    """Free matrix to output contraction. By default every ``U`` that a head makes is a free matrix for itself."""

    name: str
    joint: bool  # whether ‖U‖ ≤ 1, so that the whole map has the declared bound
    what = "this form"  # of U

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

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Free parameters that give this ``U``."""
        tolerance = 64 * torch.finfo(matrix.dtype).eps * max(matrix.shape)
        if float((self(matrix, extra) - matrix).abs().max()) > tolerance:
            raise InfeasibleError(f"the normalised output map does not have {self.what}; use head='joint'")
        return matrix, extra


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

    name, joint, what = "orthogonal", True, "orthonormal rows"

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], cells: Cells = None) -> Tensor:
        tall = weight.shape[-2] > weight.shape[-1]
        least = weight.real.new_tensor(smallest(self.contraction.unit))
        found = gram_cholesky(weight.mH if tall else weight, least, self.contraction.unit).matrix
        return found.mH if tall else found


class Rows(Head):
    """Every row has norm one: each output is ℓ-Lipschitz, each pair has its own constant, the map has ``ℓ‖U‖``."""

    name, joint, what = "rows", False, "rows of norm one"

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], cells: Cells = None) -> Tensor:
        # A row of zeros stays zero: constant outputs are Lipschitz with any bound.
        return weight / row_norms(weight, cells, smallest(self.contraction.unit) ** 2)[:, None]

    def settle(self, matrix: Tensor, cells: Cells = None) -> Tensor:
        # A row keeps norm one, but one that was projected to almost nothing is not blown up.
        return matrix / row_norms(matrix, cells, self.contraction.unit)[:, None]


HEADS: dict[str, type[Head]] = {h.name: h for h in (Joint, Orthogonal, Rows)}


def chosen(contraction: str, head: str, unit: float) -> tuple[Contraction, Head]:
    """A contraction and a head by name, or :class:`OptionError`."""
    found = CONTRACTIONS[choice("contraction", contraction, CONTRACTIONS)](unit)
    return found, HEADS[choice("head", head, HEADS)](found)
