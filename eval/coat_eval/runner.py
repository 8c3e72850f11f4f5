"""Runs a model over benchmarks and question sets: prompts, answers, and the report.

The output folder of a benchmark gets ``predictions.jsonl``, ``run.json`` (what the predictions
depend on) and ``report.json``. An official benchmark's also gets ``prompts.jsonl`` (what is asked)
and ``media_problems.jsonl`` (questions whose image or video could not be read); a question set's
gets ``items.jsonl``, and a medium that cannot be read stops it. A killed run goes on with the same
command.
"""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coat_data.sample import DataError
from coat_eval.answerer import Answerer, ModelOptions
from coat_eval.benchmark import Asking, Benchmark, Prompt, Question, Settings
from coat_eval.coat_answerer import CoatAnswerer, final_model_dir
from coat_eval.data_folder import DataFolder, Layouts, find_tables, no_questions, only_tables
from coat_eval.files import file_sha256, folder_sha256, read_json, write_json, write_rows
from coat_eval.generation import (
    PREDICTIONS_FILE,
    Generation,
    Problem,
    answer_all,
    media_problem,
    merge,
    named,
    resume,
)
from coat_eval.hub_answerer import HubAnswerer
from coat_eval.report import REPORT_FILE, score_official, score_set
from coat_eval.tasks import BENCHMARKS, get_task
from coat_eval.tasks.question_set import QUESTIONS_FILE, QuestionSet
from coat_vlm.config import Recipe
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import ALONE, World
from coat_vlm.generate import load
from coat_vlm.report.evaluation import evaluation_rows, percent_text, spread
from coat_vlm.train.evaluation import EvalSubset

PROBLEMS_FILE = "media_problems.jsonl"
PROMPTS_FILE = "prompts.jsonl"
SUBMISSION_FILE = "submission.json"
COLUMNS = ("set", "task", "metric", "value", "chance", "majority", "required", "")
_SUFFIX = re.compile(r"\.\w+(?=#|$)")


def load_answerer(model: str, options: ModelOptions) -> Answerer:
    """The model of a folder, or of the Hub by name.

    Args:
        model: a run folder or stage model folder of this project, a folder of a Hugging Face model,
            or a name on the Hub.
        options: how it is loaded.

    Raises:
        FileNotFoundError: a run folder has no finished model.
        ValueError: the model is of a kind that cannot answer about images.
    """
    folder = Path(model)
    if (folder / "recipe.yaml").is_file() or _model_type(folder) == "coat_vlm":
        return CoatAnswerer.load(model, options)
    if options.precision is not None:
        raise ValueError(
            f"{model} is no checkpoint of this project: it runs in its own dtype; drop --precision"
        )
    return HubAnswerer.load(model, options)


