"""transformers' common tests of models and their configurations, with the composed model."""

import inspect
import unittest
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, Qwen2Config, SiglipVisionConfig
from transformers_source import import_common_tests, skip

from coat_vlm.model import CoatVlm, CoatVlmConfig

common = import_common_tests("test_modeling_common")
configurations = import_common_tests("test_configuration_common")

IMAGE = 3


class Tester:
    """What transformers' tests ask of a model: a small configuration, and inputs for it."""

    __test__ = False

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.batch_size, self.seq_length, self.vocab_size = 7, 11, 99
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4
        self.image_size, self.patch_size = 16, 4
        self.is_training = True

    def get_config(self) -> CoatVlmConfig:
        sizes: Any = {"num_hidden_layers": self.num_hidden_layers, "intermediate_size": 37}
        tower: Any = {"hidden_size": 16, "num_attention_heads": 2, **sizes}
        tower |= {"image_size": self.image_size, "patch_size": self.patch_size}
        language: Any = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size, **sizes}
        language |= {"num_attention_heads": self.num_attention_heads, "num_key_value_heads": 2}
        language |= {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 512,
        }
        if self.kind == "text":
            text = Qwen2Config(**language, tie_word_embeddings=True)
            return CoatVlmConfig(None, text, projector_type=None, image_token_id=None)
        if self.kind == "tied":
            vision: Any = CLIPVisionConfig(**tower)
            text = LlamaConfig(**language, tie_word_embeddings=True)
        else:
            vision, text = SiglipVisionConfig(**tower), Qwen2Config(**language)
        return CoatVlmConfig(vision, text, "mlp_downsample", select_layer=-1, image_token_id=IMAGE)

    def prepare_config_and_inputs_for_common(self) -> tuple[CoatVlmConfig, dict[str, Any]]:
        config = self.get_config()
        ids = common.ids_tensor((self.batch_size, self.seq_length), self.vocab_size - 4) + 4
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.has_vision:
            ids[:, 1 : 1 + config.tokens_per_image] = IMAGE
            size = (self.batch_size, 3, self.image_size, self.image_size)
            inputs["pixel_values"] = common.floats_tensor(size)
        return config, inputs


ALWAYS = {
    "test_cannot_load_with_meta_device_context_manager": (
        "loading raises ValueError with transformers' message, as for every other problem"
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        "the test loads a checkpoint without weights, which is a ValueError"
    ),
    "test_model_rope_scaling_from_config": (
        "the test reads last_hidden_state, which a class without output layer returns; the rotary "
        "embedding is that of transformers' language model"
    ),
}
TOWER = {
    "test_sdpa_can_dispatch_composite_models": (
        "the tower's module is in vision_tower.model; test_vlm.py checks its attention"
    ),
}


class _Common(common.ModelTesterMixin, common.GenerationTesterMixin):
    all_model_classes = (CoatVlm,)
    additional_model_inputs = ("pixel_values",)
    kind = ""

    def setUp(self) -> None:
        self.model_tester = Tester(self.kind)

    def test_config(self) -> None:
        config = self.model_tester.get_config()
        names = inspect.signature(CoatVlmConfig.__init__).parameters.keys() & config.to_dict()
        values = {name: config.to_dict()[name] for name in names if not name.endswith("_config")}
        tester = configurations.ConfigTester(
            self, config_class=CoatVlmConfig, has_text_modality=False, **values
        )
        for name in dir(tester):
            # With another folder that test expects OSError, which is a ValueError here.
            own = name == "create_and_test_config_from_and_save_pretrained"
            if name.startswith(("create_and_test_", "check_")) and not own:
                with self.subTest(name):
                    getattr(tester, name)()


@skip(ALWAYS | TOWER)
class TestSiglipQwen(_Common, unittest.TestCase):
    _is_composite = True
    kind = "siglip"


@skip(ALWAYS | TOWER)
class TestClipLlamaTied(_Common, unittest.TestCase):
    _is_composite = True
    kind = "tied"


@skip(ALWAYS)
class TestTextOnly(_Common, unittest.TestCase):
    kind = "text"
