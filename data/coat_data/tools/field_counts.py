"""Counts which fields of a source's rows were used and ignored, and what readers noted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from coat_data.sample import NOTES, Sample


@dataclass(slots=True)
class FieldCounts:
    """Counts of one source."""

    rows: int = 0  # good rows
    pairs: int = 0  # good rows that are preference pairs
    used: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)  # key of coat_data.sample.NOTES -> rows
    first: dict[str, str] = field(default_factory=dict)
    """Key of :data:`coat_data.sample.NOTES` -> file and row of the first of them."""

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        self.rows += 1
        self.pairs += bool(sample.rejected)
        self.used.update(sample.reading.used)
        self.ignored.update(sample.reading.ignored)
        for note in sample.reading.notes:
            self.notes[note] += 1
            self.first.setdefault(note, sample.where)

    def merge(self, later: "FieldCounts") -> None:
        """Add the counts of later rows of the same source."""
        self.rows += later.rows
        self.pairs += later.pairs
        self.used.update(later.used)
        self.ignored.update(later.ignored)
        self.notes.update(later.notes)
        self.first = later.first | self.first

    def lines(self, name: str) -> list[str]:
        """Return the fields and pairs of the rows of source ``name``, and :meth:`warnings`."""
        lines = []
        if self.used:  # none in ingested rows, whose fields were checked before
            used, ignored = self._list(self.used), self._list(self.ignored)
            lines.append(f"{name}: fields used: {used}; ignored: {ignored}")
        if self.pairs:
            lines.append(f"{name}: {self.pairs} of {self.rows} rows are preference pairs")
        return [*lines, *self.warnings(name)]

    def warnings(self, name: str) -> list[str]:
        """Return a line for each kind of note in the rows of source ``name``."""
        return [
            f"{name}: in {number} of {self.rows} rows {NOTES[note]}; first {self.first[note]}"
            for note, number in self.notes.items()
        ]

    def _list(self, fields: Mapping[str, int]) -> str:
        names = (
            name if number == self.rows else f"{name} ({number} of {self.rows} rows)"
            for name, number in sorted(fields.items())
        )
        return ", ".join(names) or "none"
