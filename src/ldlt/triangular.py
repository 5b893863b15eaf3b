r"""Cholesky factor of a Gram matrix, with its gradient carried in the factor's own frame.

For a free matrix :math:`W` and :math:`\alpha > 0`

.. math:: M M^* = \alpha I + W W^*, \qquad U = M^{-1} W, \qquad U U^* = I - \alpha M^{-1} M^{-*} \prec I .

Every later use of ``M`` is a solve. Write a perturbation as :math:`dM = -M E` with ``E`` lower triangular. Then

.. math:: E = -\Phi(M^{-1}\, d(MM^*)\, M^{-*}), \qquad d(M^{-1}B) = M^{-1} dB + E M^{-1} B ,

with :math:`\Phi` = lower triangle, diagonal halved. So the cotangent of ``E`` costs one matrix product per use and no
triangular solve, and the whole backward pass of Gram + Cholesky + solve needs a single solve and two products:

.. math:: \bar W = M^{-*}\bigl(\bar U - (P + P^*)\,U\bigr), \qquad P = \Phi(\bar E + \bar U U^*) .

``torch.linalg.cholesky`` followed by ``solve_triangular`` needs three solves and three products more for the same
gradient. To that end :class:`Triangular` holds ``value`` (``M``, constant to autograd) and ``frame`` (``E``, a zero
tensor that carries the gradient). Second derivatives work: the backward formulas are written with the same
differentiable verbs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

__all__ = ["SHARE", "Contraction", "Triangular", "gram_cholesky", "positive_qr", "scale_both"]

SHARE = 4.0
"""Rounding units of ``‖W‖²_F`` that are added to α."""

_BLOCK = 256  # up to this size LAPACK's own Cholesky is faster than the blocked one


def _factor_in_place(gram: Tensor) -> None:
    """Overwrite a Hermitian matrix, given by its lower triangle, with its lower Cholesky factor.

    Large matrices are split in two, so that most of the work is matrix products: LAPACK's own blocking ran at a fifth
    of the speed of a product at size 512. Where the matrix is not positive definite the result is NaN, not an
    exception.
    """
    n = gram.shape[-1]
    if n <= _BLOCK:
        factor, info = torch.linalg.cholesky_ex(gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(torch.where(info == 0, 0.0, torch.nan)[..., None])
        gram.copy_(factor)
        return
    h = n // 2
    top = gram[..., :h, :h]
    _factor_in_place(top)
    side = torch.linalg.solve_triangular(top.mH, gram[..., h:, :h], upper=True, left=False)
    gram[..., h:, :h] = side
    gram[..., :h, h:] = 0
    gram[..., h:, h:] -= side @ side.mH
    _factor_in_place(gram[..., h:, h:])


def _solve(factor: Tensor, rhs: Tensor, adjoint: bool) -> Tensor:
    """``M^{-1} rhs`` or ``M^{-*} rhs``.

    A row-major right side is the transpose of a column-major one that is solved from the right, without a copy. In
    float32 that is faster than from the left by enough to pay for a copy of any other right side; in float64 it is not.
    """
    matrix = factor.mH if adjoint else factor
    if rhs.stride(-1) != 1 and rhs.dtype == torch.float32 and rhs.device.type == "cpu":
        rhs = rhs.contiguous()
    if rhs.stride(-1) == 1:
        return torch.linalg.solve_triangular(matrix.mT, rhs.mT, upper=not adjoint, left=False).mT
    return torch.linalg.solve_triangular(matrix, rhs, upper=adjoint)


def _add_product(start: Tensor, left: Tensor, right: Tensor, sign: int) -> Tensor:
    """``start + sign · left @ right``."""
    if start.ndim == 2:
        return torch.addmm(start, left, right, alpha=sign)
    return start + sign * (left @ right)


class _Function(torch.autograd.Function):
    """Autograd function whose ``apply`` does not inspect the signature of ``forward`` (without defaults) every time."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Contract(_Function):
    """``(W, alpha) -> (U, U again, M, E, alpha used)``; see the module docstring. ``alpha`` is a scalar or one per row.

    The second ``U`` is for :class:`_Product`, which hands the term ``Ū U^*`` of ``Ē`` over itself.

    The α that is used is larger than the given one by a share of ``‖W‖²_F`` of the order of the rounding unit. Any
    positive number is a valid α, so this is no approximation; it keeps ``αI + WW^*`` positive definite in floating
    point however large ``W`` has grown.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, alpha: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        gram = weight @ weight.mH
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        energy = diagonal.real.sum(-1)
        used = alpha + SHARE * unit * (energy.amax() if energy.ndim else energy)  # one for all matrices of a stack
        diagonal.add_(used)
        _factor_in_place(gram)
        frame = torch.zeros_like(used.reshape(-1)[0], dtype=gram.dtype).expand(gram.shape)
        contraction = _solve(gram, weight, False)
        return contraction, contraction.view_as(contraction), gram, frame, used

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, ...]) -> None:
        contraction, _, factor, frame, used = output
        ctx.mark_non_differentiable(factor)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], contraction, factor, frame, used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, contraction, factor, frame, used = ctx.saved_tensors
        grad_u, grad_product, _, grad_e, grad_used = grads
        tri = Triangular(factor, frame)
        grad_e = torch.zeros_like(factor) if grad_e is None else grad_e
        half = (grad_e if grad_u is None else _add_product(grad_e, grad_u, contraction.mH, 1)).tril()
        if grad_u is None:
            grad_u = torch.zeros_like(contraction) if grad_product is None else grad_product
        elif grad_product is not None:
            grad_u = grad_u + grad_product
        half.diagonal(dim1=-2, dim2=-1).mul_(0.5)  # P = Φ(Ē + Ū U^*)
        grad_w = tri.solve_adjoint(_add_product(grad_u, half + half.mH, contraction, -1))
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            if used.ndim == 0:
                # U(tW, t²α) = U(W, α) and M(tW, t²α) = t M: the derivative along the scaling is −tr(Ē), so no solve
                # is needed.
                # (What _Product has put into Ē belongs to U, not to M.)
                trace = grad_e.diagonal(dim1=-2, dim2=-1).real.sum()
                if grad_product is not None:
                    trace = trace - (grad_product * contraction.conj()).real.sum()
                grad_alpha = -(trace + (grad_w * weight.conj()).real.sum()) / (2 * used)
            else:
                # ᾱ = −diag(M^{-*} P M^{-1})
                left = tri.solve_adjoint(half)
                inverse = tri.solve(torch.eye(half.shape[-1], dtype=half.dtype, device=half.device).expand_as(half))
                grad_alpha = -(left * inverse.mT).sum(-1).real
            if grad_used is not None:
                grad_alpha = grad_alpha + grad_used
        return grad_w, grad_alpha, None


class _Product(_Function):
    """``x U^*`` for rows x (batch, k): ``Ū = ȳ^* x``, and ``Ū U^* = ȳ^* y`` costs no more than the batch is large."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, contraction: Tensor, frame: Tensor) -> Tensor:
        return x @ contraction.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, contraction, output = ctx.saved_tensors
        (grad,) = grads
        return grad @ contraction, grad.mH @ x, grad.mH @ output


