"""Small tokenizers of the kinds that people's language models have, tars, a server of files."""

import functools
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import coat_vlm  # noqa: F401 - first, so that torchvision imports next to a CPU-only torch

TEXTS = [
    "A chat between a curious user and an artificial intelligence assistant.",
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    "USER: What is in the image? ASSISTANT: A red circle and two blue squares.",
    "You are a helpful assistant. system user assistant [INST] [/INST] <<SYS>> <</SYS>>",
    "How many shapes are there? Three. Is there a dog? No. Yes, a brown one.",
] * 3

QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3 = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
    "{% set content = message['content'] %}{% if loop.first and system is defined %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache folders of the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("COAT_VLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@functools.cache
def byte_level() -> str:
    """GPT-2's way, as Qwen and Llama 3 have it: bytes, and no space before a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend.to_str()


@functools.cache
def sentence_piece(form: str) -> str:
    """Llama 2's and Mistral's way: words carry the space before them, also the first one.

    ``first`` and ``always`` are pre-tokenizers of newer conversions, ``prepend`` the normalizer of
    older ones.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if form == "prepend":
        replace = normalizers.Replace(" ", "\u2581")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend.to_str()


def wrap(
    backend: str, template: str | None, bos: str | None, eos: str, specials: list[str]
) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that puts ``bos`` before texts, and knows ``<image>``."""
    core = Tokenizer.from_str(backend)
    core.add_special_tokens([AddedToken(name, special=True) for name in [*specials, "<image>"]])
    core.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if bos:
        core.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos, unk_token=None
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = "tiny"
    return tokenizer


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]


def make(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer called ``name``."""
    if name in ("qwen2", "qwen3"):
        template = {"qwen2": QWEN2, "qwen3": QWEN3}[name]
        return wrap(byte_level(), template, None, "<|im_end|>", CHATML)
    if name == "llama3":
        return wrap(byte_level(), LLAMA3, "<|begin_of_text|>", "<|eot_id|>", LLAMA)
    family, form = name.split("_")
    template = {"llama2": LLAMA2, "mistral": MISTRAL}[family]
    tokenizer = wrap(sentence_piece(form), template, "<s>", "</s>", ["<unk>", "<s>", "</s>"])
    tokenizer.unk_token = "<unk>"
    return tokenizer


BYTE_LEVEL = ("qwen2", "qwen3", "llama3")
SENTENCE_PIECE = ("llama2_first", "llama2_prepend", "mistral_first")


@pytest.fixture(params=[*BYTE_LEVEL, *SENTENCE_PIECE])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Every kind of tokenizer in turn, each with its own chat template."""
    return make(request.param)


@pytest.fixture
def make_tokenizer():
    """The function that makes a tokenizer by name."""
    return make


@pytest.fixture
def tar() -> Callable[[Path, dict[str, bytes]], Path]:
    """The function that writes a tar of members by name, gzipped where its name ends so."""

    def write(path: Path, members: dict[str, bytes]) -> Path:
        mode = "w:gz" if path.name.endswith("gz") else "w"
        with tarfile.open(path, mode) as archive:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    return write


class Server:
    """The files of a folder; notes what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                with suppress(BrokenPipeError, ConnectionResetError):
                    super().do_GET()  # a client may look at the header only

            def log_message(self, format: str, *args: Any) -> None:
                """Not to the terminal."""

        handler = functools.partial(Handler, directory=str(folder))
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Server]]:
    """Starts servers, which end with the test."""
    started: list[Server] = []

    def start(folder: Path) -> Server:
        started.append(Server(folder))
        return started[-1]

    yield start
    for server in started:
        server.close()
