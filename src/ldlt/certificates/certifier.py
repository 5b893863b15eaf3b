"""One call from a network to its certificate: search, then proof, then the statement of what was proven.

The search only proposes. Multipliers and a bound go to :mod:`ldlt.certificates.settle`, which raises the bound by the
smallest factor found that passes the proof, and what passed is what the certificate states.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.certificates.certificate import CERTIFIED, NOT_CERTIFIED, Certificate, require_plain, residual_of
from ldlt.certificates.convolutional import TorusProblem
from ldlt.certificates.eliminate import on_torus
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.certificates.local import Region, ranges
from ldlt.certificates.norms import layer_norms
from ldlt.certificates.problem import Problem
from ldlt.certificates.proof import LARGEST, Proof, Prover
from ldlt.certificates.settle import settle, settle_gram, settle_on_torus
from ldlt.certificates.solve import SMALLEST, TOLERANCE, Solution, Step, minimise, product
from ldlt.certificates.torus import TorusNetwork
from ldlt.engine.network import Lipschitz, sample_shape
from ldlt.errors import GraphError, InfeasibleError, OptionError, ShapeError
from ldlt.graph import Convolution, Graph, Wire
from ldlt.graph.operations import TABLE

__all__ = ["METHODS", "TOLERANCE", "Step", "built_multipliers", "certify", "freeze_certified", "issue"]

METHODS = ("optimal", "product")
"""``optimal``: the best multipliers. ``product``: norms multiplied along the graph, for comparison."""

LARGEST_MATRICES = 40_000_000
"""Entries of the matrices of all convolutions and other given maps together, above which norms of layers stand in."""

_MOST_OUTPUTS = 512  # for which constants of all pairs are stored
_ROOM = 1e-9  # relative: a bound at which the inequality is singular cannot be proven
_WORTH_AN_ESTIMATE = 1000  # size from which on a proof takes noticeable time

Late = Callable[[], bool]


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
            inputs are treated as matrices, larger ones per frequency, with one multiplier per channel. What has neither
            form leaves norms of single layers, a loose bound; ``certificate.method`` then says so, and why.
        input_shape: Shape of one input, without the batch dimension. Not needed where the model tells.
        method: One of :data:`METHODS`.
        region: Bound the slope between any two points of a ball or box only. Such bounds account for rounding by
            margins, not by a proof.
        time_limit: Seconds. The search leaves as much of them to the proof as that is expected to take; the proof
            itself is never cut short. The bound found so far is valid, and never above the product of norms.
        tolerance: Relative tolerance of the search.
        progress: Called after every step of the search. A ``KeyboardInterrupt`` ends it; the best so far is proven.

    Returns:
        A certificate; ``certificate.rigorous`` tells whether the bound was proven with all rounding errors. Where there
        is no bound or no proof, its status is ``"not certified"`` and ``certificate.reason`` says why.

    Raises:
        UnsupportedOpError: The network has an operation without a rule.
        OptionError: An unknown method, or a time limit or tolerance that is none.
        ShapeError: The input's shape is missing or wrong.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> found = certify(net, 4)
        >>> found.status, found.rigorous, found.bound <= certify(net, 4, method="product").bound
        ('certified', True, True)
    """
    begin = time.perf_counter()
    if method not in METHODS:
        raise OptionError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if region is not None and not isinstance(region, Region):
        raise OptionError(f"region must be a ldlt.Region, such as Region('ball', center, radius), not {region!r}")
    for name, value in (("tolerance", tolerance), ("time_limit", 1.0 if time_limit is None else time_limit)):
        if not (isinstance(value, int | float) and value >= 0 and (value > 0 or name == "time_limit")):
            raise OptionError(f"{name} must be a {'positive number' if name == 'tolerance' else 'number of seconds'}")
    if not isinstance(model, nn.Module):
        from ldlt.files.read import read_onnx  # noqa: PLC0415 (only for files)

        file = read_onnx(model, input_shape=None if input_shape is None else sample_shape(input_shape))
        model, input_shape = file.module, file.input_shape
    if isinstance(model, Lipschitz):
        if region is None and method == "optimal":
            return freeze_certified(model)[1]
        input_shape, model = tuple(model.input_shape), model.frozen_map()
    if input_shape is None:
        raise ShapeError("input_shape is needed: the shape of one input, without the batch dimension")
    graph = traced(model, sample_shape(input_shape))
    end = math.inf if time_limit is None else begin + time_limit
    cause = _too_large(graph)
    if region is None:
        try:
            network = on_torus(graph, model)
        except GraphError as error:
            cause = f"{cause}, and {error}" if cause else ""
        else:
            if network is not None:
                return _per_channel(network, method, end, tolerance, progress)
    if cause:
        if region is not None:
            raise GraphError(cause)
        return _unproven(graph, model, layer_norms(graph, model), f"norms of single layers, because {cause}")
    slopes = None if region is None else ranges(graph, model, region).slopes
    problem = Problem.build(graph, model, slopes)

    def late() -> bool:
        return time.perf_counter() > end

    left = None
    if time_limit is not None:
        left = max(0.0, end - _proof_seconds(sum(problem.sizes.values()) + problem.outputs) - time.perf_counter())
    label = method if region is None else f"{method}, local"
    try:
        if method == "product":
            found = _product(problem)
        else:
            found = minimise(problem, time_limit=left, tolerance=tolerance, progress=progress)
    except InfeasibleError as error:
        return _certificate(graph, model, math.inf, label, reason=str(error), region=region)
    prover = Prover(graph, model, slopes)
    proof = settle(prover, found.multipliers, (1 + _ROOM) * found.bound, late=late)
    if not proof.holds and not proof.unknown and method != "product":
        plain = _product(problem)  # far from the boundary of what is feasible
        second = settle(prover, plain.multipliers, (1 + _ROOM) * plain.bound, late=late)
        proof = second if second.holds else proof
    if proof.unknown or (region is not None and not proof.holds):
        return _unproven(graph, model, found.bound, f"{label}, unproven: {proof.reason}", region, found.multipliers)
    return _stated(prover, proof, label, region, pairs=not late())


