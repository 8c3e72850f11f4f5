"""The processor: settings from recipes and checkpoints, saving, and inputs for generation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_conversations import make_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    CLIPVisionConfig,
    Dinov2Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config import ImageConfig, LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.model.configuration import CoatVlmConfig, OpenClipVisionConfig
from coat_vlm.model.processor import (
    IMAGE_TOKEN,
    CoatVlmProcessor,
    build_processor,
    continue_processor,
    prepare_tokenizer,
    train_tokenizer,
)

TEXTS = ["What is in the image? A red circle.", "How many shapes are there? Three."] * 5
SIZES: dict[str, Any] = {
    "image_size": 28, "image_mean": (0.1, 0.2, 0.3), "image_std": (0.4, 0.5, 0.6),
    "image_mode": "pad", "image_resample": 2,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"num_hidden_layers": 3, "image_size": 28, "patch_size": 7}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 320)


@pytest.fixture
def processor(tokenizer: PreTrainedTokenizerFast) -> CoatVlmProcessor:
    return CoatVlmProcessor(
        tokenizer,
        **SIZES,
        tokens_per_image=4,
        video={"num_frames": 3},
        max_length=200,
        template="vicuna_v1",
    )


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def photo_sample(path: Path) -> Sample:
    picture().save(path)
    turns = (
        Turn("user", (Part("image"), Part("text", "\nWhat is in the image?"))),
        Turn("assistant", (Part("text", "A red circle."),)),
    )
    return Sample(id="x", turns=turns, media=(Media(kind="image", path=str(path)),))


@pytest.mark.parametrize("loader", [CoatVlmProcessor, AutoProcessor])
def test_saving_and_loading_keeps_everything(
    processor: CoatVlmProcessor, tmp_path: Path, loader: type
):
    processor.save_pretrained(tmp_path / "model")
    model_type = json.dumps({"model_type": "coat_vlm"})
    (tmp_path / "model" / "config.json").write_text(model_type)  # what AutoProcessor looks at
    loaded = loader.from_pretrained(tmp_path / "model")
    assert isinstance(loaded, CoatVlmProcessor)
    assert {k: v for k, v in loaded.to_dict().items() if k != "tokenizer"} == processor.to_dict()
    sample = photo_sample(tmp_path / "a.png")
    for template in (None, "chatml", "tokenizer", "plain"):
        one, other = (each.encoder(template=template)(sample) for each in (processor, loaded))
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.pixel_values, other.pixel_values)


def test_a_tokenizer_without_vocabulary_is_refused(processor: CoatVlmProcessor, tmp_path: Path):
    """transformers makes an empty one of a folder whose tokenizer.json is missing."""
    processor.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"the tokenizer of '{tmp_path}' has no tokens for a text"):
        CoatVlmProcessor(tokenizer)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 300 tokens that knows neither <image> nor padding."""
    core = train_tokenizer(TEXTS, 300).backend_tokenizer.to_str().replace(IMAGE_TOKEN, "<other>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(core), eos_token="<|im_end|>"
    )


def recipe(vision: VisionConfig, image: ImageConfig | None = None) -> ModelConfig:
    language = LanguageConfig(config={"model_type": "qwen2"})
    return ModelConfig(
        vision=vision, language=language, image=image or ImageConfig(), max_length=99
    )


def composed(vision: PretrainedConfig) -> CoatVlmConfig:
    return CoatVlmConfig(vision_config=vision, text_config=Qwen2Config(vocab_size=400))


