"""The processor, which converts images and text into model inputs and is saved with the model.

The processor stores settings; ``coat_data`` does the conversion, with the same code in training and
inference. The tokenizer is either trained on the recipe's texts or an existing one with the
required tokens.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from typing import Any, cast

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
from transformers.utils.constants import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from coat_data.load.collate import collate
from coat_data.load.encode import Encoder
from coat_data.media.image import Augment, ImageMode, ImageTransform
from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_data.sample import Sample
from coat_data.text.chat import get_template
from coat_data.text.from_messages import Message, Picture, messages_to_sample, question_to_sample
from coat_data.text.tokens import TokenizerLike
from coat_vlm.config import ModelConfig
from coat_vlm.model.chat_templates import CHATML, find_jinja_template
from coat_vlm.model.configuration import IMAGE_TOKEN, CoatVlmConfig
from coat_vlm.model.pretrained import check_local_path

logger = logging.getLogger(__name__)

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"

# SigLIP expects values in [-1, 1]; CLIP and open_clip's towers expect OpenAI's normalization.
_SIGLIP = (IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD)
_CLIP = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)


class CoatVlmProcessor(ProcessorMixin):
    """Tokenizer, image settings and chat template of one model.

    ``save_pretrained``, ``from_pretrained`` and ``AutoProcessor`` work as in transformers.

    Attributes:
        tokenizer: a fast tokenizer that contains ``<image>``.
        image_size: side of the tower's input in pixels.
        image_mean: mean of each color channel, of values in 0..1.
        image_std: standard deviation of each color channel.
        image_mode: ``resize``, ``pad``, ``dynamic`` or ``dynamic_s2``.
        image_augment: ``none`` or ``crop_flip``; in training only.
        image_resample: a filter of ``PIL.Image.Resampling``.
        image_min_tiles: minimum tiles of the grid in mode ``dynamic``.
        image_max_tiles: maximum tiles of the (largest) grid in ``dynamic`` and ``dynamic_s2``.
        image_s2_scales: sides of the scales in pixels in mode ``dynamic_s2``, else None.
        image_max_pixels: maximum pixels of an image file; Pillow's limit if None.
        tokens_per_image: image tokens per image tile; 0 for a language model without vision, whose
            tokenizer needs no ``<image>``.
        num_video_frames: number of sampled frames per video with uniform sampling.
        video: the other fields of :class:`coat_data.media.sampling.VideoSettings`.
        max_length: maximum sequence length in tokens.
        template: name of the chat template (``coat_data.text.chat.get_template``).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_size: int = 224,
        image_mean: Sequence[float] = tuple(_SIGLIP[0]),
        image_std: Sequence[float] = tuple(_SIGLIP[1]),
        image_mode: ImageMode = "resize",
        image_augment: Augment = "none",
        image_resample: int = Image.Resampling.BICUBIC,
        tokens_per_image: int = 256,
        num_video_frames: int = 8,
        max_length: int = 2048,
        template: str = "chatml",
        chat_template: str | None = None,
        image_min_tiles: int = 1,
        image_max_tiles: int = 12,
        image_s2_scales: Sequence[int] | None = None,
        image_max_pixels: int | None = None,
        video: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, chat_template=chat_template)
        self.image_size = image_size
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.image_mode: ImageMode = image_mode
        self.image_augment: Augment = image_augment
        self.image_resample = int(image_resample)
        self.tokens_per_image = tokens_per_image
        self.num_video_frames = num_video_frames
        self.max_length = max_length
        self.template = template
        self.image_min_tiles = image_min_tiles
        self.image_max_tiles = image_max_tiles
        self.image_s2_scales = None if image_s2_scales is None else list(image_s2_scales)
        self.image_max_pixels = image_max_pixels
        self.video = dict(video or {})

    def adopt_template(self, name: str | None) -> None:
        """Make the chat template that a stage trains the one of the model and of its tokenizer.

        The tokenizer gets it as its ``chat_template``, which others read from the saved folder.
        ``plain`` is no chat template, and changes nothing; ``tokenizer`` is the tokenizer's own.

        Args:
            name: the stage's template. Default: the model's.
        """
        if name not in (None, "plain"):
            self.template = name
        own = find_jinja_template(name or self.template, cast(TokenizerLike, self.tokenizer))
        if own is not None:
            self.tokenizer.chat_template = own

    def encoder(self, *, train: bool, template: str | None = None) -> Encoder:
        """Create the encoder of samples for this model.

        Args:
            train: augment images (if the encoder receives a generator).
            template: chat template. Default: the model's.

        Raises:
            ValueError: the template or an image setting is unknown, or the tokenizer has no
                ``<image>``.
        """
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
            transform = ImageTransform(*basic, augment=self.image_augment if train else "none")
        return Encoder(
            tokenizer,
            get_template(template or self.template, tokenizer),
            transform,
            tokens_per_image=self.tokens_per_image,
            image_token_id=image_token_id if self.tokens_per_image else None,
            video=VideoSettings(num_frames=self.num_video_frames, **self.video),
            max_length=self.max_length,
            max_pixels=self.image_max_pixels,
        )

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        images: Picture | Sequence[Picture] | Sequence[Sequence[Picture]] | None = None,
        text: str | Sequence[str] | None = None,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
    ) -> BatchFeature:
        """Create inputs of ``model.generate``: left-padded prompts and the pixels of their images.

        Args:
            images: paths, PIL images or encoded bytes. For one text: one image or several. For a
                list of texts or conversations: one entry per row, an image or a list of images.
            text: a question, or one per row; images appear at ``<image>``, or first.
            messages: instead of ``text``, a conversation in Hugging Face's format, or one per row.

        Returns:
            input_ids and attention_mask (B, T) int64, pixel_values (N, 3, H, W) float32; in mode
            ``dynamic_s2`` also image_grids (M, 2) int64, and for videos with ``pool_frames``
            frame_groups (G,) int64.

        Raises:
            DataError: an image cannot be read, or a prompt is too long.
            ValueError: both or neither of text and messages are given, or the images do not match.
        """
        encoder = self.encoder(train=False)
        samples = _samples(images, text, messages)
        batch = collate(
            [encoder.prompt(sample) for sample in samples],
            pad_token_id=self.tokenizer.pad_token_id,
            padding_side="left",
        )
        names = ("input_ids", "attention_mask", "pixel_values", "image_grids", "frame_groups")
        return BatchFeature({name: value for name, value in batch.items() if name in names})


