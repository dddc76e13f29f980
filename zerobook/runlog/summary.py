"""The state of a run in a sentence or two."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from zerobook.runlog.event_text import duration, far_above_best, figure, sentence
from zerobook.runlog.history import is_being_written, last_of
from zerobook.runlog.writer import EVENTS, LAST_WORDS
from zerobook.utils.terminal import plain


def summary(folder: Path) -> str:
    """Return the state of a run in a sentence or two. Reads a few lines only, however long the log is."""
    kinds = ("run_start", "metrics", "eval", "checkpoint", "decision", "machine", *LAST_WORDS)
    found = last_of(folder / EVENTS, kinds)
    start = found.get("run_start")
    if start is None:
        return "It has not begun to train."
    attempt = start["attempt"]
    own = {kind: event for kind, event in found.items() if event["attempt"] == attempt}
    metrics = own.get("metrics")
    step = metrics["steps"][1] if metrics else start["step"]
    total = start["total_steps"]
    ended = max((own[kind] for kind in LAST_WORDS if kind in own), key=lambda event: event["seq"], default=None)
    if ended is not None and ended.get("of_attempt"):
        ended = None
    if ended is not None:
        state = {"run_end": "Finished", "crash": "CRASHED", "preempted": "Preempted", "stop": "STOPPED, and handed over"}[
            ended["type"]
        ]
        if ended.get("signal") == "SIGINT":
            state = "Interrupted"
    elif is_being_written(folder):
        age = (datetime.now(UTC) - datetime.fromisoformat(max(own.values(), key=lambda e: e["seq"])["utc"])).total_seconds()
        state = f"Training (last word {duration(max(0.0, age))} ago)"
    else:
        state = "ENDED WITHOUT AN EVENT (killed, out of memory, or a power failure)"
    words = f"{state}: step {step} of {total} ({step / max(total, 1):.0%}), attempt {attempt}, branch {start['branch']}"
    branch = max((event["branch"] for event in own.values()), default=start["branch"])
    words = words.replace(f"branch {start['branch']}", f"branch {branch}")
    if metrics:
        words += f", loss {figure(metrics['loss'], '.4f')}"
        words += f", {metrics['tokens_per_second']:,.0f} supervised tokens/s"
    words += "."
    if ended is not None and ended["type"] != "run_end":
        words += f" {sentence(ended)}"
    elif ended is not None and ended.get("far_above_best"):
        words += f" {far_above_best(ended['far_above_best'])}"
    if "eval" in found and "loss" in found["eval"]:
        words += f" Held-out loss {figure(found['eval']['loss'], '.4f')} at step {found['eval']['step']}."
    if "decision" in found:
        words += f" Last decision: {found['decision']['measure']} ({found['decision']['rule']})."
    return plain(words, lines=False)
