"""The networks of the study: every family by name, built the same way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ldlt.engine.network import Lipschitz
from ldlt.nn import FeedForward, Residual
from ldlt_bench.families import FamilyNetwork
from ldlt_bench.paper import AsPrintedResidual, AsPrintedWarning
from ldlt_bench.study.family import AS_LDLT, AS_PRINTED, Family, Start, find_family

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
        start: Where it starts; default: as published.
    """
    kind, start = find_family(family), start or Start()
    shape = features, [width] * depth, classes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind.form:
            net = _ldlt(kind, *shape, start)
            return Model(net, net.pair_bounds, lambda: net.bound, scales=_scales(net, start))
        if kind.name == AS_PRINTED:
            return _as_printed(*shape, start)
        if kind.name == AS_LDLT:
            chain = _ldlt(find_family("LDLT-L:cayley"), *shape, start)  # before anything else is drawn
            layered = FamilyNetwork("sandwich", *shape, head="rows")
            _copy_chain(chain, layered)
            _move(layered, Start(own=start.own))
        else:
            layered = FamilyNetwork(kind.name.lower(), *shape, head="rows")
            _move(layered, start)
    padding = layered.embed.padding
    return Model(layered, layered.pair_bounds, lambda: layered.bound, padding=padding, scales=_scales(layered, start))


def _scales(net: nn.Module, start: Start) -> dict[str, float]:
    names = [name for name, _ in net.named_parameters() if "bias" in name]
    return dict.fromkeys(names, start.bias_scale) if start.bias_scale != 1.0 else {}


def _ldlt(family: Family, features: int, hidden: list[int], classes: int, start: Start) -> Lipschitz:
    make = FeedForward if family.form == "feedforward" else Residual
    return make(
        features,
        hidden,
        classes,
        head="rows",
        contraction=family.contraction or start.contraction,
        alpha=start.alpha * (hidden[0] / 64) ** start.growth,
        init=start.init,
        gain=start.gain,
        placing=start.placing,
    )


@torch.no_grad()
def _copy_chain(chain: Lipschitz, net: FamilyNetwork) -> None:
    """Let a Sandwich network compute what a chain with the Cayley contraction and Λ = I does."""
    linear = [m for m in chain.module.modules() if isinstance(m, nn.Linear)]
    skews = [p for name, p in chain.named_parameters() if name.startswith("skew.")]
    for part, skew, plain in zip(net.layers, skews, linear, strict=False):
        free = torch.cat((skew, plain.weight), 1)
        for name, value in (("weight", free), ("gain", free.norm()), ("bias", plain.bias)):
            part.get_parameter(name).copy_(value)
    net.head.load_state_dict(linear[-1].state_dict())


@torch.no_grad()
def _move(net: nn.Module, start: Start) -> None:
    """Change published start values to others."""
    for name, p in net.named_parameters():
        leaf = name.rpartition(".")[2]
        if p.dim() == 2 and start.init == "orthogonal":
            norm = p.norm()
            nn.init.orthogonal_(p)
            p.mul_(norm / p.norm())
        if p.dim() == 2 or leaf == "gain":
            p.mul_(start.gain)
        elif "bias" in name:
            p.mul_(start.placing)
        elif leaf == "log_q":
            p.mul_(start.own)
        else:  # logarithms: of Ψ, of α
            p.add_(math.log(start.own))


def _as_printed(features: int, hidden: list[int], classes: int, start: Start) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AsPrintedWarning)  # the rows of the results say it
        net = AsPrintedResidual(features, hidden, classes, form="cholesky")
    _move(net, start)

    def claimed() -> Tensor:
        # The paper claims ‖f(x) − f(x')‖ ≤ ‖x − x'‖; a difference of two logits would then have √2.
        return net.bound * 2**0.5 * (1 - torch.eye(classes, dtype=torch.float64))

    return Model(net, claimed, lambda: net.bound, certified=False, scales=_scales(net, start))


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
