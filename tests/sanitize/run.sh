#!/usr/bin/env bash
# Builds the kernels with AddressSanitizer and UBSan, and calls every one on arrays that end where the heap
# block ends: a read or write one element too far stops the run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
built=$(mktemp -d)
trap 'rm -r "$built"' EXIT
${CC:-gcc} -std=c11 -O1 -g -ffp-contract=off -fno-trapping-math -fsanitize=address,undefined \
  -fno-sanitize-recover=all -Wall -Wextra -Werror -pthread -I ../../src/gradlane/kernels/csrc driver.c -lm -o "$built/driver"
"$built/driver"
