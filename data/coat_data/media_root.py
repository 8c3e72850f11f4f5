"""The folder that media paths start from, and the guard that no path leaves it."""

import functools
import os
from pathlib import Path

from coat_data.sample import DataError


class MediaRoot:
    """Turns the media paths of a data file into absolute paths below one folder.

    A data file comes from somebody else: ``../../secret.png``, an absolute path or a link that was
    unpacked with the images must not make a training set of the user's other files.

    Args:
        folder: absolute folder.
        follow_links: allow links below the folder that lead out of it; for folders that the user
            has linked together.
    """

    def __init__(self, folder: str | Path, *, follow_links: bool = False) -> None:
        self.folder = Path(os.path.normpath(folder))
        self.follow_links = follow_links
        self._folder = str(self.folder)
        self._real_folder = os.path.realpath(folder)

    def file(self, name: str, where: str) -> str:
        """The absolute path of ``name``; it need not exist.

        Raises:
            DataError: the path leaves the folder, by itself or through a link.
        """
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

    def _check_links(self, path: str, name: str, where: str) -> None:
        real = _real_folder(os.path.dirname(path))  # noqa: PTH120
        if os.path.islink(path):  # noqa: PTH114
            real = os.path.realpath(path)
        outside = None if _is_below(real, self._real_folder) else real
        if outside is None and os.path.isdir(path):  # noqa: PTH112 - frames of a video
            outside = next(
                (found for found in _links(path) if not _is_below(found, self._real_folder)), None
            )
        if outside is not None:
            raise DataError(
                where,
                f"the media path {name!r} is a link to {outside}, outside of the media root "
                f"{self._folder}",
                "copy the files there, or set follow_links if you made the link yourself",
            )


@functools.lru_cache(maxsize=4096)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _links(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
