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
FP8_X = torch.ones(4, 48).to(torch.float8_e4m3fn)
FLOAT64 = X.double()
COLUMN_MAJOR = torch.ones(48, 4).t()
THREE_DIMENSIONS = torch.ones(2, 4, 48)

MATRIX_FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize_layouts": quantize_tensor,
    "quantize_again": lambda x: quantize_again([x], torch.ones(()), transposed=True),
    "quantize_group": lambda x: quantize_group(x, 16),
    "norm_fwd": lambda x: norm_fwd(x, WEIGHT, None, 1e-6, centered=False, group_size=16),
    "norm_bwd": lambda dy: norm_bwd(dy, saved_norm(), WEIGHT),
    "activation_fwd": lambda a: activation_fwd(a, "gelu", group_size=16),
    "activation_bwd": lambda dh: activation_bwd(dh, saved_activation(), "gelu"),
}


def saved_norm() -> Any:
    return norm_fwd(X, WEIGHT, None, 1e-6, centered=False, group_size=16)[2]


def saved_activation() -> Any:
    return activation_fwd(X, "gelu", group_size=16)[1]


@pytest.mark.parametrize("name", MATRIX_FUNCTIONS)
def test_matrices_are_contiguous_and_of_high_precision(name: str):
    function = MATRIX_FUNCTIONS[name]
    function(X)
    with pytest.raises(ValueError, match=rf"{name}: \w+ has shape \(4, 48\) and strides \(1, 4\)"):
        function(COLUMN_MAJOR)
    with pytest.raises(ValueError, match=r"flatten the leading dimensions and call .contiguous"):
        function(THREE_DIMENSIONS)
    with pytest.raises(ValueError, match=r"is torch.float64; pass float32, bfloat16 or float16"):
        function(FLOAT64)
    with pytest.raises(ValueError, match=r"is torch.float8_e4m3fn; pass float32"):
        function(FP8_X)


@pytest.mark.parametrize("name", ["norm_bwd", "activation_bwd"])
def test_gradients_have_the_shape_of_the_output(name: str):
    with pytest.raises(ValueError, match=r"contiguous matrix \[4, 48\]"):
        MATRIX_FUNCTIONS[name](torch.ones(4, 32))


@pytest.mark.parametrize(
    ("channels", "size", "remedy"),
    [
        (48, 8, "use 16$"),
        (48, 32, "use 16$"),
        (128, 256, "use 16 or 32 or 64 or 128$"),
        (24, 16, "pad the last dimension$"),
        (0, 16, "pad the last dimension$"),
    ],
)
def test_a_bad_group_size_names_the_allowed_ones(channels: int, size: int, remedy: str):
    x = torch.ones(4, channels)
    for name, call in {
        "quantize_group": lambda: quantize_group(x, size),
        "norm_fwd": lambda: norm_fwd(
            x, torch.ones(channels), None, 1e-6, centered=True, group_size=size
        ),
        "activation_fwd": lambda: activation_fwd(x, "gelu", group_size=size),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: N = {channels}.* of {size};.*{remedy}"):
            call()


def test_the_gate_and_the_up_half_hold_whole_groups():
    with pytest.raises(ValueError, match="N = 24 channels in groups of 16"):
        activation_fwd(X, "silu_mul", group_size=16)
    with pytest.raises(ValueError, match=r"has 47 columns; pass \[gate \| up\]"):
        activation_fwd(torch.ones(4, 47), "silu_mul", group_size=16)


@pytest.mark.parametrize(
    "call",
    [
        lambda: activation_fwd(X, "relu", group_size=16),
        lambda: activation_bwd(X, saved_activation(), "relu"),
    ],
)
def test_an_unknown_activation_names_the_known_ones(call: Callable[[], Any]):
    with pytest.raises(ValueError, match="'relu' has no kernel; use one of silu_mul, gelu"):
        call()


@pytest.mark.parametrize("parts", [[], [X, torch.ones(4, 32)], [X, X.bfloat16()]])
def test_stacked_matrices_fit_together(parts: list[torch.Tensor]):
    with pytest.raises(ValueError, match=r"quantize_layouts: got parts of .*pass one or more"):
        quantize_layouts(parts, rows=True, transposed=True)


def test_stacked_matrices_that_are_transposed_have_whole_words():
    with pytest.raises(ValueError, match=r"parts of \[4, 4\] rows; to be transposed, .* of 16"):
        quantize_layouts([X, X], rows=True, transposed=True)
    assert quantize_layouts([X, X], rows=True, transposed=False)[0].q.shape == (8, 48)


@pytest.mark.parametrize("bad", [torch.ones(4, 32), X.bfloat16(), COLUMN_MAJOR])
def test_a_residual_is_like_what_it_is_added_to(bad: torch.Tensor):
    with pytest.raises(ValueError, match=r"norm_fwd: delta is .* must match x"):
        norm_fwd(X, WEIGHT, None, 1e-6, centered=False, group_size=16, delta=bad)
    with pytest.raises(ValueError, match=r"norm_bwd: grad_residual is .* must match grad_output"):
        norm_bwd(X, saved_norm(), WEIGHT, bad)


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match="'e3m4' is not known; use one of e4m3, e5m2"):
        get_format("e3m4")


