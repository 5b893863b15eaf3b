"""A certificate for a network in an ONNX file: made, checked, and what happens when somebody changes it.

Run:  python examples/certify_onnx.py --out pictures

1. Write a small trained network as an ONNX file. Any tool may have written it; nothing in the file is executed.
2. Certify it: the product of norms, for comparison, and the best multipliers. Both come with a proof.
3. Save the certificate and verify it from the two files alone, as somebody would who trusts neither.
4. Forge it: a bound that is too small, with the checksum of the file made right; and a network of which one weight was
   changed. Both are rejected.

On the command line:  ldlt certify net.onnx --out net.cert.json  and  ldlt verify net.cert.json net.onnx
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import ldlt


@dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
        bounds: Bound by method, and the slope that an attack found.
        verified: Bound that was proven again from the files.
        rejected: Why the two forgeries were rejected.
    """

    bounds: dict[str, float]
    verified: float
    rejected: dict[str, str]


def trained(seed: int, steps: int) -> nn.Sequential:
    """A plain network that has learnt a little."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    x = torch.randn(256, 8)
    labels = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0).long()
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimiser.step()
    return net


def write(net: nn.Sequential, path: Path) -> None:
    """The network as ONNX nodes; `torch.onnx.export(..., external_data=False)` does the same."""
    nodes, weights, value = [], [], "x"
    for index, layer in enumerate(net):
        target = "y" if index == len(net) - 1 else f"v{index}"
        if isinstance(layer, nn.Linear):
            names = [f"weight{index}", f"bias{index}"]
            pair: tuple[Tensor, Tensor] = (layer.weight, layer.bias)
            weights += [numpy_helper.from_array(t.detach().numpy(), n) for t, n in zip(pair, names, strict=True)]
            nodes.append(helper.make_node("Gemm", [value, *names], [target], name=f"linear{index}", transB=1))
        else:
            nodes.append(helper.make_node("Relu", [value], [target], name=f"relu{index}"))
        value = target
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", k]) for n, k in (("x", 8), ("y", 3))]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


def forge(certificate: Path, forged: Path, factor: float) -> None:
    """The same certificate with its bound multiplied, and a checksum that fits."""
    content = json.loads(certificate.read_text())
    statement = content["statement"]
    statement["bound"] = float.hex(factor * float.fromhex(statement["bound"]))
    canonical = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    content["checksum"] = hashlib.sha256(canonical.encode("ascii")).hexdigest()
    forged.write_text(json.dumps(content, indent=1) + "\n")


def change_one_weight(network: Path, changed: Path) -> None:
    """The same network with one weight moved by a millionth."""
    model = onnx.load(network)
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, 0] += 1e-6
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, model.graph.initializer[0].name))
    onnx.save(model, changed)


def rejection(certificate: Path, network: Path) -> str:
    """Why the pair is rejected."""
    try:
        ldlt.verify(certificate, ldlt.read_onnx(network).module)
    except ldlt.CertificateError as error:
        return str(error)
    raise RuntimeError("a forgery was accepted")


def draw(path: Path, bounds: dict[str, float]) -> None:
    """The bounds as bars, above what an attack found."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    colors = ["C3" if name == "attack" else "C0" for name in bounds]
    bars = axes.barh(list(bounds), list(bounds.values()), color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="slope", title="upper bounds (blue) and the steepest pair of inputs found (red)")
    axes.set_xlim(0, 1.1 * max(bounds.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, steps: int = 100, out: Path | None = None) -> Result:
    """Run the four steps in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        network, saved = Path(folder) / "net.onnx", Path(folder) / "net.cert.json"
        write(trained(seed, steps), network)
        bounds = {"product": ldlt.certify(network, method="product").bound}
        certificate = ldlt.certify(network)
        bounds["optimal"] = certificate.bound
        bounds["attack"] = ldlt.attack.lipschitz_lower_bound(
            ldlt.read_onnx(network).module, 8, starts=32, steps=50
        ).value
        for name, value in bounds.items():
            print(f"{name:8s} {value:9.4f}")
        certificate.save(saved)
        verified = ldlt.verify(saved, ldlt.read_onnx(network).module).bound
        print(f"verified from the files: {verified:.4f}, rigorous: {certificate.rigorous}")

        forged, changed = Path(folder) / "forged.json", Path(folder) / "changed.onnx"
        forge(saved, forged, 0.9)
        change_one_weight(network, changed)
        rejected = {"bound lowered": rejection(forged, network), "weight changed": rejection(saved, changed)}
        for name, reason in rejected.items():
            print(f"{name}: rejected, {reason}")
    if out is not None:
        draw(out / "certify_onnx.png", bounds)
    return Result(bounds, verified, rejected)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
