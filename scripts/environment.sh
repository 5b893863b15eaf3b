# Sourced by the other scripts: makes a virtual environment in .venv once and installs the package with the given extras.
# Usage: source scripts/environment.sh EXTRAS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras="$1"
python="${PYTHON:-python3}"
"$python" - <<'PY' || { echo "Python 3.11 or newer is needed (set PYTHON to choose one)" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
PY
stamp=".venv/.ldlt-$extras"
wanted="$(cat pyproject.toml constraints.txt | cksum)"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "installing ldlt[$extras] into .venv ..." >&2
  # torch first and by its exact pin, so that no other requirement pulls another build
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)" -c constraints.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
  echo "$wanted" > "$stamp"
fi
# One thread per process: linear algebra on many small matrices is slower with more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
