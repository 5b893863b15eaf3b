"""The two training protocols, and every decision the paper leaves open."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from ldlt.errors import OptionError
from ldlt_bench.study.family import Family, find_family

__all__ = [
    "CURVE",
    "LOSSES",
    "PROTOCOLS",
    "RADII",
    "Candidate",
    "Loss",
    "Protocol",
    "Start",
    "network_width",
    "shortened",
]

RADII: dict[str, float] = {"cert_36": 36 / 255, "cert_72": 72 / 255, "cert_108": 108 / 255, "cert_255": 1.0}
"""Columns of certified accuracy and their radii, in standardised input units."""

CURVE: tuple[float, ...] = tuple(i / 20 for i in range(41))
"""Radii of the certified-accuracy curve."""


RULES = 1
"""Version of what is fixed in code: rule of the width, batches, choice of the epoch. Raise it when one changes."""


@dataclass(frozen=True)
class Loss:
    r"""``t · CE((y − o·onehot(c)) / t)``: cross-entropy that asks for a margin o at temperature t.

    o = 0, t = 1 is the plain cross-entropy.

    Attributes:
        name: Name in the results.
        offset: o, taken off the true class's logit.
        temperature: t.
    """

    name: str
    offset: float
    temperature: float


LOSSES: dict[str, Loss] = {
    "cross-entropy": Loss("cross-entropy", 0.0, 1.0),
    # offset and temperature as in B. Prach and C. H. Lampert, "Almost-orthogonal layers", ECCV 2022
    "margin": Loss("margin", math.sqrt(2.0), 0.25),
}


@dataclass(frozen=True)
class Start:
    """Start values of LDLT networks, which decide how far an optimiser's step moves them.

    Chosen on rows that are held out of the training rows (``benchmarks/choose_start.py`` prints such scores); one
    choice per protocol for all data sets. A network moves by steps of size η on the scale √α, so one step size for all
    wants an α that fits it.

    Attributes:
        alpha: Start value of α at width 64: the free matrices start at norm ``gain·√α``. Without effect on ``cayley``.
        growth: α is multiplied by ``(width / 64)^growth``. A step of AdamW with step size η changes a w × w matrix by
            a norm of up to ``ηw``, so with ``growth = 2`` networks of all widths move equally far, in units of √α.
        contraction: Contraction of the networks, unless the family names one.
        init: See :mod:`ldlt.engine.start`.
        gain: Norm of the free matrices at the start, in units of ``√α``; for ``cayley`` see
            :meth:`ldlt.engine.contraction.Cayley.free_gain`.
        placing: Means of the pre-activations at the start; see :mod:`ldlt.engine.start`.
        bias_scale: Biases are stored divided by this number, so that a step moves them by that much more.
    """

    alpha: float = 1e-2
    growth: float = 2.0
    contraction: str = "cholesky"
    init: str = "default"
    gain: float = 1.0
    placing: float = 1.0
    bias_scale: float = 1.0

    def contraction_of(self, family: Family) -> str:
        """Contraction of a family's networks: the one it names, else the protocol's."""
        return family.contraction or self.contraction

    def alpha_at(self, width: int) -> float:
        """α at the start of a network of some width."""
        return self.alpha * (width / 64) ** self.growth


@dataclass(frozen=True)
class Candidate:
    """One setting of the search.

    Attributes:
        learning_rate: Start value of AdamW's step size.
        loss: A key of :data:`LOSSES`.
    """

    learning_rate: float
    loss: str


@dataclass(frozen=True)
class Protocol:
    """How every network of a study is trained.

    The paper's values are the defaults; ``batch`` and what follows it are decisions of ours.

    Attributes:
        name: Name in the results.
        candidates: Settings that are tried. With one there is no search.
        depth: Number of hidden layers.
        epochs: Largest number of epochs.
        weight_decay: AdamW's decoupled weight decay.
        plateau: Epochs without a better validation accuracy until the step size is halved (counted anew after that).
        patience: Epochs without a better validation accuracy until training stops.
        batch: Rows per step.
        least_steps: Small sets: at least this many steps per epoch (of fewer rows).
        most_steps: Large sets: at most this many steps per epoch (of more rows).
        rungs: Search: at epoch e the best k candidates of a fold go on, for (e, k) in order.
        start: Start values of LDLT networks; the other families start as published.
    """

    name: str
    candidates: tuple[Candidate, ...] = (Candidate(1e-3, "cross-entropy"),)
    depth: int = 4
    epochs: int = 100
    weight_decay: float = 1e-4
    plateau: int = 8
    patience: int = 30
    batch: int = 256
    least_steps: int = 4
    most_steps: int = 32
    rungs: tuple[tuple[int, int], ...] = ()
    start: Start = field(default_factory=Start)

    def steps(self, rows: int) -> int:
        """Steps per epoch for a number of training rows; the rows are dealt into batches of equal size (± 1)."""
        steps = min(max(math.ceil(rows / self.batch), self.least_steps), self.most_steps)
        return max(1, min(steps, rows))

    def fingerprint(self, family: str) -> str:
        """Short hash of all settings that concern a family, so that results of different settings are never mixed.

        Losses and radii count by their numbers, not their names. ``start`` concerns the engine's networks only: with
        another choice of it, results of the other families stay valid.
        """
        settings = asdict(self)
        if not find_family(family).has_start:
            del settings["start"]
        losses = {candidate.loss: asdict(LOSSES[candidate.loss]) for candidate in self.candidates}
        settings |= {"losses": losses, "radii": RADII, "curve": CURVE, "rules": RULES}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _grid(rates: Sequence[float]) -> tuple[Candidate, ...]:
    return tuple(Candidate(rate, loss) for loss in LOSSES for rate in rates)


PROTOCOLS: dict[str, Protocol] = {
    "paper": Protocol("paper"),
    "tuned": Protocol(
        "tuned",
        candidates=_grid((1e-3, 3e-3, 1e-2)),
        rungs=((5, 2), (15, 1)),
        # chosen for the Cayley contraction, which has no α: another one behind a colon starts here, too
        start=Start(alpha=1.0, growth=0.0, contraction="cayley", gain=0.6, placing=0.5, bias_scale=3.0),
    ),
}
"""``paper``: one setting for all. ``tuned``: every family gets the same search, judged on validation rows."""


def shortened(protocol: Protocol, epochs: int) -> Protocol:
    """Return the protocol with fewer epochs; its fingerprint differs, so its results stay apart.

    Raises:
        OptionError: If ``epochs`` is not positive.
    """
    if epochs < 1:
        raise OptionError(f"epochs must be at least 1, not {epochs}")
    if epochs >= protocol.epochs:
        return protocol
    rungs = tuple((max(1, e * epochs // protocol.epochs), k) for e, k in protocol.rungs)
    return replace(protocol, epochs=epochs, rungs=rungs)


def network_width(features: int, classes: int) -> int:
    r"""Hidden width by the paper's rule.

    .. math:: b = \min(\max(4N, 32), 512), \quad b' = (1 + 0.25 \cdot 1_{M > 10})\, b, \quad
        w = 2^{\operatorname{round}(\log_2 b')} ,

    for N features and M classes, and at most 512 (the largest width the paper reports).

    Example:
        >>> network_width(4, 3), network_width(16, 26), network_width(262, 13)
        (32, 64, 512)
    """
    base = min(max(4 * features, 32), 512) * (1.25 if classes > 10 else 1.0)
    return 2 ** round(math.log2(base))
