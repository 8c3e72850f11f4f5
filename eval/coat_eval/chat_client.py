"""Asks a model behind an OpenAI-compatible server: a judge, or the evaluated model."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from coat_data.sample import DataError

_ATTEMPTS = 12
_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
"""Pause before the second attempt, doubled before each further one: three and a half minutes in
all, in which a server can start again."""
_TIMEOUT_S, _SLOWEST = 600.0, 5.0
"""A reply may take ten minutes, and one more second for each five tokens."""
_REMEDY = "check the server, its URL (usually ending in /v1), the model's name and the key"
_ACCEPTED = "start the server with the context length and the media that the question needs"

_Result = TypeVar("_Result")


class ChatClient:
    """A model at a URL; ``key`` is sent as bearer token."""

    def __init__(self, address: str, model: str, key: str = "") -> None:
        self.name, self.address = model, address.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._opener = build_opener(_NoRedirect())
        self._has_replied = False
        self._stopped = threading.Event()

    def ask_all(
        self, jobs: Sequence[Any], ask: Callable[[Any], _Result], num_requests: int
    ) -> Iterator[_Result]:
        """Yield ``ask(job)`` for all jobs as they arrive, ``num_requests`` at a time.

        After an error no further job is begun; it is raised when those in flight have ended.
        """
        stopped = self._stopped = threading.Event()
        remaining, arrived = iter(jobs), SimpleQueue[_Result | Exception | None]()

        def work() -> None:
            end = None
            try:
                for job in remaining:  # a list's iterator gives each job to one thread
                    if stopped.is_set():
                        break
                    arrived.put(ask(job))
            except Exception as error:
                stopped.set()
                end = error
            arrived.put(end)

        failure, working = None, min(num_requests, len(jobs))
        for _ in range(working):
            # A command that was stopped does not wait for a daemon's answer.
            threading.Thread(target=work, daemon=True).start()
        try:
            while working:
                result = arrived.get()
                if result is None or isinstance(result, Exception):
                    failure, working = failure or result, working - 1
                else:
                    yield result
        finally:
            stopped.set()
        if failure:
            raise failure

    def ask(self, content: Any, **settings: Any) -> tuple[str, bool]:
        """Return the stripped answer, empty if the model gave none, and whether it is cut.

        ``content`` of one user message, ``settings`` are further entries of the request.
        Transient failures are retried. DataError: the server does not accept this request.
        ValueError: it gives no answer.
        """
        messages = [{"role": "user", "content": content}]
        body = {"model": self.name, "messages": messages, "temperature": 0, **settings}
        url, data = f"{self.address}/chat/completions", json.dumps(body).encode()
        timeout_s = _TIMEOUT_S + settings.get("max_tokens", 0) / _SLOWEST
        for attempt in count(1):
            try:
                request = Request(url, data, self._headers)
                with self._opener.open(request, timeout=timeout_s) as reply:
                    self._has_replied = True
                    return _read(url, reply.read())
            except (OSError, HTTPException) as error:
                code = error.code if isinstance(error, HTTPError) else None
                self._has_replied |= code is not None
                # A URL that has never replied is more likely wrong than starting again.
                passes = self._has_replied if code is None else code >= 500 or code in (408, 429)
                if not passes or attempt == _ATTEMPTS or self._stopped.is_set():
                    problem = f"{self.name} gave no answer, attempt {attempt}: {_explain(error)}"
                    if code in (400, 413, 422):
                        raise DataError(url, problem, _ACCEPTED) from error
                    raise ValueError(f"{url}: {problem} -> {_REMEDY}") from error
            self._stopped.wait(min(_PAUSE_S * 2 ** (attempt - 1), _MAX_PAUSE_S))
        raise AssertionError("unreachable")


class _NoRedirect(HTTPRedirectHandler):
    """Rejects redirects, which would send the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing: the redirect becomes an HTTPError."""


def connect(option: str, address: str, model: str, key: str | None) -> ChatClient:
    """Make the client of the URL in an option, such as ``--judge``.

    ``key`` is the environment variable of the option's ``-key``. ValueError: one cannot be used.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"{option} is {address!r}; give http://HOST:PORT/v1 or https://HOST/v1 (for a model in "
            "a folder start a server, such as transformers serve or vLLM)"
        )
    if "@" in parts.netloc or parts.query:
        raise ValueError(
            f"{option} {address} has a password or a query, which reports would show; put the key "
            f"into an environment variable and name that: {option}-key VARIABLE"
        )
    if key is not None and not os.environ.get(key):
        raise ValueError(f"{option}-key {key}: the environment variable {key} is not set")
    return ChatClient(address, model, os.environ[key] if key else "")


def _read(url: str, data: bytes) -> tuple[str, bool]:
    try:
        choice = json.loads(data)["choices"][0]
        text = (choice["message"].get("content") or "").strip()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"the reply is not a chat completion: {data[:80]!r}"
        raise ValueError(f"{url}: {problem} -> {_REMEDY}") from error
    return text, choice.get("finish_reason") == "length"


def _explain(error: Exception) -> str:
    """Return the message of a failure, with what the server says about it."""
    if not isinstance(error, HTTPError):
        return str(getattr(error, "reason", error))
    with suppress(OSError, HTTPException, ValueError, AttributeError):
        found = json.loads(error.read())
        found = found.get("error", found)
        reason = found if isinstance(found, str) else found.get("message") or found.get("detail")
        return f"{error}: {str(reason)[:300]}"
    return str(error)
