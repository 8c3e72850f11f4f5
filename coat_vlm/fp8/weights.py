"""FP8 weights: quantized for each GEMM, or cached for the micro-batches of a step.

Outside of :func:`reused_weights` nothing is cached: the forward pass quantizes a weight row-major,
and the backward pass quantizes it again, transposed, with the forward's scale (with a new scale if
the forward GEMM is BF16). Inside, the first use writes both layouts, and later uses read them
(2 bytes per parameter): the weights must not change until the scope ends. Weights with the same
input are one fused matrix with one scale.

Frozen weights can be stored only in FP8 (:func:`store_weights`), with the bits that would be
computed in every pass: 1 byte per parameter on the GPU, row-major for the forward GEMM; the
backward pass transposes a weight for its grad-input GEMM. The original weights go to host memory,
block by block, so that the GPU never holds both completely: checkpoints and merged models are made
from them. Experts (:func:`store_experts`) have one scale each.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import TensorScaled, quantize_again, quantize_layouts, quantize_rows
from coat_kernels.formats import pad_length
from coat_vlm.fp8 import saturation

Key = tuple[Hashable, ...]
"""Identifies weights. Addresses do not: ZeRO-3 gathers one weight where another was. Neither do the
tensors that a backward pass unpacks: under checkpointing those are other objects."""


_cache: dict[Key, tuple[TensorScaled, TensorScaled]] | None = None
"""Both layouts of the weights of the current scope; None outside of a scope."""

_STORED = "fp8_stored"
"""Attribute of a layer whose weight is stored in FP8, fused with weights of the same input."""


@contextmanager
def reused_weights(enabled: bool = True) -> Iterator[None]:
    """Quantize every weight at most once until the scope ends."""
    global _cache
    before = _cache
    _cache = {} if enabled else before
    try:
        yield
    finally:
        _cache = before


def are_reused() -> bool:
    """Whether a scope of :func:`reused_weights` is open."""
    return _cache is not None


def saved_bytes() -> int:
    """Return the bytes of FP8 weights that the current scope has saved."""
    return sum(rows.q.nbytes + other.q.nbytes for rows, other in (_cache or {}).values())


def key_of(layers: Sequence[nn.Linear]) -> Key:
    """Return the key of the layers' weights; shallow copies of Fp8Linear layers have the same."""
    return tuple(vars(layer).get("fp8_key", id(layer.weight)) for layer in layers)


@torch.no_grad()
def store_weights(layers: Sequence[nn.Linear], device: torch.device | None = None) -> None:
    """Store frozen weights of layers with the same input in FP8, and move the originals to the CPU.

    Each is padded with zeros to the multiples that the GEMMs take. Call it again after a change of
    the originals. On ``meta`` weights stay there. ``device`` defaults to where the weights are, or
    where the stored ones are.
    """
    before = stored_weight(layers[0])
    device = device or (layers[0].weight.device if before is None else before.q.device)
    parts = [_pad(layer.weight.to(device)) for layer in layers]
    stored, _ = quantize_layouts(parts, rows=True, transposed=False, dithered=True)
    for layer in layers:
        vars(layer)[_STORED] = stored
        if device.type == "cuda":
            layer.weight.data = layer.weight.data.cpu()


def _pad(weight: Tensor) -> Tensor:
    rows, columns = (pad_length(size) - size for size in weight.shape)
    return F.pad(weight, (0, columns, 0, rows)) if rows or columns else weight.contiguous()


@torch.no_grad()
def store_experts(experts: Any, device: torch.device | None = None) -> None:
    """Store frozen experts, ``gate_up_proj`` and ``down_proj``, in FP8 with a scale per expert.

    The data are (E, N, K), their scales FP32 (E,). ``device`` as in :func:`store_weights`.
    """
    stored: list[TensorScaled] = []
    parameters = (experts.gate_up_proj, experts.down_proj)
    before = vars(experts)[_STORED][0].q if is_stored(experts) else parameters[0]
    target: torch.device = before.device if device is None else device
    for parameter in parameters:
        q, scale = quantize_rows(parameter.to(target).flatten(1))
        stored.append(TensorScaled(q.view(parameter.shape), scale))
        if target.type == "cuda":
            parameter.data = parameter.data.cpu()
    vars(experts)[_STORED] = tuple(stored)


