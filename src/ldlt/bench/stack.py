"""Many networks of one architecture as one program: the folds, seeds and settings of one data set and family.

The parameters of n networks are the rows of one matrix (n, P). A step of all of them is one recorded list of batched
operations (:mod:`ldlt.program`), and AdamW is a handful of operations on the whole matrix (:mod:`ldlt.adamw`). The
rows never mix, so a stack computes what n separate runs compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ldlt.bench.models import Model
from ldlt.program import Program, record

__all__ = ["Stack", "flatten", "margin_loss", "unflatten"]


def flatten(model: Model) -> Tensor:
    """Trained parameters of a model, as stored (see ``Model.scales``), in one vector (P,)."""
    parts = [(p.detach() / model.scales.get(n, 1.0)).reshape(-1) for n, p in _trained(model.module)]
    return torch.cat(parts)


def unflatten(model: Model, flat: Tensor) -> dict[str, Tensor]:
    """Parameters as used, by name, from a vector as stored."""
    found = {}
    names = _trained(model.module)
    for (name, like), part in zip(names, flat.split([p.numel() for _, p in names]), strict=True):
        value = part.view(like.shape)
        found[name] = value * model.scales[name] if name in model.scales else value
    return found


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad]


def margin_loss(logits: Tensor, labels: Tensor, offset: Tensor, temperature: Tensor) -> Tensor:
    """``t · CE((y − o·onehot(c)) / t)`` per row; see :class:`ldlt.bench.protocol.Loss`.

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
