"""The loss without logits is the loss, and its gradients, with them; by autograd and in place."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from coat_kernels import OPS, cross_entropy
from coat_vlm.model import loss as loss_module
from coat_vlm.model.loss import (
    linear_cross_entropy,
    loss_for_logits,
    next_token_loss,
)

WIDTH, VOCABULARY = 64, 1000
TOKEN_BYTES = 4 * VOCABULARY


@pytest.fixture(
    params=[
        "autograd",
        "reference",
        pytest.param("interpreter", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors are; ``reference`` and ``interpreter`` compute as a GPU does."""
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the kernels run on the GPU here: pytest -m gpu")
        monkeypatch.setattr(cross_entropy, "_cross_entropy_", OPS["cross_entropy_"].triton)
    if request.param in ("reference", "interpreter"):
        monkeypatch.setattr(loss_module, "_kernel_fits", lambda *_: True)
    return "cuda" if request.param == "cuda" else "cpu"


def output_layer(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)


def inputs(
    tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = 2 * torch.randn(tokens, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return hidden.to(device, dtype).requires_grad_(), targets.to(device)


def exact(layer: nn.Linear, hidden: Tensor, targets: Tensor, divisor: float) -> list[Tensor]:
    """Loss, then gradients of hidden and the layer's parameters, by plain torch in FP64."""
    layer = copy.deepcopy(layer).double().requires_grad_()
    hidden = hidden.detach().double().requires_grad_()
    loss = F.cross_entropy(layer(hidden), targets, reduction="sum") / divisor
    return [loss, *torch.autograd.grad(loss, [hidden, *layer.parameters()])]


def relative_error(ours: Tensor | None, wanted: Tensor) -> float:
    assert ours is not None
    assert ours.shape == wanted.shape
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [7, 1000])
def test_loss_and_gradients_are_torchs(device: str, tokens_per_chunk: int, bias: bool) -> None:
    layer, (hidden, targets) = output_layer(bias).to(device), inputs(50, device=device)
    divisor = torch.tensor(30.0, device=device)
    loss = linear_cross_entropy(layer, hidden, targets, divisor, tokens_per_chunk * TOKEN_BYTES)
    (3 * loss).backward()
    assert loss.dtype == torch.float32
    ours = [loss.detach(), hidden.grad, *(p.grad for p in layer.parameters())]
    wanted = exact(layer, hidden, targets, 10.0)
    wanted[0] = wanted[0] / 3
    assert len(ours) == (4 if bias else 3)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert relative_error(mine, theirs.detach()) < 2e-6


def test_bf16_in_one_chunk_is_bit_for_bit_what_autograd_gives() -> None:
    """The gradient is divided before it is rounded, as it is behind whole logits."""
    layer, (hidden, targets) = output_layer(True, torch.bfloat16), inputs(50, torch.bfloat16)
    twin, other = copy.deepcopy(layer), hidden.detach().clone().requires_grad_()
    loss = linear_cross_entropy(layer, hidden, targets, torch.tensor(37.0))
    loss.backward()
    wanted = F.cross_entropy(twin(other).float(), targets, reduction="sum") / 37
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert torch.equal(hidden.grad, other.grad)  # pyright: ignore[reportArgumentType]
    for mine, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_bf16_chunks_add_their_weight_gradients_in_fp32() -> None:
    layer, (hidden, targets) = output_layer(False, torch.bfloat16), inputs(400, torch.bfloat16)
    wanted = exact(layer, hidden, targets, 1.0)[2]
    errors = []
    for tokens_per_chunk in (400, 1):
        layer.weight.grad = None
        linear_cross_entropy(
            layer, hidden, targets, chunk_bytes=tokens_per_chunk * TOKEN_BYTES
        ).backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.bfloat16
        errors.append(relative_error(layer.weight.grad, wanted))
    # A running sum in BF16 would lose 0.02 and more.
    assert errors[1] < 1.5 * errors[0] < 0.008


@pytest.mark.parametrize(("trains_hidden", "trains_weight"), [(True, False), (False, True)])
def test_what_is_frozen_gets_no_gradient(
    device: str, trains_hidden: bool, trains_weight: bool
) -> None:
    layer, (hidden, targets) = output_layer(True).to(device), inputs(20, device=device)
    layer.weight.requires_grad_(trains_weight)
    hidden = hidden.detach().requires_grad_(trains_hidden)
    linear_cross_entropy(layer, hidden, targets, chunk_bytes=3 * TOKEN_BYTES).backward()
    _, of_hidden, of_weight, of_bias = exact(layer, hidden, targets, 1.0)
    assert relative_error(layer.bias.grad, of_bias) < 2e-6
    for tensor, trains, wanted in (
        (hidden, trains_hidden, of_hidden),
        (layer.weight, trains_weight, of_weight),
    ):
        if trains:
            assert relative_error(tensor.grad, wanted) < 2e-6
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_autograd(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, their gradient and what is summed over the tokens are rounded in both."""
    layer, (hidden, targets) = output_layer(True, dtype).to(device), inputs(96, dtype, device)
    wanted = [x.detach() for x in exact(layer, hidden, targets, 123.0)]
    errors = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(loss_module, "_kernel_fits", lambda *_: False)
        leaves = [hidden, *layer.parameters()]
        divisor = torch.tensor(123.0, device=device)
        loss = linear_cross_entropy(layer, hidden, targets, divisor)
        found = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        assert all(gradient.dtype == dtype for gradient in found[1:])
        errors.append([relative_error(*pair) for pair in zip(found, wanted, strict=True)])
    for mine, theirs in zip(*errors, strict=True):
        assert mine < 1.1 * theirs + 1e-6


def test_hooks_of_a_parameter_see_the_whole_gradient_once() -> None:
    """DeepSpeed reduces what hooks bring; so it must not be a chunk's."""
    layer, (hidden, targets) = output_layer(), inputs(20)
    before, after = [], []
    layer.weight.register_hook(before.append)
    layer.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad))
    loss = linear_cross_entropy(layer, hidden, targets, chunk_bytes=3 * TOKEN_BYTES)
    assert before == after == []
    loss.backward()
    assert len(before) == len(after) == 1
    wanted = exact(layer, hidden, targets, 1.0)[2]
    assert relative_error(before[0], wanted) < 1e-6


