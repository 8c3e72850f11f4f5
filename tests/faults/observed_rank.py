"""A rank of ``coat-vlm`` that records its state: ``observed_rank.py OPTIONS train RECIPE ...``.

A launcher starts it in place of the command. Before each save, and after a load, it writes the
SHA-256 of everything that training goes on with into a file of ``digests``, read from the engine
and not through the code that writes checkpoints. OPTIONS is a JSON object:

- ``digests``: the folder of these files, ``EVENT-STEP-RANK.json``;
- ``checkpoints``: the folder of the stage's checkpoints. A save begins when the one before is
  complete, so that the time of a save contains no waiting for another;
- ``kill_at``: rank 1 sends SIGKILL to itself in the place of the save of this step (null: never);
- ``deterministic``: use torch's deterministic algorithms; an operation without one is an error.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coat_cli.main import main as coat_vlm
from coat_data.mixture.sampler import SamplerState
from coat_vlm.checkpoint.load import list_checkpoints, path_step
from coat_vlm.checkpoint.metadata import capture_random_state
from coat_vlm.checkpoint.partitions import get_frozen_fragment, list_partitions
from coat_vlm.train import stages
from coat_vlm.train.loop import StageLoop
from coat_vlm.train.step import TrainStep

PART = 1 << 26
"""Elements that are hashed at once."""
COMMIT_S = 300.0
"""Longest wait for a checkpoint, or for what another rank writes."""


def hash_tensor(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().data).hexdigest()


def digest(step: TrainStep) -> dict[str, str]:
    """The SHA-256 of each tensor of this rank by name, and of the state that is not in tensors."""
    engine, model = step.engine, step.model
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies below are made by other threads
    optimizer: Any = engine.basic_optimizer
    tensors = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        # This rank's part of a parameter, without padding; below stage 3 the whole parameter.
        part = get_frozen_fragment(name, parameter, owner=True)
        if part is not None:
            tensors[f"weight {name}"] = part[0]
    for number, partition in enumerate(list_partitions(engine)):
        tensors[f"master {number}"] = partition.tensor
        for key, value in optimizer.state.get(partition.tensor, {}).items():
            tensors[f"{key} {number}"] = torch.as_tensor(value)
    parts = {
        f"{name} [{number}]": part
        for name, tensor in tensors.items()
        for number, part in enumerate(tensor.detach().reshape(-1).split(PART))
    }
    with ThreadPoolExecutor() as pool:
        digests = dict(zip(parts, pool.map(hash_tensor, parts.values()), strict=True))
    others = {
        "random generators": capture_random_state(),
        "progress": [step.finished, [*step.sampler_state], step.bad_samples.total],
    }
    for name, value in others.items():
        digests[name] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    digests["bytes"] = str(sum(part.numel() * part.element_size() for part in parts.values()))
    return digests


def observe(options: dict[str, Any]) -> Callable[..., StageLoop]:
    """A constructor of the loop whose saves are observed."""

    def build(
        *, step: TrainStep, save: Callable[[int, SamplerState], None], saved: int, **others: Any
    ) -> StageLoop:
        rank, newest = step.world.rank, saved

        def digest_file(event: str, of_rank: int) -> Path:
            return Path(options["digests"]) / f"{event}-{step.finished}-{of_rank}.json"

        def record(event: str) -> None:
            path = digest_file(event, rank)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(digest(step)))
            part.replace(path)

        def save_observed(number: int, sampler_state: SamplerState) -> None:
            nonlocal newest
            wait_until(lambda: is_complete(newest), f"the checkpoint of step {newest}")
            record("reached")
            if number == options["kill_at"] and rank == 1:
                # The launcher ends the other rank soon afterwards.
                other = digest_file("reached", 0)
                wait_until(other.is_file, f"{other} of rank 0")
                os.kill(os.getpid(), signal.SIGKILL)
            save(number, sampler_state)
            newest = number

        def is_complete(number: int) -> bool:
            saves = list_checkpoints(Path(options["checkpoints"]))
            return not number or number in map(path_step, saves)

        if saved:
            record("loaded")
        return StageLoop(step=step, save=save_observed, saved=saved, **others)

    return build


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + COMMIT_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} is not complete in {COMMIT_S:.0f} s")
        time.sleep(0.02)


def main() -> int:
    options = json.loads(sys.argv[1])
    if options["deterministic"]:
        # Not with warn_only: attention's backward pass stays nondeterministic then.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    stages.StageLoop = observe(options)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = ["coat-vlm", *sys.argv[2:]]
    return coat_vlm(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
