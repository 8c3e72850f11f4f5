"""Documents as rows of tokens that are read once, and questions with a choice of answers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from coat_data.containers.open import open_rows
from coat_data.sample import DataError
from coat_vlm.model.processor import train_tokenizer

TOKENIZER_CHARACTERS = 32_000_000
"""The tokenizer is trained on every n-th document, so that these are about so many characters."""
_DOCUMENTS_AT_ONCE = 1000
TOKENS = "tokens.npz"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of documents; an end token follows each document."""

    tokenizer: PreTrainedTokenizerFast
    training: Tensor
    """int32 [tokens]."""
    held_out: Mapping[str, Tensor]
    """Source of the documents -> int32 [tokens]."""


@dataclass(frozen=True, slots=True)
class Question:
    """Contexts with continuations; the most likely continuation is the answer.

    Several continuations of one context, or one of several contexts (WinoGrande). A single pair is
    right if greedy decoding of the context gives the continuation (LAMBADA).
    """

    pairs: tuple[tuple[str, str], ...]
    gold: int
    """Number of the right pair, counted from 0."""


def read_corpus(
    training: Sequence[Path], held_out: Sequence[Path], vocab_size: int, folder: Path
) -> Corpus:
    """Read documents and tokenize them; their tokens are saved in ``folder`` and read from there.

    Args:
        training: files whose rows have a field ``text`` and may have a field ``source``: JSON
            lines, Parquet, also compressed.
        held_out: files of other documents, with the same fields.
        vocab_size: number of tokens of the tokenizer, which is trained on the training documents.
        folder: an existing folder.

    Raises:
        DataError: a file cannot be read, or a row has no text.
    """
    if not (folder / TOKENS).is_file():
        texts = [text for text, _ in _read_documents(training)]
        every = -(-sum(map(len, texts)) // TOKENIZER_CHARACTERS)
        lines = chain.from_iterable(text.splitlines(keepends=True) for text in texts[::every])
        tokenizer = train_tokenizer(lines, vocab_size)
        tokenizer.save_pretrained(folder / TOKENIZER)
        arrays = {"training": _encode(tokenizer, texts)}
        by_source: dict[str, list[str]] = {}
        for text, source in _read_documents(held_out):
            by_source.setdefault(source, []).append(text)
        for source, group in sorted(by_source.items()):
            arrays[f"held out {source}"] = _encode(tokenizer, group)
        part = folder / f"part-{TOKENS}"
        np.savez(part, **arrays)  # pyright: ignore[reportArgumentType]
        part.replace(folder / TOKENS)
    with np.load(folder / TOKENS) as arrays:
        ids = {name: torch.from_numpy(arrays[name].astype(np.int32)) for name in arrays.files}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)
    training_ids = ids.pop("training")
    return Corpus(
        tokenizer, training_ids, {name.removeprefix("held out "): ids[name] for name in ids}
    )


def _read_documents(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        for number, row in enumerate(open_rows(file.absolute()).stream()):
            text = row.get("text") if isinstance(row, Mapping) else None
            if not isinstance(text, str):
                raise DataError(f"{file}, row {number}", "has no text in field text", "add it")
            yield text, str(row.get("source", file.name))


def _encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the token ids of all texts with an end token after each, uint16 or uint32."""
    dtype, end = np.uint16 if len(tokenizer) <= 2**16 else np.uint32, tokenizer.eos_token_id
    parts: list[np.ndarray[Any, Any]] = []
    for begin in tqdm(range(0, len(texts), _DOCUMENTS_AT_ONCE), "tokenizing", leave=False):
        group = list(texts[begin : begin + _DOCUMENTS_AT_ONCE])
        for ids in tokenizer(group, add_special_tokens=False)["input_ids"]:
            parts.append(np.array([*ids, end], dtype))
    return np.concatenate(parts)


def read_questions(file: Path) -> list[Question]:
    """Read questions in the layouts of llm-foundry's evaluation data.

    Rows have ``query``, ``choices`` and ``gold``; ``context_options``, ``continuation`` and
    ``gold``; or ``context`` and ``continuation``.

    Raises:
        DataError: the file cannot be read, or a row has another layout.
    """
    questions: list[Question] = []
    for number, row in enumerate(open_rows(file.absolute()).stream()):
        match row:
            case {"query": context, "choices": choices, "gold": gold}:
                pairs = [(context, choice) for choice in choices]
            case {"context_options": contexts, "continuation": continuation, "gold": gold}:
                pairs = [(context, continuation) for context in contexts]
            case {"context": context, "continuation": continuation}:
                pairs, gold = [(context, continuation)], 0
            case _:
                raise DataError(
                    f"{file}, row {number}",
                    "has none of the known layouts",
                    "give query, choices and gold; context_options, continuation and gold; or "
                    "context and continuation",
                )
        questions.append(Question(tuple(pairs), int(gold)))
    return questions


def score_questions(
    questions: Sequence[Question],
    score: Callable[[Sequence[list[int]], Sequence[int]], Iterable[tuple[float, bool]]],
    tokenizer: PreTrainedTokenizerFast,
    tokens: int,
) -> float:
    """Return the share of right answers in percent, lm-eval's ``acc``.

    Context and continuation are joined with a space. The log-likelihood of a continuation is a sum
    over its tokens, without division by its length.

    Args:
        questions: at least one.
        score: takes token ids of the pairs and the number of the last ids of each to score; returns
            the log-likelihood and whether greedy decoding gives the same ids.
        tokenizer: of the model.
        tokens: largest number of ids; contexts are truncated from the left.
    """
    pairs = [pair for question in questions for pair in question.pairs]
    texts = [(before.rstrip(), f"{before.rstrip()} {after.lstrip()}") for before, after in pairs]
    contexts, wholes = (
        tokenizer(list(part), add_special_tokens=False)["input_ids"]
        for part in zip(*texts, strict=True)
    )
    ids = [whole[-tokens:] for whole in wholes]
    lengths = [len(w) - len(c) for w, c in zip(wholes, contexts, strict=True)]
    scores = iter(score(ids, lengths))
    right = 0
    for question in questions:
        own = [next(scores) for _ in question.pairs]
        if len(own) == 1:
            right += own[0][1]
        else:
            right += max(range(len(own)), key=lambda i: own[i][0]) == question.gold
    return 100 * right / len(questions)
