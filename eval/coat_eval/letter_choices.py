"""Base classes of multiple-choice benchmarks in VLMEvalKit's tables, with its letter rule.

Source: open-compass/VLMEvalKit @c03bc048, vlmeval/dataset/image_mcq.py (prompt) and
vlmeval/dataset/utils/multiple_choice.py (``mcq_vanilla_eval``, ``mcq_circular_eval``).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    LETTER_ANSWER,
    UPSTREAM,
    Benchmark,
    Pair,
    Prompt,
    PromptOptions,
    Question,
    ScoredItem,
    Settings,
    UnusableVerdictError,
    pick,
)
from coat_eval.data_folder import DataFolder, MediaFile, Row
from coat_eval.extract import LETTER_RULES, declines, infer_letter_c03bc048, letter_choices
from coat_eval.files import IMAGE_HASH, Table, Tables

LMMS_EVAL = "EvolvingLMMs-Lab/lmms-eval @v0.7.3"
"""Release from which the prompts and rules of these benchmarks were read."""
VLMEVALKIT = "open-compass/VLMEvalKit vlmeval/dataset/utils/multiple_choice.py @c03bc048"
ROTATION = 1_000_000
"""Difference of the indices of two rotations of a question."""
_EMPTY = frozenset(
    {
        *("", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
        *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    }
)
"""Cells that pandas, and so VLMEvalKit, reads as empty: an option "None" does not exist."""


def read_cell(row: Mapping[str, Any], *columns: str) -> str:
    """Return the text of the first of these columns that is not empty; empty if all are."""
    cells = (str(row[name]) for name in columns if row.get(name) is not None)
    return next((cell for cell in cells if cell not in _EMPTY), "")


def read_choices(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the options by letter; with empty texts if only their letters are there."""
    listed = row.get("choices") or row.get("options")
    if isinstance(listed, Mapping):
        return {letter: str(listed[letter]) for letter in ascii_uppercase if letter in listed}
    if isinstance(listed, list):
        return letter_choices([str(text) for text in listed])
    cells = {letter: read_cell(row, letter) for letter in ascii_uppercase if letter in row}
    if not cells and isinstance(listed, str):
        return dict.fromkeys(listed, "")
    return {letter: text for letter, text in cells.items() if text}


def has_rotations(table: Table) -> bool:
    """Return whether the index of the last question marks it as a rotated copy."""
    last = str(table.rows[-1].get("index")) if table.has("index", "answer") else ""
    return last.isdecimal() and int(last) >= ROTATION and not table.has("prediction")


def ask_vlmeval(question: Question) -> str:
    """Return VLMEvalKit's prompt (``ImageMCQDataset.build_prompt`` @c03bc048)."""
    hint = question.details["hint"]
    head = [*([f"Hint: {hint}"] if hint else []), f"Question: {question.text}", "Options:"]
    request = "Please select the correct answer from the options above. \n"
    return "\n".join([*head, *list_choices(question), request])


def ask_llava(question: Question) -> str:
    """Return LLaVA's prompt (llava/eval/model_vqa_mmbench.py @32cebc38)."""
    head = [*filter(None, [question.details["hint"]]), question.text]
    return "\n".join([*head, *list_choices(question), LETTER_ANSWER])


def list_choices(question: Question) -> list[str]:
    """Return a line ``A. text`` per option; DataError if the references have no texts."""
    choices = get_choices(question)
    if not all(choices.values()):
        raise DataError(question.where, "the options have no texts", "give the complete file")
    return [f"{letter}. {text}" for letter, text in choices.items()]


def get_choices(question: Question) -> Mapping[str, str]:
    """Return the options by letter; DataError if there are none (RealWorldQA on the Hub)."""
    if not question.details["choices"]:
        problem = "has no options in columns A, B, ..."
        remedy = "give VLMEvalKit's table, or take --profile lmms if the benchmark has it"
        raise DataError(question.where, problem, remedy)
    return question.details["choices"]


