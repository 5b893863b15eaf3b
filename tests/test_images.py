"""Convolutions through the rule, against dense matrices assembled from unrolled convolutions."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import ldlt
from ldlt.graph import Convolution, evaluate
from ldlt.images.convolutions import CirculantWeight, CircularConv, unrolls
from ldlt.images.grids import Fold, apply, cell_rows, local, operator_norm, row_norms, to_cells, transfer
from random_graphs import randomise
from random_images import RandomImages, conv, dense_twin

CONTRACTIONS = ["cholesky", "symmetric", "cayley"]
JOINT = (ldlt.activations.MaxMin, nn.MaxPool1d, nn.MaxPool2d)
pytestmark = pytest.mark.usefixtures("double")


def unrolled(net):
    """Explicit matrices of all layers, by parameter name, from unit images run through the layers' own forward."""
    found = {}
    explicit = net.explicit()
    for affine in net.graph.affines:
        weight = explicit[affine.weight].detach()
        if isinstance(weight, CirculantWeight):
            images = torch.eye(torch.Size(weight.inputs).numel()).reshape(-1, *weight.inputs)
            weight = weight.apply_to(images, None).flatten(1).T
        else:  # a map that no activation reads is not normalised
            weight = affine.matrix(weight, net.graph)
        found[affine.weight] = weight
    return found


class Block(nn.Module):
    """``conv → h + conv(σ(conv h)) → cat with the input → conv → flatten → dense``."""

    def __init__(self, channels=2, size=(4, 5)):
        super().__init__()
        self.stem, self.inner, self.outer = conv(channels, 3, 2), conv(3, 4, 2), conv(4, 3, 2)
        self.mix = conv(3 + channels, 2, 2, 1)
        self.head = nn.Linear(2 * size[0] * size[1], 3)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        h = h + self.outer(torch.relu(self.inner(h)))
        return self.head(torch.relu(self.mix(torch.cat([h, x], 1))).flatten(1))


@pytest.mark.parametrize(
    ("fine", "coarse", "rows", "columns"),
    [
        ((6, 4), (3, 2), (1, 1), (1, 1)),
        ((6, 4), (2, 4), (2, 1), (1, 3)),
        ((6, 4), None, (1, 2), (2, 2)),
        ((6,), (3,), (2,), (1,)),
        ((5,), None, (1,), (2,)),
    ],
)
def test_folding_changes_the_description_not_the_operator(fine, coarse, rows, columns):
    outputs = (2, *(f * s for f, s in zip(fine, rows, strict=True)))
    inputs = (3, *(f * s for f, s in zip(fine, columns, strict=True)))
    spectrum = transfer(torch.randn(local(outputs, fine), local(inputs, fine), *fine), fine)
    x = torch.randn(4, *inputs)
    fold = Fold(fine, coarse)
    folded = fold.both(spectrum, rows, columns)
    torch.testing.assert_close(apply(folded, x, coarse, outputs), apply(spectrum, x, fine, outputs))
    torch.testing.assert_close(operator_norm(folded), operator_norm(spectrum))
    some = torch.randn(3, local(inputs, coarse), *(coarse or (1,) * len(fine)))
    some = transfer(some, coarse)
    wide = fold.unfold(some, columns)
    torch.testing.assert_close(fold.columns(wide, columns), some)
    square = transfer(torch.randn(local(inputs, fine), local(inputs, fine), *fine), fine)
    torch.testing.assert_close(some @ fold.both(square, columns, columns), fold.columns(wide @ square, columns))
    dense = Fold(fine, None).both(spectrum, rows, columns)
    norms = Fold(fine, None).vector(row_norms(spectrum, fine), rows)
    torch.testing.assert_close(torch.linalg.vector_norm(dense, dim=-1), norms)
    place, where = cell_rows(inputs, fine)
    assert torch.equal(to_cells(x, fine).flatten(2)[:, where, place], x.flatten(1))


