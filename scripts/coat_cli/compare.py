"""``coat-vlm compare``."""

import argparse
from pathlib import Path

from coat_cli.command import Commands, at_least, check_effects, command, say


def add(commands: Commands) -> None:
    """Declare ``compare``."""
    parser = command(
        commands,
        "compare",
        _compare,
        "find out which model is better, with confidence intervals",
        """\
  coat-vlm compare out/bf16 out/coat                   # reports of coat-vlm eval or score
  coat-vlm compare out/bf16/pope/report.json out/coat/pope/report.json --html pope.html --limit 100
  coat-vlm compare runs/bf16_0 runs/coat_0 --json difference.json       # evaluated run folders
  coat-vlm compare runs/bf16_0 runs/bf16_1 --with runs/coat_0 runs/coat_1
""",
        """\
Each model is compared with the first one on the same items; the first lines
say which is better. For run folders, mean and standard deviation over seeds are
also printed, and --with compares two groups of them. The page of --html lists
results next to published ones.
""",
    )
    add = parser.add_argument
    add(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="run folder, report.json, or folder of TASK/report.json",
    )
    add(
        "--with",
        dest="other",
        metavar="RUN",
        nargs="+",
        type=Path,
        default=[],
        help="second group of runs; differences are this group minus the first",
    )
    add("--anyway", action="store_true", help="compare the common items of reports that differ")
    add("--json", type=Path, metavar="FILE", help="write the differences as JSON")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page: plots, a table with published models, and the items that only one "
        "model answers correctly, with their images",
    )
    add(
        "--limit",
        type=at_least(0),
        metavar="N",
        help="with --html: at most N items per set; default 40",
    )
    add("--media-root", metavar="DIR", help="with --html: folder or address of relative images")


def _compare(args: argparse.Namespace) -> int:
    from coat_eval.compare_models import compare_runs, format_comparison

    paths = [*args.runs, *args.other]
    if args.html is None:
        check_effects(args, dict.fromkeys(("limit", "media_root"), "is for --html FILE"))
    if (args.html or args.json) and args.other and len(paths) > 2:
        raise ValueError("--html and --json compare single models; list them without --with")
    trained = all((path / "recipe.yaml").is_file() for path in paths)
    groups = compare_runs(args.runs, args.other, anyway=args.anyway) if trained else []
    if not trained and args.other and len(paths) > 2:
        raise ValueError(
            "groups need run folders (they have recipe.yaml); list reports without --with: "
            "coat-vlm compare A B C"
        )
    # Runs without evaluation sets, such as text pretraining, are compared only by losses.
    evaluated = not trained or args.html or args.json
    evaluated = evaluated or any(next(path.glob("eval/*/report.json"), None) for path in paths)
    if not evaluated:
        say("\nNo run is evaluated (coat-vlm eval --model RUN), so no items are compared.")
    elif len(paths) > 1 and (not args.other or len(paths) == 2):
        _compare_items(args, paths)
    elif not trained or args.html or args.json:
        raise ValueError(f"a single model cannot be compared; give two: {paths[0]} OTHER")
    if trained:
        say(format_comparison(groups))
    return 0


def _compare_items(args: argparse.Namespace, paths: list[Path]) -> None:
    from coat_data.saved_files import check_outputs
    from coat_eval.compare_models import compare_items, format_differences
    from coat_eval.files import write_json
    from coat_eval.results_page import ITEMS_PER_SET, write_results

    comparison = compare_items(paths, anyway=args.anyway)
    reports = [one.path for sets in comparison.sets.values() for one in sets.values()]
    read = [*reports, *(file for one in reports for file in one.parent.glob("*.jsonl"))]
    read += [path / one for path in paths for one in ("recipe.yaml", "metrics.jsonl", "eval.json")]
    check_outputs([args.json, args.html], read)
    say(format_differences(comparison))
    if args.json is not None:
        write_json(args.json, comparison.to_json())
        say(f"differences: {args.json}")
    if args.html is not None:
        per_set = ITEMS_PER_SET if args.limit is None else args.limit
        write_results(comparison, args.html, per_set=per_set, media_root=args.media_root)
        say(f"page: {args.html}")
