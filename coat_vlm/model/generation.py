"""Inputs of generation steps: the images of each row, for beams, samples and earlier calls' caches.

``pixel_values`` contains the images of all rows in order, so that it has no row per sequence.
transformers' :class:`GenerationMixin` repeats and drops inputs by rows of a batch.
"""

from typing import Any

import torch
from transformers import GenerationMixin

from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.projector import list_image_sizes

_LAYOUT = ("image_grids", "frame_groups")
_MEDIA = ("pixel_values", *_LAYOUT)


def count_images(images: torch.Tensor | None) -> int:
    """Return the number of images or tiles in ``pixel_values``."""
    return 0 if images is None else images.shape[0]


class ImageGenerationMixin(GenerationMixin):
    """``generate`` for a model with images at placeholders of its tokens."""

    config: CoatVlmConfig

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        *args: Any,
        inputs_embeds: torch.Tensor | None = None,  # by this name `generate` knows that it may
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs of a generation step; with a cache, only the first one has images.

        If the cache of an earlier call has some of the images, the step has the others.
        """
        kwargs.pop("image_positions", None)  # invalid after rows are repeated
        media: dict[str, Any] = {name: kwargs.pop(name, None) for name in _MEDIA}
        inputs = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            *args,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        cache = kwargs.get("past_key_values")
        first = is_first_iteration or cache is None or cache.get_seq_length() == 0
        if first or not kwargs.get("use_cache", True):
            shown = 0 if inputs["input_ids"] is None else inputs["input_ids"].shape[1]
            if count_images(media["pixel_values"]) and shown < input_ids.shape[1]:
                media = self._keep_last_images(input_ids, shown, media)
            inputs |= media
        return inputs

    def _split_media(
        self, ids: torch.Tensor, media: dict[str, torch.Tensor | None]
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        counts = self.count_row_images(ids, media["image_grids"], media["frame_groups"])
        rows: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, tensor in media.items():
            if tensor is None:
                continue
            sizes = [tiles if name == "pixel_values" else own for own, tiles in counts]
            if sum(sizes) != len(tensor):
                raise ValueError(
                    f"the rows have image placeholders (id {self.config.image_token_id}) for "
                    f"{sizes} entries of {name}, which has {len(tensor)}; give the placeholders "
                    "and images that the processor makes"
                )
            rows[name] = tensor.split(sizes)
        return rows

    def _keep_last_images(
        self, ids: torch.Tensor, num_last: int, media: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor | None]:
        """Return the media of the last ``num_last`` tokens of ``ids`` (B, T)."""
        rows = self._split_media(ids, media)
        seen = [
            self.count_row_images(
                before[None], *(rows[name][row] if name in rows else None for name in _LAYOUT)
            )[0]
            for row, before in enumerate(ids[:, : ids.shape[1] - num_last])
        ]
        found = dict(media)
        for name, split in rows.items():
            drop = [tiles if name == "pixel_values" else own for own, tiles in seen]
            found[name] = torch.cat([own[n:] for own, n in zip(split, drop, strict=True)])
        return found

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        # transformers would repeat each image; all images of a row must be repeated together.
        media = {name: model_kwargs.pop(name, None) for name in _MEDIA}
        if count_images(media["pixel_values"]) and expand_size > 1:
            assert input_ids is not None
            for name, rows in self._split_media(input_ids, media).items():
                repeated = [row.repeat(expand_size, *[1] * (row.ndim - 1)) for row in rows]
                media[name] = torch.cat(repeated)
        expanded_ids, model_kwargs = super()._expand_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        return expanded_ids, model_kwargs | media

    def count_row_images(
        self,
        input_ids: torch.Tensor,
        image_grids: torch.Tensor | None = None,
        frame_groups: torch.Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """Count images (or groups) and tiles of ``pixel_values`` per row of ids (B, T)."""
        if not self.config.has_vision:
            return [(0, 0)] * len(input_ids)
        placeholders = (input_ids == self.config.image_token_id).sum(1).tolist()
        tokens = self.config.tokens_per_image
        images = sum(placeholders) // tokens
        scales = self.config.s2_scales or ()
        sizes = iter(list_image_sizes(tokens, images, image_grids, frame_groups, scales))
        counts: list[tuple[int, int]] = []
        for left in placeholders:
            tiles = []
            while left > 0 and (size := next(sizes, None)) is not None:
                left -= size[0]
                tiles.append(size[1])
            counts.append((len(tiles), sum(tiles)))
        return counts
