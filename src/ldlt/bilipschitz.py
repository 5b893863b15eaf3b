r"""Invertible networks: slopes bounded from above and from below, by construction.

For ``0 < m < L`` let ``c = (L + m)/2``, ``r = (L − m)/2`` and ``g`` an ``r``-Lipschitz network of any graph. Then

.. math:: F(x) = c\,x + g(x), \qquad m\,\|x - x'\| \le \|F(x) - F(x')\| \le L\,\|x - x'\| ,

by the triangle inequality, and ``F`` is a bijection: :math:`x \mapsto (y - g(x))/c` contracts with the rate
``r/c < 1`` for every ``y``. Whatever point ``x`` an iteration ends with, the lower slope says how far it can be from
the preimage:

.. math:: \|x - F^{-1}(y)\| \le \frac{\|F(x) - y\|}{m} .
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ldlt.check import positive, whole
from ldlt.engine.network import Lipschitz
from ldlt.errors import BoundError, CertificateError, OptionError, ShapeError

__all__ = ["BiLipschitz", "Inverse", "Shifted"]

_WINDOW = 6
"""Steps that Anderson's acceleration looks back on."""
_RIDGE = 1e-11
"""Relative weight that keeps its least squares regular where the steps are parallel."""
_EXACT = 32
"""Features up to which a log-determinant is computed exactly by default."""


@dataclass(frozen=True)
class Inverse:
    """A preimage, and how good it is.

    Attributes:
        x: (batch, *shape).
        error: Bound on the distance of each sample from the true preimage (batch,), float64.
        proven: Whether ``error`` holds with all rounding (of a frozen map with a proven lower slope), or is what the
            computed residual says.
        steps: Iterations that were made.
    """

    x: Tensor
    error: Tensor
    proven: bool
    steps: int


