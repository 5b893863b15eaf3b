"""Bounds on the rounding of a forward pass, against arithmetic with 200 bits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import ldlt
from ldlt.activations import ELEMENTWISE, Abs, Atan, Clamp, Cos, GroupSort, MaxMin, Sin
from ldlt.certificates.ball import Ball
from ldlt.rounding import ACCURACY, _norm
from random_graphs import RandomGraph

flint = pytest.importorskip("flint")
arb = flint.arb


@pytest.fixture(autouse=True)
def _precision():
    with flint.ctx.workprec(200):
        yield


# -------------------------------------------------------------------------------------------- the exact network


def clip(x, low, high):
    return max(min(x, arb(high)), arb(low)) if high is not None else max(x, arb(low))


def softplus(x):
    return x + (-x).exp().log1p() if x > 0 else x.exp().log1p()


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def gelu(m, x):
    if m.approximate == "tanh":
        return x / 2 * (1 + ((2 / arb.pi()).sqrt() * (x + arb("0.044715") * x**3)).tanh())
    return x / 2 * (1 + (x / arb(2).sqrt()).erf())


def selu(m, x):
    scale, alpha = arb("1.0507009873554804934193349852946"), arb("1.6732632423543772848170429916717")
    return scale * (x if x > 0 else alpha * x.expm1())


EXACT = {
    Abs: lambda m, x: abs(x),
    Atan: lambda m, x: x.atan(),
    Clamp: lambda m, x: clip(x, m.min, m.max),
    Cos: lambda m, x: x.cos(),
    Sin: lambda m, x: x.sin(),
    nn.CELU: lambda m, x: x if x > 0 else m.alpha * (x / m.alpha).expm1(),
    nn.ELU: lambda m, x: x if x > 0 else m.alpha * x.expm1(),
    nn.GELU: gelu,
    nn.Hardshrink: lambda m, x: x,
    nn.Hardsigmoid: lambda m, x: clip(x + 3, 0, 6) / 6,
    nn.Hardswish: lambda m, x: x * clip(x + 3, 0, 6) / 6,
    nn.Hardtanh: lambda m, x: clip(x, m.min_val, m.max_val),
    nn.Identity: lambda m, x: x,
    nn.LeakyReLU: lambda m, x: x if x >= 0 else m.negative_slope * x,
    nn.LogSigmoid: lambda m, x: -softplus(-x),
    nn.Mish: lambda m, x: x * softplus(x).tanh(),
    nn.PReLU: lambda m, x: x if x >= 0 else m.weight.item() * x,
    nn.ReLU: lambda m, x: clip(x, 0, None),
    nn.ReLU6: lambda m, x: clip(x, 0, 6),
    nn.RReLU: lambda m, x: x if x >= 0 else (arb(m.lower) + m.upper) / 2 * x,
    nn.SELU: selu,
    nn.SiLU: lambda m, x: x * sigmoid(x),
    nn.Sigmoid: lambda m, x: sigmoid(x),
    nn.Softplus: lambda m, x: softplus(m.beta * x) / m.beta,
    nn.Softshrink: lambda m, x: x - clip(x, -m.lambd, m.lambd),
    nn.Softsign: lambda m, x: x / (1 + abs(x)),
    nn.Tanh: lambda m, x: x.tanh(),
    nn.Tanhshrink: lambda m, x: x - x.tanh(),
    nn.Threshold: lambda m, x: clip(x, m.threshold, None),
}
CASES = [
    *(c() for c in EXACT if c not in (Clamp, nn.Hardshrink, nn.Threshold)),
    Clamp(-0.3, 0.7), Clamp(min=0.1), nn.Hardshrink(0.0), nn.Threshold(0.3, 0.3), nn.CELU(0.7), nn.ELU(1.7),
    nn.GELU("tanh"), nn.Hardtanh(-0.1, 0.7), nn.LeakyReLU(-0.3), nn.Softplus(beta=-3.3, threshold=80.0),
    nn.Softplus(threshold=35.0), nn.Softshrink(0.3),
]  # fmt: skip


def activate(module, row):
    if isinstance(module, MaxMin):
        return [f(row[2 * i], row[2 * i + 1]) for i in range(len(row) // 2) for f in (max, min)]
    return [EXACT[type(module)](module, v) for v in row]


def linear(layer, row):
    weight, bias = layer.weight.tolist(), [0.0] * layer.out_features if layer.bias is None else layer.bias.tolist()
    return [sum((w * v for w, v in zip(line, row, strict=True)), arb(b)) for line, b in zip(weight, bias, strict=True)]


def run(graph: RandomGraph, row):
    """The program of a random module in exact arithmetic, from its definition."""
    values, layers = {0: row}, graph.layers

    def add(a, b, sign=1):
        return [p + sign * q for p, q in zip(a, b, strict=True)]

    for kind, i, chosen, number in graph.program:
        first = values[chosen[0]]
        if kind in ("act", "linear"):
            total = linear(layers[f"l{i}_{chosen[0]}"], first)
            for p in chosen[1:]:
                total = add(total, linear(layers[f"l{i}_{p}"], values[p]))
            values[i] = activate(layers[f"a{i}"], total) if kind == "act" else total
        elif kind == "cat":
            values[i] = [v for p in chosen for v in values[p]]
        elif kind == "sum":
            total = first
            for p in chosen[1:]:
                total = add(total, values[p], -1)
            values[i] = total
        elif kind == "slice":
            values[i] = first[number[0] : number[1]]
        elif kind == "scale":
            values[i] = [number * v for v in first]
        elif kind == "constant":
            columns = getattr(graph, f"c{i}").T.tolist()
            values[i] = [sum((c * v for c, v in zip(column, first, strict=True)), arb(0)) for column in columns]
        elif kind == "postact":
            values[i] = activate(layers[f"a{i}"], first)
        else:
            values[i] = activate(layers[f"a{i}"], add(first, linear(layers[f"l{i}_{chosen[0]}"], first)))
    ends = [linear(layers[f"out_{p}"], values[p]) for p in graph.ends]
    return [sum(column, arb(0)) for column in zip(*ends, strict=True)]


def compare(model, x, truth):
    """Check the bound on every output; the bounds, and their ratios to the true errors that are not zero."""
    logits, error = ldlt.forward_error(model, x)
    assert torch.equal(logits, model(x).detach())
    ratios = []
    for row, exact, bounds in zip(logits.double().tolist(), truth, error.tolist(), strict=True):
        for found, value, bound in zip(row, exact, bounds, strict=True):
            miss = abs(found - value)
            assert miss <= bound, (found, value, bound)
            if float(miss.mid()) > 1e-17:
                ratios.append(bound / float(miss.mid()))
    return error, ratios


# ------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_graphs(dtype):
    ratios = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = RandomGraph(seed).to(dtype).eval()
        x = torch.randn(3, model.width_in, dtype=dtype) * 2
        ratios += compare(model, x, [run(model, [arb(v) for v in row]) for row in x.tolist()])[1]
    assert np.median(ratios) < (1.01 if dtype is torch.float32 else 100)


def test_every_activation_has_a_rule():
    assert set(EXACT) == set(ELEMENTWISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("module", CASES, ids=repr)
def test_activations(module, dtype):
    """On all scales, near the kinks, and behind an inexact layer."""
    module = copy.deepcopy(module).to(dtype).eval()
    scales = 10.0 ** torch.arange(-3, 2, dtype=torch.float64)
    x = torch.cat([*(s * torch.randn(6, dtype=torch.float64) for s in scales), torch.tensor([0, 3, -3, 6, 0.7, 21.0])])
    x = x.to(dtype)[:, None]
    exact = EXACT[type(module)]
    compare(nn.Sequential(module), x, [[exact(module, arb(v))] for v in x[:, 0].tolist()])
    layer = nn.Linear(1, 1).to(dtype)
    truth = [[exact(module, linear(layer, [arb(v)])[0])] for v in x[:, 0].tolist()]
    error, _ = compare(nn.Sequential(layer, module), x, truth)
    if dtype is torch.float64:  # PyTorch replaces Softplus by x beyond its threshold; that is an error, too
        jumps = isinstance(module, nn.Softplus) and module.threshold < 36
        assert bool((error <= (1e-8 if jumps else 1e-14) * (1 + x.abs())).all())


@pytest.mark.parametrize(
    "make",
    [nn.LeakyReLU, nn.ELU, nn.CELU, nn.Softshrink, lambda v: nn.Hardtanh(-v, v), lambda v: nn.Softplus(v, 60.0)],
)
def test_numbers_may_be_read_in_the_precision_of_the_network(make):
    rounded = float(np.float32(0.1))
    layer = nn.Linear(1, 1)
    x = torch.linspace(-3, 3, 40)[:, None]
    for value in (0.1, rounded):
        module = make(value)
        truth = [[EXACT[type(module)](module, linear(layer, [arb(v)])[0])] for v in x[:, 0].tolist()]
        compare(nn.Sequential(layer, make(0.1)), x, truth)


def test_assumed_accuracy_of_elementary_functions():
    x = torch.cat([s * torch.randn(200, dtype=torch.float64) for s in (1e-3, 1.0, 10.0)])
    for name in ("exp", "expm1", "log1p", "tanh", "erf", "atan", "sin", "cos"):
        points = x.abs() if name == "log1p" else x
        for v, found in zip(points.tolist(), getattr(torch, name)(points).tolist(), strict=True):
            size = 1.0 if name in ("sin", "cos") else abs(found)
            assert abs(getattr(arb(v), name)() - found) <= ACCURACY / 2 * size


class Mixed(nn.Module):
    """Constants in all places, frozen maps, means, shapes other than vectors."""

    def __init__(self):
        super().__init__()
        self.standardise = ldlt.nn.Standardise(
            torch.tensor([0.1, 0.2]).reshape(2, 1), torch.tensor([0.3, 0.7])[:, None]
        )
        self.given = nn.Linear(6, 4).requires_grad_(False)
        self.free, self.sort = nn.Linear(4, 4, bias=False), GroupSort(4)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("gain", torch.rand(4))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        x = torch.relu_(self.given(self.standardise(x).flatten(1)) + 0.1)
        y = torch.add(self.free(x), self.shift, alpha=0.3) * self.gain / 3
        y = 1 - self.sort(y)
        y = torch.cat([y, torch.nn.functional.dropout(x, 0.5, self.training).mean(1, keepdim=True)], 1)
        return -self.out(0.7 * y)


def exact_mixed(m, x):
    def numbers(t):
        return [arb(v) for v in t.tolist()]

    rows = [[(v - a) / s for v in line] for line, a, s in zip(x, *map(numbers, _ends(m)), strict=True)]
    x = [clip(v + 0.1, 0, None) for v in linear(m.given, [v for line in rows for v in line])]
    y = [v + 0.3 * s for v, s in zip(linear(m.free, x), numbers(m.shift), strict=True)]
    y = sorted(v * g / 3 for v, g in zip(y, numbers(m.gain), strict=True))
    return [-v for v in linear(m.out, [arb(0.7) * v for v in [*(1 - v for v in y), sum(x, arb(0)) / len(x)]])]


def _ends(m):
    return m.standardise.mean[:, 0], m.standardise.scale[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_shapes_and_frozen_maps(dtype):
    model = Mixed().to(dtype).eval()
    x = torch.randn(5, 2, 3, dtype=dtype)
    _, ratios = compare(model, x, [exact_mixed(model, [[arb(v) for v in line] for line in row]) for row in x.tolist()])
    assert np.median(ratios) < (4 if dtype is torch.float32 else 100)  # 0.1, 0.3 and 0.7 have two readings
    model.train()
    logits, _ = ldlt.forward_error(model, x)
    assert model.training
    assert torch.equal(logits, model.eval()(x))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, MaxMin])
def test_errors_do_not_grow_exponentially_with_depth(activation):
    """Entry by entry they would: by a factor of about 3 in each of these layers."""
    model = ldlt.nn.FeedForward(4, [16] * 24, 2, activation=activation, dtype=torch.float64).freeze()
    x = torch.randn(1, 4, dtype=torch.float64)
    row = [arb(v) for v in x[0].tolist()]
    for layer in model:
        row = linear(layer, row) if isinstance(layer, nn.Linear) else activate(layer, row)
    error, _ = compare(model, x, [row])
    assert float(error.max()) < 1e-12


def test_norms():
    rng = np.random.default_rng(0)
    for shape in ((5, 9), (9, 5), (1, 4), (30, 30)):
        matrix = rng.normal(size=shape)
        truth = np.linalg.norm(matrix, 2)
        assert truth <= _norm(Ball(matrix)) <= 1.0001 * truth
        assert truth + 0.1 <= _norm(Ball(matrix, np.full(shape, 0.1)))  # the matrix may be moved along its vectors
    assert _norm(Ball(np.diag([3.0, 0.0, -4.0]))) == pytest.approx(4.0, rel=1e-12)
    assert _norm(Ball(np.zeros((3, 2)))) < 1e-100
    assert _norm(Ball(np.full((2, 2), np.inf))) == np.inf


def test_low_precision_is_charged():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    logits, error = ldlt.forward_error(model, x)
    truth = copy.deepcopy(model).double()(x.double())
    assert logits.dtype is torch.bfloat16
    miss = (logits.double() - truth).abs()
    assert bool((miss <= error + 1e-14).all())
    assert bool((error <= miss + 1e-13).all())


# ----------------------------------------------------------------------------------------- what may go wrong


def test_overflow_and_broken_inputs_have_infinite_error():
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[nan, 1.0], [1.0, inf], [1.0, 2.0], [0.0, 0.0]])
    logits, error = ldlt.forward_error(model, x)
    assert error[:2].tolist() == [[inf, inf], [inf, inf]]
    assert bool((error[2:] < 1e-6).all())
    assert ldlt.certified_radius(logits, torch.ones(2, 2), error=error)[:2].tolist() == [0.0, 0.0]
    huge = nn.Linear(2, 2)
    nn.init.constant_(huge.weight, 3e38)
    assert bool(ldlt.forward_error(huge, torch.ones(1, 2))[1].isinf().all())
    assert ldlt.forward_error(model, torch.empty(0, 2))[1].shape == (0, 2)


def test_refusals():
    net = ldlt.nn.FeedForward(3, [4], 2)
    with pytest.raises(ldlt.GraphError, match=r"net\.freeze\(\)"):
        ldlt.forward_error(net, torch.randn(2, 3))
    with pytest.raises(ldlt.GraphError, match="not list"):
        ldlt.forward_error([], torch.randn(2, 3))
    plain = net.freeze()
    with pytest.raises(ldlt.OptionError, match=r"x\.to\(torch\.float32\)"):
        ldlt.forward_error(plain, torch.randn(2, 3, dtype=torch.float64))
    with pytest.raises(ldlt.ShapeError, match="batch"):
        ldlt.forward_error(plain, torch.randn(3))

    class Unknown(nn.Module):
        def forward(self, x):
            return x.sin()

    ldlt.activations.register(Unknown, lambda module: (-1.0, 1.0))
    with pytest.raises(ldlt.GraphError, match="rounding of Unknown"):
        ldlt.forward_error(nn.Sequential(nn.Linear(3, 2), Unknown()), torch.randn(2, 3))


def test_flushing_to_zero_is_noticed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        with pytest.raises(ldlt.OptionError, match="set_flush_denormal"):
            ldlt.forward_error(nn.Linear(3, 2), torch.randn(2, 3))
    finally:
        torch.set_flush_denormal(False)


def test_frozen_networks():
    module = nn.Sequential(nn.Linear(3, 8), GroupSort(4), nn.Linear(8, 4), nn.PReLU(4))
    scaled = ldlt.Lipschitz(module, input_shape=3, output="scale").freeze()
    assert isinstance(scaled, ldlt.Scaled)
    x = torch.randn(6, 3)
    logits, error = ldlt.forward_error(scaled, x)
    truth = copy.deepcopy(scaled).double()(x.double())
    assert bool(((logits.double() - truth).abs() <= error + 1e-15).all())
    assert float(error.max()) < 1e-6


def test_certificate_with_the_rounding_of_the_forward_pass():
    """The whole chain is proven: constants for the stored weights, margins for the computed logits."""
    plain = ldlt.nn.FeedForward(4, [8, 8], 3).freeze()
    certificate = ldlt.certify(plain, 4)
    assert certificate.rigorous
    logits, error = ldlt.forward_error(plain, torch.randn(20, 4))
    charged = ldlt.certified_radius(logits, certificate, error=error)
    assert bool((charged <= ldlt.certified_radius(logits, certificate)).all())
    assert float((ldlt.certified_radius(logits, certificate) - charged).max()) < 1e-5
