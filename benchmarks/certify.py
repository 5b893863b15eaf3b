"""Upper bounds on the Lipschitz constant of given networks, and what they cost.

Run:  python benchmarks/certify.py                       (20-64-64-10, 784-1024×4-10, 50×128 chain)
      python benchmarks/certify.py --networks small      (only the first)
      python benchmarks/certify.py --peers               (also cvxpy's solvers and the package eclipse-nn, if installed)
      python benchmarks/certify.py --speed               (only: how much faster than cvxpy's solvers on the first)

Each line is one method: the bound, its ratio to the best bound found for that network, and the seconds it took. Weights
are PyTorch's default initialisation with ReLU, in float64, on one thread. ``--limit`` is the time limit of this
library's optimiser; the other methods run until they are done, in a process of their own that is ended after
``--patience`` seconds.

``--speed`` compares at equal accuracy: every method begins with the same traced network and ends with a bound, in one
process and on one thread, in turn, ``--repeats`` times, for ``--seeds`` initialisations. Both this library's optimiser,
which is controlled by ``tolerance``, and SCS, which is controlled by ``eps``, run with several values. Medians are
printed, for cvxpy in all and of the solver alone. What counts is the fastest setting of either whose bound is at most
0.1 % above the optimum for every initialisation, and the median of the ratios of their times. Beside it is what comes
out if either may choose its setting for each network anew, with hindsight: nobody knows the optimum beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import nn

from _measure import machine
from _sdp import solve_sdp
from ldlt.attack import lipschitz_lower_bound
from ldlt.certificates import Problem, minimise
from ldlt.certificates.solve import product
from ldlt.errors import LdltError
from ldlt.graph.trace import trace

NETWORKS = {
    "small": [20, 64, 64, 10],
    "wide": [784, 1024, 1024, 1024, 1024, 10],
    "deep": [128] * 51,
    "tiny": [5, 16, 16, 3],  # to try the script out
}


def make(name: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = NETWORKS[name]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def problem_of(name: str) -> Problem:
    net = make(name)
    return Problem.build(trace(net, (NETWORKS[name][0],)), net)


def optimise(name: str, limit: float) -> tuple[float, str]:
    found = minimise(problem_of(name), time_limit=limit)
    gap = f"gap {found.gap:.1e}" if found.lower > 0.5 * found.bound else "no tight lower bound"
    return found.bound, f"{found.reason}, {gap}"


def peer_eclipse(name: str, limit: float, fast: bool) -> tuple[float, str]:
    from eclipse_nn.LipConstEstimator import LipConstEstimator  # type: ignore[import-not-found]

    weights = [m.weight.detach() for m in make(name) if isinstance(m, nn.Linear)]
    count = len(weights)
    estimator = LipConstEstimator(weights=weights, alphas=[0.0] * count, betas=[1.0] * count)
    value = estimator.estimate(method="ECLipsE_Fast" if fast else "ECLipsE")
    value = value[0] if isinstance(value, tuple) else value
    return float(value), "package eclipse-nn"


def solver(name: str, limit: float, which: str) -> tuple[float, str]:
    found = solve_sdp(problem_of(name), solver=which)
    return found.bound, found.reason


METHODS: dict[str, Callable[[str, float], tuple[float, str]]] = {
    "attack (lower bound)": lambda n, limit: (
        lipschitz_lower_bound(make(n), NETWORKS[n][0], starts=8, steps=50).value,
        "",
    ),
    "product": lambda n, limit: (product(problem_of(n))[0], ""),
    "optimise": optimise,
}
PEERS: dict[str, Callable[[str, float], tuple[float, str]]] = {
    "ECLipsE-Fast, eclipse-nn": lambda n, limit: peer_eclipse(n, limit, True),
    "ECLipsE, eclipse-nn": lambda n, limit: peer_eclipse(n, limit, False),
    "cvxpy SCS": lambda n, limit: solver(n, limit, "SCS"),
    "cvxpy Clarabel": lambda n, limit: solver(n, limit, "CLARABEL"),
}


SPEED_ACCURACY = 1e-3
SPEED_TOLERANCES = (1e-3, 2e-3, 3e-3, 5e-3)
SPEED_EPS = (1e-3, 3e-4, 1e-4, 1e-5, 1e-6)


def solver_times() -> list[float]:
    """A list that cvxpy appends the seconds of the solver alone to, from now on."""
    import cvxpy as cp

    inside: list[float] = []
    solve = cp.Problem.solve

    def timed(task: cp.Problem, *args: object, **options: object) -> object:
        found = solve(task, *args, **options)
        inside.append(float(task.solver_stats.solve_time or math.nan) + float(task.solver_stats.setup_time or 0.0))
        return found

    cp.Problem.solve = timed
    return inside


Medians = dict[str, tuple[float, float, float]]  # seconds, those of the solver alone, bound / optimum − 1


def speed(name: str, seed: int, repeats: int, clarabel: bool, inside: list[float]) -> tuple[Medians, Medians]:
    """Measure and print every setting of the optimiser and of cvxpy's solvers on one network."""
    net = make(name, seed)
    graph = trace(net, (NETWORKS[name][0],))

    def build() -> Problem:
        return Problem.build(graph, net)

    own: dict[str, Callable[[], float]] = {
        f"optimise, tolerance {tolerance:.0e}": lambda tolerance=tolerance: minimise(build(), tolerance=tolerance).bound
        for tolerance in SPEED_TOLERANCES
    }
    others: dict[str, Callable[[], float]] = {
        f"cvxpy SCS, eps {eps:.0e}": lambda eps=eps: solve_sdp(build(), solver="SCS", eps_abs=eps, eps_rel=eps).bound
        for eps in SPEED_EPS
    }
    if clarabel:
        others["cvxpy Clarabel"] = lambda: solve_sdp(build(), solver="CLARABEL").bound
    optimum = minimise(build(), tolerance=1e-7).lower
    for run in (*own.values(), *list(others.values())[:1]):
        run()  # imports and first calls are not what is measured
    spent: dict[str, list[tuple[float, float, float]]] = {key: [] for key in (*own, *others)}

    def measured(key: str, run: Callable[[], float]) -> None:
        begin = time.perf_counter()
        bound = run()
        seconds = time.perf_counter() - begin
        spent[key].append((seconds, math.nan if key in own else inside[-1], bound / optimum - 1))

    for _ in range(repeats):
        for key, run in others.items():
            if key == "cvxpy Clarabel" and spent[key]:
                continue  # minutes: once is enough
            measured(key, run)
            for _ in range(3):
                for mine, again in own.items():
                    measured(mine, again)
    medians: Medians = {key: tuple(median(c) for c in zip(*rows, strict=True)) for key, rows in spent.items()}  # type: ignore[misc]
    print(f"\n{name}, seed {seed}: optimum {optimum:.6f}, medians of {repeats}\n")
    print("| method | bound / optimum − 1 | seconds | solver alone | |\n|---|---:|---:|---:|---|")
    for key, (total, alone, above) in medians.items():
        note = "" if above <= SPEED_ACCURACY else "not within 0.1 %"
        print(f"| {key} | {above:.1e} | {total:.4f} | {'' if key in own else f'{alone:.2f}'} | {note} |", flush=True)
    return {key: medians[key] for key in own}, {key: medians[key] for key in others}


