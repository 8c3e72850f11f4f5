"""The data room: readers, ingestion, mixtures, encoding and loading of samples.

Names are imported on first use, so that ``import coat_data`` does not load torch or a decoder. Two
functions share their module's name and are imported from there: ``coat_data.ingest.ingest`` and
``coat_data.collate.collate``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coat_data.sample import DataError, Media, Part, Sample, Turn

if TYPE_CHECKING:
    from coat_data.chat import ChatTemplate, Segment, get_template
    from coat_data.cifar import convert_cifar10
    from coat_data.collate import Batch
    from coat_data.dataset import SampleDataset
    from coat_data.encode import IGNORE_INDEX, EncodedSample, Encoder
    from coat_data.frame_sampling import VideoSettings
    from coat_data.image import ImageTransform, image_size, open_image
    from coat_data.loader import BadSample, LoadedBatch, TrainLoader, val_batches
    from coat_data.mixture import Mixture, SourceShare
    from coat_data.nlvr import convert_nlvr
    from coat_data.order import Cursor
    from coat_data.pack import Budget, Lengths, PackedOrder
    from coat_data.scenes import make_scenes
    from coat_data.selection import SelectedRows, select_rows, shards_of
    from coat_data.shards import Manifest
    from coat_data.stream_order import Shards
    from coat_data.tiling import TiledTransform
    from coat_data.verify import verify_rows, verify_template
    from coat_data.video import Clip, VideoReader, read_frames

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
    "convert_cifar10",
    "convert_nlvr",
    "get_template",
    "image_size",
    "make_scenes",
    "open_image",
    "read_frames",
    "select_rows",
    "shards_of",
    "val_batches",
    "verify_rows",
    "verify_template",
]

_NAMES_BY_MODULE = {
    "chat": ("ChatTemplate", "Segment", "get_template"),
    "cifar": ("convert_cifar10",),
    "collate": ("Batch",),
    "dataset": ("SampleDataset",),
    "encode": ("IGNORE_INDEX", "EncodedSample", "Encoder"),
    "frame_sampling": ("VideoSettings",),
    "image": ("ImageTransform", "image_size", "open_image"),
    "loader": ("BadSample", "LoadedBatch", "TrainLoader", "val_batches"),
    "mixture": ("Mixture", "SourceShare"),
    "nlvr": ("convert_nlvr",),
    "order": ("Cursor",),
    "pack": ("Budget", "Lengths", "PackedOrder"),
    "scenes": ("make_scenes",),
    "selection": ("SelectedRows", "select_rows", "shards_of"),
    "shards": ("Manifest",),
    "stream_order": ("Shards",),
    "tiling": ("TiledTransform",),
    "verify": ("verify_rows", "verify_template"),
    "video": ("Clip", "VideoReader", "read_frames"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f"coat_data.{module}"), name)
    raise AttributeError(f"module 'coat_data' has no attribute {name!r}")
