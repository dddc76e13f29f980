"""Encoding of canonical samples as token ids, with labels on the tokens that the model must generate.

The loss of a chat is on the assistant's turns: on the text that the model would generate there, and on the one token
that ends the turn. `zerobook.data.rendering` finds them. Without ``assistant_only_loss``, it is on all tokens.
Labels are made by position, never by comparing ids. So it is not a problem if the pad token is also the token that ends a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zerobook.constants import IGNORE
from zerobook.data.chats import IDENTIFIERS
from zerobook.data.rendering import find_assistant_turns, open_template, open_tool_template, with_fixed_date
from zerobook.data.samples import BadSample, Chat, Pair, Sample, Text, Tokens
from zerobook.data.template_limits import checked_length, template_memory, template_time
from zerobook.data.turns import ControlTokens, Rendered, Tokenized, continuation_ids, token_ids, tokenize_turns
from zerobook.errors import ConfigError
from zerobook.utils.chat_template import DEFAULT, template_file
from zerobook.utils.reading import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row. ``input_ids`` and ``labels``: int32 [tokens], of equal length except for seq2seq.

    ``cut``: the sample was longer than allowed. ``added_eos``: number of turns that got an end-of-text token because the chat
    template ends them with no special token. ``shortened``: number of turns of which the template leaves out a part.
    ``plain``: the text has the name of a special token, which was encoded as characters. ``others``: further rows of the same
    chat, each with turns that the rows before it do not supervise. ``extra``: further arrays of the row, int32, by name;
    the collator gets them beside ids and labels.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool = False
    added_eos: int = 0
    shortened: int = 0
    plain: bool = False
    others: tuple[Encoded, ...] = ()
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)


class Encoder(Protocol):
    """Converts samples to rows. It is sent to the processes that prepare data, so it must be picklable.

    An encoder may define formats of its own as ``formats``, a mapping of names to `zerobook.data.formats.Format`; they are
    tried before the built-in ones.
    """

    @property
    def length(self) -> int | None:
        """Maximum number of tokens in a row's ``input_ids``."""

    def encode(self, samples: Sequence[Any]) -> list[Encoded | BadSample]:
        """Return one result for each sample, in order; a `BadSample` says why there is no row."""


def paired(
    first: Sequence[Encoded | BadSample], second: Sequence[Encoded | BadSample], prefix: str
) -> list[Encoded | BadSample]:
    """Return the rows of ``first`` with the ids and labels of ``second`` as the extra arrays ``PREFIXids``, ``PREFIXlabels``.

    A pair is a bad sample if one of its samples is bad, or has several rows.
    """

    rows: list[Encoded | BadSample] = []
    for row, partner in zip(first, second, strict=True):
        if isinstance(row, BadSample):
            rows.append(row)
        elif isinstance(partner, BadSample):
            rows.append(partner)
        elif row.others or partner.others:
            # The advice is for answers that differ only in their last turn: the turns before it need no loss.
            reason = "an answer has several turns, and the chat template needs a row for each; give one that does not"
            rows.append(BadSample(f"{reason} with --chat_template, or leave only the last turn supervised"))
        else:
            extra = {f"{prefix}ids": partner.input_ids, f"{prefix}labels": partner.labels}
            rows.append(replace(row, extra=extra))
    return rows


