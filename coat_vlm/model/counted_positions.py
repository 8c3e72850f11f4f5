"""Spares a language model the search for packed sequences where there can be none.

Without a mask, models of transformers look whether ``position_ids`` start again within a row
(``find_packed_sequence_indices``). The answer decides on the CPU, so it waits for the GPU: once in
every forward pass, behind the vision tower. Positions that the model counted itself never start
again.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import masking_utils

_search = masking_utils.find_packed_sequence_indices
_here = threading.local()


@contextmanager
def counted_by_model(is_so: bool) -> Iterator[None]:
    """In here, and in this thread, positions were counted by the model, if ``is_so``."""
    before = getattr(_here, "counted", False)
    _here.counted = is_so
    try:
        yield
    finally:
        _here.counted = before


def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Transformers' function of that name, which is not asked where the answer is known.

    Args:
        position_ids: (B, T).

    Returns:
        (B, T), a number for each sequence of a row; None where each row is one.
    """
    if not torch.compiler.is_compiling() and getattr(_here, "counted", False):
        return None
    return _search(position_ids)


def register() -> None:
    """Put the function in the place of transformers' own."""
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
