"""A model with one of several adapters (``coat-vlm eval --adapters``)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coat_eval.adapter import ModelAdapter
from coat_eval.files import folder_sha256
from coat_vlm.config.stage import check_folder_name
from coat_vlm.model.adapter_folder import merged_adapter, read_adapter_config


@contextmanager
def adapted(
    base: ModelAdapter, folder: Path | None, name: str, *, own_size: bool = True
) -> Iterator[ModelAdapter]:
    """Merge the adapter in a folder, if one is given, into a model until the context ends.

    ``own_size``: images get the size with which the adapter was trained, if its folder has it.
    """
    if folder is None:
        yield base
        return
    images: Any = getattr(base.encoder, "image_processor", None)
    before = getattr(images, "size", None)
    if own_size and before is not None and (folder / "preprocessor_config.json").is_file():
        images.size = type(images).from_pretrained(folder).size
    try:
        with merged_adapter(base.model, folder, name):
            yield base.with_identity(
                lambda: {**base.identity, "adapter_sha256": folder_sha256(folder)}
            )
    finally:
        if before is not None:
            images.size = before


def name_adapters(given: Sequence[str]) -> Mapping[str, Path]:
    """Return the adapter folders (``[NAME=]FOLDER``) by their output's names; ValueError."""
    folders: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        named = equals and not Path(text).exists()
        folder = Path(path if named else text)
        name = name if named else folder.resolve().name
        check_folder_name(name)
        if name in folders:
            raise ValueError(
                f"--adapters: {folders[name]} and {folder} would both write to {name}: give them "
                f"names, as in {name}_2={folder}"
            )
        read_adapter_config(folder)
        folders[name] = folder
    return folders
