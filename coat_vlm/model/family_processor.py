"""A published model's own processor in the data engine.

The tokens are those that the processor itself makes of the conversation
(tests/vlm/test_families.py), with two differences: a special token in a user's text is text, and
the line break that LLaVA's rows have between an image and a text is left out. Supervised tokens are
as in :mod:`coat_data.text.chat`: answers, and the token that ends each.
"""

import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor
from transformers.image_processing_backends import PilBackend

from coat_data.load.collate import Batch
from coat_data.load.encode import IGNORE_INDEX, EncodedSample, Encoder, Size, as_tensor
from coat_data.media.image import ImageTransform, image_size, open_image
from coat_data.media.sampling import VideoSettings
from coat_data.readers.boxes import TAG, rewrite_boxes
from coat_data.sample import DataError, Media, Part, Sample, Turn, errors_within
from coat_data.text.jinja import JinjaTemplate
from coat_data.text.tokens import Segment, TokenizerLike
from coat_vlm.config.model import VideoConfig
from coat_vlm.model.chat_templates import find_pad_id
from coat_vlm.model.families import FAMILIES, Family, find_family
from coat_vlm.model.family_layout import count_units, describe_batch
from coat_vlm.model.family_videos import EncodedVideo, FamilyMedia, sample_frames
from coat_vlm.model.pretrained import load_auto, read_files

logger = logging.getLogger(__name__)

_FILES = ("*token*", "vocab.*", "merges.txt", "chat_template.*", "*processor_config.json")
_FILES += ("*.model", "LICENSE*", "generation_config.json")
_OF_TEXT = {"attention_mask", "mm_token_type_ids", "token_type_ids", "labels"}
_IMAGE_SIZE = "the image size in the preprocessor_config.json of the model's folder"
_LINE_BREAKS = re.compile(r"^\n+|\n+$")


