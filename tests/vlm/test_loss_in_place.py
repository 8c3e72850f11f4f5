"""The loss whose gradient replaces the logits: by its reference, the interpreter, or on a GPU."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_kernels import OPS, cross_entropy
from coat_vlm.model import loss as loss_module
from coat_vlm.model.loss import IN_PLACE_BYTES, chunk_tokens, linear_cross_entropy
from coat_vlm.plan.activations import LiveMemory

WIDTH, VOCABULARY, TOKENS = 64, 1000, 96

Case = tuple[nn.Linear, Tensor, Tensor]


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
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
@pytest.mark.parametrize("tokens", [1000, 32, 25])
def test_loss_and_gradients_are_torchs(
    device: str, tokens: int, bias: bool, chunks: list[int]
) -> None:
    of = case(device, bias=bias)
    assert max(relative_errors(results(of, tokens), exact(of))) < 2e-6
    assert chunks == {1000: [96], 32: [32] * 3, 25: [24] * 4}[tokens]


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden weight", "weight bias"])
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


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sum_over_chunks_is_rounded_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the docstring says of BF16."""
    monkeypatch.setattr(loss_module, "_kernel_fits", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(256, 2000, bias=False)
    nn.init.normal_(layer.weight, std=0.08, generator=generator)
    hidden = torch.randn(2048, 256, generator=generator).to(place, torch.bfloat16)
    targets = torch.randint(2000, (2048,), generator=generator).to(place)
    of = (layer.to(place, torch.bfloat16), hidden, targets)
    wanted = exact(of)[1]
    found = []
    for chunks in (1, 8, 16):
        layer.weight.grad = None
        size = len(hidden) * 2000 * 2 // chunks
        divisor = torch.tensor(123.0 / 4, device=place)
        linear_cross_entropy(*of, divisor, chunk_bytes=size).backward()
        assert layer.weight.grad is not None
        found += relative_errors([layer.weight.grad], [wanted])
    one_rounding = relative_errors([wanted.bfloat16()], [wanted])[0]
    assert found == pytest.approx([0.0021] * 3, rel=0.05)
    assert one_rounding < min(found)
    assert one_rounding == pytest.approx(0.0017, rel=0.05)  # uniform: 2^-8 / sqrt(12) of a binade


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_computes_no_gradient(
    device: str, context: Callable[[], Any], chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = case(device)
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("computed a gradient"))
    with context():
        loss = linear_cross_entropy(*of, chunk_bytes=bytes_of(32))
    assert chunks == [32] * 3
    assert not loss.requires_grad
    monkeypatch.undo()
    assert relative_errors([loss / 123], exact(of)[:1])[0] < 1e-6


def test_no_token_gives_zero_with_a_graph(device: str, chunks: list[int]) -> None:
    layer, hidden, targets = case(device, torch.bfloat16)
    hidden = hidden.detach()[:0].requires_grad_()
    loss = linear_cross_entropy(layer, hidden, targets[:0])
    loss.backward()
    assert loss.item() == 0
    assert chunks == []
    for leaf in (hidden, *layer.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        assert not leaf.grad.any()


def test_a_second_backward_pass_is_refused(device: str) -> None:
    loss = linear_cross_entropy(*case(device))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class OtherLinear(nn.Linear):
    """Might compute anything."""


def test_where_the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 8, dtype=torch.bfloat16)
    hidden: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert loss_module._kernel_fits(layer, hidden)
    assert not loss_module._kernel_fits(OtherLinear(4, 8, dtype=torch.bfloat16), hidden)
    for changed in ({"device": torch.device("cpu")}, {"dtype": torch.float32}):
        other: Any = SimpleNamespace(**{**vars(hidden), **changed})
        assert not loss_module._kernel_fits(layer, other)
    double: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64)
    assert not loss_module._kernel_fits(nn.Linear(4, 8, dtype=torch.float64), double)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert not loss_module._kernel_fits(layer, hidden)


def test_a_plan_of_memory_takes_the_way_of_a_gpu(chunks: list[int]) -> None:
    layer, hidden, targets = case("meta", torch.bfloat16)
    with LiveMemory("meta"):
        results((layer, hidden, targets), 32)
    assert chunks == [32] * 3


def test_16k_tokens_of_a_large_vocabulary_are_four_chunks() -> None:
    assert chunk_tokens(16384, 152064, IN_PLACE_BYTES, 2) == 4096


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
