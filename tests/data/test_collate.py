"""Batches, written out by hand."""

import torch

from coat_data.load.collate import collate
from coat_data.load.encode import EncodedSample


def encoded(ids: list[int], num_images: int = 0, fill: float = 0.0) -> EncodedSample:
    labels = torch.tensor([-100, *ids[1:]])
    return EncodedSample(torch.tensor(ids), labels, torch.full((num_images, 3, 2, 2), fill))


def test_right_padding():
    """Of a tokenizer that pads with its end token: one in a text is attended and has a label."""
    batch = collate(
        [encoded([5, 6, 9], 1, 1.0), encoded([8]), encoded([1, 2], 2, 3.0)], pad_token_id=9
    )
    assert batch["input_ids"].tolist() == [[5, 6, 9], [8, 9, 9], [1, 2, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 9], [-100, -100, -100], [-100, 2, -100]]
    assert batch["pixel_values"].shape == (3, 3, 2, 2)
    assert batch["pixel_values"][:, 0, 0, 0].tolist() == [1.0, 3.0, 3.0]
    assert {batch[key].dtype for key in ("input_ids", "attention_mask", "labels")} == {torch.int64}


def test_left_padding():
    batch = collate([encoded([5, 6, 7]), encoded([8])], pad_token_id=0, padding_side="left")
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    assert batch["pixel_values"].shape == (0, 3, 2, 2)
