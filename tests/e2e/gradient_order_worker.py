"""Trains two steps under ZeRO 1 or 2 on two ranks, one of which returns gradients as replays do.

Started by ``test_gradient_order.py``: ``REPLAYS BUCKET ORDERED STAGE``. The backward pass reduces
gradients; a step under ZeRO-1 has two micro-batches, of which the last is reduced. A CUDA graph
needs a GPU; what is replayed here is an eager pass inside of one autograd Function, which has the
same gradients and returns them in the same way.
"""

import json
import sys
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.utils import safe_get_full_grad

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.config import Fp8Config
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import convert, fp8_blocks
from coat_vlm.fp8.cuda_graphs import (
    FORWARD,
    _alias_parameters,  # pyright: ignore[reportPrivateUsage]
    _run_eagerly,  # pyright: ignore[reportPrivateUsage]
)
from coat_vlm.train.zero import GradientOrder, change_optimizer


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, block: Any, args: Any, kwargs: Any, *_: Any) -> Any:
        with torch.enable_grad(), _alias_parameters(block) as own:
            x = hidden.detach().requires_grad_()
            y = _run_eagerly(block, x, *args, **kwargs)
        ctx.inside = (x, y, own)
        return y.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x, y, own = ctx.inside
        grad, *grads = torch.autograd.grad(y, [x, *own], grad_outputs[0])
        return grad, None, None, None, *grads


def replay(model: Any) -> None:
    for _, block in fp8_blocks(model):
        own = [p for p in block.parameters() if p.requires_grad]

        def forward(hidden: Any, *args: Any, _b: Any = block, _p: Any = own, **kwargs: Any) -> Any:
            return Replay.apply(hidden, _b, args, kwargs, *_p)

        vars(block)[FORWARD] = forward


def main(replays: str, bucket: int, ordered: bool, zero_stage: int, world: World) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=128,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    convert(model, Fp8Config(language="coat", vision="bf16"))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    accumulation = 2 if zero_stage == 1 else 1
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {
                "stage": zero_stage,
                "overlap_comm": True,
                "reduce_bucket_size": bucket,
            },
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
        },
    )
    change_optimizer(engine)
    if ordered:
        GradientOrder(engine.optimizer)
    came: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    found: dict[str, Any] = {}
    for step in range(2):
        if step and (replays == "all" or (replays == "first" and world.is_main)):
            replay(model)
        draw = torch.Generator().manual_seed(2 * step + world.rank)
        for number in range(accumulation):
            came.clear()
            ids = torch.randint(0, 128, (1, 48), generator=draw)
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            if number < accumulation - 1:
                engine.step()
        grads = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
        found = {
            name: float(grad.double().sum()) for name, grad in grads.items() if grad is not None
        }
        engine.step()
    everyones = world.gather({"order": came, "norm": engine.get_global_grad_norm()})
    if world.is_main:
        same = everyones[0]["order"] == everyones[1]["order"]
        norm = float(everyones[0]["norm"])
        sys.stdout.write(f"\n{json.dumps({'grads': found, 'norm': norm, 'same order': same})}\n")


with join_world() as joined:
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "ordered", int(sys.argv[4]), joined)
