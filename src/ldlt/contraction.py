r"""Contractions: free matrices to matrices ``U`` of norm below one, with the root of what they leave over.

A contraction hands the rule (``ldlt.elimination``) the pair ``(U, K)`` with :math:`K^*K = (I - UU^*)^{-1}`. ``K`` is
given as a *root*, an object with the three verbs the rule needs, ``dense()`` for ``K``, ``right_divide(X)`` for
:math:`X K^{-*}` and ``divide(X)`` for :math:`K^{-*} X`, all up to a scalar ``factor``. On a grid (``ldlt.grid``) all of
them are stacks of matrices, one per frequency, with the same α for all.

=============  =====================================================  ==============  ====================
contraction    ``U``                                                  ``K``           ``K U``
=============  =====================================================  ==============  ====================
``cholesky``   ``M^{-1} W``, ``M M' = αI + WW'``, M lower triangular  ``M/√α``        ``W/√α``
``symmetric``  ``M^{-1} W``, ``M = (αI + WW')^{1/2}``                 ``M/√α``        ``W/√α``
``cayley``     rows ``[U A]`` orthonormal by the Cayley transform     ``A^{-1}``      ``A^{-1} U``
=============  =====================================================  ==============  ====================

``W`` is (n, k), ``U`` is (n, k), ``K`` is (n, n). To add one, subclass :class:`Contraction` and put it into
:data:`CONTRACTIONS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ldlt.cayley import CayleyMap
from ldlt.errors import InfeasibleError, OptionError
from ldlt.grid import Fold, Layout
from ldlt.scalars import positive, unbounded
from ldlt.triangular import SHARE, Triangular, gram_cholesky

__all__ = ["CONTRACTIONS", "Contracted", "Contraction", "Root", "get_contraction"]


class Root(ABC):
    """A square factor ``K`` (n, n), known through what one can do with it.

    A scalar factor is kept apart as ``factor``, so that it can be merged with other diagonal scalings.
    """

    factor: Tensor | float = 1.0
    divides_only = False  # whether K may be infinite: it is then never asked for

    @abstractmethod
    def dense(self) -> Tensor:
        """``factor · K``."""

    @abstractmethod
    def right_divide(self, x: Tensor) -> Tensor:
        """``x K^{-*} / factor``, x (m, n)."""

    @abstractmethod
    def divide(self, x: Tensor) -> Tensor:
        """``K^{-*} x / factor``, x (n, m)."""

    def soften(self, x: Tensor) -> Tensor:
        """``x P``, x (m, n), with the soft projection on the directions that are more than a floor: here all."""
        return x


class TriangularRoot(Root):
    """``K = M / factor`` for a lower-triangular M."""

    def __init__(self, lower: Triangular, factor: Tensor) -> None:
        self.lower, self.factor = lower, factor

    def dense(self) -> Tensor:
        return self.lower.dense()

    def right_divide(self, x: Tensor) -> Tensor:
        return self.lower.solve(x.mH).mH

    def divide(self, x: Tensor) -> Tensor:
        return self.lower.solve_adjoint(x)


class AdjointRoot(Root):
    """``K = N^*`` for a lower-triangular N."""

    def __init__(self, lower: Triangular) -> None:
        self.lower = lower

    def dense(self) -> Tensor:
        return self.lower.dense().mH

    def right_divide(self, x: Tensor) -> Tensor:
        return self.lower.solve_adjoint(x.mH).mH

    def divide(self, x: Tensor) -> Tensor:
        return self.lower.solve(x)


class HermitianRoot(Root):
    """``K = M / factor`` for a Hermitian positive definite M with known inverse."""

    def __init__(self, matrix: Tensor, inverse: Tensor, factor: Tensor) -> None:
        self.matrix, self.inverse, self.factor = matrix, inverse, factor

    def dense(self) -> Tensor:
        return self.matrix

    def right_divide(self, x: Tensor) -> Tensor:
        return x @ self.inverse

    def divide(self, x: Tensor) -> Tensor:
        return self.inverse @ x


class InverseRoot(Root):
    """``K = A^{-1}`` for a lower-triangular A: dividing is a product."""

    def __init__(self, lower: Tensor) -> None:
        self.lower = lower

    def solve(self, rhs: Tensor) -> Tensor:
        """``A^{-1} rhs``."""
        return torch.linalg.solve_triangular(self.lower, rhs, upper=False)

    def dense(self) -> Tensor:
        eye = torch.eye(self.lower.shape[-1], dtype=self.lower.dtype, device=self.lower.device)
        return self.solve(eye.expand_as(self.lower))

    def right_divide(self, x: Tensor) -> Tensor:
        return x @ self.lower.mH

    def divide(self, x: Tensor) -> Tensor:
        return self.lower.mH @ x


class CayleyRoot(Root):
    """``K = A^{-1}`` for the A of a Cayley transform: few vectors are solved for, many are multiplied."""

    divides_only = True

    def __init__(self, map: CayleyMap) -> None:
        self.map = map

    def dense(self) -> Tensor:
        # Asked for when a sweep runs backwards only, from weights that are strictly feasible: A is invertible there.
        a = self.map.a()
        return torch.linalg.inv_ex(a).inverse

    def right_divide(self, x: Tensor) -> Tensor:
        few = x.shape[-2] < self.map.rows and not x.is_complex()
        return self.map.apply_a(x) if few else x @ self.map.a().mH

    def divide(self, x: Tensor) -> Tensor:
        few = x.shape[-1] < self.map.rows and not x.is_complex()
        return self.map.adjoint_a(x.mT).mT if few else self.map.a().mH @ x


class IdentityRoot(Root):
    """``K = I``, (size, size); with ``frequencies``, one for each of them."""

    def __init__(self, size: int, like: Tensor, frequencies: int | None = None) -> None:
        self.size, self.like, self.frequencies = size, like, frequencies

    def dense(self) -> Tensor:
        eye = torch.eye(self.size, dtype=self.like.dtype, device=self.like.device)
        return eye if self.frequencies is None else eye.to(eye.dtype.to_complex()).expand(self.frequencies, -1, -1)

    def coarse(self, fold: Fold) -> IdentityRoot:
        """The identity on a coarser grid."""
        target = Layout(fold.coarse, fold.coarse, 1).frequencies if fold.coarse is not None else None
        return IdentityRoot(self.size * fold.factor, self.like, target)

    def right_divide(self, x: Tensor) -> Tensor:
        return x

    def divide(self, x: Tensor) -> Tensor:
        return x


class FoldedRoot(Root):
    """``K`` of a finer grid, noise by features: everything is done there.

    Args:
        root: ``K`` (f, m, m) on the fine grid.
        fold: From the fine grid to this one.
        noise: Phases of the ``m`` local noise channels.
        parts: Phases of the ``m`` local features.
    """

    def __init__(self, root: Root, fold: Fold, noise: tuple[int, ...], parts: tuple[int, ...]) -> None:
        self.root, self.fold, self.noise, self.parts = root, fold, noise, parts
        self.factor, self.divides_only = root.factor, root.divides_only

    def dense(self) -> Tensor:
        return self.fold.both(self.root.dense(), self.noise, self.parts)

    def right_divide(self, x: Tensor) -> Tensor:
        return self.fold.columns(self.root.right_divide(self.fold.unfold(x, self.noise)), self.parts)

    def divide(self, x: Tensor) -> Tensor:
        fine = self.fold.unfold(x.mH, self.parts).mH
        return self.fold.columns(self.root.divide(fine).mH, self.noise).mH

    def soften(self, x: Tensor) -> Tensor:
        return self.fold.columns(self.root.soften(self.fold.unfold(x, self.noise)), self.noise)


class FlooredRoot(Root):
    """``K = R`` of a floored QR factorisation (``ldlt.generator``), upper triangular.

    Args:
        upper: ``R`` (n, n).
        signal: ``Q_1`` (q, n); the soft projection is ``P = Q_1^* Q_1``.
    """

    def __init__(self, upper: Tensor, signal: Tensor) -> None:
        self.upper, self.signal = upper, signal

    def soften(self, x: Tensor) -> Tensor:
        return (x @ self.signal.mH) @ self.signal

    def dense(self) -> Tensor:
        return self.upper

    def right_divide(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.upper.mH, x, upper=False, left=False)

    def divide(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.upper.mH, x, upper=False)


class Contracted:
    """What the rule needs to know of one contraction ``(U, K)``, ``K^*K = (I − UU^*)^{-1}``.

    Args:
        shape: Of ``U``, (n, k) behind the frequencies of a grid.
        matrix: Makes ``U``; called when it is first asked for.
        root: ``K``.
        spread: ``Y -> K U Y`` for Y (k, m): how the other live tensors are inflated.
        product: ``x -> x U^*`` for rows x (batch, k), where there is a better way than the matrix.
    """

    def __init__(
        self,
        shape: torch.Size,
        matrix: Callable[[], Tensor],
        root: Root,
        spread: Callable[[Tensor], Tensor],
        product: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.shape, self.root, self.spread = shape, root, spread
        self._make, self._product = matrix, product
        self._matrix: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """``U`` (n, k), norm below one."""
        if self._matrix is None:
            self._matrix = self._make()
        return self._matrix

    def product(self, x: Tensor) -> Tensor:
        """``x U^*`` for rows x (batch, k)."""
        return x @ self.matrix.mH if self._product is None else self._product(x)


def _gap(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor of ``I − UU^*`` and LAPACK's verdict (0 if there is one)."""
    eye = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    found = torch.linalg.cholesky_ex(eye - matrix @ matrix.mH)
    return found.L, found.info


