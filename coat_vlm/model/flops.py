"""Model FLOPs: the work that a step's samples need, whoever does it and however.

One multiply-add is 2 FLOPs; matrix products, the patches' convolution and attention are counted
and nothing else (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T per
token). For a weight [N, K] that reads R rows:

    forward                                                        2 R N K
    gradient of the weight, if it trains                           2 R N K
    gradient of the rows, if something that trains made them       2 R N K

and for attention of H heads of width D, over P pairs of a query and a key that it sees:

    forward  2 * 2 P H D    (q k^T and probabilities times v)
    backward 2 * 4 P H D    (if anything in the part or below it trains)

    P of an image of L patches and class tokens                    L^2
    P of a sequence of L tokens (causal)                           L (L + 1) / 2
    P of one where a token sees W at most, L > W                   W (W + 1) / 2 + (L - W) W

Unlike appendix B: a causal pair that is not seen is no work; embeddings are looked up, not
multiplied; what is frozen has no gradient; and the output layer reads only the positions that are
trained, as the loss does (:mod:`coat_vlm.model.loss`), or all where the loss needs all logits.

Not counted, as a leaner program would not do it: padding; what gradient checkpointing and flash
attention compute twice; the zero image of a batch without images. Not counted, as it is small:
pooling in time, resizing of scales, norms, activations, rotary angles, the optimizer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_vlm.config import ModuleName
from coat_vlm.model.configuration import kept_layers
from coat_vlm.model.loss import why_logits_are_needed
from coat_vlm.model.vlm import CoatVlm

_WINDOWED = {"sliding_attention": True, "full_attention": False}
"""Kinds of layers, and whether they have a sliding window."""

_POSITIONS = "positional_embedding"
"""open_clip's matrix that is added and not multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a batch holds, without padding."""

    tiles: int
    """Tiles of images, and frames, that the tower sees."""
    vision_tokens: int
    """Positions of the language model that their features fill."""
    trained_tokens: int
    """Positions with a target."""
    lengths: Sequence[int]
    """Tokens of each sequence; tokens of different ones do not see each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward and backward pass, by what causes them; see :func:`model_flops`."""

    tile: int
    """The vision tower, per tile."""
    projected: int
    """The projector, per token that it makes."""
    projected_per_tile: int | None
    """Tokens that it makes of a tile; None with several scales, where it makes what is placed."""
    token: int
    """The language model's weights but the output layer's, per token."""
    pair: int
    """Its attention, per layer and pair."""
    windows: Counter[int | None]
    """Its layers by the tokens that one sees in them; None for all of its sequence."""
    output: int
    """The output layer, per position that it reads."""
    output_reads_all: bool
    """Whether it reads all positions, and not the trained ones alone."""

    def of(self, work: Work) -> dict[ModuleName, int]:
        """FLOPs of a batch by the part of the model; those that are not there have 0."""
        tokens = sum(work.lengths)
        made = work.vision_tokens
        if self.projected_per_tile is not None:
            made = work.tiles * self.projected_per_tile  # before pooling in time
        pairs = 0  # of a query and a key that it sees in a causal sequence
        for window, layers in self.windows.items():
            for length in work.lengths:
                seen = length if window is None else min(length, window)
                pairs += layers * (seen * (seen + 1) // 2 + (length - seen) * seen)
        read = tokens if self.output_reads_all else work.trained_tokens
        return {
            "vision": self.tile * work.tiles,
            "projector": self.projected * made,
            "language": self.token * tokens + self.pair * pairs + self.output * read,
        }


def model_flops(model: CoatVlm) -> ModelFlops:
    """FLOPs of a model as it trains now: what is frozen is told by ``requires_grad``.

    Weights are counted from the parameters, so that every tower, projector and adapter is as it
    is built; in the order in which they are registered, which decides what lies below what. That
    order is wrong for LoRA on a language model under which nothing trains: the first block's k and
    v are counted with a gradient of their input, which is not needed.

    Args:
        model: before DeepSpeed gets it: ZeRO-3 takes the parameters' shapes away.

    Raises:
        ValueError: the language model's FLOPs do not follow from its parameters and configuration
            (mixtures of experts, layers without attention).
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
        tile, trains = _products(model.vision_tower, False, positions=positions, patches=patches)
        layers = kept_layers(vision.num_hidden_layers, config.select_layer)
        tile += layers * _attention(positions**2, vision.hidden_size, trains)
    if model.projector is not None:
        projected, trains = _products(model.projector, trains)
    language = model.language_model
    output: Any = language.get_output_embeddings().weight
    token, trains = _products(language, trains, without=output)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelFlops(
        tile=tile,
        projected=projected,
        projected_per_tile=None if config.s2_scales else config.tokens_per_image,
        token=token,
        pair=_attention(1, text.num_attention_heads * width, trains),
        windows=Counter(_windows(text)),
        output=2 * output.numel() * (1 + trains + output.requires_grad),
        output_reads_all=why_logits_are_needed(language) is not None,
    )


def why_not_counted(language_model: PreTrainedModel) -> str | None:
    """Why a language model's FLOPs are not those of :func:`model_flops`; None if they are."""
    config: Any = language_model.config
    for name, parameter in language_model.named_parameters():
        if parameter.ndim > 2:
            return f"{name} has {parameter.ndim} dimensions (experts, or a convolution)"
    if not getattr(config, "num_attention_heads", None) or getattr(config, "kv_lora_rank", None):
        return "its attention is not that of heads of one width"
    other = set(getattr(config, "layer_types", None) or ()) - _WINDOWED.keys()
    if other:
        return f"it has layers of the types {', '.join(sorted(other))}"
    return None


def _attention(pairs: int, width: int, trains: bool) -> int:
    """FLOPs of a layer whose heads have this width together."""
    return 4 * pairs * width * (3 if trains else 1)


def _products(
    part: nn.Module,
    below: bool,
    *,
    positions: int = 1,
    patches: int = 1,
    without: Tensor | None = None,
) -> tuple[int, bool]:
    """FLOPs of products with the weights of a part.

    Args:
        part: a part of the model.
        below: whether something trains that makes what it reads.
        positions: rows that its matrices read.
        patches: rows that its convolution reads, which are pixels: nothing below them trains.
        without: a weight that is left out.

    Returns:
        FLOPs, and whether something trains in the part or below it.
    """
    flops = 0
    for owner in part.modules():
        looked_up = isinstance(owner, nn.Embedding)
        for name, weight in owner.named_parameters(recurse=False):
            added = name == _POSITIONS or weight.ndim not in (2, 4)
            if not (looked_up or added or weight is without):
                from_pixels = weight.ndim == 4
                passes = 1 + weight.requires_grad + (below and not from_pixels)
                flops += 2 * weight.numel() * passes * (patches if from_pixels else positions)
            below = below or weight.requires_grad
    return flops, below


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer; None where a token sees its whole sequence."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if _WINDOWED[kind] else None for kind in types]
