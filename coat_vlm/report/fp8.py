"""The report's FP8 section: what is FP8, the bytes kept against the original, saturation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coat_vlm.report.run_folder import RunFolder, StageLog

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Section:
    """What one stage says of its FP8."""

    stage: str
    converted: list[tuple[str, str]]
    """(module, what it is now)."""
    skipped: list[tuple[str, str]]
    """(module, why it stays)."""
    blocks: list[tuple[str, str, str, str]]
    """(block, FP8 bytes per token, original bytes per token, their ratio)."""
    states: str
    """The optimizer's bytes per parameter in a sentence; empty before the first step."""
    rates: list[tuple[str, str, str, str, str]]
    """(kind, format, values, saturated, underflowed), at the last step that was counted."""
    rates_step: int | None
    compared: list[tuple[str, str, str, str]]
    """(block, largest output error, largest input gradient error, where it computes now), of all
    steps in which the monitor looked."""
    warnings: list[str]
    """What the monitor found, with its step."""


def fp8_sections(run: RunFolder) -> list[Fp8Section]:
    """One section per stage that ran in FP8; empty for BF16 and FP32 runs."""
    return [_section(stage) for stage in run.stages if stage.fp8]


def _section(stage: StageLog) -> Fp8Section:
    last: dict[str, Mapping[str, Any]] = {row["status"]: row for row in stage.fp8}
    blocks = last.get("blocks", {})
    rates = last.get("rates", {})
    return Fp8Section(
        stage=stage.name,
        converted=list(blocks.get("converted", {}).items()),
        skipped=list(blocks.get("skipped", {}).items()),
        blocks=[_block(block) for block in last.get("footprint", {}).get("blocks", [])],
        states=_states(last.get("states", {})),
        rates=_rates(rates.get("rates", {})),
        rates_step=rates.get("step"),
        compared=_compared(stage.monitor),
        warnings=[
            f"step {row['step']}: {text}" for row in stage.monitor for text in row["warnings"]
        ],
    )


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


def _rates(rates: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str, str, str]]:
    return [
        (
            kind,
            KINDS.get(kind, ""),
            f"{row['values']:,.0f}",
            f"{100 * row['saturated']:.4f}",
            f"{100 * row['underflowed']:.4f}",
        )
        for kind, row in sorted(rates.items())
    ]
