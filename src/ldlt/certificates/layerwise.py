r"""Bounds that look at one layer at a time: looser, for comparison and as a fallback.

* :func:`product`: norms of matrices times slopes, carried through the graph.
* :func:`eclipse`: ECLipsE and ECLipsE-Fast (Xu and Sivaranjani, *ECLipsE: Efficient compositional Lipschitz constant
  estimation for deep neural networks*, NeurIPS 2024, arXiv:2404.04375), for chains.

Both are feasible points of the same matrix inequality or weaker than one, so neither is below the optimum of
:func:`ldlt.certificates.optimise.minimise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ldlt.certificates.interior import solve
from ldlt.certificates.problem import Layer, Problem
from ldlt.certificates.start import feasible
from ldlt.errors import GraphError, InfeasibleError

__all__ = ["eclipse", "product"]


def product(problem: Problem) -> float:
    r"""Norms times slopes, layer by layer.

    With ``ℓ_b`` the constants of the blocks, a map ``v = Σ_b V_b z_b`` is bounded in two ways, and the smallest counts:

    .. math::

        \ell_v \le \sum_b \|V_b\|\,\ell_b ,\qquad
        \ell_v \le \bigl\|\,[V_{b_1}d_{b_1}\;\; V_{b_2}d_{b_2}\;\dots]\,\bigr\|
            \Bigl(\sum_b \ell_b^2/d_b^2\Bigr)^{1/2} .

    The second holds for every ``d_b > 0``, since the stacked vector of all ``z_b / d_b`` has at most the norm
    ``(Σ_b ℓ_b²/d_b²)^{1/2}‖x‖``; ``d = ℓ`` and ``d = 1`` are tried. For a chain all are the product of the norms.
    """
    constants = {problem.input: 1.0}
    for layer in problem.layers:
        slopes = torch.maximum((layer.center + layer.radius).abs(), (layer.center - layer.radius).abs())
        if layer.count < layer.size:  # joint: the radius is one for all
            constants[layer.name] = float(slopes.max()) * _carried(layer.inputs, constants)
        else:  # slopes act on rows, so they go into the norm
            scaled = {b: slopes[:, None] * v for b, v in layer.inputs.items()}
            constants[layer.name] = _carried(scaled, constants)
    return _carried(problem.output, constants)


def _carried(blocks: Mapping[str, Tensor], constants: Mapping[str, float]) -> float:
    """The smallest of the bounds."""
    if not blocks:
        return 0.0
    apart = sum(constants[b] * float(torch.linalg.matrix_norm(v, 2)) for b, v in blocks.items())
    if len(blocks) == 1:
        return apart
    plain = float(torch.linalg.matrix_norm(torch.cat(list(blocks.values()), 1), 2))
    plain *= math.sqrt(sum(constants[b] ** 2 for b in blocks))
    scaled = float(torch.linalg.matrix_norm(torch.cat([constants[b] * v for b, v in blocks.items()], 1), 2))
    return min(apart, plain, math.sqrt(len(blocks)) * scaled)


def eclipse(
    problem: Problem, *, fast: bool = False, tolerance: float = 1e-5, stop: Callable[[], bool] | None = None
) -> tuple[float, Tensor]:
    r"""ECLipsE for chains: choose the multipliers greedily from the input to the output.

    ``P_1 = I`` is passed on as ``P_{i+1} = 2Λ − 4 cΛW D^{-1}W'Λc``, ``D = P_i + 2W'Λ(c² − r²)W``. The multipliers of
    layer i are those with the largest s such that ``P_{i+1} ⪰ s W_{i+1}'W_{i+1}`` (a semidefinite program of the size
    of the layer), or for the fast variant, in closed form,

    .. math:: \Lambda_i = I / \|4 r^2\,W_iP_i^{-1}W_i'\| .

    The bound is ``‖W_n P_n^{-1} W_n'‖^{1/2}``.

    Args:
        problem: A chain.
        fast: The closed form.
        tolerance: Relative tolerance of s in each layer. A large one stops near the centre of what is feasible, which
            leaves more to the layers behind: 0.3 often ends in a lower bound than 1e-5, and is a better start.
        stop: Whether time is up; the layer at hand is then left as it is, and the rest takes the closed form.

    Returns:
        The bound, and multipliers of the full inequality.

    Raises:
        GraphError: If the network is not a chain.
        InfeasibleError: If a matrix that is passed on is singular to working precision.
    """
    if not problem.is_chain:
        raise GraphError("ECLipsE is defined for feed-forward chains; use method 'optimal' or 'product' for this graph")
    metric = torch.eye(problem.inputs, dtype=torch.float64)
    chosen: list[Tensor] = []
    names = list(problem.sizes)
    maps = [layer.inputs[name] for name, layer in zip(names, problem.layers, strict=False)] + [
        problem.output.get(names[-1], torch.zeros(problem.outputs, problem.sizes[names[-1]], dtype=torch.float64))
    ]
    for i, layer in enumerate(problem.layers):
        factor = _factor(metric, i)
        white = torch.linalg.solve_triangular(factor, maps[i].T, upper=False).T  # W L^{-T}
        if fast or (stop is not None and stop()):
            each = 4 * layer.radius[:, None] * (white @ white.T) * layer.radius
            value = torch.full((layer.count,), 1 / float(torch.linalg.matrix_norm(each, 2)), dtype=torch.float64)
        else:
            value = _greedy(layer, white, maps[i + 1], tolerance, stop or _never)
        chosen.append(value)
        spread = value[layer.shared]
        inner = metric + 2 * maps[i].T @ ((spread * layer.product)[:, None] * maps[i])
        half = torch.linalg.solve_triangular(_factor(inner, i), maps[i].T, upper=False)
        half = half * (2 * layer.center * spread)
        metric = torch.diag(2 * spread) - half.T @ half
    last = torch.linalg.solve_triangular(_factor(metric, len(chosen)), maps[-1].T, upper=False)
    squared = float(torch.linalg.matrix_norm(last, 2)) ** 2
    flat = torch.cat([torch.empty(0, dtype=torch.float64), *chosen])
    return math.sqrt(squared), squared * flat


def _factor(matrix: Tensor, index: int) -> Tensor:
    factor, info = torch.linalg.cholesky_ex((matrix + matrix.T) / 2)
    if int(info):
        raise InfeasibleError(f"ECLipsE: the matrix passed on to layer {index + 1} is not positive definite")
    return factor


def _never() -> bool:
    return False


def _greedy(layer: Layer, white: Tensor, after: Tensor, tolerance: float, stop: Callable[[], bool]) -> Tensor:
    """The semidefinite program of one layer: that of a network with it as its only hidden layer."""
    x = "x"
    alone = Layer(layer.name, layer.size, layer.kept, {x: white}, layer.center, layer.radius, layer.shared, layer.count)
    small = Problem(x, white.shape[1], (alone,), {layer.name: after}, len(after), {layer.name: layer.size})
    squared, start = feasible(small)
    best, chosen, low = squared, start, 0.0

    def report(value: float, multipliers: Tensor, lower: float) -> bool:
        nonlocal best, chosen, low
        if value < best:
            best, chosen = value, multipliers
        low = max(low, lower)
        return best <= low * (1 + tolerance)

    for reduced in (True, False):
        solve(small, start, squared, stop=stop, report=report, reduced=reduced, near=math.inf)
        if best <= low * (1 + tolerance) or stop():
            break
    return chosen.clone()
