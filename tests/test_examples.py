"""The examples run, and show what they claim."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
