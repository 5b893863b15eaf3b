"""Training a small constrained network: few steps, little overhead, interruptible."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim import AdamW

from ldlt.engine.network import Lipschitz
from ldlt.program import ProgramError, record

__all__ = ["Batches", "Epoch", "RowLoss", "Trainer"]

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Outputs (n, k) and targets (n, k) to the losses of the rows (n,)."""

_WORTH_RECORDING = 40  # steps; recording costs about as much as twenty steps run by Python
_AUTO_BATCH, _LEAST_STEPS, _MOST_STEPS = 512, 4, 64  # rows of a batch, batches of an epoch
_AUTO_STEPS, _LEAST_EPOCHS, _MOST_EPOCHS = 600, 30, 100


@dataclass(frozen=True)
class Epoch:
    """Progress, as it is passed to a callback.

    Attributes:
        epoch: Epochs done.
        epochs: Largest number of epochs.
        loss: Mean loss of the training rows during this epoch.
        validation: Of the validation rows after it, their mean loss, or for a classifier the share of them that is not
            right with the radius that is asked for; NaN without validation rows.
        seconds: Since the start.
    """

    epoch: int
    epochs: int
    loss: float
    validation: float
    seconds: float

    def __str__(self) -> str:
        held = "" if math.isnan(self.validation) else f"   held rows {self.validation:.4f}"
        return f"epoch {self.epoch}/{self.epochs}   loss {self.loss:.4f}{held}"


