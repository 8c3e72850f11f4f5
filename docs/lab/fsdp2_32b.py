"""A step of 32.8B parameters on two GPUs: "32.8B parameters on two GPUs" in 2026-11.md.

``torchrun --nproc-per-node N docs/lab/fsdp2_32b.py [32b or tiny] [STEPS] [TOKENS]`` trains a
language model of Qwen2.5-32B's shape with random weights on one repeated sample of 4,096 tokens per
rank. FSDP2 shards every block (DeepSpeed's ZeRO-3 has FP32 copies of BF16 weights, which would not
fit). The optimizer's step is inside the backward pass: each gradient is used and freed as soon as
FSDP2 has reduced it, so there is no accumulation and no clipping. BF16 weights, the low 16 bits of
the FP32 master weights and FP8 moments are 6.1 bytes per parameter, divided by the ranks.
"""

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from coat_bench.models import SIZES, StepModel
from coat_bench.recipe import RecipeBench, list_stage_cases, make_batch
from coat_bench.step import StepCase
from coat_vlm.config import LanguageConfig, ModelConfig
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.distributed import World, join_world
from coat_vlm.optim import CoatAdamW
from coat_vlm.train.step import copy_batch_to_device

QWEN_32B = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
    "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Shapes of Qwen/Qwen2.5-32B-Instruct's config.json."""


DEVIATION = 0.02
"""Standard deviation of random matrices."""

WARMUP = 2
"""Steps that are not measured."""


def add_size(tokens: int) -> None:
    """Add the size "32b", with samples of so many tokens, to those of the benchmark."""
    SIZES["32b"] = StepModel(
        "qwen2.5-32b",
        ModelConfig(
            vision=None,
            language=LanguageConfig(config=QWEN_32B),
            tokenizer=TokenizerConfig(train_vocab_size=QWEN_32B["vocab_size"]),
            max_length=tokens,
        ),
        images=0,
    )


def shard(model: Any, device: torch.device) -> None:
    """Shard a model on ``meta`` block by block, and draw this rank's part of its weights."""
    decoder = model.language_model.model
    # The output layer stays a plain nn.Linear, whose loss has kernels: it belongs to the root.
    for part in (*decoder.layers, decoder.embed_tokens):
        fully_shard(part)
    fully_shard(model)
    model.to_empty(device=device)
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config).to(device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = parameter.to_local()
            if parameter.ndim > 1:
                part.normal_(std=DEVIATION)
            else:
                part.fill_(0.0 if name.endswith("bias") else 1.0)


def step_in_backward(parameter: nn.Parameter) -> None:
    """Update a parameter whenever its gradient was reduced, and free the gradient."""
    optimizer = CoatAdamW([parameter], lr=1e-4, weight_decay=0.1, master="bf16_low_bits")

    def update(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(update)


def measure(size: str, steps: int, world: World) -> None:
    """Take the steps; the main process prints their losses, time and memory."""
    recipe = StepCase("coat", None, True, 0, "low_bits").recipe(size, 1)
    (case,) = list_stage_cases(RecipeBench(recipe=recipe, images=0), world)
    model: Any = case.frame
    shard(model, world.device)
    for parameter in model.parameters():
        step_in_backward(parameter)
    batch = make_batch(model, [case.row], None, seed=world.rank).batch
    inputs: Any = copy_batch_to_device(batch, world.device)
    losses, seconds = [], []
    for _ in range(WARMUP + steps):
        world.barrier()
        started = time.perf_counter()
        loss = model(**inputs, skip_logits=True).loss
        loss.backward()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    slowest = [max(ranks) for ranks in zip(*world.gather(seconds), strict=True)][WARMUP:]
    peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    peaks, all_losses = world.gather(peak), world.gather(losses)
    if world.is_main:
        each = statistics.median(slowest)
        means = [sum(ranks) / len(ranks) for ranks in zip(*all_losses, strict=True)]
        sys.stdout.write(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {world.size} ranks: "
            f"{1e3 * each:.1f} ms, {case.row.tokens / each:,.0f} tokens/s per rank, peak "
            f"{max(peaks) / 1e9:.2f} GB; losses {', '.join(f'{x:.4f}' for x in means)}\n"
        )


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    chosen = given.get(1, "32b")
    add_size(int(given.get(3, 4096)))
    with join_world() as joined:
        measure("tiny-llm" if chosen == "tiny" else chosen, int(given.get(2, 4)), joined)
