"""Reads and writes the tensors of a checkpoint: safetensors files with a JSON index per rank.

``rank-00000.json`` lists the partitions that the rank saved, with the fragments of parameters, the
optimizer's state, and the files. Any number of ranks at any ZeRO stage can read the files of any
other, and no file of a checkpoint is a pickle.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from coat_kernels import join_master
from coat_vlm.checkpoint.manifest import FolderFiles, read_manifest
from coat_vlm.optim.state import LOW_BITS, by_element

WEIGHT = "weight"
"""The key of a partition's weights; the other keys are the optimizer's states."""

SHARD_BYTES = 1 << 31
"""Size from which the next tensors are written to another file."""

_INDEX = re.compile(r"rank-\d+\.json")


class Fragment(NamedTuple):
    """Elements ``start`` to ``start + size`` of a flattened parameter."""

    name: str
    """Name of the parameter."""
    start: int
    size: int
    offset: int
    """Index of the first element in the flat tensor of the partition."""


_Tensors = dict[str, Tensor]


class ShardWriter:
    """Collects the tensors of one rank, then writes them.

    ``copy`` returns the tensor to write, given its name in the files: a copy, so that training may
    go on before it is written. Default: the tensor itself.
    """

    def __init__(self, rank: int, copy: Callable[[str, Tensor], Tensor] | None = None) -> None:
        self._name = f"rank-{rank:05d}"
        self._copy = copy
        self._partitions: list[dict[str, Any]] = []
        self._files: list[_Tensors] = [{}]

    def add(
        self,
        fragments: tuple[Fragment, ...],
        weight: Tensor,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a partition with the optimizer's state, if there is one; ``weight`` may be padded."""
        number, state = len(self._partitions), state or {}
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        elements = by_element(tensors, weight.numel())
        tensors[WEIGHT] = weight
        if sum(t.numel() * t.element_size() for t in self._files[-1].values()) >= SHARD_BYTES:
            self._files.append({})
        for key, tensor in tensors.items():
            name = f"{number}.{key}"
            copied = tensor.detach() if self._copy is None else self._copy(name, tensor.detach())
            self._files[-1][name] = copied.reshape(-1) if tensor.ndim or key == WEIGHT else copied
        self._partitions.append(
            {
                "pieces": fragments,
                "size": weight.numel(),
                "elements": sorted(elements),
                "others": sorted(tensors.keys() - elements - {WEIGHT}),
                "on_cpu": sorted(k for k, v in tensors.items() if not v.ndim and not v.is_cuda),
                "numbers": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
                "file": self._file_name(len(self._files) - 1),
            }
        )

    def write(self, folder: FolderFiles) -> None:
        """Write the tensors and the index into a checkpoint."""
        for number, tensors in enumerate(self._files):
            if tensors:
                folder.write_tensors(self._file_name(number), tensors)
        index = json.dumps({"partitions": self._partitions})
        folder.write(f"{self._name}.json", [index.encode()])

    def _file_name(self, number: int) -> str:
        return f"{self._name}-{number:03d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPartition:
    """A partition in a checkpoint."""

    number: int
    fragments: tuple[Fragment, ...]
    size: int
    """Number of elements of the weights, including padding."""
    elements: frozenset[str]
    """Keys of the state's tensors with one entry per element, without the low bits."""
    low_bits: bool
    """Whether the weights are in BF16, and the low 16 bits of the master weights in the state."""
    others: frozenset[str]
    """Keys of the state's other tensors."""
    on_cpu: frozenset[str]
    """Keys of zero-dimensional tensors that were on the CPU."""
    numbers: Mapping[str, Any]
    """Entries of the state that are not tensors."""
    file: Any = field(repr=False)
    """The open safetensors file."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all tensors of the state."""
        return self.elements | self.others

    def tensor(self, key: str) -> Tensor:
        """Read a whole tensor: flat, or zero-dimensional; weights as :meth:`read` returns them."""
        if key == WEIGHT:
            return self.read(WEIGHT, 0, self.size)
        return self.file.get_tensor(f"{self.number}.{key}")

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        device: torch.device | None = None,
        *,
        master: bool = True,
    ) -> Tensor:
        """Read elements ``start`` to ``stop`` of a flat tensor.

        With ``master``, BF16 weights that have low bits are returned as FP32 master weights.
        """
        values = self.file.get_slice(f"{self.number}.{key}")[start:stop].to(device=device)
        if key == WEIGHT and master and self.low_bits:
            return join_master(values, self.read(LOW_BITS, start, stop, device))
        return values


