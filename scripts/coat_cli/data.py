"""``coat-vlm data``: check, look at, convert, download or make data."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import Commands, command, say

if TYPE_CHECKING:
    from coat_data.tools.preview import ModelView

FOUND_PROBLEMS = 1
"""Exit status of ``lint`` when a row is bad."""

MADE_FILE = "made.json"
"""Says which settings and code a made folder comes from."""

_SCENES_SETTINGS = {
    "num_train": "training images",
    "num_val": "validation images",
    "num_test": "test images, a multiple of 8",
    "seed": "decides everything",
    "image_size": "width and height in pixels, a multiple of 3",
    "questions_per_image": "training questions about an image",
    "questions_per_row": "questions that share a training row as turns",
}


def add(commands: Commands) -> None:
    """Declare ``data`` and its jobs."""
    parser = commands.add_parser("data", help="check, look at, convert, download or make data")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    _add_ingest(jobs)
    _add_looks(jobs)
    _add_export(jobs)
    _add_download(jobs)
    make = jobs.add_parser("make", help="make scenes, cifar10 or nlvr as LLaVA JSON and images")
    _add_makers(make.add_subparsers(title="data sets", metavar="SET", required=True))


def _add_source(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Declare the arguments that say what to open; returns what declares more of them."""
    add = parser.add_argument
    add(
        "path",
        help="JSON, JSONL, CSV, Parquet, tar or .txt file, pattern or address (https://, hf://, "
        "s3://) of shards, folder, or list of sources",
    )
    add("--media-root", help="folder or address where paths start; default: beside PATH")
    add("--format", metavar="NAME", help="how to read a row; default: by content")
    add("--allow-pickle", action="store_true", help="read .pkl files, plain values only")
    add("--follow-links", action="store_true", help="allow links that lead out of the media root")
    return add


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What :func:`_add_source` declared, and ``names``, as keyword arguments."""
    names = ("media_root", "format", "allow_pickle", "follow_links", *names)
    return {name: getattr(args, name) for name in names}


def _add_ingest(jobs: Commands) -> None:
    parser = command(
        jobs,
        "ingest",
        _ingest,
        "check data in any known format row by row and write it as Parquet shards",
        """\
  coat-vlm data ingest llava.json --media-root images --out data/llava
  coat-vlm data ingest "shards/{000..099}.tar" --out data/captions --max-bad-samples 100
  coat-vlm data ingest dataset_info.json#mllm_demo --out data/demo --embed-media
""",
    )
    add = _add_source(parser)
    add("--out", type=Path, required=True, help="folder to make")
    add("--embed-media", action="store_true", help="put the files into the shards")
    add("--no-check-media", action="store_true", help="do not open every image and video")
    add("--max-bad-samples", type=int, default=0, help="leave out and list up to N; default 0")
    add("--shard-rows", type=int, default=10_000, help="rows a shard; default 10000")
    add("--overwrite", action="store_true", help="replace an ingested folder")


def _ingest(args: argparse.Namespace) -> int:
    from coat_data.tools.ingest import ingest

    manifest = ingest(
        args.path,
        args.out,
        **_options(args, "embed_media", "max_bad_samples", "shard_rows", "overwrite"),
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
        "tell what is wrong with every bad row, as file:row: problem -> remedy",
        """\
  coat-vlm data lint llava.json --media-root images
  coat-vlm data lint "shards/{000..099}.tar" --check-media decode
  coat-vlm data lint rows.jsonl --format messages --check-media none

exit status: 0 all rows are good, 1 some are not
""",
    )
    add = _add_source(parser)
    add(
        "--check-media",
        choices=("none", "header", "decode"),
        default="header",
        help="nothing; the files are there and begin as images (default); all can be decoded",
    )
    add("--no-progress", action="store_true", help="show no progress bar")

    parser = command(
        jobs,
        "stats",
        _stats,
        "count rows, media and turns, with the spread of text lengths and image sizes",
        """\
  coat-vlm data stats llava.json --media-root images
  coat-vlm data stats mixture.yaml --tokenizer Qwen2.5-1.5B-Instruct
