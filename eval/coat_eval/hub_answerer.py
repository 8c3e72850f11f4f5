"""Any image-text-to-text model of Hugging Face as an answerer, through its chat template.

A video is shown as its frames, one image each, as LLaVA and VILA show videos: that works for every
model that takes several images. A processor's own way with videos differs from model to model.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from coat_data.frame_sampling import VideoSettings
from coat_data.image import open_image
from coat_data.sample import Media
from coat_data.video import Clip, VideoReader
from coat_eval.answerer import ModelOptions
from coat_eval.runner import folder_sha256
from coat_vlm.generate import GREEDY

Encoded = tuple[str, list[Image.Image]]


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
        return {**weights, "dtype": dtype, "num_frames": self._num_frames}

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
    def answer(self, batch: Any, max_new_tokens: int) -> list[str]:
        """See :class:`coat_eval.answerer.Answerer`."""
        inputs = {
            name: value.to(self._model.device, self._model.dtype)
            if value.is_floating_point()
            else value.to(self._model.device)
            for name, value in batch.items()
        }
        tokenizer = self.encoder.tokenizer
        output = self._model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, **GREEDY
        )
        answers = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [text.strip() for text in texts]


class HubEncoder:
    """Turns prompts into a processor's inputs; keeps the last video it decoded.

    Attributes:
        tokenizer: the processor's, padding on the left.
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

    def encode(self, text: str, media: Sequence[Media]) -> Encoded:
        """The conversation as text, and its images in RGB."""
        images = [image for one in media for image in self._images(one)]
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        prompt = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return prompt, images

    def collate(self, encoded: Sequence[Encoded]) -> dict[str, torch.Tensor]:
        """See :class:`coat_eval.answerer.PromptEncoder`; all or none of the prompts have images."""
        images = [own for _, own in encoded]
        inputs = self._processor(
            text=[prompt for prompt, _ in encoded],
            images=images if any(images) else None,
            padding=True,
            return_tensors="pt",
            # Chat templates write the first token themselves where there is one.
            add_special_tokens=not self._writes_first_token(encoded[0][0]),
        )
        return {name: value for name, value in inputs.items() if torch.is_tensor(value)}

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        return self._videos.plan(media)[1]

    def _writes_first_token(self, prompt: str) -> bool:
        first = self.tokenizer.bos_token
        return first is not None and prompt.startswith(first)

    def _images(self, media: Media) -> list[Image.Image]:
        if media.kind == "image":
            return [open_image(media)]
        if self._last_clip is None or self._last_clip[0] != media:
            self._last_clip = (media, self._videos.read(media))
        return self._last_clip[1].frames
