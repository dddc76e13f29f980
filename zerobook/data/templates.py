"""Canonical samples to token ids, and labels on what the model must say.

The loss of a chat is on the assistant's turns: from a turn's first token to its end-of-turn token,
inclusive. Where the template marks them by ``{% generation %}``, the marks count. Otherwise a turn is
what lies between the chat rendered up to it with the generation prompt, and the chat rendered with it.
Labels are made by position, never by comparing ids, so a pad token that equals the end of turn does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from zerobook.data.feed import IGNORE
from zerobook.data.formats import BadSample, Chat, Pair, Sample, Text, Tokens
from zerobook.data.skeleton import Part, Skeleton, Turn, only_writes_contents
from zerobook.data.turns import Rendered, Span, TurnTokenizer, any_of, token_ids
from zerobook.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Encoded:
    """``input_ids`` and ``labels``: int32 [tokens], as many of one as of the other but for seq2seq.

    ``cut``: something was longer than allowed. ``added_eos``: turns that got an end-of-text token
    because the chat template ends them with no special token.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool = False
    added_eos: int = 0


class CausalEncoder:
    """Samples for a decoder. Can be pickled.

    Text becomes its ids and an end-of-text token, and is never cut: the caller makes blocks of it.
    Chats go through the chat template. Pairs do not: source, target and end of text, the loss on the
    last two. Tokens are taken as they are.

    Args:
        tokenizer: a transformers tokenizer.
        length: the most tokens a chat, a pair or ready tokens may have; None never cuts. What is too
            long loses its end; a pair loses the left of its source first.
        chat_template: Jinja text in place of the tokenizer's own.

    Raises:
        ConfigError: a chat template that is not valid Jinja.
    """

    def __init__(self, tokenizer: Any, *, length: int | None, chat_template: str | None = None):
        self.tokenizer = tokenizer
        self.length = length
        self.template = _template(tokenizer, chat_template)
        self._turns = TurnTokenizer(tokenizer)
        eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        self._eos = [] if eos is None else [eos]
        self._bos = [bos] if tokenizer("a")["input_ids"][:1] == [bos] else []

    def encode(self, samples: Sequence[Sample]) -> list[Encoded | BadSample]:
        """One result for each sample, in order; a `BadSample` says why there are no tokens.

        Raises:
            ConfigError: a chat, and the tokenizer cannot render one.
        """
        kinds = {Text: self._texts, Chat: self._chats, Pair: self._pairs, Tokens: self._tokens}
        return _by_kind(samples, kinds)

    def _texts(self, samples: list[Text]) -> list[Encoded | BadSample]:
        closed = [self._close(ids) for ids in token_ids(self.tokenizer, [sample.text for sample in samples])]
        return [Encoded(ids, ids.copy()) for ids in closed]

    def _pairs(self, samples: list[Pair]) -> list[Encoded | BadSample]:
        ids = token_ids(self.tokenizer, [sample.source for sample in samples] + [sample.target for sample in samples])
        return [self._pair(*pair) for pair in zip(ids[: len(samples)], ids[len(samples) :], strict=True)]

    def _pair(self, source: np.ndarray, target: np.ndarray) -> Encoded:
        target = self._close(target)
        bos = [] if source[:1].tolist() == self._bos else self._bos
        room = len(source) if self.length is None else max(0, self.length - len(bos) - len(target))
        kept = source[max(0, len(source) - room) :]
        ids = np.concatenate([np.array(bos, np.int32), kept, target])
        labels = ids.copy()
        labels[: len(ids) - len(target)] = IGNORE
        return self._cut(ids, labels, cut=len(kept) < len(source))

    def _tokens(self, samples: list[Tokens]) -> list[Encoded | BadSample]:
        known = len(self.tokenizer)
        results: list[Encoded | BadSample] = []
        for sample in samples:
            highest = max(max(sample.input_ids), max(sample.labels))
            if highest >= known:
                results.append(BadSample(f"token id {highest} is outside the tokenizer's {known} ids"))
            else:
                results.append(self._cut(np.array(sample.input_ids, np.int32), np.array(sample.labels, np.int32)))
        return results

    def _chats(self, samples: list[Chat]) -> list[Encoded | BadSample]:
        if self.template is None:
            raise ConfigError(
                "the samples are chats, but the tokenizer has no chat template. "
                "Give one with --chat_template FILE, or use an instruct model's tokenizer."
            )
        results: list[Any] = []
        for sample in samples:
            try:
                results.append(self.template.render(sample.messages))
            except BadSample as error:
                results.append(error)
        good = [i for i, result in enumerate(results) if not isinstance(result, BadSample)]
        for i, found in zip(good, self._turns.encode([results[i] for i in good]), strict=True):
            bad = isinstance(found, BadSample)
            results[i] = found if bad else self._chat(found.ids, found.turns, results[i].added_eos)
        return results

    def _chat(self, ids: np.ndarray, turns: list[Span], added_eos: int) -> Encoded:
        labels = np.full(len(ids), IGNORE, np.int32)
        for first, end in turns:
            labels[first:end] = ids[first:end]
        return self._cut(ids, labels, added_eos=added_eos)

    def _cut(self, ids: np.ndarray, labels: np.ndarray, *, cut: bool = False, added_eos: int = 0) -> Encoded:
        if self.length is None or len(ids) <= self.length:
            return Encoded(ids, labels, cut, added_eos)
        return Encoded(ids[: self.length], labels[: self.length], True, added_eos)

    def _close(self, ids: np.ndarray) -> np.ndarray:
        """With the end-of-text token, once: some published texts carry it already."""
        return ids if ids[-1:].tolist() == self._eos else np.array([*ids, *self._eos], np.int32)


