"""Data of vision-language models: readers, ingestion, mixtures, encoding and loading of samples.

A new format of rows is a reader (``readers/``, listed in ``readers/catalogue.py``); a new kind of
file is a container (``containers/``, found by ``containers/open.py``); a new list of data sets is a
form in ``lists/formats.py``.

Names are imported on first use, so that ``import coat_data`` does not load torch or a decoder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coat_data.moved import announce_moves
from coat_data.sample import DataError, Media, Part, Sample, Turn

if TYPE_CHECKING:
    from coat_data.containers.ingested import Manifest
    from coat_data.containers.rows import Shards
    from coat_data.load.check_labels import verify_rows, verify_template
    from coat_data.load.collate import Batch
    from coat_data.load.dataset import SampleDataset
    from coat_data.load.encode import IGNORE_INDEX, EncodedSample, Encoder
    from coat_data.load.loader import BadSample, LoadedBatch, TrainLoader, val_batches
    from coat_data.media.image import ImageTransform, image_size, open_image
    from coat_data.media.sampling import VideoSettings
    from coat_data.media.tiling import TiledTransform
    from coat_data.media.video import Clip, VideoReader, read_frames
    from coat_data.mixture.packing import Budget, Lengths, PackedOrder
    from coat_data.mixture.sampler import Cursor, Mixture, SourceShare
    from coat_data.mixture.selection import SelectedRows, select_rows, shards_of
    from coat_data.text.chat import ChatTemplate, Segment, get_template

__all__ = [
    "IGNORE_INDEX",
    "BadSample",
    "Batch",
    "Budget",
    "ChatTemplate",
    "Clip",
    "Cursor",
    "DataError",
    "EncodedSample",
    "Encoder",
    "ImageTransform",
    "Lengths",
    "LoadedBatch",
    "Manifest",
    "Media",
    "Mixture",
    "PackedOrder",
    "Part",
    "Sample",
    "SampleDataset",
    "Segment",
    "SelectedRows",
    "Shards",
    "SourceShare",
    "TiledTransform",
    "TrainLoader",
    "Turn",
    "VideoReader",
    "VideoSettings",
    "get_template",
    "image_size",
    "open_image",
    "read_frames",
    "select_rows",
    "shards_of",
    "val_batches",
    "verify_rows",
    "verify_template",
]

_NAMES_BY_MODULE = {
    "containers.ingested": "Manifest",
    "containers.rows": "Shards",
    "load.collate": "Batch",
    "load.dataset": "SampleDataset",
    "load.encode": "IGNORE_INDEX EncodedSample Encoder",
    "load.loader": "BadSample LoadedBatch TrainLoader val_batches",
    "load.check_labels": "verify_rows verify_template",
    "media.image": "ImageTransform image_size open_image",
    "media.sampling": "VideoSettings",
    "media.tiling": "TiledTransform",
    "media.video": "Clip VideoReader read_frames",
    "mixture.packing": "Budget Lengths PackedOrder",
    "mixture.sampler": "Cursor Mixture SourceShare",
    "mixture.selection": "SelectedRows select_rows shards_of",
    "text.chat": "ChatTemplate Segment get_template",
}

announce_moves("coat_data")


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    for module, names in _NAMES_BY_MODULE.items():
        if name in names.split():
            return getattr(import_module(f"coat_data.{module}"), name)
    raise AttributeError(f"module 'coat_data' has no attribute {name!r}")