class FamilyProcessor:
    """The processor of a published model, with what training asks of a processor."""

    template = "tokenizer"
    video = VideoSettings()
    """How videos are decoded."""

    notes = ""
    """What a user should know of a family that is not in the table."""
    _files: dict[str, bytes]

    def __init__(self, processor: Any, family: Family, config: Any, max_length: int) -> None:
        self._processor = processor
        self._family = family
        self._config = config
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor
        self.video_processor = getattr(processor, "video_processor", None)
        self.max_length = max_length
        vocab_size: int = config.get_text_config().vocab_size
        self.pad_token_id = find_pad_id(self.tokenizer, vocab_size, processor.image_token)

    @classmethod
    def load(
        cls,
        where: str,
        path: str,
        max_length: int | None = None,
        max_pixels: int | None = None,
        video: VideoConfig | None = None,
    ) -> "FamilyProcessor":
        """Load the processor of a folder or of a model on the Hub; ``where`` is the recipe key.

        The default of ``max_length`` is the length that the model supports. Raises ValueError if
        the processor cannot be used, or ``max_pixels`` or ``video`` have no effect on it.
        """
        family, config = find_family(where, path)
        try:
            processor: Any = load_auto(AutoProcessor, path)
            files = read_files(path, *_FILES)
            known = inspect.signature(type(processor)).parameters.keys() - json.loads(
                files.get("processor_config.json", "{}")
            )
            missing = {}
            for name in sorted(known & _SETTINGS.keys()):
                with suppress(AttributeError):  # config.json has no such number either
                    missing[name] = _SETTINGS[name](config)
            if any(getattr(processor, name) != value for name, value in missing.items()):
                listed = ", ".join(f"{name}={value}" for name, value in missing.items())
                logger.warning("%s: processor_config.json lacks %s of config.json", path, listed)
                processor = load_auto(AutoProcessor, path, **missing)
        except (OSError, ValueError, ImportError, KeyError) as error:  # KeyError: of tokenizer.json
            raise ValueError(
                f"{where}={path!r} has no processor that transformers can load: {error}; required: "
                "the files of the published model, with preprocessor_config.json and the tokenizer"
            ) from error
        if getattr(processor, "image_token", None) is None:
            raise ValueError(
                f"{where}={path!r}: {type(processor).__name__} has no image token, so a text has "
                "no place for an image; take a model whose processor has one"
            )
        if not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
            processor.chat_template = family.template
        if not (processor.chat_template or processor.tokenizer.chat_template):
            raise ValueError(
                f"{where}={path!r}: the processor has no chat template, so there is no format for "
                "conversations; add the chat_template.jinja of the published model"
            )
        sample_frames(processor, family)
        changes = limit_pixels("model.max_pixels", processor, config.model_type, max_pixels)
        if max_pixels is not None:
            size = {"size": dict(processor.image_processor.size), "max_pixels": max_pixels}
            _write_settings(files, size, "image_")  # or transformers 4's name
        given = {name: value for name, value in asdict(video or VideoConfig()).items() if value}
        sampling = {name: given.get(name) for name in ("num_frames", "fps", "max_frames")}
        changes |= sample_videos("model.video.", processor, config.model_type, sampling)
        _write_settings(files, changes, "video_", "image_")
        supported: int = config.get_text_config().max_position_embeddings
        found = cls(processor, family, config, supported if max_length is None else max_length)
        found._files = files
        found.video = VideoSettings(**given)
        if not family.is_known:
            try:
                inputs = found._compare_inputs()
            except Exception as error:  # an unknown processor may do anything
                raise ValueError(
                    f"{where}={path!r}: {type(processor).__name__} does not process images and "
                    f"write their tokens as others do ({type(error).__name__}: {error}); known "
                    f"families: {', '.join(one.name for one in FAMILIES.values())}"
                ) from error
            parts = "; ".join(f"{role}: {', '.join(own)}" for role, own in family.parts.items())
            found.notes = (
                f"{family.name} is not among the tested families; by the names of transformers' "
                f"models its parts are {parts}; inputs of an image: {', '.join(inputs)}"
            )
        return found

    def _compare_inputs(self) -> tuple[str, ...]:
        """Return the inputs of an image; ValueError if the processor itself makes others."""
        filler, processor = self.encoder().filler, self._processor
        own = {"input_ids": filler.input_ids[None], "pixel_values": filler.pixel_values}
        own |= filler.extras
        image = Image.new("RGB", (64, 64))
        found = processor(text=[processor.image_token], images=[[image]], return_tensors="pt")
        names = (set(found) & {"input_ids", *self._family.inputs}) - _OF_TEXT
        token = self.tokenizer.convert_tokens_to_ids(processor.image_token)
        counts = [int((ids == token).sum()) for ids in (own["input_ids"], found["input_ids"])]
        if names != own.keys() or counts[0] != counts[1] or not counts[0]:
            raise ValueError(
                f"its inputs are {', '.join(sorted(names))} with {counts[1]} image tokens, but "
                f"found: {', '.join(sorted(own))} with {counts[0]}"
            )
        return tuple(sorted(own.keys() - {"input_ids"}))

    def adopt_template(self, name: str | None) -> None:
        """Keep the model's own chat template; a recipe cannot name another one."""
        assert name is None

    def encoder(self, *, template: str | None = None) -> "FamilyEncoder":
        """Create the encoder of samples."""
        assert template in (None, self.template)
        settings = (self._config, self.max_length, self.video)
        return FamilyEncoder(self._processor, self._family, *settings)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of the folder that it is loaded from, with the settings of a recipe."""
        for name, content in self._files.items():
            (Path(folder) / name).write_bytes(content)


_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "image_seq_len": lambda c: _count_patches(c) // c.scale_factor**2,
    "image_seq_length": lambda c: getattr(c, "mm_tokens_per_image", None) or c.image_seq_length,
    "num_additional_image_tokens": lambda c: int(c.vision_config.model_type == "clip_vision_model"),
    "num_image_tokens": lambda c: _count_patches(c),
    "patch_size": lambda c: c.vision_config.patch_size,
    "spatial_merge_size": lambda c: c.spatial_merge_size,
    "vision_feature_select_strategy": lambda c: c.vision_feature_select_strategy,
}
"""Settings of processor_config.json, which older folders lack, by the model's configuration."""


def _count_patches(config: Any) -> int:
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def _write_settings(files: dict[str, bytes], changes: dict[str, Any], *parts: str) -> None:
    """Change the settings of the first of ``parts`` that the files have."""
    whole = json.loads(files.get("processor_config.json", "{}"))
    for part in parts:
        name = f"{part}preprocessor_config.json".removeprefix("image_")
        own = whole.get(f"{part}processor")
        if own:
            files["processor_config.json"] = _dump({**whole, f"{part}processor": own | changes})
        if name in files:
            files[name] = _dump(json.loads(files[name]) | changes)
        if own or name in files:
            return


