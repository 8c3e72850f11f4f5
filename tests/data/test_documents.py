"""Documents: what holds them, how they are cut, what is trained of a piece."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from encoders import encoder_of, jsonl

from coat_data.load.check_labels import check_labels, verify_template
from coat_data.load.dataset import SampleDataset
from coat_data.load.documents import (
    DocumentChunks,
    RowKinds,
    get_chunk,
    row_kinds,
    split_document,
    split_rows,
)
from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.mixture.selection import SelectedRows, original_row
from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_data.text.chat import get_template

LIMIT = 24
HARD = (
    "The assistant gives helpful, detailed answers.\n\n  Two  spaces,\ttabs and caf\u00e9 \u4f60"
    "\u597d\u4f60\u597d\u4f60\u597d\u4f60\u597d \U0001f600\u200d\U0001f600 "
    "<|im_end|></s><image>" + "x" * 90 + " the end of it. "
) * 3


def text_encoder(tokenizer: Any, limit: int = LIMIT) -> Encoder:
    """For a language model without vision."""
    return encoder_of(tokenizer, image_token_id=None, tokens_per_image=0, max_length=limit)


def document(text: str, *, row: int = 0) -> Sample:
    turns = (Turn("user", ()), Turn("assistant", (Part("text", text),)))
    return Sample(id=str(row), turns=turns, source="web.jsonl", row=row)


def test_pieces_fit_and_are_the_document(tokenizer: Any) -> None:
    encoder = text_encoder(tokenizer)
    sample = document(HARD)
    spans = split_document(sample, encoder)
    pieces = [get_chunk(sample, *span) for span in spans]
    assert "".join(piece.turns[1].text for piece in pieces) == HARD
    assert [piece.continues for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    sizes = [len(encoder(piece).input_ids) for piece in pieces]
    assert max(sizes) <= LIMIT
    assert min(sizes[:-1]) > LIMIT // 2  # no more pieces than needed, by far
    end = tokenizer.eos_token_id
    for piece, size in zip(pieces, sizes, strict=True):
        encoded = encoder(piece)
        assert encoder.measure(piece).tokens == size
        check_labels(piece, encoded.input_ids.tolist(), encoded.labels.tolist(), encoder)
        assert (int(encoded.labels[-1]) == end) == (not piece.continues)


def test_a_piece_begins_with_a_word_where_there_is_one(make_tokenizer: Any) -> None:
    encoder = text_encoder(make_tokenizer("llama2_first"))
    text = "What is in the image? A red circle and two blue squares. " * 6
    spans = split_document(document(text), encoder)
    assert len(spans) > 3
    for start, _ in spans[1:]:
        assert text[start].isspace() or text[start - 1].isspace()


def test_rows_that_fit_and_bad_rows_are_one_piece(make_tokenizer: Any, tmp_path: Path) -> None:
    encoder = text_encoder(make_tokenizer("qwen2"))

    texts = [{"text": text} for text in ("A dog.", "", HARD, "42")]
    dataset = SampleDataset(jsonl(tmp_path / "web.jsonl", *texts))
    found = np.concatenate(list(split_rows(dataset, encoder, range(4))))
    assert [row.tolist() for row in found if row[0] != 2] == [[0, 0, -1], [1, 0, -1], [3, 0, -1]]
    pieces = DocumentChunks(SelectedRows(dataset, np.array([2, 3])), found[found[:, 0] < 2])
    assert [original_row(pieces, index) for index in range(2)] == [2, 3]
    assert not pieces[1].continues


def test_texts_by_content(tmp_path: Path) -> None:
    """JSONL and Parquet with other fields next to the text; .txt files, patterns and folders."""
    rows = [{"text": "One.", "url": "https://a"}, {"text": "Two.", "url": "https://b"}]
    Dataset.from_list(rows).to_parquet(tmp_path / "web.parquet")
    (tmp_path / "web.jsonl").write_text('{"content": "One."}\n{"content": "Two."}\n')
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt").write_bytes(b"\xef\xbb\xbfOne.")
    (tmp_path / "books/b.txt").write_text("Two.")
    (tmp_path / "books/c.txt").write_text(" \n")
    for path in ("web.parquet", "web.jsonl", "books", "books/*.txt"):
        dataset = SampleDataset(tmp_path / path)
        assert dataset.format == "documents", path
        assert row_kinds(dataset).documents
        assert [sample.turns[1].text for sample in map(dataset.__getitem__, range(2))] == [
            "One.", "Two.",
        ]  # fmt: skip
        assert dataset[0].is_document
    assert dataset[1].where.endswith("b.txt:1")


def test_documents_are_found_wherever_they_stand(tmp_path: Path, make_tokenizer: Any) -> None:
    """A mixed source begins with conversations: its documents are cut, and nothing else."""
    encoder = text_encoder(make_tokenizer("qwen2"))
    talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    text = {"messages": [{"role": "assistant", "content": HARD}]}
    rows: list[Any] = [talk] * 200 + [text] * 100 + [talk] * 200
    rows[0] = {"messages": 3}  # a bad row tells nothing
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = SampleDataset(path)
    assert row_kinds(dataset) == RowKinds(3, 12, dropped_question=f"{path}:32")
    found = np.concatenate(list(split_rows(dataset, encoder, range(198, 202))))
    assert sorted(Counter(found[:, 0].tolist()).values()) == [1, 1, *[len(found) // 2 - 1] * 2]
    path.write_text("\n".join(map(json.dumps, rows[:200])))
    assert not row_kinds(SampleDataset(path)).documents


def test_texts_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "One."}\n{"text": "  "}\n{"url": "x"}\n{"text": 3}\n'
    )
    dataset = SampleDataset(tmp_path / "a.jsonl")
    for row, message in ((1, "text is empty"), (2, "there is no text"), (3, "not a string")):
        with pytest.raises(DataError, match=rf"a.jsonl:{row + 1}: .*{message}"):
            dataset[row]
    (tmp_path / "b.txt").write_bytes(b"One \xff")
    with pytest.raises(DataError, match=r"b.txt:1: is not UTF-8"):
        SampleDataset(tmp_path / "b.txt", format="documents")[0]


def test_media_are_refused_without_a_tower(make_tokenizer: Any) -> None:
    encoder = text_encoder(make_tokenizer("qwen2"))
    verify_template(encoder)
    turns = (Turn("user", (Part("image"),)), Turn("assistant", (Part("text", "A dog."),)))
    media = (Media(kind="image", path="a.png"),)
    sample = Sample(id="1", turns=turns, media=media, source="rows.json", row=7)
    assert not sample.is_document
    for use in (encoder, encoder.measure, encoder.layout):
        with pytest.raises(
            DataError, match=r"rows.json:8: shows 1 images or videos, but the model"
        ):
            use(sample)


def test_a_text_that_goes_on_has_no_end_in_any_template(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer("qwen2")
    for template in ("plain", "vicuna_v1", "chatml", "tokenizer"):
        encoder = text_encoder(tokenizer, limit=500)
        encoder.template = get_template(template, tokenizer)
        sample = get_chunk(document("A red circle and two blue squares."), 0, 12)
        _, labels = encoder.layout(sample)
        trained = [label for label in labels if label != IGNORE_INDEX]
        assert encoder.tokenizer.decode(trained) == "A red circle"
