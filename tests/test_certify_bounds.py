"""Bounds of given networks: against a general solver, the definition, attacks and closed cases."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt import activations, attack, lmi
from ldlt.certificates import Problem, Region, minimise
from ldlt.certificates.local import ranges
from ldlt.certificates.solve import SMALLEST, bound_of, layerwise, product
from ldlt.covariance import Covariance, smooth_maximum
from ldlt.graph.trace import trace
from random_graphs import RandomGraph

pytestmark = pytest.mark.usefixtures("double")

ACTS = {"relu": nn.ReLU, "tanh": nn.Tanh, "leaky": lambda: nn.LeakyReLU(0.2), "gelu": nn.GELU}
SORTED = activations.MaxMin


class Chain(nn.Sequential):
    def __init__(self, sizes, act=nn.ReLU):
        layers = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), act()]
        super().__init__(*layers[:-1])


class Residual(nn.Module):
    """Blocks ``x + Wσ(Vx)`` with a readout."""

    def __init__(self, width, hidden, blocks, out, act=nn.ReLU):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, hidden) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(hidden, width) for _ in range(blocks))
        self.acts = nn.ModuleList(act() for _ in range(blocks))
        self.head = nn.Linear(width, out)

    def forward(self, x):
        for inner, act, outer in zip(self.inner, self.acts, self.outer, strict=True):
            x = x + outer(act(inner(x)))
        return self.head(x)


def problem_of(net, size):
    graph = trace(net, (size,))
    return graph, Problem.build(graph, net)


def local(graph, net, region):
    return Problem.build(graph, net, ranges(graph, net, region).slopes)


def residual_of(graph, net, solution):
    """The independent yardstick: smallest eigenvalue of Q relative to its scale."""
    weights = dict(net.named_parameters())
    return lmi.from_graph(graph, net, weights, solution.multipliers, solution.bound * (1 + 1e-10)).residual


def random_net(seed):
    """One of 20: chains and residual networks, up to 150 neurons."""
    torch.manual_seed(seed)
    act = list(ACTS.values())[seed % 4]
    big = 1 + seed // 4
    if (seed // 2) % 2:
        size = 3 + big
        return size, Residual(size, 6 * big, 2 + seed % 3, 3, act).double()
    return 4 + big, Chain([4 + big, *[8 + 6 * big] * (1 + seed % 3), 3], act).double()


# ------------------------------------------------------------------------------------------------ the one elimination


@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
def test_gradients_of_the_elimination(kind):
    """A skip, a batch of frequencies, real or Hermitian, through all outputs."""
    torch.manual_seed(0)
    c1, c2, skip, out = (torch.randn(3, *s, dtype=kind) for s in ((5, 4), (6, 5), (6, 4), (2, 10)))

    def run(first, second, c1, half):
        live = Covariance.start("x", torch.eye(4, dtype=kind).expand(3, 4, 4))
        read = live.read({"x": c1})
        scale = read.spread.diagonal(dim1=-2, dim2=-1).real.mean(0)
        live, one = live.activate(read, first.exp() * scale, "w", half, half, {"x", "w"})
        read = live.read({"x": skip, "w": c2})
        scale = read.spread.diagonal(dim1=-2, dim2=-1).real.mean(0)
        wide = half.new_full((6,), 0.5)
        live, two = live.activate(read, second.exp() * scale, "u", wide / 2, wide, {"x", "u"})
        return smooth_maximum(live.read({"x": out[..., :4], "u": out[..., 4:]}).spread, 5.0), one, two

    points = [p.requires_grad_() for p in (torch.full((5,), 3.0), torch.full((6,), 3.0), c1)]
    assert torch.autograd.gradcheck(lambda *p: run(*p, torch.full((5,), 0.5)), points)


@pytest.mark.parametrize("seed", range(6))
def test_covariances_are_the_inverse_of_the_inequality(seed):
    """Against Q of the definition: its inverse, its determinant, and where it is not positive."""
    torch.manual_seed(seed)
    net = RandomGraph(seed).double()
    graph, problem = problem_of(net, net.width_in)
    if not problem.layers or problem.neurons != sum(a.features for a in graph.activations):
        return
    flat = layerwise(problem, 0.5)
    live, slack = problem.covariance(flat, everything=True)
    output = problem.dense(problem.outputs, problem.output)
    form = lmi.from_graph(graph, net, dict(net.named_parameters()), problem.full(flat), 1.0).matrix
    form += output.T @ output
    if all(bool((layer.radius >= 0.03 * layer.center.abs()).all()) for layer in problem.layers):
        assert torch.allclose(live.matrix @ form, torch.eye(len(form)), atol=1e-9)
    determinant = float(slack) + float((2 * problem.spread(flat)).log().sum())
    assert determinant == pytest.approx(float(torch.linalg.slogdet(form)[1]), abs=1e-8)
    assert problem.squared(flat) == pytest.approx(float(torch.linalg.eigvalsh(output @ live.matrix @ output.T)[-1]))
    assert problem.squared(1e6 * flat) == math.inf


# ------------------------------------------------------------------------------------------------ against the optimum


def solver(graph, net):
    """The optimum by cvxpy, with the matrices of the definition."""
    cp = pytest.importorskip("cvxpy")
    names = {a.name: a.features for a in graph.activations}
    count = sum(names.values())

    def form(flat, bound):
        parts = dict(zip(names, flat.split(list(names.values())), strict=True))
        return lmi.from_graph(graph, net, dict(net.named_parameters()), parts, bound).matrix

    unit = torch.eye(count)
    nothing = form(torch.zeros(count), 0.0)
    matrices = [(form(e, 0.0) - nothing).numpy() for e in unit]
    inputs = (form(torch.zeros(count), 1.0) - nothing).numpy()
    squared, weights = cp.Variable(), cp.Variable(count, nonneg=True)
    total = squared * inputs + nothing.numpy() + sum(weights[i] * m for i, m in enumerate(matrices))
    cp.Problem(cp.Minimize(squared), [(total + total.T) / 2 >> 0]).solve(solver="CLARABEL")
    return math.sqrt(float(squared.value))


def compare_with_solver(seed):
    size, net = random_net(seed)
    graph, problem = problem_of(net, size)
    found, optimum = minimise(problem), solver(graph, net)
    assert found.bound == pytest.approx(optimum, rel=1e-3)
    assert found.bound >= optimum * (1 - 2e-5)  # not below it but for the solver's error
    assert found.lower <= optimum * (1 + 2e-5)
    assert residual_of(graph, net, found) > -1e-12


@pytest.mark.parametrize("seed", [0, 2])
def test_optimum_of_a_general_solver(seed):
    compare_with_solver(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_optimum_of_a_general_solver_all(seed):
    compare_with_solver(seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed):
    """Any graph: valid by the definition, above attacks, below products."""
    torch.manual_seed(seed)
    net = RandomGraph(seed).double()
    graph, problem = problem_of(net, net.width_in)
    found = minimise(problem, tolerance=1e-3)
    assert found.lower <= found.bound
    assert residual_of(graph, net, found) > -1e-12
    assert found.bound <= max(product(problem)[0], SMALLEST) * (1 + 1e-6)
    assert attack.lipschitz_lower_bound(net, net.width_in, starts=6, steps=15).value <= found.bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sizes", "act", "best"),
    [  # bounds of the semidefinite program, by an interior-point method on the whole matrix, to 1e-4
        ([20, 64, 64, 10], nn.ReLU, 0.512493),
        ([20, 64, 64, 10], SORTED, 1.13395),
        ([10, *[20] * 10, 5], nn.ReLU, 0.0355405),
        ([8, *[32] * 4, 3], nn.Tanh, 0.227414),
        ([8, *[32] * 4, 3], SORTED, 1.02645),
    ],
    ids=lambda v: str(v)[:24],
)
def test_quality(sizes, act, best):
    """Shallow networks by interior points, deep and sorting ones by descent: within 0.1 % of the optimum."""
    torch.manual_seed(0)
    found = minimise(problem_of(Chain(sizes, act), sizes[0])[1])
    assert best * (1 - 2e-4) <= found.bound <= best * 1.001


def test_a_shallow_network_takes_few_steps():
    torch.manual_seed(0)
    found = minimise(problem_of(Chain([20, 64, 64, 10]), 20)[1], tolerance=1e-3)
    assert found.converged
    assert len(found.history) <= 15


# -------------------------------------------------------------------------------------------------- products of norms


def test_product_is_the_product_of_norms():
    torch.manual_seed(0)
    net = Chain([5, 9, 8, 3], lambda: nn.LeakyReLU(0.2))
    bound, multipliers = product(problem_of(net, 5)[1])
    norms = [float(torch.linalg.matrix_norm(net[i].weight.detach(), 2)) for i in (0, 2, 4)]
    assert bound == pytest.approx(math.prod(norms), rel=1e-6)
    assert math.sqrt(problem_of(net, 5)[1].squared(multipliers)) <= bound


@pytest.mark.parametrize("act", [*ACTS, "sorted"])
@pytest.mark.parametrize("seed", range(3))
def test_products_have_multipliers(seed, act):
    """Those of the triangle inequality are feasible, whatever the skips and slopes."""
    torch.manual_seed(seed)
    net = Residual(4, 6, 1 + seed, 3, ACTS.get(act, SORTED))
    _, problem = problem_of(net, 4)
    bound, multipliers = product(problem)
    assert math.sqrt(problem.squared(multipliers)) <= bound * (1 + 1e-9)


def test_no_search_is_worse_than_the_product():
    """A start that is poor in a deep network, and no time for more: the product of norms counts."""
    torch.manual_seed(0)
    net = Chain([8, *[32] * 8, 3], SORTED)
    _, problem = problem_of(net, 8)
    assert math.sqrt(problem.squared(layerwise(problem, 0.7))) > product(problem)[0]
    assert minimise(problem, time_limit=0.0).bound <= product(problem)[0]
    found = ldlt.certify(net, 8, time_limit=0.0)
    assert found.rigorous
    assert found.bound <= product(problem)[0] * (1 + 1e-6)


# ------------------------------------------------------------------------------------------------------- invariances


def test_one_layer_is_exact():
    """A linear network, and one neuron: the constant itself."""
    net = nn.Linear(3, 2)
    norm = float(torch.linalg.matrix_norm(net.weight.detach(), 2))
    assert minimise(problem_of(net, 3)[1]).bound == pytest.approx(norm)
    neuron = Chain([3, 1, 2])
    exact = float(neuron[0].weight.detach().norm() * neuron[2].weight.detach().norm())
    assert minimise(problem_of(neuron, 3)[1], tolerance=1e-6).bound == pytest.approx(exact, rel=1e-5)


def test_scale_and_order_of_neurons_do_not_matter():
    torch.manual_seed(2)
    net = Chain([4, 9, 8, 3])
    base = minimise(problem_of(net, 4)[1], tolerance=1e-6).bound
    order, factors = torch.randperm(9), 10.0 ** torch.linspace(-6, 6, 9)
    with torch.no_grad():
        net[4].weight *= 1e8
        net[0].weight.copy_(factors[:, None] * net[0].weight[order])
        net[2].weight.copy_(net[2].weight[:, order] / factors)
    assert minimise(problem_of(net, 4)[1], tolerance=1e-6).bound == pytest.approx(1e8 * base, rel=1e-5)


def test_zero_weights():
    net = Chain([3, 5, 2])
    with torch.no_grad():
        net[2].weight.zero_()
    found = minimise(problem_of(net, 3)[1])
    assert (found.bound, found.converged) == (SMALLEST, True)
    with torch.no_grad():
        net[0].weight.zero_()
        net[2].weight.fill_(1.0)
    assert minimise(problem_of(net, 3)[1]).bound == SMALLEST  # constant: biases only


def test_dead_and_constant_neurons():
    torch.manual_seed(4)
    net = Chain([3, 6, 5, 2])
    with torch.no_grad():
        net[0].weight[1].zero_()  # constant
        net[2].weight[:, 2].zero_()  # nobody reads it
        net[4].weight[:, 0].zero_()
    _, problem = problem_of(net, 3)
    assert problem.neurons == 10
    found = minimise(problem)
    assert found.multipliers[problem.layers[0].name].isinf().nonzero().tolist() == [[1]]
    small = Chain([3, 4, 4, 2])
    with torch.no_grad():
        for i, (rows, columns) in {0: ([0, 3, 4, 5], slice(None)), 2: ([1, 2, 3, 4], [0, 3, 4, 5])}.items():
            small[i].weight.copy_(net[i].weight[rows][:, columns])
        small[4].weight.copy_(net[4].weight[:, 1:])
    assert found.bound == pytest.approx(minimise(problem_of(small, 3)[1]).bound, rel=1e-3)


class Parents(nn.Module):
    """Several parents, a concatenation, a split, tied inputs, joint nonlinearities."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(10, 5)
        self.sort, self.act = SORTED(), nn.PReLU(5)

    def forward(self, x):
        u = self.sort(self.a(x))
        first, second = self.b(u).chunk(2, 1)
        v = torch.cat([torch.relu(first) - second, u[:, :3], x], 1)
        return self.act(self.c(v)) + 0.5 * torch.tanh(v[:, :5])


