"""A recipe's ``limits`` and ``network``: what the rows of its sources may take, and from whom."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, Positive

Seconds = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LimitsConfig:
    """Limits of compressed files, and of images and videos by address."""

    archive_bytes: Positive | None = None
    """Bytes that a compressed file may be unpacked to; default 250 times its size, and at least
    1 GiB."""
    archive_members: Positive | None = None
    """Members of a compressed tar; default 10 million."""
    archive_sample_bytes: Positive | None = None
    """Bytes of one sample of a compressed tar, which is held in memory; default 1 GiB."""
    archive_wait_s: Seconds | None = None
    """Seconds until a compressed tar gives its next sample; default 60."""
    remote_bytes: Positive | None = None
    """Bytes of an image or video by http, which is held in memory; default 2 GiB."""
    remote_s: Seconds | None = None
    """Seconds for an image or video by http; default 300."""
    remote_wait_s: Seconds | None = None
    """Seconds that the host of an image or video may take to connect, or may send nothing; default
    5."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class HostsConfig:
    """A list of the hosts that rows may name."""

    hosts: tuple[str, ...]
    """Names or IP addresses, also private ones; ``*.example.org`` stands for all hosts below it,
    and ``*`` for every public host. For other schemes than http: ``s3://BUCKET``."""


NetworkConfig = Literal["allow", "deny"] | HostsConfig
