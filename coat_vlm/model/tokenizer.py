"""Tokenizers: one trained on the recipe's own texts, and the tokens that any other one needs."""

from collections.abc import Iterable
from itertools import chain, cycle

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coat_vlm.config import ModelConfig
from coat_vlm.model.configuration import IMAGE_TOKEN

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML as a Jinja template; the same layout as ``coat_data.text.chat``'s chatml."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (GPT-2's) with ChatML's tokens and template.

    The same texts in the same order give the same tokenizer. Every string can be written, as the
    256 bytes are always in the vocabulary.

    Args:
        texts: what to learn from; read once.
        vocab_size: tokens at most, bytes and special tokens included; fewer for few texts.

    Raises:
        ValueError: ``vocab_size`` leaves no room for the bytes and the special tokens.
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
    # The template writes a role before each text, so the roles count among what is written.
    roles = cycle(("user", "assistant"))
    backend.train_from_iterator(chain.from_iterable(zip(texts, roles, strict=False)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD_TOKEN, eos_token=END_TOKEN
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tokenizer_name(model: ModelConfig) -> str:
    """Where a recipe's tokenizer comes from, if it is not to be trained.

    Raises:
        ValueError: the recipe does not say.
    """
    name = model.tokenizer.name_or_path or model.language.name_or_path
    if name is None:
        raise ValueError(
            "no tokenizer: set model.tokenizer.name_or_path, or model.tokenizer.train_vocab_size "
            "to train one on the recipe's texts"
        )
    return name


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, images: bool = True
) -> PreTrainedTokenizerBase:
    """Add ``<image>``, and ``<pad>`` if there is no pad token; returns the same tokenizer.

    New tokens make the vocabulary larger; ``build_model`` grows the embeddings to it.

    Args:
        tokenizer: changed in place.
        images: False for a language model alone, whose vocabulary stays as it is: no ``<image>``,
            and where there is no pad token, the end token pads (labels and attention leave padding
            out).
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
