"""HallusionBench: yes/no questions about original and edited figures, asked in sets.

Source: Guan et al., "HallusionBench: An Advanced Diagnostic Suite for Entangled Language
Hallucination and Visual Illusion". Papers print VLMEvalKit's figures on the 951 questions with an
image, not the authors', whose evaluation.py lets GPT-4 judge 1,129 answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Question, ScoredItem, Settings, read_word
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.extract import extract_yes_no_word
from coat_eval.files import Table
from coat_eval.uncertainty import Term

_ANSWERS = {"1": "yes", "0": "no"}
_UNITS = {"aAcc": "sets of figures", "fAcc": "figures", "qAcc": "questions of all figures"}
_PARTS = ("category", "subcategory", "visual_input", "set_id", "figure_id", "question_id")


class HallusionBench(Benchmark):
    """aAcc over questions, fAcc over figures, qAcc over questions of all figures; also by part."""

    name = "hallusionbench"
    source = (
        "open-compass/VLMEvalKit vlmeval/dataset/utils/yorn.py Hallusion_rating @c03bc048, no "
        "judge; data: tianyi-lab/HallusionBench @744007c"
    )
    headline = tuple(_UNITS)
    profiles = ("official", "vlmeval", "vlmeval@c03bc048")
    sizes: ClassVar[Mapping[str, int]] = {"with an image": 951}
    constants = ("yes", "no")
    text_fields = ("prediction", "model_prediction", "text")
    carries_answers = True
    judged = wrong_unjudged = True
    layouts: ClassVar[Layouts] = {"image": (("HallusionBench.json",), ("image-*.parquet",))}

    def is_reference(self, table: Table) -> bool:
        """HallusionBench.json or results in its layout, or rows of lmms-lab/HallusionBench."""
        return table.has(*_PARTS, "gt_answer")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; VLMEvalKit's index is the id, and questions without image do not count."""
        answer = _ANSWERS.get(str(row["gt_answer"]))
        if answer is None:
            raise DataError(where, f"gt_answer is {row['gt_answer']!r}", "it is 1 (yes) or 0 (no)")
        category, kind, _, group, figure, number = (str(row[name]) for name in _PARTS)
        part = f"{category}_{kind}"
        return Question(
            question_id=_make_id(row),
            answer=answer,
            tables={"category": category, "part": part},
            details={
                "groups": {"fAcc": f"{part}_{group}_{figure}", "qAcc": f"{part}_{group}_{number}"}
            },
            counted=str(row["visual_input"]) != "0",
            text=str(row.get("question") or ""),
            cluster=f"{part}_{group}",
            where=where,
        )

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, in a folder or in Parquet."""
        name = str(row.values.get("filename")).removeprefix("./")
        return (row.image(name, ("hallusion_bench", "images", ".")),)

    def find_id(self, row: Mapping[str, Any], where: str) -> str:
        """Return VLMEvalKit's index, made of the parts of official results."""
        return _make_id(row) if all(name in row for name in _PARTS) else super().find_id(row, where)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return ``yes``, ``no`` or None: see :func:`coat_eval.extract.extract_yes_no_word`."""
        return extract_yes_no_word(text)

    def ask_judge(self, question: Question, text: str) -> str:
        """Ask whether the text means yes or no."""
        return (
            "A model was asked a yes/no question about an image. Does its answer mean yes or no? "
            "Reply with one word: yes, no, or unknown.\n\n"
            f"Question: {question.text}\nAnswer of the model: {text}\nMeaning:"
        )

    def read_verdict(self, verdict: Any, question: Question) -> str | None:
        """Return ``yes`` or ``no``; None for "unknown"."""
        word = read_word(verdict, ("yes", "no", "unknown"))
        return None if word == "unknown" else word

    def terms(self, metric: str, items: Sequence[Mapping[str, Any]], profile: str) -> list[Term]:
        """Return a term for each question, figure, or question of all figures."""
        if metric == "aAcc":
            return super().terms(metric, items, profile)
        groups: dict[str, float] = {}
        for item in items:
            name = item["groups"][metric]
            groups[name] = min(groups.get(name, 1.0), item["score"])
        return [Term(float(score == 1), unit=name) for name, score in groups.items()]

    def get_unit(self, metric: str) -> str:
        """Return what a metric counts; the questions of aAcc are about sets of figures."""
        return _UNITS[metric]

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute the three accuracies over all, per category and per part (``VD_ocr.fAcc``)."""
        groups: dict[str, list[ScoredItem]] = {"": list(scored)}
        for table in ("category", "part"):
            for one in scored:
                groups.setdefault(f"{one.question.tables[table]}.", []).append(one)
        return {
            f"{name}{metric}": value
            for name, rows in groups.items()
            for metric, value in self.compute_headline(rows, settings).items()
        }


def _make_id(row: Mapping[str, Any]) -> str:
    return "_".join(str(row[name]) for name in _PARTS)
