"""Training many networks of one architecture as one program: the folds, seeds and settings of one data set and family.

The parameters of n networks are the rows of one matrix (n, P). A step of all of them is one recorded list of batched
operations (:mod:`ldlt.program`), and AdamW is a handful of operations on the whole matrix (:mod:`ldlt.adamw`). The
rows never mix, so a stack computes what n separate runs compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from ldlt.adamw import adamw
from ldlt.program import Program, record
from ldlt.radius import certified_radius
from ldlt_bench.data import Dataset
from ldlt_bench.data.folds import Stream
from ldlt_bench.study.models import Model, load, unflatten
from ldlt_bench.study.protocol import CURVE, LOSSES, RADII, Protocol

__all__ = ["Folds", "Net", "Score", "Stack", "Trainer", "margin_loss", "score"]


@dataclass(frozen=True)
class Score:
    """What a model achieves.

    Shares of rows that are right, and right with a margin: ``accuracy`` and the columns of ``RADII``, and at the radii
    of ``CURVE``; the mean over all rows of the certified radius, at most 1, of those that are right.
    """

    metrics: dict[str, float]
    curve: list[float]
    radius: float

    @property
    def rank(self) -> tuple[float, float]:
        """What a search maximises: the mean of the five metrics, then the mean radius."""
        return sum(self.metrics.values()) / len(self.metrics), self.radius


@torch.no_grad()
def score(model: Model, x: Tensor, labels: Tensor) -> Score:
    """Score a model, in the precision it was trained in; the radii use the constants of all pairs of logits."""
    logits = model.module(x)
    radius = certified_radius(logits, model.pair_bounds())
    right = (torch.nan_to_num(logits, nan=-torch.inf).argmax(1) == labels) & logits.isfinite().all(1)
    radius = torch.where(right, radius, -1.0)

    def share(r: float) -> float:
        return float((radius > r).double().mean())

    metrics = {"accuracy": float(right.double().mean()), **{name: share(r) for name, r in RADII.items()}}
    return Score(metrics, [share(r) for r in CURVE], float(radius.clamp(0.0, 1.0).mean()))


def margin_loss(logits: Tensor, labels: Tensor, offset: Tensor, temperature: Tensor) -> Tensor:
    """``t · CE((y − o·onehot(c)) / t)`` per row; see :class:`ldlt_bench.study.protocol.Loss`.

    Args:
        logits: (..., k).
        labels: (...).
        offset: o, broadcast against the labels.
        temperature: t, likewise.
    """
    truth = (labels[..., None] == torch.arange(logits.shape[-1])).to(logits.dtype)
    shifted = (logits - offset[..., None] * truth) / temperature[..., None]
    return temperature * (torch.logsumexp(shifted, -1) - (shifted * truth).sum(-1))


class Stack:
    """Programs of n networks of one architecture.

    Args:
        model: A network of the architecture; its parameters are not touched.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._programs: dict[tuple[object, ...], Program] = {}

    def gradient(
        self, flat: Tensor, x: Tensor, labels: Tensor, weights: Tensor, offset: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients (n, P) and losses (n,) of ``Σ w l / Σ w`` over each network's batch.

        Args:
            flat: Parameters (n, P).
            x: Inputs (n, batch, d).
            labels: Classes (n, batch).
            weights: Weights of the rows (n, batch); zero for rows that only fill the batch.
            offset: (n,).
            temperature: (n,).
        """

        def loss(row: Tensor, x: Tensor, labels: Tensor, weights: Tensor, o: Tensor, t: Tensor) -> Tensor:
            logits = functional_call(self.model.module, unflatten(self.model, row), (x,))
            return (margin_loss(logits, labels, o, t) * weights).sum() / weights.sum()

        def alone(flat: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            row = flat[0].detach().requires_grad_()
            value = loss(row, *(r[0] for r in rest))
            return torch.autograd.grad(value, row)[0][None], value.detach()[None]

        # a single wide network is faster outside vmap: maps wider than the batch are then not multiplied out
        step = vmap(grad_and_value(loss)) if len(flat) > 1 else alone
        return self._run("gradient", step, flat, x, labels, weights, offset, temperature)  # type: ignore[return-value]

    def logits(self, flat: Tensor, x: Tensor) -> Tensor:
        """Logits (n, batch, k) of inputs (n, batch, d)."""

        def one(row: Tensor, x: Tensor) -> Tensor:
            return functional_call(self.model.module, unflatten(self.model, row), (x,))  # type: ignore[no-any-return]

        def run(flat: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            return (vmap(one)(flat, x) if len(flat) > 1 else one(flat[0], x[0])[None],)

        return self._run("logits", run, flat, x)[0]

    def _run(self, name: str, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        key = (name, *(tuple(t.shape) for t in inputs))
        if key not in self._programs:
            self._programs[key] = record(function, *inputs)
        with torch.no_grad():
            return self._programs[key](*inputs)


class Net(NamedTuple):
    """Who a row of the stack is: its fold, its seed, the index of the protocol's candidate."""

    fold: int
    seed: int
    candidate: int


class Folds:
    """Standardised rows of all folds of a data set, as tensors.

    Args:
        dataset: The data set.
        folds: The folds that are used.
        protocol: Sets the number of steps per epoch, one number for all folds.
        dtype: Floating-point type of features and weights.
    """

    def __init__(
        self, dataset: Dataset, folds: Sequence[int], protocol: Protocol, dtype: torch.dtype = torch.float32
    ) -> None:
        self.name = dataset.name
        self.classes = len(dataset.classes)
        self.position = {fold: i for i, fold in enumerate(folds)}
        parts = [dataset.standardise(fold) for fold in folds]
        self.splits = {fold: part.split for fold, part in zip(folds, parts, strict=True)}
        self.rows = dataset.rows
        self.features = torch.from_numpy(np.concatenate([p.features for p in parts])).to(dtype)
        self.labels = torch.from_numpy(np.tile(dataset.labels, len(folds)))
        # balanced class weights n / (k n_c), over the classes that occur in training
        self.class_weights = torch.zeros(len(folds) * self.classes, dtype=dtype)
        for i, part in enumerate(parts):
            labels = part.labels[part.split.train]
            counts = np.bincount(labels, minlength=self.classes)
            weights = np.divide(len(labels), self.classes * counts, out=np.zeros(self.classes), where=counts > 0)
            self.class_weights[i * self.classes : (i + 1) * self.classes] = torch.from_numpy(weights)
        self.steps = protocol.steps(min(len(s.train) for s in self.splits.values()))
        self.batch = max(-(-len(s.train) // self.steps) for s in self.splits.values())

    def batches(self, fold: int, seed: int, epoch: int) -> np.ndarray:
        """Rows of every step of an epoch (steps, batch) in the concatenated tensors; −1 fills up.

        A function of data set, fold, seed and epoch alone: all families see the same batches.
        """
        train = self.splits[fold].train
        order = train[Stream("batches", self.name, fold, seed, epoch).permutation(len(train))]
        found = np.full((self.steps, self.batch), -1, dtype=np.int64)
        for step, part in enumerate(np.array_split(order, self.steps)):
            found[step, : len(part)] = part + self.position[fold] * self.rows
        return found

    def validation(self, folds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows (n, v) and mask (n, v) of the validation rows of several folds, filled up to the longest."""
        rows = [torch.from_numpy(self.splits[f].validation + self.position[f] * self.rows) for f in folds]
        index = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return index.clamp_min(0), index >= 0

    def part(self, fold: int, which: str) -> tuple[Tensor, Tensor]:
        """Features and labels of the ``train``, ``validation`` or ``test`` rows of a fold."""
        rows = torch.from_numpy(getattr(self.splits[fold], which) + self.position[fold] * self.rows)
        return self.features[rows], self.labels[rows]

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (n, b, d), labels (n, b) and row weights (n, b) of rows (n, b); weight 0 where the row is −1."""
        fill = rows < 0
        at = rows.clamp_min(0)
        labels = self.labels[at]
        weights = self.class_weights[at // self.rows * self.classes + labels].masked_fill(fill, 0.0)
        return self.features[at], labels, weights


class Trainer:
    """All networks of a unit, their state and their best snapshots.

    Args:
        stack: Programs of the architecture.
        starts: Start values (n, P).
        nets: Who the n rows are.
        folds: The data.
        protocol: How to train.
        together: Number of networks that run as one program.
        rate: Step sizes are this many times as large as those of the protocol.
    """

    def __init__(
        self,
        stack: Stack,
        starts: Tensor,
        nets: Sequence[Net],
        folds: Folds,
        protocol: Protocol,
        together: int,
        rate: float = 1.0,
    ) -> None:
        self.stack, self.nets, self.folds, self.protocol, self.together = stack, nets, folds, protocol, together
        n = len(nets)
        losses = [LOSSES[protocol.candidates[net.candidate].loss] for net in nets]
        self.flat = starts.clone()
        self.first, self.second = torch.zeros_like(starts), torch.zeros_like(starts)
        self.rate = rate * torch.tensor([protocol.candidates[net.candidate].learning_rate for net in nets]).to(starts)
        self.offset = torch.tensor([loss.offset for loss in losses]).to(starts)
        self.temperature = torch.tensor([loss.temperature for loss in losses]).to(starts)
        self.best = starts.clone()
        self.best_accuracy = torch.full((n,), -1.0)
        self.best_loss = torch.full((n,), torch.inf).to(starts)
        self.best_epoch = torch.zeros(n, dtype=torch.int64)
        self.epochs = torch.zeros(n, dtype=torch.int64)
        self.stale = torch.zeros(n, dtype=torch.int64)  # epochs without a better validation accuracy
        self.plateau = torch.zeros(n, dtype=torch.int64)  # the same, since the last halving
        self.active = torch.ones(n, dtype=torch.bool)

    def run(self) -> list[int]:
        """Train all networks; returns the survivor of the search for every fold and seed, as indices of ``nets``."""
        alive = list(range(len(self.nets)))
        start = 0
        for until, keep in self.protocol.rungs:
            self._advance(alive, start, until)
            alive = self._select(alive, keep)
            start = until
        self._advance(alive, start, self.protocol.epochs)
        return self._select(alive, 1)

    def score(self, index: int, which: str) -> Score:
        """Score of a network's best snapshot on the ``validation`` or ``test`` rows of its fold."""
        load(self.stack.model, self.best[index])
        return score(self.stack.model, *self.folds.part(self.nets[index].fold, which))

    def _select(self, alive: list[int], keep: int) -> list[int]:
        groups: dict[tuple[int, int], list[int]] = {}
        for i in alive:
            groups.setdefault((self.nets[i].fold, self.nets[i].seed), []).append(i)
        chosen: list[int] = []
        for members in groups.values():
            if len(members) <= keep:
                chosen += members
                continue
            order = sorted(members, key=lambda i: self.score(i, "validation").rank, reverse=True)
            chosen += sorted(order[:keep])
        return chosen

    def _advance(self, alive: Sequence[int], start: int, until: int) -> None:
        running = [i for i in alive if self.active[i]]
        for at in range(0, len(running), self.together):
            self._train(torch.tensor(running[at : at + self.together]), start, until)

    def _train(self, index: Tensor, start: int, until: int) -> None:
        """Train some of the networks from one epoch to another, in lockstep."""
        folds, protocol = self.folds, self.protocol
        nets = [self.nets[i] for i in index]
        flat, first, second = self.flat[index], self.first[index], self.second[index]
        offset, temperature = self.offset[index], self.temperature[index]
        rows, mask = folds.validation([net.fold for net in nets])
        x_validation, y_validation, _ = folds.gather(rows)
        for epoch in range(start, until):
            dealt = {key: folds.batches(*key, epoch) for key in {(net.fold, net.seed) for net in nets}}
            plan = torch.from_numpy(np.stack([dealt[net.fold, net.seed] for net in nets], axis=1))
            rate = self.rate[index][:, None]
            for step in range(folds.steps):
                x, labels, weights = folds.gather(plan[step])
                grad, _ = self.stack.gradient(flat, x, labels, weights, offset, temperature)
                adamw(flat, grad, first, second, rate, epoch * folds.steps + step + 1, protocol.weight_decay)
            logits = self.stack.logits(flat, x_validation)
            right = (logits.argmax(-1) == y_validation) & mask
            accuracy = right.sum(1) / mask.sum(1)
            losses = margin_loss(logits, y_validation, offset[:, None], temperature[:, None])
            loss = torch.where(mask, losses, 0.0).sum(1) / mask.sum(1)
            self._judge(index, flat, accuracy, loss, epoch + 1)
            if not self.active[index].any():
                break
        self.flat[index], self.first[index], self.second[index] = flat, first, second

    def _judge(self, index: Tensor, flat: Tensor, accuracy: Tensor, loss: Tensor, epoch: int) -> None:
        """Keep what is best, halve step sizes, stop what no longer improves.

        Only a strictly better validation accuracy counts as improvement. Among epochs of equal accuracy the snapshot
        with the smaller validation loss is kept. Where the loss is not finite nothing is kept.
        """
        protocol = self.protocol
        running = self.active[index]
        better = running & (accuracy > self.best_accuracy[index]) & loss.isfinite()
        tie = running & (accuracy == self.best_accuracy[index]) & (loss < self.best_loss[index])
        kept = better | tie
        where = index[kept]
        self.best[where] = flat[kept]
        self.best_accuracy[where], self.best_loss[where] = accuracy[kept], loss[kept]
        self.best_epoch[where] = epoch
        self.epochs[index[running]] = epoch
        for counter in (self.stale, self.plateau):
            counter[index] = torch.where(better, 0, counter[index] + 1)
        halve = self.plateau[index] >= protocol.plateau
        self.rate[index] = torch.where(halve, self.rate[index] / 2, self.rate[index])
        self.plateau[index] = torch.where(halve, 0, self.plateau[index])
        self.active[index] = running & (self.stale[index] < protocol.patience)
