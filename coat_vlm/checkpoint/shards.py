"""The tensors of a checkpoint: safetensors files, and per rank an index that says what they hold.

``rank-00000.json`` lists the partitions that the rank saved: the pieces of parameters in them, the
optimizer's state, and the files. So any number of ranks at any ZeRO stage can read what any other
saved, and nothing in a checkpoint is a pickle.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coat_vlm.checkpoint.partitions import Piece
from coat_vlm.optim.state import by_element

WEIGHT = "weight"
"""The key of a partition's weights; the other keys are those of the optimizer's state."""

SHARD_BYTES = 1 << 31
"""A file is closed when it holds this much: what a rank copies to its memory at a time."""


class ShardWriter:
    """Writes what one rank saves.

    Args:
        folder: the checkpoint.
        rank: names the files.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._name = f"rank-{rank:05d}"
        self._partitions: list[dict[str, Any]] = []
        self._pending: dict[str, Tensor] = {}
        self._num_files = 0

    def add(
        self,
        pieces: tuple[Piece, ...],
        weight: Tensor,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a partition.

        Args:
            pieces: which elements of which parameters.
            weight: their values; a padded tensor, or the parameter itself.
            state: the optimizer's state; none before its first step, and for what is frozen.

        Raises:
            OSError: a file could not be written.
        """
        number, state = len(self._partitions), state or {}
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        elements = by_element(tensors, weight.numel())
        tensors[WEIGHT] = weight
        for key, tensor in tensors.items():
            flat = tensor.detach().to("cpu", copy=True).contiguous()
            self._pending[f"{number}.{key}"] = (
                flat.view(-1) if tensor.ndim or key == WEIGHT else flat
            )
        self._partitions.append(
            {
                "pieces": pieces,
                "size": weight.numel(),
                "elements": sorted(elements),
                "others": sorted(tensors.keys() - elements - {WEIGHT}),
                "on_cpu": sorted(k for k, v in tensors.items() if not v.ndim and not v.is_cuda),
                "numbers": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
                "file": f"{self._name}-{self._num_files:03d}.safetensors",
            }
        )
        if sum(t.numel() * t.element_size() for t in self._pending.values()) >= SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the index.

        Raises:
            OSError: a file could not be written.
        """
        if self._pending:
            self._flush()
        text = json.dumps({"partitions": self._partitions})
        (self._folder / f"{self._name}.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        path = self._folder / f"{self._name}-{self._num_files:03d}.safetensors"
        save_tensors(self._pending, path)
        self._pending = {}
        self._num_files += 1


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; OSError also where safetensors says it otherwise."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # also for a full disk
        raise OSError(f"{path.name}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPartition:
    """A partition in a checkpoint."""

    number: int
    pieces: tuple[Piece, ...]
    size: int
    """Elements of its weights, with padding."""
    elements: frozenset[str]
    """Keys of the state with one entry per element."""
    others: frozenset[str]
    """Its other tensors."""
    on_cpu: frozenset[str]
    """Those without dimensions that were on the CPU."""
    numbers: Mapping[str, Any]
    """What is no tensor."""
    file: Any = field(repr=False)
    """The open safetensors file."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the state's tensors."""
        return self.elements | self.others

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, as it was saved: flat, or without dimensions."""
        return self.file.get_tensor(f"{self.number}.{key}")

    def read(self, key: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Some entries of a flat tensor."""
        return self.file.get_slice(f"{self.number}.{key}")[start:stop].to(device=device)


class Shards:
    """All partitions of a checkpoint, read where they are needed.

    Args:
        checkpoint: the folder; its files are trusted to be whole.
    """

    def __init__(self, checkpoint: Path) -> None:
        files: dict[str, Any] = {}
        self._by_pieces: dict[tuple[Piece, ...], SavedPartition] = {}
        self._by_name: dict[str, list[tuple[Piece, SavedPartition]]] = {}
        for index in sorted(checkpoint.glob("rank-*.json")):
            listed = json.loads(index.read_text(encoding="utf-8"))["partitions"]
            for number, entry in enumerate(listed):
                name = entry["file"]
                if name not in files:
                    files[name] = safe_open(str(checkpoint / name), "pt")
                partition = SavedPartition(
                    number=number,
                    pieces=tuple(Piece(*piece) for piece in entry["pieces"]),
                    size=entry["size"],
                    elements=frozenset(entry["elements"]),
                    others=frozenset(entry["others"]),
                    on_cpu=frozenset(entry["on_cpu"]),
                    numbers=entry["numbers"],
                    file=files[name],
                )
                if partition.pieces:
                    self._by_pieces[partition.pieces] = partition
                for piece in partition.pieces:
                    self._by_name.setdefault(piece.name, []).append((piece, partition))

    def same(self, pieces: tuple[Piece, ...], size: int) -> SavedPartition | None:
        """The saved partition of this size with exactly these pieces at the same places."""
        found = self._by_pieces.get(pieces)
        return found if found is not None and found.size == size else None

    def overlaps(self, wanted: Piece) -> Iterator[tuple[SavedPartition, int, int, int]]:
        """Where the elements of a piece are saved.

        Yields:
            A saved partition, the first element in it, the first in ``wanted``, and how many.

        Raises:
            ValueError: some are not saved.
        """
        left = wanted.size
        for piece, partition in self._by_name.get(wanted.name, []):
            first = max(piece.start, wanted.start)
            count = min(piece.start + piece.size, wanted.start + wanted.size) - first
            if count > 0:
                left -= count
                yield partition, piece.offset + first - piece.start, first - wanted.start, count
        if left:
            raise ValueError(
                f"the checkpoint lacks {left} of {wanted.size} elements of {wanted.name}; take an "
                "earlier one: delete or move this one away"
            )

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole parameter as it was saved: where it trains, its master weights."""
        size = torch.Size(shape).numel()
        parts = {
            place: partition.read(WEIGHT, first, first + count)
            for partition, first, place, count in self.overlaps(Piece(name, 0, size, 0))
        }
        return torch.cat([parts[place] for place in sorted(parts)]).view(shape)
