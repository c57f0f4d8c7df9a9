#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest:   bash launch/test.sh tests/config -k typo
# Without the long ones, which `-m long` runs alone and `-m ""` with the others.
#
# DSTRAIN_EXTRAS  which extras of pyproject.toml are installed: test, or test,deepspeed for DeepSpeed's launcher too
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh" "${DSTRAIN_EXTRAS:-test}"

cd "$root"
# Two test processes of one thread each: with more, torch's thread pools fight over the cores of a small machine.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
exec "$root/.venv/bin/python" -m pytest -n 2 "$@"
