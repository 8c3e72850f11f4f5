"""``coat-vlm data``: ingest the user's files, look at them, or make one of the known data sets."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from coat_cli import data_tools
from coat_cli.command import Commands, command, say

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
    """Declare ``data ingest``, ``data make`` and the jobs of :mod:`data_look`."""
    parser = commands.add_parser("data", help="check, look at, convert, download or make data")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    _add_ingest(jobs)
    data_tools.add(jobs)
    make = jobs.add_parser("make", help="make scenes, cifar10 or nlvr as LLaVA JSON and images")
    sets = make.add_subparsers(title="data sets", metavar="SET", required=True)
    _add_scenes(sets)
    _add_cifar10(sets)
    _add_nlvr(sets)


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
    data_tools.add_source(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--embed-media", action="store_true", help="put the files into the shards")
    parser.add_argument(
        "--no-check-media", action="store_true", help="do not open every image and video"
    )
    parser.add_argument(
        "--max-bad-samples", type=int, default=0, help="leave out and list up to N; default 0"
    )
    parser.add_argument(
        "--shard-rows", type=int, default=10_000, help="rows a shard; default 10000"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an ingested folder")


def _ingest(args: argparse.Namespace) -> int:
    from coat_data.tools.ingest import ingest

    manifest = ingest(
        args.path,
        args.out,
        **data_tools.source_options(args),
        embed_media=args.embed_media,
        check_media=not args.no_check_media,
        max_bad_samples=args.max_bad_samples,
        shard_rows=args.shard_rows,
        overwrite=args.overwrite,
    )
    say(
        f"{args.out}: {manifest.rows} rows in {len(manifest.shards)} shards, "
        f"{manifest.bad_samples} bad samples left out"
    )
    return 0


def _add_scenes(sets: Commands) -> None:
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
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="keep the folder if this command made it with the same settings, else make it anew",
    )
    for name, meaning in _SCENES_SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        # Left out of the namespace when not given, so that the defaults stand in one place.
        parser.add_argument(flag, type=int, default=argparse.SUPPRESS, metavar="N", help=meaning)


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


def _add_cifar10(sets: Commands) -> None:
    parser = command(
        sets,
        "cifar10",
        _cifar10,
        "turn CIFAR-10's photographs into naming, yes/no and multiple-choice conversations",
        "  coat-vlm data make cifar10 --zip cifar10_train_jpeg.zip --out data/cifar10\n",
    )
    parser.add_argument("--zip", type=Path, required=True, help="train/<class>/<number>.jpg inside")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the questions; default 0")
    parser.add_argument("--limit-per-class", type=int, help="only the first photographs of a class")


def _cifar10(args: argparse.Namespace) -> int:
    from coat_datasets.cifar import convert_cifar10

    summary = convert_cifar10(
        args.zip, args.out, seed=args.seed, limit_per_class=args.limit_per_class
    )
    _say_made(args.out, summary)
    return 0


def _add_nlvr(sets: Commands) -> None:
    parser = command(
        sets,
        "nlvr",
        _nlvr,
        "turn NLVR's statements about drawn shapes into yes/no conversations",
        "  coat-vlm data make nlvr --folder nlvr --split hidden dev --out data/nlvr\n",
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="with SPLIT.json and SPLIT_images.tar"
    )
    parser.add_argument(
        "--split", nargs="+", required=True, help="train, dev, test or hidden, one or several"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")


def _nlvr(args: argparse.Namespace) -> int:
    from coat_datasets.nlvr import convert_nlvr

    _say_made(args.out, convert_nlvr(args.folder, args.out, split=args.split))
    return 0


def _say_made(out: Path, summary: Mapping[str, float]) -> None:
    say(f"{out}:")
    for name, number in summary.items():
        say(f"  {name:<24} {number}")
