"""Asks a model the questions of a benchmark: in batches of like length, on any number of ranks.

The order is decided before anything is decoded, and is the same on every rank: questions with the
same number of media first by where their media stand (a row group of a Parquet file can only be
read whole), then by length, longest first, so that memory runs out at the start if it does.
Questions about one video stay in one batch if it has room for them. Batches are made over all
questions, answered or not, because in FP8 a batch shares its scales: a resumed run asks in the same
company as one that was never interrupted. Batches are dealt to the ranks in turn.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from coat_data.sample import DataError, Media
from coat_eval.answerer import Answerer, PromptEncoder
from coat_eval.answers import Answer, AnswerWriter, named
from coat_eval.prompt import Prompt
from coat_eval.ranks import ALONE, World

_BYTES_OF_A_WORKER = 3 * 64 * 3 * 384 * 384 * 4
"""Three batches (one in use, two ahead) of 64 pictures of 384 pixels in FP32: 340 MB."""

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
    name: str = "",
) -> list[Problem]:
    """Answer what is not answered yet; every answer is on disk when the next batch begins.

    Batches that are answered in full are left out. Of one that is answered in part all questions
    are asked again, and only new answers are written.

    Args:
        answerer: the model.
        prompts: all questions.
        done: indices of those that are answered.
        out_dir: gets this rank's predictions (:class:`coat_eval.answers.AnswerWriter`).
        generation: batch size, length, workers.
        world: this process among the ranks.
        name: of the benchmark, for the progress bar.

    Returns:
        This rank's questions whose media could not be read; they have no answer.
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
        desc=f"eval {name}{share}",
        unit="item",
        disable=not generation.progress or not world.is_main,
    )
    problems: list[Problem] = []
    with bar, AnswerWriter(out_dir, world.rank) as writer:
        for indices, batch, found in loader:
            if not done.issuperset(indices):
                asked = [prompts[index] for index in indices]
                answers = _answers(answerer, batch, asked, generation.max_new_tokens)
                new = {i: one for i, one in zip(indices, answers, strict=True) if i not in done}
                writer.write(list(new), [prompts[index] for index in new], list(new.values()))
            problems += [row for row in found if row["index"] not in done]
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
    groups = sorted(_groups(prompts), key=lambda group: _order(prompts, group))
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


def _groups(prompts: Sequence[Prompt]) -> Iterator[list[int]]:
    """Questions that show the same videos together, every other one alone."""
    by_videos: dict[Any, list[int]] = {}
    for index, prompt in enumerate(prompts):
        videos = tuple(one.name for one in prompt.media if one.kind == "video")
        by_videos.setdefault(videos or index, []).append(index)
    yield from by_videos.values()


def _order(prompts: Sequence[Prompt], group: Sequence[int]) -> tuple[int, bool, str, int, int]:
    first = prompts[group[0]]
    place = first.media[0].place if first.media else ""
    longest = max(len(prompts[index].text) for index in group)
    return -len(first.media), first.choices is not None, place, -longest, group[0]


class _Encoded(Dataset[tuple[list[int], Any, list[Problem]]]):
    """Batches of inputs, without the questions whose media cannot be read, and these."""

    def __init__(
        self, encoder: PromptEncoder, batches: Sequence[Sequence[tuple[int, Prompt]]]
    ) -> None:
        self.encoder = encoder
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> tuple[list[int], Any, list[Problem]]:
        indices: list[int] = []
        encoded: list[Any] = []
        problems: list[Problem] = []
        for index, prompt in self.batches[place]:
            try:
                media = [one.load() for one in prompt.media]
                encoded.append(_encoded(self.encoder, prompt, media))
            except DataError as error:
                problems.append(media_problem(index, prompt, error))
            else:
                indices.append(index)
        ranks = self.batches[place][0][1].choices is not None
        collate = self.encoder.collate_choices if ranks else self.encoder.collate
        return indices, collate(encoded) if encoded else None, problems


def _encoded(encoder: PromptEncoder, prompt: Prompt, media: Sequence[Media]) -> Any:
    if prompt.choices is None:
        return encoder.encode(prompt.text, media)
    return encoder.encode_choices(prompt.text, media, prompt.choices.texts)


def _unchanged(batch: Any) -> Any:
    """DataLoader would convert what it does not have to; in a worker, it must be a function."""
    return batch


def media_problem(index: int, prompt: Prompt, error: DataError) -> Problem:
    """How a question is listed whose media, or a part of them, cannot be read."""
    return {
        **named(prompt, index),
        "where": prompt.where,
        "media": [one.name for one in prompt.media],
        "problem": error.problem,
        "remedy": error.remedy,
    }
