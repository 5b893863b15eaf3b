"""The published families: definitions, certificates, attacks after hostile training, engineering."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap

from ldlt import errors
from ldlt_bench.families import (
    ACTIVATIONS,
    CPL,
    FAMILIES,
    HEADS,
    SLL,
    FamilyNetwork,
    Layer,
    Orthogonal,
    RowsHead,
    Sandwich,
    SandwichOutput,
    Spectral,
    aol,
    cayley,
    cayley_rows,
    pair_constants,
    sll_diagonal,
    squared_norm,
)
from ldlt_bench.families.layer import raise_zeros

NAMES = sorted(FAMILIES)
PLAIN = ["aol", "orthogonal", "spectral"]
SHAPES = [(5, 5), (3, 8), (8, 3), (6, 1)]
F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def shout(layer: nn.Module, scale: float = 3.0) -> nn.Module:
    """Replace all parameters by large random ones, in float64."""
    layer.double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, scale)
    return layer


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2).max())


def lmi(layer: Layer) -> Tensor:
    """Assemble Q over (x, w) from its definition, densely; slopes [0, 1], constant 1."""
    p, _, r = (None if t is None else t.detach() for t in layer.explicit())
    n, m = layer.in_features, layer.neurons
    x = torch.eye(n, n + m, dtype=F64)
    w = torch.eye(n + m, dtype=F64)[n:]
    v = p @ x
    y = (x if layer.residual else 0) + (w if r is None else r @ w)
    lam = torch.diag(layer.multiplier().detach())
    slope = 2 * ((w - v / 2).T @ lam @ (w - v / 2) - v.T @ lam @ v / 4)
    return x.T @ x + slope - y.T @ y


def push(net: nn.Module, steps: int = 100, lr: float = 0.3, dtype: torch.dtype = F64) -> Tensor:
    """Train with large steps to push outputs of close inputs apart; return the inputs."""
    x = torch.randn(48, net.in_features, dtype=dtype)
    u = nn.functional.normalize(torch.randn_like(x), dim=-1)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        ratio = (net(x + 0.1 * u) - net(x)).norm(dim=-1) / 0.1
        (-ratio.mean()).backward()
        optimizer.step()
    return x


def attack(net: nn.Module, starts: Tensor, steps: int = 60) -> float:
    """Largest ratio ‖f(a) − f(b)‖ / ‖a − b‖ found by gradient ascent on pairs."""
    a = starts.clone().requires_grad_()
    b = (starts + torch.randn_like(starts)).requires_grad_()
    optimizer = torch.optim.Adam([a, b], lr=0.05)
    best = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        ratio = (net(a) - net(b)).norm(dim=-1) / (a - b).norm(dim=-1)
        best = max(best, ratio.detach().max().item())
        (-ratio.sum()).backward()
        optimizer.step()
    return best


# --- definitions -----------------------------------------------------------------------------------------


def test_aol_is_its_formula():
    w = torch.randn(4, 6, dtype=F64)
    gram = w.T @ w
    d = torch.stack([sum(abs(gram[i, j]) for j in range(6)) for i in range(6)])
    torch.testing.assert_close(aol(w), w @ torch.diag(d**-0.5))


def test_orthogonal_is_its_formula():
    w = torch.randn(5, 5, dtype=F64)
    skew, eye = w - w.T, torch.eye(5, dtype=F64)
    expected = (eye - skew) @ torch.linalg.inv(eye + skew)
    torch.testing.assert_close(cayley_rows(w), expected.T)  # [A] is the transpose of (I + Z)^{-1} (I − Z)


def test_cayley_is_its_formula():
    x, y = torch.randn(4, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    z, eye = x - x.T + y.T @ y, torch.eye(4, dtype=F64)
    a, b = cayley(x, y)
    inverse = torch.linalg.inv(eye + z)
    torch.testing.assert_close(a.T, inverse @ (eye - z))
    torch.testing.assert_close(b.T, -2 * y @ inverse)


def test_sandwich_is_its_formula():
    layer = shout(Sandwich(3, 4), 1.0)
    a, b = layer.blocks()
    psi, h = torch.diag(layer.log_psi.exp()), torch.randn(7, 3, dtype=F64)
    inside = torch.relu(math.sqrt(2) * h @ (torch.linalg.inv(psi) @ b).T + layer.bias)
    torch.testing.assert_close(layer(h), math.sqrt(2) * inside @ (a.T @ psi).T)


def test_sandwich_output_is_its_formula():
    layer = shout(SandwichOutput(3, 4), 1.0)
    h = torch.randn(7, 3, dtype=F64)
    torch.testing.assert_close(layer(h), h @ layer.blocks()[1].T + layer.bias)


def test_sll_is_its_formula():
    layer = shout(SLL(4, 6), 1.0)
    w, q = layer.weight.detach(), layer.log_q.detach().exp()
    gram, x = w.T @ w, torch.randn(7, 4, dtype=F64)
    t = torch.stack([sum(abs(gram[i, j]) * q[j] / q[i] for j in range(6)) for i in range(6)])
    torch.testing.assert_close(sll_diagonal(layer.weight, layer.log_q), t)
    expected = x - 2 * torch.relu(x @ w + layer.bias) @ torch.diag(1 / t) @ w.T
    torch.testing.assert_close(layer(x), expected)


def test_cpl_is_its_formula():
    layer = shout(CPL(4, 6), 1.0)
    w, x = layer.weight, torch.randn(7, 4, dtype=F64)
    expected = x - 2 / torch.linalg.matrix_norm(w, 2) ** 2 * torch.relu(x @ w + layer.bias) @ w.T
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_spectral_norm_is_exact(shape):
    w = torch.randn(shape, dtype=F64)
    torch.testing.assert_close(squared_norm(w), torch.linalg.matrix_norm(w, 2) ** 2)
    layer = shout(Spectral(*shape))
    torch.testing.assert_close(layer.explicit().inner, layer.weight / torch.linalg.matrix_norm(layer.weight, 2))


def test_rows_head_has_unit_rows():
    head = shout(RowsHead(6, 4))
    v = head.explicit().inner
    torch.testing.assert_close(v.norm(dim=1), torch.ones(4, dtype=F64))
    constants = pair_constants(v)
    for c in range(4):
        for j in range(4):
            torch.testing.assert_close(constants[c, j], (v[c] - v[j]).norm())
    assert (constants.diagonal() == 0).all()


def test_pair_constants_of_almost_equal_rows_are_accurate():
    v = torch.tensor([[1.0, 0.0], [1.0, 1e-12]], dtype=F64)
    assert float(pair_constants(v)[0, 1]) == pytest.approx(1e-12, rel=1e-12)


# --- certificates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_lmi_of_every_family(family, shape, scale):
    layer = shout(FAMILIES[family](*shape), scale)
    with torch.no_grad():
        if family in {"sll", "sandwich"}:  # keep the multipliers in a range float64 can resolve
            getattr(layer, "log_q" if family == "sll" else "log_psi").clamp_(-2, 2)
    q = lmi(layer)
    assert float(torch.linalg.eigvalsh(q)[0]) >= -1e-10 * max(1.0, norm(q))


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_rows_or_columns(shape):
    layer = shout(Orthogonal(*shape))
    p = layer.explicit().inner.detach()
    gram = p @ p.T if p.shape[0] <= p.shape[1] else p.T @ p
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=F64), atol=1e-10, rtol=0)


@pytest.mark.parametrize("head", [SandwichOutput, Orthogonal])
def test_lmi_of_a_whole_sandwich_network(head):
    net = FamilyNetwork("sandwich", 4, (6, 5), 3, bound=1.7, head="joint")
    net.head = head(5, 3, "identity")
    shout(net, 1.0)
    plain = net.freeze()
    first, middle, last = plain[0].weight, plain[2].weight, plain[4].weight
    a = [layer.blocks()[0] for layer in net.layers]
    b = [layer.blocks()[1] for layer in net.layers]
    psi = [layer.log_psi.exp() for layer in net.layers]
    torch.testing.assert_close(middle, (2 / psi[1][:, None] * (b[1] @ a[0].T) * psi[0]).detach())
    select = torch.eye(15, dtype=F64)
    x, w1, w2 = select[:4], select[4:10], select[10:]
    q = 1.7**2 * x.T @ x - (last @ w2).T @ (last @ w2)
    for layer, w, v in zip(net.layers, (w1, w2), (first @ x, middle @ w1), strict=True):
        term = w.T @ torch.diag(layer.multiplier().detach()) @ (w - v)
        q = q + term + term.T
    smallest = float(torch.linalg.eigvalsh(q)[0]) / norm(q)
    assert smallest >= -1e-10
    if head is Orthogonal:  # an orthogonal output makes the LMI singular
        assert smallest <= 1e-10


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    cols=st.integers(1, 6),
    log_scales=st.lists(st.floats(-170, 30), min_size=6, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_aol_holds_for_columns_of_any_size(rows, cols, log_scales, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([10.0**s if s > -165 else 0.0 for s in log_scales[:cols]], dtype=F64)
    w = torch.randn(rows, cols, dtype=F64, generator=generator) * size
    assert norm(aol(w)) <= 1 + 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("tiny", [0.0, 1e-22, 1e-160])
@pytest.mark.parametrize("family", NAMES)
def test_vanishing_weights_are_finite_and_certified(family, tiny, dtype):
    layer = FAMILIES[family](4, 4).to(dtype)
    with torch.no_grad():
        layer.weight[:, :2] *= tiny
    x = torch.randn(5, 4, dtype=dtype)
    slopes = vmap(jacrev(layer))(x)
    assert norm(slopes) <= 1 + (1e-10 if dtype is F64 else 1e-5)
    with torch.no_grad():
        layer.weight.mul_(tiny)
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    assert norm(vmap(jacrev(layer))(x)) <= 1 + (1e-10 if dtype is F64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_vanishing_divisors_are_raised_to_one(dtype):
    tiny = torch.finfo(dtype).tiny
    t = torch.tensor([0.0, tiny, 1e-20, 0.5, 2.0], dtype=dtype)
    assert raise_zeros(t).tolist() == [1.0, 1.0, *t[2:].tolist()]
    weight = torch.zeros(3, 3, dtype=dtype, requires_grad=True)
    aol(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


# --- hostile training and attacks -------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", NAMES)
def test_bounds_after_hostile_training(family, head):
    torch.manual_seed(NAMES.index(family))
    net = FamilyNetwork(family, 5, (12, 12), 4, bound=1.5, head=head).double()
    x = push(net)
    jacobian = vmap(jacrev(net))(torch.cat((x, 5 * torch.randn_like(x)))).detach()
    slope = norm(jacobian)
    assert slope <= net.bound * (1 + 1e-6)
    assert slope >= 0.6 * net.bound  # a dead layer fails
    ratio = attack(net, x)
    assert 0.6 * net.bound <= ratio <= net.bound * (1 + 1e-6)
    if head == "joint":
        assert net.bound == 1.5
    else:
        assert net.bound == pytest.approx(1.5 * norm(net.head.explicit().inner))

    pairs = net.pair_bounds().detach()
    differences = (jacobian[:, :, None] - jacobian[:, None]).norm(dim=-1)
    assert (differences <= pairs * (1 + 1e-6) + 1e-12).all()
    assert differences.max() >= 0.4 * pairs.max()
    assert (pairs <= math.sqrt(2) * net.bound * (1 + 1e-12)).all()
    a, b = x[:, None], x[None] + 1e-3
    moved = net(a) - net(b)
    gaps = (moved[..., :, None] - moved[..., None, :]).abs()
    assert (gaps <= pairs * (a - b).norm(dim=-1)[..., None, None] * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("family", NAMES)
def test_other_activations_keep_the_bound(family, activation):
    torch.manual_seed(3)
    if activation == "maxmin" and FAMILIES[family].elementwise:
        with pytest.raises(errors.OptionError, match="elementwise"):
            FamilyNetwork(family, 4, (8,), 2, activation=activation)
        return
    net = FamilyNetwork(family, 4, (8, 8), 2, head="joint", activation=activation).double()
    x = push(net, steps=25)
    assert 0.2 <= norm(vmap(jacrev(net))(x)) <= 1 + 1e-6
    torch.testing.assert_close(net.freeze()(x), net(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", NAMES)
def test_float32_charge(family):
    """In float32 the bound may be missed by rounding only."""
    torch.manual_seed(4)
    net = FamilyNetwork(family, 5, (16, 16), 3, head="joint")
    x = push(net, steps=60, lr=0.1, dtype=torch.float32)
    exact = net.freeze().double()  # what float32 inference stores, evaluated without further rounding
    assert 0.5 <= norm(vmap(jacrev(exact))(x.double())) <= 1 + 2e-5


# --- engineering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", NAMES)
def test_vmap_over_stacked_parameters_equals_the_loop(family, head):
    nets = [FamilyNetwork(family, 5, (8, 6), 3, bound=2.0, head=head).double() for _ in range(3)]
    stacked, buffers = stack_module_state(nets)
    assert not buffers
    base = copy.deepcopy(nets[0]).to("meta")
    x = torch.randn(3, 7, 5, dtype=F64)
    y = vmap(lambda p, z: functional_call(base, p, (z,)))(stacked, x)
    torch.testing.assert_close(y, torch.stack([net(z) for net, z in zip(nets, x, strict=True)]))
    y.square().sum().backward()
    sum(net(z).square().sum() for net, z in zip(nets, x, strict=True)).backward()
    for name, value in stacked.items():
        torch.testing.assert_close(value.grad, torch.stack([n.get_parameter(name).grad for n in nets]))

    def loss(p, z):
        return functional_call(base, p, (z,)).square().sum()

    detached = {name: value.detach() for name, value in stacked.items()}
    grads = vmap(torch.func.grad(loss))(detached, x)
    for name, value in stacked.items():
        torch.testing.assert_close(grads[name], value.grad)


@pytest.mark.parametrize(("head", "bound", "dtype"), [("rows", 1.0, torch.float32), ("joint", 3.0, F64)])
@pytest.mark.parametrize("family", NAMES)
def test_frozen_equals_built(family, head, bound, dtype):
    net = FamilyNetwork(family, 5, (8, 6), 3, bound=bound, head=head).to(dtype)
    x = torch.randn(11, 5, dtype=dtype)
    state = torch.get_rng_state()
    plain = net.freeze()
    assert torch.equal(state, torch.get_rng_state())
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype is F64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(plain(x), net(x), **tolerance)
    assert not any(isinstance(m, Layer | FamilyNetwork) for m in plain.modules())
    assert all(not p.requires_grad and p.dtype is dtype for p in plain.parameters())
    assert all(type(a) is not nn.Linear or type(b) is not nn.Linear for a, b in pairwise(plain))
    if family == "sandwich":
        assert [type(m) for m in plain] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    before = plain(x)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    assert torch.equal(plain(x), before)
    pickle.loads(pickle.dumps(plain))


@pytest.mark.parametrize("family", NAMES)
def test_copy_pickle_and_state(family):
    net = FamilyNetwork(family, 5, (8, 8), 3, bound=1.3)
    x = torch.randn(4, 5)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x))
        assert twin.bound == net.bound
    other = FamilyNetwork(family, 5, (8, 8), 3, bound=1.3)
    assert not torch.equal(other(x), net(x))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))
    assert not list(net.buffers())
    net.eval()
    assert torch.equal(other(x), net(x))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", NAMES)
def test_every_parameter_receives_a_gradient(family, head):
    net = FamilyNetwork(family, 5, (8, 8), 3, head=head, activation="leaky_relu").double()
    net(torch.randn(16, 5, dtype=F64)).square().sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("family", NAMES)
def test_gradients_are_those_of_finite_differences(family):
    layer = shout(FAMILIES[family](3, 4, "tanh"), 0.7)
    names, values = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(2, 3, dtype=F64)

    def call(*args):
        return functional_call(layer, dict(zip(names, args, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, values)


@pytest.mark.parametrize("family", NAMES)
def test_traces_without_graph_breaks(family):
    net = FamilyNetwork(family, 5, (8, 8), 3)
    x = torch.randn(4, 5)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))


@pytest.mark.parametrize("family", ["sll", "cpl"])
@pytest.mark.parametrize(("features", "hidden"), [(3, (8, 5)), (8, (3, 5)), (4, (4,))])
def test_residual_families_pad_the_input(family, features, hidden):
    net = FamilyNetwork(family, features, hidden, 2, bound=1.5).double()
    width = max(features, hidden[0])
    assert net.embed.padding == width - features
    assert [(m.in_features, m.neurons, m.out_features) for m in net.layers] == [(width, h, width) for h in hidden]
    x = torch.randn(5, features, dtype=F64)
    torch.testing.assert_close(net.freeze()(x), net(x), rtol=1e-10, atol=1e-12)


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"family": "lot"}, errors.OptionError),
        ({"head": "softmax"}, errors.OptionError),
        ({"activation": "gelu"}, errors.OptionError),
        ({"hidden": ()}, errors.ShapeError),
        ({"hidden": (8, 0)}, errors.ShapeError),
        ({"hidden": (8.0,)}, errors.ShapeError),
        ({"in_features": -1}, errors.ShapeError),
        ({"out_features": 0}, errors.ShapeError),
        ({"hidden": (7,), "activation": "maxmin", "family": "aol"}, errors.ShapeError),
        ({"bound": 0.0}, errors.BoundError),
        ({"bound": math.inf}, errors.BoundError),
        ({"bound": math.nan}, errors.BoundError),
        ({"bound": "1"}, errors.BoundError),
    ],
)
def test_wrong_arguments_are_refused(change, error):
    arguments = {"family": "sll", "in_features": 4, "hidden": (8,), "out_features": 2} | change
    with pytest.raises(error):
        FamilyNetwork(**arguments)


@pytest.mark.parametrize("family", NAMES)
def test_wrong_input_shapes_are_refused(family):
    net = FamilyNetwork(family, 4, (8,), 2)
    for x in (torch.randn(3, 5), torch.tensor(1.0)):
        with pytest.raises(errors.ShapeError):
            net(x)
        with pytest.raises(errors.ShapeError):
            net.head(x)


def test_rows_head_has_no_multiplier():
    with pytest.raises(errors.InfeasibleError):
        RowsHead(3, 2).multiplier()


@pytest.mark.parametrize("layer", [Orthogonal, Sandwich])
@pytest.mark.parametrize(("p", "q"), [(5, 8), (8, 8), (11, 6), (1, 3)])
def test_solving_for_a_small_batch_is_the_layer(layer: type[Layer], p: int, q: int) -> None:
    torch.manual_seed(p + q)
    module = layer(p, q).double()
    x = torch.randn(2, p, dtype=torch.float64, requires_grad=True)  # fewer rows than neurons: solved, not multiplied
    names, values = zip(*((n, v.detach().requires_grad_()) for n, v in module.named_parameters()), strict=True)

    def solved(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return functional_call(module, dict(zip(names, values, strict=True)), (x,))

    def multiplied(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        wide = torch.cat((x, torch.zeros(20, p, dtype=x.dtype)))
        return functional_call(module, dict(zip(names, values, strict=True)), (wide,))[:2]

    torch.testing.assert_close(solved(x, *values), multiplied(x, *values))
    weights = torch.randn(2, q, dtype=torch.float64)
    for one, other in zip(
        *(torch.autograd.grad((f(x, *values) * weights).sum(), (x, *values)) for f in (solved, multiplied)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_sll_takes_any_positive_vector():
    """The diagonal is the published one, and a bound for spreads of q that overflow by themselves."""
    torch.manual_seed(2)
    w, log_q = torch.randn(6, 5, dtype=torch.float64), 20 * torch.randn(5, dtype=torch.float64)
    ratio = torch.exp(log_q[None, :] - log_q[:, None])
    torch.testing.assert_close(sll_diagonal(w, log_q), ((w.mT @ w).abs() * ratio).sum(1))
    for spread in (1e2, 1e4):
        t = sll_diagonal(w.float(), spread * torch.randn(5)).double()
        assert bool(t.isfinite().all() & (t > 0).all())
        assert float(torch.linalg.eigvalsh(torch.eye(5).double() - (w.mT @ w) / (t[:, None] * t).sqrt())[0]) > -1e-6
