"""Protocols, recorded programs, stacked training and scoring of the benchmark."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from ldlt import Lipschitz, attack
from ldlt.errors import OptionError
from ldlt_bench.data import Dataset, Embedded
from ldlt_bench.study.family import AS_LDLT, FAMILIES, GRIDS, Start, find_family
from ldlt_bench.study.models import Model, build, flatten, load, unflatten
from ldlt_bench.study.protocol import (
    CURVE,
    LOSSES,
    PROTOCOLS,
    RADII,
    Loss,
    Protocol,
    network_width,
    read_starts,
    shortened,
)
from ldlt_bench.study.training import Folds, Net, Score, Stack, Trainer, margin_loss, score
from ldlt_bench.study.unit import Unit, estimate_cost, run_unit, together

# -- protocol --------------------------------------------------------------------------------------------------------


def test_protocol_is_the_papers() -> None:
    paper = PROTOCOLS["paper"]
    assert (paper.depth, paper.epochs, paper.patience, paper.plateau, paper.weight_decay) == (4, 100, 30, 8, 1e-4)
    assert [(c.learning_rate, c.loss) for c in paper.candidates] == [(1e-3, "cross-entropy")]
    assert [round(255 * r) for r in RADII.values()] == [36, 72, 108, 255]
    tuned = PROTOCOLS["tuned"]
    assert len(tuned.candidates) == 10
    differ = {name for name in paper.__dataclass_fields__ if getattr(paper, name) != getattr(tuned, name)}
    assert differ == {"name", "candidates", "rungs", "starts"}


def test_every_family_is_treated_alike() -> None:
    """Equally many settings of the start are tried for each, and each begins as published."""
    tried = {name: sum(len(values) - 1 for values in grid.values()) for name, grid in GRIDS.items()}
    assert set(GRIDS) == set(FAMILIES)
    assert len(set(tried.values())) == 1
    for grid in GRIDS.values():
        assert all(values[0] == getattr(Start(), knob) for knob, values in grid.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_start_changes_the_training(family: str) -> None:
    plain = build(family, 5, 8, 2, 3, 0)
    for knob, values in GRIDS[family].items():
        for value in values[1:]:
            moved = build(family, 5, 8, 2, 3, 0, replace(Start(), **{knob: value}))
            same = torch.equal(flatten(plain), flatten(moved)) if len(flatten(plain)) == len(flatten(moved)) else False
            without = knob == "rate" or (knob in ("placing", "bias_scale") and family == "LDLT-R as printed")
            assert same == without, (knob, value)


def test_sandwich_as_ldlt_is_the_same_network() -> None:
    x = torch.randn(7, 5)
    start = Start(contraction="cayley", gain=0.6, placing=0.5, bias_scale=3.0)
    chain, twin = (build(name, 5, 32, 4, 3, 1, start) for name in ("LDLT-L", AS_LDLT))
    torch.testing.assert_close(twin.module(x), chain.module(x))
    torch.testing.assert_close(twin.pair_bounds(), chain.pair_bounds(), rtol=1e-5, atol=1e-6)


def test_starts_from_a_file(tmp_path) -> None:
    path = tmp_path / "starts.json"
    path.write_text('{"starts": {"SLL": {"gain": 2.0, "init": "orthogonal"}}, "sets": ["a"]}')
    assert read_starts(path) == {"SLL": Start(gain=2.0, init="orthogonal")}
    for bad in ('{"starts": {"SLL": {"gain": "x"}}}', "{}", '{"starts": {"Nobody": {}}}'):
        path.write_text(bad)
        with pytest.raises(OptionError):
            read_starts(path)


def test_start_reaches_the_network() -> None:
    """Contraction, placing and gain of the start are those of the network; the family's contraction goes before."""
    start = Start(contraction="cayley", gain=0.5, placing=0.0, bias_scale=4.0)
    model = build("LDLT-L", 5, 32, 4, 3, 0, start)
    assert isinstance(model.module, Lipschitz)
    assert "skew" in dict(model.module.named_children())
    contracted = model.module.explicit()["0.weight"].detach() / 2**0.5  # √2 U
    assert float(torch.linalg.matrix_norm(contracted, 2)) == pytest.approx(0.5 / 1.25**0.5, rel=1e-5)
    placed = build("LDLT-L", 5, 32, 4, 3, 0, replace(start, placing=1.0))
    assert float(placed.module.get_parameter("module.0.bias").detach().mean()) > 0.1
    assert abs(float(model.module.get_parameter("module.0.bias").detach().mean())) < 0.1
    assert model.scales["module.0.bias"] == 4.0
    other = build("LDLT-L:symmetric", 5, 32, 4, 3, 0, start)
    assert "skew" not in dict(other.module.named_children())


