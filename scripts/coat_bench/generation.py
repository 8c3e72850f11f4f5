"""How many questions a second are answered: the suite's engine against a loop of single prompts.

    python -m coat_bench.generation                       7B shape with random weights, one GPU
    python -m coat_bench.generation --csv generation.csv
    python -m coat_bench.generation --size tiny --items 12 --single-items 4 --repeats 1   CPU

The data are made on the spot in POPE's layout: JPEGs of 640 x 480 and yes/no questions about them,
with LLaVA's prompt. Cases:

    engine     coat_eval.generation: prompts sorted by length, left-padded batches, key-value cache,
               worker processes that decode and tokenize ahead, answers written as they come
    single     coat_vlm.generate.generate, one prompt at a time, decoded and tokenized in line

Both answer with the same weights, in the same dtype, with the same key-value cache, and read the
same files. Random weights never end an answer, so that every one has ``--new-tokens`` tokens: two
by default, "yes" and the token that ends it, which favours the single prompts more than longer
answers would. A rate is the median over passes, in which the cases take turns, after one that is
not counted.

``7b`` has the language model of Qwen2.5-7B, the tower of SigLIP-so400m/14 at 384 pixels and VILA's
2 x 2 downsampling projector: 196 tokens per image, 8.0 billion parameters.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from PIL import Image
from tqdm import tqdm

from coat_bench.rows import replace_csv, table
from coat_eval.benchmark import Asking, Prompt
from coat_eval.coat_answerer import CoatAnswerer
from coat_eval.data_folder import DataFolder
from coat_eval.generation import Generation, answer_all, default_workers
from coat_eval.tasks import get_benchmark
from coat_vlm.config import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from coat_vlm.generate import generate
from coat_vlm.model.build import build_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import (
    CoatVlmProcessor,
    build_processor,
    prepare_tokenizer,
    train_tokenizer,
)
from coat_vlm.model.vlm import CoatVlm

SPLITS = ("random", "popular", "adversarial")
OBJECTS = ("dog", "traffic light", "dining table", "person", "bottle of wine", "bicycle")
NUM_PICTURES = 64
"""POPE asks 18 questions about each of its 500 pictures; every question decodes its own anew."""
COLUMNS = ("case", "size", "batch", "prompt_tokens", "new_tokens", "items", "items_per_s", "ratio")

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "7b": (
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
        },
    ),
    "tiny": (
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
"""Tower and language model: google/siglip-so400m-patch14-384 and Qwen/Qwen2.5-7B (config.json)."""


def make_pope(folder: Path, num_items: int) -> None:
    """Three label files and their pictures, which are smooth with some noise."""
    pictures = folder / "val2014"
    pictures.mkdir(parents=True)
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:480, 0:640]
    for number in range(NUM_PICTURES):
        wave = np.sin(x / rng.uniform(9, 90) + y / rng.uniform(9, 90))
        noise = rng.normal(0, 8, (480, 640, 3))
        pixels = np.clip(128 + 100 * wave[..., None] * rng.uniform(0, 1, 3) + noise, 0, 255)
        path = pictures / f"COCO_val2014_{number:012d}.jpg"
        Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
    for place, split in enumerate(SPLITS):
        rows = [
            {
                "question_id": index + 1,
                "image": f"COCO_val2014_{index % NUM_PICTURES:012d}.jpg",
                "text": f"Is there a {OBJECTS[index % len(OBJECTS)]} in the image?",
                "label": "yes" if index % 2 else "no",
            }
            for index in range((num_items + place) // len(SPLITS))
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"coco_pope_{split}.json").write_text(lines, encoding="utf-8")


def build(size: str, device: torch.device) -> tuple[CoatVlm, CoatVlmProcessor]:
    """The model with random weights, BF16 on a GPU, and its processor with a made-up tokenizer."""
    vision, language = SHAPES[size]
    config = ModelConfig(
        vision=VisionConfig(config={"model_type": "siglip_vision_model", **vision}),
        language=LanguageConfig(config={"model_type": "qwen2", **language}),
        projector=ProjectorConfig(type="mlp_downsample"),
    )
    # Whole words, as a published tokenizer would have them: lengths as with real models.
    texts = [f"Is there a {thing} in the image?" for thing in OBJECTS]
    texts.append("Answer the question using a single word or phrase.")
    tokenizer = prepare_tokenizer(train_tokenizer(texts * 4, 600))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: Any = build_model(config, tokenizer, dtype)
    model = model.to(device).eval()
    return model, build_processor(config, tokenizer, cast(CoatVlmConfig, model.config))


def engine(answerer: CoatAnswerer, prompts: list[Prompt], settings: Generation) -> int:
    """Answer all questions as the suite does, in a folder of its own; their number."""
    with tempfile.TemporaryDirectory() as out:
        problems = answer_all(answerer, prompts, set(), Path(out), settings)
        written = (Path(out) / "predictions.rank0.jsonl").read_text(encoding="utf-8")
    if problems or len(written.splitlines()) != len(prompts):
        raise RuntimeError("the engine did not answer every question")
    return len(prompts)


def single(model: CoatVlm, processor: CoatVlmProcessor, prompts: list[Prompt], tokens: int) -> int:
    """Answer all questions by a loop of ``generate`` with one prompt each; their number."""
    for prompt in prompts:
        generate(model, processor, [prompt.load()], tokens)
    return len(prompts)


def measure(cases: dict[str, Any], repeats: int, device: torch.device) -> dict[str, float]:
    """Items per second of each case, the median over passes."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in tqdm(range(repeats + 1), desc="passes", disable=None):
        for name, case in cases.items():
            start = time.perf_counter()
            count = case()
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates[name].append(count / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def main() -> None:
    """Measure, print a table, and write it if asked to."""
    args = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chip = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    tqdm.write(f"{chip}; {versions}; {args.workers} workers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "pope"
        make_pope(folder, args.items)
        model, processor = build(args.size, device)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tqdm.write(f"{parameters / 1e9:.2f} billion parameters in {model.dtype}")
        pope = get_benchmark("pope")
        data = DataFolder.open(folder, "pope", pope.layouts)
        prompts = list(pope.prompts(data, Asking()))
        answerer = CoatAnswerer(model, processor, dict)
        encoded = answerer.encoder.encode(prompts[0].load())
        settings = Generation(
            batch_size=args.batch_size,
            max_new_tokens=args.new_tokens,
            num_workers=args.workers,
            progress=False,
        )
        few = prompts[: args.single_items]
        cases = {
            "single": partial(single, model, processor, few, args.new_tokens),
            "engine": partial(engine, answerer, prompts, settings),
        }
        rates = measure(cases, args.repeats, device)
    length, new = len(encoded.input_ids), args.new_tokens
    shapes = {
        "single": (1, length, new, len(few)),
        "engine": (args.batch_size, length, new, len(prompts)),
    }
    lines = [
        [case, args.size, *map(str, shapes[case]), f"{rate:.2f}", f"{rate / rates['single']:.2f}"]
        for case, rate in rates.items()
    ]
    tqdm.write(table(COLUMNS, lines))
    if device.type == "cuda":
        tqdm.write(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if args.csv is not None:
        replace_csv(args.csv, COLUMNS, lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        epilog=(__doc__ or "").split("\n", maxsplit=1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SHAPES, default="7b", help="the model; default 7b")
    parser.add_argument("--items", type=int, default=768, help="questions of the engine")
    parser.add_argument("--single-items", type=int, default=48, help="questions asked one by one")
    parser.add_argument("--batch-size", type=int, default=64, help="default 64")
    parser.add_argument("--new-tokens", type=int, default=2, help="tokens per answer; default 2")
    parser.add_argument("--repeats", type=int, default=3, help="counted passes; default 3")
    parser.add_argument(
        "--workers",
        type=int,
        default=default_workers("cuda" if torch.cuda.is_available() else "cpu"),
        help="processes that decode ahead; default 0 without a GPU",
    )
    parser.add_argument("--csv", type=Path, help="file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
