"""Multiple-choice tasks, scored by the likelihood of each choice. Nothing is generated.

The definitions are those of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness,
``lm_eval/api/task.py``), with the text of the choice, not its letter, as the continuation:

``acc``       share of questions whose right choice has the highest log P(choice | prompt), summed over its tokens.
``acc_norm``  the same with the sum divided by the UTF-8 bytes of the choice, so that long choices are not at a
              disadvantage ("byte-length normalized" in https://blog.eleuther.ai/multiple-choice-normalization/; the
              harness's code divides by characters under this name and by bytes as ``acc_bytes``: equal in ASCII).

The prompt is ``QUESTION\\nAnswer:`` and the choice follows after a space; with a chat template the prompt is a user's
turn, and the choice starts the assistant's. Among equal choices, the first is picked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerobook.data.turns import ControlTokens
from zerobook.errors import ConfigError, DataError, DivergenceError
from zerobook.evaluation.held_out import rows_at_once
from zerobook.utils.bars import tqdm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerobook.models.result import Kind
    from zerobook.strategy import Strategy

LISTED_PROBLEMS = 5


@dataclass(frozen=True)
class Question:
    question: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice."""
    subject: str | None = None


@dataclass(frozen=True)
class Task:
    name: str
    """The file's name without its ending."""
    questions: tuple[Question, ...]

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing: the mean of 1 / number of choices."""
        return sum(1 / len(q.choices) for q in self.questions) / len(self.questions)


# --- task files
def read_task(path: str | Path) -> Task:
    """Read a JSONL file in MMLU's form: ``question``, ``choices``, ``answer`` (index or letter), maybe ``subject``.

    Raises:
        DataError: a file that cannot be read or is empty, or bad lines: the first few with their numbers and reasons.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"not UTF-8 text (byte {getattr(error, 'start', '?')})"
        raise DataError(f"{path}: the task cannot be read: {reason}.") from None
    questions, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(line))
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:LISTED_PROBLEMS])
        more = f"\n  and {len(problems) - LISTED_PROBLEMS} more" if len(problems) > LISTED_PROBLEMS else ""
        raise DataError(f"{path}: {len(problems)} of {len(problems) + len(questions)} questions are bad:\n{listed}{more}")
    if not questions:
        raise DataError(f"{path}: the task is empty. Expected a line of JSON for each question.")
    return Task(path.stem, tuple(questions))


def _question(line: str) -> Question:
    """Return a line's question. Raises `ValueError` with the reason where the line is wrong."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a question: nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} where an object is expected")
    missing = [key for key in ("question", "choices", "answer") if key not in row]
    if missing:
        raise ValueError(f"no {' and no '.join(missing)}; it has {', '.join(row) or 'nothing'}")
    question, choices, answer, subject = row["question"], row["choices"], row["answer"], row.get("subject")
    if not _is_text(question):
        raise ValueError(f"question is {short(question)}, not text")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"choices is {short(choices)}, not a list of two or more")
    for index, choice in enumerate(choices):
        if not _is_text(choice):
            raise ValueError(f"choices[{index}] is {short(choice)}, not text")
    letters = [chr(ord("A") + index) for index in range(min(len(choices), 26))]
    if isinstance(answer, str) and answer in letters:
        answer = letters.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"answer is {short(answer)}; expected an index from 0 to {len(choices) - 1} or a letter from A to {letters[-1]}"
        )
    if subject is not None and not _is_text(subject):
        raise ValueError(f"subject is {short(subject)}, not text")
    return Question(question, tuple(choices), answer, subject)


def _is_text(value: Any) -> bool:
    """Return whether ``value`` is a non-blank string that can be written as UTF-8 (JSON allows half a surrogate pair)."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= c <= "\udfff" for c in value)


# --- likelihoods
@dataclass(frozen=True)
class Scored:
    """Token ids; those from ``first`` on are the choice."""

    ids: list[int]
    first: int
    source: list[int] | None = None
    """Input ids of a seq2seq model's encoder; None for a causal model."""


