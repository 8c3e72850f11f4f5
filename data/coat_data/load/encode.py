"""Converts a sample to model inputs: token ids, labels and pixel values.

Every tile of an image, and every frame of a video, is ``tokens_per_image`` image tokens at its
place in the conversation (mode ``dynamic_s2``: every tile of the largest scale; mode ``dynamic``:
with a line break between tiles, as in VILA's prompts). A sample that is too long is an error:
truncated inside an image, it would no longer match its pixel values.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from coat_data.media.image import ONE_TILE, ImageTransform
from coat_data.media.sample_media import MediaLoader, MediaPlan
from coat_data.media.sampling import VideoSettings
from coat_data.sample import DataError, Media, Part, Sample, Turn, errors_within
from coat_data.text.chat import ChatTemplate
from coat_data.text.tokens import Segment, SegmentTokenizer, TokenizerLike

IGNORE_INDEX = -100
"""Label of an unsupervised token (PyTorch's default ``ignore_index``)."""


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """The model's inputs for one sample of T tokens and N tiles."""

    input_ids: torch.Tensor
    """(T,) int64."""
    labels: torch.Tensor
    """(T,) int64, equal to ``input_ids`` for supervised tokens, else IGNORE_INDEX; not shifted."""
    pixel_values: torch.Tensor
    """(N, 3, H, W) float32; N is 0 without images."""
    image_grids: torch.Tensor | None = None
    """(M, 2) int64 in mode ``dynamic_s2``: rows and columns of the largest scale of each image;
    (1, 1) for a single tile, such as a frame of a video. None in other modes."""
    frame_groups: torch.Tensor | None = None
    """(G,) int64 if frames of videos are pooled: number of consecutive tiles per group that shares
    the tokens of one tile; 1 for a tile of an image. None without pooling."""
    image_positions: torch.Tensor | None = None
    """(P,) int64, ascending: indices of image tokens in ``input_ids``. None for a language model
    without vision."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Events while media were read, e.g. ``video_decord_timeout``: 1; of a published model also
    ``images``, ``units`` and ``pairs``, as in :class:`Size`."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further inputs of a published model for the sample's media, such as ``image_grid_thw``, with
    one row per image."""
    filler: "EncodedSample | None" = None
    """Text samples of a published model: image tokens and pixels to append to a batch without
    media, so that its tower takes part in every step."""
    rejected: "EncodedSample | None" = None
    """Preference pairs: the same prompt and media with the rejected answer."""

    @property
    def num_images(self) -> int:
        """Tiles of images, and frames; whole images if the processor of a published model cuts."""
        return self.counts.get("images", len(self.pixel_values))


class Size(NamedTuple):
    """Size of an encoded sample, measured without decoding media."""

    tokens: int
    """Tokens, image tokens included."""
    images: int
    """Tiles of images, and frames, that the vision tower processes."""
    units: int = 0
    """What the tower reads: tiles and frames, or patches of images that keep their size."""
    pairs: int = 0
    """Pairs of patches that attend to each other, in all blocks of the tower; 0 for tiles."""


class Encoder:
    """Encodes samples; an instance can be pickled.

    Attributes:
        image_token_id: None for a language model without vision.
        media_token_ids: kind of media by id of its tokens, ``image`` or ``video``.
        reads_images: whether ``media`` makes the pixel values, which are then images.
        preferences: whether samples must be preference pairs or must not; None encodes both.
    """

    preferences: bool | None = None
    reads_images = True
    single_turn = False
    """Whether the template writes conversations of one question and one answer only."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        template: ChatTemplate,
        transform: ImageTransform,
        *,
        tokens_per_image: int,
        image_token_id: int | None,
        video_token_id: int | None = None,
        video: VideoSettings | None = None,
        max_length: int = 2048,
        max_pixels: int | None = None,
    ) -> None:
        """Prepare the tokenizer; ``image_token_id`` is None for a language model without vision.

        ``video_token_id`` is for models whose videos have tokens of their own.
        """
        kinds = ((image_token_id, "image"), (video_token_id, "video"))
        self.media_token_ids = {token: kind for token, kind in kinds if token is not None}
        names = [tokenizer.backend_tokenizer.id_to_token(n) or "" for n in self.media_token_ids]
        self._image_token = names[0] if names else ""
        self.tokenizer = SegmentTokenizer(tokenizer, names)
        self.template = template
        self.media = MediaLoader(transform, video or VideoSettings(), max_pixels)
        self.image_token_id = image_token_id
        self._image_ids = [] if image_token_id is None else [image_token_id] * tokens_per_image
        self.max_length = max_length

    def __call__(self, sample: Sample) -> EncodedSample:
        """Encode the whole conversation, with the answers as labels.

        A preference pair is encoded twice, up to the end token of its last answer; only that
        answer has labels. DataError, with the row, if media cannot be read, the placeholders do
        not match the media, there is no answer, the template refuses the conversation, the
        sequence is too long, or the sample is not of the kind in :attr:`preferences`.
        """
        self.check_kind(sample)
        segments = self.segments(sample)
        if sample.rejected:
            answers = (sample.turns[-1].text, sample.rejected)
            encoded, rejected = self.answered(sample, answers)
            encoded = replace(encoded, rejected=rejected)
        else:
            encoded = self._encode(sample, segments)
        notes = Counter(sample.reading.notes)
        return replace(encoded, counts=notes + Counter(encoded.counts)) if notes else encoded

    def check_kind(self, sample: Sample) -> None:
        """Check that a sample has an answer, and is of the kind in :attr:`preferences`."""
        if not any(turn.role == "assistant" for turn in sample.turns):
            raise DataError(sample.where, "there is no answer to train on", "add a gpt turn")
        if sample.rejected and self.preferences is False:
            raise DataError(
                sample.where,
                "is a preference pair (chosen and rejected), which only a stage named dpo trains",
                "move its source to stages.dpo, or train on the chosen answer with ignore_fields: "
                "[rejected]",
            )
        if self.preferences and not sample.rejected:
            problem = "has one answer, and a stage named dpo trains pairs (chosen and rejected)"
            remedy = "move its source to another stage, or add the rejected answer"
            raise DataError(sample.where, problem, remedy)

    def measure(self, sample: Sample) -> Size:
        """Measure the size of :meth:`__call__`'s result from headers; nothing is decoded.

        For a preference pair, the size with the chosen answer; both are checked. It is larger
        than the result only if a video is shorter than its header says, or by the digits of time
        tokens. Raises DataError as a call does, as far as headers show it.
        """
        size = self._size(sample)
        if sample.rejected:
            worse = Turn("assistant", (Part("text", sample.rejected),))
            self._size(replace(sample, turns=(*sample.turns[:-1], worse), rejected=""))
        return size

    def _size(self, sample: Sample) -> Size:
        ids, _, plans = self._planned(sample, self.media.plan)
        self._check_length(sample, len(ids), plans)
        tiles = sum(plan.num_tiles for plan in plans)
        return Size(len(ids), tiles, tiles)

    @property
    def complete(self) -> Callable[[Any], Any] | None:
        """Adds to a collated batch what the model would compute on its device, if anything."""
        return None

    def written(self, sample: Sample) -> Sample:
        """Return the sample with the texts that are tokenized."""
        return sample

    def layout(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Return ids and labels, one tile per image or frame; any length, nothing is opened."""
        ids, labels, _ = self._planned(sample, lambda _: MediaPlan((ONE_TILE,)))
        return ids, labels

    def _planned(
        self, sample: Sample, plan: Callable[[Media], MediaPlan]
    ) -> tuple[list[int], list[int], list[MediaPlan]]:
        segments = self.segments(sample)
        self._check_media(sample, segments)
        with errors_within(sample.where):
            plans = [plan(medium) for medium in sample.media]
            return *self._tokens(segments, [self._media_text(plan) for plan in plans]), plans

    def segments(self, sample: Sample, *, add_generation_prompt: bool = False) -> list[Segment]:
        """Render the conversation; a document that continues ends without an end token."""
        try:
            segments = self.template.render(
                sample.turns, sample.tools, add_generation_prompt=add_generation_prompt
            )
        except ValueError as error:
            raise DataError(sample.where, str(error), "remove the row or its source") from error
        joins_space = self.template.as_transformers or self.tokenizer.hides_first_space
        if add_generation_prompt and joins_space and segments[-1].text.endswith(" "):
            # The space belongs to the first token of the answer.
            segments[-1] = segments[-1]._replace(text=segments[-1].text[:-1])
        while sample.continues and not add_generation_prompt and segments[-1].kind == "literal":
            segments = segments[:-1]
        return segments

    def prompt(self, sample: Sample) -> EncodedSample:
        """Encode the conversation up to its last question or result, and the answer prefix.

        The tokens are a prefix of the whole conversation's; all labels are IGNORE_INDEX.
        Raises DataError as a call does, or if the conversation has no user turn.
        """
        encoded = self.conversation(_asked(sample), add_generation_prompt=True)
        return replace(encoded, labels=torch.full_like(encoded.labels, IGNORE_INDEX))

    def conversation(self, sample: Sample, *, add_generation_prompt: bool = False) -> EncodedSample:
        """Encode all turns as they are; nothing follows the last text of one that ``continues``."""
        segments = self.segments(sample, add_generation_prompt=add_generation_prompt)
        return self._encode(sample, segments)

    def answered(self, sample: Sample, answers: Sequence[str]) -> list[EncodedSample]:
        """Encode the :meth:`prompt` followed by each of ``answers``, with the labels of the answer.

        The tokens are a prefix of the whole conversation's. The media are read once.
        """
        prompt = self.prompt(sample)
        asked = _asked(sample)
        found = []
        for answer in answers:
            reply = Turn("assistant", (Part("text", answer),))
            ids, labels = self.layout(replace(asked, turns=(*asked.turns, reply)))
            end = max(place for place, label in enumerate(labels) if label != IGNORE_INDEX) + 1
            before = [p for p, label in enumerate(labels[:end]) if label == IGNORE_INDEX]
            tail = torch.tensor(ids[before[-1] + 1 if before else 0 : end])
            if (length := len(prompt.input_ids) + len(tail)) > self.max_length:
                of = f" with the answer {answer[:80]!r}"
                raise self._too_long(sample, length, of, "or take fewer images, tiles or frames")
            input_ids = torch.cat([prompt.input_ids, tail])
            labels = torch.cat([prompt.labels, tail])
            found.append(replace(prompt, input_ids=input_ids, labels=labels))
        return found

    def _encode(self, sample: Sample, segments: list[Segment]) -> EncodedSample:
        self._check_media(sample, segments)
        with errors_within(sample.where):
            opened = [self.media.open(medium) for medium in sample.media]
            plans = [plan for plan, _ in opened]
            ids, labels = self._tokens(segments, [self._media_text(plan) for plan in plans])
            self._check_length(sample, len(ids), plans)
            pixel_values = self.media.write(opened)
        counts, self.media.counts = self.media.counts, Counter()
        input_ids = as_tensor(ids)
        found: dict[str, Any] = {**self._media_layout(plans)}
        if self.image_token_id is not None:
            found["image_positions"] = (input_ids == self.image_token_id).nonzero().squeeze(1)
        return EncodedSample(
            input_ids, as_tensor(labels), pixel_values, **found, counts=dict(counts)
        )

    def read_media(self, media: Sequence[Media]) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Read media for prompts that others have rendered as text.

        Returns the token text of each image or video, and ``pixel_values``, ``image_grids`` and
        ``frame_groups`` as in :class:`EncodedSample`.
        """
        if media and self.image_token_id is None:
            shown = Sample(id="prompt", turns=(), media=tuple(media), source="prompt")
            self._check_media(shown, [])
        opened = [self.media.open(medium) for medium in media]
        plans = [plan for plan, _ in opened]
        texts = [self._media_text(plan) for plan in plans]
        return texts, {"pixel_values": self.media.write(opened)} | self._media_layout(plans)

    def describe_pixels(self, encoded: EncodedSample) -> str:
        """Return number, width and height of the images that the model gets; empty for none."""
        if not len(encoded.pixel_values):
            return ""
        *number, _, height, width = encoded.pixel_values.shape
        return f"{math.prod(number)} x {width} x {height}"

    def _media_layout(self, plans: list[MediaPlan]) -> dict[str, torch.Tensor]:
        """Return ``image_grids`` and ``frame_groups`` of :class:`EncodedSample`, if not None."""
        found: dict[str, torch.Tensor] = {}
        if self.media.transform.mode == "dynamic_s2":
            shapes = [(tiles.rows, tiles.columns) for plan in plans for tiles in plan.tiles]
            found["image_grids"] = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
        if self.media.video.pool_frames > 1:
            sizes = [size for plan in plans for size in plan.group_sizes]
            found["frame_groups"] = torch.tensor(sizes, dtype=torch.int64)
        return found

    def _tokens(
        self, segments: Sequence[Segment], texts: Sequence[str]
    ) -> tuple[list[int], list[int]]:
        """Tokenize segments, with the texts of the media's tokens, and return ids and labels."""
        shown = iter(texts)
        written = [
            segment if segment.kind in ("literal", "text") else Segment("literal", next(shown))
            for segment in segments
        ]
        as_transformers = self.template.as_transformers
        begin = self._begins(written)
        if begin and not as_transformers:
            written = written[1:]  # the built-in templates write it
        ids, trained = self.tokenizer.encode(written, as_transformers=as_transformers, begin=begin)
        pairs = zip(ids, trained, strict=True)
        return ids, [token if flag else IGNORE_INDEX for token, flag in pairs]

    def _begins(self, segments: Sequence[Segment]) -> bool:
        """Whether the tokenizer puts its begin-of-text token before the segments.

        It tokenizes a text after its own token differently than after a template's token.
        """
        begin = self.tokenizer.decode(self.tokenizer.begin)
        return not self.template.as_transformers and bool(begin) and segments[0].text == begin

    def _media_text(self, plan: MediaPlan) -> str:
        """Return the text of the tokens of an image or video."""
        tile = self._image_token * len(self._image_ids)
        if self.media.video.time_tokens and plan.times_s is not None:
            return "".join(f"<{time:.1f} seconds>{tile}" for time in plan.group_times_s)
        between = "\n" if any(tiles.separated for tiles in plan.tiles) else ""
        return between.join([tile] * plan.num_token_tiles)

    def _check_media(self, sample: Sample, segments: Sequence[Segment]) -> None:
        media = sample.media
        if media and self.image_token_id is None:
            problem = f"shows {len(media)} images or videos, but the model has no vision tower"
            remedy = "remove the row or its source, or give the recipe's model.vision a tower"
            raise DataError(sample.where, problem, remedy)
        kinds = [segment.kind for segment in segments if segment.kind in ("image", "video")]
        if kinds != [medium.kind for medium in media]:
            problem = f"the conversation shows {kinds} but the files are {[m.kind for m in media]}"
            remedy = "make the <image>/<video> placeholders match the listed files"
            raise DataError(sample.where, problem, remedy)

    def _check_length(self, sample: Sample, length: int, plans: list[MediaPlan]) -> None:
        if length <= self.max_length:
            return
        of, remedy = "", "or split the conversation"
        if sample.is_document:
            remedy = (
                "or train documents in a separate source with template: plain, which splits them"
            )
        if plans:
            images = sum(len(plan.tiles) for plan in plans)
            tiles = sum(plan.num_token_tiles for plan in plans)
            texts = [Segment("literal", self._media_text(plan)) for plan in plans]
            in_images = len(self.tokenizer.encode(texts)[0])
            shown = f"{images} images" if tiles == images else f"{images} images in {tiles} tiles"
            each, text = len(self._image_ids), length - in_images
            of = f" ({shown} of {each} tokens = {in_images}, text {text})"
            remedy = (
                "take fewer images, tiles (model.image.max_tiles) or frames (model.video), or "
                "split the conversation"
            )
        raise self._too_long(sample, length, of, remedy)

    def _too_long(self, sample: Sample, length: int, of: str, remedy: str) -> DataError:
        problem = f"{length} tokens{of} are more than max_length={self.max_length}"
        return DataError(sample.where, problem, f"raise model.max_length, {remedy}")


def as_tensor(numbers: list[int]) -> torch.Tensor:
    """Convert to int64; through numpy, which is several times as fast as torch here."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _asked(sample: Sample) -> Sample:
    """Return the sample up to its last question or result."""
    asked = [number for number, turn in enumerate(sample.turns) if turn.role in ("user", "tool")]
    if not asked:
        raise DataError(sample.where, "there is no question to answer", "add a human turn")
    turns = sample.turns[: asked[-1] + 1]
    num_media = sum(part.kind != "text" for turn in turns for part in turn.parts)
    return replace(sample, turns=turns, media=sample.media[:num_media])
