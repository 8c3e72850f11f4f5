"""``examples/class_photos.py`` on a small archive in the published layout."""

import importlib.util
import io
import json
import tarfile
from pathlib import Path

import numpy as np

from coat_data.load.dataset import SampleDataset
from coat_data.sample import Sample

SCRIPT = Path(__file__).parents[2] / "examples/class_photos.py"
spec = importlib.util.spec_from_file_location("class_photos", SCRIPT)
assert spec is not None
assert spec.loader is not None
class_photos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(class_photos)


def write_cifar10(path: Path) -> Path:
    """Two photographs in each of two training batches, one in the test batch; red then blue."""
    pixels = np.zeros((3, 32, 32), np.uint8)
    pixels[0], blue = 255, np.zeros((3, 32, 32), np.uint8)
    blue[2] = 255
    records = [bytes([label]) + image.tobytes() for label, image in ((0, pixels), (1, blue))]
    files = {
        "batches.meta.txt": b"rose\nsky\n\n",
        "data_batch_1.bin": records[0] + records[1],
        "data_batch_2.bin": records[1] + records[0],
        "test_batch.bin": records[1],
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_rows_and_questions_of_cifar10(tmp_path: Path) -> None:
    out = tmp_path / "out"
    class_photos.convert(write_cifar10(tmp_path / "cifar.tar.gz"), out, val_per_class=1)
    for file, answers in (("train.json", ["rose", "rose", "sky", "sky"]), ("val.json", ["sky"])):
        samples = [s for s in SampleDataset(out / file).stream() if isinstance(s, Sample)]
        assert [sample.turns[1].text for sample in samples] == answers
        assert all(Path(str(sample.media[0].path)).is_file() for sample in samples)
    lines = (out / "eval/questions.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["sky"]
    assert all((out / json.loads(line)["image"]).is_file() for line in lines)
