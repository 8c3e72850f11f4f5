"""Measures Unsloth's LoRA training step with the model and batch of step.py, on one GPU.

Unsloth needs an older transformers than coat-vlm, so it runs in an environment of its own, whose
Python is given: a virtual environment after pip install unsloth. The model has random weights.
Rows have the columns of step.csv; compare them with rows of step.py from the same GPU. Frozen
weights are in BF16, or with 4bit in NF4 (QLoRA). Nothing is recomputed in the backward pass.
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
from coat_cli.command import at_least
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.plan.published import LANGUAGES
from step import StepResult, check_training, format_steps

MODEL = "Qwen/Qwen2.5-7B-Instruct"


def write_model(folder: Path, tiny: bool) -> int:
    """Write the model with random weights and a tokenizer; returns the vocabulary size."""
    config = {**LANGUAGES[MODEL]}
    if tiny:
        config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    kind: Any = transformers.AutoConfig.for_model(**config)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50GB")
    train_tokenizer(["a few words"] * 4, 300).save_pretrained(folder)
    return kind.vocab_size


def measure(folder: Path, vocab: int, weights: str, args: argparse.Namespace) -> StepResult:
    """Train in Unsloth's environment; the result names a failure, whose error is printed."""
    result = StepResult(
        *harness.get_origin()[:3],
        gpus=1,
        zero=0,
        model="qwen2.5-7b" + "-tiny" * args.tiny,
        implementation="unsloth" + f"_{weights}" * (weights != "bf16"),
        checkpointing=False,
        optimizer="adamw",
        batch=args.batch,
        tokens=args.batch * args.tokens,
        note=f"accumulation 1; LoRA rank {args.lora}",
    )
    options = {"model": folder, "weights": weights, "vocab": vocab, "rank": args.lora}
    options |= {name: getattr(args, name) for name in ("batch", "tokens", "steps", "warmup")}
    command = [str(args.python), str(Path(__file__).with_name("unsloth_steps.py"))]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, check=False)
    lines = done.stdout.splitlines()
    if done.returncode:
        result.problem = f"status {done.returncode}; the error is above"
        return result
    found = json.loads(lines[-1])
    result.problem = check_training(found["losses"], None)
    if not result.problem:
        result.ms, result.peak_gb = found["ms"], found["peak_gb"]
        result.tok_s = result.tokens / (found["ms"] / 1e3)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    first, last = (found["losses"][i] for i in (0, -1))
    result.note = f"attention {found['attention']}, {result.note}"
    result.note += f"; loss {first:.4f} -> {last:.4f}; {versions}"
    return result


EXAMPLES = """\
  python scripts/bench/lab_unsloth.py --python .venv-unsloth/bin/python --csv unsloth.csv
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add, positive = parser.add_argument, at_least(1)
    # fmt: off
    add("--python", type=Path, required=True, help="Python of the environment with Unsloth")
    add("--weights", nargs="+", choices=("bf16", "4bit"), default=["bf16"], metavar="NAME",
        help="bf16 or 4bit; default bf16")
    add("--lora", type=positive, default=64, metavar="RANK", help="default 64")
    add("--batch", type=positive, default=2, help="sequences; default 2")
    add("--tokens", type=positive, default=4096, help="of a sequence; default 4096")
    add("--steps", type=positive, default=9, help="measured steps; default 9")
    add("--warmup", type=positive, default=3, help="steps before them; default 3")
    add("--tiny", action="store_true", help="a tiny model, to try the script")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the model and measure each kind of weights in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocab = write_model(folder, args.tiny)
        torch.cuda.empty_cache()
        results = []
        for weights in args.weights:
            results.append(measure(folder, vocab, weights, args))
            harness.append_results(args.csv, results[-1:])
    harness.say(f"\n{format_steps(results)}")


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
