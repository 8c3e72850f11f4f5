"""Builds the tables of data, memory and throughput."""

from collections.abc import Mapping
from typing import Any

from coat_vlm.report.run_folder import RunFolder, StageLog
from coat_vlm.report.stages import format_duration
from coat_vlm.train.steady import add_up, average_rates

GIB = 2**30

Plan = Mapping[str, Mapping[str, float]]
"""Planned bytes of a GPU by part, for each stage; ``peak`` is the sum at the peak."""


def build_data_rows(run: RunFolder) -> list[tuple[str, ...]]:
    """Build rows ``(stage, source, rows, passes, samples %, tokens each, bad, loss)``.

    Samples are shares of an epoch. The loss is the last one on a validation source of the same
    name; other validation sources have rows of their own. Logs of early versions do not describe
    the sources.
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
    """Build rows ``(stage, measured, planned, measured / planned, parts)`` in GiB.

    Without a plan, rows are ``(stage, measured)``.
    """
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
    """Build the cells ``(column, text)`` of each stage; columns without any value are left out.

    All rates are those of the steady steps (:mod:`coat_vlm.train.steady`).
    """
    table = [_build_throughput_row(stage) for stage in run.stages if stage.steps]
    kept = [any(text != "-" for _, text in column) for column in zip(*table, strict=True)]
    return [[cell for cell, keep in zip(row, kept, strict=True) if keep] for row in table]


def list_shares(run: RunFolder) -> list[str]:
    """List the parts of the model's FLOPs and of a step's time, in words, by stage."""
    kinds = (("model FLOPs", "tflop"), ("phases of a step", "phases"))
    return [
        f"{stage.name}, {what}: {shares}"
        for stage in run.stages
        for what, key in kinds
        if (shares := _format_shares(stage, key))
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


def _format_shares(stage: StageLog, key: str) -> str:
    sums: dict[str, float] = {}
    for row in stage.steady:
        for name, value in (row.get(key) or {}).items():
            sums[name] = sums.get(name, 0.0) + value
    total = sum(sums.values())
    return ", ".join(f"{name} {_share(part, total)}" for name, part in sums.items() if total)


def _spent(rows: list[Any], key: str) -> str:
    """Format the number and the time of events; early versions did not log some times."""
    if not rows:
        return "-"
    timed = [row for row in rows if row.get(key) is not None]
    seconds = add_up(timed, key)
    spent = format_duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"
    return f"{len(rows)}, {spent}" if timed else str(len(rows))


def _share(part: float | None, total: float | None) -> str:
    return f"{100 * part / total:.1f}%" if part is not None and total else "-"


def _shown(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)
