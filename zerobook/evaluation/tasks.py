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

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import nn

from zerobook.data.collate import attention_mask, pad_sequences
from zerobook.data.templates import render_prompt
from zerobook.data.turns import ControlTokens
from zerobook.errors import ConfigError, DataError, DivergenceError
from zerobook.evaluation.held_out import rows_at_once
from zerobook.health.position import touch
from zerobook.utils.bars import tqdm
from zerobook.utils.reading import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerobook.strategy import Strategy

MAX_LISTED_PROBLEMS = 5
METRICS = ("acc", "acc_norm")
_Text = Annotated[str, StringConstraints(strict=True, pattern=r"\S")]
"""A text that is not blank."""


@checked_dataclass(frozen=True)
class Question:
    question: _Text
    choices: Annotated[tuple[_Text, ...], Field(min_length=2)]
    answer: int
    """Index of the right choice; a file may have its letter."""
    subject: _Text | None = None

    @field_validator("answer", mode="before")
    @classmethod
    def _read_answer(cls, answer: object, info: ValidationInfo) -> int:
        count = len(info.data.get("choices", ()))
        letters = string.ascii_uppercase[:count]
        if isinstance(answer, str) and answer in [*letters]:
            return letters.index(answer)
        # Compare the type, since True is an integer of Python, too.
        if type(answer) is int and 0 <= answer < count:
            return answer
        raise ValueError(f"{short(answer)}; expected an index from 0 to {count - 1} or a letter from A to {letters[-1:]}")


_QUESTION = TypeAdapter(Question)


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
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"not UTF-8 text (byte {getattr(error, 'start', '?')})"
        raise DataError(f"{path}: the task cannot be read: {reason}.") from None
    questions = []
    problems = []
    for number, line in enumerate(lines, 1):
        # Blank lines are not questions, and still count as lines in messages.
        if not line.strip():
            continue
        try:
            questions.append(_QUESTION.validate_json(line))
        except ValidationError as error:
            # One reason for each line: the other errors of a line often follow from the first.
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            problems.append(f"{path}, line {number}: {where or 'the line'}: {first['msg']}")
    if problems:
        listing = "".join(f"\n  {problem}" for problem in problems[:MAX_LISTED_PROBLEMS])
        if len(problems) > MAX_LISTED_PROBLEMS:
            listing += f"\n  and {len(problems) - MAX_LISTED_PROBLEMS} more"
        raise DataError(f"{path}: {len(problems)} of {len(problems) + len(questions)} questions are bad:{listing}")
    if not questions:
        raise DataError(f"{path}: the task is empty. Expected a line of JSON for each question.")
    return Task(path.stem, tuple(questions))


# --- likelihoods
@dataclass(frozen=True)
class Scored:
    """Token ids; those from ``first`` on are the choice."""

    ids: list[int]
    first: int


