"""GEMMs with the narrow matrices of LoRA adapters against torch in FP64."""

from typing import Any

import pytest
import torch
from op_check import TOLERANCE, Run, relative_rms
from torch import Tensor

from coat_kernels import (
    E5M2,
    TensorScaled,
    append_low_rank,
    low_rank,
    low_rank_gradient,
    low_rank_project,
    quantize_gradient,
    quantize_tensor,
    scaled_mm,
)
from coat_kernels.low_rank import COLUMNS, MAX_RANK, MIN_RANK, ROWS

TOKENS = 2 * ROWS + 3
RANKS, SCALES = [8, MAX_RANK + 16, MIN_RANK], [0.5, 4.0, -1.0]


def normal(*shape: int) -> Tensor:
    """Seeded by the shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(
    params=[
        (64, 16, torch.float32),
        (64, 8, torch.bfloat16),
        (1, 16, torch.bfloat16),
        (1, 8, torch.float32),
        (64, 16, torch.float16),
    ],
    ids=str,
)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Sums in pieces, and undivided; layers whose columns are aligned or not; dtypes."""
    monkeypatch.setattr(low_rank, "PROGRAMS", request.param[0])
    return request.param


@pytest.fixture
def sizes(case: tuple[Any, ...]) -> list[int]:
    """Columns of x of each adapter, for tiles of many columns, and of few."""
    return [48, case[1], 2 * COLUMNS + 16]


@pytest.fixture
def dtype(case: tuple[Any, ...]) -> torch.dtype:
    """Dtype of adapters; FP32 has tiles of its own."""
    return case[2]


def starts_of(sizes: list[int]) -> list[int]:
    return [0, sizes[0], sizes[0] + sizes[1]]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Rounded once to the dtype from an FP32 sum of products of which most cancel."""
    rtol = max(1e-5, torch.finfo(actual.dtype).eps)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=2e-6)


def assert_product(actual: Tensor, expected: Tensor) -> None:
    """Of FP8 terms: rounded to 16 bits, on a GPU after sums of FP8 tensor cores."""
    if actual.dtype == torch.float32:
        assert_close(actual, expected)
    else:
        sums = TOLERANCE["scaled_mm", torch.float32] if torch.cuda.is_available() else 0.0
        assert relative_rms(actual, expected) < torch.finfo(actual.dtype).eps / 2 + sums


def exact(x: TensorScaled) -> Tensor:
    """What the FP8 data means, FP64."""
    return x.q.double() * x.scale.double()


@pytest.fixture
def x(dtype: torch.dtype, sizes: list[int]) -> TensorScaled:
    """An activation in E4M3, or a gradient in E5M2."""
    values = 0.01 * normal(TOKENS, sum(sizes))
    if dtype == torch.float32:
        return quantize_tensor(values)
    return quantize_gradient([values], E5M2, transposed=False).rows


def few_tokens(x: TensorScaled) -> TensorScaled:
    """One tile of rows and the beginning of another one: rows of P are computed separately."""
    return TensorScaled(x.q[: ROWS + 3], x.scale)


def test_gradients_of_p_come_from_each_adapters_columns(
    run: Run, x: TensorScaled, sizes: list[int], dtype: torch.dtype
) -> None:
    starts, x = starts_of(sizes), few_tokens(x)
    b = [normal(size, rank).to(dtype) for size, rank in zip(sizes, RANKS, strict=True)]
    parts = zip(starts, sizes, b, SCALES, strict=True)
    expected = torch.cat([s * exact(x)[:, i : i + n] @ m.double() for i, n, m, s in parts], 1)
    results = run("low_rank_project", (*x, b, starts, SCALES, False))
    for p in (*results, low_rank_project(x, b, starts, SCALES)):
        assert_product(p, expected)


def test_p_is_the_product_with_each_a(run: Run, x: TensorScaled, dtype: torch.dtype) -> None:
    x = few_tokens(x)
    a = [normal(rank, x.q.shape[1]).to(dtype) for rank in RANKS]
    expected = torch.cat([exact(x) @ m.double().t() for m in a], 1)
    results = run("low_rank_project", (*x, a, [0] * 3, [1.0] * 3, True))
    for p in (*results, low_rank_project(x, a, transposed=True)):
        assert_product(p, expected)


def test_gradients_of_b_are_sums_over_tokens(
    run: Run, x: TensorScaled, sizes: list[int], dtype: torch.dtype
) -> None:
    starts, p = starts_of(sizes), normal(TOKENS, sum(RANKS)).to(dtype)
    inner = p.double().split(RANKS, 1)
    parts = zip(starts, sizes, inner, SCALES, strict=True)
    expected = [s * exact(x)[:, i : i + n].t() @ of_rank for i, n, of_rank, s in parts]
    for transposed in (False, True):
        wanted = [e.t() if transposed else e for e in expected]
        (flat,) = run("low_rank_gradient", (*x, p, starts, sizes, RANKS, SCALES, transposed))
        assert_close(flat, torch.cat([e.flatten() for e in wanted]))
        found = low_rank_gradient(x, p, starts, sizes, RANKS, SCALES, transposed=transposed)
        for pair in zip(found, wanted, strict=True):
            assert_close(*pair)


@pytest.mark.parametrize("size", [0.0, 1e-5, 1e-2, 100.0])
def test_appended_columns_add_a_product(size: float) -> None:
    """Without saturation, also if the product is much larger than the matrices'."""
    a, b = quantize_gradient([normal(40, 48)]).rows, quantize_tensor(0.02 * normal(32, 48))
    p, u = normal(40, 5), size * normal(32, 5)
    p[3] *= 100
    matrices = [u[:20, :3].clone(), -2 * u[20:, 3:]]
    wide = append_low_rank(a, p, b, matrices, [0, 20], [1.0, -0.5])
    u[:20, 3:], u[20:, :3] = 0, 0
    product = p.double() @ u.double().t()
    expected = exact(a) @ exact(b).t() + product
    assert [x.q.shape for x in wide] == [(40, 64), (32, 64)]
    error = (scaled_mm(*wide, torch.float32).double() - expected).norm()
    assert error < 1e-6 * expected.norm() + 0.08 * product.norm()
    if size < 1e-3:  # the matrices are copied
        assert all(
            torch.equal(exact(x)[:, :48], exact(y)) for x, y in zip(wide, (a, b), strict=True)
        )