def given(matrix: Tensor) -> Contracted:
    """The pair ``(U, K)`` of a contraction that is given instead of parameterised: ``K = L^{-1}``, ``LL^* = I − UU^*``.

    Used for maps that are kept as they are. The caller bounds the multipliers so that ``I − UU^*`` is diagonally
    dominant after a diagonal scaling, hence safe to factor.
    """
    factor, info = _gap(matrix)
    factor = torch.where((info == 0)[..., None, None], factor, torch.nan)
    root = InverseRoot(factor)
    return Contracted(matrix.shape, lambda: matrix, root, lambda y: root.solve(matrix @ y))


def _no_inverse(y: Tensor) -> Tensor:
    raise AssertionError("nothing is inflated on a chain")


class Contraction(ABC):
    """A smooth map from free parameters onto the matrices of norm below one.

    Args:
        unit: Rounding unit of the stored parameters; safeguards against rounding are measured in it, whatever precision
            the map is evaluated in.
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
        """``W`` (n, k) and the other free parameters to ``(U, K)``.

        Args:
            weight: ``W``.
            extra: The other parameters, by role.
            straight: ``K`` is only divided by, as on a chain, and may be singular.
        """

    @abstractmethod
    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Free parameters that give this ``U``; raises :class:`InfeasibleError` if its norm is not below one."""


