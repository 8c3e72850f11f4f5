"""A small DeepSpeed engine on several ranks, forked from one process that has imported everything.

``python many_ranks.py FOLDER < runs.json``: each run trains a few steps and leaves ``NAME.pt``.
Whole parameters and states are put together by DeepSpeed's functions, not by the code under test.
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from coat_kernels import decode_moment, join_master
from coat_vlm.checkpoint.load import load_checkpoint
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.distributed import World
from coat_vlm.optim import CoatAdamW
from coat_vlm.train.zero import change_optimizer

BATCH = 8
MOMENTS = ("exp_avg", "exp_avg_sq")


class Toy(nn.Module):
    """Tied, frozen and unused parameters, a buffer, and sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(37, 24)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.tower = nn.Linear(24, 24).requires_grad_(False)
        self.up = nn.Linear(24, 61)
        self.norm = nn.LayerNorm(61)
        self.down = nn.Linear(61, 24)
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.full((3,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.tower(self.embed(ids))
        x = x + self.down(self.norm(torch.tanh(self.up(x))))
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1).float(), (ids.flatten() + 1) % 37
        )


def build(run: dict[str, Any]) -> Any:
    model = Toy()
    if run["bf16"] or run["low_bits"]:
        model = model.bfloat16()
    groups = [
        {"params": [model.up.weight, model.down.weight], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [model.embed.weight, model.unused], "lr": 3e-3},
        {"params": [model.up.bias, model.norm.weight, model.norm.bias, model.down.bias]},
    ]
    kind = CoatAdamW if run["optimizer"] == "coat" else torch.optim.AdamW
    how: Any = {"master": "bf16_low_bits"} if run["low_bits"] else {}
    optimizer = kind(groups, lr=1e-3, weight_decay=0.0, **how)
    zero: dict[str, Any] = {"stage": run["zero"]}
    if run["zero"] == 3:
        zero["sub_group_size"] = 900  # several sub-groups per parameter group
        zero["stage3_param_persistence_threshold"] = 100
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0 if run["zero"] or run["bf16"] else 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {
                "enabled": run["bf16"] or (run["low_bits"] and run["zero"] > 0),
                "bf16_master_weights_and_grads": run["low_bits"] and run["zero"] > 0,
                "bf16_optimizer_states": run["low_bits"] and run["zero"] > 0,
            },
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    if run["zero"] == 0:
        optimizer.state.clear()
    change_optimizer(engine)
    return engine


