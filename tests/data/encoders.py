"""Encoders, rows and files that many tests have in common."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from coat_data.load.encode import Encoder
from coat_data.media.image import ImageTransform
from coat_data.sample import DataError, Sample
from coat_data.text.chat import get_template

Tar = Callable[[Path, dict[str, bytes]], Path]
"""The fixture ``tar``."""

TRANSFORM = ImageTransform(8, (0.5,) * 3, (0.5,) * 3)


def encoder_of(
    tokenizer: PreTrainedTokenizerFast,
    template: str = "plain",
    transform: ImageTransform = TRANSFORM,
    **options: Any,
) -> Encoder:
    """Images of 4 tokens ``<image>``, unless ``options`` say otherwise."""
    image = tokenizer.convert_tokens_to_ids("<image>")
    options = {"image_token_id": image, "tokens_per_image": 4, **options}
    return Encoder(tokenizer, get_template(template, tokenizer), transform, **options)


def templates_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Templates that work with the tokenizer, and the end of an answer in each."""
    eos = str(tokenizer.eos_token)
    found = {"plain": eos, "vicuna_v1": eos, "tokenizer": eos}
    if eos == "<|im_end|>":
        found["chatml"] = eos
    if "<<SYS>>" in str(tokenizer.chat_template):
        found["tokenizer"] = " </s>"
    return found


def talk(question: str = "q", answer: str = "a", **fields: Any) -> dict[str, Any]:
    """A row of LLaVA's format."""
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {**fields, "conversations": said}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shown(sample: Sample | DataError) -> list[str]:
    """A conversation as text: ``user: [a.png] What?``."""
    assert isinstance(sample, Sample)
    names = iter(sample.media)
    lines = []
    for turn in sample.turns:
        pieces = [
            part.text if part.kind == "text" else f"[{Path(next(names).path or '').name}]"
            for part in turn.parts
        ]
        lines.append(f"{turn.role}: {''.join(pieces)}")
    return lines