class LetterBenchmark(Benchmark):
    """One choice per row; accuracy over rows and by category."""

    source = VLMEVALKIT
    headline = ("overall",)
    profiles = ("official", "vlmeval", "vlmeval@c03bc048", "first_letter")
    constants = tuple("ABCD")
    table_columns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "category": ("category",),
        "l2_category": ("l2_category", "l2-category", "L2-category"),
    }
    """Columns of each sub-table."""

    def get_upstream(self, profile: str) -> str:
        """Return repository and commit of the scorer that a profile follows."""
        if profile == "first_letter":
            return f"{UPSTREAM['lmms']} lmms_eval/tasks/seedbench/utils.py"
        return LMMS_EVAL if profile == "lmms" else super().get_upstream(profile)

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row, which has an ``index``."""
        named = {name: read_cell(row, *columns) for name, columns in self.table_columns.items()}
        return Question(
            question_id=str(pick(row, ("index",), where)),
            answer=read_cell(row, "answer") or None,
            tables={name: value for name, value in named.items() if value},
            details={"choices": read_choices(row), "hint": read_cell(row, "hint")},
            text=str(row.get("question") or ""),
            cluster=str(row.get("image") or row.get("image_path") or ""),
            where=where,
        )

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions; rows without ``index`` get their number from 0."""
        starts, count = {}, 0
        for table in sorted(folder.tables, key=lambda one: one.path):
            starts[table.path], count = count, count + len(table.rows)
        for table in filter(self.is_reference, folder.tables):
            for row in folder.rows_of(table):
                values = {"index": starts[table.path] + row.index, **row.values}
                yield self.question(values, table, row.where), row

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return all questions; those about one image share its hash as ``cluster``."""
        questions = super().questions(references, predictions)
        # A cell without an image has the index of the row with it.
        images = {
            question.question_id: question.cluster
            for question in questions
            if question.cluster.startswith(IMAGE_HASH)
        }
        return [replace(one, cluster=images.get(one.cluster, one.cluster)) for one in questions]

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the text of a prompt; default: VLMEvalKit's."""
        return ask_vlmeval(question)

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image: in the table, or as VLMEvalKit saves it, ``images/INDEX.jpg``."""
        return (row.image(question.question_id, ("images", "."), (".jpg", ".png")),)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the letter that the text decides for, or None."""
        choices = get_choices(question)
        if settings.profile == "first_letter":
            letter = text.strip()[:1].upper()
            return letter if letter in choices else None
        letter = LETTER_RULES.get(settings.profile, infer_letter_c03bc048)(text, choices)
        if letter is None and not any(choices.values()) and len(text.strip()) > 1:
            raise DataError(
                question.where,
                f"has letters without texts, which the rule needs for the answer {text[:40]!r}",
                "give references with the options' texts",
            )
        return letter


