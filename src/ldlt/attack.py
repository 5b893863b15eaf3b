r"""Attacks: what is found by searching is real, so it can refute a claim, and never prove one.

:func:`lipschitz_lower_bound` searches for a steep pair of inputs: a lower bound on the Lipschitz constant.
:func:`attack_radius` searches for the nearest input with another prediction: an upper bound on what can be certified,

.. math:: \text{certified} \;\le\; \text{true radius} \;\le\; \text{found by an attack} .

Where the two are close, neither can be improved much; a certified radius above that of an attack refutes its bound.
These attacks are those of foolbox (extra ``attack``), Euclidean and untargeted: DeepFool (Moosavi-Dezfooli et al.,
2016), DDN (Rony et al., 2019), Carlini & Wagner (2017). What they find is drawn towards the input by bisection and
checked by the model itself, and norms are computed in float64.

Attacks of images search a box of valid pixels. Standardised data has no such box, so none is imposed: the search is
over displacements ``z`` in :math:`x + s z`, in a cube a thousand times as wide as needed, where ``s`` is an estimate of
the distance to the boundary, sample by sample. That makes step sizes the same for data of any scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.check import positive, sample_shape, whole
from ldlt.errors import MissingExtraError, OptionError, ShapeError
from ldlt.evaluation import evaluating, reference

__all__ = [
    "ATTACKS",
    "AttackResult",
    "Gap",
    "SteepPair",
    "attack_radius",
    "jacobian_norms",
    "lipschitz_lower_bound",
    "robustness_gap",
]

_REACH = 1000.0  # half the width of the cube of displacements, in units of the estimated distance
_STEP = 0.05  # of Carlini & Wagner's attack, in the same units
_POWERS = range(4, -13, -1)  # of two, by which the linear estimate of the distance may be corrected
_HALVINGS = 20

ATTACKS: dict[str, Callable[[Any, int], Any]] = {
    "deepfool": lambda foolbox, steps: foolbox.attacks.L2DeepFoolAttack(steps=steps),
    "ddn": lambda foolbox, steps: foolbox.attacks.DDNAttack(init_epsilon=1.0, steps=steps),
    # Margins are scaled to one: for a linear model, the least constant that leads to the other side is two. The
    # attack works on artanh(z / reach), in which a step is that much shorter.
    "cw": lambda foolbox, steps: foolbox.attacks.L2CarliniWagnerAttack(
        binary_search_steps=6, steps=steps, stepsize=_STEP / _REACH, initial_const=1.0
    ),
}
"""Attacks by name, from the fastest to the slowest."""


@contextmanager
def _attacked(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and gradients for inputs only."""
    changed = [p for p in model.parameters() if p.requires_grad]
    with evaluating(model), torch.enable_grad():
        for p in changed:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in changed:
                p.requires_grad_(True)


def _lengths(x: Tensor) -> Tensor:
    """Euclidean norm of every sample (batch,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _per_sample(values: Tensor, x: Tensor) -> Tensor:
    """(batch,) in a shape that multiplies ``x``."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


# -- steep pairs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SteepPair:
    """The steepest thing that an attack has found.

    Attributes:
        value: The larger of ``pair`` and ``jacobian``: a lower bound on the Lipschitz constant, up to rounding of the
            outputs.
        pair: ``‖f(x) − f(y)‖ / ‖x − y‖`` of the best pair.
        jacobian: Largest norm of a Jacobian.
        x: First input of the best pair, (1, *input_shape).
        y: Second input.
    """

    value: float
    pair: float
    jacobian: float
    x: Tensor
    y: Tensor


def jacobian_norms(model: nn.Module, x: Tensor) -> Tensor:
    """Spectral norm of the Jacobian at each sample of ``x`` (batch, *shape), from the dense Jacobian."""
    return torch.linalg.matrix_norm(_jacobians(model, x), 2)


