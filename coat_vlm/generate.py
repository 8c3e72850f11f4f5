"""Loads a composed checkpoint and answers prompts greedily, in left-padded batches.

A checkpoint in BF16 runs in FP32 on a CPU unless a dtype is given: few CPUs multiply BF16 matrices
faster than FP32 ones, and the weights are the same numbers. On a GPU it keeps its own dtype.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coat_data.load.collate import Batch, collate
from coat_data.load.encode import IGNORE_INDEX, EncodedSample, Encoder
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config import Fp8Config, Precision
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.fp8.convert import back_to_bf16
from coat_vlm.model.compressed import compressed_layers, compression_of, round_inputs
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm

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
"""Plain greedy decoding. A published language model may bring a repetition penalty and sampling
settings in its generation_config.json; the former would change answers, the latter warn."""


def load(
    model_dir: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    fp8: Fp8Config | None = None,
) -> tuple[CoatVlm, CoatVlmProcessor]:
    """The model, in evaluation mode, and the processor of a checkpoint folder.

    Where the folder's weights are compressed (``coat-vlm export --weights``), they are decompressed
    and the inputs of their layers are rounded as a program that serves them does.

    Args:
        model_dir: folder written by training (``RUN/<stage>/model``).
        device: where the model goes; the first GPU if there is one, else the CPU.
        dtype: dtype of the weights; by default the checkpoint's on a GPU and FP32 on a CPU.
        precision: compute as a run with this precision does on the device, but for the blocks that
            its monitor sent back to BF16; plainly in the weights' dtype when absent.
        fp8: what ``coat`` converts; its defaults when absent.

    Raises:
        FileNotFoundError: the folder or its config.json does not exist.
        ValueError: the folder holds another kind of model, FP8 does not fit it or the GPU, or a
            precision is given for compressed weights.
    """
    folder = Path(model_dir)
    _check_checkpoint(folder)
    scheme = compression_of(folder)
    if scheme is not None and precision is not None:
        raise ValueError(
            f"precision={precision} has no effect on {folder}, whose linear layers compute in "
            f"{scheme.name} as its config.json says; leave the precision out, or give the folder "
            "that it was exported from"
        )
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = dtype or (torch.float32 if place.type == "cpu" else "auto")
    model = CoatVlm.from_pretrained(folder, dtype=wanted, local_files_only=True)
    if precision is not None:
        arithmetic = arithmetic_of(precision, fp8, place)
        arithmetic.apply(model)
        for name in _bf16_blocks(folder) if arithmetic.fp8 is not None else ():
            back_to_bf16(model.get_submodule(name), arithmetic.round_linears)
    if scheme is not None:
        round_inputs(model, scheme, compressed_layers(folder))
    return model.to(place).eval(), CoatVlmProcessor.from_pretrained(folder)


def generate(
    model: CoatVlm,
    processor: CoatVlmProcessor,
    samples: Sequence[Sample],
    max_new_tokens: int = 128,
) -> list[str]:
    """The model's answer to the last user turn of each sample, as stripped text.

    A sample may have several images and videos; an assistant turn after the last user turn is a
    reference and is not shown to the model.

    Args:
        model: the model; it runs where it is.
        processor: its processor.
        samples: one conversation per answer; all of them make one batch.
        max_new_tokens: longest answer in tokens.

    Raises:
        DataError: a medium cannot be read, or a prompt is longer than the model's max_length.
    """
    if not samples:
        return []
    encoder = PromptEncoder(processor)
    return generate_batch(model, encoder, encoder(samples), max_new_tokens)


class PromptEncoder:
    """Encodes prompts into left-padded batches; made once for many batches, also in a worker.

    Attributes:
        tokenizer: the processor's tokenizer.
        stop_token_ids: the tokens that end an answer.
    """

    def __init__(self, processor: CoatVlmProcessor) -> None:
        self._encoder = processor.encoder(train=False)
        self.tokenizer = processor.tokenizer
        self.stop_token_ids = _stop_token_ids(self._encoder, self.tokenizer.eos_token_id)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """The prompts of ``samples``, up to where the answer begins, on the CPU.

        Left padding puts every prompt's last token in the last column, where generation goes on.

        Returns:
            input_ids and attention_mask (B, T) int64, pixel_values (images of all, 3, H, W).

        Raises:
            DataError: a medium cannot be read, or a prompt is too long.
        """
        return self.collate([self.encode(sample) for sample in samples])

    def encode(self, sample: Sample) -> EncodedSample:
        """The prompt of one sample; DataError as in a call."""
        return self._encoder.prompt(sample)

    def collate(self, encoded: Sequence[EncodedSample]) -> Batch:
        """The left-padded batch of encoded prompts."""
        return collate(encoded, pad_token_id=self.tokenizer.pad_token_id, padding_side="left")

    def answered(self, sample: Sample, answers: Sequence[str]) -> list[EncodedSample]:
        """The prompt with each answer behind it, which has labels; DataError as in a call."""
        return self._encoder.answered(sample, answers)

    def collate_answered(self, encoded: Sequence[EncodedSample]) -> Batch:
        """The right-padded batch of prompts with their answers."""
        return collate(encoded, pad_token_id=self.tokenizer.pad_token_id)

    def frame_times(self, media: Media) -> tuple[float, ...] | None:
        """Seconds at which a video is shown, from its header; None for a folder of frames."""
        return self._encoder.media_plan(media)[0].times_s

    def keep_last_clip(self) -> None:
        """Keep a decoded video until another is asked for: several questions may be about it."""
        self._encoder.keep_last_clip()


@torch.inference_mode()
def generate_batch(
    model: CoatVlm, encoder: PromptEncoder, batch: Batch, max_new_tokens: int
) -> list[str]:
    """The greedy answers to a batch made by ``encoder``, as stripped texts.

    The batch ends when every row has produced an end token or ``max_new_tokens``.
    """
    return answer_batch(model, encoder, batch, max_new_tokens)


def answer_batch(
    model: CoatVlm,
    encoder: PromptEncoder,
    batch: Batch,
    max_new_tokens: int,
    *,
    synced: bool = False,
) -> list[str]:
    """:func:`generate_batch` for a model that goes on training.

    Gradients are off, but not by inference mode: the weights that ZeRO-3 gathers and keeps would
    become inference tensors, which no later step may save for its backward pass.

    Args:
        model: the model, in evaluation mode.
        encoder: made the batch.
        batch: left-padded prompts.
        max_new_tokens: longest answer in tokens.
        synced: go on with empty passes until all ranks have ended; needed where a pass gathers
            weights from all of them.
    """
    # transformers' stubs want attributes of its own quantized and encoder-decoder models.
    output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=batch["input_ids"].to(model.device),
        attention_mask=batch["attention_mask"].to(model.device),
        pixel_values=batch["pixel_values"].to(model.device, model.dtype),
        image_grids=batch.get("image_grids"),
        frame_groups=batch.get("frame_groups"),
        max_new_tokens=max_new_tokens,
        pad_token_id=encoder.tokenizer.pad_token_id,
        eos_token_id=encoder.stop_token_ids,
        synced_gpus=synced,
        **GREEDY,
    )
    answers = output[:, batch["input_ids"].shape[1] :]
    texts = encoder.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [text.strip() for text in texts]


def _stop_token_ids(encoder: Encoder, eos_token_id: int | None) -> list[int]:
    """The token trained after every answer, and the tokenizer's own end token.

    The former is read from an encoded example, so that a chat template and its end token are
    written down in one place only.
    """
    turns = (Turn("user", (Part("text", "?"),)), Turn("assistant", (Part("text", "!"),)))
    labels = encoder(Sample(id="stop", turns=turns)).labels
    end_of_answer = int(labels[labels != IGNORE_INDEX][-1])
    return sorted({end_of_answer} | ({eos_token_id} if eos_token_id is not None else set()))


def _bf16_blocks(folder: Path) -> list[str]:
    """FP8 blocks that training sent back to BF16, as training.json says."""
    path = folder / "training.json"
    if not path.is_file():
        return []
    return json.loads(path.read_text(encoding="utf-8")).get("bf16_blocks", [])


def _check_checkpoint(folder: Path) -> None:
    config_path = folder / "config.json"
    if not config_path.is_file():
        found = sorted(path.parent for path in folder.glob("*/model/config.json"))
        hint = f"; did you mean {found[-1]}?" if found else ""
        raise FileNotFoundError(
            f"{folder} is not a coat_vlm checkpoint: it has no config.json (expected a folder like "
            f"RUN/sft/model with config.json, model.safetensors and the tokenizer){hint}"
        )
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{config_path} is not JSON: {error}; copy the checkpoint again"
        ) from error
    model_type = config.get("model_type")
    if model_type != "coat_vlm":
        raise ValueError(
            f"{folder} is not a coat_vlm checkpoint: its model_type is {model_type!r}; to build on "
            "a language model or a vision tower, name it in a recipe (model.language.name_or_path)"
        )
