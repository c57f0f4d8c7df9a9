#!/usr/bin/env bash
# `dstrain train` under DeepSpeed's launcher, which starts processes and nothing more: training is dstrain's own.
#
#   bash launch/deepspeed.sh model=small run.name=a                     this machine
#   HOSTFILE=hosts bash launch/deepspeed.sh run.name=a …                on the first node; it reaches the others by ssh
#   HOSTFILE=hosts NODE_RANK=1 bash launch/deepspeed.sh run.name=a …    without ssh: the same on each node, 0, 1, …
#
# HOSTFILE        a line for each node, "name slots=8"      MASTER_ADDR, MASTER_PORT   the first node, a free port there
# NPROC           ranks on this machine, without HOSTFILE
#
# Set up with `bash launch/setup.sh deepspeed`. Without GPUs: DS_ACCELERATOR=cpu. The exit code is the first rank's that
# failed. After a SIGTERM, DeepSpeed gives the ranks 30 seconds to save.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/environment.sh"
where=(--num_gpus "${NPROC:-$ranks_here}")
if [ -n "${HOSTFILE:-}" ]; then
    first="$(awk 'NF && $1 !~ /^#/ { print $1; exit }' "$HOSTFILE")"
    where=(--hostfile "$HOSTFILE" --master_addr "${MASTER_ADDR:-$first}")
    [ -z "${NODE_RANK:-}" ] || where+=(--no_ssh --node_rank "$NODE_RANK")
fi

exec "$python" -m deepspeed.launcher.runner "${where[@]}" --master_port "${MASTER_PORT:-29500}" \
    --no_local_rank --module dstrain "${DSTRAIN_COMMAND:-train}" "$@"
