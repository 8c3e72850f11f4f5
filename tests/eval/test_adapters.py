"""``coat-vlm eval --adapter`` next to the evaluation of the models that peft merges."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from coat_cli.main import main
from coat_eval.lora_model import name_adapters
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert
from coat_vlm.model.adapter_folder import merged_adapter
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm

TASKS = ("gqa", "seedbench_likelihood")
LANGUAGE, TOWER = r"language_model.*\.(q_proj|down_proj)", r"vision_tower.*\.fc1"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": LANGUAGE, "modules_to_save": ["projector"]},
    "dora": {"target_modules": f"{LANGUAGE}|{TOWER}", "use_dora": True, "use_rslora": True},
}


@pytest.fixture(scope="module")
def folders(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders NAME (an adapter that peft saved) and NAME_merged (the model it merged)."""
    place = tmp_path_factory.mktemp("adapters")
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        torch.manual_seed(seed)
        base: Any = CoatVlm.from_pretrained(speaking_model)
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, **settings)
        model: Any = get_peft_model(base, config).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key or (parameter.requires_grad and parameter.ndim > 1):
                    parameter.add_(torch.rand_like(parameter))
        model.save_pretrained(place / name)
        merged = model.merge_and_unload()
        merged.save_pretrained(place / f"{name}_merged")
        CoatVlmProcessor.from_pretrained(speaking_model).save_pretrained(place / f"{name}_merged")
    return place


