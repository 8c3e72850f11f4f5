"""Evaluates a checkpoint's language model on text: perplexity, and the accuracy of last words.

Every token is predicted exactly once, after a start token (the tokenizer's BOS, or its end token).
Window k starts at k * stride and counts only tokens that no earlier window predicted.
Source of the procedure: Hugging Face, "Perplexity of fixed-length models". A last word is right if
each of its tokens is the most likely one: LAMBADA's accuracy (Paperno et al., arXiv:1606.06031).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional as F
from tqdm import tqdm

from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import DataError
from coat_eval.adapter import name_precision
from coat_eval.files import read_json, read_table
from coat_eval.generation import select_device
from coat_eval.own_model import load_run_or_model
from coat_vlm.config import Precision
from coat_vlm.model.pretrained import load_auto

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

WINDOW = 2048
_ROW_FORMATS = (".json", ".jsonl", ".parquet", ".gz", ".ndjson")


def load_language_model(
    folder: Path, precision: Precision | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, str]":
    """Load the causal language model of a run, a model folder or any other; tokenizer, precision.

    The default precision is as in :func:`load_run_or_model`.
    """
    config = read_json(folder / "config.json", "copy the model again")
    if (folder / "recipe.yaml").is_file() or config.get("model_type") == "coat_vlm":
        model, processor, _, found = load_run_or_model(folder, select_device(), precision)
        return cast(Any, model).language_model, processor.tokenizer, found
    if not config:
        raise FileNotFoundError(
            f"{folder} has no config.json; give a run folder, RUN/sft/model, an exported folder or "
            "the folder of a language model"
        )
    if precision is not None:
        raise ValueError(f"precision={precision} is for checkpoints of this project, not {folder}")
    # Imported here because coat_vlm must be imported before transformers (torchvision_ops.py).
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = select_device()
    dtype: Any = torch.float32 if device.type == "cpu" else "auto"
    language: Any = load_auto(AutoModelForCausalLM, folder, dtype=dtype, local_files_only=True)
    tokenizer = load_auto(AutoTokenizer, folder, local_files_only=True)
    return language.to(device).eval(), tokenizer, name_precision(language.dtype)


def read_documents(path: Path, text_field: str = "text") -> list[str]:
    """Read documents: a plain text, or one per row of JSON lines, JSON or Parquet.

    Rows with ``context`` and ``continuation`` (LAMBADA in llm-foundry) need no ``text_field``.
    """
    if path.suffix.lower() not in _ROW_FORMATS:
        try:
            documents = [path.read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise DataError(str(path), f"is not UTF-8 text: {error}", "convert it") from error
    else:
        table = read_table(path)
        documents = []
        for index, row in enumerate(table.rows):
            text = row.get(text_field)
            if text is None and {"context", "continuation"} <= row.keys():
                text = f"{row['context']} {row['continuation']}"
            if not isinstance(text, str):
                problem = f"has no text under {text_field!r}; it has {sorted(row)}"
                raise DataError(table.where(index), problem, "name the field with --text-field")
            documents.append(text)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise DataError(str(path), "contains no text", "give another file")
    return documents


def measure_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    documents: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 4,
) -> dict[str, float]:
    """Predict every token of every document once; the start token is the only special token added.

    ``window`` is at most 2048 by default, ``stride`` half a window; the logits of ``batch_size``
    windows are in memory. Losses are in nats, ``last_word_accuracy`` in percent. ValueError: window
    or stride is invalid for the model, or the tokenizer has no start token.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or WINDOW
    window = min(WINDOW, positions) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 0 < stride <= window <= positions:
        raise ValueError(
            f"window={window} and stride={stride}: 0 < stride <= window <= {positions}, the "
            "positions that the model has"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give at least one window per forward pass")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(start, int):
        raise ValueError("the tokenizer has neither a BOS nor an end token to start a text")

    def encode(text: str) -> list[int]:
        return [start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    encoded = [encode(text) for text in documents]
    tokens = sum(len(ids) - 1 for ids in encoded)
    windows = (
        (number, *one)
        for number, ids in enumerate(encoded)
        for one in _split_windows(ids, window, stride)
    )
    hits: list[list[bool]] = [[] for _ in documents]
    nll = 0.0
    with tqdm(total=tokens, desc="perplexity", unit="token") as bar:
        while batch := list(islice(windows, batch_size)):
            for (number, *_), (loss, hit) in zip(batch, _predict(model, batch), strict=True):
                nll += loss
                hits[number] += hit
                bar.update(len(hit))
    # As lm-eval: the tokens of the whole text after as many as the text without its last word has.
    lengths = [len(encode(text.rpartition(" ")[0])) for text in documents]
    right = sum(all(hit[length - 1 :]) for hit, length in zip(hits, lengths, strict=True))
    num_bytes = sum(len(text.encode("utf-8")) for text in documents)
    return {
        "perplexity": math.exp(nll / tokens),
        "bits_per_byte": nll / (num_bytes * math.log(2)),
        "nll_per_token": nll / tokens,
        "last_word_accuracy": 100 * right / len(documents),
        "tokens": tokens,
        "bytes": num_bytes,
        "documents": len(documents),
    }


def _split_windows(
    ids: Sequence[int], window: int, stride: int
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Yield the inputs of windows with labels: the next token if this window counts it."""
    counted = 0
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + window, len(ids) - 1)
        skipped = counted - begin
        yield ids[begin:end], [IGNORE_INDEX] * skipped + list(ids[counted + 1 : end + 1])
        counted = end
        if end == len(ids) - 1:
            return


@torch.inference_mode()
def _predict(
    model: "PreTrainedModel", batch: Sequence[tuple[int, Sequence[int], list[int]]]
) -> Iterator[tuple[float, list[bool]]]:
    """Yield per window the loss of its counted tokens, and whether each is the most likely one."""
    longest = max(len(ids) for _, ids, _ in batch)
    inputs = torch.tensor([[*ids, *[ids[0]] * (longest - len(ids))] for _, ids, _ in batch])
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
    for row, (_, ids, labels) in zip(logits, batch, strict=True):
        target = torch.tensor(labels, device=row.device)
        own = row[: len(ids)].float()
        loss = F.cross_entropy(own, target, ignore_index=IGNORE_INDEX, reduction="sum")
        yield loss.double().item(), (own.argmax(-1) == target)[target != IGNORE_INDEX].tolist()
