"""One training step, as ``coat-vlm bench step`` repeats it: with DeepSpeed's engine, or without.

Every micro-batch of a step is the same batch. What ``coat-vlm plan`` expects of such a step's
memory is here, too.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor

from coat_bench.models import Inputs, VlmShape
from coat_vlm.config import (
    FP8_PRECISIONS,
    Fp8Config,
    LanguageConfig,
    ModelConfig,
    ModuleTraining,
    Precision,
    Recipe,
    StageConfig,
    VisionConfig,
)
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic, WeightReuse, convert, graph_blocks
from coat_vlm.model import CoatVlm
from coat_vlm.optim import CoatAdamW, param_groups
from coat_vlm.plan.activations import Activations, trace
from coat_vlm.plan.frames import gpu_arithmetic
from coat_vlm.plan.zero import ZeroStage, rank_memory, sizes_of, state_bytes_per_parameter
from coat_vlm.train.engine import build_engine, clips_itself, set_train_mode, set_trainable

OptimizerName = Literal["none", "adamw", "coat"]

LR = 2e-5
"""High enough to lower the loss of a repeated batch within a few steps."""


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """Forward and backward passes; the gradients are freed after the last one."""

    model: CoatVlm
    reuse: WeightReuse
    accumulation: int

    def step(self, inputs: Inputs) -> Tensor:
        """Both passes of every micro-batch; the loss, on the device."""
        loss = torch.zeros(())
        with self.reuse.scope(self.accumulation):
            for _ in range(self.accumulation):
                loss = self.model(**inputs).loss
                (loss / self.accumulation).backward()
        self.model.zero_grad(set_to_none=True)
        self.reuse.after_step()
        return loss.detach()

    def close(self) -> None:
        """Drop graphs, and gradients, which a pass that failed leaves."""
        graph_blocks(self.model, enabled=False)
        self.model.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class EngineLoop:
    """The step of training: passes, reduction, clipping and optimizer through DeepSpeed."""

    engine: DeepSpeedEngine
    model: CoatVlm
    reuse: WeightReuse
    accumulation: int
    clip: float | None
    """Clip gradients here; DeepSpeed does it otherwise."""

    def step(self, inputs: Inputs) -> Tensor:
        """As :class:`coat_vlm.train.step.TrainStep` does; the loss before it, on the device."""
        optimizer: Any = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = LR
        loss = torch.zeros(())
        with ExitStack() as kept:
            kept.enter_context(self.reuse.scope(self.accumulation))
            for number in range(self.accumulation):
                loss = self.engine(**inputs).loss
                self.engine.backward(loss)
                if number == self.accumulation - 1:
                    if self.clip is not None:
                        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
                    kept.close()  # the weights move now
                self.engine.step()
        self.reuse.after_step()
        return loss.detach()

    def close(self) -> None:
        """Take DeepSpeed's hooks off the model, and all memory from both."""
        take_apart(self.engine, self.model)


Loop = PlainLoop | EngineLoop


def take_apart(engine: DeepSpeedEngine, model: CoatVlm) -> None:
    """Take DeepSpeed's hooks off a model, and all memory from both; neither can be used again.

    Stage 3 of deepspeed 0.19.8 never lets go of a model: a list of its module and classes made
    for its hooks hold it. So what they hold is emptied.
    """
    graph_blocks(model, enabled=False)
    wrapper: Any = engine.optimizer
    inner: Any = engine.basic_optimizer
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    for parameter in model.parameters():
        parameter.grad = None
        vars(parameter).clear()
        parameter.data = parameter.data.new_empty(0)
    inner.state.clear()
    for group in inner.param_groups:
        group["params"] = []
    for held in (wrapper, inner):
        vars(held).clear()


def stage_config(batch: int = 1, accumulation: int = 1, ranks: int = 1) -> StageConfig:
    """A stage that trains all modules."""
    train = ModuleTraining(train=True, lr=LR)
    return StageConfig(
        data=[],
        vision=train,
        projector=train,
        language=train,
        batch_size=batch * accumulation * ranks,
        micro_batch_size=batch,
        max_steps=1,
        weight_decay=0.1,
    )


def fp8_config(
    precision: Precision,
    optimizer: OptimizerName = "coat",
    graphs: bool = False,
    bf16_forward_first: int | None = None,
) -> Fp8Config | None:
    """What an FP8 precision makes FP8; the optimizer is one that a recipe can name, if it is."""
    if precision not in FP8_PRECISIONS:
        return None
    return Fp8Config(
        optimizer="coat" if optimizer == "coat" else "adamw",
        cuda_graphs=graphs,
        bf16_forward_first=None if precision == "fp8_linear" else bf16_forward_first,
    )


