"""Videos of published models; the reference is transformers' own processor and model.

It gets every frame of a clip, decoded one after the other, and samples them itself.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clips import write_clip
from family_folders import make_folders
from family_samples import assert_equal_gradients
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from coat_data.load.collate import collate
from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_vlm.config.model import VideoConfig
from coat_vlm.generate import PromptEncoder, generate
from coat_vlm.model.families import FAMILIES, find_parts
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.train.passes import copy_batch_to_device

CPU = torch.device("cpu")
ENDED = {"attention_mask": 1, "mm_token_type_ids": 0}
MIXES_NOT = ("glm46v", "glm4v", "smolvlm")
"""Families of which transformers does not take images next to videos."""
FRAMES = {name for name, family in FAMILIES.items() if family.videos.frames is not None}
"""Families whose videos are images."""


QUICK = ("gemma3", "glm4v", "internvl", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""One of the families whose rows with videos are alike."""
folder = make_folders(FAMILIES, quick=QUICK)


@pytest.fixture(scope="module")
def processor(folder: Path) -> FamilyProcessor:
    return FamilyProcessor.load("model.pretrained", str(folder), 2048)


def pictures(number: int, width: int, height: int) -> np.ndarray:
    draw = np.random.default_rng(number)
    coarse = draw.integers(0, 256, (number, height // 8, width // 8, 3), dtype=np.uint8)
    return coarse.repeat(8, 1).repeat(8, 2)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Media]:
    """Clips of several rates, lengths and shapes, and of all orders of decoding."""
    folder = tmp_path_factory.mktemp("clips")
    made = {
        "wide.mp4": (pictures(50, 96, 48), {"rate": 10, "options": {"bf": "2", "g": "12"}}),
        "quick.mp4": (pictures(90, 48, 64), {"rate": 30}),
        "slow.mkv": (pictures(7, 64, 64), {"rate": 1}),
        "short.mp4": (pictures(3, 64, 48), {"rate": 25}),
    }
    for name, (frames, options) in made.items():
        write_clip(folder / name, frames, **options)
    found = {name: Media(kind="video", path=str(folder / name)) for name in made}
    for number, values in enumerate(pictures(6, 40, 24)):
        Image.fromarray(values).save(folder / f"{number}.png")
    frames = tuple(str(folder / f"{number}.png") for number in range(6))
    found["frames"] = Media(kind="video", path=frames[0], frames=frames, fps=2.0)
    return found


def decode(media: Media) -> tuple[np.ndarray, dict[str, Any]]:
    """Return every frame, and what transformers calls metadata."""
    if media.frames:
        frames, rate = [Image.open(path).convert("RGB") for path in media.frames], media.fps
    else:
        with av.open(media.path or "") as container:
            stream = container.streams.video[0]
            frames, rate = [f.to_image() for f in container.decode(stream)], stream.average_rate
    assert rate is not None
    values = np.stack([np.asarray(frame) for frame in frames])
    about = {"total_num_frames": len(values), "fps": float(rate)}
    return values, {**about, "duration": len(values) / float(rate)}


@pytest.fixture(autouse=True)
def one_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaliGemma takes one question and answer."""
    if folder.name == "paligemma":
        defaults = {"answers": ("red",)}
        monkeypatch.setattr(conversation, "__kwdefaults__", defaults)


def conversation(*media: Media, answers: tuple[str, ...] = ("red", "yes")) -> Sample:
    turns: list[Turn] = []
    for number, answer in enumerate(answers):
        shown = tuple(Part(one.kind) for one in media) if not number else ()
        turns.append(Turn("user", (*shown, Part("text", f"What color is {number}?"))))
        turns.append(Turn("assistant", (Part("text", answer),)))
    return Sample(id="1", turns=tuple(turns), media=media, source="rows.json")


def ask_stock(
    stock: Any, name: str, sample: Sample, *, prompt: bool = False, as_saved: bool = False
) -> dict[str, torch.Tensor]:
    """What transformers makes of a conversation with the decoded frames, sampled by itself.

    ``as_saved``: with the sampling in its folder.
    """
    media, metadata, messages = iter(sample.media), [], []
    for turn in sample.turns[:-1] if prompt else sample.turns:
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
            elif (medium := next(media)).kind == "image":
                content.append({"type": "image", "image": Image.open(medium.path or "")})
            elif name in FRAMES:
                content += frames_of(name, *decode(medium), 6 if as_saved else 8)
            else:
                values, about = decode(medium)
                content.append({"type": "video", "video": values})
                metadata.append(about)
        messages.append({"role": turn.role, "content": content})
    options: dict[str, Any] = {"video_metadata": metadata} if metadata else {}
    options |= {} if as_saved or not metadata else sampling_of(stock, name, metadata)
    if name == "paligemma":
        return ask_paligemma(stock, messages)
    template = stock.chat_template
    if name == "llava_onevision":  # answers are trained behind the text for generation
        space = "(' ' if message['role'] != 'assistant' else '')"
        template = template.replace("message['role'] + ' '", f"message['role'] + {space}")
    elif name == "llava":  # as it was trained
        end = "(' ' if message['role'] != 'assistant' else eos_token)"
        template = template.replace("part['text'] + ' '", f"part['text'] + {end}")
    elif name == "smolvlm":
        template = None  # its processor has another one for videos
    inputs = stock.apply_chat_template(
        messages, template, tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=prompt, processor_kwargs=options,
    )  # fmt: skip
    return end_last(inputs, stock) if name.startswith("glm") and not prompt else inputs


def sampling_of(stock: Any, name: str, metadata: list[dict[str, Any]]) -> dict[str, Any]:
    """The frames that the publishers sample."""
    sampling: dict[str, Any] = {**FAMILIES[name].videos.sampling}
    if "fps" not in sampling:  # the processor refuses clips with fewer frames
        few = min(about["total_num_frames"] for about in metadata)
        number = sampling.get("num_frames", getattr(stock.video_processor, "num_frames", 0))
        sampling["num_frames"] = min(number, few)
    return {"do_sample_frames": True, **sampling}


def ask_paligemma(stock: Any, messages: list[Any]) -> dict[str, torch.Tensor]:
    """The processor formats the question itself."""
    *shown, text = messages[0]["content"]
    images = [[part["image"] for part in shown]]
    suffix = {"suffix": [one["content"][0]["text"] for one in messages[1:]]}
    found = stock(
        text=["<image>" * len(shown) + text["text"]],
        images=images,
        **(suffix if messages[1:] else {}),
    )
    return found.convert_to_tensors("pt")


def frames_of(
    name: str, values: np.ndarray, about: dict[str, Any], number: int
) -> list[dict[str, Any]]:
    """Frames at equal distances as a user of the processor writes them, Gemma 3's with times."""
    found: list[dict[str, Any]] = []
    number = min(number, len(values))
    for place in (int(step * len(values) / number) for step in range(number)):
        if name == "gemma3":
            found.append({"type": "text", "text": f"Frame {round(place / about['fps'], 2)}:"})
        found.append({"type": "image", "image": Image.fromarray(values[place])})
    return found


def end_last(inputs: Any, stock: Any) -> Any:
    """Add the end token, which GLM-V's template does not write."""
    for name, value in {"input_ids": stock.tokenizer.eos_token_id, **ENDED}.items():
        inputs[name] = F.pad(inputs[name], (0, 1), value=value)
    return inputs


def picture(folder: Path, number: int = 1, width: int = 40, height: int = 24) -> Media:
    path = folder / f"{number}.png"
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return Media(kind="image", path=str(path))


@pytest.mark.parametrize("name", ["wide.mp4", "quick.mp4", "slow.mkv", "short.mp4", "frames"])
def test_inputs_are_those_of_the_processor(
    folder: Path, processor: FamilyProcessor, clips: dict[str, Media], name: str
) -> None:
    stock: Any = AutoProcessor.from_pretrained(folder)
    sample = conversation(clips[name])
    if (folder.name, name) == ("glm46v", "short.mp4"):
        with pytest.raises(DataError, match=r"selects none of its 3 frames"):
            processor.encoder()(sample)
        return
    expected = ask_stock(stock, folder.name, sample)
    encoder = pickle.loads(pickle.dumps(processor.encoder()))
    encoded = encoder(sample)
    assert encoded.input_ids.tolist() == expected["input_ids"][0].tolist()
    inputs = {"pixel_values": encoded.pixel_values, **encoded.extras}
    expected = join_grids(folder.name, expected)
    compared = {name for name, value in inputs.items() if len(value)} - {"video_frames"}
    ignored = {"input_ids", "attention_mask", "labels"} | {"mm_token_type_ids", "token_type_ids"}
    assert compared == expected.keys() - ignored
    for one in compared:
        assert torch.equal(inputs[one].flatten(), expected[one].flatten()), one
    labels = [label for label in encoded.labels.tolist() if label != IGNORE_INDEX]
    assert labels == encoder(conversation()).labels[encoder(conversation()).labels != -100].tolist()
    prompt = ask_stock(stock, folder.name, sample, prompt=True)["input_ids"]
    assert torch.equal(PromptEncoder(processor)([sample])["input_ids"], prompt)
    size = encoder.measure(sample)  # by the header
    assert size.tokens == len(encoded.input_ids)
    times = PromptEncoder(processor).frame_times(sample.media[0])
    assert times is not None
    assert len(times) == size.images


def join_grids(name: str, inputs: Any) -> dict[str, torch.Tensor]:
    """GLM-V's video as its tower and its positions take it: an image of each two frames."""
    found = dict(inputs)
    if name.startswith("glm") and "video_grid_thw" in found:
        grids = found.pop("video_grid_thw")
        split = [torch.tensor([[1, *grid[1:].tolist()]] * int(grid[0])) for grid in grids]
        found |= {"image_grid_thw": torch.cat(split)}
        found |= {"pixel_values": found.pop("pixel_values_videos")}
        found["mm_token_type_ids"] = found["mm_token_type_ids"].clamp(max=1)
    return found


def read_all(stock: Any, name: str, sample: Sample) -> dict[str, torch.Tensor]:
    """As :func:`ask_stock`, of a conversation with images next to videos.

    SmolVLM's processor drops the pixels of these images, and GLM-V's model takes none.
    """
    inputs = ask_stock(stock, name, sample)
    if name in MIXES_NOT and len({medium.kind for medium in sample.media}) > 1:
        inputs = join_grids(name, inputs)
        each = [join_grids(name, ask_stock(stock, name, conversation(one))) for one in sample.media]
        for one in {"pixel_values", "pixel_attention_mask", "image_grid_thw"} & each[0].keys():
            dim = 1 if name == "smolvlm" else 0
            inputs[one] = torch.cat([own[one] for own in each], dim)
    return inputs


def test_images_and_videos_of_a_conversation(
    folder: Path, processor: FamilyProcessor, clips: dict[str, Media], tmp_path: Path
) -> None:
    """In the order in which the chat template writes them, which may not be that of the row."""
    video = clips["wide.mp4"]  # twice, as processors refuse videos of several lengths
    sample = conversation(video, picture(tmp_path), video)
    expected = read_all(AutoProcessor.from_pretrained(folder), folder.name, sample)
    encoded = processor.encoder()(sample)
    assert processor.encoder().measure(sample).tokens == len(encoded.input_ids)
    assert encoded.input_ids.tolist() == expected["input_ids"][0].tolist()
    inputs = {"pixel_values": encoded.pixel_values, **encoded.extras}
    for one in expected.keys() & inputs.keys():
        assert torch.equal(inputs[one].flatten(), expected[one].flatten()), one


def old_layout(folder: Path, target: Path) -> None:
    """Copy a folder as transformers 4 wrote it: Qwen2.5-VL's has no file for videos."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    whole = json.loads((folder / "processor_config.json").read_text())
    images, videos = (whole.pop(f"{part}_processor", None) for part in ("image", "video"))
    if folder.name != "qwen2_5_vl" and videos is not None:
        (target / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (target / "preprocessor_config.json").write_text(json.dumps(images))
    (target / "processor_config.json").write_text(json.dumps(whole))


SAMPLED = {
    6: VideoConfig(num_frames=6),
    8: VideoConfig(sampling="fps", fps=4.0, max_frames=8),
    20: VideoConfig(sampling="fps", fps=4.0),
}
"""By the frames of 50 at 10 a second."""


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("number", SAMPLED)
def test_frames_of_a_recipe_are_in_the_saved_folder(
    folder: Path, clips: dict[str, Media], tmp_path: Path, number: int, old: bool
) -> None:
    source, family = tmp_path / folder.name, FAMILIES[folder.name]
    (old_layout if old else partial(shutil.copytree, dirs_exist_ok=True))(folder, source)
    load = partial(FamilyProcessor.load, "model.pretrained", str(source), 1024)
    if not family.videos.settings or (number != 6 and "fps" not in family.videos.settings):
        with pytest.raises(ValueError, match=rf"has no effect with {family.name}; .*; allowed: "):
            load(None, SAMPLED[number])
        return
    sample = conversation(clips["wide.mp4"])
    processor = load(256 if family.limits_pixels else None, SAMPLED[number])
    encoded = processor.encoder()(sample)
    assert encoded.counts["images"] == number
    processor.save_pretrained(source)
    saved = FamilyProcessor.load("model.pretrained", str(source), 1024)
    assert torch.equal(saved.encoder()(sample).input_ids, encoded.input_ids)
    found = ask_stock(AutoProcessor.from_pretrained(source), folder.name, sample, as_saved=True)
    assert encoded.input_ids.tolist() == found["input_ids"][0].tolist()
    if (grid := encoded.extras.get("video_grid_thw")) is not None:
        assert torch.equal(found["video_grid_thw"], grid)
        assert 0 < grid[0, 1:].prod() * saved.image_processor.patch_size**2 <= 256


@pytest.fixture
def rows(folder: Path, clips: dict[str, Media], tmp_path: Path) -> list[Sample]:
    """A text, an image, and videos of several lengths, also with an image."""
    short = "quick.mp4" if folder.name == "glm46v" else "short.mp4"  # of which it takes no frame
    found = [
        conversation(),
        conversation(picture(tmp_path, 2, 90, 20)),
        conversation(clips["wide.mp4"], answers=("blue",)),
        conversation(picture(tmp_path), clips[short]),
        conversation(clips["slow.mkv"]),
    ]
    return found[folder.name == "paligemma" :]  # its processor takes no text


def test_loss_and_gradients_are_those_of_transformers(
    folder: Path,
    processor: FamilyProcessor,
    rows: list[Sample],
    in_own_memory: Callable[[Any], Any],
) -> None:
    """Of a batch with texts, images and videos, against the rows one by one."""
    ours: Any = load_family_model("model.pretrained", str(folder), torch.float32).train()
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    ours, stock = in_own_memory(ours), in_own_memory(stock)
    reader: Any = AutoProcessor.from_pretrained(folder)
    encoded = [processor.encoder()(sample) for sample in rows]
    batch = collate(encoded, pad_token_id=processor.pad_token_id)
    passes = count_calls(ours)
    loss = ours(**copy_batch_to_device(batch, CPU), num_items_in_batch=7.0, skip_logits=True).loss
    assert passes == [1]
    loss.backward()
    total = 0.0
    for sample, own in zip(rows, encoded, strict=True):
        logits = stock(**read_all(reader, folder.name, sample)).logits
        expected = F.cross_entropy(logits[0, :-1], own.labels[1:], reduction="sum") / 7
        expected.backward()
        total += expected.item()
    # FP32 sums in another order.
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert_equal_gradients(ours, stock, 1e-6)


def count_calls(model: Any) -> list[int]:
    """Count the passes of the tower's first block."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    tower = find_parts(model, model.family)["vision"]
    first = next(one for name, one in tower.named_modules() if name.endswith(".0"))
    first.register_forward_hook(count)
    return calls


def test_answers_are_those_of_transformers(
    folder: Path,
    processor: FamilyProcessor,
    rows: list[Sample],
    in_own_memory: Callable[[Any], Any],
) -> None:
    ours: Any = load_family_model("model.pretrained", str(folder), torch.float32).eval()
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ours, stock = in_own_memory(ours), in_own_memory(stock)
    reader: Any = AutoProcessor.from_pretrained(folder)
    expected = []
    for sample in rows:
        kinds = {medium.kind for medium in sample.media}
        if folder.name in MIXES_NOT and len(kinds) > 1:
            expected.append(generate(ours, processor, [sample], 6)[0])
            continue
        inputs = ask_stock(reader, folder.name, sample, prompt=True)
        output = stock.generate(**inputs, max_new_tokens=6, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :]
        expected.append(reader.tokenizer.decode(ids, skip_special_tokens=True).strip())
        assert generate(ours, processor, [sample], 6) == expected[-1:]
    assert len(generate(ours, processor, rows[-3:], 6)) == 3
    texts = generate(ours, processor, rows, 6)
    assert [text[:2] for text in texts] == [text[:2] for text in expected]


def test_a_batch_of_texts_and_videos_gets_no_filler(
    processor: FamilyProcessor, rows: list[Sample]
) -> None:
    encoder = processor.encoder()
    text, video = encoder(conversation()), encoder(rows[-1])
    batch = collate([text, video], pad_token_id=processor.pad_token_id)
    assert batch["input_ids"][0, : len(text.input_ids)].tolist() == text.input_ids.tolist()
    assert batch["attention_mask"][0].sum() == len(text.input_ids)


def test_what_is_refused(folder: Path, clips: dict[str, Media], tmp_path: Path) -> None:
    processor = FamilyProcessor.load("model.pretrained", str(folder), 8)
    with pytest.raises(DataError, match=r"including 1 videos, are more than.*fewer frames"):
        processor.encoder()(conversation(clips["slow.mkv"]))
    encoder = FamilyProcessor.load("model.pretrained", str(folder), 1024).encoder()
    untimed = replace(clips["frames"], fps=None)
    videos = FAMILIES[folder.name].videos
    if videos.timed:
        with pytest.raises(DataError, match=r"has no times, which .*\"fps\": 2"):
            encoder(conversation(untimed))
    else:
        assert encoder(conversation(untimed)).counts["images"] == 6
    missing = Media(kind="video", path=str(tmp_path / "no.mp4"))
    with pytest.raises(DataError, match=r"rows\.json:1: .*no such file"):
        encoder(conversation(missing))
    thin = write_clip(tmp_path / "thin.mp4", np.zeros((9, 2, 600, 3), np.uint8), "mpeg4")
    one = Media(kind="video", path=str(thin))
    if folder.name.startswith(("glm", "qwen")):
        with pytest.raises(DataError, match=r"thin\.mp4: .*aspect ratio must be smaller than 200"):
            encoder(conversation(one))
    elif folder.name in ("lfm2_vl", "mistral3"):
        with pytest.raises(DataError, match=r"images of 600 x 2, .* image processor rejects them"):
            encoder(conversation(one))
    else:
        encoder(conversation(one))
