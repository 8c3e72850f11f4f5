"""``coat-vlm eval`` and ``score``."""

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import (
    Commands,
    add_loading,
    at_least,
    check_effects,
    command,
    complain,
    say,
    stoppable,
)

if TYPE_CHECKING:
    from coat_eval.judge import Judge
    from coat_eval.runner import EvalTask

_PROFILES = "rules: official (default), lmms, vlmeval[@c03bc048]"
_KIND = "KIND=FOLDER of your own questions"
_LOADED = ("precision", "max_pixels", "adapters", "num_workers")
_JUDGE = ("judge", "judge_model", "judge_key", "judge_cache")
_SET_TOKENS, _BENCHMARK_TOKENS = 16, 128
"""Longest answers in tokens; to a question set as in ``coat_vlm.train.evaluation``."""


def add(commands: Commands) -> None:
    """Declare ``eval`` and ``score``."""
    _add_eval(commands)
    _add_score(commands)


def _add_eval(commands: Commands) -> None:
    parser = command(
        commands,
        "eval",
        stoppable(_eval),
        "measure a model on benchmarks, your own questions or texts",
        """\
  coat-vlm eval --model runs/my_vlm          # evaluation sets of the run's recipe
  coat-vlm eval --model runs/my_vlm --tasks yes_no=my_questions --to out/own
  coat-vlm eval --model runs/my_vlm --tasks pope gqa --data benchmarks --to out/all
  coat-vlm eval --model runs/my_vlm/sft/model --tasks textvqa_no_ocr vqav2 mmmu \\
      --data benchmarks --to out/limited --limit 100
  coat-vlm eval --model Qwen/Qwen2.5-1.5B-Instruct --text wiki.txt --window 1024
  torchrun --nproc-per-node 8 --no-python coat-vlm eval --tasks videomme \\
      --model llava-hf/llava-1.5-7b-hf --data benchmarks --to out/llava
""",
        """\
"coat-vlm data download TASK" fetches the files of a benchmark. The same command
continues an interrupted evaluation. With torchrun, GPUs share the questions.
exit status: 1 if a required metric of the recipe is not reached, else 0
""",
    )
    add = parser.add_argument
    add("--list-tasks", action="store_true", help="list benchmarks and kinds of question sets")
    add("--model", help="run or model folder, Hub model, or name at --server")
    add("--server", metavar="URL", help="ask the model at this OpenAI-compatible address")
    add("--server-key", metavar="VAR", help="environment variable with the server's key")
    add("--tasks", nargs="+", default=[], metavar="TASK", help=f"benchmarks, or {_KIND}")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="measure the perplexity")
    add("--data", type=Path, metavar="DIR", help="folder with one folder per benchmark")
    add("--to", type=Path, metavar="DIR", help="folder to write, with one folder per task")
    add("--limit", type=at_least(1), metavar="N", help="only the first N questions of each task")
    add("--batch-size", type=at_least(1), metavar="N", help="default 32; with --text 4 windows")
    add_loading(parser)
    add("--text-field", metavar="NAME", help="with --text: field of the texts; default text")
    add("--window", type=at_least(1), metavar="N", help="with --text: tokens; default 2048")
    group = parser.add_argument_group("with --tasks")
    add = group.add_argument
    add(
        "--max-new-tokens",
        type=at_least(1),
        metavar="N",
        help=f"default {_BENCHMARK_TOKENS}, for question sets {_SET_TOKENS}",
    )
    add("--temperature", type=float, metavar="T", help="sample the answers; default: greedy")
    add("--samples", type=at_least(2), metavar="N", help="answers per question: majority, pass@k")
    add("--media-root", metavar="DIR", help="folder or address of images of question sets")
    add("--split", help="split of benchmarks; default: the one with answers")
    add("--profile", help=_PROFILES)
    add(
        "--adapters",
        metavar="[NAME=]DIR",
        nargs="+",
        default=[],
        help="LoRA adapters of --model; results go to NAME/TASK",
    )
    add(
        "--num-frames",
        type=at_least(1),
        metavar="N",
        help="frames per video; default: the processor's, else 8",
    )
    add(
        "--num-workers",
        type=at_least(0),
        metavar="N",
        help="processes that load data; default up to 12, on a CPU 0",
    )
    add("--overwrite", action="store_true", help="replace answers of another model or prompt")
    _add_judge(group)


