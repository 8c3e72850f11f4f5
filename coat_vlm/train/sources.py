"""A stage's data: the training mixture and the validation sources.

A recipe's source that is a list of sources: one source for each entry, with its own share.

What a stage's sources were when it started, so that a run that continues has the same.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coat_data.lists.entry import SourceEntry
from coat_data.lists.read import read_list
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import Encoder
from coat_data.load.loader import LoadedBatch, TrainLoader, val_batches
from coat_data.load.prepare import row_kinds
from coat_data.load.verify import dropped_question, verify_rows, verify_template
from coat_data.mixture.packing import Budget, Outlook, PackedOrder
from coat_data.mixture.sampler import Mixture, SourceShare
from coat_data.mixture.selection import (
    Rows,
    SelectedRows,
    listed_sources,
    read_quarantine,
    select_rows,
    shards_of,
    unseekable,
    without,
)
from coat_data.sample import DataError
from coat_vlm.config import Recipe, SourceConfig, StageConfig, StageName
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import World
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.train.documents import in_pieces, mean_tokens, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source of a stage, as a recipe would have it."""

    config: SourceConfig
    columns: Mapping[str, str] = field(default_factory=dict)
    """The reader's names of fields -> those of the file."""


def parts(source: SourceConfig) -> list[Part]:
    """The sources that a source of a recipe stands for: itself, or those of the list it names.

    An entry is called ``source/entry`` (``source`` if it is the only one). What the recipe says
    holds for the entries that say nothing, and its ``repeat`` multiplies theirs. Its ``weight`` is
    shared out by the entries' weights; where they have none, every entry gets all of it here, and
    :func:`by_rows` shares it out. With ``select`` a list stays one source with the rows of all its
    entries, and so does a list in a list.

    Raises:
        DataError: the list has a mistake, or ``exclude`` names none of its sources.
        ValueError: ``repeat`` is asked of a list with weights, or only some entries have a weight.
    """
    entries = read_list(source.path) if source.select is None else None
    if entries is None:
        return [Part(config=source)]
    weights = [entry.weight for entry in entries if entry.weight is not None]
    if weights and len(weights) < len(entries):
        raise ValueError(
            f"{source.name}: only {len(weights)} of the {len(entries)} sources of {source.path} "
            "have a weight; give one to all or to none"
        )
    if weights and source.repeat is not None:
        raise ValueError(
            f"{source.name}: repeat={source.repeat} has no meaning with the weights of "
            f"{source.path}; give this source a weight instead, or remove it"
        )
    found = [_part(source, entry, sum(weights), alone=len(entries) == 1) for entry in entries]
    return found if source.exclude is None else _excluding(source, source.exclude, found)


def ignored_keys(sources: Sequence[SourceConfig]) -> list[str]:
    """A line for each entry of the sources' lists that has keys without a meaning here."""
    return [
        f"{source.name}/{entry.name}: {', '.join(entry.ignored)} of {source.path} has no meaning "
        "here and is passed over"
        for source in sources
        for entry in read_list(source.path) or []
        if entry.ignored
    ]


def ignored_weights(sources: Sequence[SourceConfig]) -> list[str]:
    """A line for each validation source that is a list with weights."""
    return [
        f"{source.name}: the weights of {source.path} play no part in validation, which reads "
        "every row once; if it is a metadataset, this is its split train, and "
        f"{source.path}#val is its split val"
        for source in sources
        if any(entry.weight is not None for entry in read_list(source.path) or [])
    ]


def by_rows(source: SourceConfig, entries: list[Part], rows: list[int]) -> list[Part]:
    """Share out the weight of a list whose entries have none, by what they are without it.

    Args:
        source: the list's.
        entries: its parts.
        rows: of each part.
    """
    listed = read_list(source.path) or []
    if source.weight is None or len(entries) == 1 or listed[0].weight is not None:
        return entries
    samples = [number * (entry.repeat or 1.0) for entry, number in zip(listed, rows, strict=True)]
    if not sum(samples):
        return entries  # the mixture says which source has no rows
    return [
        _changed(part, repeat=None, weight=source.weight * number / sum(samples))
        for part, number in zip(entries, samples, strict=True)
    ]


