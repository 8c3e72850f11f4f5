"""The facts of a run in words: its header, one column per stage, and what a stage says of FP8."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from statistics import median
from typing import Any

from coat_vlm.config import MODULES
from coat_vlm.report.run_folder import RunFolder, StageLog

Facts = list[tuple[str, str]]
"""Label and text of each fact that is shown."""


def header_facts(run: RunFolder) -> Facts:
    """Label and text of each fact in the report's header."""
    starts = [stage.start for stage in run.stages if stage.start]
    start = starts[-1] if starts else {}
    rows = [row for stage in run.stages for row in stage.steps]
    times = [row["time"] for row in rows if "time" in row]
    versions = start.get("versions") or {}
    ranks = start.get("world_size") or 1
    device = start.get("device") or ""
    return _shown(
        [
            ("precision", start.get("precision") or run.recipe.get("precision")),
            ("device", f"{ranks} x {device}" if device and ranks > 1 else device),
            ("ZeRO stage", start.get("zero_stage", run.recipe.get("zero_stage"))),
            ("seed", run.recipe.get("seed")),
            ("training", " to ".join(_moment(time) for time in times[:: max(1, len(times) - 1)])),
            ("training time", duration(_sum(rows, "step_s")) if rows else ""),
            ("commit", run.training.get("commit")),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ]
    )


def stage_columns(run: RunFolder) -> list[dict[str, Any]]:
    """One ``{"name", "status", "facts", "modules"}`` per stage.

    ``modules`` has ``(module, trained parameters, all parameters, peak lr)`` as texts.
    """
    configs = run.recipe.get("stages") or {}
    return [_stage_column(stage, configs.get(stage.name) or {}) for stage in run.stages]


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{whole // 3600} h {minutes % 60:02d} min"
    )


