"""Properties of quantization, and of products of codes, for any input."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from op_check import assert_same_bits
from torch import Tensor

from coat_kernels import (
    E4M3,
    E5M2,
    GROUP_SIZES,
    OPS,
    Format,
    dequantize_group,
    quantize_group,
)
from op_cases import run_op

hypothesis = pytest.importorskip("hypothesis")
numpy_strategies = pytest.importorskip("hypothesis.extra.numpy")
st = hypothesis.strategies
given = hypothesis.given


Run = Callable[[str, Sequence[Any]], list[Tensor]]
formats = st.sampled_from([E4M3, E5M2])
group_sizes = st.sampled_from(GROUP_SIZES)


def matrices(elements: Any) -> Any:
    """FP32 [rows, 128] of few distinct elements, repeated: enough for everything here."""
    shapes = st.tuples(st.integers(1, 5), st.just(128))
    arrays = numpy_strategies.arrays(np.float32, shapes, elements=elements, fill=elements)
    return arrays.map(torch.from_numpy)


# Beyond 1.9 * 2^127, rounding up to the next FP8 value leaves FP32: infinity, and rightly so.
LARGEST = 1.75 * 2.0**127


any_value = matrices(
    st.floats(-LARGEST, LARGEST, width=32)
    | st.sampled_from([float("nan"), float("inf"), -float("inf")])
)


@given(any_value, group_sizes, formats)
def test_groups_are_zero_finite_or_nan_as_a_whole(x: Tensor, size: int, fmt: Format):
    groups = x.view(len(x), -1, size)
    decoded = dequantize_group(quantize_group(x, size, fmt)).view_as(groups)
    good = groups.isfinite().all(-1)
    assert torch.equal(decoded.isnan().all(-1), ~good)
    assert decoded[good].isfinite().all()
    assert not decoded[~groups.any(-1)].any()


@given(any_value, group_sizes, formats)
def test_kernels_agree_with_the_references_bit_for_bit(run: Run, x: Tensor, size: int, fmt: Format):
    scale = OPS["tensor_scale"].reference([x], fmt.name)
    for op, args in (
        ("tensor_scale", ([x], fmt.name)),
        ("quantize_tensor", ([x], scale, fmt.name, True, True)),
        ("quantize_group", (x, size, fmt.name)),
    ):
        expected = run_op(op, OPS[op].reference, args)
        for actual, wanted in zip(run(op, args), expected, strict=True):
            assert_same_bits(op, actual, wanted)
