"""Model adapter for any other image-text-to-text model of Hugging Face with a chat template.

If processor and chat template support videos, the frames of a video are passed as a video with
their times. Otherwise each frame is an image.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from coat_eval.adapter import ModelAdapter, compute_answer_losses, name_precision
from coat_eval.benchmark import IMAGE_LINE
from coat_eval.files import folder_sha256
from coat_vlm.generate import GREEDY
from coat_vlm.model.pretrained import load_auto

_CLOCK = 1000
"""Ticks per second of frame times: processors count in whole frames."""


class HubAdapter(ModelAdapter):
    """A model with its processor; prompts get the chat template."""

    encoder: "HubEncoder"

    def __init__(self, model: Any, processor: Any, name: str, num_frames: int) -> None:
        """Wrap a loaded model; ``name`` is its folder or Hub name."""
        self._name = name
        encoder = HubEncoder(processor, num_frames)
        folder = Path(name)

        def describe() -> dict[str, Any]:
            commit = {"model": name, "commit": getattr(model.config, "_commit_hash", None)}
            return {
                **({"model_sha256": folder_sha256(folder)} if folder.is_dir() else commit),
                "dtype": str(model.dtype).removeprefix("torch."),
                "precision": name_precision(model.dtype),
                "num_frames": num_frames,
                "videos_as": encoder.videos_as,
            }

        super().__init__(model, encoder, describe)

    @classmethod
    def load(cls, name: str, device: torch.device, num_frames: int) -> "HubAdapter":
        """Load a model from a folder, or from the Hub by name; ValueError if it is unsuitable."""
        from transformers import AutoModelForImageTextToText, AutoProcessor

        dtype = torch.float32 if device.type == "cpu" else "auto"
        try:
            processor = load_auto(AutoProcessor, name)
            model: Any = load_auto(AutoModelForImageTextToText, name, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} cannot be loaded as an image-text-to-text model: "
                f"{str(error).splitlines()[0]}; give a run folder or model folder of this project, "
                "or a folder (online also the Hub name) with such a model and its processor"
            ) from error
        if getattr(processor, "chat_template", None) is None:
            raise ValueError(
                f"the processor of {name} has no chat template; add chat_template.jinja to its "
                "folder (newer versions on the Hub have one)"
            )
        return cls(model.to(device).eval(), processor, name, num_frames)

    @torch.inference_mode()
    def answer(self, batch: Any, max_new_tokens: int, **sampling: Any) -> list[str]:
        """See :class:`ModelAdapter`."""
        inputs = self._copy_to_device(batch)
        tokenizer = self.encoder.tokenizer
        options = {**GREEDY, **sampling, "pad_token_id": tokenizer.pad_token_id}
        output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
        answers = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def compute_losses(self, batch: dict[str, torch.Tensor]) -> list[float]:
        """See :class:`ModelAdapter`; ValueError: the model is an encoder-decoder."""
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                f"{self._name} is an encoder-decoder model, which cannot rank answers here; "
                "generate letters instead: --tasks seedbench"
            )
        inputs = self._copy_to_device(batch)
        return compute_answer_losses(self.model, inputs, inputs.pop("labels"))

    def _copy_to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy a batch to the model's device; only pixels get the model's dtype."""
        device, dtype = self.model.device, self.model.dtype
        return {
            name: value.to(device, dtype) if name.startswith("pixel_values") else value.to(device)
            for name, value in batch.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPrompt:
    """One prompt formatted by a chat template, with its media."""

    text: str
    images: list[Image.Image]
    """In RGB, like the videos in the order of their placeholders in the text."""
    videos: list[Clip]
    answer: str = ""
    """Answer to rank, after the prompt."""


class ContentReader:
    """Reads texts and media of prompts; caches the last decoded video."""

    videos_as: Literal["video", "images"] = "images"
    line_breaks = False
    """Whether the line break after an image is text: chat templates of published models have their
    own separators, and composed models of this project were trained with it."""

    def __init__(self, num_frames: int) -> None:
        self._videos = VideoReader(VideoSettings(num_frames=num_frames))
        self._last_clip: tuple[Media, Clip] | None = None

    def read(self, sample: Sample) -> tuple[list[dict[str, str]], list[Image.Image], list[Clip]]:
        """Return the parts of the first turn, for a chat template, its images and its videos."""
        content: list[dict[str, str]] = []
        images: list[Image.Image] = []
        videos: list[Clip] = []
        media = iter(sample.media)
        for part in sample.turns[0].parts:
            if part.kind == "text":
                if part.text != IMAGE_LINE or self.line_breaks:
                    content.append({"type": "text", "text": part.text})
                continue
            one = next(media)
            if one.kind == "image":
                shown = [open_image(one)]
            elif self.videos_as == "video":
                shown = []
                videos.append(self._read_clip(one))
                content.append({"type": "video"})
            else:
                shown = self._read_clip(one).frames
            images += shown
            content += [{"type": "image"}] * len(shown)
        return content, images, videos

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """See :class:`coat_eval.adapter.PromptEncoder`."""
        return self._videos.plan(media)[1]

    def _read_clip(self, media: Media) -> Clip:
        """Read the frames of a video; videos get a fixed number of frames so that batches stack."""
        last = self._last_clip  # several threads may read
        if last is None or last[0] != media:
            clip, number = self._videos.read(media), self._videos.settings.num_frames
            if self.videos_as == "video" and len(clip.frames) < number:
                places = [place * len(clip.frames) // number for place in range(number)]
                times = clip.times_s and [clip.times_s[place] for place in places]
                clip = replace(clip, frames=[clip.frames[place] for place in places], times_s=times)
            last = self._last_clip = (media, clip)
        return last[1]


class HubEncoder(ContentReader):
    """Makes inputs with a processor."""

    def __init__(self, processor: Any, num_frames: int) -> None:
        super().__init__(num_frames)
        self._processor = processor
        self.image_processor = getattr(processor, "image_processor", None)
        self.tokenizer = processor.tokenizer
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            # Padding is masked, so any token works.
            self.tokenizer.pad_token = self.tokenizer.eos_token
        token = getattr(processor, "video_token", None)
        if getattr(processor, "video_processor", None) is not None and token is not None:
            # A template that does not support videos omits the token, or raises.
            with suppress(TemplateError):
                text = self._apply_template([{"type": "video"}, {"type": "text", "text": ""}])
                self.videos_as = "video" if text.count(token) == 1 else "images"

    def encode(self, sample: Sample) -> HubPrompt:
        """Format the first turn of the conversation, and load its images and videos."""
        content, images, videos = self.read(sample)
        return HubPrompt(text=self._apply_template(content), images=images, videos=videos)

    def encode_choices(self, sample: Sample, answers: Sequence[str]) -> list[HubPrompt]:
        """See :class:`coat_eval.adapter.PromptEncoder`."""
        prompt = self.encode(sample)
        return [replace(prompt, answer=answer) for answer in answers]

    def collate(self, encoded: Sequence[HubPrompt]) -> dict[str, torch.Tensor]:
        """See :class:`coat_eval.adapter.PromptEncoder`; all or none of the prompts have media."""
        return self._make_inputs([own.text for own in encoded], encoded, "left")

    def collate_choices(self, encoded: Sequence[HubPrompt]) -> dict[str, torch.Tensor]:
        """Right-padded; ``labels`` (B, T) are the tokens of each answer and the end token."""
        texts = [
            prompt.text + self._format_answer(prompt.text, prompt.answer) for prompt in encoded
        ]
        inputs = self._make_inputs(texts, encoded, "right")
        labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
        ends = inputs["attention_mask"].sum(1).tolist()
        for row, (prompt, text, end) in enumerate(zip(encoded, texts, ends, strict=True)):
            # Counted from the end: before it, images take more tokens than their placeholders.
            span = slice(end - self._count_new_tokens(prompt.text, text), end)
            labels[row, span] = inputs["input_ids"][row, span]
        return {**inputs, "labels": labels}

    def _apply_template(self, content: Sequence[dict[str, str]]) -> str:
        return self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def _make_inputs(
        self, texts: list[str], prompts: Sequence[HubPrompt], side: str
    ) -> dict[str, torch.Tensor]:
        images = [own.images for own in prompts]
        clips = [clip for own in prompts for clip in own.videos]
        videos: dict[str, Any] = {}
        if clips:
            videos = {
                "videos": [np.stack([np.asarray(frame) for frame in one.frames]) for one in clips],
                "video_metadata": [_make_metadata(one) for one in clips],
                "do_sample_frames": False,
            }
        first = self.tokenizer.bos_token
        inputs = self._processor(
            text=texts,
            images=images if any(images) else None,
            **videos,
            padding=True,
            padding_side=side,
            return_tensors="pt",
            # Chat templates insert the BOS token themselves, if there is one.
            add_special_tokens=first is None or not texts[0].startswith(first),
        )
        return {name: value for name, value in inputs.items() if torch.is_tensor(value)}

    def _format_answer(self, prompt: str, answer: str) -> str:
        """Return answer and end token, after a space if the prompt ends in a word or a colon."""
        spaced = prompt[-1:].isspace() or prompt.endswith(tuple(self.tokenizer.all_special_tokens))
        return f"{'' if spaced else ' '}{answer}{self.tokenizer.eos_token or ''}"

    def _count_new_tokens(self, prompt: str, whole: str) -> int:
        before, ids = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole)
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))
        return len(ids) - sum(1 for _ in same)


def _make_metadata(clip: Clip) -> dict[str, Any]:
    """Make the fields of transformers' ``VideoMetadata``; a folder of frames has no times."""
    count = len(clip.frames)
    if clip.times_s is None or clip.duration_s is None:
        return {"total_num_frames": count, "frames_indices": list(range(count))}
    return {
        "total_num_frames": max(1, round(clip.duration_s * _CLOCK)),
        "fps": float(_CLOCK),
        "duration": clip.duration_s,
        "frames_indices": [round(time * _CLOCK) for time in clip.times_s],
    }
