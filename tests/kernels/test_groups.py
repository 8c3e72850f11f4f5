"""Quantization per group bit for bit: by FP8's definition, and kernels against references."""

import pytest
import torch
from op_check import Run, assert_same_bits

from coat_kernels import (
    E4M3,
    E5M2,
    GROUP_SIZES,
    Format,
)

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def smallest_exponent(amax: float, fmt: Format) -> int:
    """By trying them all, in FP64, which is exact here."""
    return next(e for e in range(1, 255) if amax <= fmt.max * 2.0 ** (e - 127))


@FORMATS
@DTYPES
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_exponents_and_codes_by_definition(
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
def test_a_bad_element_spoils_its_group_only(fmt: Format, bad: float, run: Run):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0
    x[1, 20] = bad
    (decoded,) = run("dequantize_group", (*run("quantize_group", (x, 16, fmt.name)), torch.float32))
    assert not decoded[0].any()
    assert decoded[1, 16:32].isnan().all()
    assert decoded.isnan().sum() == 16
