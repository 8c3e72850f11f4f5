"""Runs a model over an evaluation folder: predictions row by row, then the score from the file.

A run can be killed at any time. ``predictions.jsonl`` grows by one flushed line per answer, and
``run.json`` says which model and which questions the lines belong to (the model folder holds the
chat template and the image settings too); the next call with the same ones keeps the lines and asks
only what is left.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from coat_data.load.collate import Batch
from coat_data.sample import DataError, Sample
from coat_eval.item import Item
from coat_eval.questions import QUESTIONS_FILE
from coat_eval.score import (
    REPORT_FILE,
    file_sha256,
    read_json,
    read_predictions,
    score_file,
    write_json,
)
from coat_eval.task import Task
from coat_vlm.config import Precision
from coat_vlm.fp8 import fp8_blocks
from coat_vlm.generate import PromptEncoder, generate_batch
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm

PREDICTIONS_FILE = "predictions.jsonl"
RUN_FILE = "run.json"
Mismatch = Literal["error", "overwrite"]


class RunIdentity(TypedDict):
    """What the lines of a predictions file depend on."""

    task: str
    questions_sha256: str
    model_sha256: str
    max_new_tokens: int
    dtype: str
    precision: NotRequired[Precision]
    """Where the model computes in another way than plainly in its dtype."""


def evaluate(
    model: CoatVlm,
    processor: CoatVlmProcessor,
    task: Task,
    folder: Path,
    out_dir: Path,
    *,
    model_dir: Path,
    media_root: Path | str | None = None,
    batch_size: int = 32,
    max_new_tokens: int = 16,
    limit: int | None = None,
    num_workers: int = 0,
    precision: Precision | None = None,
    on_mismatch: Mismatch = "error",
    progress: bool = True,
) -> dict[str, Any]:
    """Answer the questions of ``folder`` greedily, write everything to ``out_dir`` and score it.

    Questions of similar length share a batch (left-padded, with a key-value cache). The model runs
    where it is and in the dtype it has; :func:`coat_vlm.generate.load` chooses both.

    Args:
        model: the model, in evaluation mode.
        processor: its processor.
        task: how answers are scored.
        folder: evaluation folder with questions.jsonl.
        out_dir: gets predictions.jsonl, run.json, items.jsonl and report.json.
        model_dir: folder the model was loaded from; its files identify the predictions.
        media_root: folder or address where relative media paths start; ``folder`` by default.
        batch_size: questions per forward pass.
        max_new_tokens: longest answer in tokens; a batch stops early when all have ended.
        limit: ask the first ``limit`` questions only.
        num_workers: processes that decode and tokenize ahead; 0 does it in this process.
        precision: what the model was loaded with, where the predictions shall be told apart by it.
        on_mismatch: what to do when ``out_dir`` has predictions of another model, other questions
            or another setting: raise, or start over.
        progress: show a progress bar with the time left.

    Returns:
        The report, see :func:`coat_eval.score.score_file`; with model, dtype, device, batch_size,
        max_new_tokens and ``seconds`` of this call.

    Raises:
        ValueError: the predictions in ``out_dir`` do not belong to this model and these questions.
        DataError: a question, a medium or an earlier prediction cannot be read; names file, line.
    """
    start = time.monotonic()
    items = task.load(folder, media_root)[:limit]
    identity: RunIdentity = {
        "task": task.name,
        "questions_sha256": file_sha256(Path(folder) / QUESTIONS_FILE),
        "model_sha256": folder_sha256(model_dir),
        "max_new_tokens": max_new_tokens,
        "dtype": _dtype_name(model, batch_size),
    }
    if precision is not None:
        identity["precision"] = precision
    predictions_path = out_dir / PREDICTIONS_FILE
    done = _resume(out_dir, identity, on_mismatch)
    left = sorted((item for item in items if item.question_id not in done), key=_length)
    batches = [left[i : i + batch_size] for i in range(0, len(left), batch_size)]
    encoder = PromptEncoder(processor)
    loader = DataLoader(
        _Prompts(encoder, [[item.sample for item in batch] for batch in batches]),
        batch_size=None,
        num_workers=min(num_workers, len(batches)),
    )
    bar = tqdm(
        total=len(items),
        initial=len(items) - len(left),
        desc=f"eval {out_dir.name}",
        unit="item",
        disable=not progress,
    )
    with bar, predictions_path.open("a", encoding="utf-8") as file:
        for asked, prompts in zip(batches, loader, strict=True):
            if isinstance(prompts, DataError):
                raise prompts
            answers = generate_batch(model, encoder, prompts, max_new_tokens)
            _write_answers(file, asked, answers)
            bar.update(len(asked))
    extra = {
        "model": str(model_dir),
        **identity,
        "device": str(model.device),
        "batch_size": batch_size,
        "seconds": round(time.monotonic() - start, 2),
    }
    return score_file(
        task,
        folder,
        predictions_path,
        out_dir / REPORT_FILE,
        media_root=media_root,
        limit=limit,
        extra=extra,
    )


def _dtype_name(model: CoatVlm, batch_size: int) -> str:
    """The weights' dtype; with FP8 blocks the batch size too, as a batch shares its scales."""
    name = str(model.dtype).removeprefix("torch.")
    return f"{name}, fp8 blocks, batches of {batch_size}" if fp8_blocks(model) else name


