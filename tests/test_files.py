"""Networks in files: they compute the same in any runtime, carry a proven certificate, and refuse damage."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_wine
from torch import nn

import ldlt
import ldlt.files.store
from ldlt.activations import ELEMENTWISE, GroupSort, MaxMin, WindowSort
from ldlt.files import OnnxLimits, atomic
from ldlt.files.read import network_of
from ldlt.files.write import message_of
from ldlt.graph.trace import trace
from ldlt.testing.moves import MOVES
from random_graphs import RandomGraph
from random_images import RandomImages

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ort.set_default_logger_severity(4)

DTYPES = [torch.float64, torch.float32]
PROPERTIES = {"ldlt.certificate", "ldlt.meaning", "ldlt.card"}


class Snake(nn.Module):
    """An activation that nobody but this file knows."""

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return x + (self.rate * x).sin() ** 2 / self.rate


class Unwritten(nn.Module):
    """An activation that is no formula."""

    def forward(self, x):
        return torch.special.i0e(x)


@pytest.fixture(autouse=True)
def _registered(_tables):
    ldlt.activations.register(Snake, lambda module: (0.0, 2.0))
    ldlt.activations.register(Unwritten, lambda module: (-1.0, 1.0))


# -- what is written ---------------------------------------------------------------------------------------------------


def outputs(path, x):
    session = ort.InferenceSession(path if isinstance(path, bytes) else str(path))
    return session.run(None, {"x": x.numpy()})[0]


def same(model, path, *, run=True):
    """The file computes what the model does: in another runtime, and as it is read."""
    loaded = ldlt.load(path)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 5):
        x = torch.randn(rows, *loaded.input_shape, generator=generator, dtype=torch.float64).to(loaded.dtype)
        with torch.no_grad():
            wanted = model(x.clone()).numpy()
            found = loaded(x.clone()).numpy()
        scale = 1 + np.abs(wanted).max()
        bound = scale * (1e-7 if loaded.dtype == torch.float64 else 1e-5)
        np.testing.assert_allclose(found, wanted.reshape(rows, -1), atol=bound, rtol=0)
        if run:
            np.testing.assert_allclose(outputs(path, x), wanted, atol=bound, rtol=0)
    return loaded


class Wrapped(nn.Module):
    """A step as a network."""

    def __init__(self, step, count):
        super().__init__()
        self.step, self.count = step, count

    def forward(self, x):
        return self.step(*[x] * self.count).flatten(1)


def written(model, shape, kernels=True, dtypes=DTYPES):
    """Trace a module once, write it in both precisions, and compare what is read and what another runtime computes."""
    graph, found = trace(model.double().eval(), shape), []
    for dtype in dtypes:
        plain = copy.deepcopy(model).to(dtype).eval()
        message = message_of(plain, graph, dtype)
        network = network_of(message, OnnxLimits()).module
        onnx.checker.check_model(message)
        x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        with torch.no_grad():
            wanted, read = plain(x.clone()).numpy(), network(x.clone()).numpy()
        bound = (1 + np.abs(wanted).max()) * (1e-7 if dtype == torch.float64 else 1e-5)
        np.testing.assert_allclose(read, wanted.reshape(3, -1), atol=bound, rtol=0)
        if kernels or (kernels is None and dtype == torch.float32):
            np.testing.assert_allclose(outputs(message.SerializeToString(), x), wanted, atol=bound, rtol=0)
        found.append(network)
    return found


SHAPES = [(4,), (2, 4), (2, 4, 4), (4, 4, 4), (6,)]
KERNELLESS = (nn.GELU, ldlt.activations.Atan)
"""Activations that onnxruntime does not know in float64."""


@pytest.mark.parametrize("part", range(6))
def test_every_operation_can_be_written(part):
    """All moves of the conformance suite that the table of operations accepts."""
    count = 0
    for move in MOVES[part::6]:
        steps = ((shape, move.make(random.Random(0), *[shape] * move.parents)) for shape in SHAPES)
        shape, step = next(((a, b) for a, b in steps if b is not None), ((), None))
        if step is None or move.kind == "activation":
            continue
        try:
            written(Wrapped(step, move.parents), shape)
        except ldlt.UnsupportedOpError:
            continue
        count += 1
    assert count >= 8


ARGUMENTS = {
    "Clamp": [(-1.0, None), (0, 2)],
    "GELU": [(), ("tanh",)],
    "GroupSort": [(3,)],
    "Hardshrink": [(0.0,)],
    "Hardtanh": [(-0.5, 2.0)],
    "LeakyReLU": [(1 / 3,)],
    "PReLU": [(6,), (1,)],
    "RReLU": [(0.1, 0.4)],
    "Snake": [(0.7,)],
    "Softmax": [(1,)],
    "Softplus": [(), (2.0, 40.0)],
    "Threshold": [(0.0, 0.0)],
}


@pytest.mark.parametrize("kind", [*ELEMENTWISE, GroupSort, MaxMin, nn.Softmax, Snake], ids=lambda c: c.__name__)
def test_every_activation_can_be_written(kind):
    for arguments in ARGUMENTS.get(kind.__name__, [()]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), kind(*arguments), nn.Linear(6, 2))
        for network in written(model, (4,), kernels=None if kind in KERNELLESS else True):
            assert len(list(network.children())) == (kind is not nn.Identity)
            if kind in (Snake, MaxMin, GroupSort):
                assert [type(m) for m in network.children()] == [kind]


@pytest.mark.parametrize("window", [(2,), (2, 3)])
def test_sorts_over_windows_can_be_written(window):
    size = tuple(2 * w for w in window)
    conv = nn.Conv1d(1, 2, 1) if len(window) == 1 else nn.Conv2d(1, 2, 1)
    written(nn.Sequential(conv, WindowSort(window), nn.Flatten(), nn.Linear(2 * math.prod(size), 2)), (1, *size))


class Mixed(nn.Module):
    """Convolution, sorting over channels, pooling, dense layers, a concatenation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
        self.sort, self.pool = MaxMin(), nn.MaxPool2d(2)
        self.inner, self.head = nn.Linear(16, 8), nn.Linear(24, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = self.pool(self.sort(self.conv(x))).flatten(1)
        return self.head(torch.cat([h, torch.relu(self.inner(self.drop(h)))], 1))


NETWORKS = {
    "feed-forward": lambda d: ldlt.nn.FeedForward(5, [8, 8], 3, dtype=d),
    "residual": lambda d: ldlt.nn.Residual(5, [8, 8], 3, bound=2.0, dtype=d),
    "rows": lambda d: ldlt.nn.Residual(5, [8], 3, head="rows", activation=MaxMin, dtype=d),
    "orthogonal": lambda d: ldlt.nn.FeedForward(5, [8], 3, head="orthogonal", activation=nn.SiLU, dtype=d),
    "groupsort": lambda d: ldlt.nn.FeedForward(5, [8, 8], 3, activation=lambda: GroupSort(4), dtype=d),
    "snake": lambda d: ldlt.nn.FeedForward(5, [8], 3, activation=Snake, dtype=d),
    "u-net": lambda d: ldlt.nn.UNet(6, [8, 4], 2, dtype=d),
    "u-net of images": lambda d: ldlt.nn.UNet((1, 4, 4), [2, 3], 1, dtype=d),
    "convolutions": lambda d: ldlt.nn.ConvResNet((1, 6, 6), [2, 3], 3, blocks=1, dtype=d),
    "mixed": lambda d: ldlt.Lipschitz(Mixed().to(d), input_shape=(1, 4, 4)),
    "scaled": lambda d: ldlt.Lipschitz(nn.Sequential(nn.Linear(4, 6), nn.ReLU()).to(d), input_shape=4, output="scale"),
}


@functools.cache
def network(name, dtype=torch.float64):
    torch.manual_seed(0)
    return NETWORKS[name](dtype)


SINGLE = ("residual", "convolutions", "mixed")


@pytest.mark.parametrize(("name", "dtype"), [*((n, DTYPES[0]) for n in NETWORKS), *((n, DTYPES[1]) for n in SINGLE)])
def test_networks_are_saved_with_a_proven_certificate(name, dtype, tmp_path, capsys):
    net, path = network(name, dtype), tmp_path / "net.onnx"
    assert ldlt.save(net, path) == path
    assert capsys.readouterr() == ("", "")
    loaded = same(net.freeze().eval(), path)
    stated = loaded.certificate
    assert stated.rigorous
    assert stated.bound <= net.bound * (1 + (1e-5 if dtype == torch.float64 else 1e-3))
    assert ldlt.verify(path).bound == stated.bound  # from the file alone
    message = onnx.load(path)
    assert {p.key for p in message.metadata_props} == PROPERTIES
    assert str(Path.cwd()).encode() not in path.read_bytes()  # no paths of this machine
    assert not any(t.data_location for t in message.graph.initializer)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("seed", range(6))
def test_random_networks_survive_a_file(seed):
    module = RandomGraph(seed) if seed % 3 else RandomImages(seed)
    shape = module.width_in if seed % 3 else module.shape
    net = ldlt.Lipschitz(module, input_shape=shape, head=["joint", "orthogonal", "rows"][seed % 3])
    written(net.freeze(), net.input_shape, kernels=False, dtypes=DTYPES[:1])


def test_a_file_is_traced_twice_and_proven_once(tmp_path, monkeypatch):
    counts = dict.fromkeys(("trace", "prove", "read"), 0)

    def counted(name, place, attribute):
        original = getattr(sys.modules[place], attribute)

        def run(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(sys.modules[place], attribute, run)

    counted("trace", "ldlt.certificates.fingerprint", "trace")
    counted("prove", "ldlt.files.store", "issue")
    counted("read", "ldlt.files.store", "network_of")
    net = network("residual")
    ldlt.save(net, tmp_path / "net.onnx")
    assert counts == {"trace": 2, "prove": 1, "read": 1}


def test_what_cannot_be_written_is_found_out_before_anything_is_proven(tmp_path, monkeypatch):
    def proof(*args, **kwargs):
        raise AssertionError("something was proven")

    for name in ("issue", "certify", "verify"):
        monkeypatch.setattr(sys.modules["ldlt.files.store"], name, proof)
    net = ldlt.nn.FeedForward(3, [4], 2, activation=Unwritten)
    with pytest.raises(ldlt.GraphError, match="cannot be written"):
        ldlt.save(net, tmp_path / "net.onnx")


# -- kinds of models ---------------------------------------------------------------------------------------------------


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.1), nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 3)).double()