class Encoder:
    """Turns (prompt, choice) into `Scored` tokens.

    Args:
        kind: ``causal`` or ``seq2seq``.
        apply_chat_template: the prompt becomes a user's turn in the tokenizer's chat template.
        max_length: tokens the model takes; longer prompts lose their beginning. None: no limit.
        prefix: text that a seq2seq model was trained to see before every source.

    Raises:
        ConfigError: the tokenizer has no chat template, but one is needed, or it gives no offsets of its tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: Kind,
        *,
        apply_chat_template: bool = False,
        max_length: int | None = None,
        prefix: str = "",
    ):
        if apply_chat_template and getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("--apply_chat_template: the tokenizer has no chat template. Leave the flag out.")
        if kind == "causal" and not tokenizer.is_fast:
            raise ConfigError(
                f"{type(tokenizer).__name__} does not tell which characters a token covers, which scoring needs. "
                "Save the model with a fast tokenizer (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.kind = kind
        self.chat = apply_chat_template
        self.max_length = max_length
        self.prefix = prefix
        self.cut = 0
        """Number of sequences that lost the beginning of their prompt."""
        self.control = ControlTokens(tokenizer)
        self.lead = [] if self.chat else self.control.leading  # as in training; templates write their own

    def __call__(self, question: str, choice: str) -> Scored:
        refusal = self.control.refusal("its text", question) or self.control.refusal("its choice", choice)
        if refusal:
            raise DataError(f"the question {question[:60]!r} cannot be asked: {refusal}. Leave it out.")
        prompt = f"{question}\nAnswer:"
        if self.chat:
            turns = [{"role": "user", "content": prompt}]
            prompt = cast("str", self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        if self.kind == "seq2seq":
            return self._seq2seq(self.prefix + prompt, choice)
        text = prompt + ("" if self.chat else " ") + choice
        # encoded together, because a token may cross the boundary; such a token depends on the choice and belongs to it
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        inside = [i for i, (start, end) in enumerate(encoded["offset_mapping"]) if start < end <= len(prompt)]
        ids, first = self.lead + encoded["input_ids"], len(self.lead) + (inside[-1] + 1 if inside else 0)
        over = len(ids) - (self.max_length or len(ids))
        if over > 0:
            self.cut += 1
            ids, first = ids[over:], first - over
        if first < 1:
            raise DataError(
                f"the choice {choice[:60]!r} leaves no room for its question: the model takes {self.max_length} tokens."
            )
        return Scored(ids, first)

    def _seq2seq(self, prompt: str, choice: str) -> Scored:
        source = self.tokenizer(prompt, verbose=False)["input_ids"]
        target = self.tokenizer(text_target=choice, return_special_tokens_mask=True, verbose=False)
        # a leading language or start token is read but not scored; the end token is neither, as in the harness
        spoken = [i for i, special in enumerate(target["special_tokens_mask"]) if not special]
        if not spoken:
            raise DataError(f"the choice {choice[:60]!r} has no tokens of its own in this tokenizer.")
        ids = target["input_ids"][: spoken[-1] + 1]
        if self.max_length and len(ids) > self.max_length:
            raise DataError(f"the choice {choice[:60]!r} has {len(ids)} tokens; the model takes {self.max_length}.")
        if self.max_length and len(source) > self.max_length:
            self.cut += 1
            source = source[-self.max_length :]
        return Scored(ids, spoken[0], source)


@torch.no_grad()
def likelihoods(
    model: nn.Module,
    sequences: Sequence[Scored],
    *,
    pad_token_id: int,
    batch_size: int,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    progress: bool = False,
) -> list[list[float]]:
    """Return two numbers of every sequence, on every rank.

    They are log P(choice | prompt) in nats, summed over the tokens of the choice; and 1 where each of these tokens is the one
    that the model predicts, otherwise 0.

    Batches do not depend on the number of ranks: rank r takes batches r, r + world_size, ... of one common list. So
    the scores are the same numbers on any number of processes. Every rank runs the same number of forwards, since
    each may gather weights from all ranks; a rank without a batch repeats the last one and discards the scores.

    Args:
        batch_size: sequences (choices, not questions) in a forward.
        reduce: sums a tensor over the ranks.
    """
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids) - len(sequences[i].source or ()))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    scores = torch.zeros(len(sequences), 2, device=device)
    for start in tqdm(range(0, len(batches), world_size), desc="scoring", leave=False, disable=None if progress else True):
        mine = start + rank
        batch = batches[min(mine, len(batches) - 1)]
        values = _forward(model, [sequences[i] for i in batch], pad_token_id, device)
        if mine < len(batches):
            scores[torch.tensor(batch, device=device)] = values
    return reduce(scores).tolist()


def _forward(model: nn.Module, rows: list[Scored], pad: int, device: torch.device | str) -> torch.Tensor:
    """Return summed log-likelihoods, and whether all tokens are the model's first choice, float32 [rows, 2]."""
    ids, mask = _padded([row.ids for row in rows], pad, device)
    choice = mask.bool()
    for i, row in enumerate(rows):
        choice[i, : row.first] = False
    if rows[0].source is None:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        ids, choice = ids[:, 1:], choice[:, 1:]
    else:
        source, source_mask = _padded([row.source or [] for row in rows], pad, device)
        labels = ids.masked_fill(mask == 0, -100)  # the model makes its decoder's input from the labels
        logits = model(input_ids=source, attention_mask=source_mask, labels=labels, use_cache=False).logits
    # only at the tokens of choices: a float32 copy of all logits would be the largest tensor of the run
    predicted = logits[choice].float().log_softmax(-1)
    by_position, missed = torch.zeros(choice.shape, device=device), torch.zeros(choice.shape, device=device)
    by_position[choice] = predicted.gather(1, ids[choice].unsqueeze(1)).squeeze(1)
    missed[choice] = (predicted.argmax(-1) != ids[choice]).float()
    return torch.stack([by_position.sum(1), (missed.sum(1) == 0).float()], dim=1)


