"""Lets VLMEvalKit evaluate a model. Not tested against VLMEvalKit itself, which is not on PyPI.

VLMEvalKit has no plugin interface: its ``run.py`` looks models up in the dictionary
``vlmeval.config.supported_VLM``, to which :func:`register` adds one. In its checkout::

    python -c "from coat_eval.vlmeval_adapter import register
    register('my_vlm', '/path/to/runs/my_vlm')
    import runpy; runpy.run_path('run.py', run_name='__main__')" --data MMStar --model my_vlm

``coat-vlm score`` reads the result tables. Prompts and scores are VLMEvalKit's; videos are decoded
with the settings of the checkpoint. Interface: open-compass/VLMEvalKit, vlmeval/vlm/base.py
@23757c4 (``BaseModel`` converts every message to a list of ``{"type", "value"}`` and calls
``generate_inner``), vlmeval/inference.py @0044c57 and inference_video.py @002f7b7
(``supported_VLM``, ``set_dump_image``, ``VIDEO_LLM``). The tests state that interface again. Import
needs vlmeval.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlmeval.vlm.base import BaseModel  # pyright: ignore[reportMissingImports]

from coat_data.sample import Role
from coat_eval.harness_model import Content, HarnessModel, make_sample

MAX_NEW_TOKENS = 128
"""Longest answer in tokens, as in ``coat-vlm eval --tasks``."""


def register(name: str, pretrained: str, **options: Any) -> None:
    """Add a model to VLMEvalKit's models; it is loaded when VLMEvalKit first asks it.

    Args:
        name: name for ``run.py --model``.
        pretrained: run folder, model folder or name, see :class:`HarnessModel`.
        **options: ``precision``, ``device``, ``max_new_tokens`` of :class:`CoatVlmForVLMEvalKit`.

    Raises:
        ValueError: VLMEvalKit has a model of this name.
    """
    from vlmeval.config import supported_VLM  # pyright: ignore[reportMissingImports]

    if name in supported_VLM:
        raise ValueError(f"VLMEvalKit has a model named {name!r}; choose another name")
    supported_VLM[name] = partial(CoatVlmForVLMEvalKit, pretrained, **options)


class CoatVlmForVLMEvalKit(BaseModel):
    """A model of VLMEvalKit with interleaved images and videos, which answers greedily."""

    INTERLEAVE = True
    VIDEO_LLM = True
    allowed_types = ("text", "image", "video")

    def __init__(
        self,
        pretrained: str,
        *,
        precision: str | None = None,
        device: str | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> None:
        """Load the model; see :class:`HarnessModel` for the arguments and errors."""
        super().__init__()
        self._model = HarnessModel(pretrained, precision=precision, device=device)
        self._max_new_tokens = max_new_tokens

    def generate_inner(
        self, message: Sequence[Mapping[str, Any]], dataset: str | None = None
    ) -> str:
        """Answer one question.

        Args:
            message: contents in order, each with ``type`` (text, image or video), ``value`` (the
                text, or the path of a file) and perhaps ``role`` (system; default user).
            dataset: name of the data set, for messages.

        Raises:
            DataError: a file cannot be read, or the prompt is too long for the model.
        """
        contents: dict[Role, list[Content]] = {"system": [], "user": []}
        for one in message:
            own = contents["system" if one.get("role") == "system" else "user"]
            own.append((one["type"], one["value"]))
        turns: list[tuple[Role, list[Content]]] = [one for one in contents.items() if one[1]]
        sample = make_sample(turns, f"data set {dataset}")
        (text,) = self._model.answer([sample], self._max_new_tokens)
        return text
