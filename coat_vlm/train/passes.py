"""Forward, backward, clipping and the optimizer's update of a step, on one engine.

The loss of a micro-batch is the sum over its tokens, divided by the number of supervised tokens of
all micro-batches and ranks. The gradients of micro-batches therefore add up to the gradient of the
whole batch's mean loss per supervised token, however it is split. In a stage ``dpo`` the loss
is the sum over its pairs, divided by the number of pairs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from coat_data.load.collate import Batch
from coat_data.load.loader import LoadedBatch
from coat_kernels import share_scales
from coat_vlm.config import Recipe, StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic, SpareMemory, graph_blocks
from coat_vlm.model.placeholders import KINDS, copy_to_device
from coat_vlm.model.sequence_parallel import SHARD, SequenceGroup, join_sequence_group, shard_batch
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim import CoatAdamW, clip_scale
from coat_vlm.train.engine import build_engine, training_loop_clips
from coat_vlm.train.gradient_sums import GradientSums
from coat_vlm.train.model_setup import set_train_mode
from coat_vlm.train.preference import Preference, count_pairs
from coat_vlm.train.throughput import count_supervised_tokens

_CPU_INPUTS = frozenset(
    (
        *("attention_mask", "labels", "image_grids", "frame_groups", "cu_seq_lens_q"),
        *("max_length_q", "image_sizes", "batch_num_images", "video_frames", SHARD),
        *(f"{kind}_grid_thw" for kind in KINDS),
        *(f"{kind}_cu{name}_seqlens" for kind in KINDS for name in ("", "_window")),
    )
)
"""Inputs that the model reads on the CPU, to decide on shapes without waiting for the GPU."""


class Results(NamedTuple):
    """The loss of this rank and the gradient norm of a step, which the GPU may not have yet."""

    copied: Tensor
    """FP64 [1] or [2] on the CPU: the loss, and the norm unless it is not computed."""
    done: torch.cuda.Event | None
    """When the step has ended and its results are copied; None on a CPU."""

    def wait(self) -> tuple[float, float | None]:
        """Wait for the step, not for later launches; return loss and norm."""
        if self.done is not None:
            self.done.synchronize()
        loss, *norm = self.copied.tolist()
        return loss, norm[0] if norm else None


@dataclass(slots=True, kw_only=True)
class Passes:
    """Runs the passes and updates of one stage."""

    engine: DeepSpeedEngine
    model: PreTrainedModel
    stage: StageConfig
    world: World
    clips: bool
    """Whether this class clips gradients, instead of DeepSpeed."""
    spare_memory: SpareMemory
    sums: GradientSums
    sequence: SequenceGroup | None = None
    """The ranks that share the tokens of each micro-batch; None without sequence parallelism."""
    preference: Preference | None = None
    """The loss of a stage ``dpo``."""
    mode_is_set: bool = False

    @property
    def counts(self) -> bool:
        """True on one rank of a group that shares sequences, whose micro-batches count once."""
        return self.sequence is None or self.sequence.rank == 0

    def set_train_mode(self) -> None:
        """Set module modes unless they are set already: that takes 9 ms on 7B with adapters."""
        if not (self.mode_is_set and self.model.training):  # a validation resets the whole model
            set_train_mode(self.model, self.stage)
            self.mode_is_set = True

    def update(
        self,
        micro_batches: list[LoadedBatch],
        divisor: float,
        read_previous: Callable[[], None],
        *,
        step: int,
    ) -> Results:
        """Launch forward, backward and the optimizer's update.

        ``divisor`` is the number of terms of the loss of all micro-batches and ranks.
        ``step`` counts from 1. ``read_previous`` reads and checks the previous step, while the GPU
        has work.
        """
        # DeepSpeed divides by the number of micro-batches (backward) and of ranks (averaging). Each
        # rank's loss is the sum over its own tokens, also if ranks share a micro-batch.
        undo_averaging = len(micro_batches) * self.world.size
        total_loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        norm: Tensor | float | None = None
        with ExitStack() as shared_weights:
            shared_weights.enter_context(self.spare_memory.share_weights(len(micro_batches)))
            if self.sequence is not None:
                shared_weights.enter_context(share_scales(self.sequence.raise_to_largest))
            for number, loaded in enumerate(micro_batches, start=1):
                loss = self.loss(loaded.batch, divisor)
                total_loss += loss.detach().double()
                first = step == 1 and number == 1
                check = self._check_modules_get_gradients() if first else nullcontext()
                with check, self.sums.adding(step, number):
                    self.engine.backward(loss * undo_averaging)
                # No weight has changed since the previous step, so its passes can be repeated.
                read_previous()
                if number == len(micro_batches):
                    if self.clips:
                        norm = self._clip()
                    shared_weights.close()  # the step changes weights and needs the memory
                self.engine.step()  # updates weights only after the last micro-batch
        self.spare_memory.after_step()
        if not self.clips:
            norm = self.engine.get_global_grad_norm()
        results = [total_loss]
        if norm is not None:
            results.append(torch.as_tensor(norm, dtype=torch.float64, device=self.world.device))
        copied = torch.stack(results).to("cpu", non_blocking=True)
        return Results(copied, record_event(self.world.device))

    def loss(self, batch: Batch, divisor: float) -> Tensor:
        """Run the forward pass; return the sum of this rank's token (or pair) losses / divisor."""
        shard: Mapping[str, Any] = batch
        if self.sequence is not None:
            shard = shard_batch(batch, self.sequence, self.model)
        inputs = copy_batch_to_device(shard, self.world.device)
        if self.preference is not None:
            return self.preference.loss(self.engine, inputs, divisor)
        # Without skip_logits the model would also return logits in validation.
        return self.engine(**inputs, num_items_in_batch=divisor, skip_logits=True).loss

    def count_terms(self, batch: Batch) -> int:
        """Count the terms of the sum in :meth:`loss`: supervised tokens, or pairs."""
        if self.preference is not None:
            return count_pairs(batch["labels"])
        return count_supervised_tokens(batch)

    def set_lr(self, factor: float) -> dict[str, float]:
        """Set the learning rates to this part of their peaks, and return them by module."""
        rates = {}
        optimizer: Any = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
            rates[group["module"]] = group["lr"]
        return rates

    def find_bad_values(
        self, micro_batches: list[LoadedBatch], divisor: float
    ) -> tuple[str | None, list[str]]:
        """Repeat the passes of a skipped step before the run stops, and find what is not finite.

        Returns the first module with NaN or infinities in its output, or None, and the parameters
        with such gradients.
        """
        bad: set[str] = set()
        outputs: list[str] = []

        def check_output(name: str, _: nn.Module, __: object, output: object) -> None:
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            if not outputs and not all(leaf.isfinite().all() for leaf in leaves):
                outputs.append(name or "the model")

        def check(name: str, gradient: Tensor) -> None:
            if name not in bad and not gradient.isfinite().all():
                bad.add(name)

        graph_blocks(self.model, enabled=False)  # a capture may not wait for the GPU, as hooks do
        with _gradient_hooks(self.model.named_parameters(), check), ExitStack() as hooks:
            for name, module in self.model.named_modules():
                hook = module.register_forward_hook(partial(check_output, name))
                hooks.callback(hook.remove)
            for loaded in micro_batches:
                self.engine.backward(self.loss(loaded.batch, divisor))
        first = [names[0] for names in self.world.gather(outputs) if names]
        return next(iter(first), None), sorted(set[str]().union(*self.world.gather(bad)))

    def _clip(self) -> Tensor:
        """Clip the gradients, or have the optimizer skip them if they are not finite.

        Returns the norm [] before clipping. CoatAdamW reads the scale of the gradients on their
        device; for torch's AdamW, this function waits for the norm.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.stage.max_grad_norm
        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, CoatAdamW):
            # In FP32, also of BF16 gradients, without copying them.
            grads: Any = [p.grad for p in parameters]
            norms = torch._foreach_norm(grads, 2.0, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            optimizer.grad_scale = clip_scale(norm, limit)
            return norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)
        if not math.isfinite(norm):
            for parameter in parameters:  # AdamW skips parameters without a gradient
                parameter.grad = None
        return norm

    @contextmanager
    def _check_modules_get_gradients(self) -> Iterator[None]:
        parts = module_parameters(self.model)
        trained = {name: parts[name] for name in parts if self.stage.module(name).train}
        reached: set[str] = set()
        parameters = ((name, p) for name, part in trained.items() for p in part.parameters())
        with _gradient_hooks(parameters, lambda name, _: reached.add(name)):
            yield
        missed = [name for name in trained if name not in reached]
        if missed:
            raise ValueError(
                f"{', '.join(missed)} should train but got no gradient in the first step; check "
                "that the data has images and that nothing detaches them"
            )


def build_passes(
    model: PreTrainedModel,
    recipe: Recipe,
    stage: StageConfig,
    arithmetic: Arithmetic,
    world: World,
    preference: Preference | None = None,
) -> Passes:
    """Build the passes of a prepared model, with DeepSpeed's engine around it."""
    sums = GradientSums.of(model, recipe, stage, arithmetic, world)
    engine = build_engine(model, recipe, stage, arithmetic, world, sums.sums)
    return Passes(
        engine=engine,
        model=model,
        stage=stage,
        world=world,
        clips=training_loop_clips(recipe, arithmetic),
        spare_memory=SpareMemory.of(model, arithmetic, world.device),
        sums=sums,
        sequence=join_sequence_group(world, stage.sequence_parallel, recipe.collective_timeout_s),
        preference=preference,
    )


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after what was launched so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def copy_batch_to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the model's inputs to a device, except those that the model reads on the CPU."""
    inputs: dict[str, Any] = {**batch}
    inputs |= inputs.pop("extras", {})
    return {
        name: value
        if name in _CPU_INPUTS or not isinstance(value, Tensor)
        else copy_to_device(value, device)
        for name, value in inputs.items()
    }


@contextmanager
def _gradient_hooks(
    parameters: Iterable[tuple[str, nn.Parameter]], hook: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``hook`` with the name and the gradient of each parameter, before ZeRO reduces it."""
    with ExitStack() as hooks:
        for name, parameter in parameters:
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(partial(hook, name)).remove)
        yield