LABELS = torch.tensor(
    [
        [-100, 6, -100, 8, 9, 90],
        [-100, -100, -100, -100, -100, -100],
        [5, -100, 7, 95, 0, -100],  # the first token of a row has no predecessor
    ]
)


@pytest.mark.parametrize("num_items", [None, 12.0, torch.tensor(12)])
@pytest.mark.parametrize("tokens_per_chunk", [2, 1000])
def test_loss_of_the_output_layer_is_transformers_loss(
    num_items: Any, tokens_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", tokens_per_chunk * TOKEN_BYTES)
    layer = output_layer()
    hidden = inputs(LABELS.numel())[0].detach().view(*LABELS.shape, WIDTH).requires_grad_()
    with loss_for_logits(layer, LABELS, num_items):
        ours = layer(hidden)
    found = torch.autograd.grad(ours, [hidden, layer.weight])
    logits = layer(hidden)
    for wanted in (
        next_token_loss(logits, LABELS, num_items),
        ForCausalLMLoss(logits, LABELS, VOCABULARY, num_items_in_batch=num_items),
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)
        expected = torch.autograd.grad(wanted, [hidden, layer.weight], retain_graph=True)
        for mine, theirs in zip(found, expected, strict=True):
            assert relative_error(mine, theirs) < 1e-6


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the chunks whose logits the kernel gets, in order."""
    seen: list[int] = []
    original = loss_module._token_losses

    def counted(logits: Tensor, *rest: Any) -> Tensor:
        seen.append(len(logits))
        return original(logits, *rest)

    monkeypatch.setattr(loss_module, "_token_losses", counted)
    return seen


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(run_without_waits: Any, chunks: list[int]) -> None:
    layer = output_layer(True, torch.bfloat16).to("cuda")
    hidden, targets = inputs(96, torch.bfloat16, "cuda")
    divisor = torch.tensor(123.0, device="cuda")

    def run() -> None:
        chunk_bytes = 32 * TOKEN_BYTES // 2
        linear_cross_entropy(layer, hidden, targets, divisor, chunk_bytes).backward()
        with torch.no_grad():
            linear_cross_entropy(layer, hidden, targets, divisor, chunk_bytes)

    run_without_waits(run)
    assert set(chunks) == {32}


@pytest.mark.gpu
def test_the_logits_are_never_all_there(chunks: list[int]) -> None:
    vocabulary, tokens = 65536, 4096
    layer = nn.Linear(WIDTH, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    limit, before = tokens * vocabulary * 2 // 8, 0
    for _ in range(2):  # the first call makes cuBLAS take its workspace
        layer.weight.grad = hidden.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(layer, hidden, targets, chunk_bytes=limit).backward()
    assert chunks == 2 * [512] * 8
    others = 3 * (layer.weight.nbytes + hidden.nbytes)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * limit + others
