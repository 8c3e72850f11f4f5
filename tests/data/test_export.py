"""Exported samples, read again, are the samples; what a format cannot hold is left out, named."""

import base64
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_data.tools.export import ExportFormat, export, merge_texts, messages_row
from coat_data.tools.ingest import ingest

PNG = b"\x89PNG\r\n\x1a\n picture "
FORMATS: tuple[ExportFormat, ...] = ("llava", "messages")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["<image>", "<video>\n", " <image-1> ", "<bbox>", "\ud7ff\U0001f600", "\u2028", "</s>"]
)
ASKED = st.lists(TEXT.map(lambda text: Part("text", text)) | st.just(Part("image")), max_size=4)
ANSWERED = st.builds(lambda text: (Part("text", text + "."),), TEXT)


@st.composite
def conversations(draw: st.DrawFn) -> Sample:
    turns = [Turn("system", (Part("text", draw(TEXT)),))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [Turn("user", tuple(draw(ASKED))), Turn("assistant", draw(ANSWERED))]
    images = sum(part.kind == "image" for turn in turns for part in turn.parts)
    media = tuple(Media(kind="image", path=f"{n}.png", data=PNG + b"%d" % n) for n in range(images))
    return Sample(
        id=draw(st.text(st.characters(exclude_categories=["Cs"]))), turns=tuple(turns), media=media
    )


def same(sample: Sample) -> tuple[Any, ...]:
    """All of a sample that has to survive."""
    media = [
        (item.kind, item.data if item.data is not None else Path(item.path or "").read_bytes())
        for item in sample.media
    ]
    return sample.id, merge_texts(sample.turns), media


def stored(samples: list[Sample], folder: Path) -> Path:
    """A source that holds the samples: rows of the messages format."""
    path = folder / "source.jsonl"
    rows = []
    for sample in samples:
        data = [base64.b64encode(medium.data or b"").decode() for medium in sample.media]
        rows.append(messages_row(sample, [f"data:image/png;base64,{text}" for text in data]))
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@given(st.lists(conversations(), min_size=1, max_size=3))
def test_round_trips(samples: list[Sample]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = stored(samples, folder)
        expected = [same(sample) for sample in samples]
        assert [same(sample) for sample in SampleDataset(source).stream()] == expected  # pyright: ignore
        for to in FORMATS:
            out = folder / to
            try:
                summary = export(source, out, to)
            except DataError as error:
                if to == "llava" and "no sample can be exported" in error.problem:
                    continue  # messages hold every sample
                raise
            assert summary.rows + summary.left_out == len(samples)
            assert to == "llava" or not summary.left_out
            found = [same(sample) for sample in SampleDataset(summary.path).stream()]  # pyright: ignore
            assert len(found) == summary.rows
            assert [item for item in expected if item in found] == found


def test_a_text_that_looks_like_a_placeholder_is_left_out_of_llava(tmp_path: Path) -> None:
    image = Media(kind="image", data=PNG)
    asked = (Part("text", "What is <image> in "), Part("image"))
    answer = Turn("assistant", (Part("text", "A tag"),))
    document = Turn("assistant", (Part("image"), Part("text", "A dog")))
    good = Sample(id="good", turns=(Turn("user", (Part("image"),)), answer), media=(image,))
    samples = [
        Sample(id="odd", turns=(Turn("user", asked), answer), media=(image,)),
        Sample(id="document", turns=(Turn("user", ()), document), media=(image,)),
        good,
    ]
    source = stored(samples, tmp_path)
    summary = export(source, tmp_path / "out", "llava")
    assert (summary.rows, summary.left_out) == (1, 2)
    listed = (tmp_path / "out/left_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["where"] for line in listed] == [f"{source}:1", f"{source}:2"]
    assert same(SampleDataset(summary.path)[0]) == same(good)


@pytest.mark.parametrize("to", FORMATS)
def test_files_folders_and_spans_of_videos(tmp_path: Path, to: ExportFormat) -> None:
    (tmp_path / "clip.mkv").write_bytes(b"video")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames/0.png").write_bytes(PNG)
    said = [{"from": "human", "value": "<video>\n?"}, {"from": "gpt", "value": "Rain"}]
    span = {"path": "clip.mkv", "start": 1.5, "end": 2}
    rows = [{"video": video, "conversations": said} for video in (span, "frames")]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    summary = export(tmp_path / "a.json", tmp_path / "out", to)
    read = list(SampleDataset(summary.path).stream())
    first = read[0]
    assert isinstance(first, Sample)
    assert (first.media[0].start, first.media[0].end) == (1.5, 2)
    assert same(dataclasses.replace(first, id="")) == (
        "",
        merge_texts(first.turns),
        [("video", b"video")],
    )
    assert isinstance(read[1], Sample)
    assert (Path(read[1].media[0].path or "") / "0.png").read_bytes() == PNG
    with pytest.raises(DataError, match="not empty"):
        export(tmp_path / "a.json", summary.path.parent, to)


@pytest.mark.parametrize("to", ["messages", "ingest"])
def test_a_document_that_goes_on_does_so_when_read_back(tmp_path: Path, to: Any) -> None:
    text = "".join(f"line {number} of a book\n" for number in range(9000))
    (tmp_path / "book.txt").write_text(text)
    source = SampleDataset(tmp_path / "book.txt")
    assert [sample.continues for sample in source.stream()] == [True, True, False]  # pyright: ignore
    if to == "ingest":
        ingest(tmp_path / "book.txt", tmp_path / "out")
        path = tmp_path / "out"
    else:
        path = export(tmp_path / "book.txt", tmp_path / "out", to).path
    read = [sample for sample in SampleDataset(path).stream() if isinstance(sample, Sample)]
    assert [sample.continues for sample in read] == [True, True, False]
    assert "".join(sample.turns[1].text for sample in read) == text
    # Only a document goes on: the word in a conversation's row means nothing.
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": said, "continues": True}]))
    assert not SampleDataset(tmp_path / "a.json")[0].continues
