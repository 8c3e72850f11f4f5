"""transformers' common tests of processors, run with the composed model's processor."""

import unittest
from typing import Any

from transformers_source import import_common_tests

from coat_vlm.model.processor import CoatVlmProcessor, train_tokenizer

common = import_common_tests("test_processing_common")


class TestCommon(common.ProcessorTesterMixin, unittest.TestCase):
    processor_class = CoatVlmProcessor
    image_token = "<image>"
    video_token = "<video>"

    @classmethod
    def _setup_tokenizer(cls) -> Any:
        return train_tokenizer(["lower newer upper older longer string"], 300)

    @staticmethod
    def prepare_processor_dict() -> dict[str, Any]:
        return {"image_size": 16, "tokens_per_image": 4}
