"""The command line: ``ldlt``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Sequence

from ldlt._version import __version__
from ldlt.certificates.command import add_certify, add_verify
from ldlt.completion import add_completion
from ldlt.errors import LdltError
from ldlt.tables.command import add_predict, add_train

__all__ = ["main"]

_EXAMPLES = """examples:
  ldlt train data.csv --target y           train a certified network on a table
  ldlt predict data.ldlt.safetensors new.csv
                                           predictions with certified radii
  ldlt certify net.onnx                    bound the Lipschitz constant of a trained network, proven
  ldlt verify net.cert.json net.onnx       check a certificate, from the network's own weights

ldlt COMMAND --help has examples for each command.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ldlt",
        description="Networks that are Lipschitz by construction.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ldlt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    add_train(commands)
    add_predict(commands)
    add_certify(commands)
    add_verify(commands)
    add_completion(commands, _parser)
    return parser


_PIPE_CLOSED = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 if a check failed, 2 on an error, 130 when interrupted.

    If whoever reads standard output has had enough (``ldlt predict … | head``), it ends quietly with 141, as a program
    does that is stopped by the signal for this.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    arguments.command_line = shlex.join(["ldlt", *given])
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence()
        return _PIPE_CLOSED
    except LdltError as error:
        print(f"ldlt: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Files are a command's own matter; what is left is its output.
        _silence()
        print(f"ldlt: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nldlt: interrupted", file=sys.stderr)
        return 130


def _silence() -> None:
    """Let the interpreter's last flush of standard output go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
