#!/usr/bin/env bash
# Style, types, architecture, tests. Arguments go to pytest: ./test.sh tests/unit -k bucket
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./setup.sh
if [ $# -eq 0 ]; then
  .venv/bin/ruff format --check --quiet src tests examples benchmarks docs/conf.py
  .venv/bin/ruff check --quiet src tests examples benchmarks docs/conf.py
  .venv/bin/mypy
  .venv/bin/lint-imports
fi
exec .venv/bin/python -m pytest -m "not slow" "$@"
