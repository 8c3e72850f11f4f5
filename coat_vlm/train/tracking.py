"""Metric loggers (metrics.jsonl, TensorBoard, Weights & Biases) and the printed progress line."""

import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_data.sample import hide_secrets
from coat_data.saved_files import write_text
from coat_vlm.config import STAGES
from coat_vlm.config.recipe import TrackingConfig
from coat_vlm.distributed import World

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""File in a run folder."""


class Metrics:
    """Writes metrics to all loggers, on the main process only (``enabled``).

    ``check`` raises an error if this run must not write any more; it is called before each entry.
    """

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingConfig,
        run_name: str,
        enabled: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._file = (run_dir / METRICS).open("a", encoding="utf-8") if enabled else None
        self._board = None
        self._wandb = None
        if enabled and tracking.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))
        if enabled and tracking.wandb_project:
            import wandb  # pyright: ignore[reportMissingImports]

            self._wandb = wandb.init(
                project=tracking.wandb_project, name=run_name, dir=str(run_dir)
            )
            for stage in STAGES:
                self._wandb.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry with the time in seconds since 1970, and flush."""
        if self._file is None:
            return
        self._check()
        line = json.dumps({**entry, "time": round(time.time(), 3)})
        self._file.write(f"{hide_secrets(line)}\n")
        self._file.flush()
        if entry["kind"] in {"step", "val", "eval", "monitor"}:
            numbers = dict(_flatten(entry["stage"], entry))
            if self._board is not None:
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, entry["step"])
            if self._wandb is not None:
                # W&B's own step must increase, but the steps of every stage start at 1.
                self._wandb.log({**numbers, f"{entry['stage']}/step": entry["step"]})

    def close(self) -> None:
        """Flush and close all loggers."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def append_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Append one entry with the time, on a line of its own also after a truncated line."""
    with path.open("a", encoding="utf-8") as file:
        line = json.dumps({**entry, "time": round(time.time(), 3)})
        file.write(f"\n{hide_secrets(line)}\n")


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a .jsonl file in a run folder, if it exists.

    Skips lines that are not entries of a stage: one that a killed run truncated, or foreign ones.
    """
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if (
            isinstance(entry, dict)
            and entry.get("stage") in STAGES
            and isinstance(entry.get("step", 0), int)
        ):
            yield entry


def list_measured(path: Path, stage: str, step: int) -> frozenset[str]:
    """Return the kinds of entries (``val``, ``eval``) that metrics.jsonl has for a step."""
    return frozenset(
        entry["kind"]
        for entry in read_entries(path)
        if entry.get("kind") in ("val", "eval") and (entry["stage"], entry["step"]) == (stage, step)
    )


def rewind(path: Path, stage: str, step: int) -> None:
    """Delete the entries after ``step`` of ``stage`` and of later stages, which a resume repeats.

    Entries of kind ``resume`` stay, because the user's changes remain in effect. ``path`` is
    metrics.jsonl or bad_samples.jsonl; lines that are not entries of a stage are deleted.
    """
    if not path.is_file():
        return
    entries = list(read_entries(path))
    with path.open("rb") as file:
        others = sum(1 for line in file if line.strip()) - len(entries)
    if others:
        logger.warning("%s: deleted %d lines that are not entries of a stage", path, others)
    kept = []
    for entry in entries:
        order = STAGES.index(entry["stage"]) - STAGES.index(stage)
        of_stage = entry.get("step", 0) <= step and entry.get("status") != "end"
        of_stage = of_stage or entry.get("kind") == "resume"
        if order < 0 or (order == 0 and of_stage):
            kept.append(json.dumps(entry) + "\n")
    write_text(path, "".join(kept))


def print_on_main(world: World, text: str) -> None:
    """Print on the main process, above a progress bar."""
    if world.is_main:
        tqdm.write(text)


def _flatten(prefix: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of an entry by path, such as ``sft/lr/vision``."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and name not in {"step", "total_steps", "time"}:
            yield f"{prefix}/{name}", value


Entry = Mapping[str, Any]
"""A step's entry of metrics.jsonl."""


