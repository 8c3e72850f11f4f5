"""Mixtures of experts: the load-balancing loss, and FP8 blocks with experts."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build
from family_folders import MAKERS
from family_samples import assert_equal_gradients, sample_of
from one_block import relative
from one_stage import one_stage
from test_fp8_families import known_blocks, live_inputs, run_block, run_model, without_rounding
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from coat_data.load.collate import collate
from coat_data.load.encode import IGNORE_INDEX
from coat_kernels import (
    TensorScaled,
    expert_gradient,
    quantize_group,
    quantize_rows,
    reference,
    scaled_grouped_mm,
    transpose_quantized,
)
from coat_vlm.config import Fp8Config
from coat_vlm.config.load import load_recipe
from coat_vlm.config.stage import LoraTraining
from coat_vlm.fp8 import convert, fp8_blocks, store_frozen_weights
from coat_vlm.fp8 import experts as fp8_experts
from coat_vlm.fp8.block_error import BlockError, block_error
from coat_vlm.fp8.weights import is_stored, list_stored, store_experts
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.optim import CoatAdamW
from coat_vlm.plan.stage import plan_recipe
from coat_vlm.train.model_setup import set_trainable
from coat_vlm.train.passes import copy_batch_to_device

__all__ = ["without_rounding"]  # a fixture

CPU = torch.device("cpu")
FAMILY = "qwen3_vl_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / FAMILY
    MAKERS[FAMILY](folder)
    return folder


def collate_samples(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    processor = FamilyProcessor.load("model.pretrained", str(folder), 1024)
    encoded = [processor.encoder()(sample_of(folder, name)) for name in names]
    batch = collate(encoded, pad_token_id=processor.tokenizer.pad_token_id)
    return copy_batch_to_device(batch, CPU)


def test_the_load_balancing_loss_is_that_of_transformers(folder: Path) -> None:
    """Padding is not counted, and gradients of routers are equal."""
    ours: Any = load_family_model("model.pretrained", str(folder), torch.float32).train()
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    batch = collate_samples(folder, ("wide", "two images", "text"))
    items = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    plain = ours(**batch, num_items_in_batch=float(items), skip_logits=True).loss
    for model in (ours, stock):
        model.config.text_config.output_router_logits = True
        model.config.text_config.router_aux_loss_coef = 0.5
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    expected = stock(**inputs, **ours.make_token_types(batch["input_ids"]))
    found = ours(**batch, num_items_in_batch=float(items), skip_logits=True)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.loss.item() > plain.item() + 0.1
    mean = ours(**batch, skip_logits=True).loss
    assert mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    found.loss.backward()
    expected.loss.backward()
    assert_equal_gradients(ours, stock)


def test_micro_batches_contribute_by_their_supervised_tokens(folder: Path) -> None:
    ours: Any = load_family_model("model.pretrained", str(folder), torch.float32)
    ours.config.text_config.output_router_logits = True
    losses, counts, expected = [], [], 0.0
    for name in ("wide", "text"):
        batch = collate_samples(folder, (name,))
        counts.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
        losses.append(ours(**batch, skip_logits=True).loss.item())
    for name, loss, count in zip(("wide", "text"), losses, counts, strict=True):
        batch = collate_samples(folder, (name,))
        part = ours(**batch, num_items_in_batch=float(sum(counts)), skip_logits=True).loss
        assert part.item() == pytest.approx(loss * count / sum(counts), rel=1e-5)
        expected += part.item()
    assert expected > 0


def sorted_rows(rows: int, columns: int, experts: int) -> tuple[Tensor, Tensor]:
    """Rows, and the ends of the experts' ones; the second expert has none."""
    ends = torch.tensor([0, *sorted(range(rows // experts, rows, rows // experts))[: experts - 2]])
    ends = torch.cat([ends[1:2], ends[1:2], ends[2:], torch.tensor([rows])]).int()
    assert len(ends) == experts
    return torch.randn(rows, columns), ends


def test_the_grouped_gemm_multiplies_each_row_with_its_expert() -> None:
    torch.manual_seed(0)
    x, ends = sorted_rows(40, 32, 4)
    weight = torch.randn(4, 48, 32)
    (a, a_scale), (b, b_scale) = quantize_rows(x), quantize_rows(weight.flatten(1))
    stored = TensorScaled(b.view(weight.shape), b_scale)
    found = scaled_grouped_mm(a, a_scale, stored, ends, torch.float32)
    dequantized = b.view(weight.shape).float() * b_scale[:, None, None]
    exact = F.grouped_mm(a.float() * a_scale[:, None], dequantized.transpose(1, 2), offs=ends)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert relative(dequantized, weight) < 2.0**-4
    turned = transpose_quantized(stored)
    assert torch.equal(turned.q.float(), stored.q.float().transpose(1, 2))


@pytest.mark.gpu
def test_grouped_gemms_of_a_gpu_are_those_of_the_cpu() -> None:
    """Groups of any size, none included; sums of FP32 products of E4M3, rounded to BF16."""
    torch.manual_seed(0)
    sizes = torch.tensor([0, 1, 17, 130, 0, 5, 64, 39])
    ends = sizes.cumsum(0).int()
    rows = int(ends[-1])
    a, a_scale = quantize_rows(torch.randn(rows, 256))
    b, b_scale = quantize_rows(torch.randn(8, 192 * 256))
    weight = TensorScaled(b.view(8, 192, 256), b_scale)
    on_gpu = TensorScaled(weight.q.cuda(), weight.scale.cuda())
    exact = scaled_grouped_mm(a, a_scale, weight, ends, torch.float32)
    found = scaled_grouped_mm(a.cuda(), a_scale.cuda(), on_gpu, ends.cuda(), torch.bfloat16)
    assert relative(found.cpu(), exact) < 4e-3
    turned, turned_on_gpu = transpose_quantized(weight).q, transpose_quantized(on_gpu).q
    assert torch.equal(turned_on_gpu.cpu().view(torch.uint8), turned.view(torch.uint8))


@pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh_mul"])
def test_gradients_of_experts_are_autograds(kind: str) -> None:
    torch.manual_seed(0)
    a = quantize_group(torch.randn(20, 64), 16)
    exact = reference.dequantize_group(*a, torch.float64).requires_grad_()
    weights = torch.rand(20, dtype=torch.float64, requires_grad=True)
    gate, up = exact.chunk(2, -1)
    act = F.silu(gate) if kind == "silu_mul" else F.gelu(gate, approximate="tanh")
    dh = torch.randn(20, 32)
    (act * up * weights[:, None] * dh).sum().backward()
    given = (dh, a, weights.detach().float(), kind)
    da, _, dweights, h = expert_gradient(*given, quantized=False)
    assert exact.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(da.double(), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dweights.double(), weights.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        h.double(), (act * up * weights[:, None]).detach(), rtol=1e-4, atol=1e-5
    )
    q, scale, *_ = expert_gradient(*given, quantized=True)
    assert relative(q.float() * scale[:, None], da) < 2.0**-4
    with pytest.raises(ValueError, match="is not gated"):
        expert_gradient(dh, a, weights.detach().float(), "gelu", quantized=True)


def adapted() -> tuple[Any, Any]:
    """A small model with random adapters on attention, its experts frozen, and a batch."""
    model, batch = build(FAMILY)
    model.requires_grad_(False)
    targets = r"model\.language_model\..*\.[qkvo]_proj"
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets), model)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model, batch


def adapted_blocks(model: nn.Module) -> list[str]:
    return [name for name in known_blocks(model) if "language_model" in name]


@pytest.mark.usefixtures("without_rounding")
def test_without_rounding_stored_experts_compute_what_the_original_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coat_kernels.reference.experts.cast", lambda x, _: x)
    monkeypatch.setattr("coat_kernels.reference.experts.to_float", torch.clone)
    monkeypatch.setattr(
        fp8_experts,
        "transpose_quantized",
        lambda b: TensorScaled(b.q.transpose(1, 2).contiguous(), b.scale),
    )
    model, batch = build(FAMILY)
    live = live_inputs(model, batch, names := adapted_blocks(model))
    for name in names:
        model.get_submodule(name).mlp.experts.requires_grad_(False)
    converted = copy.deepcopy(model)
    convert(converted, Fp8Config())
    for name in names:
        store_experts(converted.get_submodule(name).mlp.experts)
    for name in names:
        exact = run_block(model.get_submodule(name), live[name])
        found = run_block(converted.get_submodule(name), live[name])
        assert found.keys() == exact.keys()
        assert len(exact) == 2 + 9
        for tensor, value in exact.items():
            assert relative(found[tensor], value) < 1e-4, (name, tensor)


def bf16_of(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else dtype


def measure(model: nn.Module, batch: Any) -> BlockError:
    """The largest errors of a converted model's decoder blocks."""
    names = [name for name, _ in fp8_blocks(model) if "language_model" in name]
    live = live_inputs(model, batch, names)
    worst = BlockError()
    for name in names:
        error = block_error(model.get_submodule(name), live[name], round_linears=True)
        worst.output = max(worst.output, error.output, key=lambda pair: pair[0] / (pair[1] or 1))
        worst.gradient = max(
            worst.gradient, error.gradient, key=lambda pair: pair[0] / (pair[1] or 1)
        )
    return worst


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("lora", [False, True], ids=["trained", "stored"])
def test_errors_are_those_of_other_families(lora: bool, device: str) -> None:
    """The bounds are 1.4 times the largest errors of other decoders (docs/reference).

    FP8 attention moves tokens with nearly equal router logits to other experts.
    """
    model, batch = adapted() if lora else build(FAMILY)
    if device == "cuda":
        model.to(device, torch.bfloat16)
        batch = {name: x.to(device, bf16_of(x.dtype)) for name, x in batch.items()}
    convert(model, Fp8Config(bf16_forward=()))
    store_frozen_weights(model)
    # With adapters: heads, output and experts of two decoder blocks, four layers of two of images.
    assert len(list_stored(model)) == (2 * (2 + 2) + 2 * 4 if lora else 0)
    error = measure(model, batch)
    assert 0.01 < (error.output_error or 0) < 0.11
    assert 0.01 < (error.input_gradient_error or 0) < 0.16


def test_frozen_experts_without_adapters_stay_in_bf16() -> None:
    model, _ = build(FAMILY)
    convert(model.requires_grad_(False), Fp8Config(bf16_forward=()))
    store_frozen_weights(model)
    assert len(list_stored(model)) == 2 * 2 + 2 * 4  # heads and output, layers of images
    assert not any("experts" in name and is_stored(m) for name, m in model.named_modules())


@pytest.mark.usefixtures("without_rounding")
def test_routers_get_the_gradient_of_the_load_balancing_loss() -> None:
    model, batch = build(FAMILY)
    model.config.text_config.output_router_logits = True
    model.config.text_config.router_aux_loss_coef = 1.0
    converted = copy.deepcopy(model)
    convert(converted, Fp8Config(vision="bf16"))
    loss, _, gradients = run_model(model, batch)
    for checkpointing in (False, True):
        if checkpointing:
            converted.gradient_checkpointing_enable({"use_reentrant": False})
        found, _, own = run_model(converted, batch)
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
        assert len(routers) == 2
        for name in routers:
            assert relative(own[name], gradients[name]) < 1e-3, name


def test_training_lowers_the_loss_with_fp8_moments() -> None:
    model, batch = build(FAMILY)
    convert(model, Fp8Config())
    optimizer = CoatAdamW(model.parameters(), lr=1e-3)
    first, _, gradients = run_model(model, batch)
    assert all(gradient.any() for name, gradient in gradients.items() if ".experts." in name)
    last = first
    for _ in range(4):
        optimizer.step()
        last, _, _ = run_model(model, batch)
    assert last < 0.9 * first
    experts = model.model.language_model.layers[0].mlp.experts
    state = optimizer.state[experts.gate_up_proj]
    assert state["exp_avg"].shape == experts.gate_up_proj.shape
    assert state["exp_avg"].dtype.itemsize == 1


def test_experts_are_not_left_out_of_nf4_without_a_word() -> None:
    lora = LoraTraining(rank=4, quantize="nf4", modules=["language"])
    with pytest.raises(ValueError, match="most weights of this model are experts; remove quantize"):
        set_trainable(build(FAMILY)[0], one_stage("language", lora=lora))


def test_layers_without_experts_are_refused() -> None:
    model, _ = build(FAMILY)
    del model.model.language_model.layers[1].mlp.experts
    with pytest.raises(ValueError, match=r"has no experts .* set fp8\.language: bf16"):
        convert(model, Fp8Config())
    model, _ = build(FAMILY)
    experts = model.model.language_model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj[..., :48][:, :120].clone())
    with pytest.raises(ValueError, match=r"K = 120 and F = 48"):
        convert(model, Fp8Config())


REAL: dict[str, Any] = {
    "hidden_size": 2048, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
"""Layers of Qwen3-VL-30B-A3B."""


def plan_layers(folder: Path, layers: int, precision: str) -> Any:
    """The plan of LoRA on attention, of rows of 512 tokens without images."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("num_local_experts", None)  # transformers' name
    config["text_config"] |= REAL | {"num_hidden_layers": layers}
    config["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    config["vision_config"]["out_hidden_size"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    answer = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "red"}]
    (folder / "rows.json").write_text(json.dumps([{"conversations": answer}] * 4))
    stage = {
        "data": [{"name": "rows", "path": str(folder / "rows.json")}],
        "batch_size": 1, "micro_batch_size": 1, "max_steps": 1,
        "language": {"train": True, "lr": 1e-4},
        "lora": {"rank": 16, "alpha": 16, "dropout": 0},
    }  # fmt: skip
    recipe = {"name": "plan", "output_dir": str(folder / "run"), "precision": precision}
    recipe |= {"model": {"pretrained": str(folder), "max_length": 512}, "stages": {"sft": stage}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (plan,) = plan_recipe(load_recipe(str(folder / "recipe.json"), []), ranks=1, gpu_bytes=141e9)
    return plan


def test_a_plan_knows_experts(tmp_path: Path) -> None:
    MAKERS[FAMILY](tmp_path / FAMILY)
    plans = {n: plan_layers(tmp_path / FAMILY, n, "coat") for n in (1, 3)}
    width, queries, keys, inner = 2048, 32 * 128, 4 * 128, 768
    attention, experts = 2 * width * (queries + keys), 128 * 3 * inner * width
    assert plans[3].sizes.stored - plans[1].sizes.stored == 2 * (attention + experts)
    layer = plans[3].sizes.parameters - plans[1].sizes.parameters
    adapters = 16 * (4 * width + 2 * queries + 2 * keys)
    assert layer == 2 * (attention + experts + 128 * width + 2 * width + 2 * 128 + adapters)
    assert plans[3].own_memory.backward_peak >= 2 * plans[3].sizes.parameters  # when it starts
    saved = [plans[n].activations.saved["language"] for n in (1, 3)]
    each = (saved[1] - saved[0]) / 2 / 512
    # Per token: norms and activations in FP8, q and k before and after their norms, v, the output
    # of attention in BF16; probabilities, numbers and order of rows. Statistics are not counted.
    norms, rows = 2 * width * 17 / 16, 8 * (2 * inner * 17 / 16 + 4 + 8 + 8)
    expected = norms + rows + 2 * (2 * (queries + 2 * keys) + queries)
    assert expected < each < 1.05 * expected
    bf16 = plan_layers(tmp_path / FAMILY, 1, "bf16").activations.saved["language"]
    assert saved[0] < 0.5 * bf16
