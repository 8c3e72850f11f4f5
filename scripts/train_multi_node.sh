#!/usr/bin/env bash
# Trains a recipe on several machines, started on one of them; resumes an interrupted run.
#   scripts/train_multi_node.sh HOSTFILE RECIPE [key=value ...]
# HOSTFILE has one line per machine, reachable by ssh without a password, e.g.
#   node-a slots=8
#   node-b slots=8
# Every machine needs this repository, its environment, the data and the run folder at the same paths.
# Without ssh, run torchrun on each machine instead:
#   torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29500 \
#     --no-python coat-vlm train RECIPE --resume auto
# SIGTERM, SIGUSR1 and SIGHUP of this script save a checkpoint; it then exits with 75: start it again.
# DeepSpeed's launcher kills ranks that have not saved after 30 seconds; the run then continues from the
# checkpoint before.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
# shellcheck source=scripts/_launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
hostfile="$1"
shift
# In this folder, which all machines see.
status_file="$PWD/.coat-vlm-status.$$"
linger=60 # deepspeed ends before the launchers on the machines
forward() { kill -TERM "$launcher"; }
launch "$status_file" deepspeed --hostfile "$hostfile" "$(command -v coat-vlm)" train "$@" \
  --resume auto
