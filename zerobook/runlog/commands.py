"""Commands that people give to a live run: files in ``output_dir/runlog/commands``, which rank 0 takes at its log points.

A command is JSON, so that it is data and never code. Whoever can write to the folder of a run may put any file there. So a
command counts only if it is a regular file of the user who runs the run, of bounded size, and valid. Files are renamed into
their place, so none is read half written. The directory cache of a network file system can delay them by up to a minute.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zerobook.config import OnSpike
from zerobook.runlog.writer import EVENTS
from zerobook.utils.writing import write_whole

FOLDER = "commands"
"""Folder in the runlog's folder."""
MOST_BYTES = 1 << 16
MOST_FILES = 1000
"""Maximum number of files that are read at one log point, so that many files do not block a run."""
# Only files with such a name are read and removed. They sort by the time at which they were written.
_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})\.json")
_ARGUMENTS = {"rollback": "step", "lower_rate": "factor", "skip": "steps", "policy": "on_spike"}
"""Action -> its argument. The other actions have none."""


class Command(BaseModel):
    """A command of a person to a run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    action: Literal["rollback", "lower_rate", "skip", "save", "stop", "policy"]
    step: int | None = Field(None, ge=1)
    """of the checkpoint to go back to"""
    factor: float | None = Field(None, gt=0, lt=1)
    """of the learning rate"""
    steps: tuple[int, int] | None = None
    """first and last step whose samples are left out"""
    on_spike: OnSpike | None = None
    reason: str = Field("", max_length=1000)
    host: str = Field(max_length=255)
    """where the command was given"""
    attempt: int
    branch: int
    newest_seq: int
    """number of the run's newest event when the command was given"""

    @model_validator(mode="after")
    def _check_arguments(self) -> Command:
        for action, name in _ARGUMENTS.items():
            if (getattr(self, name) is not None) != (action == self.action):
                raise ValueError(f"{name} belongs to {action}, and to nothing else")
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError("the first step is at least 1, and not behind the last one")
        return self

    @property
    def argument(self) -> int | float | str | tuple[int, int] | None:
        return getattr(self, _ARGUMENTS.get(self.action, ""), None)


class Received(NamedTuple):
    """A command as rank 0 took it. If it is malformed, ``problem`` says why, and ``command`` is None."""

    command_id: str
    user: str
    command: Command | None
    problem: str | None


def make_folder(runlog: Path) -> None:
    """Make the folder. Nobody but this user can put a file into it."""
    # Without the folder, the run trains, but takes no commands.
    with suppress(OSError):
        (runlog / FOLDER).mkdir(mode=0o700, exist_ok=True)


def send(runlog: Path, command: Command) -> str:
    """Put a command into the folder of a run, and return its id."""
    command_id = f"{time.time_ns():016x}-{secrets.token_hex(4)}"
    write_whole(_file_of(runlog, command_id), command.model_dump_json(exclude_none=True), durable=True)
    return command_id


def withdraw(runlog: Path, command_id: str) -> bool:
    """Remove a command that was not taken. Return False if the run has taken it: only one process can remove the file."""
    try:
        _file_of(runlog, command_id).unlink()
    except FileNotFoundError:
        return False
    return True


def _file_of(runlog: Path, command_id: str) -> Path:
    return runlog / FOLDER / f"{command_id}.json"


def is_waiting(runlog: Path) -> bool:
    """Return whether there is a command."""
    with _opened(runlog) as folder:
        return folder is not None and bool(_names(folder))


def take_oldest(runlog: Path) -> Received | None:
    """Take the oldest command out of the folder; None if there is none."""
    # An error of the disk does not end the training: the command stays, or is lost.
    with _opened(runlog) as folder, suppress(OSError):
        if folder is None:
            return None
        for name in _names(folder):
            user, content, problem = _read(name, folder, owner=os.stat(runlog / EVENTS).st_uid)
            try:
                os.unlink(name, dir_fd=folder)
            except OSError:
                # It was withdrawn, or is something that cannot be removed, such as a folder.
                continue
            command = None
            if problem is None:
                command, problem = _parse(content)
            return Received(name.removesuffix(".json"), user, command, problem)
    return None


@contextmanager
def _opened(runlog: Path) -> Iterator[int | None]:
    """Return a context with the open folder, or with None if there is none. A link is not followed, since files are removed."""
    try:
        folder = os.open(runlog / FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        # The training goes on without a folder, or a disk.
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def _names(folder: int) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_FILES)]
    except OSError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name))


def _read(name: str, folder: int, owner: int) -> tuple[str, bytes, str | None]:
    """Return the name of the file's owner, the content, and the reason if the file is refused; else None.

    Args:
        owner: user id of the runlog's owner. The file must belong to this user, or to the user of this process. The two differ
            on a file server that maps user ids, which maps those of both files alike.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        return "somebody", b"", f"it cannot be read ({error.strerror})"
    try:
        facts = os.fstat(file)
        user = _name_of(facts.st_uid)
        if not stat.S_ISREG(facts.st_mode):
            return user, b"", "it is not a regular file"
        if facts.st_uid not in (owner, os.geteuid()):
            return user, b"", f"only {_name_of(owner)}, who runs this, may command it"
        if facts.st_size > MOST_BYTES:
            return user, b"", f"it is larger than {MOST_BYTES} bytes"
        return user, os.read(file, MOST_BYTES), None
    finally:
        os.close(file)


def _parse(content: bytes) -> tuple[Command | None, str | None]:
    try:
        return Command.model_validate_json(content), None
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        return None, f"it is malformed: {f'{place}: ' if place else ''}{detail['msg']}"[:300]


def _name_of(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        # A container need not know the users of a shared disk.
        return f"user {user_id}"
