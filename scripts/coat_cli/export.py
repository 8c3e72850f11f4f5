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
        "export a checkpoint as a Hugging Face model folder",
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

The checkpoint can be from any number of ranks, ZeRO stage and precision; one process on a CPU reads
it. --format is the layout that is written:

  coat      loads with coat_vlm.generate.load, with AutoModelForImageTextToText after
            "import coat_vlm", and as init_from of a recipe; a published model keeps its own layout,
            which transformers loads
  llava     loads with transformers only (LlavaForConditionalGeneration, AutoProcessor) and in
            servers that support LLaVA; needs model.projector.type: mlp2x_gelu and one square image
            (resize or pad)
  vila      VILA's folders llm/, vision_tower/ and mm_projector/; --model also takes such a folder
  language  only the language model (the whole model of a text-only run), for
            AutoModelForCausalLM of transformers and model.language.name_or_path of a recipe
  adapter   only the LoRA adapters and the other trained modules, in peft's layout. The same model
            is returned by peft.PeftModel.from_pretrained(CoatVlm.from_pretrained(BASE), DIR), where
            BASE is the folder that the stage started from. If there is no such folder, give a
            checkpoint: its frozen weights are then written to DIR/base. The other layouts have
            adapters merged into the weights

--weights quantizes the linear layers of the language model; embeddings, lm_head, projector and
vision tower stay in --dtype (default bfloat16). vLLM and transformers (with the compressed-tensors
package) read the files. The quantization error of each layer is printed and written to
quantization.json; "coat-vlm eval --model DIR" measures the effect on answers.

  fp8        FP8 E4M3, one scale per output channel; inputs per token
  fp8_block  FP8 E4M3, one scale per 128 x 128 block; inputs per token and 128 channels
  int8       INT8, one scale per output channel; inputs per token

--card writes README.md, a model card for the Hugging Face Hub, from the files of the run:
parameters, precision, hardware, steps, tokens, data, results with intervals, recipe (with the paths
in it). The license is left to you. --push-to-hub uploads the folder; a new repository is private.
""",
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="run folder, RUN/STAGE/model, RUN/STAGE/checkpoints/step-..., an adapter (merged into "
        "its base), or a checkpoint of VILA",
    )
    add("--to", type=Path, required=True, metavar="DIR", help="the new folder")
    add(
        "--format",
        choices=["coat", "llava", "vila", "language", "adapter"],
        default="coat",
        help="default coat",
    )
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="dtype of the weights; default: as in training (float32 exports the master weights)",
    )
    add(
        "--weights",
        choices=["fp8", "fp8_block", "int8"],
        help="quantize the language model's linear layers; not with --format vila",
    )
    add("--card", action="store_true", help="write a model card (README.md)")
    add("--push-to-hub", metavar="NAME", help="upload to this repository (USER/MODEL) of the Hub")


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