class Shards:
    """All partitions of a checkpoint; tensors are read on demand and not verified."""

    def __init__(self, checkpoint: Path) -> None:
        files: dict[str, Any] = {}
        self._by_fragments: dict[tuple[Fragment, ...], SavedPartition] = {}
        self._by_name: dict[str, list[tuple[Fragment, SavedPartition]]] = {}
        # The manifest, not a listing of the folder: every rank must read the same files.
        indices = [name for name in read_manifest(checkpoint) if _INDEX.fullmatch(name)]
        for index in sorted(indices):
            text = (checkpoint / index).read_text(encoding="utf-8")
            listed = json.loads(text)["partitions"]
            for number, entry in enumerate(listed):
                name = entry["file"]
                if name not in files:
                    files[name] = safe_open(str(checkpoint / name), "pt")
                partition = SavedPartition(
                    number=number,
                    fragments=tuple(Fragment(*fragment) for fragment in entry["pieces"]),
                    size=entry["size"],
                    elements=frozenset(entry["elements"]) - {LOW_BITS},
                    low_bits=LOW_BITS in entry["elements"],
                    others=frozenset(entry["others"]),
                    on_cpu=frozenset(entry["on_cpu"]),
                    numbers=entry["numbers"],
                    file=files[name],
                )
                if partition.fragments:
                    self._by_fragments[partition.fragments] = partition
                for fragment in partition.fragments:
                    self._by_name.setdefault(fragment.name, []).append((fragment, partition))

    def find_identical(self, fragments: tuple[Fragment, ...], size: int) -> SavedPartition | None:
        """Return the saved partition with this size and exactly these fragments, or None."""
        found = self._by_fragments.get(fragments)
        return found if found is not None and found.size == size else None

    def find_overlaps(self, wanted: Fragment) -> Iterator[tuple[SavedPartition, int, int, int]]:
        """Yield the saved partitions that contain elements of a fragment.

        Each with the index of its first such element, the index of that element in ``wanted``, and
        their number. Raises ValueError if elements are missing.
        """
        left = wanted.size
        for fragment, partition in self._by_name.get(wanted.name, []):
            first = max(fragment.start, wanted.start)
            count = min(fragment.start + fragment.size, wanted.start + wanted.size) - first
            if count > 0:
                left -= count
                yield (
                    partition,
                    fragment.offset + first - fragment.start,
                    first - wanted.start,
                    count,
                )
        if left:
            raise ValueError(
                f"the checkpoint lacks {left} of {wanted.size} elements of {wanted.name}; delete "
                "or move the checkpoint to resume from an earlier one"
            )

    def read_values(self, wanted: Fragment, *, master: bool = True) -> Tensor:
        """Read the saved elements of a fragment, flat: master weights for trained parameters.

        Without ``master``, weights that have low bits are read as they are, in BF16.
        """
        parts = {
            position: partition.read(WEIGHT, first, first + count, master=master)
            for partition, first, position, count in self.find_overlaps(wanted)
        }
        if not parts:  # a parameter without elements: the registers of a tower that has none
            return torch.empty(0)
        return torch.cat([parts[position] for position in sorted(parts)])

    def read_parameter(self, name: str, shape: tuple[int, ...], *, master: bool = True) -> Tensor:
        """Read a whole parameter; see :meth:`read_values`."""
        whole = Fragment(name, 0, torch.Size(shape).numel(), 0)
        return self.read_values(whole, master=master).view(shape)