def _per_channel(
    network: TorusNetwork, method: str, end: float, tolerance: float, progress: Callable[[Step], object] | None
) -> Certificate:
    """The certificate of a convolutional network, with one multiplier per channel."""
    graph, model, label = network.graph, network.module, f"{method}, one multiplier per channel"
    problem = TorusProblem.on(network)
    try:
        if method == "product":
            found = _product(problem)
        else:
            left = None if end == math.inf else max(0.0, 0.8 * (end - time.perf_counter()))
            found = minimise(problem, time_limit=left, tolerance=tolerance, progress=progress)
    except InfeasibleError as error:
        return _certificate(graph, model, math.inf, label, reason=str(error))
    proof, gram = settle_on_torus(network, found.multipliers, found.bound), None
    if not proof.holds and method != "product":
        plain = _product(problem)
        proof = settle_on_torus(network, plain.multipliers, plain.bound)
    if not proof.holds:
        return _unproven(graph, model, found.bound, f"{label}, unproven: {proof.reason}", None, found.multipliers)
    gram = proof.gram if 1 < graph[graph.output].features <= _MOST_OUTPUTS else None
    return _certificate(graph, model, proof.bound, label, multipliers=proof.multipliers, rigorous=True, gram=gram)


def issue(
    model: nn.Module,
    input_shape: Sequence[int],
    multipliers: Mapping[str, Tensor],
    bound: float,
    *,
    method: str = "given multipliers",
    region: Region | None = None,
    largest: float = 1 + 1e-3,
    least: float = 1.0,
    pairs: bool = True,
) -> Certificate:
    """A certificate of a stored network, from multipliers that somebody found.

    Args:
        model: The network, with plain weights.
        input_shape: Shape of one input.
        multipliers: ``Λ`` by activation node of the traced network.
        bound: ℓ.
        method: How the multipliers were found.
        region: Bound slopes between points of this region only. The enclosures of the slopes there account for
            rounding by margins, so the certificate is not rigorous; what follows from them is proven all the same.
        largest: Largest factor by which ℓ may be raised so that the proof passes in spite of rounding.
        least: Smallest factor on ℓ.
        pairs: Whether to prove constants of output directions, too.

    Returns:
        A certificate that is rigorous unless it is about a region, or one with the status ``"not certified"`` and a
        reason.
    """
    require_plain(model)
    graph = traced(model, [int(n) for n in input_shape])
    slopes = None if region is None else ranges(graph, model, region).slopes
    prover = Prover(graph, model, slopes)
    return _stated(prover, settle(prover, multipliers, bound, largest, least), method, region, pairs)


def freeze_certified(net: Lipschitz) -> tuple[nn.Module, Certificate]:
    """The stored form of a network built here, and its certificate with the network's own multipliers.

    >>> import ldlt
    >>> stored, certificate = freeze_certified(ldlt.nn.FeedForward(4, [8, 8], 3, bound=1.0))
    >>> certificate.status, certificate.rigorous, certificate.bound < 1 + 1e-5
    ('certified', True, True)
    """
    stored = net.frozen_map()
    graph = traced(stored, net.input_shape)
    # Wrapping the module for a gain renames its nodes; their order stays.
    multipliers = dict(zip([a.name for a in graph.activations], built_multipliers(net), strict=True))
    prover = Prover(graph, stored)
    return stored, _stated(prover, settle(prover, multipliers, net.bound), "by construction", None, True)


