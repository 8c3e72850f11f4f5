"""How much a step trains on, and how fast: tokens of vision and of text, tiles, model FLOPs.

Every rank counts its own micro-batches on the CPU, from what the loader made; the loop adds the
numbers up with the others of the step, in the one sum over the ranks that it has.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from coat_data.collate import Batch
from coat_data.encode import IGNORE_INDEX
from coat_vlm.config import MODULES
from coat_vlm.model.flops import ModelFlops, Work, model_flops, why_not_counted
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.overview import say
from coat_vlm.train.world import World


class Throughput:
    """Counts the steps of one stage.

    Args:
        model: with the stage's modules made trainable, before DeepSpeed gets it.
        world: the processes of the run.
    """

    def __init__(self, model: CoatVlm, world: World) -> None:
        self._image_token_id: int | None = model.config.image_token_id
        self._ranks = world.size
        self._flops: ModelFlops | None = None
        why = why_not_counted(model.language_model)
        if why is None:
            self._flops = model_flops(model)
        else:
            say(world, f"  no TFLOP/s: the model's work is not known, as {why}")

    def count(self, batches: Sequence[Batch]) -> list[float]:
        """What this rank's micro-batches of a step hold, to be summed over the ranks."""
        works = [work_of(batch, self._image_token_id) for batch in batches]
        flops = [] if self._flops is None else [self._flops.of(work) for work in works]
        return [
            float(sum(work.tiles for work in works)),
            float(sum(work.vision_tokens for work in works)),
            *(float(sum(own[name] for own in flops)) for name in MODULES),
        ]

    def row(self, sums: Sequence[float]) -> dict[str, Any]:
        """Sums of :meth:`count` as metrics.jsonl has them.

        ``tiles``: tiles of images, and frames. ``vision_tokens``: positions of the language model
        that their features fill; all others of ``tokens`` are text. ``tflop``: model FLOPs of the
        step / 1e12 by part (:mod:`coat_vlm.model.flops`), where they are known.
        """
        tiles, vision_tokens, *flops = sums
        row: dict[str, Any] = {"tiles": int(tiles), "vision_tokens": int(vision_tokens)}
        if self._flops is not None:
            parts = zip(MODULES, flops, strict=True)
            row["tflop"] = {name: _digits(number / 1e12) for name, number in parts if number}
        return row

    def rates(self, row: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """Rates of a step's row: over all ranks, but TFLOP/s per GPU.

        Args:
            row: has tokens, samples and :meth:`row`'s.
            seconds: of the step, with its wait for data.
        """
        tokens, vision_tokens = row["tokens"], row["vision_tokens"]
        rates = {
            "tokens_per_s": round(tokens / seconds, 1),
            "vision_tokens_per_s": round(vision_tokens / seconds, 1),
            "text_tokens_per_s": round((tokens - vision_tokens) / seconds, 1),
            "samples_per_s": round(row["samples"] / seconds, 2),
        }
        if "tflop" in row:
            own = sum(row["tflop"].values()) / self._ranks
            rates["tflop_per_s_per_gpu"] = _digits(own / seconds)
        return rates


def work_of(batch: Batch, image_token_id: int | None) -> Work:
    """What a micro-batch holds, without its padding.

    Args:
        batch: on the CPU; padded on the right, or packed.
        image_token_id: the placeholder of image features; None for a language model alone.
    """
    mask = batch["attention_mask"].bool()
    placed = 0
    if image_token_id is not None:
        placed = int(((batch["input_ids"] == image_token_id) & mask).sum())
    if "cu_seq_lens_q" in batch:
        used = int(mask.sum())  # what fills the row up is the last sequence
        bounds = batch["cu_seq_lens_q"].tolist()
        lengths = [end - start for start, end in pairwise(bounds) if start < used]
    else:
        lengths = mask.sum(1).tolist()
    return Work(
        tiles=len(batch["pixel_values"]),
        vision_tokens=placed,
        trained_tokens=trained_tokens(batch),
        lengths=lengths,
    )


def trained_tokens(batch: Batch) -> int:
    """Tokens with a target; the first of a row predicts nothing."""
    return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())


def _digits(number: float) -> float:
    return float(f"{number:.5g}")