_WITH_TASKS = (
    *("data", "media_root", "split", "profile", "adapters", "num_frames", "num_workers"),
    *("overwrite", "server", "server_key", "temperature", "samples", *_JUDGE),
)
_WITH_TEXT = ("text_field", "window")


def _eval(args: argparse.Namespace) -> int:
    if args.list_tasks:
        return _list_tasks()
    if args.model is None:
        raise ValueError("--model is missing; give a run folder, a model folder or a Hub name")
    if args.samples and not (args.temperature or 0) > 0:
        raise ValueError("--samples needs --temperature above 0: greedy answers are all equal")
    if args.server is None:
        check_effects(args, {"server_key": "is for the address --server"})
    else:
        check_effects(args, dict.fromkeys(_LOADED, "is for a model that this command loads"))
    if args.text and args.tasks:
        raise ValueError("--text and --tasks are two evaluations; give one of them")
    if not args.text:
        check_effects(args, dict.fromkeys(_WITH_TEXT, "is for --text"))
    if not args.tasks:
        check_effects(args, dict.fromkeys(_WITH_TASKS, "is for --tasks"))
    if args.text:
        check_effects(
            args, dict.fromkeys(("limit", "max_new_tokens", "max_pixels"), "is for questions")
        )
        return _eval_text(args)
    if args.tasks:
        return _eval_tasks(args)
    names = ("max_pixels", "to")
    check_effects(args, dict.fromkeys(names, "is for --tasks and --text; here the run decides"))
    return _eval_run(args)


def _list_tasks() -> int:
    from coat_eval.tasks import BENCHMARKS, TASKS

    for benchmark in BENCHMARKS.values():
        variants = (f"{benchmark.name}_{kind}" for kind in benchmark.variants)
        say(" ".join([benchmark.name, *variants]))
    for name in TASKS:
        say(f"{name}=FOLDER")
    return 0


def _eval_run(args: argparse.Namespace) -> int:
    from coat_eval.files import REPORT_FILE, read_json
    from coat_eval.generation import Generation, join_ranks, select_device
    from coat_eval.runner import evaluate_run, format_table
    from coat_vlm.config.load import load_run_recipe
    from coat_vlm.run.lock import LOCK, lock_folder

    run = Path(args.model)
    if not (run / "recipe.yaml").is_file():
        raise ValueError(f"{run} is not a run folder: name what to evaluate with --tasks or --text")
    recipe = load_run_recipe(run / "recipe.yaml")
    generation = Generation(
        batch_size=args.batch_size or 32, max_new_tokens=args.max_new_tokens or _SET_TOKENS
    )
    device = select_device()
    with join_ranks() as world, lock_folder(run / LOCK, "eval", world) as lock:
        missed = evaluate_run(
            run,
            generation,
            device=device,
            precision=args.precision,
            limit=args.limit,
            world=world,
            check=lock.check,
        )
        if world.is_main:
            eval_json = json.loads((run / "eval.json").read_text(encoding="utf-8"))
            say(format_table(eval_json, recipe))
            say(f"precision of the forward pass: {eval_json['precision']}")
            for name in recipe.eval_sets:
                report = read_json(run / "eval" / name / REPORT_FILE, "evaluate again")
                _warn(report, f"{name}: ")
    for message in missed:
        complain(f"missed: {message}")
    return 1 if missed else 0


def _eval_text(args: argparse.Namespace) -> int:
    from coat_data.saved_files import check_outputs, hash_file
    from coat_eval.files import write_json
    from coat_eval.text import load_language_model, measure_perplexity, read_documents

    out = args.to and args.to / "text.json"
    check_outputs([out], args.text)
    # Errors in a file are reported before the model is loaded.
    documents = {path: read_documents(path, args.text_field or "text") for path in args.text}
    model, tokenizer, precision = load_language_model(Path(args.model), args.precision)
    report: dict[str, Any] = {}
    for path, texts in documents.items():
        sizes = {"window": args.window, "batch_size": args.batch_size or 4}
        measured = measure_perplexity(model, tokenizer, texts, **sizes)
        report[str(path)] = {**measured, "sha256": hash_file(path)}
        say(
            f"{path}: perplexity {measured['perplexity']:.4f}  bits/byte "
            f"{measured['bits_per_byte']:.4f}  {measured['tokens']:,} tokens  last words "
            f"{measured['last_word_accuracy']:.2f}%  in {precision}"
        )
    if out is not None:
        write_json(out, {"model": args.model, "precision": precision, "text": report})
        say(f"metrics: {out}")
    return 0


