"""A published model's own processor in the data engine.

The tokens are those that the processor itself makes of the conversation
(tests/vlm/test_families.py), with two differences: a special token in a user's text is text, and
the line break that LLaVA's rows have between an image and a text is left out. Supervised tokens are
those of :mod:`coat_data.text.chat`: answers, and the token that ends each.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor

from coat_data.load.encode import IGNORE_INDEX, EncodedSample, Encoder, Size, as_tensor
from coat_data.media.image import ImageTransform, image_size, open_image
from coat_data.readers.boxes import TAG, rewrite_boxes
from coat_data.sample import DataError, Part, Sample, Turn, errors_within
from coat_data.text.jinja import JinjaTemplate
from coat_data.text.tokens import Segment, TokenizerLike
from coat_vlm.model.chat_templates import find_pad_id
from coat_vlm.model.families import FAMILIES, Family, find_family
from coat_vlm.model.pretrained import load_auto, read_files

logger = logging.getLogger(__name__)

_FILES = ("*token*", "vocab.*", "merges.txt", "chat_template.*", "*processor_config.json")
_FILES += ("*.model", "LICENSE*", "generation_config.json")
_IMAGE_SIZE = "the image size in the preprocessor_config.json of the model's folder"
_LINE_BREAKS = re.compile(r"^\n+|\n+$")


class FamilyProcessor:
    """The processor of a published model, with what training asks of a processor."""

    template = "tokenizer"

    _files: dict[str, bytes]

    def __init__(self, processor: Any, family: Family, max_length: int, vocab_size: int) -> None:
        self._processor = processor
        self._family = family
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor
        self.max_length = max_length
        self.pad_token_id = find_pad_id(self.tokenizer, vocab_size, processor.image_token)

    @classmethod
    def load(
        cls, where: str, path: str, max_length: int | None = None, max_pixels: int | None = None
    ) -> "FamilyProcessor":
        """Load the processor of a folder or of a model on the Hub; ``where`` is the recipe key.

        The default of ``max_length`` is the length that the model supports. Raises ValueError if
        the processor cannot be used, or ``max_pixels`` has no effect on it.
        """
        family, config = find_family(where, path)
        try:
            processor: Any = load_auto(AutoProcessor, path)
            files = read_files(path, *_FILES)
            known = inspect.signature(type(processor)).parameters.keys() - json.loads(
                files.get("processor_config.json", "{}")
            )
            missing = {name: _SETTINGS[name](config) for name in sorted(known & _SETTINGS.keys())}
            if any(getattr(processor, name) != value for name, value in missing.items()):
                listed = ", ".join(f"{name}={value}" for name, value in missing.items())
                logger.warning("%s: processor_config.json lacks %s of config.json", path, listed)
                processor = load_auto(AutoProcessor, path, **missing)
        except (OSError, ValueError, ImportError, KeyError) as error:  # KeyError: of tokenizer.json
            raise ValueError(
                f"{where}={path!r} has no processor that transformers can load: {error}; required: "
                "the files of the published model, with preprocessor_config.json and the tokenizer"
            ) from error
        if not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
            raise ValueError(
                f"{where}={path!r}: the processor has no chat template, so there is no format for "
                "conversations; add the chat_template.jinja of the published model"
            )
        if max_pixels is not None:
            limit_pixels("model.max_pixels", processor, config.model_type, max_pixels)
            _write_size(files, dict(processor.image_processor.size))
        text = config.get_text_config()
        longest: int = text.max_position_embeddings if max_length is None else max_length
        found = cls(processor, family, longest, text.vocab_size)
        found._files = files
        return found

    def adopt_template(self, name: str | None) -> None:
        """Keep the model's own chat template; a recipe cannot name another one."""
        assert name is None

    def encoder(self, *, template: str | None = None) -> "FamilyEncoder":
        """Create the encoder of samples."""
        assert template in (None, self.template)
        return FamilyEncoder(self._processor, self._family, self.max_length)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of the folder that it is loaded from, with ``max_pixels`` if given."""
        for name, content in self._files.items():
            (Path(folder) / name).write_bytes(content)


_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "image_seq_len": lambda c: _count_patches(c) // c.scale_factor**2,
    "image_seq_length": lambda c: getattr(c, "mm_tokens_per_image", None) or c.image_seq_length,
    "num_additional_image_tokens": lambda c: int(c.vision_config.model_type == "clip_vision_model"),
    "num_image_tokens": lambda c: _count_patches(c),
    "patch_size": lambda c: c.vision_config.patch_size,
    "vision_feature_select_strategy": lambda c: c.vision_feature_select_strategy,
}
"""Settings of processor_config.json, which older folders lack, by the model's configuration."""


