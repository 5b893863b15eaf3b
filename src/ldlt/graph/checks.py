"""What a graph is compared with before anything rests on it: the module itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.errors import GraphError, LdltError
from ldlt.graph.fold import Forward, fold
from ldlt.graph.nodes import Graph, Wire, index_map
from ldlt.graph.opaque import DROPOUT, Known

__all__ = ["check_graph", "hooks_of", "require_ordinary"]


def check_graph(module: nn.Module, graph: Graph) -> None:
    """Refuse a graph that does not suit the engine, or is not what the module computes.

    Raises:
        GraphError: With the reason.
    """
    shape = graph[graph.output].shape
    if 0 in shape:
        raise GraphError("the output has no features")
    if len(shape) != 1 and not graph.has_images:
        shown = ", ".join(map(str, shape))
        raise GraphError(f"the output must have shape (batch, k), not (batch, {shown}): flatten it")
    tensors = graph.tensors(module)
    for path in graph.constants:
        value = tensors(path).detach()
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise GraphError(f"the constant '{path[1:]}' has entries that are not finite; no bound holds for them")
    _compare(module, graph)


def require_ordinary(module: nn.Module) -> None:
    """Refuse parameters and buffers that are no ordinary tensors of finite real numbers.

    Raises:
        GraphError: With the name of the tensor.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise GraphError(f"'{name}' has no values yet; run the module once to initialise its lazy layers")
        ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not ordinary or tensor.is_complex() or tensor.is_quantized:
            raise GraphError(f"'{name}' is not an ordinary tensor of real numbers ({type(tensor).__name__})")
        if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.detach().isfinite().all()):
            raise GraphError(f"'{name}' has entries that are infinite or not a number; no bound holds for them")


def hooks_of(module: nn.Module) -> list[str]:
    """What runs beside or instead of the forward functions: a graph is only that of a module with the same of these."""
    shared: Any = nn.modules.module
    tables = [("", shared._global_forward_hooks), ("", shared._global_forward_pre_hooks)]
    found = []
    for path, m in module.named_modules():
        tables += [(path, m._forward_hooks), (path, m._forward_pre_hooks)]
        if "forward" in m.__dict__:
            found.append(f"{path} forward")
    for path, table in tables:
        found += [f"{path} {getattr(hook, '__qualname__', type(hook).__name__)}" for hook in table.values()]
    return found


def _twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in double precision with random parameters."""
    try:
        twin = copy.deepcopy(module).double().cpu()
    except Exception as error:
        raise GraphError(f"{type(module).__name__} cannot be copied: {error}") from error
    for p in twin.parameters():
        if p.is_floating_point():
            width = max(1, p.shape[-1]) if p.ndim else 1
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / width**0.5)
    return twin


class _Claims(Forward):
    """Values as everything that reads the roles of linear operations takes them to be."""

    def __init__(self, graph: Graph, module: nn.Module, x: Tensor) -> None:
        super().__init__(module, graph.tensors(module), x)
        self.graph = graph

    def wire(self, node: Wire, parents: Sequence[Tensor]) -> Tensor:
        run = node.bind(self.tensors)
        if node.role == "sum":
            return node.linear(self.tensors)(*parents) + run(*map(torch.zeros_like, parents))
        if node.role == "rearrange":
            index = index_map(self.graph.index, node, self.tensors)
            flat = [p.reshape(len(p), self.graph[n].features) for p, n in zip(parents, node.parents, strict=True)]
            return torch.cat(flat, 1)[:, index].reshape(len(self.x), *node.shape)
        value, others = run(*parents), [torch.randn_like(p) for p in parents]
        together = run(*(p + o for p, o in zip(parents, others, strict=True)))
        if not _close(together, value + run(*others)):
            raise GraphError(f"'{node.operation}' (node '{node.name}') is not linear, which its rule says")
        return value


def _close(found: Tensor, expected: Tensor) -> bool:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if not bool(expected.isfinite().all()):
        raise GraphError("the module computes numbers that are not finite; no bound holds for them")
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-9 * (1 + size))


def _compare(module: nn.Module, graph: Graph) -> None:
    """Run the graph beside the module itself, in batches and alone, in both modes."""
    generator = torch.Generator().manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)  # of the tensors that forward makes
        twin = _twin(module, generator)
        x = 2 * torch.randn(4, *graph.input.shape, generator=generator, dtype=torch.float64)
        for training in (False, True):
            twin.train(training)
            for m in twin.modules():
                if isinstance(m, (*DROPOUT, nn.RReLU, nn.modules.batchnorm._BatchNorm)):
                    m.eval()
            try:
                expected = fold(graph, _Claims(graph, twin, x.clone()))[graph.output]
                found = _outputs(twin, x, training)
            except LdltError:
                raise
            except Exception as error:
                raise GraphError(
                    f"the module cannot be run in double precision, one sample at a time: {error}"
                ) from error
            for reason, value in found.items():
                if not _close(value, expected):
                    mode = "training" if training else "evaluation"
                    raise GraphError(f"the traced graph is not what the module computes in {mode} mode: {reason}")


def _outputs(module: nn.Module, x: Tensor, training: bool) -> dict[str, Tensor]:
    """What the module computes in several ways, and what is wrong if one of them is not the graph's."""
    with Known(functions=False, training=training):
        found = {
            "look for a hook, an overwritten tensor, randomness or a use of self.training": module(x.clone()),
            "samples of a batch influence each other, or a batch of one is treated differently": torch.cat(
                [module(x[i : i + 1].clone()) for i in range(len(x))]
            ),
        }
        with contextlib.suppress(RuntimeError):  # a view that such an input has not
            strewn = module(x.movedim(0, -1).contiguous().movedim(-1, 0))
            found["it depends on how its input lies in memory"] = strewn
    return found
