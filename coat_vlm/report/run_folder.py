"""Reads a complete or partial run folder; lists absent and unreadable files without raising."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coat_vlm.checkpoint.load import list_checkpoints
from coat_vlm.config import STAGES
from coat_vlm.run.heartbeat import read_states
from coat_vlm.train.tracking import read_entries, split_steps

_BY_STEP = ("step", "val", "eval", "monitor", "save")
"""Kinds of rows of which a step has one; the last one counts."""


@dataclass(slots=True, kw_only=True)
class StageLog:
    """The entries of one stage in metrics.jsonl, each kind in order of its steps."""

    name: str
    start: dict[str, Any] = field(default_factory=dict)  # the last one
    end: dict[str, Any] | None = None
    """None while the stage runs, and after a crash."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """A step repeated after a resume counts once."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # in training
    fp8: list[dict[str, Any]] = field(default_factory=list)
    monitor: list[dict[str, Any]] = field(default_factory=list)  # FP8 blocks against BF16
    saves: list[dict[str, Any]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    """The first steps after a start or a resume."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Changes at resumes, and divergence."""

    @property
    def ranks(self) -> int:
        """Processes of the last start."""
        return self.start.get("world_size") or 1

    @property
    def steady(self) -> list[Mapping[str, Any]]:
        """The steps whose time is only training."""
        return split_steps(self.steps, self.first)[0]

    @property
    def status(self) -> str:
        """``not started``, ``not finished`` or ``finished``."""
        return "finished" if self.end else "not finished" if self.start else "not started"

    @property
    def on_gpu(self) -> bool:
        """Whether the last start was on a GPU."""
        return self.start.get("device", "cpu") != "cpu"


@dataclass(slots=True, kw_only=True)
class RunFolder:
    """The files of a run; absent parts are empty, and files are listed in ``missing``."""

    folder: Path
    recipe: dict[str, Any]
    recipe_text: str
    stages: list[StageLog]
    eval_json: dict[str, Any]
    reports: dict[str, dict[str, Any]]
    training: dict[str, Any]  # training.json of the last existing model folder
    missing: list[str]
    running: bool = False


def read_run_folder(folder: Path) -> RunFolder:
    """Read ``folder``; raise FileNotFoundError if it is not a run folder."""
    if not (folder / "recipe.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(
            f"{folder} is not a run folder: it has neither recipe.yaml nor metrics.jsonl; "
            "give the output_dir of a recipe that was trained"
        )
    missing: list[str] = []
    recipe, recipe_text = _read_recipe(folder / "recipe.yaml", missing)
    stages = _read_metrics(folder / "metrics.jsonl", recipe, missing)
    if recipe.get("eval_sets") and not (folder / "eval.json").is_file():
        missing.append("eval.json does not exist: the evaluation sets were not evaluated yet")
    eval_json = _read_json(folder / "eval.json", missing)
    eval_sets: dict[str, Any] = recipe.get("eval_sets") or {}
    reports = {
        name: report
        for name in dict.fromkeys([*eval_sets, *eval_json])
        if (report := _read_json(folder / "eval" / name / "report.json", missing))
    }
    training: dict[str, Any] = {}
    for stage in STAGES:
        training = _read_json(folder / stage / "model" / "training.json", missing) or training
    return RunFolder(
        folder=folder,
        recipe=recipe,
        recipe_text=recipe_text,
        stages=stages,
        eval_json=eval_json,
        reports=reports,
        training=training,
        missing=missing,
        running=any(state.runs for state in read_states(folder)),
    )


def _read_recipe(path: Path, missing: list[str]) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        missing.append("recipe.yaml does not exist, so the configuration is not shown")
        return {}, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError as error:
        missing.append(f"recipe.yaml cannot be read: {error}")
        return {}, text
    return (recipe if isinstance(recipe, dict) else {}), text


def _read_metrics(path: Path, recipe: Mapping[str, Any], missing: list[str]) -> list[StageLog]:
    logs = {name: StageLog(name=name) for name in STAGES if name in (recipe.get("stages") or {})}
    if not path.is_file():
        missing.append("metrics.jsonl does not exist: training has not started")
        return list(logs.values())
    with path.open("rb") as file:
        lines = sum(1 for line in file if line.strip())
    rows = list(read_entries(path))  # after counting: a running run appends lines
    if lines > len(rows):
        unreadable = lines - len(rows)
        missing.append(f"metrics.jsonl has {unreadable} unreadable lines (truncated by a crash?)")
    numbered: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    fresh: set[str] = {*STAGES}  # whose next step is the first after a start
    for row in rows:
        name, kind = str(row["stage"]), row.get("kind")
        log = logs.setdefault(name, StageLog(name=name))
        if kind in _BY_STEP:
            numbered.setdefault((name, kind), {})[int(row["step"])] = row
        if kind == "step":
            (log.first.add if name in fresh else log.first.discard)(int(row["step"]))
            fresh.discard(name)
        elif kind == "fp8":
            log.fp8.append(row)
        elif kind in ("resume", "divergence"):
            log.events.append(row)
        elif kind == "stage":
            log.start, log.end = (log.start, row) if row.get("status") == "end" else (row, None)
            fresh.add(name)
    for name, log in logs.items():
        log.steps, log.validations, log.evaluations, log.monitor, log.saves = (
            [row for _, row in sorted(numbered.get((name, kind), {}).items())] for kind in _BY_STEP
        )
    return list(logs.values())


def _read_json(path: Path, missing: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of text that is not UTF-8
        missing.append(f"{path.parent.name}/{path.name} cannot be read: {error}")
        return {}
    if not isinstance(values, dict):
        missing.append(
            f"{path.parent.name}/{path.name} is a {type(values).__name__}, not an object"
        )
        return {}
    return values


def describe_run(run_dir: Path) -> tuple[str, bool]:
    """Describe how far a run is, and what its processes do or did last.

    Returns the text, and whether all processes respond that have not ended in order.
    """
    states = read_states(run_dir)
    lines = [_describe_stage(run_dir, stage) for stage in read_run_folder(run_dir).stages]
    lines += [state.describe() for state in states] or ["no process trains in this folder"]
    return "\n".join(lines), all(state.runs for state in states)


def _describe_stage(run_dir: Path, stage: StageLog) -> str:
    parts = [f"stage {stage.name} is {stage.status}"]
    if stage.steps:
        last = stage.steps[-1]
        parts.append(f"step {last['step']} of {last['total_steps']}")
        if last.get("loss") is not None:
            parts.append(f"loss {last['loss']:.4f}")
    checkpoints = list_checkpoints(run_dir / stage.name / "checkpoints")
    return ", ".join(parts + [f"newest checkpoint {path.name}" for path in checkpoints[:1]])
