"""Example arguments of every op, written once for all kinds of tests.

``examples`` serves the tests in the interpreter and on a GPU, ``opcheck``, and the compilation
without a GPU.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coat_kernels import reference
from coat_kernels.cross_entropy import MAX_COLUMNS
from coat_kernels.formats import E5M2, FORMATS, GROUP_SIZES, pad_length
from coat_kernels.moment_formats import new_moment
from coat_kernels.registry import OPS


class _Inputs:
    """Seeded tensors of one size."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype):
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.group = max(size for size in GROUP_SIZES if columns % size == 0)
        self._generator = torch.Generator().manual_seed(rows * 1000 + columns)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian, with channels of different size, as activations have."""
        size = torch.exp2(torch.randn(shape[-1], generator=self._generator))
        x = torch.randn(*shape, generator=self._generator) * size
        return x.to(dtype or self.dtype)

    def matrix(self) -> Tensor:
        x = self.normal(self.rows, self.columns)
        x[1::3] *= 2.0**-9  # rows whose variance an epsilon matters to
        return x


Examples = dict[str, tuple[Any, ...]]


def _tensor_scale(i: _Inputs) -> Examples:
    x = i.matrix()
    return {
        **{name: ([x], name, True) for name in FORMATS},
        "stacked": ([x[:0], x, i.matrix()], "e4m3", False),
    }


def _dither_scale(i: _Inputs) -> Examples:
    x = i.matrix()
    return {"one": (reference.tensor_scale([x], "e4m3", False), x)}


def _quantize_tensor(i: _Inputs) -> Examples:
    x = i.matrix()
    layouts = {"rows": (True, False), "transposed": (False, True), "both": (True, True)}
    examples: Examples = {}
    for fmt in FORMATS:
        scale = reference.tensor_scale([x], fmt)
        examples |= {f"{fmt}-{name}": ([x], scale, fmt, *both) for name, both in layouts.items()}
    parts = [i.normal(48, i.columns), x[:0], x]
    scale = reference.tensor_scale(parts, "e4m3")
    return examples | {"stacked": (parts, scale, "e4m3", True, True)}


def _quantize_gradient(i: _Inputs) -> Examples:
    x = i.matrix()
    side_by_side = [x, i.normal(i.rows, 32), i.matrix()]
    return {
        "rows": ([x], "e5m2", True, False, False),
        "transposed-e4m3": ([x], "e4m3", False, True, False),
        "both-bias": ([x], "e5m2", True, True, True),
        "side-by-side": (side_by_side, "e5m2", True, True, True),
        "side-by-side-without-bias": (side_by_side, "e5m2", True, True, False),
        "bias": (side_by_side, "e5m2", False, False, True),
        "neither": (side_by_side, "e5m2", False, False, False),
    }


def _quantize_group(i: _Inputs) -> Examples:
    sizes = [size for size in GROUP_SIZES if i.columns % size == 0]
    return {f"{fmt}-{size}": (i.matrix(), size, fmt) for fmt in FORMATS for size in sizes}


def _dequantize_group(i: _Inputs) -> Examples:
    return {
        name: (*reference.quantize_group(*args), i.dtype)
        for name, args in _quantize_group(i).items()
    }


def _codes(i: _Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    x = i.matrix()
    scales = {fmt: reference.tensor_scale([x], fmt) for fmt in FORMATS}
    return {
        fmt: (reference.quantize_tensor([x], scale, fmt, True, False)[0], scale)
        for fmt, scale in scales.items()
    }


def _transpose_quantized(i: _Inputs) -> Examples:
    matrices = [q for q, _ in _codes(i).values()]
    stacked = torch.stack([q.view(torch.uint8) for q in matrices]).view(matrices[0].dtype)
    return {fmt: (q,) for fmt, q in zip(FORMATS, matrices, strict=True)} | {"stacked": (stacked,)}


def _dequantize_tensor(i: _Inputs) -> Examples:
    return {fmt: (*codes, i.dtype) for fmt, codes in _codes(i).items()}


def _norm_fwd(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, centered, has_bias, fmt in (
        ("rms", False, False, "e4m3"),
        ("layer", True, True, "e4m3"),
        ("layer-without-bias", True, False, "e4m3"),
        ("rms-e5m2", False, False, "e5m2"),
        ("rms-of-a-sum", False, False, "e4m3"),
    ):
        weight, bias = i.normal(i.columns), i.normal(i.columns) if has_bias else None
        delta = i.matrix() if "sum" in name else None
        examples[name] = (i.matrix(), delta, weight, bias, 1e-5, centered, i.group, fmt)
    return examples


def _norm_recompute(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, args in _norm_fwd(i).items():
        _, q, exponents, rstd, mean, _, scale = reference.norm_fwd(*args)
        examples[name] = (q, exponents, *args[2:4], rstd, mean, scale, args[-1])
    return examples


def _norm_bwd(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, args in _norm_fwd(i).items():
        delta = args[1]
        _, q, exponents, rstd, mean, *_ = reference.norm_fwd(*args)
        residual = None if delta is None else i.matrix()
        examples[name] = (i.matrix(), q, exponents, args[2], rstd, mean, residual, True)
    for name in ("rms", "layer"):
        *given, _ = examples[name]
        examples[f"{name}-frozen"] = (*given, False)
    return examples


def _activation_input(i: _Inputs, kind: str) -> Tensor:
    return i.normal(i.rows, 2 * i.columns if kind.endswith("_mul") else i.columns)


def _activation_stats(i: _Inputs) -> Examples:
    examples: Examples = {
        kind: (_activation_input(i, kind), kind, i.group, "e4m3") for kind in reference.ACTIVATIONS
    }
    a, kind, group, _ = examples["silu_mul"]
    return examples | {"silu_mul-e5m2": (a, kind, group, "e5m2")}


def _activation_apply(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, args in _activation_stats(i).items():
        a, kind, _, fmt = args
        *_, scale = reference.activation_stats(*args)
        examples[name] = (a, kind, scale, fmt)
    return examples


def _activation_bwd(i: _Inputs) -> Examples:
    examples: Examples = {}
    for kind in reference.ACTIVATIONS:
        q, exponents = reference.quantize_group(_activation_input(i, kind), i.group, "e4m3")
        dh, bias = i.matrix(), kind in ("silu_mul", "gelu_tanh_mul", "gelu")
        scale, _ = reference.activation_bwd_stats(dh, q, exponents, kind, None, "e4m3", "e5m2")
        examples[kind] = (dh, q, exponents, kind, "e5m2", True, True, bias, scale)
    for name, kind, layout in (
        ("rows", "gelu_tanh", (True, False, False)),
        ("transposed", "silu_mul", (False, True, False)),
    ):
        *given, _, _, _, scale = examples[kind]
        examples[name] = (*given, *layout, scale)
    return examples


def _activation_bwd_stats(i: _Inputs) -> Examples:
    examples: Examples = {}
    for kind in reference.ACTIVATIONS:
        a = _activation_input(i, kind)
        *copy, scale = reference.activation_stats(a, kind, i.group, "e4m3")
        examples[kind] = (i.matrix(), *copy, kind, scale, "e4m3", "e5m2")
    return examples | {"scale": (*examples["silu_mul"][:4], None, "e4m3", "e5m2")}


def _activation_bwd_once(i: _Inputs) -> Examples:
    examples = _activation_bwd_stats(i)
    return {"gradient" if name == "scale" else name: given for name, given in examples.items()}


def _expert_gradient(i: _Inputs) -> Examples:
    examples: Examples = {}
    for kind in ("silu_mul", "gelu_tanh_mul"):
        saved = reference.quantize_group(_activation_input(i, kind), i.group, "e4m3")
        for name, quantized in (("quantized", True), ("high-precision", False)):
            weights = i.normal(i.rows, dtype=torch.float32).abs()
            examples[f"{kind}-{name}"] = (i.matrix(), *saved, weights, kind, quantized)
    return examples


def _scaled_mm(i: _Inputs) -> Examples:
    b = i.normal(48, i.columns, dtype=torch.float32)
    b_scale = reference.tensor_scale([b], "e4m3")
    b_q, _ = reference.quantize_tensor([b], b_scale, "e4m3", True, False)
    examples: Examples = {}
    for fmt, bias in (("e4m3", None), ("e5m2", None), ("e4m3", i.normal(48))):
        a = i.matrix()
        scale = reference.tensor_scale([a], fmt)
        q, _ = reference.quantize_tensor([a], scale, fmt, True, False)
        name = fmt if bias is None else f"{fmt}-bias"
        examples[name] = (q, scale, b_q, b_scale, bias, i.dtype, False)
    return examples | {"fast": (*examples["e4m3"][:-1], True)}


def _low_rank_project(i: _Inputs) -> Examples:
    x, half = i.matrix(), i.columns // 2
    examples: Examples = {}
    for fmt in FORMATS:
        scale = reference.tensor_scale([x], fmt)
        q, _ = reference.quantize_tensor([x], scale, fmt, True, False)
        b = [i.normal(half, 8), i.normal(half - 8, 5), i.normal(8, 72)]
        examples[f"{fmt}-b"] = (q, scale, b, [0, half, i.columns - 8], [0.5, 2.0, 1.0], False)
        a = [i.normal(rank, i.columns) for rank in (16, 1)]
        examples[f"{fmt}-a"] = (q, scale, a, [0, 0], [1.0, 1.0], True)
        whole = i.columns // 16 * 16
        examples[f"{fmt}-aligned"] = (q, scale, [i.normal(whole, 64)], [0], [1.0], False)
    return examples


def _low_rank_gradient(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, (q, scale, matrices, starts, factors, transposed) in _low_rank_project(i).items():
        sizes = [m.shape[transposed] for m in matrices]
        ranks = [m.shape[not transposed] for m in matrices]
        p = i.normal(i.rows, sum(ranks))
        examples[name] = (q, scale, p, starts, sizes, ranks, factors, transposed)
    return examples


def _append_low_rank(i: _Inputs) -> Examples:
    examples: Examples = {}
    b, half = i.normal(48, i.columns, dtype=torch.float32), 24
    b_scale = reference.tensor_scale([b], "e4m3")
    b_q, _ = reference.quantize_tensor([b], b_scale, "e4m3", True, False)
    for fmt in FORMATS:
        x = i.matrix()
        scale = reference.tensor_scale([x], fmt)
        q, _ = reference.quantize_tensor([x], scale, fmt, True, False)
        # Narrow matrices whose product is small, one that is larger than the matrices', and zeros.
        for name, u, starts, factors in (
            ("b", [i.normal(half, 5), i.normal(half, 72)], [0, half], [-2.0, 0.5]),
            ("a", [i.normal(16, 48), i.normal(1, 48)], [0, 0], [1.0, 1.0]),
            ("large", [i.normal(48, 16)], [0], [100.0]),
            ("zero", [0 * i.normal(48, 16)], [0], [0.25]),
        ):
            transposed = name == "a"
            p = i.normal(i.rows, sum(m.shape[not transposed] for m in u))
            p_scale, u_scale = reference.tensor_scale([p], fmt), reference.tensor_scale(u, "e4m3")
            given = (q, scale, p, p_scale, b_q, b_scale, u, u_scale, starts, factors, transposed)
            examples[f"{fmt}-{name}"] = given
    return examples


def _adamw_step(i: _Inputs) -> Examples:
    examples: Examples = {}
    is_bf16 = i.dtype == torch.bfloat16
    # Low bits and stochastic rounding are for BF16; skipped: the scale of the gradients is NaN.
    for name in ("plain", "low_bits", "stochastic", "skipped"):
        p, g = i.matrix(), i.matrix()
        moments = [*new_moment(p), *new_moment(p)]
        settings = (1e-3, 0.9, 0.999, 1e-8, 0.1)
        has_low_bits = is_bf16 and name == "low_bits"
        low_bits = torch.zeros_like(p, dtype=torch.int16) if has_low_bits else None
        seed = 7 if is_bf16 and name == "stochastic" else None
        how = (low_bits, torch.tensor(0.5), seed, 0)
        if p.numel():  # moments as the first step leaves them
            step: Any = reference.adamw_step
            step(p, i.matrix(), *moments, *settings, 1, *how)
        if name == "skipped":
            how = (low_bits, torch.tensor(math.nan), seed, 0)
        examples[name] = (p, g, *moments, *settings, 2, *how)
    return examples


def _add_stochastic(i: _Inputs) -> Examples:
    total, term = i.matrix().bfloat16(), i.matrix().bfloat16()
    return {"sum": (total, term, torch.tensor([0xDEADBEEF]), 3)}


def _cross_entropy(i: _Inputs) -> Examples:
    generator = torch.Generator().manual_seed(i.rows)
    examples: Examples = {}
    # Three tiles, the last of them in part; and less than one.
    for name, columns in (("wide", i.columns + 2 * MAX_COLUMNS), ("narrow", i.columns)):
        targets = torch.randint(columns, (i.rows,), generator=generator)
        logits = i.normal(i.rows, columns)
        examples[name] = (logits, targets, torch.tensor(37.0))
        examples[f"{name}-losses"] = (logits, targets, None)
    return examples


def _logit_gradient(i: _Inputs) -> Examples:
    targets = torch.randint(i.columns, (i.rows,), generator=torch.Generator().manual_seed(i.rows))
    logits = i.normal(i.rows, i.columns)
    losses = reference.cross_entropy_(logits, targets, None)
    qt = torch.zeros(i.columns, 32 + pad_length(i.rows), dtype=E5M2.dtype)
    return {
        "rows": (logits, targets, losses, qt.new_empty(0, 0), 0, True),
        "transposed": (logits, targets, losses, qt, 0, False),
        "both": (logits, targets, losses, qt, 16, True),
    }


def _rope(i: _Inputs) -> Examples:
    examples: Examples = {}
    shared = i.rows // 3 if i.rows and i.rows % 3 == 0 else max(1, i.rows)
    for name, heads, kv_heads, rows in (("grouped", 3, 1, shared), ("equal", 5, 5, max(1, i.rows))):
        cos, sin = i.normal(rows, i.columns), i.normal(rows, i.columns)
        qkv = i.normal(i.rows, (heads + 2 * kv_heads) * i.columns)
        examples[name] = (qkv, cos, sin, heads, kv_heads)
    return examples


def _rope_gradient(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, (qkv, cos, sin, heads, kv_heads) in _rope(i).items():
        gradients = reference.rope(qkv, cos, sin, heads, kv_heads)
        examples[name] = (*gradients, cos, sin, "e5m2", True, True, True)
        examples[f"{name}-rows"] = (*gradients, cos, sin, "e5m2", True, False, False)
        examples[f"{name}-transposed"] = (*gradients, cos, sin, "e4m3", False, True, False)
    return examples


def _head_norm(i: _Inputs) -> Examples:
    examples: Examples = {}
    for name, (qkv, cos, sin, heads, _) in _rope(i).items():
        # q's columns of the fused matrix.
        x, weight = qkv[:, : heads * i.columns], 1.0 + 0.1 * i.normal(i.columns)
        examples[name] = (x, weight, cos, sin, 1e-3)
    return examples


def _head_norm_bwd(i: _Inputs) -> Examples:
    return {name: (i.normal(*x.shape), x, *others) for name, (x, *others) in _head_norm(i).items()}


_EXAMPLES: dict[str, Callable[[_Inputs], Examples]] = {
    "tensor_scale": _tensor_scale,
    "dither_scale": _dither_scale,
    "quantize_tensor": _quantize_tensor,
    "quantize_gradient": _quantize_gradient,
    "quantize_group": _quantize_group,
    "dequantize_group": _dequantize_group,
    "transpose_quantized": _transpose_quantized,
    "dequantize_tensor": _dequantize_tensor,
    "norm_fwd": _norm_fwd,
    "norm_recompute": _norm_recompute,
    "norm_bwd": _norm_bwd,
    "activation_stats": _activation_stats,
    "activation_apply": _activation_apply,
    "activation_bwd": _activation_bwd,
    "activation_bwd_stats": _activation_bwd_stats,
    "activation_bwd_once": _activation_bwd_once,
    "activation_once": _activation_stats,
    "scaled_mm": _scaled_mm,
    "cross_entropy_": _cross_entropy,
    "logit_gradient": _logit_gradient,
    "expert_gradient": _expert_gradient,
    "head_norm": _head_norm,
    "head_norm_bwd": _head_norm_bwd,
    "rope": _rope,
    "rope_gradient": _rope_gradient,
    "low_rank_project": _low_rank_project,
    "low_rank_gradient": _low_rank_gradient,
    "append_low_rank": _append_low_rank,
    "adamw_step": _adamw_step,
    "add_stochastic": _add_stochastic,
}


def examples(
    op: str, rows: int = 63, columns: int = 208, dtype: torch.dtype = torch.float32
) -> Examples:
    """Arguments of an op on the CPU, by name of the variant.

    Args:
        op: its name in ``OPS``.
        rows: M.
        columns: N, or F of an activation, or K of a GEMM; a multiple of 16.
        dtype: of everything that is neither FP8 nor a statistic.

    Raises:
        ValueError: the op has no examples.
    """
    if op not in _EXAMPLES:
        raise ValueError(f"op {op!r} has no examples; add them to op_examples.py ({sorted(OPS)})")
    return _EXAMPLES[op](_Inputs(rows, columns, dtype))