def split_steps(
    entries: Iterable[Entry], first: Collection[int]
) -> tuple[list[Entry], dict[str, list[Entry]]]:
    """Split the steps of one stage into steady ones and, by kind, others.

    ``first`` are the numbers of the first steps after a start or a resume, which compile and fill
    queues. The others ``measured`` FP8, or were ``capturing`` CUDA graphs.
    """
    steady: list[Entry] = []
    excluded: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry["step"] in first:
            excluded["first"].append(entry)
        elif entry["peak_memory_mb"] is None:
            excluded["measured"].append(entry)
        elif entry.get("captured"):
            excluded["capturing"].append(entry)
        else:
            steady.append(entry)
    return steady, dict(excluded)


def average_rates(entries: Sequence[Entry], ranks: int) -> dict[str, float]:
    """Compute the rates over steps: sums of all ranks divided by the time; empty without steps.

    ``wait`` is the share of the time spent waiting for data, ``imbalance`` a mean.
    """
    seconds = add_up(entries, "step_s")
    if not seconds:
        return {}
    rates = {
        f"{name}_per_s": add_up(entries, name) / seconds
        for name in ("tokens", "vision_tokens", "samples")
    }
    work = sum(sum((entry.get("tflop") or {}).values()) for entry in entries)
    if work:
        rates["tflop_per_s_per_gpu"] = work / seconds / ranks
    if any("imbalance" in entry for entry in entries):
        rates["imbalance"] = add_up(entries, "imbalance") / len(entries)
    return rates | {
        "step_s": seconds / len(entries),
        "wait": add_up(entries, "data_wait_s") / seconds,
    }


def add_up(entries: Iterable[Entry], key: str) -> float:
    """Sum an entry over entries; absent ones count as 0."""
    return sum(float(entry.get(key) or 0.0) for entry in entries)


_RATES = ("tokens_per_s", "vision_tokens_per_s", "tflop_per_s_per_gpu", "wait", "imbalance")


class StepLine:
    """Prints a line for every few steps of a stage, on the main process.

    Rates cover the steady steps since the last line; the time of other steps follows
    (:func:`split_steps`).

    ``done`` are the steps before a resume; the last step always has a line.
    """

    def __init__(self, stage: str, total_steps: int, done: int, every: int, world: World) -> None:
        self._stage, self._total, self._every, self._world = stage, total_steps, every, world
        self._peak_mb: float | None = None
        self._entries: list[Entry] = []
        self._first = {done + 1}
        self._step_s: float | None = None

    def show(self, entry: Entry) -> None:
        """Add a step's entry of metrics.jsonl, and print a line if one is due."""
        self._entries.append(entry)
        self._peak_mb = entry["peak_memory_mb"] or self._peak_mb
        step = entry["step"]
        if step % self._every and step != self._total:
            return
        steady, excluded = split_steps(self._entries, self._first)
        rates = average_rates(steady, self._world.size)
        self._step_s = rates.get("step_s", self._step_s)
        tokens, vision, tflop, wait, uneven = map(rates.get, _RATES)
        if self._world.device.type != "cuda":
            tflop = None
        loss, norm = entry["loss"], entry["grad_norm"]
        left = math.ceil((self._total - step) * (self._step_s or entry["step_s"]))
        parts = [
            f"{self._stage} step {step}/{self._total}",
            f"loss {'not finite' if loss is None else f'{loss:.4f}'}",
            f"grad {'not finite' if norm is None else f'{norm:.3g}'}",
            f"lr {'/'.join(f'{rate:.1e}' for rate in dict.fromkeys(entry['lr'].values()))}",
            tokens and f"tokens/s {tokens:,.0f}",
            vision and f"(vision {vision:,.0f})",
            tflop and f"TFLOP/s {f'{tflop:,.0f}' if tflop >= 100 else f'{tflop:.3g}'}",
            wait is not None and f"wait {wait:.1%}",
            uneven is not None and f"imbalance {uneven:.1%}",
            self._peak_mb and f"mem {self._peak_mb / 1e3:.1f} GB",
            *(
                f"{f'{len(steps)} {kind} steps' if len(steps) > 1 else f'{kind} step'} "
                f"{add_up(steps, 'step_s'):.1f} s"
                for kind, steps in excluded.items()
            ),
            f"eta {timedelta(seconds=left)}",
        ]
        print_on_main(self._world, " ".join(part for part in parts if part))
        sys.stdout.flush()
        self._entries.clear()
