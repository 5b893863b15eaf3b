"""Certificates per frequency: never below the optimum of the whole matrix, proven, and the same from a file."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ldlt
from ldlt import lmi
from ldlt.certificates.convolutional import TorusProblem
from ldlt.certificates.eliminate import LEAST, prove_on_torus
from ldlt.certificates.fingerprint import traced
from ldlt.certificates.near import Near, positive_by, roots
from ldlt.certificates.problem import Problem
from ldlt.certificates.settle import settle_on_torus
from ldlt.certificates.solve import minimise, product
from ldlt.certificates.torus import TorusNetwork, Untreated


class Block(nn.Module):
    """A residual block of ordinary code."""

    def __init__(self, c, d, stride=1, first=False):
        super().__init__()
        self.one, self.two = nn.Conv2d(c, d, 3, padding=1, stride=stride), nn.Conv2d(d, d, 3, padding=1)
        self.norm, self.first = nn.BatchNorm2d(d), first
        self.short = nn.Conv2d(c, d, 1, stride=stride) if (c, stride) != (d, 1) else nn.Identity()

    def forward(self, x):
        if self.first:  # activation first: the sum spills over
            return self.short(x) + self.two(torch.relu(self.norm(self.one(torch.relu(x)))))
        return torch.relu(self.short(x) + self.two(torch.relu(self.norm(self.one(x)))))


class Spilled(nn.Module):
    """A sum that is not zero outside of the image, read by a convolution."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))

    def forward(self, x):
        return self.c(x + self.b(torch.relu(self.a(x)))).flatten(1)


