"""Asks a model behind an OpenAI-compatible address, with many requests at a time.

Used for judges (:mod:`coat_eval.judge`) and for evaluated models (:mod:`coat_eval.served_model`).
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from coat_data.sample import DataError

_ATTEMPTS = 12
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""Pause before the second attempt, doubled before each further one: three and a half minutes in
all, in which a server can start again."""
_TIMEOUT_S, _SLOWEST = 600.0, 5.0
"""A reply may take ten minutes, and one more second for each five tokens."""
_REFUSED = (400, 413, 422)
"""Status of a request that the server does not accept, such as a prompt that is too long."""
_REMEDY = "check the server, its address (usually ending in /v1), the model's name and the key"
_ACCEPTED = "start the server with the context length and the media that the question needs"

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class RefusedError(DataError):
    """The server does not accept this request; it may accept others."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The text of an answer, empty if the model gave none."""

    text: str
    is_cut: bool = False
    """Whether the answer has reached the maximum number of tokens."""


class ChatClient:
    """A model behind an address; ``key`` is sent as bearer token."""

    def __init__(self, address: str, model: str, key: str = "") -> None:
        self.name, self.address, self._key = model, address.rstrip("/"), key
        self._opener = build_opener(_NoRedirect())
        self._has_replied = False
        self._stopped = threading.Event()

    def ask_all(
        self, jobs: Sequence[_Job], ask: Callable[[_Job], _Result], num_requests: int
    ) -> Iterator[tuple[_Job, _Result]]:
        """Yield each job with ``ask(job)`` as they arrive, ``num_requests`` at a time.

        After an error no further job is begun; it is raised when those in flight have ended.
        """
        stopped = self._stopped = threading.Event()
        remaining = iter(jobs)
        arrived: SimpleQueue[tuple[_Job, _Result] | BaseException | None] = SimpleQueue()

        def work() -> None:
            for job in remaining:  # a list's iterator gives each job to one thread
                if stopped.is_set():
                    break
                try:
                    arrived.put((job, ask(job)))
                except BaseException as error:
                    stopped.set()
                    arrived.put(error)
            arrived.put(None)

        # Daemons: a command that was stopped does not wait for answers that it no longer reads.
        workers = [
            threading.Thread(target=work, daemon=True) for _ in range(min(num_requests, len(jobs)))
        ]
        for worker in workers:
            worker.start()
        failures: list[BaseException] = []
        try:
            for _ in workers:
                while (found := arrived.get()) is not None:
                    if isinstance(found, BaseException):
                        failures.append(found)
                    else:
                        yield found
        finally:
            stopped.set()
        if failures:
            raise failures[0]

    def ask(self, content: Any, max_tokens: int = 0, **settings: Any) -> Reply:
        """Ask once, and again after a failure that may pass.

        ``content`` is that of one user's message; ``max_tokens`` (0: the server's maximum) and
        ``settings`` are further entries of the request. RefusedError: the server does not accept
        the request. DataError: there is no answer.
        """
        settings = {"temperature": 0, **settings} | (
            {"max_tokens": max_tokens} if max_tokens else {}
        )
        messages = [{"role": "user", "content": content}]
        body = json.dumps({"model": self.name, "messages": messages, **settings}).encode()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url = f"{self.address}/chat/completions"
        for attempt in count(1):
            try:
                timeout_s = _TIMEOUT_S + max_tokens / _SLOWEST
                with self._opener.open(Request(url, body, headers), timeout=timeout_s) as reply:
                    data = reply.read()
                self._has_replied = True
                return self._read(data)
            except (HTTPError, URLError, OSError, HTTPException) as error:
                code = error.code if isinstance(error, HTTPError) else None
                self._has_replied |= code is not None
                # An address that has never replied is more likely wrong than starting again.
                passes = self._has_replied if code is None else code >= 500 or code in (408, 429)
                if not passes or attempt == _ATTEMPTS or self._stopped.is_set():
                    problem = f"{self.name} gave no answer, attempt {attempt}: {_explain(error)}"
                    if code in _REFUSED:
                        raise RefusedError(url, problem, _ACCEPTED) from error
                    raise DataError(url, problem, _REMEDY) from error
            self._stopped.wait(min(_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def _read(self, data: bytes) -> Reply:
        try:
            choice = json.loads(data)["choices"][0]
            text = choice["message"].get("content")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"the reply is not a chat completion: {data[:80]!r}"
            raise DataError(self.address, problem, _REMEDY) from error
        is_cut = choice.get("finish_reason") == "length"
        return Reply(text if isinstance(text, str) else "", is_cut)


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which would send the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing: the redirect becomes an HTTPError."""


def connect(option: str, address: str, model: str | None, key: str | None) -> ChatClient:
    """Make the client of an option, such as ``--judge``, of the model's name and of the key's.

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
            f"{option} {address} has a password or a query, which every report would show; put the "
            f"key into an environment variable and name that: {option}-key VARIABLE"
        )
    if not model:
        name = "--model" if option == "--server" else f"{option}-model"
        raise ValueError(f"{option} {address} needs the name of the model there: {name} NAME")
    if key is not None and not os.environ.get(key):
        raise ValueError(f"{option}-key {key}: the environment variable {key} is not set")
    return ChatClient(address, model, os.environ[key] if key else "")


def _explain(error: Exception) -> str:
    """Return the message of a failure, with what the server says about it."""
    if not isinstance(error, HTTPError):
        return str(getattr(error, "reason", error))
    with suppress(OSError, HTTPException, ValueError, AttributeError):
        found = json.loads(error.read())
        found = found.get("error", found)
        said = found if isinstance(found, str) else found.get("message") or found.get("detail")
        return f"{error}: {str(said)[:300]}" if said else str(error)
    return str(error)
