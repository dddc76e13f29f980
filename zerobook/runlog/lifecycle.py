"""The first and last events of an attempt."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from zerobook.runlog import compare
from zerobook.runlog.events import COMMON_FIELDS, Event, ending_types
from zerobook.runlog.jsonl import backwards
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
    config = _without_passwords(config)
    facts = _without_passwords(facts)
    previous = _read_previous_attempt(log)
    if previous.last is not None and not previous.has_ending:
        _write_how_it_ended(log, previous.last, previous.machine)
    # Steps that are done again get a branch of their own, so that (branch, step) stays unique.
    newest_step = next((record for record in backwards(log.folder / STEPS) if record), None)
    if newest_step is not None and newest_step["step"] > step:
        log.branch += 1
    log.event("run_start", step=step, config=config, versions=versions, **facts)
    env = environment()
    log.event("env", **env, durable=False)
    if previous.run_start is not None:
        _write_differences(log, "config_diff", previous.run_start["config"], config)
        _write_differences(log, "launch_diff", compare.launch(previous.run_start), compare.launch(facts))
        # The versions are in ``run_start``, and the rest of the environment in ``env``.
        previous_env = {**(previous.env or {}), **previous.run_start["versions"]}
        _write_differences(log, "env_diff", previous_env, {**env, **versions})


def _without_passwords(value: Any) -> Any:
    """Return ``value`` without passwords in addresses, however deep they stand: a log is shown to others."""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        return {key: _without_passwords(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_passwords(item) for item in value]
    return value


@dataclass
class _PreviousAttempt:
    """The newest events from before an attempt, each None if there is none."""

    last: Event | None = None
    machine: Event | None = None
    run_start: Event | None = None
    env: Event | None = None
    has_ending: bool = False
    """whether the attempt of ``last`` ended with an event of its own, which a note may follow"""


def _read_previous_attempt(log: RunLog) -> _PreviousAttempt:
    previous = _PreviousAttempt()
    for event in backwards(log.folder / EVENTS):
        if event is None or event["attempt"] == log.attempt:
            continue
        event_type = event["type"]
        if previous.last is None:
            previous.last = event
        # A crash that a later attempt wrote is of another attempt than its own.
        is_of_last_attempt = event["attempt"] == previous.last["attempt"] and not event.get("of_attempt")
        if is_of_last_attempt and event_type in ending_types():
            previous.has_ending = True
        if event_type in ("machine", "run_start", "env") and getattr(previous, event_type) is None:
            setattr(previous, event_type, event)
        # What is older is of no use.
        if previous.run_start is not None:
            break
    return previous


def _write_how_it_ended(log: RunLog, last: Event, machine: Event | None) -> None:
    """Write the crash of an attempt that could not write it, as far as its ``last`` event and ``machine`` sample tell."""
    reason = "it ended without an event: killed from outside, out of memory, or a power failure"
    full_memory = machine and nearly_full(machine)
    if full_memory:
        reason = f"it ended without an event, probably killed for lack of memory: {full_memory} at its last sample"
    log.event(
        "crash",
        of_attempt=last["attempt"],
        reason=reason,
        last_event=last["seq"],
        last_utc=last["utc"],
        machine=machine["seq"] if machine else None,
    )


def _write_differences(log: RunLog, event_type: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Write an event with the keys that differ, if any do."""
    differing = compare.differences(before, now)
    # Fields that every event has differ always.
    for key in COMMON_FIELDS:
        differing.pop(key, None)
    if differing:
        log.event(event_type, differing=differing)


def environment() -> dict[str, Any]:
    """Return host, hardware and the git commit; no environment variables, which may hold secrets."""
    # A package that was installed from a wheel has no clone.
    repository = clone()
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "host_memory": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "git": None if repository is None else git_state(repository),
    }


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


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
    # A git that hangs, as on a network drive, does not block the run.
    return subprocess.check_output(["git", "-C", str(folder), *words], stderr=subprocess.DEVNULL, text=True, timeout=10).strip()


@contextmanager
def log_failure(log: RunLog, output_dir: str | Path, rank: int) -> Iterator[None]:
    """Return a context for the training. It samples the machine, logs an error that ends the training, and raises it again.

    Rank 0 writes ``crash`` (``stop`` for Ctrl-C) into the log, another rank ``runlog/crash-rank-R.txt``.
    """
    sampler = Sampler(log) if rank == 0 else None
    try:
        try:
            yield
        finally:
            # No sample follows the event that ends the attempt.
            if sampler:
                sampler.stop()
    except (Exception, KeyboardInterrupt) as error:
        # torch's error by its name: logs are written and read without torch.
        if type(error).__name__ == "OutOfMemoryError":
            error.add_note(out_of_memory())
        # A log is shown to others.
        trace = without_passwords(traceback.format_exc())
        if rank != 0:
            # On a full disk, the error that ended the training would be lost behind this one.
            with suppress(OSError):
                write_whole(Path(output_dir) / "runlog" / f"crash-rank-{rank}.txt", trace)
        elif isinstance(error, KeyboardInterrupt):
            log.event("stop", reason="interrupted from the keyboard")
        else:
            reason = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
            log.event("crash", reason=without_passwords(reason), error=type(error).__name__, traceback=trace[-4000:])
        raise


def log_hang(log: RunLog, output_dir: str | Path, rank: int, reason: str, text: str) -> None:
    """Write that this process ends because a rank blocks the run: rank 0 into the log, another rank into a file.

    Args:
        text: the whole report, with stacks.
    """
    if rank != 0:
        write_whole(Path(output_dir) / "runlog" / f"crash-rank-{rank}.txt", text)
    else:
        # An event is one line of the log, so it has only the end of the report.
        log.event("crash", reason=reason, error="Hang", traceback=text[-4000:])


def write_page(log: RunLog) -> None:
    """Write the report, and print its path."""
    from zerobook.runlog.report import write

    try:
        tqdm.write(f"report: {write(log.folder)}")
    # The run itself has ended without an error, so a failure of the page is only a warning.
    except Exception as error:
        tqdm.write(f"WARNING: the report could not be written: {type(error).__name__}: {error}")
