"""Model FLOPs: the work that a step's samples require, independent of the implementation.

Only matrix products, the patch convolution and attention count, a multiply-add as 2 FLOPs
(Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). A weight [N, K] with an input of R
rows: 2 R N K in forward, for a trained weight's grad-weight, and for grad-input if a trained module
computes the input. Attention with H heads of width D over P pairs of a query and a visible key:

    forward  2 * 2 P H D;  backward 2 * 4 P H D, if this module or one below it is trained

Padding, recomputation and the zero image of a batch without images do not count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_vlm.config import ModuleName
from coat_vlm.model.configuration import count_needed_layers
from coat_vlm.model.loss import why_logits_are_needed
from coat_vlm.model.vlm import CoatVlm

# Layer types, and whether they have a sliding window.
_WINDOWED = {"sliding_attention": True, "full_attention": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The content of a batch, without padding."""

    tiles: int
    """Image tiles and frames that the tower reads."""
    vision_tokens: int
    supervised_tokens: int
    lengths: Sequence[int]
    """Tokens of each sequence; attention does not cross sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward and backward pass by source; see :func:`count_flops`."""

    tile: int
    """The vision tower, per tile."""
    projected: int
    """The projector, per output token."""
    projected_per_tile: int | None
    """Projector outputs per tile; None with several scales (one output per vision token)."""
    token: int
    """The language model's weights without the output layer, per token."""
    pair: int
    """The language model's attention, per layer and pair."""
    windows: Counter[int | None]
    """Number of layers by sliding window; None for full attention."""
    output: int
    """The output layer, per input position."""
    output_reads_all: bool
    """Whether it reads all positions, not only the supervised ones."""

    def count(self, work: Work) -> dict[ModuleName, int]:
        """Count the FLOPs of a batch by part of the model; 0 for absent parts."""
        tokens = sum(work.lengths)
        made = work.vision_tokens
        if self.projected_per_tile is not None:
            made = work.tiles * self.projected_per_tile  # before temporal pooling
        pairs = int(self._count_pairs(np.array(work.lengths, np.int64)).sum())
        read = tokens if self.output_reads_all else work.supervised_tokens
        return {
            "vision": self.tile * work.tiles,
            "projector": self.projected * made,
            "language": self.token * tokens + self.pair * pairs + self.output * read,
        }

    def estimate(self, tokens: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Estimate the FLOPs (n,) of samples of ``tokens`` (n,), without the output layer."""
        length, tiles = tokens.astype(np.float64), images.astype(np.float64)
        made = 0.0 if self.projected_per_tile is None else tiles * self.projected_per_tile
        pairs = self._count_pairs(tokens.astype(np.int64)).astype(np.float64)
        return self.tile * tiles + self.projected * made + self.token * length + self.pair * pairs

    def _count_pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Count pairs of a query and a visible key in all layers: causal, some with a window."""
        pairs = np.zeros_like(lengths)
        for window, layers in self.windows.items():
            seen = lengths if window is None else np.minimum(lengths, window)
            pairs += layers * (seen * (seen + 1) // 2 + (lengths - seen) * seen)
        return pairs


def count_flops(model: CoatVlm) -> ModelFlops:
    """Count a model's FLOPs, before DeepSpeed wraps it, with its ``requires_grad`` flags.

    Registration order decides which modules are below others. With LoRA on only the language model,
    grad-input of the first block's k and v counts, which training does not compute. Raises
    ValueError for mixtures of experts and layers without attention.
    """
    why = why_not_counted(model.language_model)
    if why is not None:
        raise ValueError(f"FLOPs of {type(model.language_model).__name__}: {why}")
    config: Any = model.config
    text = config.text_config
    tile = projected = 0
    trains = False
    if model.vision_tower is not None:
        vision = config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        positions = patches + config.num_prefix_tokens
        tile, trains = _count_gemms(model.vision_tower, False, positions=positions, patches=patches)
        layers = count_needed_layers(vision.num_hidden_layers, config.select_layer)
        tile += layers * _count_attention(positions**2, vision.hidden_size, trains)
    if model.projector is not None:
        projected, trains = _count_gemms(model.projector, trains)
    language = model.language_model
    output: Any = language.get_output_embeddings().weight
    token, trains = _count_gemms(language, trains, without=output)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    windowed = [True] * text.num_hidden_layers if types is None else [_WINDOWED[t] for t in types]
    return ModelFlops(
        tile=tile,
        projected=projected,
        projected_per_tile=None if config.s2_scales else config.tokens_per_image,
        token=token,
        pair=_count_attention(1, text.num_attention_heads * width, trains),
        windows=Counter(window if has_window else None for has_window in windowed),
        output=2 * output.numel() * (1 + trains + output.requires_grad),
        output_reads_all=why_logits_are_needed(language) is not None,
    )


def why_not_counted(language_model: PreTrainedModel) -> str | None:
    """Return why :func:`count_flops` does not support a language model; None if it does."""
    config: Any = language_model.config
    for name, parameter in language_model.named_parameters():
        if parameter.ndim > 2:
            return f"{name} has {parameter.ndim} dimensions (experts, or a convolution)"
    if not getattr(config, "num_attention_heads", None) or getattr(config, "kv_lora_rank", None):
        return "its attention heads do not have one common width"
    other = set(getattr(config, "layer_types", None) or ()) - _WINDOWED.keys()
    if other:
        return f"it has layers of the types {', '.join(sorted(other))}"
    return None


def _count_attention(pairs: int, width: int, trains: bool) -> int:
    """Count the FLOPs of attention; ``width`` is the sum over all heads."""
    return 4 * pairs * width * (3 if trains else 1)


def _count_gemms(
    part: nn.Module,
    below: bool,
    *,
    positions: int = 1,
    patches: int = 1,
    without: Tensor | None = None,
) -> tuple[int, bool]:
    """Count the FLOPs of the GEMMs with a part's weights; ``below``: a trained module is below.

    Matrices read ``positions`` vectors, and the convolution ``patches`` of pixels, which need no
    gradient. Also returns whether a module in the part or below it is trained.
    """
    flops = 0
    for owner in part.modules():
        looked_up = isinstance(owner, nn.Embedding)
        for name, weight in owner.named_parameters(recurse=False):
            # open_clip's positional_embedding is a matrix that is added, not multiplied.
            added = name == "positional_embedding" or weight.ndim not in (2, 4)
            if not (looked_up or added or weight is without):
                from_pixels = weight.ndim == 4
                passes = 1 + weight.requires_grad + (below and not from_pixels)
                flops += 2 * weight.numel() * passes * (patches if from_pixels else positions)
            below = below or weight.requires_grad
    return flops, below
