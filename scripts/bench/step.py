"""Measures the training step of a full model, on one GPU or several.

Each implementation is built from the same random weights, compared with BF16, run for a few steps
of one batch size, and freed. Every micro-batch of a step is the same batch of random sequences.

--precisions are ours (bf16 included, with its chunked loss). --baselines are transformers'
BF16 model (eager), its decoder layers compiled (compile), compiled with torchao's tensorwise FP8
(torchao), these with Liger's kernels (liger, liger_torchao), and torchao's with only Liger's
loss (liger_loss_torchao). The others have Liger's loss and compile the tower as well: torchao's
FP8 in the decoder (tower), or BF16 in CUDA graphs, for small models (reduce_overhead). The last
lines name the fastest.

--optimizer none measures the forward and backward pass in one process and frees the gradients
between steps; the batch is on the GPU already. own runs DeepSpeed as training does, with the
precision's default optimizer and attention kernels. --lora freezes the tower and trains the
projector and LoRA adapters on all linear layers of the language model, in baselines with PEFT's
layers. For a recipe with other keys use coat-vlm plan RECIPE --measure. --mixed draws samples as in
an instruction mix; baselines of packed sequences have this project's positions and variable-length
attention.

A model is timed only if its loss on a sample is within 1% of BF16's and its gradient norm within a
factor of 1.5: with random weights every loss is near the logarithm of the vocabulary size, so a
wrong scale shows in the norm. With an optimizer, the loss of the repeated batch must also fall.
Times are medians of whole steps, peaks are the memory that PyTorch allocated; the note has the
memory in use on the GPU after the steps, by all processes. A batch that does not fit is reported as
OOM, and no larger one is tried; with several processes the run ends there.
"""

import argparse
import contextlib
import json
import math
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

import harness
from coat_cli.command import at_least
from coat_data.load.loader import LoadedBatch
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import SpareMemory, arithmetic_of, graph_blocks, store_frozen_weights
from coat_vlm.plan.measure import (
    StageCase,
    build_stage_model,
    build_training_step,
    open_case,
    release_engine,
    take_steps,
)
from coat_vlm.plan.zero import ZeroStage
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.passes import copy_batch_to_device
from coat_vlm.train.throughput import PeakMemory
from coat_vlm.train.zero import OPTIONS
from harness import PRECISIONS, Result
from layer import restore_attention
from step_models import BASELINES, SIZES, apply_baseline, make_recipe, make_step_batch

LOSS_TOLERANCE = 0.01
"""Largest relative difference to BF16's loss at the same weights."""

NORM_FACTOR = 1.5
"""Largest ratio of the gradient norms to BF16's, or of its inverse. Rounding to FP8 increases the
norm in every block; a wrong scale changes it by a factor of two at least."""

STEP_TOLERANCE = 0.05
"""Largest relative difference to the losses of the BF16 run in the same steps."""

NAMES = {
    "bf16": "bf16",
    "fp8_linear": "coat_fp8_linear",
    "coat": "coat_paper",
    "recompute_qkv": "coat_recompute_qkv",
}
"""Precision -> implementation in the results, with the names of the layer benchmark."""


@dataclass(slots=True)
class StepResult(Result):
    """One measurement; the columns of ``step.csv`` (kernels/benchmarks/README.md)."""

    gpus: int
    zero: int
    model: str
    implementation: str
    checkpointing: bool
    optimizer: str
    batch: int
    tokens: int
    ms: float | None = None
    tok_s: float | None = None
    peak_gb: float | None = None
    note: str = ""
    problem: str = ""


class Implementation(NamedTuple):
    """A precision or a baseline, with or without its optimizer, at one ZeRO stage."""

    name: str
    """One of ``harness.PRECISIONS``, or a key of ``BASELINES``."""
    trains: bool
    """Whether there is an optimizer."""
    zero_stage: ZeroStage

    @property
    def label(self) -> str:
        """Name in the results."""
        return NAMES.get(self.name) or BASELINES[self.name].implementation


class Reference(NamedTuple):
    """BF16's results with the initial weights."""

    grad_norm: float
    """Norm of all gradients on the first sample."""
    losses: dict[int, float]
    """Batch size -> loss; always contains the first sample by itself (batch size 1)."""


