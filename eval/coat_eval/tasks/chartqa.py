"""ChartQA: questions about charts, 1,250 written by people and 1,250 generated ("augmented").

Source: Masry et al., "ChartQA: A Benchmark for Question Answering about Charts with Visual and
Logical Reasoning"; relaxed accuracy as in google-research/pix2struct metrics.py, which lmms-eval
and VLMEvalKit copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import SHORT_ANSWER, Benchmark, Question, Settings
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.files import Table
from coat_eval.tasks.mmmu import parse_list

SPLITS = ("test_human", "test_augmented")
_TOLERANCE = 0.05


class ChartQa(Benchmark):
    """Relaxed accuracy overall, and of human and augmented questions."""

    name = "chartqa"
    source = (
        "google-research/pix2struct metrics.py relaxed_correctness, as copied in VLMEvalKit "
        "vlmeval/dataset/utils/vqa_eval.py @c03bc048"
    )
    headline = ("overall", *(f"split.{split}" for split in SPLITS))
    profiles = ("official", "lmms", "vlmeval", "vlmeval@c03bc048")
    sizes: ClassVar[Mapping[str, int]] = {"test": 2500, "one split": 1250}
    text_fields = ("prediction", "text", "answer")
    layouts: ClassVar[Layouts] = {
        "test": (("test_human.json", "test_augmented.json"), ("test-*.parquet",), ("*.parquet",))
    }
    variants: ClassVar[Mapping[str, str]] = {
        "lmms": "ends in 'with a single word', as in lmms-eval's chartqa.yaml"
    }

    def is_reference(self, table: Table) -> bool:
        """The official lists, rows of lmms-lab/ChartQA, or VLMEvalKit's table."""
        if table.has("query", "label"):
            return True
        split = table.rows[0].get("split", table.rows[0].get("type")) if table.rows else None
        return table.has("question", "answer") and (
            split in SPLITS or split in ("human_test", "augmented_test")
        )

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions; ids are ``index``, or split and position in it."""
        numbers: dict[str, int] = dict.fromkeys(SPLITS, -1)
        tables = filter(self.is_reference, folder.tables)
        for table in sorted(tables, key=lambda table: table.path):
            for row in folder.rows_of(table):
                values = row.values
                # lmms-lab/ChartQA writes human_test; official lists have the split in their name.
                named = values.get("split") or values.get("type") or table.path.name
                found = [one for one in SPLITS if one.removeprefix("test_") in str(named).lower()]
                if len(found) != 1:
                    problem = f"is neither human nor augmented: {named!r}"
                    remedy = "name the files test_human.json and test_augmented.json, or add split"
                    raise DataError(row.where, problem, remedy)
                split = found[0]
                numbers[split] += 1
                answer = values.get("label", values.get("answer"))
                question = Question(
                    question_id=str(values.get("index", f"{split}_{numbers[split]}")),
                    answer=None if answer is None else str(answer),
                    tables={"split": split},
                    text=str(values.get("query", values.get("question")) or ""),
                    cluster=str(values.get("imgname") or ""),
                    where=row.where,
                )
                yield question, row

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the question with the suffix of VLMEvalKit, or of lmms-eval as a variant."""
        end = "Answer the question with a single word." if variant else SHORT_ANSWER
        return f"{question.text}\n{end}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, in a folder or in Parquet."""
        return (row.image(str(row.values.get("imgname")), ("png", "test/png", "images", ".")),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the text without blanks around it; lmms: the text itself."""
        return text if settings.profile == "lmms" else text.strip()

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for a match; vlmeval@c03bc048 swaps prediction and gold (fixed in #1204)."""
        gold = question.answer if settings.profile == "lmms" else parse_list(question.answer)
        golds = [gold] if isinstance(gold, str) else map(str, gold)
        pairs = [(gold, extracted) for gold in golds]
        if settings.profile == "vlmeval@c03bc048":
            pairs = [(prediction, gold) for gold, prediction in pairs]
        return float(any(is_relaxed_match(gold, prediction) for gold, prediction in pairs))


def is_relaxed_match(gold: str, prediction: str) -> bool:
    """Apply ``relaxed_correctness``: numbers within 5 % of the gold number, else equal texts.

    A text that ends in "%" is a hundredth of its number. If the gold number is 0, or one of the
    texts is not a number (also "1,000" and "$5"), the texts must be equal in lower case.
    """
    number, target = _read_number(prediction), _read_number(gold)
    if number is not None and target:
        return abs(number - target) / abs(target) <= _TOLERANCE
    return prediction.lower() == gold.lower()


def _read_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None