def test_wrong_arguments_of_appended_columns() -> None:
    a, b = quantize_tensor(normal(40, 48)), quantize_tensor(normal(32, 48))
    with pytest.raises(ValueError, match=r"p has shape \(40, 6\) .* contiguous matrix \[40, 5\]"):
        append_low_rank(a, normal(40, 6), b, [normal(32, 5)], [0], [1.0])
    with pytest.raises(ValueError, match="takes 32 rows of b from number 1 on, and there are 32"):
        append_low_rank(a, normal(40, 5), b, [normal(32, 5)], [1], [1.0])


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    M, N = 2**17 + ROWS, 2**14 + 16
    q = torch.zeros(M, N, dtype=torch.float8_e4m3fn, device="cuda")
    q[-1, -1] = 2.0
    x = TensorScaled(q, torch.ones((), device="cuda"))
    b = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    p = low_rank_project(x, [b], [N - 16])
    assert p[-1].tolist() == [2.0] * 16
    assert not p[:-1].any()
    (grad,) = low_rank_gradient(x, torch.ones_like(p), [N - 16], [16], [16], [1.0])
    assert grad[-1].tolist() == [2.0] * 16
    assert not grad[:-1].any()


def test_a_nan_stays_in_its_token_and_channel(run: Run) -> None:
    q = torch.zeros(TOKENS, 32, dtype=torch.float8_e4m3fn)
    q.view(torch.uint8)[70, 20] = 0x7F
    b, p = [normal(16, 16), normal(16, 16)], normal(TOKENS, 32)
    (of_p,) = run("low_rank_project", (q, torch.ones(()), b, [0, 16], [1.0, 1.0], False))
    assert of_p.isnan().nonzero().tolist() == [[70, column] for column in range(16, 32)]
    (of_b,) = run(
        "low_rank_gradient", (q, torch.ones(()), p, [0, 16], [16, 16], [16, 16], [1.0, 1.0], False)
    )
    assert of_b.view(2, 16, 16).isnan().nonzero().tolist() == [[1, 4, r] for r in range(16)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matrices": []}, "lists of 0, 0, 0 values; pass 1 to 3 matrices"),
        ({"starts": None}, "matrix 0 multiplies 16 columns, and x has 32; give starts"),
        ({"starts": [24]}, "matrix 0 takes 16 columns of x from number 24 on, and there are 32"),
        ({"matrices": [normal(8, 16).t()]}, r"matrix 0 is torch.float32 .* contiguous matrix"),
        (
            {"matrices": [normal(16, 8), normal(16, 8).half()]},
            "matrix 1 is torch.float16",
        ),
        ({"x": TensorScaled(normal(4, 32), torch.ones(()))}, "the FP8 data of x is torch.float32"),
    ],
)
def test_wrong_arguments_of_projections(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"x": quantize_tensor(normal(4, 32)), "matrices": [normal(16, 8)]}
    given["starts"] = [0] * len(change.get("matrices", [0]))
    with pytest.raises(ValueError, match=words):
        low_rank_project(**(given | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p": normal(5, 8)}, r"p is .* shape \(5, 8\) .* contiguous matrix \[4, 8\]"),
        ({"factors": []}, "lists of 1, 1, 1, 0 values"),
    ],
)
def test_wrong_arguments_of_gradients(change: dict[str, Any], words: str) -> None:
    given = {"starts": [0], "sizes": [16], "ranks": [8], "factors": [1.0], "p": normal(4, 8)}
    arguments: dict[str, Any] = given | change
    with pytest.raises(ValueError, match=words):
        low_rank_gradient(quantize_tensor(normal(4, 32)), **arguments)
