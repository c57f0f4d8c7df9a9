#!/usr/bin/env bash
# `dstrain train` on any number of nodes under torchrun; the arguments are those of `dstrain train`:
#
#   bash launch/torchrun.sh model=small run.name=a                      this machine, a rank per GPU (1 without GPUs)
#   NNODES=4 MASTER_ADDR=node0 bash launch/torchrun.sh run.name=a …     the same command on each of 4 nodes
#
# NPROC           ranks on this node        MASTER_ADDR, MASTER_PORT   where the nodes meet, on one of them
# NNODES          nodes of the job          MAX_RESTARTS               after a rank died, all start again (0)
# JOB             the same on all nodes; another for another job on the same MASTER_ADDR and MASTER_PORT
# STOP_SECONDS    what ranks have to save in after the launcher got a signal, before they are killed (300)
#
# torchrun ends with 0 or 1, whatever the ranks ended with; <run>/status.json and the ranks' lines say more.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/environment.sh"
nnodes="${NNODES:-1}"
[ "$nnodes" = 1 ] && port=0 || port=29500 # 0: any free one

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${STOP_SECONDS:-300}"
# A new key-value store for every restart, by rank 0: in torchrun's own the ranks would meet the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
exec "$python" -m torch.distributed.run \
    --nnodes="$nnodes" --nproc-per-node="${NPROC:-$ranks_here}" --max-restarts="${MAX_RESTARTS:-0}" \
    --rdzv-backend=c10d --rdzv-endpoint="${MASTER_ADDR:-localhost}:${MASTER_PORT:-$port}" --rdzv-id="${JOB:-dstrain}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m dstrain "${DSTRAIN_COMMAND:-train}" "$@"
