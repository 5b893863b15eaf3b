"""The command line: what it prints and writes, how it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_iris
from torch import nn
from typer.testing import CliRunner

import ldlt
from ldlt import cli
from ldlt.certificates import METHODS
from ldlt.progress import Progress

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

QUICK = ["--width", "8", "--depth", "1", "--epochs", "4"]
LONGER = ["--width", "8", "--epochs", "20", "--seed", "3"]
INPUTS = 5


@pytest.fixture
def run():
    """Run a command: exit code, standard output, standard error."""

    def call(*words):
        found = CliRunner().invoke(cli.app, [str(w) for w in words])
        assert "Traceback" not in found.stderr
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.exit_code, found.stdout, found.stderr

    return call


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))


def write(path, net, shape=(INPUTS,), tail=(), kind=TensorProto.FLOAT):
    """The network as a file: Gemm and Relu, then operators without arguments."""
    nodes, weights, name = [], [], "x"
    for i, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            for part, tensor in layer.named_parameters():
                weights.append(numpy_helper.from_array(tensor.detach().numpy(), f"{part}{i}"))
            nodes.append(helper.make_node("Gemm", [name, f"weight{i}", f"bias{i}"], [f"v{i}"], transB=1))
        else:
            nodes.append(helper.make_node("Relu", [name], [f"v{i}"]))
        name = f"v{i}"
    for operator in tail:
        nodes.append(helper.make_node(operator, [name], [operator]))
        name = operator
    ends = [helper.make_tensor_value_info("x", kind, ["n", *shape])], [helper.make_tensor_value_info(name, kind, None)]
    graph = helper.make_graph(nodes, "net", *ends, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tables with models that were trained on them, a foreign network with its certificate; made once."""
    folder = tmp_path_factory.mktemp("made")
    iris = load_iris(as_frame=True).frame
    iris["target"] = np.array(["setosa", "versicolor", "virginica"])[iris["target"]]
    iris.rename(columns={"target": "species"}).to_csv(folder / "iris.csv", index=False)
    load_diabetes(as_frame=True, scaled=False).frame.iloc[:100].to_csv(folder / "diabetes.csv", index=False)
    outcomes = {}
    for name, words in {"iris": LONGER, "diabetes": ["--bound", "0.5", *QUICK]}.items():
        found = CliRunner().invoke(cli.app, ["train", str(folder / f"{name}.csv"), "--json", *words])
        assert found.exit_code == 0, found.output
        outcomes[name] = json.loads(found.stdout)
    write(folder / "net.onnx", network())
    ldlt.certify(folder / "net.onnx").save(folder / "net.cert.json")
    return folder, outcomes


@pytest.fixture
def files(made, tmp_path, monkeypatch):
    """Copies in the working directory."""
    for path in made[0].iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def heeded():
    """Ctrl-C raises an exception, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(heeded, monkeypatch):
    """Ctrl-C when the second step of some work is told."""
    tell, told = Progress.tell, []

    def stop(self, line, done=0):
        told.append(line)
        if len(told) == 2:
            signal.raise_signal(signal.SIGINT)
        tell(self, line, done)

    monkeypatch.setattr(Progress, "tell", stop)


def strict(text):
    """JSON without the constants that it does not have."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def table(out):
    """The rows that are printed for people."""
    lines = (line.split("  ", 1) for line in out.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, value in lines}


def rows(out):
    return list(csv.DictReader(io.StringIO(out)))


# -- train and predict -------------------------------------------------------------------------------------------------