class CausalEncoder:
    """Encodes samples for a decoder. Can be pickled.

    A text is encoded as its ids and an end-of-text token. It is never truncated, since the caller divides it into blocks.
    A chat is rendered with the chat template. A pair is encoded without one, as source, target and end-of-text token, with
    labels on the last two. Texts and pairs begin with a BOS if the tokenizer adds one. A template writes its own BOS.
    Token ids are used as they are. The text of a sample never becomes a control token: a chat or a pair that contains the name
    of a control token is a bad sample, and in a text the name is encoded as characters.

    Args:
        tokenizer: a transformers tokenizer.
        length: maximum number of tokens of a chat, a pair or token ids; None: samples are not cut. A longer sample loses its
            end; a pair first loses the beginning of its source.
        chat_template: Jinja text in place of the tokenizer's own.
        assistant_only_loss: the loss of a chat is on the assistant's turns; False: on all of its tokens, unless the data says
            which turns are supervised, by marks or as a completion.

    Raises:
        ConfigError: a chat template that is not valid Jinja.
    """

    # Set on an instance only if they differ: the attributes of an instance are in the fingerprint of prepared data.
    assistant_only_loss: bool = True
    has_default_template: bool = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int | None,
        chat_template: str | None = None,
        assistant_only_loss: bool = True,
    ):
        if not assistant_only_loss:
            self.assistant_only_loss = False
        self.tokenizer = tokenizer
        self.length = length
        self.chat_template = chat_template
        self.template = open_template(tokenizer, chat_template)
        self.tool_template = open_tool_template(tokenizer, chat_template) or self.template
        self._eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._control = ControlTokens(tokenizer)
        self._bos = self._control.leading

    def take_default_template(self) -> None:
        """Render chats by the template `DEFAULT` if the tokenizer has none, and none was given."""
        if self.template is None:
            self.template = self.tool_template = open_template(self.tokenizer, read_text(template_file(DEFAULT)))
            self.has_default_template = True

    def encode(self, samples: Sequence[Sample]) -> list[Encoded | BadSample]:
        """Return one result for each sample, in order; a `BadSample` says why there are no tokens.

        Raises:
            ConfigError: a sample is a chat, and there is no chat template.
        """
        pairs = partial(_encode_valid_pairs, control=self._control, encode=self._encode_pairs)
        return _encode_by_class(
            samples, {Text: self._encode_texts, Chat: self._encode_chats, Pair: pairs, Tokens: self._encode_tokens}
        )

    # Encode documents, or parts of them, completely.
    def _encode_texts(self, samples: list[Text]) -> list[Encoded | BadSample]:
        texts = [self._control.bare(sample.text, begins=sample.begins, ends=sample.ends) for sample in samples]
        results: list[Encoded | BadSample] = []
        for sample, text, row in zip(samples, texts, token_ids(self.tokenizer, texts, plain=True), strict=True):
            # Only the first part of a long text begins it, and only the last one ends it.
            before = self._bos if sample.begins else []
            after = self._eos if sample.ends else []
            ids = np.concatenate([before, row, after]).astype(np.int32)
            results.append(Encoded(ids, ids.copy(), plain=self._control.named(text)))
        return results

    def _encode_pairs(self, pairs: list[Pair]) -> list[Encoded]:
        sources = token_ids(self.tokenizer, [pair.source for pair in pairs])
        targets = continuation_ids(self.tokenizer, [pair.target for pair in pairs])
        return list(map(self._encode_pair, sources, targets))

    # Join the ids of a source and a target to a row of at most ``length`` tokens, with labels on the target.
    def _encode_pair(self, source: np.ndarray, target: np.ndarray) -> Encoded:
        target = np.array([*target, *self._eos], np.int32)
        cut = False
        if self.length is not None:
            # A pair that is too long loses the beginning of its source, so that the target stays complete.
            room = max(0, self.length - len(self._bos) - len(target))
            cut = room < len(source)
            source = source[max(0, len(source) - room) :]
        ids = np.concatenate([np.array(self._bos, np.int32), source, target])
        labels = ids.copy()
        labels[: len(ids) - len(target)] = IGNORE
        return self._cut(ids, labels, cut=cut)

    # Make rows of token ids, which need no tokenizer.
    def _encode_tokens(self, samples: list[Tokens]) -> list[Encoded | BadSample]:
        vocabulary = len(self.tokenizer)
        results: list[Encoded | BadSample] = []
        for sample in samples:
            # An id outside the vocabulary would stop the run with an error of the device.
            highest = max(max(sample.input_ids), max(sample.labels))
            if highest >= vocabulary:
                results.append(BadSample(f"token id {highest} is outside the tokenizer's {vocabulary} ids"))
            else:
                results.append(self._cut(np.array(sample.input_ids, np.int32), np.array(sample.labels, np.int32)))
        return results

    # Render all chats, tokenize their rows in one call, and label the supervised turns.
    def _encode_chats(self, samples: list[Chat]) -> list[Encoded | BadSample]:
        if self.template is None or self.tool_template is None:
            raise ConfigError(
                "the samples are chats, but the tokenizer has no chat template. "
                "Give one with --chat_template FILE, or use an instruct model's tokenizer."
            )
        rendered: list[list[Rendered] | BadSample] = []
        with template_memory():
            for sample in samples:
                template = self.template if sample.tools is None else self.tool_template
                is_whole = not (self.assistant_only_loss or sample.unsupervised)
                try:
                    rendered.append(template.render(sample, is_supervised_whole=is_whole))
                except BadSample as error:
                    rendered.append(error)

        # One call for the rows of all chats, since a fast tokenizer works on the texts of a call in parallel.
        rows: list[Rendered] = []
        for chat in rendered:
            if not isinstance(chat, BadSample):
                rows += chat
        tokenized = iter(tokenize_turns(self.tokenizer, rows))

        results: list[Encoded | BadSample] = []
        for chat in rendered:
            if isinstance(chat, BadSample):
                results.append(chat)
            else:
                results.append(self._label_chat(chat, [next(tokenized) for _ in chat]))
        return results

    def _label_chat(self, rows: list[Rendered], tokenized: list[Tokenized]) -> Encoded:
        """Return the first row of a chat, with its further rows as ``others``. The labels are on the supervised turns."""
        encoded: list[Encoded] = []
        for row, tokens in zip(rows, tokenized, strict=True):
            labels = np.full(len(tokens.ids), IGNORE, np.int32)
            for start, end in tokens.turns:
                labels[start:end] = tokens.ids[start:end]
            encoded.append(replace(self._cut(tokens.ids, labels), added_eos=row.added_eos, shortened=row.shortened))
        return replace(encoded[0], others=tuple(encoded[1:]))

    # Return a row of at most ``length`` tokens. ``cut``: the sample has lost tokens before.
    def _cut(self, ids: np.ndarray, labels: np.ndarray, *, cut: bool = False) -> Encoded:
        if self.length is None or len(ids) <= self.length:
            return Encoded(ids, labels, cut)
        return Encoded(ids[: self.length], labels[: self.length], True)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, opens_turn: bool = True, fixed_date: bool = True
) -> str:
    """Return a chat as the tokenizer's template writes it, for a model to answer.

    Args:
        opens_turn: end with the beginning of the assistant's turn.
        fixed_date: a template that writes today's date gets that of training data, so that a score is the same every day.

    Raises:
        DataError: the template takes too much time or memory, or writes too much.
        Exception: of any class, by the template.
    """
    with template_memory(), template_time(), ExitStack() as stack:
        if fixed_date:
            stack.enter_context(with_fixed_date(tokenizer.get_chat_template()))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens_turn)
    return checked_length(str(text))


