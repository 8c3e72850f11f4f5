"""How fast images and videos become a model's inputs, on generated files.

    python data/benchmarks/media.py                       all cores, a table
    python data/benchmarks/media.py --workers 0 2 --csv media.csv
    python data/benchmarks/media.py --images 32 --clips 4 --repeats 3 --seconds 5     a quick look

Cases, each in the same worker processes of a DataLoader:

    tiles, bare      JPEG of 1280 x 960: Pillow's decode, resize to the 3 x 4 grid of tiles of 448
                     and to the thumbnail, as arrays of bytes
    tiles, engine    the same file through the encoder in mode dynamic: tokens, labels, 13
                     normalized tiles in FP32
    tiles, datasets  the same pixels by Hugging Face datasets (imagefolder, its Image feature) and a
                     plain collator: Pillow's resize and crop, torch's normalization, batches of
                     4; no tokens
    tiles, energon   the same by megatron-energon from a WebDataset of the files, where it is
                     installed (pip install megatron-energon); no tokens
    square, bare     Pillow's decode and resize to 448 x 448, as an array of bytes
    square, engine   the same through the encoder in mode resize
    clip, pyav       H.264 clip of 1280 x 720 at 30 frames per second, a keyframe every 250 frames:
                     8 frames, uniform in time, through the encoder
    clip, decord     the same with decord in its child process, where it is installed

A rate is the median over passes, in which the cases take turns; before the first, the workers are
started and the files read once. ``sent`` counts with the transport of the results to the main
process, ``kept`` leaves them in the worker, which is what decoding and encoding cost. ``cpu_ms`` is
the processor time of one file, measured without workers only (decord's child not included); the
comparison with the bare case is of that where it is known, as other programs disturb it least.
"""

import argparse
import contextlib
import csv
import importlib.util
import io
import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import torch
from av.video.stream import VideoStream
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from coat_data.load.encode import Encoder
from coat_data.media.image import ImageTransform
from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_data.sample import Media, MediaKind, Part, Sample, Turn
from coat_data.text.chat import get_template
from coat_vlm.model.processor import train_tokenizer

SIZE, HALF = 448, (0.5, 0.5, 0.5)
GRID = (3, 4)  # rows and columns that 1280 x 960 gets of up to 12 tiles
BATCH = 4  # images of the cases that make batches themselves
COLUMNS = ("case", "workers", "results", "per_second", "cpu_ms", "over_bare_percent")

Load = Callable[[Path], Any]
Loader = Callable[[int, bool], Iterable[Any]]
"""Workers, and whether they keep their results -> what is iterated in a pass over the files."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to be measured."""

    name: str
    files: list[Path]
    loader: Loader
    bare: str | None = None
    """The case that it is compared with."""


class Files(Dataset[Any]):
    """Loads files in worker processes."""

    def __init__(self, files: Sequence[Path], load: Load, *, keep: bool) -> None:
        self._files = list(files)
        self._load = load
        self._keep = keep

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        loaded = self._load(self._files[index])
        return 0 if self._keep else loaded