def list_implementations(args: argparse.Namespace, ranks: int) -> list[Implementation]:
    """List what is measured by ZeRO stage, then optimizer, then model.

    ValueError: the options do not fit each other or this machine.
    """
    if "none" in args.optimizer and ranks > 1:
        raise ValueError(
            f"--optimizer none is a step of one process without communication, and there are "
            f"{ranks} processes; start one, or use --optimizer own"
        )
    if args.zero and set(args.optimizer) == {"none"}:
        raise ValueError("--zero has no effect without an optimizer: add --optimizer own")
    if args.batch != sorted(set(args.batch)):
        raise ValueError(f"--batch {args.batch}: give ascending numbers")
    names: list[str] = [*args.precisions, *args.baselines]
    stages: Sequence[ZeroStage] = args.zero or (0,)
    if not names:
        raise ValueError("nothing to measure; give --precisions or --baselines")
    listed = [
        Implementation(name, optimizer != "none", zero if optimizer != "none" else 0)
        for zero in stages
        for optimizer in args.optimizer
        for name in names
    ]
    return list(dict.fromkeys(listed))


def run_pass(model: Any, loaded: LoadedBatch) -> tuple[float, float]:
    """Return the loss and the norm of all gradients; clears the gradients."""
    device = next(model.parameters()).device
    loss = model(**copy_batch_to_device(loaded.batch, device), skip_logits=True).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    model.zero_grad(set_to_none=True)
    return loss.item(), norm


def measure_reference(model: Any, batches: Sequence[LoadedBatch]) -> Reference:
    """Run BF16, in training mode, only on the first sample and then on the measured batches."""
    loss, norm = run_pass(model, batches[0])
    losses = {1: loss}
    device = next(model.parameters()).device
    with torch.no_grad():
        for loaded in batches[1:]:
            inputs = copy_batch_to_device(loaded.batch, device)
            losses[loaded.num_samples] = model(**inputs, skip_logits=True).loss.item()
    return Reference(norm, losses)


def find_disagreement(model: Any, sample: LoadedBatch, reference: Reference) -> str:
    """Compare a pass over the first sample with BF16; returns the problem, or ""."""
    loss, norm = run_pass(model, sample)
    problem = check_losses([loss], reference.losses[1])
    factor = norm / reference.grad_norm
    if not problem and not 1 / NORM_FACTOR <= factor <= NORM_FACTOR:  # also NaN
        return (
            f"not correct: the gradients' norm is {norm:.4g}, BF16's {reference.grad_norm:.4g}; "
            f"a factor of {NORM_FACTOR} is allowed"
        )
    return problem


def check_losses(losses: Sequence[float], exact: float) -> str:
    """Compare losses with BF16's; returns the problem, or ""."""
    for loss in losses:
        if not abs(loss - exact) <= LOSS_TOLERANCE * abs(exact):  # also NaN
            return (
                f"not correct: the loss is {loss:.4f}, BF16's {exact:.4f}; "
                f"{LOSS_TOLERANCE:.0%} is allowed"
            )
    return ""


def check_training(losses: Sequence[float], exact: Sequence[float] | None) -> str:
    """Check the losses of steps on one repeated batch, also against a BF16 run's."""
    listed = ", ".join(f"{loss:.4f}" for loss in losses)
    if not all(math.isfinite(loss) for loss in losses):
        return f"not correct: losses {listed}"
    if losses[-1] >= losses[0]:
        return f"not correct: training does not lower the loss of its batch: {listed}"
    for step, (loss, other) in enumerate(zip(losses, exact or (), strict=False), start=1):
        if abs(loss - other) > STEP_TOLERANCE * abs(other):
            return (
                f"not correct: the loss of step {step} is {loss:.4f}, BF16's {other:.4f}; "
                f"{STEP_TOLERANCE:.0%} is allowed"
            )
    return ""


