"""Mixtures of experts: the load-balancing loss, and FP8 blocks with experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_folders import MAKERS
from family_samples import sample_of
from transformers import AutoModelForImageTextToText

from coat_data.load.collate import collate
from coat_data.load.encode import IGNORE_INDEX
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.train.passes import copy_batch_to_device

CPU = torch.device("cpu")
FAMILY = "qwen3_vl_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / FAMILY
    MAKERS[FAMILY](folder)
    return folder


def collate_samples(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    processor = FamilyProcessor.load("model.pretrained", str(folder), 1024)
    encoded = [processor.encoder()(sample_of(folder, name)) for name in names]
    batch = collate(encoded, pad_token_id=processor.tokenizer.pad_token_id)
    return copy_batch_to_device(batch, CPU)


def test_the_load_balancing_loss_is_that_of_transformers(folder: Path) -> None:
    """Padding is not counted, and gradients of routers are equal."""
    ours: Any = load_family_model("model.pretrained", str(folder), torch.float32).train()
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    batch = collate_samples(folder, ("wide", "two images", "text"))
    items = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    plain = ours(**batch, num_items_in_batch=float(items), skip_logits=True).loss
    for model in (ours, stock):
        model.config.text_config.output_router_logits = True
        model.config.text_config.router_aux_loss_coef = 0.5
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    expected = stock(**inputs, **ours.make_token_types(batch["input_ids"]))
    found = ours(**batch, num_items_in_batch=float(items), skip_logits=True)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.loss.item() > plain.item() + 0.1
    mean = ours(**batch, skip_logits=True).loss
    assert mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    found.loss.backward()
    expected.loss.backward()
    gradients = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - gradients[name].grad).norm()
        assert difference <= 1e-4 * gradients[name].grad.norm() + 1e-7, name


def test_micro_batches_contribute_by_their_supervised_tokens(folder: Path) -> None:
    ours: Any = load_family_model("model.pretrained", str(folder), torch.float32)
    ours.config.text_config.output_router_logits = True
    losses, counts, expected = [], [], 0.0
    for name in ("wide", "text"):
        batch = collate_samples(folder, (name,))
        counts.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
        losses.append(ours(**batch, skip_logits=True).loss.item())
    for name, loss, count in zip(("wide", "text"), losses, counts, strict=True):
        batch = collate_samples(folder, (name,))
        part = ours(**batch, num_items_in_batch=float(sum(counts)), skip_logits=True).loss
        assert part.item() == pytest.approx(loss * count / sum(counts), rel=1e-5)
        expected += part.item()
    assert expected > 0