def engine_loop(
    model: CoatVlm,
    stage: StageConfig,
    arithmetic: Arithmetic,
    world: World,
    *,
    precision: Precision,
    optimizer: OptimizerName,
    zero_stage: ZeroStage,
    accumulation: int,
    cudnn_attention: bool = False,
) -> EngineLoop:
    """DeepSpeed around a model, as training has it.

    Args:
        model: converted, with what trains already set.
        stage: batch sizes and optimizer settings.
        arithmetic: of the precision.
        world: the processes.
        precision: the model's.
        optimizer: any but ``none``.
        zero_stage: of DeepSpeed.
        accumulation: micro-batches of a step.
        cudnn_attention: the recipe's key.

    Raises:
        ValueError: DeepSpeed does not take them.
    """
    unused: dict[str, Any] = {"model_type": "built already"}
    recipe = Recipe(
        name="bench",
        output_dir="unused",
        model=ModelConfig(
            vision=VisionConfig(config=unused), language=LanguageConfig(config=unused)
        ),
        stages={"sft": stage},
        precision=precision,
        fp8=arithmetic.fp8,
        zero_stage=zero_stage,
        cudnn_attention=cudnn_attention,
    )
    given = None
    if optimizer == "coat" and arithmetic.fp8 is None:  # which no recipe gives to this precision
        given = CoatAdamW(
            param_groups(model, stage),
            lr=0.0,
            betas=stage.betas,
            eps=stage.eps,
            codec=Fp8Config().codec(stage.betas[1]),
        )
    engine = build_engine(model, recipe, stage, arithmetic, world, given)
    clip = stage.grad_clip if clips_itself(recipe, arithmetic) else None
    reuse = arithmetic.weight_reuse(model, world.device)
    return EngineLoop(engine, model, reuse, accumulation, clip)


def traced(
    shape: VlmShape,
    precision: Precision,
    batch: int,
    *,
    reuse_weights: bool,
    bf16_forward_first: int | None = None,
) -> tuple[CoatVlm, Activations]:
    """A model on ``meta`` as it would stand on a GPU, and the memory of its passes over a batch.

    Args:
        shape: the model and its samples.
        precision: one of our own.
        batch: samples of a micro-batch. Memory is not on a line through two small batches: their
            logits are fewer chunks.
        reuse_weights: whether micro-batches share FP8 weights.
        bf16_forward_first: that key of ``fp8``.
    """
    arithmetic = gpu_arithmetic(
        precision, fp8_config(precision, bf16_forward_first=bf16_forward_first)
    )
    frame, stage = shape.frame(arithmetic.dtype), stage_config()
    set_trainable(frame, stage)
    if arithmetic.fp8 is not None:
        convert(frame, arithmetic.fp8)
    set_train_mode(frame, stage)
    text = shape.tokens - shape.images * frame.config.tokens_per_image
    activations = trace(
        frame, batch, shape.tokens, shape.images, trained=text, reuse_weights=reuse_weights
    )
    return frame, activations


def planned_gb(
    frame: CoatVlm,
    stage: StageConfig,
    activations: Activations,
    *,
    optimizer: OptimizerName,
    zero_stage: ZeroStage,
    ranks: int,
    accumulates: bool,
) -> float:
    """What ``coat-vlm plan`` expects of a rank's highest memory, in 10^9 bytes.

    Args:
        frame: the model on ``meta``, with what trains already set.
        stage: says which parameters are optimized together.
        activations: of a micro-batch.
        optimizer: ``none`` for both passes alone, whose gradients are freed between steps.
        zero_stage: of DeepSpeed.
        ranks: processes.
        accumulates: whether a step has several micro-batches.
    """
    if optimizer == "none":
        sizes = sizes_of(frame, stage, 0.0)
        weights = sizes.weight_bytes * sizes.parameters + activations.weight_copies
        if accumulates:  # the gradients of the micro-batches before stay
            return (weights + sizes.weight_bytes * sizes.trained + activations.peak()) / 1e9
        return (weights + activations.peak(sizes.weight_bytes)) / 1e9
    kind = CoatAdamW if optimizer == "coat" else torch.optim.AdamW
    sizes = sizes_of(frame, stage, state_bytes_per_parameter(kind))
    memory = rank_memory(zero_stage, sizes, ranks, activations, accumulates=accumulates)
    return memory.peak / 1e9
