"""``coat-vlm eval``, ``score`` and ``generate``."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import PRECISIONS, Commands, command, complain, say

if TYPE_CHECKING:
    from coat_data.sample import Sample
    from coat_eval.judge import Judge

OFFICIAL = (
    "pope", "gqa", "vqav2", "textvqa", "vizwiz", "seedbench", "mmmu", "videomme",
    "mmstar", "realworldqa", "scienceqa", "mmbench", "ccbench", "ai2d",
    "mme", "chartqa", "ocrbench", "hallusionbench", "okvqa", "nextqa", "tempcompass", "tabmwp",
    "docvqa", "infovqa", "mathvista", "mathvision", "mmvet", "mvbench", "longvideobench", "mlvu",
)  # fmt: skip
"""Names of ``coat_eval.tasks.BENCHMARKS``, which takes longer to import than ``--help`` should."""
_PROFILES = (
    "scoring rules: official (default; the report names scorer and commit), lmms (lmms-eval "
    "@c228e27), vlmeval (VLMEvalKit @d21c5e9) or vlmeval@c03bc048, an earlier version"
)
"""The commits are those of ``coat_eval.benchmark.UPSTREAM``."""


def add(commands: Commands) -> None:
    """Declare ``eval``, ``score`` and ``generate``."""
    _add_eval(commands)
    _add_score(commands)
    _add_generate(commands)


def _add_eval(commands: Commands) -> None:
    parser = command(
        commands,
        "eval",
        _eval,
        "evaluate a model on question sets or official benchmarks",
        """\
  coat-vlm eval --run runs/my_vlm            # all evaluation sets of the run's recipe
  coat-vlm eval --model runs/my_vlm/sft/model --task yes_no --data my_questions --out out/yes_no
  coat-vlm eval --model runs/my_vlm --tasks pope,gqa --data benchmarks --out out/official
  coat-vlm eval --model runs/my_vlm/sft/model --tasks textvqa_no_ocr,vqav2,mmmu --data benchmarks \\
      --out out/limited --limit 100
  coat-vlm eval --model runs/my_lora/align/model --adapter first=runs/my_lora/sft/model/adapter \\
      --adapter second=runs/my_lora_1/sft/model/adapter --tasks pope \\
      --data benchmarks --out out/lora
  torchrun --nproc-per-node 8 --no-python coat-vlm eval --model llava-hf/llava-1.5-7b-hf \\
      --tasks videomme,videomme_subtitles --data benchmarks --out out/llava