def bare_tiles(path: Path) -> list[torch.Tensor]:
    """What Pillow alone needs for the tiles and the thumbnail."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    whole = image.resize((GRID[1] * SIZE, GRID[0] * SIZE), Image.Resampling.BICUBIC)
    small = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return [torch.from_numpy(np.array(part)) for part in (whole, small)]


def bare_square(path: Path) -> list[torch.Tensor]:
    """What Pillow alone needs for one square."""
    with Image.open(path) as opened:
        image = opened.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return [torch.from_numpy(np.array(image))]


def by_file(files: list[Path], load: Load) -> Loader:
    """Loads one file after the other."""

    def loader(workers: int, keep: bool) -> Iterable[Any]:
        return DataLoader(
            Files(files, load, keep=keep),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    return loader


def plain_tiles(image: Image.Image) -> torch.Tensor:
    """The tiles of the grid and the thumbnail, normalized, as a short script makes them."""
    image = image.convert("RGB")
    whole = image.resize((GRID[1] * SIZE, GRID[0] * SIZE), Image.Resampling.BICUBIC)
    corners = [(SIZE * column, SIZE * row) for row in range(GRID[0]) for column in range(GRID[1])]
    tiles = [whole.crop((left, top, left + SIZE, top + SIZE)) for left, top in corners]
    tiles.append(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    pixels = torch.from_numpy(np.stack([np.asarray(tile) for tile in tiles]))
    mean, std = (torch.tensor(HALF).view(3, 1, 1) for _ in range(2))
    return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std


def by_datasets(files: list[Path], folder: Path) -> Loader:
    """Hugging Face datasets, which decodes, and a collator, which tiles."""
    from datasets import load_dataset

    names = [str(path) for path in files]
    images: Any = load_dataset(
        "imagefolder", data_files=names, drop_labels=True, split="train", cache_dir=str(folder)
    )

    def loader(workers: int, keep: bool) -> Iterable[Any]:
        def collated(rows: list[dict[str, Any]]) -> Any:
            batch = torch.stack([plain_tiles(row["image"]) for row in rows])
            return 0 if keep else batch

        return DataLoader(
            images,
            batch_size=BATCH,
            collate_fn=collated,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    return loader


def by_energon(files: list[Path], folder: Path) -> Loader:
    """A WebDataset of the files, prepared and read by megatron-energon."""
    energon: Any = importlib.import_module("megatron.energon")
    webdataset: Any = importlib.import_module("megatron.energon.flavors.webdataset")
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as archive:
        for number, path in enumerate(files):
            archive.add(path, f"{number:06d}.jpg")
            caption = tarfile.TarInfo(f"{number:06d}.txt")
            caption.size = 1
            archive.addfile(caption, io.BytesIO(b"-"))
    with contextlib.redirect_stdout(sys.stderr):
        webdataset.BaseWebdatasetFactory.prepare_dataset(
            energon.epathlib.EPath(folder), ["0.tar"], split_parts_ratio=[("train", 1.0)], workers=1
        )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        "field_map: {image: jpg, caption: txt}\n"
    )

    def loader(workers: int, keep: bool) -> Iterable[Any]:
        class Tiles(energon.DefaultTaskEncoder):
            decoder = energon.SampleDecoder(image_decode="pilrgb")

            @energon.stateless
            def encode_sample(self, sample: Any) -> torch.Tensor:
                return plain_tiles(sample.image)

            def batch(self, samples: list[torch.Tensor]) -> Any:
                batch = torch.stack(samples)
                return 0 if keep else batch

        dataset = energon.get_val_dataset(  # of training data the loader has no end
            str(folder),
            split_part="train",
            worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=workers),
            batch_size=BATCH,
            task_encoder=Tiles(),
        )
        return energon.get_loader(dataset)

    return loader


class Engine:
    """Encodes a file as the picture of a question and an answer."""

    def __init__(self, encoder: Encoder, kind: MediaKind) -> None:
        self._encoder = encoder
        self._kind: MediaKind = kind

    def __call__(self, path: Path) -> Any:
        """The encoded sample."""
        question = Turn("user", (Part(self._kind), Part("text", "\nWhat is shown here?")))
        answer = Turn("assistant", (Part("text", "A pattern of coloured squares."),))
        media = (Media(kind=self._kind, path=str(path)),)
        return self._encoder(Sample(id="x", turns=(question, answer), media=media))


def cases(images: list[Path], clips: list[Path], folder: Path) -> list[Case]:
    """All cases that can run here; ``folder`` is for what they store."""
    tokenizer: Any = train_tokenizer(
        ["What is shown here? A pattern of coloured squares."] * 3, 300
    )

    def engine(kind: MediaKind, transform: ImageTransform, backend: Any = "pyav") -> Engine:
        encoder = Encoder(
            tokenizer,
            get_template("chatml", tokenizer),
            transform,
            tokens_per_image=256,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            video=VideoSettings(backend=backend),
            max_length=100_000,
        )
        return Engine(encoder, kind)

    square = ImageTransform(SIZE, HALF, HALF)
    tiled = engine("image", TiledTransform(SIZE, HALF, HALF))
    found = [
        Case("tiles, bare", images, by_file(images, bare_tiles)),
        Case("tiles, engine", images, by_file(images, tiled), "tiles, bare"),
        Case("tiles, datasets", images, by_datasets(images, folder / "datasets"), "tiles, bare"),
        Case("square, bare", images, by_file(images, bare_square)),
        Case("square, engine", images, by_file(images, engine("image", square)), "square, bare"),
        Case("clip, pyav", clips, by_file(clips, engine("video", square))),
    ]
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.energon"):
        loader = by_energon(images, folder / "energon")
        found.insert(3, Case("tiles, energon", images, loader, "tiles, bare"))
    if importlib.util.find_spec("decord") is not None:
        decord = by_file(clips, engine("video", square, "decord"))
        found.append(Case("clip, decord", clips, decord, "clip, pyav"))
    return found


def measure(
    all_cases: list[Case], workers: int, repeats: int, *, keep: bool
) -> dict[str, tuple[float, float]]:
    """Seconds per file by the clock and of the processor, by case; medians over the passes."""
    torch.set_num_threads(1)
    loaders = {case.name: case.loader(workers, keep) for case in all_cases}
    sizes = {case.name: len(case.files) for case in all_cases}
    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for _ in tqdm(range(repeats + 1), desc=f"{workers} workers", unit="pass", disable=None):
        for name, loader in loaders.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in loader:
                pass
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            passes[name].append((wall_s / sizes[name], cpu_s / sizes[name]))
    return {
        name: (statistics.median(w for w, _ in kept), statistics.median(c for _, c in kept))
        for name, kept in ((name, taken[1:]) for name, taken in passes.items())
    }


def _unchanged(loaded: Any) -> Any:
    return loaded


def rows(args: argparse.Namespace, all_cases: list[Case]) -> Iterator[dict[str, Any]]:
    """The table's rows."""
    for workers in args.workers:
        for keep in (True, False) if workers else (True,):
            times = measure(all_cases, workers, args.repeats, keep=keep)
            for case in all_cases:
                wall_s, cpu_s = times[case.name]
                over = ""
                if case.bare is not None:
                    own, other = times[case.name], times[case.bare]
                    which = 0 if workers or "decord" in case.name else 1
                    over = f"{100 * (own[which] / other[which] - 1):.1f}"
                cpu_ms = "" if workers else f"{1000 * cpu_s:.1f}"
                results = "kept" if keep else "sent"
                values = (case.name, workers, results, f"{1 / wall_s:.2f}", cpu_ms, over)
                yield dict(zip(COLUMNS, values, strict=True))


