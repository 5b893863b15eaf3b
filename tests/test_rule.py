"""The rule against the matrix inequality assembled from its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.engine import rule
from ldlt.engine.linalg import bounded
from ldlt_bench.families import cayley
from random_graphs import RandomGraph, randomise

CONTRACTIONS = ["cholesky", "symmetric", "cayley"]
pytestmark = pytest.mark.usefixtures("double")


def slow_from(first, values):
    """Parameters of a test of which those from a place on are among the slow proofs."""
    return [pytest.param(v, marks=pytest.mark.slow) if i >= first else v for i, v in enumerate(values)]


class Stack(nn.Module):
    """Residual blocks ``h ← h + B σ(C h)`` between two linear maps."""

    def __init__(self, inputs, width, blocks, outputs, activation=torch.relu):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.inner = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.outer = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.head = nn.Linear(width, outputs)
        self.activation = activation

    def forward(self, x):
        h = self.stem(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            h = h + outer(self.activation(inner(h)))
        return self.head(h)


@pytest.mark.parametrize("part", slow_from(1, range(10)))
def test_random_graphs_satisfy_the_inequality(part):
    """500 random graphs in all (50 in every run), up to 12 nodes and 4 parents; tight with an orthogonal output map.

    The floor costs tightness where a stack has directions with a share of 1e-5 of their magnitude: a little.
    """
    seen, slack = set(), []
    for seed in range(50 * part, 50 * (part + 1)):
        contraction = CONTRACTIONS[seed % 3]
        head = ["joint", "orthogonal", "rows"][seed // 3 % 3]
        module = RandomGraph(seed)
        net = ldlt.Lipschitz(module, bound=1.7, input_shape=module.width_in, contraction=contraction, head=head)
        randomise(net, seed)
        found = ldlt.lmi.assemble(net)
        assert found.residual >= -1e-9, f"seed {seed}: {found.residual}"
        if head != "joint":  # the reported bound of the row head is tight for the whole map, too
            slack.append(found.residual)
        seen.update(type(n).__name__ for n in net.graph.nodes)
        seen.update("free" if g.free else "given" for g in net.plan.groups.values())
    assert {"Affine", "Wire", "Activation", "free", "given"} <= seen
    assert max(slack) <= 1e-6


@given(
    seed=st.integers(1000, 10**6),
    contraction=st.sampled_from(CONTRACTIONS),
    head=st.sampled_from(["joint", "orthogonal", "rows"]),
    scale=st.floats(0.01, 4.0),
    bound=st.floats(0.05, 50.0),
)
@settings(max_examples=10)
def test_any_graph_any_size_of_parameters(seed, contraction, head, scale, bound):
    torch.set_default_dtype(torch.float64)
    module = RandomGraph(seed)
    net = ldlt.Lipschitz(module, bound=bound, input_shape=module.width_in, contraction=contraction, head=head)
    randomise(net, seed, scale)
    assert ldlt.lmi.residual(net) >= -1e-9


def test_precision_of_the_yardstick_does_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float32)
    for activation in (nn.GELU, nn.SiLU, nn.Mish):
        net = ldlt.nn.FeedForward(3, [5, 4], 2, activation=activation, head="orthogonal", dtype=torch.float64)
        randomise(net, 0)
        assert abs(ldlt.lmi.residual(net)) < 1e-12
        given = ldlt.Lipschitz(nn.Sequential(activation(), nn.Linear(3, 2)).double(), input_shape=3, head="orthogonal")
        randomise(given, 0)
        assert abs(ldlt.lmi.residual(given)) < 1e-12


def test_a_singular_cayley_root_is_no_special_case():
    net = ldlt.nn.Residual(1, [1], 1, contraction="cayley")
    with torch.no_grad():
        net.module.body[0].weight.fill_(1.0)  # A = (1 − w²)/(1 + w²) = 0
    assert torch.isfinite(net(torch.ones(1, 1))).all()
    assert ldlt.lmi.residual(net) >= -1e-9


def test_the_oracle_can_fail():
    """Weights that are too large by one part in a thousand are seen by the inequality."""
    net = ldlt.nn.Residual(4, [8, 8], 3, head="orthogonal")
    randomise(net, 0)
    weights, multipliers = net.explicit(), net.multipliers()
    good = ldlt.lmi.from_graph(net.graph, net.module, weights, multipliers, net.bound)
    weights["head.weight"] = weights["head.weight"] * 1.001
    bad = ldlt.lmi.from_graph(net.graph, net.module, weights, multipliers, net.bound)
    assert abs(good.residual) < 1e-12
    assert bad.residual < -1e-6


def test_oracle_agrees_with_slopes_drawn_from_the_sector():
    """Independently of the inequality: with any slopes of the sector in place of activations the bound holds."""
    net = ldlt.nn.Residual(5, [9, 7], 4, bound=1.3, head="orthogonal", activation=nn.GELU)
    randomise(net, 3)
    w = {k: v.detach() for k, v in net.explicit().items()}
    low, high = ldlt.activations.slope_bounds(nn.GELU())
    worst = 0.0
    for _ in range(2000):
        s1, s2 = (low + (high - low) * torch.rand(n).round() for n in (9, 7))
        jacobian = w["head.weight"] @ (s2[:, None] * w["body.2.weight"]) @ (s1[:, None] * w["body.0.weight"])
        worst = max(worst, float(torch.linalg.matrix_norm(jacobian + w["skip.weight"], 2)))
    assert 0.4 * 1.3 < worst <= 1.3 * (1 + 1e-12)


def _free_graph(seed):
    """A random graph in which every activation has a free map, with activations of all kinds."""
    while True:
        module = RandomGraph(seed)
        net = ldlt.Lipschitz(module, bound=1.3, input_shape=module.width_in, contraction=CONTRACTIONS[seed % 3])
        if net.plan.groups and all(g.free for g in net.plan.groups.values()) and _smallest_share(net) > 0.1:
            return net
        seed += 7919


@pytest.mark.parametrize("seed", slow_from(3, range(40)))
def test_converse_feasible_weights_are_reached(seed):
    """Explicit weights and multipliers of one contraction are reproduced by another one's free parameters."""
    net = _free_graph(seed)
    randomise(net, seed, 0.8)
    weights = {k: v.detach() for k, v in net.explicit().items()}
    multipliers = {k: v.detach() for k, v in net.multipliers().items()}
    x = torch.randn(16, net.input_shape[0])
    other = ldlt.Lipschitz(
        net.module,
        bound=1.3,
        input_shape=net.input_shape,
        contraction=CONTRACTIONS[(seed + 1) % 3],
        init="keep",
    )
    expected = torch.func.functional_call(net.module, weights, (x,)).detach()
    other.load_explicit(weights, multipliers)
    torch.testing.assert_close(other(x), expected, rtol=1e-6, atol=1e-6)
    for name, value in other.multipliers().items():
        torch.testing.assert_close(value, multipliers[name], rtol=1e-8, atol=1e-8)
    for name, value in other.explicit().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=1e-6)


