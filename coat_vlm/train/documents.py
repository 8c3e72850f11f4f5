"""Cuts the documents of a stage into pieces that fit the context, once per run.

The sizes of a stage's rows: all of them for packing, or of a few for the table.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import Encoder
from coat_data.load.prepare import DocumentPieces, cut_rows, holds_documents, measure_rows
from coat_data.mixture.packing import Budget, Lengths
from coat_data.mixture.selection import Rows, SelectedRows, original_row
from coat_data.sample import DataError
from coat_vlm.config import SourceConfig
from coat_vlm.distributed import World

_ESTIMATED_ROWS = 32


def mean_tokens(dataset: Rows, encoder: Encoder) -> float | None:
    """Mean tokens of some rows, evenly spaced; None if none of them is good."""
    found: list[int] = []
    for row in np.linspace(0, len(dataset) - 1, min(len(dataset), _ESTIMATED_ROWS)).astype(int):
        try:
            found.append(encoder.measure(dataset[int(row)]).tokens)
        except DataError:
            continue  # met in training, it is counted there
    return float(np.mean(found)) if found else None


def measured(
    sources: Sequence[SourceConfig],
    datasets: Sequence[Rows],
    encoder: Encoder,
    budget: Budget,
    *,
    folder: Path,
    world: World,
    num_workers: int,
    skip_bad: bool,
) -> Lengths:
    """The sizes of all rows, measured once and kept in ``folder``.

    Every rank measures its share with ``num_workers`` processes.

    Args:
        sources: the stage's sources.
        datasets: their rows.
        encoder: measures a row.
        budget: what a row of a batch may hold.
        folder: the stage's folder in the run, which all ranks see.
        world: the processes of the run.
        num_workers: measuring processes per rank.
        skip_bad: bad rows are replaced later, and not an error now.

    Raises:
        DataError: a row is bad and ``skip_bad`` is False, or a medium cannot be reached.
    """
    path = folder / "lengths.npz"
    own_key = ""
    if world.is_main:  # the main process's alone: nodes may see other times of change
        own_key = json.dumps([fingerprint(s, d) for s, d in zip(sources, datasets, strict=True)])
    key = world.gather(own_key)[0]
    kept = kept_arrays(path, key, len(datasets))
    if world.any(kept is None):  # together, as they wait for each other below
        share = folder / f"lengths-{world.rank:05d}.npz"
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
        world.barrier()
        bar = tqdm(
            total=sum(len(_own_rows(dataset, world)) for dataset in datasets),
            desc="measuring rows for packing",
            unit="row",
            disable=None if world.is_main else True,
            mininterval=1.0,
        )
        own: list[np.ndarray] = []
        with bar:
            for dataset in datasets:
                chunks = [np.empty((0, 2), dtype=np.int32)]
                for sizes in measure_rows(
                    dataset,
                    encoder.measure,
                    _own_rows(dataset, world),
                    max_images=budget.images,
                    num_workers=num_workers,
                    skip_bad=skip_bad,
                ):
                    chunks.append(sizes)
                    bar.update(len(sizes))
                own.append(np.concatenate(chunks))
        np.savez(share, *own)
        world.barrier()
        if world.is_main:
            _merge_measured(folder, datasets, world, path, key)
        world.barrier()
        kept = kept_arrays(path, key, len(datasets))
    assert kept is not None, "the main process has just written it"
    return Lengths([sizes[:, 0] for sizes in kept], [sizes[:, 1] for sizes in kept])


def _own_rows(dataset: Rows, world: World) -> range:
    return range(world.rank, len(dataset), world.size)


def fingerprint(source: SourceConfig, dataset: Rows) -> list[str | int]:
    """What was measured: the files of a source as they were, and which of their rows."""
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    paths = whole.paths if isinstance(whole, SampleDataset) else ()
    rows = np.array([original_row(dataset, index) for index in range(len(dataset))])
    return [source.path, len(dataset), zlib.crc32(rows.tobytes()), *_state(paths)]


def _state(paths: Sequence[Path]) -> tuple[int, str]:
    """Number of files, and a SHA-256 of their paths, bytes and times of change."""
    found = {str(file) for path in paths for file in _files(path)}
    digest = hashlib.sha256()
    for file in sorted(found):
        stat = Path(file).stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="replace"))
    return len(found), digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """The file, or all files below the folder; a link that leads nowhere is none."""
    return (file for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())


def kept_arrays(path: Path, key: str, sources: int) -> list[np.ndarray] | None:
    """An array per source that an earlier start kept under this key; None if there are none."""
    if not path.is_file():
        return None
    with np.load(path) as saved:
        if str(saved["key"]) != key:
            return None
        return [saved[f"arr_{number}"] for number in range(sources)]


def _merge_measured(
    folder: Path, datasets: Sequence[Rows], world: World, path: Path, key: str
) -> None:
    """Put the ranks' shares together."""
    whole = [np.zeros((len(dataset), 2), dtype=np.int32) for dataset in datasets]
    for rank in range(world.size):
        share = folder / f"lengths-{rank:05d}.npz"
        with np.load(share) as saved:
            for number, sizes in enumerate(whole):
                sizes[rank :: world.size] = saved[f"arr_{number}"]
        share.unlink()
    temporary = path.with_name("lengths-new.npz")
    np.savez(temporary, *whole, key=np.array(key))
    temporary.replace(path)


