"""Any image-text-to-text model of Hugging Face as an answerer, through its chat template."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from coat_eval.answerer import ModelOptions
from coat_eval.hub_encoder import HubEncoder
from coat_eval.likelihood import AnswerLoss, answer_losses
from coat_eval.runner import folder_sha256
from coat_vlm.generate import GREEDY


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