The data of an official benchmark (--tasks) are its official files or the Hub's Parquet files in
--data/TASK; docs/reference/benchmarks.md lists them and coat-vlm data download TASK fetches them.
--model is a run folder, a model folder, or any image-text-to-text model of Hugging Face. Such a
model gets videos as videos if its processor supports them, otherwise as images. The same command
continues an interrupted evaluation. With torchrun, the questions are divided among the GPUs.
""",
    )
    parser.add_argument(
        "--run", type=Path, help="run folder; exit status 1 if a required metric is not reached"
    )
    parser.add_argument(
        "--model", help="run folder, or RUN/sft/model; with --tasks also a Hugging Face model"
    )
    parser.add_argument("--task", help="yes_no, multiple_choice or short_answer")
    parser.add_argument("--data", type=Path, help="folder with questions.jsonl, or with benchmarks")
    parser.add_argument(
        "--out", type=Path, help="output folder: predictions.jsonl, report.json, ..."
    )
    parser.add_argument(
        "--media-root",
        help="root of image paths, a folder or an address (http:, s3:, hf:, ...); default --data",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="default 32")
    parser.add_argument("--max-new-tokens", type=int, help="default 16, with --tasks 128")
    parser.add_argument("--limit", type=int, help="only the first questions")
    suite = parser.add_argument_group("official benchmarks")
    suite.add_argument(
        "--tasks", metavar="TASK,...",
        help=f"{', '.join(OFFICIAL)}; other prompts: textvqa_no_ocr, "
        "mmmu_all_images, videomme_subtitles, mme_vlmeval, chartqa_lmms, okvqa_lmms, "
        "mathvision_steps, mmvet_lmms; choices "
        "ranked by likelihood: seedbench_likelihood",
    )  # fmt: skip
    suite.add_argument("--split", help="e.g. test; default: the split with answers")
    suite.add_argument("--profile", help=_PROFILES)
    _add_judge(suite)
    model = parser.add_argument_group("model, also with --task")
    model.add_argument(
        "--precision", choices=PRECISIONS,
        help="default: the run's precision for a run folder, the dtype of the weights for a model "
        "folder (FP32 on a CPU)",
    )  # fmt: skip
    model.add_argument(
        "--adapter", metavar="[NAME=]DIR", action="append", default=[],
        help="LoRA adapter folder in peft's layout that was trained on --model; may be repeated: "
        "the model is loaded once, and results go to --out/NAME (default: the folder's name)",
    )  # fmt: skip
    model.add_argument(
        "--device", help="e.g. cpu; also with --run; default: the process's GPU, or the CPU"
    )
    suite.add_argument(
        "--num-frames", type=int,
        help="frames per video for models of other projects; default 8 (run.json records whether "
        "the model got a video or images)",
    )  # fmt: skip
    model.add_argument(
        "--num-workers", type=int,
        help="processes that load data; default 0 on a CPU and with --task, else up to 12",
    )  # fmt: skip
    model.add_argument(
        "--overwrite",
        action="store_true",
        help="replace answers of another model or of other prompts",
    )


def _eval(args: argparse.Namespace) -> int:
    task = "task" if args.tasks is None else "tasks"
    single = {f"--{name}": getattr(args, name) for name in ("model", task, "data", "out")}
    given = [flag for flag, value in single.items() if value is not None]
    if args.run is not None:
        if given:
            raise ValueError(f"--run takes the model and the sets from the run; drop {given[0]}")
        _check(args, "--run", _NOT_WITH_RUN)
    elif len(given) < len(single):
        missing = ", ".join(flag for flag in single if flag not in given)
        raise ValueError(f"missing {missing} (or give --run RUN_DIR instead)")
    elif args.tasks is None:
        _check(args, "--task", _NOT_WITH_TASK)
    elif args.task is not None:
        raise ValueError(
            "--task is for your own question set, --tasks for benchmarks; give one of them"
        )
    else:
        _check(args, "--tasks", _NOT_WITH_TASKS)
    from coat_vlm.run.signals import SIGNALS

    with SIGNALS.handle():
        return _eval_model(args) if args.run is None else _eval_run(args)


_FOR_BENCHMARKS = "is for official benchmarks (--tasks)"
_FROM_RECIPE = "is for --model; with --run the recipe decides"
_JUDGE = ("judge", "judge_model", "judge_key", "judge_cache")
_NOT_WITH_TASK: dict[str, str] = dict.fromkeys(
    ("split", "profile", "num_frames", *_JUDGE), _FOR_BENCHMARKS
)
_NOT_WITH_RUN = {
    **_NOT_WITH_TASK,
    **dict.fromkeys(("media_root", "precision", "num_workers"), _FROM_RECIPE),
    "adapter": "is for --model; a run's own adapters are merged into its model",
    "overwrite": "is for --model; a run's answers of an earlier model are always replaced",
}
_NOT_WITH_TASKS = {
    "media_root": "is for your own question set (--task); media of benchmarks are below --data"
}
_SET_TOKENS = 16
"""Longest answer to a question set in tokens, as in ``coat_vlm.train.evaluation``."""
_SIZES = {"batch_size": 1, "max_new_tokens": 1, "limit": 1, "num_frames": 1, "num_workers": 0}
"""Smallest allowed values."""


def _check(args: argparse.Namespace, mode: str, without_effect: Mapping[str, str]) -> None:
    """Raise ValueError for a flag that has no effect, or for a number that is too small."""
    for name, why in without_effect.items():
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{_flag(name)} has no effect with {mode}: it {why}; drop it")
    for name, least in _SIZES.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"{_flag(name)} is {value}; give {least} or more")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _eval_run(args: argparse.Namespace) -> int:
    from coat_eval.files import REPORT_FILE, read_json
    from coat_eval.generation import Generation, join_ranks, select_device
    from coat_eval.runner import evaluate_run, format_table
    from coat_vlm.config.load import load_recipe
    from coat_vlm.run.lock import LOCK, lock_folder

    recipe = load_recipe(str(args.run / "recipe.yaml"))
    generation = Generation(
        batch_size=args.batch_size, max_new_tokens=args.max_new_tokens or _SET_TOKENS
    )
    device = select_device(args.device)
    with join_ranks() as world, lock_folder(args.run / "eval" / LOCK, "eval", world) as lock:
        missed = evaluate_run(
            args.run,
            generation,
            device=device,
            limit=args.limit,
            world=world,
            check=lock.check,
        )
        if world.is_main:
            eval_json = json.loads((args.run / "eval.json").read_text(encoding="utf-8"))
            say(format_table(eval_json, recipe))
            for name in recipe.eval_sets:
                _warn(
                    read_json(args.run / "eval" / name / REPORT_FILE, "evaluate again"), f"{name}: "
                )
    for message in missed:
        complain(f"missed: {message}")
    return 1 if missed else 0


def _eval_model(args: argparse.Namespace) -> int:
    """Evaluate a model on one question set, or on benchmarks one after the other."""
    from coat_eval.benchmark import Settings
    from coat_eval.generation import Generation, choose_num_workers, join_ranks, select_device
    from coat_eval.lora_model import adapted, name_adapters
    from coat_eval.own_model import CoatAdapter
    from coat_eval.runner import EvalTask, load_adapter, make_eval_task, run_benchmark
    from coat_eval.tasks import get_task
    from coat_vlm.run.lock import LOCK, lock_folder

    own_set = args.tasks is None
    common = {"limit": args.limit, "overwrite": args.overwrite}
    if own_set:
        eval_tasks = [EvalTask(benchmark=get_task(args.task, args.media_root), **common)]
    else:
        common |= {
            "split": args.split or "",
            "settings": Settings(profile=args.profile or "official"),
        }
        eval_tasks = [
            make_eval_task(name.strip(), args.data, **common) for name in args.tasks.split(",")
        ]
    judge = None if own_set else _make_judge(args)
    if judge is not None and not any(one.benchmark.judged for one in eval_tasks):
        raise ValueError(f"--judge has no effect: none of {args.tasks} asks a judge; drop it")
    device = select_device(args.device)
    workers = args.num_workers
    if workers is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = 0 if own_set else choose_num_workers(device.type, processes)
    tokens = args.max_new_tokens or (_SET_TOKENS if own_set else 128)
    generation = Generation(batch_size=args.batch_size, max_new_tokens=tokens, num_workers=workers)
    adapters: dict[str, Path | None] = {**name_adapters(args.adapter)} or {"": None}
    outs = {
        (name, eval_task.name): args.out / name / ("" if own_set else eval_task.name)
        for name in adapters
        for eval_task in eval_tasks
    }
    with join_ranks() as world, ExitStack() as locks:
        checks = {
            out: locks.enter_context(lock_folder(out / LOCK, "eval", world)).check
            for out in dict.fromkeys(outs.values())
        }
        if own_set:
            base = CoatAdapter.load(args.model, device, args.precision)
        else:
            base = load_adapter(args.model, device, args.precision, args.num_frames or 8)
        for name, folder in adapters.items():
            with adapted(base, folder, args.model) as model:
                for eval_task in eval_tasks:
                    out = outs[name, eval_task.name]
                    report = run_benchmark(
                        model,
                        eval_task,
                        args.data,
                        out,
                        generation,
                        world=world,
                        model_name=f"{args.model} with {folder}" if folder else args.model,
                        judge=judge if eval_task.benchmark.judged else None,
                        check=checks[out],
                    )
                    if world.is_main:
                        title = "" if out == args.out else out.relative_to(args.out).as_posix()
                        _say_result(report, eval_task.name, out, title, own_set=own_set)
    return 0


def _say_result(
    report: Mapping[str, Any], task: str, out: Path, title: str, *, own_set: bool
) -> None:
    """Print the result of a question set or benchmark below ``title``, the folder below --out."""
    from coat_eval.scoring import format_headline

    _warn(report, f"{task}: ")
    if own_set:
        say("\n".join(filter(None, (title, json.dumps(report["metrics"], indent=2)))))
        return
    say(f"{title}\n{format_headline(report)}")
    if report["n_media_problems"]:
        say(
            f"{report['n_media_problems']} questions were skipped and count as wrong, because an "
            f"image or video cannot be read; {out / 'media_problems.jsonl'} lists them"
        )
    say(f"{out / 'report.json'} has all metrics and items\n")


def _warn(report: Mapping[str, Any], name: str = "") -> None:
    """Print a report's warnings, and its headline metric if a constant answer reaches it."""
    from coat_eval.reliability import describe_constant

    for warning in report.get("warnings", ()):
        complain(f"warning: {name}{warning}")
    metric = report.get("headline", "")
    if metric and (mark := describe_constant(report, metric)):
        complain(f"warning: {name}{metric} {report['metrics'][metric]:.4f} is {mark}")


