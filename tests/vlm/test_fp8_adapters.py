"""LoRA adapters in FP8 blocks, and frozen weights that are stored in FP8 alone."""

import math
from statistics import median
from typing import Any, cast

import pytest
import torch
from one_stage import one_stage
from torch import Tensor, nn

from coat_kernels import (
    E5M2,
    dequantize_tensor,
    quantize_gradient,
    quantize_tensor,
    share_scales,
    transpose_quantized,
)
from coat_vlm.config import Fp8Config
from coat_vlm.config.stage import LoraTraining
from coat_vlm.fp8 import convert, fp8_blocks, gemm, store_frozen_weights, without_originals
from coat_vlm.fp8.convert import back_to_bf16, count_fp8_weights
from coat_vlm.fp8.weights import list_stored
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.model_setup import set_train_mode, set_trainable

RANK, SCALE = 4, 3.0
STAGE = one_stage("language", lora=LoraTraining(rank=RANK, alpha=12, dropout=0.0))
CPU = torch.device("cpu")


def adapted(tiny: Any, fp8: Fp8Config | None, device: torch.device = CPU) -> CoatVlm:
    """A tiny model without a tower's training, with random adapters, converted."""
    model = tiny.model(vision=tiny.vision(hidden_size=32, intermediate_size=48))
    set_trainable(model, STAGE)
    draw_adapters(model)
    set_train_mode(model, STAGE)
    model.to(device)
    if device.type == "cuda":
        model.bfloat16()
    if fp8 is not None:
        convert(model, fp8)
    return model


def draw_adapters(model: nn.Module, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=draw))


def run(model: CoatVlm) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a fixed batch and the gradients of the adapters."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 60, (2, 24), generator=draw)
    device = next(model.language_model.parameters()).device
    loss = model(input_ids=ids.to(device), labels=ids).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), {n: g.clone() for n, g in grads.items() if g is not None}


