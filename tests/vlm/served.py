"""Starts transformers' server in this process, and asks it as an OpenAI client does."""

import base64
import contextlib
import io
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image


@contextlib.contextmanager
def serve_at_address(folder: Path) -> Iterator[str]:
    """Serve a model folder on the CPU; give the address."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package, reason="pip install openai 'transformers[serving]'")
    from transformers.cli.transformers import app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--non-blocking", "--device", "cpu", "--dtype", "float32", "--port", port]
    server = app(["serve", str(folder), *options], standalone_mode=False)
    address = f"http://localhost:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        with patch("torchvision.io.decode_image", _decode_with_pillow):
            yield f"{address}/v1"
    finally:
        server.kill_server()


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Any]:
    """Serve a model folder on the CPU; give a function that asks with an image (or None)."""
    with serve_at_address(folder) as address:
        from openai import OpenAI

        client = OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)

        def ask(image: Path | None, question: str, max_tokens: int, **more: Any) -> Any:
            content: Any = [{"type": "text", "text": question}]
            if image is not None:
                url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
                content.insert(0, {"type": "image_url", "image_url": {"url": url}})
            messages: Any = [{"role": "user", "content": content}]
            return client.chat.completions.create(
                model=str(folder), messages=messages, max_tokens=max_tokens, temperature=0, **more
            )

        yield ask


def _decode_with_pillow(data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """As torchvision's decode_image, which is missing where its wheel does not fit torch's."""
    image = Image.open(io.BytesIO(data.numpy().tobytes())).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
