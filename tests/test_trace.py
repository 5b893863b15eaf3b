"""What a module may consist of, in every form it can be written, and what is refused."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ldlt
from ldlt.graph import Affine
from random_graphs import randomise

pytestmark = pytest.mark.usefixtures("double")


def module_of(forward, **parts):
    """A module with these parts whose forward is ``forward(self, x)``."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Made.forward = forward
    return Made()


def _chunked(s, x):
    u, v = s.a(x).chunk(2, dim=1)
    return s.b(torch.relu(u) + torch.tanh(v))


def _crossed(s, x):
    """Two activations, each of which reads the map that the other one would normalise."""
    p, q = s.a(x), s.b(x)
    return s.e(torch.relu(p + s.c(q)) + torch.tanh(q + s.d(p)))


def lin(i, o):
    return nn.Linear(i, o)


ACCEPTED = {
    "sum_of_free_maps": lambda: module_of(
        lambda s, x: s.d(torch.relu(s.a(x) - 2 * s.b(torch.tanh(s.c(x))))), a=lin(4, 6), b=lin(5, 6), c=lin(4, 5), d=lin(6, 3)
    ),
    "cat_negative_dim_before_activation": lambda: module_of(
        lambda s, x: s.c(torch.relu(torch.cat((s.a(x), s.b(x)), -1))), a=lin(4, 6), b=lin(4, 2), c=lin(8, 3)
    ),
    "chunk": lambda: module_of(
        _chunked, a=lin(4, 6), b=lin(3, 3)
    ),
    "split": lambda: module_of(
        lambda s, x: (lambda t: s.b(torch.cat([F.relu(t[0]), t[1]], 1)))(torch.split(s.a(x), [2, 4], dim=1)), a=lin(4, 6), b=lin(6, 3)
    ),
    "permute_before_activation": lambda: module_of(
        lambda s, x: s.b(torch.relu(s.a(x).unflatten(1, (2, 3)).transpose(1, 2)).flatten(1)), a=lin(4, 6), b=lin(6, 3)
    ),
    "identity_dropout": lambda: nn.Sequential(lin(4, 6), nn.Identity(), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5), lin(6, 3)),
    "linear_into_linear": lambda: nn.Sequential(lin(4, 7), lin(7, 6), nn.ReLU(), lin(6, 5), lin(5, 3)),
    "wide_linear_without_full_rank": lambda: nn.Sequential(lin(2, 9), lin(9, 6), nn.Tanh(), lin(6, 3)),
    "post_activation_resnet": lambda: module_of(
        lambda s, x: s.c(torch.relu(s.b(torch.relu(s.a(x))) + x)), a=lin(4, 6), b=lin(6, 4), c=lin(4, 3)
    ),
    "activation_of_input": lambda: nn.Sequential(nn.Tanh(), lin(4, 3)),
    "pre_activation_resnet": lambda: module_of(
        lambda s, x: (lambda h: s.c(h + s.b(torch.relu(h))))(s.a(x)), a=lin(4, 5), b=lin(5, 5), c=lin(5, 3)
    ),
    "one_map_two_activations": lambda: module_of(
        lambda s, x: (lambda h: s.c(torch.relu(h) + torch.tanh(h)))(s.a(x)), a=lin(4, 5), c=lin(5, 3)
    ),
    "sum_in_place": lambda: module_of(
        lambda s, x: s.c(torch.relu(operator.iadd(s.a(x), s.b(x)))), a=lin(4, 5), b=lin(4, 5), c=lin(5, 3)
    ),
    "reused_activation": lambda: (lambda r: nn.Sequential(lin(4, 6), r, lin(6, 6), r, lin(6, 3)))(nn.PReLU(init=0.2)),
    "linear_only": lambda: lin(4, 3),
    "crossed_free_maps": lambda: module_of(
        _crossed, a=lin(4, 5), b=lin(4, 5), c=lin(5, 5), d=lin(5, 5), e=lin(5, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_forms(name):
    """The inequality holds, frozen equals built, explicit weights in the module equal both, attacks stay below."""
    module, contraction = ACCEPTED[name](), ("cholesky", "cayley")[len(name) % 2]
    shape = 4 if name != "wide_linear_without_full_rank" else 2
    net = ldlt.Lipschitz(module, bound=0.8, input_shape=shape, contraction=contraction)
    randomise(net, 0)
    net.eval()
    assert ldlt.lmi.residual(net) > -1e-12
    x = torch.randn(7, *net.input_shape)
    y = net(x)
    torch.testing.assert_close(net.freeze()(x), y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.func.functional_call(module, net.explicit(), (x,)), y)
    assert ldlt.attack.lipschitz_lower_bound(net, net.input_shape, starts=6, steps=20).value <= 0.8 * (1 + 1e-9)
    y.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "free"),
    [("post_activation_resnet", [False, True]), ("pre_activation_resnet", [True]),
     ("one_map_two_activations", [False, True]), ("crossed_free_maps", [False, True])],
)  # fmt: skip
def test_free_and_given_groups(name, free):
    plan = ldlt.Lipschitz(ACCEPTED[name](), input_shape=4).plan
    assert sorted(g.free for g in plan.groups.values()) == free


