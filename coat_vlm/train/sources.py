"""A stage's data: the training mixture and the validation sources."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coat_data.dataset import SampleDataset
from coat_data.encode import Encoder
from coat_data.loader import LoadedBatch, TrainLoader, val_batches
from coat_data.mixture import Mixture, SourceShare
from coat_vlm.config import Recipe, SourceConfig, StageConfig
from coat_vlm.processor import CoatVlmProcessor
from coat_vlm.train.world import World


def open_source(source: SourceConfig) -> SampleDataset:
    """The dataset of one source.

    Raises:
        DataError: the file or folder is missing or cannot be read.
        ValueError: there is no such format.
    """
    return SampleDataset(
        source.path,
        source.media_root or None,
        source.name,
        format=source.format,
        follow_links=source.follow_links,
    )


def texts(recipe: Recipe) -> Iterator[str]:
    """All text of the recipe's training sources, each file once: what a tokenizer learns from."""
    seen: set[str] = set()
    for stage in recipe.stages.values():
        for source in stage.data:
            if source.path in seen:
                continue
            seen.add(source.path)
            dataset = open_source(source)
            for row in range(len(dataset)):
                for turn in dataset[row].turns:
                    yield turn.text


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    """Where a stage's batches come from."""

    loader: TrainLoader
    shares: list[SourceShare]
    """Rows and samples per epoch of each source."""
    epoch_size: int
    """Samples per epoch."""
    validation: dict[str, SampleDataset]
    """Validation datasets by source name."""
    _encoder: Encoder
    _world: World
    _batch_size: int
    _pad_token_id: int

    def total_steps(self, stage: StageConfig) -> int:
        """Optimizer steps of the stage."""
        if stage.max_steps is not None:
            return stage.max_steps
        assert stage.epochs is not None
        return max(1, round(stage.epochs * self.epoch_size / stage.batch_size))

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


def open_data(
    recipe: Recipe, stage: StageConfig, processor: CoatVlmProcessor, world: World
) -> StageData:
    """Open the stage's sources.

    Raises:
        DataError: a source is missing or cannot be read.
        ValueError: a source has no rows, or the batch sizes do not divide.
    """
    datasets = [open_source(source) for source in stage.data]
    mixture = _mixture(stage.data, datasets, recipe.seed)
    pad_token_id = processor.tokenizer.pad_token_id
    loader = TrainLoader(
        datasets,
        mixture,
        processor.encoder(train=True, template=stage.template),
        batch_size=stage.batch_size,
        micro_batch_size=stage.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        num_workers=recipe.num_workers,
        seed=recipe.seed,
        replace_bad=stage.max_bad_samples > 0,
        pad_token_id=pad_token_id,
    )
    return StageData(
        loader=loader,
        shares=mixture.accounting(),
        epoch_size=mixture.epoch_size,
        validation={source.name: open_source(source) for source in stage.val_data},
        _encoder=processor.encoder(train=False, template=stage.template),
        _world=world,
        _batch_size=stage.micro_batch_size,
        _pad_token_id=pad_token_id,
    )


def _mixture(sources: Sequence[SourceConfig], datasets: list[SampleDataset], seed: int) -> Mixture:
    return Mixture(
        [len(dataset) for dataset in datasets],
        [source.repeat for source in sources],
        [source.weight for source in sources],
        seed,
        names=[source.name for source in sources],
    )
