r"""Linear algebra of the engine: bounded scalars, and Gram + Cholesky + solve as one function with a cheap gradient.

For a free matrix :math:`W` and :math:`\alpha > 0`

.. math:: M M^* = \alpha I + W W^*, \qquad U = M^{-1} W, \qquad U U^* = I - \alpha M^{-1} M^{-*} \prec I .

Every later use of ``M`` is a solve. Write a perturbation as :math:`dM = -M E` with ``E`` lower triangular. Then

.. math:: E = -\Phi(M^{-1}\, d(MM^*)\, M^{-*}), \qquad d(M^{-1}B) = M^{-1} dB + E M^{-1} B ,

with :math:`\Phi` = lower triangle, diagonal halved: the cotangent of ``E`` costs one product per use and no solve, and
the whole backward pass needs a single solve and two products instead of three solves and three products more:

.. math:: \bar W = M^{-*}\bigl(\bar U - (P + P^*)\,U\bigr), \qquad P = \Phi(\bar E + \bar U U^*) .

:class:`Triangular` holds ``value`` (``M``, constant to autograd) and ``frame`` (``E``, zeros that carry the gradient).
A compiler (``torch.compile``) sees the plain operations of PyTorch instead.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

# Any finite number is a good parameter: a free p enters every formula as m tanh(p/m), so that nothing overflows.

LOG, BALANCE, MARGIN = 20.0, 5.0, 10.0
"""``m`` of logarithms, of the logarithms of balances, and of margins before the sigmoid."""


def bounded(free: Tensor, limit: float = LOG) -> Tensor:
    """``m tanh(p/m)``."""
    return limit * (free / limit).tanh()


def positive(free: Tensor, limit: float = LOG) -> Tensor:
    """``exp(m tanh(p/m))``: a positive number from any finite one."""
    return bounded(free, limit).exp()


def unbounded(value: float | Tensor, limit: float = LOG) -> Tensor:
    """The free number of a bounded one: ``bounded(unbounded(v)) = v``; beyond the range, the nearest there is."""
    edge = limit * (1 - 1e-6)
    exact = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    return limit * (exact.clamp(-edge, edge) / limit).atanh()


def smallest(unit: float) -> float:
    """Square root of the smallest number of the stored precision; the same for a sweep in a higher one."""
    return torch.finfo(torch.float32 if unit > torch.finfo(torch.float64).eps else torch.float64).tiny ** 0.5


def floor_share(unit: float) -> float:
    """``δ = ε^{1/3}``: the share of its magnitude that every feature of a factored stack gets as noise of its own."""
    return unit ** (1 / 3)


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast on the device of a tensor."""
    kind = like.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # the meta device knows no autocast
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


SHARE = 4.0
"""Rounding units of ``‖W‖²_F`` that are added to α."""

_BLOCK = 256  # up to this size LAPACK's own Cholesky is faster than the blocked one


