"""A good citizen of PyTorch, and clear words for bad arguments."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import ldlt
from random_graphs import RandomGraph, randomise

KINDS = {
    "feed_forward": lambda **o: ldlt.nn.FeedForward(5, [16, 12], 3, **o),
    "residual": lambda **o: ldlt.nn.Residual(5, [16, 12], 3, **o),
    "gelu": lambda **o: ldlt.nn.Residual(5, [16, 12], 3, activation=nn.GELU, **o),
    "leaky": lambda **o: ldlt.nn.FeedForward(5, [16, 12], 3, activation=nn.LeakyReLU, **o),
}
CONTRACTIONS = ["cholesky", "symmetric", "cayley"]


@pytest.fixture(params=KINDS)
def net(request):
    return KINDS[request.param]()


def test_copies_are_equal_and_independent(net):
    x = torch.randn(4, 5)
    expected = net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            next(other.parameters()).add_(1.0)
        assert not torch.equal(other(x), expected)
    assert torch.equal(net(x), expected)


@pytest.mark.parametrize("seed", range(5))
def test_any_graph_can_be_pickled(seed):
    module = RandomGraph(seed)
    net = ldlt.Lipschitz(module, input_shape=module.width_in)
    x = torch.randn(3, module.width_in)
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))


def test_state_dict_round_trip(net):
    randomise(net, 5)
    other = copy.deepcopy(net)
    randomise(other, 6)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(4, 5)
    assert torch.equal(other(x), net(x))


def test_a_loaded_bound_is_the_one_reported():
    small, large = ldlt.nn.FeedForward(3, [4], 2, bound=0.3), ldlt.nn.FeedForward(3, [4], 2, bound=7.0)
    small.load_state_dict(large.state_dict())
    assert small.bound == 7.0


@pytest.mark.parametrize("bound", [0.1, 1 / 3, 1.7, 12345.678])
def test_the_bound_in_use_is_never_above_the_declared_one(bound):
    net = ldlt.nn.FeedForward(3, [4], 2, bound=bound)
    assert net.bound == bound
    assert bound * (1 - 1e-6) < float(net._bound()) <= bound


def test_precision_and_device_follow_the_module(net):
    x = torch.randn(4, 5)
    single = net(x)
    net.double()
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    torch.testing.assert_close(net(x.double()).float(), single, rtol=1e-3, atol=1e-4)
    net.to(torch.float32)
    assert net(x).dtype == torch.float32
    meta = copy.deepcopy(net).to("meta")
    assert meta(torch.empty(4, 5, device="meta")).shape == (4, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(net):
    x = torch.randn(4, 5)
    torch.testing.assert_close(net.cuda()(x.cuda()).cpu(), net.cpu()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind, contraction):
    net = KINDS[kind](contraction=contraction, train_bound=True)
    net(torch.randn(64, 5)).pow(3).sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind, contraction):
    net = KINDS[kind](contraction=contraction, dtype=torch.float64, train_bound=True)
    randomise(net, 1, 0.6)
    x = torch.randn(8, 5, dtype=torch.float64)
    names = [n for n, _ in net.named_parameters()]

    def loss():
        return net(x).square().sum()

    net.zero_grad()
    loss().backward()
    direction = {n: torch.randn_like(p) for n, p in net.named_parameters()}
    slope = sum(float((p.grad * direction[n]).sum()) for n, p in net.named_parameters())
    step, values = 1e-6, []
    for sign in (1, -1):
        moved = copy.deepcopy(net)
        with torch.no_grad():
            for n in names:
                moved.get_parameter(n).add_(sign * step * direction[n])
            values.append(float(moved(x).square().sum()))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_vmap_over_stacked_parameters(contraction):
    nets = [ldlt.nn.Residual(5, [16, 12], 3, contraction=contraction, dtype=torch.float64) for _ in range(3)]
    parameters, buffers = stack_module_state(nets)
    base = copy.deepcopy(nets[0])
    x = torch.randn(7, 5, dtype=torch.float64)
    out = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    out.square().sum().backward()
    for i, one in enumerate(nets):
        single = one(x)
        torch.testing.assert_close(out[i], single)
        single.square().sum().backward()
        for name, p in one.named_parameters():
            torch.testing.assert_close(parameters[name].grad[i], p.grad, rtol=1e-9, atol=1e-11)


def test_second_derivatives_for_gradient_penalties():
    net = ldlt.nn.Residual(4, [8, 8], 1, activation=nn.Tanh, dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    assert all(p.grad is not None for n, p in net.named_parameters() if n != "module.head.bias")


COMPILED = {
    "feed_forward": lambda: ldlt.nn.FeedForward(5, [16, 12], 3),
    "residual": lambda: ldlt.nn.Residual(5, [16, 12], 3),
    "cayley": lambda: ldlt.nn.Residual(5, [16, 12], 3, contraction="cayley"),
    "prelu": lambda: ldlt.nn.FeedForward(5, [16, 12], 3, activation=nn.PReLU),
    "traced": lambda: ldlt.Lipschitz(
        nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(0.1), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), input_shape=5
    ),
}


@pytest.mark.filterwarnings("ignore")  # the tracer of torch.compile sets off warnings of its own
@pytest.mark.parametrize("name", COMPILED)
def test_compile(name):
    """One graph, same outputs and gradients, in training and in evaluation (inductor itself is in the slow tests)."""
    _check_compiled("aot_eager", COMPILED[name]().float())


@pytest.mark.filterwarnings("ignore")
def test_slopes_that_changed_are_seen_by_compiled_networks():
    torch._dynamo.reset()
    net = COMPILED["traced"]().double()
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(8, 5, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), net(x))
    net.module[1].negative_slope = 0.6
    torch.testing.assert_close(compiled(x), net(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["feed_forward", "residual", "traced"])
def test_compile_with_inductor(name):
    _check_compiled("inductor", COMPILED[name]().float())


def _check_compiled(backend, net):
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=backend, fullgraph=True)  # a graph break is an error
    x = torch.randn(8, 5, dtype=torch.float32)
    for mode in (True, False):
        net.train(mode)
        net.zero_grad()
        compiled(x).square().sum().backward()
        found = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        y = net(x)
        y.square().sum().backward()
        torch.testing.assert_close(compiled(x), y, rtol=1e-4, atol=1e-5)
        for a, p in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-4)


DATA = torch.randn(8, 5, generator=torch.Generator().manual_seed(7))


def _steps(wrap, data):
    torch.manual_seed(0)
    net = wrap(ldlt.nn.Residual(5, [16, 12], 3))
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimiser.zero_grad()
        net(data).square().mean().backward()
        optimiser.step()
    return [p.detach().numpy() for p in net.parameters()]


def _ddp_worker(rank, path, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    queue.put((rank, _steps(nn.parallel.DistributedDataParallel, DATA[4 * rank : 4 * rank + 4])))
    dist.barrier()  # a process that leaves early would abort the other one
    dist.destroy_process_group()


def _agree(found):
    for ours, alone in zip(found, _steps(lambda net: net, DATA), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(alone), rtol=1e-4, atol=1e-5)


def test_distributed_data_parallel():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _agree(_steps(nn.parallel.DistributedDataParallel, DATA))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_with_two_processes(tmp_path):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_ddp_worker, args=(r, str(tmp_path / "store"), queue)) for r in range(2)]
    for w in workers:
        w.start()
    results = dict(queue.get() for _ in workers)
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    for found in results.values():
        _agree(found)


def test_frozen_is_the_users_own_class():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    net = ldlt.Lipschitz(Mine(), input_shape=4)
    plain = net.freeze()
    assert type(plain) is Mine
    assert {type(m).__name__ for m in plain.modules()} == {"Mine", "Linear"}
    x = torch.randn(9, 4)
    torch.testing.assert_close(plain(x), net(x), rtol=1e-5, atol=1e-6)
    assert set(net.explicit()) == {n for n, _ in plain.named_parameters()}
    with torch.no_grad():
        plain.a.weight.zero_()
    assert net.module.a.weight.abs().sum() > 0


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_equals_built_when_the_free_matrices_are_huge(kind, contraction):
    """Frozen weights are computed in float64; the function must be the one that was trained in float32."""
    net = KINDS[kind](contraction=contraction)
    randomise(net, 0, 30.0 if contraction != "cayley" else 3.0)
    x = torch.randn(9, 5)
    y = net(x).detach()
    assert float((net.freeze()(x) - y).detach().norm()) <= 2e-3 * float((y - y.mean(0)).norm() + y.norm())


def test_train_and_eval_agree_after_a_step():
    """No cache that could go stale."""
    net = ldlt.nn.FeedForward(5, [8], 2)
    optimiser = torch.optim.SGD(net.parameters(), 1.0)
    x = torch.randn(6, 5)
    for _ in range(3):
        net.train()
        optimiser.zero_grad()
        net(x).square().sum().backward()
        optimiser.step()
        trained = net(x)
        net.eval()
        assert torch.equal(net(x), trained)


def test_multipliers_by_node():
    net = ldlt.nn.FeedForward(5, [8, 4], 2)
    found = net.multipliers()
    assert list(found) == ["_1", "_3"]
    assert found["_1"].shape == (8,)
    fixed = ldlt.nn.FeedForward(5, [8], 2, train_multipliers=False)
    assert not fixed.log_multiplier["at__1"].requires_grad


@pytest.mark.parametrize(("floor", "ceiling"), [(None, None), (0.5, None), (None, 3.0), (0.5, 3.0)])
def test_trained_bound_stays_between_its_limits(floor, ceiling):
    net = ldlt.nn.FeedForward(
        3, [8], 2, bound=1.0, train_bound=True, bound_floor=floor, bound_ceiling=ceiling, dtype=torch.float64
    )
    assert net.bound == pytest.approx(1.0)
    for push in (+1, -1):
        optimiser = torch.optim.SGD(net.parameters(), 5.0)
        for _ in range(60):
            optimiser.zero_grad()
            (-push * net._bound().log()).backward()
            optimiser.step()
        assert (floor or 0.0) <= net.bound <= (ceiling or math.inf)
        assert ldlt.lmi.residual(net) > -1e-9
    with pytest.raises(ldlt.BoundError):
        ldlt.nn.FeedForward(3, [8], 2, bound=9.0, train_bound=True, bound_ceiling=3.0)


@pytest.mark.parametrize("bound", [0, -1.0, math.nan, math.inf, "one", None])
def test_bad_bounds(bound):
    with pytest.raises(ldlt.BoundError, match="bound must be"):
        ldlt.nn.FeedForward(3, [4], 2, bound=bound)


@pytest.mark.parametrize("shape", [0, -3, (), (3, 0), "3", 2.5, None])
def test_bad_input_shapes(shape):
    with pytest.raises(ldlt.ShapeError, match="input_shape"):
        ldlt.Lipschitz(nn.Linear(3, 2), input_shape=shape)


def test_input_shape_that_does_not_fit():
    with pytest.raises(ldlt.ShapeError):
        ldlt.Lipschitz(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), input_shape=5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"contraction": "qr"}, "contraction must be one of"),
        ({"head": "softmax"}, "head must be one of"),
        ({"init": "xavier"}, "init must be one of"),
        ({"output": "any"}, "output must be"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"gain": -1}, "gain must be"),
        ({"placing": math.inf}, "placing must be"),
        ({"placing": "half"}, "placing must be"),
        ({"bound_floor": 0.1}, "train_bound=True"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(ldlt.OptionError, match=word):
        ldlt.nn.FeedForward(3, [4], 2, **options)


def test_empty_modules_and_things_that_are_no_module():
    for module in (nn.Sequential(), nn.ReLU(), nn.Sequential(nn.Identity(), nn.Tanh())):
        with pytest.raises(ldlt.GraphError, match="no Linear layer"):
            ldlt.Lipschitz(module, input_shape=3)
    with pytest.raises(ldlt.GraphError, match=r"torch\.nn\.Module"):
        ldlt.Lipschitz(lambda x: x, input_shape=3)
    with pytest.raises(ldlt.GraphError, match="already"):
        ldlt.Lipschitz(ldlt.nn.FeedForward(3, [4], 2), input_shape=3)
    with pytest.raises(ldlt.ShapeError, match="at least one hidden"):
        ldlt.nn.Residual(3, [], 2)
    with pytest.raises(ldlt.ShapeError, match="positive integers"):
        ldlt.nn.FeedForward(3, [0], 2)


@pytest.mark.parametrize("x", [[1.0, 2.0, 3.0], None, torch.tensor(1.0), torch.randn(2, 4), torch.randn(2, 3, 1)])
def test_bad_inputs(x):
    with pytest.raises(ldlt.ShapeError, match="input must"):
        ldlt.nn.FeedForward(3, [4], 2)(x)


def test_precisions_that_factorisations_do_not_have():
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ldlt.GraphError, match="float32"):
            ldlt.Lipschitz(nn.Linear(3, 2).to(dtype), input_shape=3)
    with pytest.raises(ldlt.GraphError, match="meta"):
        ldlt.Lipschitz(nn.Linear(3, 2, device="meta"), input_shape=3)
    with pytest.raises(ldlt.ShapeError, match="list of widths"):
        ldlt.nn.FeedForward(3, 16, 2)
    with pytest.raises(ldlt.OptionError, match="no brackets"):
        ldlt.nn.FeedForward(3, [16], 2, activation=nn.ReLU())
    with pytest.raises(ldlt.OptionError, match="contraction must be"):
        ldlt.nn.FeedForward(3, [16], 2, contraction=["cayley"])


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_autocast_keeps_the_factorisations_in_full_precision(contraction):
    net = ldlt.nn.FeedForward(5, [16, 12], 3, contraction=contraction)
    x = torch.randn(32, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), net(x), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_autocast_keeps_factored_weights_in_full_precision(contraction):
    """Batches smaller than the layers, and layers wider than the whole numbers that bfloat16 knows."""
    torch.manual_seed(0)
    net = ldlt.nn.FeedForward(5, [300] * 4, 3, contraction=contraction)
    if contraction == "cayley":  # so that rows are exchanged in its factorisation
        with torch.no_grad():
            for skew in net.skew.values():
                skew.normal_()
    x = torch.randn(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
    y.float().sum().backward()
    torch.testing.assert_close(y.float(), net(x), rtol=0.1, atol=0.05)
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)


def test_load_explicit_takes_maps_that_are_not_normalised_and_slopes_from_its_argument():
    def make():
        return nn.Sequential(
            nn.Linear(4, 5), nn.Linear(5, 6), nn.PReLU(init=0.1 + 0.5 * torch.rand(()).item()), nn.Linear(6, 3)
        )

    a, b = (ldlt.Lipschitz(make().double(), input_shape=4) for _ in range(2))
    b.load_explicit(a.explicit(), a.multipliers())
    x = torch.randn(7, 4, dtype=torch.float64)
    torch.testing.assert_close(a(x), b(x), rtol=1e-9, atol=1e-10)
    before = b(x)
    bad = {k: -v for k, v in a.multipliers().items()}
    with pytest.raises(ldlt.InfeasibleError, match="positive"):
        b.load_explicit(a.explicit(), bad)
    with pytest.raises(ldlt.InfeasibleError):
        b.load_explicit({k: 100 * v for k, v in a.explicit().items()}, a.multipliers())
    assert torch.equal(b(x), before)  # a refusal changes nothing


def test_empty_batch():
    assert ldlt.nn.FeedForward(3, [4], 2)(torch.empty(0, 3)).shape == (0, 2)


def test_errors_survive_pickling():
    for error in (ldlt.UnsupportedOpError("node", "why"), ldlt.MissingExtraError("package", "extra")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_same_seed_same_network():
    def make():
        torch.manual_seed(3)
        return ldlt.nn.Residual(5, [16, 12], 3)

    for a, b in zip(make().parameters(), make().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
@pytest.mark.parametrize("depth", [4, 128])
def test_signal_and_gradient_do_not_die_with_depth(activation, depth):
    net = ldlt.nn.FeedForward(16, [32] * depth, 4, activation=activation, head="orthogonal")
    x = torch.randn(64, 16, requires_grad=True)
    y = net(x)
    assert float((y - y.mean(0)).norm(dim=1).mean().detach()) > 0.05
    (slope,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), x)
    assert float(slope.norm(dim=1).mean()) > 0.05


def test_orthogonal_init_and_keep():
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    before = copy.deepcopy(module.state_dict())
    ldlt.Lipschitz(module, input_shape=3, init="keep")
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    ldlt.Lipschitz(module, input_shape=3, init="orthogonal", gain=0.5, alpha=4.0)
    torch.testing.assert_close(module[0].weight.T @ module[0].weight, torch.eye(3), rtol=1e-5, atol=1e-5)
    assert torch.equal(module[0].bias, before["0.bias"])


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_small_batches_use_factored_weights_with_the_same_result(kind, contraction):
    """Fewer samples than neurons: solves are applied to the batch; outputs and gradients stay the same."""
    net = KINDS[kind](contraction=contraction, dtype=torch.float64)
    randomise(net, 2)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    net(x).square().sum().backward()
    found = [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]
    net.zero_grad()
    x.grad = None
    functional_call(net.module, net.explicit(), (x,)).square().sum().backward()
    for a, b in zip(found, [x.grad, *(p.grad for p in net.parameters())], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_factored_weights_are_ordinary_tensors_to_everything_but_linear():
    net = ldlt.nn.FeedForward(5, [16, 16], 2)
    found = net._sweep(batch=3).weights
    factored = found["2.weight"]
    assert isinstance(factored, ldlt.engine.lazy.FactoredWeight)
    dense = net.explicit()["2.weight"]
    torch.testing.assert_close(factored + 0, dense)
    torch.testing.assert_close(torch.relu(factored), torch.relu(dense))
    torch.testing.assert_close(factored @ torch.ones(16), dense.sum(1))
    assert factored.shape == (16, 16)
    x = torch.randn(2, 4, 16)
    torch.testing.assert_close(nn.functional.linear(x, factored), nn.functional.linear(x, dense))


def test_biases_are_placed_in_units_of_the_default_place():
    """The means of the pre-activations on standard normal inputs scale with ``placing``."""

    def means(placing):
        torch.manual_seed(0)
        net = ldlt.nn.FeedForward(6, [64, 64], 2, placing=placing)
        first = net.freeze()[0](torch.randn(20_000, 6))
        return first.mean().item(), net.freeze()[2](torch.relu(first)).mean().item()

    one = means(1.0)
    assert min(one) > 0.1
    for placing in (0.0, 0.5):
        found = means(placing)
        assert found[0] == pytest.approx(placing * one[0], abs=0.02)
        assert (found[1] > 0.05) == (placing > 0)  # the spread of the second layer depends on the first


@pytest.mark.parametrize("output", ["free", "scale"])
def test_weights_can_be_computed_once(output, monkeypatch):
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), *([nn.Tanh()] if output == "scale" else []))
    net = ldlt.Lipschitz(module, input_shape=4, output=output).eval()
    x = torch.randn(5, 4)
    count = []
    sweep = ldlt.Lipschitz._sweep
    monkeypatch.setattr(ldlt.Lipschitz, "_sweep", lambda *a, **k: count.append(1) or sweep(*a, **k))
    with torch.no_grad():
        expected = net(x)
        count.clear()
        with net.cached():
            torch.testing.assert_close(net(x), expected)
            with net.cached():
                torch.testing.assert_close(net(x), expected)
            torch.testing.assert_close(net(x), expected)
            assert len(count) == 1
            module[0].weight.mul_(2)
            changed = net(x)
            assert len(count) == 2
            assert copy.deepcopy(net)._cache is None
        assert net._cache is None
        torch.testing.assert_close(changed, net(x))


def test_weights_that_are_computed_once_cannot_be_trained():
    net = ldlt.nn.FeedForward(4, [6], 3)
    x = torch.randn(5, 4)
    with pytest.raises(ldlt.LdltError, match="no gradients"), torch.no_grad(), net.cached():
        pass
    net.eval()
    with pytest.raises(ldlt.LdltError, match="no gradients"), net.cached():
        pass
    with torch.no_grad(), net.cached():
        with torch.enable_grad(), pytest.raises(ldlt.LdltError, match="no gradients"):
            net(x)
        net.train()
        with pytest.raises(ldlt.LdltError, match="no gradients"):
            net(x)
        net.eval()
    net.requires_grad_(False)
    x.requires_grad_()
    with net.cached():
        net(x).sum().backward()
    assert x.grad is not None


def test_networks_that_would_be_too_large_are_refused():
    convolution = nn.Conv2d(3, 64, 3, padding=1)  # zeros around it: a dense map, unless it is local
    module = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ldlt.GraphError, match="circular"):
        ldlt.Lipschitz(module, input_shape=(3, 64, 64), convolutions="normalised")
