"""Images and videos by URL: whole files, or the part that a header needs.

A medium's address comes from a row (``https://...``), or from a path below a media root that is an
address. It is read again each time; nothing is cached on disk. Every failure is a
:class:`DataError` that names the address, so that a dead link is one bad row. ``media.network`` has
the hosts that may be asked, ``media.limits`` how long they may take and how much they may send.
"""

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from coat_data.containers.http_client import check_host, is_http, read_body, request
from coat_data.containers.media_files import check_regular_file
from coat_data.containers.remote_file import (
    Blocks,
    RangeFile,
    RemoteFile,
    filesystem,
    is_url,
    retry,
    unreachable,
)
from coat_data.limits import Limits, Network
from coat_data.sample import DataError, Media, Sample

WAITS_S = (0.5, 2.0)
"""Seconds between attempts; fewer than for shards, as links in rows may be dead."""
_BLOCKS = {"image": (1 << 16, 4), "video": (1 << 20, 16)}
"""Bytes per block, and the number of blocks after which the whole file is read for a header."""

T = TypeVar("T")


def is_remote(medium: Media) -> bool:
    """Whether the file, or a frame, of a medium is at an address."""
    return medium.data is None and any(map(is_url, medium.frames or (medium.path or "",)))


def restrict_media(sample: Sample, network: Network, limits: Limits) -> Sample:
    """Return a sample whose media at addresses have these hosts and limits.

    Raises:
        DataError: a host is not allowed; names the row.
    """
    if not any(map(is_remote, sample.media)):
        return sample
    media = list(sample.media)
    for place, medium in enumerate(media):
        if not is_remote(medium):
            continue
        try:
            for path in filter(is_url, medium.frames or (medium.path or "",)):
                check_host(path, network)
        except DataError as error:
            raise error.within(sample.where) from None
        media[place] = dataclasses.replace(medium, network=network, limits=limits)
    return dataclasses.replace(sample, media=tuple(media))


def fetch_media(media: Media) -> Media:
    """Return ``media`` with the bytes of its file if its path is a URL; otherwise unchanged.

    Raises:
        DataError: the file cannot be read; names the address.
    """
    if media.data is not None or media.path is None or not is_url(media.path):
        return media
    return dataclasses.replace(media, data=_fetch(media))


def open_header(media: Media) -> BinaryIO:
    """Open the file at the URL ``media.path``; only the requested bytes are read.

    The whole file is read if the server does not support ranges, or many bytes are requested.

    Raises:
        DataError: the file cannot be opened or read; names the address.
    """
    url = media.path or ""
    file = _open(media)
    if not file.seekable or file.size is None:
        return io.BytesIO(_fetch(media))
    size = file.size
    block, most = _BLOCKS[media.kind]
    blocks: dict[int, bytes] = {}

    def read_at(start: int, stop: int) -> bytes:
        nonlocal block
        if start // block not in blocks and len(blocks) == most:
            block = size
            blocks.clear()
            blocks[0] = _fetch(media)
        number, offset = divmod(start, block)
        if number not in blocks:
            blocks[number] = _read(url, lambda: file.range(number * block, block))
        data = blocks[number][offset : offset + stop - start]
        if not data:
            raise DataError(url, "breaks off", "copy the file again")
        return data

    return cast(BinaryIO, RangeFile(size, read_at))


def _open(media: Media) -> RemoteFile:
    url, options = media.path or "", {"network": media.network, "limits": media.limits}
    return _read(url, lambda: RemoteFile(url, Blocks(), waits_s=WAITS_S, **options))


def _fetch(media: Media) -> bytes:
    """Read a whole file in one request; over http with limits of time and size."""
    url, limits = media.path or "", media.limits

    def read() -> bytes:
        check_host(url, media.network)
        if not is_http(url):
            system, path = filesystem(url)
            return system.cat_file(path)
        wait_s, max_s = limits.remote_wait_s, limits.remote_s
        with request(url, None, wait_s, media.network, max_s) as answer:
            return read_body(answer, url, limits.remote_bytes)

    return _read(url, lambda: retry(read, WAITS_S, timeouts=False))


def _read(url: str, read: Callable[[], T]) -> T:
    """Call ``read``; errors of networks, servers and invalid addresses become DataErrors."""
    try:
        return read()
    except DataError:
        raise
    except Exception as error:  # also ValueError for host names, and exceptions of fsspec
        raise unreachable(url, error) from error


def check_video(media: Media) -> None:
    """Check that the video file, the folder of frames, or every frame of a list is not empty.

    Raises:
        DataError: it does not; names the path.
    """
    for frame in media.frame_images():
        check_video(frame)
    where = media.path or "<video bytes>"
    if media.data is not None:
        empty = not media.data
    elif is_url(where):
        empty = _open(media).size == 0
    elif not os.path.exists(where):  # noqa: PTH110 - a million paths
        raise DataError(where, "no such file", "fix the path or the media root")
    else:
        check_regular_file(where)
        path = Path(where)
        empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
    if empty:
        raise DataError(where, "the video is empty", "replace the file or remove the row")
