"""Draws the charts of docs/figures from the rows of kernels/benchmarks/results.

An SVG has light and dark colors and text that is readable at a width of 400 pixels. With
``--check`` nothing is written, and the exit status is 1 if a chart is stale. ``--plan`` first plans
the memory of an 8B step again (a minute), which the chart ``memory_8b.svg`` shows.
"""

import csv
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from make_numbers import RESULTS, values
from pages import write_pages

FIGURES = Path(__file__).resolve().parent / "figures"
WIDTH = 640
STYLE = """
svg { --ink: #1f2937; --faint: #6b7280; --line: #c3c9d2; --paper: #ffffff; --box: #f3f4f6;
  --bf16: #6b7280; --other: #c2410c; --own: #1d4ed8; --saved: #dbeafe;
  --teal: #0f766e; --sky: #60a5fa }
@media (prefers-color-scheme: dark) { svg { --ink: #e5e7eb; --faint: #9ca3af; --line: #4b5563;
  --paper: #161b22; --box: #232a35; --bf16: #9ca3af; --other: #fb923c; --own: #7cb1ff;
  --saved: #1e3a6b; --teal: #2dd4bf; --sky: #3b82f6 } }
text { font: 18px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
.title { font-weight: 600; font-size: 20px }
.faint { fill: var(--faint) }
.bf16 { fill: var(--bf16) } .other { fill: var(--other) } .own { fill: var(--own) }
.strong { font-weight: 600 }
.line { stroke: var(--line); fill: none }
.curve { fill: none; stroke-width: 3 }
"""
"""Colors are variables, which the dark scheme of the reader changes."""

Point = tuple[float, float]


