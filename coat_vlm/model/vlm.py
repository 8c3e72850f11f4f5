"""The composed model: vision tower, projector and causal language model as one PreTrainedModel.

A sequence contains ``config.tokens_per_image`` placeholders per image or tile, whose embeddings the
projected image features replace in order (LLaVA, Liu et al. 2023, arXiv:2304.08485, section 4.1).
"""

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from coat_vlm.config import ModuleName
from coat_vlm.model.compressed import make_load_arguments, read_compression
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.generation import ImageGenerationMixin, count_images
from coat_vlm.model.loss import loss_for_logits, next_token_loss, why_logits_are_needed
from coat_vlm.model.packing import (
    PACKED,
    Packing,
    make_empty_mask,
    mask_for_loss,
    read_packing,
    skip_packing_search,
)
from coat_vlm.model.placeholders import (
    copy_to_device,
    find_placeholders,
    place_features,
    pool_frames,
)
from coat_vlm.model.pretrained import load_complete, readable_errors
from coat_vlm.model.projector import Grid, Projector, build_projector, project_scales
from coat_vlm.model.sequence_parallel import SHARD, SequenceGroup, SequenceShard, distribute_images
from coat_vlm.model.vision import VisionTower

logger = logging.getLogger(__name__)

INFERENCE_TILES = 64
"""Tiles that tower and projector process at once without gradients: about 1.5 GB in a tower of
0.4B with 448 pixels."""