def fastest(runs: list[Medians]) -> str:
    """The setting that takes the least time, of those that are accurate on all networks."""
    good = [key for key in runs[0] if all(run[key][2] <= SPEED_ACCURACY for run in runs)]
    return min(good, key=lambda key: median(run[key][0] for run in runs))


def compare(runs: list[tuple[Medians, Medians]]) -> None:
    """Print the ratios."""
    own, others = [mine for mine, _ in runs], [theirs for _, theirs in runs]
    one, peer = fastest(own), fastest(others)
    for title, column in (("times as fast", 0), ("times as fast as the solver alone", 1)):
        ratios = [theirs[peer][column] / mine[one][0] for mine, theirs in runs]
        print(f"\n{one} against {peer}: {median(ratios):.0f} {title} ", end="")
        print(f"(median of {len(ratios)} networks: {', '.join(f'{r:.0f}' for r in ratios)})")
    ratios = [theirs[fastest([theirs])][0] / mine[fastest([mine])][0] for mine, theirs in runs]
    print(f"\nwith the best setting for each network, by hindsight: {median(ratios):.0f} times as fast ", end="")
    print(f"({', '.join(f'{r:.0f}' for r in ratios)})")


def work(name: str, method: str, limit: float, sender: Connection) -> None:
    torch.set_num_threads(1)
    run = {**METHODS, **PEERS}[method]
    with contextlib.suppress(ImportError, LdltError):
        run("tiny", limit)  # imports and the first calls of libraries are not what is measured
    begin = time.perf_counter()
    try:
        value, note = run(name, limit)
    except (ImportError, LdltError, ValueError, RuntimeError, TypeError) as error:  # peers may fail in their own ways
        value, note = float("nan"), f"{type(error).__name__}: {error}"[:80]
    sender.send((value, time.perf_counter() - begin, note))


def measure(name: str, method: str, limit: float, patience: float) -> tuple[float, float, str]:
    """Run a method in a process of its own; give up after ``patience`` seconds."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, method, limit, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(patience):
            return receiver.recv()
        return float("nan"), patience, "gave up"
    except EOFError:
        return float("nan"), float("nan"), "the process died"
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["small", "wide", "deep"])
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--methods", nargs="+", help="only these, by name")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="of --speed")
    parser.add_argument("--seeds", type=int, default=5, help="initialisations of --speed")
    parser.add_argument("--clarabel", action="store_true", help="in --speed, too (minutes)")
    options = parser.parse_args()
    if options.speed:
        print(machine())
        torch.set_num_threads(1)
        inside = solver_times()
        compare([speed("small", s, options.repeats, options.clarabel, inside) for s in range(options.seeds)])
        return
    methods = options.methods or [*METHODS, *(PEERS if options.peers else ())]
    print(machine())
    for name in options.networks:
        rows = [(m, *measure(name, m, options.limit, options.patience)) for m in methods]
        best = min(value for m, value, _, _ in rows if math.isfinite(value) and "attack" not in m)
        print(f"\n{name}: {'-'.join(map(str, NETWORKS[name][:3]))}…, {len(NETWORKS[name]) - 1} layers\n")
        print("| method | bound | × best | seconds | |\n|---|---:|---:|---:|---|")
        for method, value, seconds, note in rows:
            print(f"| {method} | {value:.6g} | {value / best:.4f} | {seconds:.2f} | {note} |", flush=True)


if __name__ == "__main__":
    main()
