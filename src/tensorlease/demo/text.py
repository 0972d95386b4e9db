"""Real English text that every Python carries, and the word pieces that it is cut into."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

_HELD_OUT_EVERY = 10
_BYTES = [bytes([value]) for value in range(256)]


def corpus() -> tuple[bytes, bytes]:
    """Returns the text to train on and the held-out text: paragraphs, one a line, as UTF-8.

    It is the reference behind `help()`, some 200 kB; other Pythons carry slightly different text.
    Every tenth paragraph is held out, and no paragraph is in both. What is no prose (grammar,
    tables, examples) is left away.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}
    for topic in topics.values():
        for block in re.split(r"\n\s*\n", topic):
            paragraph = " ".join(block.split())
            if _is_prose(paragraph):
                paragraphs[paragraph] = None
    lines = [f"{paragraph}\n".encode() for paragraph in paragraphs]
    train = [line for at, line in enumerate(lines) if at % _HELD_OUT_EVERY]
    return b"".join(train), b"".join(lines[::_HELD_OUT_EVERY])


def find_pieces(text: bytes, size: int) -> list[bytes]:
    """Returns a vocabulary: all single bytes, common words, and common parts of the other words."""
    words = Counter(re.findall(rb" ?[A-Za-z]+", text))
    common = _best(words, (size - len(_BYTES)) * 3 // 4)
    parts: Counter[bytes] = Counter()
    for word in words.keys() - set(common):
        for length in (2, 3, 4):
            for at in range(len(word) - length + 1):
                parts[word[at : at + length]] += words[word]
    for word in common:
        del parts[word]
    return [*_BYTES, *common, *_best(parts, size - len(_BYTES) - len(common))]


class Vocabulary:
    """Turns text into tokens, always the longest piece that fits, and back.

    Args:
        pieces: The text of each token.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.newline = pieces.index(b"\n")
        self._tokens = {piece: token for token, piece in enumerate(pieces)}
        longest_first = sorted(pieces, key=len, reverse=True)
        self._cut = re.compile(b"|".join(map(re.escape, longest_first)), re.DOTALL)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: bytes) -> list[int]:
        """Returns the tokens of a text."""
        return [self._tokens[piece] for piece in self._cut.findall(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens; a dot stands for what cannot be printed."""
        text = b"".join(self.pieces[token] for token in tokens).decode(errors="replace")
        odd, dot = "\N{REPLACEMENT CHARACTER}", "\N{MIDDLE DOT}"
        return "".join(c if c.isprintable() and c != odd else dot for c in text)

    def unigram_loss(self, train: Sequence[int], windows: Sequence[Sequence[int]]) -> float:
        """What a model that knows only how frequent each token is would lose, in nats a byte.

        The first token of each window does not count, as nothing predicts it for a language model.
        """
        counts = Counter(train)
        total = len(train) + len(self)
        scored = [token for window in windows for token in window[1:]]
        loss = sum(math.log(total / (counts[token] + 1)) for token in scored)
        return loss / sum(len(self.pieces[token]) for token in scored)


def windows(tokens: Sequence[int], length: int, count: int) -> list[Sequence[int]]:
    """Returns `count` pieces of `length` tokens, at even distances over the whole text."""
    last = len(tokens) - length
    starts = (last * i // max(1, count - 1) for i in range(count))
    return [tokens[start : start + length] for start in starts]


def _best(counts: Counter[bytes], number: int) -> list[bytes]:
    """Returns the pieces that make a text shorter by most tokens; always the same ones."""
    saved = {piece: count * (len(piece) - 1) for piece, count in counts.items()}
    ranked = sorted(saved, key=lambda piece: (-saved[piece], piece))
    return [piece for piece in ranked[:number] if len(piece) > 1]


def _is_prose(paragraph: str) -> bool:
    return (
        len(paragraph) >= 60
        and paragraph[0].isupper()
        and paragraph[-1] in ".:"
        and "::=" not in paragraph
        and ">>>" not in paragraph
    )
