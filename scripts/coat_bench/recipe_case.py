"""What ``coat-vlm bench recipe`` measures: its settings, its rows, its tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from coat_bench.rows import Row, number, table
from coat_vlm.config import Recipe
from coat_vlm.fp8.graphs import EAGER_PASSES


@dataclass(slots=True)
class RecipeRow(Row):
    """One stage's step; the columns of ``recipe.csv``."""

    recipe: str
    """Its name, and the keys that were changed."""
    stage: str
    gpus: int
    zero: int
    """ZeRO stage."""
    precision: str
    optimizer: str
    checkpointing: bool
    micro_batch: int
    """Rows of a micro-batch on one GPU."""
    accumulation: int
    """Micro-batches of a step."""
    row_tokens: int
    """Of the language model, those of images included."""
    images: int
    """Tiles of images, or frames, of a row."""
    tokens: int | None = None
    """Of a step on all GPUs, those of images included."""
    vision_tokens: int | None = None
    """Of these, those that hold image features."""
    trained_tokens: int | None = None
    """Of these, those with a target."""
    ms: float | None = None
    """A step, median; of the slowest GPU."""
    tok_s_gpu: float | None = None
    """Tokens per second of one GPU."""
    vision_tok_s_gpu: float | None = None
    """Vision tokens per second of one GPU."""
    tflops_gpu: float | None = None
    """Model TFLOP/s of one GPU as the log line counts them; absent where they are not known."""
    peak_gb: float | None = None
    """Most that was allocated on one GPU, in 10^9 bytes; absent on a CPU."""
    plan_gb: float | None = None
    """What ``coat-vlm plan`` expects of the same GPUs and micro-batches."""
    plan_off: float | None = None
    """Plan by peak, less 1, in percent."""
    note: str = ""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBench:
    """What is measured, and how.

    Raises:
        ValueError: a number is too small, or what is to be captured would not be.
    """

    recipe: Recipe
    changes: Sequence[str] = ()
    """The ``key=value`` texts that the recipe was read with."""
    only_stage: str | None = None
    images: int | None = None
    """Tiles or frames of a row; as a plan finds them when absent."""
    steps: int = 5
    """Measured ones."""
    warmup: int = 3
    """Steps before them."""
    accumulation: int = 1
    """Micro-batches of a step."""
    plan: bool = True
    """Also say what ``coat-vlm plan`` expects of the peak."""

    def __post_init__(self) -> None:
        if min(self.steps, self.warmup, self.accumulation) < 1:
            raise ValueError("--steps, --warmup and --accumulation are 1 or more")
        fp8 = self.recipe.fp8
        if fp8 is not None and fp8.cuda_graphs and self.warmup <= EAGER_PASSES:
            raise ValueError(
                f"fp8.cuda_graphs: blocks are captured after {EAGER_PASSES} steps, which --warmup "
                f"{self.warmup} has to exceed"
            )


def format_row(row: RecipeRow) -> str:
    """A heading and a Markdown table of one stage."""
    checkpointed = ", gradient checkpointing" if row.checkpointing else ""
    heading = (
        f"{row.recipe}, stage {row.stage}: {row.gpus} x {row.gpu}, ZeRO-{row.zero}, "
        f"{row.precision}, {row.optimizer}{checkpointed}\n"
        f"a step: {row.gpus} rank(s) x {row.accumulation} micro-batch(es) x {row.micro_batch} "
        f"row(s) of {row.row_tokens:,} tokens with {row.images} image(s)"
    )
    if row.problem:
        return f"{heading}\nno speed: {row.problem}"
    cells = {
        "tokens a step": _whole(row.tokens),
        "trained": _whole(row.trained_tokens),
        "ms/step": number(row.ms, 1),
        "tokens/s per GPU": _whole(row.tok_s_gpu),
        "vision tokens/s per GPU": _whole(row.vision_tok_s_gpu),
        "TFLOP/s per GPU": "-" if row.tflops_gpu is None else f"{row.tflops_gpu:.3g}",
        "peak GB": number(row.peak_gb, 2),
        "plan GB": "-" if row.plan_gb is None else f"{row.plan_gb:.4g}",
        "plan off": "-" if row.plan_off is None else f"{row.plan_off:+.1f}%",
    }
    return f"{heading}\n{row.note}\n\n{table(list(cells), [list(cells.values())])}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