class Encoder:
    """Turns (prompt, choice) into `Scored` tokens.

    Args:
        apply_chat_template: the prompt becomes a user's turn in the tokenizer's chat template.
        max_length: tokens the model takes; longer prompts lose their beginning. None: no limit.

    Raises:
        ConfigError: the tokenizer gives no offsets of its tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool = False,
        max_length: int | None = None,
    ):
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{type(tokenizer).__name__} does not tell which characters a token covers, which scoring needs. "
                "Save the model with a fast tokenizer (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.chat = apply_chat_template
        self.max_length = max_length
        self.truncated_count = 0
        """Number of sequences that lost the beginning of their prompt."""
        self.control = ControlTokens(tokenizer)
        # Training puts these tokens before a text, too. Chat templates write them themselves.
        self.leading_ids = [] if self.chat else self.control.leading

    def __call__(self, question: str, choice: str) -> Scored:
        refusal = self.control.refusal("its text", question) or self.control.refusal("its choice", choice)
        if refusal:
            raise DataError(f"the question {question[:60]!r} cannot be asked: {refusal}. Leave it out.")
        prompt = f"{question}\nAnswer:"
        continuation = f" {choice}"
        if self.chat:
            turns = [{"role": "user", "content": prompt}]
            prompt = render_prompt(self.tokenizer, turns)
            # The template writes what stands before an answer.
            continuation = choice
        text = prompt + continuation
        # Encoded together, because a token may cross the boundary; such a token depends on the choice and belongs to it.
        # verbose=False: the limit of the tokenizer is not a limit here, since the beginning is cut below.
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        prompt_tokens = 0
        for position, (start, end) in enumerate(encoded["offset_mapping"]):
            if start < end <= len(prompt):
                prompt_tokens = position + 1
        ids = self.leading_ids + encoded["input_ids"]
        first = len(self.leading_ids) + prompt_tokens
        excess = len(ids) - (self.max_length or len(ids))
        if excess > 0:
            self.truncated_count += 1
            ids = ids[excess:]
            first -= excess
        if first < 1:
            raise DataError(
                f"the choice {choice[:60]!r} leaves no room for its question: the model takes {self.max_length} tokens."
            )
        return Scored(ids, first)


class Likelihood(NamedTuple):
    """``log_probability``: log P(choice | prompt) in nats, summed over the tokens of the choice. ``is_greedy``: each of these
    tokens is the one that the model predicts."""

    log_probability: float
    is_greedy: bool


@torch.no_grad()
def likelihoods(
    strategy: Strategy | None,
    model: nn.Module,
    sequences: Sequence[Scored],
    *,
    pad_token_id: int,
    batch_size: int,
    progress: bool = False,
) -> list[Likelihood]:
    """Return the likelihood of every sequence, on every rank. Collective if there is a strategy.

    Batches do not depend on the number of ranks: of n ranks, rank r takes batches r, r + n, ... of one common list. So
    the scores are the same numbers on any number of processes. Every rank runs the same number of forwards, since
    each may gather weights from all ranks; a rank without a batch repeats the last one and discards the scores.

    Args:
        strategy: how ``model`` is spread; None for a plain model in one process.
        batch_size: sequences (choices, not questions) in a forward.

    Raises:
        DivergenceError: a likelihood is not a number. All ranks raise it.
    """
    rank = 0
    world_size = 1
    device = next(model.parameters()).device
    if strategy is not None:
        # Processes that compute the same tokens, each with its part of the weights, need the same batch.
        rank = strategy.mesh.token_parallel_rank
        world_size = strategy.mesh.token_parallel_size
        device = strategy.device
    # The longest come first: a batch that does not fit into memory fails at once.
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index].ids))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    scores = torch.zeros(len(sequences), 2, device=device)
    # With None, tqdm shows the bar on a terminal, and nothing in a log.
    hide_bar = None if progress else True
    for start in tqdm(range(0, len(batches), world_size), desc="scoring", leave=False, disable=hide_bar):
        number = start + rank
        # A rank beyond the last batch repeats it: its forward takes part in the collectives of sharded weights.
        batch = batches[min(number, len(batches) - 1)]
        batch_scores = _forward(model, [sequences[index] for index in batch], pad_token_id, device)
        if number < len(batches):
            scores[torch.tensor(batch, device=device)] = batch_scores
        # All batches together may take longer than the limit of an evaluation.
        touch()
    if strategy is not None:
        # Each score is on one rank, or on those that computed it together, and 0 on the others. So the sum is that score.
        scores = strategy.mesh.sum_over_samples(scores)
    broken = int(scores[:, 0].isnan().sum())
    # A comparison with nan is always false, so the first choice would win every question.
    if broken:
        raise DivergenceError(f"{broken} of {len(sequences)} likelihoods are nan: the model's weights are broken.")
    return [Likelihood(log_probability, bool(is_greedy)) for log_probability, is_greedy in scores.tolist()]


def _forward(model: nn.Module, rows: list[Scored], pad: int, device: torch.device) -> torch.Tensor:
    """Return summed log-likelihoods, and whether all tokens are the model's first choice, float32 [rows, 2]."""
    row_ids = [row.ids for row in rows]
    ids = pad_sequences(row_ids, pad).to(device)
    mask = attention_mask(row_ids, ids.shape[1]).to(device)
    is_choice = mask.bool()
    for number, row in enumerate(rows):
        is_choice[number, : row.first] = False
    # The last token is predicted, and nothing after it. So a row may have one token more than the model takes.
    logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False).logits
    # The logits at a position predict the next token, so the ids are moved by one.
    ids = ids[:, 1:]
    is_choice = is_choice[:, 1:]
    # Take the logits at the tokens of choices alone: a float32 copy of all logits would be the largest tensor of the run.
    log_probabilities = logits[is_choice].float().log_softmax(-1)
    choice_ids = ids[is_choice]
    by_position = torch.zeros(is_choice.shape, device=device)
    by_position[is_choice] = log_probabilities.gather(1, choice_ids.unsqueeze(1)).squeeze(1)
    is_missed = torch.zeros(is_choice.shape, device=device)
    is_missed[is_choice] = (log_probabilities.argmax(-1) != choice_ids).float()
    is_greedy = is_missed.sum(1) == 0
    return torch.stack([by_position.sum(1), is_greedy.float()], dim=1)