def test_a_classifier_and_its_figures(files, made, run):
    found = made[1]["iris"]
    assert (found["task"], found["status"]) == ("classification", "certified")
    assert found["inferred"]
    assert found["rigorous"]
    assert (found["trained_on"], found["tested_on"], found["classes"]) == (120, 30, 3)
    assert found["test"]["accuracy"] >= found["test"]["certified_accuracy"][0]
    assert found["test"]["certified_accuracy"] == sorted(found["test"]["certified_accuracy"], reverse=True)
    loaded = ldlt.load("iris.ldlt.onnx")
    assert (loaded.meaning.target, loaded.meaning.rows, loaded.certificate.bound) == ("species", 120, found["bound"])
    whole = ldlt.tables.read_table("iris.csv")
    test = ldlt.tables.split(whole, 0.2, 3)[1]
    accuracy = (loaded.predict(whole.features.iloc[test]) == whole.target[test]).mean()
    assert found["test"]["accuracy"] == pytest.approx(accuracy)
    assert loaded.certificate.fingerprint in Path("iris.ldlt.card.md").read_text()
    assert run("verify", "iris.ldlt.onnx")[0] == 0


def test_training_again_gives_the_same_and_a_table_for_people(files, made, run):
    code, out, err = run("train", "iris.csv", *LONGER, "--out", "new.onnx")
    assert (code, err) == (0, "")
    shown = table(out)
    assert (shown["status"], shown["target"], shown["model"]) == ("certified", "species", "new.onnx")
    assert shown["fingerprint"] == made[1]["iris"]["fingerprint"]
    assert Decimal(shown["bound"]) >= Decimal(made[1]["iris"]["bound"])


def test_options_reach_the_estimator(files, run, monkeypatch):
    seen = {}

    def spy(self, X, y):
        seen.update(self.get_params(), columns=list(X.columns), rows=len(X))
        raise ldlt.OptionError("enough")

    monkeypatch.setattr(ldlt.LipschitzClassifier, "fit", spy)
    words = ["--width", 6, "--depth", 3, "--epochs", 2, "--radius", 1, "--balanced", "--patience", 5, "--test-share", 0]
    code, _, err = run("train", "iris.csv", *words, "--seed", 7, "--drop", "sepal width (cm)")
    assert (code, err) == (1, "ldlt: enough\n")
    assert (seen["hidden"], seen["epochs"], seen["radius"], seen["class_weight"]) == ((6, 6, 6), 2, 1.0, "balanced")
    assert (seen["early_stopping"], seen["patience"], seen["random_state"]) == (True, 5, 7)
    assert (len(seen["columns"]), seen["rows"]) == (3, 150)


def test_what_cannot_be_proven_is_said(files, run):
    small = pd.read_csv("iris.csv")
    small.iloc[:, 0] *= 1e-300
    small.to_csv("tiny.csv", index=False)
    code, out, err = run("train", "tiny.csv", *QUICK, "--test-share", 0)
    assert (code, err) == (1, "")
    assert (table(out)["status"], table(out)["bound"]) == ("not certified", "none")


@pytest.mark.parametrize(
    "words",
    [
        *(["--bound", b, "--target", "petal width (cm)", "--drop", "species"] for b in ("0", "-1", "inf", "nan", "x")),
        ["--bound", "1"],
        *([f"--{name}", "0"] for name in ("width", "depth", "epochs", "patience")),
        ["--test-share", "1"],
        *(["--radius", r] for r in ("-1", "nan", "near")),
        ["--seed", "-1"],
        ["--task", "guess"],
        ["--separator", "ab"],
        ["--out", "model.pt"],
        ["--out", "none/model.onnx"],
        ["--out", "."],
        ["--radius", "1", "--task", "regression", "--target", "petal width (cm)", "--drop", "species"],
    ],
)
def test_wrong_usage_of_train(words, files, run):
    before = sorted(files.iterdir())
    code, out, err = run("train", "iris.csv", *words)
    assert (code, out) == (2, "")
    assert err
    assert sorted(files.iterdir()) == before
    assert run("train", "nowhere.csv")[0] == run("train", ".")[0] == run("train", "a" * 5000)[0] == 2


@pytest.mark.parametrize("words", [["--target", "specie"], ["--width", str(10**15), "--target", "species"]])
def test_refusals_of_train_are_one_line(words, files, run):
    code, out, err = run("train", "iris.csv", *words)
    assert (code, out, err.count("\n"), err[:6]) == (1, "", 1, "ldlt: ")