def _count_patches(config: Any) -> int:
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def _write_size(files: dict[str, bytes], size: dict[str, int]) -> None:
    """Write the image processor's size into the file that has it."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        values = json.loads(files.get(name, "{}"))
        images = values if name.startswith("pre") else values.get("image_processor")
        if images:
            images |= {"size": size, "max_pixels": size["longest_edge"]}  # or transformers 4's name
            files[name] = (json.dumps(values, indent=2) + "\n").encode()


def limit_pixels(key: str, processor: Any, model_type: str, max_pixels: int | None) -> None:
    """Shrink larger images to ``max_pixels``; ValueError, with ``key``, if that has no effect."""
    if max_pixels is None:
        return
    family = FAMILIES.get(model_type)
    if family is None or not family.limits_pixels:
        name = model_type if family is None else family.name
        names = ", ".join(one.name for one in FAMILIES.values() if one.limits_pixels)
        raise ValueError(
            f"{key}={max_pixels} has no effect with {name}, whose processor "
            "limits no number of pixels; remove it, and change preprocessor_config.json in a local "
            f"folder of the model; families with such a limit: {names}"
        )
    images = processor.image_processor
    least = images.size["shortest_edge"]  # pixels, in spite of its name
    if max_pixels < least:
        raise ValueError(
            f"{key}={max_pixels} is less than the {least} pixels to which the processor "
            "enlarges small images; raise it"
        )
    images.size = type(images.size)(**{**dict(images.size), "longest_edge": max_pixels})


def _image_options(processor: Any) -> dict[str, Any]:
    """Return the options with which a processor calls its image processor: those of its class.

    They precede preprocessor_config.json: InternVL3's says ``crop_to_patches: false``.
    """
    options = getattr(processor, "images_kwargs", None)
    if options is None:  # transformers before 5.20
        defaults = getattr(processor.valid_processor_kwargs, "_defaults", {})
        options = defaults.get("images_kwargs", {})
    return dict(options)


class ProcessorTemplate(JinjaTemplate):
    """The chat template of a processor, in which an image is the processor's image token."""

    remedy = "change chat_template.jinja in a local folder of the model"

    def __init__(self, processor: Any, *, adds_end_token: bool = False) -> None:
        self.image_token = processor.image_token
        self.adds_end_token = adds_end_token
        template = processor.chat_template or processor.tokenizer.chat_template
        super().__init__(cast(TokenizerLike, processor.tokenizer), template)
        self._processor = processor

    def adapt(self, turn: Turn) -> Turn:
        """Return the turn without the line breaks between images and texts."""
        if all(part.kind == "text" for part in turn.parts):
            return turn
        stripped = (
            Part("text", _LINE_BREAKS.sub("", part.text)) if part.kind == "text" else part
            for part in turn.parts
        )
        return replace(turn, parts=tuple(p for p in stripped if p.kind != "text" or p.text))

    def content(self, parts: Sequence[tuple[str, str]]) -> Any:
        """Return the parts of a message, without the media themselves."""
        # A video is written like an image here: the encoder rejects it with its row.
        return [
            {"type": "text", "text": text} if kind == "text" else {"type": "image"}
            for kind, text in parts
        ]

    def apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render messages."""
        return self._processor.apply_chat_template(messages, tokenize=False, **options)


class FamilyEncoder(Encoder):
    """Encodes samples with the processor of a published model; an instance can be pickled."""

    reads_images = False

    def __init__(self, processor: Any, family: Family, max_length: int) -> None:
        super().__init__(
            cast(TokenizerLike, processor.tokenizer),
            ProcessorTemplate(processor, adds_end_token=family.adds_end_token),
            ImageTransform(1, (0.5,) * 3, (0.5,) * 3),  # not used: the processor reads images
            tokens_per_image=1,  # of a layout; the processor knows the number of tokens
            image_token_id=processor.tokenizer.convert_tokens_to_ids(processor.image_token),
            max_length=max_length,
        )
        self._processor = processor
        self._family = family

    def __call__(self, sample: Sample) -> EncodedSample:
        """Encode the whole conversation; see :class:`Encoder`. A video is a DataError."""
        encoded = super().__call__(self.written(sample))
        return encoded if sample.media else replace(encoded, filler=self.filler)

    def measure(self, sample: Sample) -> Size:
        """Encode the sample and return its size: only the processor knows it."""
        return Size(len(self(sample).input_ids), len(sample.media))

    def segments(self, sample: Sample, *, add_generation_prompt: bool = False) -> list[Segment]:
        """Render the conversation, with boxes as the family writes them."""
        sample, tagged = self.written(sample), self._family.boxes == "tagged thousandths"
        segments = super().segments(sample, add_generation_prompt=add_generation_prompt)
        if not (tagged and sample.media and any("<box>[[" in one.text for one in segments)):
            return segments
        # The tags of boxes are tokens; other special tokens in texts stay text.
        return [
            segment._replace(kind="literal" if TAG.fullmatch(text) else segment.kind, text=text)
            for segment in segments
            for text in (TAG.split(segment.text) if segment.kind == "text" else [segment.text])
            if text or segment.kind != "text"
        ]

    def written(self, sample: Sample) -> Sample:
        """Return the sample with its boxes as the family writes them; reads headers of images."""
        style, media = self._family.boxes, sample.media
        if style == "fractions" or {medium.kind for medium in media} != {"image"}:
            return sample

        @cache
        def resize(number: int) -> tuple[float, float]:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # slow

            width, height = image_size(media[number])
            images = self._processor.image_processor
            limits = images.size["shortest_edge"], images.size["longest_edge"]
            with suppress(ValueError):  # the processor will refuse the image
                factor = images.patch_size * images.merge_size
                height, width = smart_resize(height, width, factor, *limits)
            return width, height

        with errors_within(sample.where):
            return rewrite_boxes(sample, style, resize if style == "pixels" else None)

    def describe_pixels(self, encoded: EncodedSample) -> str:
        """Return the sizes of the images that the model gets, for people."""
        grids = encoded.extras.get("image_grid_thw")
        if grids is None:
            return super().describe_pixels(encoded)
        side = self._processor.image_processor.patch_size
        return ", ".join(f"{w * side} x {h * side}" for _, h, w in grids.tolist())

    def _encode(self, sample: Sample, segments: list[Segment]) -> EncodedSample:
        media = sample.media
        self._check_media(sample, segments)
        with errors_within(sample.where):
            texts, inputs = self._read([open_image(medium) for medium in media])
            ids, labels = self._tokens(segments, texts)
        if len(ids) > self.max_length:
            of = f", with those of {len(media)} images," if media else ""
            lower = "model.max_pixels" if self._family.limits_pixels else _IMAGE_SIZE
            remedy = "or split the conversation" + (f", or lower {lower}" if media else "")
            raise self._too_long(sample, len(ids), of, remedy)
        return EncodedSample(
            as_tensor(ids),
            as_tensor(labels),
            inputs.pop("pixel_values", torch.empty(0)),
            counts={"images": len(media)},
            extras=inputs,
        )

    def _read(self, images: Sequence[Image.Image]) -> tuple[list[str], dict[str, Tensor]]:
        """Return the text of each image's tokens, and the model's inputs for the images."""
        if not images:
            return [], {}
        processor, family = self._processor, self._family
        # One list per conversation: some processors treat several images of one differently.
        try:
            found, texts = processor._process_images(
                [list(images)], **{**_image_options(processor), "return_tensors": "pt"}
            )
        except ValueError as error:  # such as a side 200 times as long as the other (Qwen)
            raise DataError(
                f"images of {', '.join('{} x {}'.format(*image.size) for image in images)} pixels",
                f"{family.name}'s image processor refuses them: {error}",
                "crop them, or remove the row",
            ) from error
        return texts, {name: found[name] for name in family.inputs if name in found}

    def _begins(self, segments: Sequence[Segment]) -> bool:
        """Whether the tokenizer's begin-of-text token is missing, which the processor then adds."""
        begin = self._processor.tokenizer.bos_token
        return begin is not None and not segments[0].text.startswith(begin)

    @cached_property
    def filler(self) -> EncodedSample:
        """The tokens and pixels of a small image, without labels."""
        texts, inputs = self._read([Image.new("RGB", (64, 64))])
        ids = torch.tensor(self.tokenizer.encode([Segment("literal", texts[0])])[0])
        labels = torch.full_like(ids, IGNORE_INDEX)
        return EncodedSample(ids, labels, inputs.pop("pixel_values"), extras=inputs)

    def _check_media(self, sample: Sample, segments: Sequence[Segment]) -> None:
        if any(medium.kind == "video" for medium in sample.media):
            raise DataError(
                sample.where,
                "shows a video, and a model of model.pretrained is trained on images and text",
                "remove the row or its source, or compose the model of model.vision and "
                "model.language",
            )
        super()._check_media(sample, segments)
