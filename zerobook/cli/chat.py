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
from zerobook.cli.export import add_checkpoint_flag, find_checkpoint
from zerobook.data.templates import render_prompt
from zerobook.data.turns import ControlTokens
from zerobook.errors import ConfigError, DataError
from zerobook.models.generation_config import list_stop_tokens
from zerobook.models.result import Loaded, load_result
from zerobook.utils.terminal import plain, say

if TYPE_CHECKING:
    from io import TextIOWrapper

    from transformers import PreTrainedTokenizerBase

    from zerobook.evaluation.generation import Generates

_NEW_TOKENS = 256
# What a person can type in a chat besides messages -> its effect.
COMMANDS = {
    "/help": "show this list",
    "/reset": "clear the conversation",
    "/quit": "leave; so does the end of the input (Ctrl-D)",
    "Ctrl-C": "stop an answer",
}


def chat(argv: list[str]) -> int:
    """Read lines, print answers. Returns 0 at the end of the input, or at /quit."""
    parser = Parser("zerobook chat", description="Chat with a trained model. /help lists the commands that you can type.")
    parser.add_argument("path", help="a run's output_dir, a model or adapter folder, a hub name or embedded:smollm2")
    parser.add_argument(
        "--max_new_tokens", type=positive, help="maximum number of tokens in an answer (default: the model's own, or 256)"
    )
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, help="sampling temperature; 0: greedy decoding (default: 0)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--source_prefix", metavar="TEXT", help="prefix of each source of a seq2seq model, if it is not saved with the model"
    )
    add_checkpoint_flag(parser)
    parser.add_argument("--trust_remote_code", action="store_true", help="run the Python code that comes with the model")
    flags = parser.parse_args(argv)
    path = str(find_checkpoint(flags.path, flags.checkpoint)) if flags.checkpoint else flags.path
    loaded = load_result(path, trust_remote_code=flags.trust_remote_code)
    source_prefix = loaded.source_prefix if flags.source_prefix is None else flags.source_prefix
    _talk(Conversation(loaded, flags.system, source_prefix, flags.max_new_tokens, flags.temperature))
    return 0


