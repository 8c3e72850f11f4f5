"""Shows what every rank of a run is doing, and which rank the others wait for.

Each rank renews ``RUN/heartbeat/rank-00000.json`` every few seconds from a thread. A process that
is stopped or dead does not renew its file; one that hangs in a call stays in the same activity.
Rank 0 warns when a step takes long and other ranks are not where it is; any rank exits when it has
waited longer than ``collective_timeout_s``. (The time limits of NCCL and gloo do not suffice:
DeepSpeed makes groups that do not have the run's limit.)
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coat_data.saved_files import write_text
from coat_vlm.distributed import World

FOLDER = "heartbeat"
"""Folder in a run folder."""
EXIT_LOST_RANK = 2
"""Exit status of a rank that waited for others longer than the time limit."""
SILENT_S = 60.0
"""Seconds without a renewal after which a rank counts as stopped or dead, and seconds in one step
after which rank 0 looks for ranks that are elsewhere."""
_RENEW_S = 5.0
_FAILED = "stopped by an error while "
"""Beginning of the last activity of a rank that ended with an error."""
_LOST_RANK = re.compile(r"gloo|NCCL|Timed out waiting|Connection (closed|reset)")
"""Errors of torch.distributed when another rank does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The last state of a rank."""

    rank: int
    host: str
    pid: int
    stage: str
    step: int
    """Number of finished steps."""
    activity: str
    """What the rank does, such as ``waiting for data``."""
    seconds: float
    age_s: float = 0.0
    """Seconds since the rank wrote this, by the clock of the file system."""

    @property
    def runs(self) -> bool:
        """Whether the rank responds, and has not ended with an error."""
        return self.age_s < SILENT_S and not self.activity.startswith(_FAILED)

    def describe(self, silent_s: float = SILENT_S) -> str:
        """Describe the rank in one line."""
        alive = self.age_s < silent_s
        now = "is" if alive else f"has not responded for {self.age_s:.0f} s; it was"
        total = self.seconds + (self.age_s if alive else 0.0)
        return (
            f"rank {self.rank} (process {self.pid} on {self.host}) {now} {self.activity}, for "
            f"{total:.0f} s, after step {self.step} of stage {self.stage}"
        )


class Heartbeat:
    """Writes this rank's file while the context is open, and deletes it after an orderly end.

    ``check`` raises ValueError if this run must not write any more (its lock was taken over).
    """

    def __init__(
        self,
        run_dir: Path,
        stage: str,
        step: int,
        world: World,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        renew_s: float = _RENEW_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._folder = run_dir / FOLDER
        self._stage = stage
        self._world = world
        self._check = check
        self._timeout_s, self._renew_s, self._silent_s = timeout_s, renew_s, silent_s
        self._now = (step, "starting", time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._told: tuple[int, str] | None = None

    def __enter__(self) -> "Heartbeat":
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._world.is_main:
            for path in self._folder.glob("rank-*.json"):  # of an earlier run of more ranks
                if int(path.stem.partition("-")[2]) >= self._world.size:
                    path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None or issubclass(kind, SystemExit):
            self._path(self._world.rank).unlink(missing_ok=True)
            return
        lost = isinstance(error, RuntimeError) and _LOST_RANK.search(str(error))
        elsewhere = self._find_elsewhere() if lost else ""
        step, activity, since = self._now
        self._now = step, f"{_FAILED}{activity}", since
        with contextlib.suppress(OSError, ValueError):
            self._check()
            self._write()
        if lost:
            raise ConnectionError(
                f"another rank died or timed out (collective_timeout_s): {error}. "
                f"An error of another rank may be printed above; {elsewhere}"
            ) from error

    def enter(self, activity: str, step: int) -> None:
        """Note what this rank does from now on, after so many finished steps."""
        self._now = (step, activity, time.monotonic())

    def _run(self) -> None:
        while True:
            # A full or lost disk must not end training; the next renewal tries again.
            with contextlib.suppress(OSError):
                try:
                    self._check()
                except ValueError:
                    return  # the main thread ends the run with this error when it writes
                self._write()
                if self._world.size > 1:
                    self._watch()
            if self._ended.wait(self._renew_s):
                return

    def _write(self) -> None:
        step, activity, since = self._now
        state = RankState(
            rank=self._world.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            stage=self._stage,
            step=step,
            activity=activity,
            seconds=round(time.monotonic() - since, 1),
        )
        write_text(self._path(self._world.rank), json.dumps(asdict(state)), durable=False)

    def _watch(self) -> None:
        """Warn about ranks that are elsewhere, once for each activity; end after the time limit."""
        step, activity, since = self._now
        waited = time.monotonic() - since
        expired = waited >= self._timeout_s
        if not expired and (waited < self._silent_s or self._told == (step, activity)):
            return
        elsewhere = self._find_elsewhere()
        if not elsewhere or not (expired or self._world.is_main):
            return
        self._told = step, activity
        end = "; this rank ends (collective_timeout_s)" if expired else ""
        sys.stderr.write(
            f"coat-vlm: WARNING rank {self._world.rank} is {activity} for {waited:.0f} s, after "
            f"step {step}; it may be waiting for: {elsewhere}{end}\n"
        )
        if expired:
            sys.stderr.flush()
            os._exit(EXIT_LOST_RANK)

    def _find_elsewhere(self) -> str:
        """Describe the ranks that do not respond, or do not do what this one does."""
        states = read_states(self._folder.parent)
        found = [
            state.describe(min(self._silent_s, self._timeout_s))
            for state in states
            if state.age_s >= min(self._silent_s, self._timeout_s)
            or (state.step, state.activity) != self._now[:2]
        ]
        missing = sorted(set(range(self._world.size)) - {state.rank for state in states})
        found += [f"rank {rank} has ended, or has not started this stage" for rank in missing]
        return "; ".join(found)

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"


def read_states(run_dir: Path) -> list[RankState]:
    """Read the ranks' last states, by rank; empty if no rank is training or all ended in order.

    Ages are differences of modification times. The newest file is taken as now if this process
    cannot write to the folder.
    """
    folder = run_dir / FOLDER
    found: list[tuple[float, RankState]] = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found.append((path.stat().st_mtime, RankState(**values)))
        except (FileNotFoundError, ValueError, TypeError):
            continue  # the rank ended or replaces its file in this moment, or the file was damaged
    if not found:
        return []
    now = max(renewed for renewed, _ in found)
    probe = folder / f".now-{os.getpid()}"
    with contextlib.suppress(OSError):
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    return [replace(state, age_s=round(max(0.0, now - renewed), 1)) for renewed, state in found]
