"""Loads a composed checkpoint and answers prompts greedily, in left-padded batches.

On a CPU, a BF16 checkpoint runs in FP32 unless a dtype or precision is given: few CPUs multiply
BF16 matrices faster than FP32 ones, and the conversion is exact. On a GPU, the checkpoint's dtype
is used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from coat_data.load.collate import Batch, collate
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.checkpoint.read_model import load_named_model
from coat_vlm.config import Fp8Config, Precision
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model.compressed import read_compression, round_inputs
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import AnyProcessor, load_processor
from coat_vlm.model.named_model import find_model

GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "use_cache": True,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
}
"""Plain greedy decoding. The generation_config.json of a published language model may contain a
repetition penalty, which would change answers, and sampling settings, which cause warnings."""


def load(
    model_dir: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    fp8: Fp8Config | None = None,
) -> tuple[PreTrainedModel, AnyProcessor]:
    """Load the model that a folder names (:func:`find_model`), in evaluation mode; its processor.

    The default device is the first GPU, or the CPU if there is none; the default ``dtype`` of the
    weights is the checkpoint's on a GPU and FP32 on a CPU. ``precision``, one of training's,
    computes with ``fp8`` (default ``Fp8Config()``); ``bf16`` is BF16 on a CPU as well, not the
    emulation of training, so that all weights and values are as on a server. Compressed weights
    are decompressed, and the
    inputs of their layers are rounded as in a server. Raises FileNotFoundError without a
    config.json, ValueError if the precision does not fit the model or the GPU.
    """
    named = find_model(Path(model_dir))
    folder = named.folder
    if named.path == folder and not (folder / "config.json").is_file():
        found = [path.parent for path in sorted(folder.glob("*/model/config.json"))]
        found += [path.parent for path in folder.glob("model/config.json")]
        hint = f"; did you mean {found[-1]}?" if found else ""
        raise FileNotFoundError(
            f"{folder} is not a coat_vlm checkpoint: it has no config.json (expected a folder like "
            f"RUN/sft/model with config.json, model.safetensors and the tokenizer){hint}"
        )
    scheme = read_compression(folder)
    if scheme is not None and precision is not None:
        raise ValueError(
            f"precision={precision} has no effect on {folder}, whose linear layers compute in "
            f"{scheme.name} according to its config.json; remove the precision, or give the folder "
            "that it was exported from"
        )
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    arithmetic = None
    if precision is not None:
        arithmetic = arithmetic_of(precision, fp8, chosen, low_bits=precision == "bf16")
        dtype = dtype or arithmetic.dtype
    model = load_named_model(named, dtype or (torch.float32 if chosen.type == "cpu" else "auto"))
    if arithmetic is not None:
        arithmetic.apply(model)
    if scheme is not None:
        round_inputs(model, scheme, folder)
    return model.to(chosen).eval(), load_processor(folder)


def generate(
    model: PreTrainedModel,
    processor: AnyProcessor,
    samples: Sequence[Sample],
    max_new_tokens: int = 128,
) -> list[str]:
    """Generate the answer to the last user turn of each sample, as stripped text.

    An assistant turn after it is the reference answer, which the prompt does not contain. Raises
    DataError if an image or video cannot be read or a prompt is too long.
    """
    if not samples:
        return []
    encoder = PromptEncoder(processor)
    return generate_batch(model, encoder, encoder(samples), max_new_tokens)


class PromptEncoder:
    """Encodes prompts into left-padded batches; reusable for many batches, also in a worker.

    ``encode`` encodes the prompt of one sample; ``encode_choices`` encodes it once per answer, with
    the answer appended and labeled. ``stop_token_ids`` are the token trained after every answer,
    and the tokenizer's end token.
    """

    def __init__(self, processor: AnyProcessor) -> None:
        encoder = processor.encoder()
        self._media = encoder.media
        self.encode = encoder.prompt
        self.encode_choices = encoder.answered
        self.tokenizer = processor.tokenizer
        # Limits of pixels and frames are set on these.
        self.image_processor = processor.image_processor
        self.video_processor = getattr(processor, "video_processor", None)
        self.pad_token_id = processor.pad_token_id
        # Only the chat template defines the token at the end of an answer.
        turns = (Turn("user", (Part("text", "?"),)), Turn("assistant", (Part("text", "!"),)))
        ids, labels = encoder.layout(Sample(id="stop", turns=turns))
        if len(ids) > encoder.max_length:
            raise ValueError(
                f"model.max_length={encoder.max_length} is too small: the chat template "
                f"{processor.template} takes {len(ids)} tokens for a question and an answer "
                "of one letter; raise model.max_length, or use a shorter template"
            )
        supervised = [label for label in labels if label != IGNORE_INDEX]
        ends = {supervised[-1], self.tokenizer.eos_token_id}
        self.stop_token_ids = sorted(token for token in ends if token is not None)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Encode the prompts of ``samples``, up to the start of the answer, on the CPU.

        input_ids and attention_mask (B, T) int64 are left-padded; pixel_values are (images, 3, H,
        W). Raises DataError if an image or video cannot be read or a prompt is too long.
        """
        return self.collate([self.encode(sample) for sample in samples])

    def collate(self, encoded: Sequence[EncodedSample]) -> Batch:
        """Collate encoded prompts into a left-padded batch."""
        return collate(encoded, pad_token_id=self.pad_token_id, padding_side="left")

    def collate_choices(self, encoded: Sequence[EncodedSample]) -> Batch:
        """Collate prompts with their answers into a right-padded batch."""
        return collate(encoded, pad_token_id=self.pad_token_id)

    def frame_times(self, media: Media) -> tuple[float, ...] | None:
        """Return the times of a video's sampled frames in seconds, or None."""
        return self._media.plan(media).times_s

    def keep_last_clip(self) -> None:
        """Cache the last decoded video, for several questions about the same video."""
        self._media.keeps_last_clip = True


