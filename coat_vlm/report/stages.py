"""The facts of a run in words: its header, and one column per stage."""

from collections import Counter
from datetime import datetime
from statistics import median
from typing import Any

from coat_vlm.config import MODULES
from coat_vlm.report.run_folder import RunFolder, StageLog


def header_facts(run: RunFolder) -> list[tuple[str, str]]:
    """Label and text of each fact in the report's header."""
    starts = [stage.start for stage in run.stages if stage.start]
    start = starts[-1] if starts else {}
    rows = [row for stage in run.stages for row in stage.steps]
    times = [row["time"] for row in rows if "time" in row]
    versions = start.get("versions") or {}
    facts = [
        ("precision", start.get("precision") or run.recipe.get("precision")),
        ("device", _device(start)),
        ("ZeRO stage", start.get("zero_stage", run.recipe.get("zero_stage"))),
        ("seed", run.recipe.get("seed")),
        ("training", _period(times)),
        ("training time", _training_time(rows)),
        ("commit", run.training.get("commit")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [(label, str(value)) for label, value in facts if value not in (None, "")]


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
    facts = [
        ("steps", f"{last['step']} of {last.get('total_steps', '?')}" if last else ""),
        ("batch size", config.get("batch_size")),
        ("data", ", ".join(_source(source) for source in config.get("data") or [])),
        ("template", config.get("template")),
        ("LoRA", _lora(config.get("lora") or {})),
        ("schedule", config.get("schedule")),
        ("train loss, last 20 steps", _mean_of_last(stage, "loss")),
        ("validation loss", _validation(stage)),
        ("last questions in training", _evaluation(stage)),
        ("tokens/s, median", _median(stage, "tokens_per_s")),
        ("of them vision", _vision_share(stage)),
        ("samples/s, median", _median(stage, "samples_per_s")),
        ("TFLOP/s per GPU, median", _median(stage, "tflop_per_s_per_gpu")),
        ("model FLOPs", _shares(stage, "tflop")),
        ("waiting for data", _waiting(stage)),
        ("phases of a step", _shares(stage, "phases")),
        ("peak memory", _peak_memory(stage)),
        ("bad samples", last.get("bad_samples", "")),
        ("wall time", _wall_time(stage)),
    ]
    return {
        "name": stage.name,
        "status": "finished" if stage.end else "not finished" if stage.steps else "not started",
        "facts": [(label, str(value)) for label, value in facts if value not in (None, "")],
        "modules": [
            _module(stage, config, name)
            for name in MODULES
            if name in (stage.start.get("total") or MODULES)  # a text-only run has one alone
        ],
    }


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


def _lora(settings: dict[str, Any]) -> str:
    names = ("rank", "alpha", "dropout")
    return ", ".join(f"{name} {settings[name]:g}" for name in names if name in settings)


def _mean_of_last(stage: StageLog, key: str) -> str:
    values = [float(row[key]) for row in stage.steps[-20:] if row.get(key) is not None]
    return f"{sum(values) / len(values):.4f}" if values else ""


def _median(stage: StageLog, key: str) -> str:
    values = [float(row[key]) for row in stage.steps if row.get(key) is not None]
    return count(median(values)) if values else ""


def _validation(stage: StageLog) -> str:
    losses = stage.validations[-1].get("losses") or {} if stage.validations else {}
    return ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())


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
    vision = sum(row.get("vision_tokens") or 0 for row in stage.steps)
    tokens = sum(row.get("tokens") or 0 for row in stage.steps if "vision_tokens" in row)
    return f"{100 * vision / tokens:.1f}%" if vision else ""


def _shares(stage: StageLog, key: str) -> str:
    """The parts of what a key of the steps holds, in percent of their sum over the stage."""
    sums: Counter[str] = Counter()
    for row in stage.steps:
        sums.update(row.get(key) or {})
    total = sum(sums.values())
    return ", ".join(f"{name} {100 * part / total:.1f}%" for name, part in sums.items() if total)


def _waiting(stage: StageLog) -> str:
    total = sum(float(row.get("step_s") or 0) for row in stage.steps)
    waited = sum(float(row.get("data_wait_s") or 0) for row in stage.steps)
    return f"{100 * waited / total:.1f}% of the time" if total else ""


def _peak_memory(stage: StageLog) -> str:
    peaks = [float(row["peak_memory_mb"]) for row in stage.steps if row.get("peak_memory_mb")]
    return f"{max(peaks) * 1e6 / 2**30:.2f} GiB" if peaks else ""


def _wall_time(stage: StageLog) -> str:
    seconds = (stage.end or {}).get("wall_s")
    return "" if seconds is None else duration(seconds)


def _training_time(rows: list[dict[str, Any]]) -> str:
    return duration(sum(float(row.get("step_s") or 0) for row in rows)) if rows else ""


def _device(start: dict[str, Any]) -> str:
    if not start.get("device"):
        return ""
    ranks = start.get("world_size") or 1
    return str(start["device"]) if ranks == 1 else f"{ranks} x {start['device']}"


def _period(times: list[Any]) -> str:
    texts = [_moment(time) for time in (times[0], times[-1])] if times else []
    return " to ".join(texts)


def _moment(time: float | str) -> str:
    if isinstance(time, str):
        return time[:16].replace("T", " ")
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M")
