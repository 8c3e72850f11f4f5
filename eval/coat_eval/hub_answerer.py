"""Any image-text-to-text model of Hugging Face as an answerer, through its chat template.

A video's frames are handed over as a video, with their times, where processor and chat template
take videos (Qwen2-VL, LLaVA-OneVision, InternVL, ...). Elsewhere each frame is an image, as LLaVA
and VILA show videos: that works for every model that takes several images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image

from coat_data.load.encode import IGNORE_INDEX
from coat_data.media.image import open_image
from coat_data.media.sampling import VideoSettings
from coat_data.media.video import Clip, VideoReader
from coat_data.sample import Media, Sample
from coat_eval.answerer import AnswerLoss, ModelOptions, answer_losses
from coat_eval.benchmark import IMAGE_LINE
from coat_eval.files import folder_sha256
from coat_vlm.generate import GREEDY

_CLOCK = 1000
"""Ticks per second by which the times of frames are told: processors count in whole frames."""


class HubAnswerer:
    """A model with its processor.

    Attributes:
        encoder: writes prompts with the chat template and makes batches with the processor.
        device: where the model is.
    """

    def __init__(self, model: Any, processor: Any, name: str, num_frames: int) -> None:
        """Take a loaded model; ``name`` is the folder or Hub name that it is from."""
        self._model = model
        self._name = name
        self._num_frames = num_frames
        self.encoder = HubEncoder(processor, num_frames)
        self.device = torch.device(model.device)

    @property
    def identity(self) -> dict[str, Any]:
        """See :class:`coat_eval.answerer.Answerer`; a folder's weights are read in full."""
        return self._identity

    @cached_property
    def _identity(self) -> dict[str, Any]:
        folder = Path(self._name)
        weights = (
            {"model_sha256": folder_sha256(folder)}
            if folder.is_dir()
            else {"model": self._name, "commit": getattr(self._model.config, "_commit_hash", None)}
        )
        dtype = str(self._model.dtype).removeprefix("torch.")
        return {
            **weights,
            "dtype": dtype,
            "num_frames": self._num_frames,
            "videos_as": self.encoder.videos_as,
        }

    @classmethod
    def load(cls, name: str, options: ModelOptions) -> "HubAnswerer":
        """The model of a folder, or of the Hub by name.

        A model stored in BF16 or FP16 runs in FP32 on a CPU, see :func:`coat_vlm.generate.load`.

        Raises:
            ValueError: it takes no images and text, its processor has no chat template, or it
                cannot be had.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        dtype = torch.float32 if options.device.type == "cpu" else "auto"
        try:
            processor = AutoProcessor.from_pretrained(name)
            model: Any = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} cannot be loaded as an image-text-to-text model: "
                f"{str(error).splitlines()[0]}; give a run folder or model folder of this project, "
                "or a folder (online also the Hub name) with such a model and its processor"
            ) from error
        if getattr(processor, "chat_template", None) is None:
            raise ValueError(
                f"the processor of {name} has no chat template, so that nothing says how to ask; "
                "add chat_template.jinja to its folder, as its newer versions on the Hub have"
            )
        return cls(model.to(options.device).eval(), processor, name, options.num_frames)

    @torch.inference_mode()
    def answer(self, batch: dict[str, torch.Tensor], max_new_tokens: int) -> list[str]:
        """See :class:`coat_eval.answerer.Answerer`."""
        inputs = self._placed(batch)
        tokenizer = self.encoder.tokenizer
        output = self._model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, **GREEDY
        )
        answers = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def losses(self, batch: dict[str, torch.Tensor]) -> list[AnswerLoss]:
        """See :class:`coat_eval.answerer.Answerer`.

        Raises:
            ValueError: the model has an encoder for text, whose answers are no part of its inputs.
        """
        if self._model.config.is_encoder_decoder:
            raise ValueError(
                f"{self._name} is an encoder-decoder model, whose answers cannot be ranked here; "
                "ask it for letters: --tasks seedbench"
            )
        inputs = self._placed(batch)
        return answer_losses(self._model, inputs, inputs.pop("labels"))

    def _placed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch where the model is, pixels in its dtype; times of frames keep theirs."""
        device, dtype = self._model.device, self._model.dtype
        return {
            name: value.to(device, dtype) if name.startswith("pixel_values") else value.to(device)
            for name, value in batch.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPrompt:
    """One prompt in the words of a chat template, with what it shows."""

    text: str
    images: list[Image.Image]
    """In RGB, in the order of their places in the text."""
    videos: list[Clip]
    """The same, of videos."""
    answer: str = ""
    """What is ranked, behind the prompt."""


class HubEncoder:
    """Turns prompts into a processor's inputs; keeps the last video it decoded.

    Attributes:
        tokenizer: the processor's, padding on the left.
        videos_as: what videos are handed over as: a ``video`` each, or ``images``.
    """

    def __init__(self, processor: Any, num_frames: int) -> None:
        self._processor = processor
        self.tokenizer = processor.tokenizer
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            # What fills a row is masked, so that any token will do.
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self._videos = VideoReader(VideoSettings(num_frames=num_frames))
        self._last_clip: tuple[Media, Clip] | None = None
        self.videos_as: Literal["video", "images"] = "video" if self._takes_videos() else "images"

    def encode(self, sample: Sample) -> HubPrompt:
        """The conversation as text, its images and its videos; the first turn is what is asked."""
        content: list[dict[str, str]] = []
        images: list[Image.Image] = []
        videos: list[Clip] = []
        media = iter(sample.media)
        for part in sample.turns[0].parts:
            if part.kind == "text":
                # The chat template has its own way of setting media off.
                content += [] if part.text == IMAGE_LINE else [{"type": "text", "text": part.text}]
                continue
            one = next(media)
            if one.kind == "image":
                shown = [open_image(one)]
            elif self.videos_as == "video":
                shown = []
                videos.append(self._clip(one))
                content.append({"type": "video"})
            else:
                shown = self._clip(one).frames
            images += shown
            content += [{"type": "image"}] * len(shown)
        return HubPrompt(text=self._written(content), images=images, videos=videos)

    def answered(self, sample: Sample, answers: Sequence[str]) -> list[HubPrompt]:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        prompt = self.encode(sample)
        return [replace(prompt, answer=answer) for answer in answers]

    def collate(self, encoded: Sequence[HubPrompt]) -> dict[str, torch.Tensor]:
        """See :class:`coat_eval.answerer.PromptEncoder`; all or none of the prompts have media."""
        return self._inputs([own.text for own in encoded], encoded, "left")

    def collate_answered(self, encoded: Sequence[HubPrompt]) -> dict[str, torch.Tensor]:
        """Right-padded rows with ``labels`` (B, T): the tokens of each answer and the end token.

        Chat templates write the line break or the space that an answer starts behind in different
        ways: what ends in a word or a colon is followed by a space. A token that a prompt's end and
        an answer's beginning share belongs to the answer.
        """
        texts = [prompt.text + self._behind(prompt.text, prompt.answer) for prompt in encoded]
        inputs = self._inputs(texts, encoded, "right")
        labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
        ends = inputs["attention_mask"].sum(1).tolist()
        for row, (prompt, text, end) in enumerate(zip(encoded, texts, ends, strict=True)):
            # Counted from the end: in front of it, images have become more tokens than their names.
            span = slice(end - self._num_new(prompt.text, text), end)
            labels[row, span] = inputs["input_ids"][row, span]
        return {**inputs, "labels": labels}

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        return self._videos.plan(media)[1]

    def _written(self, content: Sequence[dict[str, str]]) -> str:
        return self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def _takes_videos(self) -> bool:
        token = getattr(self._processor, "video_token", None)
        if getattr(self._processor, "video_processor", None) is None or token is None:
            return False
        try:
            return (
                self._written([{"type": "video"}, {"type": "text", "text": ""}]).count(token) == 1
            )
        except TemplateError:  # the template refuses what it does not know
            return False

    def _inputs(
        self, texts: list[str], prompts: Sequence[HubPrompt], side: str
    ) -> dict[str, torch.Tensor]:
        images = [own.images for own in prompts]
        clips = [clip for own in prompts for clip in own.videos]
        videos: dict[str, Any] = {}
        if clips:
            videos = {
                "videos": [np.stack([np.asarray(frame) for frame in one.frames]) for one in clips],
                "video_metadata": [_metadata(one) for one in clips],
                "do_sample_frames": False,
            }
        inputs = self._processor(
            text=texts,
            images=images if any(images) else None,
            **videos,
            padding=True,
            padding_side=side,
            return_tensors="pt",
            # Chat templates write the first token themselves where there is one.
            add_special_tokens=not self._writes_first_token(texts[0]),
        )
        return {name: value for name, value in inputs.items() if torch.is_tensor(value)}

    def _behind(self, prompt: str, answer: str) -> str:
        """What follows a prompt: the answer, and the token that ends it."""
        spaced = prompt[-1:].isspace() or prompt.endswith(tuple(self.tokenizer.all_special_tokens))
        return f"{'' if spaced else ' '}{answer}{self.tokenizer.eos_token or ''}"

    def _num_new(self, prompt: str, whole: str) -> int:
        before, ids = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole)
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))
        return len(ids) - sum(1 for _ in same)

    def _writes_first_token(self, prompt: str) -> bool:
        first = self.tokenizer.bos_token
        return first is not None and prompt.startswith(first)

    def _clip(self, media: Media) -> Clip:
        """The frames of a video; as a video always as many, or a batch would not stack."""
        if self._last_clip is None or self._last_clip[0] != media:
            clip, wanted = self._videos.read(media), self._videos.settings.num_frames
            if self.videos_as == "video" and len(clip.frames) < wanted:
                places = [place * len(clip.frames) // wanted for place in range(wanted)]
                times = clip.times_s and [clip.times_s[place] for place in places]
                clip = replace(clip, frames=[clip.frames[place] for place in places], times_s=times)
            self._last_clip = (media, clip)
        return self._last_clip[1]


def _metadata(clip: Clip) -> dict[str, Any]:
    """The fields of transformers' ``VideoMetadata``; without times for a folder of frames."""
    count = len(clip.frames)
    if clip.times_s is None or clip.duration_s is None:
        return {"total_num_frames": count, "frames_indices": list(range(count))}
    return {
        "total_num_frames": max(1, round(clip.duration_s * _CLOCK)),
        "fps": float(_CLOCK),
        "duration": clip.duration_s,
        "frames_indices": [round(time * _CLOCK) for time in clip.times_s],
    }
