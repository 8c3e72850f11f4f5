"""``coat-vlm data``: check, preview, convert, download or generate data."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import Commands, at_least, check_effects, command, say, stoppable

if TYPE_CHECKING:
    from coat_data.load.encode import Encoder
    from coat_data.tools.overlap import Question
    from coat_eval.benchmark import Prompt

FOUND_PROBLEMS = 1
"""Exit status of ``lint`` if a row is bad."""

MADE_FILE = "made.json"
"""File with the settings and the code digest of a generated folder."""

_SCENES_SETTINGS = {
    "num_train": "training images",
    "num_val": "validation images",
    "num_test": "test images, a multiple of 8",
    "seed": "seed of all random choices",
}


_MODEL = "model or run folder, recipe, or published model whose processor reads the rows"


def add(commands: Commands) -> None:
    """Declare ``data`` and its jobs."""
    purpose = "check, preview, convert, download or generate data"
    parser = commands.add_parser(
        "data",
        help=purpose,
        purpose=f"{purpose.capitalize()}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="coat-vlm data JOB --help explains a job with examples.",
    )
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for declare in (_add_ingest, _add_looks, _add_export, _add_overlap, _add_download, _add_scenes):
        declare(jobs)


def _add_source(parser: argparse.ArgumentParser, *, parallel: bool = True) -> Callable[..., Any]:
    """Declare the arguments of a source; returns the parser's ``add_argument``."""
    add = parser.add_argument
    add(
        "path",
        metavar="PATH",
        help="file (JSON, JSONL, CSV, Parquet, tar, .txt), folder, pattern or address (https://, "
        "hf://, s3://) of shards, or list of sources",
    )
    add("--media-root", metavar="DIR", help="folder or address of the media; default: PATH's")
    add("--read-as", metavar="NAME", help="row format; default: recognized by content")
    add("--follow-links", action="store_true", help="follow links that leave the media root")
    add(
        "--network",
        choices=("allow", "deny"),
        default="allow",
        help="deny: PATH, media root and rows must not be addresses; default allow (rows: public "
        "hosts only)",
    )
    add(
        "--limits",
        nargs="+",
        default=[],
        metavar="NAME=NUMBER",
        help="change keys of a recipe's section limits, such as archive_bytes",
    )
    add(
        "--columns",
        nargs="+",
        type=_column,
        metavar="NAME=COLUMN",
        help="columns of flat rows, such as image=img_path question=q answer=a",
    )
    add(
        "--ignore-fields",
        nargs="+",
        default=(),
        metavar="FIELD",
        help="fields to leave out although they look like media or loss weights",
    )
    add("--keep-boxes", action="store_true", help="do not convert boxes (boxes: keep in a recipe)")
    if parallel:
        add(
            "--num-workers",
            type=at_least(1),
            metavar="N",
            help="processes; the result is the same for any N; default: usable cores, at most 8",
        )
    return add


def _column(text: str) -> tuple[str, str]:
    name, _, column = text.partition("=")
    if not (name and column):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COLUMN")
    return name, column


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the arguments of :func:`_add_source` for ``SampleDataset`` and ``workers``."""
    from coat_data.limits import Limits

    options = {
        "media_root": args.media_root,
        "format": args.read_as,
        "follow_links": args.follow_links,
        "columns": dict(args.columns) if args.columns else None,
        "ignore_fields": args.ignore_fields,
        "boxes": "keep" if args.keep_boxes else "convert",
        "network": args.network,
        "limits": Limits.parse(args.limits),
    }
    return options | ({"workers": args.num_workers} if "num_workers" in args else {})


def _add_ingest(jobs: Commands) -> None:
    parser = command(
        jobs,
        "ingest",
        stoppable(_ingest),
        "check a data set and convert it to Parquet shards",
        """\
  coat-vlm data ingest chat.json --media-root images --to data/chat
  coat-vlm data ingest "shards/{000..001}.tar" --to data/captions --max-bad-samples 100
  coat-vlm data ingest dataset_info.json#mllm_demo --to data/demo --embed-media
