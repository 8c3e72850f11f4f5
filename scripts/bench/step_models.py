"""The models of ``step.py``, and the baselines made of them.

Weights are random, because time and memory of a step do not depend on them. A sample has a fixed
number of tokens, including the tokens of its images. Samples of a language model are text only.

A baseline is the same model with transformers', Liger's or torchao's implementation. It changes the
model in place; names that a library replaces in modules of transformers are restored afterwards.
Its loss is transformers', which needs all logits, or Liger's.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from coat_data.load.encode import EncodedSample
from coat_data.load.loader import LoadedBatch
from coat_vlm.config import (
    LanguageConfig,
    ModelConfig,
    ModuleTraining,
    Recipe,
    StageConfig,
    VisionConfig,
)
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.config.stage import LoraTraining, PackingConfig
from coat_vlm.fp8.blocks import (
    Fp8DecoderLayer,
    Fp8Encoder,
    Fp8Layer,
    find_layer,
)
from coat_vlm.model import CoatVlm
from coat_vlm.model.family_layout import describe_batch
from coat_vlm.model.family_model import complete_inputs, known_layout
from coat_vlm.model.placeholders import copy_to_device
from coat_vlm.plan.measure import make_batch
from coat_vlm.plan.rows import Row, compose_row
from coat_vlm.plan.zero import ZeroStage
from harness import choose_precision
from layer import convert_to_torchao


class StepModel(NamedTuple):
    """A measured model and its samples."""

    name: str
    model: ModelConfig
    """The model; ``max_length`` is the number of tokens of a sample, including image tokens."""
    images: int
    """Images of a sample."""


def _build_qwen(name: str, language: LanguageConfig, vocab_size: int | None = None) -> StepModel:
    """SigLIP-so400m/14 and a language model of Qwen2.5's shape; 4 images of 256 tokens."""
    model = ModelConfig(
        vision=VisionConfig(
            name_or_path="Efficient-Large-Model/paligemma-siglip-so400m-patch14-448"
        ),
        language=language,
        tokenizer=TokenizerConfig(train_vocab_size=vocab_size),
        max_length=4096,
    )
    return StepModel(f"siglip-so400m_qwen2.5-{name}", model, images=4)


def _read_published(name: str, folder: str) -> StepModel:
    """A published model; 4 images of 448 pixels, 196 tokens in Qwen3-VL, 256 in Qwen2.5-VL."""
    path = Path(__file__).parent / "published" / folder
    return StepModel(name, ModelConfig(pretrained=str(path), max_length=4096), images=4)


_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
_TINY_TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
}  # fmt: skip
_QWEN_HALF_BILLION = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def _build_text(name: str, language: LanguageConfig, tokens: int, **keys: Any) -> StepModel:
    """A language model without a tower."""
    model = ModelConfig(vision=None, language=language, max_length=tokens, **keys)
    return StepModel(name, model, images=0)


_QWEN_7B = LanguageConfig(name_or_path="Qwen/Qwen2.5-7B-Instruct")
_VICUNA = LanguageConfig(name_or_path="lmsys/vicuna-7b-v1.5")
_TINY_TOKENIZER = TokenizerConfig(train_vocab_size=512)
SIZES = {
    "tiny": StepModel(
        "tiny",
        ModelConfig(
            vision=VisionConfig(config=_TINY_TOWER),
            language=LanguageConfig(
                config={"model_type": "qwen2", "num_key_value_heads": 2, **_TINY}
            ),
            tokenizer=_TINY_TOKENIZER,
            max_length=32,
        ),
        images=2,
    ),
    "tiny-llm": _build_text(
        "tiny-llm",
        LanguageConfig(config={"model_type": "llama", **_TINY}),
        32,
        tokenizer=_TINY_TOKENIZER,
    ),
    "1b": _build_qwen("0.5b", LanguageConfig(config=_QWEN_HALF_BILLION), 151936),
    "2b": _build_qwen("1.5b", LanguageConfig(name_or_path="Qwen/Qwen2.5-1.5B-Instruct")),
    "8b": _build_qwen("7b", _QWEN_7B),
    "qwen2.5-7b": _build_text("qwen2.5-7b", _QWEN_7B, 4096),
    "llama-2-7b": _build_text("llama-2-7b", _VICUNA, 2048),
    "qwen2.5-vl-7b": _read_published("qwen2.5-vl-7b", "qwen2_5_vl_7b"),
    "qwen3-vl-8b": _read_published("qwen3-vl-8b", "qwen3_vl_8b"),
    "qwen3-vl-30b-a3b": _read_published("qwen3-vl-30b-a3b", "qwen3_vl_30b_a3b"),
}
"""Values of ``--size``. The language models have published shapes (config.json of Qwen/Qwen2.5-0.5B
here, the others in :mod:`coat_vlm.plan.stage`; Vicuna has Llama-2-7B's shape). Llama-2-7B
with a context of 2,048 tokens is the end-to-end setting of COAT's paper (arXiv:2410.19313).
``published`` has config.json of Qwen/Qwen2.5-VL-7B-Instruct, Qwen/Qwen3-VL-8B-Instruct and
Qwen/Qwen3-VL-30B-A3B-Instruct, without the keys that do not change the model."""


