"""Certificates of convolutional networks: as matrices where they are small, norms of single layers where not."""

from __future__ import annotations

import copy
import importlib
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.attack import lipschitz_lower_bound
from ldlt.certificates import Problem, norms
from ldlt.certificates.fingerprint import traced


def layer_norms(net, shape):
    return norms.layer_norms(traced(net, shape), net)


def both_norms(graph, net):
    """The bound of single layers, with matrices of layers and without any."""
    before = norms._ENTRIES
    found = norms.layer_norms(graph, net)
    norms._ENTRIES = 0
    try:
        return found, norms.layer_norms(graph, net)
    finally:
        norms._ENTRIES = before


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["zeros", "circular"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, "same", "valid"]),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([(2, 6, 5), (4, 7, 7), (2, 4, 9), (2, 11), (4, 6)]),
    st.booleans(),
)
def test_matrices_are_the_convolutions(mode, kernel, stride, padding, dilation, groups, shape, bias):
    assume(padding != "same" or (stride == 1 and (kernel * dilation) % 2))
    kind = nn.Conv1d if len(shape) == 2 else nn.Conv2d
    layer = kind(shape[0], 4, kernel, stride, padding, dilation, groups, bias, mode).double()
    unit = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    try:
        matrix = (layer(unit) - layer(torch.zeros_like(unit))).flatten(1).T.detach()
    except RuntimeError:  # a window larger than the input
        return
    # The problem has the matrix that unit vectors show, and single layers bound its norm.
    flat = nn.Sequential(layer, nn.Flatten())
    graph = traced(flat, shape)
    problem = Problem.build(graph, flat)
    assert torch.allclose(problem.output.get(problem.input, torch.zeros_like(matrix)), matrix, atol=1e-12)
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    found, loose = both_norms(graph, flat)
    assert norm == pytest.approx(found)
    assert norm <= loose * (1 + 1e-9)


def body(mode: str = "zeros") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, padding_mode=mode),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_small_networks_are_proven(mode):
    net = body(mode)
    found = ldlt.certify(net, (1, 8, 8), time_limit=2.0)
    assert found.rigorous
    assert "norms" not in found.method
    assert found.bound < layer_norms(net, (1, 8, 8))
    assert lipschitz_lower_bound(net, (1, 8, 8), starts=8, steps=40).value <= found.bound * (1 + 1e-5)
    assert ldlt.verify(found, net).rigorous
    with torch.no_grad():
        net[3].weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.verify(found, net)


def test_networks_that_are_too_large_get_norms_of_layers(monkeypatch):
    net = body()
    monkeypatch.setattr(importlib.import_module("ldlt.certificates.certifier"), "LARGEST_MATRICES", 1000)
    found = ldlt.certify(net, (1, 8, 8))
    assert found.is_certified
    assert not found.rigorous
    assert found.method.startswith("norms of single layers, because as matrices its convolutions")
    assert found.bound == pytest.approx(layer_norms(net, (1, 8, 8)))
    assert found.outputs == 3
    assert lipschitz_lower_bound(net, (1, 8, 8), starts=8, steps=40).value <= found.bound
    with pytest.raises(ldlt.GraphError, match="matrices"):
        ldlt.certify(net, (1, 8, 8), region=ldlt.Region("ball", torch.zeros(1, 8, 8), torch.tensor(0.1)))


