"""The scorers of ``eval_tasks``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from zerobook.errors import ConfigError
from zerobook.evaluation.harness import HarnessScorer, load_tasks
from zerobook.evaluation.tasks import TaskScorer, read_task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from zerobook.config import RecipeConfig
    from zerobook.models.result import Kind


def split_tasks(tasks: list[str]) -> tuple[list[str], list[str]]:
    """Return (task files, tasks of lm-evaluation-harness).

    >>> split_tasks(["mine.jsonl", "arc_easy", "theirs.yaml"])
    (['mine.jsonl'], ['arc_easy', 'theirs.yaml'])
    """
    task_files = [task for task in tasks if task.endswith((".jsonl", ".json"))]
    return task_files, [task for task in tasks if task not in task_files]


def fetch_tasks(tasks: list[str], *, encoder_decoder: bool) -> None:
    """Download the data of the harness's tasks into this machine's cache. Raises `ConfigError` if a task cannot be measured."""
    check_causal(tasks, "seq2seq" if encoder_decoder else "causal")
    _, harness_tasks = split_tasks(tasks)
    if harness_tasks:
        load_tasks(harness_tasks)


def task_scorers(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, model: nn.Module, kind: Kind) -> list[Any]:
    """Return the scorers of ``config.eval_tasks`` for a training loop; an empty list if no task is named."""
    from zerobook.models.result import find_context_length

    # Check the model before any file is read: the refusal is not about the tasks.
    check_causal(config.eval_tasks, kind)
    task_files, harness_tasks = split_tasks(config.eval_tasks)
    max_length = find_context_length(cast("PreTrainedModel", model).config)
    batch_size = config.per_device_eval_batch_size
    scorers: list[Any] = []
    if task_files:
        scorers.append(TaskScorer(list(map(read_task, task_files)), tokenizer, batch_size, max_length=max_length))
    if harness_tasks:
        scorers.append(HarnessScorer(harness_tasks, tokenizer, batch_size, max_length=max_length))
    return scorers


def check_causal(tasks: list[str], kind: Kind) -> None:
    """Raise `ConfigError` if ``tasks`` are to be measured on an encoder-decoder."""
    if tasks and kind != "causal":
        raise ConfigError(f"{tasks[0]}: tasks are measured on causal models, and this is an encoder-decoder. Name no task.")
