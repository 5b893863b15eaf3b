"""The networks of the study: every family by name, built the same way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ldlt.engine.network import Lipschitz
from ldlt.nn import FeedForward, Residual
from ldlt_bench.families import FamilyNetwork
from ldlt_bench.paper import AsPrintedResidual, AsPrintedWarning
from ldlt_bench.study.family import AS_PRINTED, Family, find_family
from ldlt_bench.study.protocol import Start

__all__ = ["Model", "build", "flatten", "load", "unflatten"]


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


def build(
    family: str, features: int, width: int, depth: int, classes: int, seed: int, start: Start | None = None
) -> Model:
    """Build a network with row-normalised linear head and bound 1 in float32.

    Args:
        family: One of :data:`~ldlt_bench.study.family.FAMILIES`, or the engine's with another contraction.
        features: Number of inputs.
        width: Neurons per hidden layer.
        depth: Number of hidden layers.
        classes: Number of logits.
        seed: Seed of the start values; the global generator is left alone.
        start: Start values of LDLT networks; default: those of the protocols.
    """
    kind = find_family(family)
    hidden = [width] * depth
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind.form:
            return _ldlt(kind, features, hidden, classes, start or Start())
        if kind.name == AS_PRINTED:
            return _as_printed(features, hidden, classes)
        net = FamilyNetwork(kind.name.lower(), features, hidden, classes, head="rows")
        return Model(net, net.pair_bounds, lambda: net.bound, padding=net.embed.padding)


def _ldlt(family: Family, features: int, hidden: list[int], classes: int, start: Start) -> Model:
    make = FeedForward if family.form == "feedforward" else Residual
    net: Lipschitz = make(
        features,
        hidden,
        classes,
        head="rows",
        contraction=start.contraction_of(family),
        alpha=start.alpha_at(hidden[0]),
        init=start.init,
        gain=start.gain,
        placing=start.placing,
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


def flatten(model: Model) -> Tensor:
    """Trained parameters of a model, as stored (see ``Model.scales``), in one vector (P,)."""
    return torch.cat([(p.detach() / model.scales.get(n, 1.0)).reshape(-1) for n, p in _trained(model.module)])


def unflatten(model: Model, flat: Tensor) -> dict[str, Tensor]:
    """Parameters as used, by name, from a vector as stored."""
    trained = _trained(model.module)
    parts = flat.split([p.numel() for _, p in trained])
    views = {name: part.view(like.shape) for (name, like), part in zip(trained, parts, strict=True)}
    return {name: value * model.scales[name] if name in model.scales else value for name, value in views.items()}


def load(model: Model, flat: Tensor) -> None:
    """Put a vector as stored into the model's own parameters."""
    with torch.no_grad():
        for name, value in unflatten(model, flat).items():
            model.module.get_parameter(name).copy_(value)


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad]
