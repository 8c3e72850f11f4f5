"""Images and videos by URL: whole, or as much as their header needs.

A medium's address comes from a row (``https://...``), or from a path below a media root that is an
address. It is read anew each time: nothing is kept on this machine. Whatever fails is a
:class:`DataError` that names the address, so that one dead link is one bad row.
"""

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from coat_data.containers.remote_file import (
    Blocks,
    RangeFile,
    RemoteFile,
    fetch,
    is_url,
    unreachable,
)
from coat_data.sample import DataError, Media

TIMEOUT_S = 20.0
"""Without a byte from the server, in seconds."""
WAITS_S = (0.5, 2.0)
"""Before it is tried again, in seconds; fewer than for shards, as links in rows may be dead."""
LIMIT_S = 300.0
"""For the whole file over http, in seconds: a server may send a byte now and then."""
LARGEST_BYTES = 2 << 30
"""Of a file over http: it is held in memory."""

_PIECES = {"image": (1 << 16, 4), "video": (1 << 20, 16)}
"""Bytes of a piece, and the pieces after which a header is read from the whole file."""

T = TypeVar("T")


def fetched(media: Media) -> Media:
    """``media`` with the bytes of its file if that has an address; else as it is.

    Raises:
        DataError: it cannot be read; names the address.
    """
    if media.data is not None or media.path is None or not is_url(media.path):
        return media
    return dataclasses.replace(media, data=_whole(media.path))


def header_of(media: Media) -> BinaryIO:
    """The file at the address ``media.path``, of which only what is asked for is read.

    Where the server answers no ranges, or much is asked for, the whole file is read.

    Raises:
        DataError: it cannot be read; names the address. The same holds for reading.
    """
    url = media.path or ""
    file = _named(url, lambda: _file(url))
    if not file.seekable or file.size is None:
        return io.BytesIO(_whole(url))
    size = file.size
    piece, most = _PIECES[media.kind]
    pieces: dict[int, bytes] = {}

    def read_at(start: int, stop: int) -> bytes:
        nonlocal piece
        if start // piece not in pieces and len(pieces) == most:
            piece = size
            pieces.clear()
            pieces[0] = _whole(url)
        number, offset = divmod(start, piece)
        if number not in pieces:
            pieces[number] = _named(url, lambda: file.range(number * piece, piece))
        data = pieces[number][offset : offset + stop - start]
        if not data:
            raise DataError(url, "breaks off", "copy the file again")
        return data

    return cast(BinaryIO, RangeFile(size, read_at))


def _file(url: str) -> RemoteFile:
    return RemoteFile(url, Blocks(), timeout_s=TIMEOUT_S, waits_s=WAITS_S)


def _whole(url: str) -> bytes:
    return _named(
        url,
        lambda: fetch(
            url,
            timeout_s=TIMEOUT_S,
            waits_s=WAITS_S,
            limit_s=LIMIT_S,
            limit_bytes=LARGEST_BYTES,
        ),
    )


def _named(url: str, read: Callable[[], T]) -> T:
    """What ``read`` gives; the errors of networks, servers and odd addresses as a DataError."""
    try:
        return read()
    except DataError:
        raise
    except Exception as error:  # also ValueError of host names, and whatever fsspec's packages have
        raise unreachable(url, error) from error


def check_video(media: Media) -> None:
    """Check that the file, or the folder of frames, is there and not empty.

    Raises:
        DataError: it is not; names the path.
    """
    where = media.path or "<video bytes>"
    if media.data is not None:
        empty = not media.data
    elif is_url(where):
        empty = _named(where, lambda: _file(where)).size == 0
    elif not os.path.exists(where):  # noqa: PTH110 - a million paths
        raise DataError(where, "no such file", "fix the path or the media root")
    else:
        path = Path(where)
        empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
    if empty:
        raise DataError(where, "the video is empty", "replace the file or remove the row")
