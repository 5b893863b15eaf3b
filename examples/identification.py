r"""Learning a nonlinear system from data with a network that contracts: noise on its input cannot throw it off.

Run:  python examples/identification.py --out pictures

The system is a damped pendulum that a torque u drives; y is its angle,

    θ'' = −2 sin θ − 0.8 θ' + u,    y = θ.

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

STATE, HIDDEN, GAIN, NOISE, STEP = 16, 48, 2.0, 0.5, 0.1


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


def pendulum(u: Tensor) -> Tensor:
    """Angles (batch, time, 1) for torques (batch, time, 1), by Heun's method."""

    def slope(angle: Tensor, speed: Tensor, torque: Tensor) -> tuple[Tensor, Tensor]:
        return speed, -2 * angle.sin() - 0.8 * speed + torque

    angle, speed = torch.zeros_like(u[:, 0]), torch.zeros_like(u[:, 0])
    found = []
    for torque in u.unbind(1):
        da, ds = slope(angle, speed, torque)
        ea, es = slope(angle + STEP * da, speed + STEP * ds, torque)
        angle, speed = angle + STEP * (da + ea) / 2, speed + STEP * (ds + es) / 2
        found.append(angle)
    return torch.stack(found, 1)


def torques(count: int, steps: int, generator: torch.Generator) -> Tensor:
    """Random piecewise constant torques (count, steps, 1)."""
    levels = 0.7 * torch.randn(count, steps // 10 + 1, 1, generator=generator)
    return levels.repeat_interleave(10, 1)[:, :steps]


class Cell(nn.Module):
    """A residual cell: what is not changed is carried along."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(STATE + 1, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(STATE + 1 + 2 * HIDDEN, STATE + 1)

    def forward(self, z: Tensor) -> Tensor:
        """State and input (batch, 17) to next state and output."""
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
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=epochs)
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
    axes.plot(time, y[0, :, 0], color="k", label="the pendulum, undisturbed")
    for color, (name, model) in zip(("0.6", "C3", "C0"), models.items(), strict=True):
        with torch.no_grad():
            axes.plot(time, model(u + noise)[0][0, :, 0], color=color, lw=1.2, label=name)
    axes.set(xlabel="time", ylabel="angle", title="predictions from a noisy torque")
    axes.legend(fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, epochs: int = 400, out: Path | None = None) -> dict[str, Result]:
    """Train all three; returns the results by name."""
    generator = torch.Generator().manual_seed(seed)
    u, test = torques(64, 100, generator), torques(64, 100, generator)
    y, target = pendulum(u), pendulum(test)
    noise = NOISE * torch.randn(test.shape, generator=generator)
    torch.manual_seed(seed)
    constrained = ldlt.Recurrent(Cell(), inputs=1, state=STATE, rate=0.98, gain=GAIN)
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
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
