"""Saved and exported networks: they compute the same, carry a certificate that is proven again, and refuse damage."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_wine
from torch import nn

import ldlt
from ldlt.activations import GroupSort, MaxMin
from ldlt.cli import main
from ldlt.export import encoding, storage
from ldlt.export.program import Program
from ldlt.export.program import program_of as written
from ldlt.graph.trace import trace
from random_graphs import RandomGraph
from random_images import RandomImages

pytest.importorskip("safetensors")
pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import safetensors.torch  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _one_registry():
    """The exporter builds its table of operators anew for every file; once is enough here."""
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    kind = registration.ONNXRegistry
    original = vars(kind)["from_torchlib"]
    kind.from_torchlib = staticmethod(functools.cache(kind.from_torchlib))
    yield
    kind.from_torchlib = original


def program_of(model, shape):
    return written(model, trace(model, shape))


# -- networks ----------------------------------------------------------------------------------------------------------


class Concatenation(nn.Module):
    """A residual block, a concatenation with the input, several ways to write things."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.outer, self.head = (
            nn.Linear(5, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(13, 3),
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = self.stem(x)
        h = h + 0.5 * self.outer(torch.relu(self.inner(self.drop(h))))
        first, second = torch.tanh(h).chunk(2, dim=1)
        return self.head(torch.cat([x, second, first.reshape(x.shape[0], -1)], dim=1))


class Mixed(nn.Module):
    """Convolution, sorting over channels, pooling, dense layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
        self.sort, self.pool = MaxMin(), nn.MaxPool2d(2)
        self.inner, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.inner(self.pool(self.sort(self.conv(x))).flatten(1))))


def _wrapped(cls, shape):
    return lambda dtype: ldlt.Lipschitz(cls().to(dtype), input_shape=shape)


NETWORKS = {
    "feed-forward": lambda dtype: ldlt.nn.FeedForward(5, [8, 8], 3, dtype=dtype),
    "residual": lambda dtype: ldlt.nn.Residual(5, [8, 8], 3, bound=2.0, dtype=dtype),
    "rows": lambda dtype: ldlt.nn.Residual(5, [8], 3, head="rows", dtype=dtype),
    "orthogonal": lambda dtype: ldlt.nn.FeedForward(5, [8], 3, head="orthogonal", activation=nn.SiLU, dtype=dtype),
    "groupsort": lambda dtype: ldlt.nn.FeedForward(5, [8, 8], 3, activation=lambda: GroupSort(4), dtype=dtype),
    "maxmin": lambda dtype: ldlt.nn.Residual(5, [8, 8], 3, activation=MaxMin, dtype=dtype),
    "concatenation": _wrapped(Concatenation, 5),
    "u-net": lambda dtype: ldlt.nn.UNet(6, [8, 4], 2, dtype=dtype),
    "u-net of images": lambda dtype: ldlt.nn.UNet((1, 4, 4), [2, 3], 1, dtype=dtype),
    "convolutions": lambda dtype: ldlt.nn.ConvResNet((1, 6, 6), [2, 3], 3, blocks=1, dtype=dtype),
    "mixed": _wrapped(Mixed, (1, 4, 4)),
}
SINGLE = {"residual", "convolutions"}
"""Exported in float32, too; the others with the slow proofs."""
PAIRS = [
    *((n, torch.float64) for n in NETWORKS),
    *(pytest.param(n, torch.float32, marks=() if n in SINGLE else pytest.mark.slow) for n in NETWORKS),
]


@functools.cache
def network(name, dtype=torch.float64):
    torch.manual_seed(0)
    net = NETWORKS[name](dtype)
    return net, ldlt.deploy(net)


def inputs(net, rows=5):
    dtype = next(net.parameters()).dtype
    return torch.randn(rows, *net.input_shape, dtype=dtype)


def tolerance(dtype):
    return 1e-6 if dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_saved_and_loaded_networks_are_the_same_to_the_last_bit(name, tmp_path):
    net, deployed = network(name)
    path = tmp_path / "net.safetensors"
    saved = ldlt.save(deployed, path)
    loaded = ldlt.load(path)
    x = inputs(net)
    with torch.no_grad():
        assert torch.equal(loaded(x), net.freeze().eval()(x))
    assert loaded.certificate.fingerprint == saved.certificate.fingerprint
    assert loaded.certificate.bound == saved.certificate.bound <= net.bound * (1 + 1e-5)
    assert ldlt.verify(loaded).rigorous
    assert ldlt.verify(path).bound == loaded.certificate.bound
    again = tmp_path / "again.safetensors"
    ldlt.save(loaded, again)  # what was loaded can be saved
    assert torch.equal(ldlt.load(again)(x), loaded(x))


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_onnx_files_compute_the_same(name, dtype, tmp_path, capsys):
    net, deployed = network(name, dtype)
    path = tmp_path / "net.onnx"
    stated = ldlt.export_onnx(deployed, path)
    assert capsys.readouterr() == ("", "")
    session = ort.InferenceSession(path)
    for rows in (1, 5):
        x = inputs(net, rows)
        (found,) = session.run(None, {"x": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(found, deployed(x).numpy(), atol=tolerance(dtype), rtol=0)
    assert stated.rigorous
    assert stated.bound <= deployed.certificate.bound * (1 + 1e-6)
    assert ldlt.verify(path).bound == stated.bound  # from the file alone
    proto = onnx.load(path)
    assert {p.key for p in proto.metadata_props} == {"ldlt.certificate", "ldlt.meaning"}
    assert b".py" not in path.read_bytes()  # no lines of source, no paths of this machine
    assert not any(t.data_location for t in proto.graph.initializer)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_exported_programs_compute_the_same(name, dtype, tmp_path):
    net, deployed = network(name, dtype)
    path = tmp_path / "net.pt2"
    ldlt.export_program(deployed, path)
    extra = {"ldlt.certificate": "", "ldlt.meaning": ""}
    program = torch.export.load(path, extra_files=extra).module()
    for rows in (1, 5):
        x = inputs(net, rows)
        with torch.no_grad():
            torch.testing.assert_close(program(x), deployed(x), atol=tolerance(dtype), rtol=0)
    assert ldlt.Certificate.from_json(extra["ldlt.certificate"]).bound == deployed.certificate.bound
    assert str(tmp_path.parent).encode() not in path.read_bytes()


def test_commands_on_exported_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net, deployed = network("residual")
    certificate = ldlt.export_onnx(deployed, "net.onnx")
    certificate.save("net.cert.json")
    ldlt.save(deployed, "net.safetensors")
    for words in (["net.onnx"], ["net.safetensors"], ["net.cert.json", "net.onnx"]):
        assert main(["verify", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["verified"]
        assert found["bound"] == pytest.approx(net.bound)
        assert found["rigorous"]
    assert main(["certify", "net.onnx", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound"] <= net.bound * (1 + 1e-4)
    for words in (["net.cert.json"], ["net.onnx", "--output-name", "y"], ["none.onnx"]):
        assert main(["verify", *words]) == 2
    assert ldlt.verify("net.cert.json", "net.onnx").bound == certificate.bound


@pytest.mark.usefixtures("double")
def test_random_networks_survive_a_file(tmp_path):
    path = tmp_path / "net.safetensors"
    for seed in range(15):
        module = RandomGraph(seed) if seed % 3 else RandomImages(seed)
        shape = module.width_in if seed % 3 else module.shape
        net = ldlt.Lipschitz(module, input_shape=shape, head=["joint", "orthogonal", "rows"][seed // 3 % 3])
        frozen = net.freeze().eval()
        program = program_of(frozen, net.input_shape)
        data, tensors = encoding.encode(program)
        again = encoding.decode(json.loads(json.dumps(data)), tensors, net.input_shape)
        x = inputs(net)
        with torch.no_grad():
            assert torch.equal(again(x), frozen(x)), seed
        if seed % 3 and seed < 9:
            saved = ldlt.save(net, path)
            assert ldlt.verify(path).bound == saved.certificate.bound <= net.bound * (1 + 1e-6)


def test_an_output_without_a_free_map(tmp_path):
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).double()
    net = ldlt.Lipschitz(module, input_shape=4, output="scale")
    ldlt.save(net, tmp_path / "net.safetensors")
    x = inputs(net)
    with torch.no_grad():
        assert torch.equal(ldlt.load(tmp_path / "net.safetensors")(x), net.freeze()(x))
    assert ldlt.verify(tmp_path / "net.safetensors").rigorous
    path = tmp_path / "net.onnx"
    with torch.no_grad():  # a factor so close to one that the exporter's optimiser would drop it
        assert 1e-9 < abs(float(net.freeze().gain) - 1) < 1e-6
    ldlt.export_onnx(net, path)
    (found,) = ort.InferenceSession(path).run(None, {"x": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, net.freeze()(x).numpy(), atol=1e-14, rtol=0)
    assert ldlt.verify(path).rigorous


ARGUMENTS = {
    "Clamp": [(-1.0, None), (0.0, 2.0)],
    "GroupSort": [(3,)],
    "GELU": [(), ("tanh",)],
    "Hardtanh": [(-0.5, 2.0)],
    "LeakyReLU": [(1 / 3,)],
    "PReLU": [(6,)],
    "RReLU": [(0.1, 0.4)],
    "Softplus": [(2.0, 40.0)],
    "Threshold": [(0.0, 0.0)],
}


KINDS = [k for k in ldlt.activations.ELEMENTWISE if k is not nn.Hardshrink]  # which jumps


@pytest.mark.parametrize("kind", [*KINDS, GroupSort, MaxMin], ids=lambda c: c.__name__)
def test_every_activation_can_be_written_down(kind):
    for arguments in ARGUMENTS.get(kind.__name__, [()]):
        model = nn.Sequential(nn.Linear(4, 6), kind(*arguments), nn.Linear(6, 2)).double()
        data, tensors = encoding.encode(program_of(model, (4,)))
        again = encoding.decode(json.loads(json.dumps(data)), tensors, (4,))
        x = torch.randn(5, 4).double()
        with torch.no_grad():
            assert torch.equal(again(x), model.eval()(x))


# -- kinds of models ---------------------------------------------------------------------------------------------------


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.1), nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 3)).double()


def test_plain_modules(tmp_path):
    model = plain()
    certificate = ldlt.certify(model, 4)
    path = tmp_path / "net.safetensors"
    for given_certificate, shape in ((certificate, None), (None, 4)):
        saved = ldlt.save(model, path, given_certificate, input_shape=shape)
        assert saved.certificate.bound == pytest.approx(certificate.bound, rel=1e-3)
        x = torch.randn(3, 4).double()
        assert torch.equal(ldlt.load(path)(x), model(x))
        assert ldlt.verify(path).rigorous
    with pytest.raises(ldlt.ShapeError, match="input_shape is needed"):
        ldlt.save(model, path)
    with pytest.raises(ldlt.ShapeError, match="is about inputs of shape"):
        ldlt.save(model, path, certificate, input_shape=5)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-9
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.save(model, path, certificate)
    with pytest.raises(ldlt.CertificateError, match="nobody could check"):
        ldlt.save(model, path, ldlt.certify(model, 4, method="product"))


def test_what_is_not_certified_stays_so(tmp_path):
    model = plain()
    nothing = dataclasses.replace(
        ldlt.certify(model, 4), status="not certified", reason="too large", bound=math.inf, rigorous=False
    )
    path = tmp_path / "net.safetensors"
    ldlt.save(model, path, nothing)
    loaded = ldlt.load(path)
    assert not loaded.certificate.is_certified
    assert (loaded.certified_radius(np.zeros((2, 4))) == 0).all()
    assert "Nothing is certified" in ldlt.model_card(loaded)
    with pytest.raises(ldlt.CertificateError, match="too large"):
        ldlt.verify(loaded)


def test_local_certificates(tmp_path):
    model = plain()
    region = ldlt.Region("ball", torch.zeros(4).double(), torch.tensor(0.1).double())
    certificate = ldlt.certify(model, 4, region=region)
    ldlt.save(model, tmp_path / "net.safetensors", certificate)
    loaded = ldlt.load(tmp_path / "net.safetensors")
    assert loaded.certificate.region is not None
    assert not ldlt.verify(loaded).rigorous
    assert "inputs in a ball" in ldlt.model_card(loaded)


def test_other_precisions_are_proven_anew(tmp_path):
    net, _ = network("residual")
    saved = ldlt.save(net, tmp_path / "net.safetensors", dtype=torch.float32)
    assert saved.dtype == torch.float32
    found = ldlt.verify(tmp_path / "net.safetensors")
    assert found.rigorous
    assert found.bound == pytest.approx(2.0, rel=1e-4)
    assert ldlt.deploy(saved, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(ldlt.OptionError, match="float32 or torch.float64"):
        ldlt.deploy(net, dtype=torch.float16)


def test_refusals(tmp_path):
    net, _ = network("residual")
    path = tmp_path / "net.safetensors"
    with pytest.raises(ldlt.OptionError, match="has its own"):
        ldlt.save(net, path, ldlt.certify(net))
    with pytest.raises(ldlt.OptionError, match="must be a module"):
        ldlt.save([1, 2], path)
    with pytest.raises(ldlt.OptionError, match="must end in .safetensors"):
        ldlt.save(net, tmp_path / "net.bin")
    with pytest.raises(ldlt.OptionError, match="folder does not exist"):
        ldlt.save(net, tmp_path / "none" / "net.safetensors")
    with pytest.raises(ldlt.OptionError, match="must end in .onnx"):
        ldlt.export_onnx(net, path)
    with pytest.raises(ldlt.OptionError, match="must end in .pt2"):
        ldlt.export_program(net, path)
    with pytest.raises(ldlt.CertificateError, match="carries no certificate"):
        ldlt.verify(plain())
    with pytest.raises(ldlt.CertificateError, match="the certificate comes first"):
        ldlt.verify(plain(), plain())
    with pytest.raises(ldlt.CertificateError, match="ONNX file, not 'net.pt'"):
        ldlt.verify(ldlt.certify(plain(), 4), "net.pt")
    with pytest.raises(ldlt.CertificateError, match="is missing"):
        ldlt.verify(ldlt.certify(plain(), 4))
    assert not any(tmp_path.iterdir())


def test_what_was_changed_in_memory_is_not_saved(saved, tmp_path):
    loaded = ldlt.load(saved)
    with torch.no_grad():
        next(loaded.parameters()).mul_(2)
    with pytest.raises(ldlt.CertificateError, match="certify it again"):
        ldlt.save(loaded, tmp_path / "net.safetensors")


def test_activations_of_others_are_exported_but_not_saved(tmp_path):
    class Snake(nn.Module):
        def forward(self, x):
            return x + torch.sin(x) ** 2

    ldlt.activations.register(Snake, lambda module: (0.0, 2.0))
    try:
        net = ldlt.nn.FeedForward(3, [4], 2, activation=Snake, dtype=torch.float64)
        with pytest.raises(ldlt.GraphError, match="Snake cannot be written as data"):
            ldlt.save(net, tmp_path / "net.safetensors")
        ldlt.export_program(net, tmp_path / "net.pt2")
        x = torch.randn(3, 3).double()
        found = torch.export.load(tmp_path / "net.pt2").module()(x)
        torch.testing.assert_close(found, net.freeze()(x), atol=1e-12, rtol=0)
    finally:
        del ldlt.activations.TABLE[Snake]


def test_programs_have_what_is_hidden_and_refuse_what_is_unknown():
    model = plain()
    model[0].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    x = torch.randn(3, 4).double()
    assert torch.equal(program_of(model, (4,))(x), model(x))  # with what the hook does

    class Unknown(nn.Module):
        def forward(self, x):
            return torch.logcumsumexp(x, 1)

    with pytest.raises(ldlt.GraphError, match="'logcumsumexp' has no certified rule"):
        program_of(Unknown(), (4,))
    with pytest.raises(ldlt.ShapeError, match="does not accept an input"):
        program_of(plain(), (5,))


def test_missing_packages(tmp_path, monkeypatch):
    net, _ = network("residual")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ldlt.MissingExtraError, match=r"ldlt\[export\]"):
        ldlt.save(net, tmp_path / "net.safetensors")
    with pytest.raises(ldlt.MissingExtraError, match=r"'onnxscript'.*ldlt\[export\]"):
        ldlt.export_onnx(net, tmp_path / "net.onnx")


# -- estimators --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True, as_frame=True)
    names = np.array(["a|b", "<b>", "c"])[y]
    return x, ldlt.LipschitzClassifier((8,), epochs=5, random_state=0).fit(x, names), names


def test_classifiers_with_their_standardisation(wine, tmp_path):
    x, classifier, names = wine
    loaded_from = []
    ldlt.save(classifier, tmp_path / "wine.safetensors")
    ldlt.export_onnx(classifier, tmp_path / "wine.onnx")
    for suffix in ("safetensors", "onnx"):
        loaded = ldlt.load(tmp_path / f"wine.{suffix}")
        assert (loaded.predict(x) == classifier.predict(x)).all()
        assert (loaded.predict(x[x.columns[::-1]]) == loaded.predict(x.to_numpy())).all()  # columns by name
        np.testing.assert_allclose(loaded.certified_radius(x), classifier.certified_radius(x), rtol=1e-6)
        assert loaded.certified_accuracy(x, names, [-1.0])[0] == pytest.approx(classifier.score(x, names))
        assert loaded.meaning.rows == 178
        assert loaded.meaning.features == tuple(x.columns)
        assert ldlt.verify(loaded).bound == pytest.approx(classifier.certificate_.bound, rel=1e-6)
        loaded_from.append(loaded)
    single = ldlt.deploy(loaded_from[0], dtype=torch.float32)
    radii = single.certified_radius(x)  # rounded inputs are taken into account
    assert (radii <= classifier.certified_radius(x) * (1 + 1e-3)).all()
    assert (radii > 0).mean() > 0.9
    (found,) = ort.InferenceSession(tmp_path / "wine.onnx").run(None, {"x": x.to_numpy()})
    assert (np.array(loaded.meaning.classes)[found.argmax(1)] == classifier.predict(x)).all()
    with pytest.raises(ldlt.ShapeError, match="column 'alcohol' is missing"):
        loaded.predict(x.drop(columns="alcohol"))
    with pytest.raises(ldlt.ShapeError, match="finite"):
        loaded.predict(np.full((1, 13), np.nan))
    with pytest.raises(ldlt.ShapeError, match="must have shape"):
        loaded.predict(np.zeros((1, 12)))
    with pytest.raises(ldlt.ShapeError, match="numbers"):
        loaded.predict([["text"] * 13])


def test_regressors(tmp_path):
    x, y = load_diabetes(return_X_y=True)
    regressor = ldlt.LipschitzRegressor((8,), epochs=5, random_state=0).fit(x, y)
    ldlt.save(regressor, tmp_path / "net.safetensors")
    loaded = ldlt.load(tmp_path / "net.safetensors")
    np.testing.assert_array_equal(loaded.predict(x), regressor.predict(x))
    for ours, theirs in zip(loaded.predict_interval(x, 0.1), regressor.predict_interval(x, 0.1), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    with pytest.raises(ldlt.OptionError, match="predict_interval"):
        loaded.certified_radius(x)
    with pytest.raises(ldlt.OptionError, match="not negative"):
        loaded.predict_interval(x, -1.0)
    card = ldlt.model_card(loaded, x, y, radii=[0.1])
    assert "mean absolute error" in card
    assert "noise of the target" in card
    assert "in units of the target per distance" in card
    assert "added to intervals" in card
    assert "certified prediction" not in card  # there are classes for that
    with pytest.raises(ldlt.OptionError, match="not fitted"):
        ldlt.save(ldlt.LipschitzRegressor(), tmp_path / "net.safetensors")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_estimators_compute_the_same_everywhere(task, dtype, wine, tmp_path):
    """Standardisation, network and the way back to the target's units, in onnxruntime and in ``torch.export``."""
    if task == "classification":
        x, estimator = wine[0].to_numpy(), wine[1]
    else:
        x, y = load_diabetes(return_X_y=True, scaled=False)
        estimator = ldlt.LipschitzRegressor((8,), epochs=3, random_state=0).fit(x, np.stack([y, y / 100], 1))
    deployed = ldlt.deploy(estimator, dtype=dtype)
    rows = torch.tensor(x, dtype=dtype)
    with torch.no_grad():
        wanted = deployed(rows).numpy()
    ldlt.export_onnx(deployed, tmp_path / "net.onnx")
    ldlt.export_program(deployed, tmp_path / "net.pt2")
    (found,) = ort.InferenceSession(tmp_path / "net.onnx").run(None, {"x": rows.numpy()})
    again = torch.export.load(tmp_path / "net.pt2").module()(rows).detach().numpy()
    size = np.maximum(1.0, np.abs(wanted).max(0))  # targets are in units of their own
    for values in (found, again):
        np.testing.assert_allclose(values / size, wanted / size, atol=tolerance(dtype), rtol=0)


def test_model_cards_state_facts(wine):
    x, classifier, names = wine
    deployed = ldlt.deploy(classifier)
    card = ldlt.model_card(deployed, x, names, name="Wine | <script>")
    assert card.startswith("# Wine \\| &lt;script>")
    assert "&lt;b>, a\\|b, c" in card
    assert f"`{deployed.certificate.fingerprint}`" in card
    assert "178 rows of 13 features" in card
    assert f"| accuracy | {classifier.score(x, names):.4f} |" in card
    assert "all rounding errors of the check accounted for" in card
    bound = next(line for line in card.splitlines() if "Lipschitz bound" in line).split("|")[2]
    assert float(bound) >= deployed.certificate.bound
    without = ldlt.model_card(network("residual")[0])
    assert "Results" not in without
    assert "trained on" not in without
    with pytest.raises(ldlt.OptionError, match="both X and y"):
        ldlt.model_card(deployed, x)
    with pytest.raises(ldlt.OptionError, match="not stated"):
        ldlt.model_card(network("residual")[0], np.zeros((2, 5)), [0, 1])


def test_nothing_is_certified_outside_of_a_region():
    """Tanh is flat in the region and steep around zero: there, the bound of the region is off by far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    center = torch.full((2,), 20.0, dtype=torch.float64)
    near, far = center.numpy() + np.array([[0.0, 0.0], [0.6, 0.0]]), np.array([[0.0, 0.0], [18.9, 20.0]])
    for kind, size in (("ball", torch.tensor(1.0)), ("box", torch.tensor([1.0, 2.0]))):
        certificate = ldlt.certify(model, 2, region=ldlt.Region(kind, center, size.double()))
        deployed = ldlt.deploy(model, certificate)
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


def test_what_a_file_states_is_not_passed_on_unseen(tmp_path):
    deployed = network("feed-forward")[1]
    better = dataclasses.replace(deployed.certificate, bound=1e-6)
    forged = ldlt.Deployed(deployed.network, better)
    for use in (
        ldlt.model_card,
        lambda m: ldlt.save(m, tmp_path / "net.safetensors"),
        lambda m: ldlt.export_onnx(m, tmp_path / "net.onnx"),
        lambda m: ldlt.export_program(m, tmp_path / "net.pt2"),
    ):
        with pytest.raises(ldlt.CertificateError, match="cannot be proven"):
            use(forged)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ldlt.OptionError, match="has its own"):
        ldlt.deploy(deployed, deployed.certificate)
    with pytest.raises(ldlt.OptionError, match="dtype must be"):
        ldlt.deploy(deployed, dtype=torch.float16)


def test_from_onnx_to_safetensors(wine, tmp_path):
    x, classifier, _ = wine
    ldlt.export_onnx(classifier, tmp_path / "net.onnx")
    read = ldlt.load(tmp_path / "net.onnx")
    ldlt.save(read, tmp_path / "net.safetensors")
    loaded = ldlt.load(tmp_path / "net.safetensors")
    assert loaded.meaning == read.meaning
    assert ldlt.verify(loaded).bound == read.certificate.bound
    np.testing.assert_array_equal(loaded.predict(x), classifier.predict(x))


def test_uncertified_networks_are_exported_as_such(tmp_path):
    deployed = network("feed-forward")[1]
    nothing = dataclasses.replace(
        deployed.certificate, status="not certified", reason="a reason", bound=math.inf, multipliers={}, gram=None
    )
    ldlt.export_onnx(ldlt.Deployed(deployed.network, nothing), tmp_path / "net.onnx")
    loaded = ldlt.load(tmp_path / "net.onnx")
    assert loaded.certificate.reason == "a reason"
    assert (loaded.certified_radius(np.zeros((2, 5))) == 0).all()


class Padded(nn.Module):
    """Its padding lists more numbers than a file may."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(5, 1)

    def forward(self, x):
        return self.map(nn.functional.pad(x, (1, 1)))


@pytest.mark.parametrize(
    ("model", "most"), [(Padded(), 1), (nn.Sequential(nn.Linear(3, 1)).bfloat16(), 4096)], ids=["list", "bfloat16"]
)
def test_what_could_not_be_read_is_not_written(model, most, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "_MOST_NUMBERS", most)
    with pytest.raises(ldlt.GraphError, match="could not be read again"):
        ldlt.save(model, tmp_path / "net.safetensors", input_shape=3)
    assert not list(tmp_path.iterdir())


def test_predictions_do_not_depend_on_the_mode():
    torch.manual_seed(0)
    deployed = ldlt.deploy(nn.Sequential(nn.Linear(3, 5), nn.RReLU(), nn.Linear(5, 2)), input_shape=3).train()
    x = np.random.default_rng(0).normal(size=(9, 3))
    np.testing.assert_array_equal(deployed.predict(x), deployed.predict(x))
    assert deployed.network.training


def test_odd_inputs():
    deployed = network("feed-forward", torch.float32)[1]
    huge = np.full((1, 5), 1e300)  # infinite in float32
    lower, upper = deployed.predict_interval(huge, 0.1)
    assert np.isneginf(lower).all()
    assert np.isposinf(upper).all()
    assert (deployed.certified_radius(huge) == 0).all()
    tiny = np.full((1, 5), 1e-200)  # zero in float32, and so is the square of the distance in float64
    assert (deployed._inputs(tiny)[1] >= 2e-200).all()
    assert (deployed._inputs(np.ones((1, 5)))[1] == 0).all()
    with pytest.raises(ldlt.ShapeError, match="real"):
        deployed.predict(np.ones((1, 5)) * 1j)
    x = torch.ones(2, 5, requires_grad=True)
    assert deployed.predict(x).shape == (2, 3)
    assert deployed.certified_accuracy(x, [0, 0], 0.1).shape == (1,)


def test_cards_want_targets_of_the_shape_of_outputs():
    x = np.random.default_rng(0).normal(size=(20, 2))
    regressor = ldlt.LipschitzRegressor((4,), epochs=2, random_state=0).fit(x, x[:, 0])
    with pytest.raises(ldlt.ShapeError, match=r"\(20,\).*\(20, 1\)"):
        ldlt.model_card(regressor, x, x[:, :1])


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "net.safetensors"
    ldlt.save(ldlt.Lipschitz(Concatenation().double(), input_shape=5), path)
    return path


def parts(data):
    """Header and tensors of a file."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def whole(header, tensors):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def changed(saved, tmp_path, change):
    """The file with a changed header."""
    header, tensors = parts(saved.read_bytes())
    change(header)
    path = tmp_path / "changed.safetensors"
    path.write_bytes(whole(header, tensors))
    return path


def test_changed_weights_are_noticed(saved, tmp_path, capsys):
    data = bytearray(saved.read_bytes())
    data[-3] ^= 1  # one bit of one weight
    path = tmp_path / "net.safetensors"
    path.write_bytes(data)
    with pytest.raises(ldlt.CertificateError, match="a weight or the architecture was changed"):
        ldlt.load(path)
    assert main(["verify", str(path)]) == 1
    assert "a weight or the architecture was changed" in capsys.readouterr().out


def test_a_certificate_with_a_smaller_bound_is_not_believed(saved, tmp_path):
    loaded = ldlt.load(saved)
    better = dataclasses.replace(loaded.certificate, bound=loaded.certificate.bound / 2)
    path = changed(saved, tmp_path, lambda h: h["__metadata__"].update({"ldlt.certificate": better.to_json()}))
    assert ldlt.load(path).certificate.bound == better.bound  # it is stated ...
    with pytest.raises(ldlt.CertificateError, match="cannot be proven"):
        ldlt.verify(path)  # ... and not proven


def test_changed_onnx_files_are_noticed(tmp_path, capsys):
    path = tmp_path / "net.onnx"
    ldlt.export_onnx(network("feed-forward")[1], path)
    proto = onnx.load(path)
    tensor = next(t for t in proto.graph.initializer if len(t.dims) == 2)
    weight = onnx.numpy_helper.to_array(tensor).copy()
    weight[0, 0] += 1e-12
    tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    path.write_bytes(proto.SerializeToString())
    assert main(["verify", str(path)]) == 1
    assert "another network" in capsys.readouterr().out
    del proto.metadata_props[:]
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ldlt.CertificateError, match="carries no certificate"):
        ldlt.load(path)
    for _ in range(2):
        entry = proto.metadata_props.add()
        entry.key = "twice"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ldlt.OnnxError, match="two properties"):
        ldlt.load(path)


def test_other_files(tmp_path, saved):
    with pytest.raises(ldlt.OptionError, match="does not exist"):
        ldlt.load(tmp_path / "none.safetensors")
    with pytest.raises(ldlt.OptionError, match="not a file"):
        ldlt.load(tmp_path)
    with pytest.raises(ldlt.OptionError, match=r"'a\?b.safetensors' does not exist"):
        ldlt.load("a\0b.safetensors")
    for name, content, reason in (
        ("empty.safetensors", b"", "damaged"),
        ("random.safetensors", bytes(range(256)), "not a file of safetensors"),
        ("huge.safetensors", struct.pack("<Q", 2**60) + b"{}", "truncated"),
        ("foreign.safetensors", safetensors.torch.save({"w": torch.zeros(2)}), "'ldlt' is missing"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ldlt.SavedModelError, match=reason):
            ldlt.load(tmp_path / name)

    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    for suffix in ("safetensors", "pt", "onnx"):
        (tmp_path / f"pickle.{suffix}").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(ldlt.LdltError):
            ldlt.load(tmp_path / f"pickle.{suffix}")


def _program(header):
    return json.loads(header["__metadata__"]["ldlt"])


def _with_program(change):
    """Change the program in a header."""

    def run(header):
        about = _program(header)
        change(about)
        header["__metadata__"]["ldlt"] = json.dumps(about)

    return run


def _step(target, *args, select=None, **kwargs):
    return {"target": target, "args": list(args), "kwargs": kwargs, "select": select}


def _first(step):
    """Put a step in front of a program."""
    return lambda a: a["program"]["steps"].insert(0, step)


X = {"value": 0}
HOSTILE = {
    "format": lambda a: a.update(format="ldlt model 99"),
    "old format": lambda a: a.update(format="ldlt model 1"),
    "shape": lambda a: a.update(input_shape=[6]),
    "class": lambda a: a["program"]["layers"]["layer_0"].update({"class": "Bilinear"}),
    "option": lambda a: a["program"]["layers"].update(layer_0={"class": "PReLU", "options": {"num_parameters": 2**40}}),
    "option by name": lambda a: a["program"]["layers"]["layer_0"]["options"].update(device="cuda"),
    "name": lambda a: a["program"]["layers"].update({"forward": a["program"]["layers"].pop("layer_0")}),
    "kind": lambda a: a["program"]["tensors"].update(tensor_0="weight"),
    "function": _first(_step("os.system", "true")),
    "builtin": _first(_step("eval", X)),
    "attribute": _first(_step("aten.__class__.mro", X)),
    "namespace": _first(_step("prims.add.default", X, X)),
    "no overload": _first(_step("aten.add", X, X)),
    "overload": _first(_step("aten.add.none", X, X)),
    "deeper": _first(_step("aten.add.Tensor.op", X, X)),
    "into an argument": _first(_step("aten.add.out", X, X, out=X)),
    "in place": _first(_step("aten.add_.Tensor", X, X)),
    "activation": _first(_step("aten.relu.default", X)),
    "maximum": _first(_step("aten.amax.default", X, [1])),
    "random": _first(_step("aten.native_dropout.default", X, {"float": "0x1p-1"}, True, select=0)),
    "file": _first(_step("aten.from_file.default", "name")),
    "not linear": _first(_step("aten.mul.Tensor", X, X)),
    "memory": _first(_step("aten.repeat.default", X, {"list": [1, 10**9]})),
    "batch": _first(_step("aten.flip.default", X, {"list": [0]})),
    "select": _first(_step("aten.unbind.int", X, 1, select=-1)),
    "no element": _first(_step("aten.unbind.int", X, 1, select=9)),
    "layer of two": _first(_step("layer_0", X, X)),
    "layer by name": _first(_step("layer_0", X, inplace=True)),
    "later": lambda a: a["program"]["steps"][0]["args"].__setitem__(0, {"value": 3}),
    "nothing": lambda a: a["program"]["steps"][0].update(args=[]),
    "tensor": lambda a: a["program"]["steps"][0].update(args=[X, {"tensor": "tensor_99"}]),
    "result": lambda a: a["program"].update(result=0),
    "no steps": lambda a: a["program"].update(steps=[]),
    "deep": lambda a: a["program"]["steps"][0].update(args=[{"list": [{"list": [{"list": [{"list": [X]}]}]}]}]),
    "number": lambda a: a["program"]["steps"][0].update(args=[X, {"float": "nan"}]),
    "infinite": _first(_step("aten.add.Tensor", X, {"float": "inf"})),
    "text": lambda a: a["program"]["steps"][0].update(args=[X, "text"]),
    "role": lambda a: a["program"]["steps"][0].update(role="order"),
    "no program": lambda a: a.update(program=None),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_programs(kind, saved, tmp_path):
    path = changed(saved, tmp_path, _with_program(HOSTILE[kind]))
    with pytest.raises((ldlt.SavedModelError, ldlt.CertificateError)) as caught:
        ldlt.load(path)
    assert "\n" not in str(caught.value)


FORGED = {
    "reshape that is none": _step("aten.mul.Tensor", X, {"float": "0x1p+3"}),
    "scale": _step("aten.add.Tensor", X, X, alpha=7),
    "constant": _step("aten.add.Tensor", X, {"float": "0x1p+3"}),
    "repeated": _step("aten.index_select.default", X, 1, {"tensor": "tensor_9"}),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_file_cannot_say_what_its_operations_are(kind, tmp_path):
    """Certificates are about what the operations of a file compute: roles, scales and shapes are found by tracing."""
    net, deployed = network("feed-forward")
    data, tensors = encoding.encode(deployed.network)
    for step in data["steps"]:  # behind the forged one, everything is one later
        step["args"] = [{"value": a["value"] + 1} if isinstance(a, dict) and "value" in a else a for a in step["args"]]
    if kind == "repeated":
        data["tensors"]["tensor_9"], tensors["tensor_9"] = "buffer", torch.tensor([0] * 5)
    data["steps"].insert(0, FORGED[kind])
    data["result"] += 1
    forged = encoding.decode(data, tensors, (5,))
    with pytest.raises(ldlt.CertificateError, match="another network"):
        ldlt.verify(ldlt.Deployed(forged, deployed.certificate))
    own = ldlt.certify(forged, 5)
    steepest = torch.autograd.functional.jacobian(forged, torch.randn(5, dtype=torch.float64)[None])[0, :, 0]
    assert torch.linalg.matrix_norm(steepest, 2) <= own.bound
    assert ldlt.verify(own, forged).rigorous


def test_a_damaged_name_is_noticed(wine, tmp_path):
    path = tmp_path / "net.safetensors"
    ldlt.save(wine[1], path)
    header, tensors = parts(path.read_bytes())
    texts = header["__metadata__"]
    good = texts["ldlt.meaning"]
    for text, reason in (
        (good.replace('"c"', '"d"'), "names of classes or columns"),
        (good[:-1] + ', "task": "regression"}', "not JSON"),  # a member that is there twice
    ):
        assert text != good
        texts["ldlt.meaning"] = text
        path.write_bytes(whole(header, tensors))
        with pytest.raises(ldlt.SavedModelError, match=reason):
            ldlt.load(path)


def test_hostile_meanings(saved, tmp_path):
    good = json.loads(parts(saved.read_bytes())[0]["__metadata__"]["ldlt.meaning"])
    for change in (
        {"task": "magic"},
        {"classes": ["a"]},
        {"classes": [[]] * 3},
        {"features": ["a"]},
        {"features": 3},
        {"rows": -1},
        {"rows": 1.5},
        {"target": 2},
        {"trained_bound": "much"},
        {"architecture": "x" * 2000},
        {"more": 1},
    ):
        text = json.dumps(good | change)
        path = changed(saved, tmp_path, lambda h, t=text: h["__metadata__"].update({"ldlt.meaning": t}))
        with pytest.raises(ldlt.SavedModelError):
            ldlt.load(path)
    for name in ("ldlt", "ldlt.meaning", "ldlt.certificate"):
        for text in ("", "{", "null", "[" * 100_000, "NaN"):
            path = changed(saved, tmp_path, lambda h, n=name, t=text: h["__metadata__"].update({n: t}))
            with pytest.raises((ldlt.SavedModelError, ldlt.CertificateError)):
                ldlt.load(path)


@settings(max_examples=40)
@given(data=st.data())
def test_any_damage_ends_in_an_error_or_changes_nothing(data, saved, tmp_path_factory):
    original = saved.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "random", "insert", "json"]))
    if kind == "cut":
        found = original[: data.draw(st.integers(0, len(original) - 1))]
    elif kind == "flip":
        changed_bytes = bytearray(original)
        for place in data.draw(st.lists(st.integers(0, len(original) - 1), min_size=1, max_size=4)):
            changed_bytes[place] ^= data.draw(st.integers(1, 255))
        found = bytes(changed_bytes)
    elif kind == "random":
        found = data.draw(st.binary(max_size=200))
    elif kind == "insert":
        place = data.draw(st.integers(0, len(original)))
        found = original[:place] + data.draw(st.binary(min_size=1, max_size=8)) + original[place:]
    else:
        header, tensors = parts(original)
        about = _program(header)
        _mutate(about, data)
        header["__metadata__"]["ldlt"] = json.dumps(about)
        found = whole(header, tensors)
    path = tmp_path_factory.mktemp("damage") / "net.safetensors"
    path.write_bytes(found)
    try:
        loaded = ldlt.load(path)
    except ldlt.LdltError:
        return
    # Nothing that the fingerprint is about was hit.
    assert ldlt.verify(loaded).fingerprint == ldlt.load(saved).certificate.fingerprint


@settings(max_examples=40)
@given(data=st.data())
def test_any_damage_of_an_onnx_file(data, exported, tmp_path_factory):
    original = exported.read_bytes()
    found = bytearray(original[: data.draw(st.integers(0, len(original)))] if data.draw(st.booleans()) else original)
    for place in data.draw(st.lists(st.integers(0, len(found) - 1), max_size=3)) if found else []:
        found[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damage") / "net.onnx"
    path.write_bytes(found)
    try:
        loaded = ldlt.load(path)
    except ldlt.LdltError:
        return
    assert ldlt.verify(loaded).fingerprint == ldlt.load(exported).certificate.fingerprint


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "net.onnx"
    ldlt.export_onnx(network("feed-forward")[1], path)
    return path


def _mutate(node, data):
    """Replace one part of a JSON value by something else."""
    while isinstance(node, (dict, list)) and node:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or data.draw(st.booleans()):
            node[key] = data.draw(
                st.none()
                | st.booleans()
                | st.integers()
                | st.text(max_size=5)
                | st.just([])
                | st.just({"value": 1})
                | st.just({"batch": True})
                | st.just({"float": "inf"})
            )
            return
        node = node[key]


def test_the_lists_cover_each_other():
    assert set(encoding.LAYERS) >= {"MaxPool2d", "CircularConv", "ReLU", "MaxMin", "GroupSort"}
    for name, cls in encoding.LAYERS.items():
        assert name == cls.__name__
        assert issubclass(cls, nn.Module)
    assert storage.FORMAT.startswith("ldlt model")
    assert isinstance(network("residual")[1].network, Program)
