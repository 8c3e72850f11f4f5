"""The processor, which converts images and text into model inputs and is saved with the model.

The processor stores settings; ``coat_data`` does the conversion, with the same code in training and
inference. The tokenizer is either trained on the recipe's texts or an existing one with the
required tokens.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BatchFeature,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.processing_utils import ProcessorMixin
from transformers.utils.chat_template_utils import get_json_schema
from transformers.utils.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from coat_data.load.collate import collate
from coat_data.load.encode import IGNORE_INDEX, EncodedSample, Encoder
from coat_data.media.image import ImageMode, ImageTransform
from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_data.sample import Sample
from coat_data.text.chat import get_template
from coat_data.text.from_messages import (
    Message,
    messages_to_sample,
    parse_messages,
)
from coat_data.text.message_fields import read_tools
from coat_data.text.tokens import TokenizerLike
from coat_vlm.config import ModelConfig
from coat_vlm.model.chat_templates import JINJA_TEMPLATES, find_jinja_template, find_pad_id
from coat_vlm.model.configuration import IMAGE_TOKEN, CoatVlmConfig
from coat_vlm.model.pretrained import check_local_path, load_auto
from coat_vlm.model.processor_inputs import (
    MARKS,
    PLACEHOLDERS,
    check_image_tokens,
    check_rows,
    find_padded_length,
    flat_options,
    flatten,
    place_media,
    split_rows,
    truncate,
)

logger = logging.getLogger(__name__)

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"

# SigLIP and ViT expect values in [-1, 1]; CLIP and open_clip's towers OpenAI's normalization.
_SIGLIP = (IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD)
_CLIP = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
_DINO = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


PaddingSide = Literal["left", "right"]


class CoatVlmProcessor(ProcessorMixin):
    """Tokenizer, image settings and chat template of one model.

    Attributes:
        image_resample: a filter of ``PIL.Image.Resampling``.
        image_max_tiles: of the (largest) grid, in modes ``dynamic`` and ``dynamic_s2``.
        image_s2_scales: sides of the scales in pixels in mode ``dynamic_s2``, else None.
        image_max_pixels: maximum pixels of an image file; Pillow's limit if None.
        tokens_per_image: image tokens per image tile; 0 for a language model without vision.
        video: fields of :class:`coat_data.media.sampling.VideoSettings`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_size: int = 224,
        image_mean: Sequence[float] = tuple(_SIGLIP[0]),
        image_std: Sequence[float] = tuple(_SIGLIP[1]),
        image_mode: ImageMode = "resize",
        image_resample: int = Image.Resampling.BICUBIC,
        tokens_per_image: int = 256,
        max_length: int = 2048,
        template: str = "chatml",
        chat_template: str | None = None,
        image_min_tiles: int = 1,
        image_max_tiles: int = 12,
        image_s2_scales: Sequence[int] | None = None,
        image_max_pixels: int | None = None,
        video: dict[str, Any] | None = None,
    ) -> None:
        if not tokenizer.encode("a", add_special_tokens=False):
            # transformers makes an empty tokenizer of a folder without vocabulary.
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no tokens for a text; copy its "
                "files again (tokenizer.json)"
            )
        super().__init__(tokenizer, chat_template=chat_template)
        tokenizer.padding_side = "left"  # of prompts that transformers' pipelines collate
        self.image_size = image_size
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.image_mode: ImageMode = image_mode
        self.image_resample = int(image_resample)
        self.tokens_per_image = tokens_per_image
        self.max_length = max_length
        self.template = template
        self.image_min_tiles = image_min_tiles
        self.image_max_tiles = image_max_tiles
        self.image_s2_scales = None if image_s2_scales is None else list(image_s2_scales)
        self.image_max_pixels = image_max_pixels
        self.video = dict(video or {})

    @classmethod
    def get_processor_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read processor_config.json; ValueError if it contains no settings."""
        found, rest = super().get_processor_dict(pretrained_model_name_or_path, **kwargs)
        if "tokens_per_image" not in found:
            raise ValueError(
                f"{pretrained_model_name_or_path} has no processor_config.json with the settings "
                "of images and the chat template; copy the whole folder again"
            )
        return found, rest

    @property
    def image_processor(self) -> "CoatVlmProcessor":
        """The processor itself reads images; pipelines ask for an image processor."""
        return self

    @property
    def model_input_names(self) -> list[str]:
        """Names of the tensors that a call with text and media returns."""
        names = {"input_ids": True, "attention_mask": True}
        names |= {"pixel_values": self.tokens_per_image > 0}
        names |= {"image_grids": self.image_mode == "dynamic_s2"}
        names |= {"frame_groups": self.video.get("pool_frames", 1) > 1}
        return [name for name, returned in names.items() if returned]

    @property
    def pad_token_id(self) -> int:
        """The token that pads sequences."""
        image_token = IMAGE_TOKEN if self.tokens_per_image else None
        return find_pad_id(self.tokenizer, len(self.tokenizer), image_token)

    def adopt_template(self, name: str | None) -> None:
        """Make the chat template that a stage trains the one of the model and of its tokenizer.

        ``plain`` is not a chat template, and changes nothing; ``tokenizer`` is the tokenizer's own.
        """
        if name not in (None, "plain"):
            self.template = name
        own = find_jinja_template(name or self.template, cast(TokenizerLike, self.tokenizer))
        if own is not None:
            self.tokenizer.chat_template = own

    def encoder(self, *, template: str | None = None) -> Encoder:
        """Create the encoder of samples."""
        tokenizer = cast(TokenizerLike, self.tokenizer)
        image_token_id = self.tokenizer.get_vocab().get(IMAGE_TOKEN)
        if image_token_id is None and self.tokens_per_image:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no {IMAGE_TOKEN} token; add it with "
                "coat_vlm.model.processor.prepare_tokenizer"
            )
        resample = Image.Resampling(self.image_resample)
        basic = (self.image_size, self.image_mean, self.image_std, self.image_mode, resample)
        if self.image_mode in TiledTransform.modes:
            transform = TiledTransform(
                *basic,
                min_tiles=self.image_min_tiles,
                max_tiles=self.image_max_tiles,
                scales=self.image_s2_scales or (),
            )
        else:
            transform = ImageTransform(*basic)
        return Encoder(
            tokenizer,
            get_template(template or self.template, tokenizer),
            transform,
            tokens_per_image=self.tokens_per_image,
            image_token_id=image_token_id if self.tokens_per_image else None,
            video=VideoSettings(**self.video),
            max_length=self.max_length,
            max_pixels=self.image_max_pixels,
        )

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        *,
        return_tensors: str | None = "pt",
        padding: bool | str | None = None,
        padding_side: PaddingSide = "left",
        **options: Any,
    ) -> BatchFeature:
        """Create inputs of the model from rendered prompts and their media, or from only images.

        Args:
            images: an image, a list of images, or one entry per row; an image is a path, an
                URL, encoded bytes, a PIL image or an array of 8-bit values.
            text: a rendered prompt (:meth:`apply_chat_template`), or one per row, with ``<image>``
                and ``<video>`` at the places of the media. Special tokens in it are parsed.
            videos: a video, a list of videos, or a list per row; a video is a path, a URL,
                encoded bytes, or frames (a list of images or an array (T, H, W, 3)).
            return_tensors: ``pt``, ``np``, or None for lists of token ids.
            padding: as for a tokenizer. Default: pad to the longest if tensors are returned.
            **options: ``return_mm_token_type_ids`` (1 at image tokens), and the tokenizer's.

        Returns:
            input_ids and attention_mask (B, T) int64, pixel_values (N, 3, H, W) float32; in mode
            ``dynamic_s2`` also image_grids (M, 2), and with ``pool_frames`` frame_groups (G,) of
            videos. Without text: pixel_values, and num_patches (M,), the tiles of each image.

        Raises DataError if an image cannot be read; ValueError if media and placeholders do not
        match, or an option is unknown.
        """
        if text is None and videos is None and images is not None:
            return self._encode_images(flatten(images, "image"), return_tensors)
        if text is None:
            raise ValueError("give the processor text; apply_chat_template reads messages")
        options = flat_options(options)
        output: dict[str, Any] = {"return_tensors": return_tensors, "padding": padding}
        output |= {"padding_side": padding_side, **options}
        if output["padding"] is None:
            output["padding"] = output["return_tensors"] is not None
        texts = [text] if isinstance(text, str) else list(text)
        return self._encode_texts(texts, images, videos, output)

    def apply_chat_template(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        return_tensors: str | None = "auto",
        return_dict: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Render a conversation, or several, with the chat template that the model was trained on.

        Arguments and results are as in transformers' processors; tokens are as in training: a
        special token in a user's text is text. The assistant mask is 1 at the supervised tokens.
        Another ``chat_template`` and ``documents`` are rendered by transformers.

        Args:
            conversation: messages whose content is a string or a list of parts (text, image,
                video), or a list of conversations.
            return_tensors: as for a call; ``auto`` and None return lists of token ids.
            processor_kwargs: options of a call; ``images`` are for parts without a source.
            **options: options of a call, or variables of another template.

        Raises DataError if media cannot be read, or a conversation is too long; ValueError if
        arguments contradict each other, or a message or an option is unknown.
        """
        kwargs = {**flat_options(processor_kwargs or {}), **options}
        if continue_final_message and (add_generation_prompt or return_assistant_tokens_mask):
            raise ValueError(
                "continue_final_message leaves an answer open; give it without "
                "add_generation_prompt and return_assistant_tokens_mask"
            )
        replaced = self.chat_template not in (None, self.tokenizer.chat_template)
        if chat_template is not None or documents or replaced:
            if return_assistant_tokens_mask:
                raise ValueError(
                    "return_assistant_tokens_mask is for the model's own chat template, which "
                    "marks supervised tokens; leave out chat_template and documents"
                )
            return super().apply_chat_template(
                conversation,  # pyright: ignore[reportArgumentType]
                cast(Any, chat_template or self.chat_template or self.tokenizer.chat_template),
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=tokenize,
                return_tensors=None if return_tensors == "auto" else return_tensors,
                return_dict=return_dict,
                processor_kwargs=dict(processor_kwargs or {}),
                **options,
            )
        batched = not conversation or isinstance(conversation[0], Sequence)
        conversations: Any = conversation if batched else [conversation]
        encoder = self.encoder()
        tools = read_tools([get_json_schema(t) if callable(t) else t for t in tools or ()])
        fields: Any = {"tools": tools, "continues": continue_final_message}
        if not tokenize:
            texts = []
            for one in conversations:
                turns, _ = parse_messages(one)
                segments = encoder.segments(Sample(id="messages", turns=turns, **fields))
                if add_generation_prompt:
                    segments = encoder.template.render(turns, tools, add_generation_prompt=True)
                texts.append("".join(PLACEHOLDERS.get(kind, text) for kind, text, _ in segments))
            return texts if batched else texts[0]
        kwargs.pop("load_audio_from_video", None)
        kwargs.pop("sanitize_control_tokens", None)  # always
        images = split_rows(kwargs.pop("images", None), len(conversations), one=not batched)
        samples = [
            messages_to_sample(one, own, **fields)
            for one, own in zip(conversations, images, strict=True)
        ]
        encoded = [
            encoder.conversation(sample, add_generation_prompt=add_generation_prompt)
            for sample in samples
        ]
        tensors = None if return_tensors == "auto" else return_tensors
        output = {"return_tensors": tensors, "padding": tensors is not None, "padding_side": "left"}
        batch = self._make_batch(
            encoded, **(output | kwargs), return_assistant_masks=return_assistant_tokens_mask
        )
        return batch if return_dict else batch["input_ids"]

    def _encode_texts(
        self, texts: list[str], images: Any, videos: Any, options: dict[str, Any]
    ) -> BatchFeature:
        mark_media = options.pop("return_mm_token_type_ids", False)
        return_tensors = options.pop("return_tensors")
        check_rows(texts, images)
        media = place_media(texts, flatten(images, "image"), flatten(videos, "video"))
        shown, tensors = self.encoder().read_media(media)
        remaining = iter(shown)
        texts = [MARKS.sub(lambda _: next(remaining), text) for text in texts]
        found = self.tokenizer(texts, **options)
        image_id = self.tokenizer.get_vocab().get(IMAGE_TOKEN)
        is_image = [[int(token == image_id) for token in row] for row in found["input_ids"]]
        for text, row in zip(texts, is_image, strict=True):
            if self.tokens_per_image:
                check_image_tokens(sum(row), text.count(IMAGE_TOKEN))
        if mark_media:
            found["mm_token_type_ids"] = is_image
        found = {name: value for name, value in found.items() if name != "token_type_ids"}
        batch = BatchFeature(found | (tensors if self.tokens_per_image else {}))
        return batch.convert_to_tensors(return_tensors)

    def _encode_images(self, images: list[Any], return_tensors: str | None) -> BatchFeature:
        encoder = self.encoder()
        tiles = [encoder.read_media([one])[1]["pixel_values"] for one in images]
        counts = torch.tensor([len(own) for own in tiles])
        batch = BatchFeature({"pixel_values": torch.cat(tiles), "num_patches": counts})
        return batch.convert_to_tensors(return_tensors)

    def _make_batch(
        self,
        encoded: Sequence[EncodedSample],
        *,
        return_tensors: str | None,
        padding: bool | str,
        padding_side: PaddingSide,
        return_mm_token_type_ids: bool = False,
        return_assistant_masks: bool = False,
        truncation: bool | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        **unknown: Any,
    ) -> BatchFeature:
        """Collate encoded conversations, cut after ``max_length`` tokens with ``truncation``."""
        if unknown.get("add_special_tokens") is False:  # the template writes them
            del unknown["add_special_tokens"]
        if padding not in (True, False, "longest", "max_length", "do_not_pad"):
            unknown["padding"] = padding
        if unknown:
            raise ValueError(
                f"unknown options for messages: {unknown}; allowed: return_tensors, padding (True, "
                "False, max_length), padding_side, pad_to_multiple_of, truncation (True, False), "
                "max_length, return_mm_token_type_ids. Images and videos are read as in training"
            )
        image_id = self.tokenizer.get_vocab().get(IMAGE_TOKEN, -1)
        if truncation and max_length is not None:
            encoded = [truncate(sample, max_length, image_id) for sample in encoded]
        pad = self.pad_token_id
        batch: dict[str, Any] = {**collate(encoded, pad_token_id=pad, padding_side=padding_side)}
        tokens = find_padded_length(batch["input_ids"].shape[1], padding, max_length)
        extra = tokens - batch["input_ids"].shape[1] + -tokens % (pad_to_multiple_of or 1)
        for name, value in (("input_ids", pad), ("attention_mask", 0), ("labels", IGNORE_INDEX)):
            sides = (extra, 0) if padding_side == "left" else (0, extra)
            batch[name] = F.pad(batch[name], sides, value=value)
        if return_mm_token_type_ids:
            batch["mm_token_type_ids"] = batch["input_ids"].eq(image_id).long()
        labels = batch.pop("labels")
        if return_assistant_masks:
            batch["assistant_masks"] = (labels != IGNORE_INDEX).long()
        batch.pop("image_positions", None)
        unpadded = padding in (False, "do_not_pad")
        if return_tensors is None or unpadded:
            used = batch["attention_mask"].bool() | (not unpadded)
            for name in _TOKEN_ROWS & batch.keys():
                rows = zip(batch[name], used, strict=True)
                batch[name] = [row[own].tolist() for row, own in rows]
        return BatchFeature(batch).convert_to_tensors(return_tensors)