class Mixed(nn.Module):
    """A small residual network with everything that single layers have a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.inner = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.mean = nn.AvgPool2d(3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.back = nn.ConvTranspose2d(8, 3, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.norm(self.stem(x)))
        h = h + 0.5 * torch.tanh(self.inner(h))
        h = torch.cat([self.pool(h), -self.mean(h)], 1)
        return self.head(self.back(self.up(h)).mean((2, 3)))


def test_single_layers_bound_what_an_attack_finds():
    for seed in range(2):
        torch.manual_seed(seed)
        net = Mixed().double()
        with torch.no_grad():
            net.norm.running_var.uniform_(0.5, 2)
            net.norm.weight.uniform_(-2, 2)
        net.eval()
        bound = layer_norms(net, (2, 6, 7))
        attack = lipschitz_lower_bound(net, (2, 6, 7), starts=8, steps=30).value
        assert attack <= bound
        assert bound < 1e3 * attack  # not absurd


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=1),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False, ceil_mode=True),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, groups=1),
        nn.Upsample(scale_factor=2),
        nn.PixelUnshuffle(1),
    ],
)
def test_norms_of_layers_hold(layer):
    """Against the Jacobian of the layer at random points."""
    layer = copy.deepcopy(layer).double()
    shape = (2, 5, 7)
    net = nn.Sequential(layer, nn.Flatten())
    bound, loose = both_norms(traced(net, shape), net)
    assert bound <= loose * (1 + 1e-12)
    for seed in range(5):
        x = torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        jacobian = torch.autograd.functional.jacobian(lambda v: layer(v).flatten(), x).flatten(1)
        norm = float(torch.linalg.matrix_norm(jacobian, 2))
        assert norm <= bound * (1 + 1e-12)


def test_what_has_no_rule():
    class Rolled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.max_pool2d(x, 3, 2).roll(1, 0).flatten(1)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.pool(x)
            return (h * h).flatten(1)

    for net in (Rolled(), Twice()):
        with pytest.raises(ldlt.LdltError):
            ldlt.certify(net, (1, 6, 6))


class Overwritten(nn.Module):
    """An activation in place, whose input is read again, and entries that are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.act = nn.MaxPool2d(3, stride=2), nn.LeakyReLU(3.0, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.pool(x)
        return (h + self.act(h))[:, [0, 0]].flatten(1)


class Twentyfold(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 20 * super().forward(x)


class Masked(nn.Module):
    """Weights that are computed: masked, normalised, divided, both of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mask", torch.rand(6, 6) > 0.3)
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        h = torch.tanh(nn.functional.linear(h, self.weight * self.mask, self.scale.neg())) / (self.scale + 0.1)
        return h @ (self.weight.abs() / 3).tril().T


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    net[1].register_forward_hook(lambda m, i, o: 100 * o)
    return net


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Tanh(), layer)


def normed() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)
    )
    with torch.no_grad():
        net[1].running_var.uniform_(0.5, 2)
        net[1].running_mean.uniform_(-1, 1)
        net[1].weight.uniform_(-2, 2)
    return net.eval()


def soft() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Softmax(-1))


NETS = {
    "subclass": (
        lambda: nn.Sequential(Twentyfold(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)),
        (1, 4, 4),
    ),
    "hook": (hooked, (4,)),
    "tied": (tied, (4,)),
    "batch norm": (normed, (1, 4, 4)),
    "softmax": (soft, (4,)),
    "computed": (Masked, (4,)),
    "overwritten": (Overwritten, (1, 6, 6)),
    "frozen": (lambda: nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.GELU(), nn.Linear(5, 2)), (4,)),
    "mixed": (lambda: Mixed().eval(), (2, 6, 5)),
}


def largest_slope(net: nn.Module, shape: tuple[int, ...]) -> float:
    twin, found = copy.deepcopy(net).double().eval(), 0.0
    for scale in (0.01, 1.0, 10.0):
        for _ in range(6):
            x = scale * torch.randn(1, *shape, dtype=torch.float64)
            jacobian = torch.autograd.functional.jacobian(lambda v: twin(v).flatten(), x).flatten(1)
            found = max(found, float(torch.linalg.matrix_norm(jacobian, 2)))
    return found


@pytest.mark.parametrize("name", NETS)
def test_what_a_network_computes_is_certified(name):
    torch.manual_seed(1)
    make, shape = NETS[name]
    net = make()
    slope, loose = largest_slope(net, shape), layer_norms(net, shape)
    found = ldlt.certify(net, shape, time_limit=2.0)
    assert found.is_certified, found.reason
    assert found.rigorous
    assert slope <= found.bound <= loose * (1 + 1e-5)
    assert ldlt.verify(found, net).rigorous


@pytest.mark.parametrize("name", ["tied", "softmax", "overwritten"])
def test_what_a_network_computes_in_a_region(name):
    torch.manual_seed(1)
    make, shape = NETS[name]
    net, center = make(), torch.randn(shape)
    near = ldlt.certify(net, shape, region=ldlt.Region("ball", center, torch.tensor(0.1)), time_limit=2.0)
    twin = copy.deepcopy(net).double().eval().requires_grad_(False)
    for _ in range(20):
        a, b = (
            center.double() + 0.1 * nn.functional.normalize(torch.randn(center.numel()), dim=0).reshape(shape)
            for _ in "ab"
        )
        assert float((twin(a[None]) - twin(b[None])).norm()) <= near.bound * float((a - b).norm()) * (1 + 1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value):
    net = normed()
    for tensor in (net[0].weight, net[1].running_mean):
        twin = copy.deepcopy(net)
        dict([*twin.named_parameters(), *twin.named_buffers()])[
            next(n for n, t in [*net.named_parameters(), *net.named_buffers()] if t is tensor)
        ].data.view(-1)[0] = value
        with pytest.raises(ldlt.GraphError, match="infinite or not a number"):
            ldlt.certify(twin, (1, 4, 4))


def test_what_cannot_be_proven_is_said():
    class Resized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(x, scale_factor=2, mode="bilinear").flatten(1)

    found = ldlt.certify(Resized(), (1, 3, 3))
    assert found.is_certified
    assert not found.rigorous
    assert "unproven" in found.method
    assert largest_slope(Resized(), (1, 3, 3)) <= found.bound


class Wired(nn.Module):
    """An identity, and what is to be tried behind it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4, bias=False, dtype=torch.float64)
        nn.init.eye_(self.linear.weight)
        self.register_buffer("counts", torch.tensor([5, 1, 1, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.linear(x))


@pytest.mark.parametrize(
    ("function", "norm"),
    [
        (lambda _, h: torch.cat([h, h], 1), 2**0.5),
        (lambda _, h: torch.cat(tensors=[h, h[:, :2], h], dim=1), 3**0.5),
        (lambda _, h: torch.stack([h, h, h], 1).flatten(1), 3**0.5),
        (lambda _, h: torch.repeat_interleave(h, 3, 1), 3**0.5),
        (lambda _, h: h.unsqueeze(2).expand(-1, -1, 5).flatten(1), 5**0.5),
        (lambda _, h: h.index_select(1, torch.zeros(2, dtype=torch.long)), 2**0.5),
        (lambda _, h: h.mul_(2.0), 2.0),
        (lambda _, h: h + h, 2.0),
        (lambda _, h: torch.divide(torch.negative(h), 2.0), 0.5),
        (lambda _, h: torch.multiply(torch.subtract(h, h.flip(1)), 3.0), 6.0),
    ],
)
def test_values_are_counted_as_often_as_they_are_read(function, norm):
    net = Wired(function)
    jacobian = torch.autograd.functional.jacobian(net, torch.zeros(1, 4, dtype=torch.float64)).flatten(2)[0, :, :]
    found = layer_norms(net, (4,))
    assert float(torch.linalg.matrix_norm(jacobian, 2)) == pytest.approx(norm)
    assert found == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, h: torch.repeat_interleave(h, net.counts, 1),  # its shape depends on data
        lambda _, h: torch.div(h, 2.0, rounding_mode="floor"),  # jumps
        lambda _, h: h.view(torch.float32),
        lambda _, h: h / 0.0,
    ],
)
def test_operations_that_only_look_like_ones_with_a_rule(function):
    with pytest.raises(ldlt.LdltError):
        layer_norms(Wired(function), (4,))