def _add_score(commands: Commands) -> None:
    parser = command(
        commands,
        "score",
        _score,
        "score saved predictions; needs no model, no GPU and no images",
        """\
  coat-vlm score gqa --predictions answers.jsonl --references testdev_balanced_questions.json \\
      --out gqa.json
  coat-vlm score pope --predictions out/my_vlm/pope/predictions.jsonl --out pope.json \\
      --references benchmarks/pope/coco_pope_*.json
  coat-vlm score mmmu --predictions out/limited/mmmu/predictions.jsonl --fallback wrong \\
      --references benchmarks/mmmu/*/*.parquet --out mmmu.json
  coat-vlm score vqav2 --predictions out/limited/vqav2/predictions.jsonl --submission upload.json \\
      --references benchmarks/vqav2/v2_OpenEnded_mscoco_val2014_questions.json --allow-missing \\
      --out vqav2.json
  coat-vlm score yes_no --data my_questions --predictions out/yes_no/predictions.jsonl \\
      --out out/yes_no/report.json

A prediction is {"question_id": ..., "prediction": "..."}. LLaVA's answer files, the sample logs of
lmms-eval, the result tables of VLMEvalKit and the official formats of the benchmarks are also read.
docs/reference/benchmarks.md lists all metrics, sources and formats.
""",
    )
    parser.add_argument(
        "name", metavar="TASK", nargs="?",
        help=f"{', '.join(OFFICIAL)}; or yes_no, multiple_choice, short_answer with --data",
    )  # fmt: skip
    parser.add_argument(
        "--predictions", type=Path, nargs="+", required=True, metavar="FILE",
        help="JSON, JSON lines, CSV, TSV, XLSX or Parquet; a folder means all output.json files in "
        "it (mme: all .txt files)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="report to write")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="count missing, unknown, repeated, empty and non-text predictions instead of "
        "stopping, and accept a part of the benchmark",
    )
    official = parser.add_argument_group("official benchmarks")
    official.add_argument(
        "--references", type=Path, nargs="+", default=[], metavar="FILE",
        help="official files with the answers, in any order",
    )  # fmt: skip
    official.add_argument(
        "--profile",
        help=f"{_PROFILES}; videomme also official_20240603, okvqa also pica, mathvision also "
        "string",
    )  # fmt: skip
    _add_judge(official)
    official.add_argument(
        "--raw", action="store_true",
        help="score the raw text, without the preprocessing of LLaVA and VILA",
    )  # fmt: skip
    official.add_argument(
        "--fallback", choices=("random", "wrong"),
        help="mmmu: unparsable choices get a random letter, as officially (default), or are wrong",
    )  # fmt: skip
    official.add_argument("--seed", type=int, help="mmmu: seed of the random letters; default 42")
    official.add_argument("--items", action="store_true", help="write every item to the report")
    official.add_argument(
        "--submission", type=Path, metavar="FILE",
        help="also write a submission for the server of gqa, vqav2, textvqa, vizwiz, mmmu, "
        "seedbench, docvqa or infovqa",
    )  # fmt: skip
    own = parser.add_argument_group("your own question set")
    own.add_argument("--data", type=Path, help="folder with questions.jsonl")
    own.add_argument("--limit", type=int, help="only the first questions")


