"""What ``coat-vlm plan`` would say of a step of ``coat-vlm bench step``: its highest memory."""

import torch

from coat_bench.step_loop import OptimizerName, fp8_config
from coat_bench.vlm_shapes import VlmShape
from coat_vlm.config import Precision, StageConfig
from coat_vlm.fp8 import convert
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import Activations, trace
from coat_vlm.plan.frames import gpu_arithmetic
from coat_vlm.plan.zero import ZeroStage, rank_memory, sizes_of, state_bytes_per_parameter
from coat_vlm.train.engine import set_train_mode, set_trainable

PLANNED: tuple[OptimizerName, ...] = ("none", "adamw", "coat")
"""Optimizers whose states the plan knows."""


class StepPlan:
    """Plans the steps of one model in one precision, which it traces once for each batch.

    Args:
        shape: the model and its samples.
        precision: one of our own.
        stage: what trains; its batch sizes do not matter.
        reuse_weights: whether micro-batches share FP8 weights.
        bf16_forward_first: that key of ``fp8``.
    """

    def __init__(
        self,
        shape: VlmShape,
        precision: Precision,
        stage: StageConfig,
        *,
        reuse_weights: bool,
        bf16_forward_first: int | None = None,
    ) -> None:
        fp8 = fp8_config(precision, "coat", bf16_forward_first=bf16_forward_first)
        arithmetic = gpu_arithmetic(precision, fp8)
        frame = shape.frame(arithmetic.dtype)
        set_trainable(frame, stage)
        if arithmetic.fp8 is not None:
            convert(frame, arithmetic.fp8)
        set_train_mode(frame, stage)
        self._frame, self._stage, self._shape = frame, stage, shape
        self._reuse_weights = reuse_weights
        self._traced: dict[int, Activations] = {}

    def peak_gb(
        self,
        batch: int,
        *,
        accumulation: int,
        optimizer: OptimizerName,
        zero_stage: ZeroStage,
        ranks: int,
    ) -> float | None:
        """Highest memory of a rank in 10^9 bytes; None for an optimizer that no plan knows.

        Args:
            batch: samples of a micro-batch.
            accumulation: micro-batches of a step.
            optimizer: ``none`` for both passes alone, whose gradients are freed between steps.
            zero_stage: of DeepSpeed.
            ranks: processes.
        """
        if optimizer not in PLANNED:
            return None
        activations = self._activations(batch)
        if optimizer == "none":
            return self._passes(activations, accumulation) / 1e9
        kind = CoatAdamW if optimizer == "coat" else torch.optim.AdamW
        sizes = sizes_of(self._frame, self._stage, state_bytes_per_parameter(kind))
        accumulates = accumulation > 1
        memory = rank_memory(zero_stage, sizes, ranks, activations, accumulates=accumulates)
        return memory.peak / 1e9

    def _activations(self, batch: int) -> Activations:
        # Not on a line through two small batches: their logits are fewer chunks.
        if batch not in self._traced:
            shape = self._shape
            text = shape.tokens - shape.images * self._frame.config.tokens_per_image
            self._traced[batch] = trace(
                self._frame, batch, shape.tokens, shape.images,
                trained=text, reuse_weights=self._reuse_weights,
            )  # fmt: skip
        return self._traced[batch]

    def _passes(self, activations: Activations, accumulation: int) -> float:
        sizes = sizes_of(self._frame, self._stage, 0.0)
        weights = sizes.weight_bytes * sizes.parameters + activations.weight_copies
        if accumulation > 1:  # the gradients of the micro-batches before stay
            return weights + sizes.weight_bytes * sizes.trained + activations.peak()
        return weights + activations.peak(sizes.weight_bytes)
