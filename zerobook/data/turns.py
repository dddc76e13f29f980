"""Tokenization of rendered chats, with the tokens of the assistant's turns."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from zerobook.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


class Rendered(NamedTuple):
    """A chat as text. ``turns``: (first, end) character of each supervised turn and its end token; None: all are supervised.

    ``added_eos``: number of turns that got an end-of-text token. ``shortened``: number of turns that the template shortens.
    """

    text: str
    turns: list[Span] | None
    added_eos: int
    shortened: int


class Tokenized(NamedTuple):
    """A tokenized chat. ``ids``: int32 [tokens]; ``turns``: (first token, end) of each supervised segment."""

    ids: np.ndarray
    turns: list[Span]


def tokenize_turns(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Rendered]) -> list[Tokenized]:
    """Tokenize chats. A turn begins with the token of its first character, even if this token also holds the prompt's end.

    Raises:
        ConfigError: the tokenizer does not tell which characters a token covers.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers, which the assistant's turns are found "
            "by. Save the model with a fast tokenizer (tokenizer.json)."
        )
    encodings = plain_backend(tokenizer).encode_batch([chat.text for chat in chats], add_special_tokens=False)
    results = []
    added_ids = tokenizer.added_tokens_decoder.keys()
    for chat, encoding in zip(chats, encodings, strict=True):
        turns = []
        # All tokens are supervised. Characters would not give all of them: many tokenizers count white space to no token.
        if chat.turns is None:
            turns.append((0, len(encoding.ids)))
        for start, stop in chat.turns or ():
            last_token = cast("int", encoding.char_to_token(stop - 1))
            first_token = _token_at(encoding, start)
            begin, end = cast("tuple[int, int]", encoding.token_to_chars(first_token))
            # The tokens of some models, such as Phi-3, take the white space after them. Such a token belongs to the prompt.
            if begin < start and encoding.ids[first_token] in added_ids and not chat.text[start:end].strip():
                first_token += 1
            turns.append((first_token, last_token + 1))
        results.append(Tokenized(np.array(encoding.ids, np.int32), turns))
    return results


class ControlTokens:
    """The tokens that a tokenizer puts around a text, and the check that the text of a sample names no control token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.leading = leading_ids(tokenizer)
        # The texts of the tokens before and after a text.
        self._begin = "".join(tokenizer.convert_ids_to_tokens(self.leading))
        self._end = tokenizer.eos_token or ""
        names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        # Some tokenizers do not mark their own special tokens as special.
        names += tokenizer.all_special_tokens
        self._pattern = any_of(name for name in names if name.strip())

    def bare(self, text: str, *, begins: bool = True, ends: bool = True) -> str:
        """Return ``text`` without the BOS before it and the end-of-text token after it, which some published data has."""
        if begins and self._begin:
            text = text.removeprefix(self._begin)
        if ends and self._end and text.rstrip().endswith(self._end):
            text = text.rstrip().removesuffix(self._end)
        return text

    def named(self, text: str) -> bool:
        """Return whether ``text`` has the name of a control token."""
        return self._pattern.search(text) is not None

    def refusal(self, what: str, text: str) -> str | None:
        """Return the reason to refuse ``text``, which has the name of a control token; None if it has none.

        Args:
            what: the place of the text, for the reason.
        """
        token = self._pattern.search(text)
        if token is None:
            return None
        return f"{what} has the text {token[0]!r}, which the tokenizer reads as a special token"


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, plain: bool = False) -> list[np.ndarray]:
    """Return int32 ids of each text, without the BOS and EOS that the tokenizer may add.

    Args:
        plain: a name of a special token in a text, such as ``</s>``, is tokenized like other text.
    """
    if tokenizer.is_fast:
        backend = plain_backend(tokenizer)
        backend.encode_special_tokens = plain
        rows = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        # Other users of the tokenizer expect the default setting.
        backend.encode_special_tokens = False
    else:
        options = {"add_special_tokens": False, "split_special_tokens": plain, "verbose": False}
        rows = [tokenizer(text, **options)["input_ids"] for text in texts]
    return [np.array(row, np.int32) for row in rows]


def continuation_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Return int32 ids of each text, as they follow another text: without the space that some tokenizers put before a text."""
    rows = token_ids(tokenizer, texts)
    line_end, word, next_word = token_ids(tokenizer, ["\n", "a", "\na"])
    # If "a" has the same ids after a line end, the tokenizer puts no space before a text.
    if np.array_equal(next_word, [*line_end, *word]):
        return rows
    # Tokenizers such as Llama 2's do. Put a line end before each text, so that the space is before it, and remove both.
    for index, row in enumerate(token_ids(tokenizer, ["\n" + text for text in texts])):
        # If one token has the line end and more, the text cannot be separated from it, and keeps its ids with the space.
        if np.array_equal(row[: len(line_end)], line_end):
            rows[index] = row[len(line_end) :]
    return rows


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer itself puts before a text: often a BOS, otherwise nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    # A tokenizer with a bos_token may not add it, so compare the ids with and without special tokens.
    complete = tokenizer("a", add_special_tokens=True)["input_ids"]
    for position in range(len(complete)):
        if complete[position : position + len(bare)] == bare:
            return complete[:position]
    return []


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizer's backend of the tokenizers library, set to neither truncate nor pad."""
    backend = tokenizer.backend_tokenizer
    # A tokenizer.json may enable both. transformers sets both again in each of its own calls.
    backend.no_truncation()
    backend.no_padding()
    return backend


def any_of(tokens: Iterable[str]) -> re.Pattern:
    """Return a pattern that finds any of the texts, the longest if several begin at one position."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


# Return the number of the token that has the character at ``position``.
def _token_at(encoding: Encoding, position: int) -> int:
    token = encoding.char_to_token(position)
    if token is None:
        # Many tokenizers count white space to no token. Then take the first token that ends after the position.
        token = bisect_right(range(len(encoding)), position, key=lambda t: cast("Span", encoding.token_to_chars(t))[1])
    return token
