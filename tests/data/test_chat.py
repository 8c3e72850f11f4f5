"""Chat templates as segments, against layouts written out by hand and transformers' rendering."""

import re

import pytest
from conftest import byte_level, wrap
from transformers import PreTrainedTokenizerFast

from coat_data.sample import Part, ToolCall, Turn
from coat_data.text.chat import VICUNA_SYSTEM, get_template
from coat_data.text.tokens import Segment, any_of

IMAGE = Part("image")


def turns(*said: str | tuple, system: str | None = None) -> list[Turn]:
    """Alternating user and assistant turns; a tuple is several parts."""
    first = [Turn("system", (Part("text", system),))] if system is not None else []
    for number, words in enumerate(said):
        words = words if isinstance(words, tuple) else (words,)
        parts = tuple(Part("text", w) if isinstance(w, str) else w for w in words)
        first.append(Turn("assistant" if number % 2 else "user", parts))
    return first


def written(segments: list[Segment]) -> str:
    """Segments as one string: trained ones in [[ ]], images as <I>."""
    shown = []
    for kind, text, trained in segments:
        text = f"<{kind[0].upper()}>" if kind in ("image", "video") else text
        shown.append(f"[[{text}]]" if trained else text)
    return "".join(shown).replace("]][[", "")


def test_plain_keeps_media_and_answers(make_tokenizer):
    template = get_template("plain", make_tokenizer("llama2_first"))
    conversation = turns((IMAGE, "\nDescribe."), "A dog.", "More?", "No.", system="Be kind.")
    assert written(template.render(conversation)) == "<s><I>[[A dog.</s>No.</s>]]"
    prompt = template.render(conversation[:2], add_generation_prompt=True)
    assert written(prompt) == "<s><I>"


def test_vicuna_is_llavas_layout(make_tokenizer):
    template = get_template("vicuna_v1", make_tokenizer("llama2_always"))
    conversation = turns((IMAGE, "\nWhat?"), "A dog.", "More?", "No.")
    assert written(template.render(conversation)) == (
        f"<s>{VICUNA_SYSTEM} USER: <I>\nWhat? ASSISTANT: [[A dog.</s>]]"
        "USER: More? ASSISTANT: [[No.</s>]]"
    )
    prompt = template.render(turns("Hi", system="Be kind."), add_generation_prompt=True)
    assert written(prompt) == "<s>Be kind. USER: Hi ASSISTANT: "


def test_chatml_has_no_default_system_turn(make_tokenizer):
    template = get_template("chatml", make_tokenizer("qwen2"))
    conversation = turns(("See ", IMAGE, " and ", Part("video")), "A dog.", system="Be kind.")
    assert written(template.render(conversation[1:])) == (
        "<|im_start|>user\nSee <I> and <V><|im_end|>\n<|im_start|>assistant\n[[A dog.<|im_end|>]]\n"
    )
    prompt = template.render(conversation[:2], add_generation_prompt=True)
    assert written(prompt) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSee <I> and <V><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


OWN = {
    "qwen2": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<I>What?<|im_end|>\n<|im_start|>assistant\n[[A dog.<|im_end|>]]\n<|im_start|>user\n"
    "More?<|im_end|>\n<|im_start|>assistant\n[[No.<|im_end|>]]\n",
    "qwen3": "<|im_start|>user\n<I>What?<|im_end|>\n<|im_start|>assistant\n"
    "[[A dog.<|im_end|>]]\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    "[[<think>\n\n</think>\n\nNo.<|im_end|>]]\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n<I>What?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[A dog.<|eot_id|>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nMore?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[No.<|eot_id|>]]",
    "llama2_first": "<s>[INST] <I>What? [/INST] [[A dog. </s>]]"
    "<s>[INST] More? [/INST] [[No. </s>]]",
    "mistral_first": "<s>[INST] <I>What? [/INST][[A dog.</s>]][INST] More? [/INST][[No.</s>]]",
}


@pytest.mark.parametrize("name", OWN)
def test_tokenizers_own_template(make_tokenizer, name: str):
    template = get_template("tokenizer", make_tokenizer(name))
    conversation = turns((IMAGE, "What?"), "A dog.", "More?", "No.")
    assert written(template.render(conversation)) == OWN[name]


def test_system_turn_may_be_written_into_the_first_question(make_tokenizer):
    template = get_template("tokenizer", make_tokenizer("llama2_always"))
    assert written(template.render(turns("Hi", "Ho", system="Be kind."))) == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] [[Ho </s>]]"
    )


