"""``sums.py`` on a tiny model."""

import csv
from pathlib import Path

import pytest

import sums


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_sum_is_compared_with_fp32(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sums.csv"
    words = ["--size", "tiny-llm", "--sums", kind, "--micro-batches", "32", "--rows", "1"]
    words += ["--tokens", "8", "--steps", "2", "--csv", str(path)]
    sums.main(sums.build_parser().parse_args(words))
    first, last = csv.DictReader(path.open())
    assert float(last["loss"]) < float(first["loss"])
    for row in (first, last):  # n sums that are each off by up to 2^-8
        exact = kind == "fp32"
        assert (float(row["one_minus_cosine"]) < 1e-12) == exact
        assert abs(float(row["norm_error"])) <= (1e-9 if exact else 32 * 2**-8)
