"""``python -m ldlt``: the command line."""

import sys

from ldlt.cli import main

if __name__ == "__main__":
    sys.exit(main())
