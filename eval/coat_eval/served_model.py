"""A model that an OpenAI-compatible server runs: vLLM, SGLang, ``transformers serve``.

Prompts and frames are as in :class:`coat_eval.hub_model.HubAdapter`; the server formats them
with the model's chat template. Videos always become images. Images are sent as PNG, so that the
server sees the same pixels as our own generation.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from coat_data.sample import DataError
from coat_eval.benchmark import Prompt
from coat_eval.chat_client import ChatClient
from coat_eval.hub_model import ContentReader


class ServedModel(ContentReader):
    """A model behind an address, which is asked with many requests at a time."""

    def __init__(self, client: ChatClient, *, num_frames: int, line_breaks: bool) -> None:
        super().__init__(num_frames)
        self._client, self.line_breaks = client, line_breaks
        self.encoder, self.device = self, f"server {client.address}"
        self.identity = {
            "server": client.address,
            "model": client.name,
            "num_frames": num_frames,
            "videos_as": self.videos_as,
            "line_breaks": line_breaks,
        }

    def answer_all(
        self, prompts: Sequence[Prompt], batches: Sequence[list[int]], at_once: int, **settings: Any
    ) -> Iterator[Any]:
        """Answer batches of one prompt, ``at_once`` at a time, in the order of the replies.

        Yields lists of indices and of entries of their rows, and the errors of questions that could
        not be asked, by index. ``settings`` are entries of the requests. ValueError if the server
        gives no answer.
        """

        def ask(batch: list[int]) -> Any:
            try:
                parts, images, _ = self.read(prompts[batch[0]].load())
                urls = ({"type": "image_url", "image_url": {"url": _encode(one)}} for one in images)
                content = [part if part["type"] == "text" else next(urls) for part in parts]
                text, is_cut = self._client.ask(content, **settings)
            except DataError as error:
                return [], [], {batch[0]: error}
            return batch, [{"prediction": text} | ({"cut": True} if is_cut else {})], {}

        return self._client.ask_all(batches, ask, at_once)


def _encode(image: Image.Image) -> str:
    """Return an image as a ``data:`` address of a PNG, whose pixels are exact."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
