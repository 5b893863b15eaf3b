r"""Learning a nonlinear system from data with a network that contracts: noise on its input cannot throw it off.

Run:  python examples/identification.py --out pictures

The system is a mass on a spring with friction that a force u drives; y is its position,

    θ'' = −2 θ − 0.4 θ' − tanh(3 θ') + u,    y = θ.

Three recurrent networks learn to predict y from u on clean sequences: a plain RNN, an LSTM, and `ldlt.Recurrent`, whose
states contract and whose gain from input to output is at most γ, whatever it has learnt. Then the input is disturbed:
by noise, and by the worst disturbance of the same energy that gradient ascent finds. For the constrained network

    ‖Δy‖ ≤ γ ‖Δu‖     in the norm over all of time,

so the last column has a limit that no disturbance can exceed; the others have none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import ldlt

STATE, HIDDEN, GAIN, NOISE, STEP = 8, 32, 3.0, 0.5, 0.2


@dataclass(frozen=True)
class Result:
    """One model.

    Attributes:
        clean: Root mean square error on clean test sequences.
        noisy: The same with noise on the input.
        worst: Largest ‖Δy‖ / ‖Δu‖ that gradient ascent found.
        limit: What the network guarantees for it (infinite if nothing).
    """

    clean: float
    noisy: float
    worst: float
    limit: float


def oscillator(u: Tensor) -> Tensor:
    """Positions (batch, time, 1) for forces (batch, time, 1), by Heun's method."""

    def slope(place: Tensor, speed: Tensor, force: Tensor) -> tuple[Tensor, Tensor]:
        return speed, -2 * place - 0.4 * speed - (3 * speed).tanh() + force

    place, speed = torch.zeros_like(u[:, 0]), torch.zeros_like(u[:, 0])
    found = []
    for force in u.unbind(1):
        da, ds = slope(place, speed, force)
        ea, es = slope(place + STEP * da, speed + STEP * ds, force)
        place, speed = place + STEP * (da + ea) / 2, speed + STEP * (ds + es) / 2
        found.append(place)
    return torch.stack(found, 1)


def forces(count: int, steps: int, generator: torch.Generator) -> Tensor:
    """Random piecewise constant forces (count, steps, 1)."""
    levels = 1.5 * torch.randn(count, steps // 10 + 1, 1, generator=generator)
    return levels.repeat_interleave(10, 1)[:, :steps]


class Cell(nn.Module):
    """A residual cell: what is not changed is carried along."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(STATE + 1, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(STATE + 1 + 2 * HIDDEN, STATE + 1)

    def forward(self, z: Tensor) -> Tensor:
        """State and input (batch, 9) to next state and output."""
        h = torch.tanh(self.inner(z))
        return self.last(torch.cat([z, h, torch.tanh(self.outer(h))], 1))


class Usual(nn.Module):
    """A recurrent layer of PyTorch with a linear readout."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer, self.readout = layer(1, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (batch, time, 1), and the hidden states."""
        h = self.layer(u)[0]
        return self.readout(h), h


def train(model: nn.Module, u: Tensor, y: Tensor, epochs: int) -> None:
    """Adam on the mean squared error."""
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-2, total_steps=epochs)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(u)[0], y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()


def worst(model: nn.Module, u: Tensor, steps: int = 30) -> float:
    """Largest ‖Δy‖ / ‖Δu‖ that gradient ascent on disturbances of the energy of the noise finds."""
    size = NOISE * u[0].numel() ** 0.5
    base = model(u)[0].detach()
    change = torch.randn(u.shape, generator=torch.Generator().manual_seed(2))
    for _ in range(steps):
        change = (size * change / change.flatten(1).norm(dim=1)[:, None, None]).requires_grad_()
        (found,) = torch.autograd.grad((model(u + change)[0] - base).square().sum(), change)
        change = change.detach() + size * found / found.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-12)
    change = size * change / change.flatten(1).norm(dim=1)[:, None, None]
    with torch.no_grad():
        moved = (model(u + change)[0] - base).flatten(1).norm(dim=1)
    return float(moved.max() / size)


def draw(path: Path, models: dict[str, nn.Module], u: Tensor, y: Tensor, noise: Tensor) -> None:
    """One test sequence with a disturbed input."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    time = STEP * torch.arange(u.shape[1])
    axes.plot(time, y[0, :, 0], color="k", label="the system, undisturbed")
    for color, (name, model) in zip(("0.6", "C3", "C0"), models.items(), strict=True):
        with torch.no_grad():
            axes.plot(time, model(u + noise)[0][0, :, 0], color=color, lw=1.2, label=name)
    axes.set(xlabel="time", ylabel="position", title="predictions from a noisy force")
    axes.legend(fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, epochs: int = 300, out: Path | None = None) -> dict[str, Result]:
    """Train all three; returns the results by name."""
    generator = torch.Generator().manual_seed(seed)
    u, test = forces(64, 60, generator), forces(64, 60, generator)
    y, target = oscillator(u), oscillator(test)
    noise = NOISE * torch.randn(test.shape, generator=generator)
    torch.manual_seed(seed)
    constrained = ldlt.Recurrent(Cell(), inputs=1, state=STATE, rate=0.99, gain=GAIN, contraction="cayley")
    models: dict[str, nn.Module] = {"RNN": Usual(nn.RNN), "LSTM": Usual(nn.LSTM), "constrained": constrained}
    print(f"{'model':12s} {'clean':>7s} {'noisy':>7s} {'worst gain':>11s} {'limit':>7s}")
    results = {}
    for name, model in models.items():
        train(model, u, y, epochs)
        with torch.no_grad():
            clean, noisy = (float((model(x)[0] - target).square().mean().sqrt()) for x in (test, test + noise))
        limit = GAIN if name == "constrained" else float("inf")
        results[name] = Result(clean, noisy, worst(model, test[:8]), limit)
        print(f"{name:12s} {clean:7.3f} {noisy:7.3f} {results[name].worst:11.3f} {limit:7.3g}", flush=True)
    if out is not None:
        draw(out / "identification.png", models, test[:1], target[:1], noise[:1])
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