def test_width_rule() -> None:
    assert [network_width(n, 2) for n in (3, 8, 9, 11, 12, 22, 23, 262)] == [32, 32, 32, 32, 64, 64, 128, 512]
    assert network_width(36, 2) == 128
    assert network_width(18, 11) == 64  # 90 -> 2^6.49
    assert network_width(19, 11) == 128  # 95 -> 2^6.57
    widths = {network_width(n, m) for n in range(1, 400) for m in (2, 11, 100)}
    assert widths == {32, 64, 128, 256, 512}


@given(st.integers(1, 10**6))
def test_steps_per_epoch(rows: int) -> None:
    protocol = PROTOCOLS["paper"]
    steps = protocol.steps(rows)
    assert 1 <= steps <= min(rows, 32)
    if rows >= 4:
        assert steps >= 4
    if 1024 <= rows <= 32 * 256:
        assert steps == math.ceil(rows / 256)


def test_start_values_are_part_of_the_fingerprint_of_their_family() -> None:
    before, after = PROTOCOLS["paper"], replace(PROTOCOLS["paper"], starts={"LDLT-L": Start(alpha=0.5)})
    changed = {name for name in (*FAMILIES, "LDLT-L:cayley") if before.fingerprint(name) != after.fingerprint(name)}
    assert changed == {"LDLT-L", "LDLT-L:cayley"}


def test_fingerprint_tells_settings_apart() -> None:
    prints = {p.fingerprint("AOL") for p in (*PROTOCOLS.values(), replace(PROTOCOLS["paper"], epochs=99))}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("LOSSES", LOSSES | {"margin": Loss("margin", 1.0, 0.5)}),
        ("RADII", RADII | {"cert_36": 0.2}),
        ("CURVE", (0.0, 1.0)),
        ("RULES", 0),
    ],
)
def test_fingerprint_knows_the_numbers_behind_the_names(monkeypatch, place: str, value: object) -> None:
    before = {family: PROTOCOLS["tuned"].fingerprint(family) for family in FAMILIES}
    monkeypatch.setattr(f"ldlt_bench.study.protocol.{place}", value)
    assert all(PROTOCOLS["tuned"].fingerprint(family) != before[family] for family in FAMILIES)
    assert Protocol("paper").fingerprint("AOL") == PROTOCOLS["paper"].fingerprint("AOL")


def test_shortened() -> None:
    short = shortened(PROTOCOLS["tuned"], 10)
    assert short.epochs == 10
    assert short.rungs == ((1, 4), (1, 2), (2, 1))
    assert shortened(PROTOCOLS["paper"], 500) is PROTOCOLS["paper"]
    with pytest.raises(OptionError, match="at least 1"):
        shortened(PROTOCOLS["paper"], 0)


# -- programs --------------------------------------------------------------------------------------------------------


# -- stack -----------------------------------------------------------------------------------------------------------

SOUND = [*FAMILIES, "LDLT-L:symmetric", "LDLT-R:cayley"]


def _models(family: str, count: int, width: int = 8, dtype: torch.dtype = torch.float64) -> list[Model]:
    models = [build(family, 5, width, 2, 3, seed) for seed in range(count)]
    for model in models:
        model.module.to(dtype)
    return models


