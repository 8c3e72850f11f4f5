"""A stage's data: training mixture, number of steps and validation sources, ready to be loaded.

What needs a look at every row is found once per run and saved in the stage's folder, so that a run
that continues has the same: the sizes of rows for packing, and the places where documents are cut
into pieces that fit the context.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from coat_data.load.check_labels import dropped_question, verify_rows, verify_template
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import Encoder
from coat_data.load.lengths import (
    DocumentPieces,
    cut_rows,
    holds_documents,
    measure_rows,
    row_kinds,
)
from coat_data.load.loader import LoadedBatch, TrainLoader, val_batches
from coat_data.mixture.packing import Budget, Lengths, Outlook, PackedOrder
from coat_data.mixture.sampler import Mixture, SourceShare
from coat_data.mixture.selection import (
    Rows,
    SelectedRows,
    original_row,
    shards_of,
    unseekable,
)
from coat_data.sample import DataError
from coat_vlm.config import Recipe, SourceConfig, StageConfig, StageName
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.train.sources import ignored_keys, ignored_weights, open_source, open_sources

_ESTIMATED_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    """Where a stage's batches come from."""

    loader: TrainLoader
    sources: list[SourceConfig]
    """The training sources, those of lists one by one."""
    warnings: list[str]
    """What the user should know of the sources."""
    shares: list[SourceShare]
    """Rows and samples per epoch of each source."""
    epoch_size: int
    """Samples per epoch."""
    tokens: list[float | None]
    """Mean tokens of a sample of each source: of all its rows when packing, else of a few; None if
    none of those could be measured."""
    validation: dict[str, Rows]
    """Validation datasets by source name."""
    verified_rows: int
    """Rows whose label mask was verified."""
    packing: Outlook | None
    """What packing makes of an epoch."""
    row_tokens: int | None
    """Packing: the token budget of a row."""
    validation_batches: Callable[[str], Iterator[LoadedBatch]]
    """Batches of one validation source, as many on every rank."""

    def total_steps(self, stage: StageConfig) -> int:
        """Optimizer steps of the stage."""
        if stage.max_steps is not None:
            return stage.max_steps
        assert stage.epochs is not None
        return max(1, round(stage.epochs * self.epoch_size / self.samples_per_step(stage)))

    def samples_per_step(self, stage: StageConfig) -> float:
        """Samples of an optimizer step; their mean when packing."""
        return stage.batch_size * (1 if self.packing is None else self.packing.samples_per_bin)


def row_budget(recipe: Recipe, packing: PackingConfig, max_length: int) -> Budget:
    """What packed rows hold; for CUDA graphs, which are for one shape, all have the full length."""
    tokens = packing.row_tokens(max_length)
    graphs = recipe.fp8 is not None and recipe.fp8.cuda_graphs
    align = tokens if graphs else packing.align
    return Budget(tokens=tokens, images=packing.images, buffer=packing.buffer, align=align)