def test_several_parents_and_groups():
    torch.manual_seed(5)
    net = Parents()
    with torch.no_grad():
        net.act.weight.copy_(torch.tensor([0.1, -0.3, 0.5, 1.5, 0.9]))
    graph, problem = problem_of(net, 4)
    found = minimise(problem)
    joint = found.multipliers[graph.activations[0].name]
    assert torch.equal(joint[0::2], joint[1::2])
    assert residual_of(graph, net, found) > -1e-12
    assert attack.lipschitz_lower_bound(net, 4, starts=30, steps=100).value <= found.bound


# --------------------------------------------------------------------------------------------------------- early stops


@pytest.mark.parametrize("act", [nn.ReLU, SORTED])
def test_early_stop_is_valid(act):
    torch.manual_seed(7)
    net = Chain([6, 20, 20, 4], act)
    graph, problem = problem_of(net, 6)
    at_once = minimise(problem, time_limit=0.0)
    assert not at_once.converged
    assert residual_of(graph, net, at_once) > -1e-12

    def interrupt(step):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(step.bound)

    seen = []
    stopped = minimise(problem, progress=interrupt)
    assert stopped.reason == "interrupted"
    assert residual_of(graph, net, stopped) > -1e-12
    assert at_once.bound >= seen[-1] >= stopped.bound * (1 - 1e-9) > 0
    best = minimise(problem, start=stopped.multipliers)
    again = minimise(problem, start=best.multipliers, time_limit=0.0)
    assert again.bound <= best.bound * (1 + 1e-5)  # a good start is kept
    useless = {name: 1e-9 * m for name, m in best.multipliers.items()}
    assert bound_of(problem, useless) == math.inf
    assert minimise(problem, start=useless).bound == pytest.approx(best.bound, rel=1e-3)
    assert bound_of(problem, best.multipliers) <= best.bound * (1 + 1e-6)


