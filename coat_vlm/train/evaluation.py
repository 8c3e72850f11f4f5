"""Evaluation during training (``eval_every``): generates and scores answers of the live weights.

The caller passes questions and scoring functions, since this package must not import
``coat_eval``.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from coat_data.sample import DataError, Sample
from coat_vlm.distributed import World
from coat_vlm.generate import PromptEncoder, generate_batch
from coat_vlm.model.folder import AnyProcessor
from coat_vlm.run.signals import SIGNALS

BATCH_SIZE = 8
MAX_NEW_TOKENS = 16
"""The defaults of ``coat-vlm eval``, so that the metrics are comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSubset:
    """Questions of one evaluation set with their scoring function."""

    name: str
    headline: str
    """The metric shown first."""
    samples: Sequence[Sample]
    score: Callable[[Sequence[str]], Mapping[str, float]]
    """Computes metrics in percent from an answer per sample."""


class LiveEvaluation:
    """Evaluates the model on the questions of all subsets; the ranks share the questions.

    All prompts are encoded at the start, so that a bad one raises DataError (ValueError on other
    ranks) before training. ``lockstep``: every forward pass needs all ranks and the same modules.
    """

    def __init__(
        self,
        subsets: Sequence[EvalSubset],
        processor: AnyProcessor,
        world: World,
        *,
        every: int,
        lockstep: bool,
    ) -> None:
        self.every = every
        self._subsets = subsets
        self._encoder = PromptEncoder(processor)
        self._world = world
        self._lockstep = lockstep and world.size > 1
        problem: DataError | None = None  # an error on one rank raises on all
        try:
            for subset in self._subsets:
                for indices in self._batches(subset.samples):
                    self._encoder([subset.samples[index] for index in indices])
        except DataError as error:
            problem = error
        problems = [text for text in self._world.gather(problem and str(problem)) if text]
        if problem is not None:
            raise problem
        if problems:
            raise ValueError(problems[0])

    def __call__(self, model: PreTrainedModel) -> dict[str, Any] | None:
        """Generate answers to all questions with greedy decoding and score them.

        Returns the entry for metrics.jsonl, with metrics in percent and without categories; None on
        all ranks if one of them received a signal.
        """
        started = time.perf_counter()
        metrics = {}
        for subset in self._subsets:
            answers = self._answers(model, subset)
            if answers is None:
                return None
            values = subset.score(answers)
            names = dict.fromkeys([subset.headline, *values])
            metrics[subset.name] = {name: values[name] for name in names if "." not in name}
        return {
            "metrics": metrics,
            "headline": {subset.name: subset.headline for subset in self._subsets},
            "samples": {subset.name: len(subset.samples) for subset in self._subsets},
            "eval_s": round(time.perf_counter() - started, 2),
        }

    def _answers(self, model: PreTrainedModel, subset: EvalSubset) -> list[str] | None:
        rank_answers: dict[int, str] = {}
        batches = list(self._batches(subset.samples))
        bar = tqdm(
            batches,
            desc=f"eval {subset.name}",
            leave=False,
            disable=None if self._world.is_main else True,
        )
        for indices in bar:
            stop = SIGNALS.received is not None
            if self._world.any(stop) if self._lockstep else stop:
                break
            prompts = self._encoder([subset.samples[index] for index in indices])
            texts = generate_batch(
                model, self._encoder, prompts, MAX_NEW_TOKENS, synced=self._lockstep
            )
            rank_answers.update(zip(indices, texts, strict=True))
        if self._world.any(SIGNALS.received is not None):
            return None
        answers: dict[int, str] = {}
        for part in self._world.gather(rank_answers):
            answers.update(part)
        return [answers[index] for index in range(len(subset.samples))]

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Yield this rank's batches of indices.

        In lockstep all ranks have equally many, and each has media on all ranks or on none.
        """
        groups = [list(range(len(samples)))]
        if self._lockstep:
            groups = [[i for i in groups[0] if bool(samples[i].media) == x] for x in (True, False)]
        rank, size = self._world.rank, self._world.size
        for group in groups:
            indices = group[rank::size]
            if self._lockstep and len(indices) < -(-len(group) // size):
                indices.append(group[0])
            for begin in range(0, len(indices), BATCH_SIZE):
                yield indices[begin : begin + BATCH_SIZE]
