"""The rule from its definition: networks chosen by it satisfy the matrix inequality, and it refuses what does not."""

from __future__ import annotations

import pytest
import torch

import ldlt
from ldlt import activations, reference
from random_graphs import RandomGraph

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("seed", range(20))
def test_networks_that_are_chosen_by_definition_satisfy_the_inequality(seed):
    """Every free map is chosen by move 3, whoever reads it; multipliers are half of the largest feasible ones."""
    module = RandomGraph(seed)
    net = ldlt.Lipschitz(module, bound=1.7, input_shape=module.width_in)
    weights, multipliers = {}, {}

    def choose(node, generator):
        size = generator.norm(dim=0)
        free, one = torch.randn(node.features, generator.shape[1]), torch.ones(node.features)
        last = node.name == net.graph.output
        chosen = reference.choose(free, generator, size, 0.5 * one if last else one, one)
        weights[node.weight] = chosen
        return chosen

    def bound(node, generator):
        _, radius = activations.spread(node.resolve(module), node.shape)
        v = generator * radius
        largest = 1 / (2 * torch.linalg.matrix_norm(v, 2) ** 2 + 1e-12)
        multipliers[node.name] = 0.5 * float(largest) * torch.ones(node.features)
        return multipliers[node.name]

    found = reference.Elimination(net.graph, module, choose, bound, 1.7)
    # What is summed behind the free maps may exceed one: the output is scaled to the bound.
    gain = 1 / max(found.norms["(output)"], 1.0)
    inequality = ldlt.lmi.from_graph(net.graph, module, weights, multipliers, 1.7, gain)
    assert inequality.residual > -1e-9
    assert all(norm < 1 for name, norm in found.norms.items() if name != "(output)")


def test_maps_that_are_too_large_are_refused():
    net = ldlt.nn.FeedForward(3, [5], 2, head="orthogonal", dtype=torch.float64)
    maps = {a.name: net.explicit()[a.weight].detach() for a in net.graph.affines}
    multipliers = {n: m.detach() for n, m in net.multipliers().items()}
    norms = reference.check(net.graph, net.module, maps, multipliers, 1.0)
    assert max(norms.values()) <= 1 + 1e-9
    first = net.graph.affines[0].name
    with pytest.raises(torch.linalg.LinAlgError):
        reference.check(net.graph, net.module, maps | {first: 10 * maps[first]}, multipliers, 1.0)
