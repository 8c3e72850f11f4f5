"""A model with one of several adapters (``coat-vlm eval --adapters``)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coat_eval.adapter import ModelAdapter, PromptEncoder
from coat_eval.files import folder_sha256
from coat_vlm.model.adapter_folder import merged_adapter, read_adapter_config


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A base model with an adapter merged into its weights; see :class:`ModelAdapter`."""

    base: ModelAdapter
    folder: Path
    """The adapter folder."""

    @property
    def model(self) -> Any:
        """The model."""
        return self.base.model

    @property
    def encoder(self) -> PromptEncoder:
        """The encoder of the base model."""
        return self.base.encoder

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the base model with the hash of the adapter."""
        return {**self.base.identity, "adapter_sha256": folder_sha256(self.folder)}

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.base.device

    def answer(self, batch: Any, max_new_tokens: int) -> list[str]:
        """See :class:`ModelAdapter`."""
        return self.base.answer(batch, max_new_tokens)

    def compute_losses(self, batch: Any) -> list[float]:
        """See :class:`ModelAdapter`."""
        return self.base.compute_losses(batch)


@contextmanager
def adapted(base: ModelAdapter, folder: Path | None, name: str) -> Iterator[ModelAdapter]:
    """Merge an adapter into a model until the context ends.

    Args:
        base: the model.
        folder: the adapter folder; None for the model itself.
        name: folder or name that the model was loaded from.

    Raises:
        ValueError: see :func:`coat_vlm.model.adapter_folder.merged_adapter`.
    """
    if folder is None:
        yield base
        return
    with merged_adapter(base.model, folder, name):
        yield AdaptedModel(base, folder)


def name_adapters(given: Sequence[str]) -> Mapping[str, Path]:
    """Return the adapter folders by the names of their output folders.

    Args:
        given: ``FOLDER``, whose name is that of the folder, or ``NAME=FOLDER``.

    Raises:
        ValueError: two adapters have the same name, a name is a path, or a folder has no adapter
            that :func:`coat_vlm.model.adapter_folder.merged_adapter` can merge.
    """
    folders: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        named = equals and not Path(text).exists()
        folder = Path(path if named else text)
        name = name if named else folder.resolve().name
        if not name or Path(name).name != name or name == "..":
            raise ValueError(f"--adapters {text}: {name!r} is not the name of a folder below --to")
        if name in folders:
            raise ValueError(
                f"--adapters: {folders[name]} and {folder} would both write to {name}: give them "
                f"names, as in {name}_2={folder}"
            )
        read_adapter_config(folder)
        folders[name] = folder
    return folders
