#!/usr/bin/env bash
# Makes .venv where it is missing and installs what is needed. Quick when nothing has changed.
# `./setup.sh frameworks` also installs Lightning, Accelerate and transformers, for tests/integration;
# `GRADLANE_VENV=.venv-ray ./setup.sh ray` makes an environment of its own with Ray.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
extras=test${1:+,$1}
venv=${GRADLANE_VENV:-.venv}
stamp=$venv/.installed-$extras
wanted=$(cat pyproject.toml constraints.txt setup.sh setup.py src/gradlane/kernels/csrc/* | cksum; pwd)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
python=${PYTHON:-python3}
if [ ! -x "$venv/bin/python" ]; then
  echo "making $venv ..."
  # Some systems ship venv without ensurepip; their own pip can then install into it from outside.
  "$python" -m venv "$venv" >/dev/null 2>&1 || "$python" -m venv --clear --without-pip "$venv"
fi
pip=("$venv/bin/python" -m pip)
"${pip[@]}" --version >/dev/null 2>&1 || pip=("$python" -m pip --python "$venv/bin/python")
echo "installing gradlane and its tools into $venv (the first time takes a minute or two) ..."
"${pip[@]}" install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[$extras]"
# pip would compile one file after the other; this takes all cores. What cannot be compiled is a template.
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages >/dev/null 2>&1 || true
printf '%s\n' "$wanted" > "$stamp"
