"""What ``coat-vlm bench kernels`` measures: each op as a training step calls it, and its bytes.

A case counts what an op has to move: every argument once (twice for gradients in FP8, which take
two passes) and every result once. Partial sums, and what a cache serves again, are not counted. In
the formulas ``t`` are tokens (``tp``: padded for a GEMM over tokens), ``h`` hidden channels, ``f``
those of the MLP, ``v`` tokens of the vocabulary. Matrices are BF16: 2 bytes per element; a
group-scaled copy has 1 + 1 / G.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coat_bench.shapes import LayerShape
from coat_kernels import GROUP, OPS, encode_moment
from coat_kernels.formats import padded
from coat_vlm.config import Fp8Config

GROUP_SIZE = Fp8Config().group_size

VOCABULARIES = {"llama": 32000, "qwen2": 152064}
"""Of Llama-2 and of Qwen2.5-7B."""

LOSS_TOKENS = 2048
"""Most tokens whose logits are there at once in training, of Qwen2.5-7B."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One way in which a training step calls an op."""

    op: str
    """Its name in ``OPS``."""
    variant: str
    """What it is called on, and for which layouts."""
    bytes: int
    """Read and written."""
    arguments: Callable[["Draw"], Arguments]
    """Makes the op's arguments."""


class Draw:
    """Seeded tensors, made on their device.

    Args:
        device: where the tensors are made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Gaussian [rows, columns] with channels of different size, as activations have."""
        x, size = self._normal(rows, columns), self._normal(columns)
        return x.mul_(size.exp2_()).to(dtype)

    def vector(self, size: int) -> Tensor:
        """BF16 [size]: one number per channel."""
        return self._normal(size).bfloat16()

    def tokens(self, count: int, vocabulary: int) -> Tensor:
        """Int64 [count], each below ``vocabulary``."""
        return torch.randint(vocabulary, (count,), generator=self._generator, device=self._device)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self._device)


def cases(shape: LayerShape) -> list[Case]:
    """All cases of a block, in the order in which the results are shown."""
    decoder = shape.family != "siglip"
    return [
        *_quantize_cases(shape),
        *_norm_cases(shape),
        *_activation_cases(shape),
        *((*_rope_cases(shape), _loss_case(shape)) if decoder else ()),
        _adamw_case(shape),
    ]


def sample_of(shape: LayerShape) -> LayerShape:
    """A smaller block for comparisons with the references: 200 tokens, at most 1040 MLP channels.

    Rows are as wide as in the block. Neither number is a multiple of a tile, nor do 200 tokens need
    no padding.
    """
    return replace(shape, batch=2, length=min(shape.length, 100), ffn=min(shape.ffn, 1040))


def _copy(elements: int) -> int:
    """Bytes of a group-scaled copy: codes and exponents."""
    return elements + elements // GROUP_SIZE


def _qkv(shape: LayerShape) -> tuple[int, int, int]:
    """Channels of q, k and v."""
    head = shape.hidden // shape.heads
    return shape.hidden, shape.key_value_heads * head, shape.key_value_heads * head


