"""Asks a judge model about answers, for benchmarks whose official scorer does so.

A judge is a model behind an OpenAI-compatible server. Its answers are cached as JSON lines
``{"judge", "prompt", "answer"}``; with only the cache they are replayed.
"""

from collections.abc import Sequence
from pathlib import Path

from coat_data.sample import DataError
from coat_eval.chat_client import ChatClient, connect
from coat_eval.files import format_json, read_json_lines

_REQUESTS = 8  # at a time


class Judge:
    """A judge model, a cache of its answers, or both."""

    def __init__(self, model: ChatClient | None, cache: Path | None = None) -> None:
        if model is None and cache is None:
            raise ValueError("a judge is a model or a cache of its answers; give one")
        known: dict[str, dict[str, str]] = {}
        if cache is not None and (model is None or cache.exists()):
            known = _read_cache(cache)
        if model is None and len(known) != 1:
            raise DataError(
                str(cache),
                f"has the answers of {len(known)} judges: {', '.join(sorted(known)) or 'none'}",
                "keep the answers of one, or name the judge with --judge",
            )
        self.model, self.cache = model, cache
        self.name = model.name if model is not None else next(iter(known))
        self._known = known.get(self.name, {})

    def answer(self, prompts: Sequence[str]) -> dict[str, str]:
        """Return the answers by prompt; a cache may lack some. DataError: no reply."""
        found = {prompt: self._known[prompt] for prompt in prompts if prompt in self._known}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in found]
        if self.model is None or not missing:
            return found
        if self.cache is not None:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
        ask = self.model.ask
        for prompt, answer in self.model.ask_all(
            missing, lambda one: (one, ask(one)[0]), _REQUESTS
        ):
            found[prompt] = self._known[prompt] = answer
            if self.cache is not None:
                row = {"judge": self.name, "prompt": prompt, "answer": answer}
                with self.cache.open("a", encoding="utf-8") as file:
                    file.write(format_json(row) + "\n")
        return found


def make_judge(
    address: str | None, model: str | None, key: str | None, cache: Path | None
) -> Judge:
    """Make the judge of the options ``--judge*``; ValueError: one is missing or has no effect."""
    if address is None:
        for name, value in (("--judge-model", model), ("--judge-key", key)):
            if value is not None:
                raise ValueError(f"{name} has no effect without a URL as --judge; remove it")
        return Judge(None, cache)
    client = connect("--judge", address, model or "", key)
    if not model:
        raise ValueError(f"--judge {address} needs the name of the model there: --judge-model NAME")
    return Judge(client, cache)


def _read_cache(path: Path) -> dict[str, dict[str, str]]:
    """Return the answers by judge and prompt; DataError with file and line."""
    found: dict[str, dict[str, str]] = {}
    for number, row in read_json_lines(path, "delete the line (its answer is asked for again)"):
        texts = all(isinstance(value, str) for value in row.values())
        if set(row) != {"judge", "prompt", "answer"} or not texts:
            problem = f"is not an answer of a judge; it has {sorted(row)}"
            remedy = "give a file that --judge-cache wrote: judge, prompt, answer"
            raise DataError(f"{path}:{number}", problem, remedy)
        found.setdefault(row["judge"], {})[row["prompt"]] = row["answer"]
    return found
