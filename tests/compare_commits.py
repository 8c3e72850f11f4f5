"""Run two commits on this machine and compare what they compute, bit by bit.

For changes that must not change numbers: restructuring, renaming, moved files.

  python tests/compare_commits.py 6626d5c              # with the files as they are now
  python tests/compare_commits.py 6626d5c HEAD --only losses --precision bf16 coat
  python tests/compare_commits.py HEAD HEAD --only losses                   # is it repeatable?
  python tests/compare_commits.py HEAD HEAD --only losses --change seed=1   # it must differ

What is compared (--only takes some of these):
  losses      ten training steps of the quickstart recipe on a small generated data set, in each
              precision: ZeRO 0 in one process, ZeRO 3 in two. Its three stages have frozen modules
              (align), gradient checkpointing (pretrain), packed rows and stochastic rounding of
              FP8 moments (sft). All of metrics.jsonl but times, and all files of the run folder.
  checkpoint  both commits continue from a checkpoint that the first one wrote in stage sft.
  recipes     every built-in recipe with its defaults filled in, ${VARIABLES} set to dummies.
  help        --help of every command.

The exit status is 0 if all is equal, 1 if not, 2 if the first commit fails. Differences in help
texts, in descriptive rows of metrics.jsonl (group "rows") and in files other than data, weights and
optimizer states (group "files") are shown and leave the status 0: a commit may change these if it
says why.

Everything runs on the CPU with one thread, in the environment of the Python that runs this script;
only the project's own packages are those of each commit. Results of the first commit stay in --out,
so the next comparison with it takes half of the time. They are valid for one machine: do not commit
them. The second is run anew each time; its folder is deleted unless it differs.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("losses", "checkpoint", "recipes", "help")
PRECISIONS = ("fp32", "bf16", "fp8_linear", "coat", "coat_lean")
RESUMED = ("bf16-zero0", "coat-zero0", "coat_lean-zero0", "coat-zero3")
"""The training setups whose checkpoints are continued."""
SCENES = ("--out", "made", "--num-train", "48", "--num-val", "8", "--num-test", "8")
RECIPE = (
    *("quickstart", "output_dir=run", "tracking.tensorboard=false", "save_total_limit=3"),
    *("model.image.augment=crop_flip", "stages.align.max_steps=2", "stages.pretrain.max_steps=3"),
    *("stages.pretrain.gradient_checkpointing=true", "stages.sft.max_steps=5"),
    *("stages.sft.save_steps=2", "stages.sft.packing=true", "stages.sft.betas=[0.9,0.999]"),
)
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MAY_DIFFER = ("help", "rows", "files")
"""Groups of values that do not decide the exit status."""
MEASURED = re.compile(r"time|phases|.*(_s|_mb|_per_gpu)")
"""Keys of metrics.jsonl that differ from run to run; the unit is in the name."""
RENAMED = {"trained_tokens": "supervised_tokens"}
"""Deprecated keys of metrics.jsonl -> their names."""
UNREPEATABLE = re.compile(r"(metrics|manifest|made|random-\d+)\.jsonl?|lengths.*\.npz")
"""Files with times, hashes of other files or of the code, or states of unseeded generators."""

HELP_PAGES = """
import argparse, json, runpy

