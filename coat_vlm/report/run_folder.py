"""Reads a run folder as far as it has got; what is absent or unreadable is listed, not raised."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coat_vlm.config import STAGES


@dataclass(slots=True, kw_only=True)
class StageLog:
    """What metrics.jsonl says of one stage."""

    name: str
    start: dict[str, Any] = field(default_factory=dict)
    """The last row that opened the stage: what trains, devices, versions."""
    end: dict[str, Any] | None = None
    """The row that closed it; None while it runs, and after a crash."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """One row per optimizer step, in order; a step repeated after a resume counts once."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    """One row per validation, in order."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One row per time that ``eval_every`` asked questions, in order."""
    fp8: list[dict[str, Any]] = field(default_factory=list)
    """What ``precision: coat`` measured, in order."""
    monitor: list[dict[str, Any]] = field(default_factory=list)
    """One row per time that FP8 blocks were compared with BF16, in order."""


@dataclass(slots=True, kw_only=True)
class RunFolder:
    """Everything the report shows, as read; absent parts are empty and named in ``missing``."""

    folder: Path
    recipe: dict[str, Any]
    recipe_text: str
    stages: list[StageLog]
    eval_json: dict[str, Any]
    reports: dict[str, dict[str, Any]]
    training: dict[str, Any]
    """training.json of the last model folder there is."""
    missing: list[str]


def read_run_folder(folder: Path) -> RunFolder:
    """Read ``folder``; raise FileNotFoundError if it holds no trace of a run."""
    if not (folder / "recipe.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(
            f"{folder} is not a run folder: it has neither recipe.yaml nor metrics.jsonl; "
            "give the output_dir of a recipe that was trained"
        )
    missing: list[str] = []
    recipe, recipe_text = _read_recipe(folder / "recipe.yaml", missing)
    stages = _read_metrics(folder / "metrics.jsonl", recipe, missing)
    if not (folder / "eval.json").is_file():
        missing.append("eval.json is not there: not evaluated yet (coat-vlm eval --run RUN_DIR)")
    eval_json = _read_json(folder / "eval.json", missing) or {}
    sets: dict[str, Any] = {**(recipe.get("eval_sets") or {}), **eval_json}
    sets.pop("precision", None)
    reports = {
        name: report
        for name in sets
        if (report := _read_json(folder / "eval" / name / "report.json", missing)) is not None
    }
    trained = [folder / stage / "model" / "training.json" for stage in STAGES]
    trained = [path for path in trained if path.is_file()]
    return RunFolder(
        folder=folder,
        recipe=recipe,
        recipe_text=recipe_text,
        stages=stages,
        eval_json=eval_json,
        reports=reports,
        training=(_read_json(trained[-1], missing) if trained else None) or {},
        missing=missing,
    )


def _read_recipe(path: Path, missing: list[str]) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        missing.append("recipe.yaml is not there, so the configuration is not shown")
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
        missing.append("metrics.jsonl is not there: training has not started")
        return list(logs.values())
    rows, unreadable = _read_rows(path)
    if unreadable:
        missing.append(f"metrics.jsonl has {unreadable} unreadable lines (cut off by a crash?)")
    numbered: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        name = str(row.get("stage"))
        log = logs.setdefault(name, StageLog(name=name))
        match row.get("kind"), row.get("status"):
            case "step" | "val" | "eval" | "monitor" as kind, _:
                numbered.setdefault((name, kind), {})[int(row["step"])] = row
            case "fp8", _:
                log.fp8.append(row)
            case "stage", "start":
                log.start, log.end = row, None
            case "stage", "end":
                log.end = row
    for name, log in logs.items():
        log.steps, log.validations, log.evaluations, log.monitor = (
            [row for _, row in sorted(numbered.get((name, kind), {}).items())]
            for kind in ("step", "val", "eval", "monitor")
        )
        _note_progress(log, missing)
    return list(logs.values())


def _note_progress(log: StageLog, missing: list[str]) -> None:
    last = log.steps[-1] if log.steps else {"step": 0}
    if not log.start and not log.steps:
        missing.append(f"stage {log.name} has not started")
    elif log.end is None:
        done = f"step {last['step']} of {last.get('total_steps', '?')}"
        missing.append(f"stage {log.name} is not finished: {done} is the last one")


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file and the number of lines that are none."""
    rows, unreadable = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            unreadable += 1
    return rows, unreadable


def _read_json(path: Path, missing: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        missing.append(f"{path.parent.name}/{path.name} cannot be read: {error}")
        return None
