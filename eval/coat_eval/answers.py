"""The answers of one benchmark on disk: written as they come, kept after a kill.

Every rank appends to a file of its own, ``predictions.rank0.jsonl``, one flushed line per answer.
When a run starts or ends, rank 0 puts all of them together as ``predictions.jsonl`` in the order of
the questions; so the next run may have another number of ranks. ``run.json`` says what the answers
depend on, and answers that depend on something else are refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from coat_data.sample import DataError
from coat_eval.prompt import Prompt
from coat_eval.score import read_json, write_json, write_text

PREDICTIONS_FILE = "predictions.jsonl"
RUN_FILE = "run.json"
_OF_RANKS = "predictions.rank*.jsonl"

Answer = str | list[float]
"""A text, or the loss of every choice."""


def resume(out_dir: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> set[int]:
    """Make a folder ready for answers; called by one rank before the others go on.

    Args:
        out_dir: the benchmark's output folder.
        identity: what answers depend on: model, questions, length, dtype; plain JSON.
        overwrite: throw away answers that depend on something else instead of refusing them.

    Returns:
        Indices of the questions that are answered already.

    Raises:
        ValueError: the folder has answers, not just empty files, that depend on something else.
        DataError: a line, other than a last one that was cut off, cannot be read.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    run_path = out_dir / RUN_FILE
    files = _files(out_dir)
    if files:
        earlier = read_json(run_path, "remove the output folder")
        if earlier != identity:
            differing = [key for key in identity if earlier.get(key) != identity[key]]
            if not overwrite and any(True for file in files for _ in _read(file)):
                raise ValueError(
                    f"{out_dir} has answers made with another {', '.join(differing) or 'setting'}; "
                    "choose another --out, remove the folder, or replace them with --overwrite"
                )
            # First the old answers go, so that a kill in between cannot relabel them.
            for file in files:
                file.unlink()
    write_json(run_path, dict(identity))
    return set(merge(out_dir))


def merge(out_dir: Path) -> dict[int, dict[str, Any]]:
    """Put the files of all ranks into ``predictions.jsonl``; the rows by index of the question.

    A kill at any moment leaves every answer in one file at least; one that is in two counts once.
    """
    rows: dict[int, dict[str, Any]] = {}
    files = _files(out_dir)
    for file in files:
        for row in _read(file):
            rows.setdefault(row["index"], row)
    rows = dict(sorted(rows.items()))
    write_rows(out_dir / PREDICTIONS_FILE, rows.values())
    for file in files:
        if file.name != PREDICTIONS_FILE:
            file.unlink()
    return rows


class AnswerWriter:
    """Appends one rank's answers; a context manager."""

    def __init__(self, out_dir: Path, rank: int) -> None:
        path = out_dir / f"predictions.rank{rank}.jsonl"
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "AnswerWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(
        self, indices: Sequence[int], prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> None:
        """Append the answers of one batch, and hand them to the operating system."""
        for index, prompt, answer in zip(indices, prompts, answers, strict=True):
            kind = "prediction" if isinstance(answer, str) else "losses"
            row = {**named(prompt, index), kind: answer}
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()


def named(prompt: Prompt, index: int) -> dict[str, Any]:
    """How a question is named in the files of a run."""
    category = {"category": prompt.category} if prompt.category else {}
    return {"index": index, "question_id": prompt.question_id, **category}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines; the file is complete or unchanged."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _files(out_dir: Path) -> list[Path]:
    merged = out_dir / PREDICTIONS_FILE
    return [*([merged] if merged.is_file() else []), *sorted(out_dir.glob(_OF_RANKS))]


def _read(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a file, without a last line that a kill cut off."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            _ = row["index"], row["losses" if "losses" in row else "prediction"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}", f"is no answer of a run: {error!r}", "remove the line"
            ) from error
        yield row
