"""A model as the evaluation harnesses of others call it: messages in, texts out.

:mod:`coat_eval.lmms_plugin` and :mod:`coat_eval.vlmeval_adapter` convert the calls of lmms-eval
and VLMEvalKit. The prompt is the harness's own, in the chat template of the model.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from PIL import Image

from coat_data.sample import DataError, Media, Part, Role, Sample, Turn
from coat_eval.benchmark import IMAGE_LINE
from coat_eval.generation import select_device
from coat_eval.runner import load_adapter

Content = tuple[Literal["text", "image", "video"], Any]
"""Kind, and the text, the path of a file, or a PIL image."""
_KINDS = ("text", "image", "video")


class HarnessModel:
    """A model of this project, or of Hugging Face, that answers greedily.

    Attributes:
        device: device of the model.
        batch_size: prompts per forward pass.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        precision: str | None = None,
        device: str | None = None,
        batch_size: int = 1,
    ) -> None:
        """Load the model.

        Args:
            pretrained: see :func:`coat_eval.runner.load_adapter`: run folder, model folder, name.
            precision: precision of this project's checkpoints; default: that of the run folder.
            device: default: this process's GPU, or the CPU.
            batch_size: prompts per forward pass. In FP8 a batch shares scales, so answers depend on
                it.

        Raises:
            ValueError: the batch size is not a positive number, or the model cannot be loaded.
            FileNotFoundError: a run folder has no finished model.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}; give a number from 1 on")
        self.batch_size = batch_size
        self._adapter = load_adapter(pretrained, select_device(device), precision)
        self.device = self._adapter.device

    def answer(
        self, samples: Sequence[Sample], max_new_tokens: int, until: Sequence[str] = ()
    ) -> list[str]:
        """Answer prompts as one batch; texts end before the first of ``until``.

        Raises:
            DataError: a medium cannot be read, or a prompt is too long for the model.
        """
        encoder = self._adapter.encoder
        batch = encoder.collate([encoder.encode(one) for one in samples])
        texts = self._adapter.answer(batch, max_new_tokens)
        for end in until:
            texts = [text.partition(end)[0] if end else text for text in texts]
        return texts


def make_sample(turns: Sequence[tuple[Role, Sequence[Content]]], where: str) -> Sample:
    """Make a conversation; each image or video ends its line, as in LLaVA's prompts.

    Args:
        turns: role and contents of each turn.
        where: place of the question, for messages.

    Raises:
        DataError: a content has another kind, or is neither a text, a path nor a PIL image.
    """
    made, media = [], []
    for role, contents in turns:
        parts = []
        for kind, value in contents:
            if kind == "text" and isinstance(value, str):
                parts.append(Part("text", value))
                continue
            if kind not in _KINDS[1:] or not isinstance(value, str | Image.Image):
                problem = f"the content {kind!r} of type {type(value).__name__} cannot be asked"
                remedy = f"use a task with {', '.join(_KINDS)} (paths or PIL images)"
                raise DataError(where, problem, remedy)
            media.append(_make_media(kind, value))
            parts += [Part(kind), Part("text", IMAGE_LINE)]
        made.append(Turn(role, tuple(parts)))
    return Sample(id=where, turns=tuple(made), media=tuple(media))


def _make_media(kind: Literal["image", "video"], value: Any) -> Media:
    if isinstance(value, str):
        return Media(kind=kind, path=value)
    buffer = io.BytesIO()
    value.convert("RGB").save(buffer, "PNG")
    return Media(kind=kind, data=buffer.getvalue())


def read_generation(options: Mapping[str, Any], where: str) -> tuple[int, list[str]]:
    """Return the maximum number of new tokens (default 128) and the texts that end an answer.

    Raises:
        ValueError: the options ask for sampling or beam search, which the model does not do.
    """
    sampled = options.get("do_sample") and (options.get("temperature") or 1.0) > 0
    if sampled or (options.get("temperature") or 0.0) > 0 or (options.get("num_beams") or 1) > 1:
        raise ValueError(
            f"{where} asks for {dict(options)}; answers are greedy here: set do_sample to false, "
            "temperature to 0 and num_beams to 1"
        )
    until = options.get("until") or []
    return int(options.get("max_new_tokens") or 128), [until] if isinstance(until, str) else [
        *until
    ]