class CircularBenchmark(LetterBenchmark):
    """Groups of rows with indices equal modulo :data:`ROTATION`; an item is a group."""

    headline = ("overall", "first_rotation", "rows")
    judged = wrong_unjudged = True

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return the rows with the numbers of rotations; DataError if a group lacks one."""
        questions = super().questions(references, predictions)
        groups = _group_rotations((question, None) for question in questions)
        if questions and all(len(rows) == 1 for rows in groups.values()):
            problem = f"each of the {len(groups)} questions is there in one rotation only"
            remedy = "give the file with all rotations (indices 1000000 apart)"
            raise DataError(questions[0].where, problem, remedy)
        for group, rows in groups.items():
            numbers = [int(one.question_id) // ROTATION for one, _ in rows]
            if numbers != list(range(len(rows))):
                problem = f"question {group} has the rotations {numbers}, not 0 to {len(rows) - 1}"
                remedy = "give the complete file, with every rotation once"
                raise DataError(rows[0][0].where, problem, remedy)
        sizes = {group: len(rows) for group, rows in groups.items()}
        return [
            replace(one, details={**one.details, "num_rotations": sizes[_get_group(one)]})
            for one in questions
        ]

    def count_asked(self, questions: Sequence[Question]) -> int:
        """Count the groups."""
        return len({_get_group(one) for one in questions})

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield the rotations of a question in sequence, so that a limit cuts one group at most."""
        prompts = list(super().prompts(folder, options))
        first = {_get_group(prompt): index for index, prompt in reversed([*enumerate(prompts)])}
        yield from sorted(
            prompts, key=lambda prompt: (first[_get_group(prompt)], int(prompt.question_id))
        )

    def score_all(self, joined: Iterable[Pair], settings: Settings) -> list[ScoredItem]:
        """Score the groups; a group that was scored before has one text for all its rotations."""
        pairs = [
            (one, text)
            for question, text in joined
            for one in question.details.get("rotations", (question,))
        ]
        groups = _group_rotations(pairs)
        return [self._score_group(rows, settings) for rows in groups.values()]

    def _score_group(self, rows: Sequence[Pair], settings: Settings) -> ScoredItem:
        """Score one group; with a rotation that was not asked (a limit) it is wrong."""
        scored = [self.score_one(question, text, settings) for question, text in rows]
        first = scored[0].question
        answers = [one.question.answer for one in scored]
        texts = [one.text for one in scored if one.text is not None]
        whole = len(rows) == first.details["num_rotations"]
        # As upstream, the judge is not asked if another rotation is wrong already.
        waiting = [one for one in scored if one.needs_judge]
        open_yet = whole and all(one.needs_judge or one.score == 1 for one in scored)
        details = {
            **first.details,
            "rotations": [question for question, _ in rows],
            "undecided": [(one.question, one.text) for one in waiting],
        }
        answer = None if None in answers else answers
        return ScoredItem(
            question=replace(first, answer=answer, details=details),
            text="\n".join(texts) if texts else None,
            extracted=[one.extracted for one in scored] if texts else None,
            score=float(whole and all(one.score == 1 for one in scored)),
            parsed=all(one.parsed and (open_yet or not one.needs_judge) for one in scored),
            needs_judge=bool(waiting) and open_yet,
            judged=any(one.judged for one in scored),
            prediction="\n".join(filter(None, (one.prediction or one.text for one in scored))),
            reasoning=max(one.reasoning for one in scored),
        )

    def needs_judge(
        self, extracted: Any, text: str, question: Question, settings: Settings
    ) -> bool:
        """Return whether the letter rule neither finds a letter nor a refusal in a text."""
        by_rule = settings.profile != "first_letter" and extracted is None and bool(text.strip())
        return by_rule and not declines(text, get_choices(question))

    def ask_judge(self, question: Question, text: str) -> str:
        """Ask which option the text means."""
        lines = [
            "A model was asked a multiple-choice question. Which option does its answer mean? "
            "Reply with the letter alone, or with Z if it means none of the options.",
            f"\nQuestion: {question.text}",
            *list_choices(question),
            f"\nAnswer of the model: {text}",
            "\nLetter:",
        ]
        return "\n".join(lines)

    def read_verdict(self, verdict: Any, question: Question) -> str | None:
        """Return the letter that the verdict begins with; None for Z."""
        found = re.match(r"\W*([A-Z])\b", str(verdict))
        if found is None or found[1] not in (*get_choices(question), "Z"):
            raise UnusableVerdictError(f"{verdict!r} is not the letter of an option")
        return None if found[1] == "Z" else found[1]

    def rate_item(self, metric: str, item: Mapping[str, Any], profile: str) -> tuple[float, float]:
        """Return the score of a group, of its first rotation, or of all its rows."""
        gold = item["reference"]
        right = [a == b for a, b in zip(item["extracted"] or [], gold, strict=False)]
        if metric == "first_rotation":
            return float(right[:1] == [True]), 1.0
        return (sum(right), len(gold)) if metric == "rows" else (item["score"], 1.0)


def _get_group(one: Question | Prompt) -> int:
    """Return the index of the first rotation; DataError if the index is not an integer."""
    if not one.question_id.isdecimal():
        raise DataError(one.where, f"the index is {one.question_id!r}", "give an integer")
    return int(one.question_id) % ROTATION


def _group_rotations(pairs: Iterable[Pair]) -> dict[int, list[Pair]]:
    """Group pairs by question, each group by rotation, the groups in the order of the pairs."""
    groups: dict[int, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(_get_group(pair[0]), []).append(pair)
    for rows in groups.values():
        rows.sort(key=lambda pair: int(pair[0].question_id))
    return groups
