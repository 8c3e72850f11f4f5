"""Asks a model questions: in length-bucketed batches, on any number of ranks; answers go to disk.

The order is decided before anything is decoded, and is the same on every rank: questions with the
same number of media first by where their media stand (a row group of a Parquet file can only be
read whole), then by length, longest first, so that memory runs out at the start if it does.
Questions about one video stay in one batch if it has room for them. Batches are made over all
questions, answered or not, because in FP8 a batch shares its scales: a resumed run asks in the same
company as one that was never interrupted. Batches are dealt to the ranks in turn.

Every rank appends to a file of its own, ``predictions.rank0.jsonl``, one flushed line per answer.
When a run starts or ends, rank 0 puts all of them together as ``predictions.jsonl`` in the order of
the questions; so the next run may have another number of ranks. ``run.json`` says what the answers
depend on, and answers that depend on something else are refused.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from coat_data.sample import DataError
from coat_eval.answerer import Answerer, PromptEncoder
from coat_eval.benchmark import Prompt
from coat_eval.files import read_json, write_json, write_rows
from coat_vlm.distributed import ALONE, World

PREDICTIONS_FILE = "predictions.jsonl"
RUN_FILE = "run.json"
_OF_RANKS = "predictions.rank*.jsonl"
_BYTES_OF_A_WORKER = 3 * 64 * 3 * 384 * 384 * 4
"""Three batches (one in use, two ahead) of 64 pictures of 384 pixels in FP32: 340 MB."""

_PATIENCE = timedelta(days=2)
"""How long a rank waits for the slowest: the ranks meet only before and after a benchmark."""

Answer = str | list[float]
"""A text, or the loss of every choice."""
Problem = dict[str, Any]
"""A question that could not be asked: its name, media, problem and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How answers are made."""

    batch_size: int = 32
    """Most rows per forward pass: questions, or the choices of questions that are ranked."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    num_workers: int = 0
    """Processes per rank that decode and tokenize ahead; 0 does it in this process."""
    progress: bool = True
    """Show a progress bar with the time left, on rank 0."""


