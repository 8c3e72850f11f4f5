"""Turns a sample into the model's inputs: token ids, labels and pixel values.

Every image, and every frame of a video, is ``tokens_per_image`` image tokens in the place where it
stands in the conversation. Nothing is ever truncated: a sample that is too long is an error, as a
sequence cut inside an image would no longer match its pixel values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from coat_data.chat import ChatTemplate, Segment
from coat_data.image import ImageTransform, open_image
from coat_data.sample import DataError, Media, Sample
from coat_data.tokens import PieceTokenizer, TokenizerLike

IGNORE_INDEX = -100
"""The label of a token that is not trained (PyTorch's default ``ignore_index``)."""


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """The model's inputs for one sample of T tokens and N images."""

    input_ids: torch.Tensor
    """(T,) int64."""
    labels: torch.Tensor
    """(T,) int64, equal to ``input_ids`` where trained, else IGNORE_INDEX; not shifted."""
    pixel_values: torch.Tensor
    """(N, 3, H, W) float32; N is 0 without images."""


class Size(NamedTuple):
    """What a sample will take, known before any medium is decoded."""

    tokens: int
    """Tokens, image tokens included."""
    images: int
    """Images and frames that go through the vision tower."""


class Encoder:
    """Encodes samples; an instance can be sent to a worker process.

    Attributes:
        pieces: the tokenizer.
        template: writes a conversation as segments.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        template: ChatTemplate,
        transform: ImageTransform,
        *,
        tokens_per_image: int,
        image_token_id: int,
        num_video_frames: int = 8,
        max_length: int = 2048,
    ) -> None:
        """Prepare the tokenizer.

        Args:
            tokenizer: a transformers fast tokenizer.
            template: writes a conversation as segments.
            transform: turns an image into the tower's input.
            tokens_per_image: image tokens that stand for one image.
            image_token_id: their id.
            num_video_frames: frames taken from a video.
            max_length: longest allowed sequence in tokens, image tokens included.

        Raises:
            ValueError: the tokenizer is not a fast one.
        """
        self.pieces = PieceTokenizer(tokenizer)
        self.template = template
        self._transform = transform
        self._image_ids = [image_token_id] * tokens_per_image
        self._num_video_frames = num_video_frames
        self._max_length = max_length

    def __call__(self, sample: Sample, rng: np.random.Generator | None = None) -> EncodedSample:
        """The whole conversation, with the answers as labels.

        Args:
            sample: a conversation with at least one answer.
            rng: source of the augmentation's draws; None for none.

        Raises:
            DataError: a medium cannot be read, the placeholders do not match the media, there is
                no answer, or the sequence is too long; names the row.
        """
        encoded = self._encode(sample, sample.media, self.template.render(sample.turns), rng)
        _check_answered(sample)
        return encoded

    def measure(self, sample: Sample) -> Size:
        """The size of :meth:`__call__`'s result; larger only where a video turns out too short.

        No medium is opened. A video counts as ``num_video_frames`` frames.

        Raises:
            DataError: as for a call, as far as it can be known without the media.
        """
        ids, _, num_images = self.layout(sample)
        self._check_length(sample, len(ids), num_images)
        return Size(len(ids), num_images)

    def layout(self, sample: Sample) -> tuple[list[int], list[int], int]:
        """Ids, labels and number of images of a sample of any length, without opening a medium.

        Raises:
            DataError: as for :meth:`measure`.
        """
        _check_answered(sample)
        segments = self.template.render(sample.turns)
        _check_placeholders(sample, sample.media, segments)
        counts = [
            self._num_video_frames if medium.kind == "video" else 1 for medium in sample.media
        ]
        try:
            ids, labels = self._tokens(segments, counts, before_answer=False)
        except DataError as error:
            raise _within(sample, error) from error
        return ids, labels, sum(counts)

    def prompt(self, sample: Sample) -> EncodedSample:
        """The conversation up to its last user turn, and the template's start of an answer.

        Token for token the beginning of what the encoder gives for the whole conversation; no label
        is trained.

        Raises:
            DataError: as for a call; or nobody asks anything.
        """
        asked = [number for number, turn in enumerate(sample.turns) if turn.role == "user"]
        if not asked:
            raise DataError(sample.where, "there is no question to answer", "add a human turn")
        turns = sample.turns[: asked[-1] + 1]
        num_media = sum(part.kind != "text" for turn in turns for part in turn.parts)
        segments = self.template.render(turns, add_generation_prompt=True)
        media = sample.media[:num_media]
        encoded = self._encode(sample, media, segments, None, before_answer=True)
        labels = torch.full_like(encoded.labels, IGNORE_INDEX)
        return EncodedSample(encoded.input_ids, labels, encoded.pixel_values)

    def _encode(
        self,
        sample: Sample,
        media: Sequence[Media],
        segments: list[Segment],
        rng: np.random.Generator | None,
        *,
        before_answer: bool = False,
    ) -> EncodedSample:
        _check_placeholders(sample, media, segments)
        try:
            frames = [
                _frames(medium, self._num_video_frames) if medium.kind == "video" else [medium]
                for medium in media
            ]
            ids, labels = self._tokens(segments, [len(shown) for shown in frames], before_answer)
            self._check_length(sample, len(ids), sum(len(shown) for shown in frames))
            pixel_values = self._pixels(frames, rng)
        except DataError as error:
            if error.where == sample.where:
                raise
            raise _within(sample, error) from error
        return EncodedSample(torch.tensor(ids), torch.tensor(labels), pixel_values)

    def _tokens(
        self, segments: list[Segment], frame_counts: list[int], before_answer: bool
    ) -> tuple[list[int], list[int]]:
        """Ids and labels of the segments.

        A space between template text and words belongs to the words, as in running text ("USER:
        Hi" is "USER", ":", " Hi"); but not to an answer, of which only its own characters are to be
        trained, unless the tokenizer does not count the first space as a character anyway.
        """
        pieces = self.pieces
        ids: list[int] = []
        labels: list[int] = []
        counts = iter(frame_counts)
        first, space = True, ""
        behind = Segment("text", trained=True) if before_answer else Segment("image")
        for segment, following in zip(segments, [*segments[1:], behind], strict=True):
            kind, text, trained = segment
            if kind == "literal":
                moves = following.kind == "text" and (
                    pieces.hides_first_space or not following.trained
                )
                space = " " if moves and text.endswith(" ") else ""
                text = text[: len(text) - len(space)]
                piece = pieces.literal(text, first=first)
                first = first and pieces.is_control(text)
            elif kind == "text":
                piece = pieces.text((space or (pieces.prefix if first else "")) + text)
                first, space = False, ""
            else:
                piece = self._image_ids * next(counts)
            ids += piece
            labels += piece if trained else [IGNORE_INDEX] * len(piece)
        return ids, labels

    def _check_length(self, sample: Sample, length: int, num_images: int) -> None:
        if length > self._max_length:
            in_images = num_images * len(self._image_ids)
            raise DataError(
                sample.where,
                f"{length} tokens ({num_images} images of {len(self._image_ids)} tokens = "
                f"{in_images}, text {length - in_images}) are more than max_length="
                f"{self._max_length}",
                "raise model.max_length, take fewer images or model.image.num_video_frames, or "
                "split the conversation",
            )

    def _pixels(
        self,
        frames: Sequence[Sequence[Media | Image.Image]],
        rng: np.random.Generator | None,
    ) -> torch.Tensor:
        """(N, 3, H, W); all frames of a video are augmented alike."""
        tensors: list[torch.Tensor] = []
        for shown in frames:
            if rng is None or len(shown) == 1:
                rngs = [rng] * len(shown)
            else:
                seed = int(rng.integers(2**63))
                rngs = [np.random.default_rng(seed) for _ in shown]
            for frame, frame_rng in zip(shown, rngs, strict=True):
                image = open_image(frame) if isinstance(frame, Media) else frame
                tensors.append(self._transform(image, frame_rng))
        if not tensors:
            return torch.empty(0, 3, self._transform.size, self._transform.size)
        return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _check_answered(sample: Sample) -> None:
    if not any(turn.role == "assistant" for turn in sample.turns):
        raise DataError(sample.where, "there is no answer to train on", "add a gpt turn")


def _check_placeholders(
    sample: Sample, media: Sequence[Media], segments: Sequence[Segment]
) -> None:
    kinds = [segment.kind for segment in segments if segment.kind in ("image", "video")]
    if kinds != [medium.kind for medium in media]:
        raise DataError(
            sample.where,
            f"the conversation shows {kinds} but the files are {[m.kind for m in media]}",
            "make the <image>/<video> placeholders match the listed files",
        )


def _within(sample: Sample, error: DataError) -> DataError:
    """The error of a medium or text, with the row that it belongs to."""
    return DataError(f"{sample.where}: {error.where}", error.problem, error.remedy)


def _frames(medium: Media, num_frames: int) -> list[Image.Image]:
    # Images alone need no video decoder, and loading one costs every worker some megabytes.
    from coat_data.video import read_frames

    return read_frames(medium, num_frames)
