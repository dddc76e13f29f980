"""Rendering of chats by a chat template, with the assistant's turns in the text.

If the template marks turns with ``{% generation %}``, the marked text is the turn. Otherwise, the chat is rendered up to the
turn, and the turn is the text after the generation prompt. If the template renders a turn differently when more turns follow,
the turn gets a separate row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from zerobook.data.chats import IDENTIFIERS, THOUGHTS
from zerobook.data.samples import BadSample, Chat
from zerobook.data.template_limits import checked_length, template_memory, template_time
from zerobook.data.tool_calls import has_python_arguments, with_text_arguments, with_text_contents
from zerobook.data.turns import ControlTokens, Rendered, any_of
from zerobook.data.values import shared_length
from zerobook.errors import ConfigError, DataError
from zerobook.utils.chat_template import READ_TOOLS

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase


class TurnSpan(NamedTuple):
    """Range of characters of an assistant's turn. ``has_end``: the last of them are its end-of-turn token."""

    start: int
    stop: int
    has_end: bool


class TurnFrame(NamedTuple):
    """The text that a template writes around the last turn of a chat with certain roles.

    ``prompt_end``: the end of the generation prompt, such as ``<think>``, if the template leaves it out when it renders the
    complete turn; otherwise empty. ``closing``: the text after the turn's content; None if it cannot be determined.
    """

    prompt_end: str = ""
    closing: str | None = None


class GeneratedTurn(NamedTuple):
    """A turn as the model would generate it: ``text`` is the chat up to the turn's end, and the turn begins at ``start``.

    ``has_end``: the last characters are an end-of-turn token. ``shortened``: the template left out a part of the content.
    """

    text: str
    start: int
    has_end: bool
    shortened: bool

    @property
    def span(self) -> TurnSpan:
        return TurnSpan(self.start, len(self.text), self.has_end)


# Errors of a template that exceeds a limit. They stop the run: the template is at fault, and not the chat.
_LIMIT_ERRORS = (DataError, MemoryError)
# Advice about tools, calls or contents that a template does not read.
_OTHER_TEMPLATE = f"give one that does with --chat_template, such as {' or '.join(READ_TOOLS)}"
# The date for templates that write the current one: the tokens of a chat must not depend on the day of their preparation, nor
# differ between hosts. Llama's templates have this date where they are not given another one.
TODAY = date(2024, 7, 26)
# A null that a template writes out, as Python and as JSON write it.
_NULL = re.compile("None|null")
# Name of the template that transformers takes for chats with tools, if a tokenizer has several templates.
_TOOL_TEMPLATE = "tool_use"


def open_template(tokenizer: PreTrainedTokenizerBase, override: str | None) -> ChatTemplate | None:
    """Return ``override``, or else the tokenizer's chat template; None if there is neither."""
    if override is None and not tokenizer.chat_template:
        return None
    from jinja2 import TemplateSyntaxError

    where = "--chat_template" if override else "the tokenizer's chat template"
    try:
        source = tokenizer.get_chat_template(override)
        # Jinja computes constant expressions when it compiles, so a template can take much memory or time here already.
        with template_memory(), template_time():
            _compile(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where}: not valid Jinja, line {error.lineno}: {error.message}.") from None
    # Jinja translates the template to Python, which limits how deeply blocks are nested.
    except SyntaxError as error:
        raise ConfigError(f"{where}: Python cannot compile it: {error.msg}.") from None
    # The tokenizer has several templates, and none of them is the default.
    except ValueError as error:
        raise ConfigError(f"the tokenizer's chat template: {error} Name one with --chat_template FILE.") from None
    # A chat may have calls and no column tools. It is rendered by the default template, which may not read the calls.
    if override is None and _TOOL_TEMPLATE in _named_templates(tokenizer):
        advice = f"the tokenizer's template {_TOOL_TEMPLATE} is for chats with a column tools, which this chat lacks"
    else:
        advice = _OTHER_TEMPLATE
    with template_memory():
        return ChatTemplate(source, tokenizer, advice)


