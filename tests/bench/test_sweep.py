"""The sweep over tiles: what is tried, and that each tile computes the same."""

from typing import Any

import numpy as np
import pytest
import torch
from triton.errors import TritonError

from coat_bench import kernels as bench
from coat_bench.cases import Case, Draw, cases
from coat_bench.check import assert_matches, results
from coat_bench.kernels import (
    OF_ROWS,
    ROWS,
    TILED,
    TILES,
    KernelRow,
    format_sweep,
    sweep,
    tiles_of,
)
from coat_bench.shapes import LayerShape
from coat_cli.main import main
from coat_kernels import OPS
from coat_kernels.launch import TILE, Tile, chosen, forced_tile, tiled

CPU = torch.device("cpu")
SMALL = LayerShape("small", "siglip", 64, 304, 4, 4, 3, 7)
SWEPT = [case for case in cases(SMALL) if tiles_of(case.op)]


def test_all_kernels_with_a_choice_are_swept():
    assert {*TILED, *OF_ROWS} == {case.op for case in SWEPT} <= set(OPS)
    assert TILE in TILES
    assert tiles_of("rope") == ()


def test_a_forced_tile_holds_until_the_end_of_its_scope():
    tile = Tile(32, 64, 4)
    with forced_tile(tile):
        assert chosen(TILE) == tile
        with forced_tile(TILE):
            assert chosen(tile) == TILE
        grid, options = tiled(100, 100)
        assert (grid, options["tiles_n"], options["num_warps"]) == ((8,), 2, 4)
    assert chosen(TILE) == TILE
    assert tiled(100, 100)[0] == (2,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_on_a_gpu checks it there")
@pytest.mark.parametrize("case", SWEPT, ids=lambda case: f"{case.op}-{case.variant}")
def test_tiles_do_not_change_what_is_computed(case: Case):
    args = case.arguments(Draw(CPU))
    expected = results(case.op, OPS[case.op].reference, args)
    tiles = {(tile.rows, tile.columns): tile for tile in tiles_of(case.op)}
    for tile in (tiles[min(tiles)], tiles[max(tiles)]):  # the interpreter knows no warps
        with forced_tile(tile), np.errstate(all="ignore"):
            assert_matches(case.op, results(case.op, OPS[case.op].triton, args), expected)


def test_tiles_that_are_wrong_or_too_large_get_no_time(monkeypatch: pytest.MonkeyPatch):
    def disagreement(*_: Any) -> str:
        tile = chosen(TILE)
        if tile.columns == 256:
            raise TritonError("out of resource")
        return "not correct" if tile.rows == 32 else ""

    monkeypatch.setattr(bench, "require_gpu", lambda _: None)
    monkeypatch.setattr(bench, "DEVICE", CPU)
    monkeypatch.setattr(bench, "origin", lambda: ("2026-01-31", "abc", "GPU", "2", "3"))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda _: 1000.0)
    monkeypatch.setattr(bench, "disagreement", disagreement)
    monkeypatch.setattr(bench, "median_us", lambda _: float(chosen(Tile(1, 1)).columns or 1))
    found = sweep(SMALL, ["dequantize_group"])
    assert [row.us for row in found.pop(None)] == [1.0]
    expected = {tile: None if tile.rows == 32 else tile.columns for tile in TILES}
    assert {tile: row.us for tile, (row,) in found.items()} == expected
    assert {row.op for row in sweep(SMALL)[None]} == {*TILED, *OF_ROWS}


def test_the_tables_have_a_column_per_tile():
    def row(op: str, variant: str, us: float | None) -> KernelRow:
        return KernelRow("2026-01-31", "abc", "GPU", "2", "3", "small", op, variant, us=us)

    found = {
        None: [row("quantize_group", "x", 12.0), row("norm_bwd", "y", 7.0)],
        TILES[0]: [row("quantize_group", "x", None)],
        TILES[1]: [row("quantize_group", "x", 11.0)],
        ROWS[0]: [row("norm_bwd", "y", 6.5)],
    }
    tiled_table, rows_table = format_sweep(found).split("\n\n")
    head, _, line = tiled_table.splitlines()
    assert head.startswith("| op | variant | default us | 32 x 64, 4 warps | 32 x 64, 8 warps |")
    assert line.startswith("| quantize_group | x | 12.0 | - | 11.0 | - |")
    head, _, line = rows_table.splitlines()
    assert head.startswith("| op | variant | default us | a row, 2 warps | a row, 4 warps |")
    assert line.startswith("| norm_bwd | y | 7.0 | 6.5 | - |")
    assert format_sweep({}) == ""


def test_what_has_no_tiles_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="rope, adamw_step: no choice of tiles; sweep quantize_t"):
        sweep(SMALL, ["rope", "norm_bwd", "adamw_step"])
    with pytest.raises(ValueError, match="has no case of fast"):
        sweep(SMALL, ["fast"])
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--sweep", "--csv", "x.csv"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_default_tiles_are_right():
    found = sweep(SMALL, ["quantize_tensor", "activation_bwd"])
    for default, same in zip(found[None], found[TILE], strict=True):
        assert default.us
        assert same.us
