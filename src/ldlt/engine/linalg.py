r"""Linear algebra of the engine: bounded scalars, fused Gram + Cholesky + solve, Cayley transforms, Gram matrices.

**Cholesky.** For a free matrix :math:`W` and :math:`\alpha > 0`

.. math:: M M^* = \alpha I + W W^*, \qquad U = M^{-1} W, \qquad U U^* = I - \alpha M^{-1} M^{-*} \prec I .

Every later use of ``M`` is a solve. Write a perturbation as :math:`dM = -M E` with ``E`` lower triangular. Then

.. math:: E = -\Phi(M^{-1}\, d(MM^*)\, M^{-*}), \qquad d(M^{-1}B) = M^{-1} dB + E M^{-1} B ,

with :math:`\Phi` = lower triangle, diagonal halved: the cotangent of ``E`` costs one product per use and no solve, and
the whole backward pass needs a single solve and two products instead of three solves and three products more:

.. math:: \bar W = M^{-*}\bigl(\bar U - (P + P^*)\,U\bigr), \qquad P = \Phi(\bar E + \bar U U^*) .

:class:`Triangular` holds ``value`` (``M``, constant to autograd) and ``frame`` (``E``, zeros that carry the gradient).

**Cayley.** For free X (q, q), Y (p, q) let :math:`Z = X - X^* + Y^* Y`. Then

.. math:: A^* = (I + Z)^{-1} (I - Z), \qquad B^* = -2\,Y (I + Z)^{-1}, \qquad A A^* + B B^* = I ,

because :math:`(I - Z)^*(I - Z) + 4\,Y^* Y = (I + Z)^*(I + Z)` for :math:`Z + Z^* = 2\,Y^* Y`; :math:`I + Z` is always
invertible. Rounding costs orthogonality of the order :math:`u\,\|Z\|`.

A compiler (``torch.compile``) sees the plain operations of PyTorch instead of functions with gradients of their own.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor

from ldlt.errors import ShapeError

__all__ = [
    "BALANCE",
    "LOG",
    "MARGIN",
    "SHARE",
    "CayleyMap",
    "Gram",
    "Triangular",
    "bounded",
    "cayley",
    "floor_share",
    "full_precision",
    "gram",
    "gram_cholesky",
    "positive",
    "positive_qr",
    "scale_both",
    "smallest",
    "unbounded",
]

# -- scalars -----------------------------------------------------------------------------------------------------------
# Any finite number is a good parameter: a free p enters every formula as m tanh(p/m), so that nothing overflows.

LOG, BALANCE, MARGIN = 20.0, 5.0, 10.0
"""``m`` of logarithms, of the logarithms of balances, and of margins before the sigmoid."""


def bounded(free: Tensor, limit: float = LOG) -> Tensor:
    """``m tanh(p/m)``."""
    return limit * (free / limit).tanh()


def positive(free: Tensor, limit: float = LOG) -> Tensor:
    """``exp(m tanh(p/m))``: a positive number from any finite one."""
    return bounded(free, limit).exp()


@overload
def unbounded(value: Tensor, limit: float = LOG) -> Tensor: ...
@overload
def unbounded(value: float, limit: float = LOG) -> float: ...
def unbounded(value: float | Tensor, limit: float = LOG) -> float | Tensor:
    """The free number of a bounded one: ``bounded(unbounded(v)) = v``; beyond the range, the nearest there is."""
    edge = limit * (1 - 1e-6)
    if not isinstance(value, Tensor):
        return limit * math.atanh(min(max(value, -edge), edge) / limit)
    return limit * (value.clamp(-edge, edge) / limit).atanh()


def smallest(unit: float) -> float:
    """Square root of the smallest number of the stored precision; the same for a sweep in a higher one."""
    return float(torch.finfo(torch.float32 if unit > torch.finfo(torch.float64).eps else torch.float64).tiny ** 0.5)


def floor_share(unit: float) -> float:
    """``δ = ε^{1/3}``: the share of its magnitude that every feature of a factored stack gets as noise of its own."""
    return unit ** (1 / 3)


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast on the device of a tensor."""
    kind = like.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # the meta device knows no autocast
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


