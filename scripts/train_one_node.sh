#!/usr/bin/env bash
# Trains a recipe on the GPUs of this machine, and continues if the run was interrupted.
#   scripts/train_one_node.sh RECIPE [key=value ...]                      through torchrun
#   LAUNCHER=deepspeed scripts/train_one_node.sh RECIPE [key=value ...]   through DeepSpeed's launcher
# GPUS=4 uses four of them; by default all.
set -euo pipefail
gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
case "${LAUNCHER:-torchrun}" in
  torchrun)
    exec torchrun --standalone --nproc-per-node "$gpus" --no-python \
      coat-vlm train "$@" --resume auto
    ;;
  deepspeed)
    exec deepspeed --num_gpus "$gpus" "$(command -v coat-vlm)" train "$@" --resume auto
    ;;
  *)
    echo "LAUNCHER is '$LAUNCHER'; use torchrun or deepspeed" >&2
    exit 2
    ;;
esac
