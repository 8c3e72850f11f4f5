"""Opens a stage's data: the training mixture, its loader, and the validation sources.

Two things require reading every row: the sizes of rows for packing, and the positions at which
documents are split to fit the context. Both are computed once per run, by all ranks, and saved in
the stage's folder; a resumed run reads them from there.
"""

import hashlib
import json
import logging
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from coat_data.load.check_labels import verify_template
from coat_data.load.collate import Batch
from coat_data.load.dataset import SampleDataset
from coat_data.load.documents import DocumentChunks, row_kinds, split_rows
from coat_data.load.encode import Encoder, Size
from coat_data.load.lengths import measure_rows
from coat_data.load.loader import TrainLoader, val_batches
from coat_data.load.readable import show_row
from coat_data.mixture.packing import Budget, PackedSampler, PackingEstimate
from coat_data.mixture.sampler import SourceShare
from coat_data.mixture.selection import Rows, SelectedRows, original_row
from coat_data.sample import DataError
from coat_data.saved_files import replace_file
from coat_vlm.config import Recipe, SourceConfig, StageConfig, StageName
from coat_vlm.config.stage import ROW_MULTIPLE
from coat_vlm.distributed import World
from coat_vlm.model.flops import ModelFlops
from coat_vlm.model.folder import AnyProcessor
from coat_vlm.train.open_sources import (
    FIRST_ROWS,
    access_of,
    find_row_warnings,
    mix_sources,
    open_source,
    open_sources,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    """The data of one stage, opened."""

    loader: TrainLoader
    sources: list[SourceConfig]
    """The training sources; a list of sources is expanded into its entries."""
    warnings: list[str]
    shares: list[SourceShare]
    """Rows and samples per epoch of each source."""
    epoch_size: int
    """Samples per epoch."""
    tokens: list[float | None]
    """Mean tokens per sample of each source; None if its rows are not measured, or all bad."""
    validation: dict[str, Rows]
    """Validation datasets by source name."""
    shown_row: list[str]
    """The first row as it is trained, as text."""
    packing: PackingEstimate | None
    row_tokens: int | None
    """Token budget of a packed sequence; None without packing."""
    unpadded: bool
    """Whether micro-batches that would be padded much are packed."""
    validation_batches: Callable[[str], Iterator[Batch]]
    """Iterates over the batches of one validation source, the same number on every rank."""

    def total_steps(self, stage: StageConfig) -> int:
        """Return the number of optimizer steps of the stage."""
        if stage.max_steps is not None:
            return stage.max_steps
        assert stage.epochs is not None
        steps = stage.epochs * self.epoch_size / self.samples_per_step(stage)
        # Up, so that every row is seen; not from a rounding error (1.1 * 50 is above 55).
        return math.ceil(steps - 1e-9 * steps)

    def samples_per_step(self, stage: StageConfig) -> float:
        """Samples of an optimizer step; their mean when packing."""
        return stage.batch_size * (1 if self.packing is None else self.packing.samples_per_row)


def open_data(
    recipe: Recipe,
    name: StageName,
    run_dir: Path,
    processor: AnyProcessor,
    world: World,
    check: Callable[[Sequence[SourceConfig], Sequence[Rows]], None] | None = None,
    flops: ModelFlops | None = None,
    *,
    unpad: bool = False,
) -> StageData:
    """Open the stage's sources and verify the label masks of the template.

    ``check`` is called with the training sources and their rows before these are measured or split.
    ``unpad`` packs micro-batches that would be padded much. Raises DataError if a source cannot be
    read or a label mask is wrong, ValueError if batch sizes or ``balance`` do not fit.
    """
    stage = recipe.stages[name]
    access = access_of(recipe)
    sources, datasets = open_sources(stage.data, recipe.seed, access)
    if check is not None:
        check(sources, datasets)
    validation = [
        open_source(source, recipe.seed, access=access, without_weights=True)
        for source in stage.val_data
    ]
    encoder = processor.encoder(template=stage.template)
    verify_template(encoder)
    encoder.preferences = stage.dpo is not None
    template = stage.template or processor.template
    opened = [*sources, *stage.val_data], [*datasets, *validation]
    warnings = [*find_row_warnings(*opened), *_find_template_warnings(*opened, template)]
    if template == "plain":
        split = partial(
            split_documents, encoder=encoder, world=world, num_workers=recipe.num_workers
        )
        datasets = split(sources, datasets, path=run_dir / name / "documents.npz")
        validation = split(stage.val_data, validation, path=run_dir / name / "documents-val.npz")
    mixture = mix_sources(sources, datasets, recipe.seed)
    replace_bad = stage.max_bad_samples > 0
    sampler: PackedSampler | None = None
    costs: list[np.ndarray] | None = None
    if stage.balance and flops is None:
        raise ValueError(
            f"stage {name}: balance estimates the FLOPs of rows, but this model's FLOPs are not "
            "known; remove balance"
        )
    tokens: list[float | None] = [None] * len(datasets)
    if stage.packing is not None or stage.balance:
        budget = None
        if (packing := stage.packing) is not None:
            row_tokens = packing.row_tokens(processor.max_length)
            graphs = recipe.fp8 is not None and recipe.fp8.cuda_graphs is True
            budget = Budget(
                tokens=row_tokens,
                images=packing.images,
                buffer=packing.buffer,
                align=row_tokens if graphs else ROW_MULTIPLE,  # one length for all graphs
            )
        sizes = measure_sources(
            sources,
            datasets,
            encoder,
            None if budget is None else budget.images,
            folder=run_dir / name,
            world=world,
            num_workers=recipe.num_workers,
            skip_bad=replace_bad or budget is None,  # training raises the error of a bad row
        )
        lengths = [size[:, 0] for size in sizes]
        tokens = [float(t[t > 0].mean()) if t.any() else None for t in lengths]
        if flops is not None:
            costs = [flops.estimate(*size[:, [0, 2, 3]].T) for size in sizes]
        if budget is not None:
            sampler = PackedSampler(mixture, sizes, budget, stage.batch_size, recipe.seed, costs)
    pad_token_id = processor.pad_token_id
    # The ranks that share the tokens of a micro-batch read the same one.
    replica, replicas = world.rank // stage.sequence_parallel, stage.count_replicas(world.size)
    loader = TrainLoader(
        datasets,
        mixture,
        encoder,
        batch_size=stage.batch_size,
        micro_batch_size=stage.micro_batch_size,
        rank=replica,
        world_size=replicas,
        num_workers=recipe.num_workers,
        seed=recipe.seed,
        replace_bad=replace_bad,
        pad_token_id=pad_token_id,
        packing=sampler,
        costs=costs,
        timeout_s=recipe.data_timeout_s,
        unpad=ROW_MULTIPLE if unpad else None,
        complete=encoder.complete,
    )
    held_out = {source.name: rows for source, rows in zip(stage.val_data, validation, strict=True)}
    val_encoder = processor.encoder(template=stage.template)
    val_encoder.preferences = encoder.preferences
    return StageData(
        loader=loader,
        sources=sources,
        warnings=warnings,
        shares=mixture.accounting(),
        epoch_size=mixture.epoch_size,
        tokens=tokens,
        validation=held_out,
        shown_row=_show_first_row(datasets, encoder),
        packing=None if sampler is None else sampler.estimate(),
        row_tokens=None if sampler is None else sampler.budget.tokens,
        unpadded=unpad,
        validation_batches=lambda name: val_batches(
            held_out[name],
            val_encoder,
            batch_size=stage.micro_batch_size,
            rank=replica,
            world_size=replicas,
            pad_token_id=pad_token_id,
            complete=val_encoder.complete,
        ),
    )


def _show_first_row(datasets: Sequence[Rows], encoder: Encoder) -> list[str]:
    for dataset in datasets:
        for row in range(min(FIRST_ROWS, len(dataset))):
            with suppress(DataError):
                sample = dataset[row]
                head = f"{sample.where} as it is trained; supervised text follows >:"
                return [head, *(f"  {line}" for line in show_row(sample, encoder))]
    return []


def measure_sources(
    sources: Sequence[SourceConfig],
    datasets: Sequence[Rows],
    encoder: Encoder,
    max_images: int | None,
    *,
    folder: Path,
    world: World,
    num_workers: int,
    skip_bad: bool,
) -> list[np.ndarray]:
    """Measure the sizes of all rows once, on all ranks, and save them in the stage's ``folder``.

    Returns for each source an int64 array (rows, 4) of :class:`Size`; 0 tokens mark a bad row.
    A row with more than ``max_images`` is bad; without ``skip_bad`` it raises DataError.
    """

    def measure(dataset: Rows, rows: range) -> Iterator[tuple[np.ndarray, int]]:
        for sizes in measure_rows(
            dataset,
            encoder.measure,
            rows,
            max_images=max_images,
            num_workers=num_workers,
            skip_bad=skip_bad,
        ):
            yield sizes, len(sizes)

    def join(shares: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.zeros((sum(map(len, shares)), len(Size._fields)), dtype=np.int64)
        for rank, sizes in enumerate(shares):
            whole[rank :: world.size] = sizes
        return whole

    return _load_or_compute(
        folder / "lengths.npz",
        lambda: [fingerprint(s, d) for s, d in zip(sources, datasets, strict=True)],
        datasets,
        world,
        title="measuring rows",
        compute=measure,
        join=join,
        empty=np.empty((0, len(Size._fields)), dtype=np.int64),
    )


def split_documents(
    sources: Sequence[SourceConfig],
    datasets: Sequence[Rows],
    encoder: Encoder,
    *,
    path: Path,
    world: World,
    num_workers: int,
) -> list[Rows]:
    """Split documents into chunks of at most ``max_length`` tokens; other sources are unchanged.

    The split positions are saved in ``path`` (.npz), which a resumed run reads. Raises DataError if
    the template leaves no tokens for text.
    """
    chosen = [number for number, rows in enumerate(datasets) if row_kinds(rows).documents]
    if not chosen:
        return list(datasets)

    def split(dataset: Rows, rows: range) -> Iterator[tuple[np.ndarray, int]]:
        for chunks in split_rows(dataset, encoder, rows, num_workers=num_workers):
            yield chunks, len(np.unique(chunks[:, 0]))

    def join(shares: Sequence[np.ndarray]) -> np.ndarray:
        # All chunks of a row are in one rank's share; the stable sort preserves their order.
        whole = np.concatenate(shares)
        return whole[np.argsort(whole[:, 0], kind="stable")]

    saved = _load_or_compute(
        path,
        lambda: [encoder.max_length, *(fingerprint(sources[n], datasets[n]) for n in chosen)],
        [datasets[number] for number in chosen],
        world,
        title="splitting documents",
        compute=split,
        join=join,
        empty=np.empty((0, 3), dtype=np.int64),
    )
    split_datasets = list(datasets)
    for number, chunks in zip(chosen, saved, strict=True):
        split_datasets[number] = DocumentChunks(datasets[number], chunks)
    return split_datasets


def _load_or_compute(
    path: Path,
    state: Callable[[], list[Any]],
    datasets: Sequence[Rows],
    world: World,
    *,
    title: str,
    compute: Callable[[Rows, range], Iterator[tuple[np.ndarray, int]]],
    join: Callable[[Sequence[np.ndarray]], np.ndarray],
    empty: np.ndarray,
) -> list[np.ndarray]:
    """Load an array per dataset from a file (.npz), or compute and save them on all ranks.

    ``state`` returns what the arrays depend on; only on the main process, since modification times
    may differ between nodes. ``compute`` yields arrays for the given rows in order, each with its
    number of rows. ``join`` merges the ranks' arrays; rank r computes rows r, r + world.size, ...
    """
    key, saved = world.run_on_rank0(lambda: _load(path, json.dumps(state()), len(datasets)))
    if saved is not None:
        return saved
    shares = [range(world.rank, len(dataset), world.size) for dataset in datasets]
    arrays: list[np.ndarray] = []
    with tqdm(
        total=sum(map(len, shares)),
        desc=title,
        unit="row",
        disable=None if world.is_main else True,
        mininterval=1.0,
    ) as bar:
        for dataset, rows in zip(datasets, shares, strict=True):
            chunks = [empty]
            for chunk, number in compute(dataset, rows):
                chunks.append(chunk)
                bar.update(number)
            arrays.append(np.concatenate(chunks))
    joined = [join(parts) for parts in zip(*world.gather(arrays), strict=True)]

    def save() -> None:
        with replace_file(path) as file:
            np.savez(file, *joined, key=np.array(key))  # pyright: ignore[reportArgumentType]

    world.run_on_rank0(save)
    return joined


def _load(path: Path, state: str, number: int) -> tuple[str, list[np.ndarray] | None]:
    key = hashlib.sha256(state.encode()).hexdigest()  # addresses in it may contain secrets
    try:
        with np.load(path) as saved:
            if str(saved["key"]) == key:
                return key, [saved[f"arr_{index}"] for index in range(number)]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged (%s); it is computed again", path, error)
    return key, None


def fingerprint(source: SourceConfig, dataset: Rows) -> list[str | int]:
    """Return what identifies the rows of a source: its paths, selected rows and files.

    Files are represented by their number and a SHA-256 of paths, sizes and modification times. A
    folder means all files below it; broken links are ignored.
    """
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    paths = whole.paths if isinstance(whole, SampleDataset) else ()
    rows = np.array([original_row(dataset, index) for index in range(len(dataset))])
    below = (file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]))
    files = sorted({str(file) for file in below if file.is_file()})
    digest = hashlib.sha256()
    for file in files:
        stat = Path(file).stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="replace"))
    chosen = zlib.crc32(rows.tobytes())
    columns = [f"{name}={column}" for name, column in sorted(source.columns.items())]
    paths_of_source = [source.path, source.media_root or ""]
    return [*paths_of_source, len(dataset), chosen, len(files), digest.hexdigest(), *columns]


def _find_template_warnings(
    sources: Sequence[SourceConfig], datasets: Sequence[Rows], template: str
) -> list[str]:
    """Return a warning for each source whose rows do not suit the template, judged by 64 rows.

    The whole stage has one template, and no template suits both documents and chat.
    """
    warnings: list[str] = []
    for source, dataset in zip(sources, datasets, strict=True):
        kinds = row_kinds(dataset)
        if kinds.documents and kinds.others:
            warnings.append(
                f"{source.name}: {kinds.documents} of {kinds.documents + kinds.others} inspected "
                "rows are documents, the others are not: template plain splits only the documents; "
                "make two sources of it"
            )
        if template != "plain":
            if kinds.documents:
                warnings.append(
                    f"{source.name}: contains documents, which template {template} trains as chat "
                    "answers and does not split, so that long ones are bad rows: train documents "
                    "in a separate stage with template: plain"
                )
            continue
        if kinds.dropped_question is not None:
            warnings.append(
                f"{source.name}: template plain drops the users' turns, and "
                f"{kinds.dropped_question} has no image or video: train conversations in a "
                "separate stage with a chat template"
            )
    return warnings
