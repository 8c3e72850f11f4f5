"""A model that an OpenAI-compatible server runs: vLLM, SGLang, ``transformers serve``.

Prompts and frames are those of :class:`coat_eval.hub_model.HubAdapter`, which the server formats
with the model's chat template; only videos always become images. Images are sent as PNG, so that
the server sees the pixels that our own generation would.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from coat_data.media.image import open_image
from coat_data.media.sampling import VideoSettings
from coat_data.media.video import VideoReader
from coat_data.sample import DataError, Media, Sample
from coat_eval.adapter import Answered
from coat_eval.benchmark import IMAGE_LINE, Prompt
from coat_eval.chat_client import ChatClient, RefusedError


class ServedModel:
    """A model behind an address, which is asked with many requests at a time."""

    def __init__(self, client: ChatClient, *, num_frames: int, line_breaks: bool) -> None:
        """Wrap a client; ``line_breaks``: prompts have a line break after each image.

        Composed models of this project were trained with it; the chat templates of published
        models have their own separators.
        """
        self._client, self._line_breaks = client, line_breaks
        self._videos = VideoReader(VideoSettings(num_frames=num_frames))
        self.device = f"server {client.address}"
        self.identity = {
            "server": client.address,
            "model": client.name,
            "num_frames": num_frames,
            "videos_as": "images",
            "line_breaks": line_breaks,
        }

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """See :class:`coat_eval.adapter.PromptEncoder`."""
        return self._videos.plan(media)[1]

    def answer_prompts(
        self, prompts: Sequence[Prompt], indices: Sequence[int], num_requests: int, max_tokens: int
    ) -> Iterator[Answered]:
        """Answer the prompts at ``indices``, in the order in which replies arrive.

        DataError if the server gives no answer; ValueError for prompts with choices to rank.
        """
        if any(prompts[index].choices for index in indices):
            raise ValueError(
                "a server does not return the losses of given answers, which this task ranks; "
                "generate letters instead: --tasks seedbench"
            )

        def ask(index: int) -> Answered:
            try:
                content = self._make_content(prompts[index].load())
            except DataError as error:
                return {}, {index: error}
            try:
                reply = self._client.ask(content, max_tokens)
            except RefusedError as error:
                return {}, {index: error}
            cut = {"cut": True} if reply.is_cut else {}
            return {index: {"prediction": reply.text.strip(), **cut}}, {}

        return (answered for _, answered in self._client.ask_all(indices, ask, num_requests))

    def _make_content(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the first turn of the conversation as parts of a message, with its media."""
        content: list[dict[str, Any]] = []
        media = iter(sample.media)
        for part in sample.turns[0].parts:
            if part.kind != "text":
                one = next(media)
                frames = [open_image(one)] if one.kind == "image" else self._videos.read(one).frames
                content += [
                    {"type": "image_url", "image_url": {"url": _encode(frame)}} for frame in frames
                ]
            elif part.text != IMAGE_LINE or self._line_breaks:
                if content and content[-1]["type"] == "text":  # servers may put blanks between two
                    content[-1]["text"] += part.text
                else:
                    content.append({"type": "text", "text": part.text})
        return content


def _encode(image: Image.Image) -> str:
    """Return an image as a ``data:`` address of a PNG, whose pixels are exact."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
