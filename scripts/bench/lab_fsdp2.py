"""Measures training steps that FSDP2 shards instead of DeepSpeed: a prototype.

Model, batches, FP8 blocks and optimizer are the same as in ``step.py --precisions coat --optimizer
own``, with the low bits of the master weights. FSDP2 shards every block.
--update after clips the gradients when the backward pass has ended, as training does. With
--update backward each block is updated as soon as FSDP2 has reduced its gradients, which are then
freed. The norm of all gradients is not known at that time, so they are not clipped.

A model with a tower is built on every GPU, with the weights that step.py gives it, and then
sharded. A language model is sharded first, and one weight after the other is drawn on the GPU: its
whole model does not have to fit. The weights do not depend on the number of ranks.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import harness
from coat_cli.command import at_least
from coat_data.load.loader import LoadedBatch
from coat_vlm.config import LanguageConfig, ModelConfig
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import arithmetic_of_recipe, fp8_blocks
from coat_vlm.model.cudnn import set_cudnn_attention
from coat_vlm.optim import CoatAdamW, clip_scale
from coat_vlm.plan.measure import StageCase, build_stage_model, open_case, take_steps
from coat_vlm.train.engine import build_optimizer
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.passes import copy_batch_to_device
from coat_vlm.train.throughput import PeakMemory, count_supervised_tokens
from layer import restore_attention
from step import StepResult, check_training
from step_models import SIZES, StepModel, make_recipe, make_step_batch

QWEN_32B = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
    "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
"""Shapes of Qwen/Qwen2.5-32B-Instruct's config.json."""

DEVIATION = 0.02
"""Standard deviation of the random matrices of a language model."""


def find_size(name: str, tokens: int | None) -> StepModel:
    """Return a model of step.py or the one of 32.8B parameters, with samples of so many tokens."""
    if name == "32b":
        language = LanguageConfig(config=QWEN_32B)
        tokenizer = TokenizerConfig(train_vocab_size=QWEN_32B["vocab_size"])
        model = ModelConfig(vision=None, language=language, tokenizer=tokenizer, max_length=4096)
        size = StepModel("qwen2.5-32b", model, images=0)
    else:
        size = SIZES[name]
    return size if tokens is None else size._replace(model=replace(size.model, max_length=tokens))


def open_stage(size: StepModel, batch: int, world: World, *, checkpointing: bool) -> StageCase:
    """Build the stage that trains all weights of the model, which is on ``meta``."""
    SIZES["fsdp2"] = size
    recipe = make_recipe("fsdp2", batch, "coat")
    stage = replace(recipe.stages["sft"], gradient_checkpointing=checkpointing)
    return open_case(replace(recipe, stages={"sft": stage}), "sft", world, accumulation=1)


def build_sharded_model(case: StageCase, device: torch.device) -> Any:
    """Build the model with random weights, sharded block by block over all ranks."""
    composed = case.recipe.model.vision is not None
    model: Any = build_stage_model(case, device) if composed else case.meta_model
    if not composed:
        model.to(arithmetic_of_recipe(case.recipe, device).dtype)
    blocks: list[Any] = [block for _, block in fp8_blocks(model)]
    # The output layer's loss reads its weight, which the root gathers for the whole step.
    for part in (*blocks, model.get_input_embeddings()):
        fully_shard(part)
    fully_shard(model)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    if not composed:
        draw_weights(model, device)
    set_train_mode(model, case.stage)
    return model


