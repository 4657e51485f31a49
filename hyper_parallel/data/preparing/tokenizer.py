"""Text to tokens and back: the bytes themselves, or a tokenizer file in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]

Span = tuple[int, int]


class Tokenizer(ABC):
    """Text to token ids and back. ``bos`` and ``eos`` are texts, as chat templates write them, "" where not known."""

    vocab_size: int
    identity: str  # differs when the tokens of some text do
    folder: Path | None = None
    bos: str = ""
    eos: str = ""
    eos_id: int | None = None
    chat_template: str | None = None

    @abstractmethod
    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of whole documents, with what the tokenizer puts around one and the end-of-text token."""

    @abstractmethod
    def spans(self, text: str) -> tuple[np.ndarray, list[Span]]:
        """(tokens, for each the characters it stands for) of a text that is taken as it is."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, special ones included."""


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8; there are no special ones."""

    vocab_size = 256
    identity = "bytes"

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def spans(self, text: str) -> tuple[np.ndarray, list[Span]]:
        places = [place for place, letter in enumerate(text) for _ in letter.encode()]
        return np.frombuffer(text.encode(), np.uint8), [(place, place + 1) for place in places]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(np.asarray(ids, np.uint8).tolist()).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A ``tokenizer.json``, or the folder that has one, with ``tokenizer_config.json`` and ``chat_template.jinja``."""

    def __init__(self, path: str | Path) -> None:
        tokenizers = _library()
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"there is no tokenizer '{file}'; give a tokenizer.json, a folder that has one, or \"bytes\""
            )
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file}: this is no tokenizer of the `tokenizers` library: {error}") from error
        self.folder = file.parent
        beside = self.folder / "tokenizer_config.json"
        config = _read_config(beside)
        self.bos, self.eos = (_token_text(config.get(name), name, beside) for name in ("bos_token", "eos_token"))
        self.eos_id = self._tokenizer.token_to_id(self.eos) if self.eos else None
        if self.eos and self.eos_id is None:
            raise ValueError(
                f"{beside}: eos_token {self.eos!r} is no token of '{file}', so documents would have no end"
            )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{file}: this tokenizer has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        self.chat_template = _find_template(self.folder, config.get("chat_template"), beside)
        self.identity = hashlib.blake2b(content + f"{self.bos}\0{self.eos}".encode(), digest_size=16).hexdigest()
        self._tokenizer.no_padding()  # a file may ask for both, which would change rows behind our back
        self._tokenizer.no_truncation()

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = [np.array(one.ids, np.int64) for one in self._tokenizer.encode_batch(list(texts))]
        if self.eos_id is None:
            return found
        return [ids if ids.size and ids[-1] == self.eos_id else np.append(ids, self.eos_id) for ids in found]

    def spans(self, text: str) -> tuple[np.ndarray, list[Span]]:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int64), found.offsets

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or the path of a tokenizer."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise RuntimeError(
            "a tokenizer file needs the library tokenizers; run: pip install 'hyper-parallel[train]'"
        ) from None
    return tokenizers


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: this is no table of values, but {type(config).__name__}")
    return config


def _token_text(token: Any, name: str, path: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if (text is not None and not isinstance(text, str)) or (text is None and token):
        raise ValueError(f"{path}: {name} must be a text, or a table with the text 'content', but is {token!r}")
    return text or ""


def _find_template(folder: Path, found: Any, path: Path) -> str | None:
    """The chat template: a file of its own, or what ``path`` says."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"cannot read the chat template '{file}': {error}") from error
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{path}: chat_template must be a text or a list of named templates, but is {found!r}")
    return found
