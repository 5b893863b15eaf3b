"""Image files: what is written is read back, and everything that can be wrong with a file is said."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ldlt
from ldlt_bench.data import ArchiveError, DatasetError, FormatError, LayoutError, UnavailableSetError
from ldlt.bench.images import (
    ImageSet,
    Splits,
    cifar10,
    content,
    fashion_mnist,
    idx,
    mnist,
    read_batch,
    read_idx,
    read_pair,
)

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


# -- the sets --------------------------------------------------------------------------------------------------------


def test_compression_is_told_by_content(folder):
    # the first file is compressed without the ending, the last has the ending without being compressed
    found = fashion_mnist(folder)
    assert isinstance(found, Splits)
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
    with pytest.raises(UnavailableSetError, match="the path that was given"):  # the argument wins
        fashion_mnist(other / "nothing")
    monkeypatch.setenv("LDLT_FASHION_MNIST", str(other / "nothing"))
    with pytest.raises(UnavailableSetError, match=r"from \$LDLT_FASHION_MNIST.*apt-get install dataset-fashion-mnist"):
        fashion_mnist()  # a wrong variable is not passed over for the usual place
    monkeypatch.delenv("LDLT_FASHION_MNIST")
    monkeypatch.setattr(idx, "DEBIAN", str(folder))
    assert len(fashion_mnist().test) == 3
    monkeypatch.setattr(idx, "DEBIAN", str(other / "nothing"))
    with pytest.raises(UnavailableSetError, match="the usual place.*apt-get install"):
        fashion_mnist()
    with pytest.raises(UnavailableSetError, match="set LDLT_MNIST"):
        mnist()
    nested = other / "FashionMNIST" / "raw"
    nested.parent.mkdir()
    folder.rename(nested)
    assert len(fashion_mnist(other).train) == 6


def test_other_spelling(folder):
    for file in list(folder.iterdir()):
        file.rename(folder / file.name.replace("-idx", ".idx"))
    assert len(fashion_mnist(folder).train) == 6


@pytest.mark.parametrize("gone", range(4))
def test_missing_file(folder, gone):
    next(folder.glob(NAMES[gone] + "*")).unlink()
    with pytest.raises(UnavailableSetError, match=rf"has no {NAMES[gone]}\.gz.*apt-get"):
        fashion_mnist(folder)


def test_wrong_side(folder):
    (folder / NAMES[2]).write_bytes(idx_bytes(pictures(3, side=27)[0]))
    with pytest.raises(FormatError, match="t10k.*27 × 27 pixels; those of Fashion-MNIST have 28 × 28"):
        fashion_mnist(folder)


def test_numbers_are_disagreeing(folder):
    (folder / NAMES[2]).write_bytes(idx_bytes(pictures(4)[0]))
    with pytest.raises(FormatError, match="3 labels for the 4 images"):
        fashion_mnist(folder)


def test_label_out_of_range(folder):
    (folder / (NAMES[3] + ".gz")).write_bytes(idx_bytes(np.array([3, 10, 1])))
    with pytest.raises(FormatError, match=r"label 10 of image 1 \(from 0\) is not in 0 … 9"):
        fashion_mnist(folder)


def test_swapped_files(folder):
    train, labels = folder / NAMES[2], folder / (NAMES[3] + ".gz")
    a, b = train.read_bytes(), labels.read_bytes()
    train.write_bytes(b)
    labels.write_bytes(a)
    with pytest.raises(FormatError, match="1 dimensions instead of 3 .labels instead of images"):
        fashion_mnist(folder)


def test_a_file_in_place_of_the_folder(folder):
    with pytest.raises(UnavailableSetError, match="has no train-images"):
        fashion_mnist(folder / NAMES[2])


# -- single files ----------------------------------------------------------------------------------------------------


def written(tmp_path: Path, data: bytes) -> Path:
    file = tmp_path / "file"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_faults_of_idx_files(tmp_path, pack):
    good = idx_bytes(np.arange(12).reshape(3, 2, 2))
    assert np.array_equal(read_idx(written(tmp_path, pack(good)), 3), np.arange(12).reshape(3, 2, 2))
    for data, words in {
        b"": "truncated|gzip",
        good[:3]: "truncated",
        good[:7]: "truncated: 9 of 12 bytes are missing",
        good + b"x": "bytes follow after the 12",
        b"\x00\x01" + good[2:]: "not an IDX file: it starts with 00 01 08 03 instead of 00 00 08 03",
        b"\x00\x00\x07" + good[3:]: "not an IDX file",
        b"\x00\x00\x0d" + good[3:]: "an IDX file of float32; images and labels are unsigned bytes",
        b"\x00\x00\x08\x02" + good[4:]: "2 dimensions instead of 3",
        b"<!DOCTYPE html>": "not an IDX file",
    }.items():
        with pytest.raises((FormatError, ArchiveError), match=words):
            read_idx(written(tmp_path, pack(data)), 3)
    with pytest.raises(FormatError, match="truncated"):  # one byte too few
        read_idx(written(tmp_path, gzip.compress(good[:-1])), 3)
    with pytest.raises(FormatError, match="truncated"):
        read_idx(written(tmp_path, good[:20]), 3)


def test_damaged_gzip(tmp_path):
    packed = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, 5000)))
    for data in (packed[:-1], packed[:-9], packed[:40], packed[:10], packed[:2], packed + b"garbage"):
        with pytest.raises((ArchiveError, FormatError)):
            read_idx(written(tmp_path, data), 1)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 255
    with pytest.raises((ArchiveError, FormatError)):
        read_idx(written(tmp_path, bytes(flipped)), 1)
    wrong_sum = bytearray(packed)
    wrong_sum[-6] ^= 1
    with pytest.raises(ArchiveError, match="damaged gzip file.*get it again"):
        read_idx(written(tmp_path, bytes(wrong_sum)), 1)


def test_unreadable(tmp_path):
    for file in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ArchiveError, match="cannot be read"):
            read_idx(file, 1)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_header_takes_no_memory(tmp_path, pack):
    """A header that promises four gigabytes, with nothing behind it."""
    for sizes in ((2**32 - 1,) * 3, (70_000, 28, 28), (1 << 16, 1 << 6, 1 << 6)):
        file = written(tmp_path, pack(struct.pack(">HBB3I", 0, 8, 3, *sizes) + bytes(100)))
        tracemalloc.start()
        with pytest.raises(FormatError, match="promises .* more than the file can hold|truncated"):
            read_idx(file, 3)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20


def test_a_bomb_is_stopped(tmp_path, monkeypatch):
    """What a gzip file unpacks to is limited, whatever its header says."""
    monkeypatch.setattr(content, "LARGEST", 1 << 20)
    monkeypatch.setattr(idx, "LARGEST", 1 << 20)
    bomb = gzip.compress(struct.pack(">HBBI", 0, 8, 1, 1 << 22) + bytes(1 << 22))
    assert len(bomb) < 1 << 16
    with pytest.raises(FormatError, match="more than 1,048,576"):
        read_idx(written(tmp_path, bomb), 1)
    stream = content.Bounded(io.BytesIO(bytes(100)), tmp_path, 10)
    with pytest.raises(ArchiveError, match="more than 10 bytes"):
        stream.read(50)


def test_empty_sets(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx_bytes(np.zeros((0, 28, 28))))
    labels.write_bytes(idx_bytes(np.zeros(0)))
    with pytest.raises(FormatError, match="no pixels: the header states 0 × 28 × 28"):
        read_pair(images, labels)
    images.write_bytes(idx_bytes(np.zeros((1, 2, 3))))
    labels.write_bytes(idx_bytes(np.array([4])))
    assert read_pair(images, labels).classes == ("0", "1", "2", "3", "4")


@settings(deadline=None, max_examples=150)
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


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    """Random bytes, and good files with some bytes changed, removed or added: an array or an error of ours."""
    start = data.draw(
        st.sampled_from([b"", idx_bytes(np.arange(12).reshape(3, 2, 2)), gzip.compress(idx_bytes(np.arange(9)))])
    )
    found = bytearray(start)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(found)))
        found[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file = tmp_path_factory.getbasetemp() / "fuzz"
    file.write_bytes(bytes(found))
    dims = data.draw(st.integers(1, 3))
    tracemalloc.start()
    said, array = "", None
    try:
        array = read_idx(file, dims)
    except (FormatError, ArchiveError) as error:
        said = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if array is None:
        assert "fuzz" in said
    else:
        assert array.ndim == dims
        assert array.dtype == np.uint8
    assert peak < 8 << 20


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
    file = tmp_path / "cifar-10-binary.tar.gz"
    with pytest.raises(UnavailableSetError, match="LDLT_CIFAR10.*binary version"):
        cifar10()
    with pytest.raises(UnavailableSetError, match="does not exist"):
        cifar10(file)
    good = archive_of(BATCHES)
    bad_label = bytearray(BATCHES["data_batch_2.bin"])
    bad_label[RECORD] = 10
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w:gz") as archive:
        info = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    for data, error, words in (
        (good[:-1], ArchiveError, "damaged"),  # the checksum comes last
        (good[:-20], ArchiveError, "damaged"),
        (good[: len(good) // 2], ArchiveError, "damaged|not a tar"),
        (good[:100], ArchiveError, "damaged|not a tar"),
        (b"", ArchiveError, "not a tar file"),
        (b"PK\x03\x04" + bytes(600), ArchiveError, "not a tar file"),
        (gzip.compress(b"hello"), ArchiveError, "not a tar file"),
        (archive_of({k: v for k, v in BATCHES.items() if "4" not in k}), UnavailableSetError, r"no data_batch_4\.bin"),
        (archive_of(BATCHES | {"test_batch.bin": bytes(RECORD + 1)}), FormatError, "test_batch.*3,074 bytes are not a"),
        (archive_of(BATCHES | {"test_batch.bin": b""}), FormatError, "0 bytes are not a whole number"),
        (archive_of(BATCHES | {"data_batch_2.bin": bytes(bad_label)}), FormatError, "label 10 of image 1"),
        (archive_of({"a/test_batch.bin": bytes(RECORD)} | BATCHES), ArchiveError, "occurs twice"),
        (tar({"cifar-10-batches-py/data_batch_1": b""}), LayoutError, "pickles"),
        (tar({f"f{i}": b"" for i in range(1001)}), ArchiveError, "too many"),
        (link.getvalue(), UnavailableSetError, "no test_batch"),
    ):
        file.write_bytes(data)
        with pytest.raises(error, match=words):
            cifar10(file)


def test_a_huge_member_is_refused(tmp_path):
    """The size of a member is not believed, and nothing is read for it."""
    info = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
    info.size = 1 << 40
    file = tmp_path / "a.tar"
    file.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(ArchiveError, match="too large"):
        cifar10(file)


def test_the_python_version_is_refused(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({}))
    with pytest.raises(LayoutError, match="pickles: reading one can run any program.*binary version"):
        cifar10(tmp_path)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40), st.integers(0, 600), st.integers(0, 20))
def test_any_archive_is_read_or_refused(tmp_path_factory, change, place, cut):
    data = bytearray(SMALL)
    data[place : place + len(change)] = change
    file = tmp_path_factory.getbasetemp() / "fuzz.tar"
    file.write_bytes(bytes(data[: len(data) - cut]))
    try:
        found = cifar10(file)
    except (ArchiveError, FormatError, UnavailableSetError):
        return
    assert len(found.test) == 3


SMALL = archive_of(BATCHES, "w")


def test_read_batch():
    images, labels = read_batch(BATCHES["test_batch.bin"], "x")
    assert images.shape == (3, 3, 32, 32)
    assert labels.dtype == np.int64


# -- the class -------------------------------------------------------------------------------------------------------


def test_image_set(folder):
    found = fashion_mnist(folder).train
    assert found.shape == (1, 28, 28)
    x, y = found.tensors()
    assert x.dtype == torch.float32
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    assert np.array_equal(np.rint(x.numpy() * 255).astype(np.uint8), found.images)
    assert y.tolist() == found.labels.tolist()
    some = found.take([4, 0])
    assert np.array_equal(some.images, found.images[[4, 0]])
    assert len(found.take(slice(2))) == 2
    with pytest.raises(ValueError, match="read-only"):
        found.images[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        found.labels[0] = 0
    y[0] = 5  # the tensors are copies
    assert pickle.loads(pickle.dumps(found)).classes == found.classes


def test_image_set_is_checked():
    images = np.zeros((2, 1, 3, 3), np.uint8)
    for bad, labels, words in (
        (images.astype(float), [0, 1], "uint8 of shape"),
        (images[:, 0], [0, 1], "uint8 of shape"),
        (images, [0], "2 integers"),
        (images, [0.0, 1.0], "2 integers"),
        (images, [0, 2], "0 … 1, but they go from 0 to 2"),
        (images, [-1, 0], "from -1 to 0"),
    ):
        with pytest.raises(DatasetError, match=words):
            ImageSet(bad, np.array(labels), ("a", "b"))
    assert issubclass(DatasetError, ldlt.LdltError)


@pytest.mark.skipif(not Path(idx.DEBIAN).is_dir(), reason="the Debian package dataset-fashion-mnist is not installed")
def test_the_real_set():
    train, test = fashion_mnist()
    assert (train.images.shape, test.images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert train.images.mean() == pytest.approx(72.94, abs=0.01)
