"""Loads the images and videos of a sample, and says beforehand how many tiles they make."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from coat_data.media.image import ONE_TILE, ImageTransform, TilePlan, image_size, open_image
from coat_data.media.remote_media import fetched
from coat_data.media.sampling import VideoSettings
from coat_data.sample import DataError, Media

if TYPE_CHECKING:
    from coat_data.media.video import Clip, VideoReader


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """What an image or a video becomes in the model."""

    tiles: tuple[TilePlan, ...]
    """One for an image, one per frame for a video."""
    times_s: tuple[float, ...] | None = None
    """When each frame of a video is shown, in seconds from its beginning; None without times."""
    pool_frames: int = 1
    """Of a video: so many consecutive frames share the tokens of one; the last may be fewer."""

    @property
    def group_sizes(self) -> list[int]:
        """Tiles that share the tokens of one, in order; all 1 without pooling."""
        if self.pool_frames == 1:
            return [1] * self.num_tiles
        starts = range(0, len(self.tiles), self.pool_frames)
        return [min(self.pool_frames, len(self.tiles) - start) for start in starts]

    @property
    def group_times_s(self) -> list[float]:
        """Mean time of the frames of each group, in seconds; the frames' own without pooling."""
        times = self.times_s or ()
        starts = range(0, len(times), self.pool_frames)
        groups = [times[start : start + self.pool_frames] for start in starts]
        return [sum(group) / len(group) for group in groups]

    @property
    def num_tiles(self) -> int:
        """Tiles that the vision tower sees: N of the pixel values."""
        return sum(plan.num_tiles for plan in self.tiles)

    @property
    def num_token_tiles(self) -> int:
        """Tiles, or groups of frames, whose features become tokens."""
        if self.pool_frames > 1:
            return len(self.group_sizes)
        return sum(plan.num_token_tiles for plan in self.tiles)


class MediaLoader:
    """Reads media as its transform and its video settings want them.

    Attributes:
        transform: cuts, scales and normalizes images.
        video: how videos are read.
        counts: what happened while reading videos (:class:`coat_data.media.video.VideoReader`).
        keeps_last_clip: whether a decoded video is kept until another is asked for.
    """

    def __init__(
        self, transform: ImageTransform, video: VideoSettings, max_pixels: int | None = None
    ) -> None:
        """Prepare.

        Args:
            transform: see above.
            video: see above.
            max_pixels: most pixels of an image file (:func:`coat_data.media.image.open_image`).
        """
        self.transform = transform
        self.video = video
        self.counts: Counter[str] = Counter()
        self.keeps_last_clip = False
        self._last_clip: tuple[Media, Clip] | None = None
        self._max_pixels = max_pixels
        self._reader: VideoReader | None = None

    def plan(self, media: Media) -> MediaPlan:
        """What ``media`` becomes, from its header alone.

        Exact for images. For videos the number of frames is the largest that reading can give,
        which is their number in whole files that are long enough; the times are right to within a
        frame.

        Raises:
            DataError: the header cannot be read.
        """
        if media.kind == "video":
            count, times = self._video_reader().plan(media)
            return self._video_plan(count, times)
        return MediaPlan((self._image_plan(media),))

    def open(self, media: Media) -> tuple[MediaPlan, "Clip | Media"]:
        """What ``media`` becomes for certain, and what :meth:`write` needs.

        A video is decoded, as only that shows how many frames it has. Of an image the header is
        read where its size matters: pixels are decoded one image at a time. What has an address is
        fetched here, once.

        Raises:
            DataError: it cannot be read.
        """
        if media.kind == "image":
            media = fetched(media)
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
        clip = reader.read(media)
        self.counts.update(reader.counts)
        reader.counts.clear()
        if self.keeps_last_clip:
            self._last_clip = (media, clip)
        return clip

    def write(
        self,
        opened: Sequence[tuple[MediaPlan, "Clip | Media"]],
        rng: np.random.Generator | None,
    ) -> torch.Tensor:
        """The pixel values of all media, (N, 3, H, W) float32; N is 0 without media.

        Args:
            opened: what :meth:`open` gave for each.
            rng: source of the augmentation's draws; all frames of a video are augmented alike.

        Raises:
            DataError: an image cannot be decoded.
        """
        size = self.transform.size
        pixels = torch.empty(sum(plan.num_tiles for plan, _ in opened), 3, size, size)
        remaining: NDArray[np.float32] = pixels.numpy()
        for plan, medium in opened:
            out, remaining = np.split(remaining, [plan.num_tiles])
            if isinstance(medium, Media):
                self._write_image(medium, plan.tiles[0], out, rng)
            else:
                self._write_clip(medium, out, rng)
        return pixels

    def _write_image(
        self,
        media: Media,
        plan: TilePlan,
        out: NDArray[np.float32],
        rng: np.random.Generator | None,
    ) -> None:
        image = open_image(media, self._max_pixels)
        if self.transform.plan(*image.size) != plan:
            raise DataError(
                media.path or "<image bytes>",
                f"the header announces another size than the {image.width} x {image.height} pixels "
                "that were decoded",
                "save the image again with another program",
            )
        self.transform.write(image, out, rng)

    def _write_clip(
        self, clip: "Clip", out: NDArray[np.float32], rng: np.random.Generator | None
    ) -> None:
        seed = int(rng.integers(2**63)) if rng is not None and len(out) > 1 else None
        for frame, place in zip(clip.frames, out, strict=True):
            frame_rng = rng if seed is None else np.random.default_rng(seed)
            self.transform.write_square(frame, place, frame_rng)

    def _image_plan(self, media: Media) -> TilePlan:
        if self.transform.one_tile:
            return ONE_TILE
        return self.transform.plan(*image_size(media, self._max_pixels))

    def _video_reader(self) -> "VideoReader":
        if self._reader is None:
            # Images alone need no video decoder; loading one costs every worker some megabytes.
            from coat_data.media.video import VideoReader

            self._reader = VideoReader(self.video)
        return self._reader
