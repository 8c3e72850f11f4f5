"""Sliding-window perplexity of a checkpoint's language model on text.

A document is the token sequence x_1 .. x_T behind one start token (the tokenizer's BOS, or its end
token where it has no BOS, as lm-eval does), so every token is predicted exactly once. Window k
starts at k * stride and predicts up to ``window`` tokens; of these only the ones that no earlier
window predicted are counted. So each counted token sees at least ``window - stride`` tokens of
context where there are as many. With stride = window the windows do not overlap.
Source of the procedure: Hugging Face, "Perplexity of fixed-length models".
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from coat_data.sample import DataError
from coat_eval.files import read_table
from coat_vlm.config import Precision
from coat_vlm.generate import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

WINDOW = 2048
_IGNORE = -100
_ROW_FORMATS = (".json", ".jsonl", ".parquet", ".gz", ".ndjson")


def load_language_model(
    folder: Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The causal language model inside a checkpoint, and its tokenizer; in evaluation mode.

    Args:
        folder: ``RUN/<stage>/model``, an exported folder, or a language model's own folder (what a
            recipe started from, to see what training on images did to it).
        device: where it goes; the first GPU if there is one, else the CPU.
        dtype: of the weights; by default the checkpoint's on a GPU and FP32 on a CPU.
        precision: compute as a run with this precision does; plainly when absent.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the folder holds no causal language model, or ``precision`` is given for one
            that is not inside a checkpoint of this project.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; give RUN/sft/model, what coat-vlm export wrote, or the "
            "folder of a language model"
        )
    config = json.loads(config_path.read_text(encoding="utf-8"))
    if config.get("model_type") == "coat_vlm":
        model, processor = load(folder, device, dtype, precision)
        return model.language_model, processor.tokenizer
    if precision is not None:
        raise ValueError(f"precision={precision} is for checkpoints of this project, not {folder}")
    # Here, so that coat_vlm has come before transformers (coat_vlm/torchvision_ops.py).
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted: Any = dtype or (torch.float32 if place.type == "cpu" else "auto")
    language: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=wanted, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return language.to(place).eval(), tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """What a model thinks of some text."""

    documents: int
    tokens: int
    """Tokens predicted: all of them."""
    bytes: int
    """Bytes of the text in UTF-8."""
    nll: float
    """Sum of -log p over the tokens, in nats."""

    @property
    def perplexity(self) -> float:
        """It is exp(nll / tokens), and depends on the tokenizer."""
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """The bits that a byte of text costs, nll / (bytes ln 2); comparable between tokenizers."""
        return self.nll / (self.bytes * math.log(2))

    def to_json(self) -> dict[str, Any]:
        """All numbers, as JSON-ready data."""
        return {
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "nll_per_token": self.nll / self.tokens,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "documents": self.documents,
        }


def read_documents(path: Path, text_field: str = "text") -> list[str]:
    """The documents of a file: one plain text, or one per row of JSON lines, JSON or Parquet.

    Args:
        path: ``.jsonl``, ``.json``, ``.parquet`` (also with gzip) hold rows, any other a text.
        text_field: the rows' key; C4 and the Pile have ``text``.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: naming the file and row that has no text.
    """
    path = Path(path)
    if path.suffix.lower() not in _ROW_FORMATS:
        try:
            documents = [path.read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise DataError(str(path), f"is not UTF-8 text: {error}", "convert it") from error
    else:
        table = read_table(path)
        documents = []
        for index, row in enumerate(table.rows):
            if not isinstance(row.get(text_field), str):
                raise DataError(
                    table.where(index),
                    f"has no text under {text_field!r}; it has {sorted(row)}",
                    "name the field with --text-field",
                )
            documents.append(row[text_field])
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise DataError(str(path), "holds no text", "give another file")
    return documents


def measure_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    documents: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 4,
    progress: bool = True,
) -> Perplexity:
    """Predict every token of every document once.

    Args:
        model: a causal language model in evaluation mode; it runs where it is.
        tokenizer: its tokenizer; no special tokens are added but the start token.
        documents: texts; none continues another.
        window: most tokens that a window predicts; by default 2048 or what the model has positions
            for, if that is less.
        stride: tokens from one window to the next; half a window by default.
        batch_size: windows per forward pass; its logits are kept whole.
        progress: show a progress bar.

    Raises:
        ValueError: window or stride does not fit the model or each other, batch_size is below 1, or
            the tokenizer has no token to start with.
    """
    window, stride = _sizes(model, window, stride)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give at least one window per forward pass")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(start, int):
        raise ValueError("the tokenizer has neither a BOS nor an end token to start a text with")
    encoded = [
        [start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        for text in documents
    ]
    tokens = sum(len(ids) - 1 for ids in encoded)
    windows = (one for ids in encoded for one in _windows(ids, window, stride))
    nll = 0.0
    with tqdm(total=tokens, desc="perplexity", unit="token", disable=not progress) as bar:
        while batch := list(islice(windows, batch_size)):
            nll += _batch_nll(model, batch)
            bar.update(sum(label != _IGNORE for _, labels in batch for label in labels))
    return Perplexity(
        documents=len(documents),
        tokens=tokens,
        bytes=sum(len(text.encode("utf-8")) for text in documents),
        nll=nll,
    )


def _sizes(model: "PreTrainedModel", window: int | None, stride: int | None) -> tuple[int, int]:
    positions = getattr(model.config, "max_position_embeddings", None) or WINDOW
    window = min(WINDOW, positions) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 0 < stride <= window <= positions:
        raise ValueError(
            f"window={window} and stride={stride}: 0 < stride <= window <= {positions}, the "
            "positions that the model has"
        )
    return window, stride


def _windows(
    ids: Sequence[int], window: int, stride: int
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Inputs and, for each, the next token as label where this window is the one that counts."""
    counted = 0
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + window, len(ids) - 1)
        skipped = counted - begin
        yield ids[begin:end], [_IGNORE] * skipped + list(ids[counted + 1 : end + 1])
        counted = end
        if end == len(ids) - 1:
            return


@torch.inference_mode()
def _batch_nll(model: "PreTrainedModel", batch: Sequence[tuple[Sequence[int], list[int]]]) -> float:
    """Summed -log p of the counted tokens; what pads a row on the right is seen by none of them."""
    longest = max(len(ids) for ids, _ in batch)
    inputs = torch.tensor([[*ids, *[ids[0]] * (longest - len(ids))] for ids, _ in batch])
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
    total = 0.0
    for row, (ids, labels) in zip(logits, batch, strict=True):
        target = torch.tensor(labels, device=row.device)
        own = row[: len(ids)].float()
        total += F.cross_entropy(own, target, ignore_index=_IGNORE, reduction="sum").double().item()
    return total
