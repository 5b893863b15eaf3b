"""``ldlt train``, ``ldlt predict`` and ``ldlt completion``: what they write and print, and how they refuse."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_diabetes, load_iris

import ldlt
from ldlt import cli, estimators
from ldlt.cli import main
from ldlt.completion import script
from ldlt.tables import command, reading

pytest.importorskip("safetensors")

QUICK = ["--width", "8", "--depth", "1", "--epochs", "4"]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        try:
            code = main([str(w) for w in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A classifier and a regressor with their data, made once."""
    folder = tmp_path_factory.mktemp("trained")
    iris = load_iris(as_frame=True).frame
    iris["target"] = np.array(["setosa", "versicolor", "virginica"])[iris["target"]]
    iris.rename(columns={"target": "species"}).to_csv(folder / "iris.csv", index=False)
    load_diabetes(as_frame=True, scaled=False).frame.iloc[:100].to_csv(folder / "diabetes.csv", index=False)
    assert main(["train", str(folder / "iris.csv"), "--width", "8", "--epochs", "20", "--quiet"]) == 0
    assert main(["train", str(folder / "diabetes.csv"), "--bound", "0.5", *QUICK]) == 0
    return folder


@pytest.fixture
def files(trained, run, tmp_path):
    for path in trained.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path


def rows(out):
    return list(csv.DictReader(io.StringIO(out)))


# -- train -------------------------------------------------------------------------------------------------------------


def test_classification(files, run):
    code, out, err = run("train", "iris.csv", "--target", "species", "--out", "new.safetensors", *QUICK)
    assert (code, err) == (0, "")
    assert "classification (found from the target; --task overrides)" in out
    assert "tested on" in out
    assert "  certified at 0.25" in out
    assert "rigorous                   yes" in out
    assert ldlt.verify("new.safetensors").rigorous
    loaded = ldlt.load("new.safetensors")
    assert loaded.meaning.classes == ("setosa", "versicolor", "virginica")
    assert loaded.meaning.target == "species"
    assert loaded.meaning.rows == 120
    card = Path("new.card.md").read_text()
    assert "Results on 30 given rows" in card
    assert loaded.certificate.fingerprint in card


def test_figures_for_machines_are_those_of_the_held_out_rows(files, run):
    words = ("train", "iris.csv", "--seed", "3", "--json", *QUICK)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["trained_on"], found["tested_on"], found["classes"]) == (120, 30, 3)
    shares = found["test"]["certified_accuracy"]
    assert shares == sorted(shares, reverse=True)
    assert found["test"]["accuracy"] >= shares[0]
    table = reading.read_table("iris.csv")
    _, test = reading.split(table, 0.2, 3)
    loaded = ldlt.load(found["model"])
    assert found["model"] == "iris.ldlt.safetensors"
    accuracy = (loaded.predict(table.features.iloc[test]) == table.target[test]).mean()
    assert found["test"]["accuracy"] == pytest.approx(accuracy)
    assert found["bound"] == loaded.certificate.bound
    again = json.loads(run(*words)[1])
    differ = {k for k in found if found[k] != again[k]}
    assert differ <= {"seconds"}


