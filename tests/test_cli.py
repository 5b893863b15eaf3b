"""The command line, its error paths and the demo."""

from __future__ import annotations

import json

import pytest

import ldlt
from ldlt import demo
from ldlt.cli import main


def test_demo_prints_a_table(capsys):
    assert main(["demo", "--set", "iris", "--epochs", "2", "--width", "8"]) == 0
    out = capsys.readouterr().out
    assert "LDLT-R" in out
    assert "36/255" in out


def test_demo_for_machines_is_reproducible(capsys):
    results = []
    for _ in range(2):
        assert main(["demo", "--set", "wine", "--epochs", "30", "--width", "16", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    for first, second in zip(*results, strict=True):
        assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in second.items() if k != "seconds"}
        assert first["accuracy"]["clean"] > 0.8
        shares = list(first["accuracy"].values())
        assert shares == sorted(shares, reverse=True)
        assert first["attacked"] <= first["bound"] * (1 + 1e-5)
        assert first["residual"] > -1e-12


def test_unknown_set_and_bad_numbers(capsys):
    assert main(["demo", "--set", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--epochs", "0"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        main([])


def test_interruption_is_reported(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["factors", "b"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures(which, suffix, tmp_path, capsys):
    path = tmp_path / f"figure.{suffix}"
    assert main(["figure", which, str(path)]) == 0
    assert path.stat().st_size > 10_000
    assert str(path) in capsys.readouterr().out
    assert main(["figure", which, str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"figure": str(path)}
    assert main(["figure", which, str(tmp_path / "figure.txt")]) == 2


def test_data_list_and_check(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("LDLT_UCI", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["data", "list"]) == 0
    assert "balance-scale" in capsys.readouterr().out
    assert main(["data", "list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= {"iris", "wine", "balance-scale"}
    assert main(["data", "check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["sound"] == found["checked"]
    assert main(["data", "list", str(tmp_path / "missing.zip")]) == 2
    assert "missing.zip" in capsys.readouterr().err
    assert main(["data", "list", "--unpack", str(tmp_path)]) == 2
    assert "fetch" in capsys.readouterr().err


def test_data_check_says_where_the_fault_is(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "uci" / "toy"
    folder.mkdir(parents=True)
    for file, cells in (
        ("toy_py", "1,2"),
        ("labels_py", "0"),
        ("folds_py", "0,0,0,1"),
        ("validation_folds_py", "0,0,1,0"),
    ):
        (folder / f"{file}.dat").write_text(f"{cells}\n" * 4)
    (folder / "labels_py.dat").write_text("0\n1\nx\n1\n")
    assert main(["data", "check", str(tmp_path / "uci")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [word for word in lines[2].split() if word in ("toy", "error", "3", "1")] == ["toy", "error", "3", "1"]
    assert "toy/labels_py.dat" in lines[2]
    assert lines[-1].startswith("0 of 1 data sets can be used")
    monkeypatch.setenv("LDLT_UCI", str(tmp_path / "uci"))
    assert main(["data", "list"]) == 0
    both = capsys.readouterr().out
    assert "balance-scale" in both
    assert "toy" in both
    assert main(["data", "list", "embedded"]) == 0
    assert "toy" not in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert ldlt.__version__ in capsys.readouterr().out
