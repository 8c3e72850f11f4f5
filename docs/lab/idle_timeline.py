"""Where in a training step the GPU waits for the CPU: "LoRA of 7.62B parameters" in 2026-11.md.

``python docs/lab/idle_timeline.py step --size 8b --precisions coat --batch 4 --profile`` runs
``coat-vlm bench`` with these arguments and prints, after each profiled step, a line per 20 ms of
it: how long the GPU was idle, and how far the CPU was ahead, that is the time between the launch of
a kernel and its start; then the longest pauses, with the kernel that ended each.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coat_bench.profile
from coat_cli.main import main

SLICE_US = 20_000
"""Length of a line's part of the step."""

PAUSES = 15
"""Number of pauses that are printed."""

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the events of torch's profiler."""


@dataclass(slots=True)
class Slice:
    """A part of the step."""

    idle_us: float = 0.0
    kernels: int = 0
    leads_us: list[float] = field(default_factory=list)
    """Time between the launch of each kernel and its start."""


def format_timeline(events: Sequence[dict[str, Any]]) -> str:
    """Format the events of an exported trace, whose times are in microseconds."""
    events = [event for event in events if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    first = min(event["ts"] for event in events if event.get("cat") in ("cpu_op", *LAUNCHES))
    slices: dict[int, Slice] = {}
    pauses: list[tuple[float, float, str]] = []
    busy_until = first
    on_gpu = [event for event in events if event.get("cat") in ON_GPU]
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        start, pause = event["ts"], max(0.0, event["ts"] - busy_until)
        part = slices.setdefault(int((start - first) // SLICE_US), Slice())
        part.idle_us += pause
        part.kernels += 1
        launch = launched.get(event.get("args", {}).get("correlation"))
        if launch is not None:
            part.leads_us.append(start - launch)
        pauses.append((pause, start - first, event["name"]))
        busy_until = max(busy_until, start + event["dur"])
    lines = ["from ms: idle ms; kernels; median lead ms"]
    for number, part in sorted(slices.items()):
        lead = statistics.median(part.leads_us) / 1e3 if part.leads_us else float("nan")
        start_ms = number * SLICE_US // 1000
        lines.append(f"{start_ms}: {part.idle_us / 1e3:.2f}; {part.kernels}; {lead:.2f}")
    lines.append("longest pauses, ms, and when: the kernel after it")
    for pause, start, name in sorted(pauses, reverse=True)[:PAUSES]:
        lines.append(f"{pause / 1e3:.2f}, {start / 1e3:.2f}: {name[:60]}")
    return "\n".join(lines)


class ProfileWithTimeline(coat_bench.profile.profile):
    """Torch's profiler, which prints the timeline at its end."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.export_chrome_trace(str(path))
            sys.stdout.write(format_timeline(json.loads(path.read_text())["traceEvents"]) + "\n")


if __name__ == "__main__":
    coat_bench.profile.profile = ProfileWithTimeline
    sys.exit(main(["bench", *sys.argv[1:]]))
