"""Random modules and kinds of parameters: what a network has to hold out against.

A module is drawn from the table of moves by its seed; its network is then set to parameters of every kind of
:data:`PARAMETERS`, on all entries of ``net.parameters()``, multipliers and frozen weights included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.testing.moves import Move, Shape, drawn_moves

LARGEST = 48
"""Features of the largest value: exact Jacobians and eigenvalues stay cheap."""


class Program(nn.Module):
    """An ordinary module whose forward function runs its steps in order.

    Args:
        steps: The steps; the input is value 0 and step ``i`` gives value ``i + 1``.
        parents: Which values each step reads.
        ends: Which values the heads read.
        heads: One module per end.
        join: ``"sum"`` or ``"cat"``: how the heads' outputs become one.
    """

    def __init__(
        self, steps: Sequence[nn.Module], parents: Sequence[Shape], ends: Shape, heads: Sequence[nn.Module], join: str
    ) -> None:
        super().__init__()
        self.steps, self.heads = nn.ModuleList(steps), nn.ModuleList(heads)
        self.parents, self.ends, self.join = tuple(parents), tuple(ends), join

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the heads, or their outputs side by side."""
        values = [x]
        for step, parents in zip(self.steps, self.parents, strict=True):
            values.append(step(*[values[p] for p in parents]))
        outputs = [head(values[end]) for head, end in zip(self.heads, self.ends, strict=True)]
        if self.join == "cat" and len(outputs) > 1:
            return torch.cat(outputs, 1)
        total = outputs[0]
        for other in outputs[1:]:
            total = total + other
        return total


@dataclass
class Hostile:
    """A module that was drawn.

    Attributes:
        seed: What determines everything else.
        module: In ``dtype``, in training mode as modules are when they are made.
        input_shape: Shape of a sample.
        options: Arguments of :class:`ldlt.Lipschitz` besides.
        dtype: float32 or float64.
        moves: Names of the moves that its output depends on.
    """

    seed: int
    module: nn.Module
    input_shape: Shape
    options: dict[str, Any]
    dtype: torch.dtype
    moves: tuple[str, ...] = field(default=())


