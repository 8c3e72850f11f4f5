"""Gradients in FP8: their codes by torch's cast, their sums in FP64, parts against one matrix."""

from importlib import import_module
from typing import Any

import pytest
import torch
from op_check import Run, assert_same_bits
from torch import Tensor

from coat_kernels import E4M3, E5M2, quantize_gradient

rope_module, quantize_module = (
    import_module(f"coat_kernels.{name}") for name in ("rope", "quantize")
)


def gradient(rows: int = 37, columns: int = 80) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    size = torch.exp2(3 * torch.randn(columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * size


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("columns", [80, 24])
def test_codes_scale_and_sums_of_a_matrix(run: Run, columns: int, fmt: Any):
    dy = gradient(37, columns).bfloat16()
    q, qt, scale, sums = run("quantize_gradient", ([dy], fmt.name, True, True, True))
    exact = dy.double()
    torch.testing.assert_close(scale.double(), exact.abs().max() / fmt.max, rtol=1e-7, atol=0)
    # FP32, as the kernel divides; the cast rounds once.
    assert_same_bits("codes", q, (dy.float() * (1 / scale)).clamp(-fmt.max, fmt.max).to(fmt.dtype))
    assert_same_bits("transposed", qt[:, :37].t().contiguous(), q)
    assert not qt[:, 37:].float().any()
    torch.testing.assert_close(sums.double(), exact.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [(80, 32), (80, 0, 320), (16, 144, 48)])
def test_parts_side_by_side_are_one_matrix(run: Run, widths: tuple[int, ...]):
    parts = [gradient(37, width) for width in widths]
    parts[-1] = 100 * parts[-1]
    one = run("quantize_gradient", ([torch.cat(parts, 1)], "e5m2", True, True, True))
    several = run("quantize_gradient", (parts, "e5m2", True, True, True))
    for name, a, b in zip(("codes", "transposed", "scale", "sums"), several, one, strict=True):
        assert_same_bits(name, a, b)


def test_what_is_not_needed_is_empty(run: Run):
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False,) * 3):
        results = run("quantize_gradient", ([gradient()], "e5m2", *needs))
        made = [bool(results[i].numel()) for i in (0, 1, 3)]
        assert made == list(needs)
        assert results[2] > 0
    assert quantize_gradient([gradient()]).bias is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_element_spoils_all_values_and_its_channels_sum(run: Run, bad: float):
    parts = [gradient(20, 32), gradient(20, 16)]
    parts[1][7, 5] = bad
    q, _, scale, sums = run("quantize_gradient", (parts, "e5m2", True, False, True))
    assert not (q.float() * scale).isfinite().any()
    assert (~sums.isfinite()).nonzero().flatten().tolist() == [37]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([gradient().t()], "contiguous"),
        ([gradient(4, 32), gradient(5, 32)], r"got parts of .*same number of rows"),
        ([gradient(4, 16)] * 4, "got 4 parts; pass at most 3"),
    ],
)
def test_what_does_not_fit_is_refused(parts: list[Tensor], words: str):
    with pytest.raises(ValueError, match=words):
        quantize_gradient(parts)
