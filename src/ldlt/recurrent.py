r"""Recurrent networks that contract, with a bounded gain, by construction.

Let a cell ``(ξ, υ) ↦ (x⁺, y)`` be 1-Lipschitz, and feed it ``ξ = a x``, ``υ = γ u``. For two runs of it

.. math:: \|Δx_{t+1}\|^2 + \|Δy_t\|^2 \le a^2\,\|Δx_t\|^2 + γ^2\,\|Δu_t\|^2 ,

so that, summed over time, for every two inputs and initial states

.. math:: \|Δx_t\| \le a^t\,\|Δx_0\| \ \text{ for equal inputs}, \qquad
          \sum_t \|Δy_t\|^2 \le γ^2 \sum_t \|Δu_t\|^2 + a^2\,\|Δx_0\|^2 .
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ldlt.check import finite, positive, whole
from ldlt.engine.network import Lipschitz
from ldlt.errors import OptionError, ShapeError

__all__ = ["Recurrent", "Unrolled"]


class _Loop(nn.Module):
    """The recurrence over time; how its cell is run is the subclass's."""

    inputs: int
    state: int
    outputs: int
    rate: float
    gain: float

    def _run(self) -> Callable[[Tensor], Tensor]:
        """The cell with plain weights, computed once."""
        raise NotImplementedError

    def forward(self, u: Tensor, x0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the recurrence; the explicit weights are computed once for all of time.

        Args:
            u: (batch, time, inputs).
            x0: State at the start (batch, state); zero by default.

        Returns:
            The outputs (batch, time, outputs) and the last state (batch, state).
        """
        if not isinstance(u, Tensor) or u.ndim != 3 or u.shape[2] != self.inputs:
            raise ShapeError(f"u must be (batch, time, {self.inputs}), not {tuple(getattr(u, 'shape', ()))}")
        x = u.new_zeros(len(u), self.state) if x0 is None else x0
        if x.shape != (len(u), self.state):
            raise ShapeError(f"x0 must be {(len(u), self.state)}, not {tuple(x.shape)}")
        run, found = self._run(), []
        for scaled in (self.gain * u).unbind(1):
            x, y = run(torch.cat([self.rate * x, scaled], 1)).split([self.state, self.outputs], 1)
            found.append(y)
        return torch.stack(found, 1) if found else u.new_zeros(len(u), 0, self.outputs), x

    def extra_repr(self) -> str:
        """Summary for ``repr``."""
        return (
            f"inputs={self.inputs}, state={self.state}, outputs={self.outputs}, rate={self.rate:g}, gain={self.gain:g}"
        )


class Unrolled(_Loop):
    """A frozen :class:`Recurrent`: plain weights, and nothing computed besides the recurrence."""

    def __init__(self, cell: nn.Module, net: Recurrent) -> None:
        super().__init__()
        self.cell = cell
        self.inputs, self.state, self.outputs = net.inputs, net.state, net.outputs
        self.rate, self.gain = net.rate, net.gain

    def _run(self) -> Callable[[Tensor], Tensor]:
        return cast(Callable[[Tensor], Tensor], self.cell)


class Recurrent(_Loop):
    r"""A recurrent network from any module as its cell: contracting with a given rate, with a given :math:`ℓ_2` gain.

    Args:
        cell: A module of vectors (batch, state + inputs) to (batch, state + outputs): scaled state and input side by
            side to next state and output side by side. Everything :class:`ldlt.Lipschitz` takes.
        inputs: Features of the input ``u_t``.
        state: Features of the state ``x_t``.
        rate: ``a`` in (0, 1]: states of two runs with equal inputs approach each other by this factor in every step.
        gain: ``γ > 0``: no change of the input sequence is amplified by more, in the norm over all of time.
        **options: Of :class:`ldlt.Lipschitz`.

    Attributes:
        cell: The 1-Lipschitz network that is run on ``(a x, γ u)``; certificates and files are about it.

    Shape:
        Input (batch, time, inputs), state (batch, state), output (batch, time, outputs).

    Example:
        >>> cell = nn.Sequential(nn.Linear(8 + 2, 32), nn.ReLU(), nn.Linear(32, 8 + 1))
        >>> net = Recurrent(cell, inputs=2, state=8, rate=0.9, gain=3.0)
        >>> y, x = net(torch.randn(4, 100, 2))
        >>> y.shape, x.shape
        (torch.Size([4, 100, 1]), torch.Size([4, 8]))
    """

    def __init__(
        self, cell: nn.Module, *, inputs: int, state: int, rate: float = 0.95, gain: float = 1.0, **options: Any
    ) -> None:
        super().__init__()
        self.inputs, self.state = whole("inputs", inputs), whole("state", state)
        self.rate, self.gain = finite("rate", rate, above=0.0), positive("gain", gain)
        if self.rate > 1:
            raise OptionError(f"rate must be at most 1, not {rate!r}: states would drift apart")
        if {"bound", "train_bound", "input_shape"} & set(options) or options.get("head") == "rows":
            raise OptionError("bound, input_shape and head='rows' are no options here: rate and gain bound the network")
        self.cell = Lipschitz(cell, 1.0, input_shape=self.state + self.inputs, **options)
        shape = self.cell.graph[self.cell.graph.output].shape
        if len(shape) != 1 or shape[0] <= self.state:
            raise ShapeError(
                f"the cell must make the next state, {self.state} features, and at least one output side by side, not "
                f"features of shape {shape}"
            )
        self.outputs = shape[0] - self.state

    def _run(self) -> Callable[[Tensor], Tensor]:
        return self.cell.function()

    def freeze(self) -> Unrolled:
        """An ordinary module with plain weights and the same outputs."""
        return Unrolled(self.cell.freeze(), self)