_TOKEN_ROWS = {"input_ids", "attention_mask", "mm_token_type_ids", "assistant_masks"}


def build_processor(
    recipe_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, model_config: CoatVlmConfig
) -> CoatVlmProcessor:
    """Build the processor of a recipe's model.

    Normalization and resampling are from preprocessor_config.json in the tower's folder, or the
    defaults of the tower's type. Images are always resized to the tower's square, without cropping.
    """
    vision, tower = recipe_model.vision, model_config.vision_config
    if vision is None:
        return _processor(recipe_model, tokenizer, model_config, {})
    mean, std = _DINO if tower.model_type.startswith("dinov") else _CLIP
    if tower.model_type in ("siglip_vision_model", "vit"):
        mean, std = _SIGLIP
    mean, std = getattr(tower, "image_mean", None) or mean, getattr(tower, "image_std", None) or std
    found: dict[str, Any] = {}
    if vision.library == "transformers" and vision.name_or_path is not None:
        try:
            found, _ = ImageProcessingMixin.get_image_processor_dict(vision.name_or_path)
        except OSError:
            logger.warning(
                "%s has no preprocessor_config.json; images are normalized with mean %s, std %s, "
                "as for other towers of type %s",
                vision.name_or_path,
                mean,
                std,
                tower.model_type,
            )
    settings: dict[str, Any] = {
        "image_mean": found.get("image_mean", mean),
        "image_std": found.get("image_std", std),
        "image_resample": found.get("resample", Image.Resampling.BICUBIC),
    }
    return _processor(recipe_model, tokenizer, model_config, settings)


