"""A trained decoder's losses in other precisions: what FP8 costs in weights, what in a pass."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from torch import nn

from coat_bench.rows import read_rows, replace_csv, table
from coat_lab.curves import DecoderCurve
from coat_lab.decoder import (
    Corpus,
    DecoderBench,
    arithmetic_called,
    build_decoder,
    text_loss,
)


@dataclass(frozen=True, slots=True)
class AcrossRow:
    """Losses of one model in one arithmetic, in nats per token."""

    precision: str
    """What it was trained in."""
    seed: int
    arithmetic: str
    """What its losses are computed in."""
    training_text: float
    """Over the text that it was trained on."""
    held_out: float

    @property
    def run(self) -> tuple[str, int]:
        """Precision and seed."""
        return self.precision, self.seed


class AcrossLosses:
    """The rows of the models that it is shown, and those of a file, which it keeps up to date.

    Args:
        precisions: whose arithmetic the losses are computed in, as
            :func:`coat_lab.decoder.arithmetic_called` takes them.
        bench: the models' shape.
        path: CSV file of the rows; it may be there, with rows of other runs. Everything here raises
            ValueError where it is another one.
    """

    def __init__(
        self, precisions: Sequence[str], bench: DecoderBench, path: Path | None = None
    ) -> None:
        self._precisions, self._bench, self._path = precisions, bench, path
        self._rows: list[AcrossRow] = []

    @property
    def rows(self) -> list[AcrossRow]:
        """All rows; those of the file where there is one, read again for each use."""
        if self._path is None:
            return self._rows
        return read_across(self._path)

    @property
    def seen(self) -> set[tuple[str, int]]:
        """Precision and seed of the runs that have a row in every one of the precisions."""
        there = {(row.precision, row.seed, row.arithmetic) for row in self.rows}
        runs = {(precision, seed) for precision, seed, _ in there}
        return {run for run in runs if all((*run, name) in there for name in self._precisions)}

    def look(self, model: nn.Module, curve: DecoderCurve, corpus: Corpus) -> None:
        """Take a trained model's losses; they replace the rows that its run has already.

        A precision that only these had is computed again, so that all rows are of one model. The
        file is replaced at once or not at all.
        """
        run = (curve.precision, curve.seed)
        old = [row.arithmetic for row in self.rows if row.run == run]
        names = list(dict.fromkeys([*self._precisions, *old]))
        found = losses_across(model, *run, names, corpus, self._bench)
        self._rows = [*(row for row in self.rows if row.run != run), *found]
        if self._path is not None:
            columns = [field.name for field in fields(AcrossRow)]
            replace_csv(self._path, columns, [astuple(row) for row in self._rows])


def losses_across(
    model: nn.Module,
    precision: str,
    seed: int,
    others: Sequence[str],
    corpus: Corpus,
    bench: DecoderBench,
) -> list[AcrossRow]:
    """The losses of a model in the arithmetic of several precisions.

    Args:
        model: from :func:`coat_lab.decoder.train_decoder`; stays as it is.
        precision: it was trained in.
        seed: likewise.
        others: as :func:`coat_lab.decoder.arithmetic_called` takes them.
        corpus: the text.
        bench: the model's shape.
    """
    weights = model.state_dict()
    rows = []
    for name in others:
        arithmetic = arithmetic_called(name)
        other = build_decoder(bench).to(next(model.parameters()).device, arithmetic.dtype)
        other.load_state_dict(weights)
        arithmetic.apply(other)
        losses = [text_loss(other, ids, bench) for ids in (corpus.training, corpus.held_out)]
        rows.append(AcrossRow(precision, seed, name, *losses))
    return rows


def read_across(path: Path) -> list[AcrossRow]:
    """The rows of a file of :class:`AcrossLosses`, in its order; none if it is not there.

    Raises:
        ValueError: the file is another one.
    """
    if not path.is_file():
        return []
    return read_rows(path, AcrossRow, "coat-vlm bench decoder --across --out")


def format_across(rows: Sequence[AcrossRow]) -> str:
    """Markdown, one line per model: the loss on the training text in each arithmetic."""
    names = list(dict.fromkeys(row.arithmetic for row in rows))
    lines = []
    for run in dict.fromkeys(row.run for row in rows):
        own = {row.arithmetic: f"{row.training_text:.4f}" for row in rows if row.run == run}
        lines.append([*map(str, run), *(own.get(name, "-") for name in names)])
    return table(["trained in", "seed", *(f"training text in {name}" for name in names)], lines)