class _Map(nn.Module):
    """``c x + g(x)``; how ``g`` is run is the subclass's."""

    body: nn.Module
    center: float
    lower: float
    upper: float

    def _run(self) -> Callable[[Tensor], Tensor]:
        """``g`` with plain weights, computed once."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """``F(x)``, of the shape of ``x`` (batch, *shape)."""
        return self.center * x + cast(Tensor, self.body(x))

    def inverse(self, y: Tensor, *, tolerance: float | None = None, steps: int = 10_000) -> Tensor:
        r"""``F^{-1}(y)``, differentiable in ``y`` and in the parameters.

        The gradient is implicit: :math:`dx = J^{-1}(dy - dF)` with ``J`` the Jacobian at the solution, so it costs one
        linear solve, by the same iteration, and no memory per step.

        Args:
            y: (batch, *shape).
            tolerance: Residual ``|F(x) − y|`` relative to ``|y| + c|x|`` at which to stop; by default near rounding.
            steps: Largest number of iterations.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> net = BiLipschitz(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), 0.5, 2.0, input_shape=2)
            >>> x = torch.randn(5, 2)
            >>> bool(torch.allclose(net.inverse(net(x)), x, atol=1e-5))
            True
        """
        run = self._run()
        x, _ = self._solved(run, y, tolerance, steps)
        if not torch.is_grad_enabled():
            return x
        residual = y - self.center * x - run(x)
        if not residual.requires_grad:
            return x
        with torch.enable_grad():
            point = x.requires_grad_()
            value = run(point)

        def solve(gradient: Tensor) -> Tensor:
            def pulled(v: Tensor) -> Tensor:  # J_g' v
                (found,) = torch.autograd.grad(value, point, v, retain_graph=True)
                return found

            return _fixed_point(pulled, gradient, self.center, self.radius, tolerance, steps)[0]

        residual.register_hook(solve)
        return x.detach() + residual

    def invert(self, y: Tensor, *, tolerance: float | None = None, steps: int = 10_000) -> Inverse:
        """``F^{-1}(y)`` with a bound on its error: ``|F(x) − y| / m``, sample by sample.

        Args:
            y: As in :meth:`inverse`.
            tolerance: Likewise.
            steps: Likewise.
        """
        with torch.no_grad():
            run = self._run()
            x, made = self._solved(run, y, tolerance, steps)
            residual = (self.center * x.double() + run(x).double() - y.double()).flatten(1)
        return Inverse(x, torch.linalg.vector_norm(residual, dim=1) / self.lower, False, made)

    def _solved(
        self, run: Callable[[Tensor], Tensor], y: Tensor, tolerance: float | None, steps: int
    ) -> tuple[Tensor, int]:
        if not isinstance(y, Tensor) or y.ndim < 2:
            raise ShapeError("y must be a batch (batch, *shape)")
        with torch.no_grad():
            return _fixed_point(run, y.detach(), self.center, self.radius, tolerance, whole("steps", steps))

    def log_det(
        self, x: Tensor, *, samples: int | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""``F(x)`` and :math:`\log|\det J_F(x)|` (batch,), for densities; differentiable in ``x`` and the parameters.

        Exact by default up to 32 features. Beyond, or with ``samples``, unbiased (Chen et al., *Residual flows*, 2019):
        with ``v`` of independent signs and ``N`` of a geometric law,

        .. math:: \log\det\bigl(I + J_g/c\bigr) =
            \mathbb{E} \sum_{k=1}^{N} \frac{(-1)^{k+1}}{k\,P(N \ge k)}\, v'(J_g/c)^k v .

        Args:
            x: (batch, *shape).
            samples: Number of vectors ``v`` for the estimate; None decides by the number of features.
            generator: Of the random numbers.
        """
        features = x[0].numel()
        if samples is None and features > _EXACT:
            samples = 1
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            run = self._run()
            if samples is None:
                spread = point.repeat_interleave(features, 0)
                rows = torch.eye(features, dtype=x.dtype, device=x.device).repeat(len(x), 1).reshape(spread.shape)
                value = run(spread)
                (jacobian,) = torch.autograd.grad(value, spread, rows, create_graph=True)
                matrix = jacobian.reshape(len(x), features, features)
                unit = self.center * torch.eye(features, dtype=x.dtype, device=x.device)
                found = torch.linalg.slogdet(matrix + unit).logabsdet
                return self.center * point + run(point), found
            value = run(point)
            total = self._estimate(value, point, whole("samples", samples), generator)
            return self.center * point + value, features * math.log(self.center) + total

    def _estimate(self, value: Tensor, point: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
        keep = max(0.5, 1 - (1 - self.radius / self.center) / 2)  # of the geometric law: decays slower than the terms
        total = point.new_zeros(len(point))
        for _ in range(samples):
            first = torch.randint(2, point.shape, generator=generator, device=point.device).to(point) * 2 - 1
            count = 1 + int(math.log(1 - float(torch.rand((), generator=generator))) / math.log(keep))
            moved = first
            for k in range(1, count + 1):
                (moved,) = torch.autograd.grad(value, point, moved / self.center, create_graph=True)
                term = (moved * first).flatten(1).sum(1)
                total = total + (-1) ** (k + 1) * term / (k * keep ** (k - 1))
        return total / samples

    @property
    def radius(self) -> float:
        """``r``, the constant of ``g``."""
        return self.upper - self.center


class BiLipschitz(_Map):
    r"""A network with ``lower·‖Δx‖ ≤ ‖ΔF‖ ≤ upper·‖Δx‖`` for every value of its parameters, and its inverse.

    Args:
        module: Any module that :class:`ldlt.Lipschitz` takes, with outputs of the shape of its inputs.
        lower: ``m > 0``.
        upper: ``L > m``.
        input_shape: Shape of one sample.
        **options: Of :class:`ldlt.Lipschitz`.

    Shape:
        Input and output (batch, \*input_shape).

    Example:
        >>> net = BiLipschitz(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3)), 0.1, 10.0, input_shape=3)
        >>> net(torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """

    body: Lipschitz

    def __init__(
        self, module: nn.Module, lower: float, upper: float, *, input_shape: int | Sequence[int], **options: Any
    ) -> None:
        super().__init__()
        self.lower, self.upper = positive("lower", lower, BoundError), positive("upper", upper, BoundError)
        if not self.lower < self.upper:
            raise BoundError(f"lower must be below upper, not {self.lower:g} and {self.upper:g}")
        if {"bound", "train_bound"} & set(options):
            raise OptionError("the bound of the inner network follows from lower and upper: leave out bound")
        if options.get("head") == "rows":
            raise OptionError("head='rows' bounds single outputs; the inverse needs the whole map: use 'joint'")
        self.center = (self.lower + self.upper) / 2
        self.body = Lipschitz(module, self.upper - self.center, input_shape=input_shape, **options)
        graph = self.body.graph
        if graph[graph.output].shape != graph.input.shape:
            raise ShapeError(
                f"an invertible map has outputs of the shape of its inputs, {graph.input.shape}, not "
                f"{graph[graph.output].shape}"
            )

    def _run(self) -> Callable[[Tensor], Tensor]:
        return self.body.function()

    def freeze(self) -> Shifted:
        """An ordinary module of plain weights with the same outputs, whose slopes are proven for these weights."""
        return Shifted(self.body.frozen_map(), self.center, self.body.input_shape)

    def extra_repr(self) -> str:
        """Summary for ``repr``."""
        return f"lower={self.lower:g}, upper={self.upper:g}"


class Shifted(_Map):
    """``c x + g(x)`` for a plain network ``g`` of certified constant ``r < c``: slopes in ``[c − r, c + r]``, proven.

    Args:
        body: ``g``.
        center: ``c``.
        input_shape: Shape of one sample.

    Attributes:
        certificate: Of ``g``; ``ldlt.verify(net.certificate, net.body)`` proves it again.

    Raises:
        CertificateError: No constant of ``g`` below ``c`` could be proven.
    """

    def __init__(self, body: nn.Module, center: float, input_shape: int | Sequence[int]) -> None:
        from ldlt.certificates import certify  # noqa: PLC0415 (who trains need not wait for proofs)

        super().__init__()
        self.body, self.center = body, positive("center", center)
        self.certificate = certify(body, input_shape)
        bound = self.certificate.bound
        if not (self.certificate.rigorous and bound < self.center):
            raise CertificateError(
                f"the map is not proven invertible: its constant {bound:.6g} must be proven, and be below "
                f"{self.center:g}"
            )
        self.lower = math.nextafter(self.center - bound, 0.0)
        self.upper = math.nextafter(self.center + bound, math.inf)

    def _run(self) -> Callable[[Tensor], Tensor]:
        return cast(Callable[[Tensor], Tensor], self.body)

    def invert(self, y: Tensor, *, tolerance: float | None = None, steps: int = 10_000) -> Inverse:
        """As :meth:`BiLipschitz.invert`, with a bound that holds in spite of all rounding."""
        from ldlt.rounding import forward_error  # noqa: PLC0415 (likewise)

        found = super().invert(y, tolerance=tolerance, steps=steps)
        value, error = forward_error(self.body, found.x)
        unit = torch.finfo(torch.float64).eps
        x, g, target = (t.detach().double().flatten(1) for t in (found.x, value, y))
        # Each entry of c x + g − y takes three roundings in float64, of numbers no larger than their sum.
        size = self.center * x.abs() + g.abs() + target.abs()
        entries = (self.center * x + g - target).abs() + error.flatten(1) + 4 * unit * size
        most = torch.linalg.vector_norm(entries, dim=1) * (1 + (entries.shape[1] + 8) * unit) / self.lower
        return Inverse(found.x, most * (1 + 4 * unit), True, found.steps)


def _fixed_point(
    run: Callable[[Tensor], Tensor], y: Tensor, center: float, radius: float, tolerance: float | None, steps: int
) -> tuple[Tensor, int]:
    """``x`` with ``c x + g(x) = y``: ``x ← (y − g(x))/c`` with Anderson's acceleration, sample by sample.

    An accelerated step that does not lower the residual of a sample is replaced by a plain one, which always does (by
    the factor ``r/c``): so the iteration converges whatever the acceleration does. It ends where no sample gets better
    by half in the time in which plain steps would have done that: what is left is rounding.
    """
    patience = 2 * _WINDOW + 2 * math.ceil(math.log(0.5) / math.log(radius / center))
    unit = torch.finfo(y.dtype).eps
    stop = 4 * unit if tolerance is None else positive("tolerance", tolerance)
    target = y.flatten(1)

    def moved(x: Tensor) -> Tensor:  # the residual of the fixed point, (y − F(x))/c
        return (target - run(x.reshape(y.shape)).flatten(1)) / center - x

    x = target / center
    f = moved(x)
    size = torch.linalg.vector_norm(f, dim=1)
    points, values = [x], [f]
    best, least, mark, stale, made = x, size, size, 0, 0
    for made in range(1, steps + 1):  # noqa: B007
        scale = torch.linalg.vector_norm(target, dim=1) / center + torch.linalg.vector_norm(x, dim=1)
        if bool((least <= stop * scale + torch.finfo(y.dtype).tiny).all()) or stale > patience:
            break
        trial = _mixed(points, values)
        g = moved(trial)
        new = torch.linalg.vector_norm(g, dim=1)
        worse = ~(new < size)
        if bool(worse.any()):
            plain = x + f
            trial = torch.where(worse[:, None], plain, trial)
            g = torch.where(worse[:, None], moved(plain), g)
            new = torch.linalg.vector_norm(g, dim=1)
        x, f, size = trial, g, new
        better = size < least
        best, least = torch.where(better[:, None], x, best), torch.minimum(size, least)
        halved = least < 0.5 * mark
        mark, stale = torch.where(halved, least, mark), 0 if bool(halved.any()) else stale + 1
        points, values = [*points, x][-_WINDOW:], [*values, f][-_WINDOW:]
    return best.reshape(y.shape), made


def _mixed(points: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Anderson's next point: the combination of the last ones whose residuals cancel best, in least squares."""
    x, f = points[-1], values[-1]
    if len(points) == 1:
        return x + f
    dx = torch.stack([b - a for a, b in pairwise(points)], -1).double()  # (batch, n, m)
    df = torch.stack([b - a for a, b in pairwise(values)], -1).double()
    norm = torch.linalg.vector_norm(df, dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    dx, df = dx / norm, df / norm
    gram = df.mT @ df + _RIDGE * torch.eye(df.shape[-1], dtype=df.dtype, device=df.device)
    weights = torch.linalg.solve(gram, df.mT @ f[..., None].double())
    return x + f - ((dx + df) @ weights)[..., 0].to(x)
