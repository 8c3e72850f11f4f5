"""Folders that are damaged or half replaced: found, named, and put back."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from coat_vlm.checkpoint.atomic_folder import recover_folders, write_folder
from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.checkpoint.manifest import FolderFiles, write_manifest
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.distributed import ALONE


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Whole checkpoint-like folders, oldest first."""
    for step in (1, 2, 3):

        def write(folder: Path, step: int = step) -> None:
            (folder / "model").mkdir()
            (folder / "model" / "weights").write_bytes(bytes([step]) * 1000)
            (folder / "trainer.json").write_text("{}")

        write_folder(tmp_path / f"step-{step:08d}", ALONE, write)
    return sorted(tmp_path.glob("step-*"))


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def test_a_flipped_bit_and_a_truncated_file_are_named_and_passed_over(
    three: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = three[0].parent
    assert find_checkpoint(folder).path == three[2]
    assert not caplog.records
    flip_bit(three[2] / "model" / "weights", 777)
    assert find_checkpoint(folder).path == three[1]
    assert "step-00000003 is not used: model/weights is damaged" in caplog.text
    caplog.clear()
    (three[1] / "trainer.json").write_text("{")
    assert find_checkpoint(folder).path == three[0]
    assert "step-00000002 is not used: trainer.json has 1 bytes, not 2" in caplog.text
    (three[0] / "model" / "weights").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint .* is complete.*3: model/weights.*delete"):
        find_checkpoint(folder)


def test_a_file_that_the_disk_damaged_while_it_was_written_is_found(tmp_path: Path) -> None:
    """The hash is of what was to be written, not of what the disk returns."""
    writer = FolderFiles(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield bytes([1]) * 100_000
        os.truncate(tmp_path / "weights", 0)  # zeros, once the next chunk is written
        yield bytes([2]) * 100_000

    writer.write("weights", chunks())
    write_manifest(tmp_path, writer.entries)
    assert (tmp_path / "weights").stat().st_size == 200_000
    assert find_damage(tmp_path) == "weights is damaged: its SHA-256 differs from manifest.json"


def test_what_was_moved_away_for_a_folder_that_never_came_is_put_back(three: list[Path]) -> None:
    three[2].rename(three[2].with_name(f".old-{three[2].name}"))
    (three[0].with_name(f".old-{three[0].name}")).mkdir()
    recover_folders(three[0].parent)
    assert find_checkpoint(three[0].parent).path == three[2]
    assert sorted(three[0].parent.iterdir()) == three


def test_a_failed_replacement_leaves_the_earlier_folder(three: list[Path]) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"step-00000003 could not be saved: .*No space.*unchanged"):
        write_folder(three[2], ALONE, write)
    assert find_checkpoint(three[0].parent).path == three[2]
    assert sorted(three[0].parent.iterdir()) == three


def test_a_temporary_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    """The tokenizers package raises an Exception of no class of its own."""

    def write(folder: Path) -> None:
        folder.rmdir()
        Tokenizer(BPE()).save(str(folder / "tokenizer.json"))

    with pytest.raises(OSError, match=r"tokenizer could not be saved: .*write elsewhere"):
        write_folder(tmp_path / "tokenizer", ALONE, write)
