"""Text as documents, documents as tokens, and rows of a context's length cut from their stream.

A document is a part of a file between two or more blank lines. In the stream every document begins with the
token `start`, which also tells where the one before has ended; a row holds whatever documents it meets, and
which token belongs to which can be read off the row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BETWEEN_DOCUMENTS = re.compile(r"\n(?:[ \t]*\n){2,}")


def documents_of(text: str) -> list[str]:
    """The parts between two or more blank lines, each with one line break at its end."""
    parts = _BETWEEN_DOCUMENTS.split(text.replace("\r\n", "\n"))
    return [part.strip("\n") + "\n" for part in parts if part.strip()]


class Tokenizer:
    """Bytes, or byte pairs learned from a text (with the library ``tokenizers``), and one token `start`.

    Args:
        pairs: what ``learn`` found, as JSON; None for bytes: token 97 is "a".
    """

    def __init__(self, pairs: str | None = None) -> None:
        self.pairs = pairs
        self._pairs = None if pairs is None else _tokenizers().Tokenizer.from_str(pairs)
        self.start: int = 256 if self._pairs is None else self._pairs.get_vocab_size()
        self.vocabulary = self.start + 1

    @classmethod
    def learn(cls, texts: Sequence[str], vocabulary: int) -> Tokenizer:
        """Byte-pair encoding with so many tokens at most, ``start`` included."""
        if vocabulary < 258:
            raise ValueError(
                f"vocabulary must be at least 258: 256 bytes, start and a pair, got {vocabulary}"
            )
        library = _tokenizers()
        pairs = library.Tokenizer(library.models.BPE())
        pairs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        pairs.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary - 1,
            show_progress=False,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        )
        pairs.train_from_iterator(texts, trainer)
        return cls(pairs.to_str())

    def encode(self, text: str) -> list[int]:
        if self._pairs is None:
            return list(text.encode())
        ids: list[int] = self._pairs.encode(text).ids
        return ids

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (length,); `start` is left out, bytes that are no text become a mark."""
        numbers = [token for token in tokens.tolist() if token != self.start]
        if self._pairs is None:
            return bytes(numbers).decode(errors="replace")
        text: str = self._pairs.decode(numbers)
        return text

    def stream(self, documents: Sequence[str]) -> Tensor:
        """All tokens of the documents, each behind a `start`: int32 (length,)."""
        numbers = [np.array([self.start, *self.encode(text)], np.int32) for text in documents]
        return torch.from_numpy(np.concatenate(numbers) if numbers else np.empty(0, np.int32))

    def document_ids(self, rows: Tensor) -> Tensor:
        """int64, of the shape (B, S) of rows of tokens: which document of its row each token belongs to."""
        return (rows == self.start).cumsum(-1)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"a vocabulary of byte pairs needs the library tokenizers: pip install tokenizers ({error}); "
            "bytes need nothing"
        ) from error
    return tokenizers


@dataclass(frozen=True)
class Corpus:
    """A text to learn from, and the end of it, which is held out.

    Args:
        training, validation: int32 (length,), streams of tokens.
    """

    tokenizer: Tokenizer
    training: Tensor
    validation: Tensor

    @property
    def digest(self) -> str:
        """A number of both streams: a run goes on with the text that it began with."""
        content = hashlib.sha256(self.training.numpy().tobytes())
        content.update(b"|" + self.validation.numpy().tobytes())
        return content.hexdigest()

    def rows(self, step: int, count: int, length: int, seed: int) -> Tensor:
        """The rows of a step, int64 (count, length), from random places.

        They depend on the step and the seed alone, so that a run can go on anywhere.
        """
        generator = torch.Generator().manual_seed(derived_seed(seed, step))
        places = torch.randint(len(self.training) - length + 1, (count, 1), generator=generator)
        return self.training[places + torch.arange(length)].long()

    def held_out_rows(self, length: int, most: int) -> Tensor:
        """int64 (count, length): the validation stream from its start, row after row, at most so many rows.

        A row begins with the token that the row before ended with, so that each is predicted once.
        """
        count = min(most, (len(self.validation) - 1) // (length - 1))
        starts = torch.arange(count)[:, None] * (length - 1)
        return self.validation[starts + torch.arange(length)].long()


def read_corpus(paths: Sequence[Path], context: int, tokenizer: Tokenizer | int | None = None) -> Corpus:
    """The corpus of some text files, of Hamlet without any; the last tenth of the text is held out.

    Args:
        context: tokens of a row; a text whose parts are shorter than one row is a ValueError.
        tokenizer: the one to use, or the size of a vocabulary to learn; None for bytes.

    Raises ValueError for a file that cannot be read or is no UTF-8.
    """
    training, validation = [], []
    for text in _texts(paths):
        cut = len(text) * 9 // 10
        cut = text.rfind("\n", 0, cut) + 1 or cut
        training += documents_of(text[:cut])
        validation += documents_of(text[cut:])
    if isinstance(tokenizer, int):
        tokenizer = Tokenizer.learn(training, tokenizer)
    tokenizer = tokenizer or Tokenizer()
    corpus = Corpus(tokenizer, tokenizer.stream(training), tokenizer.stream(validation))
    shortest = min(len(corpus.training), len(corpus.validation))
    if shortest <= context:
        raise ValueError(
            f"context must be shorter than the text, of which the last tenth is held out: "
            f"{len(corpus.training)} and {len(corpus.validation)} tokens, got a context of {context}"
        )
    return corpus


def _texts(paths: Sequence[Path]) -> list[str]:
    if not paths:
        from flashtile.bench import language

        return [language.play()]
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"text must be files of UTF-8 text, got {str(path)!r}: {error}") from error
    return texts


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits that depends on all of the numbers (each at least 0), and on nothing else."""
    return int(
        np.random.SeedSequence([len(numbers), *numbers]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )
