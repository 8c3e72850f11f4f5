"""Evaluates the final model of a run folder on every evaluation set of its recipe."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from coat_eval.runner import evaluate
from coat_eval.score import write_json
from coat_eval.tasks import get_task
from coat_vlm.config import STAGES, EvalSetConfig, Recipe
from coat_vlm.config.load import load_recipe
from coat_vlm.generate import load
from coat_vlm.report.evaluation import evaluation_rows, percent_text

COLUMNS = ("set", "task", "metric", "value", "chance", "majority", "required", "")


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
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int = 32,
    max_new_tokens: int = 16,
    limit: int | None = None,
    progress: bool = True,
) -> list[Unmet]:
    """Run all evaluation sets of ``run_dir/recipe.yaml`` on the last stage's model.

    Each set goes to ``run_dir/eval/<set>/`` (see :func:`coat_eval.runner.evaluate`), then
    ``run_dir/eval.json`` is written: ``{"precision": ..., set: {metric: percent}}``. An interrupted
    call goes on where it stopped; predictions of an earlier model are replaced.

    Args:
        run_dir: run folder.
        device: where the model runs; the first GPU if there is one, else the CPU.
        dtype: dtype of the weights, see :func:`coat_vlm.generate.load`.
        batch_size: questions per forward pass.
        max_new_tokens: longest answer in tokens.
        limit: ask the first ``limit`` questions of each set only.
        progress: show a progress bar per set.

    Returns:
        The ``require`` entries that are not reached; empty when all are.

    Raises:
        FileNotFoundError: no recipe, or the last stage has no model folder yet.
        ValueError: the recipe has no evaluation set, or requires a metric that does not exist.
    """
    run_dir = Path(run_dir)
    recipe = load_recipe(str(run_dir / "recipe.yaml"))
    if not recipe.eval_sets:
        raise ValueError(f"{run_dir / 'recipe.yaml'} has no eval_sets; add at least one")
    for name, settings in recipe.eval_sets.items():
        _check_required_metrics(name, settings)
    model_dir = final_model_dir(run_dir, recipe)
    # Training and evaluation share their arithmetic: a model trained in FP8 is asked in FP8.
    model, processor = load(model_dir, device, dtype, recipe.precision, recipe.fp8)
    results: dict[str, dict[str, float]] = {}
    for name, settings in recipe.eval_sets.items():
        report = evaluate(
            model,
            processor,
            get_task(settings.task),
            Path(settings.path),
            run_dir / "eval" / name,
            model_dir=model_dir,
            media_root=settings.media_root,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            limit=limit,
            num_workers=recipe.num_workers,
            on_mismatch="overwrite",
            progress=progress,
        )
        results[name] = report["metrics"]
    write_json(run_dir / "eval.json", {"precision": recipe.precision, **results})
    return [
        Unmet(name, metric, required, results[name].get(metric, 0.0))
        for name, settings in recipe.eval_sets.items()
        for metric, required in settings.require.items()
        # With a limit, a category may have had no question.
        if results[name].get(metric, 0.0) < required
    ]


def final_model_dir(run_dir: Path, recipe: Recipe) -> Path:
    """``run_dir/<last stage>/model``; FileNotFoundError when that stage has not finished."""
    stage = [stage for stage in STAGES if stage in recipe.stages][-1]
    model_dir = run_dir / stage / "model"
    if not (model_dir / "config.json").is_file():
        raise FileNotFoundError(
            f"{model_dir} is not there: stage {stage!r} of this run has not finished; "
            "continue it with coat-vlm train ... --resume auto"
        )
    return model_dir


def format_table(eval_json: Mapping[str, Any], recipe: Recipe) -> str:
    """The evaluation as an aligned plain-text table.

    One line per set with its headline metric, and one more per further required metric. Chance and
    majority are those of the metric shown (accuracy or F1), "-" where the metric has none.

    Args:
        eval_json: content of RUN/eval.json.
        recipe: the run's recipe (tasks and required values).
    """
    sets = {name: asdict(settings) for name, settings in recipe.eval_sets.items()}
    headlines = {
        name: get_task(settings.task).headline for name, settings in recipe.eval_sets.items()
    }
    lines = [COLUMNS]
    lines += [
        (
            row.set_name,
            row.task,
            row.metric,
            percent_text(row.value),
            percent_text(row.chance),
            percent_text(row.majority),
            percent_text(row.required),
            row.verdict,
        )
        for row in evaluation_rows(eval_json, sets, headlines)
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(line[3:7], widths[3:7], strict=True)]
    return "  ".join([*names, *numbers, line[7]]).rstrip()


def _check_required_metrics(name: str, settings: EvalSetConfig) -> None:
    """Fail before generating anything when a required metric is misspelt."""
    task = get_task(settings.task)
    items = task.load(Path(settings.path), settings.media_root)
    known = task.score(items, {})
    for metric in settings.require:
        if metric not in known:
            near = get_close_matches(metric, known, n=1) or [task.headline]
            raise ValueError(
                f"eval_sets.{name}.require: there is no metric {metric!r}; did you mean "
                f"{near[0]!r}? The set has: {', '.join(known)}"
            )