def _part(source: SourceConfig, entry: SourceEntry, weights: float, *, alone: bool) -> Part:
    """An entry with what the recipe says of its list; ``weights`` is the sum of all entries'."""
    weight, repeat = entry.weight, entry.repeat
    if source.weight is not None:
        weight, repeat = source.weight * (1.0 if weight is None else weight / weights), None
    elif source.repeat is not None:
        repeat = source.repeat * (repeat or 1.0)
    config = SourceConfig(
        name=source.name if alone else f"{source.name}/{entry.name}",
        path=entry.path,
        media_root=entry.media_root or source.media_root,
        format=entry.format or source.format,
        follow_links=source.follow_links,
        repeat=repeat,
        weight=weight,
        select=entry.select,
        seed=entry.seed,
        exclude=source.exclude,
    )
    return Part(config=config, columns=entry.columns)


def _excluding(source: SourceConfig, path: str, found: list[Part]) -> list[Part]:
    """The parts, without ``exclude`` where that file lists no row of theirs."""
    listed = listed_sources(Path(path))
    names = [part.config.name for part in found]
    if not listed & set(names):
        raise DataError(
            path,
            f"lists no row of {source.name!r}, which is {', '.join(names)}; only of "
            f"{sorted(listed) or 'none'}",
            "name the source as the run did that wrote the list, or remove exclude",
        )
    return [part if part.config.name in listed else _changed(part, exclude=None) for part in found]


def _changed(part: Part, **changes: Any) -> Part:
    return dataclasses.replace(part, config=dataclasses.replace(part.config, **changes))


def open_sources(
    sources: Sequence[SourceConfig], seed: int
) -> tuple[list[SourceConfig], list[Rows]]:
    """The training sources of a stage, those of lists one by one, and their rows that take part.

    Args:
        sources: of the recipe.
        seed: of random selections, where a source has none of its own.

    Raises:
        DataError: as :func:`open_source`, or a list has a mistake.
        ValueError: as :func:`open_source`, weights and repeats of a list contradict each other, or
            two sources have one name.
    """
    configs: list[SourceConfig] = []
    datasets: list[Rows] = []
    for source in sources:
        found = parts(source)
        opened = [open_source(part.config, seed, part.columns) for part in found]
        found = by_rows(source, found, [len(rows) for rows in opened])
        configs += [part.config for part in found]
        datasets += opened
    names = Counter(config.name for config in configs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"several sources are called {', '.join(twice)}; give each source of the recipe and "
            "each entry of its lists a name of its own"
        )
    return configs, datasets


def open_source(
    source: SourceConfig,
    seed: int,
    columns: Mapping[str, str] | None = None,
    *,
    without_weights: bool = False,
) -> Rows:
    """The rows of one source that take part; a list is read as one source.

    Args:
        source: what to open.
        seed: of a random selection, where the source has none of its own.
        columns: the reader's names of fields -> those of the file.
        without_weights: pass over the weights of a list, for reading every row once.

    Raises:
        DataError: the file or folder is missing or cannot be read, or the list of excluded rows is
            not one of this source.
        ValueError: there is no such format, no row is left, or there are fewer than are to be
            selected.
    """
    dataset = SampleDataset(
        source.path,
        source.media_root or None,
        source.name,
        format=source.format,
        follow_links=source.follow_links,
        columns=columns,
        without_weights=without_weights,
    )
    if source.select is None and source.exclude is None:
        return dataset
    size = len(dataset)
    rows = select_rows(
        size, source.select, seed if source.seed is None else source.seed, source.name
    )
    if source.exclude is not None:
        excluded = read_quarantine(Path(source.exclude), source.name, source.path, size)
        rows = without(rows, excluded)
    if not len(rows):
        raise ValueError(
            f"{source.name}: all of its selected rows are excluded by {source.exclude}; remove the "
            "source"
        )
    return SelectedRows(dataset, rows)