def with_template(tokenizer: PreTrainedTokenizerFast, jinja: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = jinja
    return tokenizer


CONTENTS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


def test_answer_without_an_end_is_ended_by_eos(make_tokenizer):
    template = get_template("tokenizer", with_template(make_tokenizer("qwen2"), CONTENTS))
    assert written(template.render(turns("a", "b"))) == "user: a\nassistant: [[b<|im_end|>]]"
    with pytest.raises(ValueError, match=r"'tiny'.*after an answer.*vicuna_v1"):
        template.render(turns("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("jinja", "problem"),
    [
        (
            "{{ messages[0].content * 2 }}{{ messages[1].content }}",
            "a turn of user exactly",
        ),
        ("{{ raise_exception('no images please') }}", "no images please"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ messages[1].content }}<|im_end|>{{ messages[0].content | reverse }}", "order of the"),
    ],
)
def test_unusable_templates_are_explained(make_tokenizer, jinja: str, problem: str):
    template = get_template("tokenizer", with_template(make_tokenizer("qwen2"), jinja))
    with pytest.raises(ValueError, match=rf"chat template of 'tiny'.*{problem}.*set template to"):
        template.render(turns(("q", IMAGE, IMAGE) if "reverse" in jinja else "q", "a"))


def test_what_a_template_needs_is_checked_first(make_tokenizer):
    llama = make_tokenizer("llama2_first")
    with pytest.raises(ValueError, match=r"'fancy'.*plain, vicuna_v1, chatml, tokenizer"):
        get_template("fancy", llama)
    with pytest.raises(ValueError, match=r"<\|im_start\|>.*'tiny'.*set template"):
        get_template("chatml", llama)
    llama.chat_template = None
    with pytest.raises(ValueError, match=r"'tiny' has no chat template.*vicuna_v1"):
        get_template("tokenizer", llama)
    llama.eos_token = None
    for name in ("plain", "vicuna_v1"):
        with pytest.raises(ValueError, match=rf"'{name}'.*eos_token"):
            get_template(name, llama)


# As in ibm-granite/granite-3.3-2b-instruct: the unknown token is the end token.
GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + "
    "'<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
# As in moonshotai/Kimi-K2-Instruct: eos_token is not the token that ends turns.
KIMI = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "{{ '<|im_user|>' + m.role + '<|im_middle|>' + m.content }}{% for c in m.tool_calls or [] %}"
    "<|tool_call_begin|>{{ c.function.name + ' ' + c.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_user|>assistant<|im_middle|>{% endif %}"
)


def byte_level_with(jinja: str, eos: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens are those of a template, and ``eos``."""
    return wrap(byte_level(), jinja, None, eos, sorted({eos, *re.findall(r"<\|\w+\|>", jinja)}))


def call(**arguments: str) -> list[Turn]:
    return [
        *turns("What?"),
        Turn("assistant", (), tool_calls=(ToolCall("find", arguments),)),
        Turn("tool", (Part("text", "Sun"),)),
        *turns("", "Sun.")[1:],
    ]


def test_the_end_token_may_be_the_unknown_token(make_tokenizer):
    tokenizer = byte_level_with(GRANITE, "<|end_of_text|>")
    tokenizer.unk_token = "<|end_of_text|>"
    template = get_template("tokenizer", tokenizer)
    assert written(template.render(turns("a", "b", "c", "d"))).count("<|end_of_text|>]]\n") == 2


def test_calls_are_supervised_up_to_the_end_of_their_turn():
    template = get_template("tokenizer", byte_level_with(KIMI, "[EOS]"))
    text = written(template.render(call(city="Rome"), [{"name": "find"}]))
    assert '[[<|tool_call_begin|>find {"city": "Rome"}<|tool_call_end|><|im_end|>]]' in text


@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_empty_turns_end_before_the_next(empty: str):
    template = get_template("tokenizer", byte_level_with(KIMI, "[EOS]"))
    text = written(template.render(turns("a", empty, empty, empty, "b", "c")))
    assert text.count(f"[[{empty}<|im_end|>]]") == 2


def test_a_greeting_is_supervised(make_tokenizer):
    template = get_template("tokenizer", make_tokenizer("qwen2"))
    greeting = turns("", "Hello", "Hi", "Yes?")[1:]
    assert written(template.render(greeting)).count("assistant\n[[Hello<|im_end|>]]\n") == 1


def test_answers_may_end_with_an_added_token(make_tokenizer):
    template = get_template("tokenizer", make_tokenizer("llama3"))
    answer = written(template.render(turns("a", "The tag <tool>", "b", "<tool>")))
    assert "[[The tag <tool><|eot_id|>]]" in answer
    assert answer.endswith("\n\n[[<tool><|eot_id|>]]")


@pytest.mark.parametrize("text", ["<|im_end|>", "\U000f0001\U000f0100"])
def test_special_tokens_in_tools_are_refused(text: str):
    template = get_template("tokenizer", byte_level_with(KIMI, "[EOS]"))
    for tools, arguments in ([{"name": "find", "description": text}], {}), ([], {text: "a"}):
        with pytest.raises(ValueError, match="the tools, or names in a call, contain"):
            template.render(call(**arguments), tools)


def test_longest_token_is_found():
    pattern = any_of(["<a", "<ab>", "<abc", "<" + "x" * 5000])
    assert pattern.findall("<ab <ab> <abc> <b") == ["<a", "<ab>", "<abc"]
    assert not any_of([]).search("")
