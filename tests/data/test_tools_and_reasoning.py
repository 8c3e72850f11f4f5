"""Tools, calls, results and reasoning of chat rows are trained as transformers writes them."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from encoders import encoder_of, jsonl
from test_conversations import TOOLS, make_tokenizer

from coat_data.load.check_labels import check_labels
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.sample import DataError, Sample
from coat_data.text.from_messages import messages_to_sample
from coat_data.tools.export import export
from coat_data.tools.ingest import ingest
from coat_data.tools.lint import lint
from coat_data.tools.preview import preview

CITIES = ("Rome", "Bonn")
ARGUMENTS = [{"city": city, "days": 3} for city in CITIES]
CALLS = [{"name": "get_weather", "arguments": arguments} for arguments in ARGUMENTS]
ANSWER = "Sun in Rome, rain in Bonn."
RESULTS = ("sun", "rain")
NO_THOUGHT = "<think>\n\n</think>\n\n"
"""What Qwen3's template writes before the last answer."""


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def openai(calls: Any, **fields: Any) -> dict[str, Any]:
    results = [said("tool", text, **fields) for text in RESULTS]
    call = {"role": "assistant", "tool_calls": calls}
    return {"messages": [said("user", "Weather?"), call, *results, said("assistant", ANSWER)]}


def chat(calls: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": call} for call in calls]


def sharegpt(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": text} for name, text in turns]}


AS_TEXT = [call | {"arguments": json.dumps(call["arguments"])} for call in CALLS]
RESPONSES = [("tool", f"<tool_response>\n{text}\n</tool_response>") for text in RESULTS]
LAYOUTS = {
    "OpenAI": openai(chat(AS_TEXT)) | {"tools": list(TOOLS)},
    "OpenAI with objects": openai(chat(CALLS)) | {"tools": json.dumps(TOOLS)},
    "OpenAI as text": openai(json.dumps(chat(CALLS))) | {"tools": json.dumps(TOOLS)},
    "LlamaFactory": sharegpt(
        ("human", "Weather?"),
        ("function_call", json.dumps(CALLS)),
        *(("observation", text) for text in RESULTS),
        ("gpt", ANSWER),
    )
    | {"tools": json.dumps([TOOLS[0]["function"]])},
    "one after the other": sharegpt(
        ("human", "Weather?"),
        *(("function_call", json.dumps(call)) for call in CALLS),
        *RESPONSES,
        ("gpt", ANSWER),
    )
    | {"tools": json.dumps(TOOLS)},
    "ms-swift": {
        "messages": [
            said("user", "Weather?"),
            *(said("tool_call", json.dumps(call)) for call in CALLS),
            *(said("tool_response", text) for text in RESULTS),
            said("assistant", ANSWER),
        ],
        "tools": json.dumps(TOOLS),
    },
}


def read(folder: Path, row: Any, **options: Any) -> Sample:
    return SampleDataset(jsonl(folder / "rows.jsonl", row), **options)[0]


def qwen(name: str = "qwen3") -> tuple[Any, Encoder]:
    tokenizer = make_tokenizer(name)
    options: dict[str, Any] = {"image_token_id": None, "tokens_per_image": 0, "max_length": 9999}
    return tokenizer, encoder_of(tokenizer, "tokenizer", **options)


def trained(encoder: Encoder, sample: Sample) -> str:
    encoded = encoder(sample)
    ids, labels = encoded.input_ids.tolist(), encoded.labels.tolist()
    check_labels(sample, ids, labels, encoder)
    return encoder.tokenizer.decode([label for label in labels if label != IGNORE_INDEX])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tool_conversations(tmp_path: Path, layout: str) -> None:
    """Tools were dropped, OpenAI's calls refused, results trained behind turns of the user."""
    tokenizer, encoder = qwen()
    sample = read(tmp_path, LAYOUTS[layout])
    assert [turn.role for turn in sample.turns][1:] == ["assistant", "tool", "tool", "assistant"]
    messages = LAYOUTS["OpenAI with objects"]["messages"]
    expected = tokenizer.apply_chat_template(messages, tools=list(TOOLS), return_dict=True)
    assert encoder(sample).input_ids.tolist() == expected["input_ids"]
    calls = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS)
    assert trained(encoder, sample) == f"{calls}<|im_end|>{NO_THOUGHT}{ANSWER}<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tools=list(TOOLS), add_generation_prompt=True, return_dict=True
    )
    assert encoder.prompt(sample).input_ids.tolist() == prompt["input_ids"]
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*'chatml' has no place for tools, tool c"):
        encoder_of(tokenizer, "chatml")(sample)
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*not write the tool.*take a model"):
        qwen("phi3")[1](sample)


