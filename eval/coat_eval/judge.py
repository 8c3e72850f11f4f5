"""Asks a judge model about answers, for benchmarks whose official scorer does so.

A judge is a model behind an OpenAI-compatible address. Its answers are cached as JSON lines
``{"judge", "prompt", "answer"}``; with only the cache they are replayed.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from coat_data.sample import DataError
from coat_eval.files import format_json, read_json_lines

_TIMEOUT_S = 120.0
_ATTEMPTS = 4
_PAUSE_S = 1.0  # before the second attempt; doubled before each further one
_REQUESTS = 8  # at a time


class HttpJudge:
    """A model behind an OpenAI-compatible address; ``key`` is sent as bearer token."""

    def __init__(self, address: str, model: str, key: str = "") -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"--judge is {address!r}; give http://HOST:PORT/v1 or https://HOST/v1 (for a model "
                "in a folder start a server, such as transformers serve or vLLM)"
            )
        self.name, self.address, self._key = model, address.rstrip("/"), key
        self._opener = build_opener(_NoRedirect())

    def answer(self, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield (prompt, answer) as they arrive; DataError if one cannot be had."""
        with ThreadPoolExecutor(_REQUESTS) as pool:
            waiting = {pool.submit(self._ask, prompt): prompt for prompt in prompts}
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, prompt: str) -> str:
        """Ask once, and again after a failure that may pass."""
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url = f"{self.address}/chat/completions"
        for attempt in range(1, _ATTEMPTS + 1):
            request = Request(url, json.dumps(body).encode(), headers)
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                    return self._read(reply.read())
            except (HTTPError, URLError, OSError, HTTPException) as error:
                code = error.code if isinstance(error, HTTPError) else 500
                passing = code >= 500 or code in (408, 429)
                if not passing or attempt == _ATTEMPTS:
                    problem = f"the judge {self.name} gave no answer, attempt {attempt}: {error}"
                    remedy = "check address, model and key; answers so far are in --judge-cache"
                    raise DataError(url, problem, remedy) from error
            time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _read(self, data: bytes) -> str:
        """Return the text of a reply; empty if the model declined to give one."""
        try:
            content = json.loads(data)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            problem = f"the reply is not a chat completion: {data[:80]!r}"
            remedy = "give the address of an OpenAI-compatible server, usually ending in /v1"
            raise DataError(self.address, problem, remedy) from error
        return content if isinstance(content, str) else ""


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which would send the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing: the redirect becomes an HTTPError."""


class Judge:
    """A judge model, a cache of its answers, or both."""

    def __init__(self, model: HttpJudge | None, cache: Path | None = None) -> None:
        if model is None and cache is None:
            raise ValueError("a judge is a model or a cache of its answers; give one")
        known: dict[str, dict[str, str]] = {}
        if cache is not None and (model is None or cache.exists()):
            known = _read_cache(cache)
        if model is None and len(known) != 1:
            raise DataError(
                str(cache),
                f"has the answers of {len(known)} judges: {', '.join(sorted(known)) or 'none'}",
                "keep those of one, or name the judge with --judge",
            )
        self.model, self.cache = model, cache
        self.name = model.name if model is not None else next(iter(known))
        self._known = known.get(self.name, {})

    def answer(self, prompts: Sequence[str]) -> dict[str, str]:
        """Return the answers by prompt, of which a cache may lack some; DataError: no reply."""
        found = {prompt: self._known[prompt] for prompt in prompts if prompt in self._known}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in found]
        if self.model is None or not missing:
            return found
        if self.cache is not None:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
        for prompt, answer in self.model.answer(missing):
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
                raise ValueError(f"{name} has no effect without an address as --judge; drop it")
        return Judge(None, cache)
    server = HttpJudge(address, model or "", os.environ.get(key, "") if key else "")
    if not model:
        raise ValueError(f"--judge {address} needs the name of the model there: --judge-model NAME")
    if key is not None and not os.environ.get(key):
        raise ValueError(f"--judge-key {key}: the environment variable {key} is not set")
    return Judge(server, cache)


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
