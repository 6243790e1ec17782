#!/usr/bin/env bash
# The tests whose numbers may depend on the make of the processor, as it would be with fewer instructions:
# our kernels, torch's, MKL's and oneDNN's are lowered one after the other. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${GRADLANE_PYTHON:-.venv/bin/python}
tests=(tests/unit/test_kernels.py tests/unit/test_rows.py tests/unit/test_products.py tests/unit/test_narrow_debt.py
  tests/unit/test_finite.py tests/laws tests/parity tests/faults/test_resume.py
  --ignore=tests/laws/test_many_parameters.py --ignore=tests/laws/test_undo.py)  # no numbers, much time

# name | our kernels | what torch and its libraries may use, and how many threads
levels=(
  "no compiled kernels, SSE|torch|ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2"
  "no compiled kernels, AVX2|torch|ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1"
  "portable kernels, MKL as on any processor|portable|ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1"
  "AVX2|avx2|ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2"
  "AVX-512|avx512|OMP_NUM_THREADS=1"
)
has=" torch $("$python" -c 'from gradlane.kernels import native; print(*native.levels())') "
failed=()
for level in "${levels[@]}"; do
  IFS='|' read -r name kernels settings <<<"$level"
  if [[ $has != *" $kernels "* ]]; then
    echo "== $name: left out, there are no $kernels kernels here (there are:$has)"
    continue
  fi
  echo "== $name: GRADLANE_KERNELS=$kernels $settings"
  # shellcheck disable=SC2086  # several settings, none with a blank in it
  env GRADLANE_KERNELS="$kernels" $settings "$python" -m pytest -m "not slow" -q -o cache_dir=.pytest_cache/levels \
    "${tests[@]}" "$@" || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "every level: passed"
