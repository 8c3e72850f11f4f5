"""Writes the figures of README and documents from the rows of kernels/benchmarks/results.

A figure is followed by a comment: ``18,855<!--vlm_8b coat tok_s-->`` names a group of
make_numbers.yaml, one of its implementations and a column. ``coat / bf16`` is a ratio, ``coat -
bf16`` a difference in percent (of accuracies: in points), ``coat +- bf16`` half of its 95% interval
over seeds; the second may be ``group:bf16``. Group and implementation may be left out if they equal
the comment before, on the same line. Decimals, a plus sign and a percent sign before the comment
stay as they are.

With ``--check`` nothing is written. The exit status is 1 if a figure differs from its row, if a
page shows a baseline of a group and not the fastest one, and if a later commit has rows of all
that a page shows of a group. Results and experiments must name the commits of their rows.
"""

import csv
import functools
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "kernels" / "benchmarks" / "results"

NUMBER = re.compile(r"([+-]?)(\d[\d,]*(?:\.(\d+))?)(%?)$")
MARKER = re.compile(r"<!--(\w[^>\n]*)-->")
RESULT_OF_NOTE = re.compile(r"peak|loss |CUDA graphs|in use|plan |gradient norm")
SIGNS = ("/", "-", "+-")
STUDENT = {2: 4.303, 4: 2.776, 14: 2.145}  # two-sided 95% by degrees of freedom

MEMBERS = {
    "adamw.csv": "implementation codec", "block_scales.csv": "implementation group",
    "fork.csv": "variant", "kernels.csv": "op",
    "real_parts.csv": "precision evaluated_in", "recipe.csv": "recipe stage",
    "sums.csv": "sums micro_batches",
}  # fmt: skip
"""Columns that name what was measured; in other files `implementation` or `precision`."""
ACCURACIES = {"tiny_imagenet", "cifar10", "presence", "choice", "last_words"}
"""Columns in percent, whose differences are in points."""
TIMES = {"step.csv": "ms", "layer.csv": "fwdbwd_ms", "adamw.csv": "ms"}
"""Files with other implementations, and the column of their times."""

Row = dict[str, str]


def _groups() -> dict[str, Row]:
    """The groups of make_numbers.yaml; all values are text."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    groups: dict[str, Row] = {}
    for name, group in yaml.load(text, yaml.BaseLoader).items():
        groups[name] = {**groups.get(group.pop("like", ""), {}), **group}
    return groups


GROUPS = _groups()


@functools.cache
def read(file: str) -> list[Row]:
    """The rows of a file, with the columns that are computed from others."""
    with (RESULTS / file).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    if file.startswith("decoder_"):
        rows = list(_ends_of_runs(rows))
    for row in rows:
        columns = MEMBERS.get(file, "implementation" if "implementation" in row else "precision")
        name = "_".join(row[column] for column in columns.split()).replace(" init_from=null", "")
        name = name.replace("coat_paper", "coat").replace("_tensorwise_compile", "")
        row["member"] = re.sub(r"[, ]+", "_", name)
        parts = (row.get("note") or "").replace(", bf16_forward_first 0", "").split("; ")
        row["settings"] = "; ".join(part for part in parts if not RESULT_OF_NOTE.search(part))
        if row.get("tok_s"):
            row["tok_s_gpu"] = str(float(row["tok_s"]) / int(row.get("gpus", 1)))
        if row.get("ms"):
            row["s"] = str(float(row["ms"]) / 1000)
        if "optimizer" in row:
            row["passes"] = "both" if row["optimizer"] == "none" else "whole"
    return rows


def _ends_of_runs(rows: list[Row]) -> Iterator[Row]:
    """One row per run: its last step, with the mean training loss of the last 20 steps."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["precision"], row["seed"]), []).append(row)
    for run in runs.values():
        losses = [float(row["training_loss"]) for row in run[-20:]]
        yield {**run[-1], "training_loss": str(statistics.mean(losses))}


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
    group, _, other = other.rpartition(":")
    others = values(group or name, other, column)
    ratios = [shown[seed] / others[seed] for seed in shown if seed in others]
    if sign == "/":
        return statistics.mean(ratios)
    differences = [100 * (ratio - 1) for ratio in ratios]
    if column in ACCURACIES:
        differences = [shown[seed] - others[seed] for seed in shown if seed in others]
    if sign == "-":
        return statistics.mean(differences)
    return STUDENT[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5


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
        shown.setdefault(name, set()).add(member)
        if sign:
            group, _, other = other.rpartition(":")
            shown.setdefault(group or name, set()).add(other)
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
    pages = [
        ROOT / "README.md",
        ROOT / "kernels" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
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
        found += [f"{where}: {line}" for name in shown for line in problems(name, shown[name])]
        if where.stem == "results" or where.parent.stem == "experiments":
            commits = {GROUPS[name].get("commit", "") for name in shown}
            missing = {commit for commit in commits if commit not in MARKER.sub("", text)}
            found += [f"{where}: the page does not name commit {name}" for name in sorted(missing)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
