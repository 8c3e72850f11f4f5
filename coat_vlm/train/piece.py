"""A run of elements of one parameter, and where it lies in a flat tensor."""

from typing import NamedTuple


class Piece(NamedTuple):
    """Elements ``start`` to ``start + size`` of a flattened parameter."""

    name: str
    """The parameter's."""
    start: int
    """First element, counted in the parameter."""
    size: int
    """Number of elements."""
    offset: int
    """Where they begin in the tensor that holds them."""
