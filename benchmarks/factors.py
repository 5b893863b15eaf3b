"""Pictures of the structure behind the paper's residual block: its factors, and its output map under both roots.

    python benchmarks/factors.py FOLDER [--seed 0]

writes ``factors.svg`` and ``b.svg`` there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ldlt_bench.paper.block import ResidualBlock
from ldlt_bench.paper.corrected import corrected_block
from ldlt_bench.paper.factors import closed_form_factors
from ldlt_bench.paper.roots import Root

_DECADES = 4.0  # colours span this many orders of magnitude below the largest entry


def _save(figure: Figure, target: Path) -> Path:
    """Write the figure; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "ldlt"}):
        figure.savefig(target, dpi=160, metadata={"Date" if target.suffix.lower() == ".svg" else "Software": None})
    return target


def _draw_block(hidden: Sequence[int], io: int, seed: int, root: Root) -> ResidualBlock:
    """A corrected block from Gaussian free matrices, variance one over the number of columns (float64)."""
    generator = torch.Generator().manual_seed(seed)

    def free(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.float64, generator=generator) / columns**0.5

    middle = [free(q, p) for p, q in pairwise([io, *hidden])]
    return corrected_block(free(io, io), middle, free(io, hidden[-1]), root=root)


def factor_structure(path: str | Path, hidden: Sequence[int] = (32, 64, 256, 256), io: int = 4, seed: int = 0) -> Path:
    r"""Draw the magnitudes of both factors of :math:`M = L D L^\top` for a random block.

    Left the unit lower triangular factor: identities, one band below them, and a last row that is full because of the
    skip. Right the pivots. Exact zeros are grey; the side of a block is in proportion to the root of its size.

    Args:
        path: File to write, ``.png`` or ``.svg``.
        hidden: Sizes of the hidden layers.
        io: Size of input and output.
        seed: Seed of the free parameters.

    Returns:
        The path written.
    """
    figure = Figure(figsize=(11.5, 5.2), layout="constrained")
    block = _draw_block(hidden, io, seed, "symmetric")
    lower, pivots = closed_form_factors(block).dense()
    sides = [max(round(32 * size**0.5), size) for size in block.sizes]
    starts = [sum(block.sizes[:k]) for k in range(len(sides))]
    index = torch.cat(
        [at + (torch.arange(q) * size) // q for at, q, size in zip(starts, sides, block.sizes, strict=True)]
    )
    edges = [sum(sides[:k]) for k in range(len(sides) + 1)]
    centres = [(left + right - 1) / 2 for left, right in pairwise(edges)]
    names = ["$x$", *(f"$w_{{{k}}}$" for k in range(1, len(sides)))]
    panels = figure.subplots(1, 2)
    top = max(float(lower.abs().max().log10()), float(pivots.abs().max().log10()))
    titles = (r"unit lower triangular factor $L$", r"block diagonal factor $D$")
    for panel, matrix, title in zip(panels, (lower, pivots), titles, strict=True):
        logs = matrix[index][:, index].abs().log10()
        image = panel.imshow(
            logs.masked_fill(logs.isinf(), torch.nan).numpy(),
            cmap=matplotlib.colormaps["viridis"].with_extremes(bad="#ececec"),
            vmin=top - _DECADES,
            vmax=top,
            interpolation="nearest",
        )
        for edge in edges[1:-1]:
            panel.axhline(edge - 0.5, color="#c0392b", linewidth=0.6)
            panel.axvline(edge - 0.5, color="#c0392b", linewidth=0.6)
        panel.set_xticks(centres, names)
        panel.set_yticks(centres, [f"{name} ({size})" for name, size in zip(names, block.sizes, strict=True)])
        panel.tick_params(length=0)
        panel.set_title(title)
    bar = figure.colorbar(image, ax=panels, shrink=0.85, extend="min")
    bar.set_label(r"$\log_{10}|\mathrm{entry}|$   (grey: exactly zero)")
    figure.suptitle(rf"Factors of $M = LDL^\top$: in and out {io}, hidden {', '.join(map(str, hidden))}")
    return _save(figure, Path(path))


def b_structure(
    path: str | Path, hidden: Sequence[int] = (32, 64, 128), io: int = 4, seed: int = 0, *, draws: int = 200
) -> Path:
    r"""Draw :math:`|B|` of a random corrected block under symmetric and under Cholesky roots.

    Both roots reach the same set of maps, but from the same Gaussian free matrices a triangular root favours
    some hidden units over others, which a symmetric root does not: the curves are mean norms of the columns of B.

    Args:
        path: File to write, ``.png`` or ``.svg``.
        hidden: Sizes of the hidden layers.
        io: Size of input and output.
        seed: Seed of the first draw.
        draws: Number of draws behind the curves.

    Returns:
        The path written.
    """
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    kinds: tuple[Root, ...] = ("symmetric", "cholesky")
    maps = [_draw_block(hidden, io, seed, kind).B.abs() for kind in kinds]
    limit = max(float(matrix.max()) for matrix in maps)
    panels = figure.subplots(3, 1, height_ratios=(1, 1, 1.5), sharex=True)
    for panel, matrix, kind, colour in zip(panels, maps, kinds, ("#1f77b4", "#c0392b"), strict=False):
        name = kind.replace("cholesky", "Cholesky")
        image = panel.imshow(matrix.numpy(), cmap="magma", vmin=0, vmax=limit, aspect="auto", interpolation="nearest")
        panel.set(title=f"$|B|$, {name} roots", ylabel="output", yticks=range(io))
        panel.tick_params(length=0)
        norms = [torch.linalg.vector_norm(_draw_block(hidden, io, seed + k, kind).B, dim=0) for k in range(draws)]
        panels[2].plot(torch.stack(norms).mean(0).numpy(), color=colour, label=name, linewidth=1.4)
    figure.colorbar(image, ax=panels[:2], label="absolute value", pad=0.015)
    panels[2].set_ylim(bottom=0)
    panels[2].set_xlabel("hidden unit of the last layer")
    panels[2].set_ylabel(f"column norm of $B$\n(mean of {draws} draws)")
    panels[2].legend(frameon=False)
    panels[2].grid(alpha=0.3)
    figure.suptitle(f"Output map of the corrected block: in and out {io}, hidden {', '.join(map(str, hidden))}")
    return _save(figure, Path(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(factor_structure(arguments.folder / "factors.svg", seed=arguments.seed))
    print(b_structure(arguments.folder / "b.svg", seed=arguments.seed))


if __name__ == "__main__":
    main()
