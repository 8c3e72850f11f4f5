"""Linear layers whose inputs are rounded as a layer with compressed weights rounds them.

Programs that serve such weights multiply codes by codes. Here the weights are decompressed when a
checkpoint is loaded, and every input is quantized and decompressed, so that an evaluation shows
what both roundings cost, on any machine. Only the order of summation is another.
"""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from coat_vlm.model.compressed import Scheme, codes_of, scale_of


class RoundedInputLinear(nn.Linear):
    """A linear layer that quantizes its input: one scale per token, or per token and 128 channels.

    Its parameters are those of nn.Linear; :func:`round_inputs` makes it.
    """

    scheme: Scheme

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N] in the input's dtype."""
        return F.linear(rounded(input, self.scheme), self.weight, self.bias)


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """What the codes of inputs [..., K] stand for, in their dtype."""
    values, channels = x.float(), x.shape[-1]
    if scheme.block is not None:
        values = F.pad(values, (0, -channels % scheme.block)).unflatten(-1, (-1, scheme.block))
    scale = scale_of(values.abs().amax(-1, keepdim=True), scheme)
    back = codes_of(values, scale, scheme).float() * scale
    if scheme.block is not None:
        back = back.flatten(-2)[..., :channels]
    return back.to(x.dtype)


def round_inputs(model: nn.Module, scheme: Scheme, layers: Iterable[str]) -> None:
    """Let the named layers round their inputs, in place.

    Args:
        model: has a plain linear layer of each name.
        scheme: of their weights.
        layers: names of modules.
    """
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.__class__ = RoundedInputLinear
        layer.scheme = scheme
