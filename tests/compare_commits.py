"""Train with two commits on this machine and compare losses and weights, bit by bit.

For changes that must not change numbers: restructuring, renaming, moved files.

  python tests/compare_commits.py main                 # with the files as they are now
  python tests/compare_commits.py main HEAD --precision bf16 coat
  python tests/compare_commits.py HEAD HEAD                                 # is it repeatable?
  python tests/compare_commits.py HEAD HEAD --change seed=1                 # it must differ

Compared are ten training steps of the quickstart recipe on a small generated data set, in each
precision: ZeRO 0 in one process, ZeRO 3 in two. Its three stages have frozen modules (align),
gradient checkpointing (pretrain), packed rows and stochastic rounding of FP8 moments (sft). Each
commit then continues from its own first checkpoint of stage sft. Losses, gradient norms, learning
rates and token counts of ``metrics.jsonl``, the images and questions of the data set and the
tensors of the saved models must be equal.

The exit status is 0 if all is equal, 1 if not, 2 if a run of the first commit fails. All runs use
the CPU with one thread, in the environment of the Python that runs this script; only the project's
own packages are those of each commit. Results of the first commit stay in --out, so the next
comparison with it takes half of the time. They are valid for one machine: do not commit them.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = {
    **{name: [f"precision={name}"] for name in ("fp32", "bf16", "fp8_linear", "coat")},
    "coat-recompute_qkv": ["precision=coat", "fp8.recompute_qkv=true"],
}
RESUMED = ("bf16-zero0", "coat-zero0", "coat-recompute_qkv-zero0", "coat-zero3")
"""The training setups that are also continued from a checkpoint."""
SCENES = ("--num-train", "48", "--num-val", "8", "--num-test", "8")
RECIPE = (
    *("quickstart", "output_dir=run", "tracking.tensorboard=false", "save_total_limit=3"),
    *("stages.align.max_steps=2", "stages.pretrain.max_steps=3"),
    *("stages.pretrain.gradient_checkpointing=true", "stages.sft.max_steps=5"),
    *("stages.sft.save_steps=2", "stages.sft.packing=true", "stages.sft.betas=[0.9,0.999]"),
)
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
COMPARED = re.compile(r"(val_)?loss.*|grad_norm|lr.*|supervised_tokens|tokens|samples")
"""Keys of metrics.jsonl that must be equal."""

Result = dict[str, Any]
"""What a job gave, by name; ``error`` says that it failed."""
Job = Callable[[Path], Result]
"""Makes a result in an empty folder, in which all that it wrote stays."""


@dataclass(frozen=True)
class Side:
    """One of the two states of the code, and the folder of its packages and results."""

    name: str
    folder: Path

    def run(self, words: list[str], cwd: Path) -> None:
        """Run Python with this side's packages.

        Raises:
            RuntimeError: it failed; the message ends with the path of a file with all it printed.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "packages"),
            "PYTHONSAFEPATH": "1",  # nothing is imported from cwd
            "GIT_CEILING_DIRECTORIES": str(self.folder),  # runs write no commit into their files
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            (cwd / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"status {done.returncode}: {last}: {cwd / 'log'}")

    def result(self, name: str, job: Job) -> Result:
        """Return the result ``name``: what an earlier comparison left, or what the job gives."""
        target = self.folder / name
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            started = time.perf_counter()
            (folder / "result.json").write_text(json.dumps(job(folder)), encoding="utf-8")
            print(f"{self.name}: {name}, {time.perf_counter() - started:.0f} s", flush=True)
            folder.rename(target)
        return json.loads((target / "result.json").read_text(encoding="utf-8"))

    def copy_packages(self, tree: Path, folder: Path) -> Result:
        """Job: copy the top-level packages ``coat_*``, in ``tree`` or in a folder of it."""
        for init in [*tree.glob("coat_*/__init__.py"), *tree.glob("*/coat_*/__init__.py")]:
            if not (init.parent.parent / "__init__.py").exists():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(init.parent, folder / init.parent.name, ignore=ignored)
        return {}

    def make_data(self, folder: Path) -> Result:
        """Job: make the data set."""
        self.run(["-m", "coat_vlm.cli", "data", "scenes", "--to", "made", *SCENES], folder)
        made = (folder / "made").rglob("*")  # made.json describes the maker
        kept = [p for p in made if p.suffix in (".json", ".png") and p.name != "made.json"]
        return {path.relative_to(folder).as_posix(): hash_file(path) for path in sorted(kept)}

    def train(self, setup: str, options: list[str], folder: Path) -> Result:
        """Job: train. Relative paths make the recipes of both sides the same."""
        (folder / "runs").mkdir()
        (folder / "runs" / "quickstart-data").symlink_to(self.folder / "data" / "made")
        precision, zero = setup.split("-zero")
        words = [*RECIPE, f"zero_stage={zero}", *PRECISIONS[precision], *options]
        launcher = TWO_RANKS if zero == "3" else ()
        self.run([*launcher, "-m", "coat_vlm.cli", "train", *words], folder)
        result: Result = {}
        for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines():
            entry = json.loads(line)
            if entry.get("kind") in ("step", "val"):
                place = " ".join(str(entry[k]) for k in ("stage", "kind", "step") if k in entry)
                kept = {key: value for key, value in entry.items() if COMPARED.fullmatch(key)}
                result |= {f"{place}.{key}": value for key, value in kept.items()}
        for path in sorted((folder / "run").glob("*/model/*.safetensors")):
            result[path.relative_to(folder / "run").as_posix()] = hash_file(path)
        return result

    def resume(self, setup: str, folder: Path) -> Result:
        """Job: continue from the first checkpoint of stage sft that this side wrote."""
        run = shutil.copytree(self.folder / "losses" / setup / "run", folder / "run")
        # Without earlier entries, those that are written say which steps were really run.
        (run / "metrics.jsonl").unlink()
        shutil.rmtree(run / "sft" / "model")
        for later in sorted((run / "sft" / "checkpoints").iterdir())[1:]:
            shutil.rmtree(later)
        return self.train(setup, ["--resume", "auto"], folder)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file; of safetensors, of names and tensors without the metadata."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return hashlib.sha256(data).hexdigest()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + data[start:]).hexdigest()


