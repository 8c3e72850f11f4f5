"""The GEMM with a scale per group, in Triton's interpreter or on a GPU."""

import pytest
import torch

import harness
import lab_block_scales as bench


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [64, 128])
def test_the_product_is_that_of_dequantized_operands(dtype: torch.dtype, group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Rows and columns that tiles do not divide, in more than one band of tiles.
    sizes = (1200, 136)
    matrices = [torch.randn(n, 256, generator=generator).to(device) for n in sizes]
    x, w = (bench.quantize_groups(matrix, group, dtype) for matrix in matrices)
    exact = [
        (q.double().unflatten(1, (-1, group)) * s.t()[..., None]).flatten(1) for q, s in (x, w)
    ]
    # One rounding to BF16: half a step is 2^-9 of a value, about 0.6 of it in the mean.
    y = bench.multiply(x, w, group, (128, 128, 4, 3))
    assert harness.relative_rms(y, exact[0] @ exact[1].t()) < 2**-9
    largest = 127 if dtype == torch.int8 else 448
    assert x[0].float().abs().max() == largest
    error = harness.relative_rms(exact[0], matrices[0])
    assert error < (0.01 if dtype == torch.int8 else 0.04)