@pytest.fixture(params=[math.inf, -math.inf], ids=["added", "appended"], name="appended")
def appended_to_the_operands(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Adapters' outputs are added in the model's dtype, or part of the FP8 GEMMs."""
    monkeypatch.setattr(gemm, "LAUNCHES", request.param)
    return request.param < 0


@pytest.mark.parametrize("targets", [None, ["down_proj"], ["o_proj", "q_proj"]])
@pytest.mark.parametrize("recompute_qkv", [False, True])
def test_adapters_of_some_layers(
    tiny: Any, recompute_qkv: bool, targets: list[str] | None, appended: bool
) -> None:
    """Gradients are those of peft in FP32 within the precision, whatever layers are adapted.

    The error of a draw of adapters is 5 to 45%, so five draws are compared, by their median.
    """
    errors = [compare_with_peft(tiny, recompute_qkv, targets, seed) for seed in range(1, 6)]
    middle = {name: median(draw[name] for draw in errors) for name in errors[0]}
    # A block adds up to 12% (docs/results.md), and the GEMM of the gradient half of that. Adapters
    # that are larger than the weights add as much if they are FP8.
    assert middle.pop("all") < (0.3 if appended else 0.2)
    # Of few values: a wrong layer has errors of 1 or more.
    assert max(middle.values()) < 0.5, middle


def compare_with_peft(
    tiny: Any, recompute_qkv: bool, targets: list[str] | None, seed: int
) -> dict[str, float]:
    """Relative errors of the gradients of each matrix, and of all together."""
    import peft

    found = []
    for fp8 in (None, Fp8Config(recompute_qkv=recompute_qkv)):
        plain = tiny.model(language=tiny.language("qwen2")).language_model
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=12,
            target_modules=targets or "all-linear",
            task_type="CAUSAL_LM",
        )
        model: Any = peft.get_peft_model(plain, config)
        draw_adapters(model, seed)
        if fp8 is not None:
            convert(model, fp8)
            store_frozen_weights(model)
            assert len(list_stored(model)) == 2 * 4
        ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1 + seed))
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    exact, in_fp8 = found
    assert exact
    for of in found:
        of["all"] = torch.cat([grad.flatten() for grad in of.values()])
    return {name: float((in_fp8[name] - g).norm() / g.norm()) for name, g in exact.items()}


@pytest.mark.parametrize(
    ("dtype", "of_adapters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_layers_with_the_same_input_have_adapters_of_their_own(
    dtype: torch.dtype, of_adapters: torch.dtype, appended: bool
) -> None:
    """Other ranks and scales, one layer without, and a matrix B that is not contiguous."""
    torch.manual_seed(0)
    sizes, ranks = (32, 16, 64), (3, None, 80)
    weights = [torch.randn(size, 48, dtype=dtype) for size in sizes]
    a = [None if rank is None else torch.randn(rank, 48).to(of_adapters) for rank in ranks]
    b = [
        None if rank is None else torch.randn(rank, size).to(of_adapters).t()
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    x8, gradient = quantize_tensor(torch.randn(40, 48).to(dtype)), torch.randn(40, 112).to(dtype)
    results = []
    none: list[Any] = [None] * 3
    for scales, of_a, of_b in (((0.5, 0.0, 3.0), a, b), ((0.0,) * 3, none, none)):
        fused = gemm.FusedLinear((), False, scales)
        y, saved = gemm.forward(x8, fused, gemm.LayerValues(weights, none, of_a, of_b), dtype)
        needs = gemm.Needs(True, False, False, any(scales))
        grad_input, grads = gemm.backward(
            gradient, fused, saved, needs, dtype, lambda _: transpose_quantized(x8)
        )
        assert grad_input is not None
        results.append((y.double(), grad_input.double(), grads))
    (y, grad_input, grads), (without, grad_without, _) = results

    def is_close(actual: Any, expected: Tensor, error: float) -> None:
        assert (actual.double() - expected).norm() < error * expected.norm()

    x = dequantize_tensor(x8, torch.float32).double()
    rows = quantize_gradient([gradient], E5M2, transposed=False).rows
    g = dequantize_tensor(rows, torch.float32).double()
    assert torch.equal(y[:, 32:48], without[:, 32:48])
    # Rounded once or twice to 16 bits, or FP32 sums of at most 112 products.
    rounding = max(4 * torch.finfo(dtype).eps, 112 * 2.0**-24)
    product = 0.08 if appended else rounding  # of P and s B in E4M3; of grad_P in E5M2, and A
    assert [grad is None for grad in grads.flat] == [True] * 6 + [False, True, False] * 2
    of_input = torch.zeros_like(grad_input)
    for number, scale, columns in ((0, 0.5, slice(0, 32)), (2, 3.0, slice(48, 112))):
        of_a, of_b = (m[number].double() for m in (a, b))  # pyright: ignore[reportOptionalMemberAccess]
        p, grad_p = x @ of_a.t(), scale * g[:, columns] @ of_b
        is_close(y[:, columns], without[:, columns] + scale * p @ of_b.t(), product)
        is_close(grads.b[number], scale * g[:, columns].t() @ p, rounding)
        is_close(grads.a[number], grad_p.t() @ x, 2.0**-4)  # the gradient of P in E4M3
        of_input += grad_p @ of_a
    is_close(grad_input, grad_without + of_input, product)


def test_frozen_layers_in_one_read_or_with_shared_scales(tiny: Any) -> None:
    """Processes that share scales compute the transposed layouts, and exact scales."""
    loss, grads = run(adapted(tiny, Fp8Config(vision="bf16")))
    with share_scales(lambda _: None):
        same, others = run(adapted(tiny, Fp8Config(vision="bf16")))
    assert loss == same
    for name, grad in grads.items():
        # Both round elements to E5M2, to at most 2^-3 of them.
        assert (grad - others[name]).norm() < 2 * 2.0**-3 * grad.norm(), name
    assert any(not torch.equal(grad, others[name]) for name, grad in grads.items())


def test_adapters_learn_from_zero(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended to the FP8 operands as fast as in the model's dtype."""
    losses = []
    for launches in (math.inf, -math.inf):
        monkeypatch.setattr(gemm, "LAUNCHES", launches)
        model = adapted(tiny, Fp8Config(vision="bf16"))
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if "lora_B" in name:
                parameter.data.zero_()
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        for _ in range(20):
            losses.append(float(run(model)[0]))
            optimizer.step()
            optimizer.zero_grad()
    added, appended = losses[:20], losses[20:]
    assert added[0] == appended[0]
    learned = added[0] - added[-1]
    assert learned > 0.3
    assert abs(appended[-1] - added[-1]) < 0.1 * learned, (added, appended)


@pytest.mark.parametrize(
    "fp8",
    [
        Fp8Config(vision="bf16"),
        Fp8Config(vision="bf16", recompute_qkv=True),
        Fp8Config(language="fp8_linear", vision="bf16"),
    ],
    ids=["coat", "recompute_qkv", "fp8_linear"],
)
def test_stored_weights_change_no_bit(tiny: Any, fp8: Fp8Config) -> None:
    quantized = run(adapted(tiny, fp8))
    model = adapted(tiny, fp8)
    originals = {name: p.detach().clone() for name, p in model.named_parameters()}
    store_frozen_weights(model)
    linears = 2 * 7 if fp8.language == "fp8_linear" else 2 * 4
    assert len(list_stored(model)) == linears
    stored = run(model)
    assert torch.equal(quantized[0], stored[0])
    assert quantized[1].keys() == stored[1].keys()
    assert all(torch.equal(grad, stored[1][name]) for name, grad in quantized[1].items())
    # Checkpoints and merged models are made from the original weights.
    assert all(torch.equal(p, originals[name]) for name, p in model.named_parameters())
    assert count_fp8_weights(model) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [48, pytest.param(40, id="padded")])
