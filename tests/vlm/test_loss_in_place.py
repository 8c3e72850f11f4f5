"""The loss whose gradient replaces the logits: by its reference, the interpreter, or on a GPU."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_kernels import OPS, cross_entropy
from coat_vlm.model import loss as loss_module
from coat_vlm.model.loss import linear_cross_entropy

WIDTH, VOCABULARY, TOKENS = 64, 1000, 96

Case = tuple[nn.Linear, Tensor, Tensor]


@pytest.fixture(
    params=[
        "reference",
        pytest.param("interpreter", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors are: on a CPU, too, the loss takes the way of a GPU."""
    if request.param == "cuda":
        return "cuda"
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the kernels run on the GPU here: pytest -m gpu")
        monkeypatch.setattr(cross_entropy, "_cross_entropy_", OPS["cross_entropy_"].triton)
    monkeypatch.setattr(loss_module, "_kernel_fits", lambda *_: True)
    return "cpu"


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the chunks whose logits the kernel gets, in order."""
    seen: list[int] = []
    original = loss_module._token_losses

    def counted(logits: Tensor, *rest: Any) -> Tensor:
        seen.append(len(logits))
        return original(logits, *rest)

    monkeypatch.setattr(loss_module, "_token_losses", counted)
    return seen


def case(device: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> Case:
    generator = torch.Generator().manual_seed(2)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    hidden = 2 * torch.randn(TOKENS, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return layer.to(device, dtype), hidden.to(device, dtype).requires_grad_(), targets.to(device)


def bytes_of(tokens: int, dtype: torch.dtype = torch.float32) -> int:
    return tokens * VOCABULARY * dtype.itemsize


def results(of: Case, tokens: int, factor: float = 4.0) -> list[Tensor]:
    """Loss over 123, then the gradients of what is trained, multiplied as training multiplies."""
    layer, hidden, targets = of
    layer, hidden = copy.deepcopy(layer), hidden.detach().requires_grad_(hidden.requires_grad)
    divisor = torch.tensor(123.0, device=hidden.device)
    loss = linear_cross_entropy(layer, hidden, targets, divisor, bytes_of(tokens, hidden.dtype))
    (factor * loss).backward()
    leaves = [hidden, *layer.parameters()]
    assert all((leaf.grad is not None) == leaf.requires_grad for leaf in leaves)
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def exact(of: Case, factor: float = 4.0) -> list[Tensor]:
    """The same by torch in FP64, whole."""
    layer, hidden, targets = copy.deepcopy(of[0]).double(), of[1].detach().double(), of[2]
    leaves = [hidden.requires_grad_(of[1].requires_grad), *layer.parameters()]
    loss = F.cross_entropy(layer(hidden), targets, reduction="sum") / 123
    (factor * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def relative_errors(ours: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(ours, wanted, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1000, 25])
def test_loss_and_gradients_are_torchs(
    device: str, tokens: int, bias: bool, chunks: list[int]
) -> None:
    of = case(device, bias=bias)
    assert max(relative_errors(results(of, tokens), exact(of))) < 2e-6
    assert chunks == {1000: [96], 25: [24] * 4}[tokens]


@pytest.mark.parametrize("trained", ["hidden", "weight bias"])
def test_only_what_is_trained_gets_a_gradient(device: str, trained: str) -> None:
    layer, hidden, targets = case(device)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    of = (layer, hidden.detach().requires_grad_("hidden" in trained), targets)
    ours, wanted = results(of, 32), exact(of)
    assert len(ours) == 1 + len(trained.split())
    assert max(relative_errors(ours, wanted)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_autograd(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, their gradient and what is summed over the tokens are rounded in both."""
    of = case(device, dtype)
    ours, wanted = relative_errors(results(of, 1000), exact(of)), exact(of)
    monkeypatch.setattr(loss_module, "_kernel_fits", lambda *_: False)
    plain = results(of, 1000)
    assert all(g.dtype == dtype for g in plain[1:])
    for mine, theirs in zip(ours, relative_errors(plain, wanted), strict=True):
        assert mine < 1.1 * theirs + 1e-6


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(run_without_waits: Any, chunks: list[int]) -> None:
    layer, hidden, targets = case("cuda", torch.bfloat16)
    divisor = torch.tensor(123.0, device="cuda")

    def run() -> None:
        chunk_bytes = bytes_of(32, torch.bfloat16)
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