def in_pieces(
    sources: Sequence[SourceConfig],
    datasets: Sequence[Rows],
    encoder: Encoder,
    *,
    path: Path,
    world: World,
    num_workers: int,
) -> list[Rows]:
    """The sources, those of documents cut into pieces of at most ``max_length`` tokens.

    Every rank cuts its share with ``num_workers`` processes; the places are kept in a file, so that
    a resumed run has the same ones and does not cut again. Other sources stay as they are.

    Args:
        sources: as the recipe names them.
        datasets: their rows.
        encoder: decides what fits.
        path: the file (.npz) in the run folder, which all ranks see.
        world: the processes of the run.
        num_workers: cutting processes per rank.

    Raises:
        DataError: the template leaves no room for text.
    """
    chosen = [number for number, rows in enumerate(datasets) if holds_documents(rows)]
    if not chosen:
        return list(datasets)
    own_key = ""
    if world.is_main:  # the main process's alone: nodes may see other times of change
        state = [fingerprint(sources[number], datasets[number]) for number in chosen]
        own_key = json.dumps([encoder.max_length, *state])
    key = world.gather(own_key)[0]
    kept = kept_arrays(path, key, len(chosen))
    if world.any(kept is None):  # together, as they wait for each other below
        _cut([datasets[number] for number in chosen], encoder, path, key, world, num_workers)
        kept = kept_arrays(path, key, len(chosen))
    assert kept is not None, "the main process has just written it"
    found = list(datasets)
    for number, pieces in zip(chosen, kept, strict=True):
        found[number] = DocumentPieces(datasets[number], pieces)
    return found


def _cut(
    datasets: Sequence[Rows], encoder: Encoder, path: Path, key: str, world: World, workers: int
) -> None:
    """Cut this rank's rows of each source; the main process puts the ranks' shares together."""
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
    world.barrier()
    rows = [range(world.rank, len(dataset), world.size) for dataset in datasets]
    bar = tqdm(
        total=sum(map(len, rows)),
        desc="cutting documents",
        unit="row",
        disable=None if world.is_main else True,
        mininterval=1.0,
    )
    shares: list[np.ndarray] = []
    with bar:
        for dataset, own in zip(datasets, rows, strict=True):
            chunks = [np.empty((0, 3), dtype=np.int64)]
            for pieces in cut_rows(dataset, encoder, own, num_workers=workers):
                chunks.append(pieces)
                bar.update(len(np.unique(pieces[:, 0])))
            shares.append(np.concatenate(chunks))
    np.savez(_share(path, world.rank), *shares)
    world.barrier()
    if world.is_main:
        _merge(path, key, world.size, len(datasets))
    world.barrier()


def _share(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}-{rank:05d}.npz")


def _merge(path: Path, key: str, ranks: int, sources: int) -> None:
    parts: list[list[np.ndarray]] = [[] for _ in range(sources)]
    for rank in range(ranks):
        with np.load(_share(path, rank)) as saved:
            for number, part in enumerate(parts):
                part.append(saved[f"arr_{number}"])
        _share(path, rank).unlink()
    whole = [np.concatenate(part) for part in parts]
    # The pieces of a row come from one rank and keep their order.
    whole = [pieces[np.argsort(pieces[:, 0], kind="stable")] for pieces in whole]
    temporary = path.with_name(f"{path.stem}-new.npz")
    np.savez(temporary, *whole, key=np.array(key))
    temporary.replace(path)