class Mixed(nn.Module):
    """Concatenations, slices of channels, padding."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding="same", dilation=2), nn.Conv2d(4, 2, 3, groups=2)
        self.l = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x):
        y = torch.relu(torch.cat([x, 0.5 * self.a(x)[:, :2]], 1))
        first, second = y.chunk(2, 1)
        z = self.b(F.pad(y, (1, 1, 1, 1)))
        z = F.leaky_relu(z - first + second, 0.2)
        return self.l(torch.cat([z, 2 * first], 1).flatten(1))


def conv(*args, **options):
    return nn.Conv2d(*args, **({"padding": 1} | options))


NETWORKS = {
    "chain": lambda: (
        nn.Sequential(
            conv(2, 3, 3),
            nn.ReLU(),
            conv(3, 4, 4, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(36, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        ),
        (2, 6, 6),
    ),
    "valid": lambda: (
        nn.Sequential(
            conv(1, 3, 3, padding=0),
            nn.ReLU(),
            conv(3, 2, 3, padding=0, bias=False),
            nn.Flatten(),
            nn.PReLU(),
            nn.Linear(8, 2),
        ),
        (1, 6, 6),
    ),
    "circular": lambda: (
        nn.Sequential(
            conv(2, 3, 3, padding_mode="circular"),
            nn.LeakyReLU(0.3),
            conv(3, 3, 2, padding=0, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(27, 3),
        ),
        (2, 6, 6),
    ),
    "residual": lambda: (
        nn.Sequential(
            conv(2, 3, 3),
            nn.ReLU(),
            Block(3, 3),
            Block(3, 4, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        (2, 6, 6),
    ),
    "activation first": lambda: (
        nn.Sequential(
            conv(2, 3, 3),
            Block(3, 3, first=True),
            Block(3, 4, 2, first=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        (2, 6, 6),
    ),
    "spilled": lambda: (Spilled(), (2, 5, 5)),
    "mixed": lambda: (Mixed(), (2, 6, 6)),
    "maxima": lambda: (
        nn.Sequential(
            conv(2, 3, 3),
            nn.MaxPool2d(2),
            conv(3, 3, 3),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        (2, 8, 8),
    ),
    "global maximum": lambda: (
        nn.Sequential(conv(1, 3, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(3, 2)),
        (1, 5, 5),
    ),
    "pools": lambda: (
        nn.Sequential(
            conv(1, 4, 3),
            ldlt.activations.MaxMin(),
            nn.AvgPool2d(3, 2, 1),
            conv(4, 4, 3, groups=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        (1, 7, 7),
    ),
    "signals": lambda: (
        nn.Sequential(
            nn.Conv1d(2, 3, 5, stride=3, padding=2),
            nn.ReLU(),
            nn.Conv1d(3, 3, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(9, 2),
        ),
        (2, 9),
    ),
}


def built(name, seed, gain=1.5):
    torch.manual_seed(seed)
    net, shape = NETWORKS[name]()
    net = net.double().eval()
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Linear)):
                m.weight *= gain
            if isinstance(m, nn.BatchNorm2d):
                m.running_var.uniform_(0.3, 2)
                m.weight.uniform_(-2, 2)
    return net, shape


def check(name, seed):
    net, shape = built(name, seed)
    graph = traced(net, shape)
    network = TorusNetwork(graph, net)
    problem = TorusProblem.on(network)
    found = minimise(problem, tolerance=1e-2)
    proof = settle_on_torus(network, found.multipliers, found.bound)
    assert proof.holds, proof.reason
    assert proof.bound == pytest.approx(found.bound, rel=1e-3)
    assert proof.bound <= product(problem)[0] * (1 + 1e-6)
    assert not prove_on_torus(network, proof.multipliers, 0.9 * proof.bound).holds
    best = minimise(Problem.build(graph, net), tolerance=1e-2)
    assert best.lower <= proof.bound * (1 + 1e-6)  # no multipliers at all prove less
    x = torch.randn(40, *shape, dtype=torch.float64)
    jacobians = torch.autograd.functional.jacobian(lambda v: net(v).sum(0), x).movedim(1, 0).flatten(2)
    assert float(torch.linalg.matrix_norm(jacobians, 2).max()) <= proof.bound
    if set(proof.multipliers) == {a.name for a in graph.activations}:  # nothing was masked
        matrix = lmi.from_graph(graph, net, dict(net.named_parameters()), proof.multipliers, proof.bound)
        assert matrix.residual >= -1e-9
    return proof.bound / best.bound


@pytest.mark.parametrize("name", NETWORKS)
def test_no_bound_below_the_optimum(name):
    assert check(name, 0) >= 1 - 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_no_bound_below_the_optimum_of_many(name):
    for seed in range(1, 13):
        assert check(name, seed) >= 1 - 1e-6


def large():
    torch.manual_seed(0)
    net = nn.Sequential(conv(2, 4, 3), nn.ReLU(), Block(4, 4), conv(4, 4, 4, stride=2), nn.Flatten(), nn.Linear(196, 5))
    return net.eval(), (2, 14, 14)


def test_one_call_certifies_and_verifies(tmp_path):
    net, shape = large()
    found = ldlt.certify(net, shape, tolerance=1e-2)
    assert found.rigorous
    assert "channel" in found.method
    assert found.bound < ldlt.certify(net, shape, method="product").bound
    assert bool((found.pair_bounds() <= 2**0.5 * found.bound * (1 + 1e-12)).all())
    slope = ldlt.attack.lipschitz_lower_bound(net, shape, starts=4, steps=10).value
    assert slope <= found.bound
    found.save(tmp_path / "net.cert.json")
    assert ldlt.verify(tmp_path / "net.cert.json", net).bound == found.bound
    for change in ({"bound": 0.9 * found.bound}, {"gram": 0.5 * found.gram}):
        with pytest.raises(ldlt.CertificateError):
            ldlt.verify(dataclasses.replace(found, **change), net)


def test_a_search_that_is_stopped_keeps_the_best():
    net, shape = large()

    def stop(step):
        raise KeyboardInterrupt

    for found in (ldlt.certify(net, shape, progress=stop), ldlt.certify(net, shape, time_limit=0)):
        assert found.rigorous
        assert ldlt.verify(found, net).rigorous


def test_parts_without_signal():
    net, shape = large()
    with torch.no_grad():
        net[0].weight[:2] = 0.0  # dead channels
        net[3].weight[:, 3] = 0.0
        found = ldlt.certify(net, shape, time_limit=0)
        assert found.rigorous
        net[0].weight.zero_()  # constant
        with pytest.raises(Untreated):
            TorusNetwork(traced(net, shape), net)


def test_what_has_no_torus_says_so():
    for net in (
        nn.Sequential(conv(1, 2, 3, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2)),
        nn.Sequential(nn.ConvTranspose2d(1, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2)),
    ):
        with pytest.raises(Untreated):
            TorusNetwork(traced(net, (1, 8, 8)), net)
    assert LEAST > 1000


def test_too_much_memory_is_refused_before_it_is_used():
    net = nn.Sequential(conv(3, 512, 3), nn.ReLU(), conv(512, 1, 3, stride=64), nn.Flatten())
    with pytest.raises(Untreated, match="GiB"):
        TorusNetwork(traced(net, (3, 128, 128)), net)


def test_roots_of_unity_and_eigenvalues():
    for n in (1, 2, 3, 8, 36, 101):
        unit = roots(n)
        assert float((unit.abs() - 1).abs().max()) < 1e-15
        assert float((unit[1 % n] * unit - unit.roll(-1)).abs().max()) < 1e-15
    torch.manual_seed(0)
    factor = torch.randn(4, 12, 12, dtype=torch.complex128)
    matrix = factor @ factor.mH
    least = torch.linalg.eigvalsh(matrix)[:, 0]
    exact = Near(matrix, torch.zeros(4, dtype=torch.float64))
    assert bool(positive_by(exact, least - 1e-9).all())
    assert not bool(positive_by(exact, least + 1e-9).any())
    assert not bool(positive_by(Near(matrix, 2e-6 * torch.ones(4, dtype=torch.float64)), least - 1e-6).any())