@pytest.mark.parametrize("bad", [torch.ones(47), torch.ones(96)[::2], torch.ones(1, 48)])
def test_weights_and_biases_have_one_number_per_channel(bad: torch.Tensor):
    def forward(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return norm_fwd(X, weight, bias, 1e-6, centered=True, group_size=16)

    message = r"contiguous vector \[48\], one value per channel"
    for call in (
        lambda: forward(bad, None),
        lambda: forward(WEIGHT, bad),
        lambda: norm_recompute(saved_norm(), bad, None),
        lambda: norm_recompute(saved_norm(), WEIGHT, bad),
        lambda: norm_bwd(X, saved_norm(), bad),
        lambda: scaled_mm(codes(4, 16), codes(48, 16), torch.float32, bad),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"weight is torch.float64"):
        forward(WEIGHT.double(), None)


def codes(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> TensorScaled:
    return TensorScaled(torch.ones(rows, columns).to(dtype), torch.ones(()))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (codes(4, 32), codes(16, 48)),  # K differs
        (codes(4, 40), codes(16, 40)),  # K
        (codes(4, 32), codes(24, 32)),  # N
    ],
)
def test_gemm_dimensions(a: TensorScaled, b: TensorScaled):
    with pytest.raises(ValueError, match=r"K must be the same and K and N multiples of 16: pad"):
        scaled_mm(a, b, torch.float32)


def test_gemm_operands_and_result():
    with pytest.raises(
        ValueError, match=r"both operands are E5M2.*quantize activations and weights"
    ):
        scaled_mm(codes(4, 32, E5M2.dtype), codes(16, 32, E5M2.dtype), torch.float32)
    with pytest.raises(ValueError, match=r"the FP8 data of b is torch.float8_e4m3fn of shape"):
        scaled_mm(codes(4, 16), TensorScaled(codes(16, 32).q.t(), torch.ones(())), torch.float32)
    with pytest.raises(ValueError, match=r"the FP8 data of a is torch.float32"):
        scaled_mm(TensorScaled(X, torch.ones(())), codes(16, 48), torch.float32)
    with pytest.raises(ValueError, match=r"the result cannot be torch.float64; use one of"):
        scaled_mm(codes(4, 32), codes(16, 32), torch.float64)


@pytest.mark.parametrize("function", [transpose_quantized, dequantize_tensor])
def test_codes_are_a_contiguous_fp8_matrix(function: Callable[[TensorScaled], Any]):
    name = getattr(function, "__name__")  # noqa: B009 - a Callable need not have one
    for bad in (X, FP8_X.t(), FP8_X[0]):
        with pytest.raises(ValueError, match=rf"{name}: the FP8 data of x is .* contiguous matrix"):
            function(TensorScaled(bad, torch.ones(())))


@pytest.mark.parametrize(
    "exponents",
    [
        torch.ones(4, 4, dtype=torch.uint8),  # groups of 12
        torch.ones(3, 3, dtype=torch.uint8),
        torch.ones(4, 3, dtype=torch.int32),
        torch.ones(3, 4, dtype=torch.uint8).t(),
    ],
)
def test_exponents_fit_the_codes(exponents: torch.Tensor):
    with pytest.raises(ValueError, match=r"uint8 of one of the shapes \[\(4, 3\)\]"):
        dequantize_group(GroupScaled(FP8_X, exponents))


def step(p: torch.Tensor, g: torch.Tensor, m: Any = None, v: Any = None, number: int = 1) -> None:
    adamw_step(
        p, g, m or new_moment(p), v or new_moment(p), lr=0.1, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.0, step=number,
    )  # fmt: skip


def test_adamw_arguments():
    with pytest.raises(ValueError, match="step is 0; steps count from 1"):
        step(X.clone(), X, number=0)
    with pytest.raises(ValueError, match="both must be contiguous and of one shape"):
        step(X.clone(), torch.ones(48, 4))
    with pytest.raises(ValueError, match="both must be contiguous and of one shape"):
        step(X.clone(), COLUMN_MAJOR)
    with pytest.raises(ValueError, match=r"p is torch.float64"):
        step(FLOAT64.clone(), X)
    with pytest.raises(ValueError, match=r"g is torch.float64"):
        step(X.clone(), FLOAT64)


@pytest.mark.parametrize("name", ["m", "v"])
def test_adamw_moments_belong_to_the_parameter(name: str):
    q, amax, k = new_moment(X)
    wrong = [
        new_moment(torch.ones(4, 32)),
        (q, amax[:1], k),
        (q, amax, k.double()),
        (q.view(torch.uint8), amax, k),
        (q.t().contiguous().t(), amax, k),
    ]
    for moment in wrong:
        with pytest.raises(ValueError, match=rf"{name} is .* create it with new_moment\(p\)"):
            step(X.clone(), X, *((moment, None) if name == "m" else (None, moment)))
