"""Norm and mixture of experts as one autograd Function; the router is FP32.

    residual = x + delta,   a = norm(residual),   p = softmax of the k largest of a W_router^T
    y = sum over these experts e of p_e W_down,e activation(W_in,e a),   W_in,e = [gate; up]

A token has k rows, which the GPU sorts by expert without a synchronization; the grouped GEMMs of
all experts are one launch each. Experts that are stored in FP8 (:func:`store_experts`: frozen,
under LoRA) multiply in FP8, forward and grad-input; the latter transposes the data for its GEMM.
Others multiply in the model's dtype, with torch's grouped GEMM.

Saves for backward ``residual`` per token and ``h = W_in,e a`` per row in FP8 with per-group scales,
as ``mlp.py``, the norm statistics, p and the order. With dy_e = W_down,e^T dy and act the output of
the activation, the gradient of p_e is the sum of dy_e act, and so needs no output of the experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    GroupScaled,
    NormSaved,
    TensorScaled,
    activation_fwd,
    dequantize_group,
    expert_gradient,
    norm_bwd,
    norm_fwd,
    quantize_group,
    quantize_rows,
    scaled_grouped_mm,
    transpose_quantized,
)
from coat_kernels.formats import check_group
from coat_kernels.reference import norm_values
from coat_vlm.fp8 import gemm, saturation, weights
from coat_vlm.fp8 import norm as norms
from coat_vlm.fp8.gemm import matrix
from coat_vlm.fp8.mlp import HIGH_PRECISION
from coat_vlm.fp8.norm import NormSettings


def norm_experts(
    x: Tensor, norm: nn.Module, mlp: Any, activation: str, group_size: int, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``mlp(norm(x + delta))``, and x + delta; x as in :func:`coat_vlm.fp8.norm_mlp`.

    ``mlp`` has a router ``gate`` with a weight (E, K), which normalizes the k largest
    probabilities, and ``experts`` with ``gate_up_proj`` (E, 2F, K) and ``down_proj`` (E, K, F).
    """
    experts, gate = mlp.experts, mlp.gate
    y, residual, logits = _NormExperts.apply(
        x, delta, *norms.arguments(norm, group_size), activation, gate.top_k,
        weights.stored_experts(experts), gate.weight, experts.gate_up_proj, experts.down_proj,
    )  # fmt: skip
    # transformers' hook on the router collects the logits for the load-balancing loss.
    gate.forward = lambda _: (logits, None, None)
    try:
        gate(residual)
    finally:
        del gate.forward
    return y, residual


def check_experts(name: str, experts: Any, group_size: int) -> None:
    """Raise ValueError if the kernels do not support the experts' shapes."""
    _, K, F_ = experts.down_proj.shape
    check_group(f"{name}.experts", F_, group_size)
    if K % 16 or F_ % 16:
        raise ValueError(
            f"{name}.experts: down_proj [E, K, F] has K = {K} and F = {F_}; grouped GEMMs take "
            "multiples of 16: set fp8.language: bf16"
        )


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows by number, of FP8 data too."""
    return rows.view(torch.uint8).index_select(0, index).view(rows.dtype)


def _sort(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order [M k] of the flat ``index`` [M, k] by expert, and the experts' ends."""
    found, order = index.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=index.device)
    return order, torch.searchsorted(found, numbers, right=True, out_int32=True)