def _quantize_cases(shape: LayerShape) -> Iterator[Case]:
    t, tp, h = shape.tokens, padded(shape.tokens), shape.hidden
    encoder = shape.family == "siglip"
    into_mlp = [shape.ffn] * (1 if shape.family == "siglip" else 2)
    wp = padded(sum(into_mlp))  # the rows of the stacked weights, padded
    elements = sum(into_mlp) * h
    name = "fc1" if shape.family == "siglip" else "gate, up"

    def x(draw: Draw) -> list[Tensor]:
        return [draw.matrix(t, h)]

    def codes(draw: Draw) -> tuple[Tensor, Tensor]:
        scale = OPS["tensor_scale"].reference(x(draw), "e4m3")
        made = OPS["quantize_tensor"].reference(x(draw), scale, "e4m3", True, False)
        return made[0], scale

    def weights(draw: Draw) -> list[Tensor]:
        return [draw.matrix(rows, h).mul_(0.02) for rows in into_mlp]

    def scale(
        variant: str, moved: int, parts: Callable[[Draw], list[Tensor]], fmt: str = "e4m3"
    ) -> Case:
        return Case("tensor_scale", variant, moved, lambda draw: (parts(draw), fmt))

    def quantize(
        variant: str,
        moved: int,
        parts: Callable[[Draw], list[Tensor]],
        layouts: tuple[bool, bool],
        fmt: str = "e4m3",
    ) -> Case:
        def arguments(draw: Draw) -> Arguments:
            made = parts(draw)
            return (made, OPS["tensor_scale"].reference(made, fmt), fmt, *layouts)

        return Case("quantize_tensor", variant, moved, arguments)

    rows, transposed, both = (True, False), (False, True), (True, True)
    # Read 2 bytes per element, write the scale.
    yield scale("attention output", 2 * t * h + 4, x)
    yield scale(f"weights of {name}", 2 * elements + 4, weights)
    # Read 2 bytes per element and the scale, write 1 per element and layout.
    yield quantize("attention output, rows", 3 * t * h + 4, x, rows)
    yield quantize(f"weights of {name}, rows", 3 * elements + 4, weights, rows)
    yield quantize(f"weights of {name}, transposed", 2 * elements + wp * h + 4, weights, transposed)
    yield quantize(f"weights of {name}, both", 3 * elements + wp * h + 4, weights, both)
    # Read 2 bytes per element twice; write 1 per element and layout, the scale and, in FP32, sums.
    yield Case(
        "quantize_gradient",
        "of the block's output",
        (5 * t + tp) * h + 4 + 4 * h * encoder,
        lambda draw: (x(draw), "e5m2", True, True, encoder),
    )
    if encoder:
        yield Case(
            "quantize_gradient",
            "of q, k, v, side by side",
            3 * (5 * t + tp) * h + 4 + 4 * 3 * h,
            lambda draw: ([*x(draw), *x(draw), *x(draw)], "e5m2", True, True, True),
        )
    # Read and write 1 byte per element; read 1 and write 2.
    yield Case("transpose_codes", "attention output", (t + tp) * h, lambda draw: (codes(draw)[0],))
    yield Case(
        "dequantize_tensor",
        "attention output, to BF16",
        3 * t * h + 4,
        lambda draw: (*codes(draw), torch.bfloat16),
    )
    # Read 2 bytes per element, write 1 and a scale per row; read these and write 2.
    yield Case(
        "quantize_rows",
        "attention output, rows",
        3 * t * h + 4 * t,
        lambda draw: (*x(draw), "e4m3", False),
    )
    yield Case(
        "quantize_rows",
        "attention output, transposed",
        (2 * t + tp) * h + 4 * t,
        lambda draw: (*x(draw), "e4m3", True),
    )
    yield Case(
        "dequantize_rows",
        "attention output, to BF16",
        3 * t * h + 4 * t,
        lambda draw: (
            *OPS["quantize_rows"].reference(*x(draw), "e4m3", False),
            torch.bfloat16,
        ),
    )
    # Read 2 bytes per element, write the copy; and back.
    yield Case(
        "quantize_group",
        "residual stream",
        2 * t * h + _copy(t * h),
        lambda draw: (draw.matrix(t, h), GROUP_SIZE, "e4m3"),
    )
    yield Case(
        "dequantize_group",
        "residual stream, to BF16",
        _copy(t * h) + 2 * t * h,
        lambda draw: (
            *OPS["quantize_group"].reference(draw.matrix(t, h), GROUP_SIZE, "e4m3"),
            torch.bfloat16,
        ),
    )


