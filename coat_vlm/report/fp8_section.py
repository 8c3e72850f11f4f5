"""Builds the FP8 section of each stage."""

from collections.abc import Mapping
from typing import Any

from coat_vlm.report.run_folder import RunFolder

KINDS = {
    "weight": "E4M3 per tensor",
    "linear input": "E4M3 per tensor",
    "norm output": "E4M3 per tensor",
    "activation output": "E4M3 per tensor",
    "gradient": "E5M2 per tensor",
    "norm input": "E4M3 per group, saved",
    "activation input": "E4M3 per group, saved",
    "attention input": "INT8 per group, saved",
}
"""FP8 format of each kind of tensor (:mod:`coat_vlm.fp8`)."""


def build_fp8_sections(run: RunFolder) -> list[dict[str, Any]]:
    """Build one section per stage that ran in FP8.

    Returns:
        Per stage: its name ``stage``; ``converted`` and ``skipped``, rows ``(module, new class or
        reason)``; ``blocks``, rows ``(block, FP8 bytes per token, original bytes per token,
        ratio)``; ``states``, a sentence with the optimizer's bytes per parameter, empty before the
        first step; ``rates``, rows ``(kind, format, values, saturated, underflowed)`` of the last
        measured step ``rates_step`` (or None); ``compared``, rows ``(block, largest output error,
        largest input gradient error, current precision)`` over all monitored steps; ``warnings``,
        the monitor's warnings with their steps.
    """
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
            "warnings": warnings,
        }
        sections.append(section)
    return sections


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
    ratio = f"{original / fp8:.2f}x" if fp8 else "nothing is saved (frozen)"
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