def _jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """(batch, outputs, inputs), one backward pass per output."""
    with torch.enable_grad():
        points = x.detach().requires_grad_()
        outputs = model(points).flatten(1)
        if not outputs.requires_grad:  # a constant
            return torch.zeros(len(x), outputs.shape[1], points[0].numel()).to(points)
        rows = [
            torch.autograd.grad(outputs[:, k].sum(), points, retain_graph=True, materialize_grads=True)[0]
            for k in range(outputs.shape[1])
        ]
    return torch.stack([r.flatten(1) for r in rows], 1)


def lipschitz_lower_bound(
    model: nn.Module,
    input_shape: int | tuple[int, ...],
    *,
    starts: int = 64,
    steps: int = 200,
    scale: float = 1.0,
    seed: int = 0,
    x: Tensor | None = None,
) -> SteepPair:
    """Search for the steepest pair of inputs by Jacobian norms and gradient ascent on pairs.

    Args:
        model: Any module from (batch, *input_shape) to (batch, ...); it is evaluated in its own precision and in
            evaluation mode.
        input_shape: Shape of one sample.
        starts: Number of starting points.
        steps: Steps of ascent.
        scale: Standard deviation of the starting points; a third of them is ten times and a third a tenth as far out.
        seed: Seed of the starting points.
        x: Further starting points (batch, *input_shape), for example data.

    Returns:
        The best pair; the same for the same arguments.
    """
    starts, steps, scale = whole("starts", starts), whole("steps", steps, least=0), positive("scale", scale)
    shape = sample_shape(input_shape)
    generator = torch.Generator().manual_seed(seed)
    points = scale * torch.randn(starts, *shape, generator=generator, dtype=torch.float64)
    factors = torch.tensor([1.0, 10.0, 0.1]).repeat(starts // 3 + 1)[:starts].double()
    points = (points * _per_sample(factors, points)).to(reference(model))
    if x is not None:
        if tuple(x.shape[1:]) != shape:
            raise ShapeError(f"x must have shape {('batch', *shape)}, not {tuple(x.shape)}")
        points = torch.cat([points, x.detach().to(points)])
    with _attacked(model):
        return _ascend(model, points, steps)


def _ascend(model: nn.Module, points: Tensor, steps: int) -> SteepPair:
    _, norms, directions = torch.linalg.svd(_jacobians(model, points), full_matrices=False)
    length = 1e-2 * (1 + _lengths(points))
    offset = (directions[:, 0] * length[:, None]).reshape(points.shape)
    best, pair = -1.0, (points[:1], (points + offset)[:1])
    x, y = points.clone().requires_grad_(), (points + offset).clone().requires_grad_()
    optimiser = torch.optim.Adam([x, y], lr=0.02)
    for _ in range(steps + 1):
        optimiser.zero_grad()
        slopes = _lengths(model(x) - model(y)) / _lengths(x - y)
        found = torch.nan_to_num(slopes.detach(), nan=-1.0)
        k = int(found.argmax())
        if float(found[k]) > best:
            best, pair = float(found[k]), (x[k : k + 1].detach().clone(), y[k : k + 1].detach().clone())
        if not slopes.requires_grad:
            break
        torch.log(slopes.clamp_min(1e-30)).sum().neg().backward()
        optimiser.step()
        with torch.no_grad():  # keep the pairs apart, or rounding would look like steepness
            gap = y - x
            y.copy_(x + gap * _per_sample((length / _lengths(gap).clamp_min(1e-30)).clamp_min(1.0), gap))
    jacobian = max(float(norms[:, 0].max()), float(jacobian_norms(model, x.detach()).max()))
    return SteepPair(max(best, jacobian), best, jacobian, *pair)


# -- nearest inputs with another prediction ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttackResult:
    r"""What attacks found.

    Attributes:
        radius: Euclidean norm of the smallest perturbation found, (batch,), float64; infinite where there is none, 0
            where the input itself is wrong.
        adversarial: Inputs at that distance, (batch, \*shape); the input itself where the radius is 0 or infinite.
        attack: Name of the attack that found it, or None.
    """

    radius: Tensor
    adversarial: Tensor
    attack: tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Gap:
    """Certified radii beside those found by attacks, over the samples for which an attack succeeded.

    Attributes:
        samples: Number of these samples.
        certified: Median of the certified radii.
        attacked: Median of the radii found.
        ratio: Median of certified over found, between 0 and 1: the true radius lies between the two.
        refuted: Indices of samples whose certified radius is above the one found. In floating point that may be
            rounding, within a few units in the last place of the logits; anything larger refutes the certificate.
    """

    samples: int
    certified: float
    attacked: float
    ratio: float
    refuted: Tensor


def attack_radius(
    model: nn.Module,
    x: Tensor,
    labels: Tensor | None = None,
    attacks: Sequence[str] = ("deepfool", "ddn", "cw"),
    *,
    steps: int = 100,
    batch: int = 256,
    seed: int = 0,
) -> AttackResult:
    r"""Search for the smallest perturbation of each input that changes its prediction.

    Args:
        model: Any differentiable classifier from (batch, \*shape) to (batch, k), k ≥ 2. It is run in evaluation mode;
            a Lipschitz network is attacked faster as its ``freeze()``.
        x: Inputs, (batch, \*shape), in the precision of the model.
        labels: True classes, (batch,): search for any other prediction than these. By default the predictions.
        attacks: Names from :data:`ATTACKS`; the best result of all counts.
        steps: Steps of each attack.
        batch: Number of samples that are attacked at once.
        seed: For the random directions of an attack where the gradient vanishes. Same arguments, same result.

    Returns:
        Radii with the inputs that prove them. Samples without finite logits have radius 0.

    Raises:
        MissingExtraError: foolbox is not installed.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # class 0 where the first input > 0
        >>> found = attack_radius(model, torch.tensor([[3.0, 5.0]]), attacks=["ddn"])
        >>> round(float(found.radius), 3)
        3.0
    """
    if isinstance(attacks, str) or not attacks or not set(attacks) <= set(ATTACKS):
        raise OptionError(f"attacks must be a list of names out of {', '.join(ATTACKS)}, not {attacks!r}")
    steps, batch = whole("steps", steps), whole("batch", batch)
    if x.ndim < 2:
        raise ShapeError(f"x must be a batch of inputs, (batch, *shape), not {tuple(x.shape)}")
    if labels is not None and tuple(labels.shape) != (len(x),):
        raise ShapeError(f"labels must have shape ({len(x)},), not {tuple(labels.shape)}")
    foolbox = _foolbox()
    x = x.detach().clone()
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), _attacked(model):
        torch.manual_seed(seed)
        search = _Search(foolbox, model, x, labels)
        for start in range(0, len(search.open), batch):
            search.run(attacks, steps, search.open[start : start + batch])
    return AttackResult(search.radius, search.adversarial, tuple(search.attack))