class _Solve(_Function):
    """``M^{-1} B`` or ``M^{-*} B``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, frame: Tensor, rhs: Tensor, adjoint: bool) -> Tensor:
        return _solve(factor, rhs, adjoint)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        factor, frame, rhs, ctx.adjoint = inputs
        ctx.save_for_backward(factor, frame, rhs if ctx.adjoint else output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor, None]:
        factor, frame, kept = ctx.saved_tensors
        tri = Triangular(factor, frame)
        (grad,) = grads
        grad_frame = None
        if ctx.adjoint:  # d(M^{-*}B) = M^{-*}(dB + E^*B)
            grad_rhs = tri.solve(grad)
            if ctx.needs_input_grad[1]:
                grad_frame = kept @ grad_rhs.mH
        else:  # d(M^{-1}B) = M^{-1}dB + E M^{-1}B
            grad_rhs = tri.solve_adjoint(grad)
            if ctx.needs_input_grad[1]:
                grad_frame = grad @ kept.mH
        return (
            None,
            grad_frame,
            grad_rhs,
            None,
        )  # what lies above the diagonal of grad_frame is dropped in _Contract


class _Dense(_Function):
    """``M`` itself, with gradient: ``dM = −M E``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, frame: Tensor) -> Tensor:
        return factor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        factor, frame = ctx.saved_tensors
        return None, -(Triangular(factor, frame).dense().mH @ grads[0])


