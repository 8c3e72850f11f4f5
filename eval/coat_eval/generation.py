"""Generates answers in length-bucketed batches on any number of ranks, and saves them.

Batches are the same on every rank and contain all questions, also answered ones: in FP8 a batch
shares its scales, so a resumed run must form the same batches. Every rank appends to its own file;
rank 0 merges them into ``predictions.jsonl``. ``run.json`` records what the answers depend on.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from coat_data.load.workers import in_workers
from coat_data.sample import DataError
from coat_data.saved_files import FORMAT_VERSION, check_version
from coat_eval.adapter import ModelAdapter, PromptEncoder
from coat_eval.benchmark import Prompt
from coat_eval.files import format_json, read_json, write_json, write_rows
from coat_eval.served_model import ServedModel
from coat_vlm.distributed import ALONE, World

PREDICTIONS_FILE = "predictions.jsonl"
RUN_FILE = "run.json"
VERSION = 1
"""Format version of the files of a run, in run.json."""
_RANK_FILES = "predictions.rank*.jsonl"
_BYTES_PER_WORKER = 3 * 64 * 3 * 384 * 384 * 4
"""Three batches (one in use, two ahead) of 64 pictures of 384 pixels in FP32: 340 MB."""

_TIMEOUT = timedelta(days=2)
"""Timeout of collectives: ranks synchronize only before and after a benchmark."""

AnyModel = ModelAdapter | ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Options of generation."""

    batch_size: int = 32
    """Maximum number of rows per forward pass: questions, or choices of ranked questions. To a
    server: of requests at a time."""
    max_new_tokens: int = 128
    num_workers: int = 0
    """Processes per rank that decode and tokenize ahead; 0: this process."""
    temperature: float = 0.0
    """Temperature at which answers are sampled; 0: greedy."""
    samples: int = 1
    """Number of answers to each question."""
    sample: int = 0
    """Number of this answer, the seed of its sampling."""


