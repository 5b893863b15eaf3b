"""The console script ``ldlt`` and ``python -m ldlt``: Ctrl-C ends them quietly, also while modules are imported."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns its exit code."""
    try:
        from ldlt.cli import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        print("ldlt: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