# -- Gram matrices, Cholesky factors, triangular solves ----------------------------------------------------------------

SHARE = 4.0
"""Rounding units of ``‖W‖²_F`` that are added to α."""

_BLOCK = 256  # up to this size LAPACK's own Cholesky is faster than the blocked one


def _factor_in_place(gram: Tensor) -> None:
    """Overwrite a Hermitian matrix, given by its lower triangle, with its lower Cholesky factor; NaN if it has none.

    Large matrices are split in two, so that most of the work is products: LAPACK's own blocking ran at a fifth of the
    speed of a product at size 512.
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
    """``M^{-1} rhs`` or ``M^{-*} rhs``; a row-major right side is solved transposed: float32 pays for a copy."""
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
    """``(W, alpha) -> (U, U again, M, E, alpha used)``; ``alpha`` is a scalar or one per row.

    The second ``U`` is for :class:`_Product`, which hands the term ``Ū U^*`` of ``Ē`` over itself. The α used is larger
    by a few rounding units of ``‖W‖²_F``: any α is valid, and ``αI + WW^*`` stays definite however large ``W`` is.
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
        return None, grad_frame, grad_rhs, None  # what lies above the diagonal of grad_frame is dropped in _Contract


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
    """A lower-triangular factor ``M`` (..., n, n) to solve with and to differentiate; without a frame, by autograd."""

    def __init__(self, value: Tensor, frame: Tensor | None) -> None:
        self.value, self.frame = value, frame

    def _solved(self, rhs: Tensor, adjoint: bool) -> Tensor:
        if self.frame is None:
            return torch.linalg.solve_triangular(self.value.mH if adjoint else self.value, rhs, upper=adjoint)
        if not torch.is_grad_enabled():
            return _solve(self.value, rhs, adjoint)
        return cast(Tensor, _Solve.apply(self.value, self.frame, rhs, adjoint))

    def solve(self, rhs: Tensor) -> Tensor:
        """``M^{-1} rhs``, rhs (..., n, k)."""
        return self._solved(rhs, False)

    def solve_adjoint(self, rhs: Tensor) -> Tensor:
        """``M^{-*} rhs``, rhs (..., n, k)."""
        return self._solved(rhs, True)

    def dense(self) -> Tensor:
        """``M`` as an ordinary tensor."""
        return self.value if self.frame is None else cast(Tensor, _Dense.apply(self.value, self.frame))


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
    if torch.compiler.is_compiling():
        return matrix * rows[..., :, None] * columns[..., None, :]
    return cast(Tensor, _Scale.apply(matrix, rows, columns))


class Gram(NamedTuple):
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
        if self.factor.frame is not None and torch.is_grad_enabled() and self.matrix.requires_grad:
            return cast(Tensor, _Product.apply(x, self.again, self.factor.frame))
        return x @ self.matrix.mH


def gram_cholesky(weight: Tensor, alpha: Tensor, unit: float | None = None) -> Gram:
    """``U = M^{-1} W`` and ``M`` with ``M M^* = diag(alpha) + W W^*``.

    Args:
        weight: (n, k) or a stack (..., n, k), real or complex.
        alpha: Positive scalar (shape ``()``) or, for a single matrix, vector (n,), real.
        unit: Rounding unit that the share of ``‖W‖²_F`` in α is measured in; that of ``weight`` by default. It is part
            of the map: whoever evaluates it in another precision must keep it.
    """
    unit = torch.finfo(weight.dtype).eps if unit is None else unit
    if torch.compiler.is_compiling():
        gram = weight @ weight.mH
        energy = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)
        used = alpha + SHARE * unit * (energy.amax() if energy.ndim else energy)
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        lower, info = torch.linalg.cholesky_ex(gram + used[..., None] * eye)
        factor = Triangular(torch.where((info == 0)[..., None, None], lower, torch.nan), None)
        solved = factor.solve(weight)
        return Gram(solved, factor, used, solved)
    matrix, again, value, frame, used = _Contract.apply(weight, alpha, unit)
    return Gram(matrix, Triangular(value, frame), used, again)


