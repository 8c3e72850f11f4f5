"""The recipe's ``monitor`` section: FP8 blocks compared with BF16 while they train. A leaf."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")

Limit = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class MonitorConfig:
    """Every so many steps a few FP8 blocks run once more, in FP8 and in BF16, on a live input.

    What is measured: :mod:`coat_vlm.fp8.block_error`. Other steps are as without a monitor.
    """

    every: Annotated[int, Field(gt=0)]
    """Steps between two measurements."""
    layers: tuple[str, ...] = ("first", "middle", "last")
    """Which of the tower's and of the language model's FP8 blocks: these words, ``all``, or names
    of modules such as ``language_model.model.layers.3``. Of each, the input and the output's
    gradient are kept until the step is over, and both runs take the memory of a whole block."""
    max_error: Limit = 0.25
    """Largest relative error of what a block adds to the residual stream. Where the stream is some
    hundred times larger than that, BF16's own rounding reaches this limit."""
    max_gradient_error: Limit = 0.5
    """Largest relative error of what a block adds to the gradient of its input."""
    max_saturated: Share = 0.1
    """Largest share of the values of a tensor that may be at the format's largest value; of kinds
    with one scale per tensor."""
    max_underflowed: Share = 0.25
    """Largest share of the values of a tensor that may become zero, likewise."""
    action: Literal["warn", "bf16"] = "warn"
    """What follows from a value beyond its limit: a warning, or also that the block computes in
    BF16 from the next step on: in this stage, where it is resumed, and where its model is
    evaluated. Such a block keeps its activations in BF16 and takes their memory. A later stage
    starts with all blocks in FP8 again."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(
                f"monitor.layers is {list(self.layers)}; allowed: different ones of first, middle, "
                "last, all and names of modules, one at least"
            )