def test_history_and_options():
    torch.manual_seed(8)
    _, problem = problem_of(Chain([6, 20, 20, 4]), 6)
    found = minimise(problem)
    assert all(after.bound <= before.bound for before, after in pairwise(found.history))
    assert 0 <= found.gap <= 1e-4
    assert found.history[-1].bound == found.bound
    for options in ({"tolerance": 0.0}, {"time_limit": -1.0}):
        with pytest.raises(ldlt.OptionError):
            minimise(problem, **options)
    with pytest.raises(ldlt.ShapeError):
        minimise(problem, start={})
    net = Chain([3, 4, 2])
    graph = trace(net, (3,))
    (name,) = (a.name for a in graph.activations)
    for ends, error in (((torch.ones(4), torch.zeros(4)), ldlt.OptionError), ((torch.zeros(1),) * 2, ldlt.ShapeError)):
        with pytest.raises(error):
            Problem.build(graph, net, {name: ends})
    with pytest.raises(ldlt.ShapeError):
        ranges(graph, net, ball(torch.zeros(2), 1.0))


def test_overflow_is_refused():
    net = Chain([3, 5, 2])
    with torch.no_grad():
        net[0].weight *= 1e200
        net[2].weight *= 1e200
    with pytest.raises(ldlt.InfeasibleError):
        minimise(problem_of(net, 3)[1])


