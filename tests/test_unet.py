"""U-Nets and convolutional residual networks: the inequality, the latent constant, training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ldlt
from random_graphs import randomise

pytestmark = pytest.mark.usefixtures("double")

UNETS = {
    "dense": lambda **o: ldlt.nn.UNet(6, [5, 4, 3], 6, 1.5, **o),
    "images": lambda **o: ldlt.nn.UNet((1, 4, 8), [2, 3, 2], 1, 1.5, **o),
    "signals": lambda **o: ldlt.nn.UNet((2, 6), [3, 4], 2, 1.5, activation=nn.Tanh, **o),
}


@pytest.mark.parametrize("kind", UNETS)
def test_unet_is_tight_for_the_whole_map(kind):
    net = UNETS[kind](head="orthogonal")
    randomise(net, 0, 0.6)
    assert abs(ldlt.lmi.residual(net)) < 1e-9
    assert all(g.free for g in net.plan.groups.values())
    x = torch.randn(2, *net.input_shape)
    torch.testing.assert_close(net.freeze()(x), net(x).detach())
    assert net(x).shape[1:] == x.shape[1:]


@pytest.mark.parametrize("kind", UNETS)
def test_constant_of_the_latent_code(kind):
    """The inequality of the encoder alone, with the network's own weights and multipliers, is tight there."""
    net = UNETS[kind]()
    randomise(net, 1, 0.6)
    bound = net.latent_bound
    frozen = net.freeze()

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = frozen

        def forward(self, x):
            return self.net.encode(x).flatten(1)

    encoder = Encoder()
    x = torch.randn(3, *net.input_shape)
    torch.testing.assert_close(encoder(x), net.encode(x).flatten(1).detach())
    graph = ldlt.graph.trace.trace(encoder, net.input_shape)
    own = net.multipliers()
    names = {a.name: a.name.removeprefix("net_") for a in graph.activations}
    multipliers = {a: own[n] for a, n in names.items()}
    scale = (bound / net.declared_bound) ** 2
    q = ldlt.lmi.from_graph(
        graph, encoder, dict(encoder.named_parameters()), {a: scale * m for a, m in multipliers.items()}, bound
    )
    assert abs(q.residual) < 1e-9
    jacobian = torch.func.jacrev(lambda z: encoder(z[None])[0])(x[0]).flatten(1).detach()
    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound * (1 + 1e-9)


def test_reconstruction_is_learnt():
    torch.manual_seed(0)
    net = ldlt.nn.UNet((1, 8, 8), [4, 6], 1, dtype=torch.float32)
    grid = torch.linspace(0, 6.28, 9)[:-1].float()
    shift = torch.rand(32, 1, 1, dtype=torch.float32) * 6.28
    images = (torch.sin(grid[:, None] + shift) * torch.cos(grid + 2 * shift))[:, None]
    noisy = images + 0.3 * torch.randn_like(images)
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    losses = []
    for _ in range(60):
        loss = (net(noisy) - images).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert ldlt.lmi.residual(net) > -1e-9
    assert net.latent_bound > 0


def test_values_have_constants_or_say_why_not():
    net = ldlt.nn.FeedForward(3, [4, 5], 2)
    randomise(net, 0, 0.5)
    assert net.bound_of("x" if "x" in net.graph.index else net.graph.input.name) == 1.0
    weights, multipliers = net.explicit(), net.multipliers()
    bound = net.bound_of("_1")
    first = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    graph = ldlt.graph.trace.trace(first, (3,))
    q = ldlt.lmi.from_graph(graph, first, weights, {"_1": bound**2 * multipliers["_1"]}, bound)
    assert abs(q.residual) < 1e-12
    with pytest.raises(ldlt.GraphError, match="not a value"):
        net.bound_of("nothing")
    with pytest.raises(ldlt.GraphError, match="ask for an activation"):
        net.bound_of("_0")


def test_conv_resnet():
    net = ldlt.nn.ConvResNet((1, 4, 6), [2, 3], 4, 1.2, blocks=1, head="orthogonal")
    randomise(net, 0, 0.5)
    assert abs(ldlt.lmi.residual(net)) < 1e-9
    x = torch.randn(3, 1, 4, 6)
    torch.testing.assert_close(net.freeze()(x), net(x).detach())
    with pytest.raises(ldlt.ShapeError, match="multiples of 4"):
        ldlt.nn.ConvResNet((1, 6, 6), [2, 3, 4], 2)
    with pytest.raises(ldlt.ShapeError, match="two levels"):
        ldlt.nn.UNet(4, [3], 4)
