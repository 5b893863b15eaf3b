"""The study: storing, resuming, failing, being interrupted; the commands."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from joblib.externals.loky import get_reusable_executor

from ldlt.errors import LdltError, MissingExtraError, OptionError
from ldlt_bench.commands import main
from ldlt_bench.data import Archive, Embedded, UnknownSetError
from ldlt_bench.study import run
from ldlt_bench.study.choose import Inner, chosen_on
from ldlt_bench.study.protocol import CURVE, PROTOCOLS, RADII, read_starts, shortened
from ldlt_bench.study.results import COLUMNS, KEYS, BenchError, Rows, latest, read_rows, read_settings, write_whole
from ldlt_bench.study.run import Study

ROOT = Path(__file__).parent.parent
PAPER, QUICK = PROTOCOLS["paper"], shortened(PROTOCOLS["paper"], 2)
KINDS = {"int64": 1, "double": 0.5, "bool": True, "string": "text"}


def fake(unit, protocol, dataset, seeds):
    """Rows of a unit without any network; a file in the folder LDLT_TEST tells what to do instead."""
    order = Path(os.environ["LDLT_TEST"]) / unit.family
    if order.exists():
        text = order.read_text()
        if text == "die once":
            order.unlink()
        if text.startswith("die"):
            os._exit(1)
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "strange":
            return [{"fold": 0}]
        raise RuntimeError(text)
    blank = {name: KINDS.get(kind, 0.5) for name, (kind, _) in COLUMNS.items()}
    score = (hash_of(unit.dataset) + hash_of(unit.family)) % 100 / 100
    named = {"protocol": unit.protocol, "dataset": unit.dataset, "family": unit.family, "curve": [score] * len(CURVE)}
    metrics = dict.fromkeys(["accuracy", *RADII], score)
    rigour = {"rigorous": False, "certified": True}
    return [{**blank, **named, **metrics, **rigour, "fold": f, "seed": s} for f in range(4) for s in seeds]


def hash_of(text: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(text))


@pytest.fixture
def orders(tmp_path, monkeypatch):
    folder = tmp_path / "orders"
    folder.mkdir()
    monkeypatch.setenv("LDLT_TEST", str(folder))
    yield folder
    get_reusable_executor().shutdown(wait=True)  # its workers have the folder of this test


def study(out, *, protocols=(PAPER,), families=("AOL", "SLL"), sets=("iris", "wine"), seeds=(0,), source=None, **more):
    return Study(protocols, families, sets, seeds, source or Embedded(), out, compute=fake, **more)


def go(*args, workers=1, **kwargs):
    return study(*args, **kwargs).run(workers=workers, show=False)


# -------------------- rows on disk


def one(**changes):
    blank = {name: KINDS.get(kind, [0.5]) for name, (kind, _) in COLUMNS.items()}
    return {**blank, **changes}


def test_rows_come_back_and_replace_themselves(tmp_path):
    rows = Rows(tmp_path / "new" / "paper.parquet")
    rows.add([one(fold=0), one(fold=1, accuracy=float("nan"))])
    rows.add([one(fold=0, accuracy=0.75), one(fold=0, fingerprint="other")])
    back = read_rows(rows.path)
    assert list(back.columns) == list(COLUMNS)
    assert len(back) == 3
    assert back[(back.fold == 0) & (back.fingerprint == "text")].accuracy.tolist() == [0.75]
    assert back.accuracy.isna().sum() == 1
    for bad in ([{"fold": 0}], [one(fold="x")], [one(curve=3)]):
        with pytest.raises(BenchError):
            rows.add(bad)
    pd.testing.assert_frame_equal(read_rows(rows.path), back)
    assert all(doc for _, doc in COLUMNS.values())


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_read_right_or_refused(tmp_path_factory, position, value, cut):
    path = tmp_path_factory.mktemp("rows") / "paper.parquet"
    Rows(path).add([one(fold=fold) for fold in range(4)])
    whole = read_rows(path)
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position] = value
    path.write_bytes(content[:position] if cut else content)
    try:
        found = read_rows(path)
    except BenchError:
        return
    data = [name for name in whole if name not in ("curve",)]
    pd.testing.assert_frame_equal(found[data], whole[data])


def test_other_files_are_no_rows(tmp_path):
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("text")
    for name in ("other", "text", "missing"):
        with pytest.raises(BenchError):
            read_rows(tmp_path / f"{name}.parquet")


def test_the_newest_settings_count():
    rows = pd.DataFrame(
        [one(family=f, fingerprint=p, finished_at=t, fold=i) for i, (f, p, t) in enumerate(
            [("A", "old", "1"), ("A", "new", "2"), ("B", "old", "3")]
        )]
    )  # fmt: skip
    assert latest(rows)[["family", "fingerprint"]].to_numpy().tolist() == [["A", "new"], ["B", "old"]]


def test_a_failed_write_damages_nothing(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "file", b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    for call in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(BenchError):
                write_whole(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]


# -------------------- studies


def test_a_study_stores_everything_and_resumes(tmp_path, orders):
    first = go(tmp_path / "out")
    assert (first.ok, first.total, first.computed, len(first.frame)) == (True, 4, 4, 16)
    assert not first.frame[KEYS].duplicated().any()
    record = read_settings(tmp_path / "out")
    assert record["families"] == ["AOL", "SLL"]
    assert record["finished_at"]
    assert set(record["data"]) == {"iris", "wine"}
    again = go(tmp_path / "out")
    assert (again.computed, len(again.frame)) == (0, 16)
    more = go(tmp_path / "out", seeds=(0, 1))  # a unit is all its seeds
    assert (more.computed, len(more.frame)) == (4, 32)
    fewer = go(tmp_path / "out", families=("SLL",), sets=("wine",))
    assert (fewer.computed, len(fewer.frame), set(fewer.frame.family)) == (0, 4, {"SLL"})


def test_rows_say_how_they_were_made(tmp_path, orders):
    summary = go(tmp_path / "out")
    found = read_settings(tmp_path / "out" / "paper.parquet")
    assert found["finished_at"]
    assert list(found["protocols"]) == ["paper"]
    assert found["protocols"]["paper"]["settings"]["epochs"] == PAPER.epochs
    assert not {"source", "command"} & set(found)  # paths are of no use elsewhere
    for column in ("commit", "torch_version", "machine"):
        assert set(summary.frame[column]) == {found[column]}
    assert read_settings(tmp_path / "nothing.parquet") == {}


def test_starts_are_chosen_on_held_out_rows_of_a_third():
    names = [f"set {i}" for i in range(900)]
    assert 0.28 < sum(map(chosen_on, names)) / 900 < 0.39
    data = Embedded().load("balance-scale")
    inner = Inner(*(getattr(data, field.name) for field in fields(data)))
    for fold in range(4):
        outer, split = data.split(fold), inner.split(fold)
        assert not set(split.test) & {*split.train, *split.validation, *outer.test}
        assert {*split.test, *split.train} == set(outer.train)


@pytest.mark.slow
def test_starts_are_written_that_bench_reads(tmp_path):
    """Two families, the smallest embedded set of the third, one epoch."""
    out = tmp_path / "starts.json"
    words = ["starts", "--families", "sll,aol", "--epochs", "1", "--most-rows", "600", "--workers", "1"]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["sets"] == ["breast-cancer-wisc-diag"]
    assert set(read_starts(out)) == {"SLL", "AOL"}
    tried = pd.DataFrame(found["tried"])
    assert tried.groupby("family").size().nunique() == 1 or len(tried) > 20
    assert (tried.groupby(["family", "knob"])["kept"].sum() == 1).all()
    words = [
        "bench",
        "--protocol",
        "tuned",
        "--starts",
        str(out),
        "--families",
        "sll",
        "--sets",
        "iris",
        "--epochs",
        "1",
    ]
    assert main([*words, "--workers", "1", "--out", str(tmp_path / "out")]) == 0
    assert read_settings(tmp_path / "out")["protocols"]["tuned"]["settings"]["starts"]["SLL"] == found["starts"]["SLL"]


def test_settings_are_never_mixed_and_going_back_is_free(tmp_path, orders):
    whole = go(tmp_path / "out")
    quick = go(tmp_path / "out", protocols=(QUICK,))
    assert quick.computed == 4
    assert not set(quick.frame.fingerprint) & set(whole.frame.fingerprint)
    assert go(tmp_path / "out").computed == 0
    assert len(read_rows(tmp_path / "out" / "paper.parquet")) == 32


def test_rows_of_another_run_are_taken_over(tmp_path, orders):
    go(tmp_path / "here", sets=("iris",))
    go(tmp_path / "there", sets=("wine",))
    files = [tmp_path / name / "paper.parquet" for name in ("here", "there")]
    assert go(tmp_path / "all", add=files).computed == 0
    with pytest.raises(BenchError):
        go(tmp_path / "all", add=[tmp_path / "nothing.parquet"])


@pytest.mark.parametrize("order", ["broken", "strange"])
def test_a_failing_unit_stops_no_other(tmp_path, orders, order):
    (orders / "AOL").write_text(order)
    summary = go(tmp_path / "out")
    assert (summary.ok, summary.computed, len(summary.failures)) == (False, 2, 2)
    assert {unit.family for unit in summary.failures} == {"AOL"}
    assert "AOL on iris" in (tmp_path / "out" / "failures.txt").read_text()
    (orders / "AOL").unlink()
    assert go(tmp_path / "out").computed == 2
    assert not (tmp_path / "out" / "failures.txt").exists()


def test_an_interruption_keeps_what_there_is(tmp_path, orders):
    (orders / "SLL").write_text("interrupt")
    begun = study(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        begun.run(workers=1, show=False)
    assert begun.safe == len(read_rows(tmp_path / "out" / "paper.parquet")) / 4 < begun.total
    (orders / "SLL").unlink()
    assert go(tmp_path / "out").computed == 4 - begun.safe


def test_workers_give_the_same_rows_and_may_die(tmp_path, orders):
    here = go(tmp_path / "here")
    (orders / "AOL").write_text("die once")
    there = go(tmp_path / "there", workers=2)
    assert there.ok
    columns = [name for name in COLUMNS if name not in ("finished_at", "curve")]
    frames = [summary.frame.sort_values(KEYS)[columns].reset_index(drop=True) for summary in (here, there)]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run(tmp_path, orders):
    (orders / "AOL").write_text("die always")
    with pytest.raises(BenchError):
        go(tmp_path / "out", workers=2)
    (orders / "AOL").unlink()
    assert go(tmp_path / "out").ok


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, orders, monkeypatch):
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(str(target))
        if sum(name.endswith("paper.parquet") for name in calls) > 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(BenchError):
            go(tmp_path / "out")
    assert len(read_rows(tmp_path / "out" / "paper.parquet")) == 8
    assert go(tmp_path / "out").computed == 2


def test_one_run_per_folder(tmp_path, orders):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(BenchError):
        go(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError):
        go(tmp_path / "file")


def test_senseless_studies_are_refused(tmp_path, orders):
    for change in ({"families": ()}, {"seeds": ()}, {"protocols": ()}, {"protocols": (PAPER, QUICK)}):
        with pytest.raises(OptionError):
            study(tmp_path / "out", **change)
    with pytest.raises(UnknownSetError):
        go(tmp_path / "out", sets=("iriss",))
    with pytest.raises(BenchError):
        go(tmp_path / "out", sets=())
    with pytest.raises(OptionError):
        study(tmp_path / "out").run("threads")
    assert not (tmp_path / "out").exists()


def archive(folder: Path, names=("toy", "twin")) -> Archive:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, cells in (
            (f"{name}_py", "{},2"),
            ("labels_py", "{}"),
            ("folds_py", "0,1,0,1"),
            ("validation_folds_py", "0,0,1,0"),
        ):
            lines = [cells.format(i % 2) for i in range(6)]
            lines[0] = "1,0,1,0" if file == "folds_py" else lines[0]
            (folder / name / f"{file}.dat").write_text("\n".join(lines) + "\n")
    return Archive(folder)


def test_archives_with_gaps_damage_and_changes(tmp_path, orders):
    archive(tmp_path / "uci", ("toy", "twin", "gone", "bad"))
    (tmp_path / "uci" / "gone" / "gone_py.dat").unlink()
    (tmp_path / "uci" / "bad" / "labels_py.dat").write_text("x\n")
    summary = go(tmp_path / "out", sets=None, source=Archive(tmp_path / "uci"))
    assert (summary.ok, set(summary.skipped), set(summary.damaged)) == (False, {"gone"}, {"bad"})
    assert set(summary.frame.dataset) == {"toy", "twin"}
    features = tmp_path / "uci" / "toy" / "toy_py.dat"
    features.write_text(features.read_text().replace("0,2", "0.5,2", 1))
    changed = go(tmp_path / "out", sets=("toy", "twin"), source=Archive(tmp_path / "uci"))
    assert (changed.computed, len(changed.frame)) == (2, 16)  # other data of toy; twin as it was


def test_every_family_shows_early_and_the_end_is_small(tmp_path, orders):
    begun = study(tmp_path / "out", sets=("iris", "twonorm", "wine"))
    begun._plan(["iris", "twonorm", "wine"])
    order = begun._order(list(begun.costs))
    assert {unit.family for unit in order[:2]} == {"AOL", "SLL"}
    rest = [begun.costs[unit] for unit in order[2:]]
    assert rest == sorted(rest, reverse=True)


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_a_missing_ray_is_named(tmp_path, orders):
    with pytest.raises(MissingExtraError):
        study(tmp_path / "out").run("ray")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("backend", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_clusters_give_the_same_rows(tmp_path, backend, package):
    pytest.importorskip(package, reason=f"the backend {backend} needs {package}: pip install 'ldlt[{backend}]'")
    summaries = []
    for where, workers in (("loky", 1), (backend, 2)):
        one = Study([QUICK], ["AOL", "SLL"], ["iris", "wine"], [0], Embedded(), tmp_path / where)
        summaries.append(one.run(where, workers, show=False))
    columns = [*KEYS, "accuracy", "fingerprint", "data"]
    frames = [summary.frame.sort_values(KEYS)[columns].reset_index(drop=True) for summary in summaries]
    assert len(frames[0]) == 16
    pd.testing.assert_frame_equal(*frames)


# -------------------- commands


def test_bench_of_real_networks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["bench", "--sets", "iris,wine", "--families", "ldlt-l,aol", "--epochs", "2", "--workers", "1", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["units"], found["computed"], found["rows"], found["shortened"]) == (4, 4, 16, True)
    assert {row["algorithm"] for row in found["summary"]["paper"]} == {"LDLT-L", "AOL"}
    assert Path(found["report"]).stat().st_size > 10_000
    assert (tmp_path / "ldlt-bench" / "tables" / "paper" / "summary.tex").exists()
    Study([QUICK], ["LDLT-L", "AOL"], ["iris", "wine"], [0], Embedded(), "again").run(workers=1, show=False)
    both = [read_rows(folder / "paper.parquet").sort_values(KEYS) for folder in (Path("ldlt-bench"), Path("again"))]
    drop = [name for name in COLUMNS if "seconds" in name or name in ("finished_at", "curve")]
    pd.testing.assert_frame_equal(*(rows.drop(columns=drop).reset_index(drop=True) for rows in both))
    assert (both[0].bound >= 1).all()
    assert not both[0].rigorous.any()
    assert main(words[:-1]) == 0
    said = capsys.readouterr()
    assert "4 of 4 units" in said.out
    assert "SHORTENED" in said.out
    assert main(["tables", "ldlt-bench/paper.parquet", "--only", "summary,friedman", "--form", "latex"]) == 0
    assert capsys.readouterr().out.count(r"\toprule") == 2
    assert main(["tables", "--out", "elsewhere"]) == 0
    assert list((tmp_path / "elsewhere" / "paper").glob("pairwise.*"))
    assert main(["report", "--out", "page.html"]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_what_cannot_be_done_ends_with_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (
        ["bench", "--sets", "nothing"],
        ["bench", "--families", "nobody"],
        ["bench", "--data", "missing.zip"],
        ["bench", "--seeds", "0"],
        ["bench", "--protocol", "other"],
        ["report"],
        ["tables", "missing.parquet"],
        ["data", "check", "missing.zip"],
        ["data", "list", "missing.zip"],
    ):
        assert main(words) == 2, words
        assert capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_exit_codes_of_failures_and_interruptions(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("broken")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    words = ["bench", "--sets", "iris", "--families", "aol", "--epochs", "1", "--workers", "1"]
    for compute, code in ((broken, 1), (interrupted, 130)):
        monkeypatch.setattr(Study.__init__, "__kwdefaults__", {**Study.__init__.__kwdefaults__, "compute": compute})
        assert main(words) == code
        assert capsys.readouterr().err


def test_data_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LDLT_UCI", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["data", "list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= {"iris", "balance-scale"}
    archive(tmp_path / "uci")
    (tmp_path / "uci" / "toy" / "labels_py.dat").write_text("0\n1\nx\n1\n0\n1\n")
    assert main(["data", "check", str(tmp_path / "uci")]) == 1
    said = capsys.readouterr().out
    assert "toy/labels_py.dat, line 3" in said
    assert "1 of 2" in said
    monkeypatch.setenv("LDLT_UCI", str(tmp_path / "uci"))
    assert main(["data", "list"]) == 0
    said = capsys.readouterr().out
    assert "balance-scale" in said
    assert "twin" in said
    assert main(["data", "check", "embedded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sound"] == 14


def test_entry_points_lead_to_commands():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, place in project["entry-points"]["ldlt.commands"].items():
        module, _, attribute = place.partition(":")
        assert attribute == name
        assert getattr(importlib.import_module(module), attribute)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("ldlt_bench.find_spec", lambda name: None if name == "joblib" else True)
    with pytest.raises(MissingExtraError) as caught:
        from ldlt_bench import require_extra  # noqa: PLC0415

        require_extra()
    assert caught.value.package == "joblib"
    assert isinstance(caught.value, LdltError)


@pytest.mark.slow
def test_ctrl_c_and_a_kill_keep_what_there_is(tmp_path):
    """A real run in a process group of its own, ended twice, then finished."""
    words = [sys.executable, "-m", "ldlt_bench", "bench", "--sets", "iris,wine,monks-1", "--epochs", "4"]
    words += ["--families", "aol,ldlt-l", "--workers", "2", "--out", str(tmp_path)]
    rows, least = tmp_path / "paper.parquet", 0
    for number in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None and not (rows.exists() and len(read_rows(rows)) > least):
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, number)
        process.communicate()
        assert process.returncode in (0, 130, -signal.SIGKILL)
        least = len(read_rows(rows))
        assert least % 4 == 0
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["rows"] == 24
    assert found["computed"] <= 6 - least // 4


def test_progress_is_said_without_a_terminal(tmp_path, orders, monkeypatch, capsys):
    monkeypatch.setattr(run, "LINES", 0.0)
    study(tmp_path / "out").run(workers=1)
    assert "4 of 4 units" in capsys.readouterr().err