""",
    )
    add = _add_source(parser)
    add("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    add("--embed-media", action="store_true", help="store the media in the shards")
    add(
        "--check-media",
        choices=("none", "decode"),
        default="decode",
        help="decode: open every image and video (default)",
    )
    add(
        "--max-bad-samples",
        type=at_least(0),
        default=0,
        metavar="N",
        help="skip and list up to N bad samples; default 0",
    )


def _ingest(args: argparse.Namespace) -> int:
    from coat_data.tools.ingest import ingest

    manifest = ingest(
        args.path,
        args.to,
        embed_media=args.embed_media,
        check_media=args.check_media != "none",
        max_bad_samples=args.max_bad_samples,
        **_options(args),
    )
    say(
        f"{args.to}: {manifest.rows} rows in {len(manifest.shards)} shards, "
        f"{manifest.bad_samples} bad samples left out"
    )
    return 0


def _add_looks(jobs: Commands) -> None:
    parser = command(
        jobs,
        "lint",
        stoppable(_lint),
        "find problems in your data before training",
        """\
  coat-vlm data lint chat.json --media-root images
  coat-vlm data lint "shards/{000..001}.tar" --check-media decode
  coat-vlm data lint chat.json --read-as llava --check-media none
  coat-vlm data lint flat.csv --columns image=img_path question=q answer=a
  coat-vlm data lint chat.json --media-root images --model my_recipe.yaml
""",
        """\
Every row is checked; a problem is printed as file:row: problem -> remedy.
exit status: 0 if all rows are good, else 1
""",
    )
    add = _add_source(parser)
    add(
        "--check-media",
        choices=("none", "header", "decode"),
        default="header",
        help="header: files exist and start like media (default); decode: files can be decoded",
    )
    add("--model", metavar="NAME", help=f"{_MODEL}: also checks lengths, template and image limits")
    parser = command(
        jobs,
        "preview",
        _preview,
        "look at samples, as they are or as a model is trained on them",
        """\
  coat-vlm data preview chat.json --media-root images --out chat.html
  coat-vlm data preview chat.json --model Qwen/Qwen2.5-VL-3B-Instruct --limit 3
  coat-vlm data preview data/chat --model my_recipe.yaml --ids
""",
        """\
Supervised text is marked with >, other text with |.
""",
    )
    add = _add_source(parser, parallel=False)
    add("--out", type=Path, metavar="FILE", help="write this HTML file; default: print")
    add("--limit", type=at_least(1), default=20, metavar="N", help="at most N samples; default 20")
    add("--model", metavar="NAME", help=_MODEL)
    add("--ids", action="store_true", help="show token ids next to their text")


def _lint(args: argparse.Namespace) -> int:
    from coat_data.tools.lint import lint
    from coat_data.tools.problems import ProblemList

    problems = ProblemList(say)
    check = None
    if args.model is not None:
        from coat_vlm.train.check_data import RowCheck

        check = RowCheck(_load_encoder(args.model), check_media=args.check_media)
    media = {"check_media": args.check_media, "check": check}
    summary = lint(args.path, problems.add, **media, **_options(args))
    problems.finish()
    for name, counts in summary.fields.items():
        for line in counts.lines(name):
            say(line)
    read_as = f" (read as {summary.format})" if summary.format else ""
    away = f", {summary.unreachable} of them transient I/O errors" if summary.unreachable else ""
    rows = "1 row" if summary.rows == 1 else f"{summary.rows} rows"
    bad = "1 problem" if summary.bad == 1 else f"{summary.bad} problems"
    say(f"{args.path}: {rows}, {bad}{away}{read_as}")
    return FOUND_PROBLEMS if summary.bad else 0


def _preview(args: argparse.Namespace) -> int:
    from coat_data.tools.preview import card_lines, preview

    if not args.model:
        check_effects(args, {"ids": "shows token ids, which need --model"})
    encoder = _load_encoder(args.model) if args.model else None
    shown = {"number": args.limit, "model": args.model, "encoder": encoder, "ids": args.ids}
    cards = preview(args.path, args.out, **shown, **_options(args))
    if args.out is not None:
        say(f"{args.out}: {len(cards)} samples")
        return 0
    for card in cards:
        say("\n".join([*card_lines(card, ids=args.ids), ""]))
    return 0


def _load_encoder(name: str) -> "Encoder":
    """Return the encoder of a model or run folder, a recipe, or a model on the Hub."""
    from coat_vlm.config.load import list_builtin_recipes, load_recipe
    from coat_vlm.model.family_processor import FamilyProcessor
    from coat_vlm.model.folder import is_family, load_processor
    from coat_vlm.model.named_model import find_model
    from coat_vlm.train.checks import make_recipe_encoder

    folder = Path(name)
    if folder.is_file() or name in list_builtin_recipes():
        return make_recipe_encoder(load_recipe(name, unset_variables=True))
    if not folder.exists():
        return FamilyProcessor.load("--model", name).encoder()
    named = find_model(folder)
    if named.recipe is not None and is_family(named.folder):
        return make_recipe_encoder(named.recipe, named.folder)  # with its max_length
    return load_processor(named.folder).encoder()


def _add_overlap(jobs: Commands) -> None:
    parser = command(
        jobs,
        "overlap",
        stoppable(_overlap),
        "find images and texts of evaluation sets in your training data",
        """\
  coat-vlm data overlap chat.json --media-root images --against pope gqa --data benchmarks
  coat-vlm data overlap chat.json --media-root images --against my_questions held_out.json \\
      --out overlap.jsonl      # for a source's exclude: overlap.jsonl