def built_multipliers(net: Lipschitz) -> list[Tensor]:
    """``Λ`` of a network built here by activation, in order, for the inequality of its reported bound, in float64.

    Where single outputs have the declared bound, the inequality is scaled to that of the whole map.
    """
    scale = (net.bound / net.declared_bound) ** 2
    return [scale * m.double() for m in net.multipliers().values()]


def _product(problem: Problem) -> Solution:
    """The product of norms, with multipliers that prove it."""
    if not problem.output or not problem.layers:
        return minimise(problem)
    bound, multipliers = product(problem)
    if not (0 < bound**2 < math.inf and bool(((multipliers > 0) & multipliers.isfinite()).all())):
        raise InfeasibleError("the product of norms overflows: weights or slopes are too large for float64")
    return Solution(bound, problem.full(bound**2 * multipliers), 0.0, False, "closed form")


def _too_large(graph: Graph) -> str:
    """Why a network is too large for the inequality and its proof; empty if it is not."""
    maps = [n for n in graph.nodes if isinstance(n, Convolution) or (isinstance(n, Wire) and n.role == "linear")]
    diagonal = {TABLE[name].rule for name in ("mul", "div")}
    maps = [n for n in maps if not (isinstance(n, Wire) and TABLE[n.operation].rule in diagonal)]
    entries = sum(n.features * graph[p].features for n in maps for p in n.parents)
    if entries > LARGEST_MATRICES:
        return f"as matrices its convolutions have {entries:.2g} entries, more than {LARGEST_MATRICES:.2g}"
    size = sum(n.features for n in (graph.input, *graph.activations, graph[graph.output]))
    if size > LARGEST:
        return f"as matrices it has {size} inputs, neurons and outputs, more than {LARGEST}"
    return ""


def _proof_seconds(size: int) -> float:
    """About how long a proof takes here, constants of pairs included: some four cubes of the size."""
    if size < _WORTH_AN_ESTIMATE:
        return 0.0
    probe = torch.ones(512, 512, dtype=torch.float64)
    begin = time.perf_counter()
    probe = probe @ probe
    return (time.perf_counter() - begin) * 2 * (size / 512) ** 3


def _stated(prover: Prover, proof: Proof, method: str, region: Region | None, pairs: bool) -> Certificate:
    """What a proof says, with constants of output directions if there is a proof of them, too."""
    graph, model = prover.graph, prover.module
    if not proof.holds:
        numbers = {"multipliers": proof.multipliers, "reason": proof.reason, "region": region}
        return _certificate(graph, model, math.inf, method, **numbers)
    gram = None
    if pairs and 1 < graph[graph.output].features <= _MOST_OUTPUTS:
        gram = settle_gram(prover, proof).gram
    return _certificate(
        graph,
        model,
        proof.bound,
        method,
        multipliers=proof.multipliers,
        rigorous=region is None,
        residual=residual_of(graph, model, proof.multipliers, proof.bound, prover.slopes),
        region=region,
        gram=gram,
    )


def _unproven(
    graph: Graph,
    model: nn.Module,
    bound: float,
    method: str,
    region: Region | None = None,
    multipliers: dict[str, Tensor] | None = None,
) -> Certificate:
    """A bound in floating point, raised by what its computation may have lost, without a proof."""
    bound = max(bound, SMALLEST) * (1 + _ROOM)
    if not math.isfinite(bound):
        reason = "the bound overflows: weights or slopes are too large"
        return _certificate(graph, model, math.inf, method[:200], reason=reason, region=region)
    return _certificate(graph, model, bound, method[:200], multipliers=multipliers or {}, region=region)


def _certificate(graph: Graph, model: nn.Module, bound: float, method: str, **fields: Any) -> Certificate:
    """A statement about a network; it certifies something if the bound is finite."""
    defaults = {"reason": "", "multipliers": {}, "rigorous": False, "residual": math.nan}
    return Certificate(
        bound=bound,
        status=CERTIFIED if math.isfinite(bound) else NOT_CERTIFIED,
        method=method,
        input_shape=graph.input.shape,
        outputs=graph[graph.output].features,
        fingerprint=fingerprint(graph, model),
        **{**defaults, **fields},
    )
