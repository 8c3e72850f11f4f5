"""FP8 blocks in whole models of transformers' VLM families, compared with transformers' blocks."""

import copy
from importlib import import_module
from typing import Any, cast

import pytest
import torch
from families import FAMILIES, TEXT, Batch, build
from one_block import relative
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, LlavaConfig

from coat_kernels import TensorScaled, gemm, quantize_blockwise
from coat_kernels.formats import pad_length
from coat_kernels.reference import quantize
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert, fp8_blocks
from coat_vlm.fp8.block_error import LiveInput
from coat_vlm.fp8.blocks import find_layer
from coat_vlm.fp8.convert import PROJECTORS
from coat_vlm.model.packing import PACKED
from coat_vlm.optim import CoatAdamW

FAMILY = pytest.mark.parametrize("family", FAMILIES)
WITH_GRADIENTS = pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "gemma4", "glm4v", "lfm2_vl", "llava_onevision", "mistral3", "paligemma"),
        *("qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"),
    ],
)
"""A family of each layout of blocks."""


def run_model(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits of the tokens that are not padding, and gradients."""
    model.train().zero_grad()
    out = model(**batch, use_cache=False)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), out.logits[batch["attention_mask"].bool()].detach(), gradients


def live_inputs(model: Any, batch: Batch, blocks: list[str]) -> dict[str, LiveInput]:
    """Arguments and output gradients of blocks in a training step, of those that are used."""
    found: dict[str, LiveInput] = {}

    def record(
        name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[Tensor, ...] | Tensor
    ) -> None:
        live = LiveInput((args[0].detach(), *args[1:]), kwargs)
        assert isinstance(out, Tensor)

        def save(gradient: Tensor) -> None:
            live.gradient = gradient
            found[name] = live

        out.register_hook(save)

    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, *given, name=name: record(name, *given), with_kwargs=True
        )
        for name in blocks
    ]
    run_model(model, batch)
    for hook in hooks:
        hook.remove()
    return found


def run_block(block: Any, live: LiveInput) -> dict[str, Tensor]:
    """Output, input gradient and gradients of the parameters that train."""
    block.zero_grad()
    x = live.args[0].clone().requires_grad_()
    y = block(x, *live.args[1:], **live.kwargs)
    y.backward(live.gradient)
    assert x.grad is not None
    trained = {name: p.grad for name, p in block.named_parameters() if p.requires_grad}
    gradients = {name: grad.clone() for name, grad in trained.items() if grad is not None}
    return {"output": y.detach(), "input": x.grad} | gradients


def known_blocks(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if find_layer(module)]


@FAMILY
def test_which_layers_convert(family: str) -> None:
    model, _ = build(family)
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    blocks = known_blocks(model)
    in_blocks = {name for name in linears if name.startswith(tuple(f"{b}." for b in blocks))}
    read = {
        f"{name}.{child}"
        for name in blocks
        for child in cast(Any, find_layer(model.get_submodule(name))).LINEARS
    }
    only_mlp = family in ("gemma4", "lfm2_vl", "qwen3_5")
    assert read < in_blocks if only_mlp else read == in_blocks
    assert len(blocks) == (2 if family == "gemma4" else 4), "two of the tower, two of the decoder"
    report = convert(model, Fp8Config())
    assert set(report.converted) == {*blocks, "lm_head"}
    assert linears - read - {"lm_head"} == linears & report.skipped.keys()
    assert [name for name, _ in fp8_blocks(model)] == blocks
    report = convert(build(family)[0], Fp8Config(projector="fp8_linear", lm_head="fp8_linear"))
    projector = {name for name in linears if not PROJECTORS.isdisjoint(name.split("."))}
    converted = {name for name, how in report.converted.items() if how == "FP8 linear"}
    assert converted == projector | {"lm_head"}


@pytest.fixture
def without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 tensors hold the values that casts would round, in FP32."""

    def transpose(x: TensorScaled) -> TensorScaled:
        rows = len(x.q)
        return TensorScaled(nn.functional.pad(x.q.t(), (0, pad_length(rows) - rows)), x.scale)

    monkeypatch.setattr(quantize, "cast", lambda x, _: x)
    monkeypatch.setattr(quantize, "to_float", torch.clone)  # a copy, as conversions from FP8 are
    # By its name in sys.modules: the package has a function of this name.
    monkeypatch.setattr(import_module("coat_vlm.fp8.linear"), "transpose_quantized", transpose)
    monkeypatch.setattr(gemm, "check_quantized", lambda *_: None)
    monkeypatch.setattr(quantize_blockwise, "check_grouped", lambda *_: None)


@WITH_GRADIENTS
@pytest.mark.usefixtures("without_rounding")
def test_without_rounding_a_block_computes_what_the_original_does(family: str) -> None:
    """Outputs and all gradients; FP32 sums in another order differ by some 1e-6."""
    model, batch = build(family)
    converted = copy.deepcopy(model)
    convert(converted, Fp8Config())
    live = live_inputs(model, batch, known_blocks(model))
    assert len(live) >= (2 if family == "gemma4" else 3)
    for name, given in live.items():
        exact = run_block(model.get_submodule(name), given)
        found = run_block(converted.get_submodule(name), given)
        assert found.keys() == exact.keys()
        for tensor, value in exact.items():
            if not tensor.endswith("k_proj.bias"):  # zero but for rounding: softmax ignores it
                assert relative(found[tensor], value) < 1e-4, (name, tensor)


@pytest.mark.gpu
@WITH_GRADIENTS
def test_training_steps_on_a_gpu(family: str) -> None:
    """Kernels in BF16: the first loss is the original's, and steps lower it."""
    model, batch = build(family)
    model = model.to("cuda", torch.bfloat16)
    kinds = {torch.float32: torch.bfloat16}
    batch = {name: x.to("cuda", kinds.get(x.dtype)) for name, x in batch.items()}
    loss, logits, gradients = run_model(model, batch)
    convert(model, Fp8Config())
    optimizer = CoatAdamW(model.parameters(), lr=1e-3, master="bf16_low_bits")
    loss8, logits8, gradients8 = run_model(model, batch)
    assert 1e-3 < relative(logits8, logits) < 0.15
    assert abs(loss8 - loss) < 0.02 * loss
    for name, gradient in gradients.items():
        assert gradients8[name].isfinite().all(), name
        assert bool(gradients8[name].any()) == bool(gradient.any()), name
    last = loss8
    for _ in range(5):
        optimizer.step()
        last, _, _ = run_model(model, batch)
    # With FP8 only in its MLPs, which per-layer norms follow, Gemma 4 learns slower: 2% on an H200.
    assert last < (0.99 if family == "gemma4" else 0.9) * loss8


def test_what_fp8_does_not_know_is_listed_by_name() -> None:
    """A tower of another family next to a language model of a known one."""
    tower = {"model_type": "aimv2_vision_model", "hidden_size": 64, "intermediate_size": 96}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 8}
    text = TEXT | sizes | {"model_type": "mistral", "num_key_value_heads": 2}
    config = LlavaConfig(text_config=text, vision_config=tower | sizes)
    model = AutoModelForImageTextToText.from_config(config)
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    report = convert(model, Fp8Config())
    known = {f"model.language_model.layers.{n}" for n in range(2)} | {"lm_head"}
    assert set(report.converted) == known
    inside = {n for n in linears if ".language_model." in n}
    assert linears - inside - known <= report.skipped.keys()
    line = "model.vision_tower.encoder.layers.0-1.attention.q_proj: left, Linear outside of"
    assert line in str(report)


