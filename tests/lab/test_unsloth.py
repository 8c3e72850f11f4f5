"""The bench of Unsloth's step, with a program in place of its environment's Python."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lab_unsloth as bench

PRINTED = {
    "batch": 2, "tokens": 8192, "ms": 500.0, "peak_gb": 40.0, "losses": [12.6, 11.9],
    "settings": "attention sdpa, accumulation 1; LoRA rank 64", "versions": "unsloth 1.0",
}  # fmt: skip


def python(folder: Path, script: str) -> Path:
    """A program that runs a shell script; $1 to $3 are the arguments of Unsloth's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_row_has_what_the_process_printed(tmp_path: Path) -> None:
    script = f"echo a banner; test $3 = --weights=4bit && echo '{json.dumps(PRINTED)}'"
    row = bench.measure(python(tmp_path, script), tmp_path, "4bit")
    assert (row.implementation, row.batch, row.tokens) == ("unsloth_4bit", 2, 8192)
    assert (row.ms, row.tok_s, row.peak_gb, row.problem) == (500.0, 16384.0, 40.0, "")
    assert row.note == f"{PRINTED['settings']}; loss 12.6000 -> 11.9000; unsloth 1.0"


def test_failures_have_no_speed(tmp_path: Path) -> None:
    ended = bench.measure(python(tmp_path, "exit 3"), tmp_path, "bf16")
    assert (ended.tok_s, ended.problem) == (None, "status 3; the error is above")
    printed = json.dumps(PRINTED | {"losses": [11.9, 12.6]})
    learns_nothing = bench.measure(python(tmp_path, f"echo '{printed}'"), tmp_path, "bf16")
    assert learns_nothing.tok_s is None
    assert "does not lower the loss" in learns_nothing.problem


def test_unmodified_transformers_loads_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    of_7b = {key: v for key, v in bench.LANGUAGES[bench.MODEL].items() if key != "layer_types"}
    monkeypatch.setitem(bench.LANGUAGES, bench.MODEL, of_7b | small)
    bench.write_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.to_dict().items() >= small.items()
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen2"
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= 512