def open_data(
    recipe: Recipe, name: StageName, run_dir: Path, processor: CoatVlmProcessor, world: World
) -> StageData:
    """Open the stage's sources and verify the label masks of their first rows.

    Args:
        recipe: what to train.
        name: the stage.
        run_dir: the run folder, where packing keeps what it has measured.
        processor: makes model inputs.
        world: the processes of the run.

    Raises:
        DataError: a source is missing or cannot be read, or a label mask is wrong.
        ValueError: a source has no rows, or the batch sizes do not divide.
    """
    stage = recipe.stages[name]
    sources, datasets = open_sources(stage.data, recipe.seed)
    validation = [
        open_source(source, recipe.seed, without_weights=True) for source in stage.val_data
    ]
    encoder = processor.encoder(train=True, template=stage.template)
    verify_template(encoder)
    template = stage.template or processor.template
    mismatches = _mismatches([*sources, *stage.val_data], [*datasets, *validation], template)
    if template == "plain":
        cut = partial(in_pieces, encoder=encoder, world=world, num_workers=recipe.num_workers)
        datasets = cut(sources, datasets, path=run_dir / name / "documents.npz")
        validation = cut(stage.val_data, validation, path=run_dir / name / "documents-val.npz")
    mixture = Mixture(
        [len(dataset) for dataset in datasets],
        [source.repeat for source in sources],
        [source.weight for source in sources],
        recipe.seed,
        names=[source.name for source in sources],
        shards=[shards_of(dataset) for dataset in datasets],
    )
    verified_rows = verify_rows(datasets, encoder)
    replace_bad = stage.max_bad_samples > 0 or stage.max_bad_fraction is not None
    order: PackedOrder | None = None
    if stage.packing is None:
        tokens = [mean_tokens(dataset, encoder) for dataset in datasets]
    else:
        budget = row_budget(recipe, stage.packing, processor.max_length)
        lengths = measured(
            sources,
            datasets,
            encoder,
            budget,
            folder=run_dir / name,
            world=world,
            num_workers=recipe.num_workers,
            skip_bad=replace_bad,
        )
        tokens = [float(t[t > 0].mean()) if t.any() else None for t in lengths.tokens]
        order = PackedOrder(mixture, lengths, budget, stage.batch_size, recipe.seed)
    pad_token_id = processor.tokenizer.pad_token_id
    loader = TrainLoader(
        datasets,
        mixture,
        encoder,
        batch_size=stage.batch_size,
        micro_batch_size=stage.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        num_workers=recipe.num_workers,
        seed=recipe.seed,
        replace_bad=replace_bad,
        pad_token_id=pad_token_id,
        packing=order,
    )
    held_out = {source.name: rows for source, rows in zip(stage.val_data, validation, strict=True)}
    val_encoder = processor.encoder(train=False, template=stage.template)

    def validation_batches(name: str) -> Iterator[LoadedBatch]:
        return val_batches(
            held_out[name],
            val_encoder,
            batch_size=stage.micro_batch_size,
            rank=world.rank,
            world_size=world.size,
            pad_token_id=pad_token_id,
        )

    return StageData(
        loader=loader,
        sources=sources,
        warnings=[
            *ignored_keys([*stage.data, *stage.val_data]),
            *ignored_weights(stage.val_data),
            *mismatches,
            *_warnings(sources, datasets),
        ],
        shares=mixture.accounting(),
        epoch_size=mixture.epoch_size,
        tokens=tokens,
        validation=held_out,
        verified_rows=verified_rows,
        packing=None if order is None else order.outlook(),
        row_tokens=None if order is None else order.budget.tokens,
        validation_batches=validation_batches,
    )


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

    def measure(dataset: Rows, rows: range) -> Iterator[tuple[np.ndarray, int]]:
        for sizes in measure_rows(
            dataset,
            encoder.measure,
            rows,
            max_images=budget.images,
            num_workers=num_workers,
            skip_bad=skip_bad,
        ):
            yield sizes, len(sizes)

    def join(shares: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.zeros((sum(map(len, shares)), 2), dtype=np.int32)
        for rank, sizes in enumerate(shares):
            whole[rank :: world.size] = sizes
        return whole

    saved = _saved_or_made(
        folder / "lengths.npz",
        lambda: [fingerprint(s, d) for s, d in zip(sources, datasets, strict=True)],
        datasets,
        world,
        title="measuring rows for packing",
        make=measure,
        join=join,
        none=np.empty((0, 2), dtype=np.int32),
    )
    return Lengths([sizes[:, 0] for sizes in saved], [sizes[:, 1] for sizes in saved])


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

    def cut(dataset: Rows, rows: range) -> Iterator[tuple[np.ndarray, int]]:
        for pieces in cut_rows(dataset, encoder, rows, num_workers=num_workers):
            yield pieces, len(np.unique(pieces[:, 0]))

    def join(shares: Sequence[np.ndarray]) -> np.ndarray:
        # The pieces of a row come from one rank and keep their order.
        whole = np.concatenate(shares)
        return whole[np.argsort(whole[:, 0], kind="stable")]

    saved = _saved_or_made(
        path,
        lambda: [encoder.max_length, *(fingerprint(sources[n], datasets[n]) for n in chosen)],
        [datasets[number] for number in chosen],
        world,
        title="cutting documents",
        make=cut,
        join=join,
        none=np.empty((0, 3), dtype=np.int64),
    )
    found = list(datasets)
    for number, pieces in zip(chosen, saved, strict=True):
        found[number] = DocumentPieces(datasets[number], pieces)
    return found


def _saved_or_made(
    path: Path,
    state: Callable[[], list[Any]],
    datasets: Sequence[Rows],
    world: World,
    *,
    title: str,
    make: Callable[[Rows, range], Iterator[tuple[np.ndarray, int]]],
    join: Callable[[Sequence[np.ndarray]], np.ndarray],
    none: np.ndarray,
) -> list[np.ndarray]:
    """An array per dataset, as an earlier start saved it, or made by all ranks and saved.

    Args:
        path: the file (.npz), which all ranks see.
        state: what the arrays depend on; the main process alone asks, as nodes may see other times
            of change.
        datasets: rows, of which each rank takes every ``world.size``-th.
        world: the processes of the run.
        title: of the progress bar.
        make: arrays of the given rows in order, each with the number of rows it is about.
        join: puts the arrays of all ranks together.
        none: what ``make`` makes of no row.
    """
    key = world.gather(json.dumps(state()) if world.is_main else "")[0]
    saved = _read_arrays(path, key, len(datasets))
    if world.any(saved is None):  # together, as they wait for each other below
        if world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
        world.barrier()
        rows = [range(world.rank, len(dataset), world.size) for dataset in datasets]
        shares: list[np.ndarray] = []
        with tqdm(
            total=sum(map(len, rows)),
            desc=title,
            unit="row",
            disable=None if world.is_main else True,
            mininterval=1.0,
        ) as bar:
            for dataset, own in zip(datasets, rows, strict=True):
                chunks = [none]
                for chunk, number in make(dataset, own):
                    chunks.append(chunk)
                    bar.update(number)
                shares.append(np.concatenate(chunks))
        parts = [path.with_name(f"{path.stem}-{rank:05d}.npz") for rank in range(world.size)]
        np.savez(parts[world.rank], *shares)
        world.barrier()
        if world.is_main:
            ranks = [_read_arrays(part, None, len(datasets)) or [] for part in parts]
            temporary = path.with_name(f"{path.stem}-new.npz")
            np.savez(temporary, *map(join, zip(*ranks, strict=True)), key=np.array(key))
            temporary.replace(path)
            for part in parts:
                part.unlink()
        world.barrier()
        saved = _read_arrays(path, key, len(datasets))
    assert saved is not None, "the main process has just written it"
    return saved


def _read_arrays(path: Path, key: str | None, number: int) -> list[np.ndarray] | None:
    """The arrays of a file; None if it is not there, or was saved under another key."""
    if not path.is_file():
        return None
    with np.load(path) as saved:
        if key is not None and str(saved["key"]) != key:
            return None
        return [saved[f"arr_{index}"] for index in range(number)]


def fingerprint(source: SourceConfig, dataset: Rows) -> list[str | int]:
    """What was measured: the files of a source as they were, and which of their rows.

    The files are their number, and a SHA-256 of their paths, bytes and times of change.
    """
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    paths = whole.paths if isinstance(whole, SampleDataset) else ()
    rows = np.array([original_row(dataset, index) for index in range(len(dataset))])
    files = sorted({str(file) for path in paths for file in _files(path)})
    digest = hashlib.sha256()
    for file in files:
        stat = Path(file).stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="replace"))
    chosen = zlib.crc32(rows.tobytes())
    return [source.path, len(dataset), chosen, len(files), digest.hexdigest()]