# --------------------------------------------------------------------------------------------------------- local bounds

ELEMENTWISE = [
    nn.CELU(0.7), nn.ELU(1.3), nn.ELU(-0.4), nn.GELU(), nn.GELU(approximate="tanh"), nn.Hardshrink(0.0),
    nn.Hardsigmoid(), nn.Hardswish(), nn.Hardtanh(-0.5, 2.0), nn.Identity(), nn.LeakyReLU(0.1), nn.LeakyReLU(-0.5),
    nn.LogSigmoid(), nn.Mish(), nn.PReLU(init=0.3), nn.PReLU(init=1.7), nn.ReLU(), nn.ReLU6(), nn.RReLU().eval(),
    nn.SELU(), nn.SiLU(), nn.Sigmoid(), nn.Softplus(), nn.Softplus(-2.0), nn.Softshrink(0.4), nn.Softsign(),
    nn.Tanh(), nn.Tanhshrink(), nn.Threshold(0.2, 0.2), activations.Abs(), activations.Atan(),
    activations.Clamp(max=0.5), activations.Cos(), activations.Sin(),
]  # fmt: skip


@pytest.mark.parametrize("module", ELEMENTWISE, ids=repr)
@given(middle=st.floats(-8, 8), width=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 5.0]))
@settings(max_examples=40)
def test_slopes_hold_on_intervals(module, middle, width):
    module = module.double()
    low, high = torch.tensor([middle - width]), torch.tensor([middle + width])
    bounds = tuple(torch.tensor([b]) for b in activations.slope_bounds(module))
    m, upper = activations.slope_range(module, low, high, bounds)
    assert bounds[0] <= m <= upper <= bounds[1]
    points = torch.linspace(float(low), float(high), 401)[None].requires_grad_()
    (slopes,) = torch.autograd.grad(module(points).sum(), points)
    if width > 1e-5:  # chords; shorter ones drown in rounding
        values = module(points).detach()[0]
        chords = (values[1:] - values[:-1]) / (points.detach()[0, 1:] - points.detach()[0, :-1])
        error = 1e-12 / (width / 200) + 2e-8
        assert float(m) - error <= float(chords.min())
        assert float(chords.max()) <= float(upper) + error
    if width and not isinstance(module, nn.Softplus):
        inner = slopes[0, 1:-1]
        kinks = torch.tensor([-3.0, -0.5, -0.4, 0.0, 0.2, 0.4, 0.5, 2.0, 3.0, 6.0])
        away = ((points.detach()[0, 1:-1, None] - kinks).abs() > 1e-12).all(1)  # conventions at kinks differ
        if bool(away.any()):
            assert float(m) <= float(inner[away].min()) + 2e-8  # PyTorch has some constants in float32
            assert float(inner[away].max()) <= float(upper) + 2e-8
            if width == 1.0 and type(module) in (nn.GELU, nn.SiLU, nn.Mish, nn.Tanh):  # and they are tight
                assert float(upper - inner.max()) < 1e-2
                assert float(inner.min() - m) < 1e-2