def _by_token(rows: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return sorted rows [M k, N] as [M, k, N]."""
    return rows.index_select(0, order.argsort()).unflatten(0, (-1, top_k))


class _NormExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        norm_weight: Tensor,
        norm_bias: None,
        norm: NormSettings,
        kind: str,
        top_k: int,
        stored: tuple[TensorScaled, TensorScaled] | None,
        gate: Tensor,
        w_in: Tensor,
        w_down: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = x.dtype
        residual, a8, of_norm = norm_fwd(
            matrix(x), norm_weight, norm_bias, norm.eps, centered=False, group_size=norm.group_size,
            delta=matrix(delta),
        )  # fmt: skip
        saturation.observe("norm input", of_norm.x.q, residual)
        a = norms.high_precision(residual, norm_weight, norm_bias, norm)
        logits = a.float() @ gate.float().t()
        values, index = logits.topk(top_k)
        p = values.softmax(-1)
        order, ends = _sort(index, len(gate))
        tokens = order // top_k
        if stored is None:
            rows = a.index_select(0, tokens)
            h = F.grouped_mm(rows, w_in.to(dtype).transpose(1, 2), offs=ends)
            saved = quantize_group(h, norm.group_size)
            act = HIGH_PRECISION[kind](h)
            del rows, h
            out = F.grouped_mm(act, w_down.to(dtype).transpose(1, 2), offs=ends)
        else:
            scales = a8.scale.repeat(len(tokens))
            h = scaled_grouped_mm(_take(a8.q, tokens), scales, stored[0], ends, dtype)
            act8, (saved, scale) = activation_fwd(h, kind, group_size=norm.group_size)
            saturation.observe("activation input", saved.q, h)
            del h
            out = scaled_grouped_mm(act8.q, scale.repeat(len(tokens)), stored[1], ends, dtype)
        y = _by_token(out, order, top_k).mul_(p[..., None]).sum(1).view(x.shape)
        tensors = (norm_weight, gate, w_in, w_down, p, index, order, ends)
        gemm.save(ctx, [*of_norm.x, *of_norm[1:]], saved, tensors)
        ctx.settings, ctx.shape, ctx.dtype = (kind, top_k, stored), x.shape, dtype
        ctx.set_materialize_grads(False)
        return y, residual.view(x.shape), logits

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_y, grad_residual, grad_logits = grad_outputs
        if grad_y is None:
            return norms.residual_only(grad_residual, ctx)
        (q, exponents, *rest), saved, tensors = gemm.load(ctx)
        norm_weight, gate, w_in, w_down, p, index, order, ends = tensors
        of_norm = NormSaved(GroupScaled(q, exponents), *rest)
        kind, top_k, stored = ctx.settings
        needs_gate, needs_in, needs_down = ctx.needs_input_grad[8:]
        grad_y, h, dtype = matrix(grad_y), GroupScaled(*saved), ctx.dtype
        tokens, row_p = order // top_k, p.flatten().index_select(0, order)
        a = None
        if needs_gate or needs_in:
            x32 = dequantize_group(of_norm.x, torch.float32)
            a = norm_values(x32, norm_weight, None, of_norm.rstd, None)
        grad_in = grad_down = None
        if stored is None:
            rows = grad_y.index_select(0, tokens)
            grad_act = F.grouped_mm(rows, w_down.to(dtype), offs=ends)
            grad_h, _, grad_p, act = expert_gradient(grad_act, h, row_p, kind, quantized=False)
            del grad_act
            if needs_down:
                grad_down = F.grouped_mm(rows.t(), act, offs=ends).to(w_down.dtype)
            del rows, act
            if needs_in and a is not None:
                rows = a.to(dtype).index_select(0, tokens)
                grad_in = F.grouped_mm(grad_h.t(), rows, offs=ends).to(w_in.dtype)
                del rows
            grad_rows = F.grouped_mm(grad_h, w_in.to(dtype), offs=ends)
        else:
            rows8, scales = quantize_rows(grad_y)
            rows8, scales = _take(rows8, tokens), scales.index_select(0, tokens)
            w8 = transpose_quantized(stored[1])
            grad_act = scaled_grouped_mm(rows8, scales, w8, ends, dtype)
            del rows8, w8
            grad_h, scales, grad_p, _ = expert_gradient(grad_act, h, row_p, kind, quantized=True)
            del grad_act
            w8 = transpose_quantized(stored[0])
            grad_rows = scaled_grouped_mm(grad_h, scales, w8, ends, dtype)
            del w8
        del grad_h
        grad_a = _by_token(grad_rows, order, top_k).sum(1)
        del grad_rows
        grad_p = _by_token(grad_p[:, None], order, top_k)[..., 0]
        grad_values = p * (grad_p - (p * grad_p).sum(-1, keepdim=True))  # of the softmax
        given = p.new_zeros(len(p), len(gate)) if grad_logits is None else grad_logits
        grad_logits = given.scatter_add(1, index, grad_values)
        grad_a += (grad_logits @ gate.float()).to(dtype)
        grad_gate = None
        if needs_gate and a is not None:
            grad_gate = (grad_logits.t() @ a).to(gate.dtype)
        residual = None if grad_residual is None else matrix(grad_residual)
        frozen = not ctx.needs_input_grad[2]
        grad_x, grad_norm, _ = norm_bwd(grad_a, of_norm, norm_weight, residual, frozen=frozen)
        return (
            *norms.grads_of_sum(grad_x.view(ctx.shape), ctx),
            None if frozen else grad_norm.to(norm_weight.dtype), None, None, None, None, None,
            grad_gate, grad_in, grad_down,
        )  # fmt: skip
