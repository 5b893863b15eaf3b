"""Hostile modules against the ruler, and what has to be refused because no tracer sees it."""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ldlt
from ldlt.files.message import onnx_package
from ldlt.files.read import read_onnx
from ldlt.files.write import message_of
from ldlt.graph.trace import trace
from ldlt.testing import check_module, check_network, jacobians, run_certificates, run_hostile

SLOW_SEEDS = int(os.environ.get("LDLT_HOSTILE_SEEDS", "2000"))


def _bad(found):
    return "\n".join(f"seed {seed}: {text}" for seed, text in (*found.violations, *found.declined))


@pytest.mark.parametrize("part", range(12))
def test_hostile_modules(part):
    """Random modules at one kind of parameters each: no slope above its bound, no number that is not finite."""
    found = run_hostile(range(25 * part, 25 * (part + 1)), 1)
    assert not _bad(found), _bad(found)
    assert found.accepted >= 10
    assert len(found.overflows) <= 1  # products of the user's own maps that leave the range of the dtype


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_many_hostile_modules(part):
    """``LDLT_HOSTILE_SEEDS`` modules in all, at every kind of parameters."""
    found = run_hostile(range(10**6 + part, 10**6 + SLOW_SEEDS, 10))
    assert not _bad(found), _bad(found)


# ----------------------------------------------------------------------------------------------- modules by name


