"""The gradients of the output layer in the fused loss, with FP8 GEMMs.

    forward      logits [m, V]    = h [m, H]             @ W [V, H]^T      in the layer's dtype
    gradient     g [m, V]         = (softmax(logits) - one_hot) / divisor  in E5M2
    grad-input   grad_h [m, H]    = g [m, V]             @ W^T [H, V]^T
    grad-weight  grad_W [V, H]    = g^T [V, M']          @ h^T [H, M']^T

m are the tokens of a chunk, M the tokens of many chunks, M' is M padded to a multiple of 16. The
gradient has a constant scale and is rounded stochastically (:func:`coat_kernels.logit_gradient`), W
and h are E4M3 with one scale per tensor. The loss and the logits equal
:func:`coat_vlm.model.loss.linear_cross_entropy`.

The grad-weight GEMM runs once for many chunks, so it does not read and write a sum per chunk, and
chunks may be small. It needs g^T of its tokens, which takes at most twice the memory of an FP32
sum of grad_W (:data:`MAX_TOKENS`).
"""

import torch
from torch import Tensor, nn

from coat_kernels import (
    E5M2,
    GEMM_MULTIPLE,
    GRADIENT_SCALE,
    TensorScaled,
    cross_entropy_,
    logit_gradient,
    quantize_again,
    quantize_layouts,
    scaled_mm,
)
from coat_kernels.formats import pad_length

MAX_TOKENS = 8
"""Maximum number of tokens of one grad-weight GEMM for all, in multiples of the hidden size."""


class Fp8Gradients:
    """Computes chunks of a layer without bias, whose sizes are multiples of 16."""

    CHUNK_BYTES = 400 * 2**20
    """Maximum bytes of a chunk's logits in the layer's dtype; their gradient takes half of that."""
    TOKENS_MULTIPLE = GEMM_MULTIPLE
    """The tokens of a chunk are a multiple of it, except for the last chunk."""

    def __init__(self, layer: nn.Linear, divisor: Tensor, hidden: Tensor, size: int) -> None:
        """Create empty sums for all of ``hidden``, in chunks of ``size`` tokens, a multiple of 16.

        The scale of ``hidden`` is computed here, so that ranks that share scales
        (:func:`coat_kernels.share_scales`) take part equally often, also without a token.
        """
        tokens = len(hidden)
        self._layer = layer
        self._divisor = divisor
        self._scale = GRADIENT_SCALE / divisor
        self._left = tokens
        self._max_tokens = tokens
        if tokens > MAX_TOKENS * layer.in_features:
            # A sum and a product are in memory with the operands, so these are small.
            self._max_tokens = max(1, 2 * layer.in_features // size) * size
        self._several = self._max_tokens < tokens
        weight = [layer.weight.detach()]
        _, self._weight = quantize_layouts(weight, rows=False, transposed=True, dithered=True)
        x = [hidden.detach().contiguous()]
        scaled, _ = quantize_layouts(x, rows=False, transposed=False, shared=True)
        self._hidden_scale = scaled.scale
        self._rows: list[Tensor] = []
        self._transposed: Tensor | None = None
        self._sum: Tensor | None = None

    def add(self, rows: Tensor, targets: Tensor, rows_gradient: Tensor | None) -> Tensor:
        """Add a chunk's gradients, write its rows' gradient if given; return its divided loss."""
        layer, rows = self._layer, rows.detach()
        logits = layer.forward(rows)
        losses = cross_entropy_(logits, targets)
        start = sum(map(len, self._rows))
        if layer.weight.requires_grad:
            if self._transposed is None:
                columns = pad_length(min(self._max_tokens, self._left))
                shape = (layer.out_features, columns)
                self._transposed = logits.new_empty(shape, dtype=E5M2.dtype)
            self._rows.append(rows)
        gradient = logit_gradient(
            logits, targets, losses, self._transposed, start, rows=rows_gradient is not None
        )
        del logits
        if rows_gradient is not None:
            scaled = TensorScaled(gradient, self._scale)
            rows_gradient.copy_(scaled_mm(scaled, self._weight, rows.dtype))
            del scaled
        del gradient
        if self._transposed is not None and start + len(rows) == min(self._max_tokens, self._left):
            if start + len(rows) == self._left:
                del self._weight  # no chunk follows, and memory is shortest in this GEMM
            self._multiply(self._transposed)
        return losses.sum() / self._divisor

    def _multiply(self, transposed: Tensor) -> None:
        """Run the grad-weight GEMM [V, M'] x [M', H] of the collected chunks."""
        rows = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)
        hidden = quantize_again([rows.contiguous()], self._hidden_scale, transposed=True)
        weight = self._layer.weight
        product = scaled_mm(TensorScaled(transposed, self._scale), hidden, weight.dtype)
        if self._sum is None:
            self._sum = product.float() if self._several else product
        else:
            self._sum += product
        self._left -= len(rows)
        self._rows.clear()
        self._transposed = None

    def gradients(self) -> list[Tensor]:
        """Return the gradient of the weight in FP32 or its dtype, if it is trained."""
        if not self._layer.weight.requires_grad:
            return []
        return [torch.zeros_like(self._layer.weight) if self._sum is None else self._sum]
