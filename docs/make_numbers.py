"""Writes the figures of README and documents from the rows of kernels/benchmarks/results.

A figure has a comment behind it: ``18,855<!--vlm_8b coat tok_s-->`` names a group of `GROUPS`, one
of its implementations and a column. ``coat / bf16`` is a ratio, ``coat - bf16`` a difference in
percent, ``coat +- bf16`` half of its 95% interval over seeds. Group and implementation may be left
out if they equal the comment before, on the same line. Decimals, a plus sign and a percent
sign before the comment stay as they are.

With ``--check`` nothing is written. The exit status is 1 if a figure differs from its row, if a
page shows a baseline of a group and not the fastest one, and if a later commit has rows of all
that a page shows of a group.
"""

import csv
import functools
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "kernels" / "benchmarks" / "results"

NUMBER = re.compile(r"([+-]?)(\d[\d,]*(?:\.(\d+))?)(%?)$")
MARKER = re.compile(r"<!--(\w[^>\n]*)-->")
RESULT_OF_NOTE = re.compile(r"peak|loss |CUDA graphs|in use|plan |gradient norm")
SIGNS = ("/", "-", "+-")
STUDENT = {2: 4.303, 4: 2.776, 14: 2.145}  # two-sided 95% by degrees of freedom

MEMBERS = {"adamw.csv": ["implementation", "codec"], "recipe.csv": ["recipe", "stage"]}
"""Columns that name what was measured; in other files `implementation` or `precision`."""
TIMES = {"step.csv": "ms", "layer.csv": "fwdbwd_ms", "adamw.csv": "ms"}
"""Files with other implementations, and the column of their times."""

Row = dict[str, str]


def _step(model: str, commit: str, **columns: str) -> Row:
    """Rows of step.csv: by default both passes of 4 samples on one GPU."""
    defaults = {
        "file": "step.csv", "gpu": "NVIDIA H200", "gpus": "1", "zero": "0", "passes": "both",
        "batch": "4", "settings": "attention default, accumulation 1",
    }  # fmt: skip
    return {**defaults, "model": model, "commit": commit, **columns}


_VLM = "siglip-so400m_qwen2.5-"
_AUTO = {"passes": "whole step", "settings": "attention auto, accumulation 1"}
_FLASH = {"passes": "whole step", "settings": "attention flash, accumulation 1"}
_LOW_BITS = {**_AUTO, "optimizer": "coat_low_bits"}
_80GB = {
    **_LOW_BITS, "batch": "1", "settings": "attention auto, accumulation 8",
    "older": "later rows had no limit of memory",
}  # fmt: skip
_PACKED = {"batch": "2", "settings": "attention default, accumulation 1; mixed samples, packed"}
_LORA = "attention default, accumulation 1; LoRA rank 64"

