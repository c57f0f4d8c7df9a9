# Sourced by the launchers, with $root set: python, ranks_here, and the environment of every rank.

python="${DSTRAIN_PYTHON:-$root/.venv/bin/python}"
[ -x "$(command -v "$python")" ] || { echo "no $python: run launch/setup.sh, or set DSTRAIN_PYTHON" >&2; exit 2; }
ranks_here="$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)"
[ "$ranks_here" -gt 0 ] || ranks_here=1

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the ranks share the cores; run.threads changes it for PyTorch
export PYTHONUNBUFFERED=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # wherever a launcher starts the ranks
