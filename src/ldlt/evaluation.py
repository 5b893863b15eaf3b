"""Running somebody's module without leaving traces in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["evaluating", "normalising", "reference", "running_statistics"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while, each of its modules back into its own mode afterwards."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


def reference(module: nn.Module) -> Tensor:
    """A tensor with the precision and the device of a module."""
    tensors = [*module.parameters(), *module.buffers()]
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def normalising(module: nn.Module) -> dict[str, Any]:
    """Batch normalisations that have running statistics, by name."""
    found = {n: m for n, m in module.named_modules() if isinstance(m, _BatchNorm)}
    return {n: m for n, m in found.items() if m.track_running_stats and m.running_mean is not None}


@contextmanager
def running_statistics(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    r"""Within this context batch normalisation uses its running statistics; they are updated when it ends.

    Those of the batch would make a sample's output a function of all others, which has no bound. Yields copies by name
    to run the module with, which autograd remembers while the module's own are overwritten.
    """
    layers = {n: m for n, m in normalising(module).items() if m.training}
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def look(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        axes = [0, *range(2, x.ndim)]
        seen.append((layer, x.mean(axes), x.var(axes)))

    handles = [m.register_forward_pre_hook(look) for m in layers.values()]
    for m in layers.values():
        m.training = False
    try:
        yield {f"{n}.{b}": t.clone() for n, m in layers.items() for b, t in m.named_buffers(recurse=False)}
    finally:
        for m, handle in zip(layers.values(), handles, strict=True):
            m.training = True
            handle.remove()
    with torch.no_grad():
        for layer, mean, variance in seen:
            layer.num_batches_tracked.add_(1)
            share = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean), share)
            layer.running_var.lerp_(variance.to(layer.running_var), share)
