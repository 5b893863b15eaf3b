"""What ``ldlt certify`` and ``ldlt verify`` do."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import MAGIC_PREFIX
from torch import Tensor

from ldlt.certificates.certificate import CERTIFIED, Certificate, verify
from ldlt.certificates.certify import METHODS, TOLERANCE, Step, certify
from ldlt.certificates.local import Region
from ldlt.errors import CertificateError, OnnxError, OptionError, ShapeError
from ldlt.onnx.file import load
from ldlt.onnx.reader import OnnxLimits, OnnxNetwork, read_onnx
from ldlt.watch import Watch

__all__ = ["add_certify", "add_verify", "run_certify", "run_verify"]

SHOWN_OUTPUTS = 64
"""Up to this many outputs the constants of all pairs are printed for machines."""

_SUFFIX = ".onnx"
_CARRIERS = (".onnx", ".safetensors")  # files with a network and its certificate
_DIGITS = 9  # of a bound in the table
_SHOWN_ENTRIES = 6  # of a center in the table

_NOT_RIGOROUS = "the bound is not rigorous: rounding is accounted for by margins, not by a proof"

_CERTIFY = """Bound the Lipschitz constant (Euclidean norm) of a trained network, and prove the bound for its weights.

The network is an ONNX file. It is data: nothing in it is executed, and no other file is opened."""

_CERTIFY_EPILOG = f"""examples:
  ldlt certify net.onnx                            the best bound, proven
  ldlt certify net.onnx --out net.cert.json        and a file that others can check (ldlt verify)
  ldlt certify net.onnx --time-limit 60            what was found after a minute is valid
  ldlt certify net.onnx --method product           norms multiplied along the graph, for comparison
  ldlt certify net.onnx --input-shape 1,28,28      for a file that leaves sizes open
  ldlt certify net.onnx --output-name logits       without the softmax behind 'logits'
  ldlt certify net.onnx --center 0 --radius 0.1    for inputs in a ball only
  ldlt certify net.onnx --center x.npy --radius 0.1 --box
  ldlt certify net.onnx --json                     for machines; pairs of up to {SHOWN_OUTPUTS} outputs included

Ctrl-C ends the search: the best bound so far is proven and reported. Once more, and the command is given up.

exit codes: 0 certified, 1 no bound was found or none could be proven (the reason is printed), 2 an error (no such
file, not a network that is understood, bad arguments, a package that is missing, a file that cannot be written),
130 interrupted before there was a bound
"""

_VERIFY = """Check a certificate against a network, without trusting whoever made it.

The bound is proven again from the network's own weights. If the outcome is 'rigorous', all rounding errors are
accounted for."""

_VERIFY_EPILOG = """examples:
  ldlt verify net.cert.json net.onnx               a certificate in a file of its own
  ldlt verify net.onnx                             the one that ldlt.export_onnx put into the file
  ldlt verify table.ldlt.safetensors               the one of a model that ldlt train or ldlt.save wrote
  ldlt verify net.onnx --json && deploy net.onnx   in a script: 0 only if it was proven again

