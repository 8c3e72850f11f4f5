"""FP8 training with FSDP2: ``fully_shard`` over FP8 blocks, FP8 states of each rank's shards.

    torchrun --nproc-per-node 2 examples/fsdp2.py         # two processes, GPUs or none

The order matters: convert the model, shard it block by block (a block reads the weights of its
submodules, so it must be gathered as a whole), then create the optimizer. Any number of ranks can
load the saved weights; FP8 states are saved per rank, for the same number of ranks.
"""

import argparse
import os
from pathlib import Path

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain_loop import batches, build_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from coat_vlm.optim import CoatAdamW


def shard(model: nn.Module) -> CoatAdamW:
    """Shard the model's blocks and the rest; returns the optimizer of the shards."""
    for block in model.get_submodule("model.layers").children():
        fully_shard(block)
    fully_shard(model)
    return CoatAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def train(model: nn.Module, optimizer: CoatAdamW, start: int, end: int) -> list[float]:
    """Take the steps from ``start`` to ``end``; every rank trains on its part of each batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for number, ids in enumerate(batches(end)):
        if number < start:
            continue
        mine = ids.chunk(ranks)[rank].to(next(model.parameters()).device)
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss
        loss.backward()  # fully_shard averages the gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def save(model: nn.Module, optimizer: CoatAdamW, folder: Path) -> None:
    """Write weights and this rank's states."""
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    torch.save(optimizer.state_dict(), folder / f"optimizer-{dist.get_rank()}.pt")


def load(model: nn.Module, optimizer: CoatAdamW, folder: Path) -> None:
    """Read what :func:`save` wrote."""
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=folder)  # in place
    optimizer.load_state_dict(torch.load(folder / f"optimizer-{dist.get_rank()}.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="coat", choices=("bf16", "coat"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume-at", type=int, default=0, help="save and load after this step")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"), help="for --resume-at")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")

    device, losses = "cuda" if on_gpu else "cpu", []
    for start, end in ((0, args.resume_at), (args.resume_at, args.steps)):
        model = build_model(args.precision).to(device).train()
        optimizer = shard(model)
        if start:
            load(model, optimizer, args.out)
        losses += train(model, optimizer, start, end)
        if start < end < args.steps:
            save(model, optimizer, args.out)
    for number, loss in enumerate(losses, 1):
        if dist.get_rank() == 0:
            print(f"step {number:3d}  loss {loss:.6f}")
    dist.destroy_process_group()