def test_regression(files, run):
    code, out, _ = run("train", "diabetes.csv", "--bound", "0.5", *QUICK, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["task"] == "regression"
    assert found["test"]["change_per_unit"] == pytest.approx(found["bound"])
    assert "mean absolute error" in run("train", "diabetes.csv", *QUICK)[1]
    assert "R²" in run("train", "diabetes.csv", *QUICK)[1]


def test_without_held_out_rows(files, run):
    code, out, _ = run("train", "iris.csv", "--test-share", "0", *QUICK)
    assert code == 0
    assert "tested on" not in out
    assert "Results" not in Path("iris.ldlt.card.md").read_text()
    assert ldlt.load("iris.ldlt.safetensors").meaning.rows == 150


def test_options_reach_the_estimator(files, run, monkeypatch):
    seen = {}
    fit = estimators.LipschitzClassifier.fit

    def spy(self, X, y):
        seen.update(self.get_params())
        return fit(self, X, y)

    monkeypatch.setattr(estimators.LipschitzClassifier, "fit", spy)
    words = ["--width", "6", "--depth", "3", "--epochs", "2", "--bound", "2", "--margin", "1", "--patience", "5"]
    assert run("train", "iris.csv", *words, "--seed", "7", "--drop", "sepal width (cm)")[0] == 0
    assert (seen["hidden"], seen["epochs"], seen["bound"], seen["margin"]) == ((6, 6, 6), 2, 2.0, 1.0)
    assert (seen["early_stopping"], seen["patience"], seen["random_state"]) == (True, 5, 7)
    assert len(ldlt.load("iris.ldlt.safetensors").meaning.features) == 3


def test_an_onnx_file(files, run):
    pytest.importorskip("onnxscript")
    code, _, err = run("train", "iris.csv", "--out", "iris.onnx", *QUICK)
    assert (code, err) == (0, "")
    assert run("verify", "iris.onnx")[0] == 0
    code, out, _ = run("predict", "iris.onnx", "iris.csv")
    assert code == 0
    assert {r["prediction"] for r in rows(out)} <= {"setosa", "versicolor", "virginica"}


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["a", "b"] * 10, "classification"),
        ([True, False] * 10, "classification"),
        ([0, 1, 2, 1] * 5, "classification"),
        ([0.0, 1.0] * 10, "classification"),
        (list(range(20)), "regression"),
        ([0.5, 1.5] * 10, "regression"),
        (list(range(30)) * 2, "regression"),
    ],
)
def test_the_task_is_found_from_the_target(values, task, tmp_path):
    pd.DataFrame({"x": np.arange(len(values)), "y": values}).to_csv(tmp_path / "t.csv", index=False)
    table = reading.read_table(str(tmp_path / "t.csv"))
    assert (table.task, table.inferred) == (task, True)
    if task == "classification" and not isinstance(values[0], str):
        assert reading.read_table(str(tmp_path / "t.csv"), task="regression").target.dtype == np.float64


def test_every_class_is_trained_on():
    target = np.array(["rare"] + ["often"] * 50)
    table = reading.Table(pd.DataFrame({"x": np.arange(51.0)}), target, "y", "classification", True)
    for seed in range(20):
        train, test = reading.split(table, 0.5, seed)
        assert set(target[train]) == {"rare", "often"}
        assert len(np.intersect1d(train, test)) == 0
        assert len(train) + len(test) == 51


