"""The networks of the study: every family by name, built the same way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ldlt.bench.protocol import Start, has_start
from ldlt.contraction import CONTRACTIONS
from ldlt.errors import OptionError
from ldlt.families import FamilyNetwork
from ldlt.network import Lipschitz
from ldlt.nn import FeedForward, Residual
from ldlt.paper import AsPrintedResidual, AsPrintedWarning

__all__ = ["FAMILIES", "STUDY_FAMILIES", "Model", "build", "canonical"]

STUDY_FAMILIES: tuple[str, ...] = ("AOL", "Orthogonal", "Sandwich", "SLL", "LDLT-L", "LDLT-R")
"""The six families of the paper's tables."""

FAMILIES: tuple[str, ...] = (*STUDY_FAMILIES, "CPL", "Spectral", "LDLT-R as printed")
"""All families. ``LDLT-L:cayley`` and the like name a contraction other than Cholesky's."""


@dataclass
class Model:
    """A network with what the study needs to know of it.

    Attributes:
        module: The network; input (batch, d), output (batch, k).
        pair_bounds: Constants of all logit differences (k, k), at the module's current parameters.
        bound: Constant of the whole map, at the current parameters.
        certified: False if the bound is claimed but not true.
        padding: Number of zeros appended to the input.
        scales: Parameter name -> factor between the stored and the used parameter (1 where absent).
    """

    module: nn.Module
    pair_bounds: Callable[[], Tensor]
    bound: Callable[[], float]
    certified: bool = True
    padding: int = 0
    scales: Mapping[str, float] = field(default_factory=dict)


def canonical(name: str) -> str:
    """Full name of a family, written in any case.

    Raises:
        OptionError: If there is no such family.

    Example:
        >>> canonical("ldlt-r"), canonical("LDLT-L:Cayley")
        ('LDLT-R', 'LDLT-L:cayley')
    """
    base, _, contraction = name.strip().lower().partition(":")
    for family in FAMILIES:
        if family.lower() == base:
            if not contraction:
                return family
            if family in ("LDLT-L", "LDLT-R") and contraction in CONTRACTIONS:
                return family if contraction == "cholesky" else f"{family}:{contraction}"
    raise OptionError(
        f"unknown family {name!r}; choose from {', '.join(FAMILIES)}, or LDLT-L / LDLT-R with a contraction behind a "
        f"colon ({', '.join(CONTRACTIONS)})"
    )


def build(
    family: str,
    features: int,
    width: int,
    depth: int,
    classes: int,
    seed: int,
    start: Start | None = None,
) -> Model:
    """Build a network with row-normalised linear head and bound 1 in float32.

    Args:
        family: One of :data:`FAMILIES`.
        features: Number of inputs.
        width: Neurons per hidden layer.
        depth: Number of hidden layers.
        classes: Number of logits.
        seed: Seed of the start values; the global generator is left alone.
        start: Start values of LDLT networks; default: those of the protocols.
    """
    family = canonical(family)
    hidden = [width] * depth
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_start(family):
            return _ldlt(family, features, hidden, classes, start or Start())
        if family == "LDLT-R as printed":
            return _as_printed(features, hidden, classes)
        net = FamilyNetwork(family.lower(), features, hidden, classes, head="rows")
        return Model(net, net.pair_bounds, lambda: net.bound, padding=net.embed.padding)


def _ldlt(family: str, features: int, hidden: list[int], classes: int, start: Start) -> Model:
    base, _, contraction = family.partition(":")
    make = FeedForward if base == "LDLT-L" else Residual
    net: Lipschitz = make(
        features,
        hidden,
        classes,
        head="rows",
        contraction=contraction or "cholesky",
        alpha=start.alpha_at(hidden[0]),
        init=start.init,
        gain=start.gain,
    )
    scales = {name: start.bias_scale for name, _ in net.named_parameters() if name.endswith(".bias")}
    return Model(net, net.pair_bounds, lambda: net.bound, scales=scales)


def _as_printed(features: int, hidden: list[int], classes: int) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AsPrintedWarning)  # the rows of the results say it
        net = AsPrintedResidual(features, hidden, classes, form="cholesky")

    def claimed() -> Tensor:
        # The paper claims ‖f(x) − f(x')‖ ≤ ‖x − x'‖; a difference of two logits would then have √2.
        return net.bound * 2**0.5 * (1 - torch.eye(classes, dtype=torch.float64))

    return Model(net, claimed, lambda: net.bound, certified=False)