class CoatVlm(PreTrainedModel, ImageGenerationMixin):
    """Vision tower -> projector -> any causal language model of transformers."""

    config_class = CoatVlmConfig
    main_input_name = "input_ids"
    input_modalities = ["image", "text"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # The language model adds entries to both lists.
    _no_split_modules = ["VisionTower"]  # noqa: RUF012 - as transformers declares it
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: CoatVlmConfig) -> None:
        super().__init__(config)
        self.vision_tower: VisionTower | None = None
        self.projector: Projector | None = None
        if config.projector_type is not None:
            self.vision_tower = VisionTower(config)
            self.projector = build_projector(
                config.projector_type, config.feature_size, config.text_config.hidden_size
            )
        self.language_model = AutoModelForCausalLM.from_config(
            config.text_config, trust_remote_code=False
        )
        if config.has_vision:
            # A generated placeholder would have no image.
            self.generation_config.suppress_tokens = [config.image_token_id]
        self.post_init()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a composed checkpoint; compressed weights (``export --weights``) are decompressed.

        Raises ValueError for another type of model, and damaged, missing or misshapen weights.
        """
        if pretrained_model_name_or_path is None:  # the weights are the argument state_dict
            name, source, scheme = "state_dict", None, None
        else:
            name = source = os.fspath(pretrained_model_name_or_path)
            scheme = read_compression(name)
        with readable_errors(name):
            if scheme is not None:
                config = kwargs.get("config") or CoatVlmConfig.from_pretrained(name)
                kwargs |= make_load_arguments(Path(name), scheme, config, kwargs.get("dtype"))
                source = None  # the weights are in the arguments
        model, info = load_complete(name, super().from_pretrained, source, *args, **kwargs)
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Module:
        """Return the language model's token embeddings."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the language model's token embeddings."""
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the language model's output layer."""
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the language model's output layer."""
        self.language_model.set_output_embeddings(new_embeddings)

    @property
    def language(self) -> PreTrainedModel:
        """The decoder with its output layer."""
        return self.language_model

    part_names: ClassVar[dict[ModuleName, tuple[str, ...]]] = {
        "vision": ("vision_tower",),
        "projector": ("projector",),
        "language": ("language_model",),
    }
    """Names of modules by part of the model."""

    def find_parts(self) -> dict[ModuleName, nn.Module]:
        """Return the parts of the model; there may be only a language model."""
        parts: dict[ModuleName, Any]
        parts = {name: getattr(self, own[0]) for name, own in self.part_names.items()}
        return {name: part for name, part in parts.items() if part is not None}

    packs = shares_tokens = True
    """Whether sequences may have several samples, and several ranks; the language model decides."""

    def prepare_attention(self, *, packed: bool) -> None:
        """Prepare attention for training, with ``packed`` for sequences of several samples."""
        if packed and self.language_model.config._attn_implementation == "sdpa":
            self.language_model.set_attn_implementation(PACKED)

    def distribute_media(
        self, batch: Mapping[str, Any], group: SequenceGroup, placeholders: int
    ) -> tuple[dict[str, Any], list[int]]:
        """See :func:`coat_vlm.model.sequence_parallel.distribute_images`."""
        return distribute_images(batch, group, self.config, placeholders)

    @property
    def base_model(self) -> "Backbone":  # pyright: ignore[reportIncompatibleMethodOverride]
        """The model without its output layer, as other models of transformers name it."""
        return Backbone(self)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grids: torch.Tensor | None = None,
        frame_groups: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        num_items_in_batch: float | torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        image_positions: torch.Tensor | None = None,
        sequence_shard: SequenceShard | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits, and the loss if labels are given.

        Args:
            input_ids: (B, T) with image placeholders.
            attention_mask: (B, T), or another mask of the language model; on the CPU it is dropped
                if the loss does not need it.
            pixel_values: (N, 3, S, S), the images of all sequences in order; N may be 0.
            image_grids: (M, 2) rows and columns of each image's largest scale (``s2_scales``).
            frame_groups: (G,) numbers of consecutive tiles that share one's tokens. Default: 1.
            inputs_embeds: (B, T, H) instead of input_ids and images.
            labels: (B, T), not shifted; -100 is ignored, and required for padding. On the CPU they
                avoid a synchronization.
            num_items_in_batch: divisor of the summed loss. Default: the supervised tokens.
            logits_to_keep: compute only this many last logits (0: all); not with labels.
            skip_logits: return only the loss, computed without storing the logits, unless the model
                scales or caps them. Default: True with labels in training mode.
            image_positions: as ``given`` of :func:`find_placeholders`.
            sequence_shard: the other arguments are a shard of ``sequence_parallel.shard_batch``.
            **kwargs: passed to the language model. With ``cu_seq_lens_q`` [N + 1] int32 and
                ``max_length_q`` the batch is one packed sequence of N samples.

        Raises ValueError if placeholders and images do not match, arguments contradict each other,
        or packed samples do not fill the sequence.
        """
        shifted = sequence_shard is not None
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("the loss needs all logits; give labels or logits_to_keep, not both")
        if skip_logits and labels is None:
            raise ValueError("skip_logits leaves nothing to return without labels; give labels")
        media = (pixel_values, image_grids, frame_groups, image_positions)
        if sequence_shard is None:
            hidden = self._embed_inputs(input_ids, inputs_embeds, *media)
        else:
            assert input_ids is not None
            hidden = self._embed_shard(input_ids, *media[:3], sequence_shard)
        skip = labels is not None and (self.training if skip_logits is None else skip_logits)
        if self.training or skip:
            kwargs.setdefault("use_cache", False)  # a cache would only use memory
        read = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if skip and past_key_values is None and kwargs["use_cache"] is False and not read:
            attention_mask = mask_for_loss(attention_mask, self.language_model)
        packing, position_ids, attention_mask = self._read_packing(
            hidden, position_ids, attention_mask, kwargs, sequence_shard
        )
        if packing is not None and labels is not None and not shifted:
            labels = packing.ignore_first_tokens(labels)
        kwargs["return_dict"] = True
        fused = skip and self._why_logits_are_needed is None
        loss_inside: AbstractContextManager[None] = nullcontext()
        if labels is not None and fused:
            layer: Any = self.get_output_embeddings()
            loss_inside = loss_for_logits(layer, labels, num_items_in_batch, shifted)
        # Packed sequences have position_ids here, which restart.
        with loss_inside, skip_packing_search(position_ids is None):
            outputs = self.language_model(
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
        loss, logits = None, outputs.logits
        if labels is not None:
            divided = (labels, num_items_in_batch, shifted)
            loss = logits if fused else next_token_loss(logits, *divided)
        if sequence_shard is not None:
            sequence_shard.check(self.language_model)
        found = CausalLMOutputWithPast(
            loss=loss,
            logits=None if skip else logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        as_object = self.config.return_dict if return_dict is None else return_dict
        return found if as_object else found.to_tuple()

    def _read_packing(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
        shard: SequenceShard | None = None,
    ) -> tuple[Packing | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the packing, positions and mask of the language model; completes ``kwargs``."""
        batch, tokens, _ = hidden.shape
        if shard is not None:
            kwargs[SHARD] = shard
            attention_mask = make_empty_mask(tokens, hidden.device)
            tokens *= shard.group.size
        packing = read_packing(batch, tokens, hidden.device, attention_mask, kwargs)
        if packing is not None:
            kwargs |= packing.to_kwargs() | {"use_cache": False}
            if position_ids is None:
                position_ids = packing.positions(tokens)
            if shard is None and self.language_model.config._attn_implementation == PACKED:
                attention_mask = make_empty_mask(tokens, hidden.device)
        return packing, position_ids, attention_mask

    def _embed_inputs(
        self,
        input_ids: torch.LongTensor | None,
        inputs_embeds: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
        *layout: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the input (B, T, H) of the language model."""
        if input_ids is not None and inputs_embeds is None:
            return self.embed(input_ids, pixel_values, *layout)
        if inputs_embeds is None or input_ids is not None:
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        if count_images(pixel_values):
            raise ValueError("images need input_ids with their placeholders, not inputs_embeds")
        return inputs_embeds

    def embed(
        self,
        input_ids: torch.LongTensor,
        pixel_values: torch.Tensor | None = None,
        image_grids: torch.Tensor | None = None,
        frame_groups: torch.Tensor | None = None,
        image_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute token embeddings (B, T, H) with projected image features at the placeholders."""
        num_images = count_images(pixel_values)
        if self.vision_tower is None:
            if num_images:
                raise ValueError(
                    f"pixel_values contain {num_images} images, and the model has no vision tower "
                    "(model.vision: null); give only text"
                )
            return self.get_input_embeddings()(input_ids)
        is_image = input_ids == self.config.image_token_id
        grids, groups = self._read_layout(num_images, image_grids, frame_groups)
        placed = sum(rows * cols for rows, cols in grids) if groups is None else len(groups)
        positions = find_placeholders(is_image, image_positions)
        per_image = self.config.tokens_per_image
        if len(positions) != placed * per_image:
            raise ValueError(
                f"input_ids contain {len(positions)} image placeholders (id "
                f"{self.config.image_token_id}) but pixel_values contain {placed} images with "
                f"{placed * per_image} features ({per_image} each); give {per_image} placeholders "
                "per image, as the processor does, and check that no sequence was truncated"
            )
        # Features replace these embeddings, so any valid id works; id 0 is not the placeholder's.
        embeds = self.get_input_embeddings()(input_ids.masked_fill(is_image, 0))
        if pixel_values is not None and num_images:
            return place_features(
                embeds, positions, self._project_images(pixel_values, grids, groups)
            )
        # With several ranks all use the same trained and partitioned parameters in a step.
        assert self.projector is not None
        vision = chain(self.vision_tower.parameters(), self.projector.parameters())
        if self.training and any(p.requires_grad or hasattr(p, "ds_id") for p in vision):
            return embeds + self._project_zero_image(embeds).sum().to(embeds.dtype) * 0
        return embeds

    def _read_layout(
        self, num_images: int, image_grids: torch.Tensor | None, frame_groups: torch.Tensor | None
    ) -> tuple[list[Grid], list[int] | None]:
        grids: list[Grid] = [(1, 1)] * num_images
        if image_grids is not None and self.config.s2_scales is not None:
            grids = [(rows, columns) for rows, columns in image_grids.tolist()]
        return grids, None if frame_groups is None else frame_groups.tolist()

    def _embed_shard(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None,
        image_grids: torch.Tensor | None,
        frame_groups: torch.Tensor | None,
        shard: SequenceShard,
    ) -> torch.Tensor:
        """Compute embeddings (1, T / N, H) of a shard, with the features that the ranks exchange.

        Every rank uses tower and projector if another one does, as they may be partitioned.
        """
        embeds = self.get_input_embeddings()(input_ids)
        if self.vision_tower is None or not (self.training or shard.sends):
            return embeds
        if pixel_values is not None and len(pixel_values):
            layout = self._read_layout(len(pixel_values), image_grids, frame_groups)
            features = self._project_images(pixel_values, *layout)
            features = features.reshape(-1, embeds.shape[2])
        else:
            features = self._project_zero_image(embeds).flatten(0, -2)[:0]
        features = shard.send_features(features.to(embeds.dtype))
        return place_features(
            embeds, copy_to_device(shard.find_places("image"), embeds.device), features
        )

    def _project_zero_image(self, embeds: torch.Tensor) -> torch.Tensor:
        assert self.vision_tower is not None
        size = self.vision_tower.image_size
        return self._project_images(embeds.new_zeros(1, 3, size, size), [(1, 1)], None)

    def _project_images(
        self, pixel_values: torch.Tensor, grids: list[Grid], groups: list[int] | None
    ) -> torch.Tensor:
        """Project all images to (N, T, H), or to (tokens, H) with several scales."""
        assert self.vision_tower is not None
        assert self.projector is not None
        if self.config.s2_scales is not None:
            features = self.vision_tower(pixel_values)
            return project_scales(features, grids, self.config.s2_scales, self.projector)
        chunks = [pixel_values]
        # Under ZeRO-3 every rank must call the tower equally often, so all tiles are one chunk.
        if not (torch.is_grad_enabled() or hasattr(next(self.vision_tower.parameters()), "ds_id")):
            chunks = pixel_values.split(INFERENCE_TILES)
        parts = [self.projector(self.vision_tower(chunk)) for chunk in chunks]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts)
        return projected if groups is None else pool_frames(projected, groups)

    @cached_property
    def _why_logits_are_needed(self) -> str | None:
        why = why_logits_are_needed(self.language_model)
        if why is not None:
            name = type(self.language_model).__name__
            logger.warning("The loss of %s stores all logits: %s.", name, why)
        return why

    def _init_weights(self, module: nn.Module) -> None:
        # Towers and language models initialize themselves. The projector keeps torch's defaults, as
        # in VILA; transformers would draw from N(0, 0.02).
        pass