@pytest.mark.parametrize("trained", ["language", "projector"])
def test_stored_weights_without_adapters(tiny: Any, trained: str, width: int, device: str) -> None:
    """Of a frozen tower, and of a frozen language model that passes gradients on."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ids = torch.tensor([[5, *4 * [2], 6, 7, *4 * [2], 8, 9]], device=device)  # 2: a placeholder
    draw = torch.Generator().manual_seed(5)
    images = torch.randn(2, 3, 28, 28, generator=draw).to(device, dtype)
    results = []
    for stores in (False, True):
        model = tiny.model(
            vision=tiny.vision(hidden_size=32, intermediate_size=width),
            language=tiny.language("llama", hidden_size=32, intermediate_size=width),
        )
        stage = one_stage(trained)
        set_trainable(model, stage)
        set_train_mode(model, stage)
        model.to(device, dtype)
        convert(model, Fp8Config(bf16_forward=()))
        if stores:
            store_frozen_weights(model)
            shapes = [size for weight in list_stored(model) for size in weight.q.shape]
            assert shapes
            assert all(size % 16 == 0 for size in shapes)
            weights = [p for n, p in model.language_model.named_parameters() if "_proj" in n]
            assert count_fp8_weights(model) == sum(p.numel() for p in weights if p.requires_grad)
        loss = model(ids, pixel_values=images, labels=ids.masked_fill(ids == 2, -100)).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), grads))
    (loss, grads), (stored_loss, stored_grads) = results
    trains = "language_model" if trained == "language" else "projector"
    assert all(name.startswith(trains) for name in grads)
    assert torch.equal(loss, stored_loss)
    assert grads.keys() == stored_grads.keys()
    assert all(torch.equal(grad, stored_grads[name]) for name, grad in grads.items())


def test_blocks_with_bf16_forward_gemms_keep_their_weights(tiny: Any) -> None:
    plain = run(adapted(tiny, None))
    in_fp8 = run(adapted(tiny, Fp8Config(vision="bf16")))
    model = adapted(tiny, Fp8Config(vision="bf16", bf16_forward=("last",)))
    store_frozen_weights(model)
    first, last = (block for _, block in fp8_blocks(model))
    assert (len(list_stored(first)), len(list_stored(last))) == (4, 0)
    model = adapted(tiny, Fp8Config(vision="bf16", bf16_forward=("all",)))
    store_frozen_weights(model)
    loss, gradients = run(model)
    assert abs(loss - plain[0]) < 1e-5 < abs(in_fp8[0] - plain[0])
    assert gradients.keys() == plain[1].keys()

    def error(of: dict[str, Tensor]) -> float:
        errors, exact = [of[name] - grad for name, grad in plain[1].items()], plain[1].values()
        return float(torch.cat([e.flatten() for e in errors]).norm()) / float(
            torch.cat([grad.flatten() for grad in exact]).norm()
        )

    assert 0.01 < error(gradients) < error(in_fp8[1])


def test_loaded_weights_are_stored_again_and_blocks_return_to_bf16(tiny: Any) -> None:
    model = adapted(tiny, Fp8Config(vision="bf16", bf16_forward=()))
    store_frozen_weights(model)
    before = run(model)[0]
    layer = model.get_submodule("language_model.model.layers.0.self_attn.o_proj.base_layer")
    weight: Any = layer.weight
    with torch.no_grad():
        weight.mul_(2)  # as a checkpoint is loaded
    assert torch.equal(run(model)[0], before)
    store_frozen_weights(model)
    assert not torch.equal(run(model)[0], before)
    (_, block), _ = fp8_blocks(model)
    back_to_bf16(block, False)
    assert not list_stored(block)
    assert len(fp8_blocks(model)) == 1
    run(model)


def test_deepspeed_gets_no_original(tiny: Any) -> None:
    """What moves or broadcasts all parameters has the adapters, norms and biases only."""
    model = cast(Any, adapted(tiny, Fp8Config(vision="bf16")))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    store_frozen_weights(model, CPU)
    expected = run(model)
    with without_originals(model):
        emptied = {name for name, p in model.named_parameters() if not p.numel()}
        model.to(torch.float64)
        model.to(torch.float32)
    assert emptied == {n for n in before if ".layers." in n and n.endswith("base_layer.weight")}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(run(model)[0], expected[0])


@pytest.mark.gpu
def test_a_gpu_never_has_all_originals(tiny: Any) -> None:
    model = cast(Any, adapted(tiny, Fp8Config(vision="bf16")))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    store_frozen_weights(model, torch.device("cuda"))
    with without_originals(model):
        model.to("cuda")
    weights = [p for n, p in model.named_parameters() if "layers" in n and "base_layer.weight" in n]
    assert all(p.device == CPU for p in weights)
    others = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    stored = sum(weight.q.nbytes for weight in list_stored(model))
    largest = 4 * max(p.nbytes for p in weights)  # in both precisions, fused with its neighbours
    assert torch.cuda.max_memory_allocated() - before < others + stored + largest + (1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp8_linear", "coat"])
def test_on_a_gpu_the_originals_are_on_the_cpu(tiny: Any, precision: Any) -> None:
    device, fp8 = torch.device("cuda"), Fp8Config(language=precision, vision="bf16")
    quantized = run(adapted(tiny, fp8, device))
    model = adapted(tiny, fp8, device)
    before = torch.cuda.memory_allocated()
    store_frozen_weights(model)
    assert torch.cuda.memory_allocated() < before
    weights = [p for n, p in model.named_parameters() if "layers" in n and "base_layer.weight" in n]
    assert len(weights) == 2 * 7
    assert all(p.device == CPU for p in weights)
    stored = run(model)
    assert torch.equal(quantized[0], stored[0])
    assert all(torch.equal(grad, stored[1][name]) for name, grad in quantized[1].items())
    store_frozen_weights(model)  # as after loading a checkpoint
    assert all(stored.q.is_cuda for stored in list_stored(model))
