"""Signals during training: finish the step, save, leave with a status that says why."""

import os
import signal
from types import FrameType

EXIT_REQUEUE = 75
"""EX_TEMPFAIL: a checkpoint was saved after SIGTERM or SIGUSR1; start the same command again."""
EXIT_INTERRUPTED = 130
"""A checkpoint was saved after Ctrl-C."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupts:
    """Remembers SIGTERM, SIGUSR1 and the first Ctrl-C while its context is open.

    A second Ctrl-C interrupts at once. Loader processes that inherit the handlers ignore them: the
    main process ends them.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._process = os.getpid()
        self._previous: dict[int, signal.Handlers | object] = {}

    @property
    def received(self) -> bool:
        """Whether to stop after this step."""
        return self._received is not None

    @property
    def exit_status(self) -> int:
        """Status for the process to leave with."""
        return EXIT_INTERRUPTED if self._received == signal.SIGINT else EXIT_REQUEUE

    def __enter__(self) -> "Interrupts":
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        if self._received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
