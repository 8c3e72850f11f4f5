"""Trains the runs of a study in parallel processes, and continues where it was interrupted.

A folder has ``settings.json``, which the runs share, and ``runs/NAME.json`` per finished run.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from tqdm import tqdm

from coat_data.saved_files import write_text
from harness import get_origin

Record = dict[str, Any]
"""What a run measured, plain JSON."""


def sweep(
    out: Path,
    settings: Record,
    runs: Mapping[str, tuple[Any, ...]],
    train: Callable[..., Record],
    jobs: int,
) -> dict[str, Record]:
    """Train the runs that are missing in folder ``out``; returns the records of all.

    ``settings``, plain JSON, are common to all runs of the folder; ``runs`` maps names to arguments
    of ``train``, a function of a module. ``jobs`` processes run at a time, on all GPUs in turn.

    Raises:
        ValueError: the folder has runs of other settings.
        RuntimeError: runs failed; the others are in the folder.
    """
    (out / "runs").mkdir(parents=True, exist_ok=True)
    check_settings(out / "settings.json", settings)
    files = {name: out / "runs" / f"{quote(name, safe='@:,+ ')}.json" for name in runs}
    missing = [name for name, file in files.items() if not file.is_file()]
    origin, failed = get_origin(), []
    # A forked process cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        futures = {
            pool.submit(_train_in_worker, train, runs[name], number, jobs): name
            for number, name in enumerate(missing)
        }
        for future in tqdm(as_completed(futures), "runs", len(futures), unit="run", disable=None):
            name = futures[future]
            if (error := future.exception()) is not None:
                failed.append(f"{name}: {error}")
                continue
            write_text(files[name], json.dumps(future.result() | {"origin": origin}) + "\n")
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(missing)} runs failed: {'; '.join(failed)}")
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def check_settings(path: Path, settings: Record) -> None:
    """Write the settings to a JSON file, or raise ValueError if it has others."""
    settings = json.loads(json.dumps(settings))
    if not path.is_file():
        write_text(path, json.dumps(settings, indent=1) + "\n")
        return
    previous = json.loads(path.read_text(encoding="utf-8"))
    if previous != settings:
        changed = sorted(
            key for key in {*settings, *previous} if previous.get(key) != settings.get(key)
        )
        raise ValueError(
            f"{path}: the runs had other values of {', '.join(changed)}; write to another folder"
        )


def _train_in_worker(
    train: Callable[..., Record], arguments: tuple[Any, ...], number: int, jobs: int
) -> Record:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    return train(*arguments)
