"""Kills a run of 1.95B parameters on two GPUs and resumes it: ``large_resume.py --help``.

Per ZeRO stage, two starts of the same recipe: rank 1 of the first gets SIGKILL at step 12, when
the checkpoint of step 8 is complete; the second continues from that. The states of both at step 8
(as saved, as loaded) and at step 12, and the rows of steps 9 to 12 in metrics.jsonl, are compared
bit by bit. If the steps differ, a third start measures how much those of two uninterrupted runs
do, and two more compare them in a deterministic mode. Prints a line of JSON for each measurement.

Without GPUs the same runs on two processes joined by gloo, for ``--size tiny``.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from fault_runs import ENV, TORCHRUN, Run, alive, count_steps, descendants

from coat_datasets.scenes import make_scenes
from coat_vlm.checkpoint.load import list_checkpoints
from coat_vlm.checkpoint.manifest import MANIFEST, read_manifest
from coat_vlm.config import ModuleTraining, Recipe, SourceConfig, StageConfig, TrackingConfig
from coat_vlm.config.load import save_recipe
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.distributed import ALONE
from coat_vlm.export.hugging_face import save_model
from coat_vlm.model import CoatVlmConfig, build_model
from coat_vlm.model.processor import build_processor, prepare_tokenizer, train_tokenizer
from coat_vlm.plan.stage import use_published_shapes
from coat_vlm.run.heartbeat import FOLDER

HERE = Path(__file__).parent
RANKS = 2
VOCABULARY = 400
"""Tokens of the tokenizer; the embeddings keep the published number of rows."""
SAVES, CHECKPOINT, END = 4, 8, 12
"""Steps: between two saves, of the checkpoint that is loaded, at which rank 1 is killed."""
LIMIT_S = 400.0
"""Within this a start must reach its end."""
ORPHAN_S = 60.0
"""Within this all processes must have ended after the kill."""
ROW = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "tiles", "supervised_tokens")
"""What must be equal in two runs; the other entries of a row are times and memory."""


def write_line(measured: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"measured": measured, **values}) + "\n")
    sys.stdout.flush()


def build_recipe(size: str, data: Path) -> Recipe:
    """A recipe that trains all modules on captions; every row has an image."""
    trains = ModuleTraining(train=True, lr=1e-5)
    stage = StageConfig(
        data=[SourceConfig(name="captions", path=str(data / "captions.json"))],
        vision=trains, projector=trains, language=trains,
        batch_size=8, micro_batch_size=2, max_steps=END, save_steps=SAVES,
    )  # fmt: skip
    sys.path.append(str(HERE.parents[1] / "scripts" / "bench"))
    from step_models import SIZES

    tokenizer = TokenizerConfig(train_vocab_size=VOCABULARY)
    recipe = Recipe(
        name=f"large-{size}",
        output_dir="unused",
        model=dataclasses.replace(SIZES[size].model, max_length=512, tokenizer=tokenizer),
        stages={"sft": stage},
        precision="coat",
        num_workers=0,
        save_total_limit=1,
        tracking=TrackingConfig(tensorboard=False),
    )
    return use_published_shapes(recipe)


def make_start(recipe: Recipe, data: Path, folder: Path) -> None:
    """Save a model of random weights, which a GPU draws faster than every start could."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = json.loads((data / "captions.json").read_text())
    texts = [turn["value"] for row in rows for turn in row["conversations"]]
    tokenizer = prepare_tokenizer(train_tokenizer(texts, VOCABULARY), images=True)
    torch.manual_seed(0)
    begun = time.monotonic()
    with device:
        model = build_model(recipe.model, tokenizer, torch.bfloat16)
    processor = build_processor(recipe.model, tokenizer, cast(CoatVlmConfig, model.config))
    save_model(folder, model, processor, recipe, "sft", 0, ALONE)
    write_line(
        "model",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        versions={"torch": torch.__version__, "deepspeed": version("deepspeed")},
        seconds=round(time.monotonic() - begun, 1),
    )


def read_rows(run_dir: Path, kind: str) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl of one kind by step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if row["kind"] == kind}


def read_digests(folder: Path, event: str, step: int) -> dict[str, str]:
    """The digests of all ranks; their names begin with the rank."""
    return {
        f"rank {rank}: {name}": value
        for rank in range(RANKS)
        for name, value in json.loads((folder / f"{event}-{step}-{rank}.json").read_text()).items()
    }


