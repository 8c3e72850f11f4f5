"""``coat-vlm export``."""

import argparse
from pathlib import Path

from coat_cli.command import Commands, command, say


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
  coat-vlm export runs/my_run/sft/model --to exported_fp8 --weights fp8 --format llava
  coat-vlm export runs/llm_pretrain/pretrain/model --to exported_llm --format language
  coat-vlm export NVILA_CHECKPOINT --to nvila_here
  coat-vlm export runs/my_lora/sft/model --to my_adapter --adapter

Any number of ranks, ZeRO stage and precision can have saved the checkpoint; one process on a CPU
reads it. The folder loads with coat_vlm.generate.load, with AutoModelForImageTextToText after
"import coat_vlm", and as init_from in a recipe. With --format llava it loads with transformers
alone (LlavaForConditionalGeneration, AutoProcessor), and so in programs that serve LLaVA; that
needs model.projector.type: mlp2x_gelu and images of one square (resize or pad). With --format
vila it has VILA's folders llm/, vision_tower/ and mm_projector/. A VILA checkpoint with these is
also taken as CKPT: --format coat makes it a folder that a recipe's init_from names. With --format
language it is the language model alone, which AutoModelForCausalLM of transformers loads and
model.language.name_or_path of a recipe takes: of a text-only run that is all of it.

--weights compresses the linear layers of the language model; embeddings, lm_head, projector and
vision tower stay in --dtype (bfloat16 when absent). The files are in the compressed-tensors layout
that vLLM and transformers (with the compressed-tensors package) read. What each layer loses is
printed and kept in quantization.json; "coat-vlm eval --model DIR" shows what that does to answers.

  fp8        FP8 E4M3, one scale per output channel; inputs per token
  fp8_block  FP8 E4M3, one scale per 128 x 128 block; inputs per token and 128 channels
  int8       INT8, one scale per output channel; inputs per token

LoRA adapters (a stage's lora section) are merged into the weights. --adapter writes them alone,
with the other modules that trained: peft.PeftModel.from_pretrained(CoatVlm.from_pretrained(BASE),
DIR) gives the same model, where BASE is the folder that the stage began from. Where there is none,
give a checkpoint: its frozen weights are then written as DIR/base.
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
        help="layout of the folder: coat (default), llava for stock transformers, vila for VILA, "
        "language for the language model alone",
    )
    parser.add_argument(
        "--weights",
        choices=["fp8", "fp8_block", "int8"],
        help="compress the language model's linear layers; not with --format vila",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the LoRA adapters as a folder of peft, not merged",
    )


def _export(args: argparse.Namespace) -> int:
    import torch

    from coat_vlm.export.compressed import table
    from coat_vlm.export.hugging_face import export, export_adapter

    dtype = getattr(torch, args.dtype) if args.dtype else None
    if not args.adapter:
        folder = export(args.source, args.to, dtype, args.format or "coat", args.weights)
        if args.weights:
            say(table(folder))
        say(f"model: {folder}")
        return 0
    for option, value in (("--format", args.format), ("--weights", args.weights)):
        if value is not None:
            raise ValueError(
                f"{option} {value} has no effect with --adapter, which writes the adapters alone, "
                "in peft's layout; leave one of them out"
            )
    say(f"adapter: {export_adapter(args.source, args.to, dtype)}")
    return 0
