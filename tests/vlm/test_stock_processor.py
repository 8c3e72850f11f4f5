"""The processor next to transformers' LlavaProcessor with the same tokenizer, and in pipelines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.generate import generate, load
from coat_vlm.model.processor import CoatVlmProcessor, train_tokenizer

TEXTS = ["What colour is the ball on the left?", "red green blue", "Is there a dog? yes no"]
# ChatML as a stock processor has it: answers and their end tokens are marked for the mask.
MARKED = (
    "{% macro content(m) %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ content(m) + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ content(m) + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def picture(seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    return Image.fromarray(values)


def user(*parts: Any) -> dict[str, Any]:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "red and blue"}
CONVERSATIONS = [
    [user(picture(0), "\nWhat colour?"), ANSWER],
    [{"role": "user", "content": "Is there a dog?"}, ANSWER, user("and a ball?"), ANSWER],
    [user(picture(1), "and ", picture(2), "?"), ANSWER],
]
ASKED = [conversation[:-1] for conversation in CONVERSATIONS]


@pytest.fixture(scope="module")
def both() -> tuple[CoatVlmProcessor, LlavaProcessor]:
    """Ours and the reference: 16 x 16 pixels, 4 tokens per image."""
    tokenizer: PreTrainedTokenizerFast = train_tokenizer(TEXTS, 300)
    ours = CoatVlmProcessor(tokenizer, image_size=16, tokens_per_image=4, max_length=300)
    ours.adopt_template("chatml")
    pixels = SiglipImageProcessorPil(size={"height": 16, "width": 16}, resample=3)
    stock = LlavaProcessor(pixels, ours.tokenizer, patch_size=8, chat_template=MARKED)
    return ours, stock


def assert_same(ours: Any, stock: Any) -> None:
    found, expected = ({n: v for n, v in one.items() if len(v)} for one in (ours, stock))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert type(found[name]) is torch.Tensor
            assert torch.equal(found[name], value), name
        else:
            assert np.array_equal(np.array(found[name]), np.array(value)), name


@pytest.mark.parametrize("side", ["left", "right"])
def test_rendered_prompts_equal_a_stock_processors(both, side: str):
    ours, stock = both
    texts = [f"<|im_start|>{TEXTS[0]}<image>\n", "<image>a<image><|im_end|>", TEXTS[2]]
    images = [picture(number) for number in range(3)]
    options = {"return_tensors": "pt", "padding": True, "padding_side": side}
    for nested in (images, [images[:1], images[1:], []]):
        assert_same(
            ours(images=nested, text=texts, **options), stock(images=images, text=texts, **options)
        )
    kinds = {"return_mm_token_type_ids": True, "text_kwargs": {"padding": "longest"}}
    options = {"return_tensors": "pt", "padding_side": side, **kinds}
    assert_same(
        ours(images=images, text=texts, **options), stock(images=images, text=texts, **options)
    )


@pytest.mark.parametrize("generation", [False, True])
def test_chat_templates_equal_a_stock_processors(both, generation: bool):
    ours, stock = both
    options: dict[str, Any] = {"add_generation_prompt": generation}
    conversations = ASKED if generation else CONVERSATIONS
    for chat in (*conversations, conversations):
        assert ours.apply_chat_template(chat, **options) == stock.apply_chat_template(
            chat, **options
        )
    options |= {"tokenize": True, "return_dict": True}
    for chat in conversations:
        found, expected = (one.apply_chat_template(chat, **options) for one in both)
        assert found["input_ids"] == [list(row) for row in expected["input_ids"]]
        assert (
            ours.apply_chat_template(chat, **options | {"return_dict": False})
            == (found["input_ids"])
        )
        assert_same(
            *(one.apply_chat_template(chat, **options, return_tensors="pt") for one in both)
        )
    batch = ours.apply_chat_template(conversations, **options, return_tensors="pt")
    padded = {"padding": True, "padding_side": "left"}
    assert_same(
        batch,
        stock.apply_chat_template(
            conversations, **options, return_tensors="pt", processor_kwargs=padded
        ),
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_and_padding_equal_a_stock_processors(both, side: str):
    """As TRL's collator asks for; the second conversation is cut, the first one padded."""
    output = {"padding": True, "padding_side": side, "pad_to_multiple_of": 8}
    output |= {"truncation": True, "max_length": 48, "add_special_tokens": False}
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    found, expected = (
        one.apply_chat_template(CONVERSATIONS[:2], **options, processor_kwargs=output)
        for one in both
    )
    assert_same(found, expected)
    lengths = found["attention_mask"].sum(1).tolist()
    assert lengths[0] < 48 == lengths[1]
    output |= {"padding": "max_length", "max_length": 64}
    found, expected = (
        one.apply_chat_template(CONVERSATIONS[:2], **options, processor_kwargs=output)
        for one in both
    )
    assert_same(found, expected)
    assert found["input_ids"].shape == (2, 64)
    with pytest.raises(ValueError, match="needs max_length"):
        both[0].apply_chat_template(ASKED[0], tokenize=True, padding="max_length")
    with pytest.raises(ValueError, match="truncation leaves 2 of 4"):
        both[0].apply_chat_template(ASKED[0], tokenize=True, truncation=True, max_length=5)