def _padded(rows: list[list[int]], pad: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids padded on the right and their attention mask, int64 [rows, longest] each."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return ids, mask


# --- accuracy
def standard_error(accuracy: float, questions: int) -> float:
    """Return the standard error of a binomial proportion: sqrt(p (1 - p) / n)."""
    return math.sqrt(accuracy * (1 - accuracy) / questions)


class TaskScorer:
    """Measures ``tasks`` on a model, whole on one process or spread over ranks.

    Args:
        tokenizer: its padding token is masked, so any token works.
        batch_size: choices in a forward, per process; fewer where they would have too many logits, see
            `zerobook.evaluation.held_out.rows_at_once`.
        kind: ``causal`` or ``seq2seq``.
        apply_chat_template, max_length, prefix: see `Encoder`.

    Raises:
        ConfigError: two tasks have the same name, or see `Encoder`.
        DataError: a choice that the model cannot take.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        kind: Kind,
        *,
        apply_chat_template: bool = False,
        max_length: int | None = None,
        prefix: str = "",
    ):
        names = [task.name for task in tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"--task: two task files are called {twice[0]}, so their results would be too. Rename one.")
        encode = Encoder(tokenizer, kind, apply_chat_template=apply_chat_template, max_length=max_length, prefix=prefix)
        self.tasks = list(tasks)
        self.pad_token_id = tokenizer.pad_token_id or 0
        self.sequences = [encode(q.question, choice) for task in tasks for q in task.questions for choice in q.choices]
        self.batch_size = rows_at_once(batch_size, max(len(row.ids) for row in self.sequences), len(tokenizer))
        self.cut = encode.cut

    def __call__(
        self, strategy: Strategy | None, model: nn.Module, step: int = 0, progress: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Score every question; all ranks return the same. Collective where there is a strategy.

        Args:
            strategy: how ``model`` is spread; None for a plain model in one process.
            model: as the strategy prepared it. Its training mode is restored afterwards.
            step: written into the table.

        Returns:
            (``task/NAME/acc`` and ``task/NAME/acc_norm``; a row per task, with subject None, and per subject of it, with
            ``step task subject questions acc acc_stderr acc_norm acc_norm_stderr chance``).

        Raises:
            DivergenceError: the model's likelihoods are not numbers.
        """
        spread: dict[str, Any] = {"device": next(model.parameters()).device}
        if strategy is not None:
            spread = {
                "device": strategy.device,
                "rank": strategy.rank,
                "world_size": strategy.world_size,
                "reduce": strategy.sum_over_ranks,
            }
        was_training = model.training
        model.eval()
        try:
            found = likelihoods(
                model, self.sequences, pad_token_id=self.pad_token_id, batch_size=self.batch_size, progress=progress, **spread
            )
        finally:
            model.train(was_training)
        return self._summary([value for value, _ in found], step)

    def _summary(self, scores: list[float], step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        broken = sum(math.isnan(score) for score in scores)
        if broken:
            raise DivergenceError(
                f"{broken} of {len(scores)} choices have a likelihood of nan: the model's weights are broken."
            )
        metrics: dict[str, float] = {}
        table: list[dict[str, Any]] = []
        remaining = iter(scores)
        for task in self.tasks:
            right = [_judge(q, [next(remaining) for _ in q.choices]) for q in task.questions]
            subjects = sorted({q.subject for q in task.questions if q.subject is not None})
            for subject in [None, *subjects]:
                chosen = [i for i, q in enumerate(task.questions) if subject in (None, q.subject)]
                part = Task(task.name, tuple(task.questions[i] for i in chosen))
                row: dict[str, Any] = {"step": step, "task": task.name, "subject": subject, "questions": len(chosen)}
                for column, name in enumerate(("acc", "acc_norm")):
                    row[name] = sum(right[i][column] for i in chosen) / len(chosen)
                    row[f"{name}_stderr"] = standard_error(row[name], len(chosen))
                    if subject is None:
                        metrics[f"task/{task.name}/{name}"] = row[name]
                table.append(row | {"chance": part.chance})
        return metrics, table


def _judge(question: Question, scores: list[float]) -> tuple[bool, bool]:
    """Return whether the summed and the byte-normalised likelihoods pick the right choice."""
    per_byte = [score / len(choice.encode()) for score, choice in zip(scores, question.choices, strict=True)]
    return scores.index(max(scores)) == question.answer, per_byte.index(max(per_byte)) == question.answer
