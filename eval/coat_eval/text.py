"""Evaluates a checkpoint's language model on text: sliding-window perplexity and lm-eval tasks.

For the perplexity, a document is the token sequence x_1 .. x_T after a start token (the tokenizer's
BOS, or its end token if it has no BOS, as in lm-eval), so every token is predicted exactly once.
Window k starts at k * stride and predicts up to ``window`` tokens; tokens that an earlier window
predicted are not counted again. Each counted token thus has at least ``window - stride`` tokens of
context, if they exist. With stride = window the windows do not overlap.
Source of the procedure: Hugging Face, "Perplexity of fixed-length models".

The optional extra lm-eval provides the tasks (WikiText, COPA, ARC, SciQ, HellaSwag, GSM8K and
hundreds more); their data come from the Hub or its local cache. SVAMP and NumGLUE, which lm-eval
does not have, are built here from the files of their authors.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional as F
from tqdm import tqdm

from coat_data.sample import DataError
from coat_eval.files import read_json, read_table
from coat_vlm.config import Precision
from coat_vlm.generate import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

WINDOW = 2048
FROM_FILES = ("svamp", "numglue")
"""Tasks that are read from a file."""
_INSTALL = "pip install -e '.[lm-eval]' (or: pip install 'lm-eval[hf]')"
_IGNORE = -100
_ROW_FORMATS = (".json", ".jsonl", ".parquet", ".gz", ".ndjson")
_METRICS = ("first_number", "last_number")
# A comma belongs to a number only before three digits: "2,3" are two numbers.
_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def load_language_model(
    folder: Path,
    precision: Precision | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load the causal language model of a checkpoint in evaluation mode, and its tokenizer.

    The model is on the first GPU in the checkpoint's dtype, or without a GPU on the CPU in FP32.

    Args:
        folder: ``RUN/<stage>/model``, an exported folder, or the folder of a language model (such
            as the one that a recipe started from, to measure the effect of training).
        precision: precision of the computation; default: the dtype of the weights.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the folder has no causal language model, or ``precision`` is given for a folder
            that is not a checkpoint of this project.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; give RUN/sft/model, an exported folder or the folder "
            "of a language model"
        )
    if read_json(config_path, "copy the model again").get("model_type") == "coat_vlm":
        model, processor = load(folder, precision=precision)
        return cast(Any, model).language_model, processor.tokenizer
    if precision is not None:
        raise ValueError(f"precision={precision} is for checkpoints of this project, not {folder}")
    # Imported here because coat_vlm must be imported before transformers (torchvision_ops.py).
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype: Any = torch.float32 if place.type == "cpu" else "auto"
    language: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return language.to(place).eval(), tokenizer


def read_documents(path: Path, text_field: str = "text") -> list[str]:
    """Read documents: a plain text, or one per row of JSON lines, JSON or Parquet.

    Args:
        path: ``.jsonl``, ``.json``, ``.parquet`` (also with gzip) contain rows, others a text.
        text_field: key of the rows' text; ``text`` in C4 and the Pile.

    Raises:
        FileNotFoundError: the file does not exist.
        DataError: a row has no text; names file and row.
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
    """Predict every token of every document once.

    Args:
        model: a causal language model in evaluation mode, on its device.
        tokenizer: its tokenizer; the start token is the only special token added.
        documents: independent texts.
        window: maximum number of tokens per window; default: 2048, or the number of positions of
            the model if that is less.
        stride: tokens from one window to the next; default: half a window.
        batch_size: windows per forward pass; the logits of all of them are in memory.

    Returns:
        ``perplexity``, which is exp(nll / tokens) and depends on the tokenizer; ``bits_per_byte``,
        which is nll / (bytes ln 2) and comparable between tokenizers; ``nll_per_token``, the
        mean of -log p in nats; the number of ``tokens``, of ``bytes`` of the text in UTF-8, and of
        ``documents``.

    Raises:
        ValueError: window or stride is invalid for the model, batch_size is below 1, or the
            tokenizer has no start token.
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
    encoded = [
        [start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        for text in documents
    ]
    tokens = sum(len(ids) - 1 for ids in encoded)
    windows = (one for ids in encoded for one in _split_windows(ids, window, stride))
    nll = 0.0
    with tqdm(total=tokens, desc="perplexity", unit="token") as bar:
        while batch := list(islice(windows, batch_size)):
            nll += _sum_nll(model, batch)
            bar.update(sum(label != _IGNORE for _, labels in batch for label in labels))
    num_bytes = sum(len(text.encode("utf-8")) for text in documents)
    return {
        "perplexity": math.exp(nll / tokens),
        "bits_per_byte": nll / (num_bytes * math.log(2)),
        "nll_per_token": nll / tokens,
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
        yield ids[begin:end], [_IGNORE] * skipped + list(ids[counted + 1 : end + 1])
        counted = end
        if end == len(ids) - 1:
            return


@torch.inference_mode()
def _sum_nll(model: "PreTrainedModel", batch: Sequence[tuple[Sequence[int], list[int]]]) -> float:
    """Compute the sum of -log p of the counted tokens; padding is on the right."""
    longest = max(len(ids) for ids, _ in batch)
    inputs = torch.tensor([[*ids, *[ids[0]] * (longest - len(ids))] for ids, _ in batch])
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
    total = 0.0
    for row, (ids, labels) in zip(logits, batch, strict=True):
        target = torch.tensor(labels, device=row.device)
        own = row[: len(ids)].float()
        total += F.cross_entropy(own, target, ignore_index=_IGNORE, reduction="sum").double().item()
    return total


def run_text_suite(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    tasks: Sequence[str],
    *,
    files: Mapping[str, Path] | None = None,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a language model on lm-eval tasks.

    Args:
        model: a causal language model, on its device.
        tokenizer: its tokenizer.
        tasks: names of tasks of lm-eval, of ``include_path``, or ``svamp`` and ``numglue``.
        files: the file of each task in :data:`FROM_FILES`.
        batch_size: requests per forward pass.
        num_fewshot: few-shot examples; default: the task's own number.
        limit: use the first ``limit`` questions of each task only.
        include_path: folder with further tasks in lm-eval's YAML format.

    Returns:
        ``{"lm_eval": version, "results": {task: {metric: value}}, "versions": {task: version},
        "n": {task: questions}}``; metrics are lm-eval's, as fractions or perplexities.

    Raises:
        ValueError: lm-eval is not installed, a task is unknown, or a file is missing or not used.
        DataError: naming the row of a file that cannot be used.
        OSError: a task's data are not in the cache and cannot be downloaded.
    """
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"text suites need lm-eval, which is an optional extra ({error}): {_INSTALL}; "
            "perplexity of your own file (--text) does not need it"
        ) from error
    files = files or {}
    _check_files(tasks, files)
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if name not in FROM_FILES and name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"lm-eval {version('lm-eval')} has no task {unknown[0]!r}; lm-eval ls tasks lists "
            f"them, and {', '.join(FROM_FILES)} are read from files"
        )
    asked = [make_word_problems(name, files[name]) if name in files else name for name in tasks]
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=asked,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        # No bootstrap standard errors; coat-vlm compare computes intervals.
        bootstrap_iters=0,
    )
    return {
        "lm_eval": version("lm-eval"),
        "results": {name: _parse_metrics(row) for name, row in found["results"].items()},
        "versions": found["versions"],
        "n": {name: sizes["effective"] for name, sizes in found["n-samples"].items()},
    }


