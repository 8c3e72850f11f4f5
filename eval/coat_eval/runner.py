"""Runs a model over benchmarks and question sets: prompts, answers, and the report.

The output folder contains ``prompts.jsonl``, ``predictions.jsonl``, ``run.json`` (what these depend
on), ``media_problems.jsonl`` (questions whose image or video could not be read, which count as
wrong) and ``report.json``. The same command continues a killed run.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from coat_data.sample import DataError
from coat_data.saved_files import check_outputs
from coat_data.tools.html_page import sample_evenly
from coat_eval.adapter import ModelAdapter
from coat_eval.benchmark import Benchmark, Prompt, PromptOptions, Settings
from coat_eval.data_folder import TABLES, DataFolder, Layouts, find_tables, make_no_questions_error
from coat_eval.files import REPORT_FILE, Table, read_json, write_json, write_rows
from coat_eval.generation import (
    PREDICTIONS_FILE,
    RUN_FILE,
    AnyModel,
    Generation,
    answer_all,
    get_key_fields,
    merge,
    resume,
)
from coat_eval.hub_model import HubAdapter
from coat_eval.judge import Judge
from coat_eval.own_model import CoatAdapter
from coat_eval.samples import add_pass_rates, choose_majority
from coat_eval.scoring import score_tables
from coat_eval.served_model import ServedModel
from coat_eval.tasks import BENCHMARKS, get_task
from coat_eval.tasks.question_set import QuestionSet
from coat_vlm.config import Recipe
from coat_vlm.config.load import load_run_recipe
from coat_vlm.distributed import ALONE, World
from coat_vlm.model.family_processor import sample_videos
from coat_vlm.model.folder import takes_videos
from coat_vlm.model.named_model import find_final_model, find_model
from coat_vlm.report.evaluation import build_evaluation_rows, format_percent
from coat_vlm.train.evaluation import EvalSubset
from coat_vlm.train.open_sources import access_of

PROBLEMS_FILE = "media_problems.jsonl"
PROMPTS_FILE = "prompts.jsonl"
SUBMISSION_FILE = "submission.json"
OUTPUTS = (PREDICTIONS_FILE, RUN_FILE, PROMPTS_FILE, PROBLEMS_FILE, REPORT_FILE, SUBMISSION_FILE)
COLUMNS = ("set", "task", "metric", "value", "chance", "majority", "required", "")
_SUFFIX = re.compile(r"\.\w+(?=#|$)")


def load_adapter(
    model: str, device: torch.device, precision: str | None = None, num_frames: int | None = None
) -> ModelAdapter:
    """Load what a folder names (:func:`find_model`), or a model of Hugging Face, also by name.

    ``num_frames`` of a video are shown to published models. ValueError if it has no effect.
    """
    if is_own(Path(model)) or takes_videos(model):
        folder = model if Path(model).exists() else snapshot_download(model)
        adapter = CoatAdapter.load(folder, device, precision)
        if num_frames is None:
            return adapter
        key, kind = "--num-frames: model.video.", adapter.model.config.model_type
        sample_videos(key, adapter.encoder, kind, {"num_frames": num_frames})
        return adapter.with_identity(lambda: {**adapter.identity, "num_frames": num_frames})
    if precision is not None:
        raise ValueError(
            f"{model} is not a checkpoint of this project: it has its own dtype; remove --precision"
        )
    return HubAdapter.load(model, device, num_frames or 8)


def is_own(folder: Path) -> bool:
    """Return whether a folder names a model of this project, or an adapter of any."""
    config = read_json(folder / "config.json", "copy the model again")
    return config.get("model_type") == "coat_vlm" or find_model(folder).folder != folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTask:
    """One benchmark to run, with its options."""

    benchmark: Benchmark
    variant: str = ""
    split: str = ""
    limit: int | None = None
    """Use the first questions only."""
    settings: Settings = field(default_factory=Settings)
    overwrite: bool = False
    """Replace answers of another model or other prompts instead of refusing them."""

    @property
    def name(self) -> str:
        """Name with variant, e.g. ``textvqa_no_ocr``; also the name of the output folder."""
        return "_".join(filter(None, (self.benchmark.name, self.variant)))

    def open(self, data: Path) -> DataFolder:
        """Read the benchmark's tables; DataError if one is invalid or exists twice."""
        if isinstance(self.benchmark, QuestionSet):
            return self.benchmark.open(data)
        return DataFolder.open(*self.where(data))

    def where(self, data: Path) -> tuple[Path, str, Layouts, str, set[str]]:
        """Return the arguments of :func:`find_tables` and :meth:`DataFolder.open`."""
        own = self.benchmark
        others = set(BENCHMARKS) - {own.name}
        return find_folder(data, own), own.name, own.layouts, self.split, others


