"""Graphs that are made directly are those that ``torch.export`` gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ldlt import nn as networks
from ldlt.activations import MaxMin
from ldlt.graph.direct import known_graph
from ldlt.graph.trace import trace

READY = {
    "feed_forward": (networks.feed_forward_module(3, [4, 6], 2), (3,)),
    "linear": (networks.feed_forward_module(3, [], 2), (3,)),
    "maxmin": (networks.feed_forward_module(3, [4, 6], 2, MaxMin), (3,)),
    "prelu": (networks.feed_forward_module(3, [4, 6], 2, nn.PReLU), (3,)),
    "residual": (networks.residual_module(3, [4, 6], 2, nn.GELU), (3,)),
    "unet": (networks.unet_module(5, [4, 3, 2], 2), (5,)),
    "unet_images": (networks.unet_module((1, 8, 8), [2, 3, 2], 1), (1, 8, 8)),
    "conv_resnet": (networks.conv_resnet_module((1, 8, 8), [2, 3], 3, 2), (1, 8, 8)),
    "standardised": (
        nn.Sequential(networks.Standardise(torch.ones(3), 2.0), networks.residual_module(3, [4], 2)),
        (3,),
    ),
    "dropout": (nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.ReLU(), nn.Identity(), nn.Linear(4, 2)), (3,)),
    "nested": (nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)), (3,)),
    "images": (nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), (1, 4, 4)),
}


@pytest.mark.parametrize("name", READY)
def test_it_is_the_traced_graph(name):
    module, shape = READY[name]
    module = module.double()
    direct, traced = known_graph(module, shape), trace(module, shape)
    assert direct is not None
    assert [*direct.nodes] == [*traced.nodes]
    assert direct.output == traced.output
    assert dict(direct.constants) == dict(traced.constants)
    assert not any("forward" in m.__dict__ for m in module.modules())


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def _frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2))


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module[1].register_forward_hook(lambda m, i, o: 2 * o)
    return module


def _normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU())


@pytest.mark.parametrize(
    "make",
    [_tied, _frozen, _hooked, _normed, lambda: nn.Sequential(Doubled(4, 4)), lambda: nn.Sequential(nn.LayerNorm(4))],
)
def test_anything_else_is_left_to_the_tracer(make):
    assert known_graph(make(), (4,)) is None
    assert known_graph(nn.Sequential(nn.Linear(3, 2)), (4,)) is None
