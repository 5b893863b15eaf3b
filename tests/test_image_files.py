"""Image files: what is written is read back, and what is wrong is refused without taking memory."""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ldlt_bench.data import ArchiveError, DataError, DatasetError, FormatError, LayoutError, UnavailableSetError
from ldlt_bench.data import images as module
from ldlt_bench.data.images import ImageSet, cifar10, fashion_mnist, mnist, read_batch, read_idx, read_pair

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
RECORD = 3073


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def pictures(count: int, side: int = 28, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (count, side, side)).astype(np.uint8), draw.integers(0, 10, count).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Fashion-MNIST: six and three images, every file in another guise."""
    parts = [*pictures(6, seed=1), *pictures(3, seed=2)]
    for i, (name, array) in enumerate(zip(NAMES, parts, strict=True)):
        data = idx_bytes(array)
        (tmp_path / (name + ".gz" * (i % 2))).write_bytes(gzip.compress(data) if i in (0, 1) else data)
    return tmp_path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("LDLT_FASHION_MNIST", "LDLT_MNIST", "LDLT_CIFAR10"):
        monkeypatch.delenv(name, raising=False)


def test_compression_is_told_by_content(folder):
    # the first file is compressed without the ending, the last has the ending without being compressed
    found = fashion_mnist(folder)
    assert found.train.images.shape == (6, 1, 28, 28)
    assert found.test.images.shape == (3, 1, 28, 28)
    for part, (images, labels) in zip(found, (pictures(6, seed=1), pictures(3, seed=2)), strict=True):
        assert np.array_equal(part.images[:, 0], images)
        assert np.array_equal(part.labels, labels)
    assert found.train.classes[9] == "ankle boot"
    assert mnist(folder).test.classes == tuple("0123456789")


def test_places(folder, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("LDLT_FASHION_MNIST", str(folder))
    assert len(fashion_mnist().train) == 6
    with pytest.raises(UnavailableSetError):  # the argument wins
        fashion_mnist(other / "nothing")
    monkeypatch.setenv("LDLT_FASHION_MNIST", str(other / "nothing"))
    with pytest.raises(UnavailableSetError, match="apt-get install dataset-fashion-mnist"):
        fashion_mnist()  # a wrong variable is not passed over for the usual place
    monkeypatch.delenv("LDLT_FASHION_MNIST")
    monkeypatch.setattr(module, "DEBIAN", str(folder))
    assert len(fashion_mnist().test) == 3
    with pytest.raises(UnavailableSetError):
        mnist()
    for file in list(folder.iterdir()):
        file.rename(folder / file.name.replace("-idx", ".idx"))
    nested = other / "FashionMNIST" / "raw"
    nested.parent.mkdir()
    folder.rename(nested)
    assert len(fashion_mnist(other).train) == 6


@pytest.mark.parametrize("gone", range(4))
def test_missing_file(folder, gone):
    next(folder.glob(NAMES[gone] + "*")).unlink()
    with pytest.raises(UnavailableSetError):
        fashion_mnist(folder)


def test_files_that_do_not_fit_together(folder):
    images, labels = folder / NAMES[2], folder / (NAMES[3] + ".gz")
    good = images.read_bytes(), labels.read_bytes()
    for file, content in (
        (images, idx_bytes(pictures(3, side=27)[0])),
        (images, idx_bytes(pictures(4)[0])),
        (labels, idx_bytes(np.array([3, 10, 1]))),
        (labels, good[0]),
        (images, good[1]),
        (images, good[0][:-1]),
        (images, good[0] + b"0"),
        (images, b"\0\0\x09" + good[0][3:]),
    ):
        file.write_bytes(content)
        with pytest.raises(FormatError):
            fashion_mnist(folder)
        images.write_bytes(good[0])
        labels.write_bytes(good[1])
    images.write_bytes(gzip.compress(good[0])[:-9])
    with pytest.raises(ArchiveError):
        fashion_mnist(folder)
    with pytest.raises(DataError):
        fashion_mnist(images)


def test_promises_and_bombs_take_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 1 << 20)
    (tmp_path / "promise").write_bytes(struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 4) + b"1234")
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(64 << 20)))
    tracemalloc.start()
    with pytest.raises(FormatError):
        read_idx(tmp_path / "promise", 3)
    for read in (lambda: read_idx(tmp_path / "bomb", 3), lambda: cifar10(tmp_path / "bomb")):
        with pytest.raises(ArchiveError):
            read()
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_empty_sets(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx_bytes(np.zeros((0, 28, 28))))
    labels.write_bytes(idx_bytes(np.zeros(0)))
    with pytest.raises(FormatError):
        read_pair(images, labels)
    images.write_bytes(idx_bytes(np.zeros((1, 2, 3))))
    labels.write_bytes(idx_bytes(np.array([4])))
    assert read_pair(images, labels).classes == ("0", "1", "2", "3", "4")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_idx_round_trip(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    values = data.draw(st.binary(min_size=math.prod(shape), max_size=math.prod(shape)))
    array = np.frombuffer(values, np.uint8).reshape(shape)
    packed = gzip.compress(idx_bytes(array)) if data.draw(st.booleans()) else idx_bytes(array)
    file = tmp_path_factory.getbasetemp() / "round"
    file.write_bytes(packed)
    assert np.array_equal(read_idx(file, len(shape)), array)
    assert read_idx(file, len(shape)).shape == tuple(shape)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    """Random bytes, and good files with some bytes changed, removed or added: an array or an error of ours."""
    good = [b"", idx_bytes(np.arange(12).reshape(3, 2, 2)), gzip.compress(idx_bytes(np.arange(9))), archive_of(BATCHES)]
    found = bytearray(data.draw(st.sampled_from(good)))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(found)))
        found[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file = tmp_path_factory.getbasetemp() / "fuzz"
    file.write_bytes(bytes(found))
    dims = data.draw(st.integers(1, 3))
    for read in (lambda: read_idx(file, dims), lambda: cifar10(file).train.images[:, 0, 0, 0]):
        with suppress(DataError):
            assert read().dtype == np.uint8


# -- CIFAR-10 --------------------------------------------------------------------------------------------------------


def batch(count: int, seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    table = draw.integers(0, 256, (count, RECORD)).astype(np.uint8)
    table[:, 0] = draw.integers(0, 10, count)
    return table.tobytes()


BATCHES = {f"data_batch_{i}.bin": batch(2, i) for i in range(1, 6)} | {"test_batch.bin": batch(3, 9)}


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def archive_of(batches: dict[str, bytes], mode: str = "w:gz") -> bytes:
    others = {"cifar-10-batches-bin/readme.html": b"hello"}
    return tar(others | {f"cifar-10-batches-bin/{k}": v for k, v in batches.items()}, mode)


def test_cifar_from_folder_and_archive(tmp_path, monkeypatch):
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    for name, data in BATCHES.items():
        (inner / name).write_bytes(data)
    packed, plain = tmp_path / "cifar-10-binary.tar.gz", tmp_path / "plain.tar"
    packed.write_bytes(archive_of(BATCHES))
    plain.write_bytes(archive_of(dict(reversed(BATCHES.items())), "w"))
    monkeypatch.setenv("LDLT_CIFAR10", str(packed))
    before = sorted(p.name for p in tmp_path.rglob("*"))
    found = [cifar10(p) for p in (inner, tmp_path, packed, plain, None)]
    assert sorted(p.name for p in tmp_path.rglob("*")) == before  # nothing is unpacked
    for sets in found:
        assert sets.train.images.shape == (10, 3, 32, 32)
        assert sets.test.images.shape == (3, 3, 32, 32)
        assert np.array_equal(sets.train.images, found[0].train.images)
        assert np.array_equal(sets.test.labels, found[0].test.labels)
    first = np.frombuffer(BATCHES["data_batch_1.bin"], np.uint8)
    assert found[0].train.labels[0] == first[0]
    assert found[0].train.images[0, 2, 31, 31] == first[3072]  # blue, last row, last column
    assert found[0].train.classes[3] == "cat"


def test_faults_of_cifar(tmp_path):
    file = tmp_path / "file"
    bad = {**BATCHES, "test_batch.bin": BATCHES["test_batch.bin"][:-1]}
    twice = archive_of(BATCHES)
    for content, error in (
        (archive_of({k: v for k, v in BATCHES.items() if k != "data_batch_3.bin"}), UnavailableSetError),
        (archive_of(bad), FormatError),
        (archive_of({**BATCHES, "test_batch.bin": b"\x0a" + bytes(RECORD - 1)}), FormatError),
        (tar({"cifar-10-batches-py/data_batch_1": b"pickle"}), LayoutError),
        (b"no tar file at all" * 100, ArchiveError),
        (twice[: len(twice) // 2], ArchiveError),
    ):
        file.write_bytes(content)
        with pytest.raises(error):
            cifar10(file)
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "data_batch_1").write_bytes(b"pickle")
    with pytest.raises(LayoutError):
        cifar10(tmp_path / "python")
    for content in (b"", b"1", bytes([11]) + bytes(RECORD - 1)):
        with pytest.raises(FormatError):
            read_batch(content, "name")


def test_image_sets_are_checked_and_read_only(folder):
    found = fashion_mnist(folder).train
    x, y = found.tensors()
    assert x.shape == (6, 1, 28, 28)
    assert float(x.max()) <= 1
    assert np.allclose(x.numpy() * 255, found.images)
    assert y.tolist() == found.labels.tolist()
    assert np.array_equal(found.take([4, 2]).images, found.images[[4, 2]])
    assert len(found.take(slice(0, 3))) == 3
    for array in (found.images, found.labels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    good = np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, np.int64)
    for images, labels, classes in (
        (good[0].astype(float), good[1], ("a",)),
        (good[0][0], good[1], ("a",)),
        (good[0], good[1][:1], ("a",)),
        (good[0], good[1] + 1, ("a",)),
        (good[0], good[1].astype(float), ("a",)),
    ):
        with pytest.raises(DatasetError):
            ImageSet(images, labels, classes)


@pytest.mark.skipif(not Path(module.DEBIAN).exists(), reason="Fashion-MNIST is not installed")
def test_the_real_set():
    assert [len(part) for part in fashion_mnist()] == [60_000, 10_000]
