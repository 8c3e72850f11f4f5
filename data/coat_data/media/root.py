"""Resolves media paths below the media root, and rejects paths outside it."""

import functools
import os
import posixpath
import stat
import urllib.parse
from pathlib import Path

from coat_data.containers.remote_file import is_url
from coat_data.sample import DataError

_SAFE_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"
"""Characters of a URL that are not quoted (RFC 3986); "%" in rows is taken as quoted."""


class MediaRoot:
    """Converts the media paths of a data file to absolute paths below one folder or URL.

    Data files come from third parties: with ``../../secret.png``, an absolute path or a link among
    the unpacked images, a data set could contain the user's other files. ``follow_links`` allows
    links that lead out of the folder.
    """

    def __init__(self, folder: str | Path, *, follow_links: bool = False) -> None:
        self.folder = folder.rstrip("/") if is_url(folder) else Path(os.path.normpath(folder))
        self.follow_links = follow_links
        self._folder = str(self.folder)
        self._real_folder = os.path.realpath(folder)

    def file(self, name: str, where: str) -> str:
        """Return the absolute path or the URL of ``name``; the file need not exist.

        DataError if the path leaves the folder, directly or through a link, or is a URL that
        is neither below the folder nor one of http or https.
        """
        if is_url(name):
            return self._address(name, where)
        if isinstance(self.folder, str):
            return self._below_address(self.folder, name, where)
        path = os.path.normpath(os.path.join(self._folder, name))  # noqa: PTH118 - once per medium
        if not _is_below(path, self._folder):
            raise DataError(
                where,
                f"the media path {name!r} leaves the media root {self._folder}",
                "use a path below the media root, or make a folder that holds all media (or /) "
                "the media root",
            )
        if not self.follow_links:
            self._check_links(path, name, where)
        return path

    def name(self, name: str) -> str:
        """Return the path of ``name`` for messages, without a check; nothing is opened."""
        return name if is_url(name) else os.path.join(self._folder, name)  # noqa: PTH118

    def _address(self, name: str, where: str) -> str:
        scheme, _, rest = name.partition("://")
        below = isinstance(self.folder, str) and name.startswith(f"{self.folder}/")
        clean = not {".", ".."} & set(rest.split("/")) and "::" not in rest
        if scheme.lower() in ("http", "https"):
            return urllib.parse.quote(f"{scheme.lower()}://{rest}", safe=_SAFE_CHARACTERS)
        if not (below and clean):  # with "::", fsspec would open another file system
            problem = f"the image or video is at {name[:80]!r}"
            remedy = "use http or https, or a URL below the media root, or download the file"
            raise DataError(where, problem, remedy)
        return name

    def _below_address(self, folder: str, name: str, where: str) -> str:
        path = posixpath.normpath(name)
        if path.startswith("/") or path.split("/")[0] == ".." or "::" in path:
            problem = f"the media path {name!r} leaves the media root {folder}"
            raise DataError(where, problem, "use a path below the media root, or a whole URL")
        http = folder.startswith(("http://", "https://"))
        return f"{folder}/{urllib.parse.quote(path) if http else path}"

    def _check_links(self, path: str, name: str, where: str) -> None:
        real = _real_folder(os.path.dirname(path))  # noqa: PTH120
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            mode = 0
        if stat.S_ISLNK(mode):
            real = os.path.realpath(path)
        outside = None if _is_below(real, self._real_folder) else real
        folder = not stat.S_ISREG(mode) and mode and os.path.isdir(path)  # noqa: PTH112
        if outside is None and folder:  # frames of a video
            with os.scandir(path) as entries:
                links = [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]
            outside = next((to for to in links if not _is_below(to, self._real_folder)), None)
        if outside is not None:
            raise DataError(
                where,
                f"the media path {name!r} is a link to {outside}, outside of the media root "
                f"{self._folder}",
                "copy the files there, or make a folder that holds both the media root; a source "
                "of training data may set follow_links, if you made the link yourself",
            )


@functools.lru_cache(maxsize=4096)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
