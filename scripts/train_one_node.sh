#!/usr/bin/env bash
# Trains a recipe on the GPUs of this machine; resumes an interrupted run.
#   scripts/train_one_node.sh RECIPE [key=value ...]                      through torchrun
#   LAUNCHER=deepspeed scripts/train_one_node.sh RECIPE [key=value ...]   through DeepSpeed's launcher
# GPUS=4 uses four GPUs; the default is all.
#
# SIGTERM, SIGUSR1 and SIGHUP, of this script or of torchrun, save a checkpoint; the script then exits
# with 75: start it again. torchrun kills ranks that have not saved after TORCH_ELASTIC_SHUTDOWN_TIMEOUT
# seconds (here 600; versions of torch without --shutdown-timeout, and DeepSpeed's launcher: always
# 30). The status is then 1, and the run continues from the checkpoint before.
set -euo pipefail
# shellcheck source=scripts/_launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
status_file=$(mktemp)
case "${LAUNCHER:-torchrun}" in
  torchrun)
    # torchrun forwards these signals to the ranks; by default it does not know SIGUSR1.
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
    forward() { kill -s "$1" "$launcher"; }
    launch "$status_file" torchrun --standalone --nproc-per-node "$gpus" --no-python \
      coat-vlm train "$@" --resume auto
    ;;
  deepspeed)
    # `deepspeed` starts a second process, which forwards only SIGTERM to the ranks.
    forward() { pkill -TERM -P "$launcher"; }
    launch "$status_file" deepspeed --num_gpus "$gpus" "$(command -v coat-vlm)" train "$@" \
      --resume auto
    ;;
  *)
    echo "LAUNCHER is '$LAUNCHER'; use torchrun or deepspeed" >&2
    exit 2
    ;;
esac
