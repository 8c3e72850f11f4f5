"""Published vision-language models as a user trains them: stages, ranks, LoRA, FP8, export."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import started
import tiny_run
import torch
from family_folders import MAKERS, settings_of
from PIL import Image
from safetensors.torch import load_file
from served import serve
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, pipeline

from coat_cli.main import main
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.generate import PromptEncoder, generate, load, media_inputs
from coat_vlm.model.families import FAMILIES

Published = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A function: the folder of a small checkpoint of a family, made once."""
    folder = tmp_path_factory.mktemp("published")

    @functools.cache
    def make(family: str) -> Path:
        MAKERS[family](folder / family)
        return folder / family

    return make


@pytest.fixture(scope="module")
def questions(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    rows = []
    for number in (1, 2, 4):
        shutil.copy(tiny_data / f"{number}.png", folder)
        row = {"question_id": str(number), "image": f"{number}.png", "text": "Is it red?"}
        rows.append({**row, "answer": "yes", "category": "colors"})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def make_recipe(data: Path, source: Path, run: Path, questions: Path | None = None) -> Any:
    rows = {"name": "tiny", "path": str(data / "data.json"), "select": "first 20"}
    trains = {"train": True, "lr": 1e-3}
    stage = {"data": [rows], "val_data": [rows], "batch_size": 4, "micro_batch_size": 1}
    sft = {
        **stage, "max_steps": 4, "save_steps": 2, "vision": {"train": True, "lr": 1e-4},
        "projector": trains, "language": trains,
    }  # fmt: skip
    recipe = {
        "name": "family",
        "output_dir": str(run),
        "precision": "fp32",
        "num_workers": 0,
        "tracking": {"tensorboard": False},
        "save_total_limit": 9,
        "model": settings_of(source),
        "stages": {"align": {**stage, "max_steps": 1, "projector": trains}, "sft": sft},
    }
    if questions is not None:
        recipe |= {"eval_sets": {"q": {"task": "yes_no", "path": str(questions)}}}
        recipe |= {"eval_every": 4, "eval_samples": 2}
    return recipe


def train(recipe: Any, folder: Path, *options: str, ranks: int = 1) -> str:
    done = tiny_run.train(recipe, folder, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


FIRST = "qwen3_vl"
"""The family that is trained in every run of the tests."""


def as_slow(*kept: str, without: tuple[str, ...] = ()) -> list[Any]:
    """All families, of which only some are tested in every run."""
    slow = pytest.mark.slow
    names = sorted(FAMILIES.keys() - without)
    return [name if name in kept else pytest.param(name, marks=slow) for name in names]


@pytest.fixture(scope="module", params=as_slow(FIRST))
def run(
    request: pytest.FixtureRequest,
    published: Published,
    tiny_data: Path,
    questions: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two stages, on two ranks at ZeRO-2 of which one may have only texts."""
    folder = tmp_path_factory.mktemp(request.param)
    source = published(request.param)
    recipe = make_recipe(tiny_data, source, folder / "run", questions)
    recipe["stages"]["sft"]["balance"] = True
    train({**recipe, "zero_stage": 2}, folder, ranks=2)
    return folder / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed_parts(before: Path, after: Path) -> set[str]:
    """The parts of the model with a weight that differs."""
    family = FAMILIES[json.loads((before / "config.json").read_text())["model_type"]]
    models = [AutoModelForImageTextToText.from_pretrained(path) for path in (before, after)]
    old, new = (dict(model.named_parameters()) for model in models)
    names = [name for name, value in new.items() if not torch.equal(value, old[name])]
    return {
        part for part, own in family.parts.items() if any(name.startswith(own) for name in names)
    }


def compute_logits(model: Any, processor: Any, image: Path) -> torch.Tensor:
    batch = PromptEncoder(processor)([ask(image, "What is it?")])
    with torch.no_grad():
        ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
        ids |= media_inputs(model, batch)
        return model(**ids | _token_types(model, ids["input_ids"])).logits


def _token_types(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    family = FAMILIES[model.config.model_type]
    if family.token_types is None:
        return {}
    is_image = (ids == model.config.image_token_id).int()
    return {family.token_types: 0 * is_image if family.has_prefix else is_image}


def test_stages_train_their_parts(run: Path, published: Published) -> None:
    source = published(json.loads((run / "sft/model/config.json").read_text())["model_type"])
    assert changed_parts(source, run / "align" / "model") == {"projector"}
    assert changed_parts(run / "align/model", run / "sft/model") == {
        "vision", "projector", "language",
    }  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "step"][-1]
    assert last["lr"]["vision"] == pytest.approx(last["lr"]["language"] / 10)
    assert 0 < last["tiles"] <= last["samples"] == 4
    assert list(last["tflop"]) == ["vision", "projector", "language"]
    assert 0 <= last["imbalance"] < 0.5
    assert [row for row in rows if row["kind"] == "eval"]
    assert len({row["loss"] for row in rows if row["kind"] == "step"}) == 5


def test_it_continues_bit_for_bit(run: Path, tiny_data: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(run, again)
    shutil.rmtree(again / "sft" / "model")
    shutil.rmtree(again / "sft" / "checkpoints" / "step-00000004")
    path = again / "recipe.yaml"
    path.write_text(path.read_text().replace(str(run), str(again)))
    done = started.run(["train", str(path), "--resume", "auto"], ranks=2, env=tiny_run.ENV)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny_run.losses(again) == tiny_run.losses(run)
    ours, theirs = weights(again / "sft" / "model"), weights(run / "sft" / "model")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_stock_transformers_loads_the_model_and_an_export(
    run: Path, tiny_data: Path, tmp_path: Path, in_own_memory: Any
) -> None:
    step = run / "sft" / "checkpoints" / "step-00000004"
    assert main(["export", "--model", str(step), "--to", str(tmp_path / "exported")]) == 0
    ours, processor = load(run / "sft" / "model")
    expected = compute_logits(in_own_memory(ours), processor, tiny_data / "1.png")
    for folder in (run / "sft" / "model", tmp_path / "exported"):
        stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        found = compute_logits(in_own_memory(stock.eval()), processor, tiny_data / "1.png")
        assert torch.equal(found, expected)
        family = FAMILIES[stock.config.model_type]
        assert family.template or AutoProcessor.from_pretrained(folder).chat_template


def test_evaluation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(run)]) == 0
    assert "yes_no" in capsys.readouterr().out
    answers = (run / "eval" / "q" / "predictions.jsonl").read_text().splitlines()
    assert len(answers) == 3
    assert json.loads((run / "eval" / "q" / "report.json").read_text())["image_size"]


def ask(image: Path, question: str) -> Sample:
    turns = (Turn("user", (Part("image"), Part("text", question))),)
    return Sample(id="1", turns=turns, media=(Media(kind="image", path=str(image)),))


def test_a_new_user_asks_the_model(
    run: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, a pipeline and an OpenAI client of transformers' server answer the same."""
    image, model = tiny_data / "1.png", tmp_path / "sharp"
    assert main(["export", "--model", str(run / "sft" / "model"), "--to", str(model)]) == 0
    sharpen(model)
    expected = generate(*load(model, "cpu"), [ask(image, "What is it?")], 8)[0]
    assert expected

    asked = ["--image", str(image), "--prompt", "<image>What is it?", "--max-new-tokens", "8"]
    capsys.readouterr()
    assert main(["generate", "--model", str(model), *asked]) == 0
    assert capsys.readouterr().out.strip() == expected
    assert main(["generate", "--model", str(run), *asked]) == 0
    of_run = generate(*load(run / "sft" / "model", "cpu"), [ask(image, "What is it?")], 8)[0]
    assert capsys.readouterr().out.strip() == of_run

    if FAMILIES[AutoConfig.from_pretrained(model).model_type].template is not None:
        return  # others need the chat template of the processor, and there is none
    pipe: Any = pipeline("image-text-to-text", model=str(model), dtype=torch.float32)
    content = [
        {"type": "image", "image": Image.open(image)},
        {"type": "text", "text": "What is it?"},
    ]
    greedy: Any = {"do_sample": False, "max_new_tokens": 8}
    answers = pipe(
        text=[{"role": "user", "content": content}], return_full_text=False, generate_kwargs=greedy
    )
    assert answers[0]["generated_text"].strip() == expected

    with serve(model) as send:
        assert send(image, "What is it?", 8).choices[0].message.content.strip() == expected


def sharpen(folder: Path) -> None:
    """Enlarge the matrices of an exported model, so that no two tokens are nearly equal."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # with large embeddings Gemma repeats its last token
                parameter.mul_(0.05 if "embed_tokens" in name else 8)
    model.save_pretrained(folder)


def test_lora_from_another_run(run: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Adapters on all linear layers of the decoder and tower; the projector trains whole."""
    start = run / "sft" / "model"
    recipe = make_recipe(tiny_data, start, tmp_path / "lora")
    recipe["init_from"] = str(start)
    del recipe["stages"]["align"]
    recipe["stages"]["sft"]["lora"] = {"rank": 4, "alpha": 8, "modules": ["vision", "language"]}
    assert "LoRA rank 4" in train(recipe, tmp_path)
    model = tmp_path / "lora" / "sft" / "model"
    assert changed_parts(start, model) == {"vision", "projector", "language"}
    step = tmp_path / "lora" / "sft" / "checkpoints" / "step-00000004"
    assert main(["export", "--model", str(step), "--to", str(tmp_path / "merged")]) == 0
    merged, expected = weights(tmp_path / "merged"), weights(model)
    assert all(torch.equal(value, merged[name]) for name, value in expected.items())
    assert (
        main(
            ["export", "--model", str(model), "--to", str(tmp_path / "peft"), "--format", "adapter"]
        )
        == 0
    )
    base: Any = AutoModelForImageTextToText.from_pretrained(start, dtype=torch.float32).eval()
    ours, processor = load(model)
    image = tiny_data / "1.png"
    before = compute_logits(base, processor, image)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    found = compute_logits(adapted.merge_and_unload(), processor, image)
    assert torch.allclose(found, compute_logits(ours, processor, image), atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-4)


def test_one_image_size(
    published: Published,
    tiny_data: Path,
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also of videos, and for the base with adapters; the processor's own is 1,024 pixels."""
    source, run = published(FIRST), tmp_path / "run"
    recipe = make_recipe(tiny_data, source, run, questions)
    recipe["model"] |= {"max_pixels": 256, "video": {"num_frames": 6}}
    stage = recipe["stages"].pop("align") | {"save_steps": 1, "lora": {"rank": 4, "alpha": 8}}
    recipe["stages"]["sft"] = {
        **stage,
        "projector": {"train": False},
        "language": stage["projector"],
    }
    train(recipe, tmp_path)
    model, step = run / "sft" / "model", run / "sft" / "checkpoints" / "step-00000001"
    exported, adapter = tmp_path / "exported", tmp_path / "adapter"
    assert main(["export", "--model", str(step), "--to", str(exported)]) == 0
    words = ["--format", "adapter", "--to", str(adapter)]
    assert main(["export", "--model", str(step), *words]) == 0

    def ask(name: str, folder: Path, *more: str) -> tuple[int, str]:
        out = tmp_path / "eval" / name
        words = ["--tasks", f"yes_no={questions}", "--to", str(out), *more]
        assert main(["eval", "--model", str(folder), "--max-new-tokens", "4", *words]) == 0
        (report,) = out.rglob("report.json")
        answers = (report.parent / "predictions.jsonl").read_text()
        return json.loads(report.read_text())["image_size"]["longest_edge"], answers

    assert main(["eval", "--model", str(run)]) == 0
    report = json.loads((run / "eval" / "q" / "report.json").read_text())
    assert report["image_size"]["longest_edge"] == 256
    expected = ask("model", model)
    assert expected[0] == 256
    assert ask("run", run) == ask("exported", exported) == expected
    assert ask("own", source, "--adapters", str(model / "adapter")) == expected
    assert ask("peft", source, "--adapters", str(adapter)) == expected
    base = ask("base", source)
    assert base[0] == 1024
    assert ask("limited", source, "--max-pixels", "256")[0] == 256
    capsys.readouterr()
    folders = [str(tmp_path / "eval" / name) for name in ("base", "limited")]
    assert main(["compare", *folders]) == 0
    assert "longest_edge 1024, shortest_edge 64 in A, longest_edge 256" in capsys.readouterr().out
    image = ["--image", str(tiny_data / "1.png"), "--prompt", "Is it red?", "--max-pixels"]
    assert main(["generate", "--model", str(source), *image, "256"]) == 0
    assert main(["generate", "--model", str(source), *image, "9"]) != 0
    assert "--max-pixels=9 is less than the 64 pixels" in capsys.readouterr().err
    assert main(["eval", "--model", str(run), "--max-pixels", "256"]) != 0
    assert "here the run decides" in capsys.readouterr().err


UNPACKED = ("lfm2_vl", "paligemma", "qwen3_5")
"""Families whose samples cannot share a row; tests/vlm/test_family_packing.py has the errors."""


@pytest.mark.parametrize("family", as_slow("qwen2_5_vl"))
def test_two_ranks(family: str, published: Published, tiny_data: Path, tmp_path: Path) -> None:
    """Two ranks, of which one may have only texts, train what one trains: packed rows, if any."""
    recipes = {
        "one": {"zero_stage": 0, "precision": "fp32"},
        "two": {"zero_stage": 3, "num_workers": 1},
    }
    packed = family not in UNPACKED
    for ranks, (name, changes) in enumerate(recipes.items(), start=1):
        recipe = make_recipe(tiny_data, published(family), tmp_path / name) | changes
        del recipe["stages"]["align"]
        recipe["model"]["max_length"] = 256
        if packed:
            recipe["stages"]["sft"] |= {"packing": {"tokens": 512, "images": 5}}
        assert ("sequences of 512 tokens" in train(recipe, tmp_path, ranks=ranks)) == packed
    one, two = (tiny_run.steps(tmp_path / name) for name in recipes)
    for name in ("samples", "tokens", "supervised_tokens", "packing_fill", "tiles", "tflop"):
        assert [row.get(name) for row in two] == [row.get(name) for row in one]
    assert [row["loss"] for row in two] == pytest.approx([r["loss"] for r in one], rel=2e-5)
    if packed:
        assert min(row["samples"] for row in one) > 4
        assert max(row["tiles"] for row in one) <= 4 * 5
        assert all(0 <= row["imbalance"] < 0.5 for row in two)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_ranks_share_tokens(
    zero_stage: int, published: Published, tiny_data: Path, tmp_path: Path
) -> None:
    """Of rows with images and texts, also packed; tests/vlm/test_sequence_parallel.py has more."""
    for ranks in (1, 2):
        recipe = make_recipe(tiny_data, published("qwen2_5_vl"), tmp_path / f"{ranks}")
        recipe["model"]["max_length"] = 256
        sharing = {"sequence_parallel": ranks}
        align, sft = recipe["stages"].values()
        align |= {**sharing, "micro_batch_size": 2}
        sft |= {**sharing, "packing": {"tokens": 512, "images": 5}, "max_steps": 2}
        recipe |= {"zero_stage": zero_stage if ranks > 1 else 0}
        said = train(recipe, tmp_path, ranks=ranks)
        assert ("2 ranks share the tokens of each micro-batch" in said) == (ranks == 2)
    for stage in ("align", "sft"):
        alone, shared = (tiny_run.steps(tmp_path / f"{ranks}", stage) for ranks in (1, 2))
        for name in ("samples", "tokens", "supervised_tokens", "tiles"):
            assert [row[name] for row in shared] == [row[name] for row in alone]
        for name in ("loss", "grad_norm"):
            expected = [row[name] for row in alone]
            assert [row[name] for row in shared] == pytest.approx(expected, rel=2e-5), name


NOT_BY_BLOCK = ("gemma4", "lfm2_vl", "paligemma", "qwen3_5")
"""Families of which a tower or decoder has no whole FP8 blocks, or attention is eager."""


# Features are the output of LLaVA's last block but one, LLaVA-OneVision's last one and several of
# Qwen3-VL.
@pytest.mark.parametrize("family", as_slow(without=NOT_BY_BLOCK))
def test_fp8(family: str, published: Published, tiny_data: Path, tmp_path: Path) -> None:
    """FP8 blocks in decoder and tower, gathered by block on two ranks, train as on one rank."""
    source = published(family)
    fp8 = {"bf16_forward": [], "optimizer": "adamw"}
    runs: dict[str, dict[str, Any]] = {
        "plain": {},
        "one": {"precision": "coat", "fp8": fp8},
        "two": {"precision": "coat", "fp8": fp8, "zero_stage": 3},
    }
    for name, changes in runs.items():
        recipe = make_recipe(tiny_data, source, tmp_path / name) | changes
        del recipe["stages"]["align"]
        path = tiny_run.write_recipe(recipe, tmp_path / "recipe.yaml")
        done = started.run(
            ["train", str(path)],
            program=Path(__file__).with_name("fixed_scales.py"),
            ranks=2 if name == "two" else 1,
            env=tiny_run.ENV,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stderr + done.stdout
        for block in ("encoder", "decoder"):
            assert (f".0-1: FP8 {block} block" in said) == bool(changes)
    plain, one, two = (tiny_run.steps(tmp_path / name) for name in runs)
    for number, (alone, shared, fp32) in enumerate(zip(one, two, plain, strict=True)):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-3), number
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3), number
        # The first loss is of the same weights: FP8 has 3 mantissa bits, so each of the products
        # is off by up to 2^-4 of its size and their sums by less.
        assert alone["loss"] != fp32["loss"]
        assert alone["loss"] == pytest.approx(fp32["loss"], rel=0.06), number


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "coat", "master_weights": "low_bits"},
        *(
            pytest.param({"precision": "bf16", "zero_stage": stage}, marks=pytest.mark.slow)
            for stage in (1, 2, 3)
        ),
        pytest.param({"stages.sft.lora": {"modules": ["vision"]}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blocks_behind_the_feature_layer_keep_their_bits(
    changes: dict[str, Any], published: Published, tiny_data: Path, tmp_path: Path
) -> None:
    """Neither weight decay nor the rounding of low bits changes what no output uses."""
    source = published("llava")
    recipe = make_recipe(tiny_data, source, tmp_path / "run")
    del recipe["stages"]["align"]
    sft = recipe["stages"]["sft"]
    sft["weight_decay"] = 0.5
    if "stages.sft.lora" in changes:
        sft["lora"] = changes.pop("stages.sft.lora")
    blocks = "model.vision_tower.encoder.layers.1, model.vision_tower.post_layernorm"
    assert f"because no output uses them: {blocks}\n" in train(recipe | changes, tmp_path, ranks=2)
    models = [source, tmp_path / "run" / "sft" / "model"]
    old, new = (AutoModelForImageTextToText.from_pretrained(path) for path in models)
    trained = dict(new.named_parameters())
    changed = {
        name for name, p in old.named_parameters() if not trained[name].equal(p.to(new.dtype))
    }
    tower = {name for name in trained if "vision_tower" in name}
    kept = {name for name in tower if "layers.1." in name or "post_layernorm" in name}
    assert not changed & kept
    assert changed & tower


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "'bert'; the families that can be trained are"),
        ({"model_type": "llama"}, "take its language model or vision tower as a part"),
    ],
)
def test_another_family_ends_before_the_engine(
    change: dict[str, str], message: str, published: Published, tiny_data: Path, tmp_path: Path
) -> None:
    source = tmp_path / "other"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(change))
    recipe = make_recipe(tiny_data, source, tmp_path / "run")
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
    recipe = make_recipe(tiny_data, published("qwen3_vl"), tmp_path / "run")
    recipe["init_from"] = str(published("llava_onevision"))
    done = tiny_run.train(recipe, tmp_path)
    assert "is a Qwen3-VL; name a folder of the same family" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.template=chatml"], "model.template has no effect with model.pretrained"),
        (["model.image.mode=pad"], "model.image has no effect with model.pretrained"),
        (["model.video.time_tokens=true"], "model.video.time_tokens is not supported with model.p"),
        (["model.video.sampling=all"], "model.video.sampling: all is not supported with model.pre"),
        (["model.language.name_or_path=a/b"], "model.language has no effect with model.pret"),
        (
            ["stages.sft.packing=true", "model.attn_implementation=eager"],
            "stages.sft.packing with model.pretrained needs model.attn_implementation: sdpa, not",
        ),
        (["stages.sft.template=plain"], "stages.sft.template has no effect with model.pretrained"),
    ],
)
def test_keys_without_effect(changes: list[str], message: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, Path("Qwen/Qwen3-VL-2B-Instruct"), tmp_path / "run")
    path = tiny_run.write_recipe(recipe, tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match=re.escape(message)):
        load_recipe(str(path), changes)
    saved = load_recipe(str(path), ["model.max_pixels=200704", "model.video.num_frames=9"])
    assert (saved.model.max_pixels, saved.model.video.num_frames) == (200704, 9)
    with pytest.raises(ValueError, match=r"model\.max_pixels has no effect without model\.pretr"):
        load_recipe("vila_sft", ["model.max_pixels=9"], unset_variables=True)
    save_recipe(saved, tmp_path / "saved.yaml")
    assert load_recipe(str(tmp_path / "saved.yaml")) == saved