class Seq2SeqEncoder:
    """Samples for an encoder-decoder. Can be pickled.

    Of a chat the last assistant turn is the target, and everything before it, joined by newlines, the source.

    Args:
        tokenizer: a transformers tokenizer; it places its own special tokens.
        max_source_length, max_target_length: tokens, special ones included; longer ones lose their end.
        prefix: text before every source, as T5's "summarize: ".
    """

    def __init__(self, tokenizer: Any, *, max_source_length: int, max_target_length: int, prefix: str = ""):
        self.tokenizer = tokenizer
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.prefix = prefix

    @property
    def length(self) -> int:
        """Tokens that ``input_ids`` may have."""
        return self.max_source_length

    def encode(self, samples: Sequence[Sample]) -> list[Encoded | BadSample]:
        """One result for each sample, in order. ``labels`` have their own length and are all supervised."""
        refuse = {
            Text: "a document has no target; a seq2seq model needs source and target",
            Tokens: "ready tokens are for causal models; a seq2seq model needs source and target as text",
        }
        kinds = {kind: lambda some, why=why: [BadSample(why) for _ in some] for kind, why in refuse.items()}
        return _by_kind(samples, kinds | {Pair: self._pairs, Chat: lambda chats: self._pairs([_last_turn(c) for c in chats])})

    def _pairs(self, samples: list[Pair]) -> list[Encoded | BadSample]:
        sources = self._ids("text", [self.prefix + sample.source for sample in samples], self.max_source_length)
        targets = self._ids("text_target", [sample.target for sample in samples], self.max_target_length)
        results = []
        for (ids, source_cut), (labels, target_cut) in zip(sources, targets, strict=True):
            # not every tokenizer ends a target; in some a language's code follows the end
            if self.tokenizer.eos_token_id is not None and self.tokenizer.eos_token_id not in labels[-2:]:
                target_cut |= len(labels) == self.max_target_length
                labels = np.array([*labels[: self.max_target_length - 1], self.tokenizer.eos_token_id], np.int32)
            results.append(Encoded(ids, labels, source_cut or target_cut))
        return results

    def _ids(self, side: str, texts: list[str], length: int) -> list[tuple[np.ndarray, bool]]:
        rows = self.tokenizer(**{side: texts}, truncation=True, max_length=length, verbose=False)["input_ids"]
        results = []
        for row, text in zip(rows, texts, strict=True):
            cut = len(row) == length and len(self.tokenizer(**{side: text}, verbose=False)["input_ids"]) > length
            results.append((np.array(row, np.int32), cut))
        return results