@pytest.mark.parametrize("family", SOUND)
def test_stacked_gradients_are_those_of_single_networks(family: str) -> None:
    models = _models(family, 3)
    flat = torch.stack([flatten(model) for model in models])
    n, batch = 3, 6
    x = torch.randn(n, batch, 5, dtype=torch.float64)
    labels = torch.randint(0, 3, (n, batch))
    weights = torch.rand(n, batch, dtype=torch.float64)
    weights[1, 4:] = 0  # a batch that was filled up
    offset = torch.tensor([0.0, 1.4, 0.3]).double()
    temperature = torch.tensor([1.0, 0.25, 0.5]).double()
    stack = Stack(models[0])
    for _ in range(2):  # recorded, then replayed on other values
        grad, loss = stack.gradient(flat, x, labels, weights, offset, temperature)
        for i in range(n):
            row = flat[i].clone().requires_grad_()
            logits = functional_call(models[0].module, unflatten(models[0], row), (x[i],))
            single = (margin_loss(logits, labels[i], offset[i], temperature[i]) * weights[i]).sum() / weights[i].sum()
            single.backward()
            torch.testing.assert_close(loss[i], single.detach())
            torch.testing.assert_close(grad[i], row.grad, rtol=1e-7, atol=1e-9)
            alone, _ = stack.gradient(*(t[i : i + 1] for t in (flat, x, labels, weights, offset, temperature)))
            torch.testing.assert_close(grad[i], alone[0], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(
            stack.logits(flat, x)[2], functional_call(models[0].module, unflatten(models[0], flat[2]), (x[2],))
        )
        flat = flat + 0.05 * torch.randn_like(flat)
        x = torch.randn_like(x)


def test_loading_a_row_gives_the_network() -> None:
    models = [build("LDLT-R", 5, 8, 2, 3, seed, Start(bias_scale=10.0)) for seed in range(2)]
    for model in models:
        model.module.double()
    assert set(models[0].scales.values()) == {10.0}
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = models[1].module(x)
    load(models[0], flatten(models[1]))
    torch.testing.assert_close(models[0].module(x), expected)


def test_margin_loss_is_cross_entropy() -> None:
    logits, labels = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 4, (7,))
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(margin_loss(logits, labels, zero, one), expected)
    plain, margin = LOSSES["cross-entropy"], LOSSES["margin"]
    assert (plain.offset, plain.temperature) == (0.0, 1.0)
    o, t = torch.tensor(margin.offset).double(), torch.tensor(margin.temperature).double()
    shifted = logits.clone()
    shifted[torch.arange(7), labels] -= o
    expected = t * torch.nn.functional.cross_entropy(shifted / t, labels, reduction="none")
    torch.testing.assert_close(margin_loss(logits, labels, o, t), expected)


# -- training --------------------------------------------------------------------------------------------------------

QUICK = replace(PROTOCOLS["paper"], epochs=4)


def test_batches_deal_training_rows_and_no_others() -> None:
    dataset = Embedded().load("wine")
    folds = Folds(dataset, range(4), QUICK)
    for fold in range(4):
        split = dataset.split(fold)
        for epoch in range(2):
            rows = folds.batches(fold, 0, epoch)
            assert rows.shape == (folds.steps, folds.batch)
            assert sorted(rows[rows >= 0] - fold * dataset.rows) == sorted(split.train)
            assert (np.sum(rows >= 0, axis=1) >= folds.batch - 1).all()
        assert not np.array_equal(folds.batches(fold, 0, 0), folds.batches(fold, 0, 1))
        assert not np.array_equal(folds.batches(fold, 0, 0), folds.batches(fold, 1, 0))
        assert np.array_equal(folds.batches(fold, 1, 3), folds.batches(fold, 1, 3))


def test_class_weights_are_balanced() -> None:
    dataset = Embedded().load("balance-scale")
    folds = Folds(dataset, range(4), QUICK)
    for fold in range(4):
        rows = folds.batches(fold, 0, 0)
        _, labels, weights = folds.gather(torch.from_numpy(rows))
        assert (weights[torch.from_numpy(rows < 0)] == 0).all()
        sums = [float(weights[labels == c].sum()) for c in range(3)]
        np.testing.assert_allclose(sums, len(dataset.split(fold).train) / 3, rtol=1e-5)


def _trainer(protocol: Protocol, count: int = 1) -> Trainer:
    """In float64: Adam turns gradients of the size of rounding errors into full steps, unless they are below its ε."""
    dataset = Embedded().load("iris")
    models = [build("AOL", 4, 8, 2, 3, seed) for seed in range(count)]
    for model in models:
        model.module.double()
    nets = [Net(i % 4, 0, 0) for i in range(count)]
    folds = Folds(dataset, range(4), protocol, torch.float64)
    return Trainer(Stack(models[0]), torch.stack([flatten(model) for model in models]), nets, folds, protocol, count)