def hostile_module(seed: int) -> Hostile:
    """Draw a module: 1 to 13 moves, skips, one to three heads, and options; the same for the same seed and table."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = rng.choice([_vector, _vector, _sequence, _image, _image, _image])(rng)
        steps, parents, moves, shapes = _draw(rng, shape, _palette(rng), min(rng.randint(1, 13), rng.randint(1, 13)))
        unread = set(range(len(shapes) - 1)) - {p for read in parents for p in read}
        last = {len(shapes) - 1, *(v for v in sorted(unread)[-2:] if rng.random() < 0.7)}
        ends = sorted(last | {rng.randrange(len(shapes))} if rng.random() < 0.3 else last)
        heads, join, free = _heads(rng, [shapes[e] for e in ends])
        used = _reached(parents, ends)
        place = {0: 0} | {old + 1: new + 1 for new, old in enumerate(used)}
        module = Program(
            [steps[i] for i in used],
            [tuple(place[p] for p in parents[i]) for i in used],
            tuple(place[e] for e in ends),
            heads,
            join,
        )
        dtype = rng.choice([torch.float32, torch.float64])
        options = {
            "bound": rng.choice([0.01, 1.0, 7.3, 1e4]),
            "contraction": rng.choice(["cholesky", "symmetric", "cayley"]),
            "head": rng.choice(["joint", "orthogonal", "rows"]),
            "output": "scale" if not free or rng.random() < 0.1 else "free",
        }
        return Hostile(seed, module.to(dtype), shape, options, dtype, tuple(moves[i].name for i in used))


def _vector(rng: random.Random) -> Shape:
    return (rng.randint(1, 8),)


def _sequence(rng: random.Random) -> Shape:
    return (rng.randint(1, 4), rng.randint(2, 6))


def _image(rng: random.Random) -> Shape:
    return (rng.randint(1, 3), *rng.choice([(3, 3), (4, 4), (2, 4), (3, 5), (4, 3)]))


def _palette(rng: random.Random) -> list[list[Move]]:
    """The moves of one module by kind.

    Most of the table is left out: a move that is refused does not get into every module, and those that are left meet
    each other more often than they would in the whole crowd.
    """
    moves = drawn_moves()
    kinds = [k for k in sorted({m.kind for m in moves}) if rng.random() < (0.1 if k == "unbounded" else 0.6)]
    chosen = [[m for m in moves if m.kind == k and rng.random() < 0.6] for k in kinds]
    return [c for c in chosen if c] or [moves]


def _draw(
    rng: random.Random, shape: Shape, palette: Sequence[Sequence[Move]], count: int
) -> tuple[list[nn.Module], list[Shape], list[Move], list[Shape]]:
    """Steps, their parents, their moves, and the shapes of all values."""
    steps: list[nn.Module] = []
    parents: list[Shape] = []
    moves: list[Move] = []
    shapes = [shape]
    for _ in range(50 * count):  # most moves fit most shapes, but a palette may have none that does
        if len(steps) == count:
            break
        drawn = rng.choice(rng.choice(palette))
        for _ in range(1 if drawn.parents == 1 else 8):  # two values seldom fit each other
            newest = (rng.random() < 0.7 for _ in range(drawn.parents))
            read = tuple(len(shapes) - 1 if n else rng.randrange(len(shapes)) for n in newest)
            step = drawn.make(rng, *(shapes[p] for p in read))
            if step is not None:
                break
        else:
            continue
        with torch.no_grad():
            new = tuple(step.eval()(*(torch.zeros(2, *shapes[p]) for p in read)).shape[1:])
        if not 1 <= len(new) <= 3 or not 1 <= prod(new) <= LARGEST:
            continue
        steps.append(step.train())
        parents.append(read)
        moves.append(drawn)
        shapes.append(new)
    return steps, parents, moves, shapes


def _heads(rng: random.Random, shapes: Sequence[Shape]) -> tuple[list[nn.Module], str, bool]:
    """A head for each end, how they are joined, and whether they are free maps."""
    join, outputs = rng.choice(["sum", "cat"]), rng.randint(1, 5)
    if rng.random() < 0.9:
        sizes = [outputs if join == "sum" else rng.randint(1, 3) for _ in shapes]
        heads = [nn.Sequential(nn.Flatten(), nn.Linear(prod(s), n)) for s, n in zip(shapes, sizes, strict=True)]
        return list(heads), join, True
    return [nn.Flatten() for _ in shapes], "sum" if len(set(map(prod, shapes))) == 1 else "cat", False


def _reached(parents: Sequence[Shape], ends: Sequence[int]) -> list[int]:
    """Steps that the output depends on: the parameters of the others would get no gradient."""
    alive = set(ends)
    for i in reversed(range(len(parents))):
        if i + 1 in alive:
            alive.update(parents[i])
    return [i for i in range(len(parents)) if i + 1 in alive]


# --------------------------------------------------------------------------------------------------- parameters

Kind = Callable[[nn.Module, torch.Generator], None]


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _rank_one(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return _normal(shape, generator)
    rows, columns = shape[0], prod(shape[1:])
    left, right = (_normal(torch.Size(s), generator) for s in ((rows, 1), (1, columns)))
    return (3 * left @ right).reshape(shape)


def _cauchy(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return _normal(shape, generator) / _normal(shape, generator)


def _all(draw: Callable[[torch.Size, torch.Generator], Tensor]) -> Kind:
    """Every parameter of a network, whatever its role, takes values of this kind."""

    def apply(net: nn.Module, generator: torch.Generator) -> None:
        with torch.no_grad():
            for p in net.parameters():
                if p.is_floating_point():
                    p.copy_(draw(p.shape, generator))

    return apply


def _trained(net: nn.Module, generator: torch.Generator, steps: int = 100, rate: float = 0.1) -> None:
    """Large steps that make the map as steep as they can between two fixed batches."""
    like = next(p for p in net.parameters() if p.is_floating_point())
    shape: Shape = net.input_shape  # type: ignore[assignment]
    x = _normal(torch.Size((8, *shape)), generator)
    y = x + 0.3 * _normal(x.shape, generator)
    both, distance = torch.cat([x, y]).to(like), (x - y).to(like).flatten(1).norm(dim=1)
    optimiser = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], rate)
    for _ in range(steps):
        optimiser.zero_grad()
        first, second = net(both.clone()).chunk(2)
        gap = first - second
        (-(gap.flatten(1).square().sum(1) + 1e-12).sqrt() / distance).mean().backward()
        optimiser.step()
    optimiser.zero_grad()


def _loaded(net: nn.Module, generator: torch.Generator) -> None:
    """The state of another network of this kind: its constants and frozen weights come along."""
    state = {n: v.clone() for n, v in net.state_dict().items()}
    own = {n for n, _ in net.named_parameters()} | {f"module.{n}" for n, _ in net.module.named_buffers()}  # type: ignore[operator, union-attr]
    for name in sorted(own & set(state)):
        if state[name].is_floating_point():
            drawn = _normal(state[name].shape, generator)
            state[name].copy_(drawn.square() + 0.01 if name.endswith("running_var") else drawn)
        elif state[name].ndim:  # a table of indices: others of its entries
            state[name].copy_(state[name][torch.randint(len(state[name]), (len(state[name]),), generator=generator)])
    net.load_state_dict(state)


PARAMETERS: dict[str, Kind] = {
    "start": lambda net, generator: None,
    "normal": _all(_normal),
    "thousand": _all(lambda shape, g: 1e3 * _normal(shape, g)),
    "million": _all(lambda shape, g: 1e6 * _normal(shape, g)),
    "tiny": _all(lambda shape, g: 1e-8 * _normal(shape, g)),
    "zero": _all(lambda shape, g: torch.zeros(shape, dtype=torch.float64)),
    "equal": _all(lambda shape, g: _normal(torch.Size(()), g).expand(shape)),
    "rank_one": _all(_rank_one),
    "cauchy": _all(_cauchy),
    "trained": _trained,
    "loaded": _loaded,
}
"""Kinds of parameters by name: ``(net, generator)`` sets them in place."""


def pick_kinds(seed: int, count: int) -> list[str]:
    """Some kinds for a seed: cheap ones, and training for one seed in sixteen."""
    rng = random.Random(f"kinds {seed}")
    chosen = rng.sample([k for k in PARAMETERS if k != "trained"], min(count, len(PARAMETERS) - 1))
    return [*chosen[:-1], "trained"] if rng.random() < 1 / 16 else chosen
