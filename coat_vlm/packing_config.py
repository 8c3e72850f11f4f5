"""The recipe's ``packing`` section: how samples share rows of a batch. A leaf, like the recipe."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid"))
class PackingConfig:
    """Several samples in one row, none cut, none seeing another; ``true`` takes the defaults."""

    tokens: _Positive | None = None
    """Tokens of a row, image tokens included: a multiple of ``align`` and at least
    ``model.max_length``, which is the default (rounded up)."""
    images: _Positive | None = None
    """Images and frames of a row, which limit the vision tower's memory; any number when absent.
    A sample with more is a bad sample."""
    buffer: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Samples that are looked at together, in the order of training, to fill rows."""
    align: _Positive = 128
    """Rows are filled up to a multiple of this many tokens (128 suits FP8 kernels)."""

    def row_tokens(self, max_length: int) -> int:
        """Tokens of a row for a model of this ``max_length``.

        Raises:
            ValueError: the longest sample would not fit, or ``tokens`` is no multiple of ``align``.
        """
        aligned = -(-max_length // self.align) * self.align
        if self.tokens is None:
            return aligned
        if self.tokens < max_length:
            raise ValueError(
                f"packing.tokens={self.tokens} is less than model.max_length={max_length}, and no "
                "sample is ever cut; raise packing.tokens or lower model.max_length"
            )
        if self.tokens % self.align:
            raise ValueError(
                f"packing.tokens={self.tokens} is not a multiple of packing.align={self.align}; "
                f"choose {self.tokens // self.align * self.align + self.align}, say"
            )
        return self.tokens


def _switch(value: Any) -> Any:
    """``packing: true`` and ``false`` for the defaults and for none."""
    if isinstance(value, bool):
        return {} if value else None
    return value


Packing = Annotated[PackingConfig | None, BeforeValidator(_switch)]
"""A stage's ``packing`` key."""