def test_unknown_activation_keeps_global_slopes():
    class Mine(nn.ReLU):
        def forward(self, x):
            return x.clamp(min=0.0)

    bounds = torch.zeros(1), torch.ones(1)
    assert activations.slope_range(Mine(), torch.ones(1), torch.ones(1), bounds) == bounds


def ball(center, radius):
    return Region("ball", center, torch.tensor(radius))


def trained(act):
    torch.manual_seed(9)
    net = Chain([4, 24, 24, 2], act)
    x = torch.randn(200, 4)
    y = torch.stack([torch.sin(3 * x[:, 0]) * x[:, 1], x[:, 2] ** 2 - x[:, 3]], 1)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        (net(x) - y).square().mean().backward()
        optimiser.step()
    return net


@pytest.mark.parametrize("act", list(ACTS))
def test_local_bounds_of_a_trained_network(act):
    net = trained(ACTS[act])
    graph, problem = problem_of(net, 4)
    whole = minimise(problem).bound
    center = torch.tensor([0.3, -0.2, 0.5, 0.1])
    previous = 0.0
    for radius in (0.0, 0.1, 30.0):
        found = minimise(local(graph, net, ball(center, radius)))
        assert previous <= found.bound * (1 + 1e-3) <= whole * (1 + 2e-3)
        previous = found.bound
        points = center + radius * nn.functional.normalize(torch.randn(300, 4), dim=1) * torch.rand(300, 1)
        steepest = float(attack.jacobian_norms(net, points).max())
        assert steepest <= found.bound * (1 + 1e-7)
        with torch.no_grad():
            pairs = (net(points[:150]) - net(points[150:])).norm(dim=1) / (points[:150] - points[150:]).norm(dim=1)
        if radius:
            assert float(pairs.max()) <= found.bound * (1 + 1e-9)
        if radius == 0.0:
            assert found.bound == pytest.approx(steepest, rel=1e-3)  # in the limit the Jacobian
        if radius == 0.1:
            assert found.bound * 2 <= whole  # worth the trouble
    inside = Region("box", center, torch.full((4,), 0.05))  # within the ball of radius 0.1
    assert minimise(local(graph, net, inside)).bound <= 1.001 * minimise(local(graph, net, ball(center, 0.1))).bound