def texts(recipe: Recipe) -> Iterator[str]:
    """All text of the recipe's training sources, each once: what a tokenizer learns from."""
    seen: set[tuple[str | int | None, ...]] = set()
    for stage in recipe.stages.values():
        for source in stage.data:
            rows = (source.path, source.select, source.seed, source.exclude)
            if rows in seen:
                continue
            seen.add(rows)
            for dataset in open_sources([source], recipe.seed)[1]:
                for row in range(len(dataset)):
                    for turn in dataset[row].turns:
                        yield turn.text


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
    _encoder: Encoder
    _world: World
    _batch_size: int
    _pad_token_id: int

    def total_steps(self, stage: StageConfig) -> int:
        """Optimizer steps of the stage."""
        if stage.max_steps is not None:
            return stage.max_steps
        assert stage.epochs is not None
        return max(1, round(stage.epochs * self.epoch_size / self.samples_per_step(stage)))

    def samples_per_step(self, stage: StageConfig) -> float:
        """Samples of an optimizer step; their mean when packing."""
        return stage.batch_size * (1 if self.packing is None else self.packing.samples_per_bin)

    def validation_batches(self, name: str) -> Iterator[LoadedBatch]:
        """Batches of one validation source, as many on every rank."""
        return val_batches(
            self.validation[name],
            self._encoder,
            batch_size=self._batch_size,
            rank=self._world.rank,
            world_size=self._world.size,
            pad_token_id=self._pad_token_id,
        )


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
        places = {"world": world, "num_workers": recipe.num_workers}
        path = run_dir / name / "documents.npz"
        datasets = in_pieces(sources, datasets, encoder, path=path, **places)
        path = run_dir / name / "documents-val.npz"
        validation = in_pieces(stage.val_data, validation, encoder, path=path, **places)
    mixture = _mixture(sources, datasets, recipe.seed)
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
        validation={
            source.name: rows for source, rows in zip(stage.val_data, validation, strict=True)
        },
        verified_rows=verified_rows,
        packing=None if order is None else order.outlook(),
        row_tokens=None if order is None else order.budget.tokens,
        _encoder=processor.encoder(train=False, template=stage.template),
        _world=world,
        _batch_size=stage.micro_batch_size,
        _pad_token_id=pad_token_id,
    )


def _mixture(sources: Sequence[SourceConfig], datasets: Sequence[Rows], seed: int) -> Mixture:
    return Mixture(
        [len(dataset) for dataset in datasets],
        [source.repeat for source in sources],
        [source.weight for source in sources],
        seed,
        names=[source.name for source in sources],
        shards=[shards_of(dataset) for dataset in datasets],
    )


def _warnings(sources: Sequence[SourceConfig], datasets: Sequence[Rows]) -> list[str]:
    found: list[str] = []
    for source, dataset in zip(sources, datasets, strict=True):
        address = unseekable(dataset)
        if address is not None:
            found.append(
                f"{source.name}: the server of {address} does not answer ranges; every worker "
                "reads its shards from the beginning, and again after a restart (replayed_rows in "
                "metrics.jsonl counts these rows): download it, or use another server"
            )
    return found


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


_COMPARED = ("name", "select", "seed", "repeat", "weight")


class SourceRecord:
    """The sources of a stage, those of lists one by one, with their rows: what its order rests on.

    It is kept in ``sources.json`` in the stage's folder.

    Args:
        folder: the stage's.
        sources: the training sources.
        rows: of each source, those that take part.
    """

    def __init__(self, folder: Path, sources: Sequence[SourceConfig], rows: Sequence[int]) -> None:
        self._path = folder / "sources.json"
        self._found: list[dict[str, Any]] = [
            {**{key: getattr(source, key) for key in _COMPARED}, "rows": number}
            for source, number in zip(sources, rows, strict=True)
        ]

    def check(self) -> None:
        """Compare with what was saved; a run of before there was such a file passes.

        Raises:
            ValueError: a source was added, removed, moved or changed.
        """
        if not self._path.is_file():
            return
        saved: list[dict[str, Any]] = json.loads(self._path.read_text())
        if saved == self._found:
            return
        before, after = ({one["name"]: one for one in many} for many in (saved, self._found))
        details = [
            f"{name} is {'new' if name in after else 'gone'}"
            for name in [*before, *after]
            if (name in before) != (name in after)
        ]
        details += [
            f"{name} has {key} {after[name][key]!r}, had {one[key]!r}"
            for name, one in before.items()
            for key in one
            if name in after and after[name][key] != one[key]
        ]
        raise ValueError(
            f"the data differs from {self._path}, with which this run started: "
            f"{'; '.join(details) or 'its order'}; restore the lists and files of the sources, or "
            "start a new run in another output_dir"
        )

    def save(self) -> None:
        """Write the file whole; for one process."""
        temporary = self._path.with_suffix(".new.json")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(self._found, indent=1))
        temporary.replace(self._path)