def test_plain_modules(tmp_path):
    model, path = plain(), tmp_path / "net.onnx"
    certificate = ldlt.certify(model, 4)
    for given_certificate, shape in ((certificate, None), (None, 4)):
        same(model, ldlt.save(model, path, given_certificate, input_shape=shape))
        assert ldlt.verify(path).rigorous
        assert ldlt.load(path).certificate.bound == pytest.approx(certificate.bound, rel=1e-3)
    with pytest.raises(ldlt.ShapeError, match="input_shape is needed"):
        ldlt.save(model, path)
    with pytest.raises(ldlt.ShapeError, match="about inputs of shape"):
        ldlt.save(model, path, certificate, input_shape=5)
    with pytest.raises(ldlt.CertificateError, match="multipliers"):
        ldlt.save(model, path, dataclasses.replace(certificate, multipliers={}))
    with pytest.raises(ldlt.CertificateError, match="cannot be proven"):
        ldlt.save(model, path, dataclasses.replace(certificate, bound=certificate.bound / 2))
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-9
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.save(model, path, certificate)


def test_what_is_not_certified_stays_so(tmp_path):
    model = plain()
    nothing = dataclasses.replace(
        ldlt.certify(model, 4), status="not certified", reason="too large", bound=math.inf, rigorous=False
    )
    loaded = ldlt.load(ldlt.save(model, tmp_path / "net.onnx", nothing))
    assert not loaded.certificate.is_certified
    assert (loaded.certified_radius(np.zeros((2, 4))) == 0).all()
    assert "Nothing is certified" in ldlt.model_card(loaded)
    with pytest.raises(ldlt.CertificateError, match="too large"):
        ldlt.verify(loaded)