def robustness_gap(certified: Tensor, attacked: AttackResult | Tensor) -> Gap:
    """Compare certified radii with those that attacks found.

    Args:
        certified: Certified radii, (batch,), as from :func:`ldlt.certified_radius`.
        attacked: What :func:`attack_radius` returned for the same inputs, or its radii. Samples with radius 0 (wrong
            to begin with) or infinity (nothing found) are left out.
    """
    found = attacked.radius if isinstance(attacked, AttackResult) else attacked
    if certified.ndim != 1 or certified.shape != found.shape:
        raise ShapeError(f"two vectors of radii are expected, not {tuple(certified.shape)} and {tuple(found.shape)}")
    low, high = certified.detach().double().cpu(), found.detach().double().cpu()
    counted = (high > 0) & high.isfinite()
    a, b = low[counted], high[counted]
    certain, attack, ratio = (float(v.quantile(0.5)) if len(v) else float("nan") for v in (a, b, a / b))
    return Gap(len(a), certain, attack, ratio, (counted & (low > high)).nonzero().reshape(-1))


def _foolbox() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it imports names that scipy has moved
            return import_module("foolbox")
    except ImportError as error:
        raise MissingExtraError("foolbox", "attack") from error


class _Displaced(nn.Module):
    """``z ↦ f(x + s z) / margin``: one sample each, with its own unit of length and of logits."""

    def __init__(self, model: nn.Module, x: Tensor, unit: Tensor, margin: Tensor) -> None:
        super().__init__()
        self.model, self.x, self.unit, self.margin = model, x, unit, margin

    def place(self, z: Tensor) -> Tensor:
        return self.x + _per_sample(self.unit, z) * z

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.model(self.place(z)) / self.margin[:, None]
        return logits + 0 * z.flatten(1).sum(1, keepdim=True)  # foolbox wants a gradient, also of a constant


