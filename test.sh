#!/usr/bin/env bash
# Style, types, architecture, tests. Arguments go to pytest: ./test.sh tests/unit -k bucket
# Without any, two pytest processes share the cores: tests with ranks mostly wait, the others compute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./setup.sh
pytest=(.venv/bin/python -m pytest -m "not slow")
if [ $# -gt 0 ]; then
  exec "${pytest[@]}" "$@"
fi

.venv/bin/ruff format --check --quiet src tests examples benchmarks docs/conf.py
.venv/bin/ruff check --quiet src tests examples benchmarks docs/conf.py

# Everything but the tests with ranks, so that a new folder is run without being named here.
with_ranks=(tests/faults tests/processes)
others() {
  .venv/bin/mypy
  .venv/bin/lint-imports
  exec "${pytest[@]}" -o cache_dir=.pytest_cache/others "${with_ranks[@]/#/--ignore=}"
}

told=$(mktemp)
background=
trap 'kill "$background" 2>/dev/null || true; wait; rm -f "$told"' EXIT
trap 'exit 130' INT TERM
echo "in the background: types, architecture, and all tests but ${with_ranks[*]}; what they say follows at the end"
(others) >"$told" 2>&1 &
background=$!
# In the foreground, since a job in the background ignores Ctrl-C, and these must end their ranks.
failed=0
"${pytest[@]}" "${with_ranks[@]}" || failed=$?
if kill -0 "$background" 2>/dev/null; then
  echo "the tests in the background are still running ..."
fi
wait "$background" || failed=$?
background=
cat "$told"
exit "$failed"
