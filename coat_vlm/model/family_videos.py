"""Videos of published models: which frames, at what size and as which tokens.

The family's own video processor decides all of it. Frames are decoded as for composed models
(:mod:`coat_data.media.video`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor

from coat_data.media.image import ONE_TILE, ImageTransform
from coat_data.media.sample_media import MediaLoader, MediaPlan
from coat_data.media.sampling import VideoSettings
from coat_data.sample import DataError, Media
from coat_vlm.model.families import Family

if TYPE_CHECKING:  # a decoder takes several megabytes per worker
    from coat_data.media.video import FrameCount


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video as the model gets it."""

    text: str
    """The text of its tokens."""
    frames: int
    inputs: dict[str, Tensor]
    """The model's inputs for it, by name."""


@dataclass(frozen=True, slots=True)
class _Frames:
    media: Media
    count: "FrameCount"
    numbers: list[int]
    """Chosen frames, counted from the first one of the part."""


class FamilyMedia(MediaLoader):
    """Reads videos with the video processor of a published model, which reads images itself."""

    def __init__(self, processor: Any, family: Family, video: VideoSettings) -> None:
        super().__init__(ImageTransform(1, (0.5,) * 3, (0.5,) * 3), video)
        self._processor = processor
        self._family = family
        self._last: tuple[Media, EncodedVideo] | None = None

    def plan(self, media: Media) -> MediaPlan:
        """Plan the frames of a video from its header; see :meth:`MediaLoader.plan`."""
        if media.kind == "image":
            return super().plan(media)
        frames = self._choose(media, self._video_reader().count(media))
        first, fps = frames.count.first, frames.count.fps
        times = None if fps is None else tuple((first + n) / fps for n in frames.numbers)
        return MediaPlan((ONE_TILE,) * len(frames.numbers), times)

    def measure_video(self, media: Media) -> EncodedVideo:
        """Return a video's tokens by its header, with inputs on ``meta``; see :meth:`read_video`.

        They are exact for an intact file that is not turned when it is shown.
        """
        frames = self._choose(media, self._video_reader().count(media))
        return self._process(frames, _empty(len(frames.numbers), frames.count.size))

    def read_video(self, media: Media) -> EncodedVideo:
        """Read a video, or raise DataError."""
        if self._last is not None and self._last[0] == media:
            return self._last[1]
        chosen: list[_Frames] = []
        sizes: list[tuple[int, int] | None] = []

        def choose(count: "FrameCount") -> Sequence[int]:
            chosen.append(self._choose(media, count))
            return chosen[0].numbers

        def shrink(frame: Image.Image) -> NDArray[np.uint8]:
            # At once, so that a long video is held in the size in which the model gets it.
            if not sizes:
                sizes.append(self._find_size(chosen[0], frame.size))
            return np.asarray(frame) if sizes[0] is None else self._resize(frame, *sizes[0])

        reader = self._video_reader()
        pixels = reader.read_numbers(media, choose, shrink)
        self.counts.update(reader.counts)
        reader.counts.clear()
        if len({frame.shape for frame in pixels}) > 1:
            raise DataError(media.name, "has frames of several sizes", "convert it, or remove it")
        whole = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        resized = {"do_resize": False} if sizes[0] is not None else {}
        encoded = self._process(chosen[0], whole, **resized)
        if self.keeps_last_clip:
            self._last = (media, encoded)
        return encoded

    def _choose(self, media: Media, count: "FrameCount") -> _Frames:
        """Choose frames as the video processor does, all of them if there are too few."""
        videos, family = self._processor.video_processor, self._family
        assert family.videos is not None
        names = videos.valid_kwargs.__annotations__
        options = {name: getattr(videos, name, None) for name in names}
        if options["fps"] is None and options["num_frames"] is None:
            options |= family.videos.sampling
        if count.fps is None and (family.videos.timed or options["fps"] is not None):
            raise DataError(
                media.name,
                f"has no times, which {family.name} needs of a video",
                'give the frames per second of a list of frames ({"path": [...], "fps": 2}), or '
                "put the video into a container, such as MP4",
            )
        step = options.get("temporal_patch_size") or 1
        if count.number < step:
            last = count.number - 1
            return _Frames(media, count, [*range(last), *[last] * (step - last)])
        if options["fps"] is None:
            options["num_frames"] = min(options["num_frames"], count.number // step * step)
        metadata = _describe(count, ())
        try:
            numbers = videos.sample_frames(metadata=metadata, **options)
        except (ValueError, ArithmeticError) as error:
            raise self._refused(media, count, error) from error
        return _Frames(media, count, [int(number) for number in numbers])

    def _find_size(self, frames: _Frames, size: tuple[int, int]) -> tuple[int, int] | None:
        """Return height and width to which frames are resized at once; None for other resizing."""
        encoded = self._process(frames, _empty(len(frames.numbers), size))
        grid = encoded.inputs.get("video_grid_thw")
        videos = self._processor.video_processor
        if grid is None or not videos.do_resize:
            return None
        _, rows, columns = grid[0].tolist()
        return rows * videos.patch_size, columns * videos.patch_size

    def _resize(self, frame: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
        videos = self._processor.video_processor
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)
        size = SizeDict(height=height, width=width)
        found = BaseVideoProcessor.resize(videos, pixels, size, resample=videos.resample)
        return found.permute(1, 2, 0).numpy()

    def _process(self, frames: _Frames, pixels: Tensor, **options: Any) -> EncodedVideo:
        """Run the video processor on frames (T, 3, H, W) uint8."""
        processor, videos = self._processor, self._family.videos
        assert videos is not None
        options |= {**getattr(processor, "videos_kwargs", {}), "return_tensors": "pt"}
        options |= {"return_metadata": True, "do_sample_frames": False}
        metadata = [_describe(frames.count, frames.numbers)]
        try:
            found, (text,) = processor._process_videos([pixels], video_metadata=metadata, **options)
        except ValueError as error:  # such as a side 200 times as long as the other (Qwen)
            raise self._refused(frames.media, frames.count, error) from error
        found = dict(found)
        tiles = found.get("pixel_values_videos")
        if tiles is not None and tiles.ndim == 5:  # 1, frames, 3, height, width
            found |= {"pixel_values_videos": tiles[0], "pixel_values": tiles[0]}
            found |= {"video_frames": torch.tensor([tiles.shape[1]])}
        names = videos.inputs or self._family.inputs
        inputs = {name: torch.as_tensor(found[name]) for name in names if name in found}
        return EncodedVideo(text, len(frames.numbers), inputs)

    def _refused(self, media: Media, count: "FrameCount", error: Exception) -> DataError:
        width, height = count.size
        return DataError(
            media.name,
            f"{self._family.name}'s video processor refuses {count.number} frames of {width} x "
            f"{height} pixels: {error}",
            "cut or crop the video, or remove the row",
        )


def _empty(number: int, size: tuple[int, int]) -> Tensor:
    """Return frames without values, of which a processor computes only shapes."""
    return torch.empty((number, 3, size[1], size[0]), dtype=torch.uint8, device="meta")


def _describe(count: "FrameCount", numbers: Sequence[int]) -> Any:
    """Return transformers' ``VideoMetadata``."""
    from transformers.video_utils import VideoMetadata

    width, height = count.size
    return VideoMetadata(
        total_num_frames=count.number,
        fps=count.fps,
        duration=None if count.fps is None else count.number / count.fps,
        width=width,
        height=height,
        frames_indices=[count.first + number for number in numbers],
    )
