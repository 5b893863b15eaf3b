"""Data of the benchmark: reader, splits, quirks, embedded sets, download, unpacking, commands.

Tests marked ``needs_archive`` compare with the public archive; they run only if LDLT_UCI is its path.
"""

from __future__ import annotations

import copy
import doctest
import hashlib
import importlib
import io
import math
import os
import pickle
import stat
import tarfile
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ldlt_bench import data
from ldlt_bench.data import (
    QUIRKS,
    RECIPES,
    Archive,
    ArchiveError,
    Dataset,
    DatasetError,
    Embedded,
    FetchError,
    FormatError,
    LayoutError,
    Limits,
    Policy,
    UnavailableSetError,
    UnknownSetError,
    UnsafeArchiveError,
    audit,
    check_sets,
    default_path,
    fetch,
    fetch_sets,
    format_table,
    generators,
    list_sets,
    locate,
    make_folds,
    quirks,
    rules,
    unpack,
    verify,
)
from ldlt_bench.data import embedded as embedded_module
from ldlt_bench.data.dataset import encode_labels
from ldlt_bench.data.folds import stratified_parts, stratified_sample
from ldlt_bench.data.stream import Stream
from ldlt_bench.data.table import parse_table
from ldlt.cli import main
from ldlt.errors import LdltError, MissingExtraError

UCI = os.environ.get("LDLT_UCI", "")
needs_archive = pytest.mark.skipif(not UCI, reason="LDLT_UCI is not the path of the public archive")

FILES = ("{}_py.dat", "labels_py.dat", "folds_py.dat", "validation_folds_py.dat")
KINDS = ["zip", "zip, no data/", "folder", "folder, no data/"]
FROZEN_STREAM = [765436, 842726, 899637, 284107]
FROZEN_EMBEDDED = "7b82378b37de9db4"
FROZEN_TWONORM = [0.7047706230497467, 0.948303450761343, 1.973673835459543]
QUICK = Policy(attempts=2, most=5, timeout=2.0, pause=0.01, deadline=10.0)


# ---------------------------------------------------------------------------------------------- made-up archives


def text(array) -> bytes:
    return ("\n".join(",".join(repr(value) for value in row) for row in np.asarray(array).tolist()) + "\n").encode()


def simple(rows=12, columns=3, seed=0) -> dict[str, np.ndarray]:
    """Four arrays of a small sound data set."""
    rng = np.random.default_rng(seed)
    test, validation = make_folds(np.arange(rows) % 2, "simple")
    features = rng.normal(size=(rows, columns)).round(6)
    return {
        "features": features,
        "labels": np.arange(rows)[:, None] % 2,
        "test": test.astype(int),
        "validation": validation.astype(int),
    }


