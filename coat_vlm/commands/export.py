"""``coat-vlm export``."""

import argparse
from pathlib import Path

from coat_vlm.commands.command import Commands, command, say


def add(commands: Commands) -> None:
    """Declare ``export``."""
    parser = command(
        commands,
        "export",
        _export,
        "write a checkpoint's model as a plain Hugging Face folder",
        """\
  coat-vlm export runs/quickstart/sft/checkpoints/step-00000100 --to exported
  coat-vlm export runs/quickstart/sft/model --to exported_bf16 --dtype bfloat16
  coat-vlm export runs/my_run/sft/model --to exported_llava --format llava
  coat-vlm export runs/my_run/sft/model --to exported_vila --format vila
  coat-vlm export runs/llm_pretrain/pretrain/model --to exported_llm --format language
  coat-vlm export NVILA_CHECKPOINT --to nvila_here

Any number of ranks, ZeRO stage and precision can have saved the checkpoint; one process on a CPU
reads it. The folder loads with coat_vlm.generate.load, with AutoModelForImageTextToText after
"import coat_vlm", and as init_from in a recipe. With --format llava it loads with transformers
alone (LlavaForConditionalGeneration, AutoProcessor), and so in programs that serve LLaVA; that
needs model.projector.type: mlp2x_gelu and images of one square (resize or pad). With --format
vila it has VILA's folders llm/, vision_tower/ and mm_projector/. A VILA checkpoint with these is
also taken as CKPT: --format coat makes it a folder that a recipe's init_from names. With --format
language it is the language model alone, which AutoModelForCausalLM of transformers loads and
model.language.name_or_path of a recipe takes: of a text-only run that is all of it.
""",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="CKPT",
        help="RUN/STAGE/checkpoints/step-..., RUN/STAGE/model, or a VILA checkpoint",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the new folder")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="dtype of the weights; as in training when absent (float32 keeps master weights)",
    )
    parser.add_argument(
        "--format",
        choices=["coat", "llava", "vila", "language"],
        default="coat",
        help="layout of the folder: coat (default), llava for stock transformers, vila for VILA, "
        "language for the language model alone",
    )


def _export(args: argparse.Namespace) -> int:
    import torch

    from coat_vlm.train.export import export

    dtype = getattr(torch, args.dtype) if args.dtype else None
    say(f"model: {export(args.source, args.to, dtype, args.format)}")
    return 0