def make_images(folder: Path, count: int) -> list[Path]:
    """JPEGs of 1280 x 960 with edges, gradients and some noise, about as large as photographs."""
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        values = np.asarray(coarse.resize((1280, 960), Image.Resampling.BICUBIC), dtype=np.int16)
        values = values + rng.integers(-12, 13, values.shape, dtype=np.int16)
        path = folder / f"{number}.jpg"
        Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(path)
    return paths


def make_clips(folder: Path, count: int, seconds: float) -> list[Path]:
    """H.264 clips of 1280 x 720 at 30 frames per second, of a pattern that moves."""
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (45, 120, 3), dtype=np.uint8))
        wide = np.asarray(coarse.resize((2560, 720), Image.Resampling.BICUBIC))
        path = folder / f"{number}.mp4"
        with av.open(str(path), "w") as container:
            options = {"preset": "veryfast", "g": "250"}
            stream = cast(VideoStream, container.add_stream("libx264", rate=30, options=options))
            stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
            for index in range(round(30 * seconds)):
                left = 4 * index % 1280
                values = np.ascontiguousarray(wide[:, left : left + 1280])
                frame = av.VideoFrame.from_ndarray(values, format="rgb24")
                frame.pts, frame.time_base = index, Fraction(1, 30)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        paths.append(path)
    return paths


def main(argv: Sequence[str] | None = None) -> None:
    """Make the files, measure, print the table and write it where asked."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64, help="JPEGs per pass")
    parser.add_argument("--clips", type=int, default=16, help="videos per pass")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a video")
    parser.add_argument("--repeats", type=int, default=5, help="passes that are counted")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[cores], help="worker processes; 0 for none"
    )
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    args = parser.parse_args(argv)
    machine = f"{cores} cores, {platform.processor() or platform.machine()}"
    versions = f"Pillow {Image.__version__}, PyAV {av.__version__}"
    print(f"{machine}; {versions}; Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        print(f"making {args.images} images and {args.clips} clips in {name}", file=sys.stderr)
        images = make_images(Path(name), args.images)
        clips = make_clips(Path(name), args.clips, args.seconds)
        table = []
        head = f"{'workers':>8}{'results':>9}{'per second':>12}{'CPU ms':>9}{'over bare':>11}"
        print(f"{'case':16}{head}")
        for row in rows(args, cases(images, clips, Path(name))):
            over = f"{row['over_bare_percent']}%" if row["over_bare_percent"] else ""
            line = f"{row['case']:16}{row['workers']:>8}{row['results']:>9}{row['per_second']:>12}"
            print(f"{line}{row['cpu_ms']:>9}{over:>11}")
            table.append(row)
    if args.csv is not None:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
