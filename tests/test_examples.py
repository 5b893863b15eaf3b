"""The examples run, and show what they claim."""

from __future__ import annotations

import importlib.util
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ldlt.errors import OptionError
from ldlt_bench.data import UnavailableSetError

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_lower_the_bound(capsys):
    pytest.importorskip("sklearn")
    lines = load("lower_the_bound").main(epochs=20)
    assert lines["start"][0.0] == pytest.approx(lines["plain"][0.0], abs=0.005)  # the same network
    assert lines["fifth"][0.0] > 0.9
    assert lines["fifth"][0.5] > lines["plain"][0.5] + 0.1
    assert "a fifth of the bound" in capsys.readouterr().out


def picture(folder: Path, name: str) -> bool:
    """Whether the picture was drawn; matplotlib is in the extra ``figures``."""
    return (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_certified_tabular(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    results = load("certified_tabular").main(epochs=30, out=tmp_path)
    assert picture(tmp_path, "certified_tabular")
    for result in results.values():
        assert result.certified[0] == pytest.approx(result.accuracy)
        assert all(a >= b for a, b in pairwise(result.certified))
    assert results[0.25].accuracy > 0.9
    assert results[2.0].certified[-1] > results[0.25].certified[-1]  # asked for more, got more


def test_wrap_your_resnet(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    results = load("wrap_your_resnet").main(epochs=4, out=tmp_path)
    assert picture(tmp_path, "wrap_your_resnet")
    plain, wrapped = results["plain"], results["wrapped"]
    assert wrapped.bound <= 1 + 1e-5
    assert max(wrapped.slopes) <= 1 + 1e-5
    assert plain.bound >= plain.slopes[-1] > wrapped.bound
    assert wrapped.certified[0.25] > plain.certified[0.25]


def test_wasserstein(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    module = load("wasserstein")
    results = module.main(steps=40, count=60, out=tmp_path)
    assert picture(tmp_path, "wasserstein")
    for result in results.values():
        assert max(result.history) <= result.exact * (1 + 1e-9)  # a lower bound at every step
        assert result.ratio > 0.9


def test_robust_regression(tmp_path):
    pytest.importorskip("matplotlib")
    results = load("robust_regression").main(seeds=1, steps=60, out=tmp_path)
    assert picture(tmp_path, "robust_regression")
    bounded = results["bounded"][0]
    assert bounded.slope <= bounded.bound * (1 + 1e-3)  # differences of float32 values
    assert bounded.error < 0.5


def test_controller(tmp_path):
    pytest.importorskip("matplotlib")
    results = load("controller").main(epochs=8, out=tmp_path)
    assert picture(tmp_path, "controller")
    bounded, free = results["bounded"], results["free"]
    assert bounded.cost < results["none"].cost
    assert bounded.energy[0] <= bounded.energy[1] < math.inf  # the theorem, with a delay
    assert free.energy[1] == math.inf


def test_erratum(tmp_path):
    pytest.importorskip("matplotlib")
    result = load("erratum").main(steps=60, out=tmp_path)
    assert picture(tmp_path, "erratum")
    assert result.attacked["as printed"] > 1.2
    assert 0.98 < result.attacked["ldlt.nn.Residual"] <= 1 + 1e-9
    assert result.scalar.determinant < 0


def test_certify_onnx(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("matplotlib")
    result = load("certify_onnx").main(steps=20, out=tmp_path)
    assert picture(tmp_path, "certify_onnx")
    bounds = result.bounds
    assert bounds["attack"] <= bounds["optimal"] <= bounds["product"]
    assert result.verified == bounds["optimal"]
    assert "cannot be proven" in result.rejected["bound lowered"]
    assert "another network" in result.rejected["weight changed"]


def test_fashion_mnist_on_digits(tmp_path, capsys):
    pytest.importorskip("sklearn")
    plt = pytest.importorskip("matplotlib.pyplot")
    found = load("fashion_mnist").main(digits=True, epochs=6, out=str(tmp_path / "new" / "folder"))
    assert found["clean"] > 0.8
    assert found["clean"] >= found["36/255"] >= found["72/255"] >= found["108/255"] >= found["1"]
    assert found["36/255"] > 0.6
    said = capsys.readouterr().out
    assert "1,300 training and 497 test images" in said
    for name in ("certified_accuracy.png", "samples.png"):
        picture = plt.imread(tmp_path / "new" / "folder" / name)
        assert np.ptp(picture[..., :3]) > 0.5  # something is drawn


def test_fashion_mnist_can_be_interrupted(monkeypatch, capsys):
    """Ctrl-C in the third epoch: the best weights until then are kept and judged."""
    pytest.importorskip("sklearn")
    example = load("fashion_mnist")
    calls, real = [], example.margin_loss

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 2 * example.LEAST_STEPS + 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(example, "margin_loss", interrupted)
    found = example.main(digits=True, epochs=50, width=4)
    said = capsys.readouterr().out
    assert "stopped; the best weights so far are kept" in said
    assert "epoch   2" in said
    assert "epoch   4" not in said
    assert found["clean"] > 0.15


def test_fashion_mnist_says_what_is_wrong(tmp_path):
    pytest.importorskip("sklearn")
    with pytest.raises(UnavailableSetError, match="apt-get install dataset-fashion-mnist"):
        load("fashion_mnist").main(data=str(tmp_path / "nothing"))
    for option in ("epochs", "minutes", "limit"):
        with pytest.raises(OptionError, match=f"--{option} must be positive"):
            load("fashion_mnist").main(digits=True, **{option: 0})


def test_fashion_mnist_ends_with_its_time(monkeypatch, capsys):
    """A budget of a few seconds ends within an epoch, and its end is judged, too."""
    pytest.importorskip("sklearn")
    example = load("fashion_mnist")
    monkeypatch.setattr(example, "LEAST_STEPS", 1200)
    example.main(digits=True, minutes=0.03, limit=1250, width=4)
    said = capsys.readouterr().out
    assert "1,250 training" in said
    assert "epoch   2" not in said


def test_flow(tmp_path):
    pytest.importorskip("matplotlib")
    result = load("flow").main(steps=25, out=tmp_path)
    assert picture(tmp_path, "flow")
    assert result.flow > result.normal
    assert result.error < 1e-10


def test_identification(tmp_path):
    pytest.importorskip("matplotlib")
    results = load("identification").main(epochs=10, out=tmp_path)
    assert picture(tmp_path, "identification")
    found = results["constrained"]
    assert found.worst <= found.limit * (1 + 1e-5)
    assert all(r.noisy > 0 for r in results.values())
