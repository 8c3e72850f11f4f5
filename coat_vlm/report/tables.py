"""Builds the tables of a run: facts, a column per stage, data, speed and memory, and FP8."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from coat_vlm.config import MODULES
from coat_vlm.report.run_folder import RunFolder, StageLog
from coat_vlm.train.tracking import add_up, average_rates

GIB = 2**30

Plan = Mapping[str, float]
"""Planned peak memory of a GPU in bytes, for each stage."""

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
    return _select_known(
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
        "facts": _select_known(facts),
        "row": "\n".join(stage.start.get("row") or []),
        "modules": [_module(stage, config, name) for name in names],
    }


def _select_known(facts: list[tuple[str, Any]]) -> Facts:
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


def build_data_rows(run: RunFolder) -> list[tuple[str, ...]]:
    """Build rows ``(stage, source, rows, passes, samples %, tokens each, bad, loss)``.

    Samples are shares of an epoch. The loss is the last one on a validation source of the same
    name; other validation sources have rows of their own.
    """
    table = []
    configs = run.recipe.get("stages") or {}
    for stage in run.stages:
        last = stage.steps[-1] if stage.steps else {}
        losses = dict((stage.validations[-1].get("losses") if stage.validations else {}) or {})
        bad = {name: count["rows"] for name, count in (last.get("bad_by_source") or {}).items()}
        config = configs.get(stage.name) or {}
        sources = stage.start.get("sources") or config.get("data") or []
        samples = sum(source.get("samples") or 0 for source in sources)
        used = add_up(stage.steps, "samples")
        for source in sources:
            name = str(source.get("name"))
            share, passes = source.get("samples"), source.get("passes")
            epochs = used / samples * passes if samples and passes else None
            row = (
                *(stage.name, name),
                _shown(source.get("rows"), "{:,}"),
                _shown(epochs, "{:.2f}"),
                _shown(share and 100 * share / samples, "{:.1f}"),
                _shown(source.get("tokens"), "{:,.0f}"),
                str(bad.get(name, 0)),
                _shown(losses.pop(name, None), "{:.4f}"),
            )
            table.append(row)
        for name, loss in losses.items():
            table.append((stage.name, f"{name} (validation)", *"-----", _shown(loss, "{:.4f}")))
    return table


def build_speed_rows(run: RunFolder, plan: Plan) -> list[tuple[str, ...]]:
    """Build a row per stage: the rates of its steady steps, its memory, and its saves.

    The template names the columns.
    """
    return [_speed_row(stage, plan.get(stage.name)) for stage in run.stages if stage.steps]


def _speed_row(stage: StageLog, planned: float | None) -> tuple[str, ...]:
    rates = average_rates(stage.steady, stage.ranks)
    tflop = rates.get("tflop_per_s_per_gpu") if stage.on_gpu else None
    measured = 1e6 * max(float(row.get("peak_memory_mb") or 0) for row in stage.steps)
    return (
        stage.name,
        f"{len(stage.steady)} of {len(stage.steps)}",
        _shown(rates.get("tokens_per_s"), "{:,.0f}"),
        _shown(rates.get("samples_per_s"), "{:.3g}"),
        _shown(tflop, "{:.3g}"),
        _shown(rates.get("step_s"), "{:.3g}"),
        _shown(rates.get("wait"), "{:.1%}"),
        _shown(rates.get("imbalance"), "{:.1%}"),
        f"{measured / GIB:.2f}" if measured else "-",
        _shown(planned and planned / GIB, "{:.2f}"),
        _spent(stage.saves, "save_s"),
        _spent([*stage.validations, *stage.evaluations], "val_s", "eval_s"),
    )


def _spent(rows: list[dict[str, Any]], *keys: str) -> str:
    if not rows:
        return "-"
    seconds = sum(add_up(rows, key) for key in keys)
    return f"{len(rows)}, " + (format_duration(seconds) if seconds >= 10 else f"{seconds:.2g} s")


def _shown(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def build_fp8_sections(run: RunFolder) -> list[dict[str, Any]]:
    """Build one section per stage that ran in FP8; the template names the columns of its tables."""
    sections = []
    for stage in run.stages:
        if not stage.fp8:
            continue
        section = {
            "stage": stage.name,
            "rates": [
                (
                    kind,
                    f"{row['values']:,.0f}",
                    f"{100 * row['saturated']:.4f}",
                    f"{100 * row['underflowed']:.4f}",
                )
                for kind, row in sorted(stage.fp8[-1]["rates"].items())
            ],
            "rates_step": stage.fp8[-1]["step"],
            "compared": _compared(stage.monitor),
            "warnings": [
                f"step {row['step']}: {w}" for row in stage.monitor for w in row["warnings"]
            ],
        }
        sections.append(section)
    return sections


def _compared(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Build rows (block, largest output error, largest input gradient error)."""
    names = dict.fromkeys(name for row in rows for name in row["layers"])
    keys = ("output_error", "input_gradient_error")
    return [(name, *(_largest(rows, name, key) for key in keys)) for name in names]


def _largest(rows: list[dict[str, Any]], name: str, key: str) -> str:
    errors = [row["layers"][name][key] for row in rows if key in row["layers"].get(name, {})]
    if not errors:
        return ""
    return "not finite" if None in errors else f"{max(errors):.4f}"