def ask(model: Path, benchmarks: Path, out: Path, *more: str) -> None:
    words = ["--model", str(model), "--tasks", *TASKS, "--data", str(benchmarks)]
    assert main(["eval", *words, "--to", str(out), "--max-new-tokens", "4", *more]) == 0


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_each_adapter_answers_as_its_merged_model(
    folders: Path,
    speaking_model: Path,
    benchmarks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = ["--adapters", f"second={folders / 'dora'}", str(folders / "plain")]
    out = tmp_path / "out"
    ask(speaking_model, benchmarks, out, *named)
    assert "second/gqa\n" in capsys.readouterr().out
    ask(speaking_model, benchmarks, tmp_path / "base")
    seen = [read(tmp_path / "base" / "gqa")]
    for name, source in (("second", "dora"), ("plain", "plain")):
        merged = tmp_path / source
        ask(folders / f"{source}_merged", benchmarks, merged)
        answers, losses = (read(out / name / task) for task in TASKS)
        assert answers == read(merged / "gqa")
        for one, other in zip(losses, read(merged / TASKS[1]), strict=True):
            assert one.pop("losses") == pytest.approx(other.pop("losses"), rel=1e-4)
            assert one == other
        seen.append(answers)
    assert all(one != other for n, one in enumerate(seen) for other in seen[:n])
    report = json.loads((out / "plain/gqa/report.json").read_text())
    assert report["model"] == f"{speaking_model} with {folders / 'plain'}"
    assert main(["compare", str(out / "second"), str(out / "plain")]) == 0
    table = capsys.readouterr().out
    assert "second" in table
    assert "gqa" in table


def test_an_answer_belongs_to_its_adapter(
    folders: Path, speaking_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question set, whose folder of one adapter is refused for another."""
    row = {"question_id": "0", "text": "Is it?", "answer": "yes"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    words = ["eval", "--model", str(speaking_model), "--tasks", f"yes_no={tmp_path}"]
    words += ["--to", str(tmp_path / "out"), "--adapters"]
    assert main([*words, f"one={folders / 'plain'}"]) == 0
    assert main([*words, f"one={folders / 'plain'}"]) == 0
    assert (tmp_path / "out/one" / tmp_path.name / "report.json").is_file()
    assert main([*words, f"one={folders / 'dora'}"]) == 2
    assert "answers made with a different adapter_sha256" in capsys.readouterr().err


def test_the_base_weights_are_back_bit_for_bit(folders: Path, speaking_model: Path) -> None:
    model = CoatVlm.from_pretrained(speaking_model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with merged_adapter(model, folders / "plain", str(speaking_model)):
        changed = [n for n, tensor in model.state_dict().items() if not tensor.equal(before[n])]
    projector = [n for n, one in before.items() if n.startswith("projector") and one.ndim > 1]
    assert [name for name in changed if name.startswith("projector")] == projector
    assert len(changed) == len(projector) + 2 * 2
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_fp8_blocks_compute_as_in_the_merged_model(tmp_path: Path) -> None:
    """FP8 blocks quantize the weights that are there: with the adapter, and again without it."""
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    ids = torch.arange(64)[None]

    def convert_and_run(model: Any) -> tuple[Any, torch.Tensor]:
        convert(model.eval(), Fp8Config())
        return model, model(ids).logits

    base: Any = Qwen2ForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    wrapped: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        wrapped.save_pretrained(tmp_path / "adapter")
        _, expected = convert_and_run(wrapped.merge_and_unload())
        model, before = convert_and_run(Qwen2ForCausalLM.from_pretrained(tmp_path / "base"))
        with merged_adapter(model, tmp_path / "adapter", str(tmp_path / "base")):
            found = model(ids).logits
        after = model(ids).logits
    # peft's sum and this project's differ by the rounding of FP32, and so may single FP8 values.
    scale = (expected - before).abs().max()
    assert (found - expected).abs().max() < 0.02 * scale
    assert torch.equal(after, before)


def test_what_cannot_be_merged(
    folders: Path, speaking_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = CoatVlm.from_pretrained(speaking_model)
    config = json.loads((folders / "plain/adapter_config.json").read_text())
    weights = load_file(folders / "plain/adapter_model.safetensors")
    first = next(name for name in weights if "lora_A" in name)

    def check(message: str, settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config | settings))
        save_file(tensors, folder / "adapter_model.safetensors")
        with (
            pytest.raises(ValueError, match=message),
            merged_adapter(model, folder, str(speaking_model)),
        ):
            pass

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check("rank_pattern.*merge_and_unload", {"rank_pattern": {"q_proj": 2}}, weights)
    check("peft_type: 'IA3'", {"peft_type": "IA3"}, weights)
    check("init_lora_weights: 'pissa'", {"init_lora_weights": "pissa"}, weights)
    check("r: 8, and .* has 4 rows in lora_A and 4 columns", {"r": 8}, weights)
    check("r: None and lora_alpha: 8", {"r": None}, weights)
    check("lora_alpha: None", {"lora_alpha": None}, weights)
    check(
        "use_dora: False needs lora_A",
        {},
        {name: one for name, one in weights.items() if name != first},
    )
    check("use_dora: True needs", {"use_dora": True}, weights)
    check("has no weights", {}, {})
    bias = {"base_model.model.language_model.lm_head.base_layer.bias": torch.ones(1)}
    check("cannot be merged", {}, weights | bias)
    check("cannot be merged", {}, {**weights, first.replace("A.weight", "B.bias"): torch.ones(1)})
    check("which has no gone", {}, {"base_model.model.gone.weight": torch.ones(1)})
    check("for a weight of", {}, {**weights, first: torch.ones(4, 5)})
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    with caplog.at_level(logging.WARNING), merged_adapter(model, folders / "plain", "other"):
        pass
    assert f"was trained on {speaking_model} and is used with other" in caplog.text


def test_files_that_peft_did_not_write(folders: Path, speaking_model: Path, tmp_path: Path) -> None:
    model = CoatVlm.from_pretrained(speaking_model)
    folder = shutil.copytree(folders / "plain", tmp_path / "broken")

    def check(message: str) -> None:
        with (
            pytest.raises(ValueError, match=f"{message}.*peft's save_pretrained"),
            merged_adapter(model, folder, str(speaking_model)),
        ):
            pass

    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    check("adapter_model.safetensors cannot be read")
    (folder / "adapter_model.safetensors").unlink()
    check("adapter_model.safetensors cannot be read")
    (folder / "adapter_config.json").write_text("[]")
    check("adapter_config.json has a JSON list, not an object")
    (folder / "adapter_config.json").write_text("{")
    check("adapter_config.json is not a JSON file")


def test_embeddings_that_are_also_the_head_change_only_alike(tmp_path: Path) -> None:
    """peft trains a copy of the head alone by default; the embeddings keep their weights."""
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    base: Any = Qwen2ForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], bias="all")
    get_peft_model(base, settings).save_pretrained(str(tmp_path / "adapter"))
    model: Any = Qwen2ForCausalLM.from_pretrained(tmp_path / "base")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = {n: one for n, one in load_file(file).items() if ".base_layer." not in n}
    head = tensors.pop("base_model.model.lm_head.weight")
    embeddings = "base_model.model.model.embed_tokens.weight"
    message = "changes .*lm_head.weight|changes .*embed_tokens.weight"
    for more in (
        {"base_model.model.lm_head.weight": head},
        {embeddings: head},
        {"base_model.model.lm_head.weight": head, embeddings: head + 1},
    ):
        save_file({**tensors, **more}, file)
        with (
            pytest.raises(ValueError, match=message),
            merged_adapter(model, tmp_path / "adapter", str(tmp_path / "base")),
        ):
            pass
    # Both in full and equal, as after training of the whole language model.
    both = {"base_model.model.lm_head.weight": head + 1, embeddings: head + 1}
    save_file({**tensors, **both}, file)
    with merged_adapter(model, tmp_path / "adapter", str(tmp_path / "base")):
        assert model.get_input_embeddings().weight.equal(head + 1)
    assert model.get_input_embeddings().weight.equal(head)


def test_names_of_output_folders(folders: Path, tmp_path: Path) -> None:
    plain, dora = folders / "plain", folders / "dora"
    assert name_adapters([str(plain), f"x={dora}"]) == {"plain": plain, "x": dora}
    with pytest.raises(ValueError, match=r"both write to plain: give them names"):
        name_adapters([str(plain), f"plain={dora}"])
    with pytest.raises(ValueError, match="not the name of a folder"):
        name_adapters([f"../x={plain}"])
    shutil.copytree(plain, tmp_path / "model/adapter")
    with pytest.raises(ValueError, match=r"did you mean .*adapter"):
        name_adapters([str(tmp_path / "model")])
