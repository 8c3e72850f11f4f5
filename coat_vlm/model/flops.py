"""Model FLOPs: the work that a step's samples require, independent of the implementation.

Only matrix products, the patch convolution and attention count, a multiply-add as 2 FLOPs
(Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). A weight [N, K] with an input of R
rows: 2 R N K in forward, for a trained weight's grad-weight, and for grad-input if a trained module
computes the input. Attention with H heads of width D over P pairs of a query and a visible key:

    forward  2 * 2 P H D;  backward 2 * 4 P H D, if this module or one below it is trained

Padding, recomputation and the image of a batch without images do not count, nor does attention to
later tokens, by which a few models read prefixes and images. Only the experts of a token count, and
for linear attention the three products of its recurrence with a state [K, V] per head.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from coat_vlm.config import ModuleName
from coat_vlm.model.configuration import count_layers
from coat_vlm.model.loss import why_logits_are_needed

# Layer types, and whether they have a sliding window; None if they compare no pairs of tokens.
_WINDOWED = {
    "sliding_attention": True,
    "full_attention": False,
    "linear_attention": None,
    "conv": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The content of a batch, without padding."""

    units: int
    """What the tower reads: tiles and frames, or patches of images that keep their size."""
    pairs: int = 0
    """Pairs of patches that attend to each other, in all blocks of the tower; 0 for tiles."""
    vision_tokens: int
    supervised_tokens: int
    lengths: Sequence[int]
    """Tokens of each sequence; attention does not cross sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward and backward pass by source; see :func:`count_flops`."""

    unit: int
    """The vision tower, per unit of :attr:`Work.units`, with the attention within a tile."""
    unit_pair: int
    """Its attention, per pair of :attr:`Work.pairs`."""
    projected: int
    """The projector, per output token."""
    projected_per_unit: Fraction | int | None
    """Projector outputs per tile; None if there is one per vision token."""
    token: int
    """The language model's weights without the output layer, per token."""
    windows: Counter[int | None]
    """The language model's attention, per pair, by sliding window; None for full attention."""
    output: int
    """The output layer, per input position."""
    output_reads_all: bool
    """Whether it reads all positions, not only the supervised ones."""

    def count(self, work: Work) -> dict[ModuleName, int]:
        """Count the FLOPs of a batch by part of the model; 0 for absent parts."""
        tokens = sum(work.lengths)
        made = work.vision_tokens if work.units else 0
        if self.projected_per_unit is not None:
            made = int(work.units * self.projected_per_unit)  # before temporal pooling
        pairs = int(self._count_causal(np.array(work.lengths, np.int64)).sum())
        read = tokens if self.output_reads_all else work.supervised_tokens
        return {
            "vision": self.unit * work.units + self.unit_pair * work.pairs,
            "projector": self.projected * made,
            "language": self.token * tokens + pairs + self.output * read,
        }

    def estimate(self, tokens: np.ndarray, units: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """Estimate the FLOPs (n,) of samples, without the output layer; the arguments are (n,).

        They are as in :class:`Work`. A projector with an output per vision token is left out.
        """
        shown = units.astype(np.float64)
        unit = self.unit + self.projected * (self.projected_per_unit or 0)
        vision = float(unit) * shown + self.unit_pair * pairs.astype(np.float64)
        length = tokens.astype(np.float64)
        return vision + self.token * length + self._count_causal(length)

    def _count_causal(self, lengths: np.ndarray) -> np.ndarray:
        """Count the FLOPs of causal attention in all layers, some with a window."""
        flops = np.zeros_like(lengths)
        for window, each in self.windows.items():
            seen = lengths if window is None else np.minimum(lengths, window)
            flops += each * (seen * (seen + 1) // 2 + (lengths - seen) * seen)
        return flops


def count_flops(model: Any) -> ModelFlops:
    """Count a model's FLOPs, before DeepSpeed wraps it, with its ``requires_grad`` flags.

    Registration order decides which modules are below others. With LoRA on only the language model,
    grad-input of the first block's k and v counts, which training does not compute. Raises
    ValueError for a model with other layers, or of a family that is not tested.
    """
    config, text = model.config, model.language.config
    if not model.packs:
        raise ValueError("it is not in a tested family")
    if not getattr(text, "num_attention_heads", None) or getattr(text, "kv_lora_rank", None):
        raise ValueError("its attention heads do not have one common width")
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    if other := set(types) - _WINDOWED.keys():
        raise ValueError(f"it has layers of the types {', '.join(sorted(other))}")
    parts = model.find_parts()
    names = tuple(f"{name}." for name in getattr(model, "unused", ()))
    unused = {id(p) for name, p in model.named_parameters() if f"{name}.".startswith(names or "-")}
    count = partial(_count_gemms, unused=unused)
    unit = unit_pair = projected = 0
    per_unit: Fraction | int | None = None
    trains = False
    if "vision" in parts:
        vision, layers = config.vision_config, sum(count_layers(config))
        heads = getattr(vision, "num_attention_heads", 0) * getattr(vision, "head_dim", 0)
        width = heads or getattr(vision, "embed_dim", None) or vision.hidden_size
        patches, prefix, per_unit = _describe_unit(model, parts["vision"])
        positions = patches + prefix
        unit, trains = count(parts["vision"], False, positions=positions, patches=patches)
        unit_pair = _count_attention(1, width, trains)
        if patches > 1:  # attention stays within a tile
            unit, unit_pair = unit + layers * positions**2 * unit_pair, 0
    if "projector" in parts:
        projected, trains = count(parts["projector"], trains)
    output = model.get_output_embeddings().weight
    token, trains = count(parts["language"], trains, without=output, text=text)
    windows: Counter[int | None] = Counter()
    for layer, kind in zip(text.per_layer_config, types, strict=True):
        windowed = _WINDOWED[kind]
        if windowed is not None:
            heads = layer.num_attention_heads
            width = heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
            window = getattr(text, "sliding_window", None) if windowed else None
            windows[window] += _count_attention(1, width, trains)
        elif kind == "linear_attention":
            states = text.linear_key_head_dim * text.linear_value_head_dim
            states *= text.linear_num_value_heads
            token += _count_attention(3, states, trains) // 2  # two products per pair there
    return ModelFlops(
        unit=unit,
        unit_pair=unit_pair,
        projected=projected,
        projected_per_unit=per_unit,
        token=token,
        windows=windows,
        output=2 * output.numel() * (1 + trains + output.requires_grad),
        output_reads_all=why_logits_are_needed(model) is not None,
    )


def _describe_unit(model: Any, tower: nn.Module) -> tuple[int, int, Fraction | int | None]:
    """Return patches and class tokens of one of :attr:`Work.units`, and projector outputs of it.

    The latter are None if there is one per vision token.
    """
    config, vision = model.config, model.config.vision_config
    if getattr(getattr(model, "family", None), "reads_patches", False):
        outer = getattr(config, "spatial_merge_size", None)  # where Mistral 3 has it
        merged = getattr(vision, "spatial_merge_size", outer)
        return 1, 0, None if merged is None else Fraction(1, merged**2)
    sides = (vision.image_size, vision.patch_size)
    image, patch = (side if isinstance(side, int) else side[0] for side in sides)
    patches = (image // patch) ** 2
    if hasattr(config, "tokens_per_image"):
        per_unit = None if config.s2_scales else config.tokens_per_image
        return patches, config.num_prefix_tokens, per_unit
    names = (name for name, _ in tower.named_parameters())
    prefix = sum(name.endswith(("class_embedding", "cls_token")) for name in names)
    if not hasattr(config, "image_grid_pinpoints"):
        return patches, prefix, None
    # Features are projected before they are cropped or pooled.
    keeps = config.vision_feature_select_strategy == "full"
    return patches, prefix, patches + keeps * prefix


def _count_used(weight: Tensor, text: Any) -> int:
    """Count the elements that multiply a token or patch, of experts the active ones.

    ``text`` is the configuration of a language model, None for other parts. ValueError: unknown.
    """
    if text is None or weight.ndim < 3:
        return weight.numel() if weight.ndim in (2, 4, 5) else 0  # others are added
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if weight.ndim == 3 and len(weight) == experts:
        active = getattr(text, "num_experts_per_tok", None) or text.top_k_experts
        return weight[0].numel() * active
    if weight.ndim > 3 or weight.shape[1] > 1:  # not a convolution of each channel
        raise ValueError(f"it has a weight of the shape {tuple(weight.shape)}")
    return weight.numel()


def _count_attention(pairs: int, width: int, trains: bool) -> int:
    """Count the FLOPs of attention; ``width`` is the sum over all heads."""
    return 4 * pairs * width * (3 if trains else 1)


def _count_gemms(
    part: nn.Module,
    below: bool,
    *,
    unused: Container[int],
    positions: int = 1,
    patches: int = 0,
    without: Tensor | None = None,
    text: Any = None,
) -> tuple[int, bool]:
    """Count the FLOPs of the GEMMs with a part's weights; ``below``: a trained module is below.

    Matrices read ``positions`` vectors, and the convolution of a tower ``patches`` of pixels, which
    need no gradient. ``text`` is the configuration of a language model. Also returns whether a
    module in the part or below it is trained.
    """
    flops = 0
    # Parameters of modules with children are positions and the like, used after the children.
    for owner in sorted(part.modules(), key=lambda module: any(True for _ in module.children())):
        looked_up = isinstance(owner, nn.Embedding)
        for name, weight in owner.named_parameters(recurse=False):
            # open_clip's positional_embedding is a matrix that is added, not multiplied.
            left_out = looked_up or name == "positional_embedding" or weight is without
            if not left_out and id(weight) not in unused:
                from_pixels = weight.ndim > 3 and bool(patches)
                passes = 1 + weight.requires_grad + (below and not from_pixels)
                rows = patches if from_pixels else positions
                flops += 2 * _count_used(weight, text) * passes * rows
            below = below or weight.requires_grad
    return flops, below