def files_of(name: str, arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {f"{name}/{FILES[0].format(name)}": text(arrays["features"])} | {
        f"{name}/{file}": text(arrays[key])
        for file, key in zip(FILES[1:], ("labels", "test", "validation"), strict=True)
    }


def write(root: Path, files: dict[str, bytes], kind: str = "zip") -> Path:
    prefix = "" if "no data/" in kind else "data/"
    if kind.startswith("zip"):
        with zipfile.ZipFile(root / "archive.zip", "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in files.items():
                file.writestr(prefix + name, content)
        return root / "archive.zip"
    for name, content in files.items():
        path = root / "folder" / prefix / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root / "folder"


def small_archive(root: Path, sets: int = 3) -> Path:
    files: dict[str, bytes] = {}
    for index in range(sets):
        files |= files_of(f"set-{index}", simple(rows=40, seed=index))
    return write(root, files)


def made(features=None, labels=None, *, test=None, validation=None, name="made", rows=40) -> Dataset:
    """A data set with sound defaults."""
    labels = np.arange(rows) % 2 if labels is None else np.asarray(labels)
    rows = len(labels)
    if features is None:
        features = np.random.default_rng(1).normal(size=(rows, 3))
        features = (features - features.mean(0)) / features.std(0, ddof=1)
    folds = make_folds(labels, name)
    test, validation = (folds[0] if test is None else test), (folds[1] if validation is None else validation)
    return Dataset(name, features, labels, tuple(range(int(labels.max()) + 1)), test, validation)


def codes(dataset: Dataset) -> set[str]:
    return {quirk.code for quirk in quirks(dataset)}


def same(first: Dataset, second: Dataset) -> bool:
    arrays = ("features", "labels", "test_folds", "validation_folds")
    return first.classes == second.classes and all(
        np.array_equal(getattr(first, field), getattr(second, field)) for field in arrays
    )


@st.composite
def arrays(draw):
    rows, columns = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    number = st.floats(allow_nan=False, allow_infinity=False)
    features = draw(st.lists(st.lists(number, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    labels = draw(st.lists(st.integers(-5, 5), min_size=rows, max_size=rows).filter(lambda x: len(set(x)) > 1))
    folds = st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=rows, max_size=rows)
    return {
        "features": np.array(features),
        "labels": np.array(labels)[:, None],
        "test": np.array(draw(folds)),
        "validation": np.array(draw(folds)),
    }


# ------------------------------------------------------------------------------------------------------- archive


@settings(max_examples=30)
@given(made_up=arrays(), kind=st.sampled_from(KINDS), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_archives_are_read_exactly(made_up, kind, ending):
    with tempfile.TemporaryDirectory() as root:
        files = {name: content.replace(b"\n", ending) for name, content in files_of("some-set", made_up).items()}
        archive = Archive(write(Path(root), files, kind))
        assert archive.names() == ("some-set",)
        dataset = archive.load("some-set")
        assert archive.summary("some-set").columns == dataset.columns
    assert dataset.features.dtype == np.float64
    assert dataset.labels.dtype == np.int64
    assert np.array_equal(dataset.features, made_up["features"])
    assert np.array_equal(np.array(dataset.classes)[dataset.labels], made_up["labels"][:, 0])
    assert np.array_equal(dataset.test_folds, made_up["test"] == 1)
    assert np.array_equal(dataset.validation_folds, made_up["validation"] == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_several_sets_strays_and_a_set_without_features(tmp_path, kind):
    files = files_of("b", simple()) | files_of("a", simple(seed=1)) | files_of("bare", simple())
    del files["bare/bare_py.dat"]
    files |= {
        "abalone_py.dat": b"1,2\n",
        "readme.txt": b"hello",
        "a/extra.txt": b"?",
        "partial/folds_py.dat": b"0,0,0,1\n",
    }
    archive = Archive(write(tmp_path, files, kind))
    assert archive.names() == ("a", "b")
    assert len(archive) == 2
    assert "a" in archive
    assert "bare" not in archive
    assert set(archive.unavailable()) == {"bare", "partial"}
    assert "no features" in archive.unavailable()["bare"]
    assert "labels_py.dat" in archive.unavailable()["partial"]
    with pytest.raises(UnavailableSetError, match=r"'bare' is unavailable: .*no features"):
        archive.load("bare")
    with pytest.raises(UnknownSetError, match="no data set 'c'"):
        archive.load("c")
    with pytest.raises(UnknownSetError, match="do you mean bare"):
        archive.check("baree")
    assert [finding.level for finding in archive.check("bare")] == ["unavailable"]
    assert same(pickle.loads(pickle.dumps(archive)).load("a"), archive.load("a"))
    assert "sets=2" in repr(archive)


def test_a_set_that_is_there_twice_is_not_guessed(tmp_path):
    files = files_of("a", simple()) | {f"data/{k}": v for k, v in (files_of("a", simple(seed=1))).items()}
    archive = Archive(write(tmp_path, files | files_of("b", simple()), "zip, no data/"))
    assert archive.names() == ("b",)
    assert "twice" in archive.unavailable()["a"]


def replaced(content: bytes, line: int, column: int, cell: bytes) -> bytes:
    lines = [row.split(b",") for row in content.split(b"\n")]
    lines[line - 1][column - 1] = cell
    return b"\n".join(b",".join(row) for row in lines)


JUNK = [
    b"abc",
    b"",
    b"nan",
    b"-inf",
    b"1e999",
    b"1_0",
    b"0x10",
    b"1;2",
    b"--1",
    b"1 2",
    b"\xff",
    b"\xc3\xa9",
    b"NaN(1)",
]


@settings(max_examples=200)
@given(
    file=st.sampled_from(FILES),
    line=st.integers(1, 12),
    column=st.integers(1, 4),
    junk=st.sampled_from(JUNK),
    kind=st.sampled_from(KINDS),
)
def test_a_bad_cell_is_named(file, line, column, junk, kind):
    file = "s/" + file.format("s")
    files = files_of("s", simple(columns=4))
    column = 1 if "labels" in file else column
    files[file] = replaced(files[file], line, column, junk)
    with tempfile.TemporaryDirectory() as root:
        archive = Archive(write(Path(root), files | files_of("t", simple()), kind))
        with pytest.raises(FormatError, match=r"is not|is blank|11 rows instead of 12") as caught:
            archive.load("s")
        (finding,) = archive.check("s")
        assert archive.load("t").rows == 12
    assert isinstance(caught.value, LdltError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.file.endswith(file)
    if not (junk == b"" and "labels" in file and line == 12):  # then the file merely ends a line early
        assert caught.value.line == line
    assert junk == b"" or caught.value.column == column
    assert (finding.level, finding.line, finding.column) == ("error", caught.value.line, caught.value.column)


def without_last_cell(content: bytes) -> bytes:
    lines = content.split(b"\n")
    lines[4] = lines[4].rpartition(b",")[0]
    return b"\n".join(lines)


DAMAGE = {
    "short line": ("s_py.dat", without_last_cell, "line 5, column 2: 2 columns instead of 3"),
    "long line": ("s_py.dat", lambda c: c.replace(b"\n", b",1.0\n", 1), "line 1, column 4: 4 columns instead of 3"),
    "blank line": ("s_py.dat", lambda c: c.replace(b"\n", b"\n\n", 1), "line 2: the line is blank"),
    "spaces line": ("s_py.dat", lambda c: c.replace(b"\n", b"\n  \n", 1), "line 2: the line is blank"),
    "empty": ("s_py.dat", lambda c: b"", "the file is empty"),
    "white": ("folds_py.dat", lambda c: b" \n\n", "the file is empty"),
    "fewer rows": ("s_py.dat", lambda c: c.split(b"\n", 1)[1], "11 rows instead of 12"),
    "semicolons": ("s_py.dat", lambda c: c.replace(b",", b";"), "line 1, column 1: .* is not a finite number"),
    "fraction label": (
        "labels_py.dat",
        lambda c: replaced(c, 3, 1, b"1.5"),
        "line 3, column 1: label 1.5 is not an int",
    ),
    "huge label": ("labels_py.dat", lambda c: replaced(c, 3, 1, b"1e300"), "line 3, column 1: label 1e.300 is not"),
    "word label": ("labels_py.dat", lambda c: replaced(c, 2, 1, b"cat"), "line 2, column 1: 'cat' is not"),
    "wide labels": ("labels_py.dat", lambda c: c.replace(b"\n", b",0\n"), "line 1, column 2: 2 columns instead of 1"),
    "one class": ("labels_py.dat", lambda c: c.replace(b"1", b"0"), "two or more classes"),
    "fold 2": ("folds_py.dat", lambda c: replaced(c, 4, 3, b"2"), "line 4, column 3: 2 is neither 0 nor 1"),
    "fold half": ("folds_py.dat", lambda c: replaced(c, 4, 3, b"0.5"), "line 4, column 3: 0.5 is neither 0 nor 1"),
    "three folds": (
        "folds_py.dat",
        lambda c: c.replace(b",0\n", b"\n").replace(b",1\n", b"\n"),
        "3 columns instead of 4",
    ),
    "validation 9": ("validation_folds_py.dat", lambda c: replaced(c, 1, 1, b"9"), "line 1, column 1: 9 is neither"),
    "validation rows": ("validation_folds_py.dat", lambda c: c + b"0,0,0,0\n", "13 rows instead of 12"),
}


@pytest.mark.parametrize("kind", ["zip", "folder"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_malformed_files_are_refused_with_place_and_reason(tmp_path, kind, damage):
    name, spoil, message = DAMAGE[damage]
    files = files_of("s", simple())
    files[f"s/{name}"] = spoil(files[f"s/{name}"])
    archive = Archive(write(tmp_path, files, kind))
    with pytest.raises(FormatError, match=message) as caught:
        archive.load("s")
    assert caught.value.file == f"data/s/{name}"
    assert [finding.level for finding in archive.check("s")] == ["error"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line, again.column) == (str(caught.value), caught.value.line, caught.value.column)


def test_check_reports_every_damaged_file(tmp_path):
    files = files_of("s", simple())
    files["s/s_py.dat"] = replaced(files["s/s_py.dat"], 2, 2, b"x")
    files["s/labels_py.dat"] = replaced(files["s/labels_py.dat"], 3, 1, b"0.5")
    files["s/folds_py.dat"] = replaced(files["s/folds_py.dat"], 4, 4, b"7")
    found = Archive(write(tmp_path, files)).check("s")
    assert [(f.file, f.line, f.column) for f in found] == [
        ("data/s/s_py.dat", 2, 2), ("data/s/labels_py.dat", 3, 1), ("data/s/folds_py.dat", 4, 4),
    ]  # fmt: skip


def test_integral_labels_in_other_spellings(tmp_path):
    files = files_of("s", simple(rows=8))
    files["s/labels_py.dat"] = b"3.0\n-1\n3\n-1.0\n3e0\n -1\n3\n7 \n"
    dataset = Archive(write(tmp_path, files)).load("s")
    assert dataset.classes == (-1, 3, 7)
    assert dataset.labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 2]


def test_one_row_and_one_column_tables():
    assert parse_table(b"1,2,3", "f").shape == (1, 3)
    assert parse_table(b"1\n2\n", "f", columns=1).shape == (2, 1)
    with pytest.raises(FormatError, match="1 column instead of 4"):
        parse_table(b"1\n2\n", "f", columns=4)
    with pytest.raises(FormatError, match="not a table|is not a finite number"):
        parse_table(b"1\r2\r\x003\n", "f")


def test_truncated_zip_files_never_pass(tmp_path):
    whole = write(tmp_path, files_of("s", simple())).read_bytes()
    cut = tmp_path / "cut.zip"
    for size in range(0, len(whole), 13):
        cut.write_bytes(whole[:size])
        with pytest.raises(ArchiveError, match=r"cut\.zip: "):
            Archive(cut)
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArchiveError, match=r"truncated or damaged zip file .* fetch it again"):
        Archive(cut)


@settings(max_examples=150)
@given(position=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_flipped_bits_are_noticed_or_harmless(position, mask):
    with tempfile.TemporaryDirectory() as root:
        path = write(Path(root), files_of("s", simple(rows=8)))
        sound = Archive(path).load("s")
        content = bytearray(path.read_bytes())
        content[position % len(content)] ^= mask
        path.write_bytes(bytes(content))
        with suppress(ArchiveError, UnavailableSetError, UnknownSetError):
            assert same(Archive(path).load("s"), sound)
        with suppress(ArchiveError):
            verify(path, sets=1)


def test_a_damaged_member_spoils_only_its_set(tmp_path):
    path = write(tmp_path, files_of("a", simple(rows=40)) | files_of("b", simple(rows=40)))
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("data/a/a_py.dat")
    content = bytearray(path.read_bytes())
    start = info.header_offset + 30 + len(info.filename)
    content[start + 20 : start + 60] = bytes(40)
    path.write_bytes(bytes(content))
    archive = Archive(path)
    with pytest.raises(ArchiveError, match=r"data/a/a_py\.dat"):
        archive.load("a")
    assert [(f.level, f.file) for f in archive.check("a")] == [("error", "data/a/a_py.dat")]
    assert archive.load("b").rows == 40
    with pytest.raises(ArchiveError):
        verify(path, sets=2)


def test_other_layouts_and_other_things_are_refused_with_advice(tmp_path):
    old = {"iris/iris_R.dat": b"x", "iris/iris.arff": b"x", "iris/conxuntos_kfold.dat": b"x"}
    for kind in KINDS:
        (tmp_path / kind.replace("/", "")).mkdir()
        with pytest.raises(LayoutError, match=r"layout of 2014 .*ldlt data fetch"):
            Archive(write(tmp_path / kind.replace("/", ""), old, kind))
    for name, members in (("old", old), ("new", files_of("s", simple()))):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as file:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    with pytest.raises(LayoutError, match="layout of 2014"):
        Archive(tmp_path / "old.tar.gz")
    with pytest.raises(LayoutError, match="unpack it"):
        Archive(tmp_path / "new.tar.gz")
    content = (tmp_path / "old.tar.gz").read_bytes()
    for name, start, message in (
        ("half.tar.gz", content[: len(content) // 2], "damaged tar file|a gzip file"),
        ("page.zip", b"<!DOCTYPE html><html>", "a web page"),
        ("empty.zip", b"", "the file is empty"),
        ("noise.zip", b"\x00\x01\x02" * 50, "not a zip file"),
    ):
        (tmp_path / name).write_bytes(start)
        with pytest.raises(ArchiveError, match=message):
            Archive(tmp_path / name)
    with pytest.raises(ArchiveError, match="no such file or folder"):
        Archive(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(LayoutError, match="no data sets found"):
        Archive(tmp_path / "bare")
    (tmp_path / "bare" / "data_py.zip").write_bytes(b"PK")
    with pytest.raises(LayoutError, match=r"give the path of the data_py\.zip"):
        Archive(tmp_path / "bare")


def test_a_member_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ldlt_bench.data.store.LARGEST", 100)
    for kind in ("zip", "folder"):
        archive = Archive(write(tmp_path, files_of("s", simple()), kind))
        with pytest.raises(ArchiveError, match="more than 100"):
            archive.load("s")


# --------------------------------------------------------------------------------------- data sets, splits, scales


def test_data_sets_are_frozen_copies_and_survive_pickling():
    features = np.ones((40, 2)) * np.arange(40)[:, None]
    dataset = made(features)
    features[:] = 7
    assert dataset.features[3, 0] == 3
    for twin in (dataset, pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert same(twin, dataset)
        for field in ("features", "labels", "test_folds", "validation_folds"):
            assert not getattr(twin, field).flags.writeable
    with pytest.raises(AttributeError):
        dataset.name = "other"
    assert repr(dataset) == "Dataset('made', rows=40, columns=2, classes=2)"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("features", np.zeros(40), "1 axes instead of 2"),
        ("features", np.zeros((0, 2)), "empty"),
        ("features", np.full((40, 2), np.nan), r"features\[0, 0\] is not finite"),
        ("features", np.full((40, 2), "x"), "not numeric"),
        ("labels", np.zeros(39), r"\(39,\) instead of \(40,\)"),
        ("labels", np.full(40, 0.5), "not int64"),
        ("labels", np.full(40, np.nan), "not int64"),
        ("labels", np.full(40, 2), r"0 \.\. 1"),
        ("classes", (1, 1), "two or more different classes"),
        ("classes", (1,), "two or more different classes"),
        ("test_folds", np.zeros((40, 3)), r"\(40, 3\) instead of \(40, 4\)"),
        ("validation_folds", np.full((40, 4), 2), "not bool"),
    ],
)
def test_arrays_that_disagree_are_refused(field, value, message):
    sound = made()
    arguments = {
        name: getattr(sound, name) for name in ("features", "labels", "classes", "test_folds", "validation_folds")
    }
    with pytest.raises(DatasetError, match=message):
        Dataset(name="bad", **(arguments | {field: value}))


@given(made_up=arrays(), fold=st.integers(0, 3))
def test_splits_cover_all_rows_and_test_wins(made_up, fold):
    labels, classes = encode_labels(made_up["labels"][:, 0])
    dataset = Dataset("s", np.zeros((len(labels), 1)), labels, classes, made_up["test"], made_up["validation"])
    test = made_up["test"][:, fold] == 1
    rest = ~test & (made_up["validation"][:, fold] == 0)
    if not test.any() or not rest.any():
        with pytest.raises(DatasetError, match=f"fold {fold} has no (training|test) rows"):
            dataset.split(fold)
        assert "unusable-fold" in codes(dataset)
        return
    split = dataset.split(fold)
    assert split.test.tolist() == np.flatnonzero(test).tolist()
    assert set(split.absent) == set(range(len(classes))) - set(labels[split.train].tolist())
    if split.fallback == "train":
        assert split.train.tolist() == split.validation.tolist() == np.flatnonzero(~test).tolist()
        assert max(Counter(labels[split.train].tolist()).values()) == 1
        return
    together = np.concatenate([split.train, split.validation, split.test])
    assert sorted(together.tolist()) == list(range(len(labels)))
    assert split.validation.size > 0
    assert split.train.size > 0
    if not split.fallback:
        assert split.train.tolist() == np.flatnonzero(rest).tolist()
    again = dataset.split(fold)
    assert again.validation.tolist() == split.validation.tolist()


@pytest.mark.parametrize("fold", [-1, 4])
def test_there_are_four_folds(fold):
    with pytest.raises(DatasetError, match="is not one of"):
        made().split(fold)


def test_validation_fallback_is_a_stratified_fifth():
    labels = np.repeat([0, 1, 2], [50, 25, 1])
    test = np.zeros((76, 4), dtype=bool)
    test[:10] = True
    dataset = made(labels=labels, test=test, validation=np.zeros((76, 4), dtype=bool), rows=76)
    chosen = [dataset.split(fold) for fold in range(4)]
    for split in chosen:
        assert split.fallback == "stratified"
        assert Counter(labels[split.validation].tolist()) == {0: 8, 1: 5}
        assert split.absent == ()
    assert len({tuple(split.validation.tolist()) for split in chosen}) == 4
    assert chosen[0].validation.tolist()[:4] == dataset.split(0).validation.tolist()[:4]
    assert "no-validation" in codes(dataset)


def test_standardising_uses_training_rows_only():
    dataset = made(np.random.default_rng(0).normal(5, 3, size=(40, 3)))
    for fold in range(4):
        result = dataset.standardise(fold)
        assert np.allclose(result.train[0].mean(axis=0), 0, atol=1e-12)
        assert np.allclose(result.train[0].std(axis=0, ddof=1), 1)
        assert np.allclose(result.features * result.scale + result.mean, dataset.features)
        sizes = [len(x) for x, y in (result.train, result.validation, result.test)]
        assert sizes == [len(y) for x, y in (result.train, result.validation, result.test)]
        assert sum(sizes) == 40
        moved = dataset.features.copy()
        moved[result.split.test] += 1000.0
        other = made(moved).standardise(fold)
        assert np.allclose(other.mean, result.mean)
        assert np.allclose(other.scale, result.scale)


def test_columns_constant_in_training_become_zero_everywhere():
    dataset = made()
    split = dataset.split(0)
    features = dataset.features.copy()
    features[:, 1] = 0.1
    features[split.test, 1] = 21.0
    result = made(features).standardise(0)
    assert result.scale[1] == 0
    assert (result.features[:, 1] == 0).all()
    assert (result.scale[[0, 2]] > 0).all()
    assert "constant-in-training" in codes(made(features))
    nothing = made(np.ones((40, 2))).standardise(0)
    assert (nothing.features == 0).all()
    assert nothing.raw_radius(1.0) == math.inf


@pytest.mark.parametrize("unit", [1e-300, 1e-5, 1.0, 1e300])
def test_standardising_does_not_overflow(unit):
    base = made()
    result = made(base.features * unit).standardise(1)
    assert np.allclose(result.features, base.standardise(1).features)
    quirks(made(base.features * unit))


def test_raw_radius_is_the_largest_ball_inside():
    result = made(np.random.default_rng(0).normal(0, [0.5, 2.0, 9.0], size=(40, 3))).standardise(0)
    radius = result.raw_radius(0.7)
    step = np.zeros(3)
    step[np.argmin(result.scale)] = radius
    assert np.isclose(np.linalg.norm(step / result.scale), 0.7)
    for direction in np.random.default_rng(1).normal(size=(50, 3)):
        step = radius * direction / np.linalg.norm(direction)
        assert np.linalg.norm(step / result.scale) <= 0.7 * (1 + 1e-12)


# -------------------------------------------------------------------------------------------------------- quirks


def test_a_sound_set_has_no_quirks():
    assert quirks(made()) == ()
    assert set(QUIRKS) >= {"fixed-test", "raw-test-rows", "scaled-separately"}


def test_quirks_of_folds():
    test, validation = make_folds(np.arange(40) % 2, "made")
    fixed = made(test=np.repeat(test[:, :1], 4, axis=1))
    assert codes(fixed) >= {"fixed-test"}
    assert not codes(fixed) & {"overlapping-tests", "repeated-test"}
    repeated = test.copy()
    repeated[:, 1] = repeated[:, 0]
    assert codes(made(test=repeated)) >= {"repeated-test", "overlapping-tests"}
    assert "validation-in-test" in codes(made(validation=validation | test))
    assert "few-training-rows" in codes(made(rows=12))
    broken = test.copy()
    broken[:, 2] = True
    (quirk,) = [quirk for quirk in quirks(made(test=broken)) if quirk.code == "unusable-fold"]
    assert quirk.folds == (2,)
    assert "(fold 2)" in str(quirk)


def test_quirks_of_classes():
    labels = np.arange(40) % 2
    labels[0] = 2
    found = {quirk.code: quirk for quirk in quirks(made(labels=labels))}
    fold = int(np.flatnonzero(made(labels=labels).test_folds[0])[0])
    assert found["class-not-in-training"].folds == (fold,)
    assert found["class-not-in-test"].folds == tuple(k for k in range(4) if k != fold)
    assert "class-not-in-validation" in found


def test_quirks_of_scale():
    rng = np.random.default_rng(3)
    scale = lambda x: (x - x.mean(0)) / x.std(0, ddof=1)  # noqa: E731
    features = rng.normal(2, 3, size=(200, 4))
    test = np.zeros((200, 4), dtype=bool)
    test[120:] = True
    build = partial(made, test=test, labels=np.arange(200) % 2)
    apart = np.vstack([scale(features[:120]), scale(features[120:])])
    assert "scaled-separately" in codes(build(apart))
    raw = np.vstack([scale(features[:120]), 500 + 100 * features[120:]])
    assert codes(build(raw)) >= {"raw-test-rows", "not-standardised"}
    padded = scale(np.vstack([features[:80] + 10, np.zeros((120, 4))]))[:80]
    shifted = np.vstack([padded, scale(features[80:])])
    test = test.copy()
    test[80:] = True
    assert "off-centre-training" in codes(build(shifted, test=test))
    plain = codes(build(scale(features)))
    assert not plain & {"scaled-separately", "raw-test-rows", "not-standardised", "off-centre-training"}


def test_flagged_quirks_become_notes(tmp_path):
    dataset = made(labels=np.array([2, *(np.arange(39) % 2)]))
    arrays = {
        "features": dataset.features,
        "labels": dataset.labels[:, None],
        "test": dataset.test_folds.astype(int),
        "validation": dataset.validation_folds.astype(int),
    }
    loaded = Archive(write(tmp_path, files_of("s", arrays))).load("s")
    assert any("no training row" in note for note in loaded.notes)
    assert loaded.source.endswith("archive.zip")


# ----------------------------------------------------------------------------------------- streams, folds, embedded


def test_streams_are_fixed_for_ever():
    stream = Stream("a", 1)
    assert stream.integers(1000, 5).tolist() == Stream("a", 1).integers(1000, 5).tolist()
    assert Stream("a", 2).integers(1000, 5).tolist() != Stream("a", 1).integers(1000, 5).tolist()
    assert Stream("frozen").integers(10**6, 4).tolist() == FROZEN_STREAM
    sample = Stream("normal").normal(200_000)
    assert abs(sample.mean()) < 0.01
    assert abs(sample.std() - 1) < 0.01
    assert abs((sample**4).mean() - 3) < 0.1
    assert sorted(Stream("p").permutation(100).tolist()) == list(range(100))


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), parts=st.integers(1, 5))
def test_parts_are_stratified(labels, parts):
    labels = np.array(labels)
    part = stratified_parts(labels, parts, Stream("parts"))
    sizes = np.bincount(part, minlength=parts)
    assert sizes.max() - sizes.min() <= 1
    for label in set(labels.tolist()):
        counts = np.bincount(part[labels == label], minlength=parts)
        assert counts.max() - counts.min() <= 1


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), share=st.floats(0, 1))
def test_samples_leave_a_row_of_every_class(labels, share):
    labels = np.array(labels)
    rows = np.arange(len(labels))[::2]
    chosen = stratified_sample(labels, rows, share, Stream("sample"))
    assert set(chosen.tolist()) <= set(rows.tolist())
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    left = np.setdiff1d(rows, chosen)
    assert set(labels[left].tolist()) == set(labels[rows].tolist())
    assert chosen.size > 0 or max(Counter(labels[rows].tolist()).values()) == 1


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_embedded_set(name):
    dataset, twin = Embedded().load(name), Embedded().load(name)
    assert same(dataset, twin)
    assert (dataset.rows, dataset.columns, len(dataset.classes)) == RECIPES[name].size
    assert Embedded().summary(name).rows == dataset.rows
    assert dataset.source == f"embedded ({RECIPES[name].kind})"
    assert len(dataset.notes) == 2
    varied = np.ptp(dataset.features, axis=0) > 0
    assert np.allclose(dataset.features.mean(axis=0), 0, atol=1e-10)
    assert np.allclose(dataset.features[:, varied].std(axis=0, ddof=1), 1)
    assert (dataset.test_folds.sum(axis=1) == 1).all()
    assert not (dataset.test_folds & dataset.validation_folds).any()
    for fold in range(4):
        split = dataset.split(fold)
        assert abs(split.test.size / dataset.rows - 0.25) < 0.01
        assert abs(split.validation.size / (split.train.size + split.validation.size) - 0.2) < 0.01
        assert split.absent == ()
        assert split.fallback == ""
    assert codes(dataset) <= {"constant-in-training"}
    assert all(finding.level == "note" for finding in Embedded().check(name))


def test_embedded_sets_are_frozen():
    """Labels and folds are exact on every platform; a change here changes published results."""
    digest = hashlib.sha256()
    for name in sorted(RECIPES):
        dataset = Embedded().load(name)
        digest.update(name.encode() + dataset.labels.tobytes())
        digest.update(np.packbits(dataset.test_folds).tobytes() + np.packbits(dataset.validation_folds).tobytes())
    assert digest.hexdigest()[:16] == FROZEN_EMBEDDED
    assert np.allclose(generators.twonorm()[0][0, :3], FROZEN_TWONORM, atol=1e-9)


def test_published_counts_of_the_rules():
    features, labels, classes = rules.balance_scale()
    assert Counter(np.array(classes)[labels].tolist()) == {"L": 288, "B": 49, "R": 288}
    assert len(np.unique(features, axis=0)) == 625
    features, labels, classes = rules.tic_tac_toe()
    assert Counter(np.array(classes)[labels].tolist()) == {"positive": 626, "negative": 332}
    assert len(np.unique(features, axis=0)) == 958
    assert ((features == 0).sum(axis=1) - (features == 2).sum(axis=1)).max() == 1
    for problem, positive in ((1, 216), (2, 142), (3, 228)):
        features, labels, _ = rules.monks(problem)
        assert len(np.unique(features, axis=0)) == 432
        assert labels.sum() == positive


def test_tic_tac_toe_boards_are_those_of_played_games():
    ends: dict[tuple[int, ...], bool] = {}
    seen: set[tuple[int, ...]] = set()

    def play(board: list[int], mover: int) -> None:
        if tuple(board) in seen:
            return
        seen.add(tuple(board))
        for side in (0, 2):
            if any(all(board[square] == side for square in line) for line in rules.LINES):
                ends[tuple(board)] = side == 0
                return
        if 1 not in board:
            ends[tuple(board)] = False
            return
        for square in [square for square in range(9) if board[square] == 1]:
            board[square] = mover
            play(board, 2 - mover)
            board[square] = 1

    play([1] * 9, 0)
    features, labels, _ = rules.tic_tac_toe()
    assert {tuple(map(int, row)): bool(label) for row, label in zip(features, labels, strict=True)} == ends


def test_published_bayes_errors_of_the_generators():
    """Twonorm 2.3 %, ringnorm 1.3 %, waveform 14 %, led-display 26 % (Breiman et al.)."""
    x, y, _ = generators.twonorm()
    assert abs(np.mean((x.sum(axis=1) < 0) != y) - 0.0228) < 0.005
    x, y, _ = generators.ringnorm()
    inner = ((x - generators.SHIFT) ** 2).sum(axis=1)
    outer = (x**2).sum(axis=1) / 4 + 20 * math.log(4)
    assert abs(np.mean((inner < outer) != y) - 0.013) < 0.005
    x, y, _ = generators.led_display()
    distance = (x[:, None] != generators.SEGMENTS).sum(axis=2)
    ties = distance == distance.min(axis=1, keepdims=True)
    right = ties[np.arange(len(y)), y] / ties.sum(axis=1)
    assert abs(1 - right.mean() - 0.26) < 0.04
    wrong = (x != generators.SEGMENTS[y]).mean()
    assert abs(wrong - 0.1) < 0.01
    for noise in (0, 19):
        x, y, _ = generators.waveform(noise)
        shares = (np.arange(50) + 0.5)[:, None] / 50
        evidence = []
        for first, second in generators.waves()[generators.MIXTURES]:
            centres = shares * first + (1 - shares) * second
            distance = -2 * x[:, :21] @ centres.T + (centres**2).sum(axis=1)
            evidence.append(np.exp(-(distance - (distance.min(axis=1, keepdims=True))) / 2).mean(axis=1))
            evidence[-1] = np.log(evidence[-1]) - distance.min(axis=1) / 2
        assert abs(np.mean(np.argmax(evidence, axis=0) != y) - 0.14) < 0.015
        assert abs(x[:, 21:].std() - 1 if noise else 0) < 0.01


def test_embedded_names_and_missing_scikit_learn(monkeypatch):
    assert set(Embedded().names()) == set(RECIPES)
    with pytest.raises(UnknownSetError, match="do you mean monks"):
        Embedded().load("monk-1")
    monkeypatch.setattr(embedded_module, "find_spec", lambda name: None)
    assert set(Embedded().unavailable()) == {"iris", "wine", "digits", "breast-cancer-wisc-diag"}
    assert "twonorm" in Embedded().names()
    assert "iris" not in Embedded().names()
    with pytest.raises(MissingExtraError, match="ldlt"):
        Embedded().load("iris")
    assert [finding.level for finding in Embedded().check("iris")] == ["unavailable"]
    assert {row.name for row in list_sets() if row.rows is None} == set(Embedded().unavailable())
    assert check_sets().sound == len(RECIPES) - 4


# ------------------------------------------------------------------------------------------------------ download


class Server(ThreadingHTTPServer):
    """A server on this machine with scripted faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = b""
        self.etag = '"one"'
        self.ranges = True
        self.respect_if_range = True
        self.cuts: list[int] = []  # bytes after which successive answers break off
        self.statuses: list[int] = []  # successive answers that are errors
        self.headers: dict[str, str] = {}
        self.length = True
        self.delay = 0.0  # seconds between pieces of 1000 bytes
        self.seen: list[tuple[str, str | None, str | None]] = []
        self.sent = 0

    def url(self, path: str = "/data_py.zip") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def handle_error(self, request, client_address):
        """Clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        server = self.server
        wanted = self.headers.get("Range")
        server.seen.append((self.path, wanted, self.headers.get("If-Range")))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", server.headers["Location"])
            self.end_headers()
            return
        if self.path != "/data_py.zip" or server.statuses:
            self.send_response(404 if self.path != "/data_py.zip" else server.statuses.pop(0))
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = 0
        fresh = self.headers.get("If-Range") in (None, server.etag) or not server.respect_if_range
        if wanted and server.ranges and fresh:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        if server.etag:
            self.send_header("ETag", server.etag)
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        body = body[: server.cuts.pop(0)] if server.cuts else body
        for piece in range(0, len(body), 1000):
            self.wfile.write(body[piece : piece + 1000])
            server.sent += len(body[piece : piece + 1000])
            if server.delay:
                time.sleep(server.delay)
        self.close_connection = True


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(5)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as running:
        (tmp_path / "origin").mkdir()
        running.content = small_archive(tmp_path / "origin").read_bytes()
        yield running


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "cache" / "data_py.zip"


def get(server: Server, target: Path, **options):
    options = {"urls": [server.url()], "sets": 3, "policy": QUICK} | options
    return fetch(target, **options)


def left_over(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def test_fetch_downloads_verifies_and_does_so_once(server, target):
    steps = []
    assert get(server, target, progress=steps.append) == target
    assert target.read_bytes() == server.content
    assert left_over(target) == []
    done = [step.done for step in steps]
    assert done == sorted(done)
    assert (done[-1], steps[-1].total) == (len(server.content), len(server.content))
    get(server, target)
    assert len(server.seen) == 1
    target.write_bytes(b"PK rubbish")
    get(server, target)
    assert target.read_bytes() == server.content


def test_fetch_into_a_folder(server, tmp_path):
    assert get(server, tmp_path) == tmp_path / "data_py.zip"


def test_a_broken_transfer_is_resumed(server, target):
    server.cuts = [1000, 1500]
    get(server, target)
    assert target.read_bytes() == server.content
    assert [seen[1:] for seen in server.seen] == [(None, None), ("bytes=1000-", '"one"'), ("bytes=2500-", '"one"')]


def test_a_later_call_resumes(server, target):
    server.cuts = [2000, 0, 0, 0, 0]
    with pytest.raises(FetchError, match=r"given up \(broke off after 2,000 of"):
        get(server, target)
    assert not target.exists()
    assert len(left_over(target)) == 2
    server.cuts, server.seen = [], []
    get(server, target)
    assert server.seen[0][1] == "bytes=2000-"
    assert target.read_bytes() == server.content
    assert left_over(target) == []


def test_a_complete_part_needs_no_request(server, target, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(5, "gone")))
        with pytest.raises(FetchError, match="gone"):
            get(server, target)
    get(server, target)
    assert len(server.seen) == 1


@pytest.mark.parametrize("etag", ['"one"', 'W/"weak"', ""])
def test_servers_without_ranges_start_over(server, target, etag):
    server.ranges, server.cuts, server.etag = False, [1000], etag
    get(server, target)
    assert target.read_bytes() == server.content
    assert len(server.seen) == 2


def test_a_changed_file_is_not_glued_to_the_old_part(server, target, tmp_path):
    server.cuts = [1500, 0, 0]
    with pytest.raises(FetchError):
        get(server, target)
    (tmp_path / "new").mkdir()
    server.content, server.etag, server.cuts = (small_archive(tmp_path / "new", sets=4).read_bytes(), '"two"', [])
    get(server, target)
    assert target.read_bytes() == server.content


def test_a_bad_glue_is_noticed_and_downloaded_afresh(server, target):
    server.cuts = [1500, 0, 0]
    with pytest.raises(FetchError):
        get(server, target)
    (part,) = [path for path in target.parent.iterdir() if path.suffix == ".part"]
    part.write_bytes(bytes(1500))
    server.cuts, server.seen, server.respect_if_range = [], [], False
    get(server, target)
    assert [seen[1] for seen in server.seen] == ["bytes=1500-", None]
    assert target.read_bytes() == server.content


def test_wrong_content_range_and_416_start_over(server, target):
    server.cuts = [1500, 0, 0]
    with pytest.raises(FetchError):
        get(server, target)
    (part,) = [path for path in target.parent.iterdir() if path.suffix == ".part"]
    part.write_bytes(server.content + b"more")
    server.cuts = []
    get(server, target)
    assert target.read_bytes() == server.content


def test_the_next_address_is_tried_and_all_reasons_are_given(server, target):
    get(server, target, urls=[server.url("/gone"), server.url()])
    assert [seen[0] for seen in server.seen] == ["/gone", "/data_py.zip"]
    target.unlink()
    with pytest.raises(FetchError, match=r"(?s)/a: the server answers 404.*/b: the server answers 404") as caught:
        get(server, target, urls=[server.url("/a"), server.url("/b")])
    assert isinstance(caught.value, LdltError)
    assert left_over(target) == []
    with pytest.raises(FetchError, match="no address"):
        get(server, target, urls=[])


def test_a_part_survives_the_failure_of_another_address(server, target):
    server.cuts = [1500, 0, 0]
    with pytest.raises(FetchError):
        get(server, target, urls=[server.url(), server.url("/gone")])
    server.cuts, server.seen = [], []
    get(server, target)
    assert server.seen[0][1] == "bytes=1500-"


def test_busy_servers_are_asked_again(server, target):
    server.statuses = [503, 429]
    get(server, target, policy=Policy(attempts=3, pause=0.01))
    assert len(server.seen) == 3
    target.unlink()
    server.statuses, server.headers = [500] * 9, {"Retry-After": "1"}
    with pytest.raises(FetchError, match="out of time"):
        get(server, target, policy=Policy(attempts=3, pause=0.01, deadline=0.5))
    server.statuses = [304]
    with pytest.raises(FetchError, match=r"answers 304"):
        get(server, target)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>moved</html>" * 100, "a web page"),
        (b"\x1f\x8b" + bytes(500_000), "layout of 2014"),
        (b"", "the file is empty"),
        (b"hello" * 100, "not a zip file"),
        (b"PK\x03\x04" + bytes(3000), "truncated or damaged"),
    ],
)
def test_wrong_content_is_refused(server, target, content, message):
    server.content = content
    with pytest.raises(FetchError, match=message):
        get(server, target)
    assert not target.exists()
    assert left_over(target) == []


def test_other_archives_and_checksums_are_refused(server, target):
    good = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(FetchError, match="3 complete data sets instead of at least 4"):
        get(server, target, sets=4)
    with pytest.raises(FetchError, match="sha256 is"):
        get(server, target, sha256="0" * 64)
    get(server, target, sha256=good.upper())
    with pytest.raises(ArchiveError, match="sha256"):
        verify(target, sets=3, sha256="1" * 64)
    assert len(verify(target, sets=3, sha256=good)) == 3


@pytest.mark.parametrize("length", [True, False])
def test_downloads_that_are_too_large_are_stopped(server, target, length):
    server.length = length
    with pytest.raises(FetchError, match="more than 2,000"):
        get(server, target, policy=Policy(largest=2000))


def test_a_transfer_of_unknown_length_works(server, target):
    server.length = False
    get(server, target)
    assert target.read_bytes() == server.content


def test_slow_servers_meet_the_timeout_and_the_deadline(server, target):
    server.delay = 0.5
    start = time.monotonic()
    with pytest.raises(FetchError, match="broke off"):
        get(server, target, policy=Policy(attempts=1, most=2, timeout=0.1, pause=0.01))
    with pytest.raises(FetchError, match="out of time"):
        get(server, target, policy=Policy(timeout=5, deadline=0.2))
    assert time.monotonic() - start < 8


def test_addresses_that_cannot_be_used(server, target, tmp_path):
    local = (tmp_path / "origin" / "archive.zip").as_uri()
    with pytest.raises(FetchError, match="not an http or https address"):
        get(server, target, urls=[local, "ftp://localhost/x"])
    server.headers = {"Location": local}
    with pytest.raises(FetchError, match="302"):
        get(server, target, urls=[server.url("/moved")])
    server.headers = {"Location": server.url()}
    get(server, target, urls=[server.url("/moved")])
    target.unlink()
    with pytest.raises(FetchError, match="not reachable"):
        get(server, target, urls=["http://127.0.0.1:9/"])
    with pytest.raises(FetchError, match="not a usable address|not reachable"):
        get(server, target, urls=["http://127.0.0.1:port/"])


def test_encoded_answers_are_refused(server, target):
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(FetchError, match="encoded"):
        get(server, target)


def test_places_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FetchError, match="cannot be written"):
        get(server, tmp_path / "file" / "data_py.zip")


def test_two_downloads_to_one_file_exclude_each_other(server, target):
    fcntl = pytest.importorskip("fcntl")
    target.parent.mkdir()
    with (target.parent / "data_py.zip.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="another download"):
            get(server, target)
    get(server, target)


def test_an_exception_in_the_callback_keeps_the_part(server, target):
    def stop(step):
        if step.done > 1500:
            raise KeyboardInterrupt

    server.delay = 0.02
    with pytest.raises(KeyboardInterrupt):
        get(server, target, progress=stop)
    server.seen = []
    get(server, target)
    assert server.seen[0][1].startswith("bytes=")
    assert target.read_bytes() == server.content


# ----------------------------------------------------------------------------------------------------- unpacking


def test_unpacking_gives_the_same_data(tmp_path):
    path = small_archive(tmp_path)
    folder = unpack(path, tmp_path / "out" / "deep")
    first, second = Archive(path), Archive(folder)
    assert first.names() == second.names()
    assert all(same(first.load(name), second.load(name)) for name in first.names())
    with pytest.raises(ArchiveError, match="not an empty folder"):
        unpack(path, folder)
    (tmp_path / "empty").mkdir()
    unpack(path, tmp_path / "empty")
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArchiveError, match="not an empty folder|cannot be written"):
            unpack(path, place)


def evil(root: Path, *members: tuple[str, bytes], mode: int = 0, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(root / "evil.zip", "w", method) as file:
        for name, content in members:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.external_attr = mode << 16
            info.compress_type = method
            file.writestr(info, content)
    return root / "evil.zip"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/passwd", "absolute"),
        ("../up", "leaves"),
        ("a/../../up", "leaves"),
        ("a/./b", "leaves"),
        ("a//b", "leaves"),
        ("..", "leaves"),
        ("a\\..\\b", "backslash"),
        ("C:/x", "colon"),
        ("a\nb", "control"),
    ],
)
def test_escaping_names_are_refused(tmp_path, name, reason):
    path = evil(tmp_path, ("good", b"1"), (name, b"1"))
    with pytest.raises(UnsafeArchiveError, match=reason):
        unpack(path, tmp_path / "out" / "inner")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_links_and_devices_are_refused(tmp_path, kind):
    with pytest.raises(UnsafeArchiveError, match="link or a device"):
        unpack(evil(tmp_path, ("x", b"/etc/passwd"), mode=kind | 0o777), tmp_path / "out")


def test_limits_of_unpacking(tmp_path):
    path = evil(tmp_path, ("a", bytes(100_000)), ("b", b"1"))
    for limits, reason in (
        (Limits(files=1), "2 files, more than 1"),
        (Limits(size=50_000), "more than 50,000"),
        (Limits(ratio=50), "more than 50 times"),
    ):
        with pytest.raises(UnsafeArchiveError, match=reason):
            audit(path, limits)
    with pytest.raises(UnsafeArchiveError, match="times its size"):
        audit(path)
    assert audit(path, Limits(ratio=1e6)) == 100_001
    with pytest.raises(UnsafeArchiveError):
        verify(evil(tmp_path, ("a/a_py.dat", bytes(10**6))), sets=0)


@pytest.mark.parametrize("pair", [("a", "A"), ("d/x", "D/X"), ("a", "a/b"), ("a/b", "a")])
def test_colliding_names_are_refused(tmp_path, pair):
    with pytest.raises(UnsafeArchiveError, match="twice|below a file"):
        audit(evil(tmp_path, *((name, b"1") for name in pair)))


def test_overlapping_and_encrypted_members_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "overlap.zip", "w", zipfile.ZIP_STORED) as file:
        file.writestr("a", os.urandom(2000))
        for index in range(5):
            twin = copy.copy(file.filelist[0])
            twin.filename = twin.orig_filename = f"twin-{index}"
            file.filelist.append(twin)
    with pytest.raises(UnsafeArchiveError, match="overlap"):
        audit(tmp_path / "overlap.zip")
    content = bytearray(evil(tmp_path, ("a", b"1")).read_bytes())
    content[content.rfind(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "secret.zip").write_bytes(bytes(content))
    with pytest.raises(UnsafeArchiveError, match="encrypted"):
        audit(tmp_path / "secret.zip")


def test_a_damaged_archive_leaves_nothing_behind(tmp_path):
    path = evil(tmp_path, ("a", b"1" * 50), ("b", b"hello world" * 9), method=zipfile.ZIP_STORED)
    content = path.read_bytes().replace(b"hello", b"jello", 1)
    path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------------------ commands


def test_locate_prefers_path_then_environment_then_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("LDLT_UCI", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_path() == tmp_path / "cache" / "ldlt" / "data_py.zip"
    assert locate() is None
    default_path().parent.mkdir(parents=True)
    default_path().touch()
    assert locate() == default_path()
    other = tmp_path / "other.zip"
    monkeypatch.setenv("LDLT_UCI", str(other))
    with pytest.raises(ArchiveError, match="LDLT_UCI"):
        locate()
    other.touch()
    assert locate() == other
    assert locate(tmp_path) == tmp_path
    with pytest.raises(ArchiveError, match="no such"):
        locate(tmp_path / "nothing")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "ldlt" / "data_py.zip"


def test_digests_tell_contents_apart(tmp_path):
    files = files_of("good", simple(rows=40))
    (tmp_path / "a").mkdir()
    zipped, folder = Archive(write(tmp_path / "a", files)), Archive(write(tmp_path, files, "folder"))
    assert zipped.digest("good") == folder.digest("good")
    for file in files:
        changed = files | {file: files[file].replace(b"0", b"1", 1)}
        (tmp_path / "b").mkdir(exist_ok=True)
        assert Archive(write(tmp_path / "b", changed)).digest("good") != zipped.digest("good")
    with pytest.raises(UnknownSetError):
        zipped.digest("nope")
    digests = [Embedded().digest(name) for name in Embedded().names()]
    assert len(set(digests)) == len(digests)
    assert digests == [Embedded().digest(name) for name in Embedded().names()]


def test_list_and_check_never_stop_at_a_bad_set(tmp_path):
    files = files_of("good", simple(rows=40)) | files_of("bad", simple()) | files_of("bare", simple())
    del files["bare/bare_py.dat"]
    files["bad/labels_py.dat"] = replaced(files["bad/labels_py.dat"], 3, 1, b"x")
    archive = Archive(write(tmp_path, files))
    rows = {row.name: row for row in list_sets(archive)}
    assert (rows["good"].rows, rows["good"].columns, rows["good"].classes, rows["good"].status) == (40, 3, 2, "ok")
    assert rows["bad"].status.startswith("error: data/bad/labels_py.dat, line 3")
    assert rows["bare"].status.startswith("unavailable: ")
    names: list[str] = []
    report = check_sets(archive, progress=names.append)
    assert names == ["bad", "bare", "good"]
    assert (report.checked, report.sound, report.ok) == (3, 1, False)
    assert len(report.of("error")) == len(report.of("unavailable")) == 1
    assert str(report).startswith("1 of 3 data sets can be used (1 error, 1 unavailable")
    assert check_sets(archive, ["bare", "good"]).ok
    with pytest.raises(UnknownSetError):
        check_sets(archive, ["nope"])
    table = format_table(list_sets(archive)).splitlines()
    assert table[0].split() == ["name", "rows", "columns", "classes", "kind", "status"]
    assert len(table) == 5
    faults = format_table(report.of("error"), ["name", "level", "line"]).splitlines()
    assert faults[2].split() == ["bad", "error", "3"]


def test_list_and_check_of_the_embedded_sets():
    rows = list_sets()
    assert [row.name for row in rows] == sorted(RECIPES)
    assert all(row.status == "ok" for row in rows)
    report = check_sets(names=["iris", "monks-1"])
    assert (report.checked, report.sound, report.ok) == (2, 2, True)


def test_tables_of_all_kinds_of_values():
    assert format_table([]) == "(nothing)"
    step = data.Progress("http://x", 5, None)
    assert format_table([step]).splitlines()[-1] == "http://x     5      -"
    finding = data.Finding("a", "note", "two\nlines")
    assert "two lines" in format_table([finding])
    quirk = data.Quirk("fixed-test", "x", (0, 1))
    assert "0, 1" in format_table([quirk])


def test_fetch_command(server, target, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "__kwdefaults__", fetch.__kwdefaults__ | {"sets": 3})
    archive = fetch_sets(target, urls=[server.url()])
    assert archive.path == target
    archive = fetch_sets(target, folder=tmp_path / "unpacked", urls=[server.url()])
    assert archive.path == tmp_path / "unpacked"
    assert len(archive) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch_sets(urls=[server.url()]).path == default_path()


def test_fetch_on_the_command_line(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "__kwdefaults__", fetch.__kwdefaults__ | {"sets": 3})
    monkeypatch.setattr("ldlt_bench.data.fetch_sets", partial(fetch_sets, urls=[server.url()]))
    assert main(["data", "fetch", str(tmp_path)]) == 0  # a folder: the file inside it is named
    assert capsys.readouterr().out.strip().endswith(f"data sets in {tmp_path / 'data_py.zip'}")
    assert main(["data", "fetch", str(tmp_path / "x.zip"), "--sha256", "00" * 32]) == 2
    assert "sha256" in capsys.readouterr().err
    unpacked = tmp_path / "unpacked"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["data", "fetch", str(tmp_path / "y.zip"), "--unpack", str(unpacked)]) == 0
    told = capsys.readouterr()
    assert told.out.strip().endswith(str(unpacked))
    assert f"MB from {server.url()}" in told.err
    assert Archive(unpacked).names() == Archive(tmp_path / "data_py.zip").names()


def test_public_names_and_examples():
    assert sorted(data.__all__) == sorted(set(data.__all__))
    assert all(hasattr(data, name) for name in data.__all__)
    tried = 0
    for name in ("", ".stream", ".dataset", ".embedded", ".commands"):
        result = doctest.testmod(importlib.import_module("ldlt_bench.data" + name))
        assert result.failed == 0
        tried += result.attempted
    assert tried >= 5


# ------------------------------------------------------------------------------- the public archive (LDLT_UCI only)

FIXED = set(
    [
        "adult",
        "annealing",
        "audiology-std",
        "conn-bench-vowel-deterding",
        "hayes-roth",
        "hill-valley",
        "horse-colic",
        "image-segmentation",
        "monks-1",
        "monks-2",
        "monks-3",
        "optical",
        "pendigits",
        "soybean",
        "spect",
        "spectf",
        "statlog-landsat",
        "statlog-shuttle",
        "thyroid",
    ]
)
SHIFTED = {"monks-1", "monks-2", "monks-3", "spectf"}


@pytest.fixture(scope="module")
def archive() -> Archive:
    return Archive(UCI)


@pytest.fixture(scope="module")
def everything(archive) -> dict[str, Dataset]:
    start = time.monotonic()
    loaded = {name: archive.load(name) for name in archive.names()}
    assert time.monotonic() - start < 30
    return loaded


@needs_archive
def test_archive_is_complete(archive, everything):
    assert len(everything) >= 120
    assert set(archive.unavailable()) <= {"miniboone"}
    assert sum(dataset.rows < 1000 for dataset in everything.values()) == 75
    for name, dataset in everything.items():
        size = archive.summary(name)
        assert (size.rows, size.columns, size.classes) == (dataset.rows, dataset.columns, len(dataset.classes))
        for fold in range(4):
            assert np.isfinite(dataset.standardise(fold).features).all()


@needs_archive
def test_archive_has_the_documented_quirks(everything):
    found: dict[str, dict[str, tuple[int, ...]]] = {code: {} for code in QUIRKS}
    for name, dataset in everything.items():
        if name == "miniboone":
            continue
        for quirk in quirks(dataset):
            found[quirk.code][name] = quirk.folds
    assert set(found["fixed-test"]) == FIXED
    assert len(found["overlapping-tests"]) == 101
    assert set(found["repeated-test"]) == {"trains"}
    assert set(found["raw-test-rows"]) == {"annealing"}
    assert set(found["off-centre-training"]) == SHIFTED
    assert set(found["scaled-separately"]) == FIXED - SHIFTED - {"annealing"}
    assert found["class-not-in-training"] == {"low-res-spect": (1,)}
    assert set(found["few-training-rows"]) == {"balloons", "trains"}
    assert len(found["class-not-in-test"]) == 8
    assert len(found["class-not-in-validation"]) == 27
    assert len(found["constant-in-training"]) == 8
    assert len(found["not-standardised"]) == 11
    for code in ("validation-in-test", "no-validation", "unusable-fold"):
        assert found[code] == {}


@needs_archive
def test_off_centre_rows_were_standardised_with_rows_of_zeros(everything):
    """Their mean and deviation are those of the training rows filled up with zeros to the number of test rows."""
    for name in SHIFTED:
        dataset = everything[name]
        test = dataset.test_folds[:, 0]
        train, padding = dataset.features[~test], int(test.sum()) - int((~test).sum())
        zero = -train.sum(axis=0) / padding  # what a row of zeros became, if the mean is to be 0
        assert np.allclose((train**2).sum(axis=0) + padding * zero**2, test.sum() - 1, atol=0.01)


def matched(first: Dataset | tuple, second: Dataset) -> bool:
    """Whether two sets have the same labelled rows, in any order, up to the six digits of the archive."""
    features, labels = (first.features, first.labels) if isinstance(first, Dataset) else first
    order = [
        np.lexsort([labels, *np.round(x, 3).T]) for x, labels in ((features, labels), (second.features, second.labels))
    ]
    return np.array_equal(labels[order[0]], second.labels[order[1]]) and np.allclose(
        features[order[0]], second.features[order[1]], atol=1e-3
    )


@needs_archive
@pytest.mark.parametrize("name", ["balance-scale", "tic-tac-toe", "wine", "breast-cancer-wisc-diag"])
def test_embedded_rows_are_those_of_the_archive(everything, name):
    ours = Embedded().load(name)
    assert matched(everything[name], ours)
    codes = [len(np.unique(np.round(x.features, 3), axis=0)) for x in (everything[name], ours)]
    assert codes[0] == codes[1]


@needs_archive
@pytest.mark.parametrize("problem", [1, 2, 3])
def test_monks_are_the_test_rows_of_the_archive(everything, problem):
    theirs, ours = everything[f"monks-{problem}"], Embedded().load(f"monks-{problem}")
    test = theirs.test_folds[:, 0]
    assert matched((theirs.features[test], theirs.labels[test]), ours)


@needs_archive
def test_iris_differs_in_two_rows_and_digits_are_in_optical(everything):
    from sklearn.datasets import load_iris  # noqa: PLC0415

    raw = load_iris().data
    scale = np.array([0.1, 0.1, 0.1, 0.1])
    theirs = everything["iris"].features
    steps = [np.diff(np.unique(np.round(column, 4))).min() for column in theirs.T]
    decoded = np.round((theirs - theirs[0]) / steps) * scale + raw[0]
    assert np.flatnonzero(np.abs(decoded - raw).max(axis=1) > 0.05).tolist() == [34, 37]
    optical = everything["optical"]
    test = optical.test_folds[:, 0]
    ours = Embedded().load("digits")
    varied = np.ptp(ours.features, axis=0) > 0
    theirs = optical.features[test]
    theirs = theirs[:, np.ptp(theirs, axis=0) > 0]
    assert np.array_equal(optical.labels[test], ours.labels)
    assert np.allclose(theirs, ours.features[:, varied], atol=1e-3)


@needs_archive
@pytest.mark.parametrize("name", ["twonorm", "ringnorm", "waveform", "waveform-noise", "led-display"])
def test_generated_sets_have_the_law_of_the_archive(everything, name):
    theirs, ours = everything[name], Embedded().load(name)
    assert (theirs.rows, theirs.columns) == (ours.rows, ours.columns)
    for label in range(len(ours.classes)):
        first, second = theirs.features[theirs.labels == label], ours.features[ours.labels == label]
        count = min(len(first), len(second))
        assert abs(len(first) - len(second)) < 5 * math.sqrt(2 * theirs.rows / len(ours.classes))
        spread = np.maximum(np.maximum(first.std(axis=0), second.std(axis=0)), 0.3)
        assert (np.abs(first.mean(axis=0) - second.mean(axis=0)) / spread).max() < 6 / math.sqrt(count / 2)
        assert np.abs(np.cov(first.T) - np.cov(second.T)).max() < 12 / math.sqrt(count)


@needs_archive
def test_archive_passes_its_own_check(archive, tmp_path):
    report = check_sets(archive)
    assert report.ok
    assert report.sound >= 120
    if archive.path.is_file():
        assert len(verify(archive.path)) >= 120
