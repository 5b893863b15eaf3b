"""``ldlt certify`` and ``ldlt verify``: what they print, what they write, and how they refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.certificates import command, interior
from ldlt.cli import main
from ldlt.errors import MissingExtraError
from ldlt.files import OnnxLimits
from ldlt.files.operators import OPERATORS

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

SHAPE = 5


def _net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SHAPE, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))


def _write(
    path: Path, net: nn.Sequential, shape: tuple[Any, ...] = (SHAPE,), tail: tuple[str, ...] = (), kind: Any = None
) -> Path:
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
    kind = TensorProto.FLOAT if kind is None else kind
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, ["n", *shape])],
        [helper.make_tensor_value_info(name, kind, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network and its certificate, made once."""
    path = tmp_path_factory.mktemp("files")
    _write(path / "net.onnx", _net())
    found = ldlt.certify(path / "net.onnx")
    found.save(path / "net.cert.json")
    return path


@pytest.fixture
def files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies in the working directory."""
    for path in folder.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command: exit code, standard output, standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def _rows(out: str) -> dict[str, str]:
    table = out.split("\n\n", maxsplit=1)[0]
    return {name.strip(): value for name, value in (line.split("  ", 1) for line in table.splitlines())}


def _strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# -- certify -----------------------------------------------------------------------------------------------------------


def test_certify_prints_a_table_and_writes_a_file(files, run):
    code, out, err = run("certify", "net.onnx", "--out", "new.cert.json")
    assert (code, err) == (0, "")
    rows = {k: v.strip() for k, v in _rows(out).items()}
    assert (rows["model"], rows["inputs"], rows["outputs"]) == ("net.onnx", "5", "3")
    assert (rows["status"], rows["rigorous"], rows["method"]) == ("certified", "yes", "optimal")
    assert (rows["holds for"], rows["file written"]) == ("all inputs", "new.cert.json")
    assert "note" not in out
    found = ldlt.Certificate.load("new.cert.json")
    assert Decimal(rows["bound"]) >= Decimal(found.bound)
    assert float(rows["bound"]) == pytest.approx(found.bound, rel=1e-8)
    assert float(rows["largest pair constant"]) == pytest.approx(float(found.pair_bounds().max()), rel=1e-8)
    starts = {len(line) - len(line.split("  ", 1)[1].lstrip()) for line in out.splitlines()}
    assert len(starts) == 1  # aligned
    assert run("verify", "new.cert.json", "net.onnx")[0] == 0


def test_certify_for_machines(files, run):
    code, out, err = run("certify", "net.onnx", "--json")
    assert (code, err) == (0, "")
    found = _strict(out)
    stored = ldlt.Certificate.load("net.cert.json")
    assert found["bound"] == stored.bound
    assert found["fingerprint"] == stored.fingerprint
    assert found["pair_bounds"] == stored.pair_bounds().tolist()
    assert found["largest_pair_bound"] == max(map(max, found["pair_bounds"]))
    assert (found["status"], found["rigorous"], found["reason"], found["notes"]) == ("certified", True, "", [])
    assert (found["input_shape"], found["inputs"], found["outputs"], found["region"]) == ([5], 5, 3, None)
    assert 0 <= found["gap"] < 2e-3
    assert (found["file"], found["interrupted"]) == (None, False)


@pytest.mark.parametrize("method", ["eclipse", "product"])
def test_methods(files, run, method):
    code, out, _ = run("certify", "net.onnx", "--method", method, "--json", "--out", "other.cert.json")
    found = _strict(out)
    assert code == 0
    assert found["bound"] >= ldlt.Certificate.load("net.cert.json").bound * (1 - 1e-3)
    assert found["rigorous"] == (method != "product")
    assert any("not rigorous" in note for note in found["notes"]) == (method == "product")
    assert run("verify", "other.cert.json", "net.onnx")[0] == (1 if method == "product" else 0)


def test_what_is_not_rigorous_says_so(files, run):
    code, out, _ = run("certify", "net.onnx", "--method", "product")
    assert code == 0
    assert _rows(out)["rigorous"].strip() == "no"
    assert "note: the bound is not rigorous" in out


@pytest.mark.parametrize("kind", [[], ["--box"]])
@pytest.mark.parametrize("center", ["0", "0.1,-0.2,0.3,0,1e-1", "point.npy"])
def test_regions(files, run, center, kind):
    point = np.array([0.1, -0.2, 0.3, 0, 0.1])
    np.save("point.npy", point.astype(np.float32))
    code, out, _ = run("certify", "net.onnx", "--center", center, "--radius", "0.05", *kind, "--json")
    found = _strict(out)
    assert code == 0
    where = torch.zeros(5) if center == "0" else torch.tensor(point, dtype=torch.float32)
    assert (found["region"]["kind"], found["region"]["radius"]) == ("box" if kind else "ball", 0.05)
    assert found["region"]["center"] == pytest.approx(where.tolist())
    assert found["bound"] <= ldlt.Certificate.load("net.cert.json").bound
    assert not found["rigorous"]
    radius = torch.full((5,), 0.05) if kind else torch.tensor(0.05)
    again = ldlt.certify(_net(), 5, region=ldlt.Region("box" if kind else "ball", where, radius))
    assert found["bound"] == pytest.approx(again.bound, rel=1e-3)


def test_a_certificate_of_a_region(files, run):
    words = ("certify", "net.onnx", "--center=-1,0,0,0,0", "--radius", "0.1", "--out", "local.cert.json")
    code, out, _ = run(*words)
    assert code == 0
    assert _rows(out)["holds for"].strip() == "a ball of radius 0.1 around (-1, 0, 0, 0, 0)"
    stored = ldlt.Certificate.load("local.cert.json")
    assert stored.region.center.tolist() == [-1, 0, 0, 0, 0]
    code, out, _ = run("verify", "local.cert.json", "net.onnx")
    assert code == 0
    assert _rows(out)["rigorous"].strip() == "no"
    assert "note: the bound is not rigorous" in out
    larger = ldlt.Region("ball", stored.region.center, torch.tensor(100.0))
    dataclasses.replace(stored, region=larger).save("larger.cert.json")
    assert run("verify", "larger.cert.json", "net.onnx")[0] == 1


def test_open_sizes(files, run):
    _write(files / "open.onnx", _net(), ("d",))
    code, _, err = run("certify", "open.onnx")
    assert code == 2
    assert "input_shape" in err
    assert run("certify", "open.onnx", "--input-shape", "5", "--out", "open.cert.json")[0] == 0
    assert run("verify", "open.cert.json", "open.onnx")[0] == 0
    stored = ldlt.Certificate.load("open.cert.json")
    for shape in ((7,), (5, 1)):
        dataclasses.replace(stored, input_shape=shape).save("wrong.cert.json")
        code, out, _ = run("verify", "wrong.cert.json", "open.onnx")
        assert code == 1
        assert "inputs of shape" in out
    assert run("certify", "net.onnx", "--input-shape", "4")[0] == 2


def test_logits_before_a_softmax(files, run):
    _write(files / "softmax.onnx", _net(), tail=("Softmax",))
    code, _, err = run("certify", "softmax.onnx")
    assert code == 2
    assert "Softmax" in err
    code, out, _ = run("certify", "softmax.onnx", "--output-name", "v4", "--out", "soft.cert.json", "--json")
    assert code == 0
    assert _strict(out)["bound"] == ldlt.Certificate.load("net.cert.json").bound
    assert run("verify", "soft.cert.json", "softmax.onnx", "--output-name", "v4")[0] == 0
    assert run("verify", "soft.cert.json", "softmax.onnx")[0] == 2


def test_one_output_and_many_outputs(files, run):
    for outputs in (1, command.SHOWN_OUTPUTS + 1):
        _write(files / "wide.onnx", _net(outputs))
        code, out, _ = run("certify", "wide.onnx", "--method", "product", "--json")
        found = _strict(out)
        assert code == 0
        assert found["pair_bounds"] is None
        if outputs == 1:
            assert found["largest_pair_bound"] is None
        else:
            assert found["largest_pair_bound"] == pytest.approx(math.sqrt(2) * found["bound"])


def test_no_bound_is_not_an_error(files, run):
    net = _net().double()
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight *= 1e150
            layer.bias.zero_()
    _write(files / "huge.onnx", net, kind=TensorProto.DOUBLE)
    for method in ("optimal", "product"):
        code, out, _ = run("certify", "huge.onnx", "--method", method, "--json", "--out", "huge.cert.json")
        found = _strict(out)
        assert (code, found["status"], found["bound"], found["rigorous"]) == (1, "not certified", None, False)
        assert found["reason"]
        assert found["pair_bounds"] is None
        assert not Path("huge.cert.json").exists()
    code, out, _ = run("certify", "huge.onnx", "--out", "huge.cert.json")
    assert code == 1
    assert _rows(out)["bound"].strip() == "none"
    assert "no certificate was written" in out


def test_a_proof_that_fails_is_not_an_error(files, run, monkeypatch):
    failed = dataclasses.replace(
        ldlt.Certificate.load("net.cert.json"), status="not certified", reason="cannot be proven", bound=math.inf
    )
    monkeypatch.setattr(command, "certify", lambda *_, **__: failed)
    code, out, _ = run("certify", "net.onnx")
    assert code == 1
    assert _rows(out)["reason"].strip() == "cannot be proven"


def test_time_limit(files, run):
    code, out, _ = run("certify", "net.onnx", "--time-limit", "0", "--json")
    found = _strict(out)
    assert code == 0
    assert found["rigorous"]
    assert any("time limit" in note for note in found["notes"])


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in the second step of the search."""
    solve = interior.solve

    def stopped(*args: Any, report: Callable[..., bool], **options: Any) -> str:
        count = 0

        def counted(*values: Any) -> bool:
            nonlocal count
            count += 1
            if count == 2:
                signal.raise_signal(signal.SIGINT)
            return report(*values)

        return solve(*args, report=counted, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(interior, "solve", stopped)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_interruption_ends_the_search_and_keeps_the_bound(files, run):
    code, out, _ = run("certify", "net.onnx", "--json", "--out", "early.cert.json")
    found = _strict(out)
    assert code == 0
    assert found["interrupted"]
    assert found["rigorous"]
    assert any("interrupted" in note for note in found["notes"])
    assert found["bound"] > ldlt.Certificate.load("net.cert.json").bound
    assert run("verify", "early.cert.json", "net.onnx")[0] == 0


def test_interruption_without_a_bound(files, run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "certify", interrupt)
    code, out, err = run("certify", "net.onnx")
    assert (code, out) == (130, "")
    assert "interrupted" in err


@pytest.mark.parametrize(("words", "shown"), [([], True), (["--json"], False), (["--quiet"], False)])
def test_progress_on_a_terminal(files, run, monkeypatch, words, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, _, err = run("certify", "net.onnx", *words)
    assert code == 0
    assert ("best possible" in err) == shown


def test_regions_in_words():
    def words(kind: str, center: list[float], radius: Any) -> str:
        found = command._region_facts(ldlt.Region(kind, torch.tensor(center), torch.tensor(radius)))
        assert _strict(json.dumps(found)) == found
        return command._where(found)

    assert command._where(None) == "all inputs"
    assert words("ball", [0.0] * 9, 2.0) == "a ball of radius 2 around the point with all entries 0"
    assert words("box", [1.0], [0.5]) == "a box of half-width 0.5 around 1"
    assert words("box", [1.0, 2.0], [0.5, 3.0]) == "a box with half-widths 0.5 to 3 around (1, 2)"
    assert words("ball", [float(i) for i in range(9)], 1.0).endswith("around (0, 1, 2, 3, 4, 5, …)")


@given(st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_printed_bounds_are_not_below_the_bound(value):
    text = command._ceiling(value)
    assert Decimal(text) >= Decimal(value)
    assert Decimal(text) <= Decimal(value) * (1 + Decimal("1e-8"))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_missing_and_damaged_models(files, run):
    data = (files / "net.onnx").read_bytes()
    (files / "cut.onnx").write_bytes(data[: len(data) // 2])
    (files / "empty.onnx").write_bytes(b"")
    (files / "text.onnx").write_text("hello")
    (files / "folder.onnx").mkdir()
    for name in ("nowhere.onnx", "cut.onnx", "empty.onnx", "text.onnx", "folder.onnx"):
        for words in (["certify", name], ["verify", "net.cert.json", name]):
            code, out, err = run(*words)
            assert (code, out) == (2, ""), (words, err)
            assert err.startswith("ldlt: ")
    assert "does not exist" in run("certify", "nowhere.onnx")[2]


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path("exploded").write_text, ("executed",)


def test_nothing_but_onnx_is_read(files, run):
    bomb = pickle.dumps(_Bomb())
    for name in ("net.pt", "net.pth", "net.pt2", "net", "net.onnx.pkl"):
        Path(name).write_bytes(bomb)
        for words in (["certify", name], ["verify", "net.cert.json", name]):
            code, _, err = run(*words)
            assert code == 2
            assert "torch.onnx.export" in err
            assert "execute code" in err
    Path("bomb.onnx").write_bytes(bomb)
    assert run("certify", "bomb.onnx")[0] == 2
    Path("bomb.npy").write_bytes(bomb)
    np.save("objects.npy", np.array([_Bomb()], dtype=object), allow_pickle=True)
    for name in ("bomb.npy", "objects.npy"):
        code, _, err = run("certify", "net.onnx", "--center", name, "--radius", "1")
        assert code == 2
        assert "not a .npy file of numbers" in err
    assert not Path("exploded").exists()


def test_centers_that_do_not_fit(files, run):
    np.save("four.npy", np.zeros(4))
    np.save("turned.npy", np.zeros((5, 1)))
    np.save("complex.npy", np.zeros(5, dtype=complex))
    np.save("nan.npy", np.full(5, np.nan))
    np.savez("archive.npz", a=np.zeros(5))
    shutil.copy("archive.npz", "archive.npy")
    Path("zip.npy").write_bytes(b"PK\x03\x04 and no archive")
    np.save("whole.npy", np.zeros(5))
    Path("cut.npy").write_bytes(Path("whole.npy").read_bytes()[:-8])
    header = Path("whole.npy").read_bytes()
    Path("large.npy").write_bytes(header.replace(b"(5,)", b"(9999999999999,)").replace(b" " * 12 + b"\n", b"\n"))
    for center in (
        *("four.npy", "turned.npy", "complex.npy", "nan.npy", "archive.npy", "zip.npy", "cut.npy", "large.npy"),
        *("nowhere.npy", "1,2", "1,2,3,4,five", "", "nan", "inf", "a file"),
    ):
        code, out, err = run("certify", "net.onnx", "--center", center, "--radius", "1")
        assert (code, out) == (2, ""), center
        assert "center" in err
    assert run("certify", "net.onnx", "--center", "whole.npy", "--radius", "1", "--time-limit", "0")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--input-shape", "five"],
        ["--input-shape", "0"],
        ["--input-shape", "1,,2"],
        ["--input-shape", "-5"],
        ["--method", "guess"],
        ["--time-limit", "-1"],
        ["--time-limit", "nan"],
        ["--tolerance", "0"],
        ["--tolerance", "inf"],
        ["--center", "0"],
        ["--radius", "1"],
        ["--box"],
        ["--center", "0", "--radius", "-1"],
        ["--center", "0", "--radius", "nan"],
        ["--method", "product", "--time-limit", "1"],
        ["--method", "eclipse", "--tolerance", "1e-3"],
        ["--out", "no/such/folder/net.cert.json"],
        ["--out", "."],
        ["--out", "net.onnx"],
        ["--output-name", "nothing"],
        ["--input-name", "nothing"],
    ],
)
def test_bad_arguments(files, run, words, monkeypatch):
    monkeypatch.setattr(command, "certify", lambda *_, **__: pytest.fail("the work began"))
    before = (files / "net.onnx").read_bytes()
    code, out, err = run("certify", "net.onnx", *words)
    assert (code, out) == (2, "")
    assert err
    assert (files / "net.onnx").read_bytes() == before


def test_a_file_that_cannot_be_written_does_not_lose_the_bound(files, run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ldlt.Certificate, "save", full)
    code, out, err = run("certify", "net.onnx", "--out", "new.cert.json", "--json")
    assert code == 2
    assert _strict(out)["status"] == "certified"
    assert _strict(out)["file"] is None
    assert "No space left" in err


def test_missing_extra(files, run, monkeypatch):
    def missing(*_, **__):
        raise MissingExtraError("onnx", "onnx")

    monkeypatch.setattr(command, "read_onnx", missing)
    for words in (["certify", "net.onnx"], ["verify", "net.cert.json", "net.onnx"]):
        code, _, err = run(*words)
        assert code == 2
        assert "ldlt[files]" in err


def test_help_explains_exit_codes(run):
    for name in ("certify", "verify"):
        code, out, _ = run(name, "--help")
        assert code == 0
        assert "exit codes: 0" in out
        assert f"  ldlt {name} net" in out


def test_the_page_lists_all_operators_and_limits():
    page = (Path(__file__).parent.parent / "docs" / "certificates.md").read_text()
    table = page.split("| known operators | |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(OPERATORS)
    limits = OnnxLimits()
    assert (limits.file_bytes, limits.fields, limits.nodes) == (256 * 2**20, 1_000_000, 10_000)
    assert (limits.features, limits.unrolled, limits.elements) == (2**20, 2**24, 2**26)


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify(files, run):
    code, out, err = run("verify", "net.cert.json", "net.onnx")
    assert (code, err) == (0, "")
    rows = {k: v.strip() for k, v in _rows(out).items()}
    assert (rows["certificate"], rows["status"], rows["rigorous"]) == ("net.cert.json", "verified", "yes")
    code, out, _ = run("verify", "net.cert.json", "net.onnx", "--json")
    found = _strict(out)
    stored = ldlt.Certificate.load("net.cert.json")
    assert code == 0
    assert found["verified"] is True
    assert (found["bound"], found["fingerprint"], found["created"]) == (
        stored.bound,
        stored.fingerprint,
        stored.created,
    )
    assert found["pair_bounds"] == stored.pair_bounds().tolist()


def test_verify_rejects(files, run):
    text = Path("net.cert.json").read_text()
    stored = ldlt.Certificate.load("net.cert.json")
    Path("changed.json").write_text(text.replace('"rigorous": true', '"rigorous": false'))
    Path("cut.json").write_text(text[: len(text) // 2])
    Path("empty.json").write_text("")
    Path("other.json").write_text("[]")
    Path("bytes.json").write_bytes(bytes(range(256)))
    dataclasses.replace(stored, bound=0.9 * stored.bound).save("small.json")
    dataclasses.replace(stored, fingerprint="0" * 64).save("stranger.json")
    dataclasses.replace(stored, gram=0.5 * stored.gram).save("pairs.json")
    dataclasses.replace(stored, status="not certified", bound=math.inf, reason="none").save("none.json")
    dataclasses.replace(stored, input_shape=(6,)).save("shape.json")
    reasons = {
        "changed.json": "checksum",
        "cut.json": "truncated",
        "empty.json": "not a certificate",
        "other.json": "not a certificate",
        "bytes.json": "not a certificate",
        "small.json": "cannot be proven",
        "stranger.json": "another network",
        "pairs.json": "pairs",
        "none.json": "does not certify anything",
        "shape.json": "does not fit",
    }
    for name, reason in reasons.items():
        code, out, err = run("verify", name, "net.onnx", "--json")
        found = _strict(out)
        assert (code, err, found["verified"], found["status"]) == (1, "", False, "rejected"), name
        assert reason in found["reason"], name
    code, out, err = run("verify", "changed.json", "net.onnx")
    assert (code, err) == (1, "")
    assert _rows(out)["status"].strip() == "rejected"
    assert "checksum" in _rows(out)["reason"]


def test_verify_rejects_another_model(files, run):
    net = _net()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nextafter(net[0].weight[0, 0], torch.tensor(9.0))
    _write(files / "other.onnx", net)
    code, out, _ = run("verify", "net.cert.json", "other.onnx")
    assert code == 1
    assert "another network" in out


def test_verify_errors(files, run):
    for certificate in ("nowhere.json", "."):
        code, out, err = run("verify", certificate, "net.onnx")
        assert (code, out) == (2, "")
        assert "certificate" in err
    Path("bad.json").write_text("{}")
    assert run("verify", "bad.json", "nowhere.onnx")[0] == 2
    assert run("verify", "net.cert.json")[0] == 2
