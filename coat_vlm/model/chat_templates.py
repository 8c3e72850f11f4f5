"""The chat templates of ``coat_data.text.chat`` in Jinja, for a tokenizer's ``chat_template``."""

from coat_data.text.chat import VICUNA_SYSTEM, begin_of_text
from coat_data.text.tokens import TokenizerLike

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML for messages whose content is text."""

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
