#!/usr/bin/env bash
# Style, types, architecture, tests. Arguments go to pytest: ./test.sh tests/unit -k bucket
# Without any, several pytest processes share the tests: tests/run.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./setup.sh
unset PYTHONDONTWRITEBYTECODE  # or each of some hundred processes compiles torch's modules again
if [ $# -gt 0 ]; then
  exec .venv/bin/python -m pytest -m "not slow" "$@"
fi
exec .venv/bin/python tests/run.py -m "not slow"