# The type of a flag. Its name is a part of argparse's error: invalid temperature value.
def temperature(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


# Read messages and commands from stdin, and print answers, until the input ends.
def _talk(conversation: Conversation) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        # The import of readline gives ``input()`` arrow keys and a history. Not every Python has the module.
        with suppress(ImportError):
            import readline  # noqa: F401
        print("/help lists the commands, Ctrl-C stops an answer")
    else:
        # A pipe may hold bytes that are not UTF-8.
        cast("TextIOWrapper", sys.stdin).reconfigure(errors="replace")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
            _print_note("forgotten")
        elif line == "/help":
            for command, effect in COMMANDS.items():
                say(f"{command:<8}{effect}", file=sys.stderr)
        elif line:
            conversation.answer(line)


def _print_note(note: str) -> None:
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

    A causal model with a chat template gets the turns in its template. A causal model without a template continues the text of
    the turns, joined by newlines. A seq2seq model gets this text after ``source_prefix``.

    Args:
        max_new_tokens: maximum number of tokens in an answer; None: the model's setting, or `_NEW_TOKENS`.

    Raises:
        ConfigError: the system message contains a special token. `answer` raises it if the template refuses the conversation.
    """

    def __init__(self, loaded: Loaded, system: str | None, source_prefix: str, max_new_tokens: int | None, temperature: float):
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.is_seq2seq = loaded.kind == "seq2seq"
        self.has_template = loaded.kind == "causal" and getattr(self.tokenizer, "chat_template", None) is not None
        self._control_tokens = ControlTokens(self.tokenizer)
        refusal = self._control_tokens.refusal("--system", system or "")
        if refusal:
            raise ConfigError(f"{refusal}. Leave it out.")
        self.system = system
        self.source_prefix = source_prefix
        self.turns: list[dict[str, str]] = []
        self.new_tokens = max_new_tokens or self.model.generation_config.max_new_tokens or _NEW_TOKENS
        # A prompt and an answer may each fill the context of an encoder-decoder. A decoder has one context for both, and the
        # prompt gets at least half of it.
        context = loaded.context
        longest_answer = context
        if context is not None and not self.is_seq2seq:
            longest_answer = context // 2
        if longest_answer and self.new_tokens > longest_answer:
            self.new_tokens = longest_answer
            _print_note(f"answers end after {self.new_tokens} tokens: the model's context is {context}")
        self.longest_prompt = context
        if context is not None and not self.is_seq2seq:
            self.longest_prompt = context - self.new_tokens
        self.options = self._generation_options(temperature)

    def reset(self) -> None:
        self.turns = []

    def answer(self, line: str) -> str:
        """Print the answer to ``line`` while it is generated, and return it.

        After Ctrl-C, the answer so far is a turn of the conversation. The return value is empty if the message is refused.
        """
        # In training, too, a message is text, in which special tokens are not allowed.
        refusal = self._control_tokens.refusal("this message", line)
        if refusal:
            _print_note(f"{refusal}; leave it out")
            return ""
        self.turns.append({"role": "user", "content": line})
        prompt = self.fitting_prompt()
        # A message that does not fit is not a turn of the conversation.
        if prompt is None:
            self.turns.pop()
            return ""
        streamer = _Answer(self.tokenizer)
        # A beam search knows the words only at its end.
        is_streamed = self.options["num_beams"] == 1
        try:
            sequences = cast("Generates", self.model).generate(
                input_ids=prompt,
                attention_mask=prompt.new_ones(prompt.shape),
                streamer=streamer if is_streamed else None,
                max_new_tokens=self.new_tokens,
                **self.options,
            )
            if not is_streamed:
                text = cast("str", self.tokenizer.decode(sequences[0], skip_special_tokens=True))
                streamer.on_finalized_text(text, stream_end=True)
        except KeyboardInterrupt:
            streamer.end()
            _print_note("stopped")
        answer = streamer.text.strip() if self.has_template else streamer.text
        self.turns.append({"role": "assistant", "content": answer})
        return streamer.text

    # --- what the model sees
    def fitting_prompt(self) -> torch.Tensor | None:
        """Return token ids [1, length] of the conversation. If it is too long, its oldest turns are dropped.

        None if the last message alone does not fit.
        """
        # Drop a question together with its answer, since templates need both.
        for start in range(0, len(self.turns), 2):
            prompt = self.prompt(self.turns[start:])
            if self.longest_prompt is None or prompt.shape[1] <= self.longest_prompt:
                if start:
                    _print_note(f"the {start} oldest turns no longer fit into the model's context and were dropped")
                    self.turns = self.turns[start:]
                return prompt
        _print_note(f"this message takes {prompt.shape[1]} tokens and {self.longest_prompt} fit; shorten it")
        return None

    def prompt(self, turns: list[dict[str, str]]) -> torch.Tensor:
        """Return token ids [1, length] of the turns, on the model's device."""
        if self.has_template:
            # The text of a template has all special tokens, so none are added below.
            text = self._render(turns)
        else:
            texts = [turn["content"] for turn in turns]
            if self.system:
                texts.insert(0, self.system)
            text = "\n".join(texts)
            if self.is_seq2seq:
                text = self.source_prefix + text
        encoded = self.tokenizer(text, add_special_tokens=not self.has_template, return_tensors="pt")
        return encoded["input_ids"].to(self.model.device)

    # Return the system message and the turns as text in the model's chat template.
    def _render(self, turns: list[dict[str, str]]) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            return render_prompt(self.tokenizer, system + turns, fixed_date=False)
        except DataError:
            raise
        # The template may raise errors of any type.
        except Exception as error:
            raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error

    # --- how the model answers
    # Return further arguments of ``generate``.
    def _generation_options(self, temperature: float) -> dict[str, Any]:
        saved = self.model.generation_config
        beams = 1
        # An encoder-decoder uses the number of beams of its run's evaluation. Other models have no beams, so that their answers
        # can be printed word by word.
        if self.is_seq2seq and temperature == 0:
            beams = saved.num_beams or 1
        options: dict[str, Any] = {
            "num_beams": beams,
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": list_stop_tokens(saved, self.tokenizer, encoder_decoder=self.is_seq2seq) or None,
        }
        if temperature > 0:
            return options | {"do_sample": True, "temperature": temperature}
        # transformers warns if a saved config sets these and nothing is sampled.
        return options | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
