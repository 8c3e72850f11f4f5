"""The rows of the step benchmark as a table."""

from collections.abc import Sequence

from coat_bench.rows import number, table
from coat_bench.step_case import StepRow


def format_rows(rows: Sequence[StepRow]) -> str:
    """Markdown: one line per implementation, optimizer, ZeRO stage and batch."""
    head = ["implementation", "optimizer", "ZeRO", "batch", "tokens", "ms", "tokens/s", "peak GB"]
    lines = []
    for row in rows:
        cells = [
            row.implementation,
            row.optimizer,
            "-" if row.optimizer == "none" else str(row.zero),
        ]
        cells += [str(row.batch), f"{row.tokens:,}", number(row.ms, 1)]
        cells += ["-" if row.tok_s is None else f"{row.tok_s:,.0f}", number(row.peak_gb, 2)]
        lines.append([*cells, row.problem or row.note])
    return table([*head, "note"], lines)