def _samples(images: Any, text: Any, messages: Any) -> list[Sample]:
    if (text is None) == (messages is None):
        raise ValueError("give the processor either text or messages")
    if text is not None:
        rows, one, convert = text, isinstance(text, str), question_to_sample
    else:
        # A conversation is a list of messages; several conversations are a list of lists.
        rows, convert = messages, messages_to_sample
        one = not messages or not isinstance(messages[0], Sequence)
    if one:
        return [convert(rows, _as_list(images))]
    per_row = [None] * len(rows) if images is None else images
    if len(per_row) != len(rows):
        raise ValueError(
            f"{len(rows)} prompts but {len(per_row)} entries of images; give one entry per prompt, "
            "an image or a list of images"
        )
    return [convert(row, _as_list(own)) for row, own in zip(rows, per_row, strict=True)]


def _as_list(images: Any) -> list[Picture]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def build_processor(
    recipe_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, model_config: CoatVlmConfig
) -> CoatVlmProcessor:
    """Build the processor of a recipe's model.

    Mean, standard deviation and resampling are those of the tower's training: from
    preprocessor_config.json in the tower's folder, or else the defaults of the tower's type. Images
    are always resized to the tower's square, without cropping.

    Args:
        recipe_model: the recipe's model section.
        tokenizer: a tokenizer from :func:`prepare_tokenizer`.
        model_config: configuration of the built model.
    """
    vision, tower = recipe_model.vision, model_config.vision_config
    if vision is None:
        return _processor(recipe_model, tokenizer, model_config, {})
    mean, std = _SIGLIP if tower.model_type == "siglip_vision_model" else _CLIP
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

    Tokenizer, mean, standard deviation and resampling come from the checkpoint. All other settings
    come from the recipe: a run may use longer rows, other tiles or more frames.

    Args:
        recipe_model: the recipe's model section.
        saved: the checkpoint's processor.
        model_config: the checkpoint's configuration.

    Raises:
        ValueError: the recipe and the checkpoint describe different models.
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
    num_frames = video.pop("num_frames")
    return CoatVlmProcessor(
        tokenizer,
        image_size=1 if tower is None else tower.image_size,
        image_mode=image.mode,
        image_augment=image.augment,
        image_min_tiles=image.min_tiles or 1,
        image_max_tiles=image.max_tiles or 12,
        image_s2_scales=model_config.s2_scales,
        image_max_pixels=image.max_pixels,
        tokens_per_image=model_config.tokens_per_image,
        num_video_frames=num_frames or image.num_video_frames or 8,
        video={n: value for n, value in video.items() if value is not None},
        max_length=recipe_model.max_length,
        template=recipe_model.template,
        **image_settings,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (GPT-2's) with ChatML's tokens and template.

    The same texts in the same order give the same tokenizer. The vocabulary contains all 256 bytes,
    so every string can be encoded.

    Args:
        texts: training texts; read once.
        vocab_size: maximum number of tokens, including bytes and special tokens.

    Raises:
        ValueError: ``vocab_size`` is smaller than the number of bytes and special tokens.
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
    tokenizer.chat_template = CHATML
    return tokenizer


def tokenizer_name(model: ModelConfig) -> str:
    """Return the name or path of a recipe's tokenizer.

    Raises:
        ValueError: the recipe names no tokenizer.
    """
    name = model.tokenizer.name_or_path or model.language.name_or_path
    if name is None:
        raise ValueError(
            "no tokenizer: set model.tokenizer.name_or_path, or model.tokenizer.train_vocab_size "
            "to train one on the recipe's texts"
        )
    return name


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a recipe names, with the tokens of :func:`prepare_tokenizer`.

    Raises:
        ValueError: the recipe names no tokenizer, or it cannot be read.
    """
    own = model.tokenizer.name_or_path is not None
    name, where = tokenizer_name(model), f"model.{'tokenizer' if own else 'language'}.name_or_path"
    check_local_path(where, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{where}={name!r} has no tokenizer that transformers can read: {error}; required: a "
            "folder with tokenizer.json, or a Hub id"
        ) from error
    return prepare_tokenizer(tokenizer, images=model.vision is not None)


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, images: bool = True
) -> PreTrainedTokenizerBase:
    """Add ``<image>``, and ``<pad>`` if there is no pad token; return the same tokenizer.

    New tokens increase the vocabulary; ``build_model`` extends the embeddings.

    Args:
        tokenizer: changed in place.
        images: False for a language model without vision. Its vocabulary is unchanged: no
            ``<image>``, and without a pad token the end token pads (labels and attention ignore
            padding).
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
