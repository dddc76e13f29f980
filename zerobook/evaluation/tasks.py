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
# A text that is not blank.
_Text = Annotated[str, StringConstraints(strict=True, pattern=r"\S")]


# pydantic checks the types of the fields.
@checked_dataclass(frozen=True)
class Question:
    question: _Text
    choices: Annotated[tuple[_Text, ...], Field(min_length=2)]
    answer: int
    """Index of the right choice. A file may have its letter instead."""
    subject: _Text | None = None

    @field_validator("answer", mode="before")
    @classmethod
    def _read_answer(cls, answer: object, info: ValidationInfo) -> int:
        # The choices are not in the data if they are not valid. Then there are no letters.
        count = len(info.data.get("choices", ()))
        letters = string.ascii_uppercase[:count]
        if isinstance(answer, str) and answer in [*letters]:
            return letters.index(answer)
        # Compare the type: ``isinstance`` would also accept True and False.
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
        return sum(1 / len(question.choices) for question in self.questions) / len(self.questions)


# --- task files
def read_task(path: str | Path) -> Task:
    """Read a JSONL file in MMLU's form: ``question``, ``choices``, ``answer`` (index or letter), maybe ``subject``.

    Raises:
        DataError: the file cannot be read, is empty, or has lines that are not valid. The first are listed with reasons.
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
            # Report the first error of each line: the others often follow from it.
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            problems.append(f"{path}, line {number}: {key or 'the line'}: {first['msg']}")
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
    """Token ids of a prompt and a choice. Those from index ``first`` on are the choice."""

    ids: list[int]
    first: int


class Encoder:
    """Turns a question and a choice into the token ids that are scored.

    Args:
        apply_chat_template: the prompt becomes a user's turn in the tokenizer's chat template.
        max_length: maximum number of tokens of a prompt and its choice; longer prompts lose their beginning. None: no limit.

    Raises:
        ConfigError: the tokenizer does not tell the characters of a token (its offsets).
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
        # The tokens that training puts before a text. Chat templates contain them already.
        self.leading_ids = [] if self.chat else self.control.leading

    # Raises `DataError` if a text has a special token, or if the choice leaves no room for its prompt.
    def __call__(self, question: str, choice: str) -> Scored:
        refusal = self.control.refusal("its text", question) or self.control.refusal("its choice", choice)
        if refusal:
            raise DataError(f"the question {question[:60]!r} cannot be asked: {refusal}. Leave it out.")
        prompt = f"{question}\nAnswer:"
        continuation = f" {choice}"
        if self.chat:
            prompt = render_prompt(self.tokenizer, [{"role": "user", "content": prompt}])
            # The template ends with the text before an answer, so no space is needed.
            continuation = choice
        text = prompt + continuation
        # Encode both together: a token may begin in the prompt and end in the choice. It then belongs to the choice.
        # verbose=False: no warning about a text longer than the model's limit, since its beginning is cut below.
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # The tokens up to the last one that lies within the prompt. A token without characters is not looked at.
        prompt_tokens = 0
        for position, (start, end) in enumerate(encoded["offset_mapping"]):
            if start < end <= len(prompt):
                prompt_tokens = position + 1
        ids = self.leading_ids + encoded["input_ids"]
        first = len(self.leading_ids) + prompt_tokens
        # Tokens that are cut from the beginning of the prompt.
        excess = len(ids) - (self.max_length or len(ids))
        if excess > 0:
            self.truncated_count += 1
            ids = ids[excess:]
            first -= excess
        # At least one token has to precede the choice, for its first token to have a likelihood.
        if first < 1:
            raise DataError(
                f"the choice {choice[:60]!r} leaves no room for its question: the model takes {self.max_length} tokens."
            )
        return Scored(ids, first)


