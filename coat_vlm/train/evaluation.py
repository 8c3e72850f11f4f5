"""Evaluation in training: questions that the current weights answer (``eval_every``).

This package cannot import what scores answers, which is above it. It gets each set's questions with
a function that scores their answers, and does what belongs to training: it spreads the questions
over the ranks and keeps these in step where they share weights (ZeRO stage 3).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from coat_data.sample import DataError, Sample
from coat_vlm.distributed import World
from coat_vlm.generate import PromptEncoder, answer_batch
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm

BATCH_SIZE = 8
MAX_NEW_TOKENS = 16
"""As ``coat-vlm eval`` by default, so that its figures and these can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSubset:
    """Some questions of one evaluation set, and what their answers are worth."""

    name: str
    headline: str
    """The metric shown first."""
    samples: Sequence[Sample]
    score: Callable[[Sequence[str]], Mapping[str, float]]
    """Metrics in percent of one answer per sample, in order."""


class LiveEvaluation:
    """Asks the subsets' questions, on all ranks at once.

    Args:
        subsets: the questions; the same on every rank.
        processor: of the model that is trained.
        world: the processes of the run.
        every: steps between two evaluations.
        in_step: every forward pass needs all ranks, with the same modules in the same order.

    Raises:
        ValueError: a prompt of another rank cannot be encoded.
        DataError: a medium cannot be read, or a prompt is too long; better now than at step 1000.
    """

    def __init__(
        self,
        subsets: Sequence[EvalSubset],
        processor: CoatVlmProcessor,
        world: World,
        *,
        every: int,
        in_step: bool,
    ) -> None:
        self.every = every
        self._subsets = subsets
        self._encoder = PromptEncoder(processor)
        self._world = world
        self._in_step = in_step and world.size > 1
        self._check()

    def __call__(self, model: CoatVlm) -> dict[str, Any]:
        """Answer all questions greedily and score them.

        Args:
            model: the engine's module in evaluation mode; under ZeRO-3 its weights are gathered
                layer by layer.

        Returns:
            ``metrics`` in percent by set, the set's headline metric first and without categories;
            ``headline``, that metric's name by set; ``samples``, the number of questions by set;
            ``eval_s``.
        """
        started = time.perf_counter()
        metrics = {}
        for subset in self._subsets:
            values = subset.score(self._answers(model, subset))
            names = dict.fromkeys([subset.headline, *values])
            metrics[subset.name] = {name: values[name] for name in names if "." not in name}
        return {
            "metrics": metrics,
            "headline": {subset.name: subset.headline for subset in self._subsets},
            "samples": {subset.name: len(subset.samples) for subset in self._subsets},
            "eval_s": round(time.perf_counter() - started, 2),
        }

    def _answers(self, model: CoatVlm, subset: EvalSubset) -> list[str]:
        own: dict[int, str] = {}
        batches = list(self._batches(subset.samples))
        bar = tqdm(
            batches,
            desc=f"eval {subset.name}",
            leave=False,
            disable=None if self._world.is_main else True,
        )
        for indices in bar:
            prompts = self._encoder([subset.samples[index] for index in indices])
            texts = answer_batch(
                model, self._encoder, prompts, MAX_NEW_TOKENS, synced=self._in_step
            )
            own.update(zip(indices, texts, strict=True))
        answers: dict[int, str] = {}
        for some in self._world.gather(own):
            answers.update(some)
        return [answers[index] for index in range(len(subset.samples))]

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """This rank's batches of indices.

        In step, all ranks have as many batches, and a batch shows images on all ranks or on none:
        the tower takes part in a pass only if there is something to see. What does not divide is
        asked twice.
        """
        everything = list(range(len(samples)))
        groups = [everything]
        if self._in_step:
            seeing = [index for index in everything if samples[index].media]
            groups = [seeing, [index for index in everything if not samples[index].media]]
        rank, size = self._world.rank, self._world.size
        for group in groups:
            own = group[rank::size]
            if self._in_step and len(own) < -(-len(group) // size):
                own.append(group[0])
            for begin in range(0, len(own), BATCH_SIZE):
                yield own[begin : begin + BATCH_SIZE]

    def _check(self) -> None:
        """Encode this rank's prompts once; all ranks raise if one of them has to."""
        problem: DataError | None = None
        try:
            for subset in self._subsets:
                for indices in self._batches(subset.samples):
                    self._encoder([subset.samples[index] for index in indices])
        except DataError as error:
            problem = error
        said = [text for text in self._world.gather(problem and str(problem)) if text]
        if problem is not None:
            raise problem
        if said:
            raise ValueError(said[0])
