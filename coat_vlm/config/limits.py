"""A recipe's ``limits``: what the rows of its sources may take."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, Positive

Seconds = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LimitsConfig:
    """Limits of compressed files, and of images and videos at addresses."""

    archive_bytes: Positive | None = None
    """Bytes that a compressed file may be unpacked to; default 250 times its size, and at least
    1 GiB."""
    remote_bytes: Positive | None = None
    """Bytes of an image or video by http, which is held in memory; default 2 GiB."""
    remote_s: Seconds | None = None
    """Seconds for an image or video by http; default 300."""
