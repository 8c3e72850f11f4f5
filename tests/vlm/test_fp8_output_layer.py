"""The fused loss with FP8 GEMMs for the gradients of the output layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from coat_kernels import reference
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert, output_layer
from coat_vlm.fp8.output_layer import Fp8Gradients
from coat_vlm.model.loss import FP8_GRADIENTS, linear_cross_entropy

WIDTH, VOCABULARY, TOKENS, DIVISOR = 64, 1008, 300, 77.0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def case(device: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=False)
    nn.init.normal_(layer.weight, std=0.3, generator=generator)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(device, dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return layer.to(device, dtype), hidden.requires_grad_(), targets.to(device)


def results(
    layer: nn.Linear, hidden: Tensor, targets: Tensor, tokens: int, factor: float = 4.0
) -> list[Tensor]:
    """Loss and the gradients of what is trained, in chunks of ``tokens``."""
    divisor = torch.tensor(DIVISOR, device=hidden.device)
    chunk_bytes = tokens * VOCABULARY * hidden.element_size()
    loss = linear_cross_entropy(layer, hidden, targets, divisor, chunk_bytes)
    (factor * loss).backward()
    return [loss.detach(), *(x.grad for x in (hidden, layer.weight) if x.grad is not None)]


def round_to(x: Tensor, dtype: torch.dtype, *, weight: bool = False) -> Tensor:
    """Values of an FP8 format with one scale for the tensor, by torch's casts, in FP64."""
    scale = float(x.abs().max()) / torch.finfo(dtype).max
    if weight:
        scale = float(reference.dither_scale(torch.tensor(scale), x.cpu()))
    return (x.float() / scale).to(dtype).double() * scale


def rounded(layer: nn.Linear, hidden: Tensor, targets: Tensor, factor: float = 4.0) -> list[Tensor]:
    """The same in FP64 from rounded operands: the gradient of the logits has its own scale."""
    x, weight = hidden.detach(), layer.weight.detach()
    logits = (x @ weight.t()).double()
    losses = F.cross_entropy(logits, targets, reduction="none").float().cpu()
    empty = torch.empty(0, 0, dtype=torch.float8_e5m2)
    gradient = reference.logit_gradient(logits.cpu(), targets.cpu(), losses, empty, 0, True)
    gradient = gradient.to(logits.device).double() / 2**15
    gradient *= factor / DIVISOR
    loss = F.cross_entropy(logits, targets, reduction="sum") / DIVISOR
    e4m3 = torch.float8_e4m3fn
    of_hidden = gradient @ round_to(weight, e4m3, weight=True)
    return [loss, of_hidden, gradient.t() @ round_to(x, e4m3)]


def relative_errors(ours: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(ours, wanted, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]


@pytest.mark.parametrize("tokens", [1000, 112, 50])
@pytest.mark.parametrize("most", [8, 2, 1])
def test_gradients_are_those_of_operands_in_fp8(
    device: str, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One grad-weight GEMM, or several with their own scale of the hidden states."""
    monkeypatch.setattr(output_layer, "MAX_TOKENS", most)
    layer, hidden, targets = case(device)
    wanted = rounded(layer, hidden, targets)
    setattr(layer, FP8_GRADIENTS, Fp8Gradients)
    loss, *gradients = relative_errors(results(layer, hidden, targets, tokens), wanted)
    assert loss < 1e-6
    # A probability on a tie of E5M2 may be rounded up or down: 1/4 of one value of thousands.
    # Tensor cores keep about 14 bits of a sum, and another scale has other roundings (0.026 RMS).
    several = most * WIDTH < TOKENS
    assert gradients[0] < 3e-3
    assert gradients[1] < (0.05 if several else 3e-3)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_what_is_trained_gets_a_gradient(device: str, trained: str) -> None:
    layer, hidden, targets = case(device)
    wanted = rounded(layer, hidden, targets)
    layer.weight.requires_grad_(trained == "weight")
    hidden = hidden.detach().requires_grad_(trained == "hidden")
    setattr(layer, FP8_GRADIENTS, Fp8Gradients)
    (_, gradient) = results(layer, hidden, targets, 112)
    number = 1 if trained == "hidden" else 2
    assert relative_errors([gradient], [wanted[number]])[0] < 3e-3


def decoder(vocabulary: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, True), ("fp8_gradients", True), ("bf16", False), ("fp8_linear", False)],
)
def test_conversion_marks_the_output_layer(setting: Any, expected: bool) -> None:
    model = decoder(512)
    report = convert(model, Fp8Config(lm_head=setting))
    assert (vars(model.lm_head).get(FP8_GRADIENTS) is Fp8Gradients) is expected
    assert ("lm_head" in report.converted) is (setting != "bf16")