def _norm_cases(shape: LayerShape) -> Iterator[Case]:
    t, tp, h = shape.tokens, padded(shape.tokens), shape.hidden
    centered = shape.family == "siglip"
    vectors = 2 * h * (1 + centered)  # weight, and LayerNorm's bias
    statistics = 4 * t * (1 + centered)  # rstd, and LayerNorm's mean
    stats = OPS["norm_stats"].reference

    def of_x(draw: Draw, has_delta: bool = False) -> Arguments:
        delta = draw.matrix(t, h) if has_delta else None
        bias = draw.vector(h) if centered else None
        return (draw.matrix(t, h), delta, draw.vector(h), bias, 1e-6, centered, GROUP_SIZE, "e4m3")

    def from_x(draw: Draw) -> Arguments:
        args = of_x(draw)
        _, _, _, rstd, mean, scale = stats(*args)
        return (args[0], None, args[2], args[3], rstd, mean, scale, "e4m3", True, False)

    def from_copy(draw: Draw) -> Arguments:
        args = of_x(draw)
        _, q, exponents, rstd, mean, scale = stats(*args)
        return (q, exponents, args[2], args[3], rstd, mean, scale, "e4m3", False, True)

    def backward(draw: Draw) -> Arguments:
        q, exponents, weight, _, rstd, mean, *_ = from_copy(draw)
        return (draw.matrix(t, h), q, exponents, weight, rstd, mean, draw.matrix(t, h))

    # Read x and the vectors; write x's copy, the statistics and the scale.
    once = 2 * t * h + vectors + _copy(t * h) + statistics + 4
    yield Case("norm_stats", "of x", once, of_x)
    # The same, and delta is read, the sum written.
    yield Case("norm_stats", "of x + delta", once + 4 * t * h, lambda draw: of_x(draw, True))
    # Read x (or its copy), vectors, statistics and scale; write the codes.
    small = vectors + statistics + 4
    yield Case("norm_apply", "rows, from x", 2 * t * h + small + t * h, from_x)
    yield Case("norm_apply", "transposed, from the copy", _copy(t * h) + small + tp * h, from_copy)
    # Read dy, the copy, the weight, the statistics and the residual's gradient; write dx and, in
    # FP32, the gradients of weight and bias.
    moved = 2 * t * h + _copy(t * h) + 2 * h + statistics + 2 * t * h
    moved += 2 * t * h + 4 * h * (1 + centered)
    yield Case("norm_bwd", "with a residual", moved, backward)


def _activation_cases(shape: LayerShape) -> Iterator[Case]:
    t, tp, f = shape.tokens, padded(shape.tokens), shape.ffn
    decoder = shape.family != "siglip"
    kind = "silu_mul" if decoder else "gelu_tanh"
    w = 2 * f if decoder else f
    bias = not decoder  # of the layer before: SigLIP's has one

    def of_a(draw: Draw) -> Arguments:
        return (draw.matrix(t, w), kind, GROUP_SIZE, "e4m3")

    def from_a(draw: Draw) -> Arguments:
        args = of_a(draw)
        scale = OPS["activation_stats"].reference(*args)[2]
        return (args[0], None, kind, scale, "e4m3", True, False)

    def from_copy(draw: Draw) -> Arguments:
        q, exponents, scale = OPS["activation_stats"].reference(*of_a(draw))
        return (q, exponents, kind, scale, "e4m3", False, True)

    def before(draw: Draw) -> Arguments:
        q, exponents, scale = OPS["activation_stats"].reference(*of_a(draw))
        return (draw.matrix(t, f), q, exponents, kind, scale, "e4m3", "e5m2")

    def backward(draw: Draw) -> Arguments:
        given = before(draw)
        scale = OPS["activation_bwd_stats"].reference(*given)[0]
        return (*given[:4], "e5m2", True, True, bias, scale)

    # Read a; write its copy and the scale.
    yield Case("activation_stats", kind, 2 * t * w + _copy(t * w) + 4, of_a)
    # Read a (or its copy) and the scale; write the codes.
    yield Case("activation_apply", f"{kind}, rows, from a", 2 * t * w + 4 + t * f, from_a)
    yield Case(
        "activation_apply",
        f"{kind}, transposed, from the copy",
        _copy(t * w) + 4 + tp * f,
        from_copy,
    )
    # Read dh, the copy and h's scale; write the gradient's and h's codes, transposed.
    read = 2 * t * f + _copy(t * w) + 4
    yield Case("activation_bwd_stats", kind, read + 4 + tp * f, before)
    # Read dh, the copy and the scale; write both layouts and, in FP32, the bias's gradient.
    yield Case("activation_bwd", f"{kind}, both", read + (t + tp) * w + 4 * w * bias, backward)