def test_predictions_with_radii(files, run):
    code, out, err = run("predict", "iris.ldlt.onnx", "iris.csv")
    assert (code, err) == (0, "")
    data = pd.read_csv("iris.csv")
    classes, radii = ldlt.load("iris.ldlt.onnx").predict_certified(data)
    assert [r["prediction"] for r in rows(out)] == classes.tolist()
    assert [float(r["certified_radius"]) for r in rows(out)] == radii.tolist()
    assert run("predict", "iris.ldlt.onnx", "iris.csv", "--out", "found.csv")[:2] == (0, "")
    assert Path("found.csv").read_text() == out
    machine = strict(run("predict", "iris.ldlt.onnx", "iris.csv", "--json")[1])
    assert machine[0] == {"prediction": classes[0], "certified_radius": radii[0]}
    data[data.columns[::-1]].iloc[:3].to_csv("turned.tsv", index=False, sep="\t")  # columns go by name
    turned = rows(run("predict", "iris.ldlt.onnx", "turned.tsv", "--separator", "\\t")[1])
    assert [float(r["certified_radius"]) for r in turned] == pytest.approx(radii[:3].tolist(), rel=1e-9)


def test_predictions_with_intervals(files, run):
    words = ["predict", "diabetes.ldlt.onnx", "diabetes.csv"]
    found = rows(run(*words, "--radius", "0.1")[1])
    assert len(found) == 100
    assert all(float(r["lower"]) < float(r["prediction"]) < float(r["upper"]) for r in found)
    assert list(rows(run(*words)[1])[0]) == ["prediction"]
    huge = pd.read_csv("diabetes.csv").iloc[:1].astype(float)
    huge.iloc[0, :] = [(-1) ** i * 1.7e308 for i in range(huge.shape[1])]
    huge.to_csv("diabetes.csv", index=False)
    assert strict(run(*words, "--radius", "1", "--json")[1])[0]["upper"] is None