def pages(parser, words):
    found = {words: parser.format_help()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= pages(child, f"{words} {name}")
    return found

def show(parser, *_, **__):
    print(json.dumps(pages(parser, "coat-vlm")))
    raise SystemExit

argparse.ArgumentParser.parse_known_args = show  # the first parser that is used has all commands
runpy.run_module("coat_vlm.cli", run_name="__main__")
"""
RESOLVED_RECIPES = """
import importlib, json, sys

for place in ("coat_vlm.config.load", "coat_vlm.config", "coat_vlm.recipe_file"):
    try:
        load = importlib.import_module(place).load_recipe
        break
    except (ImportError, AttributeError):
        pass
print(json.dumps({name: load(name).to_dict() for name in sys.argv[1:]}))
"""

Result = dict[str, dict[str, Any]]
"""What a job gave: group -> name -> value. The group ``error`` says that it failed."""
Job = Callable[[Path], Result]
"""Makes a result in an empty folder, in which all that it wrote stays."""


@dataclass(frozen=True)
class Side:
    """One of the two states of the code, and the folder of its packages and results."""

    name: str
    folder: Path

    def run(self, words: list[str], cwd: Path, **variables: str) -> str:
        """Run Python with this side's packages; returns what it printed.

        Raises:
            RuntimeError: it failed; the message ends with the path of a file with all it printed.
        """
        packages = [str(self.folder / "packages"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, packages)),
            "PYTHONSAFEPATH": "1",  # nothing is imported from cwd
            "GIT_CEILING_DIRECTORIES": str(self.folder),  # runs write no commit into their files
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
            **variables,
        }
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            (cwd / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"status {done.returncode}: {last}: {cwd / 'log'}")
        return done.stdout

    def result(self, name: str, job: Job) -> Result:
        """The result ``name``: what an earlier comparison left, or else what the job gives."""
        target = self.folder / name
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            started = time.perf_counter()
            (folder / "result.json").write_text(json.dumps(job(folder)), encoding="utf-8")
            print(f"{self.name}: {name}, {time.perf_counter() - started:.0f} s", flush=True)
            try:
                folder.rename(target)
            except OSError:  # a comparison that runs beside this one was faster
                shutil.rmtree(folder)
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
        self.run(["-m", "coat_vlm.cli", "data", "make", "scenes", *SCENES], folder)
        return {"data": dict(file_hashes(folder / "made"))}

    def resolve_recipes(self, folder: Path) -> Result:
        """Job: fill in the defaults of all built-in recipes."""
        listed = self.run(["-m", "coat_vlm.cli", "recipes"], folder)
        names = [line.split()[0] for line in listed.splitlines()]
        texts = [path.read_text("utf-8") for path in self.folder.glob("packages/**/*.yaml")]
        dummies = {name: f"/{name}" for name in re.findall(r"\$\{(\w+)\}", "\n".join(texts))}
        recipes = json.loads(self.run(["-c", RESOLVED_RECIPES, *names], folder, **dummies))
        return {"recipes": dict(leaf for name in recipes for leaf in flat(recipes[name], name))}

    def collect_help(self, folder: Path) -> Result:
        """Job: collect the help pages."""
        return {"help": json.loads(self.run(["-c", HELP_PAGES], folder))}

    def train(self, setup: str, options: list[str], folder: Path) -> Result:
        """Job: train. Relative paths make the recipes of both sides the same."""
        (folder / "runs").mkdir()
        (folder / "runs" / "quickstart-data").symlink_to(self.folder / "data" / "made")
        precision, zero = setup.split("-zero")
        how = [f"precision={precision}", f"zero_stage={zero}", *options]
        launcher = TWO_RANKS if zero == "3" else ()
        self.run([*launcher, "-m", "coat_vlm.cli", "train", *RECIPE, *how], folder)
        result: Result = {"losses": {}, "weights": {}, "rows": {}, "files": {}}
        for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            group = "losses" if row["kind"] in ("step", "val") else "rows"
            place = [str(row[key]) for key in ("stage", "kind", "status", "step") if key in row]
            kept = {
                RENAMED.get(key, key): value
                for key, value in row.items()
                if not MEASURED.fullmatch(key)
            }
            result[group] |= flat(kept, " ".join(place))
        for name, digest in file_hashes(folder / "run"):
            result["weights" if name.endswith(".safetensors") else "files"][name] = digest
        return result

    def resume(self, setup: str, trained: Path, folder: Path) -> Result:
        """Job: continue from the first checkpoint of stage sft in the folder of another job."""
        run = shutil.copytree(trained / "run", folder / "run")
        # Without the earlier rows, those that are written say which steps were really run.
        (run / "metrics.jsonl").unlink()
        shutil.rmtree(run / "sft" / "model")
        for later in sorted((run / "sft" / "checkpoints").iterdir())[1:]:
            shutil.rmtree(later)
        return self.train(setup, ["--resume", "auto"], folder)


def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, by dotted name below ``name``."""
    if not isinstance(value, dict | list) or not value:
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(item, f"{name}.{key}")


def file_hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """The SHA-256 of each file that is the same in every run, by its path below ``folder``."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not UNREPEATABLE.fullmatch(path.name):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield path.relative_to(folder).as_posix(), digest


def prepare(source: str, out: Path, *, is_first: bool) -> Side:
    """A side with its packages: of a commit, or for the second also of WORKTREE or a folder.

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
        versions = [version(package) for package in ("torch", "transformers", "deepspeed", "numpy")]
        settings = repr([SCENES, RECIPE, MEASURED, UNREPEATABLE, sys.version, versions]).encode()
        kept = out / f"{name}-{hashlib.sha256(settings).hexdigest()[:8]}"
        if is_first:
            side = Side(f"first, {name}", kept)
        else:
            side = Side(f"second, {name}", Path(tempfile.mkdtemp(prefix="second-", dir=out)))
        side.result("packages", partial(side.copy_packages, tree))
    return side


def make_results(side: Side, first: Side, args: argparse.Namespace) -> dict[str, Result]:
    """All results of a side that the user wants, ``args.jobs`` at a time.

    Raises:
        RuntimeError: a job of the first side failed. With the second side, that is a result.
    """
    setups = [f"{name}-zero{zero}" for name in args.precision for zero in (0, 3)]
    resumed = [setup for setup in setups if setup in RESUMED and "checkpoint" in args.only]
    if "losses" not in args.only:
        setups = resumed if side is first else []  # the checkpoints of the first are needed
    data: dict[str, Job] = {"data": side.make_data} if setups or resumed else {}
    changes = [] if side is first else args.change
    losses: dict[str, Job] = {f"losses/{s}": partial(side.train, s, changes) for s in setups}
    others: dict[str, Job] = {"recipes": side.resolve_recipes, "help": side.collect_help}
    others = {name: job for name, job in others.items() if name in args.only}
    for setup in resumed:
        trained = first.folder / "losses" / setup
        others[f"checkpoint/{setup}"] = partial(side.resume, setup, trained)

    def outcome(name: str, job: Job) -> Result:
        try:
            return side.result(name, job)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            if side is first:
                raise
            return {"error": {type(error).__name__: str(error)}}

    results: dict[str, Result] = {}
    for jobs in (data, losses, others):  # each needs what those before it made
        with ThreadPoolExecutor(args.jobs) as pool:
            results |= zip(jobs, pool.map(outcome, jobs.keys(), jobs.values()), strict=True)
    return results


def differences(first: Result, second: Result) -> list[tuple[str, str, str, str]]:
    """What differs: group, name, and both values as JSON, ``-`` for one that is missing."""
    found = []
    for group in dict.fromkeys([*first, *second]):
        sides = first.get(group, {}), second.get(group, {})
        for name in dict.fromkeys([*sides[0], *sides[1]]):
            before, after = (json.dumps(side[name]) if name in side else "-" for side in sides)
            if before != after:
                found.append((group, name, before, after))
    return found


def report(first: dict[str, Result], second: dict[str, Result], rows: int) -> bool:
    """Print what differs; returns whether all that must be equal is.

    Args:
        first: results by name; those of the second are among them.
        second: what is compared with them.
        rows: differences shown of each group of a result.
    """
    wrong = 0
    for name, result in second.items():
        found = differences(first[name], result)
        may = sum(group in MAY_DIFFER for group, *_ in found)
        wrong += len(found) - may
        verdict = f"{len(found) - may} differ" + f", {may} that may differ" * bool(may)
        number = sum(len(values) for values in first[name].values())
        print(f"{name:<28} {number:>5} values  {verdict if found else 'equal'}")
        for group in dict.fromkeys(group for group, *_ in found):
            lines = [line for g, *line in found if g == group]
            for key, *values in lines[:rows]:
                if group == "help":
                    texts = [[] if v == "-" else json.loads(v).splitlines() for v in values]
                    diff = difflib.unified_diff(texts[0], texts[1], lineterm="", n=0)
                    print(f"  {key} --help", *list(diff)[2:], sep="\n    ")
                else:
                    before, after = (v if group == "error" else v[:32] for v in values)
                    print(f"  {group:<8} {key:<60} {before}  ->  {after}")
            if len(lines) > rows:
                print(f"  {group:<8} ... and {len(lines) - rows} more (--rows N shows more)")
    return not wrong


def main() -> int:
    """Compare as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("first", help="a commit, the reference")
    second = "a commit, another checkout's folder, or (default) WORKTREE: the files as they are"
    add("second", nargs="?", default="WORKTREE", help=second)
    add("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    add("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    add("--jobs", type=int, default=2, help="runs at a time; default 2")
    add("--rows", type=int, default=6, help="differences shown per run and group; default 6")
    add("--out", type=Path, default=ROOT / "runs" / "compare_commits", help="folder of results")
    change = "override the recipe of the second's losses, to see that differences are found"
    add("--change", nargs="+", default=[], metavar="key=value", help=change)
    args = parser.parse_args()
    started = time.perf_counter()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        first = prepare(args.first, out, is_first=True)
        second = prepare(args.second, out, is_first=False)
        expected = make_results(first, first, args)
    except RuntimeError as error:
        print(f"nothing was compared: {error}")
        return 2
    equal = report(expected, make_results(second, first, args), args.rows)
    seconds = round(time.perf_counter() - started)
    print(f"{first.name}; {second.name}: {'equal' if equal else 'DIFFERENT'} ({seconds} s)")
    if not equal:
        print(f"what the second left: {second.folder}")
        return 1
    shutil.rmtree(second.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
