"""``coat-vlm generate`` answers a prompt; ``coat-vlm chat`` is a conversation in the terminal."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_cli.command import Commands, add_loading, at_least, command, complain, say

if TYPE_CHECKING:
    from coat_data.sample import Media, Sample, Turn

_MEDIA = {"/image": "image", "/video": "video"}
_HELP = """\
/image FILE   add an image to the next message
/video FILE   add a video, or a folder of frames, to the next message
/clear        start a new conversation
/save FILE    write the conversation as a row that coat-vlm train reads
/quit         end; so does Ctrl-D"""


def add(commands: Commands) -> None:
    """Declare ``generate`` and ``chat``."""
    parser = command(
        commands,
        "generate",
        _generate,
        "ask a model about images and videos",
        """\
  coat-vlm generate --model runs/my_vlm --image cat.jpg --prompt "Is there a cat?"
  coat-vlm generate --model runs/my_vlm/sft/model --image cat.jpg images/1.jpg \\
      --prompt "What differs?"
  coat-vlm generate --model runs/my_vlm/sft/model --video clip.mp4 --prompt "What happens?" \\
      --max-new-tokens 64
""",
    )
    _add_model(parser, "of the prompt", 128)
    parser.add_argument("--prompt", required=True, help="the question")
    parser = command(
        commands,
        "chat",
        _chat,
        "talk with a model about images and videos in the terminal",
        """\
  coat-vlm chat --model runs/my_vlm --image cat.jpg
  coat-vlm chat --model runs/my_vlm/sft/model --video clip.mp4 --max-new-tokens 64
""",
        "Every line is a message, except lines that begin with /:\n\n"
        + "".join(f"  {line}\n" for line in _HELP.splitlines())
        + """
Media come first in their message, or replace <image> and <video> in it. Answers
are greedy, as in coat-vlm generate; Ctrl-C stops an answer.
""",
    )
    _add_model(parser, "of the first message", 512)


def _add_model(parser: argparse.ArgumentParser, where: str, max_new_tokens: int) -> None:
    """Declare the model and its media; ``where`` ends the help of ``--image`` and ``--video``."""
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="run, model, checkpoint or adapter folder",
    )
    for kind in ("image", "video"):
        add(
            f"--{kind}",
            dest="media",
            action="extend",
            nargs="+",
            type=lambda path, kind=kind: (kind, Path(path)),
            default=[],
            metavar="FILE",
            help=f"{kind}s {where}, in this order",
        )
    add(
        "--max-new-tokens",
        type=at_least(1),
        default=max_new_tokens,
        metavar="N",
        help=f"default {max_new_tokens}",
    )
    add_loading(parser)


def _generate(args: argparse.Namespace) -> int:
    model, processor, _ = _load(args)
    from coat_vlm.generate import generate

    sample = prompt_sample(args.prompt, args.media)
    say(generate(model, processor, [sample], args.max_new_tokens)[0])
    return 0


def _load(args: argparse.Namespace) -> tuple[Any, Any, Path]:
    """Return model, processor and the folder named; FileNotFoundError: missing media."""
    for kind, path in args.media:
        if not path.exists():  # a video may be a folder of frames
            raise FileNotFoundError(f"--{kind} {path}: there is no such file")
    from coat_eval.generation import select_device
    from coat_eval.own_model import load_run_or_model
    from coat_vlm.model.family_processor import limit_pixels

    model, processor, named, _ = load_run_or_model(args.model, select_device(), args.precision)
    limit_pixels("--max-pixels", processor, model.config.model_type, args.max_pixels)
    return model, processor, named.path


def prompt_sample(prompt: str, files: Sequence[tuple[str, Path]]) -> "Sample":
    """Convert the prompt as the LLaVA reader converts a row of a file.

    ``<image>`` and ``<video>`` in the prompt mark the places of the files (kind, path); without
    them, the files come first, in the order given, each on its own line. DataError: placeholders
    and files do not match.
    """
    from coat_data.media.root import MediaRoot
    from coat_data.readers.llava import to_sample
    from coat_data.readers.reader import Place

    if not any(f"<{kind}>" in prompt for kind, _ in files):
        prompt = "".join(f"<{kind}>\n" for kind, _ in files) + prompt
    row = {
        "image": [str(path.absolute()) for kind, path in files if kind == "image"],
        "video": [str(path.absolute()) for kind, path in files if kind == "video"],
        # A sample needs an answer, which generation ignores.
        "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": "-"}],
    }
    anywhere = MediaRoot("/", follow_links=True)  # the user named the files
    return to_sample(row, Place(source="--prompt", row=0, root=anywhere))


def _chat(args: argparse.Namespace) -> int:
    model, processor, folder = _load(args)
    chat = _Conversation(model, processor, args.max_new_tokens)
    for kind, path in args.media:
        chat.attach(kind, path)
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        say(f"{folder}; /help lists the commands")
        with contextlib.suppress(ImportError):  # input() then edits lines and has a history
            import readline  # noqa: F401
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        try:
            _obey(chat, line)
        except (ValueError, OSError) as error:
            complain(str(error))


def _obey(chat: "_Conversation", line: str) -> None:
    """Execute one line of the user."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if not line.startswith("/"):
        if line:
            chat.ask(line)
    elif word == "/help":
        say(_HELP)
    elif word == "/clear":
        chat.clear()
    elif word not in {*_MEDIA, "/save"}:
        raise ValueError(f"unknown command {word}; /help lists the commands")
    elif not rest:
        raise ValueError(f"{word} needs a file: {word} FILE")
    elif word == "/save":
        chat.save(Path(rest).expanduser())
        say(f"saved: {rest}")
    else:
        chat.attach(_MEDIA[word], Path(rest).expanduser())