def _make_task(word: str, args: argparse.Namespace) -> "tuple[str, EvalTask, Path]":
    """Return the name of a task's output folder, the task, and the folder of its data."""
    from coat_eval.benchmark import Settings
    from coat_eval.runner import EvalTask, make_eval_task
    from coat_eval.tasks import get_task
    from coat_vlm.config.stage import check_folder_name

    common = {"limit": args.limit, "overwrite": args.overwrite}
    kind, equals, folder = word.partition("=")
    if equals:
        data = Path(folder)
        task = get_task(kind, args.media_root)
        return check_folder_name(data.resolve().name), EvalTask(benchmark=task, **common), data
    if args.data is None:
        raise ValueError(f"--data is missing: name the folder with the files of {word}")
    settings = Settings(profile=args.profile or "official")
    task = make_eval_task(word, args.data, split=args.split or "", settings=settings, **common)
    return task.name, task, args.data


def _load(args: argparse.Namespace, device: Any) -> Any:
    """Load the model, or connect to the model of ``--server``."""
    from coat_eval.chat_client import connect
    from coat_eval.runner import is_own, load_adapter
    from coat_eval.served_model import ServedModel
    from coat_vlm.model.family_processor import limit_pixels

    if args.server is not None:
        client = connect("--server", args.server, args.model, args.server_key)
        frames = args.num_frames or 8
        return ServedModel(client, num_frames=frames, line_breaks=is_own(Path(args.model)))
    model = load_adapter(args.model, device, args.precision, args.num_frames)
    kind = model.model.config.model_type
    limit_pixels("--max-pixels", model.encoder, kind, args.max_pixels)
    return model


def _eval_tasks(args: argparse.Namespace) -> int:
    """Evaluate a model, or each adapter of it, on the tasks one after the other."""
    from coat_eval.generation import Generation, choose_num_workers, join_ranks, select_device
    from coat_eval.lora_model import adapted, name_adapters
    from coat_eval.runner import run_benchmark
    from coat_eval.scoring import format_headline
    from coat_vlm.run.lock import LOCK, lock_folder

    if args.to is None:
        raise ValueError("--to is missing; name the folder to write")
    own_sets = ["=" in word for word in args.tasks]
    if all(own_sets):
        names = ("data", "split", "profile", *_JUDGE)
        check_effects(args, dict.fromkeys(names, "is for benchmarks, not for question sets"))
    elif not any(own_sets):
        check_effects(args, {"media_root": "is for question sets; benchmarks are below --data"})
    tasks = [_make_task(word, args) for word in args.tasks]
    if repeated := {name for name, *_ in tasks if [one[0] for one in tasks].count(name) > 1}:
        raise ValueError(f"--tasks: two of them would write to {repeated.pop()}; evaluate in turn")
    judge = _make_judge(args)
    if judge is not None and not any(task.benchmark.judged for _, task, _ in tasks):
        raise ValueError("--judge has no effect: none of the --tasks asks a judge; remove it")
    device = select_device()
    workers = args.num_workers
    if workers is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = choose_num_workers(device.type, processes)
    generation = Generation(
        batch_size=args.batch_size or 32,
        max_new_tokens=args.max_new_tokens or _BENCHMARK_TOKENS,
        num_workers=workers,
        temperature=args.temperature or 0.0,
        samples=args.samples or 1,
    )
    of_sets = replace(generation, max_new_tokens=args.max_new_tokens or _SET_TOKENS)
    adapters: dict[str, Path | None] = {**name_adapters(args.adapters)} or {"": None}
    with join_ranks() as world, ExitStack() as locks:
        checks = {
            (adapter, name): locks.enter_context(
                lock_folder(args.to / adapter / name / LOCK, "eval", world)
            ).check
            for adapter in adapters
            for name, *_ in tasks
        }
        base = _load(args, device)
        for adapter, folder in adapters.items():
            with adapted(base, folder, args.model, own_size=args.max_pixels is None) as model:
                for (name, task, data), own_set in zip(tasks, own_sets, strict=True):
                    out = args.to / adapter / name
                    report = run_benchmark(
                        model,
                        task,
                        data,
                        out,
                        of_sets if own_set else generation,
                        world=world,
                        model_name=f"{args.model} with {folder}" if folder else args.model,
                        judge=judge if task.benchmark.judged else None,
                        check=checks[adapter, name],
                    )
                    if world.is_main:
                        title = Path(adapter, name).as_posix()
                        _warn(report, f"{title}: ")
                        say(f"{title}\n{format_headline(report)}")
                        say(f"{out / 'report.json'} has all metrics and items\n")
    return 0


