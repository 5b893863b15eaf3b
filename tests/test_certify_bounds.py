"""Bounds of given networks: against a general solver, the definition, attacks and closed cases."""

from __future__ import annotations

import builtins
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt import activations, attack, lmi
from ldlt.certificates import interior
from ldlt.certificates.constraint import Reduced, Whole
from ldlt.certificates.dense import Dense
from ldlt.certificates.elimination import eliminate
from ldlt.certificates.layerwise import eclipse, product
from ldlt.certificates.local import local_problem, ranges
from ldlt.certificates.optimise import SMALLEST, bound_of, minimise
from ldlt.certificates.problem import Problem
from ldlt.certificates.region import Region
from ldlt.certificates.sdp import solve_sdp
from ldlt.certificates.start import SHAPES, feasible
from ldlt.graph.trace import trace
from random_graphs import RandomGraph

pytestmark = pytest.mark.usefixtures("double")

ACTS = {"relu": nn.ReLU, "tanh": nn.Tanh, "leaky": lambda: nn.LeakyReLU(0.2), "gelu": nn.GELU}


class Chain(nn.Sequential):
    def __init__(self, sizes, act=nn.ReLU, bias=True):
        layers = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b, bias=bias), act()]
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


def problem_of(net, size, slopes=None):
    graph = trace(net, (size,))
    return graph, Problem.build(graph, net, slopes)


def matrix_of(problem, multipliers, bound):
    """``Q(Λ, ℓ²)`` over the blocks of a problem, densely, from its definition."""
    eye = lambda n: torch.eye(n, dtype=torch.float64)  # noqa: E731
    x = problem.dense(problem.inputs, {problem.input: bound * eye(problem.inputs)})
    form = x.T @ x
    for layer in problem.layers:
        weight = multipliers[layer.name].double()[layer.kept]
        v = problem.dense(layer.size, layer.inputs)
        shifted = problem.dense(layer.size, {layer.name: eye(layer.size)}) - layer.center[:, None] * v
        form += 2 * (shifted.T @ (weight[:, None] * shifted) - v.T @ ((weight * layer.radius**2)[:, None] * v))
    y = problem.dense(problem.outputs, problem.output)
    form -= y.T @ y
    return (form + form.T) / 2


def residual_of(graph, net, solution):
    """The independent yardstick: smallest eigenvalue of Q relative to its scale."""
    weights = dict(net.named_parameters())
    return lmi.from_graph(graph, net, weights, solution.multipliers, solution.bound).residual