@pytest.mark.parametrize(
    ("name", "rows"),
    [("cat_negative_dim_before_activation", [None, None]), ("chunk", [(0, 1, 2), (3, 4, 5)]),
     ("permute_before_activation", [(0, 3, 1, 4, 2, 5)])],
)  # fmt: skip
def test_rows_keep_their_places(name, rows):
    plan = ldlt.Lipschitz(ACCEPTED[name](), input_shape=4).plan
    assert [g.terms[0].rows for g in plan.groups.values()] == rows


def test_dropout_is_off_in_the_certificate_and_on_in_training():
    net = ldlt.Lipschitz(ACCEPTED["identity_dropout"](), input_shape=4)
    x = torch.randn(64, 4)
    net.train()
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


def _control_flow(s, x):
    return s.a(x) if x.sum() > 0 else s.a(-x)


SOUND = {
    "batch norm", "shared", "positions", "parameter", "overwritten", "overwritten view", "convolution",
    "augmented assignment", "augmented assignment of a view", "alias through modules", "alias through dropout",
    "buffer arithmetic", "map and constant at once", "weight norm",
}  # fmt: skip
"""What is read as it computes: accepted, and its bound holds."""


def _check_sound(module):
    net = ldlt.Lipschitz(module, input_shape=4)
    randomise(net, 0)
    frozen = net.eval().freeze()
    for x in torch.randn(5, 4):
        torch.testing.assert_close(frozen(x[None]), net(x[None]))
        jacobian = torch.autograd.functional.jacobian(lambda z: frozen(z[None])[0], x)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= net.bound * (1 + 1e-9)


def _augmented(s, x):
    h = s.a(x)
    kept = h
    h += s.c(torch.relu(h))
    return s.b(h + kept)


def _augmented_view(s, x):
    h = s.a(x)
    u = h.view(-1, 2, 2)
    u *= 10.0
    return s.b(h)


def _through_modules(s, x):
    h = s.a(x)
    return s.b(h + s.act(s.flat(h)))


def _dropped_and_overwritten(s, x):
    h = s.a(x)
    s.drop(h).mul_(10.0)
    return s.b(h)


def _out(s, x):
    h = s.a(x)
    torch.add(x, x, alpha=50, out=h)
    return s.b(h)


def _mutating(s, x):
    s.buffer.mul_(1.5)
    return s.a(x * s.buffer)


def _normed(norm):
    return nn.Sequential(norm(lin(4, 4)), nn.ReLU(), lin(4, 3))


def _frozen_twice():
    module = module_of(
        lambda s, x: s.c(torch.relu(F.linear(x, s.w)) @ s.w), c=lin(4, 3), w=nn.Parameter(torch.randn(6, 4))
    )
    return module


