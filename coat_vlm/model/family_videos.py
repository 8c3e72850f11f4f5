"""Videos of published models: which frames, at what size and as which tokens.

The family's own video processor decides all of it. Frames are decoded as for composed models
(:mod:`coat_data.media.video`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from coat_data.media.image import ONE_TILE, ImageTransform
from coat_data.media.sample_media import MediaLoader, MediaPlan
from coat_data.media.sampling import VideoSettings
from coat_data.sample import DataError, Media
from coat_vlm.model.families import Family

if TYPE_CHECKING:  # a decoder takes several megabytes per worker
    from coat_data.media.video import FrameCount


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video as the model gets it: the text of its tokens, and the model's inputs by name.

    For frames that are images: text with image tokens, and ``frames`` (T, 3, H, W) uint8.
    """

    text: str
    frames: int
    inputs: dict[str, Tensor]


def sample_frames(processor: Any, family: Family) -> None:
    """Give a processor that takes no videos the sampling of their frames, as in its folder."""
    if family.videos.frames is not None:
        number = getattr(processor.image_processor, "num_frames", None)
        processor.video_processor = BaseVideoProcessor(num_frames=number)
        processor.video_token = None


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
        with self._refusals(media):
            about = self._choose(media, self._video_reader().count(media))
        times = None if about.fps is None else tuple(about.timestamps)
        return MediaPlan((ONE_TILE,) * len(about.frames_indices or ()), times)

    def measure_video(self, media: Media) -> EncodedVideo:
        """Decode a frame; return the tokens of :meth:`read_video`, and inputs on ``meta``."""
        about, (frame,) = self._read(media, lambda _, frame: frame, 1)
        with self._refusals(media):
            return self._process(about, _empty(about, *frame.size))

    def read_video(self, media: Media) -> EncodedVideo:
        """Read a video, or raise DataError."""
        if self._last is not None and self._last[0] == media:
            return self._last[1]
        sizes: list[tuple[int, int] | None] = []

        def shrink(about: VideoMetadata, frame: Image.Image) -> NDArray[np.uint8]:
            # At once, so that a long video is held in the size in which the model gets it.
            if not sizes:
                sizes.append(self._find_size(about, *frame.size))
            return np.array(frame) if sizes[0] is None else self._resize(frame, *sizes[0])

        about, frames = self._read(media, shrink)
        with self._refusals(media):  # also of frames of several sizes
            pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
            resized = {"do_resize": False} if sizes[0] is not None else {}
            encoded = self._process(about, pixels, **resized)
        if self.keeps_last_clip:
            self._last = (media, encoded)
        return encoded

    def _read(
        self,
        media: Media,
        convert: Callable[[VideoMetadata, Image.Image], Any],
        number: int | None = None,
    ) -> tuple[VideoMetadata, list[Any]]:
        """Choose frames, and read them, or the first ``number``."""
        chosen: list[VideoMetadata] = []

        def choose(count: "FrameCount") -> Sequence[int]:
            chosen.append(self._choose(media, count))
            return (chosen[0].frames_indices or [])[:number]

        reader = self._video_reader()
        with self._refusals(media):
            frames = reader.read_numbers(media, choose, lambda frame: convert(chosen[0], frame))
        self.counts.update(reader.counts)
        reader.counts.clear()
        return chosen[0], frames

    def _choose(self, media: Media, count: "FrameCount") -> VideoMetadata:
        """Choose frames as the video processor does, all of them if there are too few."""
        videos, family = self._processor.video_processor, self._family.videos
        names = videos.valid_kwargs.__annotations__
        options: dict[str, Any] = {name: getattr(videos, name, None) for name in names}
        if options["fps"] is None and options["num_frames"] is None:
            options |= family.sampling
        if count.fps is None and (family.timed or options["fps"] is not None):
            raise DataError(
                media.name,
                f"has no times, which {self._family.name} needs for videos",
                'give the frames per second of a list of frames ({"path": [...], "fps": 2}), or '
                "put the video into a container, such as MP4",
            )
        duration = None if count.fps is None else count.number / count.fps
        about = VideoMetadata(count.number, fps=count.fps, duration=duration)
        step = options.get("temporal_patch_size") or 1
        if options["fps"] is None:
            options["num_frames"] = min(options["num_frames"], count.number // step * step)
        numbers: Any = [*range(count.number), *[count.number - 1] * (step - count.number)]
        if count.number >= step:
            numbers = videos.sample_frames(metadata=about, **options)
        if not len(numbers):  # GLM-4.6V's takes none of a clip of less than a second
            name = self._family.name
            problem = f"{name}'s video processor selects none of its {count.number} frames"
            raise DataError(media.name, problem, "make the clip longer, or remove the row")
        about.frames_indices = [count.first + int(number) for number in numbers]
        return about

    def _find_size(self, about: VideoMetadata, width: int, height: int) -> tuple[int, int] | None:
        """Return height and width to which frames are resized at once; None for other resizing."""
        family, videos = self._family.videos, self._processor.video_processor
        if "video_grid_thw" not in family.inputs or not videos.do_resize:
            return None
        found = self._process(about, _empty(about, width, height)).inputs["video_grid_thw"]
        return int(found[0, 1]) * videos.patch_size, int(found[0, 2]) * videos.patch_size

    def _resize(self, frame: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
        videos = self._processor.video_processor
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)
        size = SizeDict(height=height, width=width)
        found = BaseVideoProcessor.resize(videos, pixels, size, resample=videos.resample)
        return found.permute(1, 2, 0).numpy()

    def _process(self, about: VideoMetadata, pixels: Tensor, **options: Any) -> EncodedVideo:
        """Run the video processor on frames (T, 3, H, W) uint8."""
        processor, family = self._processor, self._family
        if (before := family.videos.frames) is not None:
            times = about.timestamps if family.videos.timed else [0.0] * len(pixels)
            texts = (before.format(round(time, 2)) + processor.image_token for time in times)
            return EncodedVideo(self._between.join(texts), len(pixels), {"frames": pixels})
        options |= {**getattr(processor, "videos_kwargs", {}), "return_tensors": "pt"}
        options |= {"return_metadata": True, "do_sample_frames": False}
        if pixels.is_meta:  # others are not computed there, with a warning
            options["resample"] = Image.Resampling.BICUBIC
        metadata = [{**about, "frames_indices": [*(about.frames_indices or ())]}]
        found, (text,) = processor._process_videos([pixels], video_metadata=metadata, **options)
        found = dict(found)
        tiles = found.get("pixel_values_videos")
        if tiles is not None and tiles.ndim == 5:  # 1, frames, 3, height, width
            found |= {"pixel_values_videos": tiles[0], "pixel_values": tiles[0]}
            found |= {"video_frames": torch.tensor([len(pixels)])}
        elif (grid := found.get("video_grid_thw")) is not None:  # of use if frames are images
            images = torch.tensor([[1, *grid[0, 1:].tolist()]] * int(grid[0, 0]))
            found |= {"pixel_values": tiles, "image_grid_thw": images}
        names = family.videos.inputs or family.inputs
        inputs = {name: torch.as_tensor(found[name]) for name in names if name in found}
        if (places := inputs.get("video_position_ids")) is not None and places.is_meta:
            inputs["video_position_ids"] = torch.zeros_like(places, device="cpu")
        return EncodedVideo(text, len(pixels), inputs)

    @cached_property
    def _between(self) -> str:
        """What the chat template writes between two images."""
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]
        text = self._processor.apply_chat_template([{"role": "user", "content": content}])
        return text.split(self._processor.image_token)[1]

    @contextmanager
    def _refusals(self, media: Media) -> Iterator[None]:
        """Raise DataError for what the video processor refuses, such as a thin frame."""
        try:
            yield
        except DataError:
            raise
        except (ValueError, ArithmeticError) as error:
            problem = f"{self._family.name}'s video processor rejects it: {error}"
            raise DataError(media.name, problem, "cut or crop it, or remove the row") from error


def _empty(about: VideoMetadata, width: int, height: int) -> Tensor:
    """Return frames without values, for which a processor computes only shapes."""
    shape = (len(about.frames_indices or ()), 3, height, width)
    return torch.empty(shape, dtype=torch.uint8, device="meta")