def test_models_without_names(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ldlt.save(ldlt.nn.FeedForward(2, [4], 3), "net.onnx")
    Path("t.csv").write_text("a,b\n1,2\n3,4\n")
    found = rows(run("predict", "net.onnx", "t.csv", "--radius", "1")[1])
    assert float(found[0]["output_1_lower"]) < float(found[0]["output_1"]) < float(found[0]["output_1_upper"])
    Path("t.csv").write_text("a\n1\n")
    assert run("predict", "net.onnx", "t.csv")[0] == 1


def test_refusals_of_predict(files, run):
    pd.read_csv("iris.csv").drop(columns="sepal width (cm)").to_csv("narrow.csv", index=False)
    Path("broken.onnx").write_bytes(b"nothing")
    for words, code in (
        (["iris.ldlt.onnx", "narrow.csv"], 1),
        (["broken.onnx", "iris.csv"], 1),
        (["net.onnx", "iris.csv"], 1),  # it carries no certificate
        (["iris.csv", "iris.csv"], 1),
        (["iris.ldlt.onnx", "none.csv"], 2),
        (["none.onnx", "iris.csv"], 2),
        (["iris.ldlt.onnx", "iris.csv", "--radius", "1"], 2),
        (["diabetes.ldlt.onnx", "diabetes.csv", "--radius", "-1"], 2),
        (["iris.ldlt.onnx", "iris.csv", "--out", "none/found.csv"], 2),
    ):
        found, out, err = run("predict", *words)
        assert (found, out) == (code, ""), words
        assert code == 2 or err.count("\n") == 1


# -- certify and verify ------------------------------------------------------------------------------------------------


def test_certify_for_people_and_machines(files, run):
    code, out, err = run("certify", "net.onnx", "--out", "new.cert.json")
    assert (code, err) == (0, "")
    shown, stored = table(out), ldlt.Certificate.load("new.cert.json")
    assert (shown["model"], shown["inputs"], shown["outputs"]) == ("net.onnx", "5", "3")
    assert (shown["status"], shown["rigorous"], shown["method"]) == ("certified", "yes", "optimal")
    assert shown["file"] == "new.cert.json"
    assert "note" not in out
    assert Decimal(shown["bound"]) >= Decimal(stored.bound)
    assert float(shown["bound"]) == pytest.approx(stored.bound, rel=1e-8)
    found = strict(run("certify", "net.onnx", "--json")[1])
    assert (found["bound"], found["fingerprint"]) == (stored.bound, stored.fingerprint)
    assert found["pair_bounds"] == stored.pair_bounds().tolist()
    assert found["largest_pair_bound"] == max(map(max, found["pair_bounds"]))
    assert (found["input_shape"], found["region"], found["reason"], found["notes"]) == ([5], None, "", [])
    assert 0 <= found["gap"] < 2e-3
    assert (found["file"], found["interrupted"]) == (None, False)
    assert run("verify", "new.cert.json", "net.onnx")[0] == 0


def test_a_product_of_norms_is_proven_too(files, run):
    assert cli.Method.__args__ == METHODS
    code, out, _ = run("certify", "net.onnx", "--method", "product", "--out", "other.cert.json")
    assert (code, table(out)["rigorous"]) == (0, "yes")
    assert ldlt.Certificate.load("other.cert.json").bound >= ldlt.Certificate.load("net.cert.json").bound
    assert run("verify", "other.cert.json", "net.onnx")[0] == 0


def test_a_bound_without_proof_says_so(files, run):
    code, out, _ = run("certify", "net.onnx", "--center", "0", "--radius", "0.05", "--out", "other.cert.json")
    assert (code, table(out)["rigorous"]) == (0, "no")
    assert "note: the bound is not rigorous" in out


@pytest.mark.parametrize(("center", "kind"), [("0", []), ("0.1,-0.2,0.3,0,1e-1", ["--box"]), ("point.npy", [])])
def test_regions(files, run, center, kind):
    point = np.array([0.1, -0.2, 0.3, 0, 0.1])
    np.save("point.npy", point.astype(np.float32))
    words = ["--center", center, "--radius", "0.05", *kind, "--json", "--out", "local.cert.json"]
    code, out, _ = run("certify", "net.onnx", *words)
    found = strict(out)
    assert (code, found["rigorous"]) == (0, False)
    assert (found["region"]["kind"], found["region"]["radius"]) == ("box" if kind else "ball", 0.05)
    assert found["region"]["center"] == pytest.approx([0.0] * 5 if center == "0" else point.tolist())
    assert found["bound"] <= ldlt.Certificate.load("net.cert.json").bound
    assert run("verify", "local.cert.json", "net.onnx")[0] == 0
    if not kind:
        stored = ldlt.Certificate.load("local.cert.json")
        larger = ldlt.Region("ball", stored.region.center, torch.tensor(100.0))
        dataclasses.replace(stored, region=larger).save("larger.cert.json")
        assert run("verify", "larger.cert.json", "net.onnx")[0] == 1


def test_open_shapes_and_values_inside_the_file(files, run):
    write(files / "open.onnx", network(), shape=("d",), tail=("Softmax",))
    words = ["--output-name", "v4", "--input-shape", "5"]
    assert run("certify", "open.onnx", "--output-name", "v4")[0] == 1
    assert run("certify", "open.onnx", *words, "--out", "open.cert.json")[0] == 0
    stored = ldlt.Certificate.load("open.cert.json")
    assert stored.bound == ldlt.Certificate.load("net.cert.json").bound
    assert run("verify", "open.cert.json", "open.onnx", "--output-name", "v4")[0] == 0
    assert run("verify", "open.cert.json", "open.onnx")[0] == 1
    for shape in ((7,), (5, 1)):
        dataclasses.replace(stored, input_shape=shape).save("wrong.cert.json")
        assert run("verify", "wrong.cert.json", "open.onnx", "--output-name", "v4")[0] == 1
    assert run("certify", "net.onnx", "--input-shape", "4")[0] == 1


def test_one_output_and_many_outputs(files, run):
    for outputs in (1, cli.SHOWN_OUTPUTS + 1):
        write(files / "wide.onnx", network(outputs))
        found = strict(run("certify", "wide.onnx", "--method", "product", "--json")[1])
        assert found["pair_bounds"] is None
        if outputs == 1:
            assert found["largest_pair_bound"] is None
        else:
            assert 0 < found["largest_pair_bound"] <= math.sqrt(2) * found["bound"] * (1 + 1e-12)


def test_no_bound_leaves_no_file(files, run):
    net = network().double()
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight *= 1e150
            layer.bias.zero_()
    write(files / "huge.onnx", net, kind=TensorProto.DOUBLE)
    code, out, _ = run("certify", "huge.onnx", "--json", "--out", "huge.cert.json")
    found = strict(out)
    assert (code, found["status"], found["bound"], found["pair_bounds"]) == (1, "not certified", None, None)
    assert found["reason"]
    assert not Path("huge.cert.json").exists()


def test_a_file_that_cannot_be_written_does_not_lose_the_bound(files, run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ldlt.Certificate, "save", full)
    code, out, err = run("certify", "net.onnx", "--out", "new.cert.json", "--json")
    assert (code, strict(out)["status"], strict(out)["file"]) == (1, "certified", None)
    assert "No space left" in err


def test_time_limit(files, run):
    code, out, _ = run("certify", "net.onnx", "--time-limit", "0", "--json")
    found = strict(out)
    assert (code, found["rigorous"]) == (0, True)
    assert any("time limit" in note for note in found["notes"])


class Bomb:
    def __reduce__(self):
        return Path("exploded").write_text, ("executed",)


def test_damaged_models_and_nothing_but_data_is_read(files, run):
    data, bomb = (files / "net.onnx").read_bytes(), pickle.dumps(Bomb())
    for name, content in {
        "cut.onnx": data[: len(data) // 2],
        "empty.onnx": b"",
        "bomb.onnx": bomb,
        "net.pt": bomb,
    }.items():
        Path(name).write_bytes(content)
        for words in (["certify", name], ["verify", "net.cert.json", name], ["verify", name]):
            code, out, err = run(*words)
            assert (code, bool(out or err)) == (1, True), words
    np.save("objects.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    Path("bomb.npy").write_bytes(bomb)
    Path("zip.npy").write_bytes(b"PK\x03\x04 and no archive")
    np.save("four.npy", np.zeros(4))
    np.save("complex.npy", np.zeros(5, dtype=complex))
    np.save("nan.npy", np.full(5, np.nan))
    np.save("whole.npy", np.zeros(5))
    header = Path("whole.npy").read_bytes()
    Path("cut.npy").write_bytes(header[:-8])
    Path("large.npy").write_bytes(header.replace(b"(5,)", b"(9999999999999,)").replace(b" " * 12 + b"\n", b"\n"))
    for center in (
        *sorted(str(p) for p in Path().glob("*.npy") if p.name != "whole.npy"),
        "none.npy",
        "1,2",
        "1,2,3,4,a",
        "",
    ):
        code, out, err = run("certify", "net.onnx", "--center", center, "--radius", "1")
        assert (code, out, err.count("\n")) == (1, "", 1), center
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "words",
    [
        *(["--input-shape", shape] for shape in ("five", "0", "1,,2", "-5")),
        *(["--time-limit", limit] for limit in ("-1", "nan")),
        *(["--tolerance", tolerance] for tolerance in ("0", "inf")),
        ["--method", "guess"],
        ["--method", "product", "--time-limit", "1"],
        ["--center", "0"],
        ["--radius", "1"],
        ["--box"],
        ["--center", "0", "--radius", "-1"],
        ["--out", "no/such/folder/net.cert.json"],
        ["--out", "."],
        ["--out", "net.onnx"],
    ],
)
def test_wrong_usage_of_certify(words, files, run, monkeypatch):
    monkeypatch.setattr(ldlt, "certify", lambda *_, **__: pytest.fail("the work began"))
    before = (files / "net.onnx").read_bytes()
    code, out, err = run("certify", "net.onnx", *words)
    assert (code, out, bool(err)) == (2, "", True)
    assert (files / "net.onnx").read_bytes() == before


def test_verify_tells_what_was_proven(files, run):
    code, out, _ = run("verify", "net.cert.json", "net.onnx", "--json")
    found, stored = strict(out), ldlt.Certificate.load("net.cert.json")
    assert (code, found["verified"], found["rigorous"]) == (0, True, True)
    assert (found["bound"], found["created"]) == (stored.bound, stored.created)
    assert table(run("verify", "net.cert.json", "net.onnx")[1])["verified"] == "yes"


def test_verify_rejects(files, run):
    text, stored = Path("net.cert.json").read_text(), ldlt.Certificate.load("net.cert.json")
    Path("changed.json").write_text(text.replace('"rigorous": true', '"rigorous": false'))
    Path("cut.json").write_text(text[: len(text) // 2])
    Path("empty.json").write_text("")
    Path("bytes.json").write_bytes(bytes(range(256)))
    dataclasses.replace(stored, bound=0.9 * stored.bound).save("small.json")
    dataclasses.replace(stored, fingerprint="0" * 64).save("stranger.json")
    dataclasses.replace(stored, gram=0.5 * stored.gram).save("pairs.json")
    dataclasses.replace(stored, status="not certified", bound=math.inf, reason="none").save("none.json")
    for name in ("changed", "cut", "empty", "bytes", "small", "stranger", "pairs", "none"):
        code, out, err = run("verify", f"{name}.json", "net.onnx", "--json")
        found = strict(out)
        assert (code, err, found["verified"], found["status"]) == (1, "", False, "rejected"), name
        assert found["reason"]
    net = network()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nextafter(net[0].weight[0, 0], torch.tensor(9.0))
    write(files / "other.onnx", net)
    assert table(run("verify", "net.cert.json", "other.onnx")[1])["status"] == "rejected"
    for words in (["nowhere.json", "net.onnx"], ["net.cert.json", "nowhere.onnx"], ["net.cert.json"], ["."]):
        assert run("verify", *words)[0] == 2


# -- progress and interruptions ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_keeps_the_best_model_so_far(files, run):
    code, out, _ = run("train", "iris.csv", "--width", "8", "--epochs", "50", "--json", "--test-share", "0")
    found = strict(out)
    assert (code, found["epochs"] < 50, len(found["notes"])) == (0, True, 1)
    assert ldlt.verify("iris.ldlt.onnx").rigorous


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_keeps_the_best_bound_so_far(files, run):
    code, out, _ = run("certify", "net.onnx", "--json", "--out", "early.cert.json")
    found = strict(out)
    assert (code, found["interrupted"], found["rigorous"], bool(found["notes"])) == (0, True, True, True)
    assert found["bound"] > ldlt.Certificate.load("net.cert.json").bound
    assert run("verify", "early.cert.json", "net.onnx")[0] == 0


def test_ctrl_c_before_there_is_anything(files, run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ldlt, "certify", interrupt)
    monkeypatch.setattr(ldlt.LipschitzClassifier, "fit", interrupt)
    monkeypatch.setattr(typer.core.TyperGroup, "list_commands", interrupt)
    for words in (["certify", "net.onnx"], ["train", "iris.csv", "--out", "new.onnx"], ["--help"]):
        code, out, err = run(*words)
        assert (code, err) == (130, "ldlt: interrupted\n")
    assert not Path("new.onnx").exists()


def test_ctrl_c_while_modules_are_imported(files):
    """A module of the name ``torch`` that is interrupted when it is imported."""
    (files / "torch.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; import sys; from ldlt.__main__ import main; sys.exit(main())"
    path = os.pathsep.join([str(files), str(Path(ldlt.__file__).parent.parent)])
    words = [sys.executable, "-c", code, "certify", "net.onnx"]
    found = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "ldlt: interrupted\n")


class Noisy:
    """Ctrl-C in a destructor: Python prints what it raises, and goes on."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("heeded")
def test_an_interruption_that_got_lost_is_raised_again(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: lost.append(unraisable.exc_type))
    with Progress() as progress:
        progress.tell("one")
        Noisy()
        assert lost == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            progress.tell("two")
    assert progress.interrupted
    found = []

    def work():  # another thread has no Ctrl-C
        with Progress():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize(("terminal", "show", "seen"), [(True, True, True), (True, False, False), (False, True, False)])
def test_progress_is_for_terminals(terminal, show, seen, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(10, show=show) as progress:
        progress.tell("epoch 3/10", 3)
    assert ("epoch 3/10" in stream.getvalue()) == seen


# -- the application ---------------------------------------------------------------------------------------------------


def plugins(monkeypatch, **points):
    made = [importlib.metadata.EntryPoint(name, value, cli.GROUP) for name, value in points.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: made if group == cli.GROUP else [])


def other(count: int = 1) -> int:
    """Another package's command."""
    print("count", count)
    return 3


several = typer.Typer()
several.command("first")(other)
several.command("second")(other)


def test_commands_of_other_packages(run, monkeypatch):
    plugins(monkeypatch, alone="test_cli:other", several="test_cli:several", broken="ldlt_missing.cli:app [bench]")
    monkeypatch.setitem(sys.modules, "test_cli", sys.modules[__name__])
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in ("train", "alone", "several", "broken"))
    assert run("alone", "--count", "2")[:2] == (3, "count 2\n")
    assert run("several", "second")[:2] == (3, "count 1\n")
    assert run("alone", "--count", "x")[0] == run("several", "third")[0] == run("nothing")[0] == 2
    code, _, err = run("broken")
    assert (code, err.count("\n")) == (1, 1)
    assert "ldlt[bench]" in err


@pytest.mark.parametrize("name", ["train", "predict", "certify", "verify"])
def test_help_has_examples_that_are_accepted(name, run):
    code, out, _ = run(name, "--help")
    assert code == 0
    group = typer.main.get_command(cli.app)
    command = group.get_command(None, name)
    examples = [line for line in command.epilog.splitlines() if line.startswith(f"ldlt {name}")]
    assert len(examples) > 1
    known = {o for p in command.params for o in p.opts}
    assert {w for line in examples for w in line.split() if w.startswith("--")} <= known
    assert all(o in out for o in known if o.startswith("--"))


def test_version_and_no_command(run):
    assert run("--version")[:2] == (0, f"ldlt {ldlt.__version__}\n")
    assert run()[0] == 2
    assert cli.main(["--version"]) == 0
    assert cli.main(["nothing"]) == 2


def test_help_imports_nothing_heavy_and_the_console_script_is_there():
    heavy = {"torch", "sklearn", "onnx", "pandas", "numpy"}
    code = f"import sys; from ldlt.__main__ import main; main(); print(sorted({heavy} & {{*sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("[]\n")
    scripts = importlib.metadata.entry_points(group="console_scripts", name="ldlt")
    assert [script.load() is not None for script in scripts] == [True]


@pytest.mark.parametrize(("reads", "code", "message"), [(False, 141, ""), (True, 1, "No space left on device")])
def test_output_that_nobody_can_take(reads, code, message, files, monkeypatch, capsys):
    if reads:
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        end, out = os.pipe()
        os.close(end)
    with os.fdopen(out, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(["predict", "iris.ldlt.onnx", "iris.csv"]) == code
    assert capsys.readouterr().err == f"ldlt: {message}\n" * bool(message)


@given(st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_printed_bounds_are_not_below_and_radii_not_above(value):
    (_, low), (_, high) = cli._rows({"radius": value, "bound": value})
    assert Decimal(low) <= Decimal(value) <= Decimal(high)
    assert Decimal(high) <= Decimal(value) * (1 + Decimal("1e-8"))
