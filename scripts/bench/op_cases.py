"""Cases of ``ops.py``: each op with the arguments of a training step.

``t`` is the number of tokens, ``h`` of hidden channels, ``f`` of MLP channels. Matrices are BF16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coat_kernels import E5M2, OPS, encode_moment
from coat_kernels.formats import pad_length
from coat_vlm.config import Fp8Config
from layer_shapes import LayerShape

GROUP_SIZE = Fp8Config().group_size
VOCABULARIES = {"llama": 32000, "qwen2": 152064}
LOSS_TOKENS = 2048
"""Largest chunk of tokens whose logits exist at the same time in training, for Qwen2.5-7B."""
LORA_RANK = 64

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op in a training step."""

    op: str
    """Its name in ``OPS``."""
    variant: str
    """Its input, and the layouts of its results."""
    arguments: Callable[["Draw"], Arguments]
    """Makes the op's arguments."""


class Draw:
    """Makes seeded random tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Gaussian [rows, columns] with channels of different magnitude, like activations."""
        x, size = self._normal(rows, columns), self._normal(columns)
        return x.mul_(size.exp2_()).to(dtype)

    def vector(self, size: int) -> Tensor:
        """Gaussian BF16 [size], one number per channel."""
        return self._normal(size).bfloat16()

    def tokens(self, count: int, vocabulary: int) -> Tensor:
        """Int64 [count], each below ``vocabulary``."""
        return torch.randint(vocabulary, (count,), generator=self._generator, device=self._device)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self._device)


def build_cases(shape: LayerShape) -> list[Case]:
    """Build all cases of a block, in the order of the results."""

    def loss(draw: Draw) -> Arguments:
        t, v = min(shape.tokens, LOSS_TOKENS), VOCABULARIES[shape.family]
        return (draw.matrix(t, v), draw.tokens(t, v), draw.matrix(1, 1, torch.float32).abs()[0, 0])

    def gradient(draw: Draw) -> Arguments:
        logits, targets, _ = loss(draw)
        losses = draw.matrix(len(targets), 1, torch.float32)[:, 0].square()
        shape = (logits.shape[1], pad_length(len(logits)))
        qt = torch.zeros(shape, dtype=E5M2.dtype, device=logits.device)
        return (logits, targets, losses, qt, 0, True)

    def adamw(draw: Draw) -> Arguments:
        # FP32, as under DeepSpeed, with the size of one matrix of the MLP.
        p, g = (draw.matrix(shape.ffn, shape.hidden, torch.float32) for _ in range(2))
        m, v = encode_moment(0.1 * g), encode_moment(0.001 * g.square())
        return (p, g, *m, *v, 1e-3, 0.9, 0.999, 1e-8, 0.1, 2, None, None, None, 0)

    def gradients(draw: Draw) -> Arguments:
        total, term = (draw.matrix(shape.ffn, shape.hidden) for _ in range(2))
        return (total, term, draw.tokens(1, 2**32), 0)

    found = [*_build_quantize_cases(shape), *_build_norm_cases(shape)]
    found += _build_activation_cases(shape)
    if shape.family != "siglip":
        found += [*_build_rope_cases(shape), Case("cross_entropy_", "losses and gradient", loss)]
        found += [Case("logit_gradient", "both", gradient), *_build_adapter_cases(shape)]
    total = Case("add_stochastic", "gradients of weights", gradients)
    return [*found, Case("adamw_step", "FP32 weights", adamw), total]


def shrink_shape(shape: LayerShape) -> LayerShape:
    """Return a block of 200 tokens and at most 1040 MLP channels, no multiples of a tile."""
    return replace(shape, batch=2, length=min(shape.length, 100), ffn=min(shape.ffn, 1040))


def map_tensors(change: Callable[[Tensor], Tensor], args: Sequence[Any]) -> list[Any]:
    """Apply ``change`` to all tensors among an op's arguments, also inside lists."""

    def convert(arg: Any) -> Any:
        if isinstance(arg, list):
            return [convert(item) for item in arg]
        return change(arg) if isinstance(arg, Tensor) else arg

    return [convert(arg) for arg in args]


