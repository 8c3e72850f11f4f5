"""``coat-vlm bench``."""

import argparse
from pathlib import Path

from coat_vlm.commands.command import Commands, command, say


def add(commands: Commands) -> None:
    """Declare ``bench``."""
    parser = command(
        commands,
        "bench",
        _bench,
        "compare precisions by training a small decoder on a text",
        """\
  coat-vlm bench --text wiki.txt                        # bf16 and coat, 30M parameters, 200 steps
  coat-vlm bench --text wiki.txt --precisions coat --steps 20
""",
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text; its end is held out")
    parser.add_argument(
        "--precisions", nargs="+", choices=["fp32", "bf16", "coat"], default=["bf16", "coat"],
        help="what to train, the first is what the others are compared with; default bf16 coat",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps; default 200")
    parser.add_argument("--seed", type=int, default=0, help="start and batches; default 0")


def _bench(args: argparse.Namespace) -> int:
    from coat_vlm.bench.decoder import DecoderBench, format_curves, train_decoder

    bench = DecoderBench(steps=args.steps, seed=args.seed)
    curves = [train_decoder(args.text, precision, bench) for precision in args.precisions]
    say(format_curves(curves))
    return 0
