"""Certified accuracy on Fashion-MNIST at equal time: convolutional LDLT beside the convolutions of the peers.

Run:  python benchmarks/fashion_mnist.py       (needs the data, see docs/images.md, and the extra `peers`)

All networks have one skeleton: ``1 × 28 × 28`` pixels in [0, 1], centred → PixelUnshuffle → three convolution layers
of ``w`` channels on ``14 × 14`` → PixelUnshuffle → one of ``2w`` channels on ``7 × 7`` → flatten → ten unit rows.
Kernels are 3 × 3. A layer of SLL cannot change the number of channels: its image is filled up with zeros to ``w``
channels first, and its last layer has ``2w`` neurons per pixel between ``4w`` channels, so that its head reads twice as
many features. SLL has ReLU inside, all others have MaxMin unless their name says otherwise.

Every family gets the same batches, the same losses and rates to choose from, and the same time on one thread. Time is
*processor* time, and all runs take turns of a second: what else happens on the machine slows all of them alike. The
choice is made by short runs, in two rounds, by certified accuracy at 36/255 on held-out training rows; then the best
setting is trained anew on the other training rows, for the whole time, with a step size that falls to zero. Test rows
are looked at once. ``--search`` and ``--chosen`` do the two parts one by one.

The bound of a peer is the product over its layers (each 1-Lipschitz; AOC's up to its iterations) times that of the
head; that of LDLT is the network's. Radii use the constant of each pair of logits: ``‖v_c − v_j‖`` of the unit rows, or
``pair_bounds``. The columns on the right try to break them: the steepest pair of inputs that was found, over the
claimed constant of the whole map, and how many certified radii an attack refutes (with the median of certified over
found). Above 1, or not 0: the bound is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import ldlt
from _measure import machine
from ldlt.activations import MaxMin
from ldlt_bench.data.images import fashion_mnist
from ldlt_bench.families import normalize_rows, pair_constants
from ldlt_bench.study.protocol import LOSSES
from ldlt_bench.study.training import margin_loss

RADII = (0.0, 36 / 255, 72 / 255, 108 / 255, 1.0)
BATCH = 256
HELD_OUT = 3000
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
ROUNDS = ((1 / 20, 2), (1 / 8, 1))
"""Search: all candidates train for this share of the time, then so many go on, from the start."""
SLICE = 1.0
"""Seconds of processor time of a turn."""

SHAPE = (1, 28, 28)
CLASSES = 10
CONTRACTION = "cayley"
"""Of LDLT, chosen on held-out training rows; the peers have no such choice."""
JUDGED_BY = 36 / 255
"""The radius at which certified accuracy on held-out rows decides the search."""


class UnitRows(nn.Module):
    """``x ↦ V x + b`` with rows of norm one."""

    def __init__(self, features: int) -> None:
        super().__init__()
        start = nn.Linear(features, CLASSES)
        self.weight, self.bias = start.weight, start.bias

    def rows(self) -> Tensor:
        """``V`` (k, n)."""
        return normalize_rows(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n) to (batch, k)."""
        return F.linear(x, self.rows(), self.bias)


class FillChannels(nn.Module):
    """Zeros as further channels."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        """(batch, c, h, w) to (batch, c + more, h, w)."""
        return F.pad(x, (0, 0, 0, 0, 0, self.more))


class Peer(nn.Module):
    """A body whose layers are 1-Lipschitz, and unit rows behind it."""

    def __init__(self, body: nn.Sequential, features: int) -> None:
        super().__init__()
        self.body, self.head = body, UnitRows(features)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 28, 28) to (batch, k)."""
        with parametrize.cached():  # a weight that is read twice is computed once
            return self.head(self.body(x))

    @property
    def bound(self) -> float:
        """``1 · ‖V‖``."""
        return float(torch.linalg.matrix_norm(self.head.rows().detach().double(), 2))

    def pair_bounds(self) -> Tensor:
        """``1 · ‖v_c − v_j‖``, (k, k)."""
        return pair_constants(self.head.rows().detach().double())


