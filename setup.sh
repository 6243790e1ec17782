#!/usr/bin/env bash
# Makes .venv where it is missing, and adds to it what is asked for. Quick when nothing has changed.
#   ./setup.sh               the tools of the tests: the extra `test` of pyproject.toml
#   ./setup.sh cli           what the demo needs, and no more
#   ./setup.sh frameworks    Lightning, Accelerate and transformers, for tests/integration
#   GRADLANE_VENV=.venv-ray ./setup.sh test ray    an environment of its own with Ray
#   GRADLANE_VENV=.venv-triton ./setup.sh test triton    one with Triton, for the kernels of GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
extras=("${@:-test}")
venv=${GRADLANE_VENV:-.venv}

# A stamp says of which files an extra, or gradlane itself, was installed.
wanted=$(cat pyproject.toml constraints.txt setup.sh setup.py src/gradlane/kernels/csrc/* | cksum; pwd)
current() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$wanted" ]; }
missing=()
for extra in "${extras[@]}"; do
  current "$extra" || missing+=("$extra")
done
if [ ${#missing[@]} = 0 ]; then
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

list=$(IFS=,; echo "${missing[*]}")
if current gradlane; then
  echo "adding gradlane[$list] to $venv ..."
  package=("gradlane[$list]")  # installed already: pip adds what the extras lack, and compiles nothing
else
  echo "installing gradlane[$list] into $venv (the first time takes a minute or two) ..."
  package=(-e ".[$list]")
fi
# Python compiles modules when it first imports them, which is a small part of all that are installed.
"${pip[@]}" install --quiet --disable-pip-version-check --no-compile -c constraints.txt "${package[@]}"
for name in gradlane "${missing[@]}"; do
  printf '%s\n' "$wanted" >"$venv/.installed-$name"
done
