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
        "evaluate a checkpoint's language model on text: perplexity, and lm-eval tasks",
        """\
  coat-vlm eval-text --model runs/my_vlm/sft/model --text wiki.txt
  coat-vlm eval-text --model Qwen/Qwen2.5-1.5B-Instruct --text wiki.txt    # before training
  coat-vlm eval-text --model runs/my_vlm/sft/model --text wiki.txt --window 1024 --out text.json
  coat-vlm eval-text --model runs/my_vlm/sft/model --tasks wikitext,copa,arc_easy,sciq,hellaswag
  coat-vlm eval-text --model runs/my_vlm/sft/model --tasks gsm8k,svamp --file svamp=SVAMP.json \\
      --limit 100

--text needs no further package. --tasks needs lm-eval (pip install -e '.[lm-eval]') and data from
the Hub or its cache. --model also takes the folder of the language model that a recipe started
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
    suite = parser.add_argument_group("lm-eval")
    suite.add_argument(
        "--tasks", default="", metavar="A,B", help="tasks of lm-eval, and svamp, numglue"
    )
    suite.add_argument(
        "--file", action="append", default=[], metavar="TASK=FILE", help="file of svamp or numglue"
    )
    suite.add_argument(
        "--num-fewshot", type=int, help="few-shot examples; default: the task's own number"
    )
    suite.add_argument("--limit", type=int, help="only the first questions of each task")
    suite.add_argument(
        "--include-path", type=Path, metavar="DIR", help="folder with your own lm-eval tasks"
    )


def _eval_text(args: argparse.Namespace) -> int:
    tasks = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not (tasks or args.text):
        raise ValueError("nothing to do: give --text FILE ..., --tasks A,B or both")
    from coat_data.saved_files import hash_file
    from coat_eval.files import write_json
    from coat_eval.text import (
        load_language_model,
        measure_perplexity,
        read_documents,
        run_text_suite,
    )

    files = _parse_files(args.file)
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
            f"{measured['bits_per_byte']:.4f}  {measured['tokens']:,} tokens"
        )
    if tasks:
        suite = run_text_suite(
            model,
            tokenizer,
            tasks,
            files=files,
            batch_size=args.batch_size,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            include_path=args.include_path,
        )
        for name, metrics in suite["results"].items():
            values = "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items())
            say(f"{name}: {values}")
        report["lm_eval"] = suite
    if args.out is not None:
        write_json(args.out, report)
        say(f"metrics: {args.out}")
    return 0


def _parse_files(words: list[str]) -> dict[str, Path]:
    files = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--file {word}: expected TASK=FILE, such as svamp=SVAMP.json")
        files[name] = Path(path)
    return files
