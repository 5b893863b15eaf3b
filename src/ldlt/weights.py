"""Weights that are known by what they do: layers apply them, and nothing multiplies them out unless it has to."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["ActingWeight"]


class ActingWeight(Tensor):
    """A tensor in the place of a layer's weight, which the layer's own forward function applies.

    Whoever calls one of :attr:`calls` with it as the weight gets :meth:`apply_to`; everything else sees
    :meth:`multiplied_out`.

    Attributes:
        calls: Functions of ``torch.nn.functional``, with arguments ``input``, ``weight``, ``bias``.
    """

    calls: ClassVar[frozenset[Any]] = frozenset()

    def __new__(cls, shape: torch.Size, like: Tensor) -> ActingWeight:
        """A tensor of that shape, in the precision and on the device of another one."""
        self: ActingWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """What the layer computes for x; None for an input that must meet the explicit numbers."""
        raise NotImplementedError

    def multiplied_out(self) -> Tensor:
        """The explicit numbers."""
        raise NotImplementedError

    def detached(self) -> Tensor:
        """The same without gradient."""
        return self.multiplied_out().detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = dict(kwargs or {})
        if func in cls.calls:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | options
            weight = given["weight"]
            y = weight.apply_to(given["input"], given.get("bias")) if isinstance(weight, cls) else None
            if y is not None:
                return y
        if func is Tensor.detach and isinstance(args[0], cls):
            return args[0].detached()
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "stride", "is_floating_point"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        return cls.__torch_dispatch__(func, types, args, options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map(
            lambda a: a.multiplied_out() if isinstance(a, ActingWeight) else a, (tuple(args), dict(kwargs or {}))
        )
        return func(*plain[0], **plain[1])
