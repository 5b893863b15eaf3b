r"""A learnt controller that cannot make the loop unstable, even with a delay it has never seen.

Run:  python examples/controller.py --out pictures

The plant is a lightly damped oscillator pushed by a force u; y is what the controller sees,

    x⁺ = A x + B (u + d),    y = C x,    u = −π(y delayed by k steps).

Let γ be the gain of the plant: ‖y‖ ≤ γ ‖u + d‖ + √V(x₀), in the norm of ℓ₂ over all times, which holds with V = x'Px if

    [ A'PA − P + C'C   A'PB        ]
    [ B'PA             B'PB − γ²I  ]  ⪯ 0,    P ⪰ 0        (bounded real lemma).

**Theorem (small gain).** If π(0) = 0 and π is L-Lipschitz with γL < 1, the loop is stable for *every* delay k, and
‖y‖ ≤ (√V(x₀) + γ‖d‖) / (1 − γL).

*Proof.* Adding x'Px over time gives the gain. A delay does not change the norm of a signal that starts at zero, hence
‖u‖ ≤ L‖y‖; so ‖y‖ ≤ √V(x₀) + γ(L‖y‖ + ‖d‖) on every finite horizon. Solve for ‖y‖. ∎

Both controllers are trained without delay to bring the oscillator to rest. The free one brakes harder, and drives the
loop unstable once the measurement arrives late. The other has the bound L = 0.95/γ by construction; nothing about
delays enters its training.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

import ldlt

STEP, DAMPING, DELAY = 0.1, 0.1, 4
LABELS = {"none": "no controller", "free": "free controller", "bounded": "bounded controller"}


@dataclass(frozen=True)
class Plant:
    """x⁺ = A x + B u, y = C x, in float64."""

    A: Tensor
    B: Tensor
    C: Tensor


@dataclass(frozen=True)
class Result:
    """One controller.

    Attributes:
        cost: Mean over test starts of Σ ‖y‖² without delay.
        late: The same with the delay.
        lipschitz: Certified constant of the controller, 0 for none.
        energy: Largest ‖y‖ / √V(x₀) with the delay, and the theorem's limit for it (infinite if it does not apply).
    """

    cost: float
    late: float
    lipschitz: float
    energy: tuple[float, float]


def oscillator() -> Plant:
    """Unit mass and spring, velocity damping, force held over a step; position and velocity are measured."""
    continuous = torch.tensor([[0.0, 1.0], [-1.0, -2 * DAMPING]], dtype=torch.float64)
    stacked = torch.zeros(3, 3, dtype=torch.float64)
    stacked[:2, :2] = continuous
    stacked[1, 2] = 1.0
    exact = torch.linalg.matrix_exp(STEP * stacked)
    return Plant(exact[:2, :2], exact[:2, 2:], torch.diag(torch.tensor([0.3, 1.0], dtype=torch.float64)))


def gain(plant: Plant) -> tuple[float, Tensor]:
    """γ from the frequency response, raised by 0.1 %, and the P of the lemma from a Riccati iteration."""
    A, B, C = plant.A, plant.B, plant.C
    z = torch.exp(1j * torch.linspace(0, math.pi, 20001, dtype=torch.float64))[:, None, None]
    response = C.to(z) @ torch.linalg.solve(z * torch.eye(len(A)) - A, B.to(z).expand(len(z), -1, -1))
    gamma = 1.001 * float(torch.linalg.matrix_norm(response, 2).max())
    P = torch.zeros_like(A)
    for _ in range(100_000):
        new = A.T @ P @ A + C.T @ C
        new = new + A.T @ P @ B @ torch.linalg.solve(gamma**2 * torch.eye(B.shape[1]) - B.T @ P @ B, B.T @ P @ A)
        done = bool((new - P).abs().max() <= 1e-13 * new.abs().max())
        P = (new + new.T) / 2
        if done:
            break
    block = torch.cat(
        [
            torch.cat([A.T @ P @ A - P + C.T @ C, A.T @ P @ B], 1),
            torch.cat([B.T @ P @ A, B.T @ P @ B - gamma**2 * torch.eye(B.shape[1])], 1),
        ]
    )
    largest, smallest = float(torch.linalg.eigvalsh(block)[-1]), float(torch.linalg.eigvalsh(P)[0])
    if largest > 1e-9 * gamma**2 or smallest < 0:
        raise RuntimeError("the bounded real lemma does not hold")
    return gamma, P


def simulate(plant: Plant, policy: nn.Module | None, start: Tensor, steps: int, delay: int = 0) -> Tensor:
    """Outputs y (steps, batch, 2) from the states ``start`` (batch, 2)."""
    weights: dict[str, Tensor] = {}
    module = policy
    if isinstance(policy, ldlt.Lipschitz):  # the same weights in all steps: computed once
        weights, module = policy.explicit(), policy.module
    x, zero = start, torch.zeros(1, 2, dtype=start.dtype)
    seen: list[Tensor] = []
    for k in range(steps):
        seen.append(x @ plant.C.T)
        x = x @ plant.A.T
        if module is not None and k >= delay:
            u = functional_call(module, weights, (seen[k - delay],)) - functional_call(module, weights, (zero,))
            x = x - u @ plant.B.T
    return torch.stack(seen)


def train(plant: Plant, policy: nn.Module, epochs: int, seed: int, horizon: int = 60) -> None:
    """Adam on the mean of Σ ‖y‖² over random starts, without delay."""
    optimiser = torch.optim.Adam(policy.parameters(), 0.02)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        optimiser.zero_grad()
        start = torch.randn(64, 2, generator=generator, dtype=torch.float64)
        (simulate(plant, policy, start, horizon).square().sum() / len(start)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimiser.step()


def draw(path: Path, plant: Plant, policies: dict[str, nn.Module | None]) -> None:
    """Velocity over time, without and with the delay."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    start = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    for axes, delay in zip(figure.subplots(1, 2, sharey=True), (0, DELAY), strict=True):
        for color, (name, policy) in zip(("0.6", "C3", "C0"), policies.items(), strict=True):
            with torch.no_grad():
                y = simulate(plant, policy, start, 250, delay)[:, 0, 1]
            axes.plot(STEP * torch.arange(250), y, color=color, label=LABELS[name], lw=1.2)
        axes.set(xlabel="time", ylabel="velocity", title="as trained" if not delay else f"delay of {delay} steps")
        axes.set_ylim(-4.7, 4.7)
        if not delay:
            axes.legend(fontsize=8, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, epochs: int = 60, out: Path | None = None) -> dict[str, Result]:
    """Train both controllers; returns the results by name."""
    plant = oscillator()
    gamma, P = gain(plant)
    print(f"gain of the plant {gamma:.3f}: a controller with L < {1 / gamma:.4f} is safe for every delay")
    policies: dict[str, nn.Module | None] = {"none": None}
    torch.manual_seed(seed)
    policies["free"] = ldlt.nn.feed_forward_module(2, [16, 16], 1, nn.Tanh).double()
    policies["bounded"] = ldlt.nn.FeedForward(
        2, [16, 16], 1, bound=0.95 / gamma, activation=nn.Tanh, dtype=torch.float64
    )
    start = torch.randn(256, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    root = ((start @ P) * start).sum(1).sqrt()
    print(f"{'controller':10s} {'L':>8s} {'cost':>9s} {f'delay {DELAY}':>10s} {'|y|/V½':>8s} {'limit':>8s}")
    results = {}
    for name, policy in policies.items():
        constant = 0.0
        if policy is not None:
            train(plant, policy, epochs, seed)
            constant = policy.bound if isinstance(policy, ldlt.Lipschitz) else ldlt.certify(policy, 2).bound
        with torch.no_grad():
            y, late = (simulate(plant, policy, start, 400, delay) for delay in (0, DELAY))
        energy = float((late.square().sum((0, 2)).sqrt() / root).max())
        limit = 1 / (1 - gamma * constant) if gamma * constant < 1 else math.inf
        cost, slow = (float(s.square().sum() / len(start)) for s in (y, late))
        results[name] = Result(cost, slow, constant, (energy, limit))
        print(f"{name:10s} {constant:8.3f} {cost:9.2f} {slow:10.3g} {energy:8.3g} {limit:8.3g}", flush=True)
    if out is not None:
        draw(out / "controller.png", plant, policies)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