def continue_processor(
    recipe_model: ModelConfig, saved: CoatVlmProcessor, model_config: CoatVlmConfig
) -> CoatVlmProcessor:
    """Build the processor of a recipe that starts from a composed checkpoint.

    Tokenizer, normalization and resampling come from the checkpoint, all other settings from the
    recipe. Raises ValueError if these describe different models.
    """
    image, scales, vision = recipe_model.image, model_config.s2_scales, recipe_model.vision
    asked: dict[str, tuple[Any, Any]] = {
        "vision (whether there is a tower)": (vision is not None, model_config.has_vision)
    }
    if vision is not None and model_config.has_vision:
        asked |= {
            "projector.type": (recipe_model.projector.type, model_config.projector_type),
            "vision.select_layer": (vision.select_layer, model_config.select_layer),
            "vision.select_feature": (vision.select_feature, model_config.select_feature),
            "image.mode dynamic_s2": (image.mode == "dynamic_s2", scales is not None),
            "image.s2_scales": (list(image.s2_scales or scales or ()), scales or []),
        }
    for name, (wanted, found) in asked.items():
        if wanted != found:
            raise ValueError(
                f"model.{name} is {wanted!r} in the recipe and {found!r} in the checkpoint of "
                "init_from, whose weights require it; change the recipe, or start without "
                "init_from (init_from=null)"
            )
    settings: dict[str, Any] = {
        name: getattr(saved, name) for name in ("image_mean", "image_std", "image_resample")
    }
    return _processor(recipe_model, saved.tokenizer, model_config, settings)