def _warn(report: Mapping[str, Any], name: str = "") -> None:
    """Print a report's warnings, and its headline metric if a constant answer reaches it."""
    from coat_eval.remarks import describe_constant

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
        "score answers that you have, without a model or GPU",
        """\
  coat-vlm score gqa --predictions answers.jsonl --out gqa.json \\
      --references testdev_balanced_questions.json
  coat-vlm score pope --predictions out/my_vlm/pope/predictions.jsonl --out pope.json \\
      --references benchmarks/pope/coco_pope_*.json
  coat-vlm score mmmu --predictions out/limited/mmmu/predictions.jsonl \\
      --references benchmarks/mmmu/*/*.parquet --out mmmu.json --fallback wrong
  coat-vlm score vqav2 --predictions out/limited/vqav2/predictions.jsonl \\
      --references benchmarks/vqav2/v2_OpenEnded_mscoco_val2014_questions.json \\
      --allow-missing --out vqav2.json --submission upload.json
  coat-vlm score yes_no=my_questions --out report.json \\
      --predictions out/own/my_questions/predictions.jsonl
""",
        """\
A prediction is {"question_id": ..., "prediction": "..."}. LLaVA's answer files,
sample logs of lmms-eval, result tables of VLMEvalKit and official formats are
also read; docs/reference/benchmarks.md lists the metrics and formats.
""",
    )
    add = parser.add_argument
    add("name", metavar="TASK", help=f"a benchmark, or {_KIND}")
    add(
        "--predictions",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON, JSON lines, CSV, TSV, XLSX or Parquet; or a folder of output.json files (mme: "
        ".txt files)",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="report to write")
    add(
        "--allow-missing",
        action="store_true",
        help="count missing, unknown, repeated, empty and non-text predictions instead of stopping",
    )
    group = parser.add_argument_group("with benchmarks")
    add = group.add_argument
    add(
        "--references",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="official files with the answers, in any order",
    )
    add("--profile", help=f"{_PROFILES}; okvqa also pica, mathvision also string")
    _add_judge(group)
    add("--raw", action="store_true", help="score without the preprocessing of LLaVA and VILA")
    add(
        "--fallback",
        choices=("random", "wrong"),
        help="mmmu: unparsable choices are random (default, official) or wrong",
    )
    add(
        "--submission",
        type=Path,
        metavar="FILE",
        help="also write a file for the server of vqav2, textvqa, vizwiz, mmmu, docvqa or infovqa",
    )


def _score(args: argparse.Namespace) -> int:
    from coat_eval.benchmark import Settings
    from coat_eval.scoring import format_headline, score_official
    from coat_eval.tasks import TASKS, get_benchmark, get_task
    from coat_eval.tasks.question_set import QUESTIONS_FILE

    kind, equals, folder = args.name.partition("=")
    if equals:
        task, references = get_task(kind), [Path(folder) / QUESTIONS_FILE]
        names = ("references", "profile", "raw", "fallback", "submission", *_JUDGE)
        check_effects(args, dict.fromkeys(names, "is for benchmarks, not for question sets"))
    elif kind in TASKS:
        raise ValueError(f"name the question set: {kind}=FOLDER")
    else:
        task, references = get_benchmark(kind), args.references
    chosen = {"profile": args.profile, "fallback": args.fallback}
    report = score_official(
        task,
        args.predictions,
        references,
        settings=Settings(raw=args.raw, **{k: v for k, v in chosen.items() if v is not None}),
        judge=_make_judge(args),
        allow_missing=args.allow_missing,
        report_path=args.out,
        submission_path=args.submission,
    )
    say(f"{format_headline(report)}\n{args.out} has all metrics and items")
    _warn(report)
    return 0


def _add_judge(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--judge", metavar="URL", help="OpenAI-compatible judge of benchmarks that ask one")
    add("--judge-model", metavar="NAME", help="the judge's name at the address")
    add("--judge-key", metavar="VAR", help="environment variable with the judge's key")
    add(
        "--judge-cache",
        type=Path,
        metavar="FILE",
        help="the judge's answers; without --judge, only these",
    )


def _make_judge(args: argparse.Namespace) -> "Judge | None":
    """Make the judge of the options before anything is generated; None without them."""
    if all(getattr(args, name) is None for name in _JUDGE):
        return None
    from coat_eval.judge import make_judge

    return make_judge(args.judge, args.judge_model, args.judge_key, args.judge_cache)
