"""InfographicVQA: questions about infographics, scored by ANLS as DocVQA.

Source: Mathew et al., "InfographicVQA". No published predictions with scores were found, so only
the rule is checked.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from coat_eval.benchmark import Question
from coat_eval.data_folder import Layouts
from coat_eval.files import Table
from coat_eval.tasks.docvqa import DocVqa


class InfoVqa(DocVqa):
    """ANLS overall, and by where the answer is found."""

    name = "infovqa"
    sizes: ClassVar[Mapping[str, int]] = {"val": 2801, "test": 3288}
    layouts: ClassVar[Layouts] = {
        "val": (
            ("infographicsVQA_val_v1.0_withQT.json",),
            ("infographicsVQA_val_v1.0.json",),
            ("InfographicVQA/validation-*.parquet",),
            ("validation-*.parquet",),
        ),
        "test": (
            ("infographicsVQA_test_v1.0.json",),
            ("InfographicVQA/test-*.parquet",),
            ("test-*.parquet",),
        ),
    }
    folders = ("infographicsvqa_images", "images", ".")

    def is_reference(self, table: Table) -> bool:
        """The official annotations, or rows of lmms-lab/DocVQA's part InfographicVQA."""
        return table.has("questionId", "question", "image_url")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; its first type of answer is a sub-table if there is one."""
        types = {"question_types": row.get("answer_type")}
        return super().question({**row, **types}, table, where)