""",
    )
    add = _add_source(parser)
    add("--tokenizer", type=Path, help="folder with tokenizer.json: count tokens")
    add("--no-sizes", action="store_true", help="do not read image headers")
    add("--no-progress", action="store_true", help="show no progress bar")

    parser = command(
        jobs,
        "preview",
        _preview,
        "write an HTML page of samples, with tokens coloured by label if a model is given",
        """\
  coat-vlm data preview llava.json --media-root images --out preview.html
  coat-vlm data preview data/llava --model runs/quickstart/sft/model --out preview.html
""",
    )
    add = _add_source(parser)
    add("--out", type=Path, required=True, help="HTML file to write")
    add("--number", type=int, default=20, help="samples to show; default 20")
    add("--model", type=Path, help="model folder: show what this model gets")
    add("--template", help="with --model: a chat template other than the model's")


def _lint(args: argparse.Namespace) -> int:
    from coat_data.tools.lint import lint

    summary = lint(
        args.path,
        lambda error: say(str(error)),
        progress=not args.no_progress,
        **_options(args, "check_media"),
    )
    read_as = f" (read as {summary.format})" if summary.format else ""
    away = f", {summary.unreachable} of them outages" if summary.unreachable else ""
    say(f"{args.path}: {summary.rows} rows, {summary.bad} problems{away}{read_as}")
    return FOUND_PROBLEMS if summary.bad else 0


def _stats(args: argparse.Namespace) -> int:
    from coat_data.tools.stats import as_text, collect

    found = collect(
        args.path,
        sizes=not args.no_sizes,
        progress=not args.no_progress,
        **_options(args, "tokenizer"),
    )
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
    from coat_vlm.model.processor import IMAGE_TOKEN, CoatVlmProcessor

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name a model that training wrote")
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


def _add_export(jobs: Commands) -> None:
    parser = command(
        jobs,
        "export",
        _export,
        "write a source as LLaVA JSON, messages JSONL or WebDataset tars",
        """\
  coat-vlm data export data/llava --to messages --out exported
  coat-vlm data export llava.json --media-root images --to webdataset --out shards
  coat-vlm data export shards --to llava --out llava
""",
    )
    add = _add_source(parser)
    add("--to", choices=("llava", "messages", "webdataset"), required=True)
    add("--out", type=Path, required=True, help="folder to make")
    add("--keep-paths", action="store_true", help="do not copy media; name them below the root")
    add("--shard-rows", type=int, default=1000, help="samples per tar; default 1000")


def _export(args: argparse.Namespace) -> int:
    from coat_data.tools.export import BAD_NAME, export

    options = _options(args, "keep_paths", "shard_rows")
    summary = export(args.path, args.out, args.to, **options)
    say(f"{summary.path}: {summary.rows} samples")
    if summary.left_out:
        say(f"{summary.left_out} were left out; {args.out / BAD_NAME} says why")
    return 0


def _add_download(jobs: Commands) -> None:
    parser = command(
        jobs,
        "download",
        _download,
        "fetch a known data set or benchmark from the Hugging Face Hub, or list what is known",
        """\
  coat-vlm data download
  coat-vlm data download llava_558k --out data
  coat-vlm data download pope --out benchmarks     # for coat-vlm eval --tasks pope