def _processor(
    recipe_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: CoatVlmConfig,
    image_settings: Mapping[str, Any],
) -> CoatVlmProcessor:
    image, tower = recipe_model.image, model_config.vision_config
    video = dataclasses.asdict(recipe_model.video)
    return CoatVlmProcessor(
        tokenizer,
        image_size=1 if tower is None else tower.image_size,
        image_mode=image.mode,
        image_min_tiles=image.min_tiles or 1,
        image_max_tiles=image.max_tiles or 12,
        image_s2_scales=model_config.s2_scales,
        image_max_pixels=image.max_pixels,
        tokens_per_image=model_config.tokens_per_image,
        video={n: value for n, value in video.items() if value is not None},
        max_length=recipe_model.max_length,
        template=recipe_model.template or "chatml",
        **image_settings,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (GPT-2's) with ChatML's tokens and template.

    The same texts in the same order give the same tokenizer. Raises ValueError if ``vocab_size`` is
    smaller than the number of bytes and special tokens.
    """
    special = [PAD_TOKEN, START_TOKEN, END_TOKEN, IMAGE_TOKEN]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise ValueError(
            f"train_vocab_size={vocab_size} is too small: {len(alphabet)} bytes and {len(special)} "
            f"special tokens need {len(alphabet) + len(special)}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    # The template writes a role before each text, so roles are part of the training texts.
    roles = cycle(("user", "assistant"))
    backend.train_from_iterator(chain.from_iterable(zip(texts, roles, strict=False)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD_TOKEN, eos_token=END_TOKEN
    )
    tokenizer.chat_template = JINJA_TEMPLATES["chatml"]
    return tokenizer


def tokenizer_name(model: ModelConfig) -> str:
    """Return the name or path of a recipe's tokenizer; ValueError if there is none."""
    name = model.tokenizer.name_or_path or model.language.name_or_path
    if name is None:
        raise ValueError(
            "no tokenizer: set model.tokenizer.name_or_path, or model.tokenizer.train_vocab_size "
            "to train one on the recipe's texts"
        )
    return name


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a recipe's tokenizer, with the tokens of :func:`prepare_tokenizer`, or ValueError."""
    own = model.tokenizer.name_or_path is not None
    name, where = tokenizer_name(model), f"model.{'tokenizer' if own else 'language'}.name_or_path"
    check_local_path(where, name)
    try:
        tokenizer = load_auto(AutoTokenizer, name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{where}={name!r} has no tokenizer that transformers can read: {error}; required: a "
            "folder with tokenizer.json, or a Hub id"
        ) from error
    return prepare_tokenizer(tokenizer, images=model.vision is not None)


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, images: bool = True
) -> PreTrainedTokenizerBase:
    """Add ``<image>``, and ``<pad>`` if there is no pad token, in place; return the tokenizer.

    The vocabulary of a language model without vision is unchanged; the end token may pad.
    """
    if not images:
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    if all(str(token) != IMAGE_TOKEN for token in tokenizer.added_tokens_decoder.values()):
        tokenizer.add_tokens(IMAGE_TOKEN, special_tokens=True)
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer
