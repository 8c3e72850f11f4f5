"""Trains a tiny model through DeepSpeed and prints its peaks next to the plan's, as JSON.

Started by ``test_plan_zero.py``, once per process: ``DTYPE ACCUMULATION BUCKET``, where
DTYPE is ``bf16``, ``fp32`` or ``low_bits``.
"""

import gc
import json
import sys

import torch
from transformers import Qwen2Config, SiglipVisionConfig

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.config import (
    Fp8Config,
    LanguageConfig,
    ModelConfig,
    ModuleTraining,
    Recipe,
    StageConfig,
    VisionConfig,
)
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import Arithmetic
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model import loss as loss_room
from coat_vlm.model.build import create_meta_model
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.activations import LiveMemory
from coat_vlm.plan.rows import compose_row
from coat_vlm.plan.zero import (
    ZERO_STAGES,
    ZeroStage,
    count_sizes,
    estimate_rank_memory,
    measure_state_bytes,
)
from coat_vlm.train import engine as train_engine
from coat_vlm.train import model_setup
from coat_vlm.train.gradient_sums import MAX_BF16, GradientSums

TOKENS, IMAGES = 16, 1
CONFIG = CoatVlmConfig(
    vision_config=SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=4,
    ),
    text_config=Qwen2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512,
    ),
    select_layer=-1, image_token_id=3, attn_implementation="sdpa",
)  # fmt: skip


def measured(
    zero_stage: ZeroStage,
    low_bits: bool,
    dtype: torch.dtype,
    accumulation: int,
    bucket: int,
    world: World,
) -> dict[str, float]:
    """Peaks in bytes: of a step's passes, of its optimizer, and what the plan says."""
    train = ModuleTraining(train=True, lr=1e-3)
    stage = StageConfig(
        data=[], projector=train, language=train, batch_size=accumulation * world.size,
        micro_batch_size=1, max_steps=8,
    )  # fmt: skip
    model_config = ModelConfig(
        vision=VisionConfig(config={"any": 0}), language=LanguageConfig(config={"any": 0})
    )
    recipe = Recipe(
        name="plan", output_dir="unused", model=model_config, stages={"sft": stage},
        zero_stage=zero_stage,
    )  # fmt: skip
    # CoatAdamW; nothing is converted
    arithmetic = Arithmetic(dtype, Fp8Config().resolved("coat"), low_bits=low_bits)
    frame = create_meta_model(CONFIG, dtype)
    model_setup.set_trainable(frame, stage)
    model_setup.set_train_mode(frame, stage)
    planned = estimate_rank_memory(
        zero_stage,
        count_sizes(frame, stage, measure_state_bytes(CoatAdamW), low_bits=low_bits),
        world.size,
        compose_row(frame, TOKENS, IMAGES).trace(frame, 1),
        accumulates=accumulation > 1,
        fp32_sums=accumulation > MAX_BF16 and dtype == torch.bfloat16,
        bucket=bucket,
    )
    model = CoatVlm(CONFIG)
    torch.nn.Module.to(model, dtype)
    model_setup.set_trainable(model, stage)
    sums = GradientSums.of(model, recipe, stage, arithmetic, world)
    memory = LiveMemory("cpu")
    with memory:
        engine = train_engine.build_engine(model, recipe, stage, arithmetic, world, sums.sums)
    building = memory.peak
    ids = torch.arange(TOKENS)[None] + 5
    ids[:, :4] = 3
    pixels = torch.randn(IMAGES, 3, 16, 16).to(dtype)
    steps, ends = [], []
    for _ in range(8 if accumulation < 9 else 6):  # the first step makes the states
        passes = []
        for number in range(1, accumulation + 1):
            model_setup.set_train_mode(model, stage)
            with memory:
                memory.peak = memory.live
                loss = engine(input_ids=ids, pixel_values=pixels, labels=ids, skip_logits=True).loss
                with sums.adding(len(steps) + 1, number):
                    engine.backward(loss)
                del loss
                passes.append(memory.peak)
                memory.peak = memory.live
                engine.step()
        steps.append(passes)
        ends.append(memory.peak)
    engine.destroy()
    return {
        "zero_stage": zero_stage,
        "building": building,  # without the weights, which were there before
        "planned_building": planned.master_weights + planned.states
        + planned.gradients + 2 * bucket,
        # Between two ranks, gloo's threads may hold for a moment what they have reduced.
        "passes": max(min(peaks) for peaks in zip(*steps[1:], strict=True)), "step": min(ends[1:]),
        "planned_passes": planned.backward_peak, "planned_step": planned.step_peak,
    }  # fmt: skip


def main() -> None:
    """Measure all ZeRO stages; rank 0 prints."""
    low_bits = sys.argv[1] == "low_bits"
    dtype = torch.float32 if sys.argv[1] == "fp32" else torch.bfloat16
    accumulation, bucket = int(sys.argv[2]), int(sys.argv[3])
    plain = train_engine.build_deepspeed_config

    def with_bucket(*args: object) -> dict[str, object]:
        config = plain(*args)  # pyright: ignore[reportArgumentType]
        config["zero_optimization"]["reduce_bucket_size"] = bucket
        return config

    train_engine.build_deepspeed_config = with_bucket
    loss_room._kernel_fits = lambda *_: True  # pyright: ignore[reportPrivateUsage] - as on a GPU
    with join_world() as world:
        for zero_stage in ZERO_STAGES:
            torch.manual_seed(0)
            row = measured(zero_stage, low_bits, dtype, accumulation, bucket, world)
            gc.collect()
            if world.is_main:
                print("PLAN", json.dumps(row), flush=True)  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
