"""Videos as videos, for models that take them; the reference is transformers' own processor."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers.video_utils import VideoMetadata

from coat_data.media.video import read_frames
from coat_data.sample import Media
from coat_eval.benchmark import prompt_sample
from coat_eval.hub_model import HubAdapter, HubEncoder

Load = Callable[[Path], HubAdapter]


def test_a_video_is_handed_over_with_its_times(load: Load, video_folder: Path, benchmarks: Path):
    """Frames, rate and numbers of frames as transformers would have them, by hand."""
    adapter = load(video_folder)
    model, encoder = adapter.model, adapter.encoder
    assert adapter.identity["videos_as"] == "video"
    video = Media(kind="video", path=str(benchmarks / "videomme" / "data" / "aaa.mp4"))
    texts = ["what is this ?", "is this dog ? " * 4 + "yes no ?", "no"]
    batch = encoder.collate([encoder.encode(prompt_sample(text, [video])) for text in texts])
    frames = read_frames(video, 4)
    answers = []
    for text in texts:
        content = [{"type": "video"}, {"type": "text", "text": text}]
        inputs = encoder._processor(
            text=encoder._processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            ),
            videos=[np.stack([np.asarray(frames[1]), np.asarray(frames[3])])],
            video_metadata=[VideoMetadata(total_num_frames=4, fps=1.0, frames_indices=[1, 3])],
            do_sample_frames=False,
            return_tensors="pt",
        )
        if "second_per_grid_ts" in inputs:
            # Two frames at 0.5 per second make one patch in time.
            assert float(inputs["second_per_grid_ts"][0]) == 4.0
            assert batch["second_per_grid_ts"].tolist() == pytest.approx([4.0] * 3, rel=1e-3)
        output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :]
        answers.append(encoder.tokenizer.decode(answer, skip_special_tokens=True).strip())
    assert adapter.answer(batch, 6) == answers
    assert len(set(answers)) == 3


def test_videos_of_different_lengths_share_a_batch(
    load: Load, video_folder: Path, benchmarks: Path
):
    adapter = load(video_folder)
    encoder = HubEncoder(adapter.encoder._processor, 6)
    video = Media(kind="video", path=str(benchmarks / "videomme" / "data" / "aaa.mp4"))
    folder = Media(kind="video", path=str(benchmarks / "gqa" / "images"))  # six pictures
    short, long = (encoder.encode(prompt_sample("what ?", [one])) for one in (video, folder))
    assert [len(one.videos[0].frames) for one in (short, long)] == [6, 6]
    times = short.videos[0].times_s
    assert times is not None
    assert sorted(set(times)) == pytest.approx([0, 1, 2, 3], abs=1e-3)
    both = adapter.answer(encoder.collate([short, long]), 4)
    assert both == [adapter.answer(encoder.collate([one]), 4)[0] for one in (short, long)]
