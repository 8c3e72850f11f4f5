"""Tiny checkpoints in the formats of models on the Hub, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from coat_eval.hub_model import HubAdapter

SPECIAL = [
    "<pad>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|im_start|>", "<|im_end|>",
]  # fmt: skip
SAID = ["what", "is", "this", "dog", "?", "yes", "no", "USER", ":", "ASSISTANT", "user"]
WORDS = [*SPECIAL, *SAID, "assistant", *(f"w{number}" for number in range(30))]
LLAVA = (
    "{{ bos_token }}{% for message in messages %}USER : {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %} ASSISTANT :{% endif %}"
)
QWEN = (
    "{% for message in messages %}<|im_start|> user {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
TEXT: Any = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(WORDS)},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
VISION: Any = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 16},
}
PINPOINTS = [[16, 16], [32, 16]]
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def tokenizer() -> hf.PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    # As Llama's: a first token of its own, which LLaVA's chat template writes as well.
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )


def make_llava(folder: Path) -> None:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION, patch_size=8),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_index=3,
        image_seq_length=4,
    )  # fmt: skip
    size = {"height": 16, "width": 16}
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(size=size, crop_size=size),
        tokenizer=tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA,
    )
    save(hf.LlavaForConditionalGeneration(config), processor, folder)


def qwen_processor(kind: type, template: str) -> Any:
    pixels: Any = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 64, "longest_edge": 1024}
    return kind(
        image_processor=hf.Qwen2VLImageProcessor(**pixels, size=size),
        tokenizer=tokenizer(),
        video_processor=hf.Qwen2VLVideoProcessor(**pixels, size=size),
        chat_template=template,
    )


def make_qwen(folder: Path) -> None:
    config = hf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=6, video_token_id=7, vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip
    save(
        hf.Qwen2VLForConditionalGeneration(config),
        qwen_processor(hf.Qwen2VLProcessor, QWEN),
        folder,
    )


QWEN_VIDEO = QWEN.replace(
    "{% else %}",
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}",
    1,
)


def make_qwen_video(folder: Path) -> None:
    """Qwen2.5-VL, which places a video's frames by their seconds."""
    config = hf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32,
            "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
        image_token_id=6, video_token_id=7, vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip
    processor = qwen_processor(hf.Qwen2_5_VLProcessor, QWEN_VIDEO)
    save(hf.Qwen2_5_VLForConditionalGeneration(config), processor, folder)


def make_onevision(folder: Path) -> None:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, patch_size=4),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_index=3, video_token_index=7, image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    size: Any = {"height": 16, "width": 16}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        tokenizer=tokenizer(),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        video_token="<|video_pad|>",
        chat_template=QWEN_VIDEO.replace("<|image_pad|>", "<image>"),
    )
    save(hf.LlavaOnevisionForConditionalGeneration(config), processor, folder)


def save(model: Any, processor: Any, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():  # answers that depend on the question and the image
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
    model.bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)


@pytest.fixture(scope="module", params=[make_llava, make_qwen])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    request.param(folder)
    return folder


@pytest.fixture(scope="module", params=[make_qwen_video, make_onevision])
def video_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    request.param(folder)
    return folder


@pytest.fixture
def load() -> Callable[[Path], HubAdapter]:
    """The function that loads a model, which sees two frames of a video."""

    def loaded(folder: Path) -> HubAdapter:
        return HubAdapter.load(str(folder), torch.device("cpu"), 2)

    return loaded


@pytest.fixture
def llava() -> Callable[[Path], None]:
    """The function that makes a LLaVA."""
    return make_llava
