"""The examples run, and show what they claim."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ldlt.bench.data import UnavailableSetError
from ldlt.errors import OptionError

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lower_the_bound(capsys):
    pytest.importorskip("sklearn")
    lines = load("lower_the_bound").main(epochs=20)
    assert lines["start"][0.0] == pytest.approx(lines["plain"][0.0], abs=0.005)  # the same network
    assert lines["fifth"][0.0] > 0.9
    assert lines["fifth"][0.5] > lines["plain"][0.5] + 0.1
    assert "a fifth of the bound" in capsys.readouterr().out


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
