"""What a recipe says of evaluation: ``eval_sets``, and how often training looks at them."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class EvalSetConfig:
    """One evaluation set, run by ``coat-vlm eval --run``."""

    task: Literal["yes_no", "multiple_choice", "short_answer"]
    """How answers are extracted and scored."""
    path: str
    """Folder with questions.jsonl (and, usually, the images)."""
    media_root: str | None = None
    """Folder or address that relative image paths start from; defaults to ``path``."""
    require: dict[str, float] = field(default_factory=dict)
    """Smallest allowed value of a metric, in percent; ``coat-vlm eval --run`` fails below it."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class EvalSchedule:
    """The evaluation sets of a recipe, and how often training asks questions from them."""

    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Evaluation sets by name."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps after which the live weights answer ``eval_samples`` questions of every set (and at the
    end of a stage); 0 asks nothing in training. A stage's ``eval_every_steps`` is about losses."""
    eval_samples: Annotated[int, Field(gt=0)] = 64
    """Questions per set asked in training: the same ones each time, at even distances."""

    def __post_init__(self) -> None:
        if self.eval_every and not self.eval_sets:
            raise ValueError("eval_every has no effect without eval_sets; add one, or remove it")
