"""How the scenes dataset is made: shapes, sizes, settings, and what an interruption leaves."""

import numpy as np
import pytest

from coat_datasets.scenes import make_scenes
from coat_datasets.scenes.scene import coverage

SIZES = {"num_train": 16, "num_test": 8, "num_val": 4}


@pytest.mark.parametrize("size", [12, 14, 40])
def test_shapes_cover_their_geometric_area(size):
    outer, inner = 0.525, 0.21
    areas = {
        "square": 1.0,
        "circle": np.pi / 4,
        "triangle": 0.5,
        "diamond": 0.5,
        "cross": 2 * 0.36 - 0.36**2,
        "star": 5 * outer * inner * np.sin(np.pi / 5),
    }
    for shape, area in areas.items():
        assert coverage(shape, size).mean() == pytest.approx(area, abs=0.05), shape


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_test": 100}, "num_test=100.*multiple of 8"),
        ({"num_train": 0}, "num_train=0"),
    ],
)
def test_bad_settings_are_named(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        make_scenes(tmp_path / "out", **(SIZES | setting))
    assert not list(tmp_path.iterdir())