def open_tool_template(tokenizer: PreTrainedTokenizerBase, override: str | None) -> ChatTemplate | None:
    """Return the template that transformers takes for chats with tools; None if all chats have the same one."""
    source = _named_templates(tokenizer).get(_TOOL_TEMPLATE)
    if override is not None or source is None:
        return None
    return open_template(tokenizer, source)


class ChatTemplate:
    """Renders chats as text, and finds the assistant's turns in the text.

    Args:
        advice: what to do about tools that the template does not read, for messages.
    """

    def __init__(self, source: str, tokenizer: PreTrainedTokenizerBase, advice: str = _OTHER_TEMPLATE):
        self.source = source
        self.advice = advice
        self.variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.eos = tokenizer.eos_token
        self.has_marks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        added_tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._control = ControlTokens(tokenizer)
        # Finds the token that ends a turn. Some models end turns with a token that is added, but not marked as special.
        self._end_pattern = any_of(token.content for token in added_tokens)
        # The frame of a turn depends only on the roles of the chat up to it, so it is learnt once for equal roles.
        self._frames: dict[tuple[str, ...], TurnFrame] = {}
        ordinary_tokens = {token.content for token in added_tokens if not token.special}
        self._turn_pattern = any_of(self._find_turn_markers(ordinary_tokens))
        # Finds the end-of-text token, if it ends every turn. The template may write another token between it and the content.
        messages, contents = _stand_ins(("user", "assistant", "user"))
        between = ""
        with suppress(BadSample):
            between = self._render_text(messages).partition(contents[1])[2].partition(contents[2])[0]
        self._eos_pattern = any_of([self.eos] if self.eos and self.eos in between else [])

    def render(self, chat: Chat, *, is_supervised_whole: bool = False) -> list[Rendered]:
        """Return the chat as rows of text that supervise each assistant turn once, with its end-of-turn token.

        Turns in ``chat.unsupervised`` are rendered and not supervised.

        Most templates need one row, the whole chat. If a template rewrites a turn when more turns follow, a further
        row holds the chat up to that turn, as it is rendered when the model generates the turn.

        Args:
            is_supervised_whole: return one row, the whole chat with an end of each turn, and supervise all of it.

        Raises:
            BadSample: the template refuses the chat or does not read a part of it, its turns cannot be separated, or a turn
                has a special token of the tokenizer in its text.
            ConfigError: the template writes no end of turn, and the tokenizer has none.
        """
        self._refuse_control_tokens(chat)
        messages = self._convert_calls(chat.messages, chat.tools)
        text = self._render_text(messages, tools=chat.tools)
        self._require_parts(messages, chat.tools, text)
        assistant_turns = find_assistant_turns(messages)
        if is_supervised_whole:
            turns = []
            # If the turns cannot be separated, no end-of-text tokens are added, and the text is supervised as it is.
            with suppress(BadSample):
                turns = [self._find_turn(messages, index, chat.tools, text) for index in assistant_turns]
            # A turn that the template rewrites later is not in the text of the whole chat.
            spans = [turn.span for turn in turns if text.startswith(turn.text)]
            return [self._add_ends(text, spans)._replace(turns=None)]
        is_supervised = [index not in chat.unsupervised for index in assistant_turns]

        # The template marks the turns itself.
        if self.has_marks:
            text, spans, shortened = self._find_marked_turns(messages, chat.tools)
            return [self._add_ends(text, list(compress(spans, is_supervised)), shortened)]

        # Otherwise each turn is found by rendering the chat up to it.
        turns = [self._find_turn(messages, index, chat.tools, text) for index in compress(assistant_turns, is_supervised)]
        rows = []
        # A chat in which no turn is supervised is one row without turns.
        for row_text, row_turns in _cover_turns(text, turns) or [(text, [])]:
            shortened = sum(turn.shortened for turn in row_turns)
            rows.append(self._add_ends(row_text, [turn.span for turn in row_turns], shortened))
        return rows

    def _refuse_control_tokens(self, chat: Chat) -> None:
        """Raise `BadSample` if a text of the chat has a control token, or a token that the template writes around turns."""
        parts = [(f"turn {number}", list(message.values())) for number, message in enumerate(chat.messages, 1)]
        if chat.tools:
            parts.append(("the column tools", [chat.tools]))
        for name, values in parts:
            texts = []
            for value in values:
                # Calls and tools are written into the text as JSON.
                if not isinstance(value, str):
                    value = json.dumps(value, ensure_ascii=False)
                texts.append(value)
            text = "\n".join(texts)
            refusal = self._control.refusal(name, text)
            if refusal:
                raise BadSample(refusal)
            token = self._turn_pattern.search(text)
            if token:
                raise BadSample(f"{name} has the text {token[0]!r}, which the chat template begins or ends turns with")

    def _require_parts(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str) -> None:
        """Raise `BadSample` if the template leaves out the tools or a part of a turn: with another, the text is the same."""
        if tools is not None and self._writes_same((messages, tools), (messages, None)):
            raise BadSample(f"there are tools, which the chat template does not read; {self.advice}")
        # All that the template may write, its own text included.
        all_texts = "\n".join([self.source, str(tools), *(str(value) for message in messages for value in message.values())])
        for index, message in enumerate(messages):
            role = message["role"]
            # Templates may leave out a part of an earlier answer, such as its thoughts. So an answer is the last turn here, as
            # it is when the model generates it.
            stop = index + 1 if role == "assistant" else len(messages)
            for key, value in message.items():
                if value is None or key in ("role", *IDENTIFIERS):
                    continue
                # A text that the rendered chat has as often as all these texts needs no further rendering.
                if isinstance(value, str) and text.count(value.strip()) >= all_texts.count(value.strip()):
                    continue
                # Texts become a character that no template writes, and calls are removed.
                other_value = "\x02" if isinstance(value, str) else None
                changed = [*messages[:index], message | {key: other_value}, *messages[index + 1 :]]
                if self._writes_same((messages[:stop], tools), (changed[:stop], tools)):
                    advice = "write it into the content" if key in THOUGHTS else self.advice
                    raise BadSample(f"turn {index + 1} ({role}) has {key}, which the chat template does not read; {advice}")

    def _writes_same(self, *chats: tuple[list[dict[str, Any]], list[dict[str, Any]] | None]) -> bool:
        """Return whether a template writes the same text for two chats, (turns, tools) each; False if it refuses one."""
        with suppress(BadSample):
            first, second = (self._render_text(messages, tools=tools) for messages, tools in chats)
            return first == second
        return False

    def _convert_calls(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Return the turns with their calls, and with contents that are null, in the form that the template reads."""
        if not any("tool_calls" in message for message in messages):
            return messages
        with suppress(BadSample):
            with_nulls = self._convert_arguments(messages, tools)
            text = self._render_text(with_nulls, tools=tools)
            text_without_nulls = self._render_text(with_text_contents(with_nulls), tools=tools)
            # If the template wrote out the contents that are null, one text would have more nulls than the other.
            if _NULL.findall(text) == _NULL.findall(text_without_nulls):
                return with_nulls
        # A template that fails on such a content, or writes it out, gets an empty text in its place.
        return self._convert_arguments(with_text_contents(messages), tools)

    def _convert_arguments(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Return the turns with the arguments of calls in the form that the template reads: an object, or JSON text."""
        # A template that expects JSON text either fails on an object, or prints it as a Python dict.
        text = None
        with suppress(BadSample):
            text = self._render_text(messages, tools=tools)
        if text is not None and not has_python_arguments(text, messages):
            return messages
        with_text = with_text_arguments(messages)
        try:
            json_text = self._render_text(with_text, tools=tools)
        except BadSample:
            # The caller reports the error of objects, which most templates read.
            return messages
        # A thought or a tool may quote such a dict. Then both texts have it, and the template does not print it.
        if text is not None and not has_python_arguments(text, messages, json_text):
            return messages
        return with_text

    # Render turns, with the generation prompt at the end if ``with_prompt``. Raises `BadSample` if the template refuses them.
    def _render_text(
        self, messages: list[dict[str, Any]], with_prompt: bool = False, tools: list[dict[str, Any]] | None = None
    ) -> str:
        # The compiled template cannot be pickled, so it is not an attribute of this object. transformers caches it.
        try:
            with template_time(), with_fixed_date(self.source) as compiled:
                text = compiled.render(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=with_prompt, **self.variables
                )
            return checked_length(text)
        except _LIMIT_ERRORS:
            raise
        except Exception as error:  # templates raise errors of any class
            raise BadSample(f"the chat template refuses it: {error}") from None

    def _find_turn_markers(self, tokens: set[str]) -> set[str]:
        """Return which of ``tokens`` the template writes around turns. A content with one of them would look like two turns.

        Pairs of tokens beside the assistant's content, such as ``<think>`` and ``</think>``, are left out: contents may
        have them as well.
        """

        # Return which of the tokens are in the text of a placeholder chat. Its contents have none.
        def tokens_around(*roles: str) -> set[str]:
            messages, _ = _stand_ins(roles)
            try:
                text = self._render_text(messages)
            except BadSample:
                return set()
            return {token for token in tokens if token in text}

        # Tokens around the user's turn alone are all markers: no model writes there.
        around_user = tokens_around("user")
        # Not every template takes a chat that ends with the user's turn.
        around_both = tokens_around("user", "assistant", "user") or tokens_around("user", "assistant")
        return around_user | {token for token in around_both if _matching_tag(token) not in around_both}

    def _find_marked_turns(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[TurnSpan], int]:
        """Return the chat as text, the assistant's turns in it by the template's marks, and how many turns were shortened."""
        try:
            from transformers.utils.chat_template_utils import render_jinja_template

            with template_time(), with_fixed_date(self.source):
                # It returns the texts and the spans of their marks, although transformers annotates its result differently.
                rendered: Any = render_jinja_template(
                    [messages],
                    tools=cast("Any", tools),
                    chat_template=self.source,
                    return_assistant_tokens_mask=True,
                    **self.variables,
                )
            (text,), (spans,) = rendered
            checked_length(text)
        except _LIMIT_ERRORS:
            raise
        # A template can raise any error: it is code, and many check the order of the roles themselves.
        except Exception as error:
            raise BadSample(f"the chat template refuses it: {error}") from None
        assistant_turns = find_assistant_turns(messages)
        if len(spans) != len(assistant_turns):
            raise BadSample(
                f"the chat template marks {len(spans)} turns as generated, the assistant has {len(assistant_turns)}"
            )
        roles = tuple(message["role"] for message in messages)
        turns = []
        shortened = 0
        for (start, stop), index in zip(spans, assistant_turns, strict=True):
            content = messages[index]["content"] or ""
            _require_calls(messages[index], text[start:stop], index)
            # Templates trim and join white space, which shortens nothing.
            marked_text = _remove_spaces(text[start:stop])
            parts = [content, *(messages[index].get(key, "") for key in THOUGHTS)]
            shortened += any(_remove_spaces(part) not in marked_text for part in parts)
            closing = self._get_frame(roles[: index + 1]).closing
            turns.append(self._include_end_token(text, start, stop, messages[index], closing or self.eos or ""))
        return text, turns, shortened

    def _include_end_token(self, text: str, start: int, stop: int, message: dict[str, Any], closing: str) -> TurnSpan:
        """Return a turn that is marked from ``start`` to ``stop``, with the token that ends it, which may be behind the marks.

        Args:
            closing: what the template writes after the content of the last turn.
        """
        end = self._eos_pattern.search(closing) or self._end_pattern.search(closing)
        if end:
            # The marks may include any part of ``closing``, from its beginning. Try how much of it they include, most first.
            for marked_length in range(len(closing), -1, -1):
                content_stop = stop - marked_length
                is_marked = text[start:stop].endswith(closing[:marked_length])
                if is_marked and text.startswith(closing[: end.end()], content_stop):
                    return TurnSpan(start, content_stop + end.end(), True)
            # Turns before the last one may end with another token. A control token at the end of the marked text is this token,
            # since no content has one.
            marked = text[start:stop].rstrip()
            tokens = list(self._end_pattern.finditer(marked))
            if tokens and tokens[-1].end() == len(marked) and self._control.named(tokens[-1][0]):
                return TurnSpan(start, start + len(marked), True)
            # Otherwise the token may be directly behind the marks.
            next_token = self._end_pattern.match(text, stop)
            if next_token:
                return TurnSpan(start, next_token.end(), True)
        # No token follows the marked text, so the turn ends inside of it.
        length, has_end = self._find_end(text[start:stop], message, None)
        return TurnSpan(start, start + length, has_end)

    def _find_turn(
        self, messages: list[dict[str, Any]], index: int, tools: list[dict[str, Any]] | None, text: str
    ) -> GeneratedTurn:
        """Return a turn as the model would generate it, also if the template rewrites it later. ``text``: the whole chat."""
        content = (messages[index]["content"] or "").strip()
        # Turns that follow may change this one, so render the chat up to it.
        if index + 1 < len(messages):
            text = self._render_text(messages[: index + 1], tools=tools)
        prompt = self._render_prompt(messages, index, tools)
        prompt_end, closing = self._get_frame(tuple(message["role"] for message in messages[: index + 1]))

        # The text before the turn is the generation prompt, or the prompt without its end if the template leaves that out.
        lead = prompt
        if prompt_end and prompt.endswith(prompt_end) and not text.startswith(prompt):
            lead = prompt.removesuffix(prompt_end)
        if not text.startswith(lead):
            raise BadSample(f"the chat template renders turn {index + 1} differently from its own generation prompt")
        turn = text[len(lead) :]
        if lead != prompt and closing is not None and turn.endswith(closing):
            written_content = turn.removesuffix(closing).strip()
            beginning = prompt_end.strip()
            if _continues_prompt(content, written_content, beginning):
                # The model sees the complete prompt, so the turn is the content that follows it.
                lead = prompt
                calls = ""
                if "tool_calls" in messages[index]:
                    # The template wrote the calls behind the content, of which it may have left out the beginning. Compare some
                    # characters first, since it takes long to copy the rest of a long thought for each position.
                    left_out = next(
                        start
                        for start in range(len(content) + 1)
                        if written_content.startswith(content[start : start + 20])
                        and written_content.startswith(content[start:])
                    )
                    calls = written_content[len(content) - left_out :]
                # A prompt's end of white space alone begins no thought, so the template wrote all that follows it.
                turn = (content.removeprefix(beginning) + calls if beginning else written_content).lstrip() + closing

        end, has_end = self._find_end(turn, messages[index], closing)
        answer = turn[:end]
        if has_end:
            # The answer is the text before the last token, which ends the turn.
            *_, end_token = self._end_pattern.finditer(turn, 0, end)
            answer = turn[: end_token.start()]
        # A turn of an end token alone would teach the model to say nothing.
        if not answer.strip():
            raise BadSample(f"the chat template leaves turn {index + 1} out")
        if self.eos and self.eos in answer:
            raise BadSample(f"the chat template writes {self.eos!r}, the end of a text, inside of turn {index + 1}")
        _require_calls(messages[index], turn[:end], index)
        # The content may begin in the prompt's end. Templates trim and join white space, which shortens nothing.
        written_text = lead[len(lead) - len(prompt_end) :] + turn
        shortened = _remove_spaces(content) not in _remove_spaces(written_text)
        return GeneratedTurn(lead + turn[:end], len(lead), has_end, shortened)

    def _render_prompt(self, messages: list[dict[str, Any]], index: int, tools: list[dict[str, Any]] | None) -> str:
        """Return the text that the model continues with the turn at ``index``."""
        if index > 0:
            return self._render_text(messages[:index], with_prompt=True, tools=tools)
        # There is no turn before a greeting. Many templates fail on a chat without turns, or write a default system turn only
        # before a greeting. So take the prompt of no turns only if the greeting is rendered with the same beginning.
        prompt_end = self._get_frame(("assistant",)).prompt_end
        with suppress(BadSample):
            prompt = self._render_text([], with_prompt=True, tools=tools)
            if prompt and self._render_text(messages[:1], tools=tools).startswith(prompt.removesuffix(prompt_end)):
                return prompt
        # Otherwise the prompt is the text before the content of another greeting, a placeholder.
        (greeting,), (content,) = _stand_ins(("assistant",))
        return self._render_text([greeting], tools=tools).partition(content)[0].removesuffix("\t") + prompt_end

    def _get_frame(self, roles: tuple[str, ...]) -> TurnFrame:
        if roles not in self._frames:
            self._frames[roles] = self._learn_frame(roles)
        return self._frames[roles]

    # Learn the frame of the last turn by rendering a placeholder chat, with the turn and with the prompt in its place.
    def _learn_frame(self, roles: tuple[str, ...]) -> TurnFrame:
        messages, contents = _stand_ins(roles)
        try:
            prompt = self._render_text(messages[:-1], with_prompt=True)
            without_prompt = self._render_text(messages[:-1])
            text = self._render_text(messages)
        except BadSample:
            return TurnFrame()
        # The content is left out or repeated, so the text around it is not known.
        if text.count(contents[-1]) != 1:
            return TurnFrame()
        lead, closing = text.split(contents[-1])
        # Templates that do not trim contents leave the placeholder's tabs.
        lead = lead.removesuffix("\t")
        closing = closing.removeprefix("\t")
        # What the prompt has beyond the text before the content is left out of the rendered turn.
        written_length = shared_length(lead, prompt)
        # Both must be equal at least up to the generation prompt. The prompt of no turns may lack a default system turn, so it
        # must have all that is before a greeting.
        expected_length = shared_length(without_prompt, prompt) if len(roles) > 1 else len(lead)
        if written_length < expected_length:
            return TurnFrame("", closing)
        return TurnFrame(prompt[written_length:], closing)

    def _find_end(self, turn: str, message: dict[str, Any], closing: str | None) -> tuple[int, bool]:
        """Return the position in ``turn`` where it ends, and whether a token ends it there.

        The end is the first added token after the content, or the content's last character if there is no such token. If calls
        follow the content, and the text after them is not known, the end is the last added token.
        """
        # If the text after the content is known, the content ends before it. Otherwise search the turn for the content.
        tokens = list(self._end_pattern.finditer(turn))
        if closing is not None and turn.endswith(closing):
            content_end = len(turn) - len(closing)
            end = self._end_pattern.search(turn, content_end)
            # No text has a control token, so one that the calls end with ends the turn.
            if not end and tokens and self._control.named(tokens[-1][0]) and not turn[tokens[-1].end() :].strip():
                end = tokens[-1]
        else:
            content = message["content"] or ""
            content_end = _content_end(turn, content)
            # A thought before the content, or text behind the turn, may repeat it. So prefer a token right behind the content.
            candidates = [token for token in tokens if turn[: token.start()].rstrip().endswith(content.strip())]
            trimmed_end = _content_end(turn, content.strip())
            if not candidates:
                candidates = list(self._end_pattern.finditer(turn, trimmed_end))[:1]
            # If the template changed the content, it is not found, and may have such tokens. Calls may have them around them.
            if not trimmed_end or "tool_calls" in message:
                # Text behind the last token belongs to the turn, which then has no such end.
                candidates = tokens if tokens and not turn[tokens[-1].end() :].strip() else []
            end = candidates[-1] if candidates else None
        if end:
            end = self._eos_pattern.search(turn, end.start()) or end
            return end.end(), True
        return max(len(turn.rstrip()), content_end), False

    def _add_ends(self, text: str, turns: list[TurnSpan], shortened: int = 0) -> Rendered:
        """Return the row with an end-of-text token after each turn that no token ends."""
        if all(turn.has_end for turn in turns):
            return Rendered(text, [(turn.start, turn.stop) for turn in turns], 0, shortened)
        if self.eos is None:
            raise ConfigError(
                "the chat template ends the assistant's turns with no special token, and the tokenizer has no "
                "end-of-text token to put there: the model would never learn to stop. "
                "Give another template with --chat_template FILE, or an instruct model's tokenizer."
            )
        pieces = []
        spans = []
        copied = 0  # characters of the text that are in ``pieces``
        added_length = 0  # characters of the tokens that were added, by which the later turns move
        added_eos = 0
        for start, stop, has_end in turns:
            pieces.append(text[copied:stop])
            copied = stop
            turn_start = start + added_length
            if not has_end:
                pieces.append(self.eos)
                added_length += len(self.eos)
                added_eos += 1
            spans.append((turn_start, stop + added_length))
        pieces.append(text[copied:])
        return Rendered("".join(pieces), spans, added_eos, shortened)


def _cover_turns(text: str, turns: list[GeneratedTurn]) -> list[tuple[str, list[GeneratedTurn]]]:
    """Return as few rows as are needed to supervise every turn, (text, turns) each. The whole chat is first, if it is needed.

    A row supervises a turn if the row begins with the turn's text, which is the model's prompt and its answer.
    """
    rows = []
    missing = turns
    # Later turns first: the longest text may supervise several of the turns before.
    for row_text in (text, *(turn.text for turn in reversed(turns))):
        row_turns = [turn for turn in missing if row_text.startswith(turn.text)]
        if row_turns:
            rows.append((row_text, row_turns))
        missing = [turn for turn in missing if turn not in row_turns]
    return rows


def _continues_prompt(content: str, written_content: str, prompt_end: str) -> bool:
    """Return whether a content continues the generation prompt, whose end the template leaves out of the rendered turn.

    Args:
        written_content: the content as the template writes it.
        prompt_end: without white space around it, so it may be empty.
    """
    # The content repeats the prompt's end, such as <think>.
    if prompt_end and content.startswith(prompt_end):
        return True
    # The template wrote only the end of the content: it left out what the model begins in the prompt, such as its thoughts.
    # A prompt's end of white space alone precedes any content.
    return content.endswith(written_content) and (written_content != content or not prompt_end)


def _require_calls(message: dict[str, Any], turn: str, index: int) -> None:
    """Raise `BadSample` if a rendered turn lacks the name of a function that it calls, as often as it calls the function."""
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    for name in names:
        if turn.count(name) < names.count(name):
            raise BadSample(f"the chat template leaves out a call of {name!r} in turn {index + 1}")


def _stand_ins(roles: tuple[str, ...]) -> tuple[list[dict[str, str]], list[str]]:
    """Return a placeholder chat of these roles, with which a template is examined, and the contents of its turns.

    No template writes the character \\x02 itself. Each content has tabs around it, which a template may trim.
    """
    contents = [f"\x02{i}\x02" for i in range(len(roles))]
    messages = [{"role": role, "content": f"\t{content}\t"} for role, content in zip(roles, contents, strict=True)]
    return messages, contents


def _matching_tag(token: str) -> str:
    """Return ``</a>`` for ``<a>``, and ``<a>`` for ``</a>``."""
    return f"<{token[2:]}" if token.startswith("</") else f"</{token[1:]}"


def _remove_spaces(text: str) -> str:
    return "".join(text.split())


def _compile(source: str) -> Template:
    """Return a chat template, compiled and cached by transformers.

    transformers is imported in this function, because a recipe imports this module before it knows whether anything is trained.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)


@contextmanager
def with_fixed_date(source: str) -> Iterator[Template]:
    """Return the compiled template, for which today is `TODAY` until the context ends."""
    template = _compile(source)
    # transformers turns functions among the arguments of a template into text, so the function is set in its globals.
    template.globals["strftime_now"] = TODAY.strftime
    try:
        yield template
    finally:
        # All renderings share the template, and a conversation gets the true date, which the environment's globals have.
        del template.globals["strftime_now"]


def _named_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the tokenizer's templates by name; nothing if it has one without a name."""
    templates = tokenizer.chat_template
    return templates if isinstance(templates, dict) else {}


# Return the indices of the assistant's turns.
def find_assistant_turns(messages: list[dict[str, str]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _content_end(text: str, content: str) -> int:
    """Return the position after ``content``; 0 if ``text`` does not contain it, since a template changed it."""
    if content not in text:
        return 0
    return text.find(content) + len(content)
