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

    ``own_size``: images and videos are resized and sampled as the adapter was trained, if its
    folder says how.
    """
    if folder is None:
        yield base
        return
    before: list[tuple[Any, dict[str, Any]]] = []
    for kind, file in (("image", ""), ("video", "video_")):
        part: Any = getattr(base.encoder, f"{kind}_processor", None)
        if own_size and part is not None and (folder / f"{file}preprocessor_config.json").is_file():
            before.append((part, {**vars(part)}))
            vars(part).update(vars(type(part).from_pretrained(folder)))
    try:
        with merged_adapter(base.model, folder, name):
            yield base.with_identity(
                lambda: {**base.identity, "adapter_sha256": folder_sha256(folder)}
            )
    finally:
        for part, settings in before:
            vars(part).update(settings)


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
