"""Generation from a small random model, against a plain greedy loop without cache and padding."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.modeling_outputs import CausalLMOutputWithPast

from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.generate import PromptEncoder, generate, generate_batch, load
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[CoatVlm, CoatVlmProcessor]:
    model, processor = load(checkpoint, "cpu")
    assert isinstance(model, CoatVlm)
    assert isinstance(processor, CoatVlmProcessor)
    return model, processor


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> list[Media]:
    """Two pictures, and a video as a folder of three frames."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip").mkdir()
    names = ["a.png", "b.png", "clip/0.png", "clip/1.png", "clip/2.png"]
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    images = [Media(kind="image", path=str(folder / name)) for name in names[:2]]
    return [*images, Media(kind="video", path=str(folder / "clip"))]


def ask(text: str, *media: Media, answer: str | None = None) -> Sample:
    parts = [part for one in media for part in (Part(one.kind), Part("text", "\n"))]
    turns = [Turn("user", (*parts, Part("text", text)))]
    if answer is not None:
        turns.append(Turn("assistant", (Part("text", answer),)))
    return Sample(id=text, turns=tuple(turns), media=tuple(media))


def samples_of(media: list[Media]) -> list[Sample]:
    a, b, clip = media
    return [
        ask("What colour?", a),
        ask("Is there a dog? Is there a ball on the left?", a, b),
        ask("yes no"),
        ask("What is the colour of the ball?", clip),
        ask("What colour?", b),
    ]


@torch.inference_mode()
def greedy(model: CoatVlm, encoder: PromptEncoder, sample: Sample, max_new_tokens: int) -> str:
    """One token at a time, the whole sequence every time."""
    batch = encoder([sample])
    ids, start = batch["input_ids"], batch["input_ids"].shape[1]
    while ids.shape[1] < start + max_new_tokens:
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=batch["pixel_values"],
            use_cache=False,
        ).logits
        logits[..., model.config.image_token_id] = -torch.inf  # there is no image to put there
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        if int(ids[0, -1]) in encoder.stop_token_ids:
            break
    return encoder.tokenizer.decode(ids[0, start:], skip_special_tokens=True).strip()


def test_left_padded_batch_equals_a_plain_loop(
    loaded: tuple[CoatVlm, CoatVlmProcessor], media: list[Media]
):
    model, processor = loaded
    samples = samples_of(media)
    expected = [greedy(model, PromptEncoder(processor), sample, 12) for sample in samples]
    assert len(set(expected)) == len(expected)  # the test could not see a mix-up otherwise
    assert generate(model, processor, samples, 12) == expected
    assert generate(model, processor, samples[:1], 12) == expected[:1]


def test_a_published_models_sampling_settings_are_not_used(
    checkpoint: Path, loaded: tuple[CoatVlm, CoatVlmProcessor], media: list[Media]
):
    expected = generate(*loaded, samples_of(media), 12)
    model, processor = load(checkpoint, "cpu")
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 3.0
    assert generate(model, processor, samples_of(media), 12) == expected


def test_generation_stops_at_the_token_trained_after_answers(
    loaded: tuple[CoatVlm, CoatVlmProcessor],
):
    model, processor = loaded
    encoder = PromptEncoder(processor)
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in encoder.stop_token_ids
    steps = []

    def always_end(_model: object, _args: object, output: CausalLMOutputWithPast) -> None:
        assert output.logits is not None
        output.logits[..., end] = 1e9
        steps.append(1)

    hook = model.register_forward_hook(always_end)
    answers = generate_batch(model, encoder, encoder([ask("What?"), ask("Is there a dog?")]), 10)
    hook.remove()
    assert answers == ["", ""]
    assert len(steps) == 1


def test_a_bf16_checkpoint_runs_in_fp32_on_a_cpu_unless_told_otherwise(
    checkpoint: Path, loaded: tuple[CoatVlm, CoatVlmProcessor]
):
    assert not loaded[0].training
    assert {parameter.dtype for parameter in loaded[0].parameters()} == {torch.float32}
    model, _ = load(checkpoint, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), loaded[0].get_parameter(name)), name


@pytest.mark.parametrize(
    ("name", "content"), [("processor_config.json", None), ("tokenizer.json", "{")]
)
def test_a_damaged_processor_is_named(
    checkpoint: Path, tmp_path: Path, name: str, content: str | None
):
    """Without its settings, images would be read with another model's defaults."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^{folder}: the processor cannot be loaded: "):
        load(folder, "cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (json.dumps({"model_type": "llama"}), "its model_type is 'llama'"),
        ("{}", "its model_type is None"),
        ("{", "not a valid JSON file"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path: Path, config: str, message: str):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
