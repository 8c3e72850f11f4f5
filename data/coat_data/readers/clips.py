"""Video caption sets with fields of their own: ShareGPT4Video and Panda-70M.

    {"video_id": "a", "video_path": "a.mp4", "captions": [{"idx": "-1", "content": "..."}]}

ShareGPT4Video (ShareGPT4Omni/ShareGPT4Video, dataset card): the caption with ``idx`` -1 is the
summary. Panda-70M (snap-research/Panda-70M, README): a CSV of ``videoID, url, timestamp, caption``
where a row lists several clips; each one is a row here (:mod:`coat_data.containers.csv_file`).
"""

import re
from collections.abc import Mapping
from typing import Any

from coat_data.containers.csv_file import CLIP
from coat_data.readers.captions import first_file
from coat_data.readers.media import to_media
from coat_data.readers.reader import Place, as_list, as_object, as_string, kind_of, row_id
from coat_data.readers.turns import caption_turns
from coat_data.sample import DataError, Media, Sample

NAME = "clips"
SUMMARY = "video captions: ShareGPT4Video JSONL, Panda-70M CSV"

_TIME = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def matches(row: Any) -> bool:
    """Whether the row has the fields of one of the two sets."""
    return isinstance(row, Mapping) and (
        isinstance(row.get(CLIP), tuple)
        or ({"captions", "video_path"} <= set(row) and isinstance(row["captions"], list))
    )


def to_sample(row: Any, place: Place) -> Sample:
    """One caption pair. Does not decode the video.

    Raises:
        DataError: a field is missing or of the wrong type.
    """
    row = as_object(row, place.where)
    media, caption = (
        _panda(row, place) if isinstance(row.get(CLIP), tuple) else _share_gpt(row, place)
    )
    row = {**row, "id": row.get("video_id", row.get("id"))}
    return Sample(
        id=row_id(row, place),
        turns=caption_turns([media], caption),
        media=(media,),
        source=place.source,
        row=place.row,
    ).check()


def _share_gpt(row: Mapping[str, Any], place: Place) -> tuple[Media, str]:
    captions = as_list(row.get("captions"), "captions", place.where)
    if not captions:
        raise DataError(place.where, "captions is empty", "remove the row")
    for number, entry in enumerate(captions):
        if not isinstance(entry, Mapping):
            raise DataError(
                place.where, f"captions[{number}] is {kind_of(entry)}", "give it idx and content"
            )
    summary = next((entry for entry in captions if str(entry.get("idx")) == "-1"), captions[-1])
    caption = as_string(summary.get("content"), "the summary's content", place.where)
    return to_media(row.get("video_path"), "video", "video_path", place), caption


def _panda(row: Mapping[str, Any], place: Place) -> tuple[Media, str]:
    number, times, caption = row[CLIP]
    name = as_string(row.get("videoID"), "videoID", place.where)
    cut = [f"{name}_{number}.mp4", f"{name}/{number}.mp4", f"{name}_{number:05d}.mp4"]
    path = first_file([f"{name}.mp4", *cut], "videoID", place)
    is_cut = not path.endswith(f"{name}.mp4")
    start, end = (None, None) if is_cut else (_seconds(time, place) for time in times)
    return Media(kind="video", path=path, start=start, end=end), as_string(
        caption, "caption", place.where
    )


def _seconds(time: str, place: Place) -> float:
    found = _TIME.fullmatch(time)
    if found is None:
        raise DataError(
            place.where, f"the timestamp {time!r} is no time", "write hours:minutes:seconds"
        )
    return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3])
