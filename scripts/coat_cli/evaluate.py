"""``coat-vlm eval``, ``score`` and ``generate``."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import PRECISIONS, Commands, command, complain, say

if TYPE_CHECKING:
    from coat_data.sample import Sample


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
        "answer the questions of an evaluation set with a model, and score the answers",
        """\
  coat-vlm eval --run runs/quickstart        # all evaluation sets of the run's recipe
  coat-vlm eval --model runs/quickstart/sft/model --task yes_no --data my_set --out my_set/out
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
""",
    )
    parser.add_argument(
        "--run", type=Path, help="run folder; exit status 1 if a required figure is missed"
    )
    parser.add_argument("--model", help="model folder, e.g. RUN/sft/model; see below for --tasks")
    parser.add_argument("--task", help="yes_no, multiple_choice or short_answer")
    parser.add_argument("--data", type=Path, help="folder with questions.jsonl, or with benchmarks")
    parser.add_argument("--out", type=Path, help="gets predictions.jsonl and report.json")
    parser.add_argument(
        "--media-root",
        help="folder or address (http:, s3:, hf:, ...) where image paths start; default --data",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="default 32")
    parser.add_argument(
        "--max-new-tokens", type=int, help="longest answer; default 16, of benchmarks 128"
    )
    parser.add_argument("--limit", type=int, help="only the first questions")
    suite = parser.add_argument_group("official benchmarks")
    suite.add_argument(
        "--tasks", metavar="TASK,...",
        help="pope, gqa, vqav2, textvqa, vizwiz, seedbench, mmmu, videomme; other prompts: "
        "textvqa_no_ocr, mmmu_all_images, videomme_subtitles; ranking the choices' texts in place "
        "of asking for a letter: seedbench_likelihood, seedbench_likelihood_sum",
    )  # fmt: skip
    suite.add_argument("--split", help="e.g. test; default: the split with answers")
    suite.add_argument("--profile", help="scoring rules: official (default), lmms, vlmeval")
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
        raise ValueError("--task is for a set of your own, --tasks for benchmarks; give one")
    else:
        _check(args, "--tasks", _NOT_WITH_TASKS)
    return _eval_model(args) if args.run is None else _eval_run(args)


_FOR_BENCHMARKS = "is for official benchmarks (--tasks)"
_OF_RECIPE = "is for --model; a run is evaluated as its recipe says"
_NOT_WITH_TASK: dict[str, str] = dict.fromkeys(("split", "profile", "num_frames"), _FOR_BENCHMARKS)
_NOT_WITH_RUN = {
    **_NOT_WITH_TASK,
    **dict.fromkeys(("media_root", "precision", "num_workers"), _OF_RECIPE),
    "overwrite": "is for --model; answers of an earlier model of a run are always replaced",
}
_NOT_WITH_TASKS = {
    "media_root": "is for a set of your own (--task); benchmarks have their media below --data"
}
_SET_TOKENS = 16
"""The longest answer to a question set, as ``coat_vlm.train.evaluation`` has it."""
_SIZES = {"batch_size": 1, "max_new_tokens": 1, "limit": 1, "num_frames": 1, "num_workers": 0}
"""The least that makes sense."""


def _check(args: argparse.Namespace, mode: str, without_effect: Mapping[str, str]) -> None:
    """ValueError for a flag that would have no effect, or a number that is too small."""
    for name, why in without_effect.items():
        value = getattr(args, name)
        if value is not None and value is not False:
            raise ValueError(f"{_flag(name)} has no effect with {mode}: it {why}; drop it")
    for name, least in _SIZES.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"{_flag(name)} is {value}; give {least} or more")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _eval_run(args: argparse.Namespace) -> int:
    from coat_eval import Generation, evaluate_run, format_table
    from coat_eval.generation import joined_ranks, own_device
    from coat_vlm.config.load import load_recipe

    generation = Generation(
        batch_size=args.batch_size, max_new_tokens=args.max_new_tokens or _SET_TOKENS
    )
    device = own_device(args.device)
    with joined_ranks() as world:
        unmet = evaluate_run(args.run, generation, device=device, limit=args.limit, world=world)
        if world.is_main:
            eval_json = json.loads((args.run / "eval.json").read_text(encoding="utf-8"))
            say(format_table(eval_json, load_recipe(str(args.run / "recipe.yaml"))))
    for miss in unmet:
        complain(f"missed: {miss}")
    return 1 if unmet else 0


def _eval_model(args: argparse.Namespace) -> int:
    """Answer the questions of one set, or of benchmarks one after the other."""
    from coat_eval import Choice, Generation, Settings, get_task, load_answerer, run_benchmark
    from coat_eval.answerer import ModelOptions
    from coat_eval.coat_answerer import CoatAnswerer
    from coat_eval.generation import default_workers, joined_ranks, own_device
    from coat_eval.runner import choose

    own_set = args.tasks is None
    common = {"limit": args.limit, "overwrite": args.overwrite}
    if own_set:
        choices = [Choice(benchmark=get_task(args.task, args.media_root), **common)]
    else:
        common |= {
            "split": args.split or "",
            "settings": Settings(profile=args.profile or "official"),
        }
        choices = [choose(name.strip(), args.data, **common) for name in args.tasks.split(",")]
    device = own_device(args.device)
    workers = args.num_workers
    if workers is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = 0 if own_set else default_workers(device.type, processes)
    tokens = args.max_new_tokens or (_SET_TOKENS if own_set else 128)
    generation = Generation(batch_size=args.batch_size, max_new_tokens=tokens, num_workers=workers)
    options = ModelOptions(device=device, precision=args.precision, num_frames=args.num_frames or 8)
    with joined_ranks() as world:
        load = CoatAnswerer.load if own_set else load_answerer
        answerer = load(args.model, options)
        for choice in choices:
            out = args.out if own_set else args.out / choice.name
            report = run_benchmark(
                answerer, choice, args.data, out, generation, world=world, model_name=args.model
            )
            if world.is_main:
                say(json.dumps(report["metrics"], indent=2) if own_set else _text(report, out))
    return 0


def _text(report: dict[str, Any], folder: Path) -> str:
    from coat_eval.report import headline

    lines = [folder.name, headline(report)]
    problems = f"cannot be read: {folder / 'media_problems.jsonl'} lists them"
    if report["n_media_problems"]:
        lines.append(
            f"{report['n_media_problems']} questions were not asked and count as wrong, because an "
            f"image or video {problems}"
        )
    if report["n_asked_without"]:
        lines.append(
            f"{report['n_asked_without']} questions were asked without their subtitles, which "
            f"{problems}"
        )
    return "\n".join([*lines, f"{folder / 'report.json'} has all metrics and items\n"])


OFFICIAL = ("pope", "gqa", "vqav2", "textvqa", "vizwiz", "seedbench", "mmmu", "videomme")
"""Those of ``coat_eval.tasks.BENCHMARKS``, which ``--help`` should not have to import."""


def _add_score(commands: Commands) -> None:
    parser = command(
        commands,
        "score",
        _score,
        "score a file of predictions; needs no model, no GPU and no images",
        """\
  coat-vlm score gqa --predictions answers.jsonl --references testdev_balanced_questions.json \\
      --out gqa.json
  coat-vlm score pope --predictions answers.jsonl --out pope.json \\
      --references llava_pope_test.jsonl coco_pope_*.json
  coat-vlm score mmmu --predictions output.json --fallback wrong --out mmmu.json
  coat-vlm score vqav2 --predictions answers.jsonl --submission upload.json --allow-missing \\
      --references v2_OpenEnded_mscoco_test2015_questions.json --out vqav2.json
  coat-vlm score yes_no --data my_set --predictions predictions.jsonl --out report.json

