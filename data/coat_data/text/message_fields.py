r"""Tools, calls and reasoning in chat messages: the fields of OpenAI, OpenRouter and LlamaFactory.

    {"role": "assistant", "content": null, "reasoning_content": "...", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]}
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": "..."}

Tools, calls and arguments may be JSON text. In objects, keys that are null count as missing, as
Arrow writes them. Errors are :class:`DataError`, with the field as the place.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from coat_data.sample import DataError, ToolCall

_REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
_CALLS = ("tool_calls", "function_call")
_WORD = re.compile(r"[\w.:/-]*")


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a row, each as ``{"type": "function", "function": {...}}``."""
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool, _ in _functions(value, "tools")
    )


def read_fields(message: Mapping[str, Any], role: str) -> tuple[dict[str, Any], set[str]]:
    """Return fields of the message's :class:`~coat_data.sample.Turn`, and the names of its own.

    The first of several reasoning fields that has a text is used.
    """
    used = {name for name, value in message.items() if value}
    if role == "tool":
        used &= {"tool_call_id", "name"}
        return {name: _word(message[name], name) for name in used}, used
    used &= {*_REASONING, *_CALLS} if role == "assistant" else set()
    found: dict[str, Any] = {}
    for field, names, read in (("reasoning", _REASONING, _thought), ("tool_calls", _CALLS, _calls)):
        values = [value for name in names if name in used and (value := read(message[name], name))]
        found |= {field: values[0]} if values else {}
    return found, used


def _calls(value: Any, field: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for call, function in _functions(value, field):
        name = function["name"]
        arguments = function.get("arguments", function.get("parameters")) or {}
        arguments = _parse(arguments, f"{field}: the arguments of {name}")
        if not isinstance(arguments, Mapping):
            problem = f"the arguments of {name} are {arguments!r}, not an object"
            raise DataError(field, problem, 'write them by name, such as {"city": "Rome"}')
        calls.append(ToolCall(name, arguments, _word(call.get("id", ""), f"{field}: id")))
    return tuple(calls)


def _thought(value: Any, field: str) -> str:
    """Return a text, or the texts of OpenRouter's list; encrypted reasoning has none."""
    texts = [
        part.get("text") or part.get("summary") or "" if isinstance(part, Mapping) else part
        for part in (value if isinstance(value, list | tuple) else [value])
    ]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(field, f"is {value!r}", "make it a text, or a list of parts with text")
    return "".join(texts)


def _functions(value: Any, field: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the tools or calls of a field, each with its function, which has a name."""
    value = _parse(value, field)
    objects = value if isinstance(value, list | tuple) else [value]
    pairs = [(one, one.get("function", one)) for one in objects if isinstance(one, Mapping)]
    names = [function.get("name") for _, function in pairs if isinstance(function, Mapping)]
    if len(names) < len(objects) or not all(name and isinstance(name, str) for name in names):
        remedy = "make it a list of objects with a name, or the JSON of one"
        raise DataError(field, f"is {value!r}, not a list of functions", remedy)
    return pairs


def _parse(value: Any, field: str) -> Any:
    """Return the value of a JSON text, or an object without its nulls."""
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        problem = f"{value[:80]!r} is not JSON: {error}"
        raise DataError(field, problem, "write it as JSON") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _word(value: Any, field: str) -> str:
    """Return an id or a name, which templates write as a part of their own text."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        problem = f"is {value!r}"
        raise DataError(field, problem, "write it with letters, digits and any of _ . : / -")
    return value
