"""The engine: batches, answers that do not depend on them, broken media, and what is on disk."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_data.media.video import Clip, VideoReader
from coat_data.sample import DataError, Media
from coat_eval.benchmark import Prompt
from coat_eval.data_folder import MediaFile, ParquetImage
from coat_eval.generation import Generation, answer_all, make_batches, merge, resume, select_device
from coat_eval.own_model import CoatAdapter
from coat_vlm.distributed import World


def text(number: int, length: int, *media: Any) -> Prompt:
    return Prompt(question_id=str(number), text="x" * length, media=media)


def test_batches_hold_prompts_of_like_length_the_longest_first():
    lengths = [5, 90, 7, 80, 6, 70, 1]
    prompts = [text(number, length) for number, length in enumerate(lengths)]
    assert make_batches(prompts, 3) == [[1, 3, 5], [2, 4, 0], [6]]


def test_questions_about_one_video_stay_together():
    videos = [MediaFile(Path(f"{number}.mp4"), "video") for number in range(3)]
    prompts = [text(number, 10 + number, videos[number % 3]) for number in range(9)]
    assert make_batches(prompts, 4) == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]
    assert make_batches(prompts, 2) == [[2, 5], [8], [1, 4], [7], [0, 3], [6]]


def test_prompts_with_and_without_images_are_not_mixed():
    image = MediaFile(Path("a.png"))
    prompts = [text(0, 9), text(1, 5, image), text(2, 8), text(3, 6, image, image)]
    assert make_batches(prompts, 8) == [[3], [1], [0, 2]]


def test_a_row_group_is_read_in_one_go(benchmarks: Path):
    path = benchmarks / "mmmu" / "Art" / "validation-00000-of-00001.parquet"  # groups of two rows
    prompts = [
        text(row, 10 * (row % 2), ParquetImage(path, row=row, column="image_1")) for row in range(4)
    ]
    assert make_batches(prompts, 2) == [[1, 0], [3, 2]]


@pytest.fixture
def prompts(benchmarks: Path) -> list[Prompt]:
    """Text alone, one and two images, and a video about which three things are asked."""
    images = sorted((benchmarks / "gqa" / "images").iterdir())
    shown = [(), (images[0],), (images[1], images[2]), (images[3],), ()]
    found = [text(i, 3 + 4 * i, *map(MediaFile, own)) for i, own in enumerate(shown)]
    video = MediaFile(benchmarks / "videomme" / "data" / "aaa.mp4", "video")
    return [*found, *(text(10 + i, 5 * i + 1, video) for i in range(3))]


def answers(
    adapter: CoatAdapter, prompts: list[Prompt], out: Path, **settings: Any
) -> tuple[dict[int, str], list[dict[str, Any]]]:
    out.mkdir(exist_ok=True)
    generation = Generation(**{"max_new_tokens": 5, **settings})
    problems = answer_all(adapter, prompts, set(), out, generation)
    return {index: row["prediction"] for index, row in merge(out).items()}, problems


def test_batches_and_workers_do_not_change_an_answer(
    adapter: CoatAdapter, prompts: list[Prompt], tmp_path: Path
):
    one, _ = answers(adapter, prompts, tmp_path / "one", batch_size=1)
    assert len(one) == 8
    assert len(set(one.values())) > 4
    assert answers(adapter, prompts, tmp_path / "eight", batch_size=8) == (one, [])
    assert answers(adapter, prompts, tmp_path / "work", batch_size=3, num_workers=1) == (one, [])


def test_a_video_is_decoded_once_for_all_its_questions(
    adapter: CoatAdapter, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decoded: Counter[str | None] = Counter()
    read = VideoReader.read

    def counted(self: VideoReader, media: Media, *more: Any) -> Clip:
        decoded[media.path] += 1
        return read(self, media, *more)

    monkeypatch.setattr(VideoReader, "read", counted)
    other = tmp_path / "other.mp4"
    other.write_bytes(Path(prompts[-1].media[0].name).read_bytes())
    more = [*prompts, text(20, 3, MediaFile(other, "video")), text(21, 9, prompts[-1].media[0])]
    adapter.encoder._media._last_clip = None  # of the test before
    answers(adapter, more, tmp_path, batch_size=2)
    assert sorted(decoded.values()) == [1, 1]


def test_what_cannot_be_shown_is_listed_and_the_others_are_answered(
    adapter: CoatAdapter, prompts: list[Prompt], tmp_path: Path
):
    whole = Path(prompts[1].media[0].name).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "none.mp4").write_bytes(b"no video")
    broken = [
        text(30, 2, MediaFile(tmp_path / "cut.png")),
        text(31, 4, MediaFile(tmp_path / "none.mp4", "video")),
        text(32, 4000),
    ]
    found, problems = answers(adapter, [*broken, *prompts], tmp_path / "out", batch_size=4)
    expected, _ = answers(adapter, prompts, tmp_path / "expected", batch_size=4)
    assert found == {index + 3: answer for index, answer in expected.items()}
    listed = {row["index"]: (row["question_id"], row["problem"]) for row in problems}
    assert listed[0][0] == "30"
    assert "cannot be read" in listed[0][1]
    assert "the video cannot be read" in listed[1][1]
    assert "more than max_length=2048" in listed[2][1]
    assert problems[0]["media"] or problems[1]["media"]


def test_ranks_share_the_batches(adapter: CoatAdapter, prompts: list[Prompt], tmp_path: Path):
    generation = Generation(batch_size=2, max_new_tokens=1)
    for rank in (0, 1, 2):
        world = World(rank=rank, size=3, device=torch.device("cpu"))
        answer_all(adapter, prompts, {4}, tmp_path, generation, world=world)
    lengths = [len(path.read_text().splitlines()) for path in tmp_path.iterdir()]
    assert sum(lengths) == 7
    assert max(lengths) <= 4
    assert sorted(merge(tmp_path)) == [0, 1, 2, 3, 5, 6, 7]


def test_a_resumed_run_asks_in_the_same_batches(
    adapter: CoatAdapter, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[list[list[int]]] = []
    answer = CoatAdapter.answer

    def noted(self: CoatAdapter, batch: Any, max_new_tokens: int) -> list[str]:
        asked[-1].append(batch["input_ids"].tolist())
        return answer(self, batch, max_new_tokens)

    monkeypatch.setattr(CoatAdapter, "answer", noted)
    generation = Generation(batch_size=2, max_new_tokens=1)
    own = [*prompts[:1], *prompts[4:]]  # the video's [2, 3] and [4], then [1, 0]
    for name, done in (("whole", set()), ("rest", {0, 1, 2, 3}), ("part", {0, 2})):
        asked.append([])
        (tmp_path / name).mkdir()
        answer_all(adapter, own, done, tmp_path / name, generation)
        assert set(merge(tmp_path / name)) == set(range(5)) - done
    whole, rest, part = asked
    assert len(whole) == 3
    assert rest == [ids for ids in whole if len(ids) == 1]
    assert part == whole


def written(out: Path, rank: int, *numbers: int) -> None:
    with (out / f"predictions.rank{rank}.jsonl").open("a", encoding="utf-8") as file:
        for number in numbers:
            said = f"answer {number} \u2028 line"
            row = {"index": number, "question_id": str(number), "prediction": said}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def test_answers_of_any_number_of_ranks_are_put_together(tmp_path: Path):
    assert resume(tmp_path, {"model": "a"}) == set()
    written(tmp_path, 0, 5, 1)
    written(tmp_path, 7, 2)
    with (tmp_path / "predictions.rank7.jsonl").open("ab") as file:
        file.write(b'{"index": 3, "question_id": "3", "predic')
    assert resume(tmp_path, {"model": "a"}) == {1, 2, 5}
    written(tmp_path, 1, 3, 5)  # 5 as after a kill between writing and removing
    rows = merge(tmp_path)
    assert list(rows) == [1, 2, 3, 5]
    assert rows[3]["prediction"] == "answer 3 \u2028 line"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.jsonl", "run.json"]
    with pytest.raises(ValueError, match=r"made with a different model;.*--overwrite"):
        resume(tmp_path, {"model": "b"})
    assert list(merge(tmp_path)) == [1, 2, 3, 5]
    assert resume(tmp_path, {"model": "b"}, overwrite=True) == set()
    assert json.loads((tmp_path / "run.json").read_text()) == {"format_version": 1, "model": "b"}


def test_a_damaged_line_is_named(tmp_path: Path):
    resume(tmp_path, {})
    written(tmp_path, 0, 1)
    with (tmp_path / "predictions.rank0.jsonl").open("a") as file:
        file.write('{"index": 2}\n')
    with pytest.raises(DataError, match=r"predictions\.rank0\.jsonl:2: is not an answer of a run"):
        merge(tmp_path)


@pytest.mark.parametrize("name", ["gpu", "cuda:x"])
def test_a_device_that_does_not_exist_is_told(name: str):
    with pytest.raises(ValueError, match=f"device '{name}'; allowed: cpu, cuda"):
        select_device(name)


def test_cuda_is_the_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert select_device("cuda") == select_device() == torch.device("cuda", 3)
    assert select_device("cuda:1") == torch.device("cuda", 1)
    assert select_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU"):
        select_device("cuda")