A prediction row is {"question_id": ..., "prediction": "..."}; LLaVA's answers files and the
benchmarks' own formats are read as they are. docs/evaluation.md has every metric, its source and
the formats.
""",
    )
    parser.add_argument(
        "name", metavar="TASK", nargs="?",
        help=f"{', '.join(OFFICIAL)}; or yes_no, multiple_choice, short_answer with --data",
    )  # fmt: skip
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument(
        "--predictions", type=Path, nargs="+", required=True, metavar="FILE",
        help="JSON, JSON lines or Parquet; a folder stands for the output.json files in it",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="report to write")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="count missing, unknown, repeated, empty and non-text predictions instead of stopping",
    )
    official = parser.add_argument_group("official benchmarks")
    official.add_argument(
        "--references", type=Path, nargs="+", default=[], metavar="FILE",
        help="official files with the answers, in any order",
    )  # fmt: skip
    official.add_argument(
        "--profile",
        help="whose rules: official (default), lmms (lmms-eval), vlmeval (VLMEvalKit); "
        "videomme also official_20240603",
    )  # fmt: skip
    official.add_argument(
        "--raw", action="store_true",
        help="score the text untouched, without what LLaVA and VILA do to it first",
    )  # fmt: skip
    official.add_argument(
        "--fallback", choices=("random", "wrong"),
        help="mmmu: letters that cannot be read are drawn as officially (default), or wrong",
    )  # fmt: skip
    official.add_argument("--seed", type=int, help="mmmu: seed of the draws; default 42")
    official.add_argument("--items", action="store_true", help="put every item into the report")
    official.add_argument(
        "--submission", type=Path, metavar="FILE",
        help="also write what the server of vqav2, textvqa, vizwiz, mmmu or seedbench takes",
    )  # fmt: skip
    own = parser.add_argument_group("a set of your own")
    own.add_argument("--data", type=Path, help="folder with questions.jsonl")
    own.add_argument("--limit", type=int, help="only the first questions")


def _score(args: argparse.Namespace) -> int:
    name = args.name or args.task
    if name is None or (args.name and args.task):
        raise ValueError(f"name one task: coat-vlm score TASK ...; official: {', '.join(OFFICIAL)}")
    if name in OFFICIAL:
        if args.data is not None:
            raise ValueError(f"{name} takes its official files: --references instead of --data")
        _check(args, f"score {name}", {"limit": "is for a set of your own (--data)"})
        return _score_official(args, name)
    if args.references or args.data is None or len(args.predictions) != 1:
        raise ValueError(
            f"{name} is no official benchmark ({', '.join(OFFICIAL)}): it takes --data FOLDER and "
            "one --predictions file"
        )
    _check(args, f"score {name}", _NOT_WITH_OWN_SET)
    from coat_eval import get_task, score_set

    chosen = {"limit": args.limit, "allow_missing": args.allow_missing}
    report = score_set(get_task(name), args.data, args.predictions[0], args.out, **chosen)
    say(json.dumps(report["metrics"], indent=2))
    return 0


_NOT_WITH_OWN_SET = {
    **dict.fromkeys(
        ("profile", "raw", "fallback", "seed", "submission"), "is for official benchmarks"
    ),
    "items": "is for official benchmarks; a set of your own always gets items.jsonl",
}


def _score_official(args: argparse.Namespace, name: str) -> int:
    from coat_eval import Settings, get_benchmark, score_official
    from coat_eval.report import headline

    chosen = {key: getattr(args, key) for key in ("profile", "fallback", "seed")}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    report = score_official(
        get_benchmark(name),
        args.predictions,
        args.references,
        settings=Settings(raw=args.raw, **chosen),
        allow_missing=args.allow_missing,
        with_items=args.items,
        report_path=args.out,
        submission_path=args.submission,
    )
    say(f"{headline(report)}\n{args.out} has all metrics")
    return 0


def _add_generate(commands: Commands) -> None:
    parser = command(
        commands,
        "generate",
        _generate,
        "answer a prompt about images and videos",
        """\
  coat-vlm generate --model runs/quickstart/sft/model --image a.png --prompt "Is there a circle?"
  coat-vlm generate --model CKPT --image a.png --image b.png --prompt "What differs?"
  coat-vlm generate --model CKPT --video clip.mp4 --prompt "What happens?" --max-new-tokens 64