@given(seed=st.integers(0, 300), radius=st.sampled_from([0.01, 0.3, 2.0]), box=st.booleans())
@settings(max_examples=15)
def test_ranges_hold_on_random_graphs(seed, radius, box):
    """Every pre-activation and Jacobian met in the region is enclosed, whatever the graph."""
    torch.manual_seed(seed)
    net = RandomGraph(seed).double()
    graph = trace(net, (net.width_in,))
    center = torch.randn(net.width_in)
    offsets = nn.functional.normalize(torch.randn(60, net.width_in), dim=1) * torch.rand(60, 1) * radius
    if box:
        region = Region("box", center, torch.linspace(0, radius, net.width_in))
        offsets = (2 * torch.rand(60, net.width_in) - 1) * region.radius
    else:
        region = ball(center, radius)
    found = ranges(graph, net, region)
    points = center + offsets
    for node in graph.activations:
        part = type(graph)(graph.nodes, node.parents[0])
        values = ldlt.graph.evaluate(part, net, points).reshape(60, -1)
        assert bool((values >= found.low[node.name]).all())
        assert bool((values <= found.high[node.name]).all())
    solution = minimise(Problem.build(graph, net, found.slopes), time_limit=0.1)
    assert float(attack.jacobian_norms(net, points).max()) <= solution.bound * (1 + 1e-7)