LR = 2e-5
"""Learning rate, high enough to lower the loss of a repeated batch within a few steps."""


def make_recipe(
    size: str,
    batch: int,
    precision: str = "bf16",
    zero_stage: ZeroStage = 0,
    lora: int | None = None,
    packed: bool = False,
    **keys: Any,
) -> Recipe:
    """Make a recipe that trains a model of :data:`SIZES` in its only stage, ``sft``.

    ``batch`` are samples of a micro-batch, ``precision`` is one of ``harness.PRECISIONS``, ``lora``
    the rank of LoRA adapters on the language model (None: all weights are trained).
    """
    model = SIZES[size].model
    train, frozen = ModuleTraining(train=True, lr=LR), ModuleTraining(train=False)
    stage = StageConfig(
        data=[],
        vision=frozen if model.vision is None or lora is not None else train,
        projector=frozen if model.vision is None else train,
        language=train,
        lora=None if lora is None else LoraTraining(rank=lora, alpha=2 * lora, dropout=0.0),
        batch_size=batch,
        micro_batch_size=batch,
        packing=PackingConfig() if packed else None,
        max_steps=1,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
        weight_decay=0.1,
    )
    chosen, fp8 = choose_precision(precision)
    return Recipe(
        name="bench",
        output_dir="unused",
        model=model,
        stages={"sft": stage},
        precision=chosen,
        fp8=fp8,
        zero_stage=zero_stage,
        **keys,
    )


_IMAGE_SIZE = (448, 448)  # pixels of the images of a published model
_MIXED_SIZES = {(640, 480): 5, (640, 427): 2, (480, 640): 2, (427, 640): 1}
"""Common sizes of COCO's images -> how often they are drawn."""


