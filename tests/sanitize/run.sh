#!/usr/bin/env bash
# Builds the kernels with AddressSanitizer and UBSan, and calls every one on arrays that end where the heap
# block ends: a read or write one element too far stops the run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
csrc=$PWD/../../src/gradlane/kernels/csrc
flags="-std=c11 -O1 -g -ffp-contract=off -fno-trapping-math -fsanitize=address,undefined -fno-sanitize-recover=all"
flags+=" -Wall -Wextra -Werror -pthread -I$csrc"
built=$(mktemp -d)
trap 'rm -r "$built"' EXIT
# shellcheck disable=SC2086  # flags are words without blanks
printf '%s\n' "$csrc"/*.c "$PWD/driver.c" | (cd "$built" && xargs -n 1 -P "$(getconf _NPROCESSORS_ONLN)" ${CC:-gcc} $flags -c)
# shellcheck disable=SC2086
${CC:-gcc} $flags "$built"/*.o -lm -o "$built/driver"
"$built/driver"