class Likelihood(NamedTuple):
    """The likelihood of a choice after its prompt."""

    # log P(choice | prompt) in nats, summed over the tokens of the choice.
    log_probability: float
    # Whether each token of the choice is the one that the model finds most likely, as in greedy decoding.
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

    The batches, and so the scores, do not depend on the number of ranks: of n ranks, rank r computes the batches r, r + n, ...
    of one common list. Every rank runs the same number of forward passes, since each pass may gather weights from all ranks. A
    rank without a batch repeats the last batch, and discards the scores.

    Args:
        strategy: how ``model`` is spread; None for a plain model in one process.
        batch_size: sequences (choices, not questions) in a forward pass.

    Raises:
        DivergenceError: a likelihood is not a number. All ranks raise it.
    """
    rank = 0
    world_size = 1
    device = next(model.parameters()).device
    if strategy is not None:
        # Processes that compute the same tokens, each with its part of the weights, have the same `token_parallel_rank`, and
        # so the same batch.
        rank = strategy.mesh.token_parallel_rank
        world_size = strategy.mesh.token_parallel_size
        device = strategy.device
    # The longest sequences come first: if a batch does not fit into memory, the first one does not.
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index].ids))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    scores = torch.zeros(len(sequences), 2, device=device)
    # With ``disable=None``, tqdm shows the bar on a terminal only.
    hide_bar = None if progress else True
    for start in tqdm(range(0, len(batches), world_size), desc="scoring", leave=False, disable=hide_bar):
        number = start + rank
        # A rank beyond the last batch repeats it: its forward pass takes part in the collectives of sharded weights.
        batch = batches[min(number, len(batches) - 1)]
        batch_scores = _score_batch(model, [sequences[index] for index in batch], pad_token_id, device)
        if number < len(batches):
            scores[torch.tensor(batch, device=device)] = batch_scores
        # All batches together may take longer than the hang timeout of an evaluation, so each batch reports progress.
        touch()
    if strategy is not None:
        # Each score is 0 on the ranks that did not compute it, so the sum over ranks is the score. Ranks that computed the same
        # tokens together count once.
        scores = strategy.mesh.sum_over_samples(scores)
    nan_count = int(scores[:, 0].isnan().sum())
    # A comparison with nan is always false, so the first choice would win every question.
    if nan_count:
        raise DivergenceError(f"{nan_count} of {len(sequences)} likelihoods are nan: the model's weights are broken.")
    return [Likelihood(log_probability, bool(is_greedy)) for log_probability, is_greedy in scores.tolist()]


def _score_batch(model: nn.Module, rows: list[Scored], pad: int, device: torch.device) -> torch.Tensor:
    """Return the values of `Likelihood` for each row, as float32 [rows, 2]."""
    row_ids = [row.ids for row in rows]
    ids = pad_sequences(row_ids, pad).to(device)
    mask = attention_mask(row_ids, ids.shape[1]).to(device)
    # Whether a token belongs to the choice of its row. It does not if it is padding or of the prompt.
    is_choice = mask.bool()
    for number, row in enumerate(rows):
        is_choice[number, : row.first] = False
    # The last token is only predicted, so the model's input is one token shorter than a row.
    logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False).logits
    # The logits at a position predict the token at the next one, so ids and mask are shifted by one to stand beside them.
    ids = ids[:, 1:]
    is_choice = is_choice[:, 1:]
    # Take the logits at the tokens of choices alone: a float32 copy of all logits would be the largest tensor of the run.
    log_probabilities = logits[is_choice].float().log_softmax(-1)
    choice_ids = ids[is_choice]
    # Put the values of the choices' tokens back to their positions, with 0 elsewhere, to sum them by row.
    log_probability_at = torch.zeros(is_choice.shape, device=device)
    log_probability_at[is_choice] = log_probabilities.gather(1, choice_ids.unsqueeze(1)).squeeze(1)
    is_other_token = torch.zeros(is_choice.shape, device=device)
    is_other_token[is_choice] = (log_probabilities.argmax(-1) != choice_ids).float()
    is_greedy = is_other_token.sum(1) == 0
    return torch.stack([log_probability_at.sum(1), is_greedy.float()], dim=1)


# --- accuracy
class TaskScorer:
    """Measures the accuracies of ``tasks`` with a causal model in one process, or spread over ranks.

    Args:
        tokenizer: it may have no padding token, since padding is masked.
        batch_size: choices in a forward pass, per process; fewer if they would have too many logits, see
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
        # Encode all questions now, so that a choice that does not fit is refused before the training.
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
        return self._summarize([score.log_probability for score in scores], step)

    # Return the metrics and the table of `__call__` from the log-likelihood of every choice.
    def _summarize(self, scores: list[float], step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        metrics: dict[str, float] = {}
        table: list[dict[str, Any]] = []
        # The scores are in the order in which the sequences were made: tasks, questions, choices.
        remaining_scores = iter(scores)
        for task in self.tasks:
            answers = []
            for question in task.questions:
                question_scores = list(islice(remaining_scores, len(question.choices)))
                answers.append(_judge(question, question_scores))
            # The first row of a task is about all of its questions. The metrics are taken from it.
            table.append(_summary_row(task, answers, None, step))
            for name in METRICS:
                metrics[f"task/{task.name}/{name}"] = table[-1][name]
            subjects = {question.subject for question in task.questions if question.subject is not None}
            for subject in sorted(subjects):
                table.append(_summary_row(task, answers, subject, step))
        return metrics, table


def _summary_row(task: Task, answers: Sequence[tuple[bool, bool]], subject: str | None, step: int) -> dict[str, Any]:
    """Return the row of the questions of a subject; of all questions if ``subject`` is None.

    Args:
        answers: for each question of the task, whether it was answered correctly, in the order of `METRICS`.
    """
    numbers = [number for number, question in enumerate(task.questions) if subject is None or question.subject == subject]
    row: dict[str, Any] = {"step": step, "task": task.name, "subject": subject, "questions": len(numbers)}
    for column, name in enumerate(METRICS):
        # The share of correct answers. A sum counts True as 1.
        row[name] = sum(answers[number][column] for number in numbers) / len(numbers)
        # The standard error of a binomial proportion: sqrt(p (1 - p) / n).
        row[f"{name}_stderr"] = math.sqrt(row[name] * (1 - row[name]) / len(numbers))
    row["chance"] = Task(task.name, tuple(task.questions[number] for number in numbers)).chance
    return row


def _judge(question: Question, scores: list[float]) -> tuple[bool, bool]:
    """Return whether the question is answered correctly, by the log-likelihoods and by those per byte, as in `METRICS`.

    Args:
        scores: log-likelihood of each choice.
    """
    scores_per_byte = [score / len(choice.encode()) for score, choice in zip(scores, question.choices, strict=True)]
    # ``index`` returns the first maximum: among equally likely choices, the first is picked.
    is_right = scores.index(max(scores)) == question.answer
    return is_right, scores_per_byte.index(max(scores_per_byte)) == question.answer
