"""A BF16 step without ZeRO on two processes, against DeepSpeed's own."""

from pathlib import Path

import pytest
from two_ranks import run_on_two_ranks

WORKER = Path(__file__).parent / "foreach_step_worker.py"


@pytest.mark.parametrize("clip", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_two_ranks_step_as_deepspeed_does(clip: float) -> None:
    """Without clipping to the last bit; the factor of clipping may differ by its rounding."""
    first, second = run_on_two_ranks(WORKER, str(clip))
    assert first["weights"] == second["weights"]  # of data that differ
    assert first["norms"] == pytest.approx(first["their norms"], rel=1e-6)
    assert first["norms"] == second["norms"]
    assert max(first["norms"]) > 1  # so that a limit of 1 clips
    assert first["moved"] > 0.01
    assert first["furthest"] < 2**-7
    if not clip:
        assert first["differing"] == 0
