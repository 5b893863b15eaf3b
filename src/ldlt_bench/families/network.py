r"""A network of layers of one family, with one constant.

.. math::

    y = V\,(f_n \circ \dots \circ f_1)(\ell\,E x) + b,

where E pads the input with zeros if the family needs one width throughout, every :math:`f_i` is 1-Lipschitz,
and :math:`\ell` is the only place where a constant enters: it multiplies the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldlt.check import choice, positive, whole
from ldlt.errors import BoundError, ShapeError
from ldlt_bench.families.layer import Explicit, Layer, check_input, plain_linear
from ldlt_bench.families.normalised import AOL, RowsHead, Spectral, pair_constants
from ldlt_bench.families.orthogonal import Orthogonal, Sandwich, SandwichOutput
from ldlt_bench.families.potential import CPL, SLL

__all__ = ["FAMILIES", "HEADS", "FamilyNetwork"]

FAMILIES: dict[str, type[Layer]] = {
    "aol": AOL,
    "orthogonal": Orthogonal,
    "sandwich": Sandwich,
    "sll": SLL,
    "cpl": CPL,
    "spectral": Spectral,
}
"""Layer of every family, by name; each is called as ``layer(in_features, neurons, activation)``."""

JOINT_HEADS = FAMILIES | {"sandwich": SandwichOutput, "sll": AOL, "cpl": Spectral}
"""Linear map of norm at most one for every family: its own, or its normalisation if it has skips only."""

HEADS = ("rows", "joint")
"""Kinds of head: unit rows, or a joint spectral norm of at most one."""


class Embed(nn.Module):
    """``x -> [scale x; 0]``: multiplies by a constant and appends ``padding`` zeros to the last axis."""

    def __init__(self, scale: float, padding: int) -> None:
        super().__init__()
        self.scale = scale
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Scale and pad ``x``, shape ``(..., n)``."""
        y = x * self.scale
        return F.pad(y, (0, self.padding)) if self.padding else y


class FamilyNetwork(nn.Module):
    """A dense network of one family with a certified constant.

    Layer i has ``hidden[i]`` activations. In the residual families (``"sll"``, ``"cpl"``) all layers share
    one width, the larger of ``in_features`` and ``hidden[0]``; the input is padded with zeros up to it, and
    ``hidden[i]`` is the number of columns of the i-th W. In the other families ``hidden[i]`` is the output
    width of layer i.

    ``bound`` multiplies the input, once. With ``head="joint"`` the last map has norm at most one and the
    network is ``bound``-Lipschitz. With ``head="rows"`` its rows have norm one: every logit is
    ``bound``-Lipschitz, and the constant of the whole map is ``bound · ‖V‖₂``. The property :attr:`bound` is
    always the constant of the whole map; :attr:`scale` is the argument.

    Args:
        family: A key of :data:`FAMILIES`.
        in_features: Width of the input.
        hidden: Number of activations of every layer, at least one.
        out_features: Number of outputs.
        bound: Constant ℓ of the body, a positive finite number.
        head: ``"rows"`` or ``"joint"``.
        activation: A key of ``ACTIVATIONS``.

    Example:
        >>> net = FamilyNetwork("sll", 4, (16, 16), 3, bound=2.0, head="joint")
        >>> net(torch.randn(5, 4)).shape, net.bound
        (torch.Size([5, 3]), 2.0)
    """

    def __init__(
        self,
        family: str,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        *,
        bound: float = 1.0,
        head: str = "rows",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        choice("family", family, FAMILIES)
        choice("head", head, HEADS)
        if len(hidden) == 0:
            raise ShapeError("hidden must name at least one layer")
        whole("in_features", in_features, error=ShapeError)
        whole("hidden", hidden[0], error=ShapeError)
        layer = FAMILIES[family]
        width = max(in_features, hidden[0]) if layer.residual else in_features
        self.family = family
        self.head_kind = head
        self.in_features = in_features
        self.out_features = out_features
        self.scale = positive("bound", bound, BoundError)
        self.embed = Embed(self.scale, width - in_features)
        layers: list[Layer] = []
        for neurons in hidden:
            layers.append(layer(width, neurons, activation))
            width = layers[-1].out_features
        self.layers = nn.ModuleList(layers)
        self.head: Layer = (
            RowsHead(width, out_features) if head == "rows" else JOINT_HEADS[family](width, out_features, "identity")
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape ``(..., in_features)`` to ``(..., out_features)``."""
        check_input(x, self.in_features)
        x = self.embed(x)
        for part in self.parts():
            x = part(x)
        return x

    def parts(self) -> list[Layer]:
        """All layers and, last, the head."""
        return [*cast("Iterable[Layer]", self.layers), self.head]

    def explicit(self) -> tuple[Explicit, ...]:
        """Evaluate the weights of all layers and, last, of the head: a pure function of the parameters."""
        return tuple(part.explicit() for part in self.parts())

    @property
    def bound(self) -> float:
        """Constant of the whole map: ``scale`` (joint head) or ``scale · ‖V‖₂`` in float64 (rows head)."""
        if self.head_kind == "joint":
            return self.scale
        weight = self.head.explicit().inner.detach().double()
        return self.scale * float(torch.linalg.matrix_norm(weight, 2))

    def pair_bounds(self) -> Tensor:
        """Constants of all logit differences, ``scale · ‖v_c − v_j‖`` as a ``(k, k)`` tensor in float64.

        Differentiable. The certified radius of a prediction c is ``min_j (y_c − y_j) / pair_bounds[c, j]``. The
        difference of two nearly equal rows is rounding, so a few rounding units of the rows are added.
        """
        weight = self.head.explicit().inner
        norms = 4 * torch.finfo(weight.dtype).eps * weight.detach().double().norm(dim=-1)
        rounding = (norms[..., :, None] + norms[..., None, :]).fill_diagonal_(0)
        return self.scale * (pair_constants(weight.double()) + rounding)

    def freeze(self) -> nn.Sequential:
        """Return a plain sequential network with copies of the weights that computes the same function.

        Neighbouring linear maps are multiplied out (in float64), so a Sandwich network becomes an ordinary
        chain of ``nn.Linear`` and activations, and a scale without padding goes into the first of them.
        """
        modules: list[nn.Module] = []
        if self.scale != 1.0 or self.embed.padding:
            modules.append(Embed(self.scale, self.embed.padding))
        for part in self.parts():
            for module in part.freeze():
                _append(modules, module)
        return nn.Sequential(*modules)

    def extra_repr(self) -> str:
        """Family and head, for ``print``."""
        return f"family={self.family!r}, head={self.head_kind!r}, scale={self.scale}"


def _append(modules: list[nn.Module], module: nn.Module) -> None:
    """Append a module, or multiply it with the last one if both are linear."""
    last = modules[-1] if modules else None
    if isinstance(module, nn.Linear) and isinstance(last, nn.Linear):
        modules[-1] = _product(module, last)
    elif isinstance(module, nn.Linear) and isinstance(last, Embed) and not last.padding:
        modules[-1] = plain_linear(module.weight * last.scale, module.bias)
    else:
        modules.append(module)


def _product(second: nn.Linear, first: nn.Linear) -> nn.Linear:
    """Compose two linear modules into one, in float64."""
    weight, dtype = second.weight.double(), second.weight.dtype
    biases = [] if second.bias is None else [second.bias.double()]
    biases += [] if first.bias is None else [weight @ first.bias.double()]
    product = (weight @ first.weight.double()).to(dtype)
    return plain_linear(product, torch.stack(biases).sum(0).to(dtype) if biases else None)
