"""What a caller gets wrong is refused with what was got, what is allowed and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coat_kernels import (
    E5M2,
    GroupScaled,
    TensorScaled,
    activation_bwd,
    activation_fwd,
    adamw_step,
    dequantize_group,
    dequantize_tensor,
    new_moment,
    norm_bwd,
    norm_fwd,
    norm_recompute,
    quantize_again,
    quantize_group,
    quantize_layouts,
    quantize_tensor,
    scaled_mm,
    transpose_quantized,
)
from coat_kernels.formats import get_format

X = torch.ones(4, 48)
WEIGHT = torch.ones(48)
COLUMN_MAJOR = torch.ones(48, 4).t()
Call = Callable[[], Any]


def norm(x: torch.Tensor, weight: torch.Tensor = WEIGHT, **options: Any) -> Any:
    return norm_fwd(x, weight, None, 1e-6, **{"centered": False, "group_size": 16, **options})


def activation(a: torch.Tensor, kind: str = "gelu", group_size: int = 16) -> Any:
    return activation_fwd(a, kind, group_size=group_size)


def codes(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> TensorScaled:
    return TensorScaled(torch.ones(rows, columns).to(dtype), torch.ones(()))


MATRIX_FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize_layouts": quantize_tensor,
    "quantize_again": lambda x: quantize_again([x], torch.ones(()), transposed=True),
    "quantize_group": lambda x: quantize_group(x, 16),
    "norm_fwd": norm,
    "norm_bwd": lambda dy: norm_bwd(dy, norm(X)[2], WEIGHT),
    "activation_fwd": activation,
    "activation_bwd": lambda dh: activation_bwd(dh, activation(X)[1], "gelu"),
}


@pytest.mark.parametrize("name", MATRIX_FUNCTIONS)
def test_matrices_are_contiguous_and_of_high_precision(name: str):
    function = MATRIX_FUNCTIONS[name]
    function(X)
    with pytest.raises(ValueError, match=rf"{name}: \w+ has shape \(4, 48\) and strides \(1, 4\)"):
        function(COLUMN_MAJOR)
    with pytest.raises(ValueError, match=r"is torch.float64; pass float32, bfloat16 or float16"):
        function(X.double())


E4M3_48 = codes(4, 48)
VECTOR = r"contiguous vector \[48\], one value per channel"
REFUSED: dict[str, tuple[Call, str]] = {
    "norm_bwd": (lambda: MATRIX_FUNCTIONS["norm_bwd"](X[:, :32].clone()), r"matrix \[4, 48\]"),
    "quantize_group": (lambda: quantize_group(X, 32), r"N = 48.* of 32;.*use 16$"),
    "norm_fwd": (lambda: norm(X[:, :24].clone(), WEIGHT[:24]), "pad the last dimension$"),
    "norm_fwd-delta": (lambda: norm(X, delta=X.bfloat16()), "delta is .* must match x"),
    "norm_fwd-weight": (lambda: norm(X, torch.ones(47)), VECTOR),
    "norm_recompute": (lambda: norm_recompute(norm(X)[2], torch.ones(47), None), VECTOR),
    "activation_fwd": (lambda: activation(X, "silu_mul"), "N = 24 channels in groups of 16"),
    "activation_fwd-kind": (lambda: activation(X, "relu"), "use one of silu_mul, gelu"),
    "activation_fwd-odd": (lambda: activation(torch.ones(4, 47), "silu_mul"), "has 47 columns"),
    "activation_bwd": (
        lambda: activation_bwd(X, activation(X)[1], "relu"),
        "'relu' has no kernel; use one of silu_mul, gelu",
    ),
    "quantize_layouts": (
        lambda: quantize_layouts([X, X.bfloat16()], rows=True, transposed=True),
        "got parts of .*pass one or more",
    ),
    "quantize_layouts-words": (
        lambda: quantize_layouts([X, X], rows=True, transposed=True),
        r"parts of \[4, 4\] rows; to be transposed, .* of 16",
    ),
    "format": (lambda: get_format("e3m4"), "'e3m4' is not known; use one of e4m3, e5m2"),
    "scaled_mm-K": (
        lambda: scaled_mm(codes(4, 40), codes(16, 40), torch.float32),
        "K must be the same and K and N multiples of 16: pad",
    ),
    "scaled_mm-bias": (
        lambda: scaled_mm(codes(4, 16), codes(48, 16), torch.float32, torch.ones(47)),
        VECTOR,
    ),
    "scaled_mm-e5m2": (
        lambda: scaled_mm(codes(4, 32, E5M2.dtype), codes(16, 32, E5M2.dtype), torch.float32),
        "both operands are E5M2.*quantize activations and weights",
    ),
    "scaled_mm-dtype": (
        lambda: scaled_mm(codes(4, 32), codes(16, 32), torch.float64),
        "the result cannot be torch.float64; use one of",
    ),
    "transpose_quantized": (
        lambda: transpose_quantized(TensorScaled(X, torch.ones(()))),
        "the FP8 data of x is torch.float32 .* contiguous matrix",
    ),
    "dequantize_tensor": (
        lambda: dequantize_tensor(TensorScaled(E4M3_48.q.t(), torch.ones(()))),
        "the FP8 data of x is .* contiguous matrix",
    ),
    "dequantize_group": (
        lambda: dequantize_group(GroupScaled(E4M3_48.q, torch.ones(4, 4, dtype=torch.uint8))),
        r"uint8 of one of the shapes \[\(4, 3\)\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


def step(p: torch.Tensor, g: torch.Tensor, m: Any = None, v: Any = None, number: int = 1) -> None:
    adamw_step(
        p, g, m or new_moment(p), v or new_moment(p), lr=0.1, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.0, step=number,
    )  # fmt: skip


def test_adamw_arguments():
    with pytest.raises(ValueError, match="step is 0; steps count from 1"):
        step(X.clone(), X, number=0)
    with pytest.raises(ValueError, match="both must be contiguous and of one shape"):
        step(X.clone(), COLUMN_MAJOR)
    with pytest.raises(ValueError, match=r"g is torch.float64"):
        step(X.clone(), X.double())
    q, amax, k = new_moment(X)
    for moment in (new_moment(torch.ones(4, 32)), (q, amax[:1], k), (q, amax, k.double())):
        with pytest.raises(ValueError, match=r"v is .* create it with new_moment\(p\)"):
            step(X.clone(), X, None, moment)
