"""Published models in the data engine and in training, compared with transformers."""

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_folders import MAKERS, make_folders
from family_samples import IMAGES, assert_equal_gradients, conversation, picture, sample_of
from one_stage import one_stage
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from coat_data.load.check_labels import check_labels, verify_template
from coat_data.load.collate import collate
from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import DataError, Sample
from coat_vlm.config.stage import LoraTraining
from coat_vlm.generate import PromptEncoder, generate
from coat_vlm.model.families import FAMILIES, find_family, find_parts
from coat_vlm.model.family_model import (
    complete_inputs,
    find_unused,
    load_family_model,
    trainable_class,
)
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.optim import param_groups
from coat_vlm.train.model_setup import set_trainable
from coat_vlm.train.passes import copy_batch_to_device

ENDS = {"gemma3": "<end_of_turn>", "gemma4": "<turn|>", "paligemma": "<eos>"}
ENDS |= dict.fromkeys(("llava", "llava_next", "mistral3"), "</s>")
ENDS |= dict.fromkeys(("idefics3", "smolvlm"), "<end_of_utterance>")
CPU = torch.device("cpu")

QUICK = FAMILIES.keys() - {"glm46v", "idefics3", "llava", "qwen2_vl", "qwen3_5", "qwen3_vl_moe"}
"""One of the families that are alike."""
folder = make_folders(FAMILIES, quick=[*QUICK])


@pytest.fixture(scope="module")
def processor(folder: Path) -> FamilyProcessor:
    return FamilyProcessor.load("model.pretrained", str(folder), 1024)


def messages(sample: Sample) -> tuple[list[Any], list[Image.Image]]:
    """The conversation as a user of transformers writes it, without the line break."""
    found = [
        {
            "role": turn.role,
            "content": [
                {"type": "text", "text": part.text.lstrip("\n")}
                if part.kind == "text"
                else {"type": "image"}
                for part in turn.parts
            ],
        }
        for turn in sample.turns
    ]
    shown = [Image.open(io.BytesIO(m.data or b"")).convert("RGB") for m in sample.media]
    return found, shown


def render(reader: Any, name: str, found: list[Any], **options: Any) -> str:
    if FAMILIES[name].has_prefix:  # the processor formats the question itself
        *images, text = found[0]["content"]
        return "<image>" * len(images) + text["text"]
    text = reader.apply_chat_template(found, tokenize=False, **options)
    if FAMILIES[name].adds_end_token:  # as LLaVA-1.5 was trained
        text = text.replace("red ", "red</s>").replace("yes ", "yes</s>")
    if name.startswith("glm"):  # the template writes no end token; the next turn's begins
        text += "" if options else reader.tokenizer.eos_token
    if name == "llava_onevision":  # answers are trained behind the text for generation
        text = text.replace("assistant \n", "assistant\n")
    return text


def read(folder: Path, samples: list[Sample], *, prompts: bool = False) -> Any:
    """The inputs that the published processor makes of conversations or of their prompts."""
    reader: Any = AutoProcessor.from_pretrained(folder)
    asked = {"add_generation_prompt": True} if prompts else {}
    rows = [messages(sample) for sample in samples]
    texts = [
        render(reader, folder.name, found[: -1 if prompts else None], **asked) for found, _ in rows
    ]
    images = [shown for _, shown in rows]
    options: dict[str, Any] = {"images": images} if any(images) else {}
    if reader.chat_template is None:
        options |= {} if prompts else {"suffix": [sample.turns[-1].text for sample in samples]}
    else:  # as apply_chat_template does if the template writes the begin-of-text token
        options["add_special_tokens"] = "bos_token" not in reader.chat_template
    return reader(text=texts, **options, return_tensors="pt", padding=True, padding_side="right")


def mixed(folder: Path) -> list[Sample]:
    names = ["wide", "two images", "text"]
    if FAMILIES[folder.name].has_prefix:  # its processor takes no rows without an image
        names.pop()
    return [sample_of(folder, name) for name in names]


