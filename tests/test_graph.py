"""The front door: what a module computes is what its graph says, or it is refused with a reason."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, spectral_norm

import ldlt
from ldlt.graph import Activation, Affine, Convolution, Wire, evaluate
from ldlt.graph.operations import TABLE, Operation, mixes, moves, register_operation
from ldlt.graph.trace import trace


class Run(nn.Module):
    """A function of a linear layer's output, and of the input."""

    def __init__(self, run, size=4, **parts):
        super().__init__()
        self.layer, self.run = nn.Linear(size, size), run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, self.layer(x))


class LoudConvolution(nn.Conv2d):
    def forward(self, x):
        return 20 * super().forward(x)


def alike(module, shape, batch=5):
    """The graph of a module computes what the module does, in float64."""
    module = module.double().eval()
    graph = trace(module, shape)
    x = torch.randn(batch, *shape, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(evaluate(graph, module, x.clone()), module(x.clone()), rtol=1e-10, atol=1e-12)
    return graph


SENTENCES = {
    "branch on the batch": (lambda s, x: 100 * x if x.shape[0] > 4 else x, "batches of some sizes"),
    "branch on a batch of one": (lambda s, x: 100 * x if x.shape[0] == 1 else x, "batch of one"),
    "branch on data": (lambda s, x: x if x.sum() > 0 else -x, "values of its input"),
    "item": (lambda s, x: x * float(x.max()), "values of its input"),
    "mean of the batch": (lambda s, x: x - x.mean(0, keepdim=True), "influence each other"),
    "rolled batch": (lambda s, x: x.roll(12, 0), "influence each other"),
    "overwritten samples": (lambda s, x: x.index_fill(0, torch.tensor([0]), 1.0), "no certified rule"),
    "counted rows": (lambda s, x: x * (1 + 100 * (x.new_ones(x.shape[0], 1).sum(0) // 10)), "one row per sample"),
    "numbered rows": (lambda s, x: x * (1 + torch.arange(x.shape[0])[:, None] // 10), "one row per sample"),
    "triangle": (lambda s, x: x.triu(-12), "influence each other"),
    "chosen samples": (lambda s, x: x[torch.zeros(2, dtype=torch.long)], "batch"),
    "batch merged": (lambda s, x: x.reshape(-1).reshape(-1, 4), "must stay the batch"),
    "Gram matrix": (lambda s, x: x @ x.T, "batch"),
    "product": (lambda s, x: x * x, "no global Lipschitz bound"),
    "normalised": (lambda s, x: F.normalize(x), "known slopes"),
    "exponential": (lambda s, x: x.exp(), "slopes are unbounded"),
    "layer normalisation": (lambda s, x: F.layer_norm(x, (4,)), "normalised by construction"),
    "batch statistics": (lambda s, x: F.batch_norm(x, None, None, training=True), "running"),
    "log-softmax": (lambda s, x: F.log_softmax(x, 1), "logits"),
    "noise": (lambda s, x: x + torch.randn(4), "random"),
    "precision": (lambda s, x: x.half().float(), "precision"),
    "jump": (lambda s, x: torch.where(x > 0, x, x + 1), "jumps"),
    "GLU": (lambda s, x: torch.cat([F.glu(x), F.glu(x)], 1), "gate"),
    "two outputs": (lambda s, x: (x, x), "exactly one tensor"),
    "the mode": (lambda s, x: 2 * x if s.training else x, "training"),
    "a constant": (lambda s, x: s.layer.bias, "depends on its input"),
    "a number": (lambda s, x: x * s.layer.bias[0].item(), "as a number"),
    "no features": (lambda s, x: x[:, 4:], "no features"),
    "an activation of nothing": (lambda s, x: torch.cat([x, x[:, 4:].relu()], 1), "no features"),
    "overflow": (lambda s, x: x * 1e300 * 1e300, "not finite"),
    "division by a zero": (lambda s, x: x / torch.tensor([1.0, 1, 0, 1]), "not finite"),
    "numpy": (lambda s, x: torch.from_numpy(x.detach().numpy()), "cannot be exported"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_refused_with_a_sentence(name):
    run, words = SENTENCES[name]
    with pytest.raises(ldlt.GraphError) as caught:
        trace(Run(run), (4,))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "layer", [nn.LSTM(4, 4), nn.GRU(4, 4), nn.RNN(4, 4), nn.TransformerEncoderLayer(4, 2, batch_first=True),
              nn.MultiheadAttention(4, 2, batch_first=True)], ids=lambda m: type(m).__name__
)  # fmt: skip
def test_layers_that_multiply_functions_of_the_input_are_refused(layer):
    with pytest.raises(ldlt.LdltError):
        trace(layer, (3, 4))


def test_constants_made_in_forward_that_are_not_finite_are_refused():
    with pytest.raises(ldlt.GraphError, match="finite"):
        trace(Run(lambda s, x: x + torch.tensor([1.0, float("inf"), 0, 0])), (4,))


class Loud(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return 20 * found if func is F.linear else found


class Moody(nn.LeakyReLU):
    negative_slope = property(lambda self: 0.1 if self.training else 20.0, lambda self, value: None)


class Restless(nn.Linear):
    def train(self, mode=True):
        with torch.no_grad():
            self.weight.mul_(3)
        return super().train(mode)


class Stubborn(nn.Linear):
    def train(self, mode=True):
        raise RuntimeError("no")


class Tracked(nn.Module):
    def forward(self, x):
        return 20 * x if x.requires_grad else x


def _holding(tensor):
    module = Run(lambda s, x: x)
    setattr(module, "extra", tensor) if isinstance(tensor, nn.Parameter) else module.register_buffer("extra", tensor)
    return module


ODD = {
    "gradients": lambda: nn.Sequential(Tracked(), nn.Linear(4, 2)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4)),
    "complex": lambda: _holding(nn.Parameter(torch.ones(2, dtype=torch.complex64))),
    "sparse": lambda: _holding(torch.eye(4).to_sparse()),
    "a parameter that multiplies": lambda: _holding(Loud(torch.ones(4))),
    "slopes that depend on the mode": lambda: nn.Sequential(nn.Linear(4, 4), Moody(), nn.Linear(4, 2)),
    "weights that depend on the mode": lambda: nn.Sequential(Restless(4, 4)),
    "no mode": lambda: nn.Sequential(Stubborn(4, 4)),
    "traced": lambda: torch.jit.trace(nn.Sequential(nn.Linear(4, 2)), torch.zeros(2, 4)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("name", ODD)
def test_odd_modules_are_refused(name):
    module = ODD[name]()
    for call in (lambda: ldlt.certify(module, 4), lambda: ldlt.Lipschitz(module, input_shape=4)):
        with pytest.raises(ldlt.GraphError):
            call()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_networks_in_half_precision_are_refused(dtype):
    net = ldlt.Lipschitz(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), input_shape=4).to(dtype)
    for call in (net.explicit, net.freeze, net.pair_bounds, lambda: net(torch.zeros(2, 4, dtype=dtype))):
        with pytest.raises(ldlt.GraphError):
            call()


TRUE = {
    "rsub": lambda s, x: torch.rsub(x, s.layer.bias, alpha=7),
    "rsub of two": lambda s, x: torch.rsub(x, s.layer(x), alpha=7),
    "sub": lambda s, x: torch.sub(s.layer(x), x, alpha=-7),
    "bias of one entry": lambda s, x: F.linear(x, 9 * s.layer.weight, s.layer.bias[:1]),
    "numbers": lambda s, x: torch.stack([(x[:, 0] + 5 * x[:, 1]).relu(), 3 * x[:, 2]], 1),
}


@pytest.mark.parametrize("name", TRUE)
def test_certified_at_its_true_constant(name):
    module = Run(TRUE[name]).double()
    x, y = torch.randn(2, 200, 4, dtype=torch.float64)
    with torch.no_grad():
        slope = ((module(x) - module(y)).norm(dim=1) / (x - y).norm(dim=1)).max()
    assert 0.5 * ldlt.certify(module, 4).bound < float(slope) <= ldlt.certify(module, 4).bound


@pytest.mark.parametrize(("name", "rule"), [("cumsum", moves), ("cumsum", TABLE["neg"].rule), ("erf", mixes)])
def test_a_rule_that_is_not_true_is_found_out(name, rule, monkeypatch):
    monkeypatch.setitem(TABLE, name, Operation(rule))
    with pytest.raises(ldlt.GraphError):
        trace(Run(lambda s, x: x.cumsum(1) if name == "cumsum" else x.erf()), (4,))


class Everything(nn.Module):
    """What a tracer that does not follow views, constants or overwritten tensors would get wrong."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Softsign(), nn.Dropout(), nn.ReLU(inplace=True))
        self.norm, self.tied = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.rand(4))

    def forward(self, x):
        h = F.softsign(self.norm(self.first(x))).clamp(min=0) + torch.tensor([1.0, 2, 3, 4])
        h = h + torch.zeros(x.shape[0], 4)
        h += x.new_ones(x.shape[0], 1) * x
        h[:, :1].mul_(3.0)
        h[:, 1:2] = 0.5
        h[:, 2:3] = x[:, :1]
        wide = torch.zeros(x.shape[0], 6, dtype=x.dtype)
        wide[:, 1:5] = F.dropout(h, 0.5, self.training)
        pooled = F.max_pool1d(wide[:, None], 3, 2, 1).flatten(1)
        tied = F.linear(x, self.tied.weight * self.mask) + self.tied(F.softmax(x, 1))
        return torch.cat([pooled, tied, F.pad(x, (1, 1), value=2.0), torch.sort(x, 1)[0], x.amin(1, keepdim=True)], 1)


def test_the_graph_is_what_the_module_computes():
    graph = alike(Everything(), (4,))
    assert [a.weight for a in graph.affines] == ["first.0.weight"]  # the other one is used twice
    again = pickle.loads(pickle.dumps(copy.deepcopy(graph)))
    assert again.nodes[-1] == graph.nodes[-1]
    assert list(again.constants) == list(graph.constants)


def test_a_subclass_is_what_its_forward_computes():
    module = nn.Sequential(
        LoudConvolution(1, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)
    )
    graph = alike(module, (1, 4, 4))
    assert any(isinstance(n, Wire) and n.scales == (20.0,) for n in graph.nodes)


def test_global_hooks_are_part_of_the_graph():
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, _i, output: 3 * output if isinstance(m, nn.ReLU) else None
    )
    try:
        graph = alike(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (4,))
    finally:
        handle.remove()
    assert any(isinstance(n, Wire) and n.scales == (3.0,) for n in graph.nodes)


def test_parametrised_weights_are_given_maps():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    graph = alike(module, (4,))
    assert [a.weight for a in graph.affines] == ["2.weight"]
    with pytest.raises(ldlt.GraphError, match="training"):  # its power iteration runs in training only
        trace(nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2)), (4,))


LAYERS = {
    "circular": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 4, 4), Convolution),
    "zeros": (nn.Conv2d(3, 4, 3, padding=1), (3, 4, 4), Wire),
    "patches": (nn.Conv2d(3, 4, 2, stride=2), (3, 4, 4), Convolution),
    "same": (nn.Conv1d(3, 4, 3, padding="same", padding_mode="circular"), (3, 6), Convolution),
    "transposed": (nn.ConvTranspose2d(3, 2, 2, stride=2), (3, 2, 2), Convolution),
    "tokens": (nn.Linear(4, 5), (3, 4), Wire),
    "vector": (nn.Linear(4, 5), (4,), Affine),
    "frozen": (nn.Linear(4, 5).requires_grad_(False), (4,), Wire),
}


@pytest.mark.parametrize("name", LAYERS)
def test_which_maps_are_free(name):
    layer, shape, kind = LAYERS[name]
    with torch.no_grad():
        size = layer(torch.zeros(1, *shape)).numel()
    graph = alike(nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(size, 2)), shape)
    first = next(n for n in graph.nodes if n.name in ("_0", "_0__map"))
    assert type(first) is kind


def test_names_follow_the_layers():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.encoder(x) + x)

    names = [n.name for n in trace(Named(), (4,)).nodes]
    assert names[1:] == ["encoder_0", "encoder_1", "add", "head"]


def test_joint_nonlinearities_keep_their_groups():
    graph = alike(nn.Sequential(nn.Linear(4, 6), ldlt.activations.MaxMin(), nn.Softmax(1), nn.Linear(6, 2)), (4,))
    kinds = [type(n.module or graph).__name__ for n in graph.nodes if isinstance(n, Activation)]
    assert len(kinds) == 2


@pytest.mark.parametrize(("names", "rule"), [("", lambda reader, node: None), ("col2im", None), ("  ", None)])
def test_the_table_takes_names_and_rules_only(names, rule):
    with pytest.raises(ldlt.OptionError, match="a name and a rule"):
        register_operation(names, rule)
    assert "col2im" not in TABLE


def test_covariances_that_would_be_too_large_are_refused_before_they_are_made():
    """A given map on a large image: three times 64 × 64 inputs, eight channels of 64 × 64 behind it."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64 * 64, 2))
    with pytest.raises(ldlt.GraphError, match="circular"):
        ldlt.Lipschitz(module, input_shape=(3, 64, 64), convolutions="normalised")