@pytest.mark.parametrize(
    ("vision", "mean", "std"),
    [
        (SiglipVisionConfig(**SETTINGS), [0.5] * 3, [0.5] * 3),
        (
            CLIPVisionConfig(**SETTINGS),
            [0.48145466, 0.4578275, 0.40821073],
            [0.26862954, 0.26130258, 0.27577711],
        ),
        (
            OpenClipVisionConfig(**SETTINGS, image_mean=[0.1, 0.2, 0.3], image_std=[0.3, 0.2, 0.1]),
            [0.1, 0.2, 0.3],
            [0.3, 0.2, 0.1],
        ),
        (Dinov2Config(**SETTINGS), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ],
    ids=["siglip", "clip", "open_clip_own", "dinov2"],
)
def test_from_scratch_settings(tokenizer, vision, mean: list[float], std: list[float]):
    image = ImageConfig(mode="pad")
    config = composed(vision)
    built = build_processor(recipe(VisionConfig(config={}), image), tokenizer, config)
    assert built.image_mean == pytest.approx(mean)
    assert built.image_std == pytest.approx(std)
    assert built.image_size == 28
    assert built.tokens_per_image == config.tokens_per_image == 4  # 4 x 4 patches, in 2 x 2 blocks
    assert built.image_mode == "pad"
    assert (built.max_length, built.template) == (99, "chatml")


def test_pretrained_tower_brings_its_own_settings(tokenizer, tmp_path: Path):
    reference = SiglipImageProcessorPil(
        size={"height": 28, "width": 28},
        image_mean=[0.2, 0.3, 0.4],
        image_std=[0.7, 0.8, 0.9],
        resample=2,
    )
    reference.save_pretrained(tmp_path)
    vision = VisionConfig(name_or_path=str(tmp_path))
    built = build_processor(recipe(vision), tokenizer, composed(SiglipVisionConfig(**SETTINGS)))
    image = picture()
    expected = reference(image, return_tensors="pt").pixel_values
    assert torch.equal(built(images=image, text="<image>")["pixel_values"], expected)


def test_a_continued_processor_has_the_checkpoints_pixels_and_the_recipes_rest(
    processor: CoatVlmProcessor,
):
    config = composed(SiglipVisionConfig(**SETTINGS))
    image = ImageConfig(mode="dynamic", max_tiles=4)
    built = continue_processor(recipe(VisionConfig(config={}), image), processor, config)
    assert built.tokenizer is processor.tokenizer
    assert (built.image_mean, built.image_std) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert built.image_resample == 2
    assert (built.image_mode, built.image_max_tiles) == ("dynamic", 4)
    assert (built.max_length, built.template) == (99, "chatml")


def test_a_question_equals_the_training_prompt(processor: CoatVlmProcessor, tmp_path: Path):
    sample = photo_sample(tmp_path / "a.png")
    prompt = processor.encoder().prompt(sample)
    path, pil = tmp_path / "a.png", Image.open(tmp_path / "a.png")
    options: Any = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for image in (str(path), pil, path.read_bytes()):
        content = [
            {"type": "image", "text": None, "image": image},
            {"type": "text", "text": "\nWhat is in the image?", "image": None},
        ]
        chat = [{"role": "user", "content": content}]
        inputs = processor.apply_chat_template(chat, add_generation_prompt=True, **options)
        assert set(inputs) == {"input_ids", "attention_mask", "pixel_values"}
        assert inputs["input_ids"].tolist() == [prompt.input_ids.tolist()]
        assert inputs["attention_mask"].all()
        assert torch.equal(inputs["pixel_values"], prompt.pixel_values)


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "I;16"])
def test_pil_images_equal_their_files(processor: CoatVlmProcessor, tmp_path: Path, mode: str):
    image = picture().convert("L").convert("I").point(lambda v: v) if mode == "I;16" else picture()
    image = image.convert(mode)
    image.save(tmp_path / "a.tiff")
    from_file = processor(images=tmp_path / "a.tiff", text="<image>")["pixel_values"]
    assert torch.equal(processor(images=image, text="<image>")["pixel_values"], from_file)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "bot", "content": "a"}], "role 'bot'; allowed"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "allowed types"),
        ([{"role": "user", "content": [{"type": "image"}]}], "more image parts"),
        ([{"role": "user", "content": [{"type": "image", "image": "none.png"}]}], r"none\.png"),
    ],
)
def test_wrong_messages_are_explained(processor: CoatVlmProcessor, messages: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        processor.apply_chat_template(messages, tokenize=True)


def get_weather(city: str) -> str:
    """
    The weather.

    Args:
        city: The name of a city.
    """
    raise NotImplementedError(city)


def test_tools_and_calls_are_rendered(processor: CoatVlmProcessor) -> None:
    """Transformers rendered them, without a mask, and with a template that may drop them."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
    ]
    with pytest.raises(ValueError, match="'vicuna_v1' has no place for tools"):
        processor.apply_chat_template(messages[:1], tools=[get_weather], tokenize=True)
    tokenizer = prepare_tokenizer(make_tokenizer("qwen3"))
    ours = CoatVlmProcessor(
        tokenizer, **SIZES, tokens_per_image=4, video={}, max_length=9999, template="tokenizer"
    )
    options: dict[str, Any] = {"tools": [get_weather], "return_dict": True, "tokenize": True}
    expected: Any = tokenizer.apply_chat_template(messages, **options)
    found = ours.apply_chat_template(messages, **options, return_assistant_tokens_mask=True)
    assert found["input_ids"][0] == expected["input_ids"]
    pairs = zip(found["input_ids"][0], found["assistant_masks"][0], strict=True)
    said: Any = tokenizer.decode([token for token, mask in pairs if mask])
    assert '"Rome"' in said
    assert said.endswith("<think>\nr\n</think>\n\na<|im_end|>")
    assert "sun" not in said
    text = ours.apply_chat_template(messages, tools=[get_weather])
    assert text == tokenizer.apply_chat_template(messages, tools=[get_weather], tokenize=False)


@pytest.mark.parametrize("bos", [None, "<|endoftext|>"], ids=["qwen", "llama"])
@pytest.mark.parametrize("name", ["vicuna_v1", "chatml"])
def test_the_folder_has_the_chat_template_that_was_trained(
    tmp_path: Path, name: str, bos: str | None
):
    """As transformers alone reads it, on a tokenizer that has ChatML with a default system turn."""
    own: Any = train_tokenizer(TEXTS, 320)
    own.chat_template = "{{ '<|im_start|>system\nHi<|im_end|>\n' }}" + own.chat_template
    if bos is not None:
        own.bos_token = bos
        own.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, own.convert_tokens_to_ids(bos))]
        )
    before = own.chat_template
    processor = CoatVlmProcessor(own, image_size=28, tokens_per_image=4, template="tokenizer")
    processor.adopt_template("plain")
    assert (processor.template, own.chat_template) == ("tokenizer", before)
    processor.adopt_template(name)
    assert processor.template == name, "generate prompts as the stage trained"
    processor.save_pretrained(tmp_path)

    said = ["What is in the image?", "A red circle.", "How many shapes?", "Three."]
    roles: list[Any] = ["user", "assistant"] * 2
    turns = tuple(Turn(role, (Part("text", text),)) for role, text in zip(roles, said, strict=True))
    saved: Any = AutoTokenizer.from_pretrained(tmp_path)
    encoder = processor.encoder()
    for parts in (False, True):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in zip(roles, said, strict=True)
        ]
        segments = encoder.segments(Sample(id="a", turns=turns))
        rendered = saved.apply_chat_template(messages, tokenize=False)
        assert rendered == "".join(segment.text for segment in segments)
        segments = encoder.template.render(turns[:3], add_generation_prompt=True)
        asked = saved.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
        assert asked == "".join(segment.text for segment in segments)


def test_trained_tokenizer(tokenizer: PreTrainedTokenizerFast):
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<image>",
    ]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(train_tokenizer(TEXTS, 280)) == 280
    text = "caf\u00e9 \u4f60\u597d \n  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("What is in the image?")) < 12
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="train_vocab_size=100 is too small"):
        train_tokenizer(TEXTS, 100)


def test_prepare_tokenizer_adds_what_is_missing_once():
    tokenizer = other_tokenizer()
    assert prepare_tokenizer(tokenizer) is tokenizer
    assert tokenizer.convert_ids_to_tokens([300, 301]) == [IMAGE_TOKEN, "<pad>"]
    assert tokenizer.pad_token_id == 301
    assert tokenizer.encode("a<image>", add_special_tokens=False)[-1] == 300
    assert tokenizer.decode([300], skip_special_tokens=True) == ""
    size = len(tokenizer)
    assert len(prepare_tokenizer(tokenizer)) == size