def _smallest_share(net):
    """Smallest share of signal in any direction of a factored stack; without full rank, maps are not unique."""
    found, factor = [1.0], rule.factor

    def spy(*args):
        frame, *rest = factor(*args)
        for piece in frame.pieces:
            soft = piece.soften(torch.eye(piece.width))
            found.append(float(torch.linalg.eigvalsh(soft)[0].clamp_min(0).sqrt()))
        return frame, *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "factor", spy)
        with torch.no_grad():
            net.explicit()
    return min(found)


def test_converse_from_weights_that_were_never_parameterised():
    """Any weights with any multipliers, at a bound where the inequality holds strictly."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.LeakyReLU(0.3), nn.Linear(5, 2))
    weights = {k: 0.4 * torch.randn_like(v) for k, v in module.named_parameters()}
    multipliers = {"_1": 8 + 4 * torch.rand(6), "_3": 2 + torch.rand(5)}
    bound = 1.0
    while True:
        net = ldlt.Lipschitz(module, bound=bound, input_shape=4, init="keep")
        found = ldlt.lmi.from_graph(net.graph, module, weights, multipliers, bound)
        if found.smallest > 1e-3:
            break
        if found.smallest < 0:
            with pytest.raises(ldlt.InfeasibleError):
                net.load_explicit(weights, multipliers)
        bound *= 1.2
        assert bound < 1e3
    net.load_explicit(weights, multipliers)
    for name, value in net.explicit().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-8, atol=1e-8)


def test_infeasible_weights_are_refused():
    net = ldlt.nn.FeedForward(3, [4], 2)
    weights = {k: 10 * torch.ones_like(v) for k, v in net.explicit().items()}
    with pytest.raises(ldlt.InfeasibleError, match="norm"):
        net.load_explicit(weights, net.multipliers())
    with pytest.raises(ldlt.ShapeError, match="no value"):
        net.load_explicit({}, net.multipliers())


def test_feed_forward_cayley_is_the_sandwich_network():
    """Independent network from Wang & Manchester's formulas, same parameters, trained multipliers."""
    sizes = [5, 7, 6, 3]
    net = ldlt.nn.FeedForward(5, [7, 6], 3, bound=1.0, contraction="cayley")
    randomise(net, 0, 0.7)
    x = torch.randn(11, 5)
    h = x
    for i, name in enumerate(["_1", "_3", "(output)"]):
        free, bias = net.module[2 * i].weight, net.module[2 * i].bias
        a, b = cayley(net.skew[f"at_{name}"], free.T)
        if name == "(output)":
            y = h @ b.T + bias
        else:
            psi = (0.5 * bounded(net.log_multiplier[f"at_{name}"])).exp()  # Λ = Ψ²
            inner = math.sqrt(2) * (h @ b.T) / psi + bias
            h = math.sqrt(2) * (torch.relu(inner) * psi) @ a
    assert sizes[-1] == y.shape[1]
    torch.testing.assert_close(net(x), y, rtol=1e-10, atol=1e-10)


