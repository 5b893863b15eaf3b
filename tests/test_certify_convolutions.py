"""Certificates of convolutional networks: as matrices where they are small, norms of single layers where not."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.attack import lipschitz_lower_bound
from ldlt.certificates import unrolled as unrolling
from ldlt.certificates.layered import layer_norms
from ldlt.certificates.unrolled import Unrolled, unrolled


@settings(max_examples=60, deadline=None)
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
    x = torch.randn(3, *shape, dtype=torch.float64)
    try:
        expected = layer(x)
    except RuntimeError:  # a window larger than the input
        return
    dense = unrolled(layer, shape)
    if dilation * (kernel - 1) + 1 > min(shape[1:]) and mode == "circular":
        assert type(dense) is kind  # the window would meet an entry twice
        return
    assert isinstance(dense, Unrolled)
    assert torch.allclose(dense(x), expected, atol=1e-12)
    entries = set(layer.weight.detach().flatten().tolist()) | {0.0}
    assert set(dense.map.weight.flatten().tolist()) <= entries  # weight for weight
    # The layer's norm is that of its matrix, and single layers bound it.
    assert float(torch.linalg.matrix_norm(dense.map.weight, 2)) <= layer_norms(layer, shape).bound * (1 + 1e-9)


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
def test_small_networks_are_proven(mode, tmp_path):
    net = body(mode)
    found = ldlt.certify(net, (1, 8, 8))
    assert found.rigorous
    assert "norms" not in found.method
    assert found.bound < layer_norms(net, (1, 8, 8)).bound
    assert lipschitz_lower_bound(net, (1, 8, 8), starts=8, steps=40).value <= found.bound * (1 + 1e-5)
    found.save(tmp_path / "net.json")
    assert ldlt.verify(tmp_path / "net.json", net).rigorous
    with torch.no_grad():
        net[3].weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.verify(tmp_path / "net.json", net)


def test_networks_that_are_too_large_get_norms_of_layers(monkeypatch):
    net = body()
    monkeypatch.setattr(unrolling, "LARGEST", 1000)
    found = ldlt.certify(net, (1, 8, 8))
    assert found.is_certified
    assert not found.rigorous
    assert found.method.startswith("norms of single layers, because as matrices its convolutions")
    assert found.bound == pytest.approx(layer_norms(net, (1, 8, 8)).bound)
    assert found.outputs == 3
    assert lipschitz_lower_bound(net, (1, 8, 8), starts=8, steps=40).value <= found.bound
    for method in ("eclipse", "sdp"):
        with pytest.raises(ldlt.GraphError, match="matrices"):
            ldlt.certify(net, (1, 8, 8), method=method)


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
    for seed in range(4):
        torch.manual_seed(seed)
        net = Mixed().double()
        with torch.no_grad():
            net.norm.running_var.uniform_(0.5, 2)
            net.norm.weight.uniform_(-2, 2)
        net.eval()
        found = ldlt.certify(net, (2, 6, 7))
        assert "norms of single layers" in found.method
        attack = lipschitz_lower_bound(net, (2, 6, 7), starts=8, steps=30).value
        assert attack <= found.bound
        assert found.bound < 1e3 * attack  # not absurd


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
    bound = layer_norms(nn.Sequential(layer, nn.Flatten()), shape).bound
    for seed in range(5):
        x = torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        jacobian = torch.autograd.functional.jacobian(lambda v: layer(v).flatten(), x).flatten(1)
        norm = float(torch.linalg.matrix_norm(jacobian, 2))
        assert norm <= bound * (1 + 1e-12)


def test_what_single_layers_cannot_do():
    class Bad(nn.Module):
        def __init__(self, last) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 2, 3, padding_mode="reflect", padding=1), last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(x)).flatten(1)

    with pytest.raises(ldlt.UnsupportedOpError, match="conv"):  # the cause, not the last resort's trouble
        ldlt.certify(Bad(nn.ReLU()), (1, 6, 6))

    class Rolled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.max_pool2d(x, 3, 2).roll(1, 0).flatten(1)

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(x)[:, [0, 0]].flatten(1)

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(x).roll(1, 0).flatten(1)

    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.act = nn.MaxPool2d(3, stride=2), nn.LeakyReLU(-3.0, inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.pool(x)
            return (h + self.act(h)).flatten(1)

    for net in (Rolled(), Repeats(), Shifted(), Overwritten()):
        with pytest.raises(ldlt.UnsupportedOpError):
            ldlt.certify(net, (1, 6, 6))


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
    assert found.bound == pytest.approx(norm, rel=1e-9)
    assert found.outputs == len(jacobian)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, h: torch.repeat_interleave(h, net.counts, 1),  # the first entry has norm √5
        lambda _, h: torch.div(h, 2.0, rounding_mode="floor"),  # jumps
        lambda _, h: h.view(torch.float32),
        lambda _, h: h / 0.0,
        lambda _, h: h.mul_(2.0),
        lambda _, h: h.index_select(1, torch.zeros(2, dtype=torch.long)),
    ],
)
def test_operations_that_only_look_like_ones_with_a_rule(function):
    with pytest.raises(ldlt.UnsupportedOpError):
        layer_norms(Wired(function), (4,))
