"""``zerobook chat``: talk to a trained model in the terminal, or through a pipe."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import TextStreamer

from zerobook.cli.arguments import Parser, positive
from zerobook.data.templates import render_prompt
from zerobook.data.turns import ControlTokens
from zerobook.errors import ConfigError, DataError
from zerobook.models.generation_config import stop_tokens
from zerobook.models.result import Loaded, load_result
from zerobook.utils.terminal import plain, say

if TYPE_CHECKING:
    from io import TextIOWrapper

    from transformers import PreTrainedTokenizerBase

    from zerobook.evaluation.generation import Generates

_NEW_TOKENS = 256
COMMANDS = {
    "/help": "show this list",
    "/reset": "clear the conversation",
    "/quit": "leave; so does the end of the input (Ctrl-D)",
    "Ctrl-C": "stop an answer",
}
"""What a person can type in a chat besides messages -> its effect."""


def chat(argv: list[str]) -> int:
    """Read lines, print answers. Returns 0 at the end of the input, or at /quit."""
    parser = Parser("zerobook chat", description="Chat with a trained model. /help lists the commands that you can type.")
    parser.add_argument("path", help="a run's output_dir, a model or adapter folder, a hub name or embedded:smollm2")
    parser.add_argument(
        "--max_new_tokens", type=positive, help="maximum number of tokens in an answer (default: the model's own, or 256)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, help="sampling temperature; 0: greedy decoding (default: 0)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--source_prefix", metavar="TEXT", help="prefix of each source of a seq2seq model, if it is not saved with the model"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the Python code that comes with the model")
    asked = parser.parse_args(argv)
    loaded = load_result(asked.path, trust_remote_code=asked.trust_remote_code)
    prefix = loaded.source_prefix if asked.source_prefix is None else asked.source_prefix
    _talk(Conversation(loaded, asked.system, prefix, asked.max_new_tokens, asked.temperature))
    return 0


def _temperature(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def _talk(conversation: Conversation) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):  # not everywhere
            import readline  # noqa: F401  arrow keys and history in input()
        print("/help lists the commands, Ctrl-C stops an answer")
    else:
        cast("TextIOWrapper", sys.stdin).reconfigure(errors="replace")
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print() if terminal else None
            return
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
            _say("forgotten")
        elif line == "/help":
            for command, effect in COMMANDS.items():
                say(f"{command:<8}{effect}", file=sys.stderr)
        elif line:
            conversation.answer(line)


def _say(note: str) -> None:
    """Print a note of the program on stderr; stdout is for the model's answers."""
    say(f"({note})", file=sys.stderr)


class _Answer(TextStreamer):
    """Prints an answer word by word and keeps it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(plain(text), stream_end)


class Conversation:
    """A model and the turns so far.

    A causal model with a chat template gets the turns in its template, and one without continues their text. A seq2seq
    model gets the turns, joined by newlines, after ``source_prefix``.

    Raises:
        ConfigError: the template refuses the system message, or it names a special token.
    """

    def __init__(self, loaded: Loaded, system: str | None, source_prefix: str, max_new_tokens: int | None, temperature: float):
        self.model, self.tokenizer, self.kind = loaded.model, loaded.tokenizer, loaded.kind
        self.templated = self.kind == "causal" and getattr(self.tokenizer, "chat_template", None) is not None
        self._control = ControlTokens(self.tokenizer)
        refusal = self._control.refusal("--system", system or "")
        if refusal:
            raise ConfigError(f"{refusal}. Leave it out.")
        self.system = system
        self.source_prefix = source_prefix
        self.turns: list[dict[str, str]] = []
        context = loaded.context
        self.new_tokens = max_new_tokens or self.model.generation_config.max_new_tokens or _NEW_TOKENS
        # an encoder has its positions to itself; a decoder continues the prompt
        most = context if self.kind == "seq2seq" or context is None else context // 2
        if most and self.new_tokens > most:
            self.new_tokens = most
            _say(f"answers end after {self.new_tokens} tokens: the model's context is {context}")
        self.room = context if self.kind == "seq2seq" or context is None else context - self.new_tokens
        self.options = self._generation_options(temperature)

    def reset(self) -> None:
        self.turns = []

    def answer(self, line: str) -> str:
        """Print the answer to ``line`` as it is made, and return it. Ctrl-C ends it early; the turn is kept."""
        refusal = self._control.refusal("this message", line)
        if refusal:  # as in training: a message is text and holds no control token
            _say(f"{refusal}; leave it out")
            return ""
        self.turns.append({"role": "user", "content": line})
        ids = self._fitting_prompt()
        if ids is None:
            self.turns.pop()
            return ""
        streamer = _Answer(self.tokenizer)
        together = self.options["num_beams"] > 1  # with beams, the words are known only at the end
        try:
            found = cast("Generates", self.model).generate(
                input_ids=ids, attention_mask=ids.new_ones(ids.shape), streamer=None if together else streamer,
                max_new_tokens=self.new_tokens, **self.options,
            )  # fmt: skip
            if together:
                text = cast("str", self.tokenizer.decode(found[0], skip_special_tokens=True))
                streamer.on_finalized_text(text, stream_end=True)
        except KeyboardInterrupt:
            streamer.end()
            _say("stopped")
        self.turns.append({"role": "assistant", "content": streamer.text.strip() if self.templated else streamer.text})
        return streamer.text

    # --- what the model sees
    def _fitting_prompt(self) -> torch.Tensor | None:
        """Token ids [1, length] of the conversation, without its oldest turns where it is too long.

        None where the last message alone does not fit.
        """
        turns = self.turns
        for start in range(0, len(turns), 2):  # a question and its answer go together: templates need both
            self.turns = turns[start:]
            ids = self._prompt()
            if self.room is None or ids.shape[1] <= self.room:
                if start:
                    _say(f"the {start} oldest turns no longer fit into the model's context and were dropped")
                return ids
        self.turns = turns
        _say(f"this message takes {ids.shape[1]} tokens and {self.room} fit; shorten it")
        return None

    def _prompt(self) -> torch.Tensor:
        if self.templated:
            text, special = self._render(self.turns), False
        else:
            turns = [self.source_prefix + self.system] if self.system else []
            turns += [turn["content"] for turn in self.turns]
            text, special = "\n".join(turns), True
            if self.kind == "seq2seq" and not self.system:
                text = self.source_prefix + text
        return self.tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"].to(self.model.device)

    def _render(self, turns: list[dict[str, str]]) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            return render_prompt(self.tokenizer, system + turns)
        except DataError:
            raise
        except Exception as error:  # jinja's, and whatever the template raises
            raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error

    # --- how it answers
    def _generation_options(self, temperature: float) -> dict[str, Any]:
        own = self.model.generation_config
        # an encoder-decoder takes the beams of its run's evaluation; chats are printed word by word, which beams do not allow
        beams = (own.num_beams or 1) if self.kind == "seq2seq" and temperature == 0 else 1
        options: dict[str, Any] = {"num_beams": beams, "pad_token_id": self.tokenizer.pad_token_id}
        options["eos_token_id"] = stop_tokens(own, self.tokenizer, encoder_decoder=self.kind == "seq2seq") or None
        if temperature > 0:
            return options | {"do_sample": True, "temperature": temperature}
        return options | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
