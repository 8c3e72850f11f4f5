"""``coat-vlm export``."""

import argparse
from pathlib import Path

from coat_cli.command import Commands, check_effects, command, say, stoppable


def add(commands: Commands) -> None:
    """Declare ``export``."""
    parser = command(
        commands,
        "export",
        stoppable(_export),
        "export a model for transformers, inference servers, VILA or the Hub",
        """\
  coat-vlm export --model runs/my_vlm --to exports/run
  coat-vlm export --model runs/my_vlm/sft/checkpoints/step-00000001 --to exports/step
  coat-vlm export --model runs/my_vlm/sft/model --to exports/bf16 --dtype bfloat16
  coat-vlm export --model runs/my_vlm/sft/model --to exports/llava --format llava
  coat-vlm export --model runs/my_vlm/sft/model --to exports/vila --format vila
  coat-vlm export --model runs/my_vlm/sft/model --to exports/fp8 --weights fp8 --format llava
  coat-vlm export --model runs/my_vlm/sft/model --to exports/llm --format language
  coat-vlm export --model runs/my_vlm/sft/model --to exports/card --card
  coat-vlm export --model exports/vila --to exports/from_vila         # a VILA or NVILA checkpoint
  coat-vlm export --model runs/my_lora/sft/model --to exports/adapter --format adapter
""",
        """\
Formats (one process on a CPU reads the checkpoint of any number of GPUs):
  coat      for coat-vlm, and for transformers after "import coat_vlm"; a
            published model keeps its own layout, which transformers reads
  llava     LlavaForConditionalGeneration of transformers, for servers; needs
            projector.type: mlp2x_gelu and one square image (resize or pad)
  vila      VILA's folders llm/, vision_tower/ and mm_projector/
  language  only the language model, for AutoModelForCausalLM
  adapter   only LoRA adapters and other trained modules, for peft; the base is
            the folder that the stage started from, else DIR/base, written from
            a checkpoint. Other formats have the adapters merged

Weights of the language model's linear layers, in compressed-tensors files:
  fp8        FP8 E4M3, a scale per output channel; inputs: per token
  fp8_block  FP8 E4M3, a scale per 128 x 128 block; inputs: per 1 x 128 block
  int8       INT8, a scale per output channel; inputs: per token
The error of each layer is printed and written to quantization.json.
""",
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="run or model folder, checkpoint (RUN/STAGE/checkpoints/step-...), adapter, or a "
        "checkpoint of VILA",
    )
    add("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    add(
        "--format",
        choices=["coat", "llava", "vila", "language", "adapter"],
        default="coat",
        help="default coat",
    )
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="default: as in training (float32: the master weights); with --weights: bfloat16",
    )
    add(
        "--weights",
        choices=["fp8", "fp8_block", "int8"],
        help="quantize the language model; not with --format vila",
    )
    add(
        "--card",
        action="store_true",
        help="write a model card (README.md) from the files of the run",
    )
    add(
        "--push-to-hub",
        metavar="NAME",
        help="upload to USER/MODEL on the Hub; a new repository is private",
    )


def _export(args: argparse.Namespace) -> int:
    import torch

    from coat_vlm.export.hugging_face import check_hub, export, export_adapter, push
    from coat_vlm.model.compressed import table
    from coat_vlm.model.named_model import find_model

    source = find_model(args.model).path
    dtype = getattr(torch, args.dtype) if args.dtype else None
    if args.format == "adapter":
        names = ("weights", "card", "push_to_hub")
        check_effects(args, dict.fromkeys(names, "is for layouts other than --format adapter"))
        say(f"adapter: {export_adapter(source, args.to, dtype)}")
        return 0
    if args.push_to_hub:
        check_hub(args.push_to_hub)
    card = None
    if args.card:
        from coat_vlm.report.card import build_card

        card = build_card(source, args.format, args.weights)
    folder = export(source, args.to, dtype, args.format, args.weights)
    if args.weights:
        say(table(folder))
    say(f"model: {folder}")
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
        say(f"card: {folder / 'README.md'}; its license is for you to fill in")
    if args.push_to_hub:
        say(f"pushed: {push(folder, args.push_to_hub)}")
    return 0
