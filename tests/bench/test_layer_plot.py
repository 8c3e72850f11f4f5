"""The picture of the layer benchmark."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coat_bench.layer import LayerRow
from coat_bench.plots import draw_layers, find_last_run
from coat_bench.rows import append_rows, read_rows
from coat_bench.shapes import find_shape
from coat_cli.main import main
from coat_vlm.report.plots import COLORS, GREY

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "kernels" / "benchmarks" / "results" / "layer.csv"
LLAMA = find_shape("llama-2-7b")
WHERE = ("2026-01-31", "abc", "NVIDIA H200", "2.11.0", "3.6.0")
EAGER = LayerRow(
    *WHERE, "llama-2-7b", 16384, "hf_eager", "default", 10.0, 40.0, saved_mib=2900.0, length=2048
)
MAKE = "coat-vlm bench layer --csv"
COAT = replace(EAGER, implementation="coat_paper", fwdbwd_ms=20.0, saved_mib=1000.0)


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def bars(svg: Path) -> list[tuple[str, float]]:
    """Colour and length of each filled rectangle."""
    found = []
    for path, colour in re.findall(
        r'<path d="([^"]*)" clip-path[^>]* style="fill: (#\w+)"', svg.read_text()
    ):
        corners = [float(x) for x in re.findall(r"[ML] (\S+) ", path)]
        found.append((colour, max(corners) - min(corners)))
    return found


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [EAGER, replace(COAT, fwdbwd_ms=None, problem="RuntimeError: a, b")]
    append_rows(tmp_path / "layer.csv", rows)
    assert read_rows(tmp_path / "layer.csv", LayerRow, MAKE) == rows


def test_the_last_run_of_that_block_is_drawn() -> None:
    other = [
        replace(EAGER, attention="cudnn"),
        replace(EAGER, length=512),
        replace(EAGER, shape="x"),
    ]
    again = [replace(EAGER, commit="new"), replace(COAT, commit="new")]
    assert find_last_run([EAGER, COAT, *again, *other], LLAMA, "default") == again
    assert find_last_run([EAGER, COAT, *other], LLAMA, "cudnn") == other[:1]
    with pytest.raises(ValueError, match=r"no rows of llama-2-7b, 8 x 2,048 tokens.*flash"):
        find_last_run([EAGER, COAT], LLAMA, "flash")


def test_bars_are_as_long_as_what_they_show(tmp_path: Path) -> None:
    failed = replace(COAT, implementation="slow", fwdbwd_ms=None, saved_mib=None, problem="wrong")
    draw_layers([[EAGER, COAT, failed]], tmp_path / "a.svg")
    draw_layers([[EAGER, COAT, failed]], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    time, memory = bars(tmp_path / "a.svg")[:2], bars(tmp_path / "a.svg")[2:]
    for (eager, coat), share in ((time, 20 / 40), (memory, 1000 / 2900)):
        assert (eager[0], coat[0]) == (GREY, COLORS[0])
        assert coat[1] / eager[1] == pytest.approx(share, rel=1e-3)
    shown = texts(tmp_path / "a.svg")
    assert {"40.0", "20.0", "2900", "1000", "hf_eager", "coat_paper"} <= set(shown)
    assert "slow" not in shown
    assert "llama-2-7b, 8 x 2,048 tokens: fwd + bwd, ms" in shown


def test_the_command_draws_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out, words = tmp_path / "layer.svg", ["bench", "layer", "--plot"]
    shapes = ["--shape", "llama-2-7b", "siglip-so400m"]
    assert main([*words, str(out), "--csv", str(KEPT), *shapes]) == 0
    assert str(out) in capsys.readouterr().out
    assert [text for text in texts(out) if "tokens" in text] == [
        "llama-2-7b, 8 x 2,048 tokens: fwd + bwd, ms",
        "siglip-so400m, 64 x 729 tokens: fwd + bwd, ms",
    ]
    (tmp_path / "other.csv").write_text("a,b\n")
    kept = ["--csv", str(KEPT)]
    for more, problem in (
        ([], "give their file with --csv"),
        (["--csv", str(tmp_path / "none.csv")], "none.csv: no such file"),
        (["--csv", str(tmp_path / "other.csv")], "has the columns ['a', 'b']"),
        ([*kept, "--profile"], "leave out --implementations and --profile"),
        ([*kept, "--implementations", "liger"], "leave out --implementations"),
        ([*kept, "--length", "9"], "no rows of llama-2-7b, 8 x 9 tokens"),
    ):
        assert main([*words, str(out), *more]) == 2
        assert problem in capsys.readouterr().err
    assert main([*words, str(tmp_path / "layer.png"), *kept]) == 2
    assert "ends in .svg" in capsys.readouterr().err


def test_the_help_tells_of_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "layer", "--help"])
    assert "--plot layers.svg" in capsys.readouterr().out


def test_the_documented_picture_is_that_of_the_kept_rows() -> None:
    rows = find_last_run(read_rows(KEPT, LayerRow, MAKE), LLAMA, "default")
    shown = texts(ROOT / "docs" / "figures" / "layer_llama.svg")
    numbers = [text for text in shown if re.fullmatch(r"[\d.]+", text)]
    assert numbers == [f"{row.fwdbwd_ms:.1f}" for row in rows] + [
        f"{row.saved_mib:.0f}" for row in rows
    ]
