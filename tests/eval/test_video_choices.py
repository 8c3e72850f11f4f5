"""MVBench, MLVU and LongVideoBench on made-up rows in their official layouts."""

import itertools
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scoring_helpers import prompts_of, write

from coat_data.media.video import read_frames
from coat_data.sample import DataError
from coat_eval.scoring import format_headline, score_official
from coat_eval.tasks import get_benchmark


def score(name: str, said: dict[str, str], *references: Path) -> dict[str, Any]:
    folder = references[0].parent
    predictions = write(folder / "p.json", [{"question_id": i, "text": t} for i, t in said.items()])
    return score_official(get_benchmark(name), [predictions], references, allow_missing=True)


def row(video: str, answer: str = "a dog", **further: Any) -> dict[str, Any]:
    choices = ["a cat", "a dog", "a bus"]
    return {"video": video, "question": "What moves?", "candidates": choices, "answer": answer} | (
        further
    )


WRITTEN = ("{}", "({}", "({})", "{})", "{}.", "({}) a dog", "{}. a dog", " {} \n(A)", "{}, I think")
OTHER = ("", ".", "a dog", "Answer: B", "(A) or (B)", ")", "B)(A)", "It is (B)", "( ", "\nB ")


def is_right_in_mvbench(text: str, gold: str) -> bool:
    """check_ans: the first word, without periods, is a part of "(x)", or contains it."""
    line, gold = text.strip().partition("\n")[0].lower(), f"({gold.lower()})"
    word = ("(" + line).partition(" ")[0]
    parts = {gold[a:b] for a, b in itertools.combinations_with_replacement(range(4), 2)}
    return "".join(word.split(".")) in parts or len(word.split(gold)) > 1


def test_mvbench_by_task(tmp_path: Path):
    texts = [one.format(letter) for one in WRITTEN for letter in "ABCab"] + list(OTHER)
    first = [row(f"{i}.mp4") for i in range(len(texts))]
    files = [
        write(tmp_path / "json" / "moving_count.json", first),
        write(tmp_path / "json" / "action_antonym.json", [row("1.webm", "a bus")] * 2),
    ]
    said = {f"moving_count/{i}": text for i, text in enumerate(texts)}
    report = score("mvbench", {**said, "action_antonym/0": "C", "action_antonym/1": "(C"}, *files)
    scores = {item["question_id"]: item["score"] for item in report["items"]}
    wanted = {f"moving_count/{i}": is_right_in_mvbench(text, "B") for i, text in enumerate(texts)}
    assert scores == {**wanted, "action_antonym/0": 1, "action_antonym/1": 0}
    assert scores[f"moving_count/{texts.index('')}"] == 1  # as the official script has it
    number = len(texts)
    assert report["metrics"] == {
        "overall": pytest.approx(100 * (sum(wanted.values()) + 1) / (number + 2)),
        "task.action_antonym": 50,
        "task.moving_count": pytest.approx(100 * sum(wanted.values()) / number),
    }
    assert report["rule_only"]
    assert "rule only" in format_headline(report)
    # The first words of "a dog", "(A) or (B)" and "\nB " are letters.
    assert report["n_unparsed"] == len(OTHER) - 3
    assert report["counts"] == {"task.action_antonym": 2, "task.moving_count": number}


def test_mvbench_asks_about_parts_of_videos_and_frames(tmp_path: Path):
    write(tmp_path / "json" / "action_sequence.json", [row("a.mp4", start=1.5, end=4.0)])
    write(tmp_path / "json" / "action_antonym.json", [row("b.webm")])
    write(tmp_path / "json" / "episodic_reasoning.json", [row("clip", start=1, end=2)])
    frames = tmp_path / "video" / "tvqa" / "frames_fps3_hq" / "clip"
    frames.mkdir(parents=True)
    for number in range(1, 10):  # frames 4 to 6 are the second from 1 to 2
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(frames / f"{number:05d}.jpg")
    found = {one.question_id: one for one in prompts_of(tmp_path, "mvbench")}
    whole, part = found["action_antonym/0"], found["action_sequence/0"]
    assert whole.text.split("\n") == [
        "Carefully watch the video and pay attention to the cause and sequence of events, the "
        "detail and movement of objects, and the action and pose of persons. Based on your "
        "observations, select the best option that accurately addresses the question.",
        *("Question: What moves?", "Options:", "(A) a cat", "(B) a dog", "(C) a bus"),
        *("Only give the best option.", "Best option:("),
    ]
    media = whole.media[0].load()
    assert (media.path, media.start) == (str(tmp_path / "video/ssv2_video/b.webm"), None)
    clip = part.media[0].load()
    assert (Path(str(clip.path)).name, clip.start, clip.end) == ("a.mp4", 1.5, 4.0)
    shown = read_frames(found["episodic_reasoning/0"].media[0].load(), 3)
    reds = [frame.convert("RGB").getpixel((0, 0))[0] for frame in shown]  # type: ignore[index]
    assert reds == pytest.approx([80, 100, 120], abs=4)


