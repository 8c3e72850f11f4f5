"""What a model is shown for one question of a benchmark, and what can be chosen about it.

The texts are those behind published numbers: LLaVA's question files (haotian-liu/LLaVA,
docs/Evaluation.md and scripts/v1_5/eval), which VILA uses unchanged, and the benchmarks' own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coat_data.sample import DataError, Media
from coat_eval.shown import Shown

SHORT_ANSWER = "Answer the question using a single word or phrase."
"""Ends LLaVA's prompts of POPE, GQA, VQA v2, TextVQA, VizWiz and MMMU's open questions."""
LETTER_ANSWER = "Answer with the option's letter from the given choices directly."
"""Ends LLaVA's prompts of SEED-Bench and of MMMU's choices."""

FrameTimes = Callable[[Media], Sequence[float] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Answers that are ranked by how likely the model is to give them, in place of its own."""

    texts: tuple[str, ...]
    per_token: bool = True
    """An answer's loss is the mean over its tokens; else their sum, which prefers short ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question as the model is asked it: the media in order, then the text."""

    question_id: str
    """As :class:`coat_eval.benchmark.Question` has it."""
    text: str
    media: tuple[Shown, ...] = ()
    choices: Choices | None = None
    """What is ranked; None where the model answers in its own words."""
    category: str = ""
    """As in the question; the second half of the key where ids restart."""
    where: str = ""
    """File and row, for messages."""
    fingerprint: str = ""
    """Stands for ``text`` where earlier answers are checked; the text when empty. It does not
    change when a video arrives that was missing."""
    lacking: DataError | None = None
    """What could not be read, so that the question is asked without it."""

    @property
    def key(self) -> tuple[str, str]:
        """Category and id, which predictions and references are paired by."""
        return self.category, self.question_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What can be chosen about prompts."""

    split: str = ""
    """Name of the split; the benchmark's first one when empty."""
    variant: str = ""
    """One of the benchmark's ``variants``, or empty for the official prompt."""
    frame_times: FrameTimes = field(default=lambda _: None)
    """Seconds at which the model sees a video; None where that is not known."""
