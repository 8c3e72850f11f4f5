"""Lets lmms-eval evaluate a model: its model ``coat_vlm``.

lmms-eval finds :func:`get_manifest` by the entry point ``lmms_eval.models`` of this package; import
needs lmms-eval. Interface: EvolvingLMMs-Lab/lmms-eval v0.7.3, lmms_eval/api/model.py,
lmms_eval/models/registry_v2.py and lmms_eval/api/task.py (``ConfigurableMessagesTask``).
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]
from PIL import Image

from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_eval.benchmark import IMAGE_LINE
from coat_eval.generation import select_device
from coat_eval.runner import load_adapter

_UNSUPPORTED = "coat_vlm answers tasks with output_type generate_until; choose such a task"


def get_manifest() -> Any:
    """Return the declaration by which lmms-eval finds the model."""
    return ModelManifest(
        model_id="coat_vlm", chat_class_path="coat_eval.lmms_plugin.CoatVlmForLmmsEval"
    )


class CoatVlmForLmmsEval(lmms):
    """A model of lmms-eval that gets chat messages and answers greedily."""

    is_simple = False

    def __init__(
        self,
        pretrained: str,
        precision: str | None = None,
        device: str | None = None,
        batch_size: int = 1,
        max_batch_size: int | None = None,
    ) -> None:
        """Load the model; the arguments come from ``--model_args`` and the command line."""
        super().__init__()
        if max_batch_size is not None:
            raise ValueError("max_batch_size has no effect: batches have batch_size prompts")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; give a number from 1 on")
        self._batch_size = int(batch_size)
        self._adapter = load_adapter(pretrained, select_device(device), precision)

    @property
    def device(self) -> Any:
        """Device of the model, on which lmms-eval gathers counts of several processes."""
        return self._adapter.device

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer the requests in order; ValueError for sampling, DataError for bad media."""
        answers: dict[int, str] = {}
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            _, _, options, _, task, _ = request.args
            groups.setdefault(_read_options(options, task), []).append(index)
        encoder = self._adapter.encoder
        for (tokens, until), indices in groups.items():
            for begin in range(0, len(indices), self._batch_size):
                part = indices[begin : begin + self._batch_size]
                encoded = [encoder.encode(self._make_sample(requests[index])) for index in part]
                texts = self._adapter.answer(encoder.collate(encoded), tokens)
                for end in until:
                    texts = [text.partition(end)[0] for text in texts]
                answers.update(zip(part, texts, strict=True))
        return [answers[index] for index in range(len(requests))]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Raise ValueError: only tasks that generate answers are supported."""
        raise ValueError(_UNSUPPORTED)

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raise ValueError: only tasks of one round are supported."""
        raise ValueError(_UNSUPPORTED)

    def _make_sample(self, request: Any) -> Sample:
        """Make a conversation; each image or video ends its line, as in LLaVA's prompts."""
        _, make_messages, _, row, task, split = request.args
        where = f"task {task}, row {row}"
        turns, media = [], []
        for message in make_messages(self.task_dict[task][split][row]):
            parts = []
            for content in message["content"]:
                kind = content["type"]
                if kind == "text":
                    parts.append(Part("text", content["text"]))
                    continue
                media.append(_make_media(kind, content["url"], where))
                parts += [Part(kind), Part("text", IMAGE_LINE)]
            turns.append(Turn(message["role"], tuple(parts)))
        return Sample(id=where, turns=tuple(turns), media=tuple(media))


def _make_media(kind: Any, value: Any, where: str) -> Media:
    """Make :class:`Media` of a path or a PIL image; DataError for anything else."""
    if kind in ("image", "video") and isinstance(value, str):
        return Media(kind=kind, path=value)
    if kind == "image" and isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.convert("RGB").save(buffer, "PNG")
        return Media(kind=kind, data=buffer.getvalue())
    problem = f"the content {kind!r} of type {type(value).__name__} cannot be asked"
    raise DataError(where, problem, "use a task with texts, images and videos")


def _read_options(options: Mapping[str, Any], task: str) -> tuple[int, tuple[str, ...]]:
    """Return the number of new tokens (default 128) and the texts that end an answer."""
    sampled = options.get("do_sample") and (options.get("temperature") or 1.0) > 0
    if sampled or (options.get("temperature") or 0.0) > 0 or (options.get("num_beams") or 1) > 1:
        raise ValueError(
            f"task {task} asks for {dict(options)}; answers are greedy here: set do_sample to "
            "false, temperature to 0 and num_beams to 1"
        )
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    return int(options.get("max_new_tokens") or 128), tuple(filter(None, until))
