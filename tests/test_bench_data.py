"""Data of the study: reader, splits, quirks, embedded sets, download, unpacking.

Tests marked ``needs_archive`` compare with the public archive; they run only if LDLT_UCI is its path.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import pickle
import tempfile
import threading
import tracemalloc
import zipfile
from collections import Counter
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from ldlt.errors import MissingExtraError
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
    UnavailableSetError,
    UnknownSetError,
    UnsafeArchiveError,
    fetch_sets,
    locate,
    make_folds,
    quirks,
    rules,
    verify,
)
from ldlt_bench.data import archive as archive_module
from ldlt_bench.data import embedded as embedded_module
from ldlt_bench.data import fetch as fetch_module
from ldlt_bench.data.archive import default_path, parse_table
from ldlt_bench.data.dataset import encode_labels
from ldlt_bench.data.folds import Stream, stratified_parts, stratified_sample

UCI = os.environ.get("LDLT_UCI", "")
needs_archive = pytest.mark.skipif(not UCI, reason="LDLT_UCI is not the path of the public archive")

FILES = ("{}_py.dat", "labels_py.dat", "folds_py.dat", "validation_folds_py.dat")
KINDS = ["zip", "zip, no data/", "folder", "folder, no data/"]
FROZEN_STREAM = [765436, 842726, 899637, 284107]
FROZEN_EMBEDDED = "7b82378b37de9db4"
FROZEN_TWONORM = [0.7047706230497467, 0.948303450761343, 1.973673835459543]


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


@settings(max_examples=25, deadline=None)
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
def test_several_sets_strays_and_gaps(tmp_path, kind):
    files = files_of("b", simple()) | files_of("a", simple(seed=1)) | files_of("bare", simple())
    del files["bare/bare_py.dat"]
    files |= {
        "abalone_py.dat": b"1,2\n",
        "readme.txt": b"hello",
        "a/extra.txt": b"?",
        "part/folds_py.dat": b"0,0,0,1\n",
    }
    archive = Archive(write(tmp_path, files, kind))
    assert archive.names() == ("a", "b")
    assert set(archive.unavailable()) == {"bare", "part"}
    with pytest.raises(UnavailableSetError):
        archive.load("bare")
    for name in ("c", "baree"):
        with pytest.raises(UnknownSetError):
            archive.load(name)
    assert [finding.level for finding in archive.check("bare")] == ["unavailable"]
    assert same(pickle.loads(pickle.dumps(archive)).load("a"), archive.load("a"))


def test_a_set_that_is_there_twice_is_not_guessed(tmp_path):
    files = files_of("a", simple()) | {f"data/{k}": v for k, v in (files_of("a", simple(seed=1))).items()}
    archive = Archive(write(tmp_path, files | files_of("b", simple()), "zip, no data/"))
    assert archive.names() == ("b",)
    assert set(archive.unavailable()) == {"a"}


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


@settings(max_examples=80, deadline=None)
@given(
    file=st.sampled_from(FILES),
    line=st.integers(1, 11),
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
        with pytest.raises(FormatError) as caught:
            archive.load("s")
        (finding,) = archive.check("s")
        assert archive.load("t").rows == 12
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.file.endswith(file)
    assert (finding.level, finding.message) == ("error", str(caught.value))


def without_last_cell(content: bytes) -> bytes:
    lines = content.split(b"\n")
    lines[4] = lines[4].rpartition(b",")[0]
    return b"\n".join(lines)


DAMAGE = {
    "short line": ("s_py.dat", without_last_cell, (5, 2)),
    "long line": ("s_py.dat", lambda c: c.replace(b"\n", b",1.0\n", 1), (1, 4)),
    "blank line": ("s_py.dat", lambda c: c.replace(b"\n", b"\n\n", 1), (2, 1)),
    "empty": ("s_py.dat", lambda c: b"", (None, None)),
    "white": ("folds_py.dat", lambda c: b" \n\n", (None, None)),
    "fewer rows": ("s_py.dat", lambda c: c.split(b"\n", 1)[1], (None, None)),
    "semicolons": ("s_py.dat", lambda c: c.replace(b",", b";"), (1, 1)),
    "fraction label": ("labels_py.dat", lambda c: replaced(c, 3, 1, b"1.5"), (3, 1)),
    "huge label": ("labels_py.dat", lambda c: replaced(c, 3, 1, b"1e300"), (3, 1)),
    "wide labels": ("labels_py.dat", lambda c: c.replace(b"\n", b",0\n"), (1, 2)),
    "one class": ("labels_py.dat", lambda c: c.replace(b"1", b"0"), (None, None)),
    "fold half": ("folds_py.dat", lambda c: replaced(c, 4, 3, b"0.5"), (4, 3)),
    "three folds": ("folds_py.dat", lambda c: c.replace(b",0\n", b"\n").replace(b",1\n", b"\n"), (1, 3)),
    "validation rows": ("validation_folds_py.dat", lambda c: c + b"0,0,0,0\n", (None, None)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_malformed_files_are_refused_with_their_place(tmp_path, damage):
    name, spoil, place = DAMAGE[damage]
    files = files_of("s", simple())
    files[f"s/{name}"] = spoil(files[f"s/{name}"])
    archive = Archive(write(tmp_path, files))
    with pytest.raises(FormatError) as caught:
        archive.load("s")
    assert (caught.value.file, caught.value.line, caught.value.column) == (f"data/s/{name}", *place)
    assert [finding.level for finding in archive.check("s")] == ["error"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_integral_labels_in_other_spellings(tmp_path):
    files = files_of("s", simple(rows=8))
    files["s/labels_py.dat"] = b"3.0\n-1\n3\n-1.0\n3e0\n -1\n3\n7 \n"
    dataset = Archive(write(tmp_path, files)).load("s")
    assert dataset.classes == (-1, 3, 7)
    assert dataset.labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 2]


def test_tables_are_bounded_before_they_are_parsed(tmp_path, monkeypatch):
    assert parse_table(b"1,2,3", "f").shape == (1, 3)
    monkeypatch.setattr(archive_module, "CELLS", 50)
    with pytest.raises(FormatError):
        parse_table(b"0," * 60 + b"0", "f")
    monkeypatch.setattr(archive_module, "LARGEST", 100)
    for kind in ("zip", "folder"):
        with pytest.raises(ArchiveError):
            Archive(write(tmp_path, files_of("s", simple()), kind)).load("s")


def test_a_bomb_takes_no_memory(tmp_path):
    """Half a megabyte that unpacks to 400 MB is refused by its directory, whichever way it is used."""
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files_of("s", simple()).items():
            if name != "s/s_py.dat":
                file.writestr(f"data/{name}", content)
        with file.open("data/s/s_py.dat", "w") as stream:
            for _ in range(400):
                stream.write(b"0," * (1 << 19))
    tracemalloc.start()
    with pytest.raises(ArchiveError):
        Archive(path).load("s")
    with pytest.raises(UnsafeArchiveError):
        verify(path, sets=1)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_truncated_zip_files_never_pass(tmp_path):
    whole = write(tmp_path, files_of("s", simple())).read_bytes()
    cut = tmp_path / "cut.zip"
    for size in range(0, len(whole), 29):
        cut.write_bytes(whole[:size])
        with pytest.raises(ArchiveError):
            Archive(cut)


@settings(max_examples=80, deadline=None)
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
    with pytest.raises(ArchiveError):
        archive.load("a")
    assert [finding.level for finding in archive.check("a")] == ["error"]
    assert archive.load("b").rows == 40
    with pytest.raises(ArchiveError):
        verify(path, sets=2)


def test_other_layouts_and_other_things_are_refused(tmp_path):
    old = {"iris/iris_R.dat": b"x", "iris/iris.arff": b"x", "iris/conxuntos_kfold.dat": b"x"}
    for kind in KINDS:
        (tmp_path / kind.replace("/", "")).mkdir()
        with pytest.raises(LayoutError):
            Archive(write(tmp_path / kind.replace("/", ""), old, kind))
    for start, error in (
        (b"\x1f\x8b", LayoutError),
        (b"<html>", ArchiveError),
        (b"", ArchiveError),
        (b"PK", ArchiveError),
    ):
        (tmp_path / "file.zip").write_bytes(start)
        with pytest.raises(error):
            Archive(tmp_path / "file.zip")
    (tmp_path / "bare").mkdir()
    for place in ("nowhere", "bare"):
        with pytest.raises(ArchiveError):
            Archive(tmp_path / place)


# --------------------------------------------------------------------------------------- data sets, splits, scales


def test_data_sets_are_frozen_copies_and_survive_pickling():
    features = np.ones((40, 2)) * np.arange(40)[:, None]
    dataset = made(features)
    features[:] = 7
    assert dataset.features[3, 0] == 3
    for twin in (dataset, pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert same(twin, dataset)
        assert not any(getattr(twin, name).flags.writeable for name in ("features", "labels", "test_folds"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("features", np.zeros(40)), ("features", np.zeros((0, 2))), ("features", np.full((40, 2), np.nan)),
        ("features", np.full((40, 2), "x")), ("labels", np.zeros(39)), ("labels", np.full(40, 0.5)),
        ("labels", np.full(40, 2)), ("classes", (1, 1)), ("classes", (1,)), ("test_folds", np.zeros((40, 3))),
        ("validation_folds", np.full((40, 4), 2)),
    ],
)  # fmt: skip
def test_arrays_that_disagree_are_refused(field, value):
    sound = made()
    names = ("features", "labels", "classes", "test_folds", "validation_folds")
    with pytest.raises(DatasetError):
        Dataset(name="bad", **({name: getattr(sound, name) for name in names} | {field: value}))


@settings(deadline=None)
@given(made_up=arrays(), fold=st.integers(0, 3))
def test_splits_cover_all_rows_and_test_wins(made_up, fold):
    labels, classes = encode_labels(made_up["labels"][:, 0])
    dataset = Dataset("s", np.zeros((len(labels), 1)), labels, classes, made_up["test"], made_up["validation"])
    test = made_up["test"][:, fold] == 1
    rest = ~test & (made_up["validation"][:, fold] == 0)
    if not test.any() or not rest.any():
        with pytest.raises(DatasetError):
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
    if not split.fallback:
        assert split.train.tolist() == np.flatnonzero(rest).tolist()
    assert dataset.split(fold).validation.tolist() == split.validation.tolist()
    with pytest.raises(DatasetError):
        dataset.split(4)


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
    assert quirks(made()) == ()


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
    assert np.allclose(rules.twonorm()[0][0, :3], FROZEN_TWONORM, atol=1e-9)


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
    x, y, _ = rules.twonorm()
    assert abs(np.mean((x.sum(axis=1) < 0) != y) - 0.0228) < 0.005
    x, y, _ = rules.ringnorm()
    inner = ((x - rules.SHIFT) ** 2).sum(axis=1)
    outer = (x**2).sum(axis=1) / 4 + 20 * math.log(4)
    assert abs(np.mean((inner < outer) != y) - 0.013) < 0.005
    x, y, _ = rules.led_display()
    distance = (x[:, None] != rules.SEGMENTS).sum(axis=2)
    ties = distance == distance.min(axis=1, keepdims=True)
    right = ties[np.arange(len(y)), y] / ties.sum(axis=1)
    assert abs(1 - right.mean() - 0.26) < 0.04
    wrong = (x != rules.SEGMENTS[y]).mean()
    assert abs(wrong - 0.1) < 0.01
    for noise in (0, 19):
        x, y, _ = rules.waveform(noise)
        shares = (np.arange(50) + 0.5)[:, None] / 50
        evidence = []
        for first, second in rules.waves()[rules.MIXTURES]:
            centres = shares * first + (1 - shares) * second
            distance = -2 * x[:, :21] @ centres.T + (centres**2).sum(axis=1)
            evidence.append(np.exp(-(distance - (distance.min(axis=1, keepdims=True))) / 2).mean(axis=1))
            evidence[-1] = np.log(evidence[-1]) - distance.min(axis=1) / 2
        assert abs(np.mean(np.argmax(evidence, axis=0) != y) - 0.14) < 0.015
        assert abs(x[:, 21:].std() - 1 if noise else 0) < 0.01


def test_missing_scikit_learn(monkeypatch):
    assert set(Embedded().names()) == set(RECIPES)
    monkeypatch.setattr(embedded_module, "find_spec", lambda name: None)
    assert set(Embedded().unavailable()) == {"iris", "wine", "digits", "breast-cancer-wisc-diag"}
    with pytest.raises(MissingExtraError):
        Embedded().load("iris")
    with pytest.raises(UnknownSetError):
        Embedded().load("monk-1")
    assert [finding.level for finding in Embedded().check("iris")] == ["unavailable"]


# ------------------------------------------------------------------------------------------------------ download


class Handler(BaseHTTPRequestHandler):
    """Serves ``server.content``; the path tells what goes wrong."""

    def do_GET(self):
        self.server.asked += 1
        content, path = self.server.content, self.path
        if "missing" in path or ("busy" in path and self.server.asked == 1):
            self.send_error(404 if "missing" in path else 503)
            return
        self.send_response(200)
        if "length" not in path:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if "short" in path else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "ATTEMPTS", 2)
    monkeypatch.setattr("time.sleep", lambda _: None)
    files = {}
    for index in range(3):
        files |= files_of(f"set-{index}", simple(rows=40, seed=index))
    (tmp_path / "source").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.content, found.asked = write(tmp_path / "source", files).read_bytes(), 0
        found.url = f"http://127.0.0.1:{found.server_port}"
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


def fetch(server, target, *paths, **more):
    return fetch_sets(target, urls=[f"{server.url}/{path}" for path in paths], sets=3, **more)


@pytest.mark.parametrize("path", ["plain", "length", "busy"])
def test_fetch_downloads_verifies_and_does_so_once(server, tmp_path, path):
    target = tmp_path / "new" / "data_py.zip"
    sha = hashlib.sha256(server.content).hexdigest()
    assert len(fetch(server, target, path, sha256=sha.upper())) == 3
    assert target.read_bytes() == server.content
    asked = server.asked
    assert len(fetch(server, target.parent, path, sha256=sha)) == 3  # a folder will do, and nothing is asked again
    assert server.asked == asked
    with zipfile.ZipFile(target) as file:
        file.extractall(tmp_path / "uci")
    unpacked = Archive(tmp_path / "uci")
    assert same(unpacked.load("set-0"), Archive(target).load("set-0"))
    assert unpacked.digest("set-0") == Archive(target).digest("set-0") != unpacked.digest("set-1")


def test_the_next_address_is_tried_and_all_reasons_are_given(server, tmp_path):
    assert len(fetch(server, tmp_path / "a.zip", "missing", "short", "plain")) == 3
    with pytest.raises(FetchError) as caught:
        fetch(server, tmp_path / "b.zip", "missing", "short")
    assert "/missing" in str(caught.value)
    assert "/short" in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".part", "b.zip"))]


def test_wrong_content_is_refused(server, tmp_path, monkeypatch):
    whole = server.content
    for content in (b"", b"<html>", b"\x1f\x8b" + whole[2:], whole[:-30]):
        server.content = content
        with pytest.raises(FetchError):
            fetch(server, tmp_path / "x.zip", "plain")
    server.content = whole
    for change in ({"sha256": "0" * 64}, {"sha256": "nonsense"}):
        with pytest.raises(FetchError):
            fetch(server, tmp_path / "x.zip", "plain", **change)
    monkeypatch.setattr(fetch_module, "LARGEST_DOWNLOAD", 100)
    for path in ("plain", "length"):
        with pytest.raises(FetchError):
            fetch(server, tmp_path / "x.zip", path)
    for url in ("ftp://nowhere/x", "nothing", "http://127.0.0.1:1/x"):
        with pytest.raises(FetchError):
            fetch_sets(tmp_path / "x.zip", urls=[url], sets=3)
    assert not (tmp_path / "x.zip").exists()


def test_one_download_per_file_and_places_that_cannot_be_written(server, tmp_path):
    with FileLock(tmp_path / ".x.zip.lock"), pytest.raises(FetchError):
        fetch(server, tmp_path / "x.zip", "plain")
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError):
        fetch(server, tmp_path / "file" / "x.zip", "plain")


def test_locate_prefers_path_then_environment_then_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("LDLT_UCI", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert locate() is None
    default_path().parent.mkdir(parents=True)
    default_path().touch()
    assert locate() == default_path()
    (tmp_path / "here").touch()
    monkeypatch.setenv("LDLT_UCI", str(tmp_path / "here"))
    assert locate() == tmp_path / "here"
    assert locate(default_path()) == default_path()
    monkeypatch.setenv("LDLT_UCI", str(tmp_path / "gone"))
    for asked in (None, tmp_path / "gone"):
        with pytest.raises(ArchiveError):
            locate(asked)


# ------------------------------------------------------------------------------- the public archive (LDLT_UCI only)

FIXED = {
    *("adult", "annealing", "audiology-std", "conn-bench-vowel-deterding", "hayes-roth", "hill-valley", "horse-colic"),
    *("image-segmentation", "monks-1", "monks-2", "monks-3", "optical", "pendigits", "soybean", "spect", "spectf"),
    *("statlog-landsat", "statlog-shuttle", "thyroid"),
}
SHIFTED = {"monks-1", "monks-2", "monks-3", "spectf"}


@pytest.fixture(scope="module")
def everything() -> dict[str, Dataset]:
    archive = verify(UCI) if Path(UCI).is_file() else Archive(UCI)
    return {name: archive.load(name) for name in archive.names()}


@needs_archive
def test_archive_is_complete(everything):
    archive = Archive(UCI)
    assert len(everything) >= 120
    assert set(archive.unavailable()) <= {"miniboone"}
    assert sum(dataset.rows < 1000 for dataset in everything.values()) == 75
    for name, dataset in everything.items():
        size = archive.summary(name)
        assert (size.rows, size.columns, size.classes) == (dataset.rows, dataset.columns, len(dataset.classes))


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
