"""Images and videos by URL, read as a whole each time that they are needed.

Every failure is a :class:`DataError` that names the URL: a dead link is one bad row.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from coat_data.containers.http_file import is_http, read_row_address
from coat_data.containers.media_files import check_regular_file
from coat_data.containers.remote_file import filesystem, is_url, retry
from coat_data.limits import Limits, Network
from coat_data.sample import DataError, Media, Sample

WAITS_S = (0.5, 2.0)
"""Seconds between attempts; fewer than for shards, as links in rows may be dead."""


def is_remote(medium: Media) -> bool:
    """Whether an image, a video or one of its frames is at a URL."""
    return medium.data is None and any(map(is_url, medium.frames or (medium.path or "",)))


def restrict_media(sample: Sample, network: Network, limits: Limits, root: Path | str) -> Sample:
    """Return a sample whose media at URLs have these limits and this media root.

    Raises DataError if the network is denied and an image or video is at a URL.
    """
    if not any(map(is_remote, sample.media)):
        return sample
    if network == "deny":
        paths = [path for one in sample.media for path in (*one.frames, one.path or "")]
        problem = "URLs are not read (network: deny)"
        remedy = "download the file, or allow it (network: allow, --network allow)"
        raise DataError(f"{sample.where}: {next(filter(is_url, paths))}", problem, remedy)
    own: dict[str, Any] = {"limits": limits, "root": str(root)}
    media = [dataclasses.replace(one, **own) if is_remote(one) else one for one in sample.media]
    return dataclasses.replace(sample, media=tuple(media))


def fetch_media(media: Media) -> Media:
    """Return ``media`` with the bytes of its file if its path is a URL; DataError on failure."""
    url = media.path
    if media.data is not None or url is None or not is_url(url):
        return media

    def read() -> bytes:
        if not is_http(url) and media.root and url.startswith(f"{media.root}/"):
            system, path = filesystem(url)  # the user named this URL
            return system.cat_file(path)
        trusted = media.root if is_http(media.root) else ""
        return read_row_address(url, media.limits, trusted)

    return dataclasses.replace(media, data=retry(url, read, WAITS_S, timeouts=False))


def check_video(media: Media) -> None:
    """Raise DataError if the video file, the folder of frames, or a frame of a list is empty."""
    for frame in media.frame_images():
        check_video(frame)
    media = fetch_media(media)
    where = media.name
    if media.data is not None:
        empty = not media.data
    elif not os.path.exists(where):  # noqa: PTH110 - a million paths
        raise DataError(where, "no such file", "fix the path or the media root")
    else:
        check_regular_file(where)
        path = Path(where)
        empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
    if empty:
        raise DataError(where, "the video is empty", "replace the file or remove the row")