def set_stop_tokens(model: PreTrainedModel, processor: AnyProcessor) -> None:
    """Make ``model.generate`` stop at the end of an answer, also in transformers' pipelines.

    The settings of a published vision-language model are not changed.
    """
    if isinstance(processor, FamilyProcessor):
        return
    stops, own = PromptEncoder(processor).stop_token_ids, model.generation_config.eos_token_id
    kept = own if isinstance(own, list) else [] if own is None else [own]
    model.generation_config.eos_token_id = sorted({*kept, *stops})
    model.generation_config.pad_token_id = processor.pad_token_id


def media_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the model's inputs for the images of a batch, on the model's device."""
    inputs: dict[str, Any] = {**batch.get("extras", {})}
    if len(batch["pixel_values"]):
        inputs["pixel_values"] = batch["pixel_values"].to(dtype=model.dtype)
    layout: dict[str, Any] = {**batch}
    inputs |= {name: layout[name] for name in ("image_grids", "frame_groups") if name in layout}
    make_types = getattr(model, "make_token_types", None)
    if make_types is not None:
        inputs |= make_types(batch["input_ids"], batch["labels"])
    return {name: value.to(model.device) for name, value in inputs.items()}


def generate_batch(
    model: PreTrainedModel,
    encoder: PromptEncoder,
    batch: Batch,
    max_new_tokens: int,
    *,
    synced: bool = False,
    streamer: BaseStreamer | None = None,
    **sampling: Any,
) -> list[str]:
    """Generate the answers to a left-padded batch made by ``encoder``, as stripped texts.

    ``synced`` runs empty forward passes until all ranks have finished; required if a forward pass
    gathers weights from all ranks. ``streamer`` needs a batch of one prompt. ``sampling`` replaces
    entries of :data:`GREEDY`.
    """
    output = cast(Any, model).generate(
        input_ids=batch["input_ids"].to(model.device),
        attention_mask=batch["attention_mask"].to(model.device),
        **media_inputs(model, batch),
        max_new_tokens=max_new_tokens,
        pad_token_id=encoder.pad_token_id,
        eos_token_id=encoder.stop_token_ids,
        synced_gpus=synced,
        streamer=streamer,
        **{**GREEDY, **sampling},
    )
    answers = output[:, batch["input_ids"].shape[1] :]
    texts = encoder.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [text.strip() for text in texts]