class Passes:
    """Forward and backward pass of every micro-batch, with the interface of a training step."""

    def __init__(self, model: Any, spare_memory: SpareMemory, device: torch.device) -> None:
        self._model, self._spare_memory, self._device = model, spare_memory, device
        self.memory = PeakMemory(device)
        self.on_entry: Any = None

    def __call__(
        self, micro_batches: list[LoadedBatch], started: float, *, wait: bool = True
    ) -> bool:
        """Run the passes, free the gradients, call ``on_entry`` with loss, seconds and memory."""
        del wait  # without an optimizer step each step waits for its loss, as a baseline's does
        loss = torch.zeros(())
        with self._spare_memory.share_weights(len(micro_batches)):
            for loaded in micro_batches:
                inputs = copy_batch_to_device(loaded.batch, self._device)
                loss = self._model(**inputs, skip_logits=True).loss
                (loss / len(micro_batches)).backward()
        self._model.zero_grad(set_to_none=True)
        self._spare_memory.after_step()
        entry = {"loss": loss.item(), "step_s": time.perf_counter() - started}  # waits for the GPU
        self.on_entry(entry | {"peak_memory_mb": self.memory.read()})
        return False


@dataclass(slots=True)
class StepRun:
    """State that the measurements of a run share."""

    args: argparse.Namespace
    world: World
    reference: Reference | None = None
    trained: dict[int, list[float]] = field(default_factory=dict)
    """Batch size -> BF16's losses in its first steps through DeepSpeed."""

    def measure(self, implementation: Implementation, batch: int) -> StepResult:
        """Measure one batch size, and free its memory."""
        args, world = self.args, self.world
        case = self.open_case(implementation, batch)
        recipe, size = case.recipe, SIZES[args.size]
        low_bits = recipe.has_low_bits(gpu=world.device.type == "cuda")
        optimizer = f"{recipe.optimizer}{'_low_bits' if low_bits else ''}"
        attention = recipe.cudnn_attention if implementation.trains else "default"
        result = StepResult(
            *harness.get_origin()[:3],
            gpus=world.size,
            zero=implementation.zero_stage,
            model=size.name,
            implementation=implementation.label,
            checkpointing=False,
            optimizer=optimizer if implementation.trains else "none",
            batch=batch,
            tokens=size.model.max_length * batch * args.accumulation * world.size,
            note=f"attention {attention}, accumulation {args.accumulation}"
            + ("" if args.lora is None else f"; LoRA rank {args.lora}")
            + ("" if args.mixed is None else f"; mixed samples, {args.mixed}")
            + "".join(f"; {word}" for word in args.deepspeed),
        )
        try:
            if self.reference is None:
                self.reference = self._measure_reference()
            self._measure(result, implementation, case, self.reference)
        except Exception as error:  # the result reports the error, and the next one runs
            if world.size > 1:  # the other ranks wait for this one, so all must end
                error.add_note(
                    f"in {result.implementation} with optimizer {result.optimizer}, ZeRO-"
                    f"{result.zero}: leave it or its largest --batch out; only a single process "
                    "continues after a failure"
                )
                raise
            result.problem = harness.format_error(error)
            traceback.clear_frames(error.__traceback__)  # frees the model
        harness.free_memory(world.device)
        return result

    def open_case(self, implementation: Implementation, batch: int) -> StageCase:
        """Build the stage that trains the implementation's model."""
        precision = implementation.name if implementation.name in NAMES else "bf16"
        recipe = make_recipe(
            self.args.size,
            batch,
            precision,
            implementation.zero_stage,
            self.args.lora,
            packed=self.args.mixed == "packed",
            master_weights="auto" if precision == "bf16" else self.args.master_weights,
        )
        return open_case(recipe, "sft", self.world, accumulation=self.args.accumulation)

    def _measure_reference(self) -> Reference:
        case = self.open_case(Implementation("bf16", False, 0), 1)
        model = build_stage_model(case, self.world.device)
        set_train_mode(model, case.stage)
        batches = [self._batch(model, size) for size in dict.fromkeys((1, *self.args.batch))]
        reference = measure_reference(model, batches)
        del model
        harness.free_memory(self.world.device)
        return reference

    def _batch(self, model: Any, rows: int) -> LoadedBatch:
        size, mixed = SIZES[self.args.size], self.args.mixed
        return make_step_batch(model, size, rows, mixed, self.world.rank)

    def _measure(
        self,
        result: StepResult,
        implementation: Implementation,
        case: StageCase,
        reference: Reference,
    ) -> None:
        """Store the measurements, or the problem, in the result."""
        args, world = self.args, self.world
        result.note += harness.note_leftover_memory(world.device)
        model = build_stage_model(case, world.device)
        set_train_mode(model, case.stage)
        sample, loaded = (self._batch(model, batch) for batch in (1, result.batch))
        with contextlib.ExitStack() as stack:
            if implementation.name in BASELINES:
                stack.enter_context(apply_baseline(implementation.name, model))
            problem = find_disagreement(model, sample, reference)
            if world.any(bool(problem)):
                result.problem = problem or "not correct on another rank"
                return
            step: Any
            if implementation.trains:
                step = build_training_step(model, case, world, args.warmup + args.steps)
                stack.callback(release_engine, step.passes.engine, model)
            else:
                arithmetic = arithmetic_of(case.recipe.precision, case.recipe.fp8, world.device)
                store_frozen_weights(model)
                if implementation.name in NAMES and arithmetic.fp8 is not None:
                    graph_blocks(model, arithmetic.fp8.cuda_graphs)
                    stack.callback(graph_blocks, model, enabled=False)
                step = Passes(model, SpareMemory.of(model, arithmetic, world.device), world.device)
                # A failed pass leaves gradients.
                stack.callback(model.zero_grad, set_to_none=True)
                inputs: Any = copy_batch_to_device(loaded.batch, world.device)
                loaded = replace(loaded, batch=inputs)
            batches = [loaded] * args.accumulation
            title = f"{result.implementation}, {result.optimizer}, batch {result.batch}"
            timing = take_steps(step, batches, title, world, args.steps, args.warmup)
            losses = [math.nan if e["loss"] is None else e["loss"] for e in timing.entries]
            if implementation.trains:
                problem = check_training(losses, self.trained.get(result.batch))
            else:
                problem = check_losses(losses, reference.losses[result.batch])
            if world.any(bool(problem)):
                result.problem = problem or "not correct on another rank"
                return
            if implementation.trains and implementation.name == "bf16":
                self.trained.setdefault(result.batch, losses)
            result.ms, result.peak_gb = timing.ms, timing.peak_gb
            result.tok_s = result.tokens / (timing.ms / 1e3)
            result.note += (
                f"; loss {losses[0]:.4f} -> {losses[-1]:.4f}{harness.note_memory(world.device)}"
            )
            if args.profile:
                table = harness.profile_step(
                    lambda: step(batches, time.perf_counter()), world.device
                )
                harness.say(f"\n{title}, ZeRO-{result.zero}: {table}\n")


