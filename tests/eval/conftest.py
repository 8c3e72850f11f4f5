"""The eight benchmarks in their official layouts, and a small model that knows words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from official_files import WORDS, make_benchmarks

from coat_eval.own_model import CoatAdapter
from coat_eval.runner import load_adapter
from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.model.build import build_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import build_processor, prepare_tokenizer, train_tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder per benchmark; the second video of Video-MME is missing."""
    folder = tmp_path_factory.mktemp("benchmarks")
    make_benchmarks(folder)
    return folder


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose answers are WORDS, chosen by random weights from prompt and image."""
    torch.manual_seed(1)
    vision = {**SIZES, "model_type": "siglip_vision_model", "num_attention_heads": 2}
    language = {**SIZES, "model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1}
    config = ModelConfig(
        vision=VisionConfig(config={**vision, "image_size": 16, "patch_size": 8}),
        language=LanguageConfig(config=language),
        tokenizer=TokenizerConfig(train_vocab_size=300),
        max_length=2048,
    )
    texts = [word for word in WORDS for _ in range(9)]
    tokenizer = prepare_tokenizer(train_tokenizer(texts, 300))
    model = build_model(config, tokenizer)
    ids = [tokenizer(word)["input_ids"] for word in WORDS]
    assert all(len(one) == 1 for one in ids)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
        layer: Any = model.get_output_embeddings()
        head = layer.weight
        said = torch.zeros(len(head), 1)
        said[[one[0] for one in ids]] = 1.0
        head.mul_(said)  # every other token has the logit 0
    folder = tmp_path_factory.mktemp("speaking") / "model"
    model.save_pretrained(folder)
    assert isinstance(model.config, CoatVlmConfig)
    build_processor(config, tokenizer, model.config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(speaking_model: Path) -> CoatAdapter:
    found = load_adapter(str(speaking_model), torch.device("cpu"))
    assert isinstance(found, CoatAdapter)
    return found
