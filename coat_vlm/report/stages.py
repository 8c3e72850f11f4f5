"""Formats the facts of a run: the header, and one column per stage."""

from datetime import datetime
from typing import Any

from coat_vlm.config import MODULES
from coat_vlm.report.run_folder import RunFolder, StageLog
from coat_vlm.train.steady_rates import add_up

Facts = list[tuple[str, str]]  # label, text


def list_header_facts(run: RunFolder) -> Facts:
    """List the facts about the whole run."""
    starts = [stage.start for stage in run.stages if stage.start]
    start = starts[-1] if starts else {}
    rows = [row for stage in run.stages for row in stage.steps]
    times = [
        datetime.fromtimestamp(row["time"]).astimezone().strftime("%Y-%m-%d %H:%M")
        for row in rows[:: max(1, len(rows) - 1)]
        if "time" in row
    ]
    versions = start.get("versions") or {}
    ranks = start.get("world_size") or 1
    device = start.get("device") or ""
    return _shown(
        [
            ("precision", start.get("precision") or run.recipe.get("precision")),
            ("device", f"{ranks} x {device}" if device and ranks > 1 else device),
            ("ZeRO stage", start.get("zero_stage", run.recipe.get("zero_stage"))),
            ("seed", run.recipe.get("seed")),
            ("training", f"{times[0]} to {times[-1]}" if times else ""),
            ("training time", format_duration(add_up(rows, "step_s")) if rows else ""),
            ("commit", run.training.get("commit")),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ]
    )


def build_stage_columns(run: RunFolder) -> list[dict[str, Any]]:
    """Build one ``{"name", "status", "facts", "row", "modules"}`` per stage.

    ``row`` is the first row as it is trained; ``modules`` contains texts ``(module, trained
    parameters, all parameters, peak lr)``.
    """
    configs = run.recipe.get("stages") or {}
    return [_stage_column(stage, configs.get(stage.name) or {}) for stage in run.stages]


def format_duration(seconds: float) -> str:
    """Format a duration as ``45 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_count(number: float) -> str:
    """Format a count with three digits: ``950``, ``12.3 K``, ``20.1 M``, ``7.24 B``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _stage_column(stage: StageLog, config: dict[str, Any]) -> dict[str, Any]:
    last = stage.steps[-1] if stage.steps else {}
    wall_s = (stage.end or {}).get("wall_s")
    losses = [row["loss"] for row in stage.steps[-20:] if row.get("loss") is not None]
    lora = config.get("lora") or {}
    facts = [
        ("steps", f"{last['step']} of {last.get('total_steps', '?')}" if last else ""),
        ("batch size", config.get("batch_size")),
        ("template", config.get("template")),
        ("LoRA", ", ".join(f"{name} {value}" for name, value in lora.items() if value)),
        ("schedule", config.get("lr_scheduler_type")),
        ("train loss, last 20 steps", f"{sum(losses) / len(losses):.4f}" if losses else ""),
        ("newest checkpoint", f"step {stage.saves[-1]['step']}" if stage.saves else ""),
        ("wall time", "" if wall_s is None else format_duration(wall_s)),
    ]
    # A text-only run has only the language model.
    names = [name for name in MODULES if name in (stage.start.get("total") or MODULES)]
    return {
        "name": stage.name,
        "status": stage.status,
        "facts": _shown(facts),
        "row": "\n".join(stage.start.get("row") or []),
        "modules": [_module(stage, config, name) for name in names],
    }


def _shown(facts: list[tuple[str, Any]]) -> Facts:
    return [(label, str(value)) for label, value in facts if value not in (None, "")]


def _module(stage: StageLog, config: dict[str, Any], name: str) -> tuple[str, str, str, str]:
    trained = (stage.start.get("trainable") or {}).get(name)
    total = (stage.start.get("total") or {}).get(name)
    settings = config.get(name) or {}
    shown = "frozen" if trained == 0 or not settings.get("train") else "yes"
    if trained:
        shown = format_count(trained)
    lr = settings.get("lr")
    return (
        *(name, shown, "" if total is None else format_count(total)),
        "" if lr is None else f"{lr:g}",
    )