def test_the_assistant_mask_equals_a_marked_templates(both):
    options: dict[str, Any] = {"tokenize": True, "return_dict": True}
    for chat in CONVERSATIONS:
        found, expected = (
            one.apply_chat_template(chat, **options, return_assistant_tokens_mask=True)
            for one in both
        )
        mask = [list(map(int, row)) for row in expected["assistant_masks"]]
        assert found["assistant_masks"] == mask
        assert 0 < sum(mask[0]) < len(mask[0])
        # The saved template has the marks, for programs that render it themselves.
        own = both[1].apply_chat_template(
            chat,
            **options,
            return_assistant_tokens_mask=True,
            chat_template=both[0].tokenizer.chat_template,
        )
        assert_same(own, expected)


def frames_of(number: int) -> np.ndarray:
    return np.stack([np.asarray(picture(seed)) for seed in range(number)])


def test_videos_in_memory_equal_their_files(both, tmp_path: Path):
    ours, _ = both
    frames = frames_of(3)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{number}.png")
    question = {"type": "text", "text": "What colour?"}

    def encode(video: Any) -> Any:
        chat = [{"role": "user", "content": [{"type": "video", "video": video}, question]}]
        return ours.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")

    expected = encode(str(tmp_path))
    assert len(expected["pixel_values"]) == 3
    for video in (
        frames,
        torch.from_numpy(frames).permute(0, 3, 1, 2),
        [Image.fromarray(frame) for frame in frames],
        [tmp_path / f"{number}.png" for number in range(3)],
    ):
        assert_same(encode(video), expected)
    text = ["<video><image>", "a<video>"]
    batch = ours(text=text, images=[picture(9)], videos=[frames, frames_of(2)])
    marks = (batch["input_ids"] == ours.tokenizer.convert_tokens_to_ids("<image>")).sum(1)
    assert marks.tolist() == [4 * 4, 2 * 4]
    assert torch.equal(batch["pixel_values"][:3], expected["pixel_values"])
    assert torch.equal(batch["pixel_values"][4:], expected["pixel_values"][:2])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({"text": "a", "images": [picture(0)]}, "0 <image> but 1 images"),
        (
            {"text": ["<image>", "<image>"], "images": [[picture(0)] * 2, []]},
            "row 0 of the text has 1 <image> but 2 images",
        ),
        ({"text": "a", "images_kwargs": {"size": 3}}, "images_kwargs are given"),
        ({"videos": ["a.mp4"]}, "give the processor text"),
    ],
)
def test_wrong_calls_are_explained(both, call: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        both[0](**call)
    with pytest.raises(ValueError, match="unknown options for messages"):
        both[0].apply_chat_template(ASKED[0], tokenize=True, return_length=True)


def ask(text: str, *images: Image.Image) -> Sample:
    """The sample of a message of images and a text."""
    turn = Turn("user", (*(Part("image") for _ in images), Part("text", text)))
    media = []
    for image in images:
        path = Path(image.info["path"])
        media.append(Media(kind="image", path=str(path)))
    return Sample(id="a", turns=(turn,), media=tuple(media))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(checkpoint)


def test_a_pipeline_answers_as_the_project_does(checkpoint: Path, tmp_path: Path):
    images = []
    for number in range(2):
        picture(number).save(tmp_path / f"{number}.png")
        images.append(Image.open(tmp_path / f"{number}.png"))
        images[-1].info["path"] = tmp_path / f"{number}.png"
    own = load(checkpoint, "cpu")
    samples = [ask("What colour?", images[0]), ask("yes no"), ask("Is there a dog?", *images)]
    expected = generate(*own, samples, 8)
    assert len(set(expected)) == 3
    pipe = pipeline("image-text-to-text", model=str(checkpoint), dtype=torch.float32)
    chats = [[user(images[0], "What colour?")], [{"role": "user", "content": "yes no"}]]
    chats.append([user(*images, "Is there a dog?")])
    options: dict[str, Any] = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 8}}
    for batch_size in (1, 3):
        answers = pipe(text=chats, **options, return_full_text=False, batch_size=batch_size)
        assert [answer[0]["generated_text"].strip() for answer in answers] == expected
    assert pipe.processor is not None
    prompt = pipe.processor.apply_chat_template(chats[0], add_generation_prompt=True)
    answer = pipe(images=images[:1], text=prompt, **options, return_full_text=False)
    assert answer[0]["generated_text"].strip() == expected[0]
    last = pipe(text=chats[0], **options)[0]["generated_text"][-1]
    assert (last["role"], last["content"].strip()) == ("assistant", expected[0])


def encode_asked(processor: Any, conversations: Any = ASKED) -> Any:
    return processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def test_assisted_generation_gives_the_greedy_tokens(loaded, checkpoint: Path):
    """One row, as transformers requires; by other weights, the same, and by prompt lookup."""
    model, processor = loaded
    other = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    inputs = encode_asked(processor, ASKED[2])
    greedy = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for help_ in (
        {"assistant_model": other},
        {"assistant_model": model},
        {"prompt_lookup_num_tokens": 2},
    ):
        found = model.generate(**inputs, max_new_tokens=12, do_sample=False, **help_)
        assert torch.equal(found, greedy)
