#!/usr/bin/env bash
# Makes .venv where it is missing and installs what is needed. Quick when nothing has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
stamp=.venv/.installed
wanted=$(cat pyproject.toml constraints.txt setup.sh | cksum; pwd)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
if [ ! -x .venv/bin/python ]; then
  echo "making .venv ..."
  "${PYTHON:-python3}" -m venv .venv
fi
echo "installing gradlane and its tools into .venv (the first time takes a minute or two) ..."
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
printf '%s\n' "$wanted" > "$stamp"
