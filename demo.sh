#!/usr/bin/env bash
# Two local processes train a small language model with DDP, with and without gradlane.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
"$here/setup.sh" cli
unset PYTHONDONTWRITEBYTECODE  # or each process compiles torch's modules again
exec "$here/.venv/bin/gradlane" demo "$@"