GOOD = "a,b,y\n" + "".join(f"{i},{-i},{i % 2}\n" for i in range(20))
BAD = {
    "missing file": (None, [], "does not exist"),
    "folder": ("folder", [], "not a file"),
    "empty": ("", [], "is empty"),
    "header only": ("a,b,y\n", [], "is empty"),
    "no header": ("1,2,3\n4,5,6\n", [], "has no header"),
    "duplicate columns": ("a,a,y\n1,2,3\n", [], "has the column 'a' 2 times"),
    "nameless column": (",a,y\n1,2,3\n", [], "index=False"),
    "missing column": (GOOD, ["--target", "z"], "has no column 'z'; it has: a, b, y"),
    "missing column to drop": (GOOD, ["--drop", "z"], "has no column 'z'"),
    "dropped target": (GOOD, ["--target", "y", "--drop", "y"], "cannot be left out"),
    "only the target": ("y\n1\n2\n", [], "no columns besides the target"),
    "nothing left": ("y\n1\n2\n", ["--drop", "y"], "no column"),
    "text feature": ("a,b,y\n1,Paris,0\n2,Rome,1\n", [], "get_dummies(table, columns=['b'])"),
    "mixed feature": ("a,b,y\n1,2,0\n2,?,1\n", [], "'?' in row 2"),
    "missing value": ("a,b,y\n1,2,0\n2,,1\n", [], "column 'b' has 1 missing value, first in row 2"),
    "missing word": ("a,b,y\n1,2,None\n2,3,some\n", [], "row 1 (nothing, or a word such as NA, None or null)"),
    "decimal commas": ("a;y\n1,5;0\n2,5;1\n", ["--separator", ";"], "'1,5' in row 1): write decimals with a point"),
    "another encoding": ("größe,y\n1,0\n2,1\n".encode("latin-1"), [], "is not text in UTF-8"),
    "one value": ("a,y\n1,0.5\n2,0.5\n3,0.5\n", [], "only one value, 0.5"),
    "missing target": ("a,b,y\n1,2,\n2,3,\n", [], "column 'y' has 2 missing values"),
    "infinite value": ("a,b,y\n1,2,0\n2,inf,1\n", [], "has the value inf in row 2"),
    "one class": ("a,y\n1,0\n2,0\n3,0\n", [], "only one class, 0"),
    "text to regress": ("a,y\n1,u\n2,v\n", ["--task", "regression"], "--task classification"),
    "long row": ("a,y\n1,2,3\n4,5,6\n", [], "cannot be read as CSV"),
    "ragged row": ("a,y\n1,2\n4,5,6\n", [], "cannot be read as CSV"),
    "not text": (b"a,y\n\xff\xfe,1\n", [], "is not text in UTF-8"),
    "other separator": ("a;y\n1;2\n", [], "say --separator ';'"),
    "long separator": (GOOD, ["--separator", "ab"], "one character"),
    "bound 0": (GOOD, ["--bound", "0"], "--bound must be a positive finite number, not 0"),
    "negative bound": (GOOD, ["--bound", "-1"], "--bound must be a positive finite number, not -1"),
    "infinite bound": (GOOD, ["--bound", "inf"], "--bound must be a positive finite number"),
    "no number for a bound": (GOOD, ["--bound", "nan"], "--bound must be a positive finite number"),
    "test share": (GOOD, ["--test-share", "1"], "below 1"),
    "tiny test share": (GOOD, ["--test-share", "0.01"], "too few"),
    "one row": ("a,y\n1,0.5\n", ["--test-share", "0"], "too few to train on"),
    "epochs": (GOOD, ["--epochs", "0"], "--epochs must be at least 1"),
    "width": (GOOD, ["--width", "-3"], "--width must be at least 1"),
    "seed": (GOOD, ["--seed", "-1"], "--seed must be"),
    "margin": (GOOD, ["--margin", "-1"], "--margin must be"),
    "margin of a regression": (GOOD, ["--margin", "1", "--task", "regression"], "--margin is for classification"),
    "out": (GOOD, ["--out", "model.pt"], "must end in .safetensors or .onnx"),
    "numbers of Python": (GOOD.replace("\n7,", "\n7_0,"), [], "'7_0' in row 8"),
    "long numbers": (GOOD.replace(",-", ",1234567890123456789012345"), [], "--drop 'b'"),
    "target out of range": ("a,y\n" + "".join(f"{i},{i}.5e300\n" for i in range(9)), QUICK, "training failed"),
    "too wide": (GOOD, ["--width", "100000000"], "training failed"),
    "long name to write": (GOOD, ["--out", "a" * 300 + ".onnx"], "too long"),
    "long name of a column": (GOOD.replace("a,", "a" * 2000 + ","), QUICK, "'features' is too long"),
    "out in no folder": (GOOD, ["--out", "none/model.onnx"], "its folder does not exist"),
}