def make_eval_task(name: str, data: Path, **options: Any) -> EvalTask:
    """Make the task of ``pope``, ``videomme_subtitles``, ...; default variant: the profile's."""
    task, _, variant = name.partition("_")
    if task not in BENCHMARKS or (variant and variant not in BENCHMARKS[task].variants):
        known = [
            EvalTask(benchmark=one, variant=kind).name
            for one in BENCHMARKS.values()
            for kind in ("", *one.variants)
        ]
        raise ValueError(f"unknown benchmark {name!r}; allowed: {', '.join(known)}")
    eval_task = EvalTask(benchmark=BENCHMARKS[task], variant=variant, **options)
    profile = eval_task.settings.profile
    eval_task.benchmark.check_profile(profile)
    if not variant and (tool := profile.partition("@")[0]) in eval_task.benchmark.variants:
        eval_task = replace(eval_task, variant=tool)
    find_tables(*eval_task.where(data))
    return eval_task


def find_folder(data: Path, benchmark: Benchmark) -> Path:
    """Return ``DATA/TASK`` if it exists and has more than tables of a layout, else ``DATA``."""
    folder = data / benchmark.name
    first = [patterns[0] for layouts in benchmark.layouts.values() for patterns in layouts]
    inner = [name for name in first if name.startswith(f"{benchmark.name}/")]
    files = [*folder.glob("[!.]*")]
    only_tables = all(file.is_file() and file.name.endswith(TABLES) for file in files)
    nested = only_tables and any(any(data.glob(name)) for name in inner)
    return folder if folder.is_dir() and not nested else data