def _strict_gap(matrix: Tensor) -> Tensor:
    """Cholesky factor of ``I − UU^*``, or :class:`InfeasibleError` if the norm of U is not below one."""
    factor, info = _gap(matrix)
    if int(info.max()) != 0 or not bool(torch.isfinite(factor).all()):
        norm = float(torch.linalg.matrix_norm(matrix, 2).max())
        raise InfeasibleError(
            f"a map is not strictly feasible for these multipliers: its normalised form has norm {norm:.6g}, "
            "which must be "
            "below 1; raise the bound or change the multipliers"
        )
    return factor


class _Alpha(Contraction):
    """What the two contractions with a Gram matrix ``αI + WW^*`` share."""

    def initial(self, rows: int, alpha: float) -> dict[str, Tensor]:
        return {"log_alpha": torch.tensor(unbounded(math.log(alpha)))}

    def free_gain(self, gain: float, alpha: float) -> float:
        return gain * math.sqrt(alpha)

    def share(self) -> float:
        """The share of ``‖W‖²_F`` that is added to α."""
        return SHARE * self.unit

    def _rescaled(self, weight: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """``tW`` such that the α actually used is ``t²`` for a W made for α = 1."""
        share = self.share() * float(weight.abs().square().sum())
        if share >= 1:
            raise InfeasibleError("the weights are too close to the boundary of the feasible set for this precision")
        return weight * (positive(extra["log_alpha"]) / (1 - share)).sqrt()


class Cholesky(_Alpha):
    """One Gram matrix, one Cholesky factorisation, one triangular solve."""

    name = "cholesky"

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], straight: bool = False) -> Contracted:
        found = gram_cholesky(weight, positive(extra["log_alpha"]), self.unit)
        scale = found.alpha.sqrt()
        root = TriangularRoot(found.factor, scale)
        return Contracted(weight.shape, lambda: found.matrix, root, lambda y: (weight / scale) @ y, found.apply)

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # I − UU^* = α M^{-1} M^{-*}: with LL^* = I − UU^*, M = √α L^{-1} and W = M U.
        lower = _strict_gap(matrix)
        return self._rescaled(torch.linalg.solve_triangular(lower, matrix, upper=False), extra), extra