def describe_default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note for the terminal that the tokenizer has no chat template, and that the default one is used."""
    return (
        f"note: the tokenizer has no chat template, so chats are rendered by {DEFAULT}, and turns end with "
        f"{tokenizer.eos_token!r} (--chat_template names another)"
    )


class Seq2SeqEncoder:
    """Encodes samples for an encoder-decoder. Can be pickled.

    The last supervised turn of the assistant is the target of a chat. All turns before it, joined by newlines, are the source.

    Args:
        tokenizer: a transformers tokenizer; it adds its own special tokens.
        max_source_length, max_target_length: maximum number of tokens, with special tokens. Longer texts are cut at the end,
            and a source with several questions at its beginning.
        prefix: text before every source, such as "summarize: " for T5.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_source_length: int, max_target_length: int, prefix: str = ""):
        # A copy, since `_encode_pairs` sets the side at which the tokenizer cuts.
        self.tokenizer = copy(tokenizer)
        self._control = ControlTokens(tokenizer)
        self.length = max_source_length
        self.max_target_length = max_target_length
        self.prefix = prefix

    def encode(self, samples: Sequence[Sample]) -> list[Encoded | BadSample]:
        """Return one result for each sample, in order. ``labels`` have their own length and are all supervised."""

        def refuse(reason: str, samples: list[Any]) -> list[BadSample]:
            return [BadSample(reason) for _ in samples]

        return _encode_by_class(
            samples,
            {
                Text: partial(refuse, "a document has no target; a seq2seq model needs source and target"),
                Tokens: partial(refuse, "ready tokens are for causal models; a seq2seq model needs source and target as text"),
                Pair: self._pairs,
                Chat: self._encode_chats,
            },
        )

    # Encode the last supervised turn of each chat as a target. A `_Dialogue` is cut at the left, other pairs at the right.
    def _encode_chats(self, samples: list[Chat]) -> list[Encoded | BadSample]:
        encode_dialogues = partial(self._pairs, cut_at="left")
        return _encode_by_class(
            list(map(_make_pair, samples)), {Pair: self._pairs, _Dialogue: encode_dialogues, BadSample: list}
        )

    # ``cut_at``: the side at which a source that is too long is cut.
    def _pairs(self, samples: list[Pair], cut_at: str = "right") -> list[Encoded | BadSample]:
        return _encode_valid_pairs(samples, self._control, partial(self._encode_pairs, cut_at=cut_at))

    # Encode pairs that have no special tokens. Sources are cut at the side ``cut_at``, and targets at their end.
    def _encode_pairs(self, samples: list[Pair], cut_at: str) -> list[Encoded]:
        self.tokenizer.truncation_side = cut_at
        sources = self._tokenize("text", [self.prefix + sample.source for sample in samples], self.length)
        self.tokenizer.truncation_side = "right"
        targets = self._tokenize("text_target", [sample.target for sample in samples], self.max_target_length)
        eos = self.tokenizer.eos_token_id
        results = []
        for (ids, source_cut), (labels, target_cut) in zip(sources, targets, strict=True):
            # Some tokenizers add no end-of-text token. Those of translation models may add a language code after it.
            if eos is not None and eos not in labels[-2:]:
                # In a target of the maximum length, the end-of-text token replaces the last token.
                target_cut |= len(labels) == self.max_target_length
                labels = np.array([*labels[: self.max_target_length - 1], eos], np.int32)
            results.append(Encoded(ids, labels, source_cut or target_cut))
        return results

    # Return the ids of each text, and whether it was cut. ``side``: the tokenizer's argument, ``text`` or ``text_target``.
    def _tokenize(self, side: str, texts: list[str], length: int) -> list[tuple[np.ndarray, bool]]:
        rows = self.tokenizer(**{side: texts}, truncation=True, max_length=length, verbose=False)["input_ids"]
        results = []
        for row, text in zip(rows, texts, strict=True):
            cut = False
            # A row of the maximum length may be cut or complete. Only the complete text tells.
            if len(row) == length:
                cut = len(self.tokenizer(**{side: text}, verbose=False)["input_ids"]) > length
            results.append((np.array(row, np.int32), cut))
        return results