""",
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="model folder, e.g. RUN/sft/model"
    )
    for kind in ("image", "video"):
        parser.add_argument(
            f"--{kind}",
            dest="media",
            action="append",
            type=lambda path, kind=kind: (kind, Path(path)),
            metavar="FILE",
            help=f"{kind} to show; may be repeated, shown in the order given",
        )
    parser.add_argument("--prompt", required=True, help="the question")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")


def _generate(args: argparse.Namespace) -> int:
    from coat_vlm.generate import generate, load

    model, processor = load(args.model)
    sample = prompt_sample(args.prompt, args.media or [])
    say(generate(model, processor, [sample], args.max_new_tokens)[0])
    return 0


def prompt_sample(prompt: str, files: Sequence[tuple[str, Path]]) -> "Sample":
    """The prompt as a row of a LLaVA file would have it, read by the same reader.

    Args:
        prompt: the question. It may say with ``<image>`` and ``<video>`` where the files stand;
            otherwise they come first, in the order given, each on a line of its own.
        files: (``image`` or ``video``, path).

    Raises:
        DataError: other placeholders than files.
    """
    from coat_data.media.root import MediaRoot
    from coat_data.readers.llava import to_sample
    from coat_data.readers.reader import Place

    if not any(f"<{kind}>" in prompt for kind, _ in files):
        prompt = "".join(f"<{kind}>\n" for kind, _ in files) + prompt
    row = {
        "image": [str(path.absolute()) for kind, path in files if kind == "image"],
        "video": [str(path.absolute()) for kind, path in files if kind == "video"],
        # A sample needs an answer; generation does not look at it.
        "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": "-"}],
    }
    anywhere = MediaRoot("/", follow_links=True)  # the user named the files
    return to_sample(row, Place(source="--prompt", row=0, root=anywhere))
