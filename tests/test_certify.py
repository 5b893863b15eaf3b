"""From a network, or a file, to a certificate that another person can check."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn

import ldlt
from ldlt.certificates import METHODS, Region
from ldlt.errors import OptionError, ShapeError, UnsupportedOpError


def _net(activation: type[nn.Module] = nn.ReLU, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), activation(), nn.Linear(12, 12), activation(), nn.Linear(12, 3)).to(dtype)


def _norms(net: nn.Sequential) -> float:
    return math.prod(float(torch.linalg.matrix_norm(net[i].weight.detach().double(), 2)) for i in (0, 2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.GELU])
def test_certify_save_verify(activation: type[nn.Module], dtype: torch.dtype, tmp_path) -> None:
    net = _net(activation, dtype)
    found = ldlt.certify(net, input_shape=5)
    assert (found.status, found.rigorous, found.reason) == ("certified", True, "")
    attack = ldlt.attack.lipschitz_lower_bound(net, 5, starts=16, steps=60)
    assert attack.value <= found.bound * (1 + 1e-6)
    assert found.bound < _norms(net)
    found.save(tmp_path / "net.cert.json")
    assert ldlt.verify(tmp_path / "net.cert.json", net).bound == found.bound
    with torch.no_grad():
        net[2].weight[3, 4] = torch.nextafter(net[2].weight[3, 4], torch.tensor(9.0, dtype=dtype))
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.verify(tmp_path / "net.cert.json", net)


def test_dead_neurons_behind_dead_neurons() -> None:
    """A neuron that reads nothing but neurons without an input is left out, and the rest is proven."""
    net = _net(nn.Tanh)
    with torch.no_grad():
        net[0].weight[2] = 0.0
        net[2].weight[4] = 0.0
        net[2].weight[5, torch.arange(12) != 2] = 0.0  # reads only the dead one
    found = ldlt.certify(net, 5)
    assert found.rigorous
    assert ldlt.verify(found, net).rigorous


def test_product_of_norms_is_proven() -> None:
    net = _net()
    found = ldlt.certify(net, 5, method="product")
    assert found.rigorous
    assert found.bound == pytest.approx(_norms(net), rel=1e-6)
    assert ldlt.verify(found, net).bound == found.bound


def test_radii_take_a_certificate() -> None:
    net = _net()
    found = ldlt.certify(net, 5)
    logits = net(torch.randn(7, 5))
    radius = ldlt.certified_radius(logits, found)
    assert torch.equal(radius, ldlt.certified_radius(logits, found.pair_bounds()))
    top = logits.topk(2).values.double()
    assert bool((radius >= (top[:, 0] - top[:, 1]) / (math.sqrt(2) * found.bound) * (1 - 1e-9)).all())


def test_networks_built_here_keep_their_bound() -> None:
    for net in (ldlt.nn.FeedForward(5, [16] * 3, 3, 2.0), ldlt.nn.Residual(5, [16] * 3, 3, 0.5)):
        found = ldlt.certify(net)  # without a search
        assert found.rigorous
        assert net.declared_bound * 0.9 < found.bound <= net.declared_bound * (1 + 1e-5)
        assert found.method == "by construction"


def test_local_bounds_are_tighter() -> None:
    net = _net()
    x = torch.randn(5)
    here = ldlt.certify(net, 5, region=Region("ball", x, torch.tensor(0.05)))
    assert here.bound <= ldlt.certify(net, 5).bound
    assert not here.rigorous
    points = x + 0.05 * torch.nn.functional.normalize(torch.randn(200, 5), dim=1)
    slopes = (net(points) - net(x[None])).norm(dim=1) / (points - x).norm(dim=1)
    assert float(slopes.detach().max()) <= here.bound * (1 + 1e-4)


def test_time_limit_and_interruption() -> None:
    """No time at all, and Ctrl-C at the first step: still a proof, not above the product of norms."""
    net = _net()

    def interrupt(step) -> None:
        raise KeyboardInterrupt

    for options in ({"time_limit": 0.0}, {"progress": interrupt}):
        found = ldlt.certify(net, 5, **options)
        assert found.rigorous
        assert found.bound <= _norms(net) * (1 + 1e-6)


def test_the_proof_is_part_of_the_time_limit(monkeypatch) -> None:
    """What the proof is expected to take is not left to the search."""
    module = importlib.import_module("ldlt.certificates.certifier")
    asked = []
    search = module.minimise
    monkeypatch.setattr(module, "_proof_seconds", lambda size: 7.0)
    monkeypatch.setattr(module, "minimise", lambda p, **o: asked.append(o["time_limit"]) or search(p, **o))
    assert ldlt.certify(_net(), 5, time_limit=10.0).rigorous
    assert 0 <= asked[0] <= 3.0


def test_what_the_search_says_is_not_trusted(monkeypatch) -> None:
    """Multipliers that prove nothing, and a bound that is far too small: the product of norms is proven instead."""
    module = importlib.import_module("ldlt.certificates.certifier")
    search = module.minimise

    def wrong(problem, **options):
        found = search(problem, **options)
        return type(found)(0.01, {n: m * 0.01 for n, m in found.multipliers.items()}, 0.0, True, "")

    monkeypatch.setattr(module, "minimise", wrong)
    net = _net()
    found = ldlt.certify(net, 5)
    assert found.bound == pytest.approx(_norms(net), rel=1e-6)


def test_onnx_file(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    net = _net()
    parts = []
    for i in (0, 2, 4):
        parts += [onnx.numpy_helper.from_array(t.detach().numpy(), f"{n}{i}") for n, t in net[i].named_parameters()]
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "weight0", "bias0"], ["a"], transB=1),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("Gemm", ["b", "weight2", "bias2"], ["c"], transB=1),
        onnx.helper.make_node("Relu", ["c"], ["d"]),
        onnx.helper.make_node("Gemm", ["d", "weight4", "bias4"], ["y"], transB=1),
    ]
    value = onnx.helper.make_tensor_value_info
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(nodes, "net", [value("x", kind, ["n", 5])], [value("y", kind, ["n", 3])], parts)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), tmp_path / "net.onnx")
    found = ldlt.certify(tmp_path / "net.onnx")
    assert found.rigorous
    assert found.bound == pytest.approx(ldlt.certify(net, 5).bound, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "guess"}, OptionError),
        ({"input_shape": None}, ShapeError),
        ({"input_shape": (0,)}, ShapeError),
        ({"region": 0.1}, OptionError),
        ({"region": Region("ball", torch.zeros(4), torch.ones(()))}, ShapeError),
        ({"tolerance": 0.0}, OptionError),
        ({"time_limit": -1.0}, OptionError),
        ({"time_limit": "1"}, OptionError),
        ({"model": "nowhere.onnx"}, ldlt.LdltError),
        ({"model": 3}, ldlt.LdltError),
        ({"model": nn.Sequential(nn.Linear(5, 5), nn.LogSoftmax(1))}, UnsupportedOpError),
    ],
    ids=str,
)
def test_refusals(options, error) -> None:
    with pytest.raises(error):
        ldlt.certify(**{"model": _net(), "input_shape": 5, **options})


@pytest.mark.parametrize("method", METHODS)
def test_constant_networks_and_overflow(method, tmp_path) -> None:
    """A constant network has every positive bound; weights that overflow have none. Both are said, not raised."""
    net = _net().double()
    with torch.no_grad():
        net[2].weight.zero_()
    found = ldlt.certify(net, 5, method=method)
    assert found.status == "certified"
    assert 0 < found.bound < 1e-9
    found.save(tmp_path / "net.json")
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1e200)
    found = ldlt.certify(net, 5, method=method)
    assert found.status == "not certified"
    assert found.reason
    assert found.bound == float("inf")
