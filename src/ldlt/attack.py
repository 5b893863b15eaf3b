"""Attacks: lower bounds on the Lipschitz constant of any network, found by searching for steep pairs of inputs.

What an attack finds is real (two inputs and their outputs), so it can refute a claimed bound, never prove one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldlt.errors import OptionError, ShapeError
from ldlt.evaluation import evaluating

__all__ = ["SteepPair", "jacobian_norms", "lipschitz_lower_bound"]


@dataclass(frozen=True)
class SteepPair:
    """The steepest thing that an attack has found.

    Attributes:
        value: The larger of ``pair`` and ``jacobian``: a lower bound on the Lipschitz constant, up to rounding of the
            outputs.
        pair: ``‖f(x) − f(y)‖ / ‖x − y‖`` of the best pair.
        jacobian: Largest norm of a Jacobian.
        x: First input of the best pair, (1, *input_shape).
        y: Second input.
    """

    value: float
    pair: float
    jacobian: float
    x: Tensor
    y: Tensor


def jacobian_norms(model: nn.Module, x: Tensor) -> Tensor:
    """Spectral norm of the Jacobian at each sample of ``x`` (batch, *shape), from the dense Jacobian."""
    return torch.linalg.matrix_norm(_jacobians(model, x), 2)


def _jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """(batch, outputs, inputs), one backward pass per output."""
    with torch.enable_grad():
        points = x.detach().requires_grad_()
        outputs = model(points).flatten(1)
        if not outputs.requires_grad:  # a constant
            return torch.zeros(len(x), outputs.shape[1], points[0].numel()).to(points)
        rows = [
            torch.autograd.grad(outputs[:, k].sum(), points, retain_graph=True, materialize_grads=True)[0]
            for k in range(outputs.shape[1])
        ]
    return torch.stack([r.flatten(1) for r in rows], 1)


def _slopes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    top = (model(x) - model(y)).flatten(1)
    return torch.linalg.vector_norm(top, dim=1) / torch.linalg.vector_norm((x - y).flatten(1), dim=1)


def lipschitz_lower_bound(
    model: nn.Module,
    input_shape: int | tuple[int, ...],
    *,
    starts: int = 64,
    steps: int = 200,
    scale: float = 1.0,
    seed: int = 0,
    x: Tensor | None = None,
) -> SteepPair:
    """Search for the steepest pair of inputs by Jacobian norms and gradient ascent on pairs.

    Args:
        model: Any module from (batch, *input_shape) to (batch, ...); it is evaluated in its own precision and in
            evaluation mode.
        input_shape: Shape of one sample.
        starts: Number of starting points.
        steps: Steps of ascent.
        scale: Standard deviation of the starting points; a third of them is ten times and a third a tenth as far out.
        seed: Seed of the starting points.
        x: Further starting points (batch, *input_shape), for example data.

    Returns:
        The best pair; the same for the same arguments.
    """
    if starts < 1 or steps < 0 or not scale > 0:
        raise OptionError("starts must be positive, steps must not be negative, scale must be positive")
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    generator = torch.Generator().manual_seed(seed)
    points = scale * torch.randn(starts, *shape, generator=generator, dtype=torch.float64)
    factors = torch.tensor([1.0, 10.0, 0.1]).repeat(starts // 3 + 1)[:starts].double()
    points = (points * factors.reshape(-1, *[1] * len(shape))).to(like)
    if x is not None:
        if tuple(x.shape[1:]) != shape:
            raise ShapeError(f"x must have shape {('batch', *shape)}, not {tuple(x.shape)}")
        points = torch.cat([points, x.detach().to(like)])
    with evaluating(model):
        return _ascend(model, points, steps)


def _ascend(model: nn.Module, points: Tensor, steps: int) -> SteepPair:
    with torch.enable_grad():
        jacobians = _jacobians(model, points)
        _, norms, directions = torch.linalg.svd(jacobians, full_matrices=False)
        best_jacobian = float(norms[:, 0].max())
        length = 1e-2 * (1 + torch.linalg.vector_norm(points.flatten(1), dim=1))
        offset = (directions[:, 0] * length[:, None]).reshape(points.shape)
        x = points.clone().requires_grad_()
        y = (points + offset).clone().requires_grad_()
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.requires_grad_(False)
        try:
            optimiser = torch.optim.Adam([x, y], lr=0.02)
            best, pair = -1.0, (x, y)
            for _ in range(steps + 1):
                optimiser.zero_grad()
                slopes = _slopes(model, x, y)
                found = torch.nan_to_num(slopes.detach(), nan=-1.0)
                k = int(found.argmax())
                if float(found[k]) > best:
                    best, pair = (
                        float(found[k]),
                        (x[k : k + 1].detach().clone(), y[k : k + 1].detach().clone()),
                    )
                if not slopes.requires_grad:
                    break
                torch.log(slopes.clamp_min(1e-30)).sum().neg().backward()
                optimiser.step()
                with torch.no_grad():  # keep the pairs apart, or rounding would look like steepness
                    gap = y - x
                    size = torch.linalg.vector_norm(gap.flatten(1), dim=1)
                    short = (length / size.clamp_min(1e-30)).clamp_min(1.0).reshape(-1, *[1] * (x.ndim - 1))
                    y.copy_(x + gap * short)
        finally:
            for p in parameters:
                p.requires_grad_(True)
        with torch.no_grad():
            best_jacobian = max(best_jacobian, float(jacobian_norms(model, x.detach()).max()))
    return SteepPair(max(best, best_jacobian), best, best_jacobian, pair[0], pair[1])