""",
    )
    add = _add_source(parser)
    add(
        "--against",
        nargs="+",
        required=True,
        metavar="SET",
        help="benchmarks (coat-vlm eval --list-tasks), folders with questions.jsonl, data files",
    )
    add("--data", type=Path, metavar="DIR", help="folder with one folder per benchmark")
    add("--out", type=Path, metavar="FILE", help="list the rows, for the exclude of a source")


def _overlap(args: argparse.Namespace) -> int:
    from coat_data.saved_files import check_outputs
    from coat_data.tools.overlap import Benchmarks, as_table, find_overlap

    folders = (Path(args.data or "") / name for name in args.against)
    check_outputs([args.out], [*args.against, *folders])
    benchmarks = Benchmarks()
    for name in args.against:
        benchmarks.add(name, _read_questions(name, args.data))
    counts, bad = find_overlap(args.path, benchmarks, args.out, **_options(args))
    for line in as_table(counts):
        say(line)
    if benchmarks.unreadable:
        say(f"{benchmarks.unreadable} images of the evaluation sets could not be read")
    for name, short in benchmarks.short.items():
        if short:
            say(f"{name}: {short} questions are too short to be found by their text")
    if bad:
        say(f"{bad} rows could not be read; coat-vlm data lint lists them")
    if args.out is not None:
        say(f"{args.out}: name it as exclude of the source in the recipe")
    return 0


def _read_questions(name: str, data: Path | None) -> "Iterator[Question]":
    """Yield the questions of a benchmark, a folder with questions, or a data file."""
    from coat_data.load.dataset import SampleDataset
    from coat_data.sample import DataError
    from coat_data.tools.overlap import Question
    from coat_eval.benchmark import PromptOptions
    from coat_eval.runner import EvalTask, make_eval_task
    from coat_eval.tasks import BENCHMARKS, get_task
    from coat_eval.tasks.question_set import QUESTIONS_FILE

    path = Path(name)
    own = (path / QUESTIONS_FILE).is_file()
    if own or (name.partition("_")[0] in BENCHMARKS and not path.exists()):
        if own:  # the kind of a set decides about answers, which are not compared
            task, data = EvalTask(benchmark=get_task("short_answer")), path
        elif data is None:
            raise ValueError(f"--data is missing; name the folder that has the files of {name}")
        else:
            task = make_eval_task(name, data)
        options = PromptOptions(variant=task.variant)
        yield from map(_to_question, task.benchmark.prompts(task.open(data), options))
        return
    if not path.exists():
        raise ValueError(
            f"--against {name}: there is no such file or folder, and no benchmark of that name; "
            f"allowed: {', '.join(BENCHMARKS)}, a folder with {QUESTIONS_FILE}, or a data file"
        )
    for sample in SampleDataset(path).stream():
        if isinstance(sample, DataError):
            raise sample
        text = "\n".join(turn.text for turn in sample.turns)
        yield Question(where=sample.where, text=text, media=sample.media)


def _to_question(prompt: "Prompt") -> "Question":
    from coat_data.sample import DataError, Media
    from coat_data.tools.overlap import Question

    media = list(prompt.sample.media) if prompt.sample else []
    for file in prompt.media if prompt.sample is None else ():
        try:
            media.append(file.load())
        except DataError:
            media.append(Media(kind=file.kind, path=file.name))  # counted as unreadable
    return Question(where=prompt.where, text=prompt.text, media=tuple(media))


def _add_export(jobs: Commands) -> None:
    parser = command(
        jobs,
        "export",
        _export,
        "convert a data set to LLaVA JSON or messages JSONL",
        """\
  coat-vlm data export data/chat --format messages --to data/messages
  coat-vlm data export "shards/{000..001}.tar" --format llava --to data/llava