def prepare(source: str, out: Path, *, is_first: bool) -> Side:
    """Return a side with its packages: of a commit, or for the second also of WORKTREE or a folder.

    Raises:
        RuntimeError: there is no such commit.
    """
    name, tree = source, ROOT if source == "WORKTREE" else Path(source)
    with tempfile.TemporaryDirectory() as extracted:
        if is_first or not (tree / "coat_vlm").is_dir():
            git = ["git", "-C", str(ROOT)]
            resolve = [*git, "rev-parse", "--verify", "--short=12", f"{source}^{{commit}}"]
            done = subprocess.run(resolve, capture_output=True, text=True, check=False)
            if done.returncode:
                folders = "" if is_first else ", WORKTREE or a folder with coat_vlm in it"
                raise RuntimeError(f"{source!r} is not a commit of {ROOT}{folders}")
            name, tree = done.stdout.strip(), Path(extracted)
            archive = subprocess.run([*git, "archive", name], stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", extracted], input=archive.stdout, check=True)
        if is_first:
            script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
            side = Side(f"first, {name}", out / f"{name}-{script}")
        else:
            side = Side(f"second, {name}", Path(tempfile.mkdtemp(prefix="second-", dir=out)))
        side.result("packages", partial(side.copy_packages, tree))
    return side


def make_results(side: Side, args: argparse.Namespace, changes: list[str]) -> dict[str, Result]:
    """Return all results of a side, ``args.jobs`` runs at a time; failures are results."""
    setups = [f"{name}-zero{zero}" for name in args.precision for zero in (0, 3)]
    resumed = [setup for setup in setups if setup in RESUMED]
    losses: dict[str, Job] = {f"losses/{s}": partial(side.train, s, changes) for s in setups}
    continued: dict[str, Job] = {f"resumed/{s}": partial(side.resume, s) for s in resumed}

    def outcome(name: str, job: Job) -> Result:
        try:
            return side.result(name, job)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    results: dict[str, Result] = {}
    for jobs in ({"data": side.make_data}, losses, continued):  # each needs what those before made
        with ThreadPoolExecutor(args.jobs) as pool:
            results |= zip(jobs, pool.map(outcome, jobs.keys(), jobs.values()), strict=True)
    return results


def report(first: dict[str, Result], second: dict[str, Result], most: int) -> bool:
    """Print what differs, ``most`` values of a run; returns whether all is equal."""
    is_equal = True
    for name, result in second.items():
        names = dict.fromkeys([*first[name], *result])
        found = [key for key in names if first[name].get(key, "-") != result.get(key, "-")]
        verdict = f"{len(found)} differ" if found else "equal"
        print(f"{name:<36} {len(first[name]):>5} values  {verdict}")
        for key in found[:most]:
            print(f"  {key:<60} {first[name].get(key, '-')}  ->  {result.get(key, '-')}")
        is_equal = is_equal and not found
    return is_equal


def main() -> int:
    """Compare as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("first", help="a commit, the reference")
    second = "a commit, another checkout's folder, or (default) WORKTREE: the files as they are"
    add("second", nargs="?", default="WORKTREE", help=second)
    add("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    add("--jobs", type=int, default=2, help="runs at a time; default 2")
    add("--differences", type=int, default=6, help="differences shown per run; default 6")
    add("--out", type=Path, default=ROOT / "runs" / "compare_commits", help="folder of results")
    change = "override the second's recipe, to see that differences are found"
    add("--change", nargs="+", default=[], metavar="key=value", help=change)
    args = parser.parse_args()
    started = time.perf_counter()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        first = prepare(args.first, out, is_first=True)
        second = prepare(args.second, out, is_first=False)
    except RuntimeError as error:
        print(f"nothing was compared: {error}")
        return 2
    expected = make_results(first, args, [])
    failed = {name: result["error"] for name, result in expected.items() if "error" in result}
    if failed:
        print(f"nothing was compared, runs of {first.name} failed: {failed}")
        return 2
    equal = report(expected, make_results(second, args, args.change), args.differences)
    seconds = round(time.perf_counter() - started)
    print(f"{first.name}; {second.name}: {'equal' if equal else 'DIFFERENT'} ({seconds} s)")
    if not equal:
        print(f"what the second left: {second.folder}")
        return 1
    shutil.rmtree(second.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