def format_steps(results: Sequence[StepResult]) -> str:
    """Format a Markdown table with a line per implementation, optimizer, ZeRO stage and batch."""
    columns = {"implementation": "implementation", "optimizer": "optimizer", "ZeRO": "zero"}
    columns |= {"batch": "batch", "tokens": "tokens:0", "ms": "ms:1", "tokens/s": "tok_s:0"}
    columns |= {"peak GB": "peak_gb:2", "note": lambda result: result.problem or result.note}
    return harness.format_results(results, columns)


def name_fastest(results: Sequence[StepResult]) -> str:
    """Name the fastest baseline of every ZeRO stage and batch, and the speed of ours against it."""
    ours, lines = set(NAMES.values()), []
    for key in dict.fromkeys((r.zero, r.optimizer == "none", r.batch) for r in results):
        timed = [r for r in results if (r.zero, r.optimizer == "none", r.batch) == key and r.tok_s]
        if baselines := [r for r in timed if r.implementation not in ours]:
            best: Any = max(baselines, key=lambda r: r.tok_s or 0.0)
            ratios = (
                f"; {r.implementation} {(r.tok_s or 0.0) / best.tok_s:.3f}x"
                for r in timed
                if r.implementation in ours
            )
            lines.append(
                f"Fastest baseline, optimizer {best.optimizer}, ZeRO {best.zero}, batch "
                f"{best.batch}: {best.implementation}, {best.tok_s:,.0f} tokens/s{''.join(ratios)}"
            )
    return "\n".join(lines)


def limit_memory(device: torch.device, gib: float) -> None:
    """Limit torch's allocator on a GPU to ``gib`` * 2^30 bytes; ValueError if it has less."""
    if device.type != "cuda":
        raise ValueError(f"--cap-gib {gib}: there is no GPU; leave the option out")
    total = torch.cuda.get_device_properties(device).total_memory
    if not 0 < gib * 2**30 <= total:
        raise ValueError(
            f"--cap-gib {gib}: the GPU has {total / 2**30:.1f} GiB; give a number up to that"
        )
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, device)