def test_mvbench_in_parquet_and_with_a_wrong_answer(tmp_path: Path):
    path = tmp_path / "action_sequence" / "train" / "0000.parquet"
    path.parent.mkdir(parents=True)
    rows = [row("a.mp4", start=0.0, end=1.0), row("b.mp4", "a cat", start=1.0, end=2.0)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert score("mvbench", {"action_sequence/0": "B", "action_sequence/1": "B"}, path)[
        "metrics"
    ] == {"overall": 50, "task.action_sequence": 50}
    assert [one.question_id for one in prompts_of(tmp_path, "mvbench")] == [
        "action_sequence/0",
        "action_sequence/1",
    ]
    twice = row("c.mp4") | {"candidates": ["a dog", "a cat", "a dog"]}
    path = write(tmp_path / "x" / "state_change.json", [twice])
    assert score("mvbench", {"state_change/0": "C"}, path)["metrics"]["overall"] == 100
    path = write(tmp_path / "x" / "state_change.json", [row("c.mp4", "a cow")])
    with pytest.raises(DataError, match="neither a letter nor one of"):
        score("mvbench", {"state_change/0": "C"}, path)


def is_right_in_mlvu(text: str, gold: str) -> bool:
    """check_ans: the character before the first ")", or the whole text, is the letter."""
    before, closed, _ = text.partition(")")
    return before[-1:] == gold if closed else before == gold


def test_mlvu_averages_over_tasks(tmp_path: Path):
    texts = [one.format(letter) for one in WRITTEN for letter in "AB"] + list(OTHER)
    count = [row(f"{i}.mp4", question_type="count") for i in range(len(texts))]
    order = [row("1.mp4", "a bus", question_type="order")]
    files = [write(tmp_path / "4_count.json", count), write(tmp_path / "5_order.json", order)]
    said = {f"count/{i}": text for i, text in enumerate(texts)}
    report = score("mlvu", {**said, "order/0": "C)"}, *files)
    right = sum(is_right_in_mlvu(text, "B") for text in texts)
    assert report["metrics"] == {
        "m_avg": pytest.approx((100 * right / len(texts) + 100) / 2),
        "overall": pytest.approx(100 * (right + 1) / (len(texts) + 1)),
        "task.count": pytest.approx(100 * right / len(texts)),
        "task.order": 100,
    }
    assert report["rule_only"]
    # Half of the task with several videos, as the one video of the other is always right.
    share = right / len(texts)
    wanted = 50 * math.sqrt(share * (1 - share) / len(texts) * (1 + 1 / len(texts)))
    assert report["standard_errors"]["m_avg"] == pytest.approx(wanted)
    (tmp_path / "video" / "4_count").mkdir(parents=True)
    (tmp_path / "video" / "4_count" / "0.mp4").touch()
    write(tmp_path / "1_plotQA.json", [row("x.mp4", question_type="plotQA")])
    first = prompts_of(tmp_path, "mlvu")[1]
    assert first.question_id == "count/0"
    assert first.text.split("\n")[1:] == [
        *("Question: What moves?", "Options:", "(A) a cat", "(B) a dog", "(C) a bus"),
        *("Only give the best option.", "Best Option: ("),
    ]
    assert first.media[0].load().path == str(tmp_path / "video" / "4_count" / "0.mp4")


def test_mlvu_rows_of_the_hub_have_letters(tmp_path: Path):
    own = {"video_name": "a.mp4", "question": "Which?\n(A) x\n(B) y", "answer": "B"}
    rows = [{**own, "task_type": task} for task in ("ego", "needle", "ego")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test-00000-of-00001.parquet")
    said = {"ego/0": "B", "needle/0": "A", "ego/1": "(A)"}
    report = score("mlvu", said, tmp_path / "test-00000-of-00001.parquet")
    assert report["metrics"] == {
        **{"m_avg": 25, "overall": pytest.approx(100 / 3)},
        **{"task.ego": 50, "task.needle": 0},
    }
    assert "Options:" not in prompts_of(tmp_path, "mlvu")[0].text


def lvb_row(number: int, group: int, **further: Any) -> dict[str, Any]:
    return {
        **{"id": f"v_{number}", "video_path": f"v{number}.mp4", "question": "Who is it?"},
        **{"duration_group": group, "question_category": "S2E" if number % 2 else "TOS"},
        **{"candidates": ["Ann", "Bea", "Cid", "Dan", "Eve"], "correct_choice": 4, **further},
    }


LVB_TEXTS = {
    **{"E": 1, "The answer is E.": 1, "Best option: (E)": 1, "eve": 0, "": 0, "Ann or E": 0},
    **{"The correct option is E": 1, "The best option is Eve": 1, "I see D, then E": 0},
}


def test_longvideobench_by_duration_and_category(tmp_path: Path):
    groups = (15, 60, 600, 3600)
    rows = [lvb_row(i, groups[i % 4]) for i in range(len(LVB_TEXTS))]
    path = write(tmp_path / "lvb_val.json", rows)
    said = {f"v_{i}": text for i, text in enumerate(LVB_TEXTS)}
    report = score("longvideobench", said, path)
    values = list(LVB_TEXTS.values())

    def mean(chosen: list[int]) -> Any:
        return pytest.approx(100 * sum(chosen) / len(chosen))

    assert report["metrics"] == {
        "overall": mean(values),
        **{f"duration_group.{group}": mean(values[i::4]) for i, group in enumerate(groups)},
        **{"question_category.TOS": mean(values[::2]), "question_category.S2E": mean(values[1::2])},
    }
    assert report["n_unparsed"] == 2  # lmms-eval draws a letter for "eve" and ""
    first = prompts_of(tmp_path, "longvideobench")[0]
    assert first.text == (
        "Question: Who is it?\nA. Ann\nB. Bea\nC. Cid\nD. Dan\nE. Eve\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert first.media[0].kind == "video"
    bad = write(tmp_path / "bad.json", [lvb_row(1, 15, correct_choice=5)])
    with pytest.raises(DataError, match="5 of 5 choices"):
        score("longvideobench", {"v_1": "E"}, bad)