ODD = {
    "batch norm": lambda: nn.Sequential(lin(4, 6), nn.BatchNorm1d(6), nn.ReLU(), lin(6, 3)),
    "shared": lambda: (lambda a: nn.Sequential(a, nn.ReLU(), a, lin(4, 3)))(lin(4, 4)),
    "positions": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), lin(2, 3), nn.Flatten(), lin(6, 3)),
    "parameter": lambda: module_of(lambda s, x: s.a(x * s.p), a=lin(4, 3), p=nn.Parameter(torch.ones(4))),
    "batch transpose": lambda: module_of(lambda s, x: s.a(x.T.flip(1).T), a=lin(4, 3)),
    "overwritten": lambda: module_of(
        lambda s, x: (lambda h: s.b(h + F.relu(h, inplace=True)))(s.a(x)), a=lin(4, 6), b=lin(6, 3)
    ),
    "overwritten view": lambda: module_of(
        lambda s, x: (lambda h: s.b(h.view(-1, 6).relu_() + h))(s.a(x)), a=lin(4, 6), b=lin(6, 3)
    ),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten(), lin(4, 3)),
    "augmented assignment": lambda: module_of(_augmented, a=lin(4, 4), b=lin(4, 4), c=lin(4, 4)),
    "augmented assignment of a view": lambda: module_of(_augmented_view, a=lin(4, 4), b=lin(4, 4)),
    "alias through modules": lambda: module_of(
        _through_modules, a=lin(4, 4), b=lin(4, 4), flat=nn.Flatten(), act=nn.ReLU(inplace=True)
    ),
    "alias through dropout": lambda: module_of(
        _dropped_and_overwritten, a=lin(4, 4), b=lin(4, 4), drop=nn.Dropout(0.5)
    ),
    "out": lambda: module_of(_out, a=lin(4, 4), b=lin(4, 4)),
    "buffer arithmetic": lambda: module_of(lambda s, x: s.a(x / (s.std + 1e-5)), a=lin(4, 4), std=torch.ones(4)),
    "roll of everything": lambda: module_of(lambda s, x: s.a(x - 0.5 * x.roll(1)), a=lin(4, 4)),
    "rounding division": lambda: module_of(lambda s, x: s.a(torch.div(x, 0.5, rounding_mode="floor")), a=lin(4, 4)),
    "dropout that is always on": lambda: module_of(lambda s, x: s.a(F.dropout(x, 0.9)), a=lin(4, 4)),
    "mutated buffer": lambda: module_of(_mutating, a=lin(4, 4), buffer=torch.tensor(1.0)),
    "functional prelu": lambda: module_of(
        lambda s, x: s.b(F.prelu(s.a(x), s.p)), a=lin(4, 4), b=lin(4, 4), p=nn.Parameter(torch.tensor([0.25]))
    ),
    "map and constant at once": _frozen_twice,
    "weight norm": lambda: _normed(nn.utils.parametrizations.weight_norm),
    "nested network": lambda: nn.Sequential(ldlt.nn.FeedForward(4, [4], 4), lin(4, 3)),
}


@pytest.mark.parametrize("name", ODD)
def test_what_a_tracer_does_not_see_is_refused_or_sound(name):
    module = ODD[name]()
    before = set(vars(module))
    if name in SOUND:
        return _check_sound(module)
    with pytest.raises(ldlt.GraphError):
        ldlt.Lipschitz(module, input_shape=4)
    assert set(vars(module)) == before
    return None


def test_frozen_layers_are_left_alone():
    module = nn.Sequential(lin(4, 5), nn.ReLU(), lin(5, 6), nn.Tanh(), lin(6, 3))
    module[0].requires_grad_(False)
    kept = module[0].weight.clone()
    net = ldlt.Lipschitz(module, bound=0.5, input_shape=4, head="orthogonal")
    assert torch.equal(module[0].weight, kept)
    assert [g.free for g in net.plan.groups.values()] == [False, True]
    assert abs(ldlt.lmi.residual(net)) < 1e-12
    assert ldlt.attack.lipschitz_lower_bound(net, 4, starts=6, steps=20).value <= 0.5 * (1 + 1e-9)


def test_integer_buffers_select_features():
    module = module_of(
        lambda s, x: s.b(torch.relu(s.a(x))[:, s.index]), a=lin(4, 6), b=lin(3, 3), index=torch.tensor([5, 0, 2])
    )
    net = ldlt.Lipschitz(module, input_shape=4, head="orthogonal")
    assert -1e-12 < ldlt.lmi.residual(net) < 1e-9


def test_constants_may_change_after_construction():
    """The rank of a stack depends on the values of the buffers; nothing was decided by it."""
    net = ldlt.Lipschitz(
        module_of(lambda s, x: s.a(x @ s.m), a=lin(5, 3), m=torch.ones(4, 5)), input_shape=4, head="orthogonal"
    )
    with torch.no_grad():
        net.module.m.copy_(torch.diag(torch.tensor([1.0, 5, 5, 5]))[:, [0, 1, 2, 3, 3]] + 0.3)
    assert -1e-12 < ldlt.lmi.residual(net) < 1e-9
    assert ldlt.attack.lipschitz_lower_bound(net, 4, starts=6, steps=20).value <= 1 + 1e-9


