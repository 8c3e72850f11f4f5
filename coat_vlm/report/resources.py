"""Builds the tables of data, memory and throughput, and the FP8 section of each stage."""

from collections.abc import Mapping
from typing import Any

from coat_vlm.report.run_folder import RunFolder, StageLog
from coat_vlm.report.stages import format_duration
from coat_vlm.train.steady_rates import add_up, average_rates

GIB = 2**30

Plan = Mapping[str, Mapping[str, float]]
"""Planned bytes of a GPU by part, for each stage; ``peak`` is the sum at the peak."""


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
                stage.name,
                name,
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


def build_memory_rows(run: RunFolder, plan: Plan) -> list[tuple[str, ...]]:
    """Build rows ``(stage, measured, planned, ratio, parts)`` in GiB; two cells without a plan."""
    table = []
    for stage in run.stages:
        measured = max((float(row.get("peak_memory_mb") or 0) for row in stage.steps), default=0)
        if not measured:
            continue
        parts = dict(plan.get(stage.name) or {})
        planned = parts.pop("peak", None)
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        ratio = planned and measured * 1e6 / planned
        planned_gib = planned and planned / GIB
        row = (stage.name, f"{measured * 1e6 / GIB:.2f}", _shown(planned_gib, "{:.2f}"))
        row = (*row, _shown(ratio, "{:.2f}"), listed or "-")
        table.append(row if plan else row[:2])
    return table


def build_throughput_rows(run: RunFolder) -> list[list[tuple[str, str]]]:
    """Build the cells ``(column, text)`` of each stage, with the rates of its steady steps.

    Columns without any value are left out.
    """
    table = [_build_throughput_row(stage) for stage in run.stages if stage.steps]
    kept = [any(text != "-" for _, text in column) for column in zip(*table, strict=True)]
    return [[cell for cell, keep in zip(row, kept, strict=True) if keep] for row in table]


def list_shares(run: RunFolder) -> list[str]:
    """List the parts of the model's FLOPs in words, by stage."""
    return [
        f"{stage.name}, model FLOPs: {shares}"
        for stage in run.stages
        if (shares := _format_shares(stage))
    ]


def _build_throughput_row(stage: StageLog) -> list[tuple[str, str]]:
    steady, apart = stage.steady, stage.apart
    rates = average_rates(steady, stage.ranks)
    tflop = rates.get("tflop_per_s_per_gpu") if stage.on_gpu else None
    cells = [
        ("stage", stage.name),
        ("steady steps", f"{len(steady)} of {len(stage.steps)}"),
        ("tokens/s", _shown(rates.get("tokens_per_s"), "{:,.0f}")),
        ("of them vision", _share(rates.get("vision_tokens_per_s"), rates.get("tokens_per_s"))),
        ("samples/s", _shown(rates.get("samples_per_s"), "{:.3g}")),
        ("TFLOP/s per GPU", _shown(tflop, "{:.3g}")),
        ("seconds per step", _shown(rates.get("step_s"), "{:.3g}")),
        ("waiting for data", _share(rates.get("wait"), 1.0)),
        ("imbalance of ranks", _share(rates.get("imbalance"), 1.0)),
    ]
    for kind in ("first", "measured", "capturing"):
        cells.append((f"{kind} steps", _spent(apart.get(kind, []), "step_s")))
    cells += [
        ("saving", _spent(stage.saves, "save_s")),
        ("validation", _spent(stage.validations, "val_s")),
        ("evaluation", _spent(stage.evaluations, "eval_s")),
    ]
    return cells


def _format_shares(stage: StageLog) -> str:
    sums: dict[str, float] = {}
    for row in stage.steady:
        for name, value in (row.get("tflop") or {}).items():
            sums[name] = sums.get(name, 0.0) + value
    total = sum(sums.values())
    return ", ".join(f"{name} {_share(part, total)}" for name, part in sums.items() if total)


def _spent(rows: list[Any], key: str) -> str:
    """Format the number and the time of events."""
    if not rows:
        return "-"
    seconds = add_up(rows, key)
    return f"{len(rows)}, " + (format_duration(seconds) if seconds >= 10 else f"{seconds:.2g} s")


def _share(part: float | None, total: float | None) -> str:
    return f"{100 * part / total:.1f}%" if part is not None and total else "-"


def _shown(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


KINDS = {
    "weight": "E4M3 per tensor",
    "linear input": "E4M3 per tensor",
    "norm output": "E4M3 per tensor",
    "activation output": "E4M3 per tensor",
    "gradient": "E5M2 per tensor",
    "norm input": "E4M3 per group, saved",
    "activation input": "E4M3 per group, saved",
}
"""FP8 format of each kind of tensor (:mod:`coat_vlm.fp8`)."""


def build_fp8_sections(run: RunFolder) -> list[dict[str, Any]]:
    """Build one section per stage that ran in FP8; the template names the columns of its tables."""
    sections = []
    for stage in run.stages:
        if not stage.fp8:
            continue
        last: dict[str, Mapping[str, Any]] = {row["status"]: row for row in stage.fp8}
        modules, rates = last.get("blocks", {}), last.get("rates", {})
        warnings = [f"step {row['step']}: {w}" for row in stage.monitor for w in row["warnings"]]
        section = {
            "stage": stage.name,
            "converted": list(modules.get("converted", {}).items()),
            "skipped": list(modules.get("skipped", {}).items()),
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
            "warnings": warnings,
        }
        sections.append(section)
    return sections


def _compared(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Build rows (block, largest output error, largest input gradient error)."""
    names = dict.fromkeys(name for row in rows for name in row["layers"])
    keys = ("output_error", "input_gradient_error")
    return [(name, *(_largest(rows, name, key) for key in keys)) for name in names]


def _largest(rows: list[dict[str, Any]], name: str, key: str) -> str:
    found = [row["layers"][name][key] for row in rows if key in row["layers"].get(name, {})]
    if not found:
        return ""
    return "not finite" if None in found else f"{max(found):.4f}"


def _states(row: Mapping[str, Any]) -> str:
    if not row.get("parameters"):
        return ""
    each, original = row["bytes"] / row["parameters"], row["original_bytes_per_parameter"]
    return (
        f"{row['optimizer']}: {each:.3f} bytes per parameter on this rank (measured), against "
        f"{original:.3f} of torch.optim.AdamW in BF16 runs (measured), {original / each:.2f}x"
    )