def test_calls_in_texts(tmp_path: Path) -> None:
    """Hermes' sets have calls in answers, and results in the tags that templates write."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    row = sharegpt(("human", "q"), ("gpt", call), RESPONSES[0], ("gpt", f"{call}\n"))
    for name in ("qwen2_5", "qwen3"):
        tokenizer, encoder = qwen(name)
        sample = read(tmp_path, row)
        messages = [said("user", "q"), said("assistant", call), said("tool", "sun")]
        expected = tokenizer.apply_chat_template(
            [*messages, said("assistant", f"{call}\n")], return_dict=True
        )
        assert encoder(sample).input_ids.tolist() == expected["input_ids"]
        thought = NO_THOUGHT if name == "qwen3" else ""
        assert trained(encoder, sample) == f"{call}<|im_end|>{thought}{call}\n<|im_end|>"


def test_arrow_ids_and_nulls(tmp_path: Path) -> None:
    """Arrow gives each call the arguments of all; JSON text keeps a null."""
    calls = chat([CALLS[0], {"name": "now", "arguments": {"zone": "UTC"}}])
    calls = [call | {"id": str(number)} for number, call in enumerate(calls)]
    row = openai(calls, tool_call_id="1", name="now") | {"tools": list(TOOLS)}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    sample = SampleDataset(tmp_path / "a.parquet")[0]
    assert [dict(call.arguments) for call in sample.turns[1].tool_calls] == [
        ARGUMENTS[0],
        {"zone": "UTC"},
    ]
    assert [call.id for call in sample.turns[1].tool_calls] == ["0", "1"]
    assert (sample.turns[2].tool_call_id, sample.turns[2].name) == ("1", "now")
    assert sample.tools == TOOLS
    calls = chat([{"name": "get_weather", "arguments": '{"city": null}'}])
    assert read(tmp_path, openai(calls)).turns[1].tool_calls[0].arguments == {"city": None}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": ["f"]}, "tools is .* list of objects.* ignore_fields: .tools"),
        ({"tools": "no"}, "tools 'no' is not JSON"),
        ({"tools": [{"type": "function"}]}, "tools is .* not a list of functions"),
        (openai([{"id": "1"}]), r"messages\[1\]: tool_calls: is .* not a list of functions"),
        (openai([{"name": "f", "arguments": "3"}]), "arguments of f are 3, not an object"),
        (openai([{"name": "f", "id": "<s>"}]), "id: is '<s>'"),
        (sharegpt(("human", "q"), ("function_call", "f(x)")), r"conversations\[1\].*not JSON"),
        ({"messages": [said("user", "q", thinking="no"), said("assistant", "a")]}, "thinking look"),
    ],
)
def test_wrong_tools_are_refused_by_row(tmp_path: Path, fields: Any, words: str) -> None:
    messages = [said("user", "q"), said("assistant", "a")]
    row = fields if {"messages", "conversations"} & set(fields) else {"messages": messages} | fields
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*{words}") as caught:
        read(tmp_path, row)
    assert "into the text" not in caught.value.remedy  # which leads to other tokens


def test_tools_survive_every_tool(tmp_path: Path) -> None:
    """Neither stored nor exported rows had tools and calls."""
    row = openai([call | {"id": "c1"} for call in chat(CALLS)], tool_call_id="c1")
    row["messages"][1]["reasoning_details"] = [{"type": "reasoning.text", "text": "Two calls."}]
    path = jsonl(tmp_path / "rows.jsonl", row | {"tools": list(TOOLS)})
    sample = SampleDataset(path)[0]
    ingest(path, tmp_path / "ingested", workers=1)
    copies = [tmp_path / "ingested"]
    for to in ("messages", "llava"):
        copies.append(export(path, tmp_path / to, to).path)
    for copy in copies:
        found = SampleDataset(copy)[0]
        assert (found.turns, found.tools) == (sample.turns, sample.tools)
    preview(path, tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert all(word in page for word in ("get_weather", "Rome", "Two calls.", "The weather of"))
    line = lint(path, print, workers=1).fields["rows"].lines("rows")[0]
    assert line == (
        "rows: fields used: messages, messages[].reasoning_details, messages[].tool_call_id, "
        "messages[].tool_calls, tools; ignored: none"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "I think.", "reasoning_details": []},
        {"reasoning": "", "reasoning_content": "I think."},
        {"thinking": "I think."},
        {"reasoning": None, "reasoning_details": [{"type": "reasoning.text", "text": "I think."}]},
    ],
)
def test_reasoning(tmp_path: Path, fields: dict[str, Any]) -> None:
    """It was refused, or dropped without a word."""
    row = {"messages": [said("user", "q"), said("assistant", "a", **fields)]}
    expected = "<think>\nI think.\n</think>\n\na<|im_end|>"
    assert trained(qwen()[1], read(tmp_path, row)) == expected
    row = sharegpt(("human", "q"), ("gpt", "a"))
    row["conversations"][1] |= fields
    assert trained(qwen()[1], read(tmp_path, row)) == expected
    with pytest.raises(DataError, match=r"leaves out .* its reasoning; take a model"):
        qwen("qwen2_5")[1](read(tmp_path, row))


def test_a_refusal_is_the_answer_and_other_fields_are_named(tmp_path: Path) -> None:
    """The row was refused for its content; fields of messages were listed nowhere."""
    refusal = said("assistant", None, refusal="I will not.", annotations=[{"a": 1}], audio=None)
    row = {"messages": [said("user", "q", name="ann"), refusal]}
    assert read(tmp_path, row).turns[1].text == "I will not."
    parts = [{"type": "refusal", "refusal": "I will not."}]
    assert (
        read(tmp_path, {"messages": [said("user", "q"), said("assistant", parts)]}).turns[1:]
        == (read(tmp_path, row).turns[1:])
    )
    fields = lint(tmp_path / "rows.jsonl", print, workers=1).fields["rows"]
    assert set(fields.ignored) == {"messages[].annotations", "messages[].name"}


@pytest.mark.parametrize("name", ["gemma2", "llama3_1", "phi3", "qwen3", "qwen3_instruct_2507"])
def test_an_answer_without_a_question_is_supervised(tmp_path: Path, name: str) -> None:
    row = sharegpt(("gpt", "Hello"), ("human", "q"), ("gpt", "a"))
    assert re.fullmatch(r"Hello<[^<>]*>\s*(<think>\s*</think>\s*)?a<[^<>]*>",
                        trained(qwen(name)[1], read(tmp_path, row)))  # fmt: skip


def test_an_answer_before_the_first_question(tmp_path: Path) -> None:
    """It was dropped without a word."""
    row = sharegpt(("gpt", " Hello"), ("human", "q"), ("gpt", "a"))
    sample = read(tmp_path, row)
    assert sample.reading.notes == ("answer_first",)
    tokenizer, encoder = qwen("qwen2_5")
    assert trained(encoder, sample) == " Hello<|im_end|>a<|im_end|>"
    expected = tokenizer.apply_chat_template(
        [said("assistant", " Hello"), said("user", "q"), said("assistant", "a")], return_dict=True
    )
    assert encoder(sample).input_ids.tolist() == expected["input_ids"]
    assert trained(encoder_of(tokenizer, "chatml"), sample) == " Hello<|im_end|>a<|im_end|>"
    # As LLaVA, whose template this is.
    vicuna = encoder_of(tokenizer, "vicuna_v1")
    assert trained(vicuna, sample) == "a<|im_end|>"
    assert "Hello" not in vicuna.tokenizer.decode(vicuna(sample).input_ids.tolist())
    with pytest.raises(DataError, match="rejects a conversation"):
        qwen("gemma")[1](sample)


NULLS = dict.fromkeys(("messages", "conversations", "prompt", "completion", "text", "QA", "query"))
EMPTY = dict.fromkeys(("image", "video", "tools", "system", "rejected_response", "objects"), "")


@pytest.mark.parametrize(
    ("row", "reader"),
    [
        ({"messages": [said("user", "q"), said("assistant", "a")]}, "messages"),
        ({"conversations": [said("user", "q"), said("assistant", "a")]}, "messages"),
        (sharegpt(("human", "q"), ("gpt", "a")), "llava"),
        ({"prompt": "q", "completion": "a"}, "messages"),
        ({"instruction": "q", "output": "a", "query": None, "response": None}, "query"),
        ({"question": "q", "answer": "a", "chosen": None, "rejected": None}, "question"),
        ({"QA": [{"q": "q", "a": "a"}], "conversation": None}, "query"),
    ],
)
def test_null_and_empty_fields_count_as_missing(tmp_path: Path, row: Any, reader: str) -> None:
    """The reader was chosen by a name whose value is null; "" was a path, JSON or an answer."""
    dataset = SampleDataset(jsonl(tmp_path / "rows.jsonl", NULLS | EMPTY | row))
    assert dataset.format == reader
    assert [turn.text for turn in dataset[0].turns] == ["q", "a"]


def test_messages_of_arrow_with_the_names_of_both_forms(tmp_path: Path) -> None:
    question = said("user", "q", tool_calls=None, value=None) | {"from": None}
    answer: dict[str, Any] = {"from": "gpt", "value": "a", "weight": "", "tool_calls": ""}
    sample = read(tmp_path, {"messages": [question, answer | {"role": None, "content": None}]})
    assert [turn.text for turn in sample.turns] == ["q", "a"]


def test_the_guides_row(tmp_path: Path) -> None:
    """The guide says what is supervised."""
    guide = (
        (Path(__file__).parents[2] / "docs/guides/conversations.md")
        .read_text(encoding="utf-8")
        .partition("## Reasoning and tools")[2]
    )
    row = json.loads(guide.partition("```json")[2].partition("```")[0])
    sample = read(tmp_path, row)
    assert trained(qwen()[1], sample) == (
        "<think>\nI have to look.\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
        f"{NO_THOUGHT}It has 22 degrees.<|im_end|>"
    )


def test_messages_in_memory() -> None:
    """They could not have calls."""
    tokenizer, encoder = qwen()
    messages = LAYOUTS["OpenAI"]["messages"]
    sample = messages_to_sample(messages, tools=TOOLS)
    found = encoder.conversation(sample, add_generation_prompt=False).input_ids.tolist()
    messages = LAYOUTS["OpenAI with objects"]["messages"]
    expected = tokenizer.apply_chat_template(messages, tools=list(TOOLS), return_dict=True)
    assert found == expected["input_ids"]