GROUPS: dict[str, Row] = {
    "layer": {
        "file": "layer.csv", "commit": "3fedc4a", "shape": "llama-2-7b", "attention": "default",
    },
    "vlm_8b": _step(f"{_VLM}7b", "3fedc4a"),
    "vlm_8b_step": _step(f"{_VLM}7b", "35630a9", **_LOW_BITS),
    "vlm_8b_80gb": _step(f"{_VLM}7b", "7505814", **_80GB, ms="2101.4000"),
    "vlm_8b_80gb_lean": _step(f"{_VLM}7b", "7505814", **_80GB, ms="2153.5000"),
    "vlm_8b_h100": _step(f"{_VLM}7b", "5229a29", **{**_80GB, "gpu": "NVIDIA H100 80GB HBM3"}),
    "vlm_8b_ccf50c0": _step(f"{_VLM}7b", "ccf50c0"),
    "vlm_8b_step_ccf50c0": _step(f"{_VLM}7b", "ccf50c0", **_LOW_BITS, older="a history"),
    "llama_zero2": _step("llama-2-7b", "dc755f9", **_FLASH, gpus="4", zero="2", batch="8"),
    "llama_zero3": _step("llama-2-7b", "dc755f9", **_FLASH, gpus="4", zero="3", batch="8"),
    "vlm_1b": _step(f"{_VLM}0.5b", "5d3ba05"),
    "vlm_1b_zero2": _step(f"{_VLM}0.5b", "5d3ba05", **_AUTO, gpus="2", zero="2"),
    "vlm_2b_zero2": _step(f"{_VLM}1.5b", "5d3ba05", **_AUTO, gpus="2", zero="2"),
    "vlm_2b_zero3": _step(f"{_VLM}1.5b", "1573c02", **_FLASH, gpus="2", zero="3"),
    "vlm_8b_zero3": _step(f"{_VLM}7b", "1573c02", **_FLASH, gpus="2", zero="3", batch="2"),
    "qwen2_5_vl_packed": _step("qwen2.5-vl-7b", "90f77aa1", **_PACKED),
    "qwen3_vl_packed": _step("qwen3-vl-8b", "90f77aa1", **_PACKED),
    "qwen3_vl_30b_batch1": _step("qwen3-vl-30b-a3b", "65825ee5", settings=_LORA, batch="1"),
    "qwen3_vl_30b_batch2": _step("qwen3-vl-30b-a3b", "65825ee5", settings=_LORA, batch="2"),
    "recipes": {"file": "recipe.csv", "commit": "e93fbdf"},
    "recipe_lora": {"file": "recipe.csv", "commit": "35630a9"},
    "adamw_fp32": {"file": "adamw.csv", "commit": "06f4ade", "param_dtype": "float32"},
    "adamw_bf16": {"file": "adamw.csv", "commit": "06f4ade", "param_dtype": "bfloat16"},
    "one_pass": {"file": "single_pass_100m_results.csv", "measure": "held-out loss"},
    "one_pass_training": {"file": "single_pass_100m_results.csv", "measure": "training loss"},
    "one_pass_348m": {"file": "single_pass_350m_results.csv", "measure": "held-out loss"},
    "one_pass_348m_training": {"file": "single_pass_350m_results.csv", "measure": "training loss"},
    "fine_tuning": {
        "file": "finetune.csv", "commit": "c005eea1", "steps": "200",
        "older": "4e7061fa is before it",
    },
    "layouts": {"file": "long.csv", "commit": "ebde29c", "model": "vila_sft, 1.99B"},
    "long_8b_384": {"file": "long.csv", "commit": "2b37041", "frames": "384"},
    "long_8b_512": {"file": "long.csv", "commit": "ebde29c", "frames": "512"},
    "long_2b_1024": {"file": "long.csv", "commit": "ada1185", "frames": "1024"},
    "longest_bf16": {"file": "long.csv", "commit": "ada1185", "tokens": "19456"},
    "longest_coat": {"file": "long.csv", "commit": "2c3a988", "tokens": "71680"},
}  # fmt: skip
"""Rows that were measured side by side: a file, and values of its columns. `older` says why a page
shows them although a later commit has rows of the same."""


@functools.cache
def read(file: str) -> list[Row]:
    """The rows of a file, with the columns that are computed from others."""
    with (RESULTS / file).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        columns = MEMBERS.get(file) or [
            "implementation" if "implementation" in row else "precision"
        ]
        name = "_".join(row[column] for column in columns).replace(" init_from=null", "")
        name = name.replace("coat_paper", "coat").replace("_tensorwise_compile", "")
        row["member"] = re.sub(r"[, ]+", "_", name)
        parts = (row.get("note") or "").replace(", bf16_forward_first 0", "").split("; ")
        row["settings"] = "; ".join(part for part in parts if not RESULT_OF_NOTE.search(part))
        if row.get("tok_s"):
            row["tok_s_gpu"] = str(float(row["tok_s"]) / int(row["gpus"]))
        if row.get("ms"):
            row["s"] = str(float(row["ms"]) / 1000)
        if "optimizer" in row:
            row["passes"] = "both" if row["optimizer"] == "none" else "whole step"
    return rows