def answer_all(
    answerer: Answerer,
    prompts: Sequence[Prompt],
    done: set[int],
    out_dir: Path,
    generation: Generation,
    *,
    world: World = ALONE,
    strict: bool = False,
) -> list[Problem]:
    """Answer what is not answered yet; every answer is on disk when the next batch begins.

    Batches that are answered in full are left out. Of one that is answered in part all questions
    are asked again, and only new answers are written.

    Args:
        answerer: the model.
        prompts: all questions.
        done: indices of those that are answered.
        out_dir: gets this rank's predictions; its name is that of the progress bar.
        generation: batch size, length, workers.
        world: this process among the ranks.
        strict: raise at the first question that cannot be asked.

    Returns:
        This rank's questions whose media could not be read; they have no answer.

    Raises:
        DataError: ``strict``, and a medium cannot be read or a prompt is too long.
    """
    rows = max((len(one.choices.texts) for one in prompts if one.choices is not None), default=1)
    batches = make_batches(prompts, max(1, generation.batch_size // rows))
    own = [batch for batch in batches if not done.issuperset(batch)][world.rank :: world.size]
    dataset = _Encoded(answerer.encoder, [[(i, prompts[i]) for i in batch] for batch in own])
    loader = DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=min(generation.num_workers, len(own)),
    )
    share = f" (rank 0 of {world.size})" if world.size > 1 else ""
    bar = tqdm(
        total=sum(map(len, own)),
        desc=f"eval {out_dir.name}{share}",
        unit="item",
        disable=not generation.progress or not world.is_main,
    )
    problems: list[Problem] = []
    path = out_dir / f"predictions.rank{world.rank}.jsonl"
    with bar, path.open("a", encoding="utf-8") as file:
        for indices, batch, found in loader:
            if strict and found:
                raise next(iter(found.values()))
            if not done.issuperset(indices):
                asked = [prompts[index] for index in indices]
                answers = _answers(answerer, batch, asked, generation.max_new_tokens)
                for index, answer in zip(indices, answers, strict=True):
                    if index not in done:
                        kind = "prediction" if isinstance(answer, str) else "losses"
                        row = {"index": index, **named(prompts[index]), kind: answer}
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
            problems += [
                media_problem(index, prompts[index], error)
                for index, error in found.items()
                if index not in done
            ]
            bar.update(len(indices) + len(found))
    return problems


def _answers(
    answerer: Answerer, batch: Any, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Answer]:
    """A text per prompt; or the loss of each of its choices, where a batch ranks them."""
    if prompts[0].choices is None:
        return list(answerer.answer(batch, max_new_tokens))
    losses = iter(answerer.losses(batch))
    ranked = [one.choices for one in prompts if one.choices is not None]
    return [[next(losses).value(own.per_token) for _ in own.texts] for own in ranked]


def default_workers(device: str, num_processes: int = 1) -> int:
    """Worker processes that decode ahead: none on a CPU, which the model needs itself.

    On a GPU at most 12 for each process, and no more than the shared memory lets through: batches
    go through it, and containers often have 64 MB of it.
    """
    if device == "cpu":
        return 0
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    fitting = room // (num_processes * _BYTES_OF_A_WORKER)
    return int(min(12, (os.cpu_count() or 1) // num_processes, fitting))


def make_batches(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """The indices of all prompts in batches; a function of its arguments alone.

    Raises:
        ValueError: the batch size is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    # Questions that show the same videos together, every other one alone.
    by_videos: dict[Any, list[int]] = {}
    for index, prompt in enumerate(prompts):
        videos = tuple(one.name for one in prompt.media if one.kind == "video")
        by_videos.setdefault(videos or index, []).append(index)
    groups = sorted(by_videos.values(), key=lambda group: _order(prompts, group))
    batches: list[list[int]] = []
    for _, same in groupby(groups, key=lambda group: _order(prompts, group)[:2]):
        batch: list[int] = []
        for group in same:
            if len(batch) + len(group) > batch_size and batch:
                batches.append(batch)
                batch = []
            while len(group) > batch_size:
                batches.append(group[:batch_size])
                group = group[batch_size:]
            batch = batch + group
        if batch:
            batches.append(batch)
    return batches


def _order(prompts: Sequence[Prompt], group: Sequence[int]) -> tuple[int, bool, str, int, int]:
    first = prompts[group[0]]
    place = first.media[0].place if first.media else ""
    longest = max(len(prompts[index].text) for index in group)
    return -len(first.media), first.choices is not None, place, -longest, group[0]


class _Encoded(Dataset[tuple[list[int], Any, dict[int, DataError]]]):
    """Batches of inputs, without the questions whose media cannot be read, and these."""

    def __init__(
        self, encoder: PromptEncoder, batches: Sequence[Sequence[tuple[int, Prompt]]]
    ) -> None:
        self.encoder = encoder
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> tuple[list[int], Any, dict[int, DataError]]:
        encoder, encoded = self.encoder, []
        indices: list[int] = []
        problems: dict[int, DataError] = {}
        ranks = self.batches[place][0][1].choices is not None
        for index, prompt in self.batches[place]:
            try:
                sample = prompt.load()
                if prompt.choices is None:
                    encoded.append(encoder.encode(sample))
                else:
                    encoded += encoder.answered(sample, prompt.choices.texts)
            # DataLoader would raise a worker's error again from its message alone.
            except DataError as error:
                problems[index] = error
            else:
                indices.append(index)
        collate = encoder.collate_answered if ranks else encoder.collate
        return indices, collate(encoded) if encoded else None, problems


def _unchanged(batch: Any) -> Any:
    """DataLoader would convert what it does not have to; in a worker, it must be a function."""
    return batch


def media_problem(index: int, prompt: Prompt, error: DataError) -> Problem:
    """How a question is listed whose media, or a part of them, cannot be read."""
    return {
        "index": index,
        **named(prompt),
        "where": prompt.where,
        "media": [one.name for one in prompt.media],
        "problem": error.problem,
        "remedy": error.remedy,
    }


def resume(
    out_dir: Path,
    identity: Mapping[str, Any],
    prompts: Sequence[Prompt] = (),
    *,
    overwrite: bool = False,
) -> set[int]:
    """Make a folder ready for answers; called by one rank before the others go on.

    Args:
        out_dir: the benchmark's output folder.
        identity: what answers depend on: model, questions, length, dtype; plain JSON.
        prompts: all questions, to know answers by their id where a row has no index.
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
            keys = dict.fromkeys([*identity, *earlier])
            differing = [key for key in keys if earlier.get(key) != identity.get(key)]
            if not overwrite and any(_complete_lines(file) for file in files):
                raise ValueError(
                    f"{out_dir} has answers made with another {', '.join(differing)}; "
                    "choose another --out, remove the folder, or replace them with --overwrite"
                )
            # First the old answers go, so that a kill in between cannot relabel them.
            for file in files:
                file.unlink()
    write_json(run_path, dict(identity))
    return set(merge(out_dir, prompts))


def merge(out_dir: Path, prompts: Sequence[Prompt] = ()) -> dict[int, dict[str, Any]]:
    """Put the files of all ranks into ``predictions.jsonl``; the rows by index of the question.

    A kill at any moment leaves every answer in one file at least; one that is in two counts once.
    Rows of question sets had no index once: ``prompts`` says where their ids stand.
    """
    places = {prompt.question_id: index for index, prompt in enumerate(prompts)}
    rows: dict[int, dict[str, Any]] = {}
    files = _files(out_dir)
    for file in files:
        for row in _read(file, places):
            rows.setdefault(row["index"], row)
    rows = dict(sorted(rows.items()))
    write_rows(out_dir / PREDICTIONS_FILE, rows.values())
    for file in files:
        if file.name != PREDICTIONS_FILE:
            file.unlink()
    return rows


def named(prompt: Prompt) -> dict[str, str]:
    """How a question is named in the files of a run."""
    category = {"category": prompt.category} if prompt.category else {}
    return {"question_id": prompt.question_id, **category}


def _files(out_dir: Path) -> list[Path]:
    merged = out_dir / PREDICTIONS_FILE
    return [*([merged] if merged.is_file() else []), *sorted(out_dir.glob(_OF_RANKS))]


def _complete_lines(path: Path) -> list[bytes]:
    """The lines of a file, without a last one that a kill cut off."""
    return path.read_bytes().split(b"\n")[:-1]


def _read(path: Path, places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_complete_lines(path), start=1):
        try:
            row = json.loads(line)
            if "index" not in row:
                row = {"index": places[str(row["question_id"])], **row}
            _ = row["losses" if "losses" in row else "prediction"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}", f"is no answer of a run: {error!r}", "remove the line"
            ) from error
        yield row


@contextmanager
def joined_ranks() -> Iterator[World]:
    """The processes that torchrun started; one process that nobody launched is alone.

    They share no weights: each has the whole model. What they tell one another are small objects,
    over gloo, also on GPUs: then a rank that waits for a slower one does not hold a NCCL kernel,
    and no rank needs another's GPU. So the world's ``device`` is the CPU; see :func:`own_device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def own_device(name: str | None = None) -> torch.device:
    """The device of this process's model: ``name``, or its own GPU, or the CPU.

    ``cuda`` without a number is the process's own GPU: the first one would be everybody's.

    Raises:
        ValueError: there is no such device, no GPU, or there are more processes on this machine
            than GPUs.
    """
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"unknown device {name!r}; allowed: cpu, cuda (each process's own GPU), cuda:N"
            ) from error
        if device != torch.device("cuda"):
            return device
    if not torch.cuda.is_available():
        if name is not None:
            raise ValueError(f"device {name!r}, but PyTorch finds no GPU here; use --device cpu")
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()}; start as "
            "many processes per machine as there are GPUs"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