def _rope_cases(shape: LayerShape) -> Iterator[Case]:
    t, length = shape.tokens, shape.length
    widths = _qkv(shape)
    head = shape.hidden // shape.heads
    # Read q, k, v of all tokens, and cos and sin of one sequence; write q, k, v.
    moved = 2 * t * sum(widths) + 2 * (2 * length * head) + 2 * t * sum(widths)

    def embedding(draw: Draw) -> tuple[Tensor, Tensor]:
        angle = draw.matrix(length, head, torch.float32)
        return angle.cos().bfloat16(), angle.sin().bfloat16()

    yield Case(
        "rope",
        "q, k, v",
        moved,
        lambda draw: (
            draw.matrix(t, sum(widths)),
            *embedding(draw),
            shape.heads,
            shape.key_value_heads,
        ),
    )
    heads = shape.heads + 2 * shape.key_value_heads
    # Also written: a byte per element, and one per head and token.
    yield Case(
        "rope_quantize",
        "q, k, v",
        moved + t * sum(widths) + t * heads,
        lambda draw: (
            draw.matrix(t, sum(widths)),
            *embedding(draw),
            shape.heads,
            shape.key_value_heads,
        ),
    )
    # Read dq, dk, dv, cos and sin twice; write both layouts, the scale and, in FP32, sums.
    n, bias = sum(widths), shape.family == "qwen2"
    moved = (5 * t + padded(t)) * n + 2 * 2 * (2 * length * head) + 4 + 4 * n * bias
    yield Case(
        "rope_gradient",
        "q, k, v, both",
        moved,
        lambda draw: (
            *(draw.matrix(t, width) for width in widths),
            *embedding(draw),
            *("e5m2", True, True, bias),
        ),
    )


def _loss_case(shape: LayerShape) -> Case:
    t, v = min(shape.tokens, LOSS_TOKENS), VOCABULARIES[shape.family]

    def arguments(draw: Draw) -> Arguments:
        return (draw.matrix(t, v), draw.tokens(t, v), draw.matrix(1, 1, torch.float32).abs()[0, 0])

    # Read the logits, a second time from the cache at best, targets and divisor; write the
    # gradient, and a loss per token.
    return Case("cross_entropy_", "losses and gradient", 4 * t * v + (8 + 4) * t + 4, arguments)


def _adamw_case(shape: LayerShape) -> Case:
    n = shape.ffn * shape.hidden
    groups = -(-n // GROUP)
    metadata = 2 * (4 + 2) * groups  # amax in FP32 and k in FP16 of two moments

    def arguments(draw: Draw) -> Arguments:
        p = draw.matrix(shape.ffn, shape.hidden, torch.float32)
        g = draw.matrix(shape.ffn, shape.hidden, torch.float32)
        m, v = encode_moment(0.1 * g), encode_moment(0.001 * g.square(), second=True)
        return (p, g, *m, *v, 1e-3, 0.9, 0.999, 1e-8, 0.1, 2, "dre_e4m3", None, None, None, 0)

    # Read p, g and both moments; write p and both moments. p and g are FP32, as under DeepSpeed,
    # whose flat partitions may be of any size; here it is that of one matrix of the MLP.
    moved = (4 + 4 + 2) * n + metadata + (4 + 2) * n + metadata
    return Case("adamw_step", "FP32 weights", moved, arguments)