def same_certificate(net, shape):
    """The network built with dense layers: same outputs, and the same inequality with the same multipliers.

    Returns its residual.
    """
    twin = nn.Sequential(dense_twin(net.freeze(), shape), nn.Flatten())
    x = torch.randn(2, *shape)
    torch.testing.assert_close(twin(x), net(x).flatten(1), rtol=1e-9, atol=1e-9)
    graph = ldlt.graph.trace.trace(twin, shape)
    assert not any(isinstance(node, Convolution) for node in graph.nodes)
    scale = (net.bound / net.declared_bound) ** 2  # 1, unless the head bounds single rows
    own = net.multipliers()
    names = zip((a.name for a in graph.activations), (a.name for a in net.graph.activations), strict=True)
    multipliers = {a: scale * own[b] for a, b in names}
    found = ldlt.lmi.from_graph(graph, twin, dict(twin.named_parameters()), multipliers, net.bound)
    expected = ldlt.lmi.assemble(net)
    torch.testing.assert_close(found.matrix, expected.matrix, rtol=0, atol=1e-9 * expected.scale)
    return found.residual


@pytest.mark.parametrize("part", [0, *(pytest.param(p, marks=pytest.mark.slow) for p in range(1, 6))])
def test_random_graphs_satisfy_the_dense_inequality(part):
    """The matrix inequality of the unrolled network; tight with an orthogonal output map; freezing changes nothing."""
    seen = set()
    for seed in range(15 * part, 15 * (part + 1)):
        module = RandomImages(seed)
        head = ["joint", "orthogonal", "rows"][seed // 3 % 3]
        net = ldlt.Lipschitz(module, bound=1.7, input_shape=module.shape, contraction=CONTRACTIONS[seed % 3], head=head)
        randomise(net, seed)
        joint = any(isinstance(layer, JOINT) for layer in module.modules())  # sorting is for neighbours, if not images
        found = ldlt.lmi.residual(net) if joint else same_certificate(net, module.shape)
        x = torch.randn(2, *module.shape)
        torch.testing.assert_close(net.freeze()(x), net(x).detach(), rtol=1e-9, atol=1e-9)
        assert found >= -1e-9, f"seed {seed}: {found}"
        if head != "joint":
            assert abs(found) <= 1e-6, f"seed {seed}: {found}"
        seen.add("joint" if joint else "twin")  # built with dense layers, too
        seen.update("free" if g.free else "given" for g in net.plan.groups.values())
        seen.update("grid" if s.cells else "dense" for s in net.plan.steps)
    assert {"free", "given", "grid", "dense", "twin"} <= seen


def test_random_graphs_are_of_every_kind():
    """What the test above runs over."""
    modules = [RandomImages(seed) for seed in range(90)]
    kinds = {step[0] for module in modules for step in module.program}
    assert kinds >= {"act", "conv", "postact", "skipact", "cat", "sum", "slice", "roll", "scale"}
    assert kinds >= {"shuffle", "unshuffle", "average", "max", "nearest", "stride", "patch", "transposed"}
    assert any(isinstance(layer, ldlt.activations.MaxMin) for module in modules for layer in module.layers.values())
    assert {module.end for module in modules} == {"flatten", "image", "mean", "both"}
    assert {module.dims for module in modules} == {1, 2}
    assert {n for module in modules for n in module.shape[1:]} == set(range(4, 10))
    layers = [layer for module in modules for layer in module.layers.values() if hasattr(layer, "groups")]
    assert {layer.out_channels for layer in layers} == set(range(1, 7))
    assert {layer.groups for layer in layers} == {1, 2}
    assert any(len(module.shape) == 3 and module.shape[1] != module.shape[2] for module in modules)


def test_the_dense_engine_reaches_the_same_network():
    """Dense layers with the unrolled weights are in the range of the rule, with the same multipliers."""
    net = ldlt.Lipschitz(Block(), bound=1.3, input_shape=(2, 4, 5), head="joint")
    randomise(net, 1, 0.5)
    assert same_certificate(net, (2, 4, 5)) > -1e-12
    twin = dense_twin(net.freeze(), (2, 4, 5))
    x = torch.randn(5, 2, 4, 5)
    expected = net(x).detach()
    weights = {n: p.detach().clone() for n, p in twin.named_parameters()}
    dense = ldlt.Lipschitz(twin, bound=1.3, input_shape=(2, 4, 5), init="keep")
    own = list(net.multipliers().values())
    dense.load_explicit(weights, dict(zip((a.name for a in dense.graph.activations), own, strict=True)))
    torch.testing.assert_close(dense(x), expected, rtol=1e-8, atol=1e-8)
    for found, given in zip(dense.multipliers().values(), own, strict=True):
        torch.testing.assert_close(found, given, rtol=1e-8, atol=1e-8)


def test_explicit_weights_are_the_forward_pass():
    """The user's module with unrolled matrices in place of its convolutions, node by node."""
    net = ldlt.Lipschitz(Block(), input_shape=(2, 4, 5))
    randomise(net, 2, 0.7)
    x = torch.randn(3, 2, 4, 5)
    frozen = net.freeze()
    expected = net(x).detach()
    by_hand = torch.func.functional_call(net.module, net.explicit(), (x,))
    torch.testing.assert_close(by_hand, expected)
    again = pickle.loads(pickle.dumps(frozen))
    torch.testing.assert_close(again(x), expected)
    for name, matrix in unrolled(net).items():
        weight = net.explicit()[name]
        if isinstance(weight, CirculantWeight):
            torch.testing.assert_close(weight.matrix(), matrix)
    assert torch.equal(evaluate(net.graph, net.module, x), net.module(x))


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_gradients(contraction):
    module = nn.Sequential(
        conv(1, 2, 2), nn.ReLU(), nn.PixelUnshuffle(2), conv(8, 2, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(4, 2)
    )
    net = ldlt.Lipschitz(module, input_shape=(1, 2, 4), contraction=contraction)
    randomise(net, 0, 0.5)
    names = [n for n, _ in net.named_parameters()]
    x = torch.randn(2, 1, 2, 4)

    def run(*values):
        return torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(run, tuple(p.detach().clone().requires_grad_() for p in net.parameters()), atol=1e-6)


class Pyramid(nn.Module):
    """``conv → unshuffle → h + conv(MaxMin(conv h)) → pool → flatten with a skip → dense``."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.outer = conv(1, 2, 2), conv(8, 8, 2), conv(8, 8, 2)
        self.maxmin, self.head = ldlt.activations.MaxMin(), nn.Linear(8 + 16, 3)

    def forward(self, x):
        h = nn.functional.pixel_unshuffle(torch.relu(self.stem(x)), 2)
        h = h + self.outer(self.maxmin(self.inner(h)))
        return self.head(torch.cat([nn.functional.avg_pool2d(h, 2).flatten(1), x.flatten(1)], 1))


HOSTILE = {
    "chain": lambda: nn.Sequential(conv(1, 4, 2), nn.ReLU(), conv(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
    "strided": lambda: nn.Sequential(
        conv(1, 4, 2, stride=2), ldlt.activations.MaxMin(), conv(4, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    ),
    "skips": Pyramid,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_training_reaches_the_bound_and_stays_below_it(kind):
    """Weights and pairs of inputs are trained to be as steep as they can, with large steps, in float32."""
    torch.manual_seed(1)
    net = ldlt.Lipschitz(HOSTILE[kind]().float(), bound=1.5, input_shape=(1, 4, 4))
    x = torch.randn(8, 1, 4, 4, dtype=torch.float32)
    d = torch.randn(8, 1, 4, 4, dtype=torch.float32).requires_grad_()
    optimiser = torch.optim.Adam([*net.parameters(), d], 0.05)
    for _ in range(200):
        step = 0.1 * d / d.flatten(1).norm(dim=1)[:, None, None, None]
        y = net(torch.cat([x, x + step]))
        optimiser.zero_grad()
        (-(y[8:] - y[:8]).norm(dim=1).mean()).backward()
        optimiser.step()
    frozen = net.freeze().double()
    assert 0.9 * 1.5 < float(ldlt.attack.jacobian_norms(frozen, x.double()).max()) <= 1.5 * (1 + 1e-6)
    found = ldlt.attack.lipschitz_lower_bound(frozen, (1, 4, 4), starts=12, steps=60, x=x.double())
    assert 0.9 * 1.5 < found.pair <= 1.5 * (1 + 1e-6)
    assert found.jacobian <= 1.5 * (1 + 1e-6)
    assert ldlt.lmi.residual(net) > -1e-9


def test_freeze_in_float32():
    torch.set_default_dtype(torch.float32)
    net = ldlt.Lipschitz(Block(3, (6, 8)), input_shape=(3, 6, 8))
    x = torch.randn(4, 3, 6, 8)
    frozen = net.freeze()
    assert float((frozen(x) - net(x)).detach().abs().max()) < 1e-5
    assert all(p.dtype == torch.float32 for p in frozen.parameters())
    assert type(frozen.stem).__name__ == "CircularConv"
    with pytest.raises(ldlt.ShapeError, match="as large as"):
        frozen.stem(torch.randn(1, 3, 8, 6))


def test_max_pooling_over_windows_is_sorting_and_keeping_the_first():
    x = torch.randn(2, 3, 4, 6)
    ordered = ldlt.activations.WindowSort((2, 3))(x)
    torch.testing.assert_close(ordered[:, :, ::2, ::3], nn.functional.max_pool2d(x, (2, 3)))
    torch.testing.assert_close(ordered.sum((2, 3)), x.sum((2, 3)))
    groups = ldlt.activations.mixed(ldlt.activations.WindowSort((2, 3)), (3, 4, 6))
    assert groups.shape == (72,)
    assert groups.unique(return_counts=True)[1].tolist() == [6] * 12


class Functions(nn.Module):
    """The operations on images as functions rather than layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = conv(1, 4, 2), conv(4, 4, 2), nn.Linear(4, 2)

    def forward(self, x):
        F = nn.functional
        h = F.avg_pool2d(F.pixel_unshuffle(F.pixel_shuffle(torch.relu(self.a(x)), 2), 2), 2)
        h = F.interpolate(F.max_pool2d(torch.relu(self.b(h)), kernel_size=2), scale_factor=2)
        return self.head(F.adaptive_avg_pool2d(F.avg_pool2d(h, h.shape[-1]), 1).flatten(1))


class Layers(nn.Module):
    """The same with layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = conv(1, 4, 2), conv(4, 4, 2), nn.Linear(4, 2)
        self.down = nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.AvgPool2d(2))
        self.up = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2))
        self.end = nn.Sequential(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))

    def forward(self, x):
        h = self.up(torch.relu(self.b(self.down(torch.relu(self.a(x))))))
        return self.head(self.end(h).flatten(1))


def test_functions_on_images_are_what_the_layers_are():
    nets = [ldlt.Lipschitz(kind(), input_shape=(1, 4, 4), head="orthogonal") for kind in (Functions, Layers)]
    randomise(nets[0], 0, 0.5)
    nets[1].module.load_state_dict(nets[0].module.state_dict())
    for own, other in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        own.data.copy_(other.data)
    x = torch.randn(3, 1, 4, 4)
    torch.testing.assert_close(nets[0](x), nets[1](x))
    torch.testing.assert_close(ldlt.lmi.assemble(nets[0]).matrix, ldlt.lmi.assemble(nets[1]).matrix)
    assert abs(ldlt.lmi.residual(nets[0])) < 1e-9


WHOLE = {
    "zeros": lambda: nn.Conv2d(1, 2, 3, padding=1),
    "reflect": lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"),
    "no padding": lambda: nn.Conv2d(1, 2, 3),
    "even": lambda: nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"),
    "stride": lambda: nn.Conv2d(1, 2, 3, stride=4, padding=1, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose2d(1, 2, 4, stride=2, padding=1),
    "overlap": lambda: nn.MaxPool2d(3, 2),
    "remainder": lambda: nn.MaxPool2d(4),
    "pad": lambda: nn.ZeroPad2d(1),
    "adaptive": lambda: nn.AdaptiveMaxPool2d(2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_breaks_the_structure_keeps_its_map(name):
    """Whatever commutes with no shift is a given map; the bound holds."""
    layer = WHOLE[name]()
    features = layer(torch.zeros(1, 1, 6, 6)).numel()
    module = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(features, 3))
    net = ldlt.Lipschitz(module, 1.3, input_shape=(1, 6, 6))
    randomise(net, 0, 1.0)
    for x in torch.randn(5, 1, 6, 6):
        jacobian = torch.func.jacrev(lambda z: net.freeze()(z[None])[0])(x).flatten(1).detach()
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= 1.3 * (1 + 1e-9)


def test_errors_of_layers_are_passed_on_as_they_are():
    odd = nn.Sequential(conv(1, 3, 2), ldlt.activations.MaxMin(), nn.Flatten(), nn.Linear(48, 2))
    with pytest.raises(ldlt.UnsupportedOpError, match="do not divide 3"):
        ldlt.Lipschitz(odd, input_shape=(1, 4, 4))
    with pytest.raises(ldlt.ShapeError, match=r"does not accept an input of shape \(batch, 4, 4\)[^\n]*$"):
        ldlt.Lipschitz(nn.Sequential(conv(1, 4, 2), nn.Flatten(), nn.Linear(64, 2)), input_shape=(4, 4))


def test_dilation_groups_and_even_kernels_with_same_padding_are_fine():
    layers = [
        conv(2, 4, 2, 3, dilation=2),
        nn.ReLU(),
        conv(4, 4, 2, 4, groups=4),
        nn.ReLU(),
        conv(4, 2, 2, 2, groups=2),
    ]
    net = ldlt.Lipschitz(nn.Sequential(*layers), input_shape=(2, 5, 4), head="orthogonal")
    randomise(net, 0, 0.5)
    assert abs(ldlt.lmi.residual(net)) < 1e-10
    assert net.plan.cells == (5, 4)


def test_images_as_outputs_have_constants_per_pixel():
    net = ldlt.Lipschitz(
        nn.Sequential(conv(1, 3, 2), nn.ReLU(), conv(3, 2, 2)), bound=1.5, input_shape=(1, 3, 4), head="rows"
    )
    randomise(net, 0, 0.5)
    torch.testing.assert_close(net.output_bounds(), torch.full((24,), 1.5))
    pairs = net.pair_bounds()
    assert pairs.shape == (24, 24)
    assert float(pairs.max()) <= 3.0
    assert net.bound > 1.5
    assert abs(ldlt.lmi.residual(net)) < 1e-10


def test_an_image_that_has_lost_a_frequency_stays_on_its_grid():
    """``x − shift(x)`` has no mean: its rank is smaller at one frequency, and nothing depends on ranks."""

    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = conv(1, 2, 2), conv(2, 1, 2)

        def forward(self, x):
            return self.second(torch.relu(self.first(x - torch.roll(x, 1, 2))))

    net = ldlt.Lipschitz(Difference(), input_shape=(1, 3, 4), head="orthogonal")
    randomise(net, 0, 0.5)
    assert net.plan.cells == (3, 4)
    assert net.plan.steps[-1].cells == (3, 4)
    assert -1e-12 < ldlt.lmi.residual(net) < 1e-6
    x = torch.randn(2, 1, 3, 4)
    torch.testing.assert_close(net.freeze()(x), net(x).detach())


def test_certificates_of_frozen_and_of_plain_convolutions():
    """The optimal bound is proven on unrolled matrices, and is not above the one the network was built with."""
    module = nn.Sequential(conv(1, 2, 2), nn.ReLU(), nn.AvgPool2d(2), conv(2, 2, 2, 1), nn.MaxPool2d(2))
    net = ldlt.Lipschitz(nn.Sequential(module, nn.Flatten(), nn.Linear(2, 2)), bound=1.3, input_shape=(1, 4, 4))
    randomise(net, 0, 0.5)
    found = ldlt.certify(net.freeze(), input_shape=(1, 4, 4))
    assert 0 < found.bound <= 1.3 * (1 + 1e-6)
    plain = nn.Sequential(conv(1, 2, 2), nn.ReLU(), conv(2, 1, 2), nn.Flatten(), nn.Linear(9, 1))
    bound = ldlt.certify(plain, input_shape=(1, 3, 3)).bound
    x = torch.randn(50, 1, 3, 3)
    slopes = torch.func.vmap(torch.func.jacrev(lambda z: plain(z[None])[0]))(x).detach()
    assert float(slopes.flatten(1).norm(dim=1).max()) <= bound < torch.inf


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_as_many_frequencies_as_channels(contraction):
    """Three frequencies of three channels: a stack of three matrices must not be mistaken for three vectors."""
    module = nn.Sequential(conv(3, 3, 1), nn.ReLU(), conv(3, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3))
    net = ldlt.Lipschitz(module, input_shape=(3, 5), contraction=contraction, head="orthogonal")
    randomise(net, 0)
    assert abs(ldlt.lmi.residual(net)) < 1e-10


@pytest.mark.parametrize(
    ("inputs", "outputs", "cells"),
    [
        ((3, 6), (4, 6), (6,)),
        ((2, 4, 6), (3, 4, 6), (4, 6)),
        ((1, 8, 8), (4, 4, 4), (4, 4)),
        ((8, 4, 6), (2, 8, 12), (4, 3)),
        ((1, 4, 2, 2), (2, 4, 2, 2), (4, 2, 2)),
        ((16, 14, 14), (16, 14, 14), (14, 14)),
    ],
)
def test_both_ways_to_apply_a_frozen_convolution_agree(inputs, outputs, cells):
    torch.set_default_dtype(torch.float32)
    local = [math.prod(s) // math.prod(cells) for s in (outputs, inputs)]
    kernel = torch.randn(*local, *cells) / math.sqrt(math.prod(inputs))
    layer = CircularConv(kernel, inputs, outputs, torch.randn(outputs[0]))
    assert layer.unrolled == unrolls(*local, cells)
    x = torch.randn(5, *inputs)
    found = {}
    for unrolled in (False, True):
        layer.unrolled = unrolled
        with torch.no_grad():
            found[unrolled] = layer(x)
            assert torch.equal(layer(x), found[unrolled])
    assert float((found[True] - found[False]).abs().max()) < 1e-5
    assert float((found[True] - layer(x)).detach().abs().max()) < 1e-5  # with gradients: in the Fourier domain
    by_hand = x.flatten(1) @ layer.matrix().mT + layer.bias.repeat_interleave(math.prod(outputs[1:]))
    assert float((found[True].flatten(1) - by_hand).detach().abs().max()) < 1e-5


def test_a_frozen_convolution_follows_its_kernel():
    layer = CircularConv(torch.randn(2, 2, 4, 4), (2, 4, 4), (2, 4, 4))
    assert layer.unrolled
    x = torch.randn(3, 2, 4, 4)
    with torch.no_grad():
        first = layer(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * first)
    layer.double()
    with torch.no_grad():
        torch.testing.assert_close(layer(x.double()), 2 * first.double(), rtol=1e-5, atol=1e-5)
    layer.requires_grad_(False)
    point = x.double().requires_grad_()
    layer(point).square().sum().backward()  # gradients of the input go through the matrix, too
    expected = 2 * (layer(x.double()).flatten(1) @ layer.matrix())
    torch.testing.assert_close(point.grad.flatten(1), expected)
    again = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(again(x.double()), layer(x.double()))


def test_small_maps_are_unrolled_and_large_ones_are_not():
    assert unrolls(16, 16, (4, 4))
    assert unrolls(8, 1, (8, 8))
    assert not unrolls(16, 16, (14, 14))
    assert not unrolls(4, 4, (32, 32))
    assert not unrolls(4096, 4096, (2, 2))  # whatever the estimate says, it would be too large
