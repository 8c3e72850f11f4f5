"""Trains two engines without ZeRO in BF16, DeepSpeed's own and ours; prints what differs, as JSON.

Started by ``test_foreach_step_ranks.py``, once per process: ``CLIP``. Every process has data of its
own, so that weights agree only if gradients were averaged.
"""

import json
import sys
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from coat_vlm.distributed import World, join_world
from coat_vlm.train.engine import replace_slow_step


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).bfloat16()


def engine_of(clip: float, own: bool) -> Any:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": clip,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    optimizer.state.clear()
    if own:
        replace_slow_step(engine)
    return engine


def trained(clip: float, own: bool, world: World) -> tuple[Tensor, list[float]]:
    """All weights after five steps, in one, and the gradients' norms."""
    engine = engine_of(clip, own)
    norms = []
    for micro_batch in range(10):
        torch.manual_seed(100 * world.rank + micro_batch)
        x = torch.randn(2, 64).bfloat16()
        engine.backward(engine(x).square().sum())
        engine.step()
        if micro_batch % 2:
            norms.append(float(engine.get_global_grad_norm()))
    return torch.cat([p.detach().float().flatten() for p in engine.module.parameters()]), norms


def main() -> None:
    clip = float(sys.argv[1])
    with join_world() as world:
        (theirs, expected), (ours, norms) = (trained(clip, own, world) for own in (False, True))
        start = torch.cat([p.detach().float().flatten() for p in layers().parameters()])
        found = {
            "moved": float((ours - start).abs().max()),
            "differing": float((ours != theirs).float().mean()),
            "furthest": float(((ours - theirs).abs() / theirs.abs().clamp(min=1e-3)).max()),
            "norms": norms,
            "their norms": expected,
            "weights": float(ours.double().sum()),
        }
        everyones = world.gather(found)
        if world.is_main:
            sys.stdout.write(f"\n{json.dumps(everyones)}\n")


main()
