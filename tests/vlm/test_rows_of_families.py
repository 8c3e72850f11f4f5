"""``coat-vlm data preview --model`` and ``data lint --model`` with published models."""

import json
from pathlib import Path
from typing import Any

import pytest
from family_folders import MAKERS
from PIL import Image
from transformers import AutoProcessor

from coat_cli.main import main

RECIPE = """
name: x
output_dir: {0}/run
model: {{pretrained: {0}/model, max_length: 200}}
stages:
  sft:
    data: [{{name: c, path: {0}/chat.jsonl}}]
    max_steps: 1
    batch_size: 1
    micro_batch_size: 1
    language: {{train: true, lr: 1.0e-5}}
"""


def talk(answer: str, image: str | None = None) -> dict[str, Any]:
    shown = "<image>\n" if image else ""
    said = [{"from": "human", "value": f"{shown}What is it?"}, {"from": "gpt", "value": answer}]
    return {"conversations": said, **({"image": image} if image else {})}


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    Image.new("RGB", (300, 200), (10, 200, 30)).save(tmp_path / "a.png")
    Image.new("RGB", (2010, 8)).save(tmp_path / "line.png")
    rows = [talk("Green.\nYes.", "a.png"), talk("a line", "line.png"), talk("a b " * 150)]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_preview_of_a_published_model(
    family: str, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It was refused."""
    MAKERS[family](tmp_path / "model")
    command = ["data", "preview", str(chat), "--limit", "3", "--model", str(tmp_path / "model")]
    capsys.readouterr()
    assert main(command) == 0
    first, second, _ = capsys.readouterr().out.split("\n\n", 2)
    stock = AutoProcessor.from_pretrained(tmp_path / "model")
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = stock.apply_chat_template(
        [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": "Green.\nYes."}]},
        ]
    )
    image = Image.open(tmp_path / "a.png")
    ids = stock(text=[text], images=[image])["input_ids"][0]
    of_images = ids.count(stock.tokenizer.convert_tokens_to_ids(stock.image_token))
    head, *lines = first.splitlines()
    assert head.startswith(f"{chat}:1, id 0, 300 x 200, {len(ids)} tokens, ")
    assert f" {of_images} of images, " in head
    assert any(f"[{of_images} image tokens]" in line for line in lines)
    trained = [line[4:].strip() for line in lines if line.startswith("  > ")]
    assert trained[0] == "Green.\\n"
    assert trained[1].startswith("Yes.<")
    assert ("absolute aspect ratio must be smaller than 200" in second) == (family == "qwen2_5_vl")

    assert main([*command, "--ids", "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/") == 2
    assert f'<span class="image">[{of_images} image tokens]' in page
    assert f"<sub>{ids[0]}</sub>" in page
    capsys.readouterr()
    assert main([*command, "--ids"]) == 0
    shown = capsys.readouterr().out.split("\n\n", 1)[0].splitlines()[1:]
    numbers = [int(line.split()[1]) for line in shown if "image tokens" not in line]
    assert numbers == [one for one in ids if one != max(ids, key=ids.count)]


def test_lint_with_the_model_of_a_recipe(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """These rows were found in mid-epoch."""
    MAKERS["qwen2_5_vl"](tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(tmp_path))
    command = ["data", "lint", str(chat), "--num-workers", "1"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--model", str(tmp_path / "recipe.yaml")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{chat}:2: images of 2010 x 8 pixels: Qwen2.5-VL's image processor")
    assert lines[1].startswith(f"{chat}:3: ")
    assert "more than max_length=200" in lines[1]
    assert "-> " in lines[1]
    assert lines[-1].startswith(f"{chat}: 3 rows, 2 problems")
    # Without media, and with the model's own length:
    command += ["--model", str(tmp_path / "model"), "--check-media", "none"]
    assert main(command) == 0
