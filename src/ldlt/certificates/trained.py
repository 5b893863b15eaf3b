r"""From a trained network to a constrained one that starts at the same weights.

A certificate of a plain network consists of multipliers ``Λ`` and a bound ℓ for which the matrix inequality holds. For
every larger bound it holds strictly, and strict solutions are exactly what the parameterisation reaches: running the
rule backwards (:meth:`ldlt.Lipschitz.load_explicit`) gives free parameters whose explicit weights are the given ones.

With :math:`t = (ℓ'/ℓ)^2 > 1` the multipliers may be scaled by anything in ``[1, t]``: at 1 the room is in the
directions of ``x`` (:math:`Q + (ℓ'^2 - ℓ^2)I_x`), at ``t`` in those of ``y`` (:math:`tQ + (t - 1)Y'Y`). The geometric
mean :math:`\sqrt t` shares it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.certificates.certificate import Certificate
from ldlt.certificates.certify import certify
from ldlt.certificates.fingerprint import traced
from ldlt.engine.network import Lipschitz, sample_shape
from ldlt.errors import BoundError, GraphError, InfeasibleError, OptionError, ShapeError

__all__ = ["constrain"]

_LARGEST_MULTIPLIER = 1e8  # of a neuron that is constant, in units of the largest of the others


def constrain(
    model: nn.Module,
    bound: float | None = None,
    *,
    input_shape: int | Sequence[int] | None = None,
    slack: float = 1e-3,
    certificate: Certificate | None = None,
    time_limit: float | None = None,
    **options: Any,
) -> Lipschitz:
    """See :meth:`ldlt.Lipschitz.from_trained`."""
    if not isinstance(model, nn.Module):
        raise GraphError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, Lipschitz):
        raise GraphError("the model is a Lipschitz network already; use it as it is, or its freeze()")
    if not (isinstance(slack, int | float) and 0 < slack < math.inf):
        raise OptionError(f"slack must be a positive number, not {slack!r}")
    for name in ("init", "gain", "alpha", "train_bound", "bound_floor", "bound_ceiling"):
        if name in options:
            raise OptionError(f"'{name}' has no meaning here: the start is the given network")
    shape = _input_shape(model) if input_shape is None else sample_shape(input_shape)
    if certificate is None:
        certificate = certify(model, shape, time_limit=time_limit)
    names = [a.name for a in traced(model, shape).activations]
    if not certificate.is_certified or certificate.region is not None or set(names) != set(certificate.multipliers):
        why = certificate.reason or "it is about a region, or has no multipliers for these activations"
        raise InfeasibleError(f"the model has no certificate to start from: {why}")
    least = certificate.bound * (1 + slack)
    start = least if bound is None else float(bound)
    if not start >= least * (1 - 1e-12):
        raise BoundError(
            f"bound={start:g} is too small for these weights: their certified bound is {certificate.bound:.6g}, and "
            f"the start needs {least:.6g}. Leave bound out, then lower it while training with set_bound"
        )
    net = Lipschitz(copy.deepcopy(model), start, input_shape=shape, init="keep", **options)
    factor = start / certificate.bound  # √t
    multipliers = {n: factor * _finite(certificate.multipliers[n]) for n in names}
    net.load_explicit(dict(model.named_parameters()), multipliers)
    return net.train(model.training)


def _finite(multiplier: Tensor) -> Tensor:
    """Neurons that are constant have infinite multipliers in a certificate; here any large number does."""
    infinite = multiplier.isinf()
    if not bool(infinite.any()):
        return multiplier
    rest = multiplier[~infinite]
    return torch.where(infinite, _LARGEST_MULTIPLIER * (rest.max() if len(rest) else torch.ones(())), multiplier)


def _input_shape(model: nn.Module) -> tuple[int, ...]:
    """Inputs of the first linear layer, if the model is one of vectors of that size."""
    first = next((m for m in model.modules() if isinstance(m, nn.Linear)), None)
    if first is not None:
        shape = (first.in_features,)
        try:
            traced(model, shape)
        except (GraphError, ShapeError):
            pass
        else:
            return shape
    raise ShapeError("input_shape is needed: the shape of one input, without the batch dimension")