def test_schedule_halves_and_stops() -> None:
    protocol = replace(PROTOCOLS["paper"], plateau=3, patience=7)
    trainer = _trainer(protocol)
    index = torch.tensor([0])
    accuracies = [0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.9]
    losses = [1.0, 1.0, 0.9, 0.95, 0.8, math.nan, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    rates, kept = [], []
    for epoch, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), 1):
        if not trainer.active[0]:
            break
        flat = torch.full_like(trainer.flat, float(epoch))
        trainer._judge(index, flat, torch.tensor([accuracy]), torch.tensor([loss]).double(), epoch)
        rates.append(round(1e-3 / float(trainer.rate[0])))
        kept.append(int(trainer.best[0, 0]))
    # better at 1, 2 and 7; equal with a smaller loss at 3 and 5; halved after three epochs without a better one
    assert kept == [1, 2, 3, 3, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7]
    assert rates == [1, 1, 1, 1, 2, 2, 2, 2, 2, 4, 4, 4, 8, 8]
    assert len(rates) == 14  # seven epochs after the best one, and the 0.9 is never seen
    assert int(trainer.best_epoch[0]) == 7


def test_a_stack_trains_as_its_members_do() -> None:
    together_ = _trainer(QUICK, 4)
    together_.run()
    alone = _trainer(QUICK, 4)
    alone.together = 1
    alone.run()
    torch.testing.assert_close(together_.flat, alone.flat, rtol=1e-7, atol=1e-8)
    assert torch.equal(together_.best_accuracy, alone.best_accuracy)
    assert not torch.allclose(together_.flat, _trainer(QUICK, 4).flat)


def _poisoned(dataset: Dataset, fold: int) -> Dataset:
    """The data set with everything changed in the test rows of a fold."""
    features, labels = dataset.features.copy(), dataset.labels.copy()
    rows = dataset.split(fold).test
    features[rows] = -7 * features[rows] + 3
    labels[rows] = (labels[rows] + 1) % len(dataset.classes)
    return replace(dataset, features=features, labels=labels)


def test_nothing_depends_on_test_rows() -> None:
    dataset = Embedded().load("iris")
    protocol = shortened(PROTOCOLS["tuned"], 6)
    unit = Unit("tuned", "iris", "Sandwich")
    honest = run_unit(unit, protocol, dataset, [0])[2]
    poisoned = run_unit(unit, protocol, _poisoned(dataset, 2), [0])[2]
    assert honest["fold"] == poisoned["fold"] == 2
    for column in ("validation_score", "learning_rate", "loss", "epochs", "best_epoch", "bound"):
        assert honest[column] == poisoned[column], column
    assert honest["accuracy"] != poisoned["accuracy"]


def test_search_keeps_the_best_on_validation_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Embedded().load("wine")
    six = PROTOCOLS["tuned"].candidates[:6]
    protocol = replace(PROTOCOLS["tuned"], epochs=6, rungs=((2, 3), (4, 1)), candidates=six)
    folds = Folds(dataset, [0], protocol)
    model = build("AOL", dataset.columns, 8, 2, 3, 0)
    nets = [Net(0, 0, c) for c in range(6)]
    trainer = Trainer(Stack(model), flatten(model).expand(6, -1), nets, folds, protocol, 6)
    (winner,) = trainer.run()
    epochs = trainer.epochs.tolist()
    assert sorted(epochs) == [2, 2, 2, 4, 4, 6]
    assert epochs[winner] == 6
    ranks = [(0.2, 0.0), (0.5, 0.1), (0.5, 0.3), (0.1, 0.9), (0.5, 0.2), (0.4, 0.9)]

    def judged(index: int, which: str) -> Score:
        assert which == "validation"
        accuracy, radius = ranks[index]
        return Score({"accuracy": accuracy}, [], radius)

    monkeypatch.setattr(trainer, "score", judged)
    assert trainer._select(list(range(6)), 2) == [2, 4]  # equal scores: the larger mean radius
    assert trainer._select([0, 3, 5], 1) == [5]


def survivors(module: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor, radius: float) -> float:
    """Share of rows whose class stays right under projected gradient steps within a Euclidean ball."""
    classes = module(x).shape[1]
    right = torch.ones(len(x), dtype=torch.bool)
    for other in range(classes):
        delta = torch.zeros_like(x)
        for step in range(25):
            delta.requires_grad_(True)
            logits = module(x + delta)
            gap = logits[:, other] - logits.gather(1, labels[:, None])[:, 0]
            right &= (gap.detach() < 0) | (labels == other)
            (slope,) = torch.autograd.grad(gap.sum(), delta)
            delta = delta.detach() + radius / (2 + step) * slope / slope.norm(dim=1, keepdim=True).clamp_min(1e-12)
            delta = delta * (radius * (1 - 1e-6) / delta.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1.0)
    return float(right.double().mean())


