"""Downloads known public data sets and benchmarks from the Hugging Face Hub, or by URL.

``data/mixtures/NAME.yaml`` lists the repositories of a set, their licenses and archives, and the
resulting sources, which a download writes to ``OUT/NAME.yaml`` (:mod:`coat_data.lists`).
"""

import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from coat_data.containers.http_file import open_http
from coat_data.sample import DataError
from coat_data.saved_files import check_outputs, replace_file

_ASK_S = 10.0
FOLDER = Path(__file__).resolve().parents[1] / "mixtures"
"""The mixture files of a checkout; an installed package has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """One dataset repository on the Hub."""

    repo: str  # owner/name, or the URL of a single file
    license: str
    files: tuple[str, ...]
    unpack: Mapping[str, str] = field(default_factory=dict)
    """Pattern of archives -> folder to unpack them into, both below the repository's folder."""
    md5: str = ""  # published checksum of a single file, in hex

    @property
    def folder(self) -> str:
        """Folder of the repository below the download folder."""
        return self.repo.split("/")[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMixture:
    """A data set that can be downloaded by name."""

    name: str
    about: str
    hub: tuple[Repository, ...]
    sources: tuple[Mapping[str, Any], ...]
    """Entries of a native mixture file, with paths relative to the download folder."""
    notes: tuple[str, ...]


def _repository(entry: Mapping[str, Any]) -> Repository:
    return Repository(**{**entry, "files": tuple(entry["files"])})


_LISTED = resources.files("coat_datasets").joinpath("benchmarks.yaml").read_text(encoding="utf-8")
BENCHMARKS: Mapping[str, Repository] = {
    name: _repository(entry) for name, entry in yaml.safe_load(_LISTED).items()
}
"""The official benchmarks, by the name for ``coat-vlm eval --tasks``."""


def describe_benchmark(name: str) -> str:
    """Describe what :func:`download_benchmark` would fetch, one line per property."""
    one = BENCHMARKS[name]
    lines = [
        f"from: {one.repo}" if one.md5 else f"from: {one.repo}, a data set of the Hugging Face Hub",
        f"files: {', '.join(one.files)}",
        *(f"unpacked: {pattern} into {target}/" for pattern, target in one.unpack.items()),
        f"license: {one.license}",
        f"checksum: MD5 {one.md5}" if one.md5 else _ask_for_revision(one),
        "note: our tests run without a network and do not cover this download",
    ]
    return "\n".join(lines)


def _ask_for_revision(repository: Repository) -> str:
    """Return the revision on the Hub, and number and size of the files; or why it is not known."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    try:
        info = HfApi().dataset_info(repository.repo, files_metadata=True, timeout=_ASK_S)
    except Exception as error:  # of the HTTP library that this version of huggingface_hub uses
        return f"revision and size: not known, {repository.repo} cannot be asked: {_first(error)}"
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    found = list(filter_repo_objects(sizes, allow_patterns=list(repository.files)))
    total = sum(sizes[file] for file in found)
    return f"revision: {info.sha}, {len(found)} files, {total / 1e9:.3f} GB"


def _first(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def download_benchmark(name: str, out_dir: str | Path) -> Path:
    """Download a benchmark to ``out_dir/name``, where ``coat-vlm eval --tasks`` finds it.

    DataError if the host cannot be reached or the file has another checksum; says what to do.
    """
    repository, folder = BENCHMARKS[name], Path(out_dir) / name
    fetch = _fetch_file if repository.md5 else _fetch_and_unpack
    fetch(repository, folder)
    return folder


def known_mixtures() -> list[KnownMixture]:
    """Return all mixture files of the checkout, by name; none for an installed package."""
    return [read_mixture(path) for path in sorted(FOLDER.glob("*.yaml"))]


def read_mixture(path: Path) -> KnownMixture:
    """Read a mixture file with its ``hub`` entries."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return KnownMixture(
            name=path.stem,
            about=str(content["about"]),
            hub=tuple(map(_repository, content["hub"])),
            sources=tuple(content["sources"]),
            notes=tuple(content.get("notes") or ()),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(
            str(path),
            f"is not a mixture to download: {type(error).__name__}: {error}",
            "give it about, hub (repo, license, files) and sources",
        ) from error


def download(name: str, out_dir: str | Path) -> tuple[Path, tuple[str, ...]]:
    """Download one of :func:`known_mixtures`, or a mixture file; existing files are kept."""
    if name.endswith((".yaml", ".yml")):
        mixture = read_mixture(Path(name))
    else:
        known = {mixture.name: mixture for mixture in known_mixtures()}
        if name not in known:
            names = ", ".join(known) or "nothing (this package has no data/mixtures)"
            raise DataError(
                name,
                "is no known data set",
                f"choose from {names}, or give the path of a mixture file",
            )
        mixture = known[name]
    out_dir = Path(out_dir)
    path = out_dir / f"{mixture.name}.yaml"
    check_outputs([path], [name])
    for repository in mixture.hub:
        folder = out_dir / repository.folder
        _fetch_and_unpack(repository, folder)
    listing = yaml.safe_dump({"sources": [dict(source) for source in mixture.sources]})
    path.write_text(f"# {mixture.about}\n{listing}", encoding="utf-8")
    return path, mixture.notes


def _fetch_file(repository: Repository, folder: Path) -> None:
    """Download a single file, unless it is there, and check its MD5."""
    path = folder / repository.files[0]
    exists = path.exists()
    try:
        if not exists:
            with open_http(repository.repo) as answer, replace_file(path) as file:
                shutil.copyfileobj(answer, file, 1 << 20)
                if answer.length:
                    raise ConnectionError(f"it ended {answer.length} bytes early")
    except OSError as error:
        raise DataError(
            repository.repo,
            f"cannot be downloaded: {error}",
            f"where there is a network, run: curl -LO {repository.repo}; then copy the file to "
            f"{path} and run this again",
        ) from error
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "md5").hexdigest()
    if digest != repository.md5:
        if not exists:
            path.unlink()
        raise DataError(
            str(path),
            f"has the MD5 {digest}, not {repository.md5} as published",
            "delete it and download it again; if it still differs, the publisher has changed it, "
            "and scores belong to another version",
        )


