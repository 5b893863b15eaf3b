"""Stacked training against a plain loop over folds, same batches, same results.

    python benchmarks/bench_speed.py [--sets iris wine ...] [--families ...] [--epochs 50] [--repeats 3]

The loop is what one would write: for every fold a module, ``torch.optim.AdamW``, batches, ``loss.backward()``, and a
validation pass per epoch. The stacked run is the benchmark's own (``ldlt_bench.study.training``), its recording of
programs included. Both start at the same weights, see the same batches and keep the same schedule; the script prints
how far their validation accuracies and weights are apart, in float64 as well, where rounding cannot be an excuse. One
thread, interleaved, medians.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

import torch

from _measure import machine
from ldlt_bench.data import Dataset, Embedded
from ldlt_bench.study.family import STUDY_FAMILIES
from ldlt_bench.study.models import Model, build, flatten
from ldlt_bench.study.protocol import PROTOCOLS, Protocol, network_width
from ldlt_bench.study.training import Folds, Net, Stack, Trainer, margin_loss

SMALL = ("iris", "wine", "balance-scale", "monks-1", "monks-2", "monks-3", "tic-tac-toe", "breast-cancer-wisc-diag")
FOLDS = range(4)


def models(family: str, dataset: Dataset, protocol: Protocol, dtype: torch.dtype) -> list[Model]:
    classes = len(dataset.classes)
    width = network_width(dataset.columns, classes)
    found = [build(family, dataset.columns, width, protocol.depth, classes, seed=fold) for fold in FOLDS]
    for model in found:
        model.module.to(dtype)
    return found


def loop(family: str, dataset: Dataset, protocol: Protocol, dtype: torch.dtype) -> tuple[list[float], torch.Tensor]:
    """One fold after the other, in plain PyTorch; returns the best validation accuracies and the last weights."""
    folds = Folds(dataset, FOLDS, protocol, dtype)
    zero, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    accuracies, weights = [], []
    for fold, model in zip(FOLDS, models(family, dataset, protocol, dtype), strict=True):
        module, rate = model.module, protocol.candidates[0].learning_rate
        scaled = [p for n, p in module.named_parameters() if n in model.scales]
        plain = [p for n, p in module.named_parameters() if n not in model.scales and p.requires_grad]
        groups: list[dict[str, object]] = [{"params": plain}]
        if scaled:
            # a parameter stored divided by s: its step is s times as large, its decay is not, its gradient is s times
            # as large beside ε
            s = next(iter(model.scales.values()))
            decay = protocol.weight_decay / s
            groups.append({"params": scaled, "lr": rate * s, "weight_decay": decay, "eps": 1e-8 / s})
        optimiser = torch.optim.AdamW(groups, lr=rate, weight_decay=protocol.weight_decay)
        x_validation, y_validation = folds.part(fold, "validation")
        best = -1.0
        for epoch in range(protocol.epochs):
            for rows in torch.from_numpy(folds.batches(fold, 0, epoch)):
                x, labels, row_weights = folds.gather(rows[rows >= 0][None])
                loss = margin_loss(module(x[0]), labels[0], zero, one) * row_weights[0]
                optimiser.zero_grad()
                (loss.sum() / row_weights.sum()).backward()
                optimiser.step()
            with torch.no_grad():
                right = module(x_validation).argmax(1) == y_validation
            best = max(best, float(right.double().mean()))
        accuracies.append(best)
        weights.append(flatten(model))
    return accuracies, torch.stack(weights)


def stacked(family: str, dataset: Dataset, protocol: Protocol, dtype: torch.dtype) -> tuple[list[float], torch.Tensor]:
    """All folds as one program."""
    folds = Folds(dataset, FOLDS, protocol, dtype)
    made = models(family, dataset, protocol, dtype)
    starts = torch.stack([flatten(model) for model in made])
    trainer = Trainer(Stack(made[0]), starts, [Net(f, 0, 0) for f in FOLDS], folds, protocol, len(made))
    trainer.run()
    return trainer.best_accuracy.tolist(), trainer.flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SMALL), help="embedded data sets")
    parser.add_argument("--families", nargs="+", default=list(STUDY_FAMILIES))
    parser.add_argument("--epochs", type=int, default=50, help="epochs of both (no early stop)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}\n{arguments.epochs} epochs of 4 folds, seconds; difference: largest over folds\n")
    # the schedule that reacts to results is off, so that both do the same number of steps of the same size
    protocol = replace(PROTOCOLS["paper"], epochs=arguments.epochs, patience=10**6, plateau=10**6)
    print("set                       family        loop  stacked  ratio  accuracy diff  weights diff (float64)")
    ratios: dict[str, list[float]] = {}
    for name in arguments.sets:
        dataset = Embedded().load(name)
        for family in arguments.families:
            times: dict[str, list[float]] = {"loop": [], "stacked": []}
            found = {}
            for _ in range(arguments.repeats):
                for which, run in (("loop", loop), ("stacked", stacked)):
                    begun = time.perf_counter()
                    found[which] = run(family, dataset, protocol, torch.float32)
                    times[which].append(time.perf_counter() - begun)
            slow, fast = median(times["loop"]), median(times["stacked"])
            apart = max(abs(a - b) for a, b in zip(found["loop"][0], found["stacked"][0], strict=True))
            short = replace(protocol, epochs=3)
            exact = [run(family, dataset, short, torch.float64)[1] for run in (loop, stacked)]
            distance = float((exact[0] - exact[1]).abs().max())
            ratios.setdefault(name, []).append(slow / fast)
            print(
                f"{name:<25} {family:<11} {slow:>6.2f}  {fast:>7.2f}  {slow / fast:>5.1f}  "
                f"{apart:>13.4f}  {distance:.1e}",
                flush=True,
            )
    medians = {name: median(values) for name, values in ratios.items()}
    print("\nratio per set (median over families): " + ", ".join(f"{n} {r:.1f}" for n, r in medians.items()))
    print(f"median set: {median(medians.values()):.1f} times as fast as the loop")


if __name__ == "__main__":
    main()