def _files(path: Path) -> Iterator[Path]:
    """The file, or all files below the folder; a link that leads nowhere is none."""
    return (file for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())


def _warnings(sources: Sequence[SourceConfig], datasets: Sequence[Rows]) -> list[str]:
    return [
        f"{source.name}: the server of {address} does not answer ranges; every worker reads its "
        "shards from the beginning, and again after a restart (replayed_rows in metrics.jsonl "
        "counts these rows): download it, or use another server"
        for source, dataset in zip(sources, datasets, strict=True)
        if (address := unseekable(dataset)) is not None
    ]


def _mismatches(
    sources: Sequence[SourceConfig], datasets: Sequence[Rows], template: str
) -> list[str]:
    """A line for each source whose rows the template does not suit, as far as 64 of them show.

    One template holds for the whole stage: none suits both documents and chat.
    """
    found: list[str] = []
    for source, dataset in zip(sources, datasets, strict=True):
        kinds = row_kinds(dataset)
        if kinds.documents and kinds.others:
            found.append(
                f"{source.name}: {kinds.documents} of {kinds.documents + kinds.others} rows that "
                "were looked at are documents, the others are not: template plain cuts the "
                "documents alone; better make two sources of it"
            )
        if template != "plain":
            if kinds.documents:
                found.append(
                    f"{source.name}: holds documents, which template {template} trains as answers "
                    "in a chat and does not cut, so that long ones are bad rows: give them a stage "
                    "of their own with template: plain"
                )
            continue
        where = dropped_question(dataset)
        if where is not None:
            found.append(
                f"{source.name}: template plain drops what users say, and {where} has no image or "
                "video to answer to: give conversations a stage of their own with a chat template"
            )
    return found
