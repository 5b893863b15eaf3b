"""One piece of work: all folds and seeds of one data set and one family under one protocol."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ldlt_bench.data import FOLDS, Dataset
from ldlt_bench.paper import AsPrintedResidual, violation
from ldlt_bench.study.family import find_family
from ldlt_bench.study.models import Model, build, flatten, load
from ldlt_bench.study.protocol import Protocol, network_width
from ldlt_bench.study.training import Folds, Net, Stack, Trainer

__all__ = ["Unit", "estimate_cost", "run_unit", "together"]


class Unit(NamedTuple):
    """One piece of work: names of a protocol, a data set and a family."""

    protocol: str
    dataset: str
    family: str


_OTHER_CONTRACTION = 2.0  # rough cost of a step, in units of Cholesky's


def together(width: int) -> int:
    """Return how many networks of a width run as one program.

    Small networks are all overhead: the more, the better. From width 128 on a step is arithmetic, four that run alone
    take about as long per step as a stack of them, and a network that runs alone can stop alone.
    """
    return 32 if width <= 64 else 1


def run_unit(unit: Unit, protocol: Protocol, dataset: Dataset, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train and certify the networks of a unit.

    Args:
        unit: What to do.
        protocol: How to train.
        dataset: The data set.
        seeds: One network per fold and seed.

    Returns:
        One row per fold and seed, with the columns of :mod:`ldlt_bench.study.results` that describe the run.
    """
    begun, worked = time.perf_counter(), time.process_time()
    folds = Folds(dataset, range(FOLDS), protocol)
    classes, features = len(dataset.classes), dataset.columns
    width = network_width(features, classes)
    pairs = [(fold, seed) for seed in seeds for fold in range(FOLDS)]
    start, rates = protocol.start(unit.family), [candidate.learning_rate for candidate in protocol.candidates]
    models = [
        build(unit.family, features, width, protocol.depth, classes, start_seed(dataset.name, *pair), start)
        for pair in pairs
    ]
    starts = dict(zip(pairs, map(flatten, models), strict=True))
    nets = [Net(*pair, candidate) for pair in pairs for candidate in range(len(protocol.candidates))]
    model = models[0]
    matrix = torch.stack([starts[net.fold, net.seed] for net in nets])
    trainer = Trainer(Stack(model), matrix, nets, folds, protocol, together(width), start.rate)
    survivors = trainer.run()
    rows = []
    for index in survivors:
        net = nets[index]
        candidate = protocol.candidates[net.candidate]
        split = folds.splits[net.fold]
        validation = trainer.score(index, "validation")
        test = trainer.score(index, "test")
        load(model, trainer.best[index])
        rows.append(
            {
                "protocol": unit.protocol,
                "dataset": unit.dataset,
                "family": unit.family,
                "fold": net.fold,
                "seed": net.seed,
                **test.metrics,
                "curve": test.curve,
                "width": width,
                "depth": protocol.depth,
                "parameters": matrix.shape[1],
                "padding": model.padding,
                "input_dim": features,
                "output_dim": classes,
                "bound": model.bound(),
                "rigorous": False,
                "certified": model.certified,
                "violation": math.nan if model.certified else _violation(model),
                "epochs": int(trainer.epochs[index]),
                "best_epoch": int(trainer.best_epoch[index]),
                "learning_rate": start.rate * candidate.learning_rate,
                "edge": (candidate.learning_rate == max(rates)) - (candidate.learning_rate == min(rates)),
                "loss": candidate.loss,
                "batch_size": folds.batch,
                "validation_score": validation.rank[0],
                "train_rows": len(split.train),
                "validation_rows": len(split.validation),
                "test_rows": len(split.test),
                "dtype": str(matrix.dtype).removeprefix("torch."),
                "source": dataset.source,
            }
        )
    spent = {
        "seconds": (time.perf_counter() - begun) / len(rows),
        "cpu_seconds": (time.process_time() - worked) / len(rows),
    }
    return [{**row, **spent} for row in rows]


def _violation(model: Model) -> float:
    """Largest slope of a refuted construction that a search finds, in units of the bound it claims."""
    assert isinstance(model.module, AsPrintedResidual)
    return violation(model.module, starts=32, steps=50, radius=1.0).ratio


def start_seed(dataset: str, fold: int, seed: int) -> int:
    """Seed of the start values: a function of data set, fold and seed, the same for all families and settings."""
    digest = hashlib.sha256(f"start/{dataset}/{fold}/{seed}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def estimate_cost(unit: Unit, protocol: Protocol, rows: int, columns: int, classes: int) -> float:
    """Rough time of a unit in seconds, for the order of work and the remaining time.

    Constants fitted to the study under ``paper`` on one core: the work on the weights of one network, which the larger
    matrices do faster than w³ says, and the work per row, with what does not grow with the network.
    """
    width = network_width(columns, classes)
    steps = protocol.steps(rows // 2)
    family = find_family(unit.family)
    contraction = family.contraction or protocol.start(unit.family).contraction
    other = family.form and contraction != "cholesky"
    step = 1e-11 * family.cost * (_OTHER_CONTRACTION if other else 1.0) * width**2 * (width + 3000)
    row = 7e-11 * width * (columns + protocol.depth * width + 500)
    total, start, candidates = 0.4, 0, len(protocol.candidates)
    for until, keep in (*protocol.rungs, (round(0.65 * protocol.epochs), 1)):
        nets = FOLDS * candidates
        total += max(until - start, 0) * nets * (steps * step + rows * row)
        candidates, start = min(keep, candidates), until
    return total
