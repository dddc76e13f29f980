"""The first and last events of an attempt, and the decisions that it reads from earlier attempts."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from zerobook.runlog import compare
from zerobook.runlog.events import ENDING_EVENTS
from zerobook.runlog.jsonl import backwards, stream
from zerobook.runlog.machine import Sampler, nearly_full, out_of_memory
from zerobook.runlog.writer import EVENTS, STEPS, RunLog
from zerobook.utils.bars import tqdm
from zerobook.utils.shipped import clone
from zerobook.utils.terminal import without_passwords
from zerobook.utils.writing import write_whole


def begin(log: RunLog, *, config: dict[str, Any], versions: dict[str, str], step: int, **facts: Any) -> None:
    """Write how the last attempt ended if it could not, then ``run_start``, ``env``, and what differs from the last attempt.

    Args:
        step: step that this attempt continues from; if later steps are recorded, a new branch begins.
    """
    before = _before(log)
    if before["last"] and not before["ended"]:
        _obituary(log, before)
    newest = next((record for record in backwards(log.folder / STEPS) if record), None)
    if newest is not None and newest["step"] > step:
        log.branch += 1
    log.event("run_start", step=step, config=config, versions=versions, **facts)
    env = environment()
    log.event("env", **env, durable=False)
    if before["run_start"] is not None:
        _differences(log, "config_diff", before["run_start"]["config"], config)
        _differences(log, "launch_diff", compare.launch(before["run_start"]), compare.launch(facts))
        was = {**(before["env"] or {}), **before["run_start"]["versions"]}
        _differences(log, "env_diff", was, {**env, **versions})


def _before(log: RunLog) -> dict[str, Any]:
    """Return the newest event, ``machine`` sample, ``run_start`` and ``env`` before this attempt, and whether the last attempt
    ``ended`` with an event of its own (a note may follow it)."""
    found: dict[str, Any] = {"last": None, "machine": None, "run_start": None, "env": None, "ended": False}
    for record in backwards(log.folder / EVENTS):
        if record is None or record["attempt"] == log.attempt:
            continue
        found["last"] = found["last"] or record
        kind = record["type"]
        if record["attempt"] == found["last"]["attempt"] and kind in ENDING_EVENTS and not record.get("of_attempt"):
            found["ended"] = True
        if kind in found and found[kind] is None:
            found[kind] = record
        if found["run_start"] is not None:
            break
    return found


def _obituary(log: RunLog, before: dict[str, Any]) -> None:
    last, sample = before["last"], before["machine"]
    reason = "it ended without an event: killed from outside, out of memory, or a power failure"
    full = nearly_full(sample) if sample else None
    if full:
        reason = f"it ended without an event, probably killed for lack of memory: {full} at its last sample"
    log.event("crash", of_attempt=last["attempt"], reason=reason, last_event=last["seq"], last_utc=last["utc"],
              machine=sample["seq"] if sample else None)  # fmt: skip


def _differences(log: RunLog, kind: str, was: dict[str, Any], now: dict[str, Any]) -> None:
    common = ("seq", "attempt", "branch", "type", "utc", "monotonic", "parent")
    was, now = ({key: value for key, value in facts.items() if key not in common} for facts in (was, now))
    if differing := compare.differences(was, now):
        log.event(kind, differing=differing)


def environment() -> dict[str, Any]:
    """Return host, hardware and the git commit; no environment variables, which may hold secrets."""
    memory = psutil.virtual_memory()
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "host_memory": memory.total,
        "gpus": _gpus(),
        "git": _git(),
    }


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def _git() -> dict[str, Any] | None:
    here = clone()
    return None if here is None else git_state(here)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the git repository of ``folder``, and how many files differ from it; None without a repository."""
    try:
        commit = _ask_git(folder, "rev-parse", "HEAD")
        changed = _ask_git(folder, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed_files": len(changed.splitlines())}


def code_state(file: Path) -> dict[str, Any]:
    """Return the name of a recipe's file, and the state of the git repository that tracks it, if one does."""
    try:
        _ask_git(file.parent, "ls-files", "--error-unmatch", file.name)
    except (OSError, subprocess.SubprocessError):
        # A package in an environment can lie in a repository that knows nothing of it.
        return {"file": file.name}
    return {"file": file.name, **(git_state(file.parent) or {})}


def _ask_git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


class Decided(NamedTuple):
    """Decisions, findings and actions of earlier attempts, read from the log."""

    skips: list[list[int]]
    """[start, end) of samples left out"""
    cuts: list[list[float]]
    """of the learning rate, as in `zerobook.checkpoint.progress.Progress`"""
    ladder: dict[str, Any]
    """`zerobook.monitor.policy.RecoveryPolicy.state`"""
    proven: list[int]
    """steps whose checkpoints, as they are now, were proven good"""
    step: int
    """the last step they logged"""
    redone: int
    """steps that they did and gave up; ``step + redone`` is what trackers saw last"""


def decided(folder: Path) -> Decided:
    """Read the decisions of earlier attempts from the log."""
    found = Decided([], [], {}, [], step=0, redone=0)
    for record in stream(folder / EVENTS):
        if record["type"] == "metrics":
            found = found._replace(step=record["steps"][1])
        elif record["type"] == "run_start" or (record["type"] == "rollback" and record["phase"] == "outcome"):
            # training goes on from this step: later steps in the log are given up
            found = found._replace(step=record["step"], redone=found.redone + max(0, found.step - record["step"]))
        elif record["type"] == "skip":
            found.skips.extend(record["ranges"])
        elif record["type"] == "lr_change":
            found.cuts.append(record["cut"])
        elif record["type"] == "decision":
            found = found._replace(ladder=record["ladder"])
        elif record["type"] == "checkpoint" and record["state"] in ("complete", "proven_good"):
            others = [step for step in found.proven if step != record["step"]]
            found = found._replace(proven=[*others, record["step"]] if record["state"] == "proven_good" else others)
    return found


def unfinished_rollback(folder: Path) -> int | None:
    """Return the target step of a rollback that the newest attempt did not finish; None if there is none."""
    for record in backwards(folder / EVENTS):
        if record is None:
            continue
        kind = record["type"]
        if kind == "resume" or (kind == "rollback" and record["phase"] == "outcome"):
            return None
        if kind == "rollback":
            return record["to_step"]
    return None


@contextmanager
def last_words(log: RunLog | None, output_dir: str | Path, rank: int) -> Iterator[None]:
    """Return a context for the training. It samples the machine, logs an error that ends the training, and raises it again.

    Rank 0 writes ``crash`` (``stop`` for Ctrl-C) into the log, another rank ``runlog/crash-rank-R.txt``.
    """
    sampler = Sampler(log) if log else None
    try:
        try:
            yield
        finally:
            if sampler:
                sampler.stop()
    except (Exception, KeyboardInterrupt) as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, by its name: logs are read without torch
            error.add_note(out_of_memory())
        # A log is shown to others.
        where = without_passwords(traceback.format_exc())
        if log is None:
            file = Path(output_dir) / "runlog" / f"crash-rank-{rank}.txt"
            write_whole(file, where)
        elif isinstance(error, KeyboardInterrupt):
            log.event("stop", reason="interrupted from the keyboard")
        else:
            reason = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
            log.event("crash", reason=without_passwords(reason), error=type(error).__name__, traceback=where[-4000:])
        raise


def hang(log: RunLog | None, output_dir: str | Path, rank: int, reason: str, text: str) -> None:
    """Write that this process ends because a rank holds up the run: rank 0 into the log, another rank into a file.

    Args:
        text: the whole report, with stacks.
    """
    if log is None:
        write_whole(Path(output_dir) / "runlog" / f"crash-rank-{rank}.txt", text)
    else:
        log.event("crash", reason=reason, error="Hang", traceback=text[-4000:])


def write_page(log: RunLog) -> None:
    """Write the logbook's page, and print its path."""
    from zerobook.runlog.report import write

    try:
        page, _ = write(log.folder)
        tqdm.write(f"logbook: {page}")
    except Exception as error:  # the run has ended well, whatever becomes of its page
        tqdm.write(f"WARNING: the logbook's page could not be written: {type(error).__name__}: {error}")
