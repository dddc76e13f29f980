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
from zerobook.runlog.jsonl import backwards, read_newest
from zerobook.runlog.machine import Sampler, advise_on_full_gpu, describe_nearly_full
from zerobook.runlog.writer import EVENTS, STEPS, RunLog
from zerobook.utils.bars import tqdm
from zerobook.utils.shipped import clone
from zerobook.utils.terminal import without_passwords
from zerobook.utils.writing import write_whole


def begin(log: RunLog, *, config: dict[str, Any], versions: dict[str, str], step: int, **facts: Any) -> None:
    """Write the first events of an attempt: ``run_start``, ``env``, and what differs from the last attempt.

    If the last attempt wrote no event at its end, because it was killed, a ``crash`` of that attempt is written first.

    Args:
        step: step that this attempt continues from; if later steps are recorded, a new branch begins.
        facts: further fields of ``run_start``.
    """
    config = _remove_passwords(config)
    facts = _remove_passwords(facts)
    previous = _read_previous_attempt(log)
    if previous.last is not None and not previous.has_ending:
        _write_crash_of(log, previous.last, previous.machine)
    # Steps that are done again get a branch of their own, so that (branch, step) stays unique.
    newest_step, _ = read_newest(log.folder / STEPS)
    if newest_step is not None and newest_step["step"] > step:
        log.branch += 1
    log.event("run_start", step=step, config=config, versions=versions, **facts)
    env = environment()
    log.event("env", **env, durable=False)
    if previous.run_start is not None:
        _write_differences(log, "config_diff", previous.run_start["config"], config)
        _write_differences(log, "launch_diff", compare.launch(previous.run_start), compare.launch(facts))
        # The environment consists of the event ``env`` and the versions, which are in ``run_start``.
        previous_env = {**(previous.env or {}), **previous.run_start["versions"]}
        _write_differences(log, "env_diff", previous_env, {**env, **versions})


def _remove_passwords(value: Any) -> Any:
    """Return a copy of ``value`` without the passwords in addresses, at any depth, since a log is shown to other people."""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        return {key: _remove_passwords(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_remove_passwords(item) for item in value]
    return value


@dataclass
class _PreviousAttempt:
    """The newest event from before an attempt (``last``), and the newest one of three types; each None if there is none."""

    last: Event | None
    machine: Event | None
    run_start: Event | None
    env: Event | None
    has_ending: bool
    """whether the attempt of ``last`` wrote an event at its end"""


def _read_previous_attempt(log: RunLog) -> _PreviousAttempt:
    last = None
    # Type -> its newest event.
    newest_events: dict[str, Event] = {}
    has_ending = False
    for event in backwards(log.folder / EVENTS):
        # None stands for a damaged line.
        if event is None or event["attempt"] == log.attempt:
            continue
        if last is None:
            last = event
        # A crash with ``of_attempt`` tells how an earlier attempt ended, and not the one that wrote it.
        is_of_last_attempt = event["attempt"] == last["attempt"] and not event.get("of_attempt")
        if is_of_last_attempt and event["type"] in ending_types():
            has_ending = True
        newest_events.setdefault(event["type"], event)
        # Only the newest events of each type are needed, and an attempt begins with ``run_start``.
        if event["type"] == "run_start":
            break
    return _PreviousAttempt(
        last=last,
        machine=newest_events.get("machine"),
        run_start=newest_events.get("run_start"),
        env=newest_events.get("env"),
        has_ending=has_ending,
    )


def _write_crash_of(log: RunLog, last: Event, machine: Event | None) -> None:
    """Write the crash of an attempt that was killed, as far as its ``last`` event and its newest ``machine`` event tell."""
    reason = "it ended without an event: killed from outside, out of memory, or a power failure"
    full_memory = None if machine is None else describe_nearly_full(machine)
    if full_memory is not None:
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
    # An event among the values has a number and times, which always differ.
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
        "gpus": _gpu_names(),
        "git": None if repository is None else git_state(repository),
    }


def _gpu_names() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the git repository of ``folder``, and how many files differ from it; None without a repository."""
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        changed = _run_git(folder, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed_files": len(changed.splitlines())}


def code_state(file: Path) -> dict[str, Any]:
    """Return the name of a recipe's file, and the state of the git repository that tracks it, if one does."""
    try:
        _run_git(file.parent, "ls-files", "--error-unmatch", file.name)
    except (OSError, subprocess.SubprocessError):
        # No repository tracks the file. It may still lie inside of one, for example in a virtual environment.
        return {"file": file.name}
    return {"file": file.name, **(git_state(file.parent) or {})}


def _run_git(folder: Path, *words: str) -> str:
    # The time limit keeps a git command that hangs, as on a network drive, from blocking the run.
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
            # Stopped first, so that no sample follows the event that ends the attempt.
            if sampler is not None:
                sampler.stop()
    except (Exception, KeyboardInterrupt) as error:
        # The class is torch.OutOfMemoryError. Its name is compared, so that this module need not import torch.
        if type(error).__name__ == "OutOfMemoryError":
            error.add_note(advise_on_full_gpu())
        # A log is shown to other people.
        trace = without_passwords(traceback.format_exc())
        if rank != 0:
            # The disk may be full. An error of this write would replace the error that ended the training.
            with suppress(OSError):
                write_whole(Path(output_dir) / "runlog" / f"crash-rank-{rank}.txt", trace)
        elif isinstance(error, KeyboardInterrupt):
            log.event("stop", reason="interrupted from the keyboard")
        else:
            # Notes such as the advice above are not part of the error's own text.
            reason = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
            log.event("crash", reason=without_passwords(reason), error=type(error).__name__, traceback=trace[-4000:])
        raise


def log_hang(log: RunLog, output_dir: str | Path, rank: int, reason: str, text: str) -> None:
    """Write that this process ends because a rank blocks the run: rank 0 into the log, another rank into a file.

    Args:
        reason: one sentence.
        text: the whole report, with the stacks of threads.
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
    # Without the page, the run has still ended as it did, so a failure of the page is only a warning.
    except Exception as error:
        tqdm.write(f"WARNING: the report could not be written: {type(error).__name__}: {error}")
