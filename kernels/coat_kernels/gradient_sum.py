"""Sum of gradients in BF16 with stochastic rounding: total = bf16(total + term) in place.

The expected value of the sum is the exact sum, however small the terms are. The random bits of an
element depend on a key, on the tensor's index and on the element's (``master_weights.py``). Moves 6
bytes per element. Reference: ``reference.add_stochastic``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import master_weights
from coat_kernels.device import mix_bits
from coat_kernels.launch import cdiv, launch
from coat_kernels.registry import register

QUIET_NAN = tl.constexpr(master_weights.QUIET_NAN)
_BLOCK = 1024


@triton.jit(do_not_specialize=("elements", "index"))
def _add_stochastic_kernel(
    total_ptr,  # (elements,) bf16
    term_ptr,  # (elements,) bf16
    key_ptr,  # (1,) int64
    elements, index, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    x = tl.load(total_ptr + i, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(term_ptr + i, mask=mask, other=0.0).to(tl.float32)
    tensor = mix_bits(mix_bits(index.to(tl.uint32) + 0x9E3779B9))
    key = mix_bits(tl.load(key_ptr).to(tl.uint32) ^ tensor)
    word = mix_bits(i.to(tl.uint32) ^ key ^ ((i >> 32).to(tl.uint32) * 0x9E3779B9))
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), QUIET_NAN)
    bits += (word & 0xFFFF).to(tl.int32)
    tl.store(total_ptr + i, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)


@register(fake=lambda *_: None, mutates=("total",))
def _add_stochastic(total: Tensor, term: Tensor, key: Tensor, index: int) -> None:
    elements = total.numel()
    launch(
        _add_stochastic_kernel, (cdiv(elements, _BLOCK),), num_warps=4,
        total_ptr=total, term_ptr=term, key_ptr=key, elements=elements, index=index, BLOCK=_BLOCK,
    )  # fmt: skip


def add_stochastic(total: Tensor, term: Tensor, key: Tensor, index: int) -> None:
    """Add ``term`` to ``total`` in place; both BF16, contiguous, of one shape.

    ``key``: int64 [1] on their device, of 32 bits, from :func:`rounding_key`. ``index`` selects the
    random bits of a tensor.
    """
    if {total.dtype, term.dtype} != {torch.bfloat16} or total.shape != term.shape:
        raise ValueError(
            f"add_stochastic: {total.dtype} {tuple(total.shape)} + {term.dtype} "
            f"{tuple(term.shape)}; both must be bfloat16 of one shape"
        )
    _add_stochastic(total, term.contiguous(), key, index)
