"""Lets lmms-eval evaluate a model: its model ``coat_vlm``.

lmms-eval finds :func:`get_manifest` by the entry point ``lmms_eval.models`` of this package, so no
file of it changes::

    python -m lmms_eval --model coat_vlm --model_args pretrained=runs/my_vlm --tasks pope \
        --batch_size 8 --log_samples --output_path out/lmms

``coat-vlm score`` reads the sample logs. Prompts, media and scores are lmms-eval's, also the
number of tokens and the texts that end an answer; videos are decoded with the settings of the
checkpoint. Interface: EvolvingLMMs-Lab/lmms-eval v0.7.3, lmms_eval/api/model.py (``lmms``),
lmms_eval/models/registry_v2.py (``ModelManifest``) and lmms_eval/api/task.py
(``ConfigurableMessagesTask``); tested with that release. Import needs lmms-eval.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]

from coat_data.sample import Sample
from coat_eval.harness_model import Content, HarnessModel, make_sample, read_generation


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
        """Load the model; the arguments are those of ``--model_args`` and of the command line.

        Raises:
            ValueError: ``max_batch_size`` is given, or see :class:`HarnessModel`.
        """
        super().__init__()
        if max_batch_size is not None:
            raise ValueError("max_batch_size has no effect: batches have batch_size prompts")
        self._model = HarnessModel(
            pretrained,
            precision=precision,
            device=device,
            batch_size=int(batch_size) if str(batch_size).isdecimal() else batch_size,
        )

    @property
    def device(self) -> Any:
        """Device of the model, on which lmms-eval gathers counts of several processes."""
        return self._model.device

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer the requests, in their order.

        Args:
            requests: instances of lmms-eval with the arguments (context, function from row to
                messages, generation options, row number, task, split).

        Raises:
            ValueError: a task asks for sampling or beam search.
            DataError: a medium cannot be read, or a prompt is too long; names task and row.
        """
        answers = [""] * len(requests)
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            _, _, options, _, task, _ = request.args
            tokens, until = read_generation(options, f"task {task}")
            groups.setdefault((tokens, tuple(until)), []).append(index)
        size = self._model.batch_size
        for (tokens, until), indices in groups.items():
            for begin in range(0, len(indices), size):
                part = indices[begin : begin + size]
                samples = [self._make_sample(requests[index]) for index in part]
                found = self._model.answer(samples, tokens, until)
                for index, text in zip(part, found, strict=True):
                    answers[index] = text
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Raise ValueError: only tasks that generate answers are supported."""
        raise ValueError(_UNSUPPORTED)

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raise ValueError: only tasks of one round are supported."""
        raise ValueError(_UNSUPPORTED)

    def _make_sample(self, request: Any) -> Sample:
        _, make_messages, _, row, task, split = request.args
        messages = make_messages(self.task_dict[task][split][row])
        turns = [(one["role"], list(map(_read_content, one["content"]))) for one in messages]
        return make_sample(turns, f"task {task}, row {row}")


_UNSUPPORTED = "coat_vlm answers tasks with output_type generate_until; choose such a task"


def _read_content(content: Mapping[str, Any]) -> Content:
    kind = content["type"]
    return kind, content["text" if kind == "text" else "url"]