@pytest.mark.parametrize("kind", BAD)
def test_every_error_is_one_clear_line(kind, run, tmp_path):
    content, words, reason = BAD[kind]
    path = tmp_path / "data.csv"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.iterdir())
    code, out, err = run("train", "data.csv", *words)
    assert (code, out) == (2, "")
    assert reason in err
    assert err.startswith("ldlt: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["", ".", "/", "a" * 5000, "data.zip", "data.csv.gz", "data.csv.xz", "data.tar"])
def test_data_that_is_no_table(name, run, tmp_path):
    if name.startswith("data"):
        (tmp_path / name).write_bytes(gzip.compress(GOOD.encode())[:-9])
    code, out, err = run("train", name)
    assert (code, out) == (2, "")
    assert err.startswith("ldlt: data '")
    assert err.count("\n") == 1


def test_tabs_can_be_written(run, tmp_path):
    (tmp_path / "t.tsv").write_text(GOOD.replace(",", "\t"))
    code, _, err = run("train", "t.tsv", *QUICK)
    assert code == 2
    assert "--separator '\\t'" in err
    assert run("train", "t.tsv", "--separator", "\\t", *QUICK)[0] == 0
    assert run("predict", "t.ldlt.safetensors", "t.tsv", "--separator", "\\t")[0] == 0


def test_numbers_that_overflow(files, run):
    table = pd.read_csv("diabetes.csv").iloc[:1].astype(float)
    table.iloc[0, :] = [(-1) ** i * 1.7e308 for i in range(table.shape[1])]
    table.to_csv("huge.csv", index=False)
    words = ["predict", "diabetes.ldlt.safetensors", "huge.csv", "--radius", "1"]
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["upper"] is None
    assert float(rows(run(*words)[1])[0]["upper"]) == np.inf


@pytest.mark.parametrize("package", ["pandas", "sklearn", "safetensors"])
def test_missing_packages(package, files, run, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == package else object())
    code, _, err = run("train", "iris.csv")
    assert code == 2
    assert f"'{package}' is needed" in err


def test_tables_from_spreadsheets(run, tmp_path):
    lines = ["a; b; y"] + [f"{i}; {i * i}; {'u' if i % 2 else 'v'}" for i in range(20)]
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())  # a mark of Windows in front
    code, out, _ = run("train", "t.csv", "--separator", ";", "--json", *QUICK)
    assert code == 0
    assert json.loads(out)["features"] == 2
    assert ldlt.load("t.ldlt.safetensors").meaning.features == ("a", "b")


def test_what_cannot_be_proven_is_said(files, run, monkeypatch):
    saved = command._saved

    def unproven(*args):
        deployed = saved(*args)
        deployed.certificate = dataclasses.replace(
            deployed.certificate, status="not certified", reason="no proof", bound=float("inf"), rigorous=False
        )
        return deployed

    monkeypatch.setattr(command, "_saved", unproven)
    code, out, _ = run("train", "iris.csv", *QUICK)
    assert code == 1
    assert "not certified: no proof" in out


def test_progress_is_on_standard_error(files, run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = command._Progress(show=True)
    with progress:
        progress(estimators.Epoch(3, 10, 0.5, float("nan"), 1.0))
    assert run("data", "list")[2].startswith("\repoch 3/10   loss 0.5000")


def test_a_bound_beyond_floating_point_is_told_once(files, run):
    table = pd.read_csv("iris.csv")
    table.iloc[:, 0] *= 1e-300
    table.to_csv("tiny.csv", index=False)
    code, out, err = run("train", "tiny.csv", *QUICK)
    assert (code, err) == (1, "")
    assert "not certified: not proven" in out


def test_a_place_that_cannot_be_written_to(files, run):
    code, _, err = run("predict", "iris.ldlt.safetensors", "iris.csv", "--out", "none/found.csv")
    assert (code, err) == (2, "ldlt: cannot write 'none/found.csv': No such file or directory\n")


def test_wide_tables_train_in_time(run):
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.standard_normal((30, estimators.base.WIDE + 1))).add_prefix("f")
    table.assign(y=(table["f0"] > 0).astype(int)).to_csv("wide.csv", index=False)
    assert run("train", "wide.csv", *QUICK)[0] == 0
    assert ldlt.load("wide.ldlt.safetensors").meaning.architecture.startswith("FeedForward")


