"""Batch normalisation in training: normalise by the running statistics, which no sample can change, and update them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["running_statistics"]


@contextmanager
def running_statistics(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    r"""Within this context batch normalisation uses its running statistics; they are updated when it ends.

    Statistics of the batch itself would make a sample's output a function of all others, which has no bound. With the
    mean μ and the unbiased variance v of the batch, ``μ_running ← (1 − m) μ_running + m μ``, likewise for v, as PyTorch
    does it.

    Args:
        module: The user's module.

    Yields:
        Copies of the statistics by name, to run the module with: autograd remembers them until the backward pass,
        while the module's own are overwritten.
    """
    layers = {n: m for n, m in module.named_modules() if isinstance(m, _BatchNorm) and m.training}
    layers = {n: m for n, m in layers.items() if m.track_running_stats and m.running_mean is not None}
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def look(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        axes = [0, *range(2, x.ndim)]
        seen.append((layer, x.mean(axes), x.var(axes)))

    handles = [m.register_forward_pre_hook(look) for m in layers.values()]
    copies = {f"{n}.{b}": t.clone() for n, m in layers.items() for b, t in m.named_buffers(recurse=False)}
    for m in layers.values():
        m.training = False
    try:
        yield copies
    finally:
        for m in layers.values():
            m.training = True
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for layer, mean, variance in seen:
            layer.num_batches_tracked.add_(1)
            share = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean), share)
            layer.running_var.lerp_(variance.to(layer.running_var), share)
