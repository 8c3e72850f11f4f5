"""Builds the tables of data, speed and memory, and the FP8 section of each stage."""

from collections.abc import Mapping
from typing import Any

from coat_vlm.report.run_folder import RunFolder, StageLog
from coat_vlm.report.stages import format_duration
from coat_vlm.train.steady_rates import add_up, average_rates

GIB = 2**30

Plan = Mapping[str, float]
"""Planned peak memory of a GPU in bytes, for each stage."""


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
        bad = {name: one["rows"] for name, one in (last.get("bad_by_source") or {}).items()}
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
    """Format the number and the time of events."""
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
        last: dict[str, Mapping[str, Any]] = {row["status"]: row for row in stage.fp8}
        rates = last.get("rates", {})
        section = {
            "stage": stage.name,
            "states": _states(last.get("states", {})),
            "rates": [
                (
                    kind,
                    f"{row['values']:,.0f}",
                    f"{100 * row['saturated']:.4f}",
                    f"{100 * row['underflowed']:.4f}",
                )
                for kind, row in sorted(rates.get("rates", {}).items())
            ],
            "rates_step": rates.get("step"),
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


def _states(row: Mapping[str, Any]) -> str:
    if not row.get("parameters"):
        return ""
    each, original = row["bytes"] / row["parameters"], row["original_bytes_per_parameter"]
    return (
        f"{row['optimizer']}: {each:.3f} bytes per parameter on this rank, against "
        f"{original:.3f} of torch.optim.AdamW in BF16 runs, {original / each:.2f}x"
    )