def norm_of(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


def random_net(seed):
    """One of 20: chains and residual networks, up to 150 neurons."""
    torch.manual_seed(seed)
    act = list(ACTS.values())[seed % 4]
    big = 1 + seed // 4
    if (seed // 2) % 2:
        size = 3 + big
        return size, Residual(size, 6 * big, 2 + seed % 3, 3, act).double()
    return 4 + big, Chain([4 + big, *[8 + 6 * big] * (1 + seed % 3), 3], act).double()


# ------------------------------------------------------------------------------------------------ against the optimum


def compare_with_solver(seed):
    pytest.importorskip("cvxpy")
    size, net = random_net(seed)
    graph, problem = problem_of(net, size)
    assert problem.neurons <= 150
    found = minimise(problem)
    oracle = solve_sdp(problem)
    assert found.converged
    assert found.bound <= oracle.lower * 1.001  # within 0.1 % of the optimum
    assert found.bound >= oracle.lower * (1 - 2e-5)  # not below it but for the solver's error
    assert found.lower <= oracle.bound * (1 + 1e-6)
    assert residual_of(graph, net, found) > -1e-12
    assert residual_of(graph, net, oracle) > -1e-9
    assert attack.lipschitz_lower_bound(net, size, starts=12, steps=40).value <= found.bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_optimum_of_a_general_solver(seed):
    compare_with_solver(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_optimum_of_a_general_solver_all(seed):
    compare_with_solver(seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed):
    """Any graph, both methods: a small gap where promised, valid by the definition, above attacks, below products."""
    torch.manual_seed(seed)
    net = RandomGraph(seed).double()
    graph, problem = problem_of(net, net.width_in)
    found = minimise(problem)
    assert found.converged, found.reason
    assert found.lower <= found.bound <= found.lower * (1 + 1e-4)
    assert residual_of(graph, net, found) > -1e-12
    assert found.bound <= product(problem) * (1 + 1e-4)
    assert attack.lipschitz_lower_bound(net, net.width_in, starts=6, steps=15).value <= found.bound * (1 + 1e-9)
    rough = minimise(problem, dense=False, time_limit=0.3)
    assert rough.bound >= found.lower * (1 - 1e-9)
    assert residual_of(graph, net, rough) > -1e-12


# ------------------------------------------------------------------------------------------- the interior-point method


def mixed_problem(seed, form=Reduced):
    """A problem with groups or with slopes of any product, and its dense form."""
    torch.manual_seed(seed)
    act = [nn.ReLU, nn.GELU, activations.MaxMin][seed % 3]
    _, problem = problem_of(Residual(4, 6, 2, 3, act).double(), 4)
    squared, start = feasible(problem)
    return problem, Dense.build(problem, start, math.sqrt(squared), opened=form is Reduced)


@pytest.mark.parametrize("form", [Whole, Reduced])
@pytest.mark.parametrize("seed", range(3))
def test_derivatives_of_the_constraint(seed, form):
    """``∂S``, the traces, and the linear system with its curvature, from differences."""
    _, d = mixed_problem(seed, form)
    eta = 0.8 + 0.2 * torch.rand(d.count)
    place, step = form.at(d, eta), 1e-4
    units = torch.eye(d.count)
    there = [[form.at(d, eta + sign * step * unit).fixed for sign in (1, -1)] for unit in units]
    first = [(up - down) / (2 * step) for up, down in there]
    q = len(place.fixed)
    half = torch.randn(q, q)
    g, s = half @ half.T, torch.eye(q) + half.T @ half / q
    for k, unit in enumerate(units):
        assert torch.allclose(place.change(unit), first[k], atol=1e-6)
    assert torch.allclose(place.traces(g), torch.stack([(a * g).sum() for a in first]), atol=1e-5)
    assert torch.allclose(place.inner(half, half), place.traces(g), atol=1e-8)
    expected = torch.tensor([[float((a @ g @ b * s.T).sum()) for b in first] for a in first])
    for k in range(d.count):
        for j in range(d.count):
            moves = [(a, b) for a in (1, -1) for b in (1, -1)]
            corners = [form.at(d, eta + step * (a * units[k] + b * units[j])).fixed * (a * b) for a, b in moves]
            expected[k, j] -= float((g * torch.stack(corners).sum(0)).sum()) / (4 * step**2)
    system, pull = place.system(g, s, 0.0, 1.0)
    assert torch.allclose(system, expected, atol=2e-5 * float(expected.abs().max()))
    assert torch.allclose(pull, place.traces(s), atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_the_curved_constraint_stay_feasible(seed):
    """After the lag is added to τ, S is at least what its linearisation promised."""
    _, d = mixed_problem(seed)
    eta = torch.ones(d.count)
    place = Reduced.at(d, eta)
    move = 0.1 * torch.randn(d.count)
    after = Reduced.at(d, eta + move)
    rest = after.fixed - place.fixed - place.change(move)
    assert float(torch.linalg.eigvalsh(rest)[-1]) < 1e-12  # concave
    assert float(torch.linalg.eigvalsh(rest)[0]) + after.lag(place, place.change(move)) > -1e-12


@pytest.mark.parametrize("seed", range(4))
def test_both_forms_find_the_same(seed):
    size, net = random_net(seed)
    _, problem = problem_of(net, size)
    squared, start = feasible(problem)

    def run(reduced):
        seen = []

        def report(value, multipliers, lower):
            seen.append((value, lower))
            exact = bound_of(problem, problem.full(value * multipliers)) ** 2
            assert exact <= value * (1 + 1e-9)  # what is reported is proven
            return min(v for v, _ in seen) <= max(low for _, low in seen) * (1 + 1e-6)

        reason = interior.solve(problem, start, squared, stop=lambda: False, report=report, reduced=reduced)
        return reason, min(v for v, _ in seen), max(low for _, low in seen)

    whole, reduced = run(False), run(True)
    assert whole[0].startswith("optimal")
    assert reduced[1] >= whole[2] * (1 - 1e-9)
    assert whole[1] >= reduced[2] * (1 - 1e-9)
    if reduced[0].startswith("optimal"):
        assert reduced[1] == pytest.approx(whole[1], rel=2e-6)


def test_a_shallow_network_takes_few_steps():
    """The reduced form reaches 0.1 % in a few steps; a deep chain is left to the whole one."""
    torch.manual_seed(0)
    _, problem = problem_of(Chain([20, 64, 64, 10]).double(), 20)
    found = minimise(problem, tolerance=1e-3)
    assert found.converged
    assert len(found.history) <= 15  # the whole form takes 13 steps of three times the cost
    _, deep = problem_of(Chain([10, *[20] * 10, 5]).double(), 10)
    assert minimise(deep, tolerance=1e-3).converged


def test_large_method_comes_close():
    torch.manual_seed(0)
    net = Chain([6, 20, 20, 4])
    _, problem = problem_of(net, 6)
    best = minimise(problem).bound
    found = minimise(problem, dense=False, tolerance=1e-3)
    assert best * (1 - 1e-6) <= found.bound <= best * 1.005


def test_deep_chain_beats_layerwise():
    torch.manual_seed(0)
    _, problem = problem_of(Chain([12] * 13), 12)
    fast, greedy, best = eclipse(problem, fast=True)[0], eclipse(problem)[0], minimise(problem)
    rough = minimise(problem, dense=False, tolerance=1e-2)
    assert best.converged
    assert best.bound < rough.bound < greedy < fast < product(problem)
    assert bound_of(problem, problem.full(eclipse(problem)[1])) <= greedy * (1 + 1e-9)


# -------------------------------------------------------------------------------------------------------- closed cases


def test_linear_networks():
    one = nn.Linear(5, 3)
    assert minimise(problem_of(one, 5)[1]).bound == pytest.approx(norm_of(one.weight))
    two = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    norm = norm_of(two[1].weight @ two[0].weight)
    assert minimise(problem_of(two, 5)[1]).bound == pytest.approx(norm)
    # activations that are linear exactly are substituted
    third = nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(1.0), nn.Linear(7, 3))
    norm = norm_of(third[2].weight @ third[0].weight)
    found = minimise(problem_of(third, 5)[1])
    assert found.bound == pytest.approx(norm)
    assert all(bool(m.isinf().all()) for m in found.multipliers.values())


def test_one_neuron():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    expected = abs(float(net[0].weight.detach()) * float(net[2].weight.detach()))
    assert minimise(problem_of(net, 1)[1], tolerance=1e-6).bound == pytest.approx(expected, rel=1e-5)


def test_nonnegative_relu_network_is_tight():
    """With non-negative weights all neurons can be active: the constant is the norm of the product."""
    torch.manual_seed(1)
    net = Chain([4, 6, 5, 3])
    with torch.no_grad():
        for p in net.parameters():
            p.abs_()
    matrices = [m.weight for m in net if isinstance(m, nn.Linear)]
    norm = norm_of(matrices[2] @ matrices[1] @ matrices[0])
    assert norm * (1 - 1e-9) <= minimise(problem_of(net, 4)[1]).bound <= product(problem_of(net, 4)[1])


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_scaling_and_permutation(act):
    torch.manual_seed(2)
    net = Chain([4, 9, 8, 3], ACTS[act])
    base = minimise(problem_of(net, 4)[1], tolerance=1e-6).bound
    with torch.no_grad():
        net[4].weight *= 3
    assert minimise(problem_of(net, 4)[1], tolerance=1e-6).bound == pytest.approx(3 * base, rel=1e-5)
    with torch.no_grad():
        net[4].weight *= 1e8 / 3
    assert minimise(problem_of(net, 4)[1], tolerance=1e-6).bound == pytest.approx(1e8 * base, rel=1e-5)
    order = torch.randperm(9)
    with torch.no_grad():
        net[4].weight /= 1e8
        net[0].weight.copy_(net[0].weight[order])
        net[0].bias.copy_(net[0].bias[order])
        net[2].weight.copy_(net[2].weight[:, order])
    assert minimise(problem_of(net, 4)[1], tolerance=1e-6).bound == pytest.approx(base, rel=1e-5)


def test_relu_scale_invariance():
    """ReLU: scaling a neuron's input by a and its output by 1/a changes nothing, over many orders of magnitude."""
    torch.manual_seed(3)
    net = Chain([4, 9, 8, 3])
    base = minimise(problem_of(net, 4)[1], tolerance=1e-6).bound
    factors = 10.0 ** torch.linspace(-6, 6, 9)
    with torch.no_grad():
        net[0].weight *= factors[:, None]
        net[2].weight /= factors
    assert minimise(problem_of(net, 4)[1], tolerance=1e-6).bound == pytest.approx(base, rel=1e-5)


# ------------------------------------------------------------------------------------------------------- odd networks


def test_zero_weights():
    net = Chain([3, 5, 2])
    with torch.no_grad():
        net[2].weight.zero_()
    found = minimise(problem_of(net, 3)[1])
    assert found.bound == SMALLEST
    assert found.converged
    with torch.no_grad():
        net[0].weight.zero_()
        net[2].weight.fill_(1.0)
    assert minimise(problem_of(net, 3)[1]).bound == SMALLEST  # constant: biases only


@pytest.mark.parametrize("dense", [True, False])
def test_dead_and_constant_neurons(dense):
    torch.manual_seed(4)
    net = Chain([3, 6, 5, 2])
    with torch.no_grad():
        net[0].weight[1].zero_()  # constant
        net[2].weight[:, 2].zero_()  # nobody reads it
        net[4].weight[:, 0].zero_()
    _, problem = problem_of(net, 3)
    assert problem.neurons == 10
    found = minimise(problem, dense=dense, tolerance=1e-4 if dense else 1e-3)
    assert found.multipliers[problem.layers[0].name].isinf().nonzero().tolist() == [[1]]
    small = Chain([3, 4, 4, 2])
    with torch.no_grad():
        for i, (rows, columns) in {0: ([0, 3, 4, 5], slice(None)), 2: ([1, 2, 3, 4], [0, 3, 4, 5])}.items():
            small[i].weight.copy_(net[i].weight[rows][:, columns])
        small[4].weight.copy_(net[4].weight[:, 1:])
    assert found.bound == pytest.approx(minimise(problem_of(small, 3)[1]).bound, rel=3e-4 if dense else 2e-2)


class Parents(nn.Module):
    """Several parents, a concatenation, a split, tied inputs, joint nonlinearities."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(10, 5)
        self.sort, self.act = activations.MaxMin(), nn.PReLU(5)

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
    assert not problem.is_chain
    found = minimise(problem)
    assert found.converged
    joint = found.multipliers[graph.activations[0].name]
    assert torch.equal(joint[0::2], joint[1::2])
    assert residual_of(graph, net, found) > -1e-12
    assert attack.lipschitz_lower_bound(net, 4, starts=30, steps=100).value <= found.bound
    matrix = matrix_of(problem, found.multipliers, found.bound)
    assert float(torch.linalg.eigvalsh(matrix)[0]) > -1e-10 * float(torch.linalg.matrix_norm(matrix, 2))
    with pytest.raises(ldlt.GraphError, match="chains"):
        eclipse(problem)


def test_built_networks_are_recognised():
    """A network built to be ℓ-Lipschitz is certified with that ℓ, or less."""
    torch.manual_seed(6)
    net = ldlt.nn.Residual(4, [8, 8], 3, 2.0, dtype=torch.float64)
    plain = net.freeze()
    assert minimise(problem_of(plain, 4)[1]).bound <= 2.0 * (1 + 1e-4)


# --------------------------------------------------------------------------------------------------------- early stops


@pytest.mark.parametrize("dense", [True, False])
def test_early_stop_is_valid(dense):
    torch.manual_seed(7)
    net = Chain([6, 20, 20, 4])
    graph, problem = problem_of(net, 6)
    at_once = minimise(problem, time_limit=0.0, dense=dense)
    assert at_once.reason == "time limit"
    assert not at_once.converged
    assert residual_of(graph, net, at_once) > -1e-12

    def interrupt(step):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(step.bound)

    seen = []
    stopped = minimise(problem, progress=interrupt, dense=dense)
    assert stopped.reason == "interrupted"
    assert residual_of(graph, net, stopped) > -1e-12
    assert at_once.bound >= seen[-1] >= stopped.bound * (1 - 1e-9) > 0
    best = minimise(problem, start=stopped.multipliers, tolerance=1e-6)
    again = minimise(problem, start=best.multipliers, time_limit=0.0)
    assert again.bound <= best.bound * (1 + 1e-6)  # a good start is kept
    useless = {name: 1e-9 * m for name, m in best.multipliers.items()}
    assert bound_of(problem, useless) == math.inf
    assert minimise(problem, start=useless).bound == pytest.approx(best.bound, rel=2e-4)


def test_history_and_options():
    torch.manual_seed(8)
    _, problem = problem_of(Chain([6, 20, 20, 4]), 6)
    found = minimise(problem)
    bounds = [step.bound for step in found.history]
    # the last one is evaluated once more, from the definition
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(bounds))
    assert found.gap <= 1e-4
    assert found.history[-1].bound == found.bound == pytest.approx(bound_of(problem, found.multipliers))
    for options in ({"tolerance": 0.0}, {"time_limit": -1.0}):
        with pytest.raises(ldlt.OptionError):
            minimise(problem, **options)
    with pytest.raises(ldlt.ShapeError):
        minimise(problem, start={})


def test_overflow_is_refused():
    net = Chain([3, 5, 2])
    with torch.no_grad():
        net[0].weight *= 1e200
        net[2].weight *= 1e200
    with pytest.raises(ldlt.InfeasibleError):
        minimise(problem_of(net, 3)[1])


def test_missing_cvxpy(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name == "cvxpy":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ldlt.errors.MissingExtraError, match="certify"):
        solve_sdp(problem_of(Chain([2, 3, 1]), 2)[1])


# ------------------------------------------------------------------------------------------------------ building blocks


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("seed", range(4))
def test_start_and_elimination(seed, shape):
    """The start is feasible for its bound, and the block factor solves like the dense matrix."""
    torch.manual_seed(seed)
    net = RandomGraph(seed + 20).double()
    _, problem = problem_of(net, net.width_in)
    squared, flat = feasible(problem, shape)
    if not problem.layers or squared == 0:
        return
    matrix = matrix_of(problem, problem.full(squared * flat), math.sqrt(squared))
    assert float(torch.linalg.eigvalsh(matrix)[0]) > -1e-10 * float(matrix.abs().max())
    factor, _, _ = eliminate(problem, flat)
    plain = Problem(problem.input, problem.inputs, problem.layers, {}, 0, problem.features)
    dense = matrix_of(plain, problem.full(flat), 1.0)
    inverse = torch.linalg.inv(dense)
    right = torch.randn(len(dense), 3)
    parts = dict(zip(problem.sizes, right.split(list(problem.sizes.values())), strict=True))
    solved = torch.cat([factor.solve(parts)[name] for name in problem.sizes])
    scale = float(inverse.abs().max())
    assert torch.allclose(solved, inverse @ right, atol=1e-9 * scale)
    starts = dict(zip(problem.sizes, torch.tensor([0, *problem.sizes.values()]).cumsum(0).tolist(), strict=False))
    for (a, b), block in factor.selected_inverse().items():
        expected = inverse[starts[a] :, starts[b] :][: problem.sizes[a], : problem.sizes[b]]
        assert torch.allclose(block, expected, atol=1e-9 * scale)


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
    for radius in (0.0, 0.01, 0.1, 1.0, 30.0):
        found = minimise(local_problem(graph, net, ball(center, radius)))
        assert found.converged, found.reason
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
    assert (
        minimise(local_problem(graph, net, inside)).bound
        <= 1.001 * minimise(local_problem(graph, net, ball(center, 0.1))).bound
    )


@given(seed=st.integers(0, 300), radius=st.sampled_from([0.01, 0.3, 2.0]), box=st.booleans())
@settings(max_examples=25)
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
    solution = minimise(Problem.build(graph, net, found.slopes), tolerance=1e-3)
    assert float(attack.jacobian_norms(net, points).max()) <= solution.bound * (1 + 1e-7)


def test_regions_are_checked():
    net = Chain([3, 4, 2])
    graph = trace(net, (3,))
    with pytest.raises(ldlt.ShapeError):
        ranges(graph, net, ball(torch.zeros(2), 1.0))
    with pytest.raises(ldlt.ShapeError):
        Problem.build(graph, net, {graph.activations[0].name: (torch.zeros(1), torch.ones(1))})
    with pytest.raises(ldlt.OptionError):
        Problem.build(graph, net, {graph.activations[0].name: (torch.ones(4), torch.zeros(4))})
