"""Balls enclose, proofs are never wrong, certificates cannot be forged."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.certificates import definite, proof, prove
from ldlt.certificates.ball import Ball, arithmetic_is_ieee, gamma, product_up
from ldlt.certificates.definite import is_semidefinite
from ldlt.certificates.enclose import Network, Slopes
from ldlt.certificates.fingerprint import fingerprint
from ldlt.certificates.proof import Prover, bordered
from ldlt.certificates.settle import settle, settle_gram
from ldlt.graph import Activation, Graph, Input, Ref, Wire
from ldlt.graph.trace import trace
from random_graphs import RandomGraph, randomise

# ------------------------------------------------------------------------------------------------ exact arithmetic


def exact(array):
    """An array of floats as one of rational numbers."""
    return np.vectorize(Fraction, otypes=[object])(np.asarray(array, dtype=np.float64))


def contains(ball, truth) -> bool:
    miss = np.abs(exact(ball.mid) - truth) - exact(ball.radius)
    return all(m <= 0 for m in np.asarray(miss, dtype=object).reshape(-1))


def is_psd(matrix) -> bool:
    """Whether a symmetric matrix of rational numbers is positive semidefinite: exact elimination."""
    a = [list(row) for row in matrix]
    for k in range(len(a)):
        if a[k][k] < 0:
            return False
        if a[k][k] == 0:
            if any(a[i][k] != 0 for i in range(k, len(a))):
                return False
            continue
        for i in range(k + 1, len(a)):
            factor = a[i][k] / a[k][k]
            for j in range(k + 1, len(a)):
                a[i][j] -= factor * a[k][j]
    return True


def numbers(small: bool = True):
    plain = st.floats(-8, 8, allow_nan=False)
    rounded = st.integers(-64, 64).map(lambda n: n / 16)
    tiny = st.sampled_from([0.0, 1.0, -1.0, 5e-324, -3e-310, 2.0**-1022, 1e-200, 3e-160, 1e100])
    return st.one_of(plain, rounded, tiny) if small else st.one_of(plain, rounded)


def matrices(rows, columns, small=True):
    flat = st.lists(numbers(small), min_size=rows * columns, max_size=rows * columns)
    return flat.map(lambda v: np.array(v).reshape(rows, columns))


@st.composite
def balls(draw, rows, columns):
    mid = draw(matrices(rows, columns))
    if draw(st.booleans()):
        return Ball(mid)
    return Ball(mid, np.abs(draw(matrices(rows, columns))) * 2.0**-30)


def members(ball, draw):
    """A matrix of rational numbers inside the ball: a corner, or a point between."""
    size = ball.mid.size
    share = draw(st.lists(st.sampled_from([-1, 1, 0, Fraction(1, 3)]), min_size=size, max_size=size))
    return exact(ball.mid) + np.array(share, dtype=object).reshape(ball.shape) * exact(ball.radius)


sizes = st.integers(1, 4)


@given(st.data(), sizes, sizes, sizes)
def test_ball_operations_enclose(data, m, n, k):
    a, b, c = data.draw(balls(m, n)), data.draw(balls(m, n)), data.draw(balls(n, k))
    x, y, z = (members(v, data.draw) for v in (a, b, c))
    with np.errstate(all="ignore"):
        assert contains(a + b, x + y)
        assert contains(a - b, x - y)
        assert contains(a * b, x * y)
        assert contains(a @ c, x.dot(z))
        assert contains(a[:1] * b, x[:1] * y)  # broadcasting
        assert contains((a + b) @ c, (x + y).dot(z))
        assert contains(Ball.concatenate([a, b])[np.arange(2 * m)[::-1]], np.concatenate([x, y])[::-1])
        assert contains((a @ c).T, x.dot(z).T)
        assert all(m >= abs(t) for m, t in zip(exact(a.magnitude).reshape(-1), x.reshape(-1), strict=True))


@given(matrices(3, 5), matrices(5, 2))
def test_upper_bound_of_a_product(a, b):
    found = product_up(np.abs(a), np.abs(b))
    truth = exact(np.abs(a)).dot(exact(np.abs(b)))
    assert all(f >= t for f, t in zip(exact(found).reshape(-1), truth.reshape(-1), strict=True))


@given(st.integers(1, 2**40))
def test_gamma_is_an_upper_bound(n):
    truth = Fraction(n, 2**53) / (1 - Fraction(n, 2**53))
    assert truth <= Fraction(gamma(n)) <= truth * (1 + Fraction(1, 2**45))


def test_balls_against_arb():
    flint = pytest.importorskip("flint")
    rng = np.random.default_rng(0)
    for m, n, k in ((3, 40, 4), (7, 7, 7), (2, 150, 2)):
        a, b = (rng.standard_normal(s) * 10.0 ** rng.integers(-8, 8, s) for s in ((m, n), (n, k)))
        ball = Ball.exact(a) @ Ball.exact(b)
        truth = flint.fmpq_mat(*_rational(flint, a)) * flint.fmpq_mat(*_rational(flint, b))
        with flint.ctx.workprec(400):
            for i, j in itertools.product(range(m), range(k)):
                around = flint.arb(float(ball.mid[i, j]), float(ball.rad[i, j]))
                assert around.contains(flint.arb(truth[i, j]))


def _rational(flint, array):
    flat = [flint.fmpq(f.numerator, f.denominator) for f in map(Fraction, array.reshape(-1).tolist())]
    return (*array.shape, flat)


def test_flushed_denormals_are_noticed():
    net = ldlt.nn.FeedForward(2, [3], 2)
    stored = net.freeze()
    graph = trace(stored, (2,))
    assert arithmetic_is_ieee()
    assert torch.set_flush_denormal(True)
    try:
        assert not arithmetic_is_ieee()
        refused = prove(graph, stored, net.multipliers(), 2.0)
    finally:
        torch.set_flush_denormal(False)
    assert not refused.holds
    assert "flushes" in refused.reason
    assert prove(graph, stored, net.multipliers(), 2.0).holds


# ---------------------------------------------------------------------------------------------------- definiteness


@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.integers(20, 60), st.booleans())
def test_no_indefinite_matrix_is_accepted(data, n, rank, bits, up):
    b = np.array(data.draw(st.lists(st.integers(-4, 4), min_size=n * rank, max_size=n * rank))).reshape(n, rank)
    gram = (b @ b.T).astype(float)
    scale = 2.0 ** np.array(data.draw(st.lists(st.integers(-20, 20), min_size=n, max_size=n)))
    shift = (1 if up else -1) * 2.0**-bits
    matrix = scale[:, None] * (gram + shift * np.eye(n)) * scale
    found = is_semidefinite(Ball(matrix.copy()))
    if found.holds:
        assert is_psd(exact(matrix))
        assert found.margin >= 0
    if up and bits < 30:
        assert found.holds  # a smallest eigenvalue of 1e-9 is far above the rounding errors


@given(st.data(), st.integers(2, 4))
def test_all_members_of_an_accepted_ball_are_semidefinite(data, n):
    b = data.draw(matrices(n, n, small=False))
    gram = b @ b.T
    mid = np.tril(gram) + np.tril(gram, -1).T
    rad = np.full((n, n), 2.0 ** -data.draw(st.integers(1, 40)))
    found = is_semidefinite(Ball(mid.copy(), rad.copy()))
    for _ in range(3):
        signs = np.array(data.draw(st.lists(st.sampled_from([-1, 1]), min_size=n * n, max_size=n * n))).reshape(n, n)
        signs = np.tril(signs) + np.tril(signs, -1).T
        assert not found.holds or is_psd(exact(mid) + exact(signs) * exact(rad))


def test_a_wrong_factor_proves_nothing(monkeypatch):
    """The test trusts no factorisation: garbage instead of a Cholesky factor must be refused."""
    rng = np.random.default_rng(0)
    bad = rng.standard_normal((6, 6))
    bad = bad @ bad.T
    bad -= (np.linalg.eigvalsh(bad)[0] + 1e-6) * np.eye(6)
    for garbage in (torch.eye(6), torch.zeros(6, 6), torch.full((6, 6), torch.nan), torch.randn(6, 6)):
        answer = (garbage.double(), torch.zeros((), dtype=torch.int32))
        monkeypatch.setattr(definite.torch.linalg, "cholesky_ex", lambda *_, a=answer, **__: (a[0].clone(), a[1]))
        assert not is_semidefinite(Ball(bad.copy())).holds
        monkeypatch.undo()
    assert not is_semidefinite(Ball(bad.copy())).holds
    assert is_semidefinite(Ball(bad + 3e-6 * np.eye(6))).holds


def test_rounding_error_covers_the_exact_residual():
    rng = np.random.default_rng(1)
    for shift in (0.0, 1e-3):
        lower = np.tril(rng.standard_normal((5, 5)))
        mid = lower @ lower.T + shift * np.eye(5)  # without a shift the residual that is computed vanishes
        residual = exact(mid) - exact(np.eye(5)) * Fraction(shift) - exact(lower).dot(exact(lower).T)
        e = definite.rounding_error(mid, np.zeros((5, 5)), lower, shift)
        # e bounds the spectral norm; the largest entry is a lower bound of that
        assert 0 < max(abs(r) for r in residual.reshape(-1)) <= Fraction(e)
        assert e < 1e-13


@pytest.mark.parametrize(
    "matrix",
    [
        np.array([[0.0]]),
        np.array([[-1.0]]),
        np.array([[np.nan]]),
        np.array([[np.inf]]),
        np.diag([1.0, 1e-300]),
        np.array([[1.0, 0.0], [2.0, 1.0]]),
    ],
)
def test_what_is_not_definite_has_a_reason(matrix):
    found = is_semidefinite(Ball(matrix))
    assert not found.holds
    assert found.reason


# ---------------------------------------------------------------------------------------------------------- proofs


def prove_smallest(graph, module, multipliers, bound, **options):
    return settle(Prover(graph, module), multipliers, bound, **options)


def prove_gram(graph, module, multipliers, bound):
    prover = Prover(graph, module)
    return settle_gram(prover, prover.prove(multipliers, bound))


def stored_form(net):
    stored = net.freeze()
    graph = trace(stored, net.input_shape)
    names = [a.name for a in graph.activations]
    return stored, graph, dict(zip(names, net.multipliers().values(), strict=True))


def exact_inequality(graph, module, multipliers, bound):
    """``Q`` of a chain with leaky ReLUs in rational numbers, from its definition."""
    layers = [m for m in module if isinstance(m, nn.Linear)]
    slopes = [m.negative_slope for m in module if isinstance(m, nn.LeakyReLU)]
    weights = [exact(layer.weight.detach().double().numpy()) for layer in layers]
    sizes = [weights[0].shape[1], *(w.shape[0] for w in weights[:-1])]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    total = starts[-1]
    q = exact(np.zeros((total, total)))
    for i in range(sizes[0]):
        q[i, i] += Fraction(bound) ** 2
    for layer, (name, m) in enumerate(zip([a.name for a in graph.activations], slopes, strict=True)):
        for j, lam in enumerate(multipliers[name].double().tolist()):
            w, v = exact(np.zeros(total)), exact(np.zeros(total))
            w[starts[layer + 1] + j] = Fraction(1)
            v[starts[layer] : starts[layer + 1]] = weights[layer][j]
            low, high = w - Fraction(m) * v, w - v
            q += Fraction(lam) * (np.outer(low, high) + np.outer(high, low))
    y = exact(np.zeros((weights[-1].shape[0], total)))
    y[:, starts[-2] : starts[-1]] = weights[-1]
    return q - y.T.dot(y), y


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 40))
def test_proofs_against_rational_arithmetic(seed, dtype, bits):
    torch.manual_seed(seed)
    net = ldlt.nn.FeedForward(
        2, [3, 2], 2, activation=lambda: nn.LeakyReLU(0.25 * (seed % 3)), head="orthogonal", dtype=dtype
    )
    randomise(net, seed, 0.5)
    stored, graph, multipliers = stored_form(net)
    bound = net.bound * (1 + (-1) ** seed * 2.0**-bits)
    found = prove(graph, stored, multipliers, bound)
    if found.holds:
        assert is_psd(exact_inequality(graph, stored, multipliers, bound)[0])
    best = prove_smallest(graph, stored, multipliers, net.bound)
    if best.holds:
        assert is_psd(exact_inequality(graph, stored, best.multipliers, best.bound)[0])


def test_assembled_matrix_encloses_the_exact_one():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.25), nn.Linear(4, 2), nn.LeakyReLU(-0.5), nn.Linear(2, 2))
    graph = trace(module, (3,))
    multipliers = {a.name: torch.rand(a.features, dtype=torch.float64) + 0.1 for a in graph.activations}
    truth, y = exact_inequality(graph, module, multipliers, 0.7)
    values = {n: m.numpy() for n, m in multipliers.items()}
    ball = bordered(Network(graph, module), values, 0.7, np.eye(2))
    n = len(truth)
    lower = np.tril_indices(n)
    inner = Ball(ball.mid[lower], ball.rad[lower])
    assert contains(inner, (truth + y.T.dot(y))[lower])
    assert contains(Ball(ball.mid[n:, :n], ball.rad[n:, :n]), y)
    assert ball.rad.max() < 1e-14


@pytest.mark.parametrize("head", ["joint", "orthogonal", "rows"])
@pytest.mark.parametrize("contraction", ["cholesky", "symmetric", "cayley"])
@pytest.mark.parametrize("build", [ldlt.nn.FeedForward, ldlt.nn.Residual])
def test_networks_built_here_are_proven(build, contraction, head):
    dtype = torch.float64 if contraction == "symmetric" else torch.float32
    net = build(8, [32] * 3, 3, bound=1.3, contraction=contraction, head=head, dtype=dtype)
    stored, graph, multipliers = stored_form(net)
    found = prove_smallest(graph, stored, multipliers, net.bound)
    assert found.holds, found.reason
    assert found.bound <= net.bound * (1 + (1e-6 if dtype == torch.float32 else 1e-10))
    assert prove(graph, stored, found.multipliers, found.bound).holds
    assert not prove(graph, stored, multipliers, 0.5 * net.bound).holds


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_are_proven(seed):
    dtype = (torch.float32, torch.float64)[seed % 2]
    module = RandomGraph(seed).to(dtype)
    head = ("joint", "orthogonal", "rows")[seed % 3]
    contraction = ("cholesky", "symmetric", "cayley")[seed // 3 % 3]
    net = ldlt.Lipschitz(module, 1.5, input_shape=module.width_in, contraction=contraction, head=head)
    randomise(net, seed)
    stored, graph, multipliers = stored_form(net)
    found = prove_smallest(graph, stored, multipliers, net.bound)
    assert found.holds, found.reason
    assert found.bound <= net.bound * (1 + (1e-5 if dtype == torch.float32 else 1e-9))


def test_a_linear_network_is_proven_at_its_norm():
    module = nn.Linear(5, 3)
    norm = float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))
    graph = trace(module, (5,))
    assert prove(graph, module, {}, norm * (1 + 1e-12)).holds
    assert not prove(graph, module, {}, norm * (1 - 1e-12)).holds
    found = prove_smallest(graph, module, {}, 2 * norm, least=0.1)
    assert found.holds
    assert norm <= found.bound <= norm * (1 + 1e-12)


def test_a_smaller_bound_is_found_on_request():
    net = ldlt.nn.FeedForward(6, [12, 12], 2, head="joint", dtype=torch.float64)
    stored, graph, multipliers = stored_form(net)
    loose = prove_smallest(graph, stored, multipliers, 1.0)
    tight = prove_smallest(graph, stored, multipliers, 1.0, least=0.0)
    assert loose.bound == 1.0
    assert tight.holds
    assert tight.bound < 0.99


def _nets():
    net = ldlt.nn.FeedForward(4, [6, 6], 3, head="orthogonal")
    return net, *stored_form(net)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_bad_multipliers_prove_nothing(value, place):
    net, stored, graph, multipliers = _nets()
    name = graph.activations[1].name
    multipliers[name] = multipliers[name].detach().clone()
    multipliers[name][place] = value
    for run in (prove, prove_smallest, prove_gram):
        found = run(graph, stored, multipliers, 2.0)
        assert not found.holds
        assert name in found.reason


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, True, "1", None, 1e200, 1e-200])
def test_bad_bounds_prove_nothing(bound):
    net, stored, graph, multipliers = _nets()
    for run in (prove, prove_smallest, prove_gram):
        found = run(graph, stored, multipliers, bound)
        assert not found.holds
        assert found.reason


def test_multipliers_must_fit_the_network():
    net, stored, graph, multipliers = _nets()
    first, second = (a.name for a in graph.activations)
    for odd, reason in (
        ({first: multipliers[first]}, "no multiplier"),
        ({**multipliers, "other": torch.ones(3)}, "no activation"),
        ({**multipliers, second: torch.ones(5)}, "5 multipliers"),
        ({**multipliers, second: torch.ones(6, dtype=torch.int64)}, "no multiplier"),
    ):
        found = prove(graph, stored, odd, 2.0)
        assert not found.holds
        assert reason in found.reason


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value):
    net, stored, graph, multipliers = _nets()
    with torch.no_grad():
        stored[2].weight[1, 1] = value
    found = prove(graph, stored, multipliers, 2.0)
    assert not found.holds
    assert "not finite" in found.reason


def test_mixed_neurons_need_equal_multipliers():
    net = ldlt.nn.FeedForward(4, [6, 6], 3, activation=ldlt.activations.MaxMin)
    stored, graph, multipliers = stored_form(net)
    assert prove(graph, stored, multipliers, 1.01).holds
    name = graph.activations[0].name
    multipliers[name] = multipliers[name].detach().clone()
    multipliers[name][0] *= 1 + 1e-6
    found = prove(graph, stored, multipliers, 1.01)
    assert not found.holds
    assert "equal" in found.reason


def test_too_large(monkeypatch):
    net, stored, graph, multipliers = _nets()
    monkeypatch.setattr(proof, "LARGEST", 18)
    found = prove(graph, stored, multipliers, 2.0)
    assert not found.holds
    assert "too large" in found.reason


class Wired(nn.Module):
    """Every kind of linear operation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(8, 2)
        self.register_buffer("matrix", torch.randn(6, 6))
        self.register_buffer("scale", torch.rand(6) + 0.5)
        self.register_buffer("three", torch.rand(3) + 0.5)

    def forward(self, x):
        h = torch.relu(0.1 * self.a(x) + x / 3)
        g = torch.tanh(self.b(h.flip(1)) @ self.matrix - torch.sub(h, x, alpha=0.7) * self.scale)
        left, right = g.chunk(2, 1)
        mean = h.reshape(-1, 3, 2).mean(1)
        total = h.reshape(-1, 3, 2).sum(2)
        return self.out(torch.cat([-left + total, right / self.three, mean], 1)) / 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wires(dtype):
    module = Wired().to(dtype)
    graph = trace(module, (6,))
    multipliers = {a.name: torch.rand(a.features, dtype=torch.float64) + 0.1 for a in graph.activations}
    yardstick = ldlt.lmi.from_graph(graph, module, dict(module.named_parameters()), multipliers, 1.5)
    ball = bordered(Network(graph, module), {n: m.numpy() for n, m in multipliers.items()}, 1.5, np.eye(2))
    n = len(yardstick.matrix)
    y = ball.mid[n:, :n]
    form = np.tril(ball.mid[:n, :n])
    form = form + np.tril(form, -1).T - y.T @ y
    close = 1e-13 if dtype == torch.float64 else 1e-6  # numbers of the program are read in either precision
    assert np.abs(form - yardstick.matrix.numpy()).max() < close
    assert ball.rad.max() < close
    network = Network(graph, module)
    mean = next(n for n in graph.nodes if isinstance(n, Wire) and n.operation == "mean")
    (matrix,) = network.matrices(mean)
    assert contains(matrix, exact((matrix.mid != 0).astype(float)) / 3)
    quotient = next(n for n in graph.nodes if isinstance(n, Wire) and n.role == "sum" and n.operation == "div")
    third = network.scale(quotient, quotient.scales[0])
    assert contains(third, exact([1.0])[0] / 3)
    assert float(third.radius) > 0


