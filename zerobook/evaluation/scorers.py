"""The scorers of ``eval_tasks``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from zerobook.errors import ConfigError
from zerobook.evaluation.harness import HarnessScorer
from zerobook.evaluation.tasks import TaskScorer, read_task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from zerobook.config import RecipeConfig
    from zerobook.models.result import Kind


def split(tasks: list[str]) -> tuple[list[str], list[str]]:
    """Return (task files, tasks of lm-evaluation-harness).

    >>> split(["mine.jsonl", "arc_easy", "theirs.yaml"])
    (['mine.jsonl'], ['arc_easy', 'theirs.yaml'])
    """
    own = [task for task in tasks if task.endswith((".jsonl", ".json"))]
    return own, [task for task in tasks if task not in own]


def task_scorers(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, model: nn.Module, kind: Kind, prefix: str = ""
) -> list[Any]:
    """Return the scorers of ``config.eval_tasks`` for a training loop; an empty list where no task is named."""
    from zerobook.models.result import context_of

    own, named = split(config.eval_tasks)
    length, rows = context_of(cast("PreTrainedModel", model).config), config.per_device_eval_batch_size
    scorers: list[Any] = []
    if own:
        scorers.append(TaskScorer([read_task(file) for file in own], tokenizer, rows, kind, max_length=length, prefix=prefix))
    if named:
        check_causal(named, kind)
        scorers.append(HarnessScorer(named, tokenizer, rows, max_length=length))
    return scorers


def check_causal(tasks: list[str], kind: Kind) -> None:
    """Raise `ConfigError` where the harness's ``tasks`` are asked of an encoder-decoder."""
    if kind != "causal":
        raise ConfigError(
            f"{tasks[0]}: tasks of lm-evaluation-harness are measured on causal models here, and this is an encoder-decoder. "
            "Write the questions into a task file: docs/guides/runlog.md."
        )