def matching(group: Row, *, commit: bool = True) -> list[Row]:
    """The rows of a group, or of the same configuration at any commit."""
    free = {"file", "older"} | (set() if commit else {"commit", "ms"})
    wanted = {key: value for key, value in group.items() if key not in free}
    return [row for row in read(group["file"]) if all(row[key] == wanted[key] for key in wanted)]


def values(name: str, member: str, column: str) -> dict[str, float]:
    """One value by seed; rows without seeds have one in all."""
    rows = [row for row in matching(GROUPS[name]) if row["member"] == member]
    by_seed = {row.get("seed", ""): float(row[column]) for row in rows}
    if not rows or len(by_seed) < len(rows):
        raise ValueError(f"group {name!r} has {len(rows)} rows of {member!r}, not one (per seed)")
    return by_seed


def figure(name: str, member: str, sign: str, other: str, column: str) -> float:
    """The figure of a comment."""
    shown = values(name, member, column)
    if not sign:
        return statistics.mean(shown.values())
    others = values(name, other, column)
    ratios = [shown[seed] / others[seed] for seed in shown if seed in others]
    if sign == "/":
        return statistics.mean(ratios)
    percent = [100 * (ratio - 1) for ratio in ratios]
    if sign == "-":
        return statistics.mean(percent)
    return STUDENT[len(percent) - 1] * statistics.stdev(percent) / len(percent) ** 0.5


def write(line: str, shown: dict[str, set[str]]) -> str:
    """A line with the figures of its rows; adds the implementations that it shows, by group."""
    parts, end, name, member = [], 0, "", ""
    for marker in MARKER.finditer(line):
        *words, column = marker[1].split()
        sign, other = words[-2:] if len(words) > 2 and words[-2] in SIGNS else ("", "")
        words = words[:-2] if sign else words
        member = words.pop() if words else member
        name = words.pop() if words else name
        number = NUMBER.search(before := line[end : marker.start()])
        if number is None or name not in GROUPS:
            raise ValueError(f"{marker[0]}: no number before it, or no such group")
        value = figure(name, member, sign, other, column)
        value *= 100 if number[4] and sign in ("", "/") else 1
        plus = "+" if number[1] and value >= 0 else ""
        new = f"{plus}{value:,.{len(number[3] or '')}f}{number[4]}"
        parts += [before[: number.start()], new, marker[0]]
        shown.setdefault(name, set()).update({member, other} - {""})
        end = marker.end()
    return "".join([*parts, line[end:]])


def problems(name: str, shown: set[str]) -> Iterator[str]:
    """What a page that shows these implementations of a group leaves out."""
    group = GROUPS[name]
    time = TIMES.get(group["file"], "")
    baselines = {
        row["member"]: float(row[time])
        for row in matching(group)
        if time and row.get(time) and not row["member"].startswith("coat")
    }
    if shown & baselines.keys():
        fastest = min(baselines, key=lambda member: baselines[member])
        if fastest not in shown:
            yield f"{name}: the fastest baseline of these rows is {fastest}"
    later: dict[str, set[str]] = {}
    seen = False
    for row in matching(group, commit=False) if "commit" in group and "older" not in group else []:
        seen = seen or row["commit"] == group["commit"]
        if seen and row["commit"] != group["commit"]:
            later.setdefault(row["commit"], set()).add(row["member"])
    for commit, members in later.items():
        if members >= shown:
            yield f"{name}: {commit} has later rows; show them, or say why not"


def main() -> int:
    """Write or check the pages."""
    found = []
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text, shown = page.read_text(encoding="utf-8"), dict[str, set[str]]()
        lines = text.split("\n")
        written = [write(line, shown) for line in lines]
        where = page.relative_to(ROOT)
        changed = [new for old, new in zip(lines, written, strict=True) if old != new]
        if "--check" in sys.argv:
            found += [f"{where}: the row has other figures: {line}" for line in changed]
        elif changed:
            page.write_text("\n".join(written), encoding="utf-8")
        found += [
            f"{where}: {problem}" for name in shown for problem in problems(name, shown[name])
        ]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
