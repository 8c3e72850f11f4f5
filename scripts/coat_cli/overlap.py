"""``coat-vlm data overlap``: training rows that contain images or texts of evaluation sets."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import say
from coat_cli.evaluate import OFFICIAL

if TYPE_CHECKING:
    from coat_data.tools.overlap import Question
    from coat_eval.benchmark import Prompt

SUMMARY = "find images and texts of evaluation sets in a training set"
EXAMPLES = """\
  coat-vlm data overlap chat.json --media-root images --with pope,gqa --data benchmarks
  coat-vlm data overlap chat.json --media-root images --with my_questions,held_out.json \\
      --out overlap.jsonl      # for a source's exclude: overlap.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that are not those of every source."""
    add = parser.add_argument
    add(
        "--with", dest="sets", required=True, metavar="SET,...",
        help=f"official benchmarks ({', '.join(OFFICIAL)}), folders with questions.jsonl, or data "
        "files",
    )  # fmt: skip
    add("--data", type=Path, help="folder with the official benchmarks, as for eval --tasks")
    add("--out", type=Path, help="file to write: the rows, for the exclude of a recipe's source")


def run(args: argparse.Namespace, **options: Any) -> int:
    """Print the table, and write the list."""
    from coat_data.tools.overlap import Benchmarks, as_table, find_overlap
    from coat_vlm.run.signals import SIGNALS

    with SIGNALS.handle():
        benchmarks = Benchmarks()
        for name in args.sets.split(","):
            benchmarks.add(name, _read_questions(name.strip(), args.data))
        counts, bad = find_overlap(args.path, benchmarks, args.out, **options)
    for line in as_table(counts):
        say(line)
    if benchmarks.unreadable:
        say(f"{benchmarks.unreadable} images of the evaluation sets could not be read")
    for name, short in benchmarks.short.items():
        if short:
            say(f"{name}: {short} questions are too short to be found by their text")
    if bad:
        say(f"{bad} rows could not be read; coat-vlm data lint lists them")
    if args.out is not None:
        say(f"{args.out}: name it as exclude of the source in the recipe")
    return 0


def _read_questions(name: str, data: Path | None) -> "Iterator[Question]":
    """Yield the questions of an official benchmark, a folder with questions, or a data file."""
    from coat_data.load.dataset import SampleDataset
    from coat_data.sample import DataError
    from coat_data.tools.overlap import Question
    from coat_eval.benchmark import PromptOptions
    from coat_eval.runner import EvalTask, make_eval_task
    from coat_eval.tasks import get_task
    from coat_eval.tasks.question_set import QUESTIONS_FILE

    path = Path(name)
    own = (path / QUESTIONS_FILE).is_file()
    if own or (name.partition("_")[0] in OFFICIAL and not path.exists()):
        if own:  # the kind of a set decides about answers, which are not compared
            task, data = EvalTask(benchmark=get_task("short_answer")), path
        elif data is None:
            raise ValueError(f"--data is missing; name the folder that has the files of {name}")
        else:
            task = make_eval_task(name, data)
        options = PromptOptions(variant=task.variant)
        yield from map(_convert, task.benchmark.prompts(task.open(data), options))
        return
    if not path.exists():
        raise ValueError(
            f"--with {name}: there is no such file or folder, and no benchmark of that name; "
            f"allowed: {', '.join(OFFICIAL)}, a folder with {QUESTIONS_FILE}, or a data file"
        )
    for sample in SampleDataset(path).stream():
        if isinstance(sample, DataError):
            raise sample
        text = "\n".join(turn.text for turn in sample.turns)
        yield Question(where=sample.where, text=text, media=sample.media)


def _convert(prompt: "Prompt") -> "Question":
    from coat_data.sample import DataError, Media
    from coat_data.tools.overlap import Question

    media = list(prompt.sample.media) if prompt.sample else []
    for file in prompt.media if prompt.sample is None else ():
        try:
            media.append(file.load())
        except DataError:
            media.append(Media(kind=file.kind, path=file.name))  # counted as unreadable
    return Question(where=prompt.where, text=prompt.text, media=tuple(media))
