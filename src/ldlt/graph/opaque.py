"""Layers and functions whose rule is known as a whole are exported as one operation that carries their path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ldlt import activations
from ldlt.errors import GraphError

__all__ = ["DROPOUT", "Known", "opaque"]

DROPOUT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity,
)  # fmt: skip
_FUNCTIONS = {f: f.__name__ for f in (F.softsign, F.tanhshrink, F.softshrink, F.rrelu)}
"""Activations that ATen writes as several operations."""
_CHANCE = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


@torch.library.custom_op("ldlt::layer", mutates_args=())
def _layer(x: Tensor, path: str, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


@_layer.register_fake
def _(x: Tensor, path: str, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


def _as_layer(x: Tensor, path: str, outputs: Sequence[int] | None = None) -> Tensor:
    shape = x.shape if outputs is None else (x.shape[0], *outputs)
    return cast(Tensor, torch.ops.ldlt.layer(x, path, shape))


def _plain(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Whether a module runs the forward function of one of these classes, and no other."""
    own = getattr(module.forward, "__func__", None)
    return any(isinstance(module, k) and own is k.forward for k in kinds)


class Known(TorchFunctionMode):
    """Functions that are exported as one operation; dropout is the identity of every certificate.

    Without ``functions`` the mode only switches dropout off. Dropout that is on in evaluation is refused.
    """

    def __init__(self, functions: bool = True, training: bool = False) -> None:
        super().__init__()
        self.functions, self.training = functions, training
        self.made: dict[str, nn.Module] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = dict(kwargs or {})
        if func in _CHANCE and not self.training:
            default = func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
            if args[2] if len(args) > 2 else options.get("training", options.get("train", default)):
                raise GraphError("dropout that is on in evaluation is random; pass training=self.training")
        if func in _CHANCE and not options.get("inplace", False) and args[3:4] != (True,):
            return args[0] if args else options["input"]
        if self.functions and func in _FUNCTIONS and not (options.get("inplace", False) or True in args[4:5]):
            x, *rest = args if args else (options.pop("input"),)
            path = f"={_FUNCTIONS[func]}_{len(self.made)}"
            self.made[path] = cast(Any, activations.maker(_FUNCTIONS[func]))(*rest, **options)
            return _as_layer(x, path)
        return func(*args, **options)


@contextlib.contextmanager
def opaque(module: nn.Module, training: bool) -> Iterator[dict[str, nn.Module]]:
    """Within this context known layers export as one operation; yields those that functions were turned into."""
    swapped: list[nn.Module] = []
    try:
        for path, layer in module.named_modules():
            if "forward" in layer.__dict__ or getattr(layer, "inplace", False) or ".parametrizations." in path:
                continue
            if _plain(layer, DROPOUT):
                run: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
            elif _plain(layer, [k for k in type(layer).__mro__ if "ldlt_frozen" in k.__dict__]):
                run = partial(_as_layer, path=path, outputs=cast(Any, layer).outputs)
            elif activations.is_activation(layer):
                run = partial(_as_layer, path=path)
            else:
                continue
            layer.__dict__["forward"] = run
            swapped.append(layer)
        with Known(training=training) as known:
            yield known.made
    finally:
        for layer in swapped:
            del layer.__dict__["forward"]