class ChatTemplate:
    """Chats to text, and where in it the assistant speaks."""

    def __init__(self, source: str, tokenizer: Any):
        self.source = source
        self.variables = dict(tokenizer.special_tokens_map)
        self.eos = tokenizer.eos_token
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._special = any_of(token.content for token in added if token.special)
        # some models end turns with a token that is added, but not marked as special
        self._end = any_of(token.content for token in added)
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}
        self._writes_only = only_writes_contents(_compile_jinja_template(source).environment.parse(source))

    def render(self, messages: list[dict[str, str]]) -> Rendered:
        """The whole chat, each assistant turn closed by an end-of-turn token.

        Raises:
            BadSample: the template refuses the chat, its turns cannot be told apart, or a turn has a
                special token of the tokenizer in its text.
            ConfigError: the template writes no end of turn, and the tokenizer has none.
        """
        for number, message in enumerate(messages, 1):
            found = self._special.search(message["content"])
            if found:
                raise BadSample(f"turn {number} has the text {found[0]!r}, which the tokenizer reads as a special token")
        if self.marked:
            text, spans = self._by_marks(messages)
            turns = self._ends(messages, text, spans)
        else:
            text, turns = self._by_skeleton(messages)
        if all(turn.ends for turn in turns):
            return Rendered(text, [(turn.start, turn.stop) for turn in turns], 0)
        return self._with_eos(text, turns)

    def _text(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        # the compiled template is cached there; it cannot be pickled, so it is not kept here
        compiled = _compile_jinja_template(self.source)
        try:
            return compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self.variables
            )
        except Exception as error:  # templates raise what they like
            raise BadSample(f"the chat template refuses it: {error}") from None

    def _by_marks(self, messages: list[dict[str, str]]) -> tuple[str, list[Span]]:
        try:
            (text,), (turns,) = render_jinja_template(
                [messages], chat_template=self.source, return_assistant_tokens_mask=True, **self.variables
            )
        except Exception as error:
            raise BadSample(f"the chat template refuses it: {error}") from None
        spoken = _assistant_turns(messages)
        if len(turns) != len(spoken):
            raise BadSample(f"the chat template marks {len(turns)} turns as generated, the assistant has {len(spoken)}")
        after = len(self.eos or "")
        return text, [(a, b + after if self.eos and text.startswith(self.eos, b) else b) for a, b in turns]

    def _by_prefixes(self, messages: list[dict[str, str]], text: str) -> list[Span]:
        turns = []
        for i in _assistant_turns(messages):
            before, after = self._text(messages[:i], prompt=True), self._text(messages[: i + 1])
            if not text.startswith(after):
                raise BadSample(f"the chat template renders turn {i + 1} differently once the chat goes on")
            if not after.startswith(before):
                raise BadSample(f"the chat template renders turn {i + 1} differently from its own generation prompt")
            turns.append((len(before), len(after)))
        return turns

    def _by_skeleton(self, messages: list[dict[str, str]]) -> tuple[str, list[Turn]]:
        """The chat and its turns, as told by other chats of the same roles where that is certain."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._skeletons:
            self._skeletons[roles] = self._learn(roles)
        skeleton = self._skeletons[roles]
        if skeleton and skeleton.whole:
            return skeleton.fill(messages)
        text = self._text(messages)
        turns = skeleton.place(messages, text) if skeleton else None
        return text, turns or self._ends(messages, text, self._by_prefixes(messages, text))

    def _learn(self, roles: tuple[str, ...]) -> Skeleton | None:
        # tabs tell whether the template trims, and no template writes such characters of its own
        contents = [f"\x02{i}\x02" for i in range(len(roles))]
        messages = [{"role": role, "content": f"\t{content}\t"} for role, content in zip(roles, contents, strict=True)]
        try:
            text = self._text(messages)
            turns = iter(self._ends(messages, text, self._by_prefixes(messages, text)))
        except BadSample:
            return None
        parts, at = [], 0
        for role, content in zip(roles, contents, strict=True):
            if text.count(content) != 1:
                return None
            start, stop = text.index(content), text.index(content) + len(content)
            trims = text[start - 1] != "\t" and text[stop : stop + 1] != "\t"
            if not trims:
                start, stop = start - 1, stop + 1
            around = None
            if role == "assistant":
                turn = next(turns)
                around = Turn(turn.start - start, turn.stop - stop, turn.ends)
            parts.append(Part(text[at:start], trims, around))
            at = stop
        return Skeleton(parts, text[at:], self._writes_only)

    def _ends(self, messages: list[dict[str, str]], text: str, spans: list[Span]) -> list[Turn]:
        """Turns up to the last added token behind their content, or else to their last character."""
        turns = []
        for (start, stop), i in zip(spans, _assistant_turns(messages), strict=True):
            content, spoken = messages[i]["content"], text[start:stop]
            ends = list(self._end.finditer(spoken, _behind(spoken, content.strip())))
            end = ends[-1].end() if ends else max(len(spoken.rstrip()), _behind(spoken, content))
            turns.append(Turn(start, start + end, bool(ends)))
        return turns

    def _with_eos(self, text: str, turns: list[Turn]) -> Rendered:
        if self.eos is None:
            raise ConfigError(
                "the chat template ends the assistant's turns with no special token, and the tokenizer has no "
                "end-of-text token to put there: the model would never learn to stop. "
                "Give another template with --chat_template FILE, or an instruct model's tokenizer."
            )
        pieces, spans, at, size = [], [], 0, 0
        for start, stop, ends in turns:
            pieces += [text[at:stop], "" if ends else self.eos]
            spans.append((size + start - at, size := size + len(pieces[-2]) + len(pieces[-1])))
            at = stop
        return Rendered("".join([*pieces, text[at:]]), spans, sum(not turn.ends for turn in turns))


def _template(tokenizer: Any, given: str | None) -> ChatTemplate | None:
    if given is None and not tokenizer.chat_template:
        return None
    try:
        source = tokenizer.get_chat_template(given)
        _compile_jinja_template(source)
    except TemplateSyntaxError as error:
        where = "--chat_template" if given else "the tokenizer's chat template"
        raise ConfigError(f"{where}: not valid Jinja, line {error.lineno}: {error.message}.") from None
    except ValueError as error:
        raise ConfigError(f"the tokenizer's chat template: {error} Name one with --chat_template FILE.") from None
    return ChatTemplate(source, tokenizer)


def _by_kind(samples: Sequence[Sample], encoders: dict[type, Callable[[list], list]]) -> list[Encoded | BadSample]:
    results: list[Any] = [None] * len(samples)
    for kind, encode in encoders.items():
        chosen = [i for i, sample in enumerate(samples) if type(sample) is kind]
        if chosen:
            for i, result in zip(chosen, encode([samples[i] for i in chosen]), strict=True):
                results[i] = result
    return results


def _last_turn(chat: Chat) -> Pair:
    last = _assistant_turns(chat.messages)[-1]
    return Pair("\n".join(message["content"] for message in chat.messages[:last]), chat.messages[last]["content"])


def _assistant_turns(messages: list[dict[str, str]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _behind(text: str, part: str) -> int:
    """The position behind ``part``; 0 where a template changed it beyond recognition."""
    return text.find(part) + len(part) if part in text else 0
