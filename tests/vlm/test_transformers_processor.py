"""transformers' common tests of processors, with the composed model's processor."""

import unittest
from typing import Any

from transformers_source import import_common_tests, skip

from coat_vlm.model.processor import CoatVlmProcessor, train_tokenizer

common = import_common_tests("test_processing_common")

ARGUMENTS = "a call returns tensors by default, and is told max_length, mean and standard deviation"


class Reading(CoatVlmProcessor):
    """The processor, without the options of video processors that one test adds for images."""

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = options.get("processor_kwargs") or {}
        kept = {name: value for name, value in given.items() if name not in ("num_frames", "fps")}
        return super().apply_chat_template(*args, **{**options, "processor_kwargs": kept})


@skip(
    {
        "test_apply_chat_template_assistant_mask": (
            "the mask is that of training; with another template it is a ValueError"
        ),
        "test_call_arguments_default_none": ARGUMENTS,
        "test_call_arguments_not_in_processor_kwargs": ARGUMENTS,
        "test_init_arguments_not_in_processor_kwargs": ARGUMENTS,
    }
)
class TestCommon(common.ProcessorTesterMixin, unittest.TestCase):
    processor_class = Reading
    image_token = "<image>"
    video_token = "<video>"

    @classmethod
    def _setup_tokenizer(cls) -> Any:
        return train_tokenizer(["lower newer upper older longer string"], 300)

    @staticmethod
    def prepare_processor_dict() -> dict[str, Any]:
        return {"image_size": 16, "tokens_per_image": 4}

    def test_apply_chat_template_image(self) -> None:
        """The mixin's own skips: it looks for a component that reads images."""
        pictures = common.MODALITY_INPUT_DATA["images"]
        for rows in (1, 2):
            self._test_apply_chat_template(
                "image", rows, "pt", "images_input_name", "tokenizer", pictures
            )
