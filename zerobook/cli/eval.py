"""``zerobook eval``: the accuracy of a model on multiple-choice task files."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from zerobook.cli.arguments import positive
from zerobook.evaluation.tasks import TaskScorer, read_task
from zerobook.utils.terminal import console


def evaluate(argv: list[str]) -> int:
    """Print the accuracy of a model on task files. Return 0."""
    parser = argparse.ArgumentParser("zerobook eval", description="Accuracy on multiple-choice tasks, by likelihood.")
    parser.add_argument("path", help="a run's output_dir, a model or adapter folder, a hub name or embedded:smollm2")
    parser.add_argument("--task", action="append", required=True, metavar="FILE.jsonl", help="may be given several times")
    parser.add_argument("--batch_size", type=positive, default=8, help="choices in a forward (default: 8)")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="put each question into a user's turn of the chat template"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the Python code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    asked = parser.parse_args(argv)
    tasks = [read_task(file) for file in asked.task]  # before the model, which takes longer

    from zerobook.models.result import load_result

    loaded = load_result(asked.path, trust_remote_code=asked.trust_remote_code)
    scorer = TaskScorer(
        tasks, loaded.tokenizer, asked.batch_size, loaded.kind,
        apply_chat_template=asked.apply_chat_template, max_length=loaded.context, prefix=loaded.source_prefix,
    )  # fmt: skip
    _, table = scorer(None, loaded.model, progress=True)
    if scorer.cut:
        print(
            f"{scorer.cut} prompts were longer than the model's {loaded.context} tokens and lost their beginning",
            file=sys.stderr,
        )
    if asked.json:
        print(json.dumps(_as_json(asked, scorer.cut, table)))
    else:
        print_table(asked.path, table)
    return 0


def _as_json(asked: argparse.Namespace, cut: int, table: list[dict[str, Any]]) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for row in table:
        values = {key: value for key, value in row.items() if key not in ("step", "task", "subject")}
        if row["subject"] is None:
            tasks[row["task"]] = values | {"subjects": {}}
        else:
            tasks[row["task"]]["subjects"][row["subject"]] = values
    return {"path": asked.path, "apply_chat_template": asked.apply_chat_template, "cut_prompts": cut, "tasks": tasks}


def print_table(path: str, table: list[dict[str, Any]]) -> None:
    """Print the accuracies of a model, a row per task and subject."""
    from rich.table import Table

    shown = Table(title=path, title_justify="left", caption="± standard error, sqrt(p (1 - p) / n)", caption_justify="left")
    shown.add_column("task", overflow="fold")
    shown.add_column("subject", overflow="fold")
    for name in ("questions", "acc", "acc_norm", "chance"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table:
        total = row["subject"] is None
        cells = [f"{row[name]:.3f} ± {row[f'{name}_stderr']:.3f}" for name in ("acc", "acc_norm")]
        shown.add_row(
            row["task"] if total else "", "all" if total else row["subject"], str(row["questions"]),
            *cells, f"{row['chance']:.3f}", style="bold" if total else "",
        )  # fmt: skip
    console().print(shown)
