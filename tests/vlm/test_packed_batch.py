"""A packed batch trains what its samples train in a padded one: loss and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.load.encode import EncodedSample
from coat_vlm.model.packing import PACKED
from coat_vlm.train.throughput import count_supervised_tokens


def loss_and_gradients(model: Any, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """As the training loop: the summed loss over the trained tokens of all micro-batches."""
    model.zero_grad(set_to_none=True)
    divisor, total = sum(map(count_supervised_tokens, batches)), 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=divisor).loss
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_packed_rows_train_what_padded_rows_train(
    tiny: Any, conversations: Any, family: str
) -> None:
    model = tiny.model(language=tiny.language(family)).train()
    samples = conversations(model)
    padded = [collate(part, pad_token_id=0) for part in (samples[:3], samples[3:])]
    wanted, wanted_gradients = loss_and_gradients(model, padded)
    model.language_model.set_attn_implementation(PACKED)
    # Two packed rows of other samples than the padded batches hold, one without an image.
    packed = [
        collate_packed([samples[i] for i in part], pad_token_id=0, align=32)
        for part in ((4, 0, 2), (1, 3))
    ]
    assert sum(map(count_supervised_tokens, packed)) == sum(map(count_supervised_tokens, padded))
    assert all(batch["input_ids"].shape[1] % 32 == 0 for batch in packed)
    assert any((batch["attention_mask"] == 0).any() for batch in packed)
    loss, gradients = loss_and_gradients(model, packed)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert gradients.keys() == wanted_gradients.keys()
    assert any("vision_tower" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_layout_of_a_packed_row() -> None:
    """By hand: 3 and 2 tokens, filled up to 8; nobody predicts a first token."""
    empty = torch.empty(0, 3, 1, 1)
    samples = [
        EncodedSample(torch.tensor([5, 6, 7]), torch.tensor([5, 6, -100]), empty),
        EncodedSample(torch.tensor([8, 9]), torch.tensor([-100, 9]), empty),
    ]
    batch = collate_packed(samples, pad_token_id=1, align=8)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, 9, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.get("cu_seq_lens_q", torch.empty(0)).tolist() == [0, 3, 5, 8]
    assert batch.get("max_length_q") == 3
    exact = collate_packed(samples, pad_token_id=1, align=5)
    assert exact.get("cu_seq_lens_q", torch.empty(0)).tolist() == [0, 3, 5]