def answer_all(
    adapter: AnyModel,
    prompts: Sequence[Prompt],
    done: set[int],
    out_dir: Path,
    generation: Generation,
    *,
    world: World = ALONE,
    check: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Answer the remaining questions; every answer is on disk before the next batch starts.

    A batch with a missing answer is generated as a whole, and only new answers are written.
    ``done`` are the answered indices; ``check`` is called before answers are written. Returns this
    rank's questions whose media could not be read, or that the server rejected.
    """
    rows = max((len(one.choices) for one in prompts if one.choices), default=1)
    size = 1 if isinstance(adapter, ServedModel) else max(1, generation.batch_size // rows)
    batches = make_batches(prompts, size)
    own = [batch for batch in batches if not done.issuperset(batch)][world.rank :: world.size]
    if isinstance(adapter, ServedModel):
        settings: dict[str, Any] = {"max_tokens": generation.max_new_tokens}
        if generation.temperature:
            settings |= {"temperature": generation.temperature, "seed": generation.sample}
        loaded = adapter.answer_all(prompts, own, generation.batch_size, **settings)
    else:
        encode = partial(_encode_batch, adapter.encoder, prompts)
        loaded = in_workers(encode, own, min(generation.num_workers, len(own)))
    share = f" (rank 0 of {world.size})" if world.size > 1 else ""
    bar = tqdm(
        total=sum(map(len, own)),
        desc=f"eval {out_dir.name}{share}",
        unit="item",
        disable=not world.is_main,
    )
    problems: list[dict[str, Any]] = []
    path = out_dir / f"predictions.rank{world.rank}.jsonl"
    with bar, path.open("a", encoding="utf-8") as file:
        for indices, batch, found in loaded:
            if not done.issuperset(indices):
                asked = [prompts[index] for index in indices]
                answers: Sequence[dict[str, Any]]
                if isinstance(adapter, ServedModel):
                    answers = batch
                elif asked[0].choices:
                    losses = iter(adapter.compute_losses(batch))
                    answers = [{"losses": [*islice(losses, len(one.choices))]} for one in asked]
                else:
                    sampling = {}
                    if temperature := generation.temperature:
                        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
                        # A run that is resumed draws the same numbers.
                        torch.manual_seed(generation.sample * 1_000_003 + indices[0])
                    texts = adapter.answer(batch, generation.max_new_tokens, **sampling)
                    answers = [{"prediction": text} for text in texts]
                check()
                for index, answer in zip(indices, answers, strict=True):
                    if index not in done:
                        row = {"index": index, **get_key_fields(prompts[index]), **answer}
                        file.write(format_json(row) + "\n")
                file.flush()
            problems += [
                {
                    "index": index,
                    **get_key_fields(prompts[index]),
                    "where": prompts[index].where,
                    "media": [one.name for one in prompts[index].media],
                    "problem": error.problem,
                    "remedy": error.remedy,
                }
                for index, error in found.items()
                if index not in done
            ]
            bar.update(len(indices) + len(found))
    return problems


def choose_num_workers(device: str, num_processes: int = 1) -> int:
    """Choose the worker processes: none for a CPU; for a GPU what shared memory allows."""
    if device == "cpu":
        return 0
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    fitting = free // (num_processes * _BYTES_PER_WORKER)
    return int(min(12, (os.cpu_count() or 1) // num_processes, fitting))


def make_batches(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Return the indices of all prompts in batches; depends only on the arguments."""
    # Questions about the same videos form a group; all others are groups of one.
    by_videos: dict[Any, list[int]] = {}
    for index, prompt in enumerate(prompts):
        videos = tuple(one.name for one in prompt.media if one.kind == "video")
        by_videos.setdefault(videos or index, []).append(index)
    groups = sorted(by_videos.values(), key=lambda group: _sort_key(prompts, group))
    batches: list[list[int]] = []
    for _, same in groupby(groups, key=lambda group: _sort_key(prompts, group)[:2]):
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


def _sort_key(prompts: Sequence[Prompt], group: Sequence[int]) -> tuple[int, bool, str, int, int]:
    first = prompts[group[0]]
    place = first.media[0].place if first.media else ""
    longest = max(len(prompts[index].text) for index in group)
    return -len(first.media), bool(first.choices), place, -longest, group[0]


def _encode_batch(
    encoder: PromptEncoder, prompts: Sequence[Prompt], batch: Sequence[int]
) -> tuple[list[int], Any, dict[int, DataError]]:
    """Return the indices and inputs of a batch, and the errors of unreadable media by index."""
    encoded: list[Any] = []
    indices: list[int] = []
    problems: dict[int, DataError] = {}
    for index in batch:
        prompt = prompts[index]
        try:
            sample = prompt.load()
            if prompt.choices:
                encoded += encoder.encode_choices(sample, prompt.choices)
            else:
                encoded.append(encoder.encode(sample))
        except DataError as error:
            problems[index] = error
        else:
            indices.append(index)
    collate = encoder.collate_choices if prompts[batch[0]].choices else encoder.collate
    return indices, collate(encoded) if encoded else None, problems


def resume(out_dir: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> set[int]:
    """Return the answered questions; ValueError if they are of another identity or version."""
    out_dir.mkdir(parents=True, exist_ok=True)
    run_path = out_dir / RUN_FILE
    files = _list_files(out_dir)
    if files:
        earlier = read_json(run_path, "remove the output folder")
        check_version(earlier.pop(FORMAT_VERSION, None), VERSION, str(run_path))
        if earlier != identity:
            keys = dict.fromkeys([*identity, *earlier])
            differing = [key for key in keys if earlier.get(key) != identity.get(key)]
            if not overwrite and any(_read_complete_lines(file) for file in files):
                raise ValueError(
                    f"{out_dir} has answers made with a different {', '.join(differing)}; "
                    "choose another --to, remove the folder, or replace them with --overwrite"
                )
            # Delete the old answers first: a kill in between must not relabel them.
            for file in files:
                file.unlink()
    write_json(run_path, {FORMAT_VERSION: VERSION, **identity})
    return set(merge(out_dir))


def merge(out_dir: Path) -> dict[int, dict[str, Any]]:
    """Merge the files of all ranks into ``predictions.jsonl``; return the rows by index."""
    rows: dict[int, dict[str, Any]] = {}
    files = _list_files(out_dir)
    for file in files:
        for number, line in enumerate(_read_complete_lines(file), start=1):
            try:
                row = json.loads(line)
                _ = row["losses" if "losses" in row else "prediction"]
                rows.setdefault(row["index"], row)
            except (ValueError, KeyError, TypeError) as error:
                problem = f"is not an answer of a run: {error!r}"
                raise DataError(f"{file}:{number}", problem, "remove the line") from error
    rows = dict(sorted(rows.items()))
    write_rows(out_dir / PREDICTIONS_FILE, rows.values())
    for file in files:
        if file.name != PREDICTIONS_FILE:
            file.unlink()
    return rows


def get_key_fields(prompt: Prompt) -> dict[str, str]:
    """Return the fields that identify a question in the files of a run."""
    category = {"category": prompt.category} if prompt.category else {}
    return {"question_id": prompt.question_id, **category}


def _list_files(out_dir: Path) -> list[Path]:
    merged = out_dir / PREDICTIONS_FILE
    return [*([merged] if merged.is_file() else []), *sorted(out_dir.glob(_RANK_FILES))]


def _read_complete_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file, without a truncated last line."""
    return path.read_bytes().split(b"\n")[:-1]


@contextmanager
def join_ranks() -> Iterator[World]:
    """Join torchrun's processes over gloo: a waiting rank then holds no NCCL kernel."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def select_device(name: str | None = None) -> torch.device:
    """Select ``name``, else the process's own GPU, or the CPU; ValueError if it is missing."""
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
            raise ValueError(f"device {name!r}, but PyTorch finds no GPU here")
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
