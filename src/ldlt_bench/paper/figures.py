"""Pictures of the structure behind the residual block: its factors, and its output map under both roots."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldlt.errors import MissingExtraError, OptionError
from ldlt_bench.paper.block import ResidualBlock
from ldlt_bench.paper.corrected import corrected_block
from ldlt_bench.paper.factors import closed_form_factors
from ldlt_bench.paper.roots import Root

__all__ = ["b_structure", "factor_structure"]

_DECADES = 4.0  # colours span this many orders of magnitude below the largest entry


def _open(path: str | PathLike[str]) -> tuple[Path, Any]:
    """The file to write, and matplotlib."""
    target = Path(path)
    if target.suffix.lower() not in {".png", ".svg"}:
        raise OptionError(f"figures are written as .png or .svg, not '{target.suffix}'")
    try:
        import_module("matplotlib.figure")
        return target, import_module("matplotlib")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "bench") from error


def _save(mpl: Any, figure: Any, target: Path) -> Path:
    """Write the figure; the same figure gives the same bytes."""
    metadata = {"Date": None} if target.suffix.lower() == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "ldlt"}):
        figure.savefig(target, dpi=160, metadata=metadata)
    return target


def _draw_block(hidden: Sequence[int], io: int, seed: int, root: Root) -> ResidualBlock:
    """A corrected block from Gaussian free matrices, variance one over the number of columns (float64)."""
    generator = torch.Generator().manual_seed(seed)

    def free(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.float64, generator=generator) / columns**0.5

    sizes = [io, *hidden]
    return corrected_block(
        free(io, io), [free(q, p) for p, q in zip(sizes, hidden, strict=False)], free(io, sizes[-1]), root=root
    )


def _magnitude(matrix: Tensor) -> Any:
    """``log10`` of the absolute values; exact zeros become NaN, which is drawn in the background colour."""
    logs = matrix.abs().log10()
    return torch.where(matrix == 0, torch.full_like(logs, torch.nan), logs).numpy()


def factor_structure(
    path: str | PathLike[str], hidden: Sequence[int] = (32, 64, 256, 256), io: int = 4, seed: int = 0
) -> Path:
    r"""Draw the magnitudes of both factors of :math:`M = L D L^\top` for a random block.

    Left the unit lower triangular factor: identities, one band below them, and a last row that is full
    because of the skip. Right the pivots. Exact zeros are grey; the side of a block is drawn in proportion to
    the root of its size, so that small blocks remain visible.

    Args:
        path: File to write, ``.png`` or ``.svg``.
        hidden: Sizes of the hidden layers.
        io: Size of input and output.
        seed: Seed of the free parameters.

    Returns:
        The path written.

    Raises:
        LdltError: If an argument is out of its range or does not fit the others.
    """
    target, mpl = _open(path)
    block = _draw_block(hidden, io, seed, "symmetric")
    lower, pivots = closed_form_factors(block).dense()
    # Small blocks would be lost next to large ones: a block of size d is drawn with a side of about √d.
    sides = [max(round(32 * size**0.5), size) for size in block.sizes]
    index = torch.cat([(torch.arange(side) * size) // side for side, size in zip(sides, block.sizes, strict=True)])
    starts = torch.tensor([0, *block.sizes[:-1]]).cumsum(0)
    index = index + starts.repeat_interleave(torch.tensor(sides))
    edges = torch.tensor([0, *sides]).cumsum(0).tolist()
    centres = [(left + right - 1) / 2 for left, right in pairwise(edges)]
    names = ["$x$" if k == 0 else f"$w_{{{k}}}$" for k in range(len(sides))]
    colours = mpl.colormaps["viridis"].with_extremes(bad="#ececec")

    figure = mpl.figure.Figure(figsize=(11.5, 5.2), layout="constrained")
    panels = figure.subplots(1, 2)
    top = max(float(lower.abs().max().log10()), float(pivots.abs().max().log10()))
    for panel, matrix, title in zip(
        panels, (lower, pivots), (r"unit lower triangular factor $L$", r"block diagonal factor $D$"), strict=True
    ):
        image = panel.imshow(
            _magnitude(matrix[index][:, index]), cmap=colours, vmin=top - _DECADES, vmax=top, interpolation="nearest"
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
    return _save(mpl, figure, target)


def b_structure(
    path: str | PathLike[str], hidden: Sequence[int] = (32, 64, 128), io: int = 4, seed: int = 0, *, draws: int = 200
) -> Path:
    r"""Draw :math:`|B|` of a random corrected block under symmetric and under Cholesky roots.

    Both roots reach the same set of maps, but from the same Gaussian free matrices a triangular root favours
    some hidden units over others, which a symmetric root does not. The curves below show the norm of each
    column of :math:`B`, averaged over several draws.

    Args:
        path: File to write, ``.png`` or ``.svg``.
        hidden: Sizes of the hidden layers.
        io: Size of input and output.
        seed: Seed of the first draw.
        draws: Number of draws behind the curves.

    Returns:
        The path written.

    Raises:
        LdltError: If an argument is out of its range or does not fit the others.
    """
    target, mpl = _open(path)
    kinds: tuple[Root, Root] = ("symmetric", "cholesky")
    maps = [_draw_block(hidden, io, seed, kind).B.abs() for kind in kinds]
    limit = max(float(matrix.max()) for matrix in maps)

    figure = mpl.figure.Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplots(3, 1, height_ratios=(1, 1, 1.5), sharex=True)
    for panel, matrix, kind in zip(panels[:2], maps, kinds, strict=True):
        image = panel.imshow(matrix.numpy(), cmap="magma", vmin=0, vmax=limit, aspect="auto", interpolation="nearest")
        panel.set_title(f"$|B|$, {'Cholesky' if kind == 'cholesky' else kind} roots")
        panel.set_ylabel("output")
        panel.set_yticks(range(io))
        panel.tick_params(length=0)
    figure.colorbar(image, ax=panels[:2], label="absolute value", pad=0.015)
    for kind, colour in zip(kinds, ("#1f77b4", "#c0392b"), strict=True):
        norms = torch.stack(
            [torch.linalg.vector_norm(_draw_block(hidden, io, seed + k, kind).B, dim=0) for k in range(draws)]
        )
        panels[2].plot(
            norms.mean(0).numpy(), color=colour, label="Cholesky" if kind == "cholesky" else kind, linewidth=1.4
        )
    panels[2].set_ylim(bottom=0)
    panels[2].set_xlabel("hidden unit of the last layer")
    panels[2].set_ylabel(f"column norm of $B$\n(mean of {draws} draws)")
    panels[2].legend(frameon=False)
    panels[2].grid(alpha=0.3)
    widths = ", ".join(map(str, hidden))
    figure.suptitle(f"Output map of the corrected block: in and out {io}, hidden {widths}")
    return _save(mpl, figure, target)
