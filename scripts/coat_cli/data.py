"""``coat-vlm data``: check, preview, convert, download or generate data."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import Commands, command, say
from coat_cli.evaluate import OFFICIAL

if TYPE_CHECKING:
    from coat_data.tools.overlap import Question
    from coat_data.tools.preview import ModelView
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


def add(commands: Commands) -> None:
    """Declare ``data`` and its jobs."""
    parser = commands.add_parser("data", help="check, preview, convert, download or generate data")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    _add_ingest(jobs)
    _add_looks(jobs)
    _add_overlap(jobs)
    _add_export(jobs)
    _add_download(jobs)
    make = jobs.add_parser("make", help="generate or convert a data set as LLaVA JSON and images")
    _add_makers(make.add_subparsers(title="data sets", metavar="SET", required=True))


def _add_source(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Declare the arguments of a source; returns the parser's ``add_argument``."""
    add = parser.add_argument
    add(
        "path",
        help="file (JSON, JSONL, CSV, Parquet, tar, .txt), folder, pattern or address (https://, "
        "hf://, s3://) of shards, or list of sources",
    )
    add(
        "--media-root",
        help="root of media paths, a folder or an address; default: the folder of PATH",
    )
    add("--format", metavar="NAME", help="row format; default: recognized by content")
    add(
        "--follow-links",
        action="store_true",
        help="follow symbolic links that leave the media root",
    )
    add(
        "--network",
        default="allow",
        metavar="HOSTS",
        help="hosts that rows may name: allow (every public one, the default), deny (none), or "
        "names with commas between, also of private hosts",
    )
    add(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change a limit of the recipe's section limits, such as archive_bytes; repeatable",
    )
    add(
        "--columns",
        type=_columns,
        metavar="NAME=COLUMN,...",
        help="columns of flat rows, such as image=img_path,question=q,answer=a",
    )
    add(
        "--ignore-fields",
        type=lambda text: text.split(","),
        default=(),
        metavar="FIELD,...",
        help="fields to leave out that look like media or weights of the loss",
    )
    return add


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes; the result is the same for any N; default: usable cores, at most 8",
    )