def train_step(engine: Any, step: int, world: World, clips: bool) -> float:
    ids = torch.randint(0, 37, (BATCH, 6), generator=torch.Generator().manual_seed(step))
    mine = ids.view(world.size, -1, 2, 6)[world.rank]
    total = 0.0
    for number, micro in enumerate(mine):
        loss = engine(micro)
        total += loss.item() * 2 / BATCH
        engine.backward(loss)
        if clips and number == len(mine) - 1:
            parameters = [p for p in engine.module.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(parameters, 1.0)
        engine.step()
    return world.sum([total])[0]


def by_element(state: dict[str, Any], size: int) -> dict[str, torch.Tensor]:
    """Moments, and how they are coded, with one FP32 number per element."""
    found = {}
    if size and "master_low_bits" in state:
        found["low bits"] = state["master_low_bits"].float()
    for moment in MOMENTS if state else ():
        codes = state[moment]
        found[moment] = codes.float()
        if f"{moment}_amax" in state:
            amax, k = state[f"{moment}_amax"], state[f"{moment}_k"]
            found[moment] = decode_moment((codes, amax, k))
            found[f"{moment}.code"] = codes.float()
            for name, field in (("amax", amax), ("k", k)):
                spread = field.repeat_interleave(128)[:size].view(codes.shape)
                found[f"{moment}.{name}"] = spread.clone()
    return found


def masters_of(engine: Any) -> list[torch.Tensor]:
    """The tensors that the optimizer updates on this rank."""
    wrapper: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return wrapper.fp32_partitioned_groups_flat
    if engine.zero_optimization_stage():
        return wrapper.single_partition_of_fp32_groups
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def whole(engine: Any, keys: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Key, parameter and its whole value; the key ``master`` are the master weights."""
    wrapper: Any = engine.optimizer
    masters, state = masters_of(engine), engine.basic_optimizer.state
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if engine.zero_optimization_stage() == 0:
        groups = getattr(wrapper, "fp16_groups", None) or [
            g["params"] for g in wrapper.param_groups
        ]
        weights = [weight for group in groups for weight in group]
        place = {id(w): master for w, master in zip(weights, masters, strict=True)}
        for name, parameter in trained.items():
            master = place[id(parameter)]
            low_bits = state[master].get("master_low_bits")
            joined = master.float() if low_bits is None else join_master(master, low_bits)
            yield "master", name, joined.detach()
            for key in keys:
                yield key, name, state[master][key]
        return
    for name, parameter in trained.items():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            flat = masters[mapping.param_group_index]
            mapping.set_optim_state_fragment(flat, state[flat])
        master = safe_get_full_fp32_param(parameter)
        if "low bits" in keys:
            low_bits = safe_get_full_optimizer_state(parameter, "low bits")
            assert master is not None
            assert low_bits is not None
            master = join_master(master.bfloat16(), low_bits.to(torch.int16))
        yield "master", name, master
        for key in keys:
            yield key, name, safe_get_full_optimizer_state(parameter, key)


def dump(engine: Any) -> dict[str, Any]:
    """Everything of an engine, whole."""
    optimizer: Any = engine.basic_optimizer
    kept = {master: dict(optimizer.state.get(master) or {}) for master in masters_of(engine)}
    spread = {master: by_element(state, master.numel()) for master, state in kept.items()}
    keys = sorted({key for state in spread.values() for key in state})
    for master in kept:  # what DeepSpeed shall put together
        zeros = torch.zeros_like(master, dtype=torch.float32)
        optimizer.state[master] = {key: spread[master].get(key, zeros) for key in keys}
        if "master_low_bits" in kept[master]:
            optimizer.state[master]["master_low_bits"] = kept[master]["master_low_bits"]
    # Stage 3 puts states together in the dtype of its partitions.
    dtype = getattr(engine.optimizer, "master_weights_and_grads_dtype", None)
    engine.optimizer.master_weights_and_grads_dtype = torch.float32
    result: dict[str, Any] = {key: {} for key in ("master", *keys)}
    for key, name, value in whole(engine, keys):
        result[key][name] = value.detach().clone()
    result.pop("low bits", None)
    engine.optimizer.master_weights_and_grads_dtype = dtype
    for master, state in kept.items():
        optimizer.state[master] = state
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        result["weight"] = {name: p.detach().clone() for name, p in parameters.items()}
    result["weight"]["offset"] = engine.module.offset.clone()
    result["steps"] = {int(state["step"]) for state in kept.values() if state}
    result["lr"] = [group["lr"] for group in optimizer.param_groups]
    return result


def join() -> World:
    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return World(rank=rank, size=size, device=torch.device("cpu"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(folder: Path, run: dict[str, Any]) -> None:
    world = join()
    engine = build(run)
    clips = run["zero"] == 0 and not run["bf16"]
    progress = Progress(
        stage="sft", step=0, world_size=world.size, zero_stage=run["zero"], precision="x",
        bad_samples=0, sampler_state=(0, 0),
    )  # fmt: skip
    result: dict[str, Any] = {}
    if run["resume"]:
        with torch.no_grad():
            for tensor in [*engine.module.parameters(), engine.module.offset]:
                tensor.mul_(0.0)  # what is not loaded is seen
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = 0.5
        progress = load_checkpoint(folder / run["resume"], engine, progress, world)
        result["loaded"] = dump(engine)
    first = progress.step
    result["losses"] = [
        train_step(engine, step, world, clips) for step in range(first, first + run["steps"])
    ]
    result["end"] = dump(engine)
    done = Progress(
        stage="sft", step=first + run["steps"], world_size=world.size, zero_stage=run["zero"],
        precision="x", bad_samples=0, sampler_state=(0, 0),
    )  # fmt: skip
    saver = CheckpointSaver(folder / run["name"], engine, world, 2, background=False)
    path = saver.save(done)
    if world.is_main:
        result["checkpoint"] = str(path.relative_to(folder))
        torch.save(result, folder / f"{run['name']}.pt")
    world.barrier()


def main() -> int:
    folder = Path(sys.argv[1])
    for run in json.load(sys.stdin):
        children, port = [], free_port()
        for rank in range(run["ranks"]):
            child = os.fork()
            if not child:
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run["ranks"]),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                )  # fmt: skip
                try:
                    work(folder, run)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
