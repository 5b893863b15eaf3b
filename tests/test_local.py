"""Convolutions that keep their kernels: the torus, the multipliers, and the networks around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import ldlt
from ldlt.errors import GraphError, OptionError
from ldlt.images.local import dominate
from ldlt.testing import check_module


def conv(inputs, outputs, size=3, **options):
    return nn.Conv2d(inputs, outputs, size, **{"padding": size // 2, **options})


class Block(nn.Module):
    """A residual block as everybody writes it."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.second = conv(inputs, outputs, stride=stride, bias=False), conv(outputs, outputs, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2 + (stride > 1)))
        self.skip = conv(inputs, outputs, 1, stride=stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + (x if isinstance(self.skip, nn.Identity) else self.norms[2](self.skip(x))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = conv(2, 3, bias=False), nn.BatchNorm2d(3)
        self.blocks, self.head = nn.Sequential(Block(3, 3, 1), Block(3, 4, 2)), nn.Linear(4, 3)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.down, self.bottom, self.up = conv(2, 2), conv(2, 4), conv(4, 2)
        self.rise = (
            nn.ConvTranspose2d(4, 2, 2, 2) if transposed else nn.Sequential(nn.Upsample(scale_factor=2), conv(4, 2))
        )
        self.head = nn.Conv2d(2, 2, 1)

    def forward(self, x):
        a = torch.relu(self.down(x))
        b = torch.tanh(self.bottom(F.max_pool2d(a, 2)))
        return self.head(torch.relu(self.up(torch.cat([a, self.rise(b)], 1))))


class Spilled(nn.Module):
    """A sum that spills over the border is read by a convolution."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = conv(2, 3), conv(3, 2), conv(2, 2), nn.Linear(32, 2)

    def forward(self, x):
        return self.head(torch.relu(self.c(x + self.b(torch.relu(self.a(x))))).flatten(1))


class Wide(nn.Module):
    """Depthwise and pointwise convolutions, a scale per channel, several heads, dense layers behind."""

    def __init__(self):
        super().__init__()
        self.stem, self.deep = nn.Conv2d(2, 4, 2, 2), conv(4, 4, 5, groups=4, padding="same")
        self.wide, self.back = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1)
        self.scale = nn.Parameter(0.1 * torch.ones(4, 1, 1))
        self.heads, self.last = nn.ModuleList([nn.Linear(4, 3), nn.Linear(16, 5)]), nn.Linear(5, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.scale * self.back(F.gelu(self.wide(self.deep(x))))
        return self.heads[0](x.mean((2, 3)).abs()) + self.last(torch.relu(self.heads[1](x.flatten(1))))


def chain():
    return nn.Sequential(
        conv(2, 4, groups=2), nn.LeakyReLU(0.1), nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 4, 3, dilation=2, padding=2),
        ldlt.activations.MaxMin(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 2), nn.PReLU(), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


NETWORKS = {
    "chain": (chain, (2, 4, 4)),
    "resnet": (ResNet, (2, 4, 4)),
    "transposed": (lambda: UNet(True), (2, 4, 4)),
    "nearest": (lambda: UNet(False), (2, 4, 4)),
    "spilled": (Spilled, (2, 4, 4)),
    "wide": (Wide, (2, 4, 4)),
}


def drawn(name, seed=0, scale=1.0, dtype=torch.float64, **options):
    """A network at random parameters, with batch statistics of its own."""
    make, shape = NETWORKS[name]
    torch.manual_seed(seed)
    module = make().to(dtype)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.1, 3)
    net = ldlt.Lipschitz(module, 2.0, input_shape=shape, convolutions="local", init="keep", **options).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_().mul_(scale)
    return net, torch.randn(1, *shape, dtype=dtype)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("head", ["joint", "rows"])
def test_the_dense_inequality_holds_and_the_frozen_network_is_plain(name, head):
    net, x = drawn(name, head=head, power=4 if head == "rows" else 1)
    assert ldlt.lmi.residual(net) > -1e-9
    frozen = net.freeze()
    assert type(frozen) is type(net.module)
    assert all(type(layer).__module__.startswith(("torch", "test_local", "ldlt.act")) for layer in frozen.modules())
    assert torch.allclose(frozen(x), net(x))
    jacobian = torch.func.jacrev(lambda z: net(z).flatten())(x).reshape(-1, x.numel())
    assert torch.linalg.matrix_norm(jacobian, 2) <= net.bound
    assert (torch.linalg.vector_norm(jacobian, dim=1) <= net.output_bounds() * (1 + 1e-12)).all()
    net.train()(x.expand(3, -1, -1, -1).clone().normal_()).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("scale", [1e-8, 100.0])
@pytest.mark.parametrize("contraction", ["cholesky", "cayley"])
def test_any_size_of_parameters_keeps_the_bound_in_float32(name, scale, contraction):
    net, x = drawn(name, 1, scale, torch.float32, contraction=contraction)
    jacobian = torch.func.jacrev(lambda z: net(z).flatten())(x).reshape(-1, x.numel())
    assert torch.linalg.matrix_norm(jacobian.double(), 2) <= net.bound * (1 + 1e-4)
    assert ldlt.lmi.residual(net) > -1e-9


def test_what_spills_is_masked_where_a_convolution_reads_it():
    net, _ = drawn("spilled")
    assert [a.name for a in net.graph.activations if isinstance(a.module, nn.Identity)] == ["add__mask"]
    net, _ = drawn("resnet")
    assert not any(isinstance(a.module, nn.Identity) for a in net.graph.activations)


def test_large_images_of_zero_padded_networks_are_local_by_default():
    module = nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 4, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 256, 2))
    net = ldlt.Lipschitz(module, input_shape=(3, 32, 32))
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    net(x).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.norm() > 0.01
    assert set(net.state_dict()) >= {f"module.{n}" for n, _ in module.named_parameters()}


def test_kernels_may_be_parametrised_by_the_user():
    module = nn.Sequential(conv(2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).double()
    parametrizations.weight_norm(module[0])
    net = ldlt.Lipschitz(module, input_shape=(2, 4, 4))
    assert ldlt.lmi.residual(net) > -1e-9
    assert net(torch.randn(3, 2, 4, 4).double()).shape == (3, 2)


def test_what_is_no_zero_padding_is_refused_or_dense():
    reflecting = nn.Sequential(conv(2, 2, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    with pytest.raises(GraphError, match="local"):
        ldlt.Lipschitz(reflecting, input_shape=(2, 4, 4), convolutions="local")
    assert ldlt.Lipschitz(reflecting, input_shape=(2, 4, 4)).bound == 1.0
    with pytest.raises(OptionError, match="convolutions"):
        ldlt.Lipschitz(reflecting, input_shape=(2, 4, 4), convolutions="global")


@pytest.mark.parametrize("power", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_diagonal_matrix_dominates(power, dtype):
    generator = torch.Generator().manual_seed(power)
    for rank in (1, 3, 6):
        root = torch.randn(5, 6, rank, generator=generator, dtype=torch.complex128)
        root = root * torch.logspace(-6, 2, 6, dtype=torch.float64)[:, None]
        matrix = root @ root.mH
        balance = torch.rand(6, generator=generator, dtype=torch.float64) + 0.5
        size = matrix.diagonal(dim1=-2, dim2=-1).real.amax(0).sqrt()
        kind = torch.complex64 if dtype == torch.float32 else torch.complex128
        unit, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny ** 0.375
        bound = dominate(matrix.to(kind), size.to(dtype), balance.to(dtype), power, unit, least).double()
        scaled = matrix / (bound.sqrt()[:, None] * bound.sqrt())
        assert torch.linalg.matrix_norm(scaled, 2).amax() <= 1
        assert torch.linalg.matrix_norm(scaled, 2).amax() > 0.1


def test_a_deep_stack_starts_alive():
    torch.manual_seed(0)
    layers = [m for _ in range(15) for m in (conv(4, 4), nn.ReLU())]
    net = ldlt.Lipschitz(
        nn.Sequential(conv(4, 4), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(64, 4)), input_shape=(4, 4, 4)
    )
    jacobian = torch.func.jacrev(lambda z: net(z).flatten())(torch.randn(1, 4, 4, 4)).reshape(4, -1)
    assert torch.linalg.matrix_norm(jacobian, 2) > 0.1


def test_slopes_of_channels_behind_a_mask():
    """A learned slope per channel where sums spill over the border and are masked."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.slopes, self.head = nn.PReLU(3), nn.Linear(48, 2)

        def forward(self, x):
            h = self.first(x)
            return self.head(self.slopes(h + self.last(self.slopes(h))).flatten(1))

    for head in ("orthogonal", "rows"):
        found = check_module(Net().double(), (2, 4, 4), head=head, kinds=("start", "normal", "zero"))
        assert found.refusal is None
        assert not found.violations + found.declined
