"""The step of a recipe: what is fed, what is built, what is counted, what is refused."""

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_bench import recipe as recipe_bench
from coat_bench.recipe import (
    RecipeBench,
    RecipeRow,
    RowShape,
    bench_recipe,
    build_stage_model,
    format_row,
    list_stage_cases,
    make_batch,
    make_sample,
)
from coat_cli.main import main
from coat_data.load.collate import collate
from coat_vlm.config.load import list_builtin_recipes, load_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import CoatVlm, build_model, count_parameters
from coat_vlm.model.build import build_meta_model
from coat_vlm.model.processor import prepare_tokenizer, train_tokenizer
from coat_vlm.plan.activations import trace
from coat_vlm.plan.stage import LANGUAGES, use_published_shapes
from coat_vlm.train.model_setup import set_trainable

CPU = torch.device("cpu")
SMALL = (
    "precision=bf16", "model.max_length=64", "model.language.config.vocab_size=512",
    "stages.align.micro_batch_size=2", "stages.pretrain.micro_batch_size=2",
    "stages.sft.micro_batch_size=2",
)  # fmt: skip
TEXT_ALONE = """\
name: text
output_dir: unused
precision: bf16
model:
  vision: null
  language: {config: {model_type: llama, hidden_size: 64, num_hidden_layers: 1,
    num_attention_heads: 4, intermediate_size: 128, vocab_size: 512}}
  tokenizer: {train_vocab_size: 400}
  max_length: 100
stages:
  pretrain:
    data: [{name: none, path: "${NOT_SET}/missing.jsonl"}]
    language: {train: true, lr: 1.0e-3}
    packing: true
    batch_size: 2
    micro_batch_size: 2
    max_steps: 1
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def bench(*overrides: str, recipe: str = "quickstart", **settings: Any) -> RecipeBench:
    loaded = load_recipe(recipe, [*SMALL, *overrides] if recipe == "quickstart" else overrides,
                         unset_variables=True)  # fmt: skip
    return RecipeBench(recipe=loaded, **{"steps": 2, "warmup": 1, "images": 1, **settings})


def measured(world: World, asked: RecipeBench) -> list[RecipeRow]:
    told: list[RecipeRow] = []
    rows = bench_recipe(asked, world, told.append)
    assert told == rows
    return rows


def test_tokens_are_those_counted_by_hand(world: World) -> None:
    # 6 x 6 patches of 48 pixels, of which 2 x 2 make a token: 9 tokens an image.
    (row,) = measured(world, bench(only_stage="sft", images=3, accumulation=2))
    assert row.problem == ""
    assert (row.row_tokens, row.images, row.micro_batch, row.accumulation) == (64, 3, 2, 2)
    assert row.tokens == 2 * 2 * 64
    assert row.vision_tokens == 2 * 2 * 3 * 9
    assert row.supervised_tokens == 2 * 2 * (64 - 1 - 3 * 9)
    assert row.ms is not None
    assert row.tok_s_gpu == pytest.approx(1e3 * 256 / row.ms)
    assert row.vision_tok_s_gpu == pytest.approx(1e3 * 108 / row.ms)
    assert row.tflops_gpu is not None
    assert row.plan_gb is not None
    assert row.peak_gb is None  # a CPU's is not the tensors'


def test_all_stages_are_measured_and_each_trains(world: World) -> None:
    rows = measured(world, bench(steps=4, plan=False))
    assert [row.stage for row in rows] == ["align", "pretrain", "sft"]
    for row in rows:
        first, last = map(float, row.note.split("loss ")[1].split(" -> "))
        assert last < first, row
        assert row.plan_gb is None
    text = format_row(rows[0])
    assert "align: 1 x cpu, ZeRO-0, bf16, adamw" in text
    assert "| 128 |" in text


@pytest.mark.parametrize(
    "overrides",
    [(), ("precision=coat",), ("stages.sft.lora={rank: 2, alpha: 4}",)],
    ids=["bf16", "coat", "lora"],
)
def test_the_model_is_the_one_that_training_builds(overrides: tuple[str, ...]) -> None:
    if any("lora" in text for text in overrides):
        pytest.importorskip("peft")
    asked = bench(*overrides, only_stage="sft")
    recipe = asked.recipe
    tokenizer = prepare_tokenizer(train_tokenizer(["a red square"] * 4, 300))
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, CPU)
    trained = build_model(recipe.model, tokenizer, arithmetic.dtype)
    set_trainable(trained, recipe.stages["sft"])
    arithmetic.apply(trained)
    (case,) = list_stage_cases(asked, World(rank=0, size=1, device=CPU))
    model = build_stage_model(case, CPU)
    assert described(model) == described(trained)
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    assert kinds == [(name, type(module)) for name, module in trained.named_modules()]
    own, other = model.language_model.config, trained.language_model.config
    assert own._attn_implementation == other._attn_implementation == "sdpa"
    assert all(torch.isfinite(p).all() for p in model.parameters())
    embeddings: Any = model.get_input_embeddings()
    assert embeddings.weight.std() > 0


def described(model: CoatVlm) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("pooled", [False, True], ids=["images", "pooled frames"])
def test_what_is_fed_has_the_shapes_of_the_plan(
    world: World, monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    seen: dict[str, dict[str, tuple[int, ...]]] = {}
    forward = CoatVlm.forward

    def watched(self: CoatVlm, *args: Any, **kwargs: Any) -> Any:
        shapes = {n: tuple(t.shape) for n, t in kwargs.items() if isinstance(t, Tensor) and t.ndim}
        seen.setdefault(kwargs["input_ids"].device.type, shapes)
        return forward(self, *args, **kwargs)

    changes = ("model.video.pool_frames=2", "model.video.num_frames=5") if pooled else ()
    asked = bench(*changes, only_stage="sft", images=5, plan=False)
    (case,) = list_stage_cases(asked, world)
    assert case.row.groups == ((2, 2, 1) if pooled else (1,) * 5)
    monkeypatch.setattr(CoatVlm, "forward", watched)
    measured(world, asked)
    trace(case.frame, 2, 64, 5, pool_frames=2 if pooled else 1)
    mask = seen["cpu"].pop("attention_mask")  # full rows need none
    assert mask == (2, 64)
    assert seen["cpu"] == seen["meta"]
    assert seen["cpu"]["pixel_values"] == (10, 3, 48, 48)
    assert ("frame_groups" in seen["cpu"]) is pooled


def test_text_has_no_placeholder_wherever_that_stands_in_the_vocabulary() -> None:
    (case,) = list_stage_cases(bench(only_stage="sft"), World(rank=0, size=1, device=CPU))
    for image_id in (0, 7, 511):
        case.config.image_token_id = image_id
        model = build_stage_model(case, CPU)
        row = dataclasses.replace(case.row, tokens=3000)  # every id is drawn some times
        sample = make_sample(model, row, torch.Generator().manual_seed(0))
        assert (sample.input_ids == image_id).sum() == 9
        assert sample.input_ids.max() < 512
        batch = collate([sample], pad_token_id=0)
        batch.pop("attention_mask")
        assert torch.isfinite(model(**batch).loss)


def test_a_language_model_alone_gets_packed_rows(world: World, tmp_path: Path) -> None:
    (tmp_path / "text.yaml").write_text(TEXT_ALONE)
    (row,) = measured(world, bench(recipe=str(tmp_path / "text.yaml"), images=None, plan=False))
    assert (row.row_tokens, row.images) == (128, 0)  # 100, in steps of 128
    assert (row.tokens, row.vision_tokens, row.supervised_tokens) == (256, 0, 254)
    assert row.problem == ""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate too much"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "triton", "cublas"],
)
def test_out_of_memory_is_told_and_the_next_stage_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    build = recipe_bench.build_engine

    def failing(model: Any, recipe: Any, stage: Any, *others: Any) -> Any:
        if not stage.language.train:
            raise error
        return build(model, recipe, stage, *others)

    monkeypatch.setattr(recipe_bench, "build_engine", failing)
    align, pretrain, _ = measured(world, bench(plan=False))
    assert (align.problem, align.ms) == ("OOM", None)
    assert "no speed: OOM" in format_row(align)
    assert pretrain.ms is not None
    several = World(rank=0, size=2, device=CPU)
    told: list[RecipeRow] = []
    with pytest.raises(ValueError, match=r"stages.align.micro_batch_size=2 at ZeRO-0; lower it"):
        bench_recipe(bench(plan=False), several, told.append)
    assert [row.problem for row in told] == ["OOM"]


def test_another_failure_is_not_called_out_of_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(recipe_bench, "build_engine", failing)
    with pytest.raises(RuntimeError, match="device-side assert"):
        measured(world, bench(plan=False))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "tune"], "--stage tune: the recipe has the stages align, pretrain, sft"),
        (["--images", "99"], "99 images of 9 tokens leave no tokens for text in rows of 256;"),
        (["--images", "-1"], "--images -1: at least 0 is needed"),
        (["--steps", "0"], "--steps, --warmup and --accumulation are 1 or more"),
        (["model.image.mode=dynamic_s2"], "measure the same model with model.image.mode=dynamic"),
        (["fp8.cuda_graphs=true", "--warmup", "1"], "--warmup must be larger, and is 1"),
        (["init_from=nowhere"], "init_from='nowhere' is not a folder with a composed model"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "recipe", "quickstart", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_a_row_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.csv"
    words = [*SMALL, "--stage", "align", "--steps", "1", "--warmup", "1", "--csv", str(path)]
    assert main(["bench", "recipe", "quickstart", *words]) == 0
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["recipe"] == " ".join(["quickstart", *SMALL])
    assert (row["stage"], row["tokens"], row["vision_tokens"]) == ("align", "128", "18")
    assert "/" not in row["note"]  # no path of this machine
    assert "; cudnn_attention auto" in row["note"]
    out = capsys.readouterr().out
    assert "| tokens a step | supervised | ms/step |" in out
    assert "loading data is not part of the step" in out


def test_shapes_of_published_models_have_their_numbers_of_parameters() -> None:
    """Model cards and papers: 14.8B, 7.62B, 1.54B (Qwen2.5), 6.74B (Llama, which Vicuna is)."""
    published = {
        "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "lmsys/vicuna-7b-v1.5": 6_738_415_616,
    }
    assert published.keys() == LANGUAGES.keys()
    template = load_recipe("llm_pretrain", unset_variables=True)
    for name, parameters in published.items():
        recipe = load_recipe(
            "llm_pretrain",
            [f"model.language={{name_or_path: {name}}}", "model.tokenizer={}"],
            unset_variables=True,
        )
        model = use_published_shapes(recipe).model
        assert model.template == template.model.template
        size = model.tokenizer.train_vocab_size
        assert size is not None
        assert count_parameters(build_meta_model(model, size, torch.bfloat16)) == parameters


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_no_built_in_recipe_needs_a_network(name: str, world: World) -> None:
    overrides = [] if name == "quickstart" else ["init_from=null"]
    asked = RecipeBench(recipe=load_recipe(name, overrides, unset_variables=True))
    model = use_published_shapes(asked.recipe).model
    parts = [model.language, *([] if model.vision is None else [model.vision])]
    assert [part.name_or_path for part in parts] == [None] * len(parts)
    assert model.tokenizer.train_vocab_size is not None


def test_a_local_folder_of_a_published_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lmsys" / "vicuna-7b-v1.5").mkdir(parents=True)
    recipe = load_recipe("llava_1_5", unset_variables=True)
    changed = use_published_shapes(recipe)
    assert changed.model.language == recipe.model.language
    assert changed.model.vision != recipe.model.vision


@pytest.mark.parametrize("unpad", [False, True])
def test_rows_with_much_padding_are_packed_if_asked_for(unpad: bool) -> None:
    """As training does on a GPU; rows with little padding stay padded."""
    (case,) = list_stage_cases(bench(only_stage="sft"), World(rank=0, size=1, device=CPU))
    model = build_stage_model(case, CPU)
    lengths = [(40, 80), (78, 80)]
    shapes = [[RowShape(tokens=n, groups=(1,), pooled=False) for n in pair] for pair in lengths]
    much, little = (make_batch(model, pair, None, 0, unpad=unpad).batch for pair in shapes)
    assert tuple(much["input_ids"].shape) == ((1, 128) if unpad else (2, 80))
    assert tuple(little["input_ids"].shape) == (2, 80)
