"""Certificates as statements and files: what they say, and that none can be forged or made to do harm."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.certificates import Certificate, Region, freeze_certified, issue, verify
from ldlt.certificates.certificate import LARGEST_FILE, SCHEMA, _array, _checksum
from ldlt.errors import CertificateError

FIELDS = [f.name for f in dataclasses.fields(Certificate)]


@pytest.fixture(scope="module")
def certified():
    torch.manual_seed(0)
    return freeze_certified(ldlt.nn.Residual(4, [8, 6], 3, bound=1.2, head="orthogonal"))


@pytest.fixture
def file(certified, tmp_path):
    certified[1].save(tmp_path / "net.json")
    return tmp_path / "net.json"


def same(a: Certificate, b: Certificate) -> bool:
    return a.to_json() == b.to_json()


# ------------------------------------------------------------------------------------------------------ statements


def test_round_trip(certified, file):
    stored, made = certified
    assert made.rigorous
    assert made.bound <= 1.2 * (1 + 1e-6)
    read = Certificate.load(file)
    assert same(read, made)
    assert same(Certificate.from_json(made.to_json()), made)
    assert all(torch.equal(read.multipliers[n], m) for n, m in made.multipliers.items())
    assert torch.equal(read.gram, made.gram)
    for source in (file, made):
        found = verify(source, stored)
        assert found.rigorous
        assert found.bound == made.bound
    assert os.listdir(file.parent) == [file.name]  # nothing temporary is left


def test_pair_bounds(certified):
    stored, made = certified
    pairs, away = made.pair_bounds(), ~torch.eye(3, dtype=torch.bool)
    assert bool((pairs.diagonal() == 0).all())
    assert bool((pairs <= math.sqrt(2) * made.bound * (1 + 1e-15)).all())
    assert bool((made.output_bounds() <= made.bound).all())
    assert bool((dataclasses.replace(made, gram=None).pair_bounds() >= pairs).all())
    nothing = dataclasses.replace(made, status="not certified", bound=math.inf, gram=None)
    assert bool(torch.isinf(nothing.pair_bounds()[away]).all())
    assert bool((ldlt.certified_radius(stored(torch.randn(5, 4)).detach(), nothing.pair_bounds()) == 0).all())


@pytest.mark.parametrize("head", ["joint", "orthogonal", "rows"])
def test_pair_bounds_hold_on_samples(head):
    torch.manual_seed(1)
    net = ldlt.nn.FeedForward(3, [16], 4, head=head, dtype=torch.float64)
    stored, certificate = freeze_certified(net)
    x = torch.randn(500, 3, dtype=torch.float64)
    d = 1e-3 * torch.randn(500, 3, dtype=torch.float64)
    change = (stored(x + d) - stored(x)).detach()
    slopes = (change[:, :, None] - change[:, None]).abs() / d.norm(dim=1)[:, None, None]
    assert bool((slopes.amax(0) <= certificate.pair_bounds() + 1e-12).all())
    assert bool((certificate.pair_bounds() <= net.pair_bounds() * (1 + 1e-9) + 1e-7).all())


def test_not_certified_is_said_and_not_verified(tmp_path):
    stored, made = freeze_certified(ldlt.nn.FeedForward(4, [6], 2, head="orthogonal"))
    found = issue(stored, (4,), made.multipliers, 0.1)
    assert (found.is_certified, found.rigorous) == (False, False)
    assert found.reason
    assert math.isinf(found.bound)
    found.save(tmp_path / "no.json")
    with pytest.raises(CertificateError, match="does not certify"):
        verify(tmp_path / "no.json", stored)


def test_every_changed_weight_is_noticed(certified, file):
    stored, _ = certified
    for name, p in stored.named_parameters():
        model = copy.deepcopy(stored)
        model.get_parameter(name).detach().view(-1).view(torch.int32)[p.numel() // 2] ^= 1
        with pytest.raises(CertificateError, match="another network"):
            verify(file, model)


@pytest.mark.parametrize(
    "model",
    [
        ldlt.nn.FeedForward(4, [3], 3),
        nn.Sequential(nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 3)),
        nn.LogSoftmax(1),
        None,
        3,
        "model",
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_models_are_refused(file, model):
    with pytest.raises(CertificateError):
        verify(file, model)


@pytest.mark.parametrize("source", [nn.Linear(2, 2), "net.json", 3, None])
def test_what_carries_no_certificate(source):
    with pytest.raises(ldlt.LdltError):
        verify(source)


def test_rigour_is_proven_or_refused(certified):
    stored, made = certified
    below = dataclasses.replace(made, bound=made.bound * (1 - 1e-3))
    for stated in (below, dataclasses.replace(below, gram=None)):
        with pytest.raises(CertificateError, match="cannot be proven"):
            verify(stated, stored)
    modest = dataclasses.replace(made, rigorous=False, residual=0.5)
    found = verify(modest, stored)
    assert found.rigorous  # computed anew
    assert found.residual == pytest.approx(made.residual, abs=1e-12)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, 3, "text", math.nan, object(), [1], {"a": 1}], ids=lambda v: type(v).__name__)
def test_objects_with_odd_fields(certified, field, value):
    stored, made = certified
    valid = [("reason", "text"), ("method", "text"), ("gram", None), ("region", None), ("bound", 3), ("outputs", 3)]
    if (field, value) in valid or (field == "residual" and isinstance(value, int | float)):
        return  # a true statement, or one that is computed anew
    with pytest.raises(CertificateError):
        verify(dataclasses.replace(made, **{field: value}), stored)


def test_local_certificates(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(4)
    local = ldlt.certify(net, 4, region=Region("ball", x, torch.tensor(0.1)))
    assert not local.rigorous
    assert local.bound < 0.9 * ldlt.certify(net, 4).bound
    local.save(tmp_path / "local.json")
    found = verify(tmp_path / "local.json", net)
    assert not found.rigorous
    assert found.bound == local.bound
    assert torch.equal(found.region.center, x.double())
    elsewhere = (None, Region("ball", x, torch.tensor(1.0)), Region("ball", x + 1, torch.tensor(0.1)))
    for region in (*elsewhere, Region("ball", torch.zeros(5), torch.ones(()))):
        with pytest.raises(CertificateError):
            verify(dataclasses.replace(local, region=region), net)


@pytest.mark.parametrize(
    ("kind", "radius"), [("cube", [1.0, 1.0]), ("ball", [1.0, 1.0]), ("box", [1.0, -1.0]), ("box", [1.0, math.nan])]
)
def test_regions_are_checked(kind, radius):
    with pytest.raises(ldlt.LdltError):
        Region(kind, torch.zeros(2), torch.tensor(radius))


# ----------------------------------------------------------------------------------------------------------- files


def write(path, statement):
    """A file with a right checksum: what a forger would write."""
    whole = {"format": "ldlt certificate", "schema": SCHEMA, "statement": statement, "checksum": _checksum(statement)}
    path.write_text(json.dumps(whole))


def hexed(factor):
    return lambda text: (float.fromhex(text) * factor).hex()


def scaled(factor):
    def change(data):
        values = np.frombuffer(base64.b64decode(data["float64"]), "<f8") * factor
        return _array(torch.from_numpy(values).reshape(data["shape"]))

    return change


def each(change):
    return lambda items: {n: change(v) for n, v in items.items()}


FORGERIES = {
    "bound": [
        *map(hexed, (0.999, 1 - 1e-7, -1)),
        *(lambda _, v=v: v for v in ("0x0.0p+0", "nan", "inf", 1, 1.5, True, "1.2", None)),
    ],
    "status": [lambda _: "not certified", lambda _: "proven", lambda _: 1],
    "rigorous": [lambda _: 1, lambda _: "true"],
    "multipliers": [
        *(each(scaled(f)) for f in (1.01, 0.99, -1.0, math.nan, math.inf, 0.0)),
        lambda m: dict(list(m.items())[1:]),
        lambda m: {n + "x": v for n, v in m.items()},
        lambda m: {**m, "more": next(iter(m.values()))},
        lambda m: dict(zip(m, reversed(m.values()), strict=True)),
        lambda m: list(m.values()),
    ],
    "gram": [*map(scaled, (1 - 1e-6, math.nan, math.inf)), lambda g: {**g, "shape": [9]}, lambda g: {**g, "more": 1}],
    "outputs": [lambda _, v=v: v for v in (4, True, 10**30, 3.0, 0, -1)],
    "input_shape": [
        lambda _, v=v: v for v in ([5], [], [4, 1], [2**40, 2**40], [2**20, 2**20], [0], [True], [4.0], [1] * 100)
    ],
    "fingerprint": [lambda f: f[::-1], lambda f: f[1:], lambda f: f + "\n"],
    "region": [
        lambda _: {"kind": "ball", "center": _array(torch.zeros(5)), "radius": _array(torch.ones(()))},
        lambda _: {"kind": "all"},
        lambda _: "everything",
    ],
    "residual": [lambda _: "large", lambda _: 0.0],
    "versions": [lambda _: {"ldlt": 1}, lambda _: {"ldlt": "\x1b[2J"}],
    "created": [lambda _: "yesterday", lambda _: "2026-01-01T00:00:00"],
    "method": [lambda _: "x" * 10_000, lambda _: "\x1b[2J", lambda _: None],
    "reason": [lambda _: "\ud800", lambda _: 3],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_with_a_right_checksum(certified, file, name):
    statement = json.loads(file.read_text())["statement"]
    for change in FORGERIES[name]:
        write(file, {**statement, name: change(statement[name])})
        with pytest.raises(CertificateError):
            verify(file, certified[0])


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_covered_by_the_checksum(certified, file, name):
    whole = json.loads(file.read_text())
    texts = {"reason": "none", "method": "magic", "created": "2020-01-01T00:00:00+00:00", "residual": "0x1.0p+0"}
    changed = {**texts, "versions": {"ldlt": "9"}, "rigorous": False, "outputs": 4}.get(name, "other")
    file.write_text(json.dumps({**whole, "statement": {**whole["statement"], name: changed}}))
    with pytest.raises(CertificateError):
        verify(file, certified[0])
    write(file, {n: v for n, v in whole["statement"].items() if n != name})
    with pytest.raises(CertificateError):
        Certificate.load(file)


@pytest.mark.parametrize(
    "array",
    [
        {"shape": [2**60], "float64": "AAAA"},
        {"shape": [2**22], "float64": "AAAA"},
        {"shape": [2**11, 2**11, 2**11], "float64": "AAAA"},
        {"shape": [1] * 100, "float64": "AAAAAAAAAAA="},
        {"shape": [-1], "float64": ""},
        {"shape": [0], "float64": ""},
        {"shape": [True], "float64": "AAAAAAAA8D8="},
        {"shape": [1], "float64": "AAAAAAAA8D8"},
        {"shape": [1], "float64": "AAAAAAAA8D9="},
        {"shape": [1], "float64": "AAAA\nAAAA8D8"},
        {"shape": [1], "float64": "éAAAAAAA8D8="},
        {"shape": [1], "float64": 3},
        {"shape": "1", "float64": "AAAAAAAA8D8="},
        {"shape": [1], "float64": "AAAAAAAA8D8=", "more": 1},
        {"shape": [1]},
        [1.0],
        None,
    ],
    ids=repr,
)
def test_hostile_arrays(file, array):
    statement = json.loads(file.read_text())["statement"]
    write(file, {**statement, "multipliers": {"a": array}})
    with pytest.raises(CertificateError):
        Certificate.load(file)
    write(file, {**statement, "multipliers": {"a": {"shape": [1], "float64": "AAAAAAAA8D8="}}})
    assert Certificate.load(file).multipliers["a"].tolist() == [1.0]


HOSTILE = [
    b"", b"null", b"[]", b"1", b"[" * 200_000, b'{"a":' * 200_000, b"[" * 50_000 + b"]" * 50_000, b'{"format": NaN}',
    b'{"format": -Infinity}', b'{"format": 1.5}', b'{"schema": ' + b"9" * 10_000 + b"}", b'{"schema": 1e999999}',
    b'{"format": "ldlt certificate", "format": "ldlt certificate"}', '{"format": "é"}'.encode(),
    '{"format": 1}'.encode("utf-16"), b'{"format": "\\ud800"}', bytes(1000), b"\x80\x04\x95\x10\x8c\x02os\x94.",
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=lambda d: repr(d[:20]))
def test_hostile_files(file, data):
    file.write_bytes(data)
    with pytest.raises(CertificateError):
        Certificate.load(file)


@given(st.binary(max_size=300))
def test_random_bytes(data):
    with pytest.raises(CertificateError):
        Certificate.from_json(data.decode("latin-1"))


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
trees = st.recursive(
    leaves, lambda c: st.one_of(st.lists(c, max_size=4), st.dictionaries(st.text(max_size=8), c, max_size=4))
)


@given(trees, st.dictionaries(st.sampled_from(FIELDS), trees))
def test_random_documents(certified, tree, fields):
    """A certificate or the one error; nothing else comes out of a reader."""
    whole = json.loads(certified[1].to_json())
    for changed in (tree, {**whole, "statement": tree}, {**whole, "statement": {**whole["statement"], **fields}}):
        if isinstance(changed, dict) and "statement" in changed:
            try:
                changed["checksum"] = _checksum(changed["statement"])
            except ValueError:  # NaN has no canonical form
                continue
        try:
            found = Certificate.from_json(json.dumps(changed))
        except CertificateError:
            continue
        assert isinstance(found, Certificate)


def test_damaged_files(certified, file):
    data = file.read_bytes()
    for end in sorted({0, 1, 2, len(data) - 3, *range(0, len(data) - 3, 97)}):
        file.write_bytes(data[:end])
        with pytest.raises(CertificateError):
            Certificate.load(file)
    for place in range(0, len(data) - 1, 61):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert same(Certificate.load(file), certified[1])  # white space between members
        except CertificateError:
            continue


@pytest.mark.parametrize(
    ("name", "value"),
    [("schema", 2), ("schema", True), ("schema", "1"), ("format", "onnx"), ("checksum", 0), ("extra", 0)],
)
def test_other_versions_and_formats(file, name, value):
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(CertificateError, match="schema version 2" if value == 2 else None):
        Certificate.load(file)


def test_repeated_members(file):
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 1, "schema": 1'))
    with pytest.raises(CertificateError):
        Certificate.load(file)


def test_files_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LARGEST_FILE + 1)
    for path in (tmp_path, tmp_path / "missing", tmp_path / "pipe", tmp_path / "large", "\0"):
        with pytest.raises(CertificateError):
            Certificate.load(path)