def make_row(model: Any, tokens: int, sizes: Sequence[tuple[int, int]]) -> Row:
    """Make a sequence with images, of a published model of these sizes (width, height)."""
    if isinstance(model, CoatVlm):
        return compose_row(model, tokens, len(sizes))
    # As the processors of Qwen2.5-VL and Qwen3-VL do: pixels of patches.
    config, vision = model.config, model.config.vision_config
    merge = vision.spatial_merge_size
    unit = vision.patch_size * merge
    grid = torch.tensor([[1, *(merge * round(x / unit) for x in size[::-1])] for size in sizes])
    patches = grid.prod(1).tolist() if sizes else []
    ids: list[int] = []
    for count in patches:
        ids += [config.vision_start_token_id] + [config.image_token_id] * (count // merge**2)
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    shown = torch.tensor(ids, dtype=torch.int64)
    return Row(
        tokens=tokens,
        images=len(sizes),
        shown=EncodedSample(
            input_ids=shown,
            labels=shown,
            pixel_values=torch.empty(sum(patches), pixels, device="meta"),
            extras={"image_grid_thw": grid} if sizes else {},
        ),
        # Text has any id below the media ids.
        text_ids=torch.arange(min(config.image_token_id, config.vision_start_token_id)),
        complete=partial(describe_batch, config=config),
    )


def draw_samples(model: Any, tokens: int, seed: int) -> list[EncodedSample]:
    """Draw samples of so many tokens together, with the lengths of an instruction mix.

    As in LLaVA-1.5's, 6% are text only, with a median of 600 tokens, and the others have one image
    and a median of 120 tokens of text; lengths are log-normal. The last one fills up with text.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    samples: list[EncodedSample] = []
    while True:
        size = draw.choices([*_MIXED_SIZES], [*_MIXED_SIZES.values()])
        text_only = draw.random() < 0.06
        text = 2 + int(draw.lognormvariate(math.log(600 if text_only else 120), 0.9))
        unit = model.config.vision_config.patch_size * model.config.vision_config.spatial_merge_size
        image = 0 if text_only else 1 + math.prod(round(x / unit) for x in size[0])
        if text + image + 2 > tokens:
            samples.append(make_row(model, tokens, []).make(generator))
            return samples
        row = make_row(model, text + image, [] if text_only else size)
        samples.append(row.make(generator))
        tokens -= text + image


def make_step_batch(
    model: Any, size: StepModel, rows: int, mixed: str | None, seed: int
) -> LoadedBatch:
    """Make a random micro-batch of full sequences, or if ``mixed`` of as many tokens in samples."""
    tokens = size.model.max_length
    row = make_row(model, tokens, [_IMAGE_SIZE] * size.images)
    if mixed is None:
        return make_batch(row, rows, None, seed)
    if isinstance(model, CoatVlm):
        raise ValueError("--mixed is for the published models; leave the option out")
    samples = draw_samples(model, tokens * rows, seed)
    batch = row.collate(samples, PackingConfig() if mixed == "packed" else None)
    return LoadedBatch(batch=batch, bad=[], num_samples=rows)


class Baseline(NamedTuple):
    """Another implementation of the same model."""

    implementation: str
    """Name in the results."""
    parts: Sequence[Callable[[Any], None]]
    """Functions that change the model in place, called in order."""


_BOUNDS = {"cu_seq_lens_q", "position_ids"}
"""Inputs of packed sequences that the model would copy to the GPU in every layer."""


def _use_decoder_loss(model: CoatVlm | PreTrainedModel) -> None:
    """Use the language model's loss, in transformers with FP32 logits of all tokens."""
    original = model.forward  # Liger's if it was applied

    def forward_published(
        _: PreTrainedModel, labels: Tensor, attention_mask: Any, skip_logits: Any, **inputs: Any
    ) -> Any:
        del attention_mask, skip_logits  # attention is causal, and no label is in the padding
        device = inputs["input_ids"].device
        inputs |= {name: copy_to_device(inputs[name], device) for name in _BOUNDS & inputs.keys()}
        return original(labels=copy_to_device(labels, device), use_cache=False, **inputs)

    def forward(
        self: CoatVlm,
        input_ids: Any,
        labels: Tensor,
        pixel_values: Tensor | None = None,
        image_positions: Tensor | None = None,
        num_items_in_batch: float | None = None,
        **_: Any,  # the mask: sequences are full
    ) -> CausalLMOutputWithPast:
        hidden = self.embed(input_ids, pixel_values, image_positions=image_positions)
        labels = copy_to_device(labels, hidden.device)
        divisor: dict[str, Any] = {}
        if num_items_in_batch is not None:  # the mean by default
            divisor["num_items_in_batch"] = num_items_in_batch
        return self.language_model(inputs_embeds=hidden, labels=labels, use_cache=False, **divisor)

    replaced = forward if isinstance(model, CoatVlm) else forward_published
    setattr(model, "forward", MethodType(replaced, model))  # noqa: B010 - on this instance


def apply_liger(model: Any, kernels: bool = True) -> None:
    """Use Liger's loss without stored logits, and its RoPE, RMSNorm, SwiGLU in the decoder.

    Liger 0.8.5 cannot be applied to a published model as a whole: it imports classes that
    transformers 5.23 no longer has. Its kernels for the same layers of the language model can.
    ``kernels``: False for only the loss.
    """
    from liger_kernel import transformers as liger  # pyright: ignore[reportMissingImports]

    chosen: dict[str, Any] = dict.fromkeys(("rope", "rms_norm", "swiglu"), kernels)
    if isinstance(model, CoatVlm):
        decoder: Any = model.language_model
        kind = decoder.config.model_type
    else:
        decoder = model.model.language_model
        kind, module = _LIGER_KINDS[model.config.model_type]
        chosen["fused_linear_cross_entropy"] = False
        if kernels:
            setattr(module, "apply_rotary_pos_emb", liger.liger_rotary_pos_emb)  # noqa: B010
        setattr(model, "forward", MethodType(_forward_with_liger_loss, model))  # noqa: B010
    getattr(liger, f"apply_liger_kernel_to_{kind}")(model=decoder, **chosen)


_LIGER_KINDS = {
    "qwen2_5_vl": ("qwen2", modeling_qwen2_5_vl),
    "qwen3_vl": ("qwen3", modeling_qwen3_vl),
}
"""Published family -> family of its language model in Liger, module of its attention."""


def _forward_with_liger_loss(
    model: Any, labels: Tensor, num_items_in_batch: float | None = None, **inputs: Any
) -> CausalLMOutputWithPast:
    """Return the loss of a published model, computed as in Liger's own forward passes."""
    from liger_kernel.transformers.model.loss_utils import (  # pyright: ignore[reportMissingImports]
        LigerForCausalLMLoss,
    )

    inputs = complete_inputs(model, inputs)
    with known_layout(model, inputs):
        hidden = model.model(**inputs).last_hidden_state
    width, weight = hidden.shape[-1], model.lm_head.weight
    loss = LigerForCausalLMLoss(
        hidden, weight, labels, width, num_items_in_batch=num_items_in_batch
    )
    return CausalLMOutputWithPast(loss=loss)


def _find_blocks(model: nn.Module, kind: type[Fp8Layer] = Fp8DecoderLayer) -> list[nn.Module]:
    """Return the blocks of the decoder or another kind, which are of classes that FP8 supports."""
    found = ((module, find_layer(module)) for module in model.modules())
    return [module for module, layer in found if layer and issubclass(layer, kind)]


def _apply_torchao(model: nn.Module) -> None:
    """Use torchao's tensorwise FP8 in the linear layers of the decoder."""
    for block in _find_blocks(model):
        convert_to_torchao(block)


def _pad_tower(model: nn.Module) -> None:
    """Pad the width of the tower's MLPs to a multiple of 16 with zero channels.

    The widths of 3,420 in Qwen2.5-VL give rows of 6,840 bytes, which are not aligned to 16 bytes,
    so cuBLAS cannot use its kernels for Hopper. Activations and gradients of the channels are zero.
    """
    linears = (m for block in _find_blocks(model, Fp8Encoder) for m in block.modules())
    for linear in linears:
        if not isinstance(linear, nn.Linear):
            continue
        rows, columns = (-size % 16 for size in linear.weight.shape)
        for name, padding in (("weight", (0, columns, 0, rows)), ("bias", (0, rows))):
            if (old := getattr(linear, name)) is not None and any(padding):
                new = nn.Parameter(F.pad(old.detach(), padding), requires_grad=old.requires_grad)
                setattr(linear, name, new)
        linear.out_features, linear.in_features = linear.weight.shape


def _compile(
    model: nn.Module, kind: type[Fp8Layer] = Fp8DecoderLayer, mode: str | None = None
) -> None:
    """Compile every decoder layer, or every block, for one batch shape.

    ZeRO-3 gathers and frees the weights of such a block as a whole, as of an FP8 block. Its hooks
    would otherwise be traced with every layer inside, and would end the graph there.
    """
    blocks = _find_blocks(model, kind)
    for block in blocks:  # without the block's hooks
        block.forward = torch.compile(block.forward, dynamic=False, mode=mode)
    set_z3_leaf_modules(model, list({type(block) for block in blocks}))


_LIGER_LOSS = partial(apply_liger, kernels=False)
_TORCHAO = [_use_decoder_loss, _apply_torchao, _compile]
_TOWER = [_LIGER_LOSS, _use_decoder_loss, _pad_tower]
BASELINES = {
    "eager": Baseline("hf_eager", [_use_decoder_loss]),
    "compile": Baseline("hf_compile", [_use_decoder_loss, _compile]),
    "torchao": Baseline("torchao_tensorwise_compile", _TORCHAO),
    "liger": Baseline("liger", [apply_liger, _use_decoder_loss]),
    "liger_torchao": Baseline("liger_torchao_tensorwise_compile", [apply_liger, *_TORCHAO]),
    "liger_loss_torchao": Baseline(
        "liger_loss_torchao_tensorwise_compile", [_LIGER_LOSS, *_TORCHAO]
    ),
    "tower": Baseline(
        "liger_loss_torchao_tensorwise_compile_tower",
        [*_TOWER, _apply_torchao, partial(_compile, kind=Fp8Layer)],
    ),
    "reduce_overhead": Baseline(
        "liger_loss_compile_reduce_overhead",
        [*_TOWER, partial(_compile, kind=Fp8Layer, mode="reduce-overhead")],
    ),
}
"""Values of ``--baselines``."""

_PATCHED = (modeling_llama, modeling_qwen2, modeling_qwen2_5_vl, modeling_qwen3_vl)
"""Modules of transformers in which Liger replaces names."""


@contextlib.contextmanager
def apply_baseline(name: str, model: PreTrainedModel) -> Iterator[None]:
    """Turn a model permanently into a baseline; restores transformers' modules at the end."""
    before = [(module, dict(vars(module))) for module in _PATCHED]
    try:
        for part in BASELINES[name].parts:
            part(model)
        yield
    finally:
        for module, names in before:
            vars(module).update(names)