class Backbone:
    """A :class:`CoatVlm` without its output layer, for TRL's losses, which store no logits."""

    def __init__(self, model: CoatVlm) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return ``last_hidden_state`` (B, T, H); arguments as of :meth:`CoatVlm.forward`."""
        model = self._model
        names = ("pixel_values", "image_grids", "frame_groups", "image_positions")
        media = [kwargs.pop(name, None) for name in names]
        hidden = model._embed_inputs(input_ids, inputs_embeds, *media)
        if kwargs.get("use_cache") is False:
            attention_mask = mask_for_loss(attention_mask, model.language_model)
        _, position_ids, attention_mask = model._read_packing(
            hidden, position_ids, attention_mask, kwargs
        )
        with skip_packing_search(position_ids is None):
            return model.language_model.base_model(
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                return_dict=True,
                **kwargs,
            )


def module_parameters(model: PreTrainedModel) -> dict[ModuleName, nn.Module]:
    """Return the existing parts of a composed or published model by the names in recipes."""
    return cast(Any, model).find_parts()


def count_parameters(module: nn.Module, trainable_only: bool = False) -> int:
    """Count parameters, shared ones once, with complete sizes also under ZeRO-3."""
    parameters = (p for p in module.parameters() if p.requires_grad or not trainable_only)
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
