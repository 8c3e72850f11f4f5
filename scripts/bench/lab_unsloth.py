"""Measures Unsloth's LoRA training step with the model and batch of step.py, on one GPU.

Unsloth needs an older transformers than coat-vlm, so it runs in an environment of its own, whose
Python is given: a virtual environment after pip install unsloth. The model has random weights.
Rank, sequences and steps are in unsloth_steps.py. Rows have the columns of step.csv; compare them
with rows of step.py from the same GPU. Frozen weights are in BF16, or with 4bit in NF4 (QLoRA).
Nothing is recomputed in the backward pass.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision

# isort: split
import torch
import transformers

import harness
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.plan.published import LANGUAGES
from step import StepResult, check_training, format_steps

MODEL = "Qwen/Qwen2.5-7B-Instruct"


def write_model(folder: Path) -> None:
    """Write the model with random weights, and a tokenizer."""
    kind: Any = transformers.AutoConfig.for_model(**LANGUAGES[MODEL])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50GB")
    train_tokenizer(["a few words"] * 4, 300).save_pretrained(folder)


def measure(python: Path, folder: Path, weights: str) -> StepResult:
    """Train in Unsloth's environment; the result names a failure, whose error is printed."""
    script = Path(__file__).with_name("unsloth_steps.py")
    command = [str(python), str(script), f"--model={folder}", f"--weights={weights}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, check=False)
    failed = done.returncode != 0
    found: dict[str, Any] = {} if failed else json.loads(done.stdout.splitlines()[-1])
    result = StepResult(
        *harness.get_origin()[:3],
        gpus=1,
        zero=0,
        model="qwen2.5-7b",
        implementation="unsloth" + f"_{weights}" * (weights != "bf16"),
        checkpointing=False,
        optimizer="adamw",
        batch=found.get("batch", 0),
        tokens=found.get("tokens", 0),
    )
    if failed:
        result.problem = f"status {done.returncode}; the error is above"
        return result
    losses = found["losses"]
    result.note = f"{found['settings']}; loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    result.note += f"; {found['versions']}"
    result.problem = check_training(losses, None)
    if not result.problem:
        result.ms, result.peak_gb = found["ms"], found["peak_gb"]
        result.tok_s = found["tokens"] / (found["ms"] / 1e3)
    return result


EXAMPLES = """\
  python scripts/bench/lab_unsloth.py --python .venv-unsloth/bin/python --csv unsloth.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--python", type=Path, required=True, help="Python of the environment with Unsloth")
    names = ("bf16", "4bit")
    add("--weights", nargs="+", choices=names, default=["bf16"], help="default bf16")
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the model and measure each kind of weights in a process of its own."""
    results: list[StepResult] = []
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        torch.cuda.empty_cache()
        for weights in args.weights:
            results.append(measure(args.python, Path(name), weights))
            harness.append_results(args.csv, results[-1:])
    harness.say(f"\n{format_steps(results)}")


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
