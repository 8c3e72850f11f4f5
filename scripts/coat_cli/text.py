"""``coat-vlm eval-text``."""

import argparse
from pathlib import Path
from typing import Any

from coat_cli.command import PRECISIONS, Commands, command, say


def add(commands: Commands) -> None:
    """Declare ``eval-text``."""
    parser = command(
        commands,
        "eval-text",
        _eval_text,
        "measure the perplexity of a checkpoint's language model on text",
        """\
  coat-vlm eval-text --model runs/my_vlm/sft/model --text wiki.txt
  coat-vlm eval-text --model Qwen/Qwen2.5-1.5B-Instruct --text wiki.txt    # before training
  coat-vlm eval-text --model runs/my_vlm/sft/model --text wiki.txt --window 1024 --out text.json

--model also takes the folder of the language model that a recipe started
from; the difference between the two results is the effect of training on images.
""",
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="model folder, e.g. RUN/sft/model"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the metrics as JSON")
    parser.add_argument("--batch-size", type=int, default=4, help="default 4")
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="compute as in training with this precision"
    )
    text = parser.add_argument_group("perplexity")
    text.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="plain text, or rows with a text field (JSON lines, JSON, Parquet)",
    )  # fmt: skip
    text.add_argument("--text-field", default="text", help="name of the text field; default text")
    text.add_argument("--window", type=int, help="tokens per window; default 2048")
    text.add_argument("--stride", type=int, help="tokens between windows; default half of --window")


def _eval_text(args: argparse.Namespace) -> int:
    if not args.text:
        raise ValueError("nothing to do: give --text FILE ...")
    from coat_data.saved_files import hash_file
    from coat_eval.files import write_json
    from coat_eval.text import (
        load_language_model,
        measure_perplexity,
        read_documents,
    )

    # Errors in a file are reported before the model is loaded.
    documents = {path: read_documents(path, args.text_field) for path in args.text}
    model, tokenizer = load_language_model(args.model, precision=args.precision)
    report: dict[str, Any] = {"model": str(args.model)}
    for path, texts in documents.items():
        sizes = {"window": args.window, "stride": args.stride, "batch_size": args.batch_size}
        measured = measure_perplexity(model, tokenizer, texts, **sizes)
        report.setdefault("text", {})[str(path)] = {**measured, "sha256": hash_file(path)}
        say(
            f"{path}: perplexity {measured['perplexity']:.4f}  bits/byte "
            f"{measured['bits_per_byte']:.4f}  {measured['tokens']:,} tokens  last words "
            f"{measured['last_word_accuracy']:.2f}%"
        )
    if args.out is not None:
        write_json(args.out, report)
        say(f"metrics: {args.out}")
    return 0
