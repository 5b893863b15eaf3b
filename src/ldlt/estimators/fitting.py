"""Training a small constrained network: few steps, little overhead, interruptible."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from ldlt.adamw import adamw
from ldlt.engine.network import Lipschitz
from ldlt.program import ProgramError, record

__all__ = ["AdamW", "Batches", "Epoch", "History", "Trainer"]

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Outputs (n, k) and targets (n, k) to the losses of the rows (n,)."""

_WORTH_RECORDING = 40  # steps; recording costs about as much as twenty steps run by Python
_AUTO_BATCH, _LEAST_STEPS, _MOST_STEPS = 256, 4, 32


@dataclass(frozen=True)
class Epoch:
    """Progress, as it is passed to a callback.

    Attributes:
        epoch: Epochs done.
        epochs: Largest number of epochs.
        loss: Mean loss of the training rows during this epoch.
        validation: Mean loss of the validation rows after it; NaN without validation rows.
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


@dataclass
class History:
    """What happened.

    Attributes:
        loss: Per epoch.
        validation: Per epoch; empty without validation rows.
        best_epoch: The epoch whose parameters were kept, counted from one; zero if none was finished.
        stopped: Why training ended early: ``"interrupted"``, ``"not finite"``, ``"no improvement"``, or nothing.
    """

    loss: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best_epoch: int = 0
    stopped: str = ""


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
        """Steps per epoch: ``"auto"`` are batches of 256, but 4 to 32 of them."""
        if batch_size == "auto":
            steps = min(max(math.ceil(rows / _AUTO_BATCH), _LEAST_STEPS), _MOST_STEPS)
        else:
            steps = math.ceil(rows / int(batch_size))
        return max(1, min(steps, rows))

    def deal(self, random: np.random.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
        """An epoch: inputs, targets and weights of every step; the weighted losses of a step sum to its mean loss."""
        n = len(self.x)
        size = math.ceil(n / self.steps)
        order = np.zeros(self.steps * size, dtype=np.int64)
        order[:n] = random.permutation(n)
        # Deal like cards, so that no batch is left empty.
        places = torch.from_numpy(order.reshape(size, self.steps).T.copy())
        filled = (torch.arange(self.steps * size) < n).reshape(size, self.steps).T
        weight = torch.where(filled, self.weight[places], 0.0) * (self.steps / n)
        return [(self.x[p], self.target[p], w) for p, w in zip(places, weight, strict=True)]


@dataclass
class AdamW:
    """State of AdamW (:mod:`ldlt.adamw`) on one vector.

    Attributes:
        first: Mean of the gradients (P,).
        second: Mean of their squares (P,).
        steps: Steps done.
    """

    first: Tensor
    second: Tensor
    steps: int = 0

    @torch.no_grad()
    def step(self, flat: Tensor, grad: Tensor, rate: float, weight_decay: float) -> None:
        """Move ``flat`` (P,) in place; ``grad`` is overwritten."""
        self.steps += 1
        rates = torch.tensor([[rate]], dtype=torch.float64)
        adamw(flat[None], grad[None], self.first[None], self.second[None], rates, self.steps, weight_decay)


class Trainer:
    """A network whose parameters are trained as one vector by AdamW.

    Args:
        net: The network; its parameters are set at the end.
        loss: Loss of every row.
        weight_decay: Of AdamW.
        state: Of an earlier trainer of the same network, to continue; it is changed.
    """

    def __init__(self, net: Lipschitz, loss: RowLoss, weight_decay: float, state: AdamW | None = None) -> None:
        self.net, self.loss, self.weight_decay = net, loss, weight_decay
        self._trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        self.flat = torch.cat([p.detach().reshape(-1) for _, p in self._trained])
        self.state = state or AdamW(torch.zeros_like(self.flat), torch.zeros_like(self.flat))

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
    ) -> History:
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
        history, begin = History(), time.perf_counter()
        total = epochs * train.steps
        gradient = _Program(self._gradient, total >= _WORTH_RECORDING)
        outputs = _Program(self._outputs, epochs >= _WORTH_RECORDING)
        best, best_loss = self.flat.clone(), math.inf
        try:
            for epoch in range(epochs):
                losses = []
                for step, batch in enumerate(train.deal(random)):
                    passed = (epoch * train.steps + step) / total
                    rate = learning_rate * (0.5 * (1 + math.cos(math.pi * passed)) if decay else 1.0)
                    grad, loss = gradient(self.flat, *batch)
                    losses.append(loss)
                    self.state.step(self.flat, grad, rate, self.weight_decay)
                mean = float(torch.stack(losses).mean())
                held = math.nan
                if validation is not None:
                    held = self._validate(outputs, validation)
                if not math.isfinite(mean) or (validation is not None and not math.isfinite(held)):
                    history.stopped = "not finite"
                    break
                history.loss.append(mean)
                if validation is not None:
                    history.validation.append(held)
                if validation is None or held < best_loss:
                    best.copy_(self.flat)
                    best_loss, history.best_epoch = held, epoch + 1
                report(Epoch(epoch + 1, epochs, mean, held, time.perf_counter() - begin))
                if validation is not None and epoch + 1 - history.best_epoch >= patience:
                    history.stopped = "no improvement"
                    break
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        self._keep(best)
        return history

    def _keep(self, flat: Tensor) -> None:
        with torch.no_grad():
            self.flat.copy_(flat)
            for name, value in self._unflatten(flat).items():
                self.net.get_parameter(name).copy_(value)

    def _unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([p.numel() for _, p in self._trained])
        return {name: part.view(p.shape) for (name, p), part in zip(self._trained, parts, strict=True)}

    def _outputs(self, flat: Tensor, x: Tensor) -> tuple[Tensor]:
        return (functional_call(self.net, self._unflatten(flat), (x,)),)

    def _gradient(self, flat: Tensor, x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = flat.detach().requires_grad_()
            (y,) = self._outputs(point, x)
            value = (self.loss(y, target) * weight).sum()
            return torch.autograd.grad(value, point)[0], value.detach()

    def _validate(self, outputs: _Program, rows: Batches) -> float:
        with torch.no_grad():
            (y,) = outputs(self.flat, rows.x)
            return float((self.loss(y, rows.target) * rows.weight).mean())


class _Program:
    """A function of tensors, recorded when it is first called, or run as it is."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], recorded: bool) -> None:
        self.function, self.recorded = function, recorded
        self.made: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.made is None:
            self.made = self.function
            if self.recorded:
                try:
                    self.made = record(self.function, *inputs)
                except ProgramError:  # slower, no worse
                    self.made = self.function
        return self.made(*inputs)
