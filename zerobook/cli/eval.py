"""``zerobook eval``: the held-out loss of a run's model, and accuracies on task files and tasks of lm-evaluation-harness."""

import argparse
import json
import sys
from contextlib import redirect_stdout
from typing import Any

from zerobook.cli.arguments import Parser, positive
from zerobook.cli.export import add_checkpoint_flag, find_checkpoint
from zerobook.errors import ConfigError
from zerobook.evaluation.harness import HarnessScorer
from zerobook.evaluation.held_out import describe
from zerobook.evaluation.scorers import check_causal, split_tasks
from zerobook.evaluation.tasks import Task, TaskScorer, read_task
from zerobook.models.result import load_result
from zerobook.utils.terminal import console, make_table, say


def evaluate(argv: list[str]) -> int:
    """Print the held-out loss of a run's model, and what a model scores on tasks. Return 0."""
    parser = Parser("zerobook eval", description="Held-out loss and answers; accuracy on multiple-choice tasks, by likelihood.")
    parser.add_argument("path", help="a run's output_dir, a model or adapter folder, a hub name or embedded:smollm2")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="data on which the loss of a run's model is measured; answers to its first prompts are printed",
    )
    parser.add_argument(
        "--tasks",
        default="",
        metavar="NAMES",
        help="files of questions and tasks of lm-evaluation-harness, with commas between: mine.jsonl,arc_easy,my_task.yaml",
    )
    parser.add_argument("--limit", type=positive, help="rows of the file; questions of a task of the harness (default: all)")
    parser.add_argument("--num_fewshot", type=int, help="examples before a question of the harness (default: the task's)")
    parser.add_argument("--batch_size", type=positive, default=8, help="answer choices in a forward pass (default: 8)")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="put each question into a user's turn of the chat template"
    )
    add_checkpoint_flag(parser)
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the Python code of the model, or of a recipe of your own"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    flags = parser.parse_args(argv)
    if not (flags.file or flags.tasks):
        parser.error("give --file, --tasks or both")
    if flags.checkpoint:
        flags.path = str(find_checkpoint(flags.path, flags.checkpoint))
    files, harness_tasks = split_tasks([name for name in flags.tasks.split(",") if name])
    if flags.num_fewshot is not None and not harness_tasks:
        parser.error("--num_fewshot is for tasks of lm-evaluation-harness, and --tasks names none")
    # Files are read before the model, which takes longer.
    tasks = [read_task(file) for file in files]

    results: dict[str, Any] = {"path": flags.path, "apply_chat_template": flags.apply_chat_template}
    if flags.file:
        results |= _measure_file(flags)
    if flags.tasks:
        results |= _score_tasks(flags, tasks, harness_tasks)
    if flags.json:
        print(json.dumps(results))
    return 0


def _measure_file(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure the held-out loss, and return the results. Without --json, also print them, with the answers."""
    from zerobook.training.measure import evaluate_on_file

    # stdout is for the results, so what libraries print goes to stderr.
    with redirect_stdout(sys.stderr):
        record = evaluate_on_file(flags.path, flags.file, rows=flags.limit, trust_remote_code=flags.trust_remote_code)
    if not flags.json:
        say(f"{flags.path} on {flags.file}: {describe(record.result)}, {record.result['tokens']:,} tokens")
        for sample in record.samples:
            say("")
            for name, text in sample.items():
                say(f"  {name}: {text}")
    return {"file": flags.file, "held_out": record.result, "samples": record.samples}


def _score_tasks(flags: argparse.Namespace, tasks: list[Task], harness_tasks: list[str]) -> dict[str, Any]:
    """Measure accuracies, and return the results. Without --json, also print them."""
    loaded = load_result(flags.path, trust_remote_code=flags.trust_remote_code)
    results: dict[str, Any] = {"cut_prompts": 0}
    check_causal([flags.tasks], loaded.kind)
    if flags.apply_chat_template and loaded.tokenizer.chat_template is None:
        raise ConfigError("--apply_chat_template: the tokenizer has no chat template. Leave the flag out.")
    if harness_tasks:
        harness = HarnessScorer(
            harness_tasks,
            loaded.tokenizer,
            flags.batch_size,
            max_length=loaded.context,
            limit=flags.limit,
            shots=flags.num_fewshot,
            apply_chat_template=flags.apply_chat_template,
        )
        results["lm_evaluation_harness"] = harness.measure(None, loaded.model, progress=True, resamples=1000)
        results["cut_prompts"] += harness.truncated_count
        if not flags.json:
            print_harness(flags.path, results["lm_evaluation_harness"])
    if tasks:
        scorer = TaskScorer(
            tasks,
            loaded.tokenizer,
            flags.batch_size,
            apply_chat_template=flags.apply_chat_template,
            max_length=loaded.context,
        )
        _, table = scorer(None, loaded.model, progress=True)
        results["tasks"] = _group_by_task(table)
        results["cut_prompts"] += scorer.truncated_count
        if not flags.json:
            print_table(flags.path, table)
    if results["cut_prompts"]:
        print(
            f"{results['cut_prompts']} prompts were longer than the model's {loaded.context} tokens and lost their beginning",
            file=sys.stderr,
        )
    return results


# Return task -> its values, with its subjects under ``subjects``. The row of a task comes before the rows of its subjects.
def _group_by_task(table: list[dict[str, Any]]) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for row in table:
        values = {key: value for key, value in row.items() if key not in ("step", "task", "subject")}
        if row["subject"] is None:
            tasks[row["task"]] = values | {"subjects": {}}
        else:
            tasks[row["task"]]["subjects"][row["subject"]] = values
    return tasks


def print_harness(path: str, rows: list[dict[str, Any]]) -> None:
    """Print the metrics of lm-evaluation-harness, a row per task and metric."""
    terminal_table = make_table(path, ("task", "metric"), caption="measured with lm-evaluation-harness", caption_justify="left")
    for name in ("value", "samples"):
        terminal_table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        error = "" if row["stderr"] is None else f" ± {row['stderr']:.3f}"
        terminal_table.add_row(row["task"], row["metric"], f"{row['value']:.3f}{error}", str(row["samples"] or ""))
    console().print(terminal_table)


def print_table(path: str, table: list[dict[str, Any]]) -> None:
    """Print the accuracies of a model, a row per task and subject."""
    terminal_table = make_table(
        path, ("task", "subject"), caption="± standard error, sqrt(p (1 - p) / n)", caption_justify="left"
    )
    for name in ("questions", "acc", "acc_norm", "chance"):
        terminal_table.add_column(name, justify="right", no_wrap=True)
    for row in table:
        terminal_table.add_row(
            row["task"],
            row["subject"] or "all",
            str(row["questions"]),
            f"{row['acc']:.3f} ± {row['acc_stderr']:.3f}",
            f"{row['acc_norm']:.3f} ± {row['acc_norm_stderr']:.3f}",
            f"{row['chance']:.3f}",
        )
    console().print(terminal_table)
