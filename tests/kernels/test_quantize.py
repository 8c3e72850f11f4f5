"""Quantization bit for bit: against FP8's definition in NumPy, and kernels against references."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coat_kernels import (
    E4M3,
    E5M2,
    GROUP_SIZES,
    OPS,
    Format,
    dequantize_group,
    dequantize_tensor,
    quantize_group,
    quantize_layouts,
    quantize_tensor,
    quantize_transposed,
    transpose_codes,
)
from coat_kernels.formats import MIN_SCALE
from coat_kernels.testing import assert_same_bits, results

Run = Callable[[str, Sequence[Any]], list[Tensor]]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def special_values(grid: Any, fmt: Format) -> Tensor:
    """FP32 [rows, 256]: every value of the format, every tie and its neighbours, and extremes."""
    values = grid.values(fmt)[:128]
    values = np.concatenate([values[np.isfinite(values)], [fmt.max * 1.125, fmt.max * 2]])
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    tiny = [2.0**-149, 2.0**-126, 1e-40, fmt.min_subnormal / 2, fmt.min_subnormal / 4]
    tiny = np.array(tiny, np.float32)
    x = np.concatenate(
        [
            values.astype(np.float32),
            ties,
            np.nextafter(ties, np.float32(0)),
            np.nextafter(ties, np.float32(np.inf)),
            tiny,
            np.nextafter(tiny, np.float32(1)),
            np.array([3e38, 1e10], np.float32),
        ]
    )
    x = torch.from_numpy(np.concatenate([x, -x]))
    return torch.nn.functional.pad(x, (0, -x.numel() % 256)).view(-1, 256)


@FORMATS
@DTYPES
def test_per_tensor_codes_are_the_nearest_values(fmt: Format, dtype: torch.dtype, run: Run, grid):
    x = special_values(grid, fmt).to(dtype)
    args = ([x], torch.ones(()), fmt.name, True, True)
    q, qt = run("quantize_tensor", args)
    expected = torch.from_numpy(grid.nearest(x.double().numpy(), fmt)).view(fmt.dtype)
    assert_same_bits("rows", q, expected)
    assert_same_bits("transposed", qt[:, : len(x)], expected.t().contiguous())
    assert_same_bits("reference", results("", OPS["quantize_tensor"].reference, args)[0], expected)


@FORMATS
def test_nan_and_infinities_as_codes(fmt: Format, run: Run):
    x = torch.full((1, 16), float("nan"))
    x[0, 1:4] = torch.tensor([float("inf"), -float("inf"), -float("nan")])
    q, _ = run("quantize_tensor", ([x], torch.ones(()), fmt.name, True, False))
    decoded = q.float()[0]
    assert decoded[1:3].tolist() == [fmt.max, -fmt.max]
    assert decoded.isnan().sum() == 14


@FORMATS
@DTYPES
@pytest.mark.parametrize("peak", [1.0, 3e-5, 4e4, 0.0, 448.0, 57344.0])
def test_per_tensor_scale_and_codes_by_numpy(
    fmt: Format, dtype: torch.dtype, peak: float, run: Run, grid
):
    generator = torch.Generator().manual_seed(int(peak))
    x = (torch.randn(17, 48, generator=generator) * peak / 4).to(dtype)
    (scale,) = run("tensor_scale", ([x], fmt.name))
    amax = np.abs(x.float().numpy()).max()
    expected = np.maximum(amax * np.float32(1 / fmt.max), np.float32(MIN_SCALE))
    assert scale.numpy() == expected
    q, _ = run("quantize_tensor", ([x], scale, fmt.name, True, False))
    scaled = x.float().numpy() * (np.float32(1) / scale.numpy())
    assert_same_bits("codes", q, torch.from_numpy(grid.nearest(scaled, fmt)).view(fmt.dtype))


def test_every_layout_holds_the_same_codes_and_padding_is_zero():
    x = torch.randn(63, 48)
    rows, transposed = quantize_layouts([x], rows=True, transposed=True)
    only_rows = quantize_tensor(x)
    only_transposed = quantize_transposed([x], rows.scale)
    assert transposed.q.shape == (48, 64)
    assert_same_bits("rows", only_rows.q, rows.q)
    assert_same_bits("transposed", only_transposed.q, transposed.q)
    assert_same_bits("transposed", transposed.q[:, :63].t().contiguous(), rows.q)
    assert not transposed.q[:, 63:].float().any()
    assert rows.scale == transposed.scale == only_rows.scale
    at_given_scale = quantize_transposed([x], torch.tensor(0.5), E5M2)
    assert at_given_scale.scale == 0.5
    assert at_given_scale.q.dtype == E5M2.dtype
    neither, nor = quantize_layouts([x], rows=False, transposed=False)
    assert neither.q.numel() == nor.q.numel() == 0


def test_codes_that_exist_are_transposed_and_decoded():
    x = torch.randn(63, 48)
    for fmt in (E4M3, E5M2):
        rows, transposed = quantize_layouts([x], fmt, rows=True, transposed=True)
        assert_same_bits("transposed", transpose_codes(rows).q, transposed.q)
        values = rows.q.double() * rows.scale.double()
        for dtype in (torch.float32, torch.bfloat16):
            decoded = dequantize_tensor(rows, dtype)
            assert decoded.dtype == dtype
            torch.testing.assert_close(decoded.double(), values, rtol=2.0**-8, atol=0)
        torch.testing.assert_close(dequantize_tensor(rows).double(), values, rtol=2e-7, atol=0)


def test_stacked_matrices_are_quantized_as_one():
    x = torch.randn(63, 48)
    x[50] *= 100
    for parts in (list(x.split([32, 0, 31])), list(x.split(16))):
        for whole, stacked in zip(
            quantize_layouts([x], rows=True, transposed=True),
            quantize_layouts(parts, rows=True, transposed=True),
            strict=True,
        ):
            assert_same_bits("codes", stacked.q, whole.q)
            assert stacked.scale == whole.scale


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_spoils_the_tensor_but_not_the_padding(bad: float, run: Run):
    x = torch.randn(5, 32)
    x[2, 7] = bad
    (scale,) = run("tensor_scale", ([x], "e4m3"))
    assert not scale.isfinite()
    q, qt = run("quantize_tensor", ([x], scale, "e4m3", True, True))
    assert (q.float() * scale).isnan().all()
    assert not qt[:, 5:].float().any()


def smallest_exponent(amax: float, fmt: Format) -> int:
    """By trying them all, in FP64, which is exact here."""
    return next(e for e in range(1, 255) if amax <= fmt.max * 2.0 ** (e - 127))


@FORMATS
@DTYPES
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_group_exponents_and_codes_by_definition(
    fmt: Format, dtype: torch.dtype, size: int, run: Run, grid
):
    generator = torch.Generator().manual_seed(size)
    magnitude = torch.exp2(torch.randint(-150, 126, (40, 128 // size, 1), generator=generator))
    x = (torch.randn(40, 128 // size, size, generator=generator) * magnitude).to(dtype)
    # Largest magnitudes at, just below and just above where the exponent changes.
    for row, power in enumerate((0, 3, -20)):
        edge = torch.tensor(fmt.max * 2.0**power)
        for group, peak in enumerate((edge, edge.nextafter(torch.tensor(0.0)), edge * 1.001)):
            if group < x.shape[1]:
                x[row, group] = 0.0
                x[row, group, 3] = -peak.to(dtype)
    x[5, 0] = 0.0
    x = torch.where(x.isfinite(), x, 1.0).flatten(1)
    q, exponents = run("quantize_group", (x, size, fmt.name))

    peaks = x.double().abs().view(40, -1, size).amax(-1)
    expected = [[smallest_exponent(peak, fmt) for peak in row] for row in peaks.tolist()]
    assert exponents.tolist() == expected
    scaled = x.double().view(40, -1, size) * torch.exp2(127.0 - exponents.double())[..., None]
    codes = torch.from_numpy(grid.nearest(scaled.numpy(), fmt)).view(fmt.dtype).flatten(1)
    assert_same_bits("codes", q, codes)
    assert q.float().abs().amax() <= fmt.max


@FORMATS
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_kernel_quantizes_special_groups_as_the_reference(fmt: Format, size: int, run: Run, grid):
    x = special_values(grid, fmt)
    for scale in (1.0, 2.0**-130, 2.0**100):
        scaled = (x * scale).contiguous()
        scaled[0, 0], scaled[1, 200], scaled[2, 100] = float("nan"), float("inf"), -float("inf")
        args = (scaled, size, fmt.name)
        for actual, expected in zip(
            run("quantize_group", args),
            results("", OPS["quantize_group"].reference, args),
            strict=True,
        ):
            assert_same_bits("group", actual, expected)


@FORMATS
def test_all_codes_dequantize_at_all_exponents(fmt: Format, run: Run, grid):
    values = torch.from_numpy(grid.values(fmt))
    q = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).expand(16, 256).contiguous()
    exponents = torch.arange(256).view(16, 16).to(torch.uint8).clamp(min=1, max=255)
    (x,) = run("dequantize_group", (q, exponents, torch.float32))
    scale = torch.exp2(exponents.double() - 127)
    scale[exponents == 255] = float("nan")
    expected = (values.view(16, 16) * scale[..., None]).flatten(1)
    assert_same_bits("values", x, expected.float())


@FORMATS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_spoils_its_group_only(fmt: Format, bad: float, run: Run):
    x = torch.randn(3, 64)
    x[1, 20] = bad
    x[2] = 0.0
    q, exponents = run("quantize_group", (x, 16, fmt.name))
    (decoded,) = run("dequantize_group", (q, exponents, torch.bfloat16))
    assert decoded[1, 16:32].isnan().all()
    assert decoded.isnan().sum() == 16
    assert not decoded[2].any()


@DTYPES
def test_public_functions_round_trip_representable_values(dtype: torch.dtype):
    x = dequantize_group(quantize_group(torch.randn(9, 96), 32), dtype)
    again = quantize_group(x, 32)
    assert again.group_size == 32
    assert_same_bits("values", dequantize_group(again, dtype), x)
