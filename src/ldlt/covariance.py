r"""Covariances of a network with given weights: the one elimination behind starts, searches and their gradients.

Read the matrix inequality without its output term as the precision of a Gaussian over the input and the activations.
Its covariance ``G`` starts at ``I`` for the input. An activation with pre-activation ``v = C z``, slopes in
``[c − r, c + r]`` and multipliers ``Λ``, with ``D = (2 r² Λ)^{-1}``, keeps it positive definite if and only if

.. math:: D \succ T = C\,G\,C^*

and then, ``X = C G`` being the covariance of ``v`` with the tensors that are live,

.. math::

    G \leftarrow G + X^*(D - T)^{-1}X ,\qquad
    \operatorname{cov}(w, \text{live}) = c\,(X + T(D - T)^{-1}X) ,\qquad
    \operatorname{cov}(w) = c\,(T + T(D - T)^{-1}T)\,c + r^2D .

With ``y = B z`` at the end, the network has the constant ``ℓ² = λ_max(B G B*)``. Nothing is subtracted but
``D − T``, whose Cholesky factorisation also gives ``log det(I − D^{-1}T)``, the barrier of what is feasible; the sum of
these over all activations, plus ``Σ log 2Λ``, is the log-determinant of the precision.

All matrices may be real or complex Hermitian, and may have leading batch dimensions, such as the frequencies of
convolutions; ``D``, ``c`` and ``r`` are real, with or without these dimensions. Everything is differentiable, with one
adjoint by hand (:class:`_Inflate`) in place of those of the factorisation and its solves.

    >>> import torch
    >>> weight = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> live = Covariance.start("x", torch.eye(2, dtype=torch.float64))
    >>> read = live.read({"x": weight})
    >>> D, half = 2 * read.spread.diagonal(), torch.full((2,), 0.5, dtype=torch.float64)
    >>> live, slack = live.activate(read, D, "w", half, half, keep={"w"})  # a ReLU; nobody reads x again
    >>> live.matrix  # at D = 2T norms multiply
    tensor([[9., 0.],
            [0., 1.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Covariance", "Read", "mean_diagonal", "smooth_maximum"]


class _Inflate(torch.autograd.Function):
    r"""``K = Z^*(D − T)^{-1}Z`` and ``\log\det(I − D^{-1}T)``, which is NaN where ``D − T`` is not positive definite.

    With ``R = (D − T)^{-1}Z``: :math:`\bar Z = R(\bar K + \bar K^*)`, :math:`\bar T = -\bar D = R\bar KR^*`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(spread: Tensor, columns: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rest = -spread
        rest.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        factor, info = torch.linalg.cholesky_ex(rest)
        half = torch.linalg.solve_triangular(factor, columns, upper=False)
        slack = (2 * factor.diagonal(dim1=-2, dim2=-1).real.log() - diagonal.log()).sum(-1)
        return half.mH @ half, torch.where(info > 0, torch.nan, slack), factor, half

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        spread, columns, diagonal, factor, half = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: through operations that autograd knows
            factor = torch.linalg.cholesky_ex(torch.diag_embed(diagonal).to(spread.dtype) - spread)[0]
            half = torch.linalg.solve_triangular(factor, columns, upper=False)
        gain, slack = grads[:2]
        outer = None
        inner = torch.zeros_like(spread)  # of T, and of −D
        if gain is not None:
            solved = torch.linalg.solve_triangular(factor.mH, half, upper=True)
            weighted = solved @ gain
            inner, outer = weighted @ solved.mH, weighted + solved @ gain.mH
        if slack is not None:
            inner = inner - slack[..., None, None] * torch.cholesky_inverse(factor)
        own = -inner.diagonal(dim1=-2, dim2=-1).real
        return inner, outer, own if slack is None else own - slack[..., None] / diagonal


@dataclass(frozen=True, eq=False)
class Read:
    """What a linear function ``v = Σ_b C_b z_b`` of live tensors reads.

    Attributes:
        cross: ``X = C G``, the covariance of ``v`` with all live tensors, (…, n, N).
        spread: ``T = C G C*``, (…, n, n).
    """

    cross: Tensor
    spread: Tensor


@dataclass(frozen=True, eq=False)
class Covariance:
    """The joint covariance of the live tensors, stacked.

    Attributes:
        sizes: Their sizes by name, in the order in which they are stacked.
        matrix: ``G`` (…, N, N).
    """

    sizes: dict[str, int]
    matrix: Tensor

    @classmethod
    def start(cls, name: str, matrix: Tensor) -> Covariance:
        """Of the input alone: the identity, or the inverse of a metric."""
        return cls({name: matrix.shape[-1]}, matrix)

    @property
    def places(self) -> dict[str, slice]:
        """Where each tensor stands."""
        found, start = {}, 0
        for name, size in self.sizes.items():
            found[name] = slice(start, start + size)
            start += size
        return found

    def read(self, rows: Mapping[str, Tensor]) -> Read:
        """Covariances of a linear function of live tensors.

        Args:
            rows: ``C`` by tensor, (…, n, size); at least one.
        """
        places, cross, spread = self.places, None, None
        for b, block in rows.items():
            term = block @ self.matrix[..., places[b], :]
            cross = term if cross is None else cross + term
        assert cross is not None
        for b, block in rows.items():
            term = cross[..., places[b]] @ block.mH
            spread = term if spread is None else spread + term
        assert spread is not None
        return Read(cross, (spread + spread.mH) / 2)

    def keep(self, names: Collection[str]) -> Covariance:
        """Without the tensors that nobody reads any more: marginalisation."""
        if all(name in names for name in self.sizes):
            return self
        index = self._index(names)
        sizes = {n: s for n, s in self.sizes.items() if n in names}
        if not isinstance(index, Tensor):
            return Covariance(sizes, self.matrix[..., index, index])
        return Covariance(sizes, self.matrix[..., index[:, None], index])

    def transport(self, name: str, read: Read, keep: Collection[str]) -> Covariance:
        """Add a linear function of live tensors as a live tensor.

        Args:
            name: Its name.
            read: Its covariances.
            keep: Names of the tensors that are read later, its own among them.
        """
        live = self.keep(keep)
        own = read.spread
        if live.sizes:
            beside = read.cross if live is self else read.cross[..., self._index(keep)]
            own = torch.cat([torch.cat([live.matrix, beside.mH], -1), torch.cat([beside, own], -1)], -2)
        return Covariance({**live.sizes, name: read.spread.shape[-1]}, own)

    def activate(
        self,
        read: Read,
        diagonal: Tensor,
        name: str,
        center: Tensor,
        radius: Tensor,
        keep: Collection[str],
    ) -> tuple[Covariance, Tensor]:
        """Add the constraint of an activation, and its value as a live tensor.

        Args:
            read: Of its pre-activation.
            diagonal: ``D``, (n,) or (…, n), positive.
            name: Of its value, which becomes a live tensor if it is among those to keep.
            center: c, (n,) or (…, n).
            radius: r, likewise.
            keep: Names of the tensors that are read later.

        Returns:
            The covariance, and ``log det(I − D^{-1}T)``, (…). Where that is NaN, ``D − T`` is not positive definite,
            and the covariance means nothing.
        """
        live = self.keep(keep)
        beside = read.cross if live is self else read.cross[..., self._index(keep)]
        n = read.spread.shape[-1]
        columns = torch.cat([read.spread, beside], -1) if live.sizes else read.spread
        gain, slack, *_ = _Inflate.apply(read.spread, columns, diagonal.expand(read.spread.shape[:-1]))
        matrix = live.matrix + gain[..., n:, n:] if live.sizes else live.matrix
        if name not in keep:
            return Covariance(live.sizes, matrix), slack
        c = center.unsqueeze(-1) + (0 * slack.detach())[..., None, None]  # NaN where it means nothing
        own = c * (read.spread + gain[..., :n, :n]) * center.unsqueeze(-2)
        own = own + torch.diag_embed(radius**2 * diagonal)
        if live.sizes:
            across = c * (beside + gain[..., :n, n:])
            own = torch.cat([torch.cat([matrix, across.mH], -1), torch.cat([across, own], -1)], -2)
        return Covariance({**live.sizes, name: n}, own), slack

    def _index(self, names: Collection[str]) -> Any:
        """Where some tensors stand: a slice if they are neighbours."""
        found = [p for n, p in self.places.items() if n in names]
        if found and all(a.stop == b.start for a, b in pairwise(found)):
            return slice(found[0].start, found[-1].stop)
        places = [torch.arange(p.start, p.stop) for p in found]
        return torch.cat([torch.empty(0, dtype=torch.long), *places])


def mean_diagonal(matrix: Tensor) -> Tensor:
    """The real diagonal, (n,), averaged over the batch."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).real
    return diagonal.reshape(-1, diagonal.shape[-1]).mean(0)


def smooth_maximum(matrix: Tensor, sharpness: float) -> Tensor:
    r"""``(1/p) log Σ λ^p`` over the eigenvalues of a positive semidefinite matrix, and over all of its batch.

    It exceeds ``log λ_max`` by at most ``log(count)/p``, and is differentiable where eigenvalues meet.
    """
    values = torch.linalg.eigvalsh(matrix).reshape(-1)
    values = values.clamp(min=torch.finfo(values.dtype).tiny)
    return torch.logsumexp(sharpness * values.log(), 0) / sharpness