def test_an_unknown_operation_is_refused():
    nodes = (
        Input("x", (3,), ()),
        Wire("odd", (3,), ("x",), target="aten.logcumsumexp.default", args=(Ref(0), 1)),
        Activation("act", (3,), ("odd",), module=nn.ReLU()),
    )
    found = prove(Graph(nodes, "act"), nn.ReLU(), {"act": torch.ones(3)}, 10.0)
    assert not found.holds
    assert "odd" in found.reason


@pytest.mark.parametrize(
    "activation",
    [nn.GELU(), nn.SiLU(), nn.Mish(), nn.SELU(), nn.LeakyReLU(0.01), nn.Hardsigmoid(), nn.ReLU(), nn.Tanh()],
)
def test_slopes_are_rounded_outwards(activation):
    module = nn.Sequential(nn.Linear(2, 3), activation, nn.Linear(3, 2))
    node = trace(module, (2,)).activations[0]
    slopes = Slopes.of(node, module)
    low, high = ldlt.activations.slope_bounds(activation)
    dyadic = [v * 1024 == round(v * 1024) for v in (low, high)]
    assert slopes.low[0] == low if dyadic[0] else slopes.low[0] < low
    assert slopes.high[0] == high if dyadic[1] else slopes.high[0] > high
    assert slopes.high[0] - high < 1e-6
    assert low - slopes.low[0] < 1e-6
    total, product = exact(slopes.low) + exact(slopes.high), exact(slopes.low) * exact(slopes.high)
    assert contains(slopes.total, total)
    assert contains(slopes.product, product)


