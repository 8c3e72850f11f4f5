"""Loads the images and videos of a sample, and plans their tiles from headers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from coat_data.media.image import ONE_TILE, ImageTransform, TilePlan, image_size, open_image
from coat_data.media.remote_media import fetch_media
from coat_data.media.sampling import VideoSettings
from coat_data.sample import DataError, Media

_BLOCK_BYTES = 33 << 20  # bytes of a block of squares, at least; see _SquareStore

if TYPE_CHECKING:
    from coat_data.media.video import Clip, VideoReader


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """The tiles of an image or a video."""

    tiles: tuple[TilePlan, ...]
    """One plan for an image; one per frame for a video."""
    times_s: tuple[float, ...] | None = None
    """Time of each frame of a video, in seconds from its beginning; None without times."""
    pool_frames: int = 1
    """Video frames per pooling group, which shares the tokens of one; the last may be smaller."""

    @property
    def group_sizes(self) -> list[int]:
        """Return the tiles of each pooling group, in order; all 1 without pooling."""
        if self.pool_frames == 1:
            return [1] * self.num_tiles
        starts = range(0, len(self.tiles), self.pool_frames)
        return [min(self.pool_frames, len(self.tiles) - start) for start in starts]

    @property
    def group_times_s(self) -> list[float]:
        """Return the mean time of the frames of each pooling group, in seconds."""
        times = self.times_s or ()
        starts = range(0, len(times), self.pool_frames)
        groups = [times[start : start + self.pool_frames] for start in starts]
        return [sum(group) / len(group) for group in groups]

    @property
    def num_tiles(self) -> int:
        """Return N, the number of tiles that the vision tower processes."""
        return sum(plan.num_tiles for plan in self.tiles)

    @property
    def num_token_tiles(self) -> int:
        """Return the number of tiles, or groups of frames, whose features become tokens."""
        if self.pool_frames > 1:
            return len(self.group_sizes)
        return sum(plan.num_token_tiles for plan in self.tiles)


class _SquareStore:
    """Stores squares of ``size`` pixels in blocks above 32 MiB, which malloc returns when free."""

    def __init__(self, size: int) -> None:
        per_block = -(-_BLOCK_BYTES // (3 * size * size))
        self._shape = (per_block, size, size, 3)
        self._block = np.empty((0,), dtype=np.uint8)
        self._used = 0

    def add(self, square: Image.Image) -> NDArray[np.uint8]:
        """Copy a square, and return the copy (size, size, 3)."""
        if self._used == len(self._block):
            self._block, self._used = np.empty(self._shape, dtype=np.uint8), 0
        place = self._block[self._used]
        place[...] = np.asarray(square)
        self._used += 1
        return place


class MediaLoader:
    """Reads images and videos with an image transform and video settings.

    Attributes:
        counts: events while videos were read, by :data:`coat_data.media.sampling.VIDEO_COUNTS`.
        keeps_last_clip: cache the last decoded video, for consecutive questions about one video.
    """

    def __init__(
        self, transform: ImageTransform, video: VideoSettings, max_pixels: int | None = None
    ) -> None:
        self.transform = transform
        self.video = video
        self.counts: Counter[str] = Counter()
        self.keeps_last_clip = False
        self._last_clip: tuple[Media, Clip] | None = None
        self.max_pixels = max_pixels
        self._reader: VideoReader | None = None

    def plan(self, media: Media) -> MediaPlan:
        """Plan the tiles of ``media`` from its header; DataError if it cannot be read.

        The plan is exact for images. For a video it has the maximum number of frames.
        """
        if media.kind == "video":
            count, times = self._video_reader().plan(media)
            return self._video_plan(count, times)
        return MediaPlan((self._image_plan(media),))

    def open(self, media: Media) -> tuple[MediaPlan, "Clip | Media"]:
        """Return the exact plan of ``media``, and the input of :meth:`write`; or DataError.

        Videos are decoded, as only decoding finds the number of frames; images are not. Files at
        URLs are fetched here, once.
        """
        if media.kind == "image":
            media = fetch_media(media)
            return MediaPlan((self._image_plan(media),)), media
        clip = self._clip(media)
        return self._video_plan(len(clip.frames), clip.times_s), clip

    def _video_plan(self, num_frames: int, times_s: Sequence[float] | None) -> MediaPlan:
        times = None if times_s is None else tuple(times_s)
        return MediaPlan((ONE_TILE,) * num_frames, times, self.video.pool_frames)

    def _clip(self, media: Media) -> "Clip":
        if self._last_clip is not None and self._last_clip[0] == media:
            return self._last_clip[1]
        reader = self._video_reader()
        store = _SquareStore(self.transform.size)
        clip = reader.read(media, lambda frame: store.add(self.transform.square(frame)))
        self.counts.update(reader.counts)
        reader.counts.clear()
        if self.keeps_last_clip:
            self._last_clip = (media, clip)
        return clip

    def write(self, opened: Sequence[tuple[MediaPlan, "Clip | Media"]]) -> torch.Tensor:
        """Decode the results of :meth:`open` to pixel values, (N, 3, H, W) float32; or DataError.

        Frames of videos are freed as they are written, unless the last clip is cached.
        """
        size = self.transform.size
        pixels = torch.empty(sum(plan.num_tiles for plan, _ in opened), 3, size, size)
        remaining: NDArray[np.float32] = pixels.numpy()
        for plan, medium in opened:
            out, remaining = np.split(remaining, [plan.num_tiles])
            if not isinstance(medium, Media):
                frames = list(medium.frames) if self.keeps_last_clip else medium.frames
                for place in out[::-1]:  # the last frame first, as a list pops it fastest
                    self.transform.normalize(frames.pop(), place)
                continue
            image = open_image(medium, self.max_pixels)
            if self.transform.plan(*image.size) != plan.tiles[0]:
                raise DataError(
                    medium.name,
                    f"the size in the header differs from the {image.width} x {image.height} "
                    "pixels that were decoded",
                    "save the image again with another program",
                )
            self.transform.write(image, out)
        return pixels

    def _image_plan(self, media: Media) -> TilePlan:
        if self.transform.one_tile:
            return ONE_TILE
        return self.transform.plan(*image_size(media, self.max_pixels))

    def _video_reader(self) -> "VideoReader":
        if self._reader is None:
            # Only videos need a decoder, which takes several megabytes per worker.
            from coat_data.media.video import VideoReader

            self._reader = VideoReader(self.video)
        return self._reader