""",
    )
    add = parser.add_argument
    add("name", nargs="?", help="a name from the list, or a mixture file")
    add("--out", type=Path, help="folder to download into")


def _download(args: argparse.Namespace) -> int:
    from coat_datasets.download import BENCHMARKS, download, download_benchmark, known_mixtures

    if args.name is None:
        for mixture in known_mixtures():
            say(f"{mixture.name:<20} {mixture.about}")
            for repository in mixture.hub:
                say(f"{'':<20} {repository.repo} ({repository.license})")
        for name, repository in BENCHMARKS.items():
            say(f"{name:<20} benchmark: {repository.repo} ({repository.license})")
        return 0
    if args.out is None:
        raise ValueError("--out is missing; name the folder to download into")
    if args.name in BENCHMARKS:
        say(f"licence: {BENCHMARKS[args.name].license}")
        path = download_benchmark(args.name, args.out)
        say(f"{path}: coat-vlm eval --tasks {args.name} --data {args.out} --model ... --out ...")
        return 0
    path, notes = download(args.name, args.out)
    say(f"{path}: name it as the path of a source, or look at it with coat-vlm data stats {path}")
    for note in notes:
        say(note)
    return 0


def _add_makers(sets: Commands) -> None:
    parser = command(
        sets,
        "scenes",
        _scenes,
        "draw scenes of coloured shapes with captions and questions, the same for the same seed",
        """\
  coat-vlm data make scenes --out runs/quickstart-data
  coat-vlm data make scenes --out data/small --num-train 500 --num-test 40 --seed 1
""",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to make")
    add(
        "--reuse",
        action="store_true",
        help="keep the folder if this command made it with the same settings, else make it anew",
    )
    for name, meaning in _SCENES_SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        # Left out of the namespace when not given, so that the defaults stand in one place.
        add(flag, type=int, default=argparse.SUPPRESS, metavar="N", help=meaning)

    parser = command(
        sets,
        "cifar10",
        _cifar10,
        "turn CIFAR-10's photographs into naming, yes/no and multiple-choice conversations",
        "  coat-vlm data make cifar10 --zip cifar10_train_jpeg.zip --out data/cifar10\n",
    )
    add = parser.add_argument
    add("--zip", type=Path, required=True, help="train/<class>/<number>.jpg inside")
    add("--out", type=Path, required=True, help="folder to make")
    add("--seed", type=int, default=0, help="of the questions; default 0")
    add("--limit-per-class", type=int, help="only the first photographs of a class")

    parser = command(
        sets,
        "nlvr",
        _nlvr,
        "turn NLVR's statements about drawn shapes into yes/no conversations",
        "  coat-vlm data make nlvr --folder nlvr --split hidden dev --out data/nlvr\n",
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="with SPLIT.json and SPLIT_images.tar")
    add("--split", nargs="+", required=True, help="train, dev, test or hidden, one or several")
    add("--out", type=Path, required=True, help="folder to make")


def _scenes(args: argparse.Namespace) -> int:
    from coat_datasets import scenes

    settings = {name: getattr(args, name) for name in _SCENES_SETTINGS if name in args}
    note = args.out / MADE_FILE
    made = {"settings": settings, "coat_datasets.scenes": _digest(Path(scenes.__file__).parent)}
    if args.reuse and note.is_file():
        if json.loads(note.read_text(encoding="utf-8")) == made:
            say(f"{args.out} is there already")
            return 0
        shutil.rmtree(args.out)
    summary = scenes.make_scenes(args.out, **settings)
    note.write_text(json.dumps(made), encoding="utf-8")
    _say_made(args.out, summary)
    return 0


def _digest(package: Path) -> str:
    """SHA-256 of a package's code: data made by other code is other data."""
    code = b"".join(path.read_bytes() for path in sorted(package.glob("*.py")))
    return hashlib.sha256(code).hexdigest()


def _cifar10(args: argparse.Namespace) -> int:
    from coat_datasets.cifar import convert_cifar10

    limit = args.limit_per_class
    _say_made(args.out, convert_cifar10(args.zip, args.out, seed=args.seed, limit_per_class=limit))
    return 0


def _nlvr(args: argparse.Namespace) -> int:
    from coat_datasets.nlvr import convert_nlvr

    _say_made(args.out, convert_nlvr(args.folder, args.out, split=args.split))
    return 0


def _say_made(out: Path, summary: Mapping[str, float]) -> None:
    say(f"{out}:")
    for name, number in summary.items():
        say(f"  {name:<24} {number}")
