"""``coat-vlm compare``."""

import argparse
from pathlib import Path

from coat_cli.command import Commands, command, say


def add(commands: Commands) -> None:
    """Declare ``compare``."""
    parser = command(
        commands,
        "compare",
        _compare,
        "compare models item by item: intervals, tests, detectable differences, a page of results",
        """\
  coat-vlm compare out/bf16 out/coat                   # reports of coat-vlm eval or score --items
  coat-vlm compare out/bf16/pope/report.json out/coat/pope/report.json --html pope.html --flips 100
  coat-vlm compare runs/bf16_0 runs/coat_0 --json difference.json       # evaluated run folders
  coat-vlm compare runs/bf16_0 runs/bf16_1 --with runs/coat_0 runs/coat_1 --plot loss.svg

Each model is compared with the first one on the same items. Run folders also get the mean and the
standard deviation over seeds, --with compares two groups of them. Benchmarks are listed next to
published results.
""",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path,
        help="run folder, report.json, or folder of TASK/report.json",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="other", metavar="RUN", nargs="+", type=Path, default=[],
        help="second group of runs; differences are this group minus the first",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap; default 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the differences as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write a page: plots and a table of the compared and published models with intervals, "
        "and the items that only one model answers correctly, with their images",
    )  # fmt: skip
    parser.add_argument(
        "--flips",
        type=int,
        metavar="N",
        help="with --html: maximum number of items per set; default 40",
    )
    parser.add_argument(
        "--media-root",
        metavar="DIR",
        help="--html: root of relative image paths, a folder or address (http:, s3:, hf:, ...)",
    )
    parser.add_argument("--plot", type=Path, help="plot the training losses (.svg or .png)")
    parser.add_argument(
        "--labels",
        nargs=2,
        metavar="NAME",
        help="--plot: names of the groups; default first second",
    )


def _compare(args: argparse.Namespace) -> int:
    from coat_eval.compare_models import compare_runs, draw_curves, format_comparison

    paths = [*args.runs, *args.other]
    _check_options(args, paths)
    trained = all((path / "recipe.yaml").is_file() for path in paths)
    if trained:
        say(format_comparison(compare_runs(args.runs, args.other, seed=args.seed)))
    elif args.plot is not None or len(args.other) > 1 or (args.other and len(args.runs) > 1):
        raise ValueError(
            "groups and training curves need run folders (they have recipe.yaml); list reports "
            "without --with: coat-vlm compare A B C"
        )
    # Of runs without evaluation sets, such as text pretraining, only losses are compared.
    evaluated = not trained or args.html or args.json
    evaluated = evaluated or any(next(path.glob("eval/*/items.jsonl"), None) for path in paths)
    if not evaluated:
        say("\nNo run is evaluated (coat-vlm eval --run), so no items are compared.")
    elif len(paths) > 1 and (not args.other or len(paths) == 2):
        _compare_items(args, paths)
    elif not trained:
        raise ValueError(f"a single report cannot be compared; give two: {paths[0]} OTHER")
    if args.plot is not None:
        first, second = args.labels or ("first", "second")
        draw_curves(args.runs, args.other, (first, second), args.plot)
        say(f"curves: {args.plot}")
    return 0


def _check_options(args: argparse.Namespace, paths: list[Path]) -> None:
    """Raise a ValueError for options without effect."""
    if args.html is None and (args.flips is not None or args.media_root is not None):
        raise ValueError("--flips and --media-root have no effect without --html FILE")
    if args.plot is None and args.labels is not None:
        raise ValueError("--labels has no effect without --plot FILE")
    if (args.html or args.json) and len(paths) == 1:
        raise ValueError(f"--html and --json compare models; give two: {paths[0]} OTHER")
    if (args.html or args.json) and args.other and len(paths) > 2:
        raise ValueError("--html and --json compare single models; list them without --with")


def _compare_items(args: argparse.Namespace, paths: list[Path]) -> None:
    from coat_eval.compare_models import compare_items, format_differences
    from coat_eval.files import write_json
    from coat_eval.results_page import ITEMS_PER_SET, write_results

    comparison = compare_items(paths, seed=args.seed)
    say(f"\n{format_differences(comparison)}")
    if args.json is not None:
        write_json(args.json, comparison.to_json())
        say(f"differences: {args.json}")
    if args.html is not None:
        per_set = ITEMS_PER_SET if args.flips is None else args.flips
        write_results(comparison, args.html, per_set=per_set, media_root=args.media_root)
        say(f"page: {args.html}")
