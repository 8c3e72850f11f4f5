"""Computes the largest number of video frames per row that fits: in tokens, and in memory.

A row holds at most so many frames as ``max_length`` has room for:

    pool_frames * floor((tokens - 1) / (tokens_per_image + time))

``time`` is :data:`TIME_TOKENS` with ``time_tokens``, else 0. Memory at a fixed length of the row is
linear in the number of frames, so two traces determine it.
"""

from dataclasses import dataclass

from coat_vlm.config import Recipe, VideoConfig
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.plan.activations import Activations, trace

TIME_TOKENS = 10
"""Tokens assumed for a time such as ``<1023.5 seconds>``; Qwen's tokenizer needs 9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesPlan:
    """The activations of a micro-batch of full rows with many frames, and with half as many."""

    most: int
    """Frames per row whose tokens fit."""
    group_tokens: int
    """Tokens of a group of frames, its time included."""
    group_frames: int
    """Frames per group."""
    full: Activations
    """Activations with ``most`` frames per row."""
    half: Activations
    """Activations with half of them, rounded down."""

    def activations(self, frames: int) -> Activations:
        """Return the activations with another number of frames per row."""
        half = self.most // 2
        return self.half.extrapolate(self.full, (frames - half) / (self.most - half))


def trace_frames(
    model: CoatVlm, recipe: Recipe, tokens: int, micro_batch: int, *, reuse_weights: bool
) -> FramesPlan | None:
    """Trace full rows of frames; None for a recipe without video settings, or without room.

    Args:
        model: the model on ``meta``, as for :func:`coat_vlm.plan.activations.trace`.
        recipe: contains the video settings.
        tokens: tokens per row.
        micro_batch: rows per micro-batch.
        reuse_weights: as for :func:`coat_vlm.plan.activations.trace`.
    """
    video = recipe.model.video
    if video == VideoConfig() or model.vision_tower is None:
        return None
    pool = video.pool_frames or 1
    each = model.config.tokens_per_image + (TIME_TOKENS if video.time_tokens else 0)
    most = pool * ((tokens - 1) // each)
    if most < 2:
        return None
    full, half = (
        trace(model, micro_batch, tokens, n, pool_frames=pool, reuse_weights=reuse_weights)
        for n in (most, most // 2)
    )
    return FramesPlan(most=most, group_tokens=each, group_frames=pool, full=full, half=half)
