"""The residual block of the paper, as printed, breaks its bound; the corrected one does not.

Run:  python examples/erratum.py --out pictures

Juston et al., *LDLT L-Lipschitz Network* (2025), build a residual block that is meant to be 1-Lipschitz for all values
of its parameters. The printed output map forgets two cross terms (docs/errata.md has the algebra).

1. By hand: one input, one ReLU, one output. The block has slope 5/4, in exact arithmetic.
2. By training: the printed block and this library's residual network are trained to be as steep as they can. The
   printed one passes its bound; the other comes close to it.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import ldlt
from ldlt_bench.paper import AsPrintedResidual, AsPrintedWarning, ScalarCounterexample, scalar_counterexample

SIZES = (3, [6], 3)


@dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
        scalar: The counterexample by hand.
        slopes: Steepest slope of a training pair after every step, by network.
        attacked: Steepest slope that an attack finds after training, by network. Both claim the bound 1.
    """

    scalar: ScalarCounterexample
    slopes: dict[str, list[float]]
    attacked: dict[str, float]


def steepen(net: nn.Module, steps: int) -> list[float]:
    """Adam on the (soft) largest slope over random pairs of inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, SIZES[0], generator=generator, dtype=torch.float64)
    y = x + 0.3 * torch.randn(32, SIZES[0], generator=generator, dtype=torch.float64)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        slopes: Tensor = (net(x) - net(y)).norm(dim=1) / (x - y).norm(dim=1)
        found.append(float(slopes.detach().max()))
        optimiser.zero_grad()
        (-torch.logsumexp(5 * slopes, dim=0)).backward()
        optimiser.step()
    return found


def draw(path: Path, result: Result) -> None:
    """Left: the scalar block leaves the cone of slope one. Right: slopes during training."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-1, 1, 201, dtype=torch.float64)
    with torch.no_grad():
        y = result.scalar.block.forward(x[:, None])[:, 0]
    left.fill_between(x, -x.abs(), x.abs(), color="0.88", label="slope at most 1")
    left.plot(x, y, color="C3", label=f"the printed block: slope {result.scalar.slope}")
    left.set(xlabel="x", ylabel="output", title="one input, one ReLU, one output", xticks=(-1, -0.5, 0, 0.5, 1))
    left.legend(fontsize=8)
    for color, (name, slopes) in zip(("C3", "C0"), result.slopes.items(), strict=True):
        right.plot(slopes, color=color, label=name)
    right.axhline(1.0, color="k", ls="--", lw=1)
    right.text(75, 1.01, "bound that both claim", ha="center", va="bottom", fontsize=8)
    right.set(xlabel="step of training", ylabel="steepest slope", title="trained to be steep")
    right.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, steps: int = 150, out: Path | None = None) -> Result:
    """Work out the counterexample and train both networks."""
    scalar = scalar_counterexample()
    print("by hand: a = 1/2, b² = c² = 3/4, bound 1")
    print(f"  slope a + bc            {scalar.slope} (measured {scalar.measured_slope:.12f})")
    print(f"  det of the inequality   {scalar.determinant} (negative: it does not hold)")
    networks: dict[str, nn.Module] = {}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AsPrintedWarning)  # it warns that it has no bound, which is the point here
        networks["as printed"] = AsPrintedResidual(*SIZES, bound=1.0, dtype=torch.float64)
    networks["ldlt.nn.Residual"] = ldlt.nn.Residual(*SIZES, bound=1.0, dtype=torch.float64)
    slopes, attacked = {}, {}
    print("trained to be steep, bound 1:")
    for name, net in networks.items():
        slopes[name] = steepen(net, steps)
        attacked[name] = ldlt.attack.lipschitz_lower_bound(net, SIZES[0], starts=24, steps=30).value
        print(f"  {name:18s} slope found {attacked[name]:.6f}", flush=True)
    result = Result(scalar, slopes, attacked)
    if out is not None:
        draw(out / "erratum.png", result)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