@pytest.mark.parametrize("smallest", [1e-2, 1e-6, 1e-14, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_maps_that_come_close_to_losing_rank(smallest, dtype):
    """A map that is not normalised may approach a singular one; the stored weights keep the bound all the same."""
    module = nn.Sequential(lin(4, 4), lin(4, 4)).to(dtype)
    net = ldlt.Lipschitz(module, input_shape=4, head="orthogonal")
    u, _, v = torch.linalg.svd(torch.randn(4, 4))
    with torch.no_grad():
        module[0].weight.copy_(u @ torch.diag(torch.tensor([1.0, 0.7, 0.5, smallest])) @ v)
    plain = net.freeze().double()
    jacobian = plain[1].weight @ plain[0].weight
    tolerance = 1e-7 if dtype == torch.float64 else 1e-4
    assert float(torch.linalg.matrix_norm(jacobian.detach(), 2)) <= 1 + tolerance
    assert torch.isfinite(net(torch.randn(3, 4, dtype=dtype))).all()


def test_slopes_may_change_after_construction():
    module = module_of(
        lambda s, x: s.c(torch.cat([s.act(s.a(x)), x], 1)), a=lin(4, 5), c=lin(9, 3), act=nn.LeakyReLU(0.0)
    )
    net = ldlt.Lipschitz(module, input_shape=4, head="orthogonal")
    for slope in (0.1, 0.0, 0.4):
        module.act.negative_slope = slope
        assert -1e-12 < ldlt.lmi.residual(net) < 1e-9


@pytest.mark.parametrize("name", ["output", "values", "popitem", "update", "keys"])
def test_activations_may_have_any_name(name):
    module = nn.Sequential()
    module.add_module("first", lin(4, 5))
    module.add_module(name, nn.ReLU())
    module.add_module("last", lin(5, 2))
    assert abs(ldlt.lmi.residual(ldlt.Lipschitz(module, input_shape=4, head="orthogonal"))) < 1e-12


def test_control_flow_and_several_inputs_are_refused():
    with pytest.raises(ldlt.GraphError, match="depends on the values"):
        ldlt.Lipschitz(module_of(_control_flow, a=lin(4, 3)), input_shape=4)
    with pytest.raises(ldlt.GraphError, match="one tensor"):
        ldlt.Lipschitz(nn.Bilinear(4, 4, 3), input_shape=4)
    with pytest.raises(ldlt.GraphError, match="output"):  # the second one is no free map
        ldlt.Lipschitz(module_of(lambda s, x: (s.a(x), x), a=lin(4, 3)), input_shape=4)
    with pytest.raises(ldlt.GraphError, match="flatten"):
        ldlt.Lipschitz(module_of(lambda s, x: s.a(x).unflatten(1, (3, 1)), a=lin(4, 3)), input_shape=4)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ldlt.UnsupportedOpError, match="do not divide 5"):
        ldlt.Lipschitz(nn.Sequential(lin(4, 5), ldlt.activations.MaxMin(), lin(5, 3)), input_shape=4)


def test_output_without_a_free_map_needs_a_word():
    module = nn.Sequential(lin(4, 6), nn.ReLU())
    with pytest.raises(ldlt.GraphError, match="output='scale'"):
        ldlt.Lipschitz(module, input_shape=4)
    net = ldlt.Lipschitz(module, bound=0.7, input_shape=4, output="scale")
    randomise(net, 0)
    x = torch.randn(9, 4)
    assert isinstance(net.freeze(), ldlt.Scaled)
    torch.testing.assert_close(net.freeze()(x), net(x))
    assert abs(ldlt.lmi.residual(net)) < 1e-12  # scaled to be tight
    assert ldlt.attack.lipschitz_lower_bound(net, 4, starts=8, steps=30).value <= 0.7 * (1 + 1e-9)
    skip = ldlt.Lipschitz(
        module_of(lambda s, x: x + s.b(torch.relu(s.a(x))), a=lin(4, 6), b=lin(6, 4)),
        input_shape=4,
        output="scale",
    )
    assert abs(ldlt.lmi.residual(skip)) < 1e-12
    assert float(skip.pair_bounds().max()) <= 2**0.5 + 1e-12


def test_unused_layers_are_left_alone():
    """A layer that does not reach the output is no part of the graph."""
    net = ldlt.Lipschitz(module_of(lambda s, x: (s.unused(x), s.a(x))[1], a=lin(4, 3), unused=lin(4, 2)), input_shape=4)
    assert [n.name for n in net.graph.nodes if isinstance(n, Affine)] == ["a"]


def test_the_module_keeps_its_training_mode():
    module = nn.Sequential(lin(4, 6), nn.Dropout(0.1), nn.ReLU(), lin(6, 3))
    module[1].eval()
    ldlt.Lipschitz(module, input_shape=4)
    assert module.training
    assert not module[1].training
