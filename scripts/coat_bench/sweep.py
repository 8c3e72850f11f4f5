"""``coat-vlm bench kernels --sweep``: how long an op takes with other tiles than its default.

From such a table the constants of ``coat_kernels`` are chosen; nothing is chosen while training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm
from triton.errors import TritonError

from coat_bench.cases import Arguments, Case, Draw
from coat_bench.clock import median_us
from coat_bench.kernels import DEVICE, chosen_cases, disagreement
from coat_bench.rows import number, require_gpu, table
from coat_bench.shapes import LayerShape
from coat_kernels import OPS
from coat_kernels.launch import Tile, forced_tile

TILED = (
    *("quantize_tensor", "quantize_gradient", "quantize_rows", "quantize_group"),
    *("dequantize_group", "transpose_codes"),
    *("norm_apply", "activation_stats", "activation_apply"),
    *("activation_bwd_stats", "activation_bwd"),
)
"""Ops whose kernels work on any tile of a matrix."""

OF_ROWS = ("norm_stats", "norm_bwd")
"""Ops whose kernels walk over whole rows."""

TILES = tuple(
    Tile(rows, columns, warps)
    for rows, columns in ((32, 64), (64, 64), (32, 128), (64, 128), (128, 64), (32, 256))
    for warps in (4, 8)
)
"""What is tried for :data:`TILED`."""

ROWS = tuple(Tile(1, 0, warps) for warps in (2, 4, 8, 16))
"""What is tried for :data:`OF_ROWS`; their columns are the matrix's."""


@dataclass(slots=True)
class Swept:
    """One case with all its tiles."""

    op: str
    variant: str
    default_us: float
    """With the tile that training uses."""
    us: dict[Tile, float | None] = field(default_factory=dict)
    """None where the tile is wrong, or too large for the GPU."""


def tiles_of(op: str) -> tuple[Tile, ...]:
    """What is tried for an op; nothing where it has no choice."""
    return TILES if op in TILED else ROWS if op in OF_ROWS else ()


def sweep(shape: LayerShape, ops: Sequence[str] = ()) -> list[Swept]:
    """Measure ops with every tile that computes the right thing.

    Args:
        shape: the block.
        ops: names of ops; all with a choice of tiles when empty.

    Raises:
        ValueError: an op is unknown or has no choice of tiles, or there is no GPU.
    """
    fixed = [op for op in ops if op in OPS and not tiles_of(op)]
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)}: no choice of tiles; sweep {', '.join((*TILED, *OF_ROWS))}"
        )
    pairs = [pair for pair in chosen_cases(shape, ops) if tiles_of(pair[0].op)]
    require_gpu("the speed of kernels is")
    found = []
    with tqdm(total=sum(len(tiles_of(case.op)) for case, _ in pairs), unit="tile") as progress:
        for case, sample in pairs:
            args = case.arguments(Draw(DEVICE))
            checked = sample.arguments(Draw(DEVICE))
            swept = Swept(case.op, case.variant, _time(case, args))
            found.append(swept)
            for tile in tiles_of(case.op):
                with forced_tile(tile):
                    swept.us[tile] = _time_if_right(case, args, checked)
                progress.update()
    return found


def _time(case: Case, args: Arguments) -> float:
    op = OPS[case.op]
    return median_us(lambda: op(*args))


def _time_if_right(case: Case, args: Arguments, checked: Arguments) -> float | None:
    try:
        return None if disagreement(case.op, checked) else _time(case, args)
    except (RuntimeError, TritonError):  # it needs more shared memory than there is
        return None


def format_sweep(found: Sequence[Swept]) -> str:
    """Markdown: for each kind of op a table of microseconds, one column per tile."""
    tables = []
    for ops, tiles in ((TILED, TILES), (OF_ROWS, ROWS)):
        lines = [
            [
                *(swept.op, swept.variant, number(swept.default_us, 1)),
                *(number(swept.us.get(tile), 1) for tile in tiles),
            ]
            for swept in found
            if swept.op in ops
        ]
        if lines:
            tables.append(table(["op", "variant", "default us", *map(_name, tiles)], lines))
    return "\n\n".join(tables)


def _name(tile: Tile) -> str:
    size = f"{tile.rows} x {tile.columns}" if tile.columns else "a row"
    return f"{size}, {tile.warps} warps"