def folder_sha256(folder: Path) -> str:
    """SHA-256 over the names and contents of a model folder's files, in hex.

    The weights are read in full: a model trained again at the same place is another model.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


class _Prompts(Dataset[Batch | DataError]):
    """Batches of encoded prompts; a worker's :class:`DataError` is passed on, not raised.

    DataLoader re-raises a worker's error from its message alone, which loses the error's type.
    """

    def __init__(self, encoder: PromptEncoder, batches: Sequence[Sequence[Sample]]) -> None:
        self.encoder = encoder
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch | DataError:
        try:
            return self.encoder(self.batches[index])
        except DataError as error:
            return error


def _length(item: Item) -> tuple[int, int]:
    """Orders questions by length without decoding anything: videos and images weigh most."""
    weight = sum(8 if media.kind == "video" else 1 for media in item.sample.media)
    return weight, sum(len(turn.text) for turn in item.sample.turns)


def _write_answers(file: Any, items: Sequence[Item], answers: Sequence[str]) -> None:
    for item, answer in zip(items, answers, strict=True):
        row = {"question_id": item.question_id, "prediction": answer}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()


def _resume(out_dir: Path, identity: RunIdentity, on_mismatch: Mismatch) -> dict[str, str]:
    """The predictions to keep; afterwards run.json and predictions.jsonl fit ``identity``."""
    out_dir.mkdir(parents=True, exist_ok=True)
    predictions_path, run_path = out_dir / PREDICTIONS_FILE, out_dir / RUN_FILE
    if not predictions_path.exists():
        write_json(run_path, identity)
        return {}
    earlier = read_json(run_path, "overwrite the evaluation")
    if earlier == identity:
        _drop_partial_line(predictions_path)
        return read_predictions(predictions_path)
    if on_mismatch == "error":
        differing = [
            key
            for key in dict.fromkeys([*identity, *earlier])
            if earlier.get(key) != identity.get(key)
        ]
        raise ValueError(
            f"{predictions_path} was made with another {', '.join(differing)}; "
            f"remove {out_dir} (or pass on_mismatch='overwrite'), or choose another output folder"
        )
    # First the old answers go, so that a kill between the two steps cannot relabel them.
    predictions_path.unlink()
    write_json(run_path, identity)
    return {}


def _drop_partial_line(path: Path) -> None:
    """Cut a last line without its newline: the process was killed while writing it."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete != len(content):
        with path.open("r+b") as file:
            file.truncate(complete)
