"""Quantization bit for bit: against FP8's definition in NumPy, and kernels against references."""

import numpy as np
import pytest
import torch
from op_check import Run, assert_same_bits

from coat_kernels import (
    E4M3,
    E5M2,
    OPS,
    Format,
    dequantize_tensor,
    quantize_again,
    quantize_layouts,
    quantize_tensor,
    transpose_quantized,
)
from coat_kernels.formats import MIN_SCALE
from op_cases import run_op

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@FORMATS
@DTYPES
def test_per_tensor_codes_are_the_nearest_values(
    fmt: Format, dtype: torch.dtype, run: Run, grid, special_values
):
    x = special_values(fmt).to(dtype)
    args = ([x], torch.ones(()), fmt.name, True, True)
    q, qt = run("quantize_tensor", args)
    expected = torch.from_numpy(grid.nearest(x.double().numpy(), fmt)).view(fmt.dtype)
    assert_same_bits("rows", q, expected)
    assert_same_bits("transposed", qt[:, : len(x)], expected.t().contiguous())
    assert_same_bits("reference", run_op("", OPS["quantize_tensor"].reference, args)[0], expected)


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


@DTYPES
def test_the_scale_of_weights_differs_with_their_bits(dtype: torch.dtype, run: Run):
    """Its factor is uniform in [1, 2) when single weights change by their last bit."""
    weight = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = weight.view(torch.int16 if dtype.itemsize == 2 else torch.int32).flatten()
    scale, factors = torch.tensor(0.25), []
    for i in range(64):
        words[37 * i] += 1
        dithered, again = (run("dither_scale", (scale, weight))[0] for _ in range(2))
        assert_same_bits("again", again, dithered)
        assert_same_bits("reference", OPS["dither_scale"].reference(scale, weight), dithered)
        factors.append(float(dithered / scale))
    assert 1 <= min(factors) <= max(factors) < 2
    # Largest distance of 64 uniform values from their distribution (Kolmogorov, 0.1%): 1.95 / 8.
    expected = 1 + (np.arange(64) + 0.5) / 64
    assert np.abs(np.sort(factors) - expected).max() < 0.25
    (scale_of,) = run("tensor_scale", ([weight], "e4m3"))
    layout, _ = quantize_layouts([weight], rows=True, transposed=False, dithered=True)
    assert layout.scale == OPS["dither_scale"].reference(scale_of, weight)


def test_every_layout_holds_the_same_codes_and_padding_is_zero():
    x = torch.randn(63, 48)
    rows, transposed = quantize_layouts([x], rows=True, transposed=True)
    only_rows = quantize_tensor(x)
    only_transposed = quantize_again([x], rows.scale, transposed=True)
    assert transposed.q.shape == (48, 64)
    assert_same_bits("rows", only_rows.q, rows.q)
    assert_same_bits("transposed", only_transposed.q, transposed.q)
    assert_same_bits("again", quantize_again([x], rows.scale, transposed=False).q, rows.q)
    assert_same_bits("transposed", transposed.q[:, :63].t().contiguous(), rows.q)
    assert not transposed.q[:, 63:].float().any()
    assert rows.scale == transposed.scale == only_rows.scale
    at_given_scale = quantize_again([x], torch.tensor(0.5), E5M2, transposed=True)
    assert at_given_scale.scale == 0.5
    assert at_given_scale.q.dtype == E5M2.dtype
    neither, nor = quantize_layouts([x], rows=False, transposed=False)
    assert neither.q.numel() == nor.q.numel() == 0


def test_codes_that_exist_are_transposed_and_decoded():
    x = torch.randn(63, 48)
    for fmt in (E4M3, E5M2):
        rows, transposed = quantize_layouts([x], fmt, rows=True, transposed=True)
        assert_same_bits("transposed", transpose_quantized(rows).q, transposed.q)
        values = rows.q.double() * rows.scale.double()
        for dtype in (torch.float32, torch.bfloat16):
            decoded = dequantize_tensor(rows, dtype)
            assert decoded.dtype == dtype
            torch.testing.assert_close(decoded.double(), values, rtol=2.0**-8, atol=0)
        torch.testing.assert_close(dequantize_tensor(rows).double(), values, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("sizes", "transposed"),
    [
        ((5, 150), False),  # another number of tiles for each part
        ((150, 0, 70), False),
        ((64, 160, 23), True),
        ((16, 0, 11), True),
    ],
)
def test_parts_are_written_where_they_lie_in_the_whole(
    sizes: tuple[int, ...], transposed: bool, run: Run
):
    x = torch.randn(sum(sizes), 144)
    parts = list(x.split(list(sizes)))
    for i in range(len(parts)):
        largest = [part.clone() for part in parts]
        if not len(largest[i]):
            continue
        largest[i][-1, -1] = 100
        whole = torch.cat(largest)
        (scale,) = run("tensor_scale", (largest, "e4m3"))
        assert scale == np.float32(100) * np.float32(1 / 448)
        expected = (whole * (1 / scale)).to(E4M3.dtype)
        q, qt = run("quantize_tensor", (largest, scale, "e4m3", True, transposed))
        assert_same_bits("rows", q, expected)
        if transposed:
            assert_same_bits("transposed", qt[:, : len(whole)], expected.t().contiguous())
            assert not qt[:, len(whole) :].float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_spoils_the_tensor_but_not_the_padding(bad: float, run: Run):
    x = torch.randn(5, 32)
    x[2, 7] = bad
    (scale,) = run("tensor_scale", ([x], "e4m3"))
    assert not scale.isfinite()
    q, qt = run("quantize_tensor", ([x], scale, "e4m3", True, True))
    assert (q.float() * scale).isnan().all()
    assert not qt[:, 5:].float().any()


def test_bits_are_compared_as_the_gpu_casts(monkeypatch: pytest.MonkeyPatch):
    """Ada's casts: to FP16 toward zero, then to the nearest."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    half = x.half()
    too_far = half.float().abs() > x.abs()
    half = torch.where(too_far, half.view(torch.int16) - 1, half.view(torch.int16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for fmt, share in ((E4M3, 1 / 256), (E5M2, 1 / 512)):
        nearest, ada = (v.float().to(fmt.dtype) for v in (x, half.view(torch.float16)))
        differ = nearest.view(torch.uint8) != ada.view(torch.uint8)
        assert differ.float().mean() == pytest.approx(share, rel=0.25)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
        assert_same_bits("Ada", ada, nearest)
        with pytest.raises(AssertionError, match="differ"):
            assert_same_bits("away from zero", nearest, ada)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        with pytest.raises(AssertionError, match="differ"):
            assert_same_bits("Hopper", ada, nearest)
