"""One scale per row: by FP8's definition in NumPy, and products against FP64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coat_bench.check import TOLERANCE, assert_same_bits, relative_rms
from coat_kernels import (
    E4M3,
    E5M2,
    OPS,
    Format,
    RowScaled,
    dequantize_rows,
    quantize_rows,
    quantize_tensor,
    scaled_mm,
)
from coat_kernels.formats import MIN_SCALE, pad_length
from coat_kernels.quantize_blockwise import ROW_ELEMENTS, TRANSPOSED_TILE

Run = Callable[[str, Sequence[Any]], list[Tensor]]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def uneven(rows: int, columns: int) -> Tensor:
    """Gaussian rows of very different size."""
    generator = torch.Generator().manual_seed(rows + columns)
    size = torch.exp2(torch.randint(-12, 8, (rows, 1), generator=generator))
    return torch.randn(rows, columns, generator=generator) * size


def by_rows(q: Tensor, rows: int, transposed: bool) -> Tensor:
    """Codes as [M, N]; whatever the padding of transposed ones holds must be zero."""
    if not transposed:
        return q
    assert q.shape[1] == pad_length(rows)
    assert not q[:, rows:].float().any()
    return q[:, :rows].t().contiguous()


@FORMATS
@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(17, 48), (1, 16), (70, 1), (3, 129)], ids=str)
def test_scales_and_codes_by_numpy(
    shape: tuple[int, int], transposed: bool, dtype: torch.dtype, fmt: Format, run: Run, grid
):
    check_by_numpy(uneven(*shape).to(dtype), transposed, fmt, run, grid)


@FORMATS
@pytest.mark.parametrize("extra", [0, 1, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_several_chunks_by_numpy(transposed: bool, extra: int, fmt: Format, run: Run, grid):
    """With ``extra`` columns in the last chunk: 1 is a chunk of one column."""
    columns = TRANSPOSED_TILE.columns if transposed else ROW_ELEMENTS
    x = uneven(5, columns + extra)
    x[1, -1] = 1e4  # the largest are in the last chunk, and in the first
    x[2, 0] = -1e4
    check_by_numpy(x, transposed, fmt, run, grid)


def check_by_numpy(x: Tensor, transposed: bool, fmt: Format, run: Run, grid: Any) -> None:
    args = (x, fmt.name, transposed)
    for q, scale in (run("quantize_rows", args), OPS["quantize_rows"].reference(*args)):
        exact = x.float().numpy()
        amax = np.abs(exact).max(1)
        expected = np.maximum(amax * np.float32(1 / fmt.max), np.float32(MIN_SCALE))
        assert scale.tolist() == expected.tolist()
        scaled = exact * (np.float32(1) / expected)[:, None]
        codes = torch.from_numpy(grid.nearest(scaled, fmt)).view(fmt.dtype)
        assert_same_bits("codes", by_rows(q, len(x), transposed), codes)


@FORMATS
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [48, 300])
def test_bad_zero_and_constant_rows(columns: int, transposed: bool, fmt: Format, run: Run):
    x = uneven(9, columns)
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[[1, 2, 3], [0, columns - 1, 7]] = bad
    x[4] = 0.0
    x[5] = -0.3
    x[6] = 2.0**-140  # a subnormal, far below the smallest scale
    x[7] = 1e38
    q, scale = run("quantize_rows", (x, fmt.name, transposed))
    q = by_rows(q, len(x), transposed)
    decoded = q.float() * scale[:, None]
    assert decoded[1:4].isnan().all()
    assert q[1:4].float().isnan().sum() == 3  # the other codes are 0, worth NaN by their scale
    assert not scale[1:4].isfinite().any()
    assert scale[[4, 6]].tolist() == [MIN_SCALE] * 2
    assert not q[4].float().any()
    assert ((decoded[6] - x[6]).abs() <= fmt.min_subnormal * MIN_SCALE / 2).all()
    assert (q[5].float() == -fmt.max).all()
    assert (q[7].float() == fmt.max).all()
    torch.testing.assert_close(decoded[[5, 7]], x[[5, 7]], rtol=2.0**-22, atol=0)
    # What is wrong with other rows changes nothing here.
    alone, alone_scale = run("quantize_rows", (x[[0, 8]], fmt.name, transposed))
    assert_same_bits("codes", by_rows(alone, 2, transposed), q[[0, 8]])
    assert_same_bits("scales", alone_scale, scale[[0, 8]])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(0, 48), (3, 0), (0, 0)], ids=str)
def test_empty_matrices(shape: tuple[int, int], transposed: bool, run: Run):
    args = (torch.ones(shape), "e4m3", transposed)
    for q, scale in (run("quantize_rows", args), OPS["quantize_rows"].reference(*args)):
        assert q.shape == ((shape[1], pad_length(shape[0])) if transposed else shape)
        assert scale.tolist() == [MIN_SCALE] * shape[0]
    codes = torch.ones(shape).to(E4M3.dtype)
    (x,) = run("dequantize_rows", (codes, torch.ones(shape[0]), torch.bfloat16))
    assert (x.shape, x.dtype) == (shape, torch.bfloat16)


@FORMATS
@DTYPES
def test_all_codes_dequantize(dtype: torch.dtype, fmt: Format, run: Run, grid):
    values = torch.from_numpy(grid.values(fmt))
    q = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).expand(5, 256).contiguous()
    scale = torch.tensor([MIN_SCALE, 0.5, 2.0**-9, float("inf"), float("nan")])
    expected = (values * scale.double()[:, None]).to(dtype)
    for x in (
        run("dequantize_rows", (q, scale, dtype))[0],
        dequantize_rows(RowScaled(q, scale), dtype),
    ):
        assert_same_bits("values", x, expected)


@FORMATS
def test_both_layouts_hold_the_same_codes(fmt: Format):
    x = uneven(63, 48)
    plain, transposed = quantize_rows(x, fmt), quantize_rows(x, fmt, transposed=True)
    assert (plain.transposed, transposed.transposed) == (False, True)
    assert_same_bits("codes", by_rows(transposed.q, 63, True), plain.q)
    assert_same_bits("scales", transposed.scale, plain.scale)
    exact = plain.q.double() * plain.scale.double()[:, None]
    torch.testing.assert_close(dequantize_rows(plain).double(), exact, rtol=2e-7, atol=0)


def decoded(x: RowScaled) -> Tensor:
    return x.q.double() * x.scale.double()[:, None]


@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("tokens", [1, 63])
def test_product(
    tokens: int, formats: tuple[Format, Format], bias_dtype: torch.dtype | None, run: Run
):
    a, b = (
        quantize_rows(uneven(tokens, 304), formats[0]),
        quantize_rows(uneven(48, 304), formats[1]),
    )
    bias = None if bias_dtype is None else torch.linspace(-1, 1, 48).to(bias_dtype)
    exact = decoded(a) @ decoded(b).t()
    if bias is not None:
        exact += bias.bfloat16().double()
    args = (a.q, a.scale[:, None], b.q, b.scale[None], bias, torch.bfloat16, False)
    for got in (run("scaled_mm", args)[0], scaled_mm(a, b, torch.bfloat16, bias)):
        # Row by row, for they differ in size.
        for one, wanted in zip(got, exact, strict=True):
            assert relative_rms(one, wanted) < 2.0**-8 + TOLERANCE["scaled_mm", torch.float32]


def test_products_of_small_integers_are_exact(run: Run):
    generator = torch.Generator().manual_seed(0)

    def operand(n: int) -> RowScaled:
        q = torch.randint(-8, 9, (n, 32), generator=generator).to(E4M3.dtype)
        return RowScaled(q, torch.exp2(torch.randint(-9, 9, (n,), generator=generator)))

    a, b = operand(5), operand(16)
    exact = (decoded(a) @ decoded(b).t()).bfloat16()
    args = (a.q, a.scale[:, None], b.q, b.scale[None], None, torch.bfloat16, False)
    for got in (run("scaled_mm", args)[0], scaled_mm(a, b, torch.bfloat16)):
        assert_same_bits("product", got, exact)


def test_a_bad_row_spoils_its_row_or_column_of_a_product(run: Run):
    x, w = uneven(4, 32), uneven(16, 32)
    x[1, 3], w[5, 0] = float("nan"), float("inf")
    a, b = quantize_rows(x), quantize_rows(w)
    args = (a.q, a.scale[:, None], b.q, b.scale[None], None, torch.bfloat16, False)
    (y,) = run("scaled_mm", args)
    bad = torch.zeros(4, 16, dtype=torch.bool)
    bad[1], bad[:, 5] = True, True
    assert torch.equal(y.isnan(), bad)
    assert y[~bad].isfinite().all()


def test_empty_products(run: Run):
    a, b = quantize_rows(torch.ones(0, 32)), quantize_rows(torch.ones(16, 32))
    args = (a.q, a.scale[:, None], b.q, b.scale[None], None, torch.bfloat16, False)
    (y,) = run("scaled_mm", args)
    assert y.shape == (0, 16)


def test_the_other_operand_can_hold_the_scales_of_a_product_over_tokens():
    x, dy = uneven(63, 32), uneven(63, 16).double()
    x_t = quantize_rows(x, transposed=True)
    scaled_dy = torch.nn.functional.pad(dy * x_t.scale[:, None], (0, 0, 0, 1))
    exact = dy.t() @ decoded(quantize_rows(x))
    torch.testing.assert_close(scaled_dy.t() @ x_t.q.double().t(), exact)


def test_operands_are_both_scaled_per_row_or_both_per_tensor():
    x = torch.ones(16, 32)
    for a, b in ((quantize_rows(x), quantize_tensor(x)), (quantize_tensor(x), quantize_rows(x))):
        with pytest.raises(ValueError, match=r"a is (Row|Tensor)Scaled and b is .*both per tensor"):
            scaled_mm(a, b, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_row_scaled_operands_are_bf16(dtype: torch.dtype):
    x = quantize_rows(torch.ones(16, 32))
    with pytest.raises(ValueError, match=rf"cannot be {dtype} .* only torch.bfloat16: round it"):
        scaled_mm(x, x, dtype)


@pytest.mark.parametrize(
    ("k_a", "k_b", "n"), [(32, 48, 16), (40, 40, 16), (33, 33, 16), (32, 32, 17)]
)
def test_product_dimensions(k_a: int, k_b: int, n: int):
    a, b = quantize_rows(torch.ones(4, k_a)), quantize_rows(torch.ones(n, k_b))
    with pytest.raises(ValueError, match=r"K must be the same and K and N multiples of 16: pad"):
        scaled_mm(a, b, torch.bfloat16)


FP8_X = torch.ones(16, 32).to(E4M3.dtype)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            RowScaled(FP8_X, torch.ones(())),
            r"float32 of shape \(\) .* of shape \(16,\), as quantize_r",
        ),
        (RowScaled(FP8_X, torch.ones(16, 1)), r"scales of {} are torch.float32 of shape \(16, 1\)"),
        (
            RowScaled(FP8_X, torch.ones(32)),
            r"float32 of shape \(32,\) and strides \(1,\); for FP8 data of",
        ),
        (RowScaled(FP8_X, torch.ones(32)[::2]), r"strides \(2,\); .* contiguous torch.float32"),
        (RowScaled(FP8_X, torch.ones(16).double()), r"scales of {} are torch.float64"),
        (RowScaled(FP8_X, torch.ones(16), True), r"{} is transposed, .* quantize it row-major"),
        (RowScaled(torch.ones(16, 32), torch.ones(16)), r"the FP8 data of {} is torch.float32"),
        (RowScaled(FP8_X[0], torch.ones(16)), r"the FP8 data of {} is .* of shape \(32,\)"),
        (RowScaled(FP8_X.t(), torch.ones(32)), r"the FP8 data of {} is .* strides \(1, 32\)"),
    ],
)
def test_codes_and_scales_belong_together(bad: RowScaled, message: str):
    good = quantize_rows(torch.ones(16, 32))
    with pytest.raises(ValueError, match="dequantize_rows: .*" + message.format("x")):
        dequantize_rows(bad)
    with pytest.raises(ValueError, match="scaled_mm: .*" + message.format("a")):
        scaled_mm(bad, good, torch.bfloat16)
    with pytest.raises(ValueError, match="scaled_mm: .*" + message.format("b")):
        scaled_mm(good, bad, torch.bfloat16)