class Case:
    """The starts of one ZeRO stage in one mode, in a run folder of their own."""

    def __init__(self, folder: Path, recipe: Recipe, *, deterministic: bool = False) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.checkpoints = self.run_dir / "sft" / "checkpoints"
        self.mode = "deterministic" if deterministic else "default"
        self._recipe = dataclasses.replace(recipe, output_dir=str(self.run_dir))
        self._starts = 0
        for name in ("killed", "resumed"):
            (folder / name).mkdir(parents=True)

    @property
    def about(self) -> dict[str, Any]:
        return {"zero_stage": self._recipe.zero_stage, "mode": self.mode}

    def start(self, name: str, *, kill_at: int | None, async_save: bool = True) -> Run:
        """Start the ranks; their digests are written into the folder ``name``."""
        path = self.folder / f"{name}.yaml"
        save_recipe(dataclasses.replace(self._recipe, async_save=async_save), path)
        options = {
            "digests": str(self.folder / name),
            "checkpoints": str(self.checkpoints),
            "kill_at": kill_at,
            "deterministic": self.mode == "deterministic",
        }
        words = [*TORCHRUN, str(HERE / "observed_rank.py"), json.dumps(options)]
        env = {**ENV, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS))}
        if self.mode == "deterministic":
            env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch requires it before CUDA starts
        words += ["train", str(path), "--resume", "auto"]
        return Run(words, self.folder / f"{name}.log", env)

    def kill(self) -> dict[int, dict[str, Any]]:
        """Train until rank 1 dies, and kill the launcher; returns the rows of the steps."""
        begun = time.monotonic()
        run = self.start("killed", kill_at=END)
        victim = self.folder / "killed" / f"reached-{END}-1.json"
        # torchrun would wait for half a minute for the other rank, which is in a collective.
        run.wait_for(
            lambda: victim.is_file() and count_steps(self.run_dir) == END, "steps", LIMIT_S
        )
        ranks = descendants(run.pid)
        rank_1 = json.loads((self.run_dir / FOLDER / "rank-00001.json").read_text())["pid"]
        run.wait_for(lambda: not alive(rank_1), "the end of rank 1")
        trained = time.monotonic() - begun
        run.send(signal.SIGKILL)
        killed = time.monotonic()
        run.end()
        while left := [pid for pid in ranks if alive(pid)]:
            assert time.monotonic() < killed + ORPHAN_S, f"orphans: {left}"
            time.sleep(0.02)
        found = [path.name for path in list_checkpoints(self.checkpoints)]
        assert found == [f"step-{CHECKPOINT:08d}"], found
        self._measure_saves(async_save=True, written=self.checkpoints / found[0])
        write_line(
            "kill", **self.about, killed_at=END, newest_checkpoint=CHECKPOINT,
            seconds_until_kill=round(trained, 1),
            seconds_until_all_ended=round(time.monotonic() - killed, 2),
        )  # fmt: skip
        return read_rows(self.run_dir, "step")

    def resume(self) -> dict[int, dict[str, Any]]:
        """Continue to the end; returns the rows of the steps."""
        begun = time.monotonic()
        run = self.start("resumed", kill_at=None, async_save=False)
        status = run.end(LIMIT_S)
        assert status == 0, run.output()[-5000:]
        assert f"continues from {self.checkpoints}/step-{CHECKPOINT:08d}" in run.output()
        self._measure_saves(async_save=False)
        write_line("resume", **self.about, seconds=round(time.monotonic() - begun, 1))
        return read_rows(self.run_dir, "step")

    def _measure_saves(self, *, async_save: bool, written: Path | None = None) -> None:
        saves = read_rows(self.run_dir, "save")
        steps = {step: row["step_s"] for step, row in read_rows(self.run_dir, "step").items()}
        values: dict[str, Any] = {"async_save": async_save}
        if written is None:
            saves = {END: saves[END]}
        else:
            size = sum(entry.size for entry in read_manifest(written).values())
            # Its manifest is written last, before the rename.
            done = (written / MANIFEST).stat().st_mtime - saves[CHECKPOINT]["time"]
            values |= {"bytes": size, "written_in_background_s": round(done, 2)}
            values["step_s"] = statistics.median(steps[n] for n in range(2, SAVES + 1))
            values["step_s_while_writing"] = statistics.median(
                steps[n] for n in range(CHECKPOINT + 1, END + 1)
            )
        values["save_s"] = {f"step {step}": row["save_s"] for step, row in saves.items()}
        write_line("save", **self.about, **values)

    def compare_states(self) -> dict[int, list[str]]:
        """Compare what was saved and what was loaded, and the states at the end."""
        different = {}
        for step, event in ((CHECKPOINT, "loaded"), (END, "reached")):
            saved = read_digests(self.folder / "killed", "reached", step)
            found = read_digests(self.folder / "resumed", event, step)
            names = {name for name in saved | found if saved.get(name) != found.get(name)}
            different[step] = sorted(names)
            sizes = [int(value) for name, value in saved.items() if name.endswith(": bytes")]
            write_line(
                "state", **self.about, step=step, other=event, digests=len(saved),
                bytes_per_rank=sizes, different=len(names), first=sorted(names)[:5],
            )  # fmt: skip
        return different