# Any tool, for a chat by which the end of a turn is found.
_STAND_IN_TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}


def end_tokens(tokenizer: PreTrainedTokenizerBase, *, chats: bool = True) -> set[int]:
    """Return the tokens that end a supervised answer: the tokenizer's end of text, and the chat template's end of turn.

    Args:
        chats: use the template, too; an encoder-decoder's answers are not turns of a template.
    """
    ends = {tokenizer.eos_token_id} - {None}
    if chats and getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zerobook"}]
        try:
            # Encode a chat without tools and one with a tool, which may have another template.
            rows = CausalEncoder(tokenizer, length=None).encode([Chat(turns), Chat(turns, tools=[_STAND_IN_TOOL])])
        except ConfigError:
            # Nothing ends a turn, or the template cannot be read. So the model was not trained on chats.
            return ends
        for row in rows:
            if isinstance(row, Encoded):
                # The last supervised token of an answer is the one that ends it.
                ends.add(int(row.labels[row.labels != IGNORE][-1]))
    return ends


def _encode_by_class(
    samples: Sequence[Sample | BadSample], encoders: dict[type, Callable[[list], list]]
) -> list[Encoded | BadSample]:
    """Encode the samples of each class by the function for it, in one call. The results are in the order of the samples."""
    results: list[Any] = [None] * len(samples)
    for kind, encode in encoders.items():
        indices = [index for index, sample in enumerate(samples) if type(sample) is kind]
        if not indices:
            continue
        encoded = encode([samples[index] for index in indices])
        for index, result in zip(indices, encoded, strict=True):
            results[index] = result
    return results


def _encode_valid_pairs(
    samples: list[Pair], control: ControlTokens, encode: Callable[[list[Pair]], list[Encoded]]
) -> list[Encoded | BadSample]:
    """Encode the pairs whose texts have no special token. The other pairs are bad samples."""
    pairs: list[Pair | BadSample] = []
    for sample in samples:
        # Some published pairs have a BOS before the source and an end-of-text token after the target. Remove both.
        pair = Pair(control.bare(sample.source, ends=False), control.bare(sample.target, begins=False))
        refusal = control.refusal("the source", pair.source) or control.refusal("the target", pair.target)
        # A target of an end-of-text token alone would teach the model to say nothing.
        if not pair.target.strip():
            refusal = "the target is empty"
        pairs.append(BadSample(refusal) if refusal else pair)
    # ``list`` returns the bad samples as they are.
    return _encode_by_class(pairs, {Pair: encode, BadSample: list})


class _Dialogue(Pair):
    """A pair whose source has several questions. It is cut at the beginning, since the last question matters most."""


def _make_pair(chat: Chat) -> Pair | BadSample:
    """Return the last supervised turn of a chat as the target of an encoder-decoder, with the turns before it as the source."""
    text_keys = {"role", "content", *IDENTIFIERS}
    if chat.tools is not None or any(message.keys() - text_keys for message in chat.messages):
        return BadSample("the chat has tools, tool calls or thoughts, which a seq2seq model has no template for")
    supervised = [i for i in find_assistant_turns(chat.messages) if i not in chat.unsupervised]
    if not supervised:
        return BadSample("no turn of the assistant is supervised, so there is no target")
    last = supervised[-1]
    if last == 0:
        return BadSample("the assistant's turn is the first, so there is no source")
    # An earlier turn of the assistant answers an earlier question.
    pair_class = _Dialogue if find_assistant_turns(chat.messages)[0] < last else Pair
    return pair_class("\n".join(message["content"] for message in chat.messages[:last]), chat.messages[last]["content"])