def make_word_problems(name: str, path: Path) -> dict[str, Any]:
    """Make a task of lm-eval from SVAMP or NumGLUE, greedy and zero-shot.

    The metrics compare the last number of an answer with the reference (``last_number``, as in
    flexible-extract of lm-eval's gsm8k), or its first number (``first_number``).

    Args:
        name: ``svamp`` (arkilpatel/SVAMP SVAMP.json: Body, Question, Answer) or ``numglue``
            (allenai/numglue: question, perhaps passage, and answer).
        path: JSON, JSON lines or Parquet. NumGLUE's rows without a number as answer (choices and
            spans of text) are skipped.

    Raises:
        DataError: no row has a question with a number as answer.
    """
    docs = [
        {"question": question, "answer": answer}
        for question, answer in map(_parse_problem, read_table(path).rows)
        if question and answer
    ]
    if not docs:
        raise DataError(
            str(path), f"has no {name} row with a question and a number", "give the authors' file"
        )

    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(docs)}

    return {
        "task": name,
        "custom_dataset": dataset,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "process_results": _compare_numbers,
        "generation_kwargs": {"until": ["Question:", "\n\n"], "do_sample": False},
        "num_fewshot": 0,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def find_numbers(text: str) -> list[str]:
    """Return the numbers in a text, without thousands commas and trailing zeros."""
    return [f"{float(found.replace(',', '')):.12g}" for found in _NUMBER.findall(text)]


def _compare_numbers(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    found = find_numbers(results[0]) or [""]
    return {
        name: float(found[place] == doc["answer"])
        for name, place in zip(_METRICS, (0, -1), strict=True)
    }


def _parse_problem(row: Mapping[str, Any]) -> tuple[str, str | None]:
    parts = [row.get("passage"), row.get("Body"), row.get("question", row.get("Question"))]
    question = " ".join(str(part).strip() for part in parts if part)
    answer = row.get("answer", row.get("Answer"))
    whole = isinstance(answer, int | float | str) and _NUMBER.fullmatch(str(answer).strip())
    return question, find_numbers(str(answer))[0] if whole else None


def _check_files(tasks: Sequence[str], files: Mapping[str, Path]) -> None:
    for name in FROM_FILES:
        if name in tasks and name not in files:
            raise ValueError(f"{name} is not in lm-eval: give its file, --file {name}=FILE")
    unused = [name for name in files if name not in tasks or name not in FROM_FILES]
    if unused:
        raise ValueError(
            f"a file for {unused[0]!r} has no effect; files are for {', '.join(FROM_FILES)} among "
            f"the tasks ({', '.join(tasks)})"
        )


def _parse_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Select the metrics among ``acc,none``, ``acc_stderr,none`` and texts of lm-eval."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and "stderr" not in name and "," in name
    }
