"""Liger's kernels on a GPU give the loss and the gradients of the plain chunks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.model import loss as loss_module
from coat_vlm.model.loss import linear_cross_entropy

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WIDTH, VOCABULARY, TOKENS = 64, 1000, 300


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what Liger is given, in order."""
    pytest.importorskip("liger_kernel")
    shapes: list[torch.Size] = []
    original = loss_module._with_liger

    def counted(function: Any, layer: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
        shapes.append(hidden.shape)
        return original(function, layer, hidden, targets)

    monkeypatch.setattr(loss_module, "_with_liger", counted)
    return shapes


def case(dtype: torch.dtype, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    hidden = 2 * torch.randn(TOKENS, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return (
        layer.to(DEVICE, dtype),
        hidden.to(DEVICE, dtype).requires_grad_(),
        targets.to(DEVICE),
    )


def results(layer: nn.Linear, hidden: Tensor, targets: Tensor) -> list[Tensor]:
    """Loss and gradients, scaled as the training loop scales them."""
    layer, hidden = copy.deepcopy(layer), hidden.detach().requires_grad_(hidden.requires_grad)
    loss = linear_cross_entropy(layer, hidden, targets, torch.tensor(123.0, device=DEVICE))
    (loss * 4).backward()
    leaves = [t for t in (hidden, *layer.parameters()) if t.requires_grad]
    found = [loss.detach(), *(t.grad for t in leaves if t.grad is not None)]
    assert len(found) == 1 + len(leaves)
    return found


def relative_errors(ours: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(ours, wanted, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_is_as_exact_as_the_plain_chunks(
    dtype: torch.dtype, frozen: bool, bias: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, hidden, targets = case(dtype, bias)
    layer.requires_grad_(not frozen)
    fused = results(layer, hidden, targets)
    assert len(calls) == 1
    monkeypatch.setattr(loss_module, "_liger_fits", lambda *_: False)
    plain = results(layer, hidden, targets)
    exact = results(layer.double(), hidden.detach().double().requires_grad_(), targets)
    assert len(calls) == 1
    assert [t.dtype for t in fused] == [t.dtype for t in plain]
    # In BF16 Liger rounds each gradient once more, when the backward pass multiplies it.
    for ours, theirs in zip(
        relative_errors(fused, exact), relative_errors(plain, exact), strict=True
    ):
        assert ours < 2 * theirs + 1e-5


def test_validation_runs_on_liger_too(calls: list[Any]) -> None:
    layer, hidden, targets = case(torch.bfloat16)
    with torch.no_grad():
        loss = linear_cross_entropy(layer, hidden.detach(), targets)
        wanted = torch.nn.functional.cross_entropy(layer(hidden).float(), targets, reduction="sum")
    assert len(calls) == 1
    assert not loss.requires_grad
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)


def test_what_liger_cannot_do_runs_in_plain_chunks(calls: list[Any]) -> None:
    layer, hidden, targets = case(torch.bfloat16)
    none = linear_cross_entropy(layer, hidden[:0], targets[:0])
    none.backward()
    assert none.item() == 0
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()
    # It gives a weight no gradient where hidden needs none.
    linear_cross_entropy(layer, hidden.detach(), targets).backward()
    assert layer.weight.grad.any()
    assert calls == []


def test_the_logits_are_never_there(calls: list[Any]) -> None:
    vocabulary, tokens = 65536, 4096
    layer = nn.Linear(WIDTH, vocabulary, bias=False, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(tokens, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(layer, hidden, targets).backward()
    assert len(calls) == 1
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary * 2 / 4