@torch.no_grad()
def draw_weights(model: Any, device: torch.device) -> None:
    """Move a sharded language model from ``meta`` to a device, with random weights."""
    model.to_empty(device=device)
    decoder = model.language_model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config).to(device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.ndim > 1:
            whole.normal_(std=DEVIATION)
        else:
            whole.fill_(0.0 if name.endswith("bias") else 1.0)
        layout = parameter.device_mesh, parameter.placements
        shard = distribute_tensor(whole, *layout, src_data_rank=None)  # without communication
        parameter.to_local().copy_(shard.to_local())


class ShardedStep:
    """A training step on a sharded model; :func:`coat_vlm.plan.measure.take_steps` takes it."""

    def __init__(self, model: Any, case: StageCase, world: World, update: str) -> None:
        self._model, self._world, self._limit = model, world, case.stage.max_grad_norm
        self.memory = PeakMemory(world.device)
        self.on_entry: Any = None
        arithmetic = arithmetic_of_recipe(case.recipe, world.device)
        optimizer: Any = build_optimizer(model, case.stage, arithmetic, world)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"]
        self.optimizer: CoatAdamW = optimizer
        self._of_blocks: list[CoatAdamW] = []
        set_cudnn_attention(case.recipe.cudnn_attention)
        if update == "backward":
            self._update_in_backward()

    def _update_in_backward(self) -> None:
        """Give every sharded module an optimizer, which runs on the stream of the reduction."""
        inner: set[nn.Parameter] = set()
        parts = (*(part for _, part in fp8_blocks(self._model)), self._model.get_input_embeddings())
        for part in (*parts, self._model):
            own = set(part.parameters()) - inner
            inner |= own
            groups = [
                {**group, "params": [p for p in group["params"] if p in own]}
                for group in self.optimizer.param_groups
            ]
            optimizer = CoatAdamW([group for group in groups if group["params"]])
            self._of_blocks.append(optimizer)
            trained = [p for group in optimizer.param_groups for p in group["params"]]

            def update(
                _: Tensor, optimizer: CoatAdamW = optimizer, trained: Sequence[Any] = trained
            ) -> None:
                if all(p.grad is not None for p in trained):
                    optimizer.step()
                    optimizer.zero_grad()

            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(update)

    def __call__(
        self, micro_batches: list[LoadedBatch], started: float, *, wait: bool = True
    ) -> bool:
        """Take a step; call ``on_entry`` with the loss of all ranks, seconds and memory."""
        del wait  # with several ranks each step of training also waits
        world = self._world
        counts = [count_supervised_tokens(loaded.batch) for loaded in micro_batches]
        (divisor,) = world.sum([sum(counts)])
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for loaded in micro_batches:
            inputs = copy_batch_to_device(loaded.batch, world.device)
            loss = self._model(**inputs, num_items_in_batch=divisor, skip_logits=True).loss
            (loss * world.size).backward()  # FSDP2 averages the gradients of the ranks
            total += loss.detach().double()
        if not self._of_blocks:
            self._clip()
        # Blocks were updated already, except those with weights that get no gradient.
        for optimizer in self._of_blocks or (self.optimizer,):
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()
                optimizer.zero_grad()
        (mean,) = world.sum([total.item()])
        entry = {"loss": mean, "step_s": time.perf_counter() - started}
        self.on_entry(entry | {"peak_memory_mb": self.memory.read()})
        return False

    @torch.no_grad()
    def _clip(self) -> None:
        """Have CoatAdamW clip the gradients when it reads them, or skip them if not finite."""
        grads: Any = [p.grad for p in self._model.parameters() if p.grad is not None]
        local = [grad.to_local() for grad in grads]
        norms = torch._foreach_norm(local, 2.0, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total)
        self.optimizer.grad_scale = clip_scale(total.sqrt(), self._limit)


def measure(args: argparse.Namespace, update: str, world: World) -> StepResult:
    """Measure steps on one repeated batch per rank."""
    size = find_size(args.size, args.tokens)
    case = open_stage(size, args.batch, world, checkpointing=args.checkpointing)
    left, began = harness.note_leftover_memory(world.device), time.perf_counter()
    model = build_sharded_model(case, world.device)
    step = ShardedStep(model, case, world, update)
    loaded = make_step_batch(model, size, args.batch, None, world.rank)
    harness.say(f"{size.name} is sharded after {time.perf_counter() - began:.1f} s")
    timing = take_steps(step, [loaded], f"update {update}", world, args.steps, args.warmup)
    losses = [entry["loss"] for entry in timing.entries]
    harness.say(f"losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    tokens = size.model.max_length * args.batch * world.size
    when = "clipping and update after" if update == "after" else "update inside"
    return StepResult(
        *harness.get_origin()[:3],
        gpus=world.size,
        zero=3,
        model=size.name,
        implementation="coat_paper_fsdp2",
        checkpointing=args.checkpointing,
        optimizer=f"coat_{step.optimizer.param_groups[0]['master'].removeprefix('bf16_')}",
        batch=args.batch,
        tokens=tokens,
        ms=timing.ms,
        tok_s=tokens / timing.ms * 1e3,
        peak_gb=timing.peak_gb,
        note=f"scripts/bench/lab_fsdp2.py: FSDP2, {when} the backward pass{left}; loss "
        f"{losses[0]:.4f} -> {losses[-1]:.4f}{harness.note_memory(world.device)}",
        problem=check_training(losses, None),
    )


EXAMPLES = """\
  python scripts/bench/lab_fsdp2.py --csv tiny.csv               # a tiny model, on any machine
  torchrun --nproc-per-node 2 scripts/bench/lab_fsdp2.py --size 8b --batch 4
  torchrun --nproc-per-node 2 scripts/bench/lab_fsdp2.py --size 32b --update backward
  torchrun --nproc-per-node 2 scripts/bench/lab_fsdp2.py --size 32b --update backward \\
      --tokens 16384 --checkpointing
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add, positive = parser.add_argument, at_least(1)
    # fmt: off
    add("--size", choices=("tiny", "tiny-llm", "8b", "32b"), default="tiny",
        help="sizes of step.py, or a language model of Qwen2.5-32B's shape; default tiny")
    add("--tokens", type=positive, metavar="N", help="tokens of a sample; default as in step.py")
    add("--batch", type=positive, default=1, metavar="N", help="samples on one GPU; default 1")
    add("--update", nargs="+", choices=("after", "backward"), default=["after", "backward"],
        help="default both")
    add("--checkpointing", action="store_true", help="recompute every block in the backward pass")
    add("--steps", type=positive, default=5, help="measured steps; default 5")
    add("--warmup", type=positive, default=3, help="steps before them; default 3")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure the ways to update, one after the other."""
    with join_world() as world:
        for update in args.update:
            with restore_attention():
                result = measure(args, update, world)
            harness.free_memory(world.device)
            if world.is_main:
                harness.append_results(args.csv, [result])
            ms, memory = f"{result.ms:.1f} ms", harness.format_number(result.peak_gb, 2, " GB")
            speed = (result.tok_s or 0.0) / world.size
            harness.say(
                f"{result.model}, update {update}: {ms}, {speed:,.0f} tokens/s per GPU, peak "
                f"{memory}; {result.note} {result.problem}"
            )


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