def run_benchmark(
    adapter: AnyModel,
    eval_task: EvalTask,
    data: Path,
    out_dir: Path,
    generation: Generation,
    *,
    world: World = ALONE,
    model_name: str = "",
    judge: Judge | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Generate answers to all questions, and score them; all ranks call this.

    Several samples are answered in ``out_dir/sample_N``; the majority's answers are then scored.
    ``data`` is the benchmark's folder, or one with a folder per benchmark. ``check`` raises an
    error if the caller's lock on ``out_dir`` is lost. Returns the report on rank 0, ``{}`` on
    others. ValueError: the folder has answers of another model or other prompts. DataError: all
    questions had to be skipped.
    """
    start = time.monotonic()
    benchmark, folder = eval_task.benchmark, eval_task.open(data)
    read = [getattr(judge, "cache", None), *(table.path for table in folder.tables)]
    check_outputs(map(out_dir.joinpath, OUTPUTS), read)
    prompts = _make_prompts(adapter, eval_task, folder)
    asked = prompts[: eval_task.limit]
    identity: dict[str, Any] = {}
    answers: dict[int, dict[str, Any]] = {}
    references = list(filter(benchmark.is_reference, folder.tables))
    known = benchmark.questions(references, [])
    options: dict[str, Any] = {"world": world, "model_name": model_name, "judge": judge}
    numbers = range(generation.samples if generation.samples > 1 else 0)
    samples = {out_dir / f"sample_{n}": replace(generation, samples=1, sample=n) for n in numbers}

    def prepare() -> set[int]:
        identity.update(_make_identity(adapter, eval_task, prompts, generation))
        return _prepare_output(out_dir, identity, eval_task, asked)

    def vote() -> set[int]:
        rows = choose_majority(benchmark, known, [*map(merge, samples)], eval_task.settings)
        write_rows(out_dir / PREDICTIONS_FILE, rows)
        return {row["index"] for row in rows}

    done = world.run_on_rank0(prepare)
    runs = [
        run_benchmark(adapter, eval_task, data, own, sample, check=check, **options)
        for own, sample in samples.items()
    ]
    if runs:
        done = world.run_on_rank0(vote)
    skipped = answer_all(adapter, asked, done, out_dir, generation, world=world, check=check)
    problems = sorted(chain.from_iterable(world.gather(skipped)), key=lambda row: row["index"])
    check()
    if world.is_main:
        answers = merge(out_dir)
        lost = set(range(len(asked))) - {*answers, *(row["index"] for row in problems)}
        if lost:
            raise RuntimeError(f"{out_dir} lacks the answers of questions {sorted(lost)[:5]}")
        write_rows(out_dir / PROBLEMS_FILE, problems)
    if len(problems) == len(asked):
        raise DataError(
            str(folder.path),
            f"none of the {len(asked)} questions of {eval_task.name} could be asked; the first: "
            f"{problems[0]['media']}: {problems[0]['problem']}",
            f"{problems[0]['remedy']}; {out_dir / PROBLEMS_FILE} lists them",
        )
    if not world.is_main:
        return {}
    submits = type(benchmark).submission is not Benchmark.submission
    to_submit = submits and all(one.answer is None for one in known)
    warnings = []
    if problems:
        warnings.append(
            f"{len(problems)} questions were skipped and count as wrong, the first because "
            f"{problems[0]['problem']}; {out_dir / PROBLEMS_FILE} lists them"
        )
    if cut := sum("cut" in row for row in answers.values()):
        limit = f"--max-new-tokens {generation.max_new_tokens}"
        warnings.append(f"{cut} of {len(answers)} answers are cut after {limit}")
    report = score_tables(
        benchmark,
        [Table(path=out_dir / PREDICTIONS_FILE, rows=list(answers.values()))],
        references,
        settings=eval_task.settings,
        judge=judge,
        allow_missing=True,
        only={prompt.key for prompt in asked},
        submission_path=out_dir / SUBMISSION_FILE if to_submit else None,
        warnings=warnings,
    ) | {
        "model": model_name,
        "variant": eval_task.variant,
        "split": eval_task.split or next(iter(benchmark.layouts)),
        "limit": eval_task.limit,
        "n_media_problems": len(problems),
        **{name: value for name, value in identity.items() if name != "task"},
        "device": str(adapter.device),
        "batch_size": generation.batch_size,
        "num_ranks": world.size,
        "seconds": round(time.monotonic() - start, 2),
    }
    add_pass_rates(benchmark, report, runs)
    write_json(out_dir / REPORT_FILE, report)
    return report


def _make_prompts(adapter: AnyModel, eval_task: EvalTask, folder: DataFolder) -> list[Prompt]:
    """Make the prompts of all questions; DataError if the folder's tables have none."""
    benchmark = eval_task.benchmark
    options = PromptOptions(variant=eval_task.variant, frame_times=adapter.encoder.frame_times)
    known = any(map(benchmark.is_reference, folder.tables))
    prompts = list(benchmark.prompts(folder, options)) if known else []
    if not prompts:
        names = ", ".join(sorted(table.path.name for table in folder.tables)[:5])
        raise make_no_questions_error(folder.path, benchmark.name, f"only other tables: {names}")
    return prompts


def _make_identity(
    adapter: AnyModel, eval_task: EvalTask, prompts: Sequence[Prompt], generation: Generation
) -> dict[str, Any]:
    """Return what the answers depend on; ValueError for options without effect on a ranking."""
    served = isinstance(adapter, ServedModel)
    identity: dict[str, Any] = {"task": eval_task.name, "prompts_sha256": _hash_prompts(prompts)}
    if not prompts[0].choices:
        identity["max_new_tokens"] = generation.max_new_tokens
    elif served or generation.temperature:
        raise ValueError(
            f"{eval_task.name} ranks given answers by their loss, which no server returns and no "
            f"--temperature changes; generate letters: --tasks {eval_task.benchmark.name}"
        )
    sampled = ("temperature", "sample", "samples") if generation.temperature else ()
    identity |= {name: getattr(generation, name) for name in sampled} | adapter.identity
    if identity.get("scales_shared_by_batch") or (sampled and not served):
        identity["batch_size"] = generation.batch_size
        # Batches contain only questions within the limit.
        cut = eval_task.limit is not None and eval_task.limit < len(prompts)
        identity["limit"] = eval_task.limit if cut else None
    return identity


def _prepare_output(
    out_dir: Path, identity: dict[str, Any], eval_task: EvalTask, asked: Sequence[Prompt]
) -> set[int]:
    """Write the prompts, and return the answered questions."""
    done = resume(out_dir, identity, overwrite=eval_task.overwrite)
    rows = [
        {
            **get_key_fields(prompt),
            "prompt": prompt.text,
            **({"choices": prompt.choices} if prompt.choices else {}),
            "media": [{"kind": one.kind, "path": one.name} for one in prompt.media],
        }
        for prompt in asked
    ]
    write_rows(out_dir / PROMPTS_FILE, rows)
    return done


def _hash_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 over all prompts, with media by file name: the folder may move."""
    digest = hashlib.sha256()
    for prompt in prompts:
        names = [_SUFFIX.sub("", Path(one.name).name, count=1) for one in prompt.media]
        media = [(one.kind, name) for one, name in zip(prompt.media, names, strict=True)]
        text = prompt.fingerprint or prompt.text
        ranked = [prompt.choices] if prompt.choices else []
        key = (prompt.category, prompt.question_id)
        digest.update(json.dumps([*key, text, media, *ranked]).encode())
    return digest.hexdigest()


def evaluate_run(
    run_dir: Path,
    generation: Generation,
    *,
    device: torch.device | str | None = None,
    precision: str | None = None,
    limit: int | None = None,
    world: World = ALONE,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Run all evaluation sets of ``run_dir/recipe.yaml`` on the last stage's model, on all ranks.

    Writes ``run_dir/eval/<set>/`` and ``run_dir/eval.json`` (``{"precision": ..., set: {metric:
    percent}}``), in place of an earlier model's. The default ``precision`` of the forward pass is
    BF16, or FP32 after training in FP32. ``limit`` is the number of questions per set.
    Returns on rank 0 a message for each ``require`` entry that the model does not reach.
    """
    recipe = load_run_recipe(run_dir / "recipe.yaml")
    if not recipe.eval_sets:
        raise ValueError(f"{run_dir / 'recipe.yaml'} has no eval_sets; add at least one")
    tasks = {
        name: get_task(settings.task, settings.media_root, **access_of(recipe))
        for name, settings in recipe.eval_sets.items()
    }
    for name, settings in recipe.eval_sets.items():
        _check_required_metrics(name, tasks[name], Path(settings.path), settings.require)
    model_dir = find_final_model(run_dir, recipe)
    adapter = CoatAdapter.load(str(run_dir), device, precision)
    results: dict[str, dict[str, float]] = {}
    for name, settings in recipe.eval_sets.items():
        report = run_benchmark(
            adapter,
            EvalTask(benchmark=tasks[name], limit=limit, overwrite=True),
            Path(settings.path),
            run_dir / "eval" / name,
            replace(generation, num_workers=recipe.num_workers),
            world=world,
            model_name=str(model_dir),
            check=check,
        )
        results[name] = report.get("metrics", {})
    if not world.is_main:
        return []
    write_json(run_dir / "eval.json", {"precision": adapter.identity["precision"], **results})
    return [
        f"{name}: {metric} is {value:.2f}, required {required:.2f}"
        for name, settings in recipe.eval_sets.items()
        for metric, required in settings.require.items()
        # With a limit, a category may have no question.
        if (value := results[name].get(metric, 0.0)) < required
    ]


def format_table(eval_json: Mapping[str, Any], recipe: Recipe) -> str:
    """Format RUN/eval.json as an aligned plain-text table."""
    sets = asdict(recipe)["eval_sets"]
    reports = {
        name: {"headline": get_task(settings.task).headline[0]}
        for name, settings in recipe.eval_sets.items()
    }
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in build_evaluation_rows(eval_json, sets, reports):
        numbers = map(format_percent, (row.value, row.chance, row.majority, row.required))
        task = sets.get(row.set_name, {}).get("task", "")
        lines.append((row.set_name, task, row.metric, *numbers, row.verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Names are left-aligned and numbers right-aligned; the last column is not padded.
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
    """Raise ValueError before generation if a required metric does not exist."""
    questions = task.load(folder)
    known = task.evaluate(questions, [None] * len(questions))
    for metric in require:
        if metric not in known:
            near = get_close_matches(metric, known, n=1) or [task.headline[0]]
            raise ValueError(
                f"eval_sets.{name}.require: there is no metric {metric!r}; did you mean "
                f"{near[0]!r}? The set has: {', '.join(known)}"
            )


def make_eval_subsets(recipe: Recipe) -> list[EvalSubset]:
    """Make the evenly spaced questions of ``eval_every``, with their scorers."""
    subsets = []
    for name, settings in recipe.eval_sets.items():
        task = get_task(settings.task, settings.media_root, **access_of(recipe))
        questions = task.load(Path(settings.path))
        indices = sample_evenly(range(len(questions)), recipe.eval_samples)
        chosen = [questions[index] for index in indices]
        subsets.append(
            EvalSubset(
                name=name,
                headline=task.headline[0],
                samples=[one.details["sample"] for one in chosen],
                score=partial(task.evaluate, chosen),
            )
        )
    return subsets