def test_linear_layers_of_an_odd_width_are_left_and_listed() -> None:
    model, _ = build("qwen2_5_vl")
    report = convert(model, Fp8Config().resolved("fp8_linear"))
    assert {
        name.removeprefix("model.visual.blocks.0.")
        for name, why in report.skipped.items()
        if why == "its width is not a multiple of 16" and "blocks.0" in name
    } == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert type(model.model.visual.blocks[0].attn.qkv).__name__ == "Fp8Linear"
    assert type(model.model.visual.blocks[0].mlp.up_proj) is nn.Linear


def test_packed_images_do_not_see_each_other() -> None:
    """The second image's output does not depend on the first, whatever attention is configured."""
    model, batch = build("qwen3_vl")
    convert(model, Fp8Config(bf16_forward=("all",)))  # FP8 rows depend on others by their scale
    block = model.model.visual.blocks[0].eval()
    (given,) = live_inputs(model, batch, ["model.visual.blocks.0"]).values()
    x = given.args[0]
    other = x.clone()
    first_image = int(batch["image_grid_thw"][0].prod())
    other[:first_image] = x[:first_image].flip(0)
    for implementation in ("sdpa", "eager", PACKED):
        block.attn.config._attn_implementation = implementation
        with torch.no_grad():
            first, second = (block(hidden, **given.kwargs) for hidden in (x, other))
        assert relative(second[first_image:], first[first_image:]) < 1e-5
        assert relative(second[:first_image], first[:first_image]) > 1e-5
