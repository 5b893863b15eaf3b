"""The runner of the benchmark: nothing finished is ever lost, nothing is mixed, every fault is named.

The work is done by a stand-in that takes orders (sleep, fail, die), so that each fault comes when it is wanted.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ldlt
from ldlt.bench import command, lock, results
from ldlt_bench.data import Archive, Embedded, UnknownSetError
from ldlt.bench.engines import ProcessEngine, SerialEngine, Work, make_engine, provenance
from ldlt.bench.lock import Lock
from ldlt.bench.progress import Pace, Progress, clock
from ldlt.bench.results import COLUMNS, BenchError, Store, StoreError, schema, unit_name, write_atomically
from ldlt.bench.study import Study, load_study, read_settings
from ldlt.cli import main

pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")

STAND_IN = """
import hashlib, json, os, signal, time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Unit:
    protocol: str
    dataset: str
    family: str


@dataclass(frozen=True)
class Fake:
    name: str = "paper"
    epochs: int = 3

    def fingerprint(self, family):
        return hashlib.sha256(f"{self.name} {self.epochs}".encode()).hexdigest()[:12]


def estimate_cost(unit, protocol, rows, columns, classes):
    return float(rows * columns)


def run_unit(unit, protocol, dataset, seeds):
    folder = Path(os.environ["LDLT_TEST_ORDERS"])
    orders = json.loads((folder / "orders.json").read_text())
    with open(folder / "log", "a") as log:
        log.write(f"{os.getpid()} {unit.dataset} {unit.family}\\n")
    order = orders.get(f"{unit.dataset} {unit.family}", orders.get("*", ""))
    if order.startswith("sleep"):
        time.sleep(float(order.split()[1]))
    if order == "raise":
        raise ValueError("deliberate failure")
    if order == "exit":
        raise SystemExit(3)
    if order == "die" or (order == "die once" and not (folder / "died").exists()):
        time.sleep(1.0 if order == "die once" else 0.0)
        (folder / "died").touch()
        os.write(2, b"last words\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    rows = []
    for fold in range(4):
        for seed in seeds:
            text = f"{unit} {fold} {seed} {protocol.epochs} {float(dataset.features.sum()):.6f}"
            x = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
            rows.append(
                dict(
                    protocol=unit.protocol, dataset=unit.dataset, family=unit.family, fold=fold, seed=seed, accuracy=x,
                    cert_36=x * 0.9, cert_72=x * 0.8, cert_108=x * 0.7, cert_255=x * 0.5,
                    curve=[x * (1 - r / 80) for r in range(41)], width=32, depth=4, parameters=1000, padding=0,
                    input_dim=dataset.columns, output_dim=len(dataset.classes), bound=1.0, rigorous=True,
                    certified=unit.family != "broken", epochs=protocol.epochs, best_epoch=1, learning_rate=0.001,
                    loss="ce", batch_size=64, validation_score=x, seconds=0.1, cpu_seconds=0.1, train_rows=10,
                    validation_rows=5, test_rows=5, dtype="float32", source=dataset.source,
                )
            )
    if order == "fewer":
        rows.pop()
    if order == "column":
        del rows[0]["width"]
    return rows
"""

SCRIPT = """
import sys
import stand_in
from ldlt_bench.data import Embedded
from ldlt.bench.engines import make_engine
from ldlt.bench.study import Study

# Not guarded by a test for __main__: workers must not run this again.
sets = ["iris", "wine", "monks-1"]
study = Study([stand_in.Fake()], ["A", "B"], sets, [0], Embedded(), sys.argv[1], module="stand_in")
try:
    study.run(make_engine("process", int(sys.argv[2])))
except KeyboardInterrupt:
    print(f"{study.safe} of {study.total} safe")
    sys.exit(130)
"""

SETS = ["iris", "wine", "monks-1"]
CHANGING = ["finished_at", "seconds", "cpu_seconds"]


@dataclass(frozen=True)
class Unit:
    protocol: str = "paper"
    dataset: str = "iris"
    family: str = "A"


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Holm's correction in statsmodels collects garbage each time, which is most of the time of a small study."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "stand_in.py").write_text(STAND_IN)
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def orders(modules, tmp_path, monkeypatch):
    """Tell the stand-in what to do, and see what it did."""
    folder = tmp_path / "orders"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("LDLT_TEST_ORDERS", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]))

    class Orders:
        log = folder / "log"

        def __call__(self, **what):
            (folder / "orders.json").write_text(
                json.dumps({key.replace("__", " "): text for key, text in what.items()})
            )

        def done(self):
            return [line.split(" ", 1)[1] for line in self.lines()]

        def lines(self):
            return self.log.read_text().splitlines() if self.log.exists() else []

    give = Orders()
    give()
    return give


def make_study(out, *, families=("A", "B"), sets=SETS, seeds=(0,), epochs=3, source=None, **more):
    stand_in = importlib.import_module("stand_in")
    source = Embedded() if source is None else source
    return Study([stand_in.Fake(epochs=epochs)], families, sets, seeds, source, out, module="stand_in", **more)


def comparable(frame):
    return frame.drop(columns=CHANGING).sort_values(["dataset", "family", "fold", "seed"]).reset_index(drop=True)


def same_rows(left, right):
    pd.testing.assert_frame_equal(comparable(left), comparable(right))


def some_rows(unit=None, seeds=(0,), fingerprint="f"):
    """Rows without computing anything."""
    unit = unit or Unit()
    kinds = {"string": "x", "int64": 1, "double": 0.5, "bool": True, "list": [0.5] * 41}
    names = {"protocol": unit.protocol, "dataset": unit.dataset, "family": unit.family, "fingerprint": fingerprint}
    base = {column.name: kinds[column.kind] for column in COLUMNS} | names
    return [{**base, "fold": fold, "seed": seed} for fold in range(4) for seed in seeds]


def start_script(modules, out, workers):
    return subprocess.Popen(
        [sys.executable, str(modules / "script.py"), str(out), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --- names and files -----------------------------------------------------------------------------------------


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_unit_names_are_safe_and_unique(first, second):
    names = [unit_name(Unit(*parts)) for parts in (first, second)]
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9+=_.-]{1,200}", name)
        assert not name.startswith(".")
        assert not name.endswith(".")
    assert (names[0].casefold() == names[1].casefold()) == (first == second)


@pytest.mark.parametrize("name", ["../../etc/passwd", "CON", "a/b", "a\\b", "a\0b", "ä" * 300, "", ".", "-rf"])
def test_no_name_escapes_the_folder(tmp_path, name):
    store = Store(tmp_path)
    unit = Unit("paper", name, name)
    path = store.write(unit, some_rows(unit))
    assert path.parent == tmp_path / "units"
    assert store.done(unit, "f", [0])
    assert store.load()["dataset"].unique().tolist() == [name]


def test_the_schema_documents_every_column():
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    for field, column in zip(schema(), COLUMNS, strict=True):
        assert field.metadata[b"doc"].decode() == column.doc != ""


def test_write_then_read(tmp_path):
    store = Store(tmp_path)
    store.write(Unit(), some_rows(seeds=(0, 1)))
    assert store.done(Unit(), "f", [1, 0])
    frame = Store(tmp_path).load()
    assert list(frame.columns) == [column.name for column in COLUMNS]
    assert len(frame) == 8
    assert frame["curve"][0].dtype == float
    assert len(frame["curve"][0]) == 41
    merged = store.merge(tmp_path / "results.parquet")
    same_rows(pd.read_parquet(merged), frame)


def test_units_of_another_store_are_taken_over(tmp_path):
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    units = [Unit(family="A"), Unit(family="B")]
    for unit in units:
        there.write(unit, some_rows(unit, seeds=(0, 1)), "label")
    here.write(units[0], some_rows(units[0], seeds=(0, 1), fingerprint="g"), "label")
    merged = there.merge(tmp_path / "results.parquet")
    assert here.add(merged) == 1  # what is there already stays
    assert not here.done(units[0], "f", [0, 1], "label")
    assert here.done(units[1], "f", [0, 1], "label")
    assert here.add(merged) == 1  # the first was set aside by the question
    same_rows(here.load(), there.load())


@pytest.mark.parametrize("spoil", ["missing", "bytes", "no label", "half a unit"])
def test_files_that_are_no_results_are_not_taken_over(tmp_path, spoil):
    store, other, path = Store(tmp_path / "a"), Store(tmp_path / "b"), tmp_path / "results.parquet"
    store.write(Unit(), some_rows(seeds=(0, 1)))
    store.merge(path)
    if spoil == "missing":
        path.unlink()
    elif spoil == "bytes":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        table = pq.read_table(path)
        pq.write_table(table.slice(1) if spoil == "half a unit" else table.replace_schema_metadata({}), path)
    with pytest.raises(BenchError, match=r"results\.parquet"):
        other.add(path)
    assert other.load().empty


def test_an_empty_store_has_all_columns(tmp_path):
    assert list(Store(tmp_path).load().columns) == [column.name for column in COLUMNS]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: rows.clear(), "no rows"),
        (lambda rows: rows[0].pop("width"), "width"),
        (lambda rows: rows[0].update(colour=1), "colour"),
        (lambda rows: rows[0].update(width="wide"), "width"),
        (lambda rows: rows[0].update(loss=None), "missing values"),
        (lambda rows: rows.pop(), "every fold"),
        (lambda rows: rows.append(rows[0]), "every fold"),
        (lambda rows: rows[0].update(dataset="wine"), "one unit"),
        (lambda rows: rows[0].update(fingerprint="g"), "one unit"),
    ],
)
def test_rows_that_are_no_unit_are_refused(tmp_path, spoil, words):
    rows = some_rows(seeds=(0, 1))
    spoil(rows)
    with pytest.raises(BenchError, match=words):
        Store(tmp_path).write(Unit(), rows)
    assert not list(tmp_path.rglob("*.parquet"))


def damage_truncated(path):
    path.write_bytes(path.read_bytes()[:-40])


def damage_noise(path):
    path.write_bytes(os.urandom(3000))


def damage_empty(path):
    path.write_bytes(b"")


def damage_page(path):
    content = bytearray(path.read_bytes())
    content[40] ^= 0xFF  # inside the first page, whose checksum now fails
    path.write_bytes(bytes(content))


def damage_schema(path):
    pd.DataFrame({"a": [1]}).to_parquet(path)


def damage_column(path):
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["loss"]), path)


def damage_other_unit(path):
    other = Unit(family="B")
    content = Store(path.parent.parent / "elsewhere").write(other, some_rows(other)).read_bytes()
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [damage_truncated, damage_noise, damage_empty, damage_page, damage_schema, damage_column, damage_other_unit],
)
def test_damaged_files_are_set_aside_not_deleted(tmp_path, damage):
    said = []
    store = Store(tmp_path, said.append)
    path = store.write(Unit(), some_rows())
    assert store.done(Unit(), "f", [0])
    damage(path)
    content = path.read_bytes()
    assert not store.done(Unit(), "f", [0])
    assert not path.exists()
    aside = path.with_name(path.name + ".corrupt")
    assert aside.read_bytes() == content
    assert len(said) == 1
    assert aside.name in said[0]
    assert store.load().empty
    store.write(Unit(), some_rows())  # and a second time, which must not overwrite the first
    damage(path)
    assert not store.done(Unit(), "f", [0])
    assert aside.read_bytes() == content
    assert len(list(store.units.glob("*.corrupt*"))) == 2


@given(position=st.integers(0, 10_000), value=st.integers(1, 255))
def test_a_wrong_byte_never_crashes(tmp_path_factory, position, value):
    store = Store(tmp_path_factory.mktemp("byte"))
    path = store.write(Unit(), some_rows())
    before = Store(store.folder).load()
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= value
    path.write_bytes(bytes(content))
    if store.done(Unit(), "f", [0]):  # a byte that means nothing
        same_rows(store.load(), before)
    else:
        assert store.load().empty


def test_other_settings_are_set_aside_and_come_back(tmp_path):
    said = []
    store = Store(tmp_path, said.append)
    store.write(Unit(), some_rows(), data="embedded 150x4x3")
    for change in (("g", [0], "embedded 150x4x3"), ("f", [0, 1], "embedded 150x4x3"), ("f", [0], "archive 150x4x3")):
        said.clear()
        assert not store.done(Unit(), *change)
        assert len(said) == 1
        assert "stale" in said[0]
        assert re.search("other (settings|seeds|data)", said[0])
        assert store.done(Unit(), "f", [0], "embedded 150x4x3")  # back to the first: nothing is lost


def test_left_over_temporary_files_are_removed(tmp_path):
    store = Store(tmp_path)
    store.write(Unit(), some_rows())
    for path in (store.units / ".x.parquet.1.tmp", tmp_path / ".settings.json.99.tmp"):
        path.write_bytes(b"half")
    assert store.clean() == 2
    assert store.done(Unit(), "f", [0])


# --- trouble with the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_damages_nothing(tmp_path, monkeypatch, call, code):
    store = Store(tmp_path)
    path = store.write(Unit(), some_rows())
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(results.os, call, fail)
        with pytest.raises(StoreError) as caught:
            store.write(Unit(), some_rows(seeds=(0, 1)))
    assert caught.value.full == (code != errno.EIO)
    assert ("disk full" in str(caught.value)) == caught.value.full
    assert path.read_bytes() == before
    assert [entry.name for entry in store.units.iterdir()] == [path.name]


def test_a_real_limit_of_the_file_size(tmp_path):
    """The kernel refuses in the middle of a file."""
    path = tmp_path / "table"
    write_atomically(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(StoreError, match="disk full"):
            write_atomically(path, bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["table"]


def test_a_full_disk_in_the_middle_of_a_study(tmp_path, orders, monkeypatch):
    study = make_study(tmp_path / "out")
    write, count = Store.write, 0

    def fail_at_third(self, *arguments):
        nonlocal count
        count += 1
        if count == 3:
            raise StoreError(self.units / "x", True, "No space left on device")
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", fail_at_third)
        with pytest.raises(BenchError, match=r"disk full.*run the same command again; 2 of 6 units are safe"):
            study.run(SerialEngine(), show=False)
    again = make_study(tmp_path / "out").run(SerialEngine(), show=False)
    assert again.computed == 4
    assert again.ok


def test_a_folder_that_cannot_be_made(tmp_path, orders):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot write"):
        make_study(tmp_path / "file" / "out").run(SerialEngine(), show=False)


# --- one run at a time ---------------------------------------------------------------------------------------


def test_two_runs_in_one_folder(tmp_path, orders):
    refused = pytest.raises(BenchError, match=rf"another run works in .*process {os.getpid()} on ")
    with Lock(tmp_path / "out" / "run.lock", f"another run works in {tmp_path}", BenchError), refused:
        make_study(tmp_path / "out").run(SerialEngine(), show=False)
    assert make_study(tmp_path / "out").run(SerialEngine(), show=False).ok
    assert not (tmp_path / "out" / "run.lock").exists()


@pytest.mark.parametrize(
    ("holder", "free"),
    [
        ("", True),
        ("nonsense", True),
        ('{"pid": 4194999, "host": "HERE"}', True),
        ('{"pid": 1, "host": "HERE"}', False),
        ('{"pid": 4194999, "host": "elsewhere"}', False),
    ],
)
def test_locks_where_the_system_has_none(tmp_path, monkeypatch, holder, free):
    monkeypatch.setattr(lock, "_system_lock", lambda _: None)
    (tmp_path / "run.lock").write_text(holder.replace("HERE", lock.socket.gethostname()))
    ours = Lock(tmp_path / "run.lock", "another run", BenchError)
    if free:
        with ours:
            pass
    else:
        with pytest.raises(BenchError, match="another run"), ours:
            pass


# --- studies -------------------------------------------------------------------------------------------------


def test_a_study_writes_everything_and_resumes(tmp_path, orders):
    out = tmp_path / "out"
    first = make_study(out, seeds=[0, 1]).run(SerialEngine(), show=False)
    assert first.ok
    assert (first.total, first.computed, len(first.frame)) == (6, 6, 48)
    assert len(orders.done()) == 6
    same_rows(pd.read_parquet(out / "results.parquet"), first.frame)
    endings = {path.suffix for path in (out / "tables" / "paper").iterdir()}
    assert endings == {".md", ".tex", ".csv"}
    names = {path.stem for path in (out / "tables" / "paper").iterdir()}
    assert {"summary", "ranges", "friedman", "pairwise", "overall-cert_36", "outcomes-accuracy"} <= names
    again = make_study(out, seeds=[0, 1]).run(SerialEngine(), show=False)
    assert again.computed == 0
    assert len(orders.done()) == 6  # nothing was computed twice
    same_rows(again.frame, first.frame)
    assert again.seconds > first.seconds
    elsewhere = make_study(tmp_path / "elsewhere", seeds=[0, 1], add=[out / "results.parquet"])
    same_rows(elsewhere.run(SerialEngine(), show=False).frame, first.frame)
    assert len(orders.done()) == 6
    settings = read_settings(out)
    assert settings["calls"] == 2
    assert settings["finished_at"]
    assert settings["protocols"]["paper"]["settings"]["epochs"] == 3


def test_changed_settings_are_not_mixed(tmp_path, orders):
    out = tmp_path / "out"
    first = make_study(out).run(SerialEngine(), show=False)
    study = make_study(out, epochs=2)
    second = study.run(SerialEngine(), show=False)
    assert second.computed == 6
    assert len(study.messages) == 6
    assert second.frame["fingerprint"].nunique() == 1
    assert not (set(second.frame["fingerprint"]) & set(first.frame["fingerprint"]))
    back = make_study(out).run(SerialEngine(), show=False)
    assert back.computed == 0
    same_rows(back.frame, first.frame)


def test_units_of_another_run_replace_stale_ones(tmp_path, orders):
    """A unit of other settings in the folder must not keep a fitting one from being taken over."""
    make_study(tmp_path / "here", epochs=2).run(SerialEngine(), show=False)
    there = make_study(tmp_path / "there").run(SerialEngine(), show=False)
    count = len(orders.done())
    study = make_study(tmp_path / "here", add=[tmp_path / "there" / "results.parquet"])
    taken = study.run(SerialEngine(), show=False)
    assert taken.computed == 0
    assert len(orders.done()) == count
    assert any(text.startswith("6 units taken over") for text in study.messages)
    same_rows(taken.frame, there.frame)


def test_rows_of_an_earlier_study_do_not_pass_for_the_present_one(tmp_path, orders):
    """A run with other settings that was stopped before its first unit has nothing to show yet."""
    out = tmp_path / "out"
    first = make_study(out).run(SerialEngine(), show=False)

    class Stopped(SerialEngine):
        def map(self, *_):
            raise KeyboardInterrupt
            yield

    with pytest.raises(KeyboardInterrupt):
        make_study(out, epochs=2).run(Stopped(), show=False)
    with pytest.raises(BenchError, match="no results"):
        load_study(out)
    with pytest.raises(KeyboardInterrupt):  # back to the first: its rows are shown, also without its unit files
        make_study(out, seeds=[0], families=["A", "B", "C"]).run(Stopped(), show=False)
    for path in (out / "units").iterdir():
        path.unlink()
    same_rows(load_study(out)[0], first.frame)


def test_a_smaller_question_gets_its_own_answer(tmp_path, orders):
    out = tmp_path / "out"
    make_study(out).run(SerialEngine(), show=False)
    small = make_study(out, sets=["iris"], families=["A"]).run(SerialEngine(), show=False)
    assert small.computed == 0
    assert len(small.frame) == 4
    assert "at least two of each" in " ".join(small.tables["paper"].notes)
    assert {path.stem for path in (out / "tables" / "paper").iterdir()} == {"summary", "ranges", "notes"}
    frame, settings = load_study(out)
    assert len(frame) == 4
    assert settings["datasets"] == ["iris"]
    assert make_study(out).run(SerialEngine(), show=False).computed == 0


def test_a_failing_unit_does_not_stop_the_others(tmp_path, orders):
    orders(wine__A="raise", iris__B="exit", iris__A="column")
    out = tmp_path / "out"
    outcome = make_study(out).run(SerialEngine(), show=False)
    assert not outcome.ok
    assert {(unit.dataset, unit.family) for unit in outcome.failures} == {("wine", "A"), ("iris", "B"), ("iris", "A")}
    files = sorted((out / "failures").iterdir())
    assert len(files) == 3
    text = "\n".join(file.read_text() for file in files)
    assert "deliberate failure" in text
    assert "Traceback" in text
    assert "width" in text
    notes = outcome.tables["paper"].notes
    assert any(note.startswith("wine: not compared") for note in notes)
    assert outcome.tables["paper"].summary["n"].unique().tolist() == [1]
    orders()
    again = make_study(out).run(SerialEngine(), show=False)
    assert again.ok
    assert again.computed == 3
    assert not list((out / "failures").iterdir())
    assert again.tables["paper"].notes == ()


def test_families_without_certificate_are_not_compared(tmp_path, orders):
    outcome = make_study(tmp_path / "out", families=["A", "B", "broken"]).run(SerialEngine(), show=False)
    assert set(outcome.tables["paper"].summary["algorithm"]) == {"A", "B"}
    assert "broken" in outcome.tables["paper"].notes[0]
    assert "broken" in set(outcome.frame["family"])


def test_nothing_to_compare_is_said(tmp_path, orders):
    orders(**{"*": "raise"})
    outcome = make_study(tmp_path / "out").run(SerialEngine(), show=False)
    assert len(outcome.failures) == 6
    assert outcome.tables["paper"].summary is None
    with pytest.raises(BenchError, match="no results"):
        load_study(tmp_path / "out")


def test_unknown_sets_are_refused_before_any_work(tmp_path, orders):
    with pytest.raises(UnknownSetError, match=r"'irris' \(do you mean iris\?\), 'zzz'"):
        make_study(tmp_path / "out", sets=["wine", "irris", "zzz"]).run(SerialEngine(), show=False)
    assert not (tmp_path / "out").exists()
    assert not orders.done()


@pytest.fixture
def archive(tmp_path):
    """Two sound sets, one without features, one damaged."""
    for name in ("iris", "wine", "bare", "bad"):
        data = Embedded().load("iris" if name != "wine" else "wine")
        folder = tmp_path / "uci" / name
        folder.mkdir(parents=True)
        tables = {
            "labels_py.dat": data.labels[:, None],
            "folds_py.dat": data.test_folds.astype(int),
            "validation_folds_py.dat": data.validation_folds.astype(int),
        }
        if name != "bare":
            tables[f"{name}_py.dat"] = data.features
        for file, table in tables.items():
            (folder / file).write_text("\n".join(",".join(str(cell) for cell in row) for row in table.tolist()) + "\n")
    (tmp_path / "uci" / "bad" / "labels_py.dat").write_text("0\nnonsense\n")
    return tmp_path / "uci"


def test_an_archive_with_gaps(tmp_path, orders, archive):
    outcome = make_study(tmp_path / "out", sets=None, source=Archive(archive)).run(SerialEngine(), show=False)
    assert list(outcome.skipped) == ["bare"]
    assert "no features" in outcome.skipped["bare"]
    assert list(outcome.damaged) == ["bad"]
    assert not outcome.ok
    assert set(outcome.frame["dataset"]) == {"iris", "wine"}
    good = make_study(tmp_path / "out", sets=["iris", "wine", "bare"], source=Archive(archive))
    assert good.run(SerialEngine(), show=False).ok  # a set without features is no failure
    with pytest.raises(BenchError, match="no features"):
        make_study(tmp_path / "out", sets=["bare"], source=Archive(archive)).run(SerialEngine(), show=False)


def test_one_changed_cell_is_other_data(tmp_path, orders, archive):
    """The same shape is not the same data."""
    assert (
        make_study(tmp_path / "out", sets=["iris", "wine"], source=Archive(archive)).run(SerialEngine(), show=False).ok
    )
    path = archive / "wine" / "wine_py.dat"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    study = make_study(tmp_path / "out", sets=["iris", "wine"], source=Archive(archive))
    assert study.run(SerialEngine(), show=False).computed == 2
    assert all("other data" in text and "wine" in text for text in study.messages)


def test_the_same_name_from_another_source_is_other_data(tmp_path, orders, archive):
    make_study(tmp_path / "out", sets=["iris"]).run(SerialEngine(), show=False)
    study = make_study(tmp_path / "out", sets=["iris"], source=Archive(archive))
    assert study.run(SerialEngine(), show=False).computed == 2
    assert "other data" in study.messages[0]


def test_the_order_shows_every_family_early_and_ends_small(tmp_path, orders):
    plan = make_study(tmp_path / "out", sets=["digits", "iris", "wine", "monks-1"]).plan()
    assert [(unit.dataset, unit.family) for unit in plan.todo[:2]] == [("iris", "A"), ("iris", "B")]
    costs = [plan.costs[unit] for unit in plan.todo[2:]]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    "wrong", [{"families": []}, {"seeds": []}, {"source": object()}], ids=["families", "seeds", "source"]
)
def test_senseless_studies_are_refused(tmp_path, orders, wrong):
    with pytest.raises(ldlt.OptionError):
        make_study(tmp_path / "out", **wrong)


# --- engines -------------------------------------------------------------------------------------------------


def test_processes_give_the_same_rows_and_survive_deaths(tmp_path, orders):
    """One unit fails, one kills every worker that tries it; all others are as computed in this process."""
    orders(wine__A="raise", **{"monks-1 B": "die"})
    outcome = make_study(tmp_path / "many").run(ProcessEngine(2), show=False)
    reasons = {(unit.dataset, unit.family): text for unit, text in outcome.failures.items()}
    assert set(reasons) == {("wine", "A"), ("monks-1", "B")}
    assert "deliberate failure" in reasons["wine", "A"]
    report = next((tmp_path / "many" / "failures").glob("*monks-1*")).read_text()
    assert "last words" in report
    assert re.search(r"SIGKILL.*died 2 times", reasons["monks-1", "B"])  # the cause, not what the worker printed
    orders()
    alone = make_study(tmp_path / "one").run(SerialEngine(), show=False).frame
    failed = alone["dataset"].eq("wine") & alone["family"].eq("A") | alone["dataset"].eq("monks-1") & alone[
        "family"
    ].eq("B")
    same_rows(outcome.frame, alone[~failed])
    assert outcome.frame["machine"].str.endswith("1 thread").all()


def test_an_idle_worker_takes_over_from_a_dead_one(tmp_path, orders):
    """The last unit kills its worker when the other one has nothing left to do."""
    orders(iris__B="die once")
    outcome = make_study(tmp_path / "out", sets=["iris"]).run(ProcessEngine(2), show=False)
    assert outcome.ok
    assert sorted(orders.done()) == ["iris A", "iris B", "iris B"]
    assert len({line.split()[0] for line in orders.lines()}) == 2


def test_workers_that_cannot_start(tmp_path, orders, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match=r"workers cannot start: ended with exit code 1"):
        make_study(tmp_path / "out").run(ProcessEngine(1), show=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(BenchError, match="cannot be started"):
        make_study(tmp_path / "out").run(ProcessEngine(1), show=False)


def test_engines_by_name(monkeypatch):
    assert isinstance(make_engine("process", 3), ProcessEngine)
    assert make_engine("process", 3).slots == 3
    assert make_engine("process").slots >= 1
    assert isinstance(make_engine("process", 0), SerialEngine)
    assert isinstance(make_engine("serial"), SerialEngine)
    for name, workers in (("threads", 1), ("process", -1)):
        with pytest.raises(ldlt.OptionError):
            make_engine(name, workers)
    monkeypatch.setattr("ldlt.bench.engines.find_spec", lambda _: None)
    with pytest.raises(ldlt.MissingExtraError, match=r"ldlt\[ray\]"):
        make_engine("ray")


def test_the_serial_engine_leaves_the_threads_alone(orders):
    stand_in = importlib.import_module("stand_in")
    before = torch.get_num_threads()
    unit = stand_in.Unit("paper", "iris", "A")
    work = Work({"paper": stand_in.Fake()}, (0,), None, "stand_in")
    (outcome,) = SerialEngine().map(work, [unit], lambda _: None)
    assert len(outcome.rows) == 4
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_ray_gives_the_same_rows(tmp_path, orders):
    pytest.importorskip("ray")
    orders(wine__A="raise", iris__B="die once")
    code = textwrap.dedent(
        """
        import sys
        import stand_in
        from ldlt_bench.data import Embedded
        from ldlt.bench.engines import make_engine
        from ldlt.bench.study import Study
        study = Study([stand_in.Fake()], ["A", "B"], ["iris", "wine"], [0], Embedded(), sys.argv[1], module="stand_in")
        print(sorted((unit.dataset, unit.family) for unit in study.run(make_engine("ray", 2)).failures))
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ray")], capture_output=True, text=True, timeout=200, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[('wine', 'A')]"  # above it, what ray says of the dead worker
    orders()
    alone = make_study(tmp_path / "one", sets=["iris", "wine"]).run(SerialEngine(), show=False).frame
    failed = alone["dataset"].eq("wine") & alone["family"].eq("A")
    same_rows(load_study(tmp_path / "ray")[0], alone[~failed])


# --- killed and interrupted ----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_kill_the_whole_run_then_go_on(tmp_path, orders, modules):
    """SIGKILL in the middle: workers vanish, finished units stay, and the end is that of a run without trouble."""
    out = tmp_path / "out"
    orders(wine__A="sleep 300", wine__B="sleep 300")  # longer than any wait below: workers do not end by themselves
    run = start_script(modules, out, 2)
    try:
        wait_for(lambda: {"wine A", "wine B"} <= set(orders.done()))
        workers = {int(line.split()[0]) for line in orders.lines()}
        assert len(workers) == 2
        run.send_signal(signal.SIGKILL)
        run.wait()
        wait_for(lambda: not any(map(alive, workers)))
    finally:
        run.kill()
        run.communicate()
    finished = {path.name for path in (out / "units").glob("*.parquet")}
    assert 0 < len(finished) <= 4
    frame, _ = load_study(out)  # what is there can be looked at
    assert len(frame) == 4 * len(finished)
    assert (out / "run.lock").exists()  # of a dead process: no obstacle
    (out / "units" / ".half.parquet.1.tmp").write_bytes(b"half")  # as if killed while writing
    orders()
    resumed = make_study(out).run(SerialEngine(), show=False)
    assert resumed.ok
    assert resumed.computed == 6 - len(finished)
    assert not list(out.rglob("*.tmp"))
    plain = make_study(tmp_path / "plain").run(SerialEngine(), show=False)
    same_rows(resumed.frame, plain.frame)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_interrupt(tmp_path, orders, modules):
    """Ctrl-C reaches the whole group: the parent ends its workers at once and counts what is safe."""
    out = tmp_path / "out"
    orders(wine__A="sleep 60", wine__B="sleep 60")
    run = start_script(modules, out, 1)
    try:
        wait_for(lambda: {"wine A", "wine B"} & set(orders.done()))
        workers = {int(line.split()[0]) for line in orders.lines()}
        begun = time.monotonic()
        os.killpg(run.pid, signal.SIGINT)
        text, _ = run.communicate(timeout=10)
        assert time.monotonic() - begun < 5
    finally:
        run.kill()
        run.wait()
    safe = len(list((out / "units").glob("*.parquet")))
    assert run.returncode == 130
    assert text.strip() == f"{safe} of 6 safe"
    assert not any(map(alive, workers))
    assert not (out / "run.lock").exists()


# --- the command line ----------------------------------------------------------------------------------------


@pytest.fixture
def protocols(orders, monkeypatch):
    """The command line with the stand-in at work."""
    run = command.run_bench

    def with_stand_in(arguments: Namespace) -> int:
        arguments.module = "stand_in"
        return run(arguments)

    monkeypatch.setattr(command, "run_bench", with_stand_in)
    monkeypatch.setattr(command, "_page", lambda frame, path, out: (path, ""))


BENCH = ["bench", "--engine", "serial", "--families", "aol", "LDLT-R", "--sets", "iris", "wine"]


def test_bench_prints_a_table(tmp_path, protocols, capsys):
    out = tmp_path / "out"
    assert main([*BENCH, "--out", str(out), "--epochs", "2"]) == 0
    text = capsys.readouterr()
    assert "LDLT-R" in text.out
    assert "±" in text.out
    assert "SHORTENED" in text.out
    assert "report.html" in text.out
    assert "4 of 4 units" in text.err
    settings = read_settings(out)
    assert settings["shortened"] is True
    assert settings["command"].startswith("ldlt bench --engine serial")
    assert set(settings["families"]) == {"AOL", "LDLT-R"}


def test_bench_for_machines(tmp_path, protocols, orders, capsys):
    orders(wine__AOL="raise")
    arguments = [*BENCH, "--out", str(tmp_path / "out"), "--json", "--protocol", "both", "--seeds", "2"]
    assert main(arguments) == 1
    text = capsys.readouterr()
    found = json.loads(text.out)
    assert {entry["protocol"] for entry in found["failed"]} == {"paper", "tuned"}
    assert found["units"] == 8
    assert "2 units failed" in text.err
    assert "tries them again" in text.err
    orders()
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == []
    assert found["computed"] == 2
    assert found["rows"] == 8 * 4 * 2
    assert {row["algorithm"] for row in found["summary"]["tuned"]} == {"AOL", "LDLT-R"}


def test_bench_interrupted(tmp_path, protocols, monkeypatch, capsys):
    write, count = Store.write, 0

    def interrupt_at_second(self, *arguments):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return write(self, *arguments)

    monkeypatch.setattr(Store, "write", interrupt_at_second)
    assert main([*BENCH, "--out", str(tmp_path / "out")]) == 130
    assert "1 of 4 units are safe; the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sets", "irsi"], "do you mean iris"),
        (["--families", "LDLT-X"], "LDLT-R"),
        (["--data", "missing.zip"], "missing.zip"),
    ],
)
def test_bench_refuses_before_any_work(tmp_path, orders, capsys, arguments, words):
    assert main(["bench", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--seeds", "-1"], ["--workers", "x"], ["--engine", "gpu"]])
def test_bench_refuses_bad_numbers(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_report_of_nothing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no results" in capsys.readouterr().err


def test_help_loads_nothing_heavy():
    code = (
        "import sys, ldlt.cli\n"
        "try: ldlt.cli.main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('pandas', 'pyarrow', 'scipy', 'ray', 'rich', 'sklearn') if name in sys.modules])"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert text.strip().endswith("[]")
    assert "examples:" in text


# --- the real work -------------------------------------------------------------------------------------------


def test_real_networks_same_seed_same_rows(tmp_path, capsys):
    frames = []
    for name in ("one", "two"):
        arguments = ["bench", "--engine", "serial", "--sets", "iris", "--families", "AOL", "LDLT-R", "--epochs", "1"]
        assert main([*arguments, "--out", str(tmp_path / name), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["shortened"] is True
        assert Path(found["report"]).stat().st_size > 1000
        frames.append(load_study(tmp_path / name)[0])
    same_rows(*frames)
    assert sorted(frames[0]["fold"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert main(["report", str(tmp_path / "one"), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_real_networks_killed_and_resumed(tmp_path):
    """The command as users call it: killed, resumed, and equal to one that was left alone."""
    options = ["--sets", "iris", "wine", "--families", "AOL", "SLL", "LDLT-L", "--epochs", "4", "--json"]
    line = [sys.executable, "-m", "ldlt.cli", "bench", *options, "--workers", "2", "--out"]
    run = subprocess.Popen([*line, str(tmp_path / "killed")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(list((tmp_path / "killed").glob("units/*.parquet"))) >= 2, 200)
    finally:
        run.kill()
        run.communicate()
    ran = subprocess.run([*line, str(tmp_path / "killed")], capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(ran.stdout)
    assert found["units"] == 6
    assert found["computed"] <= 4
    assert main(["bench", *options, "--engine", "serial", "--out", str(tmp_path / "alone")]) == 0
    same_rows(load_study(tmp_path / "killed")[0], load_study(tmp_path / "alone")[0])


# --- progress ------------------------------------------------------------------------------------------------


def test_pace_weighs_units_by_cost():
    now = 0.0
    small, large, last = (Unit(family=name) for name in "ABC")
    pace = Pace({small: 1.0, large: 100.0, last: 100.0}, done=4, slots=lambda: 2, now=lambda: now)
    assert pace.total == 7
    assert pace.remaining() is None
    pace.start(small)
    now = 2.0
    pace.finish(small, 2.0)
    assert pace.remaining() == pytest.approx(200.0)  # 200 of cost at 2 s each, by two workers
    pace.start(large)
    pace.start(last)
    now = 52.0
    assert pace.remaining() == pytest.approx(150.0)
    now = 1000.0
    assert pace.remaining() == 0.0
    pace.finish(large, 900.0, ok=False)
    pace.finish(last, 900.0)
    assert (pace.done, pace.failed, pace.remaining()) == (6, 1, 0.0)


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(Pace({Unit(): 1.0}), stream, interval=0.05) as progress:
        progress.start(Unit())
        progress.message("something happened")
        time.sleep(0.2)
        progress.finish(Unit(), 0.2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ldlt: something happened"
    assert any("[iris A]" in line for line in lines)
    assert lines[-1].startswith("ldlt: 1 of 1 units")


def test_a_bar_on_a_terminal():
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(Pace({Unit(dataset="[red]odd"): 1.0}), stream) as progress:
        progress.start(Unit(dataset="[red]odd"))
        progress.message("[bold]something happened")
        progress.finish(Unit(dataset="[red]odd"), 0.2)
    assert "1/1 units" in stream.getvalue()
    assert "[bold]something happened" in stream.getvalue()


def test_clock_and_provenance():
    assert clock(3599.6) == "1:00:00"
    found = provenance()
    assert found["ldlt_version"] == ldlt.__version__
    assert all(isinstance(text, str) and text for text in found.values())