def _columns(text: str) -> dict[str, str]:
    """Parse ``image=img_path,question=q``."""
    pairs = [item.partition("=") for item in text.split(",")]
    wrong = next((name for name, mark, column in pairs if not (name and mark and column)), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{wrong!r} in {text!r} is not NAME=COLUMN")
    return {name.strip(): column.strip() for name, _, column in pairs}


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the arguments of :func:`_add_source`, and ``names``, as keyword arguments."""
    from coat_data.limits import Limits, Network

    names = ("media_root", "format", "follow_links", "columns", "ignore_fields", *names)
    network, limits = Network.parse(args.network), Limits.parse(args.limit)
    return {name: getattr(args, name) for name in names} | {"network": network, "limits": limits}


def _add_ingest(jobs: Commands) -> None:
    parser = command(
        jobs,
        "ingest",
        _ingest,
        "check every row of a source and write it as Parquet shards",
        """\
  coat-vlm data ingest chat.json --media-root images --out data/chat
  coat-vlm data ingest "shards/{000..001}.tar" --out data/captions --max-bad-samples 100
  coat-vlm data ingest dataset_info.json#mllm_demo --out data/demo --embed-media
""",
    )
    add = _add_source(parser)
    add("--out", type=Path, required=True, help="folder to make")
    add("--embed-media", action="store_true", help="store the media in the shards")
    add("--no-check-media", action="store_true", help="do not open every image and video")
    add(
        "--max-bad-samples",
        type=int,
        default=0,
        help="skip and list up to N bad samples; default 0",
    )
    add("--shard-rows", type=int, default=10_000, help="rows per shard; default 10000")
    _add_workers(parser)


def _ingest(args: argparse.Namespace) -> int:
    from coat_data.tools.ingest import ingest
    from coat_vlm.run.signals import SIGNALS

    with SIGNALS.handle():
        manifest = ingest(
            args.path,
            args.out,
            **_options(args, "embed_media", "max_bad_samples", "shard_rows", "workers"),
            check_media=not args.no_check_media,
        )
    say(
        f"{args.out}: {manifest.rows} rows in {len(manifest.shards)} shards, "
        f"{manifest.bad_samples} bad samples left out"
    )
    return 0


def _add_looks(jobs: Commands) -> None:
    parser = command(
        jobs,
        "lint",
        _lint,
        "check every row and print problems as file:row: problem -> remedy",
        """\
  coat-vlm data lint chat.json --media-root images
  coat-vlm data lint "shards/{000..001}.tar" --check-media decode
  coat-vlm data lint chat.json --format llava --check-media none
  coat-vlm data lint flat.csv --columns image=img_path,question=q,answer=a

exit status: 0 if all rows are good, else 1
""",
    )
    add = _add_source(parser)
    add(
        "--check-media",
        choices=("none", "header", "decode"),
        default="header",
        help="header: files exist and start like images (default); decode: files can be decoded",
    )
    _add_workers(parser)

    parser = command(
        jobs,
        "stats",
        _stats,
        "count rows, media and turns, and summarize text lengths and image sizes",
        """\
  coat-vlm data stats chat.json --media-root images
  coat-vlm data stats data/chat --no-sizes
""",
    )
    add = _add_source(parser)
    add("--no-sizes", action="store_true", help="do not read image headers")
    _add_workers(parser)

    parser = command(
        jobs,
        "preview",
        _preview,
        "write an HTML page of samples; with --model, tokens are colored by label",
        """\
  coat-vlm data preview chat.json --media-root images --out chat.html
  coat-vlm data preview data/chat --model runs/my_vlm/sft/model --out tokens.html
""",
    )
    add = _add_source(parser)
    add("--out", type=Path, required=True, help="HTML file to write")
    add("--number", type=int, default=20, help="samples to show; default 20")
    add("--model", type=Path, help="model folder: also show the model's inputs")
    add("--template", help="with --model: chat template instead of the model's")


def _lint(args: argparse.Namespace) -> int:
    from coat_data.tools.lint import lint
    from coat_data.tools.problems import ProblemList
    from coat_vlm.run.signals import SIGNALS

    problems = ProblemList(say)
    options = _options(args, "check_media", "workers")
    with SIGNALS.handle():
        summary = lint(args.path, problems.add, **options)
    problems.finish()
    for name, counts in summary.fields.items():
        for line in counts.lines(name):
            say(line)
    read_as = f" (read as {summary.format})" if summary.format else ""
    away = f", {summary.unreachable} of them transient I/O errors" if summary.unreachable else ""
    say(f"{args.path}: {summary.rows} rows, {summary.bad} problems{away}{read_as}")
    return FOUND_PROBLEMS if summary.bad else 0


def _stats(args: argparse.Namespace) -> int:
    from coat_data.tools.stats import as_text, collect
    from coat_vlm.run.signals import SIGNALS

    with SIGNALS.handle():
        found = collect(args.path, sizes=not args.no_sizes, **_options(args, "workers"))
    for line in as_text(found):
        say(line)
    return 0


def _preview(args: argparse.Namespace) -> int:
    from coat_data.tools.preview import write_preview

    if args.template and not args.model:
        raise ValueError("--template has no effect without --model; add --model FOLDER")
    model = _model_view(args.model, args.template) if args.model else None
    shown = write_preview(args.path, args.out, model=model, **_options(args, "number"))
    say(f"{args.out}: {shown} samples")
    return 0


def _model_view(folder: Path, template: str | None) -> "ModelView":
    from coat_data.tools.preview import ModelView
    from coat_vlm.model.folder import is_family
    from coat_vlm.model.processor import IMAGE_TOKEN, CoatVlmProcessor

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name a model that training wrote")
    if is_family(folder):
        raise ValueError(
            f"--model {folder}: the preview shows the tiles of composed models, not what a "
            "published model's processor makes; remove --model"
        )
    processor = CoatVlmProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    return ModelView(
        encode=processor.encoder(train=False, template=template),
        decode=lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        mean=processor.image_mean,
        std=processor.image_std,
        name=str(folder),
    )


def _add_overlap(jobs: Commands) -> None:
    parser = command(
        jobs,
        "overlap",
        _overlap,
        "find images and texts of evaluation sets in a training set",
        """\
  coat-vlm data overlap chat.json --media-root images --with pope,gqa --data benchmarks
  coat-vlm data overlap chat.json --media-root images --with my_questions,held_out.json \\
      --out overlap.jsonl      # for a source's exclude: overlap.jsonl
""",
    )
    add = _add_source(parser)
    add(
        "--with", dest="sets", required=True, metavar="SET,...",
        help=f"official benchmarks ({', '.join(OFFICIAL)}), folders with questions.jsonl, or data "
        "files",
    )  # fmt: skip
    add("--data", type=Path, help="folder with the official benchmarks, as for eval --tasks")
    add("--out", type=Path, help="file to write: the rows, for the exclude of a recipe's source")
    _add_workers(parser)


def _overlap(args: argparse.Namespace) -> int:
    from coat_data.tools.overlap import Benchmarks, as_table, find_overlap
    from coat_vlm.run.signals import SIGNALS

    with SIGNALS.handle():
        benchmarks = Benchmarks()
        for name in args.sets.split(","):
            benchmarks.add(name, _read_questions(name.strip(), args.data))
        counts, bad = find_overlap(args.path, benchmarks, args.out, **_options(args, "workers"))
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
    """Yield the questions of an official benchmark, a folder with questions, or a data file."""
    from coat_data.load.dataset import SampleDataset
    from coat_data.sample import DataError
    from coat_data.tools.overlap import Question
    from coat_eval.benchmark import PromptOptions
    from coat_eval.runner import EvalTask, make_eval_task
    from coat_eval.tasks import get_task
    from coat_eval.tasks.question_set import QUESTIONS_FILE

    path = Path(name)
    own = (path / QUESTIONS_FILE).is_file()
    if own or (name.partition("_")[0] in OFFICIAL and not path.exists()):
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
            f"--with {name}: there is no such file or folder, and no benchmark of that name; "
            f"allowed: {', '.join(OFFICIAL)}, a folder with {QUESTIONS_FILE}, or a data file"
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
        "write a source as LLaVA JSON, messages JSONL or WebDataset tars",
        """\
  coat-vlm data export data/chat --to messages --out data/messages
  coat-vlm data export chat.json --media-root images --to webdataset --out data/tars
  coat-vlm data export data/tars --to llava --out data/llava
""",
    )
    add = _add_source(parser)
    add("--to", choices=("llava", "messages", "webdataset"), required=True)
    add("--out", type=Path, required=True, help="folder to make")


def _export(args: argparse.Namespace) -> int:
    from coat_data.tools.export import BAD_NAME, export

    summary = export(args.path, args.out, args.to, **_options(args))
    say(f"{summary.path}: {summary.rows} samples")
    if summary.left_out:
        say(f"{summary.left_out} were left out; {args.out / BAD_NAME} says why")
    return 0


def _add_download(jobs: Commands) -> None:
    parser = command(
        jobs,
        "download",
        _download,
        "download a known data set or benchmark from the Hugging Face Hub, or list them",
        """\
  coat-vlm data download                           # list the names
  coat-vlm data download llava_558k --out data
  coat-vlm data download pope                      # what it would fetch: files, license, size
  coat-vlm data download pope --out benchmarks     # for coat-vlm eval --tasks pope
""",
    )
    add = parser.add_argument
    add("name", nargs="?", help="a name from the list, or a mixture file")
    add(
        "--out", type=Path, help="folder to download into; a benchmark without it is only described"
    )


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
        if args.out is None:
            return 0
        path = download_benchmark(args.name, args.out)
        say(f"{path}: coat-vlm eval --tasks {args.name} --data {args.out} --model ... --out ...")
        return 0
    if args.out is None:
        raise ValueError("--out is missing; name the folder to download into")
    path, notes = download(args.name, args.out)
    say(f"{path}: use it as the path of a source; statistics: coat-vlm data stats {path}")
    for note in notes:
        say(note)
    return 0


def _add_makers(sets: Commands) -> None:
    parser = command(
        sets,
        "scenes",
        _scenes,
        "draw scenes of colored shapes with captions and questions, deterministic per seed",
        """\
  coat-vlm data make scenes --out runs/quickstart-data
  coat-vlm data make scenes --out data/small --num-train 50 --num-val 8 --num-test 8 --seed 1
""",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to make")
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
    note = args.out / MADE_FILE
    # Other code may generate other data.
    code = b"".join(path.read_bytes() for path in sorted(Path(scenes.__file__).parent.glob("*.py")))
    made = {"settings": settings, "coat_datasets.scenes": hashlib.sha256(code).hexdigest()}
    if args.reuse and note.is_file():
        if json.loads(note.read_text(encoding="utf-8")) == made:
            say(f"{args.out} exists already")
            return 0
        shutil.rmtree(args.out)
    summary = scenes.make_scenes(args.out, **settings)
    note.write_text(json.dumps(made), encoding="utf-8")
    _say_made(args.out, summary)
    return 0


def _say_made(out: Path, summary: Mapping[str, float]) -> None:
    say(f"{out}:")
    for name, number in summary.items():
        say(f"  {name:<24} {number}")