class _Gram(_Function):
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


# -- the Cayley transform ----------------------------------------------------------------------------------------------


def cayley(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Map free ``(X, Y)`` to ``(A, B)`` with ``AA^* + BB^* = I``. Leading axes are batched; real or complex.

    Args:
        x: Free matrix, ``(..., q, q)``.
        y: Free matrix, ``(..., p, q)``; p = 0 is allowed and gives an orthogonal A.

    Returns:
        A of shape ``(..., q, q)`` and B of shape ``(..., q, p)``.

    Raises:
        ShapeError: If X is not square or Y has another number of columns.

    Example:
        >>> a, b = cayley(torch.randn(3, 3).double(), torch.randn(5, 3).double())
        >>> torch.allclose(a @ a.mT + b @ b.mT, torch.eye(3).double())
        True
    """
    found = CayleyMap(x, y)
    return found.a(), found.b()


class CayleyMap:
    r"""``[A B]`` of free X, Y, formed only when it is asked for; see :func:`cayley`.

    With :math:`A = 2 (I + Z^*)^{-1} - I` and :math:`B = -2 (I + Z^*)^{-1} Y^*` one LU factorisation and a solve per
    vector apply the maps, which is better while there are fewer vectors (rows of real matrices) than rows.

    Args:
        x: Free matrix, ``(..., q, q)``.
        y: Free matrix, ``(..., p, q)``.
        largest: Frobenius norm of ``X - X^*`` and of ``Y^* Y`` above which they are scaled down; None for no limit.

    Raises:
        ShapeError: If X is not square or Y has another number of columns.
    """

    def __init__(self, x: Tensor, y: Tensor, largest: float | None = None) -> None:
        if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] != y.shape[-1]:
            raise ShapeError(f"expected X (..., q, q) and Y (..., p, q), got {tuple(x.shape)} and {tuple(y.shape)}")
        self.rows = x.shape[-1]
        self.eye = torch.eye(self.rows, dtype=x.dtype, device=x.device)
        skew, square = x.mH - x, gram(y)
        self.y = y.mH  # Y^*
        if largest is not None:
            share = _share(square, largest)
            skew, square, self.y = skew * _share(skew, largest), square * share, self.y * share.sqrt()
        self.shift = skew + square  # Z^*
        self.plus = _Factorised(self.eye + self.shift)
        self._a: Tensor | None = None
        self._b: Tensor | None = None

    def a(self) -> Tensor:
        """A ``(..., q, q)``."""
        if self._a is None:
            self._form(True, torch.compiler.is_compiling())
        return cast(Tensor, self._a)

    def b(self) -> Tensor:
        """B ``(..., q, p)``."""
        if self._b is None:
            self._form(torch.compiler.is_compiling(), True)
        return cast(Tensor, self._b)

    def _form(self, a: bool, b: bool) -> None:
        """Form A, B, or both by one solve: what a compiler sees has no factorisation that two solves could share."""
        eye = self.eye.expand_as(self.shift)
        solved = self.plus.solve(torch.cat((eye, self.y), -1) if a and b else eye if a else self.y)
        if a:
            self._a = 2.0 * solved[..., : self.rows] - self.eye
        if b:
            self._b = -2.0 * (solved[..., self.rows :] if a else solved)

    def apply_a(self, v: Tensor) -> Tensor:
        """``A v`` for rows v ``(m, q)``."""
        return 2.0 * self.plus.solve(v.mT).mT - v

    def apply_b(self, v: Tensor) -> Tensor:
        """``B v`` for rows v ``(m, p)``."""
        return -2.0 * self.plus.solve((v @ self.y.mT).mT).mT

    def apply(self, v: Tensor) -> Tensor:
        """``[A B] v`` for rows v ``(m, q + p)``."""
        head = v[..., : self.rows]
        return 2.0 * self.plus.solve((head - v[..., self.rows :] @ self.y.mT).mT).mT - head

    def adjoint_a(self, v: Tensor) -> Tensor:
        """``A' v`` for rows v ``(m, q)``."""
        return 2.0 * self.plus.solve(v.mT, adjoint=True).mT - v

    def adjoint(self, v: Tensor) -> Tensor:
        """``[A B]' v`` for rows v ``(m, q)``."""
        solved = self.plus.solve(v.mT, adjoint=True).mT
        return torch.cat((2.0 * solved - v, -2.0 * solved @ self.y), dim=-1)


def _share(matrix: Tensor, largest: float) -> Tensor:
    """The factor that brings the Frobenius norm of a matrix down to ``largest``, 1 below; constant to autograd."""
    norm = torch.linalg.vector_norm(matrix.detach(), dim=(-2, -1), keepdim=True)
    return (largest / norm).clamp(max=1.0).to(matrix.real.dtype)


class _Factorised:
    """A matrix that is factorised once, at the first solve, for all solves and their gradients."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.factors: tuple[Tensor, Tensor, Tensor] | None = None

    def solve(self, rhs: Tensor, adjoint: bool = False) -> Tensor:
        """``M^{-1} R`` or ``M^{-*} R``; NaN, not an exception, where M is singular."""
        if torch.compiler.is_compiling():
            solution, info = torch.linalg.solve_ex(self.matrix.mH if adjoint else self.matrix, rhs)
            return torch.where((info == 0)[..., None, None], solution, torch.nan)
        if self.factors is None:
            self.factors = _factorise(self.matrix)
        return cast(Tensor, _LUSolve.apply(self.matrix, *self.factors, rhs, adjoint))


def _factorise(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``LU`` in one matrix, and how its rows are exchanged and put back: ``M[order] = LU``; NaN if M is singular."""
    with torch.no_grad():
        lu, pivots, info = torch.linalg.lu_factor_ex(matrix)
        lu = torch.where((info == 0)[..., None, None], lu, torch.nan)
        swaps, _, _ = torch.lu_unpack(lu, pivots, unpack_data=False)  # P, M = PLU
        swaps = swaps.real if swaps.is_complex() else swaps
        return lu, swaps.argmax(-2), swaps.argmax(-1)


def _taken(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order] if order.dim() == 1 else rows.take_along_dim(order[..., None], -2)


class _LUSolve(torch.autograd.Function):
    """``M^{-1} R`` or ``M^{-*} R`` from a given factorisation ``M[order] = LU``.

    ``torch.linalg.solve`` factorises M anew for every right side and for every transpose, and ``lu_solve`` solves from
    the left, which takes a BLAS longer than the transposed system from the right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, lu: Tensor, order: Tensor, back: Tensor, rhs: Tensor, adjoint: bool) -> Tensor:
        solve = torch.linalg.solve_triangular
        if adjoint:  # M^* R is the conjugate of M' R̄, and M' = U'L'P'
            half = solve(lu, rhs.conj().contiguous().mT, upper=True, left=False)
            return _taken(solve(lu, half, upper=False, left=False, unitriangular=True).mT, back).conj()
        half = solve(lu.mT, _taken(rhs, order).contiguous().mT, upper=True, left=False, unitriangular=True)
        return solve(lu.mT, half, upper=False, left=False).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *factors, _, ctx.adjoint = inputs
        ctx.save_for_backward(*factors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, Tensor, None]:
        *factors, output = ctx.saved_tensors
        grad = cast(Tensor, _LUSolve.apply(*factors, grads[0], not ctx.adjoint))
        # d(M^{-1}R) = M^{-1}(dR − dM M^{-1}R)
        outer = output @ grad.mH if ctx.adjoint else grad @ output.mH
        return -outer, None, None, None, grad, None
