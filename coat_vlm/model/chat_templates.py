"""What models need from a tokenizer: the built-in templates in Jinja, and a token to pad with."""

from typing import Any

from coat_data.text.chat import VICUNA_SYSTEM, begin_of_text
from coat_data.text.tokens import TokenizerLike

_CONTENT = (
    "{% macro content(message) %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
_ANSWER = "{% generation %}{{ content(MESSAGE) + END }}{% endgeneration %}"
"""An answer and its end token; transformers' assistant mask marks what the tags enclose."""
_VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ content(messages[0]) }}"
    "{% set turns = messages[1:] %}{% else %}"
    + VICUNA_SYSTEM
    + "{% set turns = messages %}{% endif %}{% for turn in turns %}"
    "{% if turn['role'] == 'assistant' %}{{ ' ASSISTANT: ' }}"
    + _ANSWER.replace("MESSAGE", "turn").replace("END", "eos_token")
    + "{% else %}{{ (' USER: ' if loop.first else 'USER: ') + content(turn) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT: ' }}{% endif %}"
)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    + _ANSWER.replace("MESSAGE", "message").replace("END", "'<|im_end|>'")
    + "{% else %}{{ content(message) + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JINJA_TEMPLATES = {"chatml": _CONTENT + _CHATML, "vicuna_v1": _CONTENT + _VICUNA}
"""Template by name, for content as text and as parts; without a begin-of-text token."""


def find_jinja_template(name: str, tokenizer: TokenizerLike) -> str | None:
    """Return a template with the tokenizer's begin-of-text token; None without a Jinja template.

    ``apply_chat_template`` tokenizes without special tokens, so the template writes that token.
    """
    template = JINJA_TEMPLATES.get(name)
    if template is None or not begin_of_text(tokenizer):
        return template
    return "{{ bos_token }}" + template


def find_pad_id(tokenizer: Any, vocab_size: int, image_token: str | None) -> int:
    """Return a token that pads sequences: the tokenizer's pad or end token, or any other one.

    Padding is masked by its position, so any row of the embedding can be used for it. Published
    tokenizers have pad tokens outside of the embedding, none, or the image token.
    """
    image_id = None if image_token is None else tokenizer.convert_tokens_to_ids(image_token)
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, *range(vocab_size))
    return next(
        token
        for token in candidates
        if token is not None and token < vocab_size and token != image_id
    )
