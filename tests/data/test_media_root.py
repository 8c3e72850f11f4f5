"""No path of a data file and no member of an archive leads out of the user's media folder."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from encoders import Tar, talk
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.media.root import MediaRoot
from coat_data.sample import DataError
from coat_data.tools.ingest import ingest
from coat_datasets.download import unpack


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """An image next to the media root, which no data file may reach."""
    (tmp_path / "root/frames").mkdir(parents=True)
    path = tmp_path / "secret.png"
    Image.new("RGB", (4, 4)).save(path)
    return path


def refused(root: Path, media: dict[str, Any], words: str, **options: Any) -> None:
    path = root / "a.json"
    path.write_text(json.dumps([talk(**media)]))
    with pytest.raises(DataError, match=words) as caught:
        SampleDataset(path, **options)[0]
    assert caught.value.where == f"{path}:1"


def test_paths_stay_below_the_root(secret: Path) -> None:
    root = secret.parent / "root"
    for name in ("../secret.png", "x/../../secret.png", str(secret), f"{root}x/a.png"):
        refused(root, {"image": name}, "leaves the media root")
        refused(root, {"video": name}, "leaves the media root")
    for place in ("memory://pictures/set", "https://host.org/set", root):
        for name in (
            "deep/../../secret.png", "FILE:///etc/secret.png", "ftp://host.org/a.png",
            "memory://pictures/set/../secret.png", "zip://a.png::file:///etc/secret.zip",
        ):  # fmt: skip
            refused(root, {"image": name}, "leaves the media root|URL", media_root=place)
    path = root / "a.json"
    path.write_text(json.dumps([talk(image=str(secret)), talk(image="x/../y/a.png")]))
    assert SampleDataset(path, "/")[0].media[0].path == str(secret)
    assert SampleDataset(path)[1].media[0].path == str(root / "y/a.png")


def test_links_out_of_the_root_are_refused_unless_allowed(secret: Path) -> None:
    root = secret.parent / "root"
    (root / "link.png").symlink_to(secret)
    (root / "up").symlink_to(secret.parent)
    (root / "frames/0.png").symlink_to(secret)
    for media in ({"image": "link.png"}, {"image": "up/secret.png"}, {"video": "frames"}):
        refused(root, media, "is a link to .*outside of the media root")
        path = root / "a.json"
        assert SampleDataset(path, follow_links=True)[0].media[0].path
    (root / "inside.png").symlink_to(root / "a.json")  # stays below
    assert MediaRoot(root).file("inside.png", "w") == str(root / "inside.png")
    linked = secret.parent / "linked"
    linked.symlink_to(root)  # the root itself may be a link
    assert MediaRoot(linked).file("b.png", "w") == str(linked / "b.png")


def test_a_stored_path_cannot_leave_either(secret: Path, tmp_path: Path) -> None:
    root = secret.parent / "root"
    Image.new("RGB", (4, 4)).save(root / "a.png")
    (root / "a.json").write_text(json.dumps([talk(image="a.png")]))
    out = tmp_path / "out"
    ingest(root / "a.json", out)
    shard = out / "part-00000.parquet"
    table = pq.read_table(shard).to_pylist()
    table[0]["media"][0]["path"] = "../secret.png"
    pq.write_table(pyarrow.Table.from_pylist(table, pq.read_schema(shard)), shard)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["shards"][0]["size"] = shard.stat().st_size
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="leaves the media root"):
        SampleDataset(out)[0]


@pytest.mark.parametrize("name", ["/evil.png", "a/../../evil.png"])
def test_members_of_a_tar_cannot_leave_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(DataError, match="leaves the archive"):
        SampleDataset(path)


def test_links_in_a_tar_and_damaged_tars_are_refused(tar: Tar, tmp_path: Path) -> None:
    members = {"a.png": b"1" * 2000, "a.txt": b"one", "b.png": b"2", "b.txt": b"B"}
    path = tar(tmp_path / "a.tar", members)
    whole = path.read_bytes()
    header_of_b = whole.index(b"b.png")
    damaged = bytearray(whole)
    damaged[header_of_b + 10] = 7  # tarfile would take it for the end of the archive
    path.write_bytes(damaged)
    for in_order in (False, True):
        try:
            found = list(SampleDataset(path, in_order=in_order).stream())
        except DataError as error:
            found = [error]
        assert isinstance(found[-1], DataError)
        assert f"byte {header_of_b} is damaged" in found[-1].problem
    path.write_bytes(whole[:1500])
    with pytest.raises(DataError, match=r"is truncated in 'a\.png'"):
        SampleDataset(path)
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="is a link to '/etc/passwd'"):
        SampleDataset(path)


def test_downloaded_archives_cannot_leave_their_folder(tmp_path: Path) -> None:
    bad_zip, bad_tar = tmp_path / "a.zip", tmp_path / "b.tar.gz"
    with zipfile.ZipFile(bad_zip, "w") as file:
        file.writestr("../evil.txt", "x")
    with tarfile.open(bad_tar, "w:gz") as file:
        file.addfile(tarfile.TarInfo("../evil.txt"), io.BytesIO())
    for archive in (bad_zip, bad_tar):
        with pytest.raises(DataError):
            unpack(archive, tmp_path / "into")
    assert not (tmp_path / "evil.txt").exists()


def test_downloaded_archives_have_a_limit(tmp_path: Path) -> None:
    big_zip, big_tar = tmp_path / "a.zip", tmp_path / "b.tar.gz"
    content = bytes(65 << 20)
    with zipfile.ZipFile(big_zip, "w", zipfile.ZIP_DEFLATED) as file:
        for name in "abc":
            file.writestr(name, content[: 30 << 20])
    with tarfile.open(big_tar, "w:gz") as file:
        info = tarfile.TarInfo("a")
        info.size = len(content)
        file.addfile(info, io.BytesIO(content))
    for archive in (big_zip, big_tar):
        assert archive.stat().st_size < 1 << 18
        with pytest.raises(DataError, match="bytes unpack to more than 67108864 -> if you trust"):
            unpack(archive, tmp_path / "into")
    written = sum(path.stat().st_size for path in (tmp_path / "into").iterdir())
    assert written <= 60 << 20
