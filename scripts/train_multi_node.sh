#!/usr/bin/env bash
# Trains a recipe on several machines from one of them, and continues if the run was interrupted.
#   scripts/train_multi_node.sh HOSTFILE RECIPE [key=value ...]
# HOSTFILE has one line per machine, reachable by ssh without a password, e.g.
#   node-a slots=8
#   node-b slots=8
# Every machine needs this repository, its environment, the data and the run folder at the same paths.
# Without ssh, run torchrun on each machine instead:
#   torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29500 \
#     --no-python coat-vlm train RECIPE --resume auto
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
hostfile="$1"
shift
exec deepspeed --hostfile "$hostfile" "$(command -v coat-vlm)" train "$@" --resume auto