@pytest.mark.parametrize("name", IMAGES)
def test_inputs_are_those_of_the_processor(
    folder: Path, processor: FamilyProcessor, name: str
) -> None:
    if name == "text" and FAMILIES[folder.name].has_prefix:
        pytest.skip("its processor takes no rows without an image")
    sample = sample_of(folder, name)
    shown = sample.media
    expected = read(folder, [sample])
    encoder = pickle.loads(pickle.dumps(processor.encoder()))
    encoded = encoder(sample)
    assert encoded.input_ids.tolist() == expected["input_ids"][0].tolist()
    inputs = {"pixel_values": encoded.pixel_values, **encoded.extras} if shown else {}
    assert set(inputs) == {name for name in FAMILIES[folder.name].inputs if shown}
    for name, value in inputs.items():
        assert torch.equal(value, expected[name]), name
    labels = [label for label in encoded.labels.tolist() if label != IGNORE_INDEX]
    ends = [ENDS.get(folder.name, "<|im_end|>")] * 2
    if folder.name.startswith("glm"):
        ends = ["<|user|>", processor.tokenizer.eos_token]
    answers = [turn.text for turn in sample.turns if turn.role == "assistant"]
    said = "".join(map("".join, zip(answers, ends, strict=False)))
    assert processor.tokenizer.decode(labels).replace(" ", "") == said
    prompt = encoder.prompt(sample).input_ids.tolist()
    assert prompt == encoded.input_ids[: len(prompt)].tolist()
    assert encoder.measure(sample).tokens == len(encoded.input_ids)


def test_settings_that_older_folders_lack(
    folder: Path, processor: FamilyProcessor, tmp_path: Path
) -> None:
    """Without processor_config.json, the numbers of an image's tokens are those of config.json."""
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    settings = json.loads((old / "processor_config.json").read_text())
    (old / "processor_config.json").unlink()
    for part, file in (
        ("image_processor", "preprocessor"),
        ("video_processor", "video_preprocessor"),
    ):
        if part in settings:
            (old / f"{file}_config.json").write_text(json.dumps(settings[part]))
    sample = sample_of(folder, "two images")
    found = FamilyProcessor.load("model.pretrained", str(old), 1024).encoder()(sample)
    expected = processor.encoder()(sample)
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert torch.equal(found.pixel_values, expected.pixel_values)


def test_label_masks(folder: Path, processor: FamilyProcessor) -> None:
    encoder = processor.encoder()
    verify_template(encoder)
    for name in IMAGES:
        sample = sample_of(folder, name)
        encoded = encoder(sample)
        check_labels(sample, encoded.input_ids.tolist(), encoded.labels.tolist(), encoder)


def load_both(folder: Path, in_own_memory: Callable[[Any], Any]) -> tuple[Any, Any]:
    ours = load_family_model("model.pretrained", str(folder), torch.float32)
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return in_own_memory(ours), in_own_memory(stock)