def test_multipliers_of_homogeneous_activations_only_move_weights_between_layers():
    """Λ of a ReLU can be absorbed; that of tanh cannot."""
    for activation, equal in [(nn.ReLU, True), (nn.Tanh, False)]:
        torch.manual_seed(1)
        net = ldlt.nn.FeedForward(3, [5], 2, activation=activation)
        with torch.no_grad():
            net.module[0].bias.zero_()
        x = torch.randn(7, 3)
        before = net(x)
        with torch.no_grad():
            net.log_multiplier["at__1"].add_(torch.randn(5))
        assert torch.allclose(before, net(x)) == equal


def test_stacked_blocks_are_one_network_and_stay_tight():
    net = ldlt.Lipschitz(Stack(4, 6, 5, 3), bound=2.0, input_shape=4, head="orthogonal")
    randomise(net, 1, 0.5)
    assert -1e-12 < ldlt.lmi.residual(net) < 1e-9
    assert all(g.free for g in net.plan.groups.values())


@pytest.mark.parametrize("activation", slow_from(1, [nn.LeakyReLU, nn.GELU, nn.ReLU]))
def test_depth_1000_feed_forward(activation):
    """Finite in float32; the inequality holds in float64, by its own block elimination."""
    net = ldlt.nn.FeedForward(8, [16] * 1000, 4, dtype=torch.float32, activation=activation)
    x = torch.randn(16, 8, dtype=torch.float32, requires_grad=True)
    y = net(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    weights, multipliers = net.explicit(torch.float64), {k: v.double() for k, v in net.multipliers().items()}
    # Q is block tridiagonal: pivots D_1 = ℓ²I + 2LmC'ΛC, D_{j+1} = 2Λ + 2LmC'ΛC − (L+m)² ΛC D_j^{-1} C'Λ, the last
    # one minus B'B.
    low, high = ldlt.activations.slope_bounds(activation())
    names = [f"{2 * i}.weight" for i in range(1001)]
    pivot = torch.eye(8)
    for i in range(1000):
        c = weights[names[i]].detach()
        lam = multipliers[f"_{2 * i + 1}"].detach()
        pivot = pivot + 2 * low * high * c.T @ (lam[:, None] * c)
        factor, info = torch.linalg.cholesky_ex(pivot)
        assert info == 0
        side = torch.linalg.solve_triangular(factor, (lam[:, None] * c).T, upper=False)
        pivot = 2 * lam.diag() - (low + high) ** 2 * side.T @ side
    b = weights[names[1000]].detach()
    assert float(torch.linalg.eigvalsh(pivot - b.T @ b)[0]) > -1e-9 * float(torch.linalg.matrix_norm(pivot, 2))


def test_200_stacked_residual_blocks():
    net = ldlt.Lipschitz(Stack(8, 16, 200, 4).float(), bound=1.0, input_shape=8)
    x = torch.randn(16, 8, dtype=torch.float32, requires_grad=True)
    y = net(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    assert float(x.grad.norm()) > 1e-3  # the signal arrives
    small = ldlt.Lipschitz(Stack(4, 3, 60, 3), bound=1.0, input_shape=4, head="orthogonal")
    randomise(small, 0, 0.2)
    assert abs(ldlt.lmi.residual(small)) < 1e-9


def test_values_that_cancel_are_no_directions():
    """x − x carries nothing: its map is unconstrained, and nothing divides by it."""

    class Cancel(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.c(torch.tanh(self.a(x) + self.b(x - x)))

    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.c(torch.tanh(self.a(x - x)))

    for module in (Cancel(), Nothing()):
        net = ldlt.Lipschitz(module, input_shape=3, head="orthogonal")
        randomise(net, 0)
        assert torch.isfinite(net(torch.randn(5, 3))).all()
        assert ldlt.lmi.residual(net) > -1e-12


def test_block_factors_multiply_back():
    net = ldlt.nn.Residual(4, [5, 6], 3)
    randomise(net, 2)
    found = ldlt.lmi.assemble(net)
    factors = found.factors()
    torch.testing.assert_close(factors.product(), found.matrix, rtol=1e-10, atol=1e-12)
    assert all(float(torch.linalg.eigvalsh(d)[0]) > -1e-12 for d in factors.D)
    assert found.names == ("x", "body_1", "body_3")
    assert found.sizes == (4, 5, 6)