def skeleton(width: int, conv: Callable[[int, int], nn.Module], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Everything but the head; its output has ``2 w · 49`` features."""
    return nn.Sequential(
        nn.PixelUnshuffle(2),
        *(conv(4, width), activation()),
        *(conv(width, width), activation()),
        *(conv(width, width), activation()),
        nn.PixelUnshuffle(2),
        *(conv(4 * width, 2 * width), activation()),
        nn.Flatten(),
    )


def of_layers(conv: Callable[[int, int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda width: Peer(skeleton(width, conv, MaxMin), 2 * width * 49)


def ldlt_network(width: int, activation: Callable[[], nn.Module], contraction: str = CONTRACTION) -> nn.Module:
    def conv(i: int, o: int) -> nn.Module:
        return nn.Conv2d(i, o, 3, padding=1, padding_mode="circular")

    module = skeleton(width, conv, activation).append(nn.Linear(2 * width * 49, CLASSES))
    return ldlt.Lipschitz(module, input_shape=SHAPE, head="rows", contraction=contraction)


def methods() -> dict[str, Callable[[int], nn.Module]]:
    """Networks by name, for a width. Those of packages that are not installed are left out, with a line."""
    found: dict[str, Callable[[int], nn.Module]] = {
        "ldlt": lambda width: ldlt_network(width, MaxMin),
        "ldlt-relu": lambda width: ldlt_network(width, nn.ReLU),
        "ldlt-cholesky": lambda width: ldlt_network(width, MaxMin, "cholesky"),
    }
    if importlib.util.find_spec("orthogonium") is None:
        print("orthogonium is not installed: no aol, sll, cayley, aoc (pip install 'ldlt[peers]')")
        return found
    from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d
    from orthogonium.layers.conv.AOL.aol import AOLConv2D
    from orthogonium.layers.conv.SLL.sll_layer import SDPBasedLipschitzResBlock

    def sll(width: int) -> nn.Module:
        body = nn.Sequential(
            nn.PixelUnshuffle(2),
            FillChannels(width - 4),
            *(SDPBasedLipschitzResBlock(width, 1.0) for _ in range(3)),
            nn.PixelUnshuffle(2),
            SDPBasedLipschitzResBlock(4 * width, 0.5),
            nn.Flatten(),
        )
        return Peer(body, 4 * width * 49)

    found["aol"] = of_layers(lambda i, o: AOLConv2D(i, o, 3, padding=1, padding_mode="circular"))
    found["sll"] = sll
    found["aoc"] = of_layers(lambda i, o: AdaptiveOrthoConv2d(i, o, kernel_size=3, padding=1, padding_mode="circular"))
    if importlib.util.find_spec("einops") is None:
        print("orthogonium's Cayley layer needs einops: no cayley (pip install 'ldlt[peers]')")
        return found
    from orthogonium.legacy.cayley_ortho_conv import Cayley

    found["cayley"] = of_layers(lambda i, o: Cayley(i, o, kernel_size=3))
    return found


@dataclass(frozen=True)
class Setting:
    """A candidate of the search."""

    rate: float
    loss: str

    def __str__(self) -> str:
        return f"{self.rate:g} {self.loss}"


def parse(text: str) -> tuple[str, Setting]:
    """``"sll: 0.01 margin"``."""
    name, rate, loss = text.replace(":", " ").split()
    return name, Setting(float(rate), loss)


class Run:
    """The training of one network with Adam, in slices of processor time; building the network counts.

    Attributes:
        net: The network.
        used: Seconds of processor time so far.
        times: Of every step.
    """

    def __init__(
        self, make: Callable[[], nn.Module], setting: Setting, x: Tensor, y: Tensor, seconds: float, seed: int
    ) -> None:
        start = time.process_time()
        torch.manual_seed(seed)
        self.setting, self.x, self.y, self.seconds = setting, x, y, seconds
        self.net = make().train()
        loss = LOSSES[setting.loss]
        self._loss = torch.tensor(loss.offset), torch.tensor(loss.temperature)
        self._optimiser = torch.optim.Adam([p for p in self.net.parameters() if p.requires_grad], setting.rate)
        self._order = torch.Generator().manual_seed(seed)
        self._queue: list[Tensor] = []
        self.times: list[float] = []
        self.used = time.process_time() - start

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return self.used >= self.seconds

    def advance(self, seconds: float) -> None:
        """Train for so long, or until the time is used up."""
        end = min(self.used + seconds, self.seconds)
        while self.used < end:
            start = time.process_time()
            self._step()
            self.times.append(time.process_time() - start)
            self.used += self.times[-1]

    def _step(self) -> None:
        if not self._queue:
            order = torch.randperm(len(self.x), generator=self._order)
            self._queue = list(order[: len(self.x) // BATCH * BATCH].split(BATCH))
        rows = self._queue.pop()
        for group in self._optimiser.param_groups:
            group["lr"] = self.setting.rate * min(1.0, (1 - self.used / self.seconds) / 0.7)
        self._optimiser.zero_grad()
        margin_loss(self.net(self.x[rows]), self.y[rows], *self._loss).mean().backward()
        self._optimiser.step()


def train_together(runs: list[Run]) -> None:
    """All runs to their end, always that one next which has had the least time."""
    while going := [run for run in runs if not run.over]:
        min(going, key=lambda run: run.used).advance(SLICE)
    for run in runs:
        run.net.eval()


def plain(net: nn.Module) -> nn.Module:
    return net.freeze().eval() if isinstance(net, ldlt.Lipschitz) else net


@torch.no_grad()
def certified(net: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Certified accuracy at every radius."""
    model = plain(net)
    logits = torch.cat([model(part) for part in x.split(500)])
    found = ldlt.certified_accuracy(logits, y, net, RADII)
    return [found[r] for r in RADII]


def search(
    makers: dict[str, Callable[[], nn.Module]], data: tuple[Tensor, ...], seconds: float, seed: int
) -> dict[str, Setting]:
    """The setting with the best certified accuracy on held-out rows, for every family."""
    x, y, x_held, y_held = data
    going = {name: [Setting(rate, loss) for loss in LOSSES for rate in RATES] for name in makers}
    for share, remain in ROUNDS:
        runs = {
            (name, setting): Run(makers[name], setting, x, y, share * seconds, seed)
            for name, settings in going.items()
            for setting in settings
        }
        train_together(list(runs.values()))
        scores = {}
        for (name, setting), run in runs.items():
            found = certified(run.net, x_held, y_held)
            scores[name, setting] = found[RADII.index(JUDGED_BY)]
            print(f"  {name}: {setting}, {run.seconds:.0f} s: {' '.join(f'{100 * v:.1f}' for v in found)}", flush=True)
        for name, settings in going.items():
            going[name] = sorted(settings, key=lambda s: -scores[name, s])[:remain]
    return {name: settings[0] for name, settings in going.items()}


def refuted(net: nn.Module, x: Tensor) -> str:
    """How many certified radii an attack (DDN) finds to be wrong, of those it succeeds against."""
    if importlib.util.find_spec("foolbox") is None:
        return "–"
    with torch.no_grad():
        radius = ldlt.certified_radius(plain(net)(x), net)
    found = ldlt.attack.attack_radius(plain(net), x, attacks=["ddn"], steps=40)
    # A radius at the very boundary is found from either side; rounding of float32 logits is not a broken bound.
    gap = ldlt.attack.robustness_gap(radius * (1 - 1e-4), found)
    return f"{len(gap.refuted)}/{gap.samples} ({gap.ratio:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of Fashion-MNIST")
    parser.add_argument("--minutes", type=float, default=3.5, help="processor time of each; the search adds 65 %%")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument(
        "--methods", default="ldlt,aol,cayley,sll", help="of ldlt, ldlt-relu, ldlt-cholesky, aol, cayley, sll, aoc"
    )
    parser.add_argument("--attacked", type=int, default=64, help="number of test images that are attacked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", action="store_true", help="only the search; prints what --chosen takes")
    parser.add_argument("--chosen", help="no search: a rate and a loss per method, 'ldlt: 0.003 margin, sll: …'")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = methods()
    names = [name.strip() for name in args.methods.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown and set(unknown) - {"aol", "cayley", "sll", "aoc"}:
        parser.error(f"unknown methods: {', '.join(unknown)}; there are {', '.join(known)}")
    train_set, test_set = fashion_mnist(args.data)
    x, y = train_set.tensors()
    mean = float(x.mean())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    held, rest = order[:HELD_OUT], order[HELD_OUT:]
    x = x - mean
    x_test, y_test = test_set.tensors()
    x_test = x_test - mean
    print(f"{machine()}; width {args.width}, batch {BATCH}, {args.minutes:g} min of processor time each")
    columns = ["method", "rate, loss", "clean", "36/255", "72/255", "108/255", "1", "epochs", "ms/step", "constant"]
    columns += ["steepest found / constant", "refuted (certified/found)"]
    lines = [f"| {' | '.join(columns)} |", "|---" * 2 + "|---:" * 9 + "|---|"]
    makers = {name: partial(known[name], args.width) for name in names if name in known}
    seconds = 60 * args.minutes
    x_train, y_train = x[rest], y[rest]
    if args.chosen is None:
        best = search(makers, (x_train, y_train, x[held], y[held]), seconds, args.seed)
    else:
        best = {name: setting for name, setting in map(parse, args.chosen.split(",")) if name in makers}
    print("chosen: " + ", ".join(f"{name}: {setting}" for name, setting in best.items()), flush=True)
    if args.search:
        return
    runs = {n: Run(make, best[n], x_train, y_train, seconds, args.seed) for n, make in makers.items()}
    train_together(list(runs.values()))
    for name in names:
        if name not in known:
            lines.append(f"| {name} | not installed |")
            continue
        run, setting = runs[name], best[name]
        accuracy = certified(run.net, x_test, y_test)
        bound = run.net.bound
        some = x_test[: args.attacked]
        steep = ldlt.attack.lipschitz_lower_bound(plain(run.net), SHAPE, starts=15, steps=60, x=some[:15])
        lines.append(
            f"| {name} | {setting} | "
            + " | ".join(f"{100 * a:.1f}" for a in accuracy)
            + f" | {len(run.times) * BATCH / len(rest):.1f} | {1e3 * statistics.median(run.times):.0f} | {bound:.3f} "
            f"| {steep.value / bound:.4f} | {refuted(run.net, some)} |"
        )
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
