"""The speeds that kernels/README.md tells are those of the kept rows."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from coat_bench.cases import build_cases
from coat_bench.kernels import TARGET
from coat_bench.shapes import find_shape

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
README = (KERNELS / "README.md").read_text(encoding="utf-8")
BLOCKS = ("llama-2-7b", "siglip-so400m")
CASES = {(name, case.op, case.variant) for name in BLOCKS for case in build_cases(find_shape(name))}
"""A row of a variant that no op has any more is not documented."""
Row = dict[str, str]


COMMITS = {"kernels": "db4b536", "gemm": "d93c93a", "layer": "2c3a988"}


def rows_of(name: str) -> list[Row]:
    with (KERNELS / "benchmarks" / "results" / f"{name}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["commit"] == COMMITS[name]]
    if name != "kernels":
        return rows
    return [row for row in rows if (row["shape"], row["op"], row["variant"]) in CASES]


def table(first: str) -> dict[str, list[str]]:
    """The table whose head begins with this cell: first cell -> the other cells of its line."""
    lines = README[README.index(f"\n| {first} |") :].split("\n\n")[0].strip().splitlines()
    cells = [line.strip("| ").split(" | ") for line in [lines[0], *lines[2:]]]
    return {line[0].strip("`"): line[1:] for line in cells}


def fractions(op: str) -> dict[str, list[float | None]]:
    """Variant, without the names of a block's own layers -> the fraction in each block."""
    found: dict[str, list[float | None]] = {}
    for row in (row for row in rows_of("kernels") if row["op"] == op):
        variant = re.sub(r"^weights of (gate, up|fc1)", "weights", row["variant"])
        variant = re.sub(r"^(silu_mul|gelu_tanh)(, |$)", "", variant)
        cells = found.setdefault(variant, [None] * len(BLOCKS))
        cells[BLOCKS.index(row["shape"])] = float(row["fraction"])
    return found


def in_percent(values: Iterable[float | None]) -> str:
    return " / ".join("-" if value is None else f"{100 * value:.0f}%" for value in values)


OPS = table("op")
MEASURED = list(dict.fromkeys(row["op"] for row in rows_of("kernels")))


def test_the_table_of_ops_has_what_was_measured() -> None:
    assert set(OPS) - {"op", "scaled_mm"} == set(MEASURED)
    assert {row["shape"] for row in rows_of("kernels")} == set(BLOCKS)
    assert not any(row["problem"] for name in ("kernels", "gemm") for row in rows_of(name))


@pytest.mark.parametrize("op", MEASURED)
def test_fractions_of_a_copy(op: str) -> None:
    variants = fractions(op)
    cells = [f"{name} {in_percent(values)}" for name, values in variants.items()]
    alone = [in_percent(values) for values in variants.values()]
    assert OPS[op][-1] == (alone[0] if len(alone) == 1 else "; ".join(cells))


def test_which_ops_reach_the_target() -> None:
    reached, missed = set(), set()
    for op in MEASURED:
        values = [value for pair in fractions(op).values() for value in pair if value is not None]
        if min(values) >= TARGET:
            reached.add(op)
        if max(values) < TARGET:
            missed.add(op)
    for start, ops in (("in every\nsize measured:", reached), ("Less in every size:", missed)):
        sentence = README[README.index(start) :].split(". ")[0]
        assert set(re.findall(r"`(\w+)`", sentence)) == ops
    best = max(value or 0 for pair in fractions("quantize_gradient").values() for value in pair)
    assert f"`quantize_gradient` ({100 * best:.1f}% at best)" in README
    copies = {row["shape"]: float(row["copy_gbps"]) for row in rows_of("kernels")}
    llama, siglip = (f"{copies[block]:,.0f}" for block in BLOCKS)
    assert f"copy moves {llama} GB/s ({siglip} in SigLIP's run)" in README


def test_fixed_costs_are_where_a_line_through_two_sizes_meets_no_bytes() -> None:
    def cost(op: str, end: str) -> float:
        found = [
            (float(row["mib"]), float(row["us"]))
            for row in rows_of("kernels")
            if row["op"] == op and row["variant"].startswith("weights")
            if row["variant"].endswith(end)
        ]
        (large, slow), (small, fast) = found
        return fast - small * (slow - fast) / (large - small)

    costs = [cost("quantize_tensor", end) for end in ("rows", "transposed", "both")]
    text = f"about {min(costs):.0f} to {max(costs):.0f} us for `quantize_tensor`"
    assert f"{text} and {cost('tensor_scale', ''):.0f} us for `tensor_scale`" in README


def test_operations_of_a_block() -> None:
    def speed(implementation: str, shape: str) -> str:
        own = [
            row for row in rows_of("gemm")
            if (row["implementation"], row["shape"]) == (implementation, shape)
        ]  # fmt: skip
        operations = [2 * int(r["rows"]) * int(r["columns"]) * int(r["inner"]) for r in own]
        return f"{sum(operations) / sum(float(row['us']) for row in own) / 1e6:.0f}"

    cells = [
        f"{name} {' / '.join(speed(name, block) for block in BLOCKS)}"
        for name in ("fp8", "fp8_fast", "bf16")
    ]
    assert OPS["scaled_mm"][-1] == ", ".join(cells)


def test_the_layers() -> None:
    (_, head), *lines = table("fwd+bwd, against eager, saved").items()
    shapes = {
        "Llama-2-7B": "llama-2-7b", "Qwen2.5-7B": "qwen2.5-7b", "SigLIP-so400m": "siglip-so400m"
    }  # fmt: skip
    assert [title.split(", ")[0] for title, _ in lines] == [*shapes]
    for title, cells in lines:
        shape, size = title.removesuffix(" tokens").split(", ", 1)
        batch, length = (int(count.replace(",", "")) for count in size.split(" x "))
        run = {
            row["implementation"]: row
            for row in rows_of("layer")
            if (row["shape"], row["length"], row["attention"])
            == (shapes[shape], str(length), "default")
        }
        assert {int(row["tokens"]) for row in run.values()} == {batch * length}
        told: list[str] = []
        for row in (run[name.strip("`")] for name in head):
            ms, eager = (float(found["fwdbwd_ms"]) for found in (row, run["hf_eager"]))
            told.append(f"{ms:.2f} ms, {eager / ms:.2f}x, {float(row['saved_mib']):.0f} MiB")
        assert cells == told
