"""Measures whole training runs on JPEG files: reading, packing, steps and optimizer, on one GPU.

Writes an instruction set of generated JPEG files and models of published shapes
with random weights, starts the command coat-vlm train, ends it after --steps, and reads its
metrics.jsonl. Counted are tokens of texts and images, without padding. Runs:

    qwen:coat       README's recipe with Qwen2.5-VL-7B: packed sequences, the tower frozen
    qwen:trl_liger  TRL's SFTTrainer on the same rows: BF16 weights without FP32 master weights,
                    fused AdamW, samples grouped by length, variable-length attention in the
                    tower, and Liger's RoPE, RMSNorm and SwiGLU; TRL does not pack images
    vila:coat       the recipe vila_sft: tiles, all modules trained, ZeRO stage 0

A step of qwen has --batch packed sequences, or in TRL about as many tokens, and a step of vila has
eight samples; the recipes have larger batches. Text lengths are as in LLaVA-1.5's mix. Speed and
wait for data are of the steps after --warmup, with tokens and seconds summed.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision

# isort: split
import numpy as np
import torch
import transformers
import yaml
from PIL import Image
from torch import cuda

import harness
from coat_cli.command import at_least
from coat_datasets.rows import conversation, write_conversations
from coat_vlm.model.packing import PACKED_IMAGES
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.plan.published import LANGUAGES, TOWERS
from coat_vlm.train.tracking import METRICS, read_entries
from harness import VersionedResult
from step_models import apply_liger

RUNS = ("qwen:coat", "qwen:trl_liger", "vila:coat")
TOKENS, PIXELS = 8192, 602112  # per sequence and per image
TRL_BATCH = 6
"""Samples of a micro-batch, padded to the longest, that fit without gradient checkpointing."""
SIDES, ASPECTS = range(480, 1601, 16), (1.0, 3 / 4, 4 / 3, 3 / 2, 16 / 9)
_MARKS = {
    "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>", "video": "<|video_pad|>",
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # of Qwen2.5-VL without its system prompt
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 4096,
}  # fmt: skip


@dataclass(slots=True)
class PipelineResult(VersionedResult):
    """One run; the columns of the CSV file."""

    model: str
    implementation: str
    tok_s: float
    samples: int
    """Rows of the data set."""
    step_tokens: float
    """Mean, of texts and images."""
    step_s: float
    """Mean."""
    wait: float
    """Seconds waited for data, divided by the seconds of the steps."""
    peak_gb: float
    steps: int
    """Measured ones."""


def draw_image(job: tuple[Path, int]) -> None:
    """Write a JPEG of random size: noise of all scales, as detailed as a photograph."""
    path, seed = job
    draw = np.random.default_rng(seed)
    side, aspect = int(draw.choice(SIDES)), float(draw.choice(ASPECTS))
    size = (side, round(side / aspect)) if aspect > 1 else (round(side * aspect), side)
    pixels = np.full((size[1], size[0], 3), 128.0, np.float32)
    for scale in (4, 16, 64, 256, 1024):
        noise = draw.integers(0, 256, (scale, scale, 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
        pixels += (np.asarray(smooth, np.float32) - 128) * (1.2 / math.log2(scale))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def write_data(folder: Path, samples: int) -> None:
    """Write the JPEG files and the rows chat.json."""
    draw, rows = random.Random(0), []
    names = [f"{number}.jpg" for number in range(samples)]
    media = folder / "images"
    media.mkdir(parents=True, exist_ok=True)
    with Pool() as pool:
        pool.map(draw_image, [(media / name, n) for n, name in enumerate(names)], chunksize=4)
    syllables = [a + b for a in "bdfgklmnprstvw" for b in "aeiou"]
    words = [a + b for a in syllables[:25] for b in syllables[25:45]]
    for number in range(samples):
        text_only = draw.random() < 0.06
        length = 2 + int(draw.lognormvariate(math.log(600 if text_only else 120), 0.9))
        text = draw.choices(words, k=min(length, 1400))
        cut = max(1, len(text) // 3)
        turn = (" ".join(text[:cut]), " ".join(text[cut:]))
        row = conversation(str(number), names[number], [turn])
        if text_only:
            del row["image"]
            row["conversations"][0]["value"] = turn[0]
        rows.append(row)
    train_tokenizer([" ".join(words)] * 4, 2048).save_pretrained(folder / "tokenizer")
    write_conversations(folder / "chat.json", rows)


def write_models(folder: Path, *, tiny: bool) -> None:
    """Write Qwen2.5-VL-7B, and with the same weights the language model and tower of vila_sft."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.save_pretrained(folder / "llm")
    tokenizer.add_tokens([*_MARKS.values()], special_tokens=True)
    published = Path(__file__).parent / "published/qwen2_5_vl_7b/config.json"
    config = json.loads(published.read_text(encoding="utf-8"))
    text = {**LANGUAGES["Qwen/Qwen2.5-7B-Instruct"]}
    siglip = {**TOWERS["Efficient-Large-Model/paligemma-siglip-so400m-patch14-448"]}
    if tiny:
        text |= _TINY
        siglip |= {**_TINY, "image_size": 112}
        config |= {**_TINY, "rope_scaling": {"mrope_section": [4, 6, 6], "type": "mrope"}}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 60, "num_heads": 2}
        config["vision_config"] |= {**vision, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    ids = {f"{name}_token_id": mark for name, mark in _MARKS.items()}
    config |= {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in ids.items()}
    config |= {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    dtype, llm = torch.bfloat16, folder / "llm"
    with torch.device("cuda" if cuda.is_available() else "cpu"):
        made: Any = transformers.Qwen2_5_VLConfig.from_dict(config)
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(made, dtype=dtype)
        model.save_pretrained(folder / "qwen", max_shard_size="50GB")
        del model
        made = transformers.SiglipVisionConfig(**siglip)
        tower = transformers.SiglipVisionModel._from_config(made, dtype=dtype)
        tower.save_pretrained(folder / "tower")
        del tower
    cuda.empty_cache()
    # The files of Qwen2.5-VL name the weights of the language model as Qwen2.5's do.
    (llm / "config.json").write_text(json.dumps(text), encoding="utf-8")
    (llm / "model.safetensors").symlink_to(folder / "qwen/model.safetensors")
    side = siglip["image_size"]
    size: Any = {"height": side, "width": side}
    transformers.SiglipImageProcessor(size=size).save_pretrained(folder / "tower")
    transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(), tokenizer, transformers.Qwen2VLVideoProcessor(),
        chat_template=_TEMPLATE,
    ).save_pretrained(folder / "qwen")  # fmt: skip


def train_arguments(folder: Path, run: str, args: argparse.Namespace) -> list[str]:
    """Return the arguments of coat-vlm train for a run."""
    name = run.split(":")[0]
    stage: dict[str, Any] = {"max_steps": 1000}
    stage["data"] = [{"name": "chat", "path": str(folder / "chat.json")}]
    stage["data"][0]["media_root"] = str(folder / "images")
    out = folder / "runs" / run.replace(":", "_")
    shared: dict[str, Any] = {"output_dir": str(out), "precision": "coat"}
    if name == "qwen":
        train = {"train": True, "lr": 1e-5}
        stage |= {"projector": train, "language": train, "packing": True}
        stage |= {"batch_size": args.batch, "micro_batch_size": 1}
        model = {"pretrained": str(folder / "qwen"), "max_length": TOKENS, "max_pixels": PIXELS}
        recipe = {"name": name, **shared, "num_workers": 8, "model": model}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**recipe, "stages": {"sft": stage}}), encoding="utf-8")
        return [str(path)]
    stage |= {"batch_size": 8, "micro_batch_size": 4, "epochs": None, "save_steps": 0}
    keys = {
        **shared, **{f"stages.sft.{key}": value for key, value in stage.items()},
        "init_from": None, "zero_stage": 0, "model.vision.name_or_path": str(folder / "tower"),
        "model.language.name_or_path": str(folder / "llm"),
    }  # fmt: skip
    return ["vila_sft", *(f"{key}={json.dumps(value)}" for key, value in keys.items())]


