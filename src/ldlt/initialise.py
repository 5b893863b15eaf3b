"""Start values of the free parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ldlt.errors import OptionError

if TYPE_CHECKING:
    from ldlt.network import Lipschitz

__all__ = ["INITS", "initialise"]

INITS = ("default", "orthogonal", "keep")


def initialise(net: Lipschitz, how: str, gain: float, alpha: float) -> None:
    """Set the free matrices of a network."""
    if how not in INITS:
        raise OptionError(f"init must be one of {', '.join(map(repr, INITS))}, not {how!r}")
    if how == "keep":
        return
    with torch.no_grad():
        for group in [*net.plan.groups.values(), net.plan.output]:
            part = net._blueprint.head if group.node == "output" else net._blueprint.contraction
            for term in group.terms:
                weight = net.module.get_parameter(net.plan.weights[term.affine])
                start = torch.empty(group.size, weight.shape[1], dtype=weight.dtype, device=weight.device)
                nn.init.orthogonal_(start, part.free_gain(gain / math.sqrt(len(group.terms)), alpha))
                if term.rows is None:
                    weight.copy_(start)
                else:
                    weight[list(term.rows)] = start