class Fn(nn.Module):
    """A function as a module; its parts are keyword arguments."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def circular(i, o, k=3):
    return nn.Conv2d(i, o, k, padding=k // 2, padding_mode="circular")


def frozen(layer):
    return layer.requires_grad_(False)


NAMED = {
    "pooled": (
        lambda: nn.Sequential(circular(3, 4), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 3)),
        (3, 4, 4),
    ),
    "pooled concatenation": (
        lambda: Fn(
            lambda s, x: s.head(F.avg_pool2d(torch.cat([s.conv(x), x], 1), 2).flatten(1)),
            conv=circular(3, 4), head=nn.Linear(28, 3),
        ),
        (3, 4, 4),
    ),
    "centred and summed": (
        lambda: Fn(lambda s, x: s.head((x - x.mean(1, keepdim=True)).sum(1, keepdim=True)), head=nn.Linear(1, 3)),
        (5,),
    ),
    "one number per sample": (
        lambda: Fn(
            lambda s, x: s.head(torch.stack([(y := s.first(x).unbind(1))[0] + y[1], (2 * x[:, 0]).tanh()], 1)),
            first=nn.Linear(4, 3), head=nn.Linear(2, 3),
        ),
        (4,),
    ),
    "a number per sample": (
        lambda: Fn(lambda s, x: s.head(F.relu(s.a(x)).sum(1)[:, None]), a=nn.Linear(5, 4), head=nn.Linear(1, 3)),
        (5,),
    ),
    "frozen convolution": (
        lambda: nn.Sequential(
            circular(2, 3), nn.ReLU(), frozen(circular(3, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
        ),
        (2, 4, 4),
    ),
    "a map and a map of it": (
        lambda: Fn(lambda s, x: s.last(h := s.first(x)) + h, first=nn.Linear(3, 3), last=nn.Linear(3, 3)),
        (3,),
    ),
    "sum of flattened images": (
        lambda: Fn(
            lambda s, x: (h := torch.relu(s.conv(x))).flatten(1) + (h + h).flatten(1), conv=circular(1, 2)
        ),
        (1, 3, 3),
    ),
    "computed kernel": (
        lambda: Fn(
            lambda s, x: s.head(torch.relu(F.conv2d(x, s.kernel.abs(), padding=1)).flatten(1)),
            kernel=torch.randn(2, 1, 3, 3), head=nn.Linear(32, 3),
        ),
        (1, 4, 4),
    ),
    "vector from an image beside it": (
        lambda: Fn(
            lambda s, x: s.a(s.conv(x).flatten(1)) + s.b(s.conv(x).mean((2, 3))) + s.c(x.flatten(1)),
            conv=frozen(circular(1, 2)), a=nn.Linear(16, 2), b=nn.Linear(2, 2), c=nn.Linear(8, 2),
        ),
        (1, 2, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMED)
def test_named_modules_at_all_parameters(name, dtype):
    make, shape = NAMED[name]
    output = "scale" if name in ("a map and a map of it", "sum of flattened images") else "free"
    for head in ("orthogonal", "rows"):
        found = check_module(make().to(dtype), shape, head=head, output=output)
        assert found.refusal is None
        assert not found.violations + found.declined + found.overflows


def test_maps_that_read_each_other_are_not_chosen_together():
    make, shape = NAMED["a map and a map of it"]
    with pytest.raises(ldlt.GraphError, match="scale"):
        ldlt.Lipschitz(make(), input_shape=shape)


def test_frozen_weights_may_be_loaded():
    """A state with another frozen convolution: nothing was kept of the one before."""
    make, shape = NAMED["frozen convolution"]
    net = ldlt.Lipschitz(make(), input_shape=shape, head="orthogonal").double()
    state = {n: v + torch.randn_like(v) for n, v in net.state_dict().items()}
    net(torch.randn(2, *shape).double())
    net.load_state_dict(state)
    found = check_network(net)
    assert not found.violations + found.declined


@pytest.mark.parametrize(
    "run",
    [
        lambda s, x: s.last(F.relu(s.first(x).index_select(1, s.table))),
        lambda s, x: s.last(F.relu(torch.cat([s.first(x)[:, s.table], x], 1)[:, :16])),
        lambda s, x: s.last(F.relu(s.first(x)[:, s.scores.argsort()])),
    ],
)
def test_indices_and_masks_may_be_loaded(run):
    """What is done with features may not depend on the table or mask that was there when the graph was made."""
    parts = {"table": torch.arange(16), "scores": torch.arange(16.0)}
    module = Fn(run, first=nn.Linear(16, 16), last=nn.Linear(16, 3), **parts).double()
    net = ldlt.Lipschitz(module, input_shape=16, head="orthogonal")
    net.load_state_dict({**net.state_dict(), "module.table": torch.full((16,), 3), "module.scores": torch.zeros(16)})
    found = check_network(net)
    assert not found.violations + found.declined


def test_masks_of_images_may_be_loaded():
    """A mask that came out the same at every pixel need not do so later."""

    def run(s, x):
        h = torch.where(s.scores > 0, x, 0)
        return s.a(h.flatten(1)) + s.b(s.up(F.max_pool2d(h, 2)).flatten(1))

    parts = {"a": nn.Linear(16, 3), "b": nn.Linear(16, 3), "up": nn.ConvTranspose2d(1, 1, 2, stride=2)}
    module = Fn(run, scores=torch.ones(1, 4, 4), **parts).double()
    net = ldlt.Lipschitz(module, input_shape=(1, 4, 4), head="orthogonal")
    for seed in range(5):
        torch.manual_seed(seed)
        net.load_state_dict({**net.state_dict(), "module.scores": torch.randn(1, 4, 4)})
        found = check_network(net)
        assert not found.violations + found.declined


def test_squares_of_given_maps_may_be_beyond_float32():
    net = ldlt.Lipschitz(nn.Sequential(nn.PReLU(), nn.PReLU(), nn.Linear(4, 3)), 0.01, input_shape=4)
    with torch.no_grad():
        net.module[0].weight.fill_(1e9)
        net.module[1].weight.fill_(1e9)
    found = check_network(net)
    assert not found.violations + found.declined + found.overflows


def test_a_frozen_convolution_follows_its_kernel():
    """However the kernel is changed."""
    plain = ldlt.Lipschitz(nn.Sequential(circular(1, 2), nn.Flatten(), nn.Linear(8, 2)), input_shape=(1, 2, 2)).freeze()
    x = torch.randn(3, 1, 2, 2)
    with torch.no_grad():
        before = plain[0](x)
        plain[0].weight.data.mul_(3)
        bias = plain[0].bias.reshape(-1, 1, 1)
        torch.testing.assert_close(plain[0](x) - bias, 3 * (before - bias))


@pytest.mark.parametrize("head", ["rows", "joint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pair_bounds_of_nearly_equal_rows(head, dtype):
    """The difference of two equal rows is rounding, of the stored weights: a bound of zero would be too small."""
    net = ldlt.nn.FeedForward(6, [16, 16], 4, 3.0, head=head, dtype=dtype)
    with torch.no_grad():
        net.module[-1].weight.copy_(net.module[-1].weight[:1] * torch.tensor([1.0, 1.0, 1 + 1e-7, -1.0])[:, None])
    pairs = net.pair_bounds()
    unit = torch.finfo(dtype).eps
    assert bool((pairs[0, 1:3] > unit).all())
    assert head == "joint" or bool((pairs[0, 1:3] < 1e4 * unit + 1e-6).all())
    assert bool((pairs.diagonal() == 0).all())
    found = check_network(net)
    assert not found.violations + found.declined


# ------------------------------------------------------------------------------------------------------ refusals


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def _hook(module, kind, place):
    part = module if place is None else module[place]
    if kind == "forward":
        return part.register_forward_hook(lambda m, i, o: 100 * o)
    return part.register_forward_pre_hook(lambda m, i: (100 * i[0],))


def steepest(model, shape=(4,)):
    points = torch.randn(20, *shape).to(next(model.parameters()))
    return float(torch.linalg.matrix_norm(jacobians(model, points), 2).max())


@pytest.mark.parametrize("place", [None, 0, 1])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hooks_are_part_of_what_is_certified(kind, place):
    """Those that are there; a network that was made without them is another one."""
    model, net = mlp().double(), ldlt.Lipschitz(mlp(), input_shape=4)
    certificate = ldlt.certify(model, 4)
    handles = [_hook(model, kind, place), _hook(net.module, kind, place)]
    for method in ("optimal", "product"):
        assert ldlt.certify(model, 4, method=method).bound >= steepest(model) * (1 - 1e-9)
    with pytest.raises(ldlt.CertificateError):
        ldlt.verify(certificate, model)
    assert not check_network(ldlt.Lipschitz(copy.deepcopy(model), input_shape=4, output="scale")).violations
    for call in (lambda: net(torch.randn(2, 4)), net.explicit, net.freeze, net.pair_bounds, lambda: ldlt.certify(net)):
        with pytest.raises(ldlt.LdltError, match="hook"):
            call()
    for handle in handles:
        handle.remove()
    assert ldlt.verify(certificate, model).rigorous
    assert torch.isfinite(net(torch.randn(2, 4))).all()


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_global_hooks_that_come_later_are_refused(register):
    net = ldlt.Lipschitz(mlp(), input_shape=4)
    handle = getattr(nn.modules.module, register)(lambda *args: None)
    try:
        with pytest.raises(ldlt.GraphError, match="hook"):
            net.explicit()
    finally:
        handle.remove()


def _loud(base, method):
    def run(self, *args):
        return 20 * getattr(super(kind, self), method)(*args)

    kind = type(f"Loud{base.__name__}", (base,), {method: run})
    return kind


LOUD = {
    "convolution": (lambda: [_loud(nn.Conv2d, "forward")(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 3)]),
    "inner convolution": (
        lambda: [_loud(nn.Conv2d, "_conv_forward")(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 3)]
    ),
    "average": (lambda: [_loud(nn.AvgPool2d, "forward")(2), nn.Flatten(), nn.Linear(4, 3)]),
    "maximum": (lambda: [_loud(nn.MaxPool2d, "forward")(2), nn.Flatten(), nn.Linear(4, 3)]),
    "activation": (lambda: [_loud(nn.ReLU, "forward")(), nn.Flatten(), nn.Linear(16, 3)]),
    "identity": (lambda: [_loud(nn.Identity, "forward")(), nn.Flatten(), nn.Linear(16, 3)]),
    "linear": (lambda: [nn.Flatten(), _loud(nn.Linear, "forward")(16, 3)]),
}


@pytest.mark.parametrize("name", LOUD)
def test_overriding_subclasses_are_refused_or_have_their_true_constant(name):
    model = nn.Sequential(*LOUD[name]()).double()
    slope = steepest(model, (1, 4, 4))
    for method in ("optimal", "product"):
        try:
            bound = ldlt.certify(model, (1, 4, 4), method=method).bound
        except ldlt.LdltError:
            continue
        assert bound >= slope * (1 - 1e-9)
    try:
        net = ldlt.Lipschitz(model, input_shape=(1, 4, 4), head="orthogonal")
    except ldlt.LdltError:
        return
    assert not check_network(net).violations


def test_functions_on_an_instance_are_refused():
    model = mlp()
    model[1].forward = lambda x: torch.relu(x) * (1 if float(x.abs().max()) < 50 else 100)
    for call in (lambda: ldlt.certify(model, 4), lambda: ldlt.Lipschitz(model, input_shape=4)):
        with pytest.raises(ldlt.GraphError, match="values of its input"):
            call()


BATCH_ARITHMETIC = {
    "step": lambda s, x: s.a(x) * (1 + 100 * (x.shape[0] // 10)),
    "factor": lambda s, x: s.a(x * x.size(0)),
    "shift": lambda s, x: s.a(x + x.size(0)),
    "slope": lambda s, x: s.a(F.leaky_relu(s.b(x), 0.1 * x.shape[0])),
    "slice": lambda s, x: s.a(torch.cat([x, x], 1)[:, x.shape[0] // 10 : x.shape[0] // 10 + 4]),
    "all numbers": lambda s, x: s.a(x) * (1 + x.numel() // 100),
    "made": lambda s, x: s.a(x) * torch.full((1,), x.shape[0] // 10 + 1),
    "alpha": lambda s, x: torch.add(s.a(x), s.c(x), alpha=x.shape[0] // 10 + 1),
    "stride": lambda s, x: s.a(x) * x.stride(0),
    "of a view": lambda s, x: s.a(x) * (1 + x.view(-1, 2).shape[0] // 100),
}
IN_SHAPES = {
    "view": lambda s, x: s.a(x.view(x.shape[0], -1)),
    "there and back": lambda s, x: s.a(x.view(x.size(0), 2, 2).reshape(x.size()[0], -1).view(x.shape)),
    "sum of sizes": lambda s, x: s.a(x.reshape(x.shape[:1] + (4,)).expand(x.shape[0], 4)),  # noqa: RUF005
    "function": lambda s, x: s.a(torch.reshape(x, (x.size(0), 4)).flatten(x.ndim - 1)),
    "features": lambda s, x: s.a(x.view(-1, x.shape[1]) * x.shape[1]),
}


def _parts():
    return {"a": nn.Linear(4, 3), "b": nn.Linear(4, 4), "c": nn.Linear(4, 3)}


@pytest.mark.parametrize("name", BATCH_ARITHMETIC)
def test_arithmetic_with_the_batch_size_is_refused(name):
    model = Fn(BATCH_ARITHMETIC[name], **_parts())
    for method in ("optimal", "product"):
        with pytest.raises(ldlt.GraphError, match="batch|memory|number"):
            ldlt.certify(model, 4, method=method)
    with pytest.raises(ldlt.GraphError, match="batch|memory|number"):
        ldlt.Lipschitz(model, input_shape=4)


@pytest.mark.parametrize("name", IN_SHAPES)
def test_the_batch_size_may_be_part_of_a_shape(name):
    model = Fn(IN_SHAPES[name], **_parts())
    assert ldlt.certify(model, 4).rigorous
    assert ldlt.Lipschitz(model, input_shape=4)(torch.randn(7, 4)).shape == (7, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["0.weight", "0.bias", "2.bias"])
def test_numbers_that_are_not_finite_are_refused(where, value):
    model = mlp()
    certificate = ldlt.certify(model, 4)
    with torch.no_grad():
        model.get_parameter(where).flatten()[0] = value
    calls = [
        lambda: ldlt.certify(model, 4),
        lambda: ldlt.certify(model, 4, method="product"),
        lambda: ldlt.verify(certificate, model),
        lambda: ldlt.Lipschitz(model, input_shape=4),
    ]
    for call in calls:
        with pytest.raises(ldlt.LdltError, match="infinite or not"):
            call()


@pytest.mark.parametrize("method", ["optimal", "product"])
@pytest.mark.parametrize(
    "run",
    [
        lambda s, x: s.a(x + math.inf),
        lambda s, x: s.a(x * s.k * s.k),
        lambda s, x: s.a(x * 10**400),
        lambda s, x: s.a(x + s.n),
        lambda s, x: s.a(x).clamp(min=s.n),
    ],
)
def test_overflow_inside_a_graph_is_refused(run, method):
    parts = {"k": torch.tensor(1e300).double(), "n": torch.tensor(math.nan).double()}
    model = Fn(run, a=nn.Linear(4, 3).double(), **parts)
    for call in (lambda: ldlt.certify(model, 4, method=method), lambda: ldlt.Lipschitz(model, input_shape=4)):
        with pytest.raises(ldlt.LdltError):
            call()


def test_odd_options_of_a_layer_are_refused():
    model = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 2))
    for name, value in (("stride", (0,)), ("dilation", ("a",)), ("padding", (-1,)), ("groups", 0)):
        model[0].__dict__[name] = value
        for call in (lambda: ldlt.certify(model, (2, 4)), lambda: ldlt.Lipschitz(model, input_shape=(2, 4))):
            with pytest.raises(ldlt.LdltError):
                call()
        model[0] = nn.Conv1d(2, 2, 3, padding=1)


@pytest.mark.parametrize("options", [{"alpha": "yes"}, {"alpha": math.inf}, {"more": 1}])
def test_odd_options_in_a_file_are_refused(options):
    model = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3))
    message = message_of(model, trace(model, (4,)), torch.float32)
    node = next(n for n in message.graph.node if n.op_type == "LeakyRelu")
    for name, value in options.items():
        for old in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(old)
        node.attribute.append(onnx_package().helper.make_attribute(name, value))
    with pytest.raises(ldlt.OnnxError):
        ldlt.certify(read_onnx(message.SerializeToString()).module, 4)


# -------------------------------------------------------------------------------------------------- certificates


@pytest.mark.parametrize("part", range(3))
def test_certificates_of_hostile_modules(part):
    """No certificate states less than the slopes that are found, and no exception is foreign."""
    found = run_certificates(range(10 * part, 10 * (part + 1)))
    assert not found.violations, _bad(found)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_many_certificates(part):
    """Half of ``LDLT_HOSTILE_SEEDS`` modules in all."""
    found = run_certificates(range(10**6 + part, 10**6 + SLOW_SEEDS // 2, 10))
    assert not found.violations, _bad(found)