def _score(args: argparse.Namespace) -> int:
    name = args.name
    if name is None:
        raise ValueError(f"name one task: coat-vlm score TASK ...; official: {', '.join(OFFICIAL)}")
    if name in OFFICIAL:
        if args.data is not None:
            raise ValueError(
                f"{name} needs its official files: give --references instead of --data"
            )
        _check(args, f"score {name}", {"limit": "is for your own question set (--data)"})
        return _score_official(args, name)
    if args.references or args.data is None or len(args.predictions) != 1:
        raise ValueError(
            f"{name} is not an official benchmark ({', '.join(OFFICIAL)}): give --data FOLDER and "
            "one --predictions file"
        )
    _check(args, f"score {name}", _NOT_WITH_OWN_SET)
    from coat_eval.scoring import score_set
    from coat_eval.tasks import get_task

    chosen = {"limit": args.limit, "allow_missing": args.allow_missing}
    report = score_set(get_task(name), args.data, args.predictions[0], args.out, **chosen)
    say(json.dumps(report["metrics"], indent=2))
    _warn(report)
    return 0


_NOT_WITH_OWN_SET = {
    **dict.fromkeys(
        ("profile", "raw", "fallback", "seed", "submission", *_JUDGE), "is for official benchmarks"
    ),
    "items": "is for official benchmarks; your own question set always gets items.jsonl",
}


