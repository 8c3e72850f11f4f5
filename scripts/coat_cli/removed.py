"""What replaces commands and options of earlier commits."""

from collections.abc import Sequence

_TO = "the folder to write is --to DIR"
_READ_AS = "the row format is --read-as NAME; --format is a layout that is written"
_SOURCE = {
    "--workers": "it is called --num-workers",
    "--limit": "limits are --limits NAME=NUMBER ...",
}
_REMOVED: dict[tuple[str, ...], dict[str, str]] = {
    ("train",): {"--precision": "write precision=NAME"},
    ("plan",): {
        "--precision": "write precision=NAME",
        "--zero": "--verbose compares all ZeRO stages",
        "--tokens": "write model.max_length=TOKENS",
    },
    ("eval",): {
        "--run": "give the run folder as --model RUN",
        "--task": "a question set is --tasks KIND=FOLDER, such as yes_no=my_questions",
        "--out": _TO,
        "--adapter": "adapters are --adapters [NAME=]DIR ...",
        "--device": "CUDA_VISIBLE_DEVICES chooses the GPU, or none",
    },
    ("score",): {
        "--data": "a question set is scored as coat-vlm score KIND=FOLDER",
        "--limit": "--allow-missing scores a part, at least half, of the questions",
        "--seed": "the random letters of mmmu have the official seed",
    },
    ("compare",): {
        "--flips": "it is called --limit",
        "--labels": "groups have the names of their folders",
        "--plot": "coat-vlm report RUN draws the losses of a run",
        "--seed": "the random draws have a fixed seed",
    },
    ("export",): {"--adapter": "write --format adapter"},
    ("data", "ingest"): _SOURCE
    | {"--out": _TO, "--format": _READ_AS, "--no-check-media": "write --check-media none"},
    ("data", "lint"): _SOURCE | {"--format": _READ_AS},
    ("data", "stats"): {"": "coat-vlm data lint counts rows, problems and fields; coat-vlm data "
                        "preview shows rows and the sizes of images"},
    ("data", "preview"): {"--format": _READ_AS, "--number": "it is called --limit"},
    ("data", "overlap"): _SOURCE
    | {"--format": _READ_AS, "--with": "evaluation sets are --against SET ..."},
    ("data", "export"): {"--out": _TO},
    ("data", "download"): {"--out": _TO},
    ("bench",): {"": "benchmarks are scripts of a clone, scripts/bench/; for a recipe write "
                 "coat-vlm plan RECIPE --measure"},
    ("lab",): {"": "studies are scripts of a clone, scripts/bench/"},
    ("eval-text",): {"": "write coat-vlm eval --model MODEL --text FILE; lm_eval runs its tasks on "
                     "an exported folder (docs/guides/evaluation.md)"},
    ("data", "make"): {"": "write coat-vlm data scenes --to DIR; makers of other data sets are "
                       "in examples/"},
}  # fmt: skip
"""Command -> removed option, or ``""`` for the command itself -> what replaces it."""


def find_removed(words: Sequence[str]) -> str:
    """Return a sentence about the first removed command or option of a command line, or ``""``."""
    for command, replacements in _REMOVED.items():
        if tuple(words[: len(command)]) != command:
            continue
        for flag, replacement in replacements.items():
            if not flag or any(word.partition("=")[0] == flag for word in words):
                name = " ".join(filter(None, (*command, flag)))
                return f"{name} was removed: {replacement}"
    return ""