def _model_type(folder: Path) -> str | None:
    """``model_type`` of a model folder's config.json; None without one."""
    return read_json(folder / "config.json", "copy the model again").get("model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One benchmark to run, and how."""

    benchmark: Benchmark
    variant: str = ""
    split: str = ""
    limit: int | None = None
    """Ask the first questions only."""
    settings: Settings = field(default_factory=Settings)
    overwrite: bool = False
    """Replace answers of another model or other prompts instead of refusing them."""

    @property
    def name(self) -> str:
        """As asked for, e.g. ``textvqa_no_ocr``; names the output folder."""
        return "_".join(filter(None, (self.benchmark.name, self.variant)))

    def open(self, data: Path) -> DataFolder:
        """The benchmark's tables, read; DataError if one of them cannot be, or is there twice."""
        if isinstance(self.benchmark, QuestionSet):
            return self.benchmark.open(data)
        return DataFolder.open(*self.where(data))

    def where(self, data: Path) -> tuple[Path, str, Layouts, str, set[str]]:
        """What :func:`find_tables` and :meth:`DataFolder.open` find an official one's tables by."""
        own = self.benchmark
        others = set(BENCHMARKS) - {own.name}
        return folder_of(data, own), own.name, own.layouts, self.split, others


def choose(name: str, data: Path, **options: Any) -> Choice:
    """The official benchmark of a name such as ``pope`` or ``videomme_subtitles``.

    Args:
        name: a benchmark, with ``_VARIANT`` behind it for another prompt.
        data: looked through for its files already here, so that a mistake is told before a model
            is loaded; none is opened.
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
    choice = Choice(benchmark=BENCHMARKS[task], variant=variant, **options)
    choice.benchmark.check_profile(choice.settings.profile)
    find_tables(*choice.where(data))
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


def run_benchmark(
    answerer: Answerer,
    choice: Choice,
    data: Path,
    out_dir: Path,
    generation: Generation,
    *,
    world: World = ALONE,
    model_name: str = "",
) -> dict[str, Any]:
    """Ask every question, and score the answers.

    Args:
        answerer: the model.
        choice: the benchmark, and how.
        data: the folder of a question set; of an official benchmark its own, or one with a folder
            per benchmark.
        out_dir: gets the files that the module's head names.
        generation: batch size, length, workers.
        world: this process among the ranks, all of which call this.
        model_name: for the report.

    Returns:
        The report on rank 0, on other ranks nothing. With model, device, batch_size, what the
        answers depend on, and ``seconds`` of this call it is that of
        :func:`coat_eval.report.score_set`; or that of :func:`coat_eval.report.score_official`,
        which also has ``variant``, ``split``, ``limit``, ``n_media_problems`` (not asked),
        ``n_asked_without`` (asked without subtitles that cannot be read) and ``num_ranks``.

    Raises:
        ValueError: the folder has answers of another model or other prompts.
        DataError: the benchmark's files cannot be read, no question at all could be asked, or a
            medium of a question set cannot be read.
    """
    start = time.monotonic()
    benchmark, folder = choice.benchmark, choice.open(data)
    prompts = _prompts(answerer, choice, folder)
    asked = prompts[: choice.limit]
    identity: dict[str, Any] = {}
    if world.is_main:
        identity = _identity(answerer, choice, folder, prompts, generation)
    done = world.gather(_start(out_dir, identity, choice, prompts) if world.is_main else None)[0]
    if isinstance(done, Exception):
        raise done
    assert done is not None
    own_set = isinstance(benchmark, QuestionSet)
    found = answer_all(answerer, asked, done, out_dir, generation, world=world, strict=own_set)
    problems = [one for own in world.gather(found) for one in own]
    without = _asked_without(asked, problems)
    if world.is_main:
        _finish(out_dir, asked, problems)
        if not own_set:
            listed = sorted([*problems, *without], key=lambda row: row["index"])
            write_rows(out_dir / PROBLEMS_FILE, listed)
    if len(problems) == len(asked):
        raise DataError(
            str(folder.path),
            f"none of the {len(asked)} questions of {choice.name} could be asked; the first: "
            f"{problems[0]['media']}: {problems[0]['problem']}",
            f"put the images and videos there; {out_dir / PROBLEMS_FILE} lists what is missing",
        )
    if not world.is_main:
        return {}
    of_run = {
        **{name: value for name, value in identity.items() if name != "task"},
        "device": str(answerer.device),
        "batch_size": generation.batch_size,
    }
    if isinstance(benchmark, QuestionSet):
        seconds = round(time.monotonic() - start, 2)
        extra = {"model": model_name, **of_run, "seconds": seconds}
        paths = (folder.path, out_dir / PREDICTIONS_FILE, out_dir / REPORT_FILE)
        return score_set(benchmark, *paths, limit=choice.limit, extra=extra)
    report = _scored(out_dir, choice, folder, asked) | {
        "model": model_name,
        "variant": choice.variant,
        "split": choice.split or next(iter(benchmark.layouts)),
        "limit": choice.limit,
        "n_media_problems": len(problems),
        "n_asked_without": len(without),
        **of_run,
        "num_ranks": world.size,
        "seconds": round(time.monotonic() - start, 2),
    }
    write_json(out_dir / REPORT_FILE, report)
    return report


def _prompts(answerer: Answerer, choice: Choice, folder: DataFolder) -> list[Prompt]:
    """All questions; DataError if the folder's tables have none."""
    benchmark = choice.benchmark
    asking = Asking(variant=choice.variant, frame_times=answerer.encoder.frame_times)
    known = any(map(benchmark.is_reference, folder.tables))
    prompts = list(benchmark.prompts(folder, asking)) if known else []
    if not prompts:
        names = ", ".join(sorted(table.path.name for table in folder.tables)[:5])
        raise no_questions(folder.path, benchmark.name, f"only other tables: {names}")
    return prompts


def _identity(
    answerer: Answerer,
    choice: Choice,
    folder: DataFolder,
    prompts: Sequence[Prompt],
    generation: Generation,
) -> dict[str, Any]:
    """What the answers depend on; of a question set in the form that earlier runs have it."""
    model, shared = answerer.identity, answerer.identity.get("scales_shared_by_batch")
    if isinstance(choice.benchmark, QuestionSet):
        batches = f", batches of {generation.batch_size}" if shared else ""
        return {
            "task": choice.name,
            "questions_sha256": file_sha256(folder.path / QUESTIONS_FILE),
            "model_sha256": model["model_sha256"],
            "max_new_tokens": generation.max_new_tokens,
            "dtype": f"{model['dtype']}{batches}",
            **({"precision": model["precision"]} if model.get("precision") else {}),
        }
    identity = {
        "task": choice.name,
        "prompts_sha256": _digest(prompts),
        **({} if prompts[0].choices else {"max_new_tokens": generation.max_new_tokens}),
        **model,
    }
    if shared:
        identity["batch_size"] = generation.batch_size
        # Batches are made over the questions that are asked.
        cut = choice.limit is not None and choice.limit < len(prompts)
        identity["limit"] = choice.limit if cut else None
    return identity


def _start(
    out_dir: Path, identity: dict[str, Any], choice: Choice, prompts: Sequence[Prompt]
) -> set[int] | Exception:
    """What is answered already; an error is handed to the other ranks, which would wait."""
    try:
        done = resume(out_dir, identity, prompts, overwrite=choice.overwrite)
    except (ValueError, OSError) as error:
        return error
    if not isinstance(choice.benchmark, QuestionSet):  # whose items.jsonl says what was asked
        write_rows(out_dir / PROMPTS_FILE, map(_row, prompts[: choice.limit]))
    return done


def _finish(out_dir: Path, asked: Sequence[Prompt], problems: Sequence[Problem]) -> None:
    """All answers in one file; RuntimeError if one is lost."""
    answered = {*merge(out_dir), *(row["index"] for row in problems)}
    lost = set(range(len(asked))) - answered
    if lost:
        raise RuntimeError(f"{out_dir} lacks the answers of questions {sorted(lost)[:5]}")


def _row(prompt: Prompt) -> dict[str, Any]:
    return {
        **named(prompt),
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
        only={prompt.key for prompt in asked},
        submission_path=out_dir / SUBMISSION_FILE if submits and not answers else None,
    )


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


@dataclass(frozen=True, slots=True)
class Unmet:
    """One ``require`` entry that the final model misses."""

    set_name: str
    metric: str
    required: float
    value: float

    def __str__(self) -> str:
        return f"{self.set_name}: {self.metric} is {self.value:.2f}, required {self.required:.2f}"


def evaluate_run(
    run_dir: Path,
    generation: Generation,
    *,
    device: torch.device | str | None = None,
    limit: int | None = None,
    world: World = ALONE,
) -> list[Unmet]:
    """Run all evaluation sets of ``run_dir/recipe.yaml`` on the last stage's model.

    Each set goes to ``run_dir/eval/<set>/`` (see :func:`run_benchmark`), then
    ``run_dir/eval.json`` is written: ``{"precision": ..., set: {metric: percent}}``. An interrupted
    call goes on where it stopped; predictions of an earlier model are replaced.

    Args:
        run_dir: run folder.
        generation: batch size and length; the recipe says how many workers decode ahead.
        device: where the model runs; the first GPU if there is one, else the CPU.
        limit: ask the first ``limit`` questions of each set only.
        world: this process among the ranks, all of which call this.

    Returns:
        The ``require`` entries that are not reached; empty when all are, and on other ranks than 0.

    Raises:
        FileNotFoundError: no recipe, or the last stage has no model folder yet.
        ValueError: the recipe has no evaluation set, or requires a metric that does not exist.
    """
    run_dir = Path(run_dir)
    recipe = load_recipe(str(run_dir / "recipe.yaml"))
    if not recipe.eval_sets:
        raise ValueError(f"{run_dir / 'recipe.yaml'} has no eval_sets; add at least one")
    tasks = {
        name: get_task(settings.task, settings.media_root)
        for name, settings in recipe.eval_sets.items()
    }
    for name, settings in recipe.eval_sets.items():
        _check_required_metrics(name, tasks[name], Path(settings.path), settings.require)
    model_dir = final_model_dir(run_dir, recipe)
    # Training and evaluation share their arithmetic: a model trained in FP8 is asked in FP8.
    model, processor = load(model_dir, device, None, recipe.precision, recipe.fp8)
    answerer = CoatAnswerer(model, processor, lambda: {"model_sha256": folder_sha256(model_dir)})
    results: dict[str, dict[str, float]] = {}
    for name, settings in recipe.eval_sets.items():
        report = run_benchmark(
            answerer,
            Choice(benchmark=tasks[name], limit=limit, overwrite=True),
            Path(settings.path),
            run_dir / "eval" / name,
            replace(generation, num_workers=recipe.num_workers),
            world=world,
            model_name=str(model_dir),
        )
        results[name] = report.get("metrics", {})
    if not world.is_main:
        return []
    write_json(run_dir / "eval.json", {"precision": recipe.precision, **results})
    return [
        Unmet(name, metric, required, results[name].get(metric, 0.0))
        for name, settings in recipe.eval_sets.items()
        for metric, required in settings.require.items()
        # With a limit, a category may have had no question.
        if results[name].get(metric, 0.0) < required
    ]


def format_table(eval_json: Mapping[str, Any], recipe: Recipe) -> str:
    """The evaluation as an aligned plain-text table.

    One line per set with its headline metric, and one more per further required metric. Chance and
    majority are those of the metric shown (accuracy or F1), "-" where the metric has none.

    Args:
        eval_json: content of RUN/eval.json.
        recipe: the run's recipe (tasks and required values).
    """
    sets = recipe.to_dict()["eval_sets"]
    headlines = {
        name: get_task(settings.task).headline[0] for name, settings in recipe.eval_sets.items()
    }
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in evaluation_rows(eval_json, sets, headlines):
        numbers = map(percent_text, (row.value, row.chance, row.majority, row.required))
        lines.append((row.set_name, row.task, row.metric, *numbers, row.verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Names to the left, numbers to the right; the last column is as long as it is.
    sides = (*("<" * 3), *(">" * 4), "<")
    return "\n".join(
        "  ".join(
            f"{c:{side}{width}}" for c, side, width in zip(line, sides, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _check_required_metrics(
    name: str, task: QuestionSet, folder: Path, require: Mapping[str, float]
) -> None:
    """Fail before generating anything when a required metric is misspelt."""
    unanswered = task.score_all([(one, None) for one in task.load(folder)], Settings())
    known = task.aggregate(unanswered, Settings())
    for metric in require:
        if metric not in known:
            near = get_close_matches(metric, known, n=1) or [task.headline[0]]
            raise ValueError(
                f"eval_sets.{name}.require: there is no metric {metric!r}; did you mean "
                f"{near[0]!r}? The set has: {', '.join(known)}"
            )


def eval_subsets(recipe: Recipe) -> list[EvalSubset]:
    """The questions that training asks on the way (``eval_every``), and how they are scored.

    They are ``eval_samples`` questions of every evaluation set, at even distances over its file.

    Args:
        recipe: names the sets.

    Raises:
        FileNotFoundError: a set has no questions.jsonl.
        DataError: a question cannot be read, or its medium is absent; names file and line.
    """
    subsets = []
    for name, settings in recipe.eval_sets.items():
        task = get_task(settings.task, settings.media_root)
        questions = task.load(Path(settings.path))
        chosen = [questions[index] for index in spread(range(len(questions)), recipe.eval_samples)]
        subsets.append(
            EvalSubset(
                name=name,
                headline=task.headline[0],
                samples=[one.details["sample"] for one in chosen],
                score=partial(_score_answers, task, chosen),
            )
        )
    return subsets


def _score_answers(
    task: QuestionSet, questions: Sequence[Question], answers: Sequence[str]
) -> dict[str, float]:
    pairs = zip(questions, answers, strict=True)
    return task.aggregate(task.score_all(pairs, Settings()), Settings())
