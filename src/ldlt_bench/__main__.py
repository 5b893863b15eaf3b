"""``python -m ldlt_bench``."""

import sys

from ldlt_bench.commands import main

if __name__ == "__main__":
    sys.exit(main())