@dataclass(frozen=True)
class Batches:
    """Rows as tensors of the network's precision, dealt anew in every epoch.

    Attributes:
        x: Inputs (n, d).
        target: Targets (n, k).
        weight: Weights (n,) of mean one.
        steps: Batches per epoch, all of the same size; the last ones are filled up with rows of weight zero.
    """

    x: Tensor
    target: Tensor
    weight: Tensor
    steps: int = 1

    @staticmethod
    def steps_for(rows: int, batch_size: int | str) -> int:
        """Steps per epoch: ``"auto"`` are batches of 512, but 4 to 64 of them."""
        if batch_size == "auto":
            steps = min(max(math.ceil(rows / _AUTO_BATCH), _LEAST_STEPS), _MOST_STEPS)
        else:
            steps = math.ceil(rows / int(batch_size))
        return max(1, min(steps, rows))

    def epochs_for(self, epochs: int | str) -> int:
        """Epochs: ``"auto"`` are 600 steps, but 30 to 100 epochs."""
        if epochs == "auto":
            return min(max(math.ceil(_AUTO_STEPS / self.steps), _LEAST_EPOCHS), _MOST_EPOCHS)
        return int(epochs)

    def deal(self, random: np.random.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """An epoch: inputs, targets and weights of every step; the weighted losses of a step sum to its mean loss."""
        n = len(self.x)
        size = math.ceil(n / self.steps)
        order = np.zeros(self.steps * size, dtype=np.int64)
        order[:n] = random.permutation(n)
        # Deal like cards, so that no batch is left empty.
        places = torch.from_numpy(order.reshape(size, self.steps).T.copy())
        filled = (torch.arange(self.steps * size) < n).reshape(size, self.steps).T
        weight = torch.where(filled, self.weight[places], 0.0) * (self.steps / n)
        return ((self.x[p], self.target[p], w) for p, w in zip(places, weight, strict=True))


class Trainer:
    """A network whose parameters are trained as one vector by AdamW.

    Args:
        net: The network; its parameters are set at the end.
        loss: Loss of every row.
        held_loss: Of validation rows; decides which epoch is the best.
        weight_decay: Of AdamW.
        optimiser: Of an earlier trainer of the same network, to continue; it is changed.

    Attributes:
        optimiser: Of the vector of all parameters.
        epochs: What happened, epoch by epoch.
        best_epoch: The epoch whose parameters were kept, counted from one; zero if none was finished.
        stopped: Why training ended early: ``"interrupted"``, ``"not finite"``, ``"no improvement"``, or nothing.
    """

    def __init__(
        self, net: Lipschitz, loss: RowLoss, held_loss: RowLoss, weight_decay: float, optimiser: AdamW | None = None
    ) -> None:
        self.net, self.loss, self.held_loss = net, loss, held_loss
        self._trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        flat = torch.cat([p.detach().reshape(-1) for _, p in self._trained])
        self.optimiser = AdamW([flat], weight_decay=weight_decay, fused=True) if optimiser is None else optimiser
        self.flat: Tensor = self.optimiser.param_groups[0]["params"][0]
        self.epochs: list[Epoch] = []
        self.best_epoch, self.stopped = 0, ""

    def run(
        self,
        train: Batches,
        validation: Batches | None,
        *,
        learning_rate: float,
        epochs: int,
        patience: int,
        decay: bool,
        random: np.random.Generator,
        report: Callable[[Epoch], object],
    ) -> None:
        """Train; the network then has the parameters of the best epoch (without validation rows, of the last one).

        Args:
            train: Rows to train on.
            validation: Rows that decide which epoch is the best.
            learning_rate: Step size at the start.
            epochs: Largest number of epochs.
            patience: Epochs without a smaller validation loss after which training stops.
            decay: Whether the step size falls to zero along a cosine; otherwise it is constant.
            random: Deals the batches.
            report: Called after every epoch.
        """
        begin, total = time.perf_counter(), epochs * train.steps
        gradient, outputs = self._gradient, self._outputs
        best, best_loss = self.flat.clone(), math.inf
        group = self.optimiser.param_groups[0]
        try:
            for epoch in range(epochs):
                losses = []
                for step, batch in enumerate(train.deal(random)):
                    passed = (epoch * train.steps + step) / total
                    group["lr"] = learning_rate * (0.5 * (1 + math.cos(math.pi * passed)) if decay else 1.0)
                    if passed == 0:
                        gradient = _recorded(gradient, total, self.flat, *batch)
                    self.flat.grad, loss = gradient(self.flat, *batch)
                    losses.append(loss)
                    self.optimiser.step()
                mean, held = float(torch.stack(losses).mean()), math.nan
                if validation is not None:
                    with torch.no_grad():
                        if epoch == 0:
                            outputs = _recorded(outputs, epochs, self.flat, validation.x)
                        y = outputs(self.flat, validation.x)[0]
                        held = float((self.held_loss(y, validation.target) * validation.weight).mean())
                if not math.isfinite(mean) or (validation is not None and not math.isfinite(held)):
                    self.stopped = "not finite"
                    break
                self.epochs.append(Epoch(epoch + 1, epochs, mean, held, time.perf_counter() - begin))
                if validation is None or held < best_loss:
                    best.copy_(self.flat)
                    best_loss, self.best_epoch = held, epoch + 1
                report(self.epochs[-1])
                if validation is not None and epoch + 1 - self.best_epoch >= patience:
                    self.stopped = "no improvement"
                    break
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        self.flat.grad = None
        with torch.no_grad():
            self.flat.copy_(best)
            for name, value in self._unflatten(best).items():
                self.net.get_parameter(name).copy_(value)

    def _unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([p.numel() for _, p in self._trained])
        return {name: part.view(p.shape) for (name, p), part in zip(self._trained, parts, strict=True)}

    def _outputs(self, flat: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (functional_call(self.net, self._unflatten(flat), (x,)),)

    def _gradient(self, flat: Tensor, x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            point = flat.detach().requires_grad_()
            value = (self.loss(self._outputs(point, x)[0], target) * weight).sum()
            return torch.autograd.grad(value, point)[0], value.detach()


def _recorded(
    function: Callable[..., tuple[Tensor, ...]], runs: int, *inputs: Tensor
) -> Callable[..., tuple[Tensor, ...]]:
    """A function as a recorded program, if it will run often enough; else, or where that fails, as it is."""
    if runs < _WORTH_RECORDING:
        return function
    try:
        return record(function, *inputs)
    except ProgramError:  # slower, no worse
        return function