def test_logits_and_loss_are_those_of_transformers(
    folder: Path, processor: FamilyProcessor, in_own_memory: Callable[[Any], Any]
) -> None:
    ours, stock = load_both(folder, in_own_memory)
    assert type(ours).__name__ == type(stock).__name__
    stock.train()
    ours.train()  # no dropout
    expected = stock(**read(folder, mixed(folder)))
    encoded = list(map(processor.encoder(), mixed(folder)))
    batch = collate(encoded, pad_token_id=processor.tokenizer.pad_token_id)
    inputs = copy_batch_to_device(batch, CPU)
    labels = inputs.pop("labels")
    used = batch["attention_mask"].bool()
    assert torch.equal(ours(**inputs, labels=labels).logits[used], expected.logits[used])
    # The loss in chunks, without the mask: right padding changes no supervised logits.
    loss = ours(**inputs, labels=labels, num_items_in_batch=7.0, skip_logits=True)
    assert loss.logits is None
    target = F.cross_entropy(
        expected.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    assert loss.loss.item() == pytest.approx(target.item() / 7, rel=1e-6)
    loss.loss.backward()
    (target / 7).backward()
    assert any(p.grad is not None for p in find_parts(ours, ours.family)["vision"].parameters())
    assert_equal_gradients(ours, stock)


@pytest.fixture
def with_unused(folder: Path, processor: FamilyProcessor) -> Any:
    """A model whose tower may have blocks and a pooling head that no output uses."""
    config: Any = find_family("model.pretrained", str(folder))[1]
    if folder.name in ("gemma3", "llava_onevision"):
        config.vision_config.vision_use_head = True
    if folder.name == "llava_onevision":
        config.vision_feature_layer = -2
    torch.manual_seed(0)
    model: Any = trainable_class(FAMILIES[config.model_type])(config)
    model.unused = find_unused(model, processor.encoder().filler)
    return model


def test_what_is_found_as_unused_has_no_gradient_in_transformers(
    folder: Path, processor: FamilyProcessor, with_unused: Any
) -> None:
    encoded = list(map(processor.encoder(), mixed(folder)))
    batch = collate(encoded, pad_token_id=processor.tokenizer.pad_token_id)
    stock: Any = type(with_unused).__mro__[2](with_unused.config)
    stock(**complete_inputs(with_unused, copy_batch_to_device(batch, CPU))).loss.backward()
    expected = {name for name, parameter in stock.named_parameters() if parameter.grad is None}
    wholes = [with_unused.get_submodule(name) for name in with_unused.unused]
    found = {id(parameter) for whole in wholes for parameter in whole.parameters()}
    assert {name for name, p in with_unused.named_parameters() if id(p) in found} == expected
    tower, block = "model.vision_tower", "encoder.layers.1"
    names = {
        **dict.fromkeys(("llava", "llava_next"), (f"{tower}.{block}", f"{tower}.post_layernorm")),
        "llava_onevision": (f"{tower}.{block}", f"{tower}.post_layernorm", f"{tower}.head"),
        "gemma3": (f"{tower}.head",),
    }
    assert with_unused.unused == names.get(folder.name, ())


@pytest.mark.parametrize("lora", [None, LoraTraining(rank=4, modules=["vision", "language"])])
def test_what_no_output_uses_gets_neither_optimizer_state_nor_adapter(
    with_unused: Any, lora: LoraTraining | None
) -> None:
    stage = one_stage("vision", "projector", "language", lora=lora, weight_decay=0.1)
    set_trainable(with_unused, stage)
    groups = param_groups(with_unused, stage)
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    names = [name for name, p in with_unused.named_parameters() if id(p) in trained]
    assert any(name.startswith(with_unused.family.vision) for name in names)
    assert not [name for name in names if name.startswith(tuple(with_unused.unused) or "-")]
    assert bool(lora) == any(".lora_" in name for name in names)


def test_a_text_batch_trains_the_tower_with_zeros(folder: Path, processor: FamilyProcessor) -> None:
    """All ranks must use the same parameters in each step."""
    model: Any = load_family_model("model.pretrained", str(folder), torch.float32).train()
    encoder = processor.encoder()
    text, pad = encoder(sample_of(folder, "text")), processor.tokenizer.pad_token_id
    short = encoder(conversation(answers=("no",)))
    batch = collate([short, text], pad_token_id=pad)
    assert len(batch["pixel_values"])
    loss = model(**copy_batch_to_device(batch, CPU), skip_logits=True).loss
    loss.backward()
    alone = model(input_ids=text.input_ids[None], labels=text.labels[None], skip_logits=True).loss
    count = [int((one.labels != IGNORE_INDEX).sum()) for one in (short, text)]
    other = model(input_ids=short.input_ids[None], labels=short.labels[None], skip_logits=True).loss
    expected = (other * count[0] + alone * count[1]) / sum(count)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    seen = {
        name: parameter.grad
        for role in ("vision", "projector")
        for name, parameter in find_parts(model, model.family)[role].named_parameters()
        if parameter.grad is not None
    }
    assert seen
    assert not any(gradient.any() for gradient in seen.values())
    # In a batch with images, nothing is appended.
    one = encoder(sample_of(folder, "one image"))
    assert len(collate([text, one], pad_token_id=pad)["pixel_values"]) == len(one.pixel_values)


def test_answers_are_those_of_transformers(
    folder: Path, processor: FamilyProcessor, in_own_memory: Callable[[Any], Any]
) -> None:
    ours, stock = load_both(folder, in_own_memory)
    samples = mixed(folder)[:2]
    expected = []
    for sample in samples:
        inputs = read(folder, [sample], prompts=True)
        assert torch.equal(PromptEncoder(processor)([sample])["input_ids"], inputs["input_ids"])
        inputs.pop("labels", None)
        output = stock.generate(**inputs, max_new_tokens=6, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :]
        expected.append(processor.tokenizer.decode(ids, skip_special_tokens=True).strip())
        assert generate(ours.eval(), processor, [sample], 6) == expected[-1:]
    assert len(generate(ours, processor, samples, 6)) == 2


def test_what_is_refused(folder: Path, processor: FamilyProcessor, tmp_path: Path) -> None:
    processor = FamilyProcessor.load("model.pretrained", str(folder), 8)
    with pytest.raises(DataError, match="tokens, including 1 images, are more than max_length"):
        processor.encoder()(sample_of(folder, "one image"))
    processor._processor.chat_template = "{{ raise_exception('no such thing') }}"
    # A recipe with model.pretrained cannot choose another template.
    with pytest.raises(DataError, match=r"no such thing; change chat_template\.jinja in a local"):
        processor.encoder()(sample_of(folder, "one image"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"'bert'; the families that can be trained are .*Qwen3-VL"
    ):
        find_family("model.pretrained", str(tmp_path))


def test_attention_that_transformers_cannot_compute(tmp_path: Path) -> None:
    MAKERS["paligemma"](tmp_path)
    with pytest.raises(ValueError, match=r"attention with sdpa; set model\.attn_impl"):
        load_family_model("model.pretrained", str(tmp_path), torch.float32, "sdpa")


def test_an_image_is_shrunk_to_the_pixels_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    family, _ = find_family("model.pretrained", str(folder))
    if not family.limits_pixels:
        with pytest.raises(ValueError, match=f"no effect with {family.name}.*Qwen2.5-VL, Qwen2-VL"):
            FamilyProcessor.load("model.pretrained", str(folder), 1024, 512)
        return
    with pytest.raises(ValueError, match=r"max_pixels=9 is less than the (64|32) pixels"):
        FamilyProcessor.load("model.pretrained", str(folder), 1024, 9)
    sample = conversation(picture(1, 400, 300))
    sizes = {}
    for pixels in (None, 256, 512):
        processor = FamilyProcessor.load("model.pretrained", str(folder), 1024, pixels)
        processor.save_pretrained(tmp_path)  # evaluation and servers read the folder
        saved = AutoProcessor.from_pretrained(tmp_path).image_processor
        shown = Image.new("RGB", (400, 300))
        grid = saved([[shown]], return_tensors="pt")["image_grid_thw"]
        assert torch.equal(processor.encoder()(sample).extras["image_grid_thw"], grid)
        sizes[pixels] = int(grid.prod()) * saved.patch_size**2
    assert 0 < sizes[256] <= 256 < sizes[512] <= 512 < sizes[None]


@pytest.mark.parametrize("pad", [None, "<image_pad>", 10_000])
def test_a_pad_token_is_in_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pad: str | int | None
) -> None:
    """The published one may be missing, that of images, or outside of it."""
    folder = tmp_path / "qwen3_vl"
    MAKERS["qwen3_vl"](folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = pad if isinstance(pad, str) else None
    settings["eos_token"] = None if pad is None else settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    processor = FamilyProcessor.load("model.pretrained", str(folder), 1024)
    assert 0 <= processor.pad_token_id < len(processor.tokenizer)