def _lower(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of which only the lower triangle is asked for: large ones leave a third of the work out."""
    derived = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    n = left.shape[-2]
    if n <= _BLOCK or left.ndim > 2 or derived or torch._C._are_functorch_transforms_active():
        return left @ right
    return _fill_lower(left, right, left.new_zeros(n, n))


def _fill_lower(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    h = left.shape[0] // 2
    if h < 64:
        return torch.mm(left, right, out=out)
    torch.mm(left[h:], right[:, :h], out=out[h:, :h])
    _fill_lower(left[:h], right[:, :h], out[:h, :h])
    _fill_lower(left[h:], right[:, h:], out[h:, h:])
    return out


def _factor_in_place(gram: Tensor) -> None:
    """Overwrite a Hermitian matrix, given by its lower triangle, with its lower Cholesky factor; NaN if it has none."""
    # Large ones are split in two, so that most of the work is products: LAPACK's own ran at a fifth of their speed.
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


class Function(torch.autograd.Function):
    """Autograd function whose ``apply`` does not inspect the signature of ``forward`` (without defaults) every time."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The function of its arguments."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Contract(Function):
    """``(W, alpha) -> (U, U again, M, E, alpha used)``; the second ``U`` is for :class:`_Product`.

    The α used is larger by rounding units of ``‖W‖²_F``: any α is valid, and ``αI + WW^*`` stays definite.
    """

    @staticmethod
    def forward(weight: Tensor, alpha: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        gram = _lower(weight, weight.mH)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        energy = diagonal.real.sum(-1)
        used = alpha + SHARE * unit * (energy.amax() if energy.ndim else energy)  # one for all matrices of a stack
        diagonal.add_(used)
        _factor_in_place(gram)
        frame = torch.zeros_like(used, dtype=gram.dtype).expand(gram.shape)
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
        grad_e = torch.zeros_like(factor) if grad_e is None else grad_e
        half = (grad_e if grad_u is None else grad_e + _lower(grad_u, contraction.mH)).tril()
        if grad_u is None:
            grad_u = torch.zeros_like(contraction) if grad_product is None else grad_product
        elif grad_product is not None:
            grad_u = grad_u + grad_product
        half.diagonal(dim1=-2, dim2=-1).mul_(0.5)  # P = Φ(Ē + Ū U^*)
        both = half + half.mH
        inner = torch.addmm(grad_u, both, contraction, alpha=-1) if both.ndim == 2 else grad_u - both @ contraction
        grad_w = Triangular(factor, frame).solve_adjoint(inner)
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            # U(tW, t²α) = U(W, α) and M(tW, t²α) = t M: the derivative along the scaling is −tr(Ē), without a solve.
            # (What _Product has put into Ē belongs to U, not to M.)
            trace = grad_e.diagonal(dim1=-2, dim2=-1).real.sum()
            if grad_product is not None:
                trace = trace - (grad_product * contraction.conj()).real.sum()
            grad_alpha = -(trace + (grad_w * weight.conj()).real.sum()) / (2 * used)
            grad_alpha = grad_alpha if grad_used is None else grad_alpha + grad_used
        return grad_w, grad_alpha, None


class _Product(Function):
    """``x U^*`` for rows x (batch, k): ``Ū = ȳ^* x``, and ``Ū U^* = ȳ^* y`` costs no more than the batch is large."""

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
        return grad @ contraction, grad.mH @ x, _lower(grad.mH, output)


class _Solve(Function):
    """``M^{-1} B`` or ``M^{-*} B``."""

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
        (grad,) = grads
        grad_rhs = Triangular(factor, frame)._solved(grad, not ctx.adjoint)
        grad_frame = None
        if ctx.needs_input_grad[1]:
            # d(M^{-*}B) = M^{-*}(dB + E^*B) and d(M^{-1}B) = M^{-1}dB + E M^{-1}B; _Contract drops the upper triangle.
            grad_frame = _lower(kept, grad_rhs.mH) if ctx.adjoint else _lower(grad, kept.mH)
        return None, grad_frame, grad_rhs, None


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
        return self.value if self.frame is None else self.value - self.value @ self.frame


class Gram(NamedTuple):
    """Result of :func:`gram_cholesky`."""

    matrix: Tensor  # U = M^{-1} W (..., n, k)
    factor: Triangular  # M
    alpha: Tensor  # a in M M^* = aI + W W^*: the given one plus rounding units of ‖W‖²_F
    again: Tensor  # U once more, for apply

    def apply(self, x: Tensor) -> Tensor:
        """``x U^*`` for rows x (batch, k); its gradient is cheaper than that of a product with ``matrix``."""
        if self.factor.frame is not None and torch.is_grad_enabled() and self.matrix.requires_grad:
            return cast(Tensor, _Product.apply(x, self.again, self.factor.frame))
        return x @ self.matrix.mH


def gram_cholesky(weight: Tensor, alpha: Tensor, unit: float | None = None) -> Gram:
    """``U = M^{-1} W`` and ``M`` with ``M M^* = alpha I + W W^*``.

    Args:
        weight: (n, k) or a stack (..., n, k), real or complex.
        alpha: Positive scalar ().
        unit: Rounding unit that the share of ``‖W‖²_F`` in α is measured in, a part of the map in any precision.
    """
    unit = torch.finfo(weight.dtype).eps if unit is None else unit
    if torch.compiler.is_compiling():
        gram = weight @ weight.mH
        energy = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)
        used = alpha + SHARE * unit * (energy.amax() if energy.ndim else energy)
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        lower, info = torch.linalg.cholesky_ex(gram + used * eye)
        factor = Triangular(torch.where((info == 0)[..., None, None], lower, torch.nan), None)
        solved = factor.solve(weight)
        return Gram(solved, factor, used, solved)
    matrix, again, value, frame, used = _Contract.apply(weight, alpha, unit)
    return Gram(matrix, Triangular(value, frame), used, again)