def test_neurons_without_a_choice_are_left_out():
    """Infinite multipliers: a neuron with one slope is put in as a linear map; the proof is that of its region."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    graph = trace(module, (3,))
    name = graph.activations[0].name
    active = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    slopes = {name: (active, active)}
    jacobian = module[2].weight * active @ module[0].weight
    norm = float(torch.linalg.matrix_norm(jacobian.detach(), 2))
    inf = {name: torch.full((4,), math.inf, dtype=torch.float64)}
    assert prove(graph, module, inf, norm * (1 + 1e-12), slopes=slopes).holds
    assert not prove(graph, module, inf, norm * (1 - 1e-12), slopes=slopes).holds
    assert not prove(graph, module, inf, 100 * norm).holds
    for odd in ((active[:3], active[:3]), (active, -active - 1), (active * math.nan, active)):
        found = prove(graph, module, inf, norm * 2, slopes={name: odd})
        assert not found.holds
        assert found.reason


def test_a_constant_neuron_may_be_left_out():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        module[0].weight[2] = 0.0
    graph = trace(module, (3,))
    name = graph.activations[0].name
    multipliers = {name: torch.tensor([1.0, 1.0, math.inf, 1.0], dtype=torch.float64)}
    assert prove(graph, module, multipliers, 30.0).holds


def test_gram_bounds_every_direction():
    net = ldlt.nn.Residual(5, [12, 12], 4, bound=0.7, head="joint")
    stored, graph, multipliers = stored_form(net)
    found = prove_gram(graph, stored, multipliers, net.bound)
    assert found.holds, found.reason
    x, d = torch.randn(400, 5).double(), 1e-2 * torch.randn(400, 5).double()
    stored = stored.double()
    change = (stored(x + d) - stored(x)).detach()
    for a in torch.randn(10, 4).double():
        constant = net.bound * float(a @ found.gram @ a) ** 0.5
        assert float(((change @ a).abs() / d.norm(dim=1)).max()) <= constant
    assert torch.linalg.eigvalsh(found.gram)[-1] <= 1
    smaller = found.gram * (1 - 1e-6)
    assert not prove(graph, net.freeze(), multipliers, net.bound, gram=smaller).holds
    for odd in (found.gram[:3, :3], found.gram * math.nan, found.gram + torch.eye(4).roll(1, 0)):
        assert not prove(graph, net.freeze(), multipliers, net.bound, gram=odd).holds


# ----------------------------------------------------------------------------------------------------- fingerprint


def small_model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-64, 64, p.shape, generator=generator) / 256)
    return model


def print_of(model):
    return fingerprint(trace(model, (3,)), model)


def test_fingerprint_is_the_same_everywhere():
    assert print_of(small_model()) == "90f75453c6dc8264272f1af578b1c1c7d8ebb4c3b2773d4cd94df67c5e184e4f"


def test_one_bit_anywhere_changes_the_fingerprint():
    base = small_model()
    seen = {print_of(base)}
    graph = trace(base, (3,))
    flips = 0
    for name, p in base.named_parameters():
        for index in range(p.numel()):
            for bit in (0, 17, 31):
                model = copy.deepcopy(base)
                raw = model.get_parameter(name).detach().view(-1).view(torch.int32)
                raw[index] ^= 1 << bit if bit < 31 else -(2**31)
                seen.add(fingerprint(graph, model))
                flips += 1
    assert len(seen) == flips + 1


def test_what_does_and_does_not_change_the_fingerprint():
    base = small_model()
    first = print_of(base)
    same = copy.deepcopy(base).train()
    with torch.no_grad():
        same[0].weight.set_(same[0].weight.t().contiguous().t())  # another memory layout
    assert print_of(same) == first
    other = copy.deepcopy(base)
    other[1].negative_slope = 0.2
    assert print_of(other) != first
    other = copy.deepcopy(base)
    other[1] = nn.ELU(0.1)
    assert print_of(other) != first
    assert print_of(base.double()) != first
    other = copy.deepcopy(base).float()
    other.register_buffer("unused", torch.zeros(1))
    assert print_of(other) != first