@pytest.mark.parametrize("family", ["Sandwich", "LDLT-R", "SLL"])
def test_certified_radii_withstand_an_attack(family: str) -> None:
    dataset = Embedded().load("iris")
    model = build(family, 4, 16, 2, 3, 0)
    folds = Folds(dataset, range(4), QUICK)
    trainer = Trainer(Stack(model), flatten(model)[None], [Net(0, 0, 0)], folds, replace(QUICK, epochs=30), 1)
    trainer.run()
    load(model, trainer.best[0])
    x, labels = folds.part(0, "test")
    found = score(model, x, labels)
    assert found.metrics["accuracy"] >= found.metrics["cert_36"] >= found.metrics["cert_255"]
    assert found.curve[0] <= found.metrics["accuracy"]
    assert all(a >= b for a, b in zip(found.curve, found.curve[1:], strict=False))
    # Certified is what no attack breaks: the shares stay below those that survive a steepest ascent inside the ball.
    for radius, share in zip(CURVE[:21:2], found.curve[:21:2], strict=True):
        assert share <= survivors(model.module, x, labels, radius)
    assert survivors(model.module, x, labels, 0.0) == found.metrics["accuracy"]
    pairs = model.pair_bounds()
    steep = attack.lipschitz_lower_bound(model.module, 4, starts=16, steps=30, x=x)
    assert 0.1 * model.bound() <= steep.value <= model.bound() * (1 + 1e-4)
    assert float(pairs.detach().max()) <= 2 + 1e-6


def test_score_counts_ties_and_nan_as_uncertified() -> None:
    model = Model(torch.nn.Identity(), lambda: torch.ones(3, 3, dtype=torch.float64), lambda: 1.0)
    x = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [math.nan, 0.0, 5.0], [0.0, 0.2, 0.0]])
    found = score(model, x, torch.tensor([0, 0, 2, 1]))
    assert found.metrics["accuracy"] == 0.75
    assert found.metrics["cert_36"] == 0.5
    assert found.metrics["cert_72"] == 0.25
    assert found.radius == pytest.approx((1.0 + 0.0 + 0.0 + 0.2) / 4)


# -- models and units ------------------------------------------------------------------------------------------------


def test_family_names() -> None:
    assert find_family(" sandwich ").name == "Sandwich"
    assert find_family("ldlt-r AS printed").name == "LDLT-R as printed"
    assert find_family("ldlt-l:Cholesky").name == "LDLT-L:cholesky"
    for wrong in ("LDLT", "AOL:cayley", "LDLT-R:lu", ""):
        with pytest.raises(OptionError, match="unknown family"):
            find_family(wrong)
    assert find_family("ldlt-r:cayley").contraction == "cayley"
    assert not find_family("LDLT-R").contraction  # the protocol's
    assert [name for name in FAMILIES if not find_family(name).certified] == ["LDLT-R as printed"]


def test_build_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build("LDLT-R", 4, 8, 2, 3, seed=0)
    assert torch.equal(torch.rand(2), expected)
    a, b = (flatten(build("SLL", 4, 8, 2, 3, seed=0)) for _ in range(2))
    assert torch.equal(a, b)


def test_as_printed_is_marked() -> None:
    dataset = Embedded().load("iris")
    rows = run_unit(Unit("paper", "iris", "LDLT-R as printed"), replace(QUICK, epochs=2), dataset, [0])
    assert not any(row["certified"] for row in rows)
    assert all(row["violation"] > 0.1 for row in rows)
    assert all(
        row["certified"] for row in run_unit(Unit("paper", "iris", "CPL"), replace(QUICK, epochs=1), dataset, [0])
    )


def test_costs_order_units() -> None:
    def cost(family: str, protocol: str, rows: int, columns: int) -> float:
        return estimate_cost(Unit(protocol, "x", family), PROTOCOLS[protocol], rows, columns, 2)

    assert cost("AOL", "paper", 200, 5) < cost("AOL", "paper", 200, 200) < cost("Sandwich", "paper", 200, 200)
    assert cost("AOL", "paper", 200, 200) < cost("AOL", "tuned", 200, 200)
    assert together(32) == together(64) > together(128) == together(512) == 1