class _Conversation:
    """The turns of a conversation, and the media of its next message."""

    def __init__(self, model: Any, processor: Any, max_new_tokens: int) -> None:
        from coat_vlm.generate import PromptEncoder

        self._model, self._max_new_tokens = model, max_new_tokens
        self._encoder = PromptEncoder(processor)
        self.clear()

    def clear(self) -> None:
        """Start again, without media."""
        self._turns: tuple[Turn, ...] = ()
        self._media: tuple[Media, ...] = ()
        self._files: list[tuple[str, Path]] = []

    def attach(self, kind: str, path: Path) -> None:
        """Add a file to the next message; an error if the model cannot read it."""
        from coat_data.sample import DataError

        try:
            self._encoder.encode(prompt_sample("?", [(kind, path)]))
        except DataError as error:  # its remedy is for rows of training data
            raise ValueError(f"{path}: {error.problem}") from error
        self._files.append((kind, path))

    def ask(self, text: str) -> None:
        """Print the answer to a message as it is generated; after an error nothing has changed."""
        from transformers import TextStreamer

        from coat_data.sample import DataError, Part, Sample, Turn
        from coat_vlm.generate import generate_batch

        asked = prompt_sample(text, self._files)
        turns, media = (*self._turns, asked.turns[0]), (*self._media, *asked.media)
        try:
            batch = self._encoder([Sample(id="chat", turns=turns, media=media)])
        except DataError as error:
            raise ValueError(f"{error.problem}; /clear starts a new conversation") from error
        answer: list[str] = []
        num_tokens = -1  # the prompt is the first that the streamer receives

        class Streamer(TextStreamer):
            def put(self, value: Any) -> None:
                nonlocal num_tokens
                num_tokens += 1
                super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                answer.append(text)
                super().on_finalized_text(text, stream_end)

        # transformers' stubs know one of two kinds of tokenizers.
        tokenizer: Any = self._encoder.tokenizer
        streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            generate_batch(
                self._model, self._encoder, batch, self._max_new_tokens, streamer=streamer
            )
        except KeyboardInterrupt:
            streamer.end()
            complain("stopped")
        else:
            if num_tokens == self._max_new_tokens:
                complain(f"the answer has reached --max-new-tokens {num_tokens}")
        reply = Turn("assistant", (Part("text", "".join(answer).strip()),))
        self._turns, self._media, self._files = (*turns, reply), media, []

    def save(self, path: Path) -> None:
        """Write the conversation as messages; an error if the file exists."""
        if not self._turns:
            raise ValueError("there is no conversation yet; write a message first")
        media = iter(self._media)
        messages = []
        for turn in self._turns:
            content: list[dict[str, Any]] = []
            for part in turn.parts:
                if part.kind == "text":
                    content.append({"type": "text", "text": part.text})
                else:
                    content.append({"type": part.kind, part.kind: next(media).path})
            messages.append({"role": turn.role, "content": content})
        with path.open("x", encoding="utf-8") as file:
            json.dump([{"messages": messages}], file, indent=2)
            file.write("\n")