def stored_experts(experts: nn.Module) -> tuple[TensorScaled, TensorScaled] | None:
    """Return what :func:`store_experts` stored."""
    return vars(experts).get(_STORED)


def restore_weight(layer: nn.Module) -> None:
    """Move the original weights of a layer or experts back to the GPU if they are in FP8."""
    if is_stored(layer):
        device = _list(vars(layer).pop(_STORED))[0].q.device
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.to(device)


def _list(stored: Any) -> list[TensorScaled]:
    return [stored] if isinstance(stored, TensorScaled) else [*stored]


def stored_weight(layer: nn.Linear) -> TensorScaled | None:
    """Return the fused weight [N, K] that :func:`store_weights` stored for a layer and others."""
    return vars(layer).get(_STORED)


def is_stored(layer: nn.Module) -> bool:
    """Return whether :func:`store_weights` stored a layer's weight."""
    return _STORED in vars(layer)


@contextmanager
def without_originals(model: nn.Module) -> Iterator[None]:
    """Empty the original weights of what is stored in FP8, so that nothing moves or copies them."""
    stored = (module for module in model.modules() if is_stored(module))
    weights = [p for module in stored for p in module.parameters(recurse=False) if p.ndim > 1]
    originals = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.new_empty(0)
    try:
        yield
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.data = original


def share_stored(source: nn.Module, copy: nn.Module) -> None:
    """Give a deep copy that shares its frozen parameters the weights stored for the original."""
    for module, copied in zip(source.modules(), copy.modules(), strict=True):
        if is_stored(module):
            vars(copied)[_STORED] = vars(module)[_STORED]


def list_stored(model: nn.Module) -> list[TensorScaled]:
    """List the weights of a model that are stored in FP8."""
    stored = (_list(vars(module)[_STORED]) for module in model.modules() if is_stored(module))
    return list({id(weight): weight for weights in stored for weight in weights}.values())


def quantize_weight(key: Key, parts: Sequence[Tensor], scale: Tensor | None = None) -> TensorScaled:
    """Return E4M3 [N, K] of weights [n_i, K], concatenated along N.

    With the ``scale`` of an earlier call its result is returned again, and values are not counted.
    """
    if scale is not None:
        if _cache is not None and key in _cache:
            return _cache[key][0]
        return quantize_again(_detached(parts), scale, transposed=False)
    rows, _ = _quantize(key, parts, rows=True)
    saturation.observe("weight", rows.q, lambda: torch.cat([part.detach() for part in parts]))
    return rows


def quantize_weight_transposed(
    key: Key, parts: Sequence[Tensor], scale: Tensor | None
) -> TensorScaled:
    """Return E4M3 [K, N] of the same matrix, with the scale of :func:`quantize_weight` if given."""
    if _cache is not None or scale is None:
        return _quantize(key, parts, rows=False)[1]
    return quantize_again(_detached(parts), scale, transposed=True)


def _quantize(key: Key, parts: Sequence[Tensor], rows: bool) -> tuple[TensorScaled, TensorScaled]:
    """Return one layout, the other is empty; in a scope both, quantized by the first call."""
    if _cache is not None and key in _cache:
        return _cache[key]
    both = _cache is not None
    layouts = quantize_layouts(
        _detached(parts),
        rows=rows or both,
        transposed=not rows or both,
        dithered=True,
    )
    if _cache is not None:
        _cache[key] = layouts
    return layouts


def _detached(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.detach().contiguous() for part in parts]