class _Sqrt(torch.autograd.Function):
    """``A -> (A^{1/2}, A^{-1/2})`` for Hermitian A ≻ 0, with the gradient by the Sylvester equation.

    ``d(A^{1/2}) = S`` solves ``M S + S M = dA``; in the eigenbasis this divides by ``√λ_i + √λ_j``, which is safe for
    equal eigenvalues (where differentiating ``eigh`` itself is not).
    """

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


class Symmetric(_Alpha):
    """The paper's symmetric square roots, by an eigendecomposition.

    The product of the inverse root with ``W`` is rounded by ``ε‖W‖/√α``, not backward stably as a triangular solve is:
    with a share of ``ε^{2/3}`` in α that is less than what α leaves below one.
    """

    name = "symmetric"

    def share(self) -> float:
        return SHARE * self.unit ** (2 / 3)

    def __call__(self, weight: Tensor, extra: dict[str, Tensor], straight: bool = False) -> Contracted:
        gram = weight @ weight.mH
        share = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).amax()
        alpha = positive(extra["log_alpha"]) + self.share() * share
        gram = gram + torch.diag_embed(alpha.to(gram.dtype).expand(gram.shape[:-1]))
        half, inverse, _, _ = _Sqrt.apply(gram)  # type: ignore[misc]
        scale = alpha.sqrt()
        root = HermitianRoot(half, inverse, scale)
        return Contracted(weight.shape, lambda: inverse @ weight, root, lambda y: (weight / scale) @ y)

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        _strict_gap(matrix)
        eye = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
        values, vectors = torch.linalg.eigh(eye - matrix @ matrix.mH)
        weight = (vectors / values.sqrt()) @ (vectors.mH @ matrix)
        return self._rescaled(weight, extra), extra


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
            few = None if weight.is_complex() else found.apply_b
            return Contracted(weight.shape, found.b, CayleyRoot(found), _no_inverse, few)
        share = self.unit ** (2 / 3)
        long = math.sqrt(1 - share)
        lower = gram_cholesky(long * found.a(), weight.real.new_tensor(share), 0.0).factor.dense()
        matrix, root = long * found.b(), InverseRoot(lower)
        return Contracted(weight.shape, lambda: matrix, root, lambda y: root.solve(matrix @ y))

    def invert(self, matrix: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # A = (I + Z)^{-1}(I − Z) gives Z = (I − A)(I + A)^{-1}, and U = −2(I + Z)^{-1} W. A is free up to a rotation:
        # take the triangular one, whose positive diagonal keeps I + A invertible.
        lower = _strict_gap(matrix)
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        z = torch.linalg.solve(eye + lower, eye - lower)
        weight = -(eye + z) @ matrix / 2
        skew = z - weight @ weight.mH  # = X^* − X
        return weight, {"skew": -skew / 2}


CONTRACTIONS: dict[str, type[Contraction]] = {c.name: c for c in (Cholesky, Symmetric, Cayley)}


def get_contraction(name: str, unit: float) -> Contraction:
    """A contraction of that name, or :class:`OptionError`."""
    if not isinstance(name, str) or name not in CONTRACTIONS:
        raise OptionError(f"contraction must be one of {', '.join(map(repr, CONTRACTIONS))}, not {name!r}")
    return CONTRACTIONS[name](unit)
