"""What a stage ``dpo`` cannot do is an error before it starts; what its reference shares."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from one_stage import one_stage

from coat_vlm.config import Fp8Config
from coat_vlm.config.load import load_recipe
from coat_vlm.config.stage import LoraTraining
from coat_vlm.fp8 import convert, share_stored, store_frozen_weights
from coat_vlm.generate import load
from coat_vlm.train import checks
from coat_vlm.train.checks import check_recipe
from coat_vlm.train.model_setup import set_trainable
from coat_vlm.train.preference import copy_reference

PAIR = {"question": "Which color?", "chosen": "Red.", "rejected": "Blue."}
ROW = {"question": "Which color?", "answer": "Red."}


def write(folder: Path, stages: dict[str, Any], **changes: Any) -> Path:
    """A recipe for a language model from scratch, whose stages read pairs.jsonl or rows.jsonl."""
    for name, row in (("pairs", PAIR), ("rows", ROW)):
        (folder / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    language = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1}
    language |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    common = {"language": {"train": True, "lr": 1e-3}, "batch_size": 2, "micro_batch_size": 1}
    recipe = {
        "name": "small",
        "output_dir": str(folder / "run"),
        "precision": "fp32",
        "model": {
            "vision": None,
            "language": {"config": language},
            "tokenizer": {"train_vocab_size": 280},
            "max_length": 64,
        },
        "stages": {name: {**common, "max_steps": 1, **own} for name, own in stages.items()},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, **changes}))
    return path


def source(folder: Path, name: str) -> dict[str, Any]:
    return {"data": [{"name": name, "path": str(folder / f"{name}.jsonl")}]}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path, {"dpo": {**source(tmp_path, "pairs"), "dpo": {}}})


REFUSED = [
    ("stages.dpo.packing=true", "packing is not supported with dpo: TRL computes one sequence"),
    (
        "stages.dpo.lora={rank: 4, dropout: 0.05}",
        "lora.dropout is not supported with dpo: .* write dropout: 0",
    ),
    ("stages.dpo.dpo=null", r"stages.dpo needs the settings of its loss; add dpo: \{beta: 0.1\}"),
    ("zero_stage=3", "zero_stage: 3 is not supported with stages.dpo: .*; set 0, 1 or 2"),
    (("precision=coat", "fp8={cuda_graphs: true}"), "fp8.cuda_graphs: true is not supported with"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_keys_that_the_stage_does_not_support(good: Path, changes: Any, problem: str) -> None:
    changes = [changes] if isinstance(changes, str) else [*changes]
    with pytest.raises(ValueError, match=problem):
        load_recipe(str(good), changes)


def test_rows_of_the_wrong_kind_are_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: True)
    stages = {
        "sft": {**source(tmp_path, "pairs"), "val_data": source(tmp_path, "pairs")["data"]},
        "dpo": {**source(tmp_path, "rows"), "dpo": {}},
    }
    problems = check_recipe(load_recipe(str(write(tmp_path, stages)))).problems
    assert len(problems) == 3
    for problem in problems[:2]:
        assert "stages.sft" in problem
        assert "which only a stage named dpo trains -> move its source to stages.dpo" in problem
    assert "stages.dpo rows: 4 of 4 inspected rows are bad" in problems[2]
    assert "has one answer, and a stage named dpo trains pairs" in problems[2]
    stages = {"sft": stages["dpo"] | {"dpo": None}, "dpo": stages["sft"] | {"dpo": {}}}
    assert not check_recipe(load_recipe(str(write(tmp_path, stages)))).problems


def test_the_reference_shares_what_does_not_train(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    model.float()
    set_trainable(model, one_stage("projector", "language", lora=LoraTraining(rank=4, dropout=0.0)))
    convert(model, Fp8Config())
    reference = copy_reference(model)
    own, other = dict(model.named_parameters()), dict(reference.named_parameters())
    assert own.keys() == other.keys()
    trained = {name for name, parameter in own.items() if parameter.requires_grad}
    assert trained == {name for name in own if own[name] is not other[name]}
    assert any("lora_A" in name for name in trained)
    assert any(name.startswith("projector") for name in trained)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = reference(input_ids=ids).logits
    assert torch.equal(before, model.eval()(input_ids=ids).logits)
    store_frozen_weights(model)
    share_stored(model, reference)
    assert torch.equal(before, reference(input_ids=ids).logits)
    with torch.no_grad():
        for name in trained:
            own[name].add_(0.1)
    assert torch.equal(before, reference(input_ids=ids).logits)
    assert not torch.equal(before, model(input_ids=ids).logits)
    assert not any(parameter.requires_grad for parameter in other.values())