def test_nothing_is_certified_outside_of_a_region(tmp_path):
    """Tanh is flat in the region and steep around zero: there, the bound of the region is off by far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    center = torch.full((2,), 20.0, dtype=torch.float64)
    near, far = center.numpy() + np.array([[0.0, 0.0], [0.6, 0.0]]), np.array([[0.0, 0.0], [18.9, 20.0]])
    for kind, size in (("ball", torch.tensor(1.0)), ("box", torch.tensor([1.0, 2.0]))):
        certificate = ldlt.certify(model, 2, region=ldlt.Region(kind, center, size.double()))
        deployed = ldlt.load(ldlt.save(model, tmp_path / "net.onnx", certificate))
        assert not ldlt.verify(deployed).rigorous
        assert (deployed.certified_radius(far) == 0).all()
        inside = deployed.certified_radius(near)
        assert (inside > 0).all()
        assert (inside <= [1.0, 0.4]).all()
        assert inside[1] == pytest.approx(0.4)  # where the region ends
        for x, radius, known in ((near, 0.3, True), (near, 1.5, False), (far, 0.1, False)):
            ends = deployed.predict_interval(x, radius)
            assert all(np.isfinite(e).all() == known for e in ends)
        dishonest = ldlt.Deployed(deployed.network, dataclasses.replace(deployed.certificate, rigorous=True))
        assert "| proven | no:" in ldlt.model_card(dishonest)


def test_other_precisions_are_proven_anew(tmp_path):
    path = ldlt.save(network("residual"), tmp_path / "net.onnx", dtype=torch.float32)
    loaded = ldlt.load(path)
    assert loaded.dtype == torch.float32
    assert ldlt.verify(path).bound == pytest.approx(2.0, rel=1e-4)
    assert ldlt.deploy(loaded, dtype=torch.float64).dtype == torch.float64
    half = nn.Sequential(nn.Linear(3, 1)).bfloat16()
    with pytest.raises(ldlt.GraphError, match="pass dtype"):
        ldlt.save(half, path, input_shape=3)
    assert ldlt.deploy(half, input_shape=3, dtype=torch.float32).certificate.rigorous


def test_refusals(tmp_path, monkeypatch):
    net, path = network("residual"), tmp_path / "net.onnx"
    model = plain()
    for call, error, reason in (
        (lambda: ldlt.save(net, path, ldlt.certify(net)), ldlt.OptionError, "has its own"),
        (lambda: ldlt.save([1, 2], path), ldlt.OptionError, "must be a module"),
        (lambda: ldlt.save(net, tmp_path / "net.bin"), ldlt.OptionError, "must end in .onnx"),
        (lambda: ldlt.save(net, tmp_path / "none" / "net.onnx"), ldlt.OptionError, "folder does not exist"),
        (lambda: ldlt.save(net, path, dtype=torch.float16), ldlt.OptionError, "dtype must be"),
        (lambda: ldlt.save(ldlt.LipschitzRegressor(), path), ldlt.OptionError, "not fitted"),
        (lambda: ldlt.verify(model), ldlt.CertificateError, "carries no certificate"),
        (lambda: ldlt.verify(ldlt.certify(model, 4)), ldlt.CertificateError, "is missing"),
        (lambda: ldlt.model_card(net, np.zeros((2, 5))), ldlt.OptionError, "both X and y"),
        (lambda: ldlt.model_card(net, np.zeros((2, 5)), [0, 1]), ldlt.OptionError, "not stated"),
    ):
        with pytest.raises(error, match=reason):
            call()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ldlt.MissingExtraError, match=r"ldlt\[files\]"):
        ldlt.save(net, path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("matrix", [False, True])
def test_what_comes_before_a_network_is_certified_with_it(matrix, tmp_path):
    net, shift = network("residual"), torch.linspace(-1, 1, 5, dtype=torch.float64)
    factor = torch.randn(5, 7, dtype=torch.float64) if matrix else torch.linspace(0.1, 0.5, 5, dtype=torch.float64)
    path = ldlt.save(net, tmp_path / "net.onnx", before=(factor, shift))
    scale = float(torch.linalg.matrix_norm(factor if matrix else factor.diag(), 2))
    found = same(Behind(factor if matrix else factor.diag(), shift, net.freeze()), path)
    assert ldlt.verify(path).rigorous
    assert found.certificate.bound == pytest.approx(2.0 * scale, rel=1e-4)
    model = plain()
    certificate = ldlt.certify(model, 4)
    assert ldlt.deploy(model, certificate, before=(0.5, 1.0)).certificate.bound <= certificate.bound * 0.5001
    local = ldlt.certify(model, 4, region=ldlt.Region("ball", torch.zeros(4).double(), torch.tensor(1.0).double()))
    for wrong in ((1.0,), ("a", 0.0), ([1.0, 2.0], 0.0), (math.nan, 0.0), (torch.eye(4), 0.0)):
        with pytest.raises(ldlt.OptionError):
            ldlt.deploy(net, before=wrong)
    with pytest.raises(ldlt.OptionError, match="region"):
        ldlt.deploy(model, local, before=(0.5, 0.0))


class Behind(nn.Module):
    """A network behind an affine map."""

    def __init__(self, factor, shift, network):
        super().__init__()
        self.factor, self.shift, self.network = factor, shift, network.eval()

    def forward(self, x):
        return self.network(x @ self.factor.T + self.shift)


def test_hooks_are_written(tmp_path):
    model = plain()
    model[0].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    same(model, ldlt.save(model, tmp_path / "net.onnx", input_shape=4))


def test_what_was_changed_in_memory_is_not_saved(tmp_path):
    deployed = ldlt.deploy(network("feed-forward"))
    forged = ldlt.Deployed(deployed.network, dataclasses.replace(deployed.certificate, bound=1e-6))
    for use in (ldlt.model_card, lambda m: ldlt.save(m, tmp_path / "net.onnx")):
        with pytest.raises(ldlt.CertificateError, match="cannot be proven"):
            use(forged)
    with torch.no_grad():
        next(deployed.network.parameters()).add_(1e-9)
    for use in (ldlt.model_card, ldlt.deploy, lambda m: ldlt.save(m, tmp_path / "net.onnx")):
        with pytest.raises(ldlt.CertificateError, match="another network"):
            use(deployed)
    assert not any(tmp_path.iterdir())


# -- estimators --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True, as_frame=True)
    names = np.array(["a|b", "<b>", "c"])[y]
    return x, ldlt.LipschitzClassifier((8,), epochs=5, random_state=0).fit(x, names), names


def test_classifiers_with_their_standardisation(wine, tmp_path):
    x, classifier, names = wine
    path = ldlt.save(classifier, tmp_path / "wine.onnx")
    loaded = ldlt.load(path)
    assert (loaded.predict(x) == classifier.predict(x)).all()
    assert (loaded.predict(x[x.columns[::-1]]) == loaded.predict(x.to_numpy())).all()  # columns by name
    np.testing.assert_allclose(loaded.certified_radius(x), classifier.certified_radius(x), rtol=1e-6)
    assert loaded.certified_accuracy(x, names, [-1.0])[0] == pytest.approx(classifier.score(x, names))
    assert (loaded.meaning.rows, loaded.meaning.features) == (178, tuple(x.columns))
    assert ldlt.verify(loaded).bound == pytest.approx(classifier.certificate_.bound, rel=1e-6)
    single = ldlt.deploy(loaded, dtype=torch.float32)
    radii = single.certified_radius(x)  # rounded inputs are taken into account
    assert (radii <= classifier.certified_radius(x) * (1 + 1e-3)).all()
    assert (radii > 0).mean() > 0.9
    found = outputs(path, torch.tensor(x.to_numpy()))
    assert (np.array(loaded.meaning.classes)[found.argmax(1)] == classifier.predict(x)).all()
    again = ldlt.load(ldlt.save(loaded, tmp_path / "again.onnx"))
    assert again.meaning == loaded.meaning
    np.testing.assert_array_equal(again.predict(x), loaded.predict(x))
    for wrong in (
        x.drop(columns="alcohol"),
        np.full((1, 13), np.inf),
        np.zeros((1, 12)),
        [["text"] * 13],
        np.ones((1, 13)) * 1j,
    ):
        with pytest.raises(ldlt.LdltError):
            loaded.predict(wrong)


def test_regressors(tmp_path):
    x, y = load_diabetes(return_X_y=True)
    regressor = ldlt.LipschitzRegressor((8,), epochs=5, random_state=0).fit(x, y)
    loaded = ldlt.load(ldlt.save(regressor, tmp_path / "net.onnx"))
    np.testing.assert_allclose(loaded.predict(x), regressor.predict(x), rtol=1e-9)
    for ours, theirs in zip(loaded.predict_interval(x, 0.1), regressor.predict_interval(x, 0.1), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    for call in (lambda: loaded.certified_radius(x), lambda: loaded.predict_interval(x, -1.0)):
        with pytest.raises(ldlt.OptionError):
            call()
    card = ldlt.model_card(loaded, x, y, radii=[0.1])
    for fact in ("mean absolute error", "noise of the target", "in units of the target", "added to intervals"):
        assert fact in card
    assert "certified prediction" not in card  # there are classes for that
    with pytest.raises(ldlt.ShapeError):
        ldlt.model_card(loaded, x, y[:, None])


def test_model_cards_state_facts(wine, tmp_path):
    x, classifier, names = wine
    deployed = ldlt.deploy(classifier)
    card = ldlt.model_card(deployed, x, names, name="Wine | <script>")
    assert card.startswith("# Wine \\| &lt;script>")
    for fact in ("&lt;b>, a\\|b, c", deployed.certificate.fingerprint, "178 rows of 13 features", "accounted for"):
        assert fact in card
    assert f"| accuracy | {classifier.score(x, names):.4f} |" in card
    bound = next(line for line in card.splitlines() if "Lipschitz bound" in line).split("|")[2]
    assert float(bound) >= deployed.certificate.bound
    path = ldlt.save(deployed, tmp_path / "net.onnx", card=card)
    assert {p.key: p.value for p in onnx.load(path).metadata_props}["ldlt.card"] == card
    without = ldlt.model_card(network("residual"))
    assert "Results" not in without
    assert "trained on" not in without


def test_predictions_do_not_depend_on_the_mode():
    torch.manual_seed(0)
    deployed = ldlt.deploy(nn.Sequential(nn.Linear(3, 5), nn.RReLU(), nn.Linear(5, 2)), input_shape=3).train()
    x = np.random.default_rng(0).normal(size=(9, 3))
    np.testing.assert_array_equal(deployed.predict(x), deployed.predict(x))
    assert deployed.network.training


def test_odd_inputs():
    deployed = ldlt.deploy(network("feed-forward", torch.float32))
    huge = np.full((1, 5), 1e300)  # infinite in float32
    lower, upper = deployed.predict_interval(huge, 0.1)
    assert np.isneginf(lower).all()
    assert np.isposinf(upper).all()
    assert (deployed.certified_radius(huge) == 0).all()
    tiny = deployed.certified_radius(np.full((1, 5), 1e-200))  # zero in float32
    assert (tiny <= deployed.certified_radius(np.zeros((1, 5)))).all()
    x = torch.ones(2, 5, requires_grad=True)
    assert deployed.predict(x).shape == (2, 3)
    assert deployed.certified_accuracy(x, [0, 0], 0.1).shape == (1,)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    net = ldlt.nn.FeedForward(5, [8, 8], 3, activation=MaxMin, dtype=torch.float64)
    return ldlt.save(net, tmp_path_factory.mktemp("saved") / "net.onnx")


def changed(saved, tmp_path, change):
    """The file with its message changed."""
    message = onnx.load(saved)
    change(message)
    path = tmp_path / "changed.onnx"
    path.write_bytes(message.SerializeToString())
    return path


def texts(message):
    return {p.key: p for p in message.metadata_props}


def test_changed_weights_are_noticed(saved, tmp_path):
    def move(message):
        tensor = next(t for t in message.graph.initializer if len(t.dims) == 2)
        weight = onnx.numpy_helper.to_array(tensor).copy()
        weight[0, 0] += 1e-12
        tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))

    with pytest.raises(ldlt.CertificateError, match="a weight or the architecture was changed"):
        ldlt.load(changed(saved, tmp_path, move))


def test_a_certificate_with_a_smaller_bound_is_not_believed(saved, tmp_path):
    stated = ldlt.load(saved).certificate
    better = dataclasses.replace(stated, bound=stated.bound / 2)
    path = changed(saved, tmp_path, lambda m: setattr(texts(m)["ldlt.certificate"], "value", better.to_json()))
    assert ldlt.load(path).certificate.bound == better.bound  # it is stated ...
    with pytest.raises(ldlt.CertificateError, match="cannot be proven"):
        ldlt.verify(path)  # ... and not proven


def _says(message, **more):
    function = message.functions[0]
    function.doc_string = json.dumps(json.loads(function.doc_string) | more)


LIES = {
    "another sort": lambda m: setattr(m.functions[0].node[2], "op_type", "ReduceMin"),
    "a factor": lambda m: m.functions[0].node.append(onnx.helper.make_node("Neg", ["x"], ["z"])),
    "another result": lambda m: m.functions[0].output.__setitem__(0, "v1"),
    "no description": lambda m: setattr(m.functions[0], "doc_string", ""),
    "another class": lambda m: _says(m, activation="torch.nn.modules.activation.Tanh"),
    "any class": lambda m: _says(m, activation="subprocess.Popen"),
    "a layer": lambda m: _says(m, activation="torch.nn.modules.linear.Linear", options={"in_features": 2**40}),
    "options": lambda m: _says(m, options={"more": 1}),
    "memory": lambda m: _says(m, activation="torch.nn.modules.activation.PReLU", options={"num_parameters": 2**45}),
    "a shape": lambda m: _says(m, shape=[2, 4]),
    "a member": lambda m: _says(m, more=1),
    "a type": lambda m: _says(m, double="yes"),
    "another domain": lambda m: setattr(m.functions[0], "domain", "com.example"),
    "two of one name": lambda m: m.functions.append(m.functions[0]),
}


@pytest.mark.parametrize("kind", LIES)
def test_lying_functions_are_refused(kind, saved, tmp_path):
    with pytest.raises((ldlt.SavedModelError, ldlt.OnnxError)):
        ldlt.load(changed(saved, tmp_path, LIES[kind]))


def test_activations_that_are_not_known_here_are_refused(tmp_path):
    path = ldlt.save(network("snake"), tmp_path / "net.onnx")
    Snake.__qualname__ = "Eel"
    try:
        with pytest.raises(ldlt.SavedModelError, match="register"):
            ldlt.load(path)
    finally:
        Snake.__qualname__ = "Snake"


def test_properties(saved, tmp_path):
    for change, error in (
        (lambda m: m.metadata_props.remove(texts(m)["ldlt.certificate"]), ldlt.CertificateError),
        (lambda m: m.metadata_props.append(texts(m)["ldlt.card"]), ldlt.OnnxError),
    ):
        with pytest.raises(error):
            ldlt.load(changed(saved, tmp_path, change))
    for name in ("ldlt.meaning", "ldlt.certificate"):
        for text in ("", "{", "null", "[" * 100_000, "NaN"):
            path = changed(saved, tmp_path, lambda m, n=name, t=text: setattr(texts(m)[n], "value", t))
            with pytest.raises((ldlt.SavedModelError, ldlt.CertificateError)):
                ldlt.load(path)


def test_hostile_meanings(saved, tmp_path):
    import hashlib  # noqa: PLC0415

    good = json.loads(texts(onnx.load(saved))["ldlt.meaning"].value)["meaning"]

    def sealed(meaning):
        return json.dumps({"sha256": hashlib.sha256(meaning.encode()).hexdigest(), "meaning": 0}).replace(
            '"meaning": 0', f'"meaning": {meaning}'
        )

    def path_of(text):
        return changed(saved, tmp_path, lambda m: setattr(texts(m)["ldlt.meaning"], "value", text))

    assert ldlt.load(path_of(sealed(json.dumps(good)))).meaning.rows is None
    for change in (
        {"task": "magic"}, {"classes": ["a"]}, {"classes": [[]] * 3}, {"features": ["a"]}, {"features": 3},
        {"rows": -1}, {"rows": 1.5}, {"target": 2}, {"trained_bound": "much"}, {"architecture": "x" * 2000},
        {"more": 1},
    ):  # fmt: skip
        with pytest.raises(ldlt.SavedModelError):
            ldlt.load(path_of(sealed(json.dumps(good | change))))
    with pytest.raises(ldlt.SavedModelError, match="was changed"):
        ldlt.load(path_of(sealed(json.dumps(good)).replace("FeedForward", "FeedBackward")))


def test_other_files(tmp_path):
    for path, reason in (
        (tmp_path / "none.onnx", "does not exist"),
        (tmp_path, "not a file"),
        ("a\0b.onnx", r"'a\?b.onnx' does not exist"),
    ):
        with pytest.raises(ldlt.OptionError, match=reason):
            ldlt.load(path)

    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    for suffix, error in (("safetensors", ldlt.SavedModelError), ("pt", ldlt.OptionError), ("onnx", ldlt.OnnxError)):
        (tmp_path / f"pickle.{suffix}").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(error):
            ldlt.load(tmp_path / f"pickle.{suffix}")


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_ends_in_an_error_or_changes_nothing(data, saved, tmp_path_factory):
    original = saved.read_bytes()
    found = bytearray(original[: data.draw(st.integers(0, len(original)))] if data.draw(st.booleans()) else original)
    for place in data.draw(st.lists(st.integers(0, len(found) - 1), max_size=3)) if found else []:
        found[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damage") / "net.onnx"
    path.write_bytes(found)
    try:
        loaded = ldlt.load(path)
    except ldlt.LdltError:
        return
    assert ldlt.verify(loaded).fingerprint == ldlt.load(saved).certificate.fingerprint


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_interrupted_writes_change_nothing(tmp_path, monkeypatch):
    place = tmp_path / "file.txt"
    place.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic(place) as beside:
        beside.write_text("ne")
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError), atomic(place):
        pass  # nothing was written
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]
    with atomic(place) as beside:
        beside.write_text("new")
        assert place.read_text() == "old"
    assert place.read_text() == "new"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")
    with pytest.raises(ldlt.OptionError, match="No space left"):
        ldlt.save(network("feed-forward"), path)
    assert path.read_bytes() == b"old"
    assert {p.name for p in tmp_path.iterdir()} == {"file.txt", "net.onnx"}


def test_values_beside_the_file(tmp_path):
    """Only if that is asked for, and only from the folder of the file."""
    model = onnx.load(ldlt.save(network("feed-forward"), tmp_path / "whole.onnx"))
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "net.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(ldlt.OnnxError, match="external_data=True"):
        ldlt.read_onnx(path)
    x = torch.randn(3, 5, dtype=torch.float64)
    found = ldlt.read_onnx(path, external_data=True).module(x)
    assert torch.equal(found, ldlt.load(tmp_path / "whole.onnx")(x))
    weights = path.with_name("weights.bin")
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ldlt.OnnxError, match="too short"):
        ldlt.read_onnx(path, external_data=True)
    weights.rename(tmp_path / "weights.bin")
    for location in ("weights.bin", "../weights.bin", str(tmp_path / "weights.bin"), "a\0b"):
        message = onnx.load(path, load_external_data=False)
        for tensor in message.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        path.write_bytes(message.SerializeToString())
        with pytest.raises(ldlt.OnnxError, match="cannot be found"):
            ldlt.read_onnx(path, external_data=True)
