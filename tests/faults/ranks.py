"""Ranks that save and find checkpoints, forked from one process that has imported everything.

``ranks.py`` reads runs as lines of JSON from stdin: ``{"action": NAME, "ranks": N, ...}``. For each
it forks N processes joined by gloo, calls the function NAME of this file in each, and prints the
list of their results as a line ``RESULTS [...]``; an exception is ``"ValueError: ..."``, a process
that died ``null``.
"""

import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from killing import engine_of
from safetensors.torch import save_file

from coat_vlm.checkpoint import atomic_folder, verify
from coat_vlm.checkpoint.atomic_folder import write_folder
from coat_vlm.checkpoint.load import find_checkpoint, load_checkpoint
from coat_vlm.checkpoint.metadata import Progress
from coat_vlm.checkpoint.save import CheckpointSaver
from coat_vlm.distributed import World


def progress_of(step: int, world: World, *, spike: bool = False) -> Progress:
    return Progress(
        stage="sft", step=step, world_size=world.size, zero_stage=0, precision="coat",
        bad_samples=0, sampler_state=(step, 0), spike=spike,
    )  # fmt: skip


def set_values(engine: Any, step: int) -> None:
    """Make every number of the model that of a step."""
    for parameter in engine.module.parameters():
        parameter.data.fill_(float(step))


def limit_files(run: dict[str, Any], world: World) -> None:
    if world.rank == run.get("limited_rank"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def saver_of(run: dict[str, Any], world: World, engine: Any, **options: Any) -> CheckpointSaver:
    background = run.get("background", True)
    folder = Path(run["folder"])
    return CheckpointSaver(
        folder, engine, world, run.get("keep", 9), background=background, **options
    )


def save(run: dict[str, Any], world: World) -> list[str]:
    """Save a checkpoint per step; the weights change as soon as training would go on."""
    engine = engine_of(0)
    saver = saver_of(run, world, engine)
    limit_files(run, world)
    for step in run["steps"]:
        set_values(engine, step)
        saver.save(progress_of(step, world))
        set_values(engine, -1)
    saver.finish()
    return sorted(path.name for path in Path(run["folder"]).iterdir())


def save_checked(run: dict[str, Any], world: World) -> str:
    """Save with a check that fails at its call number ``fails_at``."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == run["fails_at"]:
            raise PermissionError("the lock was taken over")

    saver = saver_of(run, world, engine_of(1), check=check)
    try:
        saver.save(progress_of(run["step"], world))
        saver.finish()
    except (OSError, ValueError) as error:
        return f"{error}"
    return f"{calls} calls"


def lose_a_rank(run: dict[str, Any], world: World) -> float:
    """Rank 1 dies when a save begins; returns the seconds that rank 0 needs to end."""
    saver = saver_of(run, world, engine_of(1))
    if world.rank == 1:
        world.run_on_rank0(lambda: None)  # what rank 0 sends in the save
        os.kill(os.getpid(), signal.SIGKILL)
    saver.save(progress_of(run["step"], world))
    begun = time.monotonic()
    saver.close()
    return time.monotonic() - begun


def find(run: dict[str, Any], world: World) -> tuple[str | None, float]:
    """Find and load the newest checkpoint; each rank has its own view of the folder."""
    folder = Path(run["views"][world.rank])
    late = run.get("late")
    if late is not None and world.rank == 1 and not os.fork():
        time.sleep(1.0)  # as a listing that is refreshed while this rank waits
        (folder / "later").rename(folder / late)
        os._exit(0)
    return load_newest(folder, world)


def load_newest(folder: Path, world: World) -> tuple[str | None, float]:
    found = find_checkpoint(folder, world).path
    if found is None:
        return None, 0.0
    engine = engine_of(0)
    load_checkpoint(found, engine, progress_of(0, world), world)
    (value,) = {float(v) for p in engine.module.parameters() for v in p.detach().flatten()}
    return found.name, value


def damage_each_file(run: dict[str, Any], world: World) -> dict[str, list[Any]]:
    """Damage the files of the newest checkpoint in turn, and load what is found then."""
    newest = Path(run["folder"]) / run["newest"]
    files = world.run_on_rank0(lambda: sorted(p for p in newest.rglob("*") if p.is_file()))
    results: dict[str, list[Any]] = {}
    for path in files:
        good = path.read_bytes()
        middle = len(good) // 2
        flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
        damages = {"truncated": good[:middle], "empty": b"", "zeroed": bytes(len(good))}
        for kind, data in {**damages, "flipped": flipped, "removed": None}.items():
            world.barrier()
            if world.is_main:
                path.unlink() if data is None else path.write_bytes(data)
            world.barrier()
            results[f"{path.name} {kind}"] = [*load_newest(newest.parent, world)]
        world.barrier()
        if world.is_main:
            path.write_bytes(good)
        world.barrier()
    return results


def write_model(run: dict[str, Any], world: World) -> None:
    """Write a model folder as a library does, without hashing."""
    limit_files(run, world)

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        save_file({"w": torch.zeros(200_000)}, folder / "model.safetensors")

    write_folder(Path(run["folder"]) / "model", world, write)


def join(rank: int, size: int, port: int) -> World:
    # A rank whose partner died must not wait for ever.
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    return World(rank=rank, size=size, device=torch.device("cpu"))


def run_ranks(run: dict[str, Any]) -> list[Any]:
    verify.WAIT_S = run.get("wait_s", 60.0)
    atomic_folder.GRACE_S = 2.0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    action: Callable[[dict[str, Any], World], Any] = globals()[run["action"]]
    children: list[int] = []
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(run["ranks"])]
        for rank, path in enumerate(paths):
            child = os.fork()
            if not child:
                world = join(rank, run["ranks"], port)
                try:
                    result = action(run, world)
                except Exception as error:
                    result = f"{type(error).__name__}: {error}"
                path.write_text(json.dumps(result))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        for path in paths:
            results.append(json.loads(path.read_text()) if path.is_file() else None)
    return results


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(f"RESULTS {json.dumps(run_ranks(json.loads(line)))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
