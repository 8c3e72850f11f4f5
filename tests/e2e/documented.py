"""The commands of the documents, and a folder with small versions of all files that they name."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import started
import torch
from family_folders import MAKERS
from official_files import clip, make_benchmarks
from PIL import Image
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

from coat_vlm.model.processor import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs/index.md", *sorted((ROOT / "docs/guides").glob("*.md")))
COMPOSED = ROOT / "docs/guides/composed.md"
"""The page whose model other pages use."""
LONGEST_S = 300
PUBLISHED = "Qwen/Qwen2.5-VL-3B-Instruct"
TOWER, LANGUAGE = "google/siglip-base-patch16-224", "Qwen/Qwen2.5-1.5B-Instruct"
"""Hub ids that the documents use; here they are folders, which transformers looks for first."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    """Why no test runs it, as the comment before it says."""

    def commands(self) -> list[str]:
        """Its shell commands, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [stripped for line in lines if (stripped := re.sub(r"\s+# .*", "", line).strip())]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(r"(?:<!-- not run: ([^>]*) -->\n)?^```(\w+)\n(.*?)^```", re.S | re.M)
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[2], found[3], found[1])
        for found in pattern.finditer(text)
    ]


def make_place(place: Path) -> None:
    """Data, checkpoints, benchmarks and recipes under the documents' names."""
    _make_data(place)
    _make_checkpoints(place)
    make_benchmarks(place / "benchmarks")
    gqa = "testdev_balanced_questions.json"
    (place / gqa).write_bytes((place / "benchmarks/gqa" / gqa).read_bytes())
    questions = json.loads((place / gqa).read_text())
    answers = [{"question_id": key, "prediction": row["answer"]} for key, row in questions.items()]
    (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (place / "wiki.txt").write_text("The cat sat on the mat, and a dog ran to it. " * 400)
    for name in ("kernels", "scripts", "examples"):
        (place / name).symlink_to(ROOT / name)
    for name in ("my_qwen.yaml", "my_recipe.yaml"):
        recipes = [b for page in PAGES for b in blocks(page) if b.text.startswith(f"# {name}")]
        (place / name).write_text(recipes[0].text)


def _make_data(place: Path) -> None:
    generator = np.random.default_rng(0)
    (place / "images").mkdir(parents=True)
    names = []
    for number in range(8):
        pixels = generator.integers(0, 256, (40, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "images" / f"{number}.jpg")
        names.append(f"{number}.jpg")
    Image.open(place / "images" / "0.jpg").save(place / "cat.jpg")

    def rows(count: int, question: str, answer: str) -> str:
        return json.dumps(
            [
                {
                    "id": str(number),
                    "image": names[number % len(names)],
                    "conversations": [
                        {"from": "human", "value": f"<image>\n{question}"},
                        {"from": "gpt", "value": answer},
                    ],
                }
                for number in range(count)
            ]
        )

    (place / "captions.json").write_text(rows(256, "Describe the picture.", "A red square."))
    (place / "chat.json").write_text(rows(128, "Is there a dog?", "no"))
    (place / "demo.json").write_text(
        rows(2, "What is it?", "noise").replace('"0.', '"images/0.').replace('"1.', '"images/1.')
    )
    table = [["img_path", "q", "a"], ["images/0.jpg", "Is there a dog?", "no"]]
    (place / "flat.csv").write_text("".join(",".join(row) + "\n" for row in table))
    columns = {"messages": "conversations", "images": "image"}
    info = {"file_name": "demo.json", "formatting": "sharegpt", "columns": columns}
    (place / "dataset_info.json").write_text(json.dumps({"mllm_demo": info}))
    (place / "shards").mkdir()
    for shard in ("000", "001"):
        with tarfile.open(place / "shards" / f"{shard}.tar", "w") as archive:
            for number in range(2):
                caption = place / "shards" / "caption.txt"
                caption.write_text("A red square.")
                archive.add(place / "images" / f"{number}.jpg", f"{number}.jpg")
                archive.add(caption, f"{number}.txt")
                caption.unlink()
    clip(place / "clip.mp4")
    (place / "held_out.json").write_text(rows(4, "Is there a dog?", "no"))
    folder = place / "my_questions"
    (folder / "images").mkdir(parents=True)
    lines = []
    for number in range(4):
        (folder / "images" / f"{number}.jpg").write_bytes(
            (place / "images" / f"{number}.jpg").read_bytes()
        )
        row = {"question_id": str(number), "image": f"images/{number}.jpg"}
        row |= {"text": "Is there a dog?\nAnswer yes or no.", "answer": ("yes", "no")[number % 2]}
        lines.append(json.dumps(row | {"category": "animals"}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines))


def _make_checkpoints(place: Path) -> None:
    """Random checkpoints in the official layouts."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": 64}
    vision = {**sizes, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    SiglipModel(SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(place / TOWER)
    SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place / TOWER)
    config = Qwen2Config(
        **sizes, num_hidden_layers=2, num_key_value_heads=2, vocab_size=320,
        max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(place / LANGUAGE)
    texts = ["What is this? A red square; a dog, yes or no."] * 4
    train_tokenizer(texts, 300).save_pretrained(place / LANGUAGE)
    MAKERS["qwen2_5_vl"](place / PUBLISHED)


def make_reader(parent: Path) -> None:
    """Make a reader's folder: all files of the documents; README's commands have run in it."""
    folder = parent / "reader"
    folder.mkdir()
    make_place(folder)
    run_page(PAGES[0], folder)
    run_page(COMPOSED, folder)
    assert (folder / "runs/my_vlm/report.html").is_file()
    _make_runs(folder)


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **threads, "PATH": path, "HF_HUB_OFFLINE": "1"}


def run(command: str, folder: Path) -> None:
    """Run one command line as a shell would; most in a process that is forked, which is faster."""
    plain = command.startswith("coat-vlm ") and not set(command) & set("|><;&$*")
    before = Path.cwd()
    os.chdir(folder)
    try:
        if plain:
            words = shlex.split(command)[1:]
            done = started.run(words, env=_environment(), timeout=LONGEST_S)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                env=_environment(), capture_output=True, text=True, timeout=LONGEST_S,
                check=False,
            )  # fmt: skip
    finally:
        os.chdir(before)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def run_page(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.language == "bash" and block.not_run is None:
            for command in block.commands():
                run(command, folder)


def _make_runs(folder: Path) -> None:
    """Runs under the other names that the guides use: copies, and two with LoRA."""
    for name in ("bf16_0", "bf16_1", "coat_0", "coat_1"):
        shutil.copytree(folder / "runs/my_vlm", folder / "runs" / name)
    for name in ("bf16", "coat"):
        shutil.copytree(folder / "out/my_vlm", folder / "out" / name)
    for recipe, name in (("my_recipe", "my_lora"), ("my_qwen", "my_adapter_1")):
        run(
            f"coat-vlm train {recipe}.yaml precision=bf16 output_dir=runs/{name} "
            "stages.sft.lora.rank=4 stages.sft.lora.alpha=8",
            folder,
        )