def run_op(op: str, body: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """Run one implementation of an op; returns its results and the tensors that it changed.

    It runs on copies of the arguments, so in-place ops can be called again.
    """
    args = map_tensors(Tensor.clone, args)
    result = body(*args)
    if op == "adamw_step":
        p, _, *moments = args[:8]
        return [p, *moments, *([args[14]] if args[14] is not None else [])]
    if op == "add_stochastic":
        return [args[0]]
    if op == "cross_entropy_":
        return [result, args[0]]
    if op == "logit_gradient":
        return [result, args[3]]
    return [result] if isinstance(result, Tensor) else list(result)


def _build_quantize_cases(shape: LayerShape) -> list[Case]:
    t, h = shape.tokens, shape.hidden
    encoder = shape.family == "siglip"
    into_mlp = [shape.ffn] * (1 if encoder else 2)
    name = "weights of fc1" if encoder else "weights of gate, up"
    output = "attention output"

    def x(draw: Draw) -> list[Tensor]:
        return [draw.matrix(t, h)]

    def weights(draw: Draw) -> list[Tensor]:
        return [draw.matrix(rows, h).mul_(0.02) for rows in into_mlp]

    def quantized(draw: Draw) -> tuple[Tensor, Tensor]:
        scale = OPS["tensor_scale"].reference(x(draw), "e4m3")
        return OPS["quantize_tensor"].reference(x(draw), scale, "e4m3", True, False)[0], scale

    def quantize(
        variant: str, parts: Callable[[Draw], list[Tensor]], rows: bool, transposed: bool
    ) -> Case:
        def arguments(draw: Draw) -> Arguments:
            made = parts(draw)
            scale = OPS["tensor_scale"].reference(made, "e4m3")
            return made, scale, "e4m3", rows, transposed

        return Case("quantize_tensor", variant, arguments)

    def three(draw: Draw) -> Arguments:
        return ([*x(draw), *x(draw), *x(draw)], "e5m2", True, True, True)

    by_group = OPS["quantize_group"].reference
    # fmt: off
    return [
        Case("tensor_scale", output, lambda draw: (x(draw), "e4m3")),
        Case("tensor_scale", name, lambda draw: (weights(draw), "e4m3")),
        Case("dither_scale", name,
             lambda draw: (draw.vector(1)[0].abs().float(), weights(draw)[0])),
        quantize(f"{output}, rows", x, True, False),
        quantize(f"{name}, rows", weights, True, False),
        quantize(f"{name}, transposed", weights, False, True),
        quantize(f"{name}, both", weights, True, True),
        Case("quantize_gradient", "of the block's output",
             lambda draw: (x(draw), "e5m2", True, True, encoder)),
        *([Case("quantize_gradient", "of q, k, v, side by side", three)] if encoder else []),
        Case("transpose_quantized", output, lambda draw: (quantized(draw)[0],)),
        Case("dequantize_tensor", f"{output}, to BF16",
             lambda draw: (*quantized(draw), torch.bfloat16)),
        Case("quantize_group", "residual stream",
             lambda draw: (draw.matrix(t, h), GROUP_SIZE, "e4m3")),
        Case("dequantize_group", "residual stream, to BF16",
             lambda draw: (*by_group(draw.matrix(t, h), GROUP_SIZE, "e4m3"), torch.bfloat16)),
    ]
    # fmt: on


def _build_norm_cases(shape: LayerShape) -> list[Case]:
    t, h = shape.tokens, shape.hidden
    centered = shape.family == "siglip"

    def of_x(draw: Draw, has_delta: bool = False) -> Arguments:
        delta = draw.matrix(t, h) if has_delta else None
        bias = draw.vector(h) if centered else None
        return (draw.matrix(t, h), delta, draw.vector(h), bias, 1e-6, centered, GROUP_SIZE, "e4m3")

    def from_saved(draw: Draw) -> Arguments:
        args = of_x(draw)
        _, q, exponents, rstd, mean, _, scale = OPS["norm_fwd"].reference(*args)
        return (q, exponents, args[2], args[3], rstd, mean, scale, "e4m3")

    def backward(draw: Draw) -> Arguments:
        q, exponents, weight, _, rstd, mean, *_ = from_saved(draw)
        return (draw.matrix(t, h), q, exponents, weight, rstd, mean, draw.matrix(t, h), True)

    return [
        Case("norm_fwd", "of x", of_x),
        Case("norm_fwd", "of x + delta", lambda draw: of_x(draw, True)),
        Case("norm_recompute", "from the copy", from_saved),
        Case("norm_bwd", "with a residual", backward),
    ]


def _build_activation_cases(shape: LayerShape) -> list[Case]:
    t, f = shape.tokens, shape.ffn
    decoder = shape.family != "siglip"
    kind = "silu_mul" if decoder else "gelu_tanh"
    width = 2 * f if decoder else f
    bias = not decoder  # of the preceding linear layer: SigLIP's has one

    def of_a(draw: Draw) -> Arguments:
        return (draw.matrix(t, width), kind, GROUP_SIZE, "e4m3")

    def from_a(draw: Draw) -> Arguments:
        args = of_a(draw)
        scale = OPS["activation_stats"].reference(*args)[2]
        return (args[0], kind, scale, "e4m3")

    def before(draw: Draw) -> Arguments:
        q, exponents, scale = OPS["activation_stats"].reference(*of_a(draw))
        return (draw.matrix(t, f), q, exponents, kind, scale, "e4m3", "e5m2")

    def backward(draw: Draw) -> Arguments:
        given = before(draw)
        scale = OPS["activation_bwd_stats"].reference(*given)[0]
        return (*given[:4], "e5m2", True, True, bias, scale)

    def of_experts(draw: Draw) -> Arguments:
        saved = OPS["quantize_group"].reference(draw.matrix(t, 1536), GROUP_SIZE, "e4m3")
        weights = draw.matrix(t, 1, torch.float32)[:, 0]
        return (draw.matrix(t, 768), *saved, weights, "silu_mul", True)

    return [
        Case("activation_once", kind, of_a),
        Case("activation_stats", kind, of_a),
        Case("activation_apply", f"{kind}, rows, from a", from_a),
        Case("activation_bwd_stats", kind, before),
        Case("activation_bwd", f"{kind}, both", backward),
        Case("activation_bwd_once", kind, before),
        Case("expert_gradient", "silu_mul, quantized", of_experts),
    ]


def _build_adapter_cases(shape: LayerShape) -> list[Case]:
    t, f, r = shape.tokens, shape.ffn, LORA_RANK

    def down(draw: Draw) -> Arguments:
        x = draw.matrix(t, f)
        scale = OPS["tensor_scale"].reference([x], "e4m3")
        q, _ = OPS["quantize_tensor"].reference([x], scale, "e4m3", True, False)
        return (q, scale, [draw.matrix(r, f)], [0], [1.0], True)

    def gate_up_forward(draw: Draw) -> Arguments:
        a, b = draw.matrix(t, shape.hidden), draw.matrix(2 * f, shape.hidden)
        p, u = draw.matrix(t, 2 * r), [draw.matrix(f, r), draw.matrix(f, r)]
        scales = [OPS["tensor_scale"].reference(m, "e4m3") for m in ([a], [b], [p], u)]
        of_a, of_b = (
            OPS["quantize_tensor"].reference([m], scale, "e4m3", True, False)[0]
            for m, scale in zip((a, b), scales, strict=False)
        )
        given = (of_a, scales[0], p, scales[2], of_b, scales[1])
        return (*given, u, scales[3], [0, f], [1.0, 1.0], False)

    def gradient(draw: Draw) -> Arguments:
        layout = ("e5m2", True, False, False)
        q, _, scale, _ = OPS["quantize_gradient"].reference([draw.matrix(t, 2 * f)], *layout)
        return q, scale

    def gate_up(draw: Draw) -> Arguments:
        b = [draw.matrix(f, r), draw.matrix(f, r)]
        return (*gradient(draw), b, [0, f], [1.0, 1.0], False)

    def of_gate_up(draw: Draw) -> Arguments:
        return (*gradient(draw), draw.matrix(t, 2 * r), [0, f], [f, f], [r, r], [1.0, 1.0], False)

    return [
        Case("low_rank_project", "A of down", down),
        Case("low_rank_project", "B of gate, up", gate_up),
        Case("low_rank_gradient", "B of gate, up", of_gate_up),
        Case("append_low_rank", "B of gate, up", gate_up_forward),
    ]


def _build_rope_cases(shape: LayerShape) -> list[Case]:
    t, length = shape.tokens, shape.length
    head = shape.hidden // shape.heads
    heads = (shape.heads, shape.key_value_heads)
    widths = [head * count for count in (shape.heads, *[shape.key_value_heads] * 2)]  # q, k, v

    def embedding(draw: Draw) -> tuple[Tensor, Tensor]:
        """Cosine and sine of one sequence."""
        angle = draw.matrix(length, head, torch.float32)
        return angle.cos().bfloat16(), angle.sin().bfloat16()

    def forward(draw: Draw) -> Arguments:
        return (draw.matrix(t, sum(widths)), *embedding(draw), *heads)

    def gradient(draw: Draw) -> Arguments:
        gradients = [draw.matrix(t, width) for width in widths]
        return (*gradients, *embedding(draw), "e5m2", True, True, shape.family == "qwen2")

    def of_queries(draw: Draw) -> Arguments:
        weight = draw.matrix(1, head).flatten()
        return (draw.matrix(t, widths[0]), weight, *embedding(draw), 1e-6)

    def gradient_of_queries(draw: Draw) -> Arguments:
        return (draw.matrix(t, widths[0]), *of_queries(draw))

    return [
        Case("head_norm", "q", of_queries),
        Case("head_norm_bwd", "q", gradient_of_queries),
        Case("rope", "q, k, v", forward),
        Case("rope_gradient", "q, k, v, both", gradient),
    ]