@pytest.mark.parametrize(("reads", "code", "message"), [(False, 141, ""), (True, 2, "No space left on device")])
def test_output_that_nobody_can_take(reads, code, message, files):
    if reads:
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        end, out = os.pipe()
        os.close(end)
    words = [sys.executable, "-m", "ldlt", "predict", "iris.ldlt.safetensors", "iris.csv"]
    found = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, cwd=files, check=False)
    os.close(out)
    assert (found.returncode, found.stderr) == (code, f"ldlt: {message}\n" * bool(message))


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C after an epoch of training."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    when = {"epoch": 2}

    def call(self, epoch):
        if epoch.epoch == when["epoch"]:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command._Progress, "__call__", call)
    yield when
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_interruption_keeps_what_was_learnt(files, run):
    code, out, _ = run("train", "iris.csv", "--width", "8", "--epochs", "50", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["epochs"] == 2
    assert found["notes"] == ["training was interrupted; the network of epoch 2 was kept"]
    assert ldlt.verify("iris.ldlt.safetensors").rigorous


def test_interruption_before_there_was_a_model(files, run, monkeypatch):
    for path in files.glob("*.ldlt.*"):
        path.unlink()

    def fit(self, X, y):
        raise KeyboardInterrupt

    monkeypatch.setattr(estimators.LipschitzClassifier, "fit", fit)
    code, out, err = run("train", "iris.csv")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert not list(files.glob("*.ldlt.*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_to_a_process(files, number):
    for path in files.glob("iris.ldlt.*"):
        path.unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ldlt.__file__).parent.parent)}
    # where the tests run in the background of a shell, Ctrl-C is ignored, and so it would be by the process
    heed = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    train = [sys.executable, "-m", "ldlt", "train", "iris.csv", "--epochs", "1000000", "--width", "8"]
    words = [sys.executable, "-c", heed, *train]
    terminal, end = pty.openpty()  # progress is for terminals
    process = subprocess.Popen(words, cwd=files, env=environment, stderr=end, stdout=subprocess.PIPE, text=True)
    os.close(end)
    seen = b""
    while b"epoch 3/" not in seen:
        seen += os.read(terminal, 4096)
    process.send_signal(number)
    reader = threading.Thread(target=_drain, args=(terminal,), daemon=True)  # a full terminal would block the process
    reader.start()
    out, _ = process.communicate(timeout=120)
    reader.join(10)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert not list(files.glob("*iris.ldlt*"))
    else:
        assert process.returncode == 0
        assert "note: training was interrupted; the network of epoch" in out
        assert ldlt.verify(files / "iris.ldlt.safetensors").rigorous


def _drain(terminal):
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # the other end was closed
        os.close(terminal)


# -- predict -----------------------------------------------------------------------------------------------------------


def test_predictions_with_radii(files, run):
    code, out, err = run("predict", "iris.ldlt.safetensors", "iris.csv")
    assert (code, err) == (0, "")
    found = rows(out)
    loaded = ldlt.load("iris.ldlt.safetensors")
    table = pd.read_csv("iris.csv")
    classes, radii = loaded.predict_certified(table)
    assert [r["prediction"] for r in found] == classes.tolist()
    assert [float(r["certified_radius"]) for r in found] == radii.tolist()
    assert run("predict", "iris.ldlt.safetensors", "iris.csv", "--out", "found.csv")[1] == ""
    assert Path("found.csv").read_text() == out
    machine = json.loads(run("predict", "iris.ldlt.safetensors", "iris.csv", "--json")[1])
    assert machine[0] == {"prediction": classes[0], "certified_radius": radii[0]}
    table[table.columns[::-1]].iloc[:3].to_csv("turned.csv", index=False)  # columns go by name
    turned = [float(r["certified_radius"]) for r in rows(run("predict", "iris.ldlt.safetensors", "turned.csv")[1])]
    assert turned == pytest.approx(radii[:3].tolist(), rel=1e-9)  # another batch size rounds differently


def test_predictions_with_intervals(files, run):
    found = rows(run("predict", "diabetes.ldlt.safetensors", "diabetes.csv", "--radius", "0.1")[1])
    assert len(found) == 100
    assert all(float(r["lower"]) < float(r["prediction"]) < float(r["upper"]) for r in found)
    assert list(rows(run("predict", "diabetes.ldlt.safetensors", "diabetes.csv")[1])[0]) == ["prediction"]


def test_models_without_names(run, tmp_path):
    ldlt.save(ldlt.nn.FeedForward(2, [4], 3), "net.safetensors")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    found = rows(run("predict", "net.safetensors", "t.csv")[1])
    assert list(found[0]) == ["output_0", "output_1", "output_2"]
    found = rows(run("predict", "net.safetensors", "t.csv", "--radius", "1")[1])
    assert float(found[0]["output_1_lower"]) < float(found[0]["output_1"]) < float(found[0]["output_1_upper"])
    (tmp_path / "t.csv").write_text("a\n1\n")
    code, _, err = run("predict", "net.safetensors", "t.csv")
    assert code == 2
    assert "has 1 columns, the model reads 2" in err


