"""One training step, as ``coat-vlm bench step`` repeats it: with DeepSpeed's engine, or without.

Every micro-batch of a step is the same batch.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor

from coat_bench.vlm_shapes import Inputs
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
from coat_vlm.fp8 import Arithmetic, WeightReuse, graph_blocks
from coat_vlm.model import CoatVlm
from coat_vlm.optim import CoatAdamW, param_groups
from coat_vlm.plan.zero import ZeroStage
from coat_vlm.train.engine import build_engine, clips_itself

OptimizerName = Literal["none", "adamw", "coat", "torchao_fp8", "torchao_8bit"]

LR = 2e-5
"""High enough to lower the loss of a repeated batch within a few steps."""


class Loop(Protocol):
    """Repeats a step."""

    def step(self, inputs: Inputs) -> Tensor:
        """One step on a batch; its loss before the step, on the device."""
        ...

    def close(self) -> None:
        """Let go of all memory but the model's."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """Forward and backward passes; the gradients are freed after the last one."""

    model: CoatVlm
    reuse: WeightReuse
    accumulation: int

    def step(self, inputs: Inputs) -> Tensor:
        """Both passes of every micro-batch."""
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
        """As :class:`coat_vlm.train.step.TrainStep` takes one."""
        self._set_lr()
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

    def _set_lr(self) -> None:
        optimizer: Any = self.engine.optimizer
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(LR)
            else:
                group["lr"] = LR


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


def stage_config(batch: int, accumulation: int, ranks: int, checkpointing: bool) -> StageConfig:
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
        gradient_checkpointing=checkpointing,
    )


def fp8_config(
    precision: Precision,
    optimizer: OptimizerName,
    graphs: bool = False,
    bf16_forward_first: int | None = None,
) -> Fp8Config | None:
    """What an FP8 precision makes FP8; the optimizer is one that a recipe can name, if it is."""
    if precision not in FP8_PRECISIONS:
        return None
    own = optimizer == "coat"
    return Fp8Config(
        optimizer="coat" if own else "adamw",
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
    given = _foreign(model, stage, arithmetic, optimizer)
    engine = build_engine(model, recipe, stage, arithmetic, world, given)
    clip = stage.grad_clip if clips_itself(recipe, arithmetic) else None
    reuse = arithmetic.weight_reuse(model, world.device)
    return EngineLoop(engine, model, reuse, accumulation, clip)


def _foreign(
    model: CoatVlm, stage: StageConfig, arithmetic: Arithmetic, name: OptimizerName
) -> torch.optim.Optimizer | None:
    """An optimizer that no recipe gives to this precision; None where one does."""
    settings: dict[str, Any] = {"lr": 0.0, "betas": stage.betas, "eps": stage.eps}
    if name == "coat" and arithmetic.fp8 is None:
        codec = Fp8Config().codec(stage.betas[1])
        return CoatAdamW(param_groups(model, stage), codec=codec, **settings)
    if name in ("adamw", "coat"):
        return None
    from torchao import optim  # pyright: ignore[reportMissingImports]

    kind = {"torchao_fp8": optim.AdamWFp8, "torchao_8bit": optim.AdamW8bit}[name]
    return kind(param_groups(model, stage), **settings)
