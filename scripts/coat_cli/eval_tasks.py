"""``coat-vlm eval --tasks``: official benchmarks, from the questions to the report."""

import argparse
import os
from pathlib import Path
from typing import Any

from coat_cli.command import PRECISIONS, say

EXAMPLES = """\
  coat-vlm eval --model runs/quickstart --tasks pope,gqa --data benchmarks --out out
  coat-vlm eval --model runs/nvila/sft/model --tasks textvqa,textvqa_no_ocr \\
      --data benchmarks --out out --limit 100
  torchrun --nproc-per-node 8 --no-python coat-vlm eval --model llava-hf/llava-1.5-7b-hf \\
      --tasks videomme,videomme_subtitles --data benchmarks --out out

Official benchmarks (--tasks) are read from --data/TASK in their official files or in the Hub's
Parquet files: coat-vlm data download TASK fetches them, docs/evaluation.md lists them. --model is a
run folder, a model folder, or any image-text-to-text model of Hugging Face, which is shown a video
as a video if it takes videos, else as images. A killed run goes on with the same command. Every GPU
that torchrun starts a process for answers its share.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what belongs to ``--tasks``."""
    suite = parser.add_argument_group("official benchmarks")
    suite.add_argument(
        "--tasks", metavar="TASK,...",
        help="pope, gqa, vqav2, textvqa, vizwiz, seedbench, mmmu, videomme; other prompts: "
        "textvqa_no_ocr, mmmu_all_images, videomme_subtitles; ranking the choices' texts in place "
        "of asking for a letter: seedbench_likelihood, seedbench_likelihood_sum",
    )  # fmt: skip
    suite.add_argument("--split", help="e.g. test; default: the split with answers")
    suite.add_argument(
        "--profile",
        help="scoring rules: official (default), lmms, vlmeval",
    )
    model = parser.add_argument_group("the model, also with --task")
    model.add_argument(
        "--precision", choices=PRECISIONS,
        help="how to compute; default: a run folder as it was trained, a model folder plainly in "
        "its weights' dtype (FP32 on a CPU)",
    )  # fmt: skip
    model.add_argument(
        "--device", help="e.g. cpu; also with --run; default: the process's GPU if there is one"
    )
    suite.add_argument(
        "--num-frames", type=int,
        help="frames of a video for models that are not of this project; default 8 (run.json "
        "says whether they were handed over as a video or as images)",
    )  # fmt: skip
    model.add_argument(
        "--num-workers", type=int,
        help="processes that decode ahead; default 0 on a CPU and with --task, else up to 12",
    )  # fmt: skip
    model.add_argument(
        "--overwrite", action="store_true", help="replace answers of another model or prompt"
    )


def evaluate_tasks(args: argparse.Namespace) -> int:
    """Run the benchmarks that the arguments name, one after the other."""
    from coat_eval.answerer import ModelOptions, load_answerer
    from coat_eval.benchmark import Settings
    from coat_eval.generation import Generation, default_workers
    from coat_eval.official import headline
    from coat_eval.ranks import joined_ranks, own_device
    from coat_eval.suite import choose, run_benchmark

    choices = [
        choose(
            name.strip(),
            args.data,
            split=args.split or "",
            limit=args.limit,
            settings=Settings(profile=args.profile or Settings().profile),
            overwrite=args.overwrite,
        )
        for name in args.tasks.split(",")
    ]
    device = own_device(args.device)
    generation = Generation(
        batch_size=args.batch_size,
        max_new_tokens=128 if args.max_new_tokens is None else args.max_new_tokens,
        num_workers=default_workers(device.type, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if args.num_workers is None
        else args.num_workers,
    )
    with joined_ranks() as world:
        options = ModelOptions(
            device=device,
            precision=args.precision,
            num_frames=8 if args.num_frames is None else args.num_frames,
        )
        answerer = load_answerer(args.model, options)
        for choice in choices:
            report = run_benchmark(
                answerer,
                choice,
                args.data,
                args.out,
                generation,
                world=world,
                model_name=args.model,
            )
            if world.is_main:
                say(f"{choice.name}\n{headline(choice.benchmark, report)}")
                say(f"{_where(args.out / choice.name, report)}\n")
    return 0


def _where(folder: Path, report: dict[str, Any]) -> str:
    text = f"{folder / 'report.json'} has all metrics and items"
    problems = folder / "media_problems.jsonl"
    if report["n_asked_without"]:
        text = (
            f"{report['n_asked_without']} questions were asked without their subtitles, which "
            f"cannot be read: {problems} lists them\n{text}"
        )
    if report["n_media_problems"]:
        text = (
            f"{report['n_media_problems']} questions were not asked and count as wrong, because an "
            f"image or video cannot be read: {problems} lists them\n{text}"
        )
    return text
