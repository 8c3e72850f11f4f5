"""Describes a run folder in a few lines, for ``coat-vlm status``."""

from pathlib import Path

from coat_vlm.checkpoint.load import list_checkpoints
from coat_vlm.report.run_folder import StageLog, read_run_folder
from coat_vlm.run.heartbeat import read_states

_COLUMNS = ("stage", "state", "step", "loss", "newest checkpoint")


def describe_run(run_dir: Path) -> tuple[str, bool]:
    """Describe how far a run is, and what its processes do or did last.

    Args:
        run_dir: the run folder; nothing in it is changed.

    Returns:
        The text, and whether all processes respond that have not ended in order.

    Raises:
        FileNotFoundError: the folder is not a run folder.
    """
    run = read_run_folder(run_dir)
    states = read_states(run_dir)
    rows = [_COLUMNS, *(_describe_stage(run_dir, stage) for stage in run.stages)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [state.describe() for state in states] or ["no process trains in this folder"]
    return "\n".join(lines), all(state.runs for state in states)


def _describe_stage(run_dir: Path, stage: StageLog) -> tuple[str, ...]:
    last = stage.steps[-1] if stage.steps else {}
    loss = last.get("loss")
    checkpoints = list_checkpoints(run_dir / stage.name / "checkpoints")
    state = "finished" if stage.end else "not finished" if stage.start else "not started"
    return (
        stage.name,
        state,
        f"{last['step']}/{last['total_steps']}" if last else "-",
        "-" if loss is None else f"{loss:.4f}",
        checkpoints[0].name if checkpoints else "-",
    )