class Drawing:
    """The elements of an SVG."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title, self.elements = height, title, list[str]()

    def text(self, at: Point, content: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text at its baseline."""
        x, y = at
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">'
            f"{escape(content)}</text>"
        )

    def box(self, at: Point, size: Point, fill: str, stroke: str = "none") -> None:
        """Draw a rectangle; colors are names of STYLE's variables."""
        (x, y), (w, h) = at, size
        edge = "" if stroke == "none" else f' stroke="var(--{stroke})" stroke-width="1.5"'
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" '
            f'fill="var(--{fill})"{edge}/>'
        )

    def path(self, points: Sequence[Point], extra: str = 'class="line"') -> None:
        """Draw a line through points."""
        self.elements.append(f'<path d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}" {extra}/>')

    def circle(self, at: Point, color: str) -> None:
        """Draw a dot."""
        x, y = at
        self.elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" class="{color}"/>')

    def bar(self, at: Point, size: Point, color: str) -> None:
        """Draw a bar in the color of an implementation."""
        (x, y), (w, h) = at, size
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:.1f}" height="{h:g}" class="{color}"/>'
        )

    def write(self) -> str:
        """Return the file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}"'
        lines = [f'{head} width="{WIDTH}" height="{self.height}" role="img">']
        lines += [f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>"]
        size = f'width="{WIDTH}" height="{self.height}"'
        lines += [f'<rect {size} rx="10" fill="var(--paper)"/>', *self.elements, "</svg>"]
        return "\n".join(lines) + "\n"


IMPLEMENTATIONS = (
    ("coat", "own"),
    ("torchao FP8 and Liger's loss, compiled", "other"),
)
"""Names and colors: ours, and the fastest baseline."""


def draw_speed() -> str:
    """Tokens per second against peak memory: three implementations of three models on one GPU."""
    title = "Forward and backward pass on one H200"
    out = Drawing(470, f"{title}: tokens per second against peak memory")
    (left, right), (top, bottom) = (50, 620), (112, 404)

    def place(gb: float, rate: float) -> Point:
        return left + (right - left) * gb / 125, bottom - (bottom - top) * rate / 20e3

    out.text((20, 32), title, "title")
    x = 20.0
    for name, color in IMPLEMENTATIONS:
        out.circle((x + 7, 56), color)
        out.text((x + 21, 62), name)
        x += 42 + 9.4 * len(name)
    out.text((20, 94), "thousand tokens/s", "faint")
    for rate in range(0, 21, 5):
        out.path([place(0, 1e3 * rate), place(125, 1e3 * rate)])
        x, y = place(0, 1e3 * rate)
        out.text((x - 8, y + 6), str(rate), "faint", "end")
    for gb in range(0, 121, 20):
        out.text((place(gb, 0)[0], bottom + 24), str(gb), "faint", "middle")
    out.text((right, bottom + 52), "peak memory, GB", "faint", "end")
    out.path([place(80, 0), place(80, 20e3)], 'class="line" stroke-dasharray="6 5"')
    out.text((place(80, 0)[0], top - 8), "80 GB", "faint", "middle")
    groups = {
        "qwen2_5_vl_packed": ("Qwen2.5-VL-7B", -8, ("coat", "liger_loss_torchao_tower")),
        "qwen3_vl_packed": ("Qwen3-VL-8B", 24, ("coat", "liger_loss_torchao_tower")),
        "vlm_8b": ("SigLIP + Qwen2.5-7B", -2, ("coat", "liger_loss_torchao_tower")),
    }
    for group, (name, down, members) in groups.items():
        columns = [
            [values(group, m, column)[""] for m in members] for column in ("peak_gb", "tok_s")
        ]
        points = [place(*pair) for pair in zip(*columns, strict=True)]
        out.path(points, 'class="line" stroke-width="2.5"')
        for (_, color), point in zip(IMPLEMENTATIONS, points, strict=False):
            out.circle(point, color)
        x, y = points[0]
        out.text((x - 14, y + down), name, anchor="end")
    return out.write()


SHAPE = {"hidden": 4096, "mlp": 11008, "group": 16}
"""Llama-2-7B, and the channels per scale."""


def draw_block() -> str:
    """What a decoder layer saves for backward, in bytes per token, and the measured totals."""
    hidden, mlp = SHAPE["hidden"], SHAPE["mlp"]
    saved = hidden + hidden // SHAPE["group"]
    gated = 2 * (mlp + mlp // SHAPE["group"])
    out = Drawing(700, "What an FP8 block saves for the backward pass")
    out.text((20, 32), "What a coat block saves for backward", "title")
    out.text((20, 60), "Llama-2-7B, kB per token", "faint")
    steps = [
        ("RMSNorm, QKV GEMM, RoPE", "input in FP8", saved),
        ("attention", "q, k, v in BF16 *", 3 * 2 * hidden),
        ("output GEMM, residual sum", "its input in BF16", 2 * hidden),
        ("RMSNorm, gate and up GEMM", "input in FP8", saved),
        ("SwiGLU, down GEMM, residual sum", "gate, up in FP8", gated),
    ]
    y = 82.0
    for number, (step, what, size) in enumerate(steps):
        out.box((20, y), (350, 48), "box")
        out.text((34, y + 30), step)
        out.box((396, y), (224, 48), "saved")
        out.text((408, y + 30), what)
        out.text((610, y + 30), f"{size / 1e3:.1f}", "strong", "end")
        if number:
            out.path([(195, y - 16), (195, y)], 'class="line" stroke-width="2"')
        y += 64
    out.text((20, y + 12), "* with fp8.recompute_qkv the input of the QKV GEMM in FP8:", "faint")
    out.text((610, y + 12), f"{hidden / 1e3:.1f}", "strong", "end")
    y += 52
    out.text((20, y), "Measured for 8 x 2,048 tokens, MiB", "title")
    bars = [
        ("BF16, eager", "hf_eager", "bf16"),
        ("BF16, compiled", "hf_compile", "bf16"),
        ("torchao FP8, compiled", "torchao", "other"),
        ("coat", "coat", "own"),
        ("coat, recompute_qkv", "coat_lean", "own"),
    ]
    for name, member, color in bars:
        y += 40
        size = values("layer", member, "saved_mib")[""]
        out.text((20, y), name)
        out.bar((230, y - 17), (310 * size / 3000, 22), color)
        out.text((238 + 310 * size / 3000, y), f"{size:,.0f}", "strong")
    return out.write()


def draw_losses() -> str:
    """Training loss in BF16 and coat over one pass, and their relative difference by seed."""
    with (RESULTS / "single_pass_100m.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["training_loss"]]
    losses = {
        (row["precision"], int(row["seed"]), int(row["step"])): float(row["training_loss"])
        for row in rows
    }
    steps = sorted({step for _, _, step in losses if step >= 100})
    out = Drawing(560, "Training loss in BF16 and in coat")
    (left, right), top = (50, 620), 110
    out.text((20, 32), "Training loss over one pass", "title")
    out.text((20, 62), "99.5M decoder, 50M tokens, three seeds", "faint")
    legend = (("BF16, mean", "bf16"), ("coat, mean", "own"))
    for number, (name, color) in enumerate(legend):
        out.circle((427 + 105 * number, 56), color)
        out.text((440 + 105 * number, 62), name.split(",")[0])

    def across(step: int) -> float:
        return left + (right - left) * step / steps[-1]

    for loss in (3, 4, 5, 6):
        y = top + 240 * (6.5 - loss) / 4
        out.path([(left, y), (right, y)])
        out.text((left - 10, y + 6), str(loss), "faint", "end")
    for precision, color, width in (("bf16", "bf16", 6), ("coat", "own", 2)):
        curve = []
        for step in steps:
            loss = statistics.mean(losses[precision, seed, step] for seed in range(3))
            curve.append((round(across(step), 1), round(top + 240 * (6.5 - loss) / 4, 1)))
        out.path(curve, f'class="curve" stroke="var(--{color})" style="stroke-width:{width}"')
    base = 450
    out.text((20, base - 66), "coat - BF16 by seed, %", "faint")
    for percent in (-1, 0, 1):
        y = base - 40 * percent
        out.path([(left, y), (right, y)])
        out.text((left - 10, y + 6), f"{percent}", "faint", "end")
    for seed in range(3):
        curve = []
        for step in steps:
            share = losses["coat", seed, step] / losses["bf16", seed, step] - 1
            curve.append((round(across(step), 1), round(base - 4000 * share, 1)))
        out.path(curve, 'class="curve" stroke="var(--own)" style="stroke-width:1.5"')
    for step in range(0, 3001, 1000):
        anchor = "middle" if step < 3000 else "end"
        out.text((across(step), base + 74), f"{step:,}", "faint", anchor)
    out.text((right, base + 100), "steps", "faint", "end")
    return out.write()


PARTS = {
    "weights": "ink",
    "master_weights": "faint",
    "states": "other",
    "gradients": "teal",
    "activations": "sky",
    "other": "line",
}
"""Part of the peak -> its color. In the optimizer's step, gradients include their FP32 copies."""
GROUPS = {
    "One GPU, one sequence": (1, 1, ["zero_stage=0", "stages.sft.batch_size=8"]),
    "Eight GPUs with ZeRO-3, four sequences each": (8, 4, ["stages.sft.batch_size=256"]),
}
"""Group of bars -> GPUs, sequences in a micro-batch, other settings."""
RECOMPUTATION = {"": [], ", recomputation": ["stages.sft.gradient_checkpointing=true"]}
PLANS = FIGURES / "memory_8b.csv"


