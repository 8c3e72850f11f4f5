"""How many kernels a block launches: a CPU takes about as long for each, whatever it computes."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import coat_kernels
from coat_kernels.registry import Op
from layer import IMPLEMENTATIONS
from layer_shapes import LayerShape, build_forward, build_layer

SHAPES = {
    "llama": LayerShape("small", "llama", 128, 256, 2, 2, 1, 16),
    "qwen2": LayerShape("small", "qwen2", 256, 512, 4, 2, 1, 16),
    "siglip": LayerShape("small", "siglip", 128, 256, 2, 2, 1, 16),
}
MOST = {
    # (family, implementation): our kernels and FP8 products, in the forward and backward pass. Not
    # counted: attention, residual sums, the setting of many scales at a time, sums of partial sums.
    ("llama", "coat_paper"): (21, 25),
    ("llama", "coat_recompute_qkv"): (21, 28),
    ("qwen2", "coat_recompute_qkv"): (21, 28),
    ("siglip", "coat_paper"): (20, 25),
    ("siglip", "coat_recompute_qkv"): (20, 27),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context that counts by name; kernels are not run, their results are whatever was there."""
    counts: Counter[str] = Counter()

    def count(kernel: Any, *_: Any, **__: Any) -> None:
        counts[kernel.fn.__name__] += 1

    def product(a: Tensor, _a_scale: Tensor, b: Tensor, _: Tensor, __: Any, dtype: Any, ___: Any):
        counts["scaled_mm"] += 1
        return a.new_zeros((len(a), len(b)), dtype=dtype)

    def call(op: Op, *args: Any) -> Any:
        return product(*args) if op.name == "scaled_mm" else op.triton(*args)

    for found in pkgutil.iter_modules(coat_kernels.__path__):
        module = importlib.import_module(f"coat_kernels.{found.name}")
        if found.name != "launch" and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", count)
    monkeypatch.setattr(Op, "__call__", call)

    @contextmanager
    def counting() -> Iterator[Counter[str]]:
        counts.clear()
        yield counts

    return counting


@pytest.mark.parametrize(("family", "implementation"), MOST)
def test_a_block_launches_no_more_kernels(
    family: str, implementation: str, launches: Callable[[], Any]
) -> None:
    cpu, shape = torch.device("cpu"), SHAPES[family]
    layer = IMPLEMENTATIONS[implementation][1](build_layer(shape, cpu, torch.bfloat16))
    forward = build_forward(shape, layer, cpu)
    x = torch.randn(1, shape.length, shape.hidden, dtype=torch.bfloat16).requires_grad_()
    with launches() as counts:
        y = forward(x)
        in_forward = dict(counts)
    with launches() as counts:
        y.backward(torch.ones_like(y))
        in_backward = dict(counts)
    assert in_forward["scaled_mm"] == 4  # q, k and v are one, and so are gate and up
    # Then backward runs the forward GEMM of q, k and v again.
    assert in_backward["scaled_mm"] == 8 + (implementation == "coat_recompute_qkv")
    found = (sum(in_forward.values()), sum(in_backward.values()))
    assert found == MOST[family, implementation], (in_forward, in_backward)
