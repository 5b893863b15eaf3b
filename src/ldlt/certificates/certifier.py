"""One call from a network to its certificate."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ldlt.certificates.certificate import CERTIFIED, NOT_CERTIFIED, Certificate, freeze_certified, issue_for
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.certificates.layered import layer_norms
from ldlt.certificates.layerwise import eclipse, product
from ldlt.certificates.local import local_problem
from ldlt.certificates.optimise import SMALLEST, TOLERANCE, Solution, Step, bound_of, minimise
from ldlt.certificates.problem import Problem
from ldlt.certificates.proof import LARGEST
from ldlt.certificates.region import Region
from ldlt.certificates.sdp import solve_sdp
from ldlt.engine.network import Lipschitz, sample_shape
from ldlt.errors import GraphError, InfeasibleError, OptionError, ShapeError
from ldlt.files.read import read_onnx
from ldlt.graph import Convolution, Graph, Wire
from ldlt.graph.operations import TABLE

__all__ = ["METHODS", "certify"]

METHODS = ("optimal", "sdp", "eclipse", "product")
"""``optimal``: the best multipliers, by the package's own methods. ``sdp``: the same by cvxpy. ``eclipse``: ECLipsE's
multipliers, for chains. ``product``: norms multiplied along the graph, without multipliers."""

LARGEST_MATRICES = 40_000_000
"""Entries of the matrices of all convolutions and other given maps together, above which norms of layers stand in."""

_REPLACEABLE = ("optimal", "product")  # methods for which norms of single layers may stand in


def certify(
    model: nn.Module | str | os.PathLike[str] | bytes,
    input_shape: int | Sequence[int] | None = None,
    *,
    method: str = "optimal",
    region: Region | None = None,
    time_limit: float | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[Step], object] | None = None,
) -> Certificate:
    """Bound the Lipschitz constant of a given network, and prove the bound for its weights as they are stored.

    Args:
        model: A plain network of the operations that :class:`ldlt.Lipschitz` accepts, such a network itself (its
            ``freeze()`` is certified, with the multipliers it was built with), or an ONNX file. Convolutions of small
            inputs are treated as matrices. Larger ones leave norms of single layers, a loose bound;
            ``certificate.method`` then says so, and why.
        input_shape: Shape of one input, without the batch dimension. Not needed where the model tells.
        method: One of :data:`METHODS`.
        region: Bound the slope between any two points of a ball or box only. Such bounds account for rounding by
            margins, not by a proof.
        time_limit: Seconds after which the search stops. The bound found so far is valid.
        tolerance: Relative tolerance of the search.
        progress: Called after every step of the search.

    Returns:
        A certificate; ``certificate.rigorous`` tells whether the bound was proven with all rounding errors. Where there
        is no bound or no proof, its status is ``"not certified"`` and ``certificate.reason`` says why.

    Raises:
        UnsupportedOpError: The network has an operation without a rule.
        OptionError: An unknown method.
        ShapeError: The input's shape is missing or wrong.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> found = certify(net, 4)
        >>> found.status, found.rigorous, found.bound <= certify(net, 4, method="product").bound
        ('certified', True, True)
    """
    if method not in METHODS:
        raise OptionError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if region is not None and not isinstance(region, Region):
        raise OptionError(f"region must be a ldlt.Region, such as Region('ball', center, radius), not {region!r}")
    if not isinstance(model, nn.Module):
        file = read_onnx(model, input_shape=None if input_shape is None else sample_shape(input_shape))
        model, input_shape = file.module, file.input_shape
    if isinstance(model, Lipschitz):
        if region is None and method == "optimal":
            return freeze_certified(model)[1]
        input_shape, model = tuple(model.input_shape), model.freeze()
    if input_shape is None:
        raise ShapeError("input_shape is needed: the shape of one input, without the batch dimension")
    shape = sample_shape(input_shape)
    graph = traced(model, shape)
    cause = _too_large(graph)
    if cause:
        if region is not None or method not in _REPLACEABLE:
            raise GraphError(cause)
        bound = layer_norms(graph, model)
        return _Subject.of(graph, model, None).unproven(bound, f"norms of single layers, because {cause}"[:200])
    problem = Problem.build(graph, model) if region is None else local_problem(graph, model, region)
    if method == "product":
        return _Subject.of(graph, model, region).unproven(product(problem), "product of norms")
    try:
        solution = _solve(problem, method, time_limit, tolerance, progress)
    except InfeasibleError as error:
        return _Subject.of(graph, model, region).refused(method, str(error))
    if region is None:
        found = issue_for(graph, model, solution.multipliers, solution.bound, method=method)
        if found.is_certified or "is not known" not in found.reason:
            return found
        return _Subject.of(graph, model, None).unproven(solution.bound, f"{method}, unproven: {found.reason}"[:200])
    found = issue_for(graph, model, solution.multipliers, solution.bound, method=f"{method}, local", region=region)
    if found.is_certified:
        return found
    subject = _Subject.of(graph, model, region)
    return subject.unproven(solution.bound, f"{method}, local, unproven", solution.multipliers)


def _too_large(graph: Graph) -> str:
    """Why a network with convolutions or other given maps is too large for a proof; empty if it is not."""
    maps = [n for n in graph.nodes if isinstance(n, Convolution) or (isinstance(n, Wire) and n.role == "linear")]
    diagonal = {TABLE[name].rule for name in ("mul", "div")}
    maps = [n for n in maps if not (isinstance(n, Wire) and TABLE[n.operation].rule in diagonal)]
    entries = sum(n.features * graph[p].features for n in maps for p in n.parents)
    if entries > LARGEST_MATRICES:
        return f"as matrices its convolutions have {entries:.2g} entries, more than {LARGEST_MATRICES:.2g}"
    size = sum(n.features for n in (graph.input, *graph.activations))
    if maps and size > LARGEST:
        return f"with convolutions as matrices it has {size} inputs and neurons, more than {LARGEST}"
    return ""


def _solve(
    problem: Problem,
    method: str,
    time_limit: float | None,
    tolerance: float,
    progress: Callable[[Step], object] | None,
) -> Solution:
    if method == "sdp":
        return solve_sdp(problem)
    if method == "eclipse" and problem.output:
        try:
            _, flat = eclipse(problem)
        except (ArithmeticError, torch.linalg.LinAlgError) as error:
            raise InfeasibleError(f"the numbers overflow: weights or slopes are too large ({error})") from error
        multipliers = problem.full(flat)
        return Solution(bound_of(problem, multipliers), multipliers, 0.0, False, "closed form")
    return minimise(problem, time_limit=time_limit, tolerance=tolerance, progress=progress)


@dataclass(frozen=True)
class _Subject:
    """What a certificate without a proof is about.

    Attributes:
        input_shape: Shape of one input.
        outputs: Number of outputs.
        fingerprint: Of the network.
        region: Where the bound holds; everywhere if None.
    """

    input_shape: tuple[int, ...]
    outputs: int
    fingerprint: str
    region: Region | None = None

    @classmethod
    def of(cls, graph: Graph, model: nn.Module, region: Region | None) -> _Subject:
        """A network that has a graph."""
        return cls(graph.input.shape, graph[graph.output].features, fingerprint(graph, model), region)

    def unproven(self, bound: float, method: str, multipliers: dict[str, torch.Tensor] | None = None) -> Certificate:
        """A bound in floating point, raised by what its computation may have lost, without a proof."""
        bound = max(bound, SMALLEST) * (1 + 1e-9)
        if not math.isfinite(bound):
            return self.refused(method, "the bound overflows: weights or slopes are too large")
        return self._certificate(bound, CERTIFIED, "", method, multipliers or {})

    def refused(self, method: str, reason: str) -> Certificate:
        """A certificate of nothing, with the reason."""
        return self._certificate(math.inf, NOT_CERTIFIED, reason, method, {})

    def _certificate(
        self, bound: float, status: str, reason: str, method: str, multipliers: dict[str, torch.Tensor]
    ) -> Certificate:
        return Certificate(
            bound=bound,
            status=status,
            reason=reason,
            method=method,
            multipliers=multipliers,
            rigorous=False,
            residual=math.nan,
            input_shape=self.input_shape,
            outputs=self.outputs,
            fingerprint=self.fingerprint,
            region=self.region,
        )
