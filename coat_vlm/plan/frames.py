"""The model of a recipe's stage as it would stand on a GPU, on ``meta``."""

import torch
from transformers import AutoTokenizer

from coat_vlm.config import BlockPrecision, Fp8Config, Precision, Recipe, StageConfig
from coat_vlm.fp8 import Arithmetic, convert
from coat_vlm.model.build import model_frame, saved_frame
from coat_vlm.model.pretrained import composed_folder
from coat_vlm.model.tokenizer import prepare_tokenizer, tokenizer_name
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.engine import set_train_mode, set_trainable

BLOCK_PRECISIONS: tuple[BlockPrecision, ...] = ("bf16", "fp8_linear", "coat", "coat_lean")
"""What the kept activations are compared over."""


def gpu_arithmetic(precision: Precision, fp8: Fp8Config | None) -> Arithmetic:
    """The arithmetic of a recipe on a GPU with FP8 tensor cores; there need not be one."""
    if precision == "fp32":
        return Arithmetic(torch.float32)
    if precision == "bf16":
        return Arithmetic(torch.bfloat16)
    return Arithmetic(torch.bfloat16, (fp8 or Fp8Config()).resolved(precision))


def vocabulary(recipe: Recipe) -> int:
    """Tokens of the recipe's tokenizer; at most, where one is to be trained.

    Raises:
        ValueError: the recipe names no tokenizer.
        OSError: there is none of that name.
    """
    if recipe.model.tokenizer.train_vocab_size is not None:
        return recipe.model.tokenizer.train_vocab_size
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name(recipe.model))
    return len(prepare_tokenizer(tokenizer, images=recipe.model.vision is not None))


def stage_frame(
    recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, vocab_size: int | None
) -> CoatVlm:
    """The model as training would have it at the first step of a stage.

    Args:
        recipe: model and start.
        stage: what trains.
        arithmetic: what is converted.
        vocab_size: see :func:`vocabulary`; None with ``init_from``, which has its own.

    Raises:
        ValueError: the recipe's model cannot be built, or not in this precision.
    """
    if vocab_size is None:
        assert recipe.init_from is not None
        frame = saved_frame(
            composed_folder(recipe.init_from), recipe.model.attention, arithmetic.dtype
        )
    else:
        frame = model_frame(recipe.model, vocab_size, arithmetic.dtype)
    set_trainable(frame, stage)
    if arithmetic.fp8 is not None:
        convert(frame, arithmetic.fp8)
    set_train_mode(frame, stage)
    return frame