def _score_official(args: argparse.Namespace, name: str) -> int:
    from coat_eval.benchmark import Settings
    from coat_eval.scoring import format_headline, score_official
    from coat_eval.tasks import get_benchmark

    chosen = {key: getattr(args, key) for key in ("profile", "fallback", "seed")}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    report = score_official(
        get_benchmark(name),
        args.predictions,
        args.references,
        settings=Settings(raw=args.raw, **chosen),
        judge=_make_judge(args),
        allow_missing=args.allow_missing,
        with_items=args.items,
        report_path=args.out,
        submission_path=args.submission,
    )
    say(f"{format_headline(report)}\n{args.out} has all metrics")
    _warn(report)
    return 0


def _add_judge(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--judge", metavar="ADDRESS",
        help="asks a model about the answers that the official scorer gives to one (mathvista, "
        "mmvet, mmbench, ccbench, hallusionbench, tempcompass): an OpenAI-compatible address, "
        "e.g. http://localhost:8000/v1, or the folder of a language model; without it they count "
        "as wrong",
    )  # fmt: skip
    group.add_argument("--judge-model", metavar="NAME", help="name of the model at the address")
    group.add_argument(
        "--judge-key", metavar="VARIABLE", help="environment variable with the key of the address"
    )
    group.add_argument(
        "--judge-cache", type=Path, metavar="FILE",
        help="file of the judge's answers: asks only for others and adds them; without --judge, "
        "scores from the file alone",
    )  # fmt: skip


def _make_judge(args: argparse.Namespace) -> "Judge | None":
    """Make the judge of the options before anything is generated; None without them."""
    if all(getattr(args, name) is None for name in _JUDGE):
        return None
    from coat_eval.judge import make_judge

    return make_judge(args.judge, args.judge_model, args.judge_key, args.judge_cache)


def _add_generate(commands: Commands) -> None:
    parser = command(
        commands,
        "generate",
        _generate,
        "answer a prompt about images and videos",
        """\
  coat-vlm generate --model runs/my_vlm --image cat.jpg --prompt "Is there a cat?"
  coat-vlm generate --model runs/my_vlm/sft/model --image cat.jpg --image images/1.jpg \\
      --prompt "What differs?"
  coat-vlm generate --model runs/my_vlm/sft/model --video clip.mp4 --prompt "What happens?" \\
      --max-new-tokens 64
""",
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="RUN_OR_FOLDER",
        help="run folder, which answers in the run's precision, or a model folder: RUN/sft/model",
    )
    add_media(parser, "of the prompt")
    parser.add_argument("--prompt", required=True, help="the question")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")


def _generate(args: argparse.Namespace) -> int:
    check_media(args.media or [])
    from coat_eval.generation import select_device
    from coat_eval.own_model import load_run_or_model
    from coat_vlm.generate import generate

    model, processor, _, _ = load_run_or_model(args.model, select_device())
    sample = prompt_sample(args.prompt, args.media or [])
    say(generate(model, processor, [sample], args.max_new_tokens)[0])
    return 0


def add_media(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare ``--image`` and ``--video``, both in ``args.media``; ``what`` ends their help."""
    for kind in ("image", "video"):
        parser.add_argument(
            f"--{kind}",
            dest="media",
            action="append",
            type=lambda path, kind=kind: (kind, Path(path)),
            metavar="FILE",
            help=f"{kind} {what}; may be repeated, the order is kept",
        )


def check_media(files: Sequence[tuple[str, Path]]) -> None:
    """Raise FileNotFoundError for a file of :func:`add_media` that does not exist."""
    for kind, path in files:
        # A video may be a folder of frames.
        if not path.exists():
            raise FileNotFoundError(f"--{kind} {path}: there is no such file")


def prompt_sample(prompt: str, files: Sequence[tuple[str, Path]]) -> "Sample":
    """Convert the prompt as the LLaVA reader converts a row of a file.

    Args:
        prompt: the question. ``<image>`` and ``<video>`` in it mark the places of the files;
            without them, the files come first, in the order given, each on its own line.
        files: (``image`` or ``video``, path).

    Raises:
        DataError: placeholders and files do not match.
    """
    from coat_data.media.root import MediaRoot
    from coat_data.readers.llava import to_sample
    from coat_data.readers.reader import Place

    if not any(f"<{kind}>" in prompt for kind, _ in files):
        prompt = "".join(f"<{kind}>\n" for kind, _ in files) + prompt
    row = {
        "image": [str(path.absolute()) for kind, path in files if kind == "image"],
        "video": [str(path.absolute()) for kind, path in files if kind == "video"],
        # A sample needs an answer, which generation ignores.
        "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": "-"}],
    }
    anywhere = MediaRoot("/", follow_links=True)  # the user named the files
    return to_sample(row, Place(source="--prompt", row=0, root=anywhere))
