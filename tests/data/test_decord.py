"""decord in its child process: the same frames as PyAV, and what happens when the child fails.

What needs no decord runs everywhere, with children that speak the protocol and misbehave.
"""

import gc
import importlib.util
import multiprocessing
import pickle
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from clips import write_clip

from coat_data.media.decord_reader import DecordError, DecordReader
from coat_data.media.sampling import VIDEO_COUNTS, VideoSettings
from coat_data.media.video import VideoReader
from coat_data.sample import Media

needs_decord = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="needs an x86-64 processor: decord has no other wheels"
)


def bar(number: int) -> np.ndarray:
    values = np.zeros((48, 64, 3), dtype=np.uint8)
    values[:, : 2 * number + 2, 1] = 200
    return values


def make_clip(path: Path, codec: str = "libx264", options: dict[str, str] | None = None) -> Path:
    return write_clip(path, map(bar, range(30)), codec, options=options)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Media:
    path = make_clip(tmp_path_factory.mktemp("clips") / "a.mp4")
    return Media(kind="video", path=str(path))


def child(*lines: str, timeout_s: float = 20.0) -> DecordReader:
    """A reader whose child runs these lines for every request, of ``source`` and ``times``."""
    body = "\n    ".join(lines)
    code = (
        "import sys, pickle, time, os, numpy as np\n"
        "out = sys.stdout.buffer\n"
        "while sys.stdin.buffer.peek(1):\n"
        "    source, times, limit_s = pickle.load(sys.stdin.buffer)\n"
        f"    {body}\n    out.flush()"
    )
    return DecordReader(timeout_s, (sys.executable, "-c", code))


# 4 x 2 pixels, all 7, for each time that is asked for.
GOOD = "out.write(pickle.dumps((times, np.full((len(times), 2, 4, 3), 7, np.uint8))))"
HALF = GOOD.replace("np.uint8))))", "np.uint8)))[:60])")


def frames_of(reader: VideoReader, media: Media) -> list[bytes]:
    return [frame.tobytes() for frame in reader.read(media).frames]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("timeout", (HALF, "out.flush()", "time.sleep(60)")),
        ("crash", (HALF, "os.abort()")),
        ("error", ("out.write(pickle.dumps('bad'))",)),
    ],
)
def test_a_child_that_fails_is_counted_and_pyav_reads(clip: Media, kind: str, lines: tuple):
    expected = frames_of(VideoReader(VideoSettings(backend="pyav", num_frames=3)), clip)
    decord = child(*lines, timeout_s=1.0 if kind == "timeout" else 20.0)
    reader = VideoReader(VideoSettings(backend="decord", num_frames=3), decord)
    assert frames_of(reader, clip) == expected
    assert dict(reader.counts) == {f"video_decord_{kind}": 1, "video_pyav": 1}
    assert set(reader.counts) <= set(VIDEO_COUNTS)
    decord.close()


def test_a_killed_child_is_replaced_and_a_good_one_is_kept():
    hang_once = "time.sleep(60) if source == 'hang' else None"
    tell = GOOD.replace("(times, ", "([os.getpid()] * len(times), ")
    reader = child(hang_once, tell, timeout_s=2.0)
    good, bad = Media(kind="video", path="a"), Media(kind="video", path="hang")
    pids = [reader.read_at(good, [0.5])[0][0] for _ in range(2)]
    assert pids[0] == pids[1]
    with pytest.raises(DecordError) as raised:
        reader.read_at(bad, [0.5])
    assert raised.value.kind == "timeout"
    assert reader.read_at(good, [0.5])[0][0] != pids[0]
    assert reader._child is not None
    process = reader._child
    reader.close()
    assert process.poll() is not None


def _read_in_a_fork(reader: VideoReader, media: Media, queue: "multiprocessing.Queue") -> None:
    queue.put((frames_of(reader, media), dict(reader.counts), pid_of(reader)))


def pid_of(reader: VideoReader) -> int:
    """The process that reads with decord for ``reader``."""
    assert reader._decord is not None
    assert reader._decord._child is not None
    return reader._decord._child.pid


def test_a_forked_daemon_has_a_child_of_its_own(clip: Media):
    """As in a DataLoader's worker: it is a daemon, and it must not read its parent's answers."""
    reader = VideoReader(VideoSettings(backend="decord", num_frames=1), child(GOOD))
    expected = frames_of(reader, clip)
    reader.counts.clear()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_read_in_a_fork, args=(reader, clip, queue), daemon=True)
    worker.start()
    found, counts, pid = queue.get(timeout=60)
    worker.join()
    assert (found, counts) == (expected, {"video_decord": 1})
    assert pid != pid_of(reader)
    assert frames_of(reader, clip) == expected  # the parent's child still answers the parent
    copy = pickle.loads(pickle.dumps(reader))
    assert frames_of(copy, clip) == expected
    for one in (copy, reader):
        assert one._decord is not None
        one._decord.close()


def test_a_forked_process_frees_nothing_that_its_parent_decoded(clip: Media):
    """A worker waited forever for FFmpeg's threads, which only its parent has."""
    gc.disable()
    try:
        VideoReader(VideoSettings(num_frames=4)).read(clip)
        worker = multiprocessing.get_context("fork").Process(target=gc.collect, daemon=True)
        worker.start()
        worker.join(20)
        stuck = worker.is_alive()
        worker.kill()
    finally:
        gc.enable()
    assert not stuck


def test_streams_that_decord_shows_wrong_are_not_given_to_it(tmp_path: Path):
    reader = VideoReader(VideoSettings(backend="decord", num_frames=2), child("os.abort()"))
    path = make_clip(tmp_path / "a.ts")
    expected = frames_of(
        VideoReader(VideoSettings(num_frames=2)), Media(kind="video", path=str(path))
    )
    assert frames_of(reader, Media(kind="video", path=str(path))) == expected
    assert dict(reader.counts) == {"video_decord_unsuited": 1, "video_pyav": 1}


def test_decord_must_be_installed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="not installed; install it"):
        VideoReader(VideoSettings(backend="decord"))


@needs_decord
@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", {"g": "12", "bf": "2"}),
        ("b.webm", "libvpx-vp9", {"g": "9"}),
    ],
)
def test_decord_shows_the_frames_that_pyav_shows(tmp_path: Path, name: str, codec: str, options):
    path = make_clip(tmp_path / name, codec, options)
    for media in (
        Media(kind="video", path=str(path), start=0.5),
        Media(kind="video", path="row 7", data=path.read_bytes()),
    ):
        decord = VideoReader(VideoSettings(backend="decord", num_frames=5))
        found, expected = decord.read(media), VideoReader(VideoSettings(num_frames=5)).read(media)
        assert dict(decord.counts) == {"video_decord": 1}
        assert [f.tobytes() for f in found.frames] == [f.tobytes() for f in expected.frames]
        assert found.times_s == pytest.approx(expected.times_s, abs=2e-3)
        assert decord._decord is not None
        decord._decord.close()