def train_ours(folder: Path, run: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run coat-vlm train until it has logged the steps; return their entries in metrics.jsonl."""
    command = [sys.executable, "-m", "coat_cli.main", "train", *train_arguments(folder, run, args)]
    out = folder / "runs" / run.replace(":", "_")
    log = out.with_suffix(".log")
    out.parent.mkdir(exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs what is under finally
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while True:
            ended = process.poll() is not None
            entries = [e for e in read_entries(out / METRICS) if e["kind"] == "step"]
            if len(entries) >= args.steps:
                return entries[: args.steps]
            if ended:
                raise ValueError(f"{run} ended early; its output is in {log}")
            time.sleep(0.5)
    finally:  # without the checkpoint that SIGTERM would save
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def train_trl(folder: Path, run: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with TRL; return entries with the names of metrics.jsonl."""
    from datasets import Dataset, List
    from datasets import Image as ImageColumn
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    processor = transformers.AutoProcessor.from_pretrained(folder / "qwen")
    processor.image_processor.size["longest_edge"] = PIXELS
    rows: list[dict[str, Any]] = []
    for row in json.loads((folder / "chat.json").read_text(encoding="utf-8")):
        question, answer = (turn["value"].split("\n")[-1] for turn in row["conversations"])
        length, images = len(processor.tokenizer(question + answer)["input_ids"]), []
        if "image" in row:
            images = [str(folder / "images" / row["image"])]
            with Image.open(images[0]) as image:
                length += min(PIXELS, image.width * image.height) // 28**2
        rows.append({
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
            "images": images, "length": length,
        })  # fmt: skip
    mean = sum(row["length"] for row in rows) / len(rows)
    gpu = cuda.is_available()
    kind = transformers.AutoModelForImageTextToText
    model: Any = kind.from_pretrained(folder / "qwen", dtype=torch.bfloat16)
    model.model.visual.requires_grad_(False).merger.requires_grad_(True)
    model.config.vision_config._attn_implementation = PACKED_IMAGES
    apply_liger(model)
    entries: list[dict[str, Any]] = []

    class Trainer(SFTTrainer):
        """Notes the tokens and times of each step."""

        began = 0.0

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            self.note()
            self.began = time.perf_counter()
            found = super().get_batch_samples(epoch_iterator, num_batches, device)
            waited = time.perf_counter() - self.began
            tokens = sum(int(batch["attention_mask"].sum()) for batch in found[0])
            entries.append({"tokens": tokens, "data_wait_s": waited})
            return found

        def note(self) -> None:
            if gpu:
                cuda.synchronize()
            if entries:
                peak = cuda.max_memory_allocated() / 1e6 if gpu else 0
                seconds = time.perf_counter() - self.began
                entries[-1] |= {"step_s": seconds, "peak_memory_mb": peak}

    settings = SFTConfig(
        output_dir=str(folder / "runs" / run.replace(":", "_")), max_steps=args.steps,
        per_device_train_batch_size=TRL_BATCH, gradient_checkpointing=False, max_length=None,
        gradient_accumulation_steps=max(1, round(args.batch * TOKENS / mean / TRL_BATCH)),
        bf16=False,  # no autocast: the weights are in BF16
        use_cpu=not gpu, optim="adamw_torch_fused", learning_rate=1e-5, save_strategy="no",
        train_sampling_strategy="group_by_length", length_column_name="length", report_to=[],
        remove_unused_columns=False, dataloader_num_workers=8, dataloader_prefetch_factor=4,
        logging_steps=args.steps,
    )  # fmt: skip
    data = Dataset.from_list(rows).cast_column("images", List(ImageColumn()))
    trainer = Trainer(model=model, args=settings, train_dataset=data, processing_class=processor)
    trainer.train()
    trainer.note()
    return entries


def summarize(run: str, entries: list[dict[str, Any]], args: argparse.Namespace) -> PipelineResult:
    """Make the result of a run from the entries of its steps."""
    measured = entries[args.warmup :]
    seconds = sum(entry["step_s"] for entry in measured)
    tokens = sum(entry["tokens"] for entry in measured)
    model, implementation = run.split(":")
    return PipelineResult(
        *harness.get_origin(),
        {"qwen": "qwen2.5-vl-7b", "vila": "vila_sft"}[model] + "-tiny" * args.tiny,
        implementation,
        tok_s=tokens / seconds,
        samples=args.samples,
        step_tokens=tokens / len(measured),
        step_s=seconds / len(measured),
        wait=sum(entry["data_wait_s"] for entry in measured) / seconds,
        peak_gb=max(entry["peak_memory_mb"] or 0 for entry in entries) / 1e3,
        steps=len(measured),
    )


EXAMPLES = """\
  python scripts/bench/lab_pipeline.py --out pipeline --csv pipeline.csv
  python scripts/bench/lab_pipeline.py --out pipeline --runs qwen:coat
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    # fmt: off
    add("--runs", nargs="+", choices=RUNS, default=RUNS, metavar="RUN", help="default: all")
    add("--samples", type=at_least(1), default=500, help="rows of the data set; default 500")
    add("--batch", type=at_least(1), default=2, help="sequences a step; default 2")
    add("--steps", type=at_least(2), default=24, help="default 24")
    add("--warmup", type=at_least(1), default=8, help="steps that are not measured; default 8")
    add("--tiny", action="store_true", help="small models, for tests")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of data, models and runs")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Write data and models where they are missing; train, and print and append the results."""
    folder = args.out.resolve()
    if not (folder / "chat.json").is_file():
        write_data(folder, args.samples)
    if not (folder / "tower").is_dir():
        write_models(folder, tiny=args.tiny)
    results = []
    for run in args.runs:
        entries = (train_trl if run == "qwen:trl_liger" else train_ours)(folder, run, args)
        results.append(summarize(run, entries, args))
        harness.append_results(args.csv, results[-1:])
    harness.say(harness.format_results(results, {
        "model": "model", "implementation": "implementation", "tokens/s": "tok_s:0",
        "tokens a step": "step_tokens:0", "s": "step_s:3", "GB": "peak_gb:1",
        "waited for data": lambda result: f"{result.wait:.1%}",
    }))  # fmt: skip


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