EXAMPLES = """\
  python scripts/bench/step.py --csv tiny.csv                    # a tiny model, on any machine
  python scripts/bench/step.py --size 8b --baselines eager liger tower --batch 1 2 4 8
  python scripts/bench/step.py --size 8b --precisions coat --optimizer own --batch 4 --profile
  python scripts/bench/step.py --size 8b --precisions coat recompute_qkv --optimizer own \\
      --accumulation 8 --cap-gib 77                              # an 8B model on a GPU of 80 GB
  python scripts/bench/step.py --size qwen3-vl-30b-a3b --lora 64 --precisions bf16 coat
  python scripts/bench/step.py --size qwen2.5-7b --lora 64 --precisions coat --optimizer own
  torchrun --nproc-per-node 2 scripts/bench/step.py --size llama-2-7b --optimizer own \\
      --precisions bf16 coat recompute_qkv --zero 1 2 3 --batch 1 2 4  # COAT's paper

sizes; samples of the models with a tower have 4,096 tokens with 4 images of 448 pixels:
  1b, 2b, 8b           SigLIP-so400m and a language model of the shape of Qwen2.5-0.5B, 1.5B or
                       7B: 0.90B, 1.95B and 8.04B parameters
  qwen2.5-vl-7b, qwen3-vl-8b, qwen3-vl-30b-a3b    the published models (model.pretrained)
  qwen2.5-7b           no tower, 4,096 tokens of text
  llama-2-7b           no tower, 2,048 tokens of text, as in COAT's paper
  tiny, tiny-llm       0.2M parameters, 32 tokens, with and without a tower, for tests on a CPU
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add, positive = parser.add_argument, at_least(1)
    # fmt: off
    add("--size", choices=SIZES, default="tiny", metavar="SIZE", help="the model; default tiny")
    add("--precisions", nargs="*", choices=PRECISIONS, default=["bf16", "coat", "recompute_qkv"],
        metavar="NAME", help=f"{', '.join(PRECISIONS)}; default bf16 coat recompute_qkv")
    add("--baselines", nargs="*", choices=BASELINES, default=[], metavar="NAME",
        help=f"{', '.join(BASELINES)}; default none")
    add("--optimizer", nargs="+", choices=("none", "own"), default=["none"], help="default none")
    add("--zero", nargs="+", type=int, choices=(0, 1, 2, 3), help="ZeRO stages; default 0")
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters; default: all weights")
    add("--master-weights", choices=("auto", "fp32", "low_bits"), default="auto",
        help="as in a recipe; default auto")
    add("--deepspeed", nargs="+", default=[], metavar="KEY=VALUE",
        help="keys of DeepSpeed's zero_optimization with several GPUs, such as overlap_comm=false")
    add("--mixed", choices=("packed", "padded"),
        help="published models: samples of mixed lengths and image sizes in one packed sequence, "
        "or in padded ones, with as many tokens as --batch full ones; padding does not count")
    add("--cap-gib", type=float, metavar="GIB", help="limit torch's allocator on each GPU")
    add("--batch", nargs="+", type=positive, default=[1], metavar="N",
        help="samples per micro-batch on one GPU, ascending; default 1")
    add("--accumulation", type=positive, default=1, help="micro-batches per step; default 1")
    add("--steps", type=positive, default=5, help="measured steps; default 5")
    add("--warmup", type=positive, default=3, help="steps before them; default 3")
    add("--profile", action="store_true", help="one more step under torch's profiler")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure all implementations, one after the other."""
    with join_world() as world:
        if args.cap_gib is not None:
            limit_memory(world.device, args.cap_gib)
        for stage in args.zero or ():
            keys = (word.split("=", 1) for word in args.deepspeed)
            OPTIONS.setdefault(stage, {}).update((key, json.loads(value)) for key, value in keys)
        run, results = StepRun(args, world), []
        for implementation in list_implementations(args, world.size):
            with restore_attention():  # which the engine sets
                for batch in args.batch:
                    results.append(run.measure(implementation, batch))
                    if world.is_main:
                        harness.append_results(args.csv, results[-1:])
                    if results[-1].problem:
                        break
        title = f"{results[0].model}, {world.size} x {results[0].gpu}"
        harness.say(f"\n{title}\n\n{format_steps(results)}\n\n{name_fastest(results)}")


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