class _Search:
    """The best perturbations so far.

    Attributes:
        open: Indices of the samples that are to be attacked.
    """

    def __init__(self, foolbox: Any, model: nn.Module, x: Tensor, labels: Tensor | None) -> None:
        self.foolbox, self.model, self.x = foolbox, model, x
        with torch.no_grad():
            logits = model(x.clone())
        if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) != len(x):
            raise ShapeError(f"the model must return logits (batch, k) with k ≥ 2, not {tuple(logits.shape)}")
        predicted = logits.argmax(1)
        self.labels = predicted if labels is None else labels.to(predicted)
        right = logits.isfinite().all(1) & (predicted == self.labels)
        self.radius = torch.where(right, torch.inf, torch.zeros(len(x), dtype=torch.float64, device=x.device))
        self.adversarial = x.clone()
        self.attack: list[str | None] = [None] * len(x)
        self.open = right.nonzero().reshape(-1)

    def run(self, attacks: Sequence[str], steps: int, rows: Tensor) -> None:
        """Attack some samples."""
        x, labels = self.x[rows], self.labels[rows]
        target = _Displaced(self.model, x, *self._units(x, labels)).eval()
        wrapped = self.foolbox.PyTorchModel(target, bounds=(-_REACH, _REACH), device=x.device)
        for name in attacks:
            z = ATTACKS[name](self.foolbox, steps).run(wrapped, torch.zeros_like(x), labels)
            with torch.no_grad():
                found = self._shrunk(x, target.place(z.detach()), labels)
                length = _lengths(found.double() - x.double())
                better = self._is_adversarial(found, labels) & (length < self.radius[rows])
            self.radius[rows[better]] = length[better]
            self.adversarial[rows[better]] = found[better]
            for row in rows[better].tolist():
                self.attack[row] = name

    def _is_adversarial(self, points: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(points.clone())
        return logits.isfinite().all(1) & (logits.argmax(1) != labels)

    def _units(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Estimated distance to the boundary, and the margin, (batch,) each; both positive.

        The distance is that of the linearised model, times the least power of two that leads to the other side along
        the gradient: where a model saturates, linearisation is far off.
        """
        points = x.clone().requires_grad_()
        logits = self.model(points)
        rival = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
        margin = logits.gather(1, labels[:, None])[:, 0] - rival
        slope = torch.autograd.grad(margin.sum(), points)[0] if margin.requires_grad else torch.zeros_like(x)
        margin, steepness, size = margin.detach(), _lengths(slope), _lengths(x)
        direction = slope / _per_sample(steepness, x)
        # Where the model is flat there is no estimate; below the spacing of floats around x nothing moves.
        kind = torch.finfo(x.dtype)
        start = torch.where(steepness > 0, margin / steepness, size + 1.0)
        unit = start = torch.maximum(start, (16 * kind.eps * size).clamp_min(kind.tiny))
        with torch.no_grad():
            for power in _POWERS:
                length = start * 2.0**power
                flipped = self._is_adversarial(x - _per_sample(length, x) * direction, labels)
                unit = torch.where(flipped, length, unit)
        return unit, torch.where(margin > kind.tiny, margin, 1.0)

    def _shrunk(self, x: Tensor, found: Tensor, labels: Tensor) -> Tensor:
        """The nearest adversarial input that bisection finds on the way from ``x``."""
        direction, best = found - x, found
        low, high = torch.zeros_like(_lengths(x)), torch.ones_like(_lengths(x))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            candidate = x + _per_sample(middle, x) * direction
            flipped = self._is_adversarial(candidate, labels)
            best = torch.where(_per_sample(flipped, x), candidate, best)
            low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
        return best