def plan_memory(path: Path = PLANS) -> None:
    """Plan a step of ``vila_sft``: 8.07B parameters, 4 images in each sequence of 4,096 tokens."""
    from coat_vlm.config.load import load_recipe
    from coat_vlm.plan import plan_recipe

    with path.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["group", "setting", *PARTS, "peak"])
        for group, (ranks, rows, words) in GROUPS.items():
            words = [*words, f"stages.sft.micro_batch_size={rows}", "init_from=null"]
            for precision, name in itertools.product(("BF16", "coat"), RECOMPUTATION):
                changes = [f"precision={precision.lower()}", "model.image.max_tiles=3"]
                changes += words + RECOMPUTATION[name]
                recipe = load_recipe("vila_sft", changes, unset_variables=True)
                (plan,) = plan_recipe(recipe, ranks=ranks, gpu_bytes=80e9, images=4)
                memory = plan.own_memory
                sizes = {part: getattr(memory, part, 0.0) for part in PARTS}
                if memory.step_peak > memory.backward_peak:
                    sizes["activations"] = 0.0
                    sizes["gradients"] += memory.peak - sum(sizes.values())
                sizes["other"] = memory.peak - sum(sizes.values())
                sizes["peak"] = memory.peak
                shown = [f"{size / 1e9:.1f}" for size in sizes.values()]
                table.writerow([group, precision + name, *shown])


def draw_memory() -> str:
    """The planned peak memory of an 8B step, by part."""
    with PLANS.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    out = Drawing(630, "Planned memory of an 8B training step, per GPU")
    out.text((20, 32), "Planned memory of an 8B training step, GB per GPU", "title")
    x, y = 20.0, 62.0
    for part, color in PARTS.items():
        name = {"states": "AdamW states"}.get(part, part.replace("_", " "))
        if x + 24 + 10 * len(name) > WIDTH - 20:
            x, y = 20.0, y + 28
        out.box((x, y - 14), (16, 16), color)
        out.text((x + 23, y), name)
        x += 44 + 10 * len(name)
    scale, y = 540 / 165, y + 12
    for group, members in itertools.groupby(rows, lambda row: row["group"]):
        y += 34
        out.text((20, y), group, "faint")
        for row in members:
            y += 30
            out.text((20, y), row["setting"])
            x, y = 20.0, y + 8
            for part, color in PARTS.items():
                size = scale * float(row[part])
                out.box((x, y), (size, 20), color)
                x += size
            out.text((x + 8, y + 16), f"{float(row['peak']):.0f}", "strong")
            y += 20
    return out.write()


CHARTS: dict[str, Callable[[], str]] = {
    "step_8b.svg": draw_speed,
    "fp8_block.svg": draw_block,
    "losses.svg": draw_losses,
    "memory_8b.svg": draw_memory,
}


if __name__ == "__main__":
    if "--plan" in sys.argv:
        plan_memory()
    sys.exit(write_pages(FIGURES, CHARTS))