def select(rows: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps after the checkpoint without times and memory."""
    return [{key: rows[step][key] for key in ROW} for step in range(CHECKPOINT + 1, END + 1)]


def distance(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> float:
    """The largest difference of two losses of the steps after the checkpoint."""
    return max(abs(a[step]["loss"] - b[step]["loss"]) for step in range(CHECKPOINT + 1, END + 1))


def kill_and_resume(case: Case) -> tuple[dict[int, dict[str, Any]], float]:
    """Kill, resume and compare; returns the rows before the kill, and how far losses are apart.

    The distance is 0 only if the rows and the states at the end are the same bit by bit.

    Raises:
        AssertionError: the loaded state is not the saved one.
    """
    killed = case.kill()
    resumed = case.resume()
    different = case.compare_states()
    assert not different[CHECKPOINT], f"other state after loading: {different[CHECKPOINT][:20]}"
    same = select(killed) == select(resumed) and not different[END]
    apart = distance(killed, resumed)
    write_line(
        "later steps", **case.about, steps=[CHECKPOINT + 1, END], identical=same,
        losses=[[row["loss"] for row in select(rows)] for rows in (killed, resumed)],
        largest_difference=apart,
    )  # fmt: skip
    shutil.rmtree(case.run_dir)
    return killed, 0.0 if same else max(apart, sys.float_info.min)


def measure(folder: Path, recipe: Recipe, *, deterministic_only: bool) -> None:
    """Measure one ZeRO stage.

    Raises:
        AssertionError: a resumed run differs by more than two uninterrupted ones do, or at all in
            the deterministic mode.
    """
    if not deterministic_only:
        killed, apart = kill_and_resume(Case(folder / "default", recipe))
        if apart == 0.0:
            return
        _measure_spread(folder, recipe, killed, apart)
    _, apart = kill_and_resume(Case(folder / "deterministic", recipe, deterministic=True))
    assert apart == 0.0, "later steps differ in the deterministic mode"


def _measure_spread(
    folder: Path, recipe: Recipe, killed: dict[int, dict[str, Any]], apart: float
) -> None:
    """Train once more up to the kill, and compare ``apart`` with the difference of the losses."""
    other = Case(folder / "again", recipe)
    spread = distance(killed, other.kill())
    shutil.rmtree(other.run_dir)
    write_line("two uninterrupted runs", **other.about, largest_difference=spread)
    assert apart <= spread, (
        f"the resumed run differs by {apart}, two uninterrupted ones by {spread}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a large run and resume it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=("tiny", "1b", "2b"), default="2b")
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[2, 3], choices=range(4))
    parser.add_argument("--deterministic", action="store_true", help="only the deterministic mode")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    make_scenes(folder / "data", num_train=64, num_val=8, num_test=8)
    recipe = build_recipe(args.size, folder / "data")
    make_start(recipe, folder / "data", folder / "start")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for stage in args.zero_stages:
        begun = time.monotonic()
        own = dataclasses.replace(recipe, zero_stage=stage, init_from=str(folder / "start"))
        measure(folder / f"zero-{stage}", own, deterministic_only=args.deterministic)
        write_line("total", zero_stage=stage, seconds=round(time.monotonic() - begun, 1))


if __name__ == "__main__":
    main()