exit codes: 0 proven again, 1 rejected (no valid certificate, about another network, or not provable; the reason is
printed), 2 an error (no such file, not a network that is understood, a package that is missing), 130 interrupted
"""


# -- arguments ---------------------------------------------------------------------------------------------------------


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or any(size < 1 for size in sizes):
        raise ArgumentTypeError(f"must be positive sizes without the batch, such as 784 or 1,28,28, not {text!r}")
    return sizes


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentTypeError(f"must be a finite number that is not negative, not {text!r}")
    return number


def _above_zero(text: str) -> float:
    number = _number(text)
    if number == 0:
        raise ArgumentTypeError("must be above 0")
    return number


def add_certify(commands: Any) -> None:
    """Add the command ``certify`` to the command line."""
    parser: ArgumentParser = commands.add_parser(
        "certify",
        help="bound the Lipschitz constant of a trained network (ONNX), and prove the bound",
        description=_CERTIFY,
        epilog=_CERTIFY_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="network, an ONNX file")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help=f"default: {METHODS[0]}")
    parser.add_argument(
        "--input-shape", type=_shape, metavar="SIZES", help="shape of one input, such as 784 or 1,28,28"
    )
    _add_names(parser)
    parser.add_argument("--time-limit", type=_number, metavar="SECONDS", help="end the search then; method optimal")
    parser.add_argument(
        "--tolerance", type=_above_zero, metavar="T", help=f"relative, of the search; default: {TOLERANCE:g}"
    )
    parser.add_argument(
        "--center",
        metavar="POINT",
        help="bound in a region around this input: a .npy file, numbers with commas, or one number for all entries "
        "(--center=-1,2 if it begins with a minus)",
    )
    parser.add_argument("--radius", type=_number, metavar="R", help="radius of the region")
    parser.add_argument("--box", action="store_true", help="the region is a box: entry by entry within R of the center")
    parser.add_argument("--out", metavar="FILE", help="certificate to write, such as net.cert.json")
    parser.add_argument("--json", action="store_true", help="print the outcome for machines")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run_certify)


def add_verify(commands: Any) -> None:
    """Add the command ``verify`` to the command line."""
    parser: ArgumentParser = commands.add_parser(
        "verify",
        help="check a certificate against a network, or the one that a model carries",
        description=_VERIFY,
        epilog=_VERIFY_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "certificate", help="file that ldlt certify --out wrote; or a model that carries its certificate"
    )
    parser.add_argument("model", nargs="?", help="network, an ONNX file, if the certificate is in a file of its own")
    _add_names(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome for machines")
    parser.set_defaults(run=run_verify)


def _add_names(parser: ArgumentParser) -> None:
    parser.add_argument("--input-name", metavar="NAME", help="input of the file, if it has several")
    parser.add_argument(
        "--output-name", metavar="NAME", help="output, or any other value of the file: the logits before a softmax"
    )


# -- commands ----------------------------------------------------------------------------------------------------------


def run_certify(arguments: Namespace) -> int:
    """Certify a network.

    Returns:
        0 if it is certified, 1 if not, 2 if the certificate could not be written.

    Raises:
        LdltError: A file or an argument that is wrong.
    """
    begin = time.perf_counter()
    _check_options(arguments)
    model = _model_path(arguments.model)
    _check_out(arguments.out, model)
    network = _read(arguments, arguments.input_shape)
    region = _region(arguments, network.input_shape)
    watch = _Progress(show=sys.stderr.isatty() and not (arguments.json or arguments.quiet))
    with watch:
        certificate = _search(arguments, network, region, watch)
    trouble = _save(certificate, arguments.out)
    facts = {
        "model": str(model),
        **_facts(certificate),
        "gap": _gap(certificate, watch.last),
        "interrupted": watch.interrupted,
        "seconds": time.perf_counter() - begin,
        "file": arguments.out if certificate.is_certified and not trouble else None,
    }
    facts["notes"] = _notes(facts, arguments, watch)
    _print(facts, arguments.json)
    if trouble:
        print(f"ldlt: {trouble}", file=sys.stderr)
        return 2
    return 0 if certificate.is_certified else 1


def run_verify(arguments: Namespace) -> int:
    """Check a certificate.

    Returns:
        0 if it was proven again, 1 if it is rejected.

    Raises:
        LdltError: A file that is missing, or a network that cannot be read.
    """
    begin = time.perf_counter()
    path = _existing(arguments.certificate, "certificate")
    facts: dict[str, Any] = {"certificate": str(path), "model": str(path)}
    if arguments.model is None:
        _check_carried(arguments)
    else:
        facts["model"] = str(_model_path(arguments.model))
    try:
        if arguments.model is None:
            certificate = verify(path)
        else:
            stated = Certificate.load(path)
            certificate = verify(stated, _read_stated(arguments, stated).module)
    except CertificateError as error:
        facts |= {"verified": False, "status": "rejected", "reason": str(error)}
    else:
        facts |= {"verified": True, **_facts(certificate), "created": certificate.created}
        facts["notes"] = [] if certificate.rigorous else [_NOT_RIGOROUS]
    facts["seconds"] = time.perf_counter() - begin
    _print(facts, arguments.json)
    return 0 if facts["verified"] else 1


# -- files -------------------------------------------------------------------------------------------------------------


def _existing(given: str, what: str) -> Path:
    """A file that is there and may be read; whether it is any good is another question."""
    path = Path(given)
    try:
        if not path.exists():
            raise OptionError(f"{what} '{given}' does not exist")
        if not path.is_file():
            raise OptionError(f"{what} '{given}' is not a file")
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{what} '{given}' cannot be read: {error}") from error


def _model_path(given: str) -> Path:
    if Path(given).suffix.lower() != _SUFFIX:
        raise OptionError(
            f"the model '{given}' is not an ONNX file ({_SUFFIX}): export it with ldlt.export_onnx, or with "
            "torch.onnx.export(..., external_data=False). Only ONNX is read, because it is data and nothing of it is "
            "executed; other formats, such as the pickles of torch.save, can execute code when they are read"
        )
    return _existing(given, "model")


def _check_carried(arguments: Namespace) -> None:
    """Refuse what is no model that carries its certificate."""
    if Path(arguments.certificate).suffix.lower() not in _CARRIERS:
        raise OptionError(
            f"'{arguments.certificate}' does not carry a network: give the ONNX file, too, as in  ldlt verify "
            "net.cert.json net.onnx"
        )
    if (arguments.input_name, arguments.output_name) != (None, None):
        raise OptionError("--input-name and --output-name are for a certificate in a file of its own")


def _read(arguments: Namespace, shape: Sequence[int] | None) -> OnnxNetwork:
    return read_onnx(
        arguments.model,
        input_name=arguments.input_name,
        output_name=arguments.output_name,
        input_shape=shape,
    )


def _read_stated(arguments: Namespace, stated: Certificate) -> OnnxNetwork:
    """The network; if the file leaves sizes open, those of the certificate.

    Raises:
        CertificateError: The sizes of the certificate do not fit.
        OnnxError: The file is at fault, whatever the certificate says.
    """
    try:
        return _read(arguments, None)
    except OnnxError:
        declared = load(arguments.model, OnnxLimits(), arguments.input_name, arguments.output_name).shape
        if None not in declared:
            raise
    try:
        return _read(arguments, stated.input_shape)
    except OnnxError as error:
        raise CertificateError(
            f"the certificate is about inputs of shape {_sizes(stated.input_shape)}, for which the model cannot be "
            f"read: {error}"
        ) from error


def _check_out(out: str | None, model: Path) -> None:
    """Refuse a place that cannot be written to before the work, not after it."""
    if out is None:
        return
    path = Path(out)
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise OptionError(f"cannot write '{out}': it is a folder, or its folder does not exist")
        if path.exists() and path.samefile(model):
            raise OptionError(f"cannot write '{out}': it is the model")
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"cannot write '{out}': {error}") from error


def _save(certificate: Certificate, out: str | None) -> str:
    """Write the certificate if there is one; returns what went wrong."""
    if out is None or not certificate.is_certified:
        return ""
    try:
        certificate.save(out)
    except (OSError, CertificateError) as error:
        return f"cannot write '{out}': {error}"
    return ""


# -- the search --------------------------------------------------------------------------------------------------------


class _Progress(Watch):
    """Progress of the search, its last step, and the seconds it took."""

    last: Step | None = None
    seconds = 0.0

    def __call__(self, step: Step) -> None:
        self.last = step
        self.tell(f"{step.seconds:7.1f} s   bound {step.bound:.6g}   best possible {step.lower:.6g}")

    def __enter__(self) -> None:
        self.seconds = -time.perf_counter()
        super().__enter__()

    def __exit__(self, *reason: object) -> None:
        self.seconds += time.perf_counter()
        super().__exit__(*reason)


def _search(arguments: Namespace, network: OnnxNetwork, region: Region | None, watch: _Progress) -> Certificate:
    return certify(
        network.module,
        network.input_shape,
        method=arguments.method,
        region=region,
        time_limit=arguments.time_limit,
        tolerance=TOLERANCE if arguments.tolerance is None else arguments.tolerance,
        progress=watch,
    )


def _check_options(arguments: Namespace) -> None:
    if (arguments.center is None) != (arguments.radius is None):
        raise OptionError("a region needs both --center and --radius")
    if arguments.box and arguments.center is None:
        raise OptionError("--box is the shape of a region: give --center and --radius, too")
    if arguments.method != METHODS[0] and (arguments.time_limit, arguments.tolerance) != (None, None):
        raise OptionError(
            f"--time-limit and --tolerance are for the search of --method {METHODS[0]}; {arguments.method} has none"
        )


def _region(arguments: Namespace, shape: tuple[int, ...]) -> Region | None:
    if arguments.center is None:
        return None
    center = _center(arguments.center, shape)
    radius = torch.tensor(arguments.radius, dtype=torch.float64)
    return Region("box", center, radius.expand(shape).clone()) if arguments.box else Region("ball", center, radius)


def _center(text: str, shape: tuple[int, ...]) -> Tensor:
    """A point: from a file, from numbers, or the same number in every entry."""
    count = math.prod(shape)
    if text.lower().endswith(".npy"):
        return _array(_existing(text, "center"), shape)
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--center must be a .npy file, numbers with commas, or one number for all entries, not '{text}'"
        ) from None
    if len(values) not in (1, count):
        raise ShapeError(f"--center has {len(values)} numbers, an input has {count}")
    return torch.tensor(values, dtype=torch.float64).expand(count).reshape(shape).clone()


def _array(path: Path, shape: tuple[int, ...]) -> Tensor:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:  # numpy would go on with archives
                raise ValueError("the first bytes are not those of numpy.save")
        # Mapped, a header that promises more than the file holds is an error before memory is allocated.
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a file must not be able to raise anything else
        raise OptionError(f"center '{path}' is not a .npy file of numbers: {error}") from error
    if found.dtype.kind not in "fiu":
        raise OptionError(f"center '{path}' has entries of type {found.dtype}, not real numbers")
    if found.shape not in (shape, (1, *shape), (math.prod(shape),)):
        raise ShapeError(f"center '{path}' has shape {_sizes(found.shape)}, an input has {_sizes(shape)}")
    return torch.from_numpy(np.array(found, dtype=np.float64)).reshape(shape)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _facts(certificate: Certificate) -> dict[str, Any]:
    """What a certificate says, as data with finite numbers only."""
    region, k = certificate.region, certificate.outputs
    pairs = largest = None
    if certificate.is_certified and k > 1:
        # Without a table all pairs have the same constant: two outputs tell it.
        shown = certificate if certificate.gram is not None else dataclasses.replace(certificate, outputs=2)
        largest = _finite(float(shown.pair_bounds().max()))
        pairs = certificate.pair_bounds().tolist() if k <= SHOWN_OUTPUTS else None
    return {
        "input_shape": list(certificate.input_shape),
        "inputs": math.prod(certificate.input_shape),
        "outputs": k,
        "region": None if region is None else _region_facts(region),
        "bound": _finite(certificate.bound),
        "status": certificate.status,
        "reason": certificate.reason,
        "rigorous": certificate.rigorous,
        "method": certificate.method,
        "residual": _finite(certificate.residual),
        "largest_pair_bound": largest,
        "pair_bounds": pairs,
        "fingerprint": certificate.fingerprint,
    }


def _region_facts(region: Region) -> dict[str, Any]:
    radius = region.radius.double().reshape(-1)
    same = bool((radius == radius[0]).all())
    return {
        "kind": region.kind,
        "center": region.center.double().reshape(-1).tolist(),
        "radius": float(radius[0]) if same else radius.tolist(),
    }


def _where(region: Mapping[str, Any] | None) -> str:
    """A region in words; of a large one the first numbers."""
    if region is None:
        return "all inputs"
    center, radius = region["center"], region["radius"]
    if isinstance(radius, list):
        size = f"with half-widths {min(radius):.6g} to {max(radius):.6g}"
    else:
        size = f"of radius {radius:.6g}" if region["kind"] == "ball" else f"of half-width {radius:.6g}"
    if len(set(center)) == 1:
        point = f"the point with all entries {center[0]:.6g}" if len(center) > 1 else f"{center[0]:.6g}"
    else:
        more = ", …" if len(center) > _SHOWN_ENTRIES else ""
        point = f"({', '.join(f'{c:.6g}' for c in center[:_SHOWN_ENTRIES])}{more})"
    return f"a {region['kind']} {size} around {point}"


def _gap(certificate: Certificate, last: Step | None) -> float | None:
    """How far the bound may be above the best that multipliers can prove, relative to it; None if that is unknown."""
    if last is None or not last.lower > 0:
        return None
    return _finite(max(certificate.bound / last.lower - 1, 0.0))


def _notes(facts: Mapping[str, Any], arguments: Namespace, watch: _Progress) -> list[str]:
    if facts["status"] != CERTIFIED:
        return [] if arguments.out is None else ["no certificate was written"]
    notes = [] if facts["rigorous"] else [_NOT_RIGOROUS]
    gap, last = facts["gap"], watch.last
    tolerance = TOLERANCE if arguments.tolerance is None else arguments.tolerance
    done = last is not None and last.bound <= last.lower * (1 + tolerance)
    if watch.interrupted:
        notes.append("the search was interrupted; the bound is the best found until then")
    elif arguments.time_limit is not None and watch.seconds > arguments.time_limit and not done:
        notes.append("the time limit was reached; the bound is the best found until then")
    if gap is not None and gap > 0.01:
        notes.append(f"the best multipliers may lower the bound, by {100 * gap / (1 + gap):.0f} % at most")
    return notes


def _print(facts: Mapping[str, Any], machine: bool) -> None:
    if machine:
        print(json.dumps(facts, allow_nan=False))
        return
    rows = _rows(facts)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for i, note in enumerate(facts.get("notes", ())):
        print("\n" * (i == 0) + f"note: {note}")


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table, without what is not known."""
    rows = [(name, facts[name]) for name in ("certificate", "model") if name in facts]
    if "inputs" in facts:
        shape = facts["input_shape"]
        rows.append(("inputs", str(facts["inputs"]) + (f" ({_sizes(shape)})" if len(shape) > 1 else "")))
        rows.append(("outputs", str(facts["outputs"])))
        rows.append(("holds for", _where(facts["region"])))
        rows.append(("bound", "none" if facts["bound"] is None else _ceiling(facts["bound"])))
    rows.append(("status", "verified" if facts.get("verified") else facts["status"]))
    if facts["reason"]:
        rows.append(("reason", facts["reason"]))
    if "inputs" in facts:
        rows.append(("rigorous", "yes" if facts["rigorous"] else "no"))
        rows.append(("method", facts["method"]))
        rows.append(("residual", "not computed" if facts["residual"] is None else f"{facts['residual']:.3g}"))
        if facts["largest_pair_bound"] is not None:
            rows.append(("largest pair constant", _ceiling(facts["largest_pair_bound"])))
    rows.append(("time", f"{facts['seconds']:.1f} s"))
    if facts.get("file"):
        rows.append(("file written", facts["file"]))
    return rows


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _ceiling(value: float) -> str:
    """A number in few digits that is not below it: what is printed is a bound, too.

    >>> _ceiling(1 / 3), _ceiling(2.0)
    ('0.333333334', '2')
    """
    return format(Context(prec=_DIGITS, rounding=ROUND_CEILING).create_decimal_from_float(value), "g")


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(str(n) for n in shape) or "()"
