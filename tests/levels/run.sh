#!/usr/bin/env bash
# The tests whose numbers may depend on the make of the processor, as it would be with fewer instructions:
# our kernels, torch's, MKL's and oneDNN's are lowered together. Arguments go to pytest.
# As many levels as there are cores run at a time; what a level prints follows at its end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${GRADLANE_PYTHON:-.venv/bin/python}

# What a BLAS has a part in, and what must be the same bits after a resume.
products=(tests/unit/test_rows.py tests/unit/test_products.py tests/unit/test_bf16_residual.py tests/laws/test_lowrank.py
  tests/laws/test_aggregates.py tests/laws/test_narrow_memory.py tests/parity
  tests/faults/test_resume.py)
# All else with numbers in it.
others=(tests/unit/test_kernels.py tests/unit/test_finite.py tests/laws/test_laws.py tests/laws/test_codecs.py
  tests/laws/test_feedback.py tests/laws/test_rules.py tests/laws/test_weighted.py tests/laws/test_private.py
  tests/laws/test_tokens.py)

# name | which tests | our kernels | what torch and its libraries may use, and how many threads
levels=(
  "no compiled kernels, SSE|all|torch|ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1"
  "no compiled kernels, AVX2|products|torch|ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2"
  "portable kernels, MKL as on any processor|products|portable|ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1"
  "AVX2|all|avx2|ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1"
  "AVX-512, two threads|products|avx512|OMP_NUM_THREADS=2"
)
has=" torch $("$python" -c 'from gradlane.kernels import native; print(*native.levels())') "
folder=$(mktemp -d)
declare -A name_of=()
failed=()
trap 'kill "${!name_of[@]}" 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

finish_one() {
  local code=0 pid
  wait -n -p pid "${!name_of[@]}" || code=$?
  cat "$folder/${name_of[$pid]}"
  if [ "$code" != 0 ]; then failed+=("${name_of[$pid]}"); fi
  unset "name_of[$pid]"
}

for level in "${levels[@]}"; do
  IFS='|' read -r name which kernels settings <<<"$level"
  if [[ $has != *" $kernels "* ]]; then
    echo "== $name: left out, this machine has no $kernels kernels (it has:$has)"
    continue
  fi
  tests=("${products[@]}")
  if [ "$which" = all ]; then tests+=("${others[@]}"); fi
  if [ ${#name_of[@]} -ge "$(nproc)" ]; then finish_one; fi
  {
    echo "== $name ($which): GRADLANE_KERNELS=$kernels $settings"
    # shellcheck disable=SC2086  # several settings, none with a blank in it
    exec env GRADLANE_KERNELS="$kernels" $settings "$python" -m pytest -m "not slow" -q \
      -o cache_dir=".pytest_cache/$name" "${tests[@]}" "$@"
  } >"$folder/$name" 2>&1 &
  name_of[$!]=$name
  echo "running: $name"
done
while [ ${#name_of[@]} -gt 0 ]; do finish_one; done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "passed at every level that this machine has"
