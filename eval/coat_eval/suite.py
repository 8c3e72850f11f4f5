"""Runs a model over official benchmarks: prompts, answers, and the report by the official scorer.

``OUT/TASK/`` gets ``prompts.jsonl`` (what is asked), ``predictions.jsonl``, ``run.json`` (what the
predictions depend on), ``media_problems.jsonl`` (questions whose image or video could not be read)
and ``report.json``. A killed run goes on with the same command.
"""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from coat_data.sample import DataError
from coat_eval.answerer import Answerer
from coat_eval.answers import PREDICTIONS_FILE, merge, resume, write_rows
from coat_eval.benchmark import Benchmark, Settings
from coat_eval.data_folder import DataFolder, Layouts, find_tables, no_questions, only_tables
from coat_eval.generation import Generation, Problem, answer_all, media_problem
from coat_eval.official import score_official
from coat_eval.prompt import Asking, Prompt
from coat_eval.ranks import ALONE, World
from coat_eval.score import REPORT_FILE, write_json
from coat_eval.tasks import BENCHMARKS

PROBLEMS_FILE = "media_problems.jsonl"
PROMPTS_FILE = "prompts.jsonl"
SUBMISSION_FILE = "submission.json"
_SUFFIX = re.compile(r"\.\w+(?=#|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One benchmark to run, and how."""

    name: str
    """As asked for, e.g. ``textvqa_no_ocr``; names the output folder."""
    benchmark: Benchmark
    variant: str = ""
    split: str = ""
    limit: int | None = None
    """Ask the first questions only."""
    settings: Settings = field(default_factory=Settings)
    overwrite: bool = False
    """Replace answers of another model or other prompts instead of refusing them."""


def choose(name: str, data: Path | None = None, **options: Any) -> Choice:
    """The benchmark of a name such as ``pope`` or ``videomme_subtitles``.

    Args:
        name: a benchmark, with ``_VARIANT`` behind it for another prompt.
        data: looked through for its files already here, if given, so that a mistake is told before
            a model is loaded; none is opened.
        **options: further fields of :class:`Choice`.

    Raises:
        ValueError: naming what is allowed.
        FileNotFoundError, DataError: ``data`` lacks the benchmark's files.
    """
    task, _, variant = name.partition("_")
    if task not in BENCHMARKS or (variant and variant not in BENCHMARKS[task].variants):
        known = [
            "_".join(filter(None, (one.name, kind)))
            for one in BENCHMARKS.values()
            for kind in ("", *one.variants)
        ]
        raise ValueError(f"unknown benchmark {name!r}; allowed: {', '.join(known)}")
    choice = Choice(name=name, benchmark=BENCHMARKS[task], variant=variant, **options)
    if choice.settings.profile not in choice.benchmark.profiles:
        raise ValueError(
            f"{task} has no profile {choice.settings.profile!r}; allowed: "
            f"{', '.join(choice.benchmark.profiles)}"
        )
    if choice.limit is not None and choice.limit < 1:
        raise ValueError(f"--limit is {choice.limit}; ask for at least one question")
    if choice.split and choice.split not in choice.benchmark.layouts:
        raise ValueError(
            f"{task} has no split {choice.split!r}; allowed: {', '.join(choice.benchmark.layouts)}"
        )
    if data is not None:
        find_tables(*_where(data, choice))
    return choice


def folder_of(data: Path, benchmark: Benchmark) -> Path:
    """``DATA/TASK`` if it is there, else ``DATA`` itself.

    The Hub's Video-MME has a folder ``videomme`` for its table alone, beside those of the videos:
    then ``DATA`` is the benchmark's folder.
    """
    own = data / benchmark.name
    inner = f"{benchmark.name}/"
    first = [patterns[0] for layouts in benchmark.layouts.values() for patterns in layouts]
    nested = any(one.startswith(inner) and any(data.glob(one)) for one in first)
    return own if own.is_dir() and not (nested and only_tables(own)) else data


def _where(data: Path, choice: Choice) -> tuple[Path, str, Layouts, str, set[str]]:
    """The arguments that :meth:`DataFolder.open` finds a benchmark's tables by."""
    benchmark = choice.benchmark
    others = set(BENCHMARKS) - {benchmark.name}
    return folder_of(data, benchmark), benchmark.name, benchmark.layouts, choice.split, others


def run_benchmark(
    answerer: Answerer,
    choice: Choice,
    data: Path,
    out: Path,
    generation: Generation,
    *,
    world: World = ALONE,
    model_name: str = "",
) -> dict[str, Any]:
    """Ask, and score with the official scorer.

    Args:
        answerer: the model.
        choice: the benchmark, and how.
        data: folder with a folder per benchmark, or one benchmark's folder.
        out: gets a folder ``choice.name``.
        generation: batch size, length, workers.
        world: this process among the ranks, all of which call this.
        model_name: for the report.

    Returns:
        The report of :func:`coat_eval.official.score_official` on rank 0, with ``model``,
        ``variant``, ``split``, ``limit``, ``n_media_problems`` (not asked), ``n_asked_without``
        (asked without subtitles that cannot be read), what the answers depend on, and ``seconds``
        of this call; on other ranks nothing.

    Raises:
        ValueError: the folder has answers of another model or other prompts.
        DataError: the benchmark's files are not there or cannot be read, or no question at all
            could be asked.
    """
    start = time.monotonic()
    benchmark = choice.benchmark
    folder = DataFolder.open(*_where(data, choice))
    asking = Asking(
        split=choice.split,
        variant=choice.variant,
        frame_times=answerer.encoder.frame_times,
    )
    known = any(map(benchmark.is_reference, folder.tables))
    prompts = list(benchmark.prompts(folder, asking)) if known else []
    if not prompts:
        names = ", ".join(sorted(table.path.name for table in folder.tables)[:5])
        raise no_questions(folder.path, benchmark.name, f"only other tables: {names}")
    asked = prompts[: choice.limit]
    out_dir = out / choice.name
    identity = _identity(answerer, choice, prompts, generation) if world.is_main else {}
    done = world.gather(_start(out_dir, identity, choice, asked) if world.is_main else None)[0]
    if isinstance(done, Exception):
        raise done
    assert done is not None
    problems = answer_all(answerer, asked, done, out_dir, generation, world=world, name=choice.name)
    everyones = [one for own in world.gather(problems) for one in own]
    if world.is_main:
        _finish(out_dir, asked, everyones)
    if len(everyones) == len(asked):
        raise DataError(
            str(folder.path),
            f"none of the {len(asked)} questions of {choice.name} could be asked; the first: "
            f"{everyones[0]['media']}: {everyones[0]['problem']}",
            f"put the images and videos there; {out_dir / PROBLEMS_FILE} lists what is missing",
        )
    if not world.is_main:
        return {}
    report = _scored(out_dir, choice, folder, asked) | {
        "model": model_name,
        "variant": choice.variant,
        "split": choice.split or next(iter(benchmark.layouts)),
        "limit": choice.limit,
        "n_media_problems": len(everyones),
        "n_asked_without": len(_asked_without(asked, everyones)),
        **{name: value for name, value in identity.items() if name != "task"},
        "device": str(answerer.device),
        "batch_size": generation.batch_size,
        "num_ranks": world.size,
        "seconds": round(time.monotonic() - start, 2),
    }
    write_json(out_dir / REPORT_FILE, report)
    return report


def _identity(
    answerer: Answerer, choice: Choice, prompts: Sequence[Prompt], generation: Generation
) -> dict[str, Any]:
    """What the answers depend on."""
    identity = {
        "task": choice.name,
        "prompts_sha256": _digest(prompts),
        **({} if prompts[0].choices else {"max_new_tokens": generation.max_new_tokens}),
        **answerer.identity,
    }
    if answerer.identity.get("scales_shared_by_batch"):
        identity["batch_size"] = generation.batch_size
        # Batches are made over the questions that are asked.
        cut = choice.limit is not None and choice.limit < len(prompts)
        identity["limit"] = choice.limit if cut else None
    return identity


def _start(
    out_dir: Path, identity: dict[str, Any], choice: Choice, asked: Sequence[Prompt]
) -> set[int] | Exception:
    """What is answered already; an error is handed to the other ranks, which would wait."""
    try:
        done = resume(out_dir, identity, overwrite=choice.overwrite)
    except (ValueError, OSError) as error:
        return error
    write_rows(out_dir / PROMPTS_FILE, map(_row, asked))
    return done


def _row(prompt: Prompt) -> dict[str, Any]:
    category = {"category": prompt.category} if prompt.category else {}
    return {
        "question_id": prompt.question_id,
        **category,
        "prompt": prompt.text,
        **({"choices": prompt.choices.texts} if prompt.choices else {}),
        "media": [{"kind": one.kind, "name": one.name} for one in prompt.media],
    }


def _digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over all prompts; media by file name, as the folder may be somewhere else later.

    The names have no suffix: that of a missing file is not known.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        names = [_SUFFIX.sub("", Path(one.name).name, count=1) for one in prompt.media]
        media = [(one.kind, name) for one, name in zip(prompt.media, names, strict=True)]
        text = prompt.fingerprint or prompt.text
        ranked = [astuple(prompt.choices)] if prompt.choices else []
        digest.update(json.dumps([*prompt.key, text, media, *ranked]).encode())
    return digest.hexdigest()


def _scored(
    out_dir: Path, choice: Choice, folder: DataFolder, asked: Sequence[Prompt]
) -> dict[str, Any]:
    """The official report over what was asked; a question without an answer is wrong."""
    benchmark = choice.benchmark
    references = [table for table in folder.tables if benchmark.is_reference(table)]
    keys = {prompt.key for prompt in asked}
    known = benchmark.questions(references, [])
    answers = any(one.answer is not None for one in known)
    submits = type(benchmark).submission is not Benchmark.submission
    return score_official(
        benchmark,
        [out_dir / PREDICTIONS_FILE],
        [table.path for table in references],
        settings=choice.settings,
        allow_missing=True,
        with_items=True,
        only=keys,
        submission_path=out_dir / SUBMISSION_FILE if submits and not answers else None,
    )


def _finish(out_dir: Path, asked: Sequence[Prompt], problems: Sequence[Problem]) -> None:
    """All answers in one file, the problems in another, and nothing else missing."""
    answered = merge(out_dir)
    listed = [*problems, *_asked_without(asked, problems)]
    write_rows(out_dir / PROBLEMS_FILE, sorted(listed, key=lambda row: row["index"]))
    lost = set(range(len(asked))) - set(answered) - {row["index"] for row in problems}
    if lost:
        raise RuntimeError(f"{out_dir} lacks the answers of questions {sorted(lost)[:5]}")


def _asked_without(asked: Sequence[Prompt], problems: Sequence[Problem]) -> list[Problem]:
    """The questions that were asked without something that cannot be read."""
    not_asked = {row["index"] for row in problems}
    return [
        {
            **media_problem(index, prompt, prompt.lacking),
            "problem": f"{prompt.lacking.where} {prompt.lacking.problem}",
            "asked": True,
        }
        for index, prompt in enumerate(asked)
        if prompt.lacking is not None and index not in not_asked
    ]