class Triangular:
    """A lower-triangular factor ``M`` (..., n, n) that can be solved with and differentiated."""

    def __init__(self, value: Tensor, frame: Tensor) -> None:
        self.value = value
        self.frame = frame

    def solve(self, rhs: Tensor) -> Tensor:
        """``M^{-1} rhs``, rhs (..., n, k)."""
        if not torch.is_grad_enabled():
            return _solve(self.value, rhs, False)
        return cast(Tensor, _Solve.apply(self.value, self.frame, rhs, False))

    def solve_adjoint(self, rhs: Tensor) -> Tensor:
        """``M^{-*} rhs``, rhs (..., n, k)."""
        if not torch.is_grad_enabled():
            return _solve(self.value, rhs, True)
        return cast(Tensor, _Solve.apply(self.value, self.frame, rhs, True))

    def dense(self) -> Tensor:
        """``M`` as an ordinary tensor."""
        return cast(Tensor, _Dense.apply(self.value, self.frame))


class _Scale(_Function):
    """``diag(rows) A diag(columns)``, with the gradients of both vectors from one product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return (matrix * rows[..., :, None]).mul_(columns[..., None, :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows, columns, output = ctx.saved_tensors
        (grad,) = grads
        grad_rows = grad_columns = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            share = (grad * output.conj()).real
            grad_rows, grad_columns = share.sum(-1), share.sum(-2)
            if share.ndim > 2:  # the same vectors for all matrices of a stack
                grad_rows, grad_columns = grad_rows.sum_to_size(rows.shape), grad_columns.sum_to_size(columns.shape)
            grad_rows, grad_columns = grad_rows / rows, grad_columns / columns
        return scale_both(grad, rows, columns), grad_rows, grad_columns


def positive_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """QR with a positive diagonal of R, so that both factors are continuous functions of the matrix."""
    q, r = torch.linalg.qr(matrix)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1).real < 0, -1.0, 1.0).to(r.dtype).detach()
    return q * sign[..., None, :], r * sign[..., :, None]


def scale_both(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``diag(rows) matrix diag(columns)`` for real vectors without zeros."""
    return cast(Tensor, _Scale.apply(matrix, rows, columns))


class Contraction(NamedTuple):
    """Result of :func:`gram_cholesky`.

    Attributes:
        matrix: ``U = M^{-1} W`` (..., n, k).
        factor: ``M``.
        alpha: The ``a`` in ``M M^* = diag(a) + W W^*``: the given one plus a rounding unit of ``‖W‖²_F``.
        again: ``U`` once more, for :meth:`apply`.
    """

    matrix: Tensor
    factor: Triangular
    alpha: Tensor
    again: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """``x U^*`` for rows x (batch, k); its gradient is cheaper than that of a product with ``matrix``."""
        if torch.is_grad_enabled() and self.matrix.requires_grad:
            return cast(Tensor, _Product.apply(x, self.again, self.factor.frame))
        return x @ self.matrix.mH


def gram_cholesky(weight: Tensor, alpha: Tensor, unit: float | None = None) -> Contraction:
    """``U = M^{-1} W`` and ``M`` with ``M M^* = diag(alpha) + W W^*``.

    Args:
        weight: (n, k) or a stack (..., n, k), real or complex.
        alpha: Positive scalar (shape ``()``) or, for a single matrix, vector (n,), real.
        unit: Rounding unit that the share of ``‖W‖²_F`` in α is measured in; that of ``weight`` by default. It is part
            of the map: whoever evaluates it in another precision must keep it.
    """
    unit = torch.finfo(weight.dtype).eps if unit is None else unit
    matrix, again, value, frame, used = _Contract.apply(weight, alpha, unit)
    return Contraction(matrix, Triangular(value, frame), used, again)