# --- accuracy
class TaskScorer:
    """Measures ``tasks`` on a causal model, whole on one process or spread over ranks.

    Args:
        tokenizer: its padding token is masked, so any token works.
        batch_size: choices in a forward, per process; fewer where they would have too many logits, see
            `zerobook.evaluation.held_out.rows_at_once`.
        apply_chat_template, max_length: see `Encoder`.

    Raises:
        ConfigError: two tasks have the same name, or see `Encoder`.
        DataError: a choice that the model cannot take.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        *,
        apply_chat_template: bool = False,
        max_length: int | None = None,
    ):
        names = [task.name for task in tasks]
        repeated_names = sorted({name for name in names if names.count(name) > 1})
        if repeated_names:
            raise ConfigError(
                f"--task: two task files are called {repeated_names[0]}, so their results would be too. Rename one."
            )
        # All questions are encoded before the run: a choice that does not fit is refused before any training.
        encode = Encoder(tokenizer, apply_chat_template=apply_chat_template, max_length=max_length)
        self.tasks = list(tasks)
        self.pad_token_id = tokenizer.pad_token_id or 0
        self.sequences = []
        for task in tasks:
            for question in task.questions:
                self.sequences += [encode(question.question, choice) for choice in question.choices]
        longest = max(len(row.ids) for row in self.sequences)
        self.batch_size = rows_at_once(batch_size, longest, len(tokenizer))
        self.truncated_count = encode.truncated_count

    def __call__(
        self, strategy: Strategy | None, model: nn.Module, step: int = 0, progress: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Score every question; all ranks return the same. Collective if there is a strategy.

        Args:
            strategy: how ``model`` is spread; None for a plain model in one process.
            model: as the strategy prepared it, in evaluation mode.
            step: written into the table.

        Returns:
            (``task/NAME/acc`` and ``task/NAME/acc_norm``; a row per task, with subject None, and per subject of it, with
            ``step task subject questions acc acc_stderr acc_norm acc_norm_stderr chance``).

        Raises:
            DivergenceError: the model's likelihoods are not numbers.
        """
        scores = likelihoods(
            strategy,
            model,
            self.sequences,
            pad_token_id=self.pad_token_id,
            batch_size=self.batch_size,
            progress=progress,
        )
        return self._summary([score.log_probability for score in scores], step)

    def _summary(self, scores: list[float], step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        metrics: dict[str, float] = {}
        table: list[dict[str, Any]] = []
        # The scores are in the order in which the sequences were made: tasks, questions, choices.
        remaining_scores = iter(scores)
        for task in self.tasks:
            answers = []
            for question in task.questions:
                question_scores = list(islice(remaining_scores, len(question.choices)))
                answers.append(_judge(question, question_scores))
            # A task without subjects has one row, that of all its questions.
            subjects = {question.subject for question in task.questions if question.subject is not None}
            table.append(_summary_row(task, answers, None, step))
            for name in METRICS:
                metrics[f"task/{task.name}/{name}"] = table[-1][name]
            for subject in sorted(subjects):
                table.append(_summary_row(task, answers, subject, step))
        return metrics, table


def _summary_row(task: Task, answers: Sequence[tuple[bool, bool]], subject: str | None, step: int) -> dict[str, Any]:
    """Return the row of a subject's questions; of all questions where ``subject`` is None.

    Args:
        answers: of each question of the task, whether it was answered rightly by each of `METRICS`.
    """
    numbers = [number for number, question in enumerate(task.questions) if subject is None or question.subject == subject]
    row: dict[str, Any] = {"step": step, "task": task.name, "subject": subject, "questions": len(numbers)}
    for column, name in enumerate(METRICS):
        # The share of right answers, of booleans that count as 0 and 1.
        row[name] = sum(answers[number][column] for number in numbers) / len(numbers)
        # The standard error of a binomial proportion: sqrt(p (1 - p) / n).
        row[f"{name}_stderr"] = math.sqrt(row[name] * (1 - row[name]) / len(numbers))
    row["chance"] = Task(task.name, tuple(task.questions[number] for number in numbers)).chance
    return row


def _judge(question: Question, scores: list[float]) -> tuple[bool, bool]:
    """Return whether the summed and the byte-normalised likelihoods pick the right choice, in the order of `METRICS`."""
    scores_per_byte = [score / len(choice.encode()) for score, choice in zip(scores, question.choices, strict=True)]
    # The index of the first maximum: among equal choices, the first is picked.
    is_right = scores.index(max(scores)) == question.answer
    is_right_per_byte = scores_per_byte.index(max(scores_per_byte)) == question.answer
    return is_right, is_right_per_byte
