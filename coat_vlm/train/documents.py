"""Cuts the documents of a stage into pieces that fit the context, once per run."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from coat_data.documents import DocumentPieces, cut_rows, holds_documents
from coat_data.encode import Encoder
from coat_data.selection import Rows
from coat_vlm.config import SourceConfig
from coat_vlm.train.measured import fingerprint, kept_arrays
from coat_vlm.train.world import World


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