def _dump(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def sample_videos(
    key: str, processor: Any, model_type: str, settings: Mapping[str, float | None]
) -> dict[str, Any]:
    """Sample the frames of videos as the ``settings`` of ``model.video`` that are not None say.

    Returns what that changes in the video processor. ValueError, with ``key``, without effect.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    family = FAMILIES.get(model_type)
    known = family.videos.settings if family else {}
    if unknown := given.keys() - known.keys():
        raise ValueError(
            f"{key}{unknown.pop()} has no effect with {family.name if family else model_type}; "
            "remove it, and change the files of the video processor in a local folder of the "
            f"model; allowed: {', '.join(known) or 'none'}"
        )
    if not given or family is None:
        return {}
    videos, sampling = processor.video_processor, family.videos.sampling
    changes = {name: getattr(videos, name) or value for name, value in sampling.items()}
    changes |= {known[name]: value for name, value in given.items()} | {"do_sample_frames": True}
    vars(videos).update(changes)
    return changes


def limit_pixels(
    key: str, processor: Any, model_type: str, max_pixels: int | None
) -> dict[str, Any]:
    """Shrink larger images, and frames of videos, to ``max_pixels``.

    Returns what that changes in the video processor. ValueError, with ``key``, without effect.
    """
    if max_pixels is None:
        return {}
    family = FAMILIES.get(model_type)
    if family is None or not family.limits_pixels:
        name = model_type if family is None else family.name
        names = ", ".join(one.name for one in FAMILIES.values() if one.limits_pixels)
        raise ValueError(
            f"{key}={max_pixels} has no effect with {name}, whose processor "
            "does not limit the pixels; remove it, and change preprocessor_config.json in a local "
            f"folder of the model; families with such a limit: {names}"
        )
    images = processor.image_processor
    # Pixels, in spite of their names.
    least = images.size["shortest_edge"] // family.frames_per_image
    if max_pixels < least:
        raise ValueError(
            f"{key}={max_pixels} is less than the {least} pixels to which the processor "
            "enlarges small images; raise it"
        )
    limit = max_pixels * family.frames_per_image
    images.size = type(images.size)(**{**dict(images.size), "longest_edge": limit})
    videos, factor = processor.video_processor, images.patch_size * images.merge_size
    if not family.videos.inputs:  # GLM-V limits only a whole video
        return {}
    if not family.videos.limits_frames:  # its size limits all frames together
        changes = {"cap_pixels_per_frame": True, "max_video_tokens": max_pixels // factor**2}
        vars(videos).update(changes)
        return changes
    videos.size = type(videos.size)(**{**dict(videos.size), "longest_edge": max_pixels})
    return {"size": dict(videos.size), "max_pixels": max_pixels}


def _image_options(processor: Any) -> dict[str, Any]:
    """Return the options with which a processor calls its image processor, from its class.

    They precede preprocessor_config.json: InternVL3's says ``crop_to_patches: false``.
    """
    defaults = getattr(processor.valid_processor_kwargs, "_defaults", {})
    options = getattr(processor, "images_kwargs", defaults.get("images_kwargs", {}))
    # Others are arguments of the method, with the processor's attributes as values (LFM2-VL).
    _, *others = inspect.signature(processor._process_images).parameters.values()
    names = [one.name for one in others if one.kind is not one.VAR_KEYWORD]
    return {**options, **{name: getattr(processor, name) for name in names}}


class ProcessorTemplate(JinjaTemplate):
    """The chat template of a processor, in which media are the processor's tokens for them."""

    remedy = "change chat_template.jinja in a local folder of the model"

    def __init__(self, processor: Any, *, adds_end_token: bool = False) -> None:
        video_token = getattr(processor, "video_token", None) or processor.image_token
        self.media_tokens = {"image": processor.image_token, "video": video_token}
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
        image, tokens = self.media_tokens["image"], self.media_tokens
        kinds = ("image" if tokens.get(kind) == image else kind for kind, _ in parts)
        texts = ({"text": text} if kind == "text" else {} for kind, text in parts)
        return [{"type": kind, **text} for kind, text in zip(kinds, texts, strict=True)]

    def apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render messages."""
        return self._processor.apply_chat_template(messages, tokenize=False, **options)


class FamilyEncoder(Encoder):
    """Encodes samples with the processor of a published model; an instance can be pickled."""

    reads_images = False

    def __init__(
        self, processor: Any, family: Family, config: Any, max_length: int, video: VideoSettings
    ) -> None:
        find_id = processor.tokenizer.convert_tokens_to_ids
        own_videos = family.videos.inputs
        super().__init__(
            cast(TokenizerLike, processor.tokenizer),
            ProcessorTemplate(processor, adds_end_token=family.adds_end_token),
            ImageTransform(1, (0.5,) * 3, (0.5,) * 3),  # not used: the processor reads images
            tokens_per_image=1,  # of a layout; the processor knows the number of tokens
            image_token_id=find_id(processor.image_token),
            video_token_id=find_id(processor.video_token) if own_videos else None,
            max_length=max_length,
        )
        self._processor = processor
        self._family = family
        self.media = FamilyMedia(processor, family, video)
        self._config = config
        self.single_turn = family.has_prefix

    @property
    def complete(self) -> Callable[[Batch], Batch] | None:
        """See :func:`~coat_vlm.model.family_layout.describe_batch`; None for unknown families."""
        if not self._family.is_known:
            return None
        return partial(describe_batch, config=self._config)

    def __call__(self, sample: Sample) -> EncodedSample:
        """Encode the whole conversation; see :class:`Encoder`."""
        encoded = super().__call__(self.written(sample))
        return encoded if sample.media else replace(encoded, filler=self.filler)

    def _size(self, sample: Sample) -> Size:
        segments = self.segments(sample)
        self._check_media(sample, segments)
        with errors_within(sample.where):
            media = _in_order(sample, segments)
            texts, found, tiles = self._read(media, _empty_image, self.media.measure_video)
            ids, _ = self._tokens(segments, texts)
        self._check_tokens(sample, len(ids))
        return Size(len(ids), tiles, **self._count_units(found))

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
        """Return the sizes of the images and videos that the model gets, for people."""
        sizes = []
        for kind, before in (("image", ""), ("video", "{} x ")):
            for count, rows, columns in encoded.extras.get(
                f"{kind}_grid_thw", torch.empty(0)
            ).tolist():
                side = self._processor.image_processor.patch_size
                sizes.append(f"{before.format(count)}{columns * side} x {rows * side}")
        return ", ".join(sizes) or super().describe_pixels(encoded)

    def _check_media(self, sample: Sample, segments: Sequence[Segment]) -> None:
        ordered = replace(sample, media=tuple(_in_order(sample, segments)))
        super()._check_media(ordered, segments)

    def _encode(self, sample: Sample, segments: list[Segment]) -> EncodedSample:
        self._check_media(sample, segments)
        with errors_within(sample.where):
            media = _in_order(sample, segments)
            texts, found, tiles = self._read(media, open_image, self.media.read_video)
            ids, labels = self._tokens(segments, texts)
        self._check_tokens(sample, len(ids))
        counts, self.media.counts = self.media.counts, Counter()
        inputs = _join(found)
        return EncodedSample(
            as_tensor(ids),
            as_tensor(labels),
            inputs.pop("pixel_values", torch.empty(0)),
            counts={**counts, "images": tiles, **self._count_units(found)},
            extras=inputs,
        )

    def _count_units(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, int]:
        """See :func:`count_units`; 0 for unknown families."""
        found = [count_units(own, self._config) for own in inputs if self._family.is_known]
        units, pairs = map(sum, zip((0, 0), *found, strict=True))
        return {"units": units, "pairs": pairs}

    def _check_tokens(self, sample: Sample, length: int) -> None:
        if length <= self.max_length:
            return
        kinds = Counter(medium.kind for medium in sample.media)
        of = " and ".join(f"{number} {kind}s" for kind, number in sorted(kinds.items()))
        remedies = ["split the conversation"]
        if kinds["image"]:
            lower = "model.max_pixels" if self._family.limits_pixels else _IMAGE_SIZE
            remedies.append(f"lower {lower}")
        if kinds["video"]:
            settable = self._family.videos.settings
            fewer = "model.video" if settable else "the files of the video processor"
            remedies.append(f"take fewer frames ({fewer})")
        remedy = f"or {', or '.join(remedies)}"
        raise self._too_long(sample, length, f", including {of}," if of else "", remedy)

    def _read(
        self,
        media: Sequence[Media],
        read_image: Callable[[Media], Image.Image | Tensor],
        read_video: Callable[[Media], EncodedVideo],
    ) -> tuple[list[str], list[dict[str, Tensor]], int]:
        """Return the token text of each image or video, model inputs, and images and frames."""
        if self._family.videos.frames is not None and media:
            token, written, images = self._processor.image_token, [], []
            for medium in media:
                video = read_video(medium) if medium.kind == "video" else None
                written.append(video.text if video else token)
                images += video.inputs["frames"] if video else [read_image(medium)]
            found, own = self._read_images(images)
            shown, pattern = iter(found), re.escape(token)
            return [re.sub(pattern, lambda _: next(shown), x) for x in written], [own], len(found)
        texts: dict[str, list[str]] = {"image": [], "video": []}
        inputs: list[dict[str, Tensor]] = []
        tiles = 0
        # Frames that have the tokens of images are among them in the order of the tokens. Others
        # are not, and some processors treat several images of a conversation differently.
        shared = not self._family.videos.inputs
        runs = media if shared else sorted(media, key=lambda medium: medium.kind)
        for kind, run in groupby(runs, lambda medium: medium.kind):
            if kind == "image":
                found, own = self._read_images([read_image(medium) for medium in run])
                inputs.append(own)
                tiles += len(found)
            else:
                videos = [read_video(medium) for medium in run]
                found = [video.text for video in videos]
                inputs += [video.inputs for video in videos]
                tiles += sum(video.frames for video in videos)
            texts[kind] += found
        remaining = {kind: iter(found) for kind, found in texts.items()}
        return [next(remaining[medium.kind]) for medium in media], inputs, tiles

    def _read_images(
        self, images: Sequence[Image.Image | Tensor]
    ) -> tuple[list[str], dict[str, Tensor]]:
        """Return the text of each image's tokens, and the model's inputs for the images."""
        processor, family = self._processor, self._family
        sizes_only = isinstance(images[0], Tensor) and images[0].is_meta
        if sizes_only and isinstance(processor.image_processor, PilBackend):
            images = [Image.new("RGB", _size(one)) for one in images]  # SmolVLM, torchvision 0.26
        elif sizes_only:
            processor = copy(processor)
            processor.image_processor = _ShapesOnly(processor.image_processor)
        # One list per conversation: some processors treat several images of one differently.
        try:
            found, texts = processor._process_images(
                [list(images)], **{**_image_options(processor), "return_tensors": "pt"}
            )
        except (ValueError, RuntimeError) as error:  # such as a side 200 times as long (Qwen)
            raise DataError(
                f"images of {', '.join('{} x {}'.format(*_size(one)) for one in images)} pixels",
                f"{family.name}'s image processor rejects them: {error}",
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
        return self.show_blank((64, 64), 1)

    def show_blank(self, size: tuple[int, int], number: int) -> EncodedSample:
        """Encode so many black images of a size (width, height), a line each, without labels."""
        texts, inputs = self._read_images([Image.new("RGB", size)] * number)
        ids = torch.tensor(self.tokenizer.encode([Segment("literal", "\n".join(texts))])[0])
        labels = torch.full_like(ids, IGNORE_INDEX)
        counts = {"images": number, **self._count_units([inputs])}
        return EncodedSample(ids, labels, inputs.pop("pixel_values"), counts=counts, extras=inputs)


class _ShapesOnly:
    """An image processor whose results on ``meta`` become zeros; Gemma 4's patches are all real."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._image_processor(*args, **kwargs)
        for name, value in {**found}.items():
            if isinstance(value, Tensor) and value.is_meta:
                found[name] = torch.zeros_like(value, device="cpu")  # LLaVA's becomes an array
        return found


def _empty_image(medium: Media) -> Tensor:
    """Return an image (3, H, W) without values, for which a processor computes only shapes."""
    width, height = image_size(medium)
    return torch.empty((3, height, width), dtype=torch.uint8, device="meta")


def _size(image: Image.Image | Tensor) -> tuple[int, int]:
    return (image.shape[2], image.shape[1]) if isinstance(image, Tensor) else image.size


def _in_order(sample: Sample, segments: Sequence[Segment]) -> list[Media]:
    """Return the media in the order in which the chat template writes them, if they are those."""
    kinds = [segment.kind for segment in segments if segment.kind in ("image", "video")]
    if sorted(kinds) != sorted(medium.kind for medium in sample.media):
        return [*sample.media]
    own = {kind: iter([one for one in sample.media if one.kind == kind]) for kind in kinds}
    return [next(own[kind]) for kind in kinds]


def _join(inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the model's inputs for images and videos of a conversation, by name."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for own in inputs for name in own):
        parts = [own[name] for own in inputs if name in own]
        # Idefics' have a row per conversation.
        by_row = "pixel" in name and "pixel_attention_mask" in inputs[0]
        found[name] = parts[0] if len(parts) == 1 else torch.cat(parts, int(by_row))
    return found