def _fetch_and_unpack(repository: Repository, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        snapshot_download(
            repository.repo,
            repo_type="dataset",
            local_dir=folder,
            allow_patterns=list(repository.files),
        )
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        files = " ".join(f"--include '{pattern}'" for pattern in repository.files)
        if not any(folder.glob(repository.files[0])):  # not copied by hand either
            raise DataError(
                repository.repo,
                f"cannot be downloaded: {_first(error)}",
                f"where there is a network, run: hf download {repository.repo} --repo-type dataset "
                f"{files} --local-dir {folder}; then copy the folder here and run this again",
            ) from error
    for pattern, target in repository.unpack.items():
        for archive in tqdm(sorted(folder.glob(pattern)), f"unpack {repository.folder}"):
            unpack(archive, folder / target)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar once; a file next to it marks it as unpacked."""
    done = archive.with_name(f".{archive.name}.unpacked")
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    left = max_bytes = max(1 << 26, 250 * archive.stat().st_size)

    def check(member: Any, path: str) -> Any:
        nonlocal left
        left -= member.size if isinstance(member, tarfile.TarInfo) else member.file_size
        if left < 0:
            problem = f"its {archive.stat().st_size} bytes unpack to more than {max_bytes}"
            remedy = f"if you trust it, unpack it into {folder} and create the file {done}"
            raise DataError(str(archive), problem, remedy)
        return isinstance(member, tarfile.TarInfo) and tarfile.data_filter(member, path)

    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as file:
                for member in file.infolist():
                    name = member.filename
                    check(member, name)
                    if os.path.isabs(name) or ".." in Path(name).parts:  # noqa: PTH117 - no path yet
                        problem = f"the member {name!r} leaves the folder"
                        raise DataError(str(archive), problem, "do not use this archive")
                file.extractall(folder)
        else:
            with tarfile.open(archive) as file:
                file.extractall(folder, filter=check)
    except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
        raise DataError(
            str(archive), f"cannot be unpacked: {error}", "delete it and download it again"
        ) from error
    done.touch()
