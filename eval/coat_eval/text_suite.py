"""Text-only suites through lm-eval, which is an optional extra.

lm-eval has the tasks (WikiText, COPA, ARC, SciQ, HellaSwag, GSM8K and hundreds more); their data
come from the Hub or its local cache. SVAMP and NumGLUE, which it does not have, are built here from
the files of their authors.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_data.sample import DataError
from coat_eval.files import read_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

FROM_FILES = ("svamp", "numglue")
"""Tasks that need a file of their own."""
INSTALL = "pip install 'coat-vlm[lm-eval]' (or: pip install 'lm-eval[hf]')"

_METRICS = ("first_number", "last_number")
# A comma belongs to a number only in front of three digits: "2,3" are two numbers.
_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


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
    """Ask a language model the questions of lm-eval's tasks.

    Args:
        model: a causal language model; it runs where it is.
        tokenizer: its tokenizer.
        tasks: names of lm-eval, of ``include_path``, or ``svamp`` and ``numglue``.
        files: the file of each task in :data:`FROM_FILES`.
        batch_size: requests per forward pass.
        num_fewshot: worked examples before each question; the task's own number when absent.
        limit: ask the first ``limit`` questions of each task only.
        include_path: folder with further tasks in lm-eval's YAML form.

    Returns:
        ``{"lm_eval": version, "results": {task: {metric: value}}, "versions": {task: version},
        "n": {task: questions}}``; metrics are lm-eval's, as fractions or perplexities.

    Raises:
        ValueError: lm-eval is not installed, a task is unknown, or a file is missing or not used.
        DataError: naming the row of a file that cannot be used.
        OSError: a task's data are neither in the cache nor can be downloaded.
    """
    lm_eval, hflm, task_manager = _import_lm_eval()
    files = dict(files or {})
    _check_files(tasks, files)
    manager = task_manager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if name not in FROM_FILES and name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"lm-eval {version('lm-eval')} has no task {unknown[0]!r}; lm-eval ls tasks lists "
            f"them, and {', '.join(FROM_FILES)} are taken from files"
        )
    asked = [word_problems(name, files[name]) if name in files else name for name in tasks]
    found = lm_eval.simple_evaluate(
        model=hflm(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=asked,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        # Standard errors of what has no closed form; the interval that matters is that of compare.
        bootstrap_iters=0,
    )
    return {
        "lm_eval": version("lm-eval"),
        "results": {name: _numbers(row) for name, row in found["results"].items()},
        "versions": found["versions"],
        "n": {name: sizes["effective"] for name, sizes in found["n-samples"].items()},
    }


def word_problems(name: str, path: Path) -> dict[str, Any]:
    """SVAMP or NumGLUE as a task of lm-eval, greedy and without examples.

    Its metrics are ``last_number``, the rule of lm-eval's gsm8k for answers that reason first
    (flexible-extract), and ``first_number``, for answers that go on; a number must be equal.

    Args:
        name: ``svamp`` (arkilpatel/SVAMP SVAMP.json: Body, Question, Answer) or ``numglue``
            (allenai/numglue: question, perhaps passage, and answer).
        path: JSON, JSON lines or Parquet. Of NumGLUE the rows whose answer is a number count: the
            others are choices and spans of text.

    Raises:
        DataError: no row has a question with a number as answer.
    """
    docs = [
        {"question": question, "answer": answer}
        for question, answer in map(_problem, read_table(path).rows)
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


def numbers(text: str) -> list[str]:
    """The numbers in a text, without thousands commas and trailing zeros."""
    return [f"{float(found.replace(',', '')):.12g}" for found in _NUMBER.findall(text)]


def _compare_numbers(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    found = numbers(results[0]) or [""]
    return {
        name: float(found[place] == doc["answer"])
        for name, place in zip(_METRICS, (0, -1), strict=True)
    }


def _problem(row: Mapping[str, Any]) -> tuple[str, str | None]:
    parts = [row.get("passage"), row.get("Body"), row.get("question", row.get("Question"))]
    question = " ".join(str(part).strip() for part in parts if part)
    answer = row.get("answer", row.get("Answer"))
    whole = isinstance(answer, int | float | str) and _NUMBER.fullmatch(str(answer).strip())
    return question, numbers(str(answer))[0] if whole else None


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


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """lm-eval writes ``acc,none``, ``acc_stderr,none``, and texts beside them."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and "stderr" not in name and "," in name
    }


def _import_lm_eval() -> tuple[Any, Any, Any]:
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"text suites need lm-eval, which is an optional extra ({error}): {INSTALL}; "
            "perplexity on a file of your own (--text) needs nothing more"
        ) from error
    return lm_eval, HFLM, TaskManager
