"""Models of other projects: tiny checkpoints in the formats of LLaVA and Qwen2-VL on the Hub.

The reference is transformers' own way of asking one prompt at a time, without padding.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from coat_data.sample import DataError, Media
from coat_eval.answerer import ModelOptions, load_answerer
from coat_eval.hub_answerer import HubAnswerer
from coat_vlm.cli import main

SPECIAL = [
    "<pad>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|im_start|>", "<|im_end|>",
]  # fmt: skip
SAID = [
    "what",
    "is",
    "this",
    "dog",
    "?",
    "yes",
    "no",
    "USER",
    ":",
    "ASSISTANT",
    "user",
    "assistant",
]
WORDS = [*SPECIAL, *SAID, *(f"w{number}" for number in range(30))]
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
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(WORDS),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    # As Llama's: a first token of its own, which LLaVA's chat template writes as well.
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )


def make_llava(folder: Path) -> None:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=16, patch_size=8,
        ),
        text_config=LlamaConfig(**TEXT),
        image_token_index=3,
        image_seq_length=4,
    )  # fmt: skip
    size = {"height": 16, "width": 16}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size),
        tokenizer=tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA,
    )
    save(LlavaForConditionalGeneration(config), processor, folder)


def make_qwen(folder: Path) -> None:
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=6, video_token_id=7, vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip
    pixels: Any = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 64, "longest_edge": 1024}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels, size=size),
        tokenizer=tokenizer(),
        video_processor=Qwen2VLVideoProcessor(**pixels, size=size),
        chat_template=QWEN,
    )
    save(Qwen2VLForConditionalGeneration(config), processor, folder)


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


def load(folder: Path) -> HubAnswerer:
    answerer = load_answerer(str(folder), ModelOptions(device=torch.device("cpu"), num_frames=2))
    assert isinstance(answerer, HubAnswerer)
    return answerer


def pictures(folder: Path, number: int) -> list[Media]:
    found = []
    for index in range(number):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 16 + 8 * index, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        found.append(Media(kind="image", path=str(folder / f"{index}.png")))
    return found


def alone(answerer: HubAnswerer, text: str, media: list[Media]) -> str:
    """One prompt as transformers' documentation asks it."""
    model, processor = answerer._model, answerer.encoder._processor
    content = [{"type": "image", "image": Image.open(str(one.path))} for one in media]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(answer, skip_special_tokens=True).strip()


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_a_left_padded_batch_says_what_one_prompt_alone_says(
    folder: Path, tmp_path: Path, num_images: int
):
    answerer = load(folder)
    images = pictures(tmp_path, 4)
    texts = ["what is this ?", "is this dog ? " * 4 + "yes no ?", "no"]
    shown = [images[i : i + num_images] for i in range(3)]
    encoder = answerer.encoder
    batch = encoder.collate([encoder.encode(*one) for one in zip(texts, shown, strict=True)])
    assert batch["attention_mask"].sum(1).tolist() != [batch["attention_mask"].shape[1]] * 3
    answers = answerer.answer(batch, 6)
    assert answers == [alone(answerer, *one) for one in zip(texts, shown, strict=True)]
    assert len(set(answers)) == 3


def test_a_video_is_shown_as_its_frames(folder: Path, benchmarks: Path):
    encoder = load(folder).encoder
    video = Media(kind="video", path=str(benchmarks / "videomme" / "data" / "aaa.mp4"))
    _, frames = encoder.encode("what ?", [video])
    # Two frames of four: those on screen in the middles of the two halves, grey 60 and 180.
    values = [frame.getpixel((16, 16)) for frame in frames]
    assert [round(value[0] / 60) for value in values if isinstance(value, tuple)] == [1, 3]
    assert encoder.frame_times(video) == pytest.approx([1.0, 3.0], abs=1e-3)
    assert encoder.encode("is ?", [video])[1][0] is frames[0]  # decoded once
    with pytest.raises(DataError, match="no such file"):
        encoder.encode("what ?", [Media(kind="video", path="gone.mp4")])


def test_the_command_takes_it(folder: Path, benchmarks: Path, tmp_path: Path):
    words = ["--model", str(folder), "--tasks", "pope,videomme_subtitles", "--num-frames", "2"]
    where = ["--data", str(benchmarks), "--out", str(tmp_path), "--max-new-tokens", "2"]
    assert main(["eval", *words, *where]) == 0
    lines = (tmp_path / "pope" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 18


def spoil_template(folder: Path) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_template, "has no chat template"),
        (spoil_config, "cannot be loaded as an image-text-to-text model"),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, spoil: Callable[[Path], None], message: str):
    make_llava(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model")