def count(number: float) -> str:
    """A count in three digits: ``950``, ``12.3 K``, ``20.1 M``, ``7.24 B``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _stage_column(stage: StageLog, config: dict[str, Any]) -> dict[str, Any]:
    last = stage.steps[-1] if stage.steps else {}
    lora = config.get("lora") or {}
    losses = stage.validations[-1].get("losses") or {} if stage.validations else {}
    total_s, wall_s = _sum(stage.steps, "step_s"), (stage.end or {}).get("wall_s")
    peak_mb = max((float(row.get("peak_memory_mb") or 0) for row in stage.steps), default=0)
    final = _values(stage.steps[-20:], "loss")
    facts = [
        ("steps", f"{last['step']} of {last.get('total_steps', '?')}" if last else ""),
        ("batch size", config.get("batch_size")),
        ("data", ", ".join(_source(source) for source in config.get("data") or [])),
        ("template", config.get("template")),
        ("LoRA", ", ".join(f"{k} {lora[k]:g}" for k in ("rank", "alpha", "dropout") if k in lora)),
        ("schedule", config.get("schedule")),
        ("train loss, last 20 steps", f"{sum(final) / len(final):.4f}" if final else ""),
        ("validation loss", ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())),
        ("last questions in training", _evaluation(stage)),
        ("tokens/s, median", _median(stage, "tokens_per_s")),
        ("of them vision", _vision_share(stage)),
        ("samples/s, median", _median(stage, "samples_per_s")),
        ("TFLOP/s per GPU, median", _median(stage, "tflop_per_s_per_gpu")),
        ("model FLOPs", _shares(stage, "tflop")),
        ("waiting for data", _percent(_sum(stage.steps, "data_wait_s"), total_s, " of the time")),
        ("phases of a step", _shares(stage, "phases")),
        ("peak memory", f"{peak_mb * 1e6 / 2**30:.2f} GiB" if peak_mb else ""),
        ("bad samples", last.get("bad_samples", "")),
        ("wall time", "" if wall_s is None else duration(wall_s)),
    ]
    return {
        "name": stage.name,
        "status": "finished" if stage.end else "not finished" if stage.steps else "not started",
        "facts": _shown(facts),
        "modules": [
            _module(stage, config, name)
            for name in MODULES
            if name in (stage.start.get("total") or MODULES)  # a text-only run has one alone
        ],
    }


def _shown(facts: list[tuple[str, Any]]) -> Facts:
    return [(label, str(value)) for label, value in facts if value not in (None, "")]


def _module(stage: StageLog, config: dict[str, Any], name: str) -> tuple[str, str, str, str]:
    trained = (stage.start.get("trainable") or {}).get(name)
    total = (stage.start.get("total") or {}).get(name)
    settings = config.get(name) or {}
    if trained is None:
        shown = "yes" if settings.get("train") else "no"
    else:
        shown = count(trained) if trained else "frozen"
    lr = settings.get("lr")
    return name, shown, "" if total is None else count(total), "" if lr is None else f"{lr:g}"


def _source(source: dict[str, Any]) -> str:
    share = source.get("repeat") or source.get("weight")
    kind = "x" if source.get("repeat") else "weight "
    return f"{source.get('name')} ({kind}{share:g})" if share else str(source.get("name"))


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def _sum(rows: list[dict[str, Any]], key: str) -> float:
    return sum(_values(rows, key))


def _percent(part: float, total: float, of: str = "") -> str:
    return f"{100 * part / total:.1f}%{of}" if total else ""


def _median(stage: StageLog, key: str) -> str:
    values = _values(stage.steps, key)
    return count(median(values)) if values else ""


def _evaluation(stage: StageLog) -> str:
    """The headline metrics, and how many questions are behind them."""
    if not stage.evaluations:
        return ""
    row = stage.evaluations[-1]
    return ", ".join(
        f"{name} {metric} {row['metrics'][name][metric]:.2f} of {row['samples'][name]}"
        for name, metric in row["headline"].items()
    )


def _vision_share(stage: StageLog) -> str:
    """Of all tokens; empty for a model without a tower, and for logs that do not say."""
    counted = [row for row in stage.steps if "vision_tokens" in row]
    vision = _sum(counted, "vision_tokens")
    return _percent(vision, _sum(counted, "tokens")) if vision else ""


def _shares(stage: StageLog, key: str) -> str:
    """The parts of what a key of the steps holds, in percent of their sum over the stage."""
    sums: Counter[str] = Counter()
    for row in stage.steps:
        sums.update(row.get(key) or {})
    total = sum(sums.values())
    return ", ".join(f"{name} {_percent(part, total)}" for name, part in sums.items() if total)


def _moment(time: float | str) -> str:
    if isinstance(time, str):
        return time[:16].replace("T", " ")
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M")


KINDS = {
    "weight": "E4M3 per tensor",
    "linear input": "E4M3 per tensor",
    "norm output": "E4M3 per tensor",
    "activation output": "E4M3 per tensor",
    "gradient": "E5M2 per tensor",
    "norm input": "E4M3 per group, kept",
    "activation input": "E4M3 per group, kept",
    "attention input": "E4M3 per group, kept",
}
"""What each kind of tensor is quantized to (docs/design.md has the picture)."""


def fp8_sections(run: RunFolder) -> list[dict[str, Any]]:
    """What the stages say of their FP8: one section per stage that ran in it.

    Returns:
        For each of these stages its name in ``stage``; ``converted`` and ``skipped``, rows
        ``(module, what it is now or why it stays)``; ``blocks``, rows ``(block, FP8 bytes per
        token, original bytes per token, their ratio)``; ``states``, the optimizer's bytes per
        parameter in a sentence, empty before the first step; ``rates``, rows ``(kind, format,
        values, saturated, underflowed)`` at the last step that was counted, ``rates_step`` or None;
        ``compared``, rows ``(block, largest output error, largest input gradient error, where it
        computes now)`` of all steps in which the monitor looked; ``warnings``, what the monitor
        found, with its step.
    """
    return [_fp8_section(stage) for stage in run.stages if stage.fp8]


def _fp8_section(stage: StageLog) -> dict[str, Any]:
    last: dict[str, Mapping[str, Any]] = {row["status"]: row for row in stage.fp8}
    modules, rates = last.get("blocks", {}), last.get("rates", {})
    return {
        "stage": stage.name,
        "converted": list(modules.get("converted", {}).items()),
        "skipped": list(modules.get("skipped", {}).items()),
        "blocks": [_block(block) for block in last.get("footprint", {}).get("blocks", [])],
        "states": _states(last.get("states", {})),
        "rates": [
            (
                kind,
                KINDS.get(kind, ""),
                f"{row['values']:,.0f}",
                f"{100 * row['saturated']:.4f}",
                f"{100 * row['underflowed']:.4f}",
            )
            for kind, row in sorted(rates.get("rates", {}).items())
        ],
        "rates_step": rates.get("step"),
        "compared": _compared(stage.monitor),
        "warnings": [f"step {r['step']}: {text}" for r in stage.monitor for text in r["warnings"]],
    }


def _compared(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    names = dict.fromkeys(name for row in rows for name in row["layers"])
    back = {name: row["step"] for row in rows for name in row["sent_back"]}
    return [
        (
            name,
            _largest(rows, name, "output_error"),
            _largest(rows, name, "input_gradient_error"),
            f"BF16 since step {back[name]}" if name in back else "FP8",
        )
        for name in names
    ]


def _largest(rows: list[dict[str, Any]], name: str, key: str) -> str:
    found = [row["layers"][name][key] for row in rows if key in row["layers"].get(name, {})]
    if not found:
        return ""
    return "not finite" if None in found else f"{max(found):.4f}"


def _block(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    fp8, original = row["fp8_bytes_per_token"], row["original_bytes_per_token"]
    ratio = f"{original / fp8:.2f}x" if fp8 else "nothing is kept (frozen)"
    return row["block"], f"{fp8:,.0f}", f"{original:,.0f}", ratio


def _states(row: Mapping[str, Any]) -> str:
    if not row.get("parameters"):
        return ""
    each, original = row["bytes"] / row["parameters"], row.get("original_bytes_per_parameter")
    measured = f"{row['optimizer']}: {each:.3f} bytes per parameter on this rank (measured)"
    if not original:
        return measured
    return (
        f"{measured}, against {original:.3f} of torch.optim.AdamW in BF16 runs (measured), "
        f"{original / each:.2f}x"
    )
