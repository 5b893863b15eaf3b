r"""The form every family shares: one affine map, one activation, at most one map back and one skip.

.. math::

    f(x) = s\,x + R\,\sigma(P x + b), \qquad s \in \{0, 1\},

where the *explicit* weights :math:`(P, b, R)` are a pure function of the free parameters of the layer.
Families differ in that function alone, so :class:`Layer` holds everything else.

**Certificate.** For an activation with slopes in :math:`[0, 1]` the layer is 1-Lipschitz if for some diagonal
:math:`\Lambda \succ 0` (:meth:`Layer.multiplier`), for all :math:`x, w`,

.. math::

    Q(x, w) = \|x\|^2 + 2\,w^\top \Lambda (w - P x) - \|s\,x + R\,w\|^2 \;\ge\; 0 .
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldlt.check import choice, whole
from ldlt.errors import OptionError, ShapeError

__all__ = ["ACTIVATIONS", "Explicit", "Layer", "MaxMin", "check_input", "plain_linear", "raise_zeros", "uniform"]


class MaxMin(nn.Module):
    """Each pair of neighbouring features as its maximum and minimum, ``(..., n)`` with n even.

    It only permutes its input, so it is 1-Lipschitz jointly, but it is not elementwise: families whose
    certificate needs slopes in [0, 1] refuse it. (Anil, Lucas & Grosse 2019; Chernodub & Nowicki 2016.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Sort the pairs of ``x``."""
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((torch.maximum(first, second), torch.minimum(first, second)), -1).flatten(-2)


class Skip(nn.Module):
    """``x + inner(x)``, the plain form of a residual layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Add the input to the output of the inner module."""
        return x + self.inner(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "maxmin": MaxMin,
}
"""Activations by name. All but ``"maxmin"`` are elementwise with slopes in [0, 1]."""


class Explicit(NamedTuple):
    """The evaluated weights of a layer ``x -> s x + outer σ(inner x + bias)``.

    Attributes:
        inner: Map in front of the activation, ``(neurons, in_features)``.
        bias: Bias in front of the activation, ``(neurons,)``.
        outer: Map behind the activation, ``(out_features, neurons)``; None stands for the identity.
    """

    inner: Tensor
    bias: Tensor
    outer: Tensor | None = None


def raise_zeros(t: Tensor) -> Tensor:
    """Replace entries of ``t >= 0`` that are zero, or too small to be accurate, by one.

    Every divisor of this package is an upper bound that may be raised without harm: if ``W'W ⪯ diag(t)``, the
    same holds for every larger t. So the certificate stays exact, and an all-zero weight maps to zero with a finite
    gradient. (Adding an epsilon to a *factor* instead would break the bound.)
    """
    info = torch.finfo(t.dtype)
    return torch.where(t > info.tiny / info.eps, t, torch.ones_like(t))


class Layer(nn.Module):
    """Base class of the layers: free parameters -> :meth:`explicit` -> :meth:`forward`.

    There is no cache and no buffer. The forward pass has no control flow that depends on data and no in-place
    operation, so a layer works under ``torch.func.functional_call`` with ``torch.func.vmap`` over stacked
    parameters.

    Args:
        in_features: Width of the input.
        neurons: Number of activations. It is the width of the output too, unless the layer is residual.
        activation: A key of :data:`ACTIVATIONS`.
    """

    residual: bool = False
    """Whether the input is added to the output; then ``out_features == in_features``."""

    elementwise: bool = False
    """Whether the certificate needs an elementwise activation with slopes in [0, 1]."""

    bias: nn.Parameter
    """Bias in front of the activation, ``(neurons,)``."""

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__()
        self.in_features = whole("in_features", in_features, error=ShapeError)
        self.neurons = whole("neurons", neurons, error=ShapeError)
        if choice("activation", activation, ACTIVATIONS) == "maxmin":
            if self.elementwise:
                raise OptionError(f"{type(self).__name__} needs an elementwise activation with slopes in [0, 1]")
            if neurons % 2:
                raise ShapeError(f"MaxMin needs an even number of neurons, got {neurons}")
        self.out_features = in_features if self.residual else neurons
        self.activation = ACTIVATIONS[activation]()

    def explicit(self) -> Explicit:
        """Evaluate the free parameters: a pure, differentiable function of them."""
        raise NotImplementedError

    def multiplier(self) -> Tensor:
        """Diagonal of a Λ with which the certificate holds for elementwise activations, shape ``(neurons,)``.

        For a layer σ(Px + b) with ``‖P‖ <= 1`` this is the identity: ``Q = ‖x‖² + ‖w‖² − 2 w'Px``.
        """
        return torch.ones_like(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``x`` of shape ``(..., in_features)``."""
        check_input(x, self.in_features)
        y = self.branch(x)
        return x + y if self.residual else y

    def branch(self, x: Tensor) -> Tensor:
        """Evaluate ``outer σ(inner x + bias)``; a layer may do so without forming its explicit weights."""
        inner, bias, outer = self.explicit()
        y = self.activation(F.linear(x, inner, bias))
        return y if outer is None else F.linear(y, outer)

    def freeze(self) -> nn.Sequential:
        """Return plain ``torch.nn`` layers with copies of the explicit weights: the same function."""
        inner, bias, outer = self.explicit()
        modules: list[nn.Module] = [plain_linear(inner, bias)]
        if not isinstance(self.activation, nn.Identity):
            modules.append(copy.deepcopy(self.activation))
        if outer is not None:
            modules.append(plain_linear(outer, None))
        body = nn.Sequential(*modules)
        return nn.Sequential(Skip(body)) if self.residual else body

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return f"in_features={self.in_features}, neurons={self.neurons}, out_features={self.out_features}"


def check_input(x: Tensor, features: int) -> None:
    """Refuse inputs whose last axis has another length."""
    if x.shape[-1:] != (features,):
        raise ShapeError(f"expected an input of shape (..., {features}), got {tuple(x.shape)}")


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Build an ``nn.Linear`` with these weights; draws no random numbers."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            setattr(linear, name, nn.Parameter(value.detach().clone(), requires_grad=False))
    return linear


def uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """Draw the default start of ``nn.Linear``: uniform on ±1/√fan_in."""
    limit = 1.0 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(*shape).uniform_(-limit, limit))