def test_refusals_of_predict(files, run):
    table = pd.read_csv("iris.csv")
    table.drop(columns="sepal width (cm)").to_csv("narrow.csv", index=False)
    Path("broken.safetensors").write_bytes(b"nothing")
    changed = bytearray(Path("iris.ldlt.safetensors").read_bytes())
    changed[-5] ^= 1
    Path("changed.safetensors").write_bytes(changed)
    for words, code, reason in (
        (["iris.ldlt.safetensors", "narrow.csv"], 2, "has no column 'sepal width (cm)'"),
        (["iris.ldlt.safetensors", "none.csv"], 2, "does not exist"),
        (["none.safetensors", "iris.csv"], 2, "does not exist"),
        (["broken.safetensors", "iris.csv"], 2, "not a file of safetensors"),
        (["iris.csv", "iris.csv"], 2, "neither .safetensors nor .onnx"),
        (["changed.safetensors", "iris.csv"], 1, "is rejected"),
        (["iris.ldlt.safetensors", "iris.csv", "--radius", "1"], 2, "--radius is for regressors"),
        (["diabetes.ldlt.safetensors", "diabetes.csv", "--radius", "-1"], 2, "not negative"),
        (["iris.ldlt.safetensors", "iris.csv", "--separator", ""], 2, "one character"),
        (["iris.ldlt.safetensors", "iris.csv", "--out", "none/found.csv"], 2, "cannot write"),
    ):
        found, out, err = run("predict", *words)
        assert (found, out) == (code, "")
        assert reason in err
        assert err.count("\n") == 1


# -- help and completion -----------------------------------------------------------------------------------------------


def _commands():
    parser = cli._parser()
    return next(a for a in parser._actions if a.dest == "command").choices


@pytest.mark.parametrize("name", _commands())
def test_help_teaches_by_example(name, run):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert "examples:" in out
    assert f"  ldlt {name}" in out
    assert "exit codes: 0" in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_examples_in_help_are_accepted_by_the_parser():
    parser = cli._parser()
    for name, command_parser in _commands().items():
        for line in (command_parser.epilog or "").splitlines():
            if line.startswith(f"  ldlt {name} "):
                words = line[2:].split("  ")[0].split(" >")[0].split("&&")[0].split()[1:]
                assert parser.parse_args(words).command == name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, run):
    pytest.importorskip("shtab")
    code, out, err = run("completion", shell)
    assert (code, err) == (0, "")
    for word in ("train", "certify", "completion", "--test-share" if shell != "fish" else "test-share"):
        assert word in out


def test_completion_in_bash(run, tmp_path):
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    (tmp_path / "ldlt.bash").write_text(run("completion", "bash")[1])
    (tmp_path / "iris.csv").write_text("")

    def complete(*words):
        line = " ".join(f'"{w}"' for w in words)
        text = f"""
source ./ldlt.bash
COMP_WORDS=({line}); COMP_CWORD=$(({len(words)} - 1)); COMP_LINE="{" ".join(words)}"; COMP_POINT=${{#COMP_LINE}}
_shtab_ldlt
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        found = subprocess.run([bash, "-c", text], capture_output=True, text=True, cwd=tmp_path, check=True)
        return found.stdout.split()

    assert complete("ldlt", "tr") == ["train"]
    assert "--target" in complete("ldlt", "train", "--ta")
    assert complete("ldlt", "train", "--task", "cl") == ["classification"]
    assert complete("ldlt", "train", "ir") == ["iris.csv"]
    assert complete("ldlt", "completion", "f") == ["fish"]


def test_completion_without_its_package(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = run("completion", "bash")
    assert code == 2
    assert "ldlt[completion]" in err
    with pytest.raises(ldlt.OptionError, match="does not know"):
        shtab = type(sys)("shtab")
        shtab.SUPPORTED_SHELLS, shtab.__version__ = ["bash"], "0"
        monkeypatch.setitem(sys.modules, "shtab", shtab)
        script(cli._parser(), "fish")