""",
    )
    add = _add_source(parser, parallel=False)
    add("--format", choices=("llava", "messages"), required=True, help="layout to write")
    add("--to", type=Path, required=True, metavar="DIR", help="folder to create")


def _export(args: argparse.Namespace) -> int:
    from coat_data.tools.export import BAD_NAME, export

    summary = export(args.path, args.to, args.format, **_options(args))
    say(f"{summary.path}: {summary.rows} samples")
    if summary.left_out:
        say(f"{summary.left_out} were left out; {args.to / BAD_NAME} says why")
    return 0


def _add_download(jobs: Commands) -> None:
    parser = command(
        jobs,
        "download",
        _download,
        "download a known data set or benchmark from the Hugging Face Hub",
        """\
  coat-vlm data download                           # list the names
  coat-vlm data download llava_558k --to data
  coat-vlm data download pope                      # what it would fetch: files, license, size
  coat-vlm data download pope --to benchmarks      # for coat-vlm eval --tasks pope
""",
    )
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="a name from the list, or a mixture file")
    add("--to", type=Path, metavar="DIR", help="folder; without it a benchmark is only described")


def _download(args: argparse.Namespace) -> int:
    from coat_datasets.download import (
        BENCHMARKS,
        describe_benchmark,
        download,
        download_benchmark,
        known_mixtures,
    )

    if args.name is None:
        for mixture in known_mixtures():
            say(f"{mixture.name:<20} {mixture.about}")
            for repository in mixture.hub:
                say(f"{'':<20} {repository.repo} ({repository.license})")
        for name, repository in BENCHMARKS.items():
            say(f"{name:<20} benchmark: {repository.repo} ({repository.license})")
        return 0
    if args.name in BENCHMARKS:
        say(describe_benchmark(args.name))
        if args.to is None:
            return 0
        path = download_benchmark(args.name, args.to)
        say(f"{path}: coat-vlm eval --tasks {args.name} --data {args.to} --model ... --to ...")
        return 0
    if args.to is None:
        raise ValueError("--to is missing; name the folder to download into")
    path, notes = download(args.name, args.to)
    say(f"{path}: use it as the path of a source; check it: coat-vlm data lint {path}")
    for note in notes:
        say(note)
    return 0


def _add_scenes(jobs: Commands) -> None:
    parser = command(
        jobs,
        "scenes",
        _scenes,
        "generate a small data set: colored shapes, captions and questions",
        """\
  coat-vlm data scenes --to data/shapes
  coat-vlm data scenes --to data/small --num-train 50 --num-val 8 --num-test 8 --seed 1
""",
    )
    add = parser.add_argument
    add("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    add(
        "--reuse",
        action="store_true",
        help="keep a folder made with the same settings; replace one made with other settings",
    )
    for name, meaning in _SCENES_SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        # Omitted from the namespace if not given, so that make_scenes has the only defaults.
        add(flag, type=int, default=argparse.SUPPRESS, metavar="N", help=meaning)


def _scenes(args: argparse.Namespace) -> int:
    from coat_datasets import scenes

    settings = {name: getattr(args, name) for name in _SCENES_SETTINGS if name in args}
    note = args.to / MADE_FILE
    # Other code may generate other data.
    code = b"".join(path.read_bytes() for path in sorted(Path(scenes.__file__).parent.glob("*.py")))
    made = {"settings": settings, "coat_datasets.scenes": hashlib.sha256(code).hexdigest()}
    if args.reuse and note.is_file():
        if json.loads(note.read_text(encoding="utf-8")) == made:
            say(f"{args.to} exists already")
            return 0
        shutil.rmtree(args.to)
    summary = scenes.make_scenes(args.to, **settings)
    note.write_text(json.dumps(made), encoding="utf-8")
    say(f"{args.to}:")
    for name, number in summary.items():
        say(f"  {name:<24} {number}")
    return 0
