"""From a network, or a file, to a certificate that another person can check."""

from __future__ import annotations

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.GELU])
def test_certify_save_verify(activation: type[nn.Module], dtype: torch.dtype, tmp_path) -> None:
    net = _net(activation, dtype)
    found = ldlt.certify(net, input_shape=5)
    assert (found.status, found.rigorous, found.reason) == ("certified", True, "")
    attack = ldlt.attack.lipschitz_lower_bound(net, 5, starts=16, steps=60)
    assert attack.value <= found.bound * (1 + 1e-6)
    assert found.bound < ldlt.certify(net, 5, method="product").bound
    found.save(tmp_path / "net.cert.json")
    again = ldlt.verify(tmp_path / "net.cert.json", net)
    assert again.bound == found.bound
    with torch.no_grad():
        net[2].weight[3, 4] = torch.nextafter(net[2].weight[3, 4], torch.tensor(9.0, dtype=dtype))
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.verify(tmp_path / "net.cert.json", net)


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
        found = ldlt.certify(net)
        assert found.rigorous
        assert net.declared_bound * 0.9 < found.bound <= net.declared_bound * (1 + 1e-5)
        assert found.method == "by construction"


def test_methods_agree() -> None:
    net = _net()
    pytest.importorskip("cvxpy")
    bounds = {method: ldlt.certify(net, 5, method=method).bound for method in METHODS}
    assert bounds["optimal"] == pytest.approx(bounds["sdp"], rel=1e-3)
    assert bounds["optimal"] <= bounds["eclipse"] * (1 + 1e-6)
    assert bounds["eclipse"] <= bounds["product"] * (1 + 1e-6)


def test_local_bounds_are_tighter() -> None:
    net = _net()
    x = torch.randn(5)
    whole = ldlt.certify(net, 5)
    here = ldlt.certify(net, 5, region=Region("ball", x, torch.tensor(0.05)))
    assert here.bound <= whole.bound
    assert not here.rigorous
    assert here.region is not None
    points = x + 0.05 * torch.nn.functional.normalize(torch.randn(200, 5), dim=1)
    slopes = (net(points) - net(x[None])).norm(dim=1) / (points - x).norm(dim=1)
    assert float(slopes.detach().max()) <= here.bound * (1 + 1e-4)


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


def test_refusals() -> None:
    net = _net()
    with pytest.raises(OptionError, match="method must be one of"):
        ldlt.certify(net, 5, method="guess")
    with pytest.raises(ShapeError, match="input_shape is needed"):
        ldlt.certify(net)
    with pytest.raises(ShapeError, match="positive ints"):
        ldlt.certify(net, (0,))
    with pytest.raises(OptionError, match="must be a ldlt.Region"):
        ldlt.certify(net, 5, region=0.1)
    with pytest.raises(OptionError, match="network or certificate"):
        ldlt.certified_radius(net(torch.randn(2, 5)), 3.0)
    with pytest.raises(ldlt.LdltError, match="cannot be read"):
        ldlt.certify("nowhere.onnx")
    with pytest.raises(ldlt.LdltError, match="path or bytes"):
        ldlt.certify(3)
    with pytest.raises(UnsupportedOpError):
        ldlt.certify(nn.Sequential(nn.Linear(5, 5), nn.LogSoftmax(1)), 5)


@pytest.mark.parametrize("method", ["optimal", "eclipse", "product"])
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
