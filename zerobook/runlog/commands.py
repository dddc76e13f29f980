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

# Name of the folder, in the folder of the runlog.
FOLDER = "commands"
MOST_BYTES = 1 << 16
# Maximum number of files that are listed at one log point, so that many files do not block a run.
MOST_FILES = 1000
# Only files with such a name are read and removed. They sort by the time at which they were written.
_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})\.json")
# Action -> its argument. The other actions have none.
_ARGUMENTS = {"rollback": "step", "lower_rate": "factor", "skip": "steps", "policy": "on_spike"}


class Command(BaseModel):
    """A command of a person to a run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    action: Literal["rollback", "lower_rate", "skip", "save", "stop", "policy"]
    step: int | None = Field(None, ge=1)
    """step of the checkpoint to go back to"""
    factor: float | None = Field(None, gt=0, lt=1)
    """number by which the learning rate is multiplied"""
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
        # Each argument must be given with its action, and with no other one.
        for action, name in _ARGUMENTS.items():
            is_given = getattr(self, name) is not None
            if is_given != (action == self.action):
                raise ValueError(f"{action} needs {name}, and no other action has it")
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError("the first step must be at least 1, and not after the last one")
        return self

    @property
    def argument(self) -> int | float | str | tuple[int, int] | None:
        name = _ARGUMENTS.get(self.action)
        return None if name is None else getattr(self, name)


class Received(NamedTuple):
    """A command as rank 0 took it. If its file is refused or malformed, ``problem`` says why, and ``command`` is None."""

    command_id: str
    user: str
    command: Command | None
    problem: str | None


def make_folder(runlog: Path) -> None:
    """Make the folder of commands. Nobody but this user can put a file into it."""
    # If the folder cannot be made, the run trains and takes no commands.
    with suppress(OSError):
        (runlog / FOLDER).mkdir(mode=0o700, exist_ok=True)


def send(runlog: Path, command: Command) -> str:
    """Put a command into the folder of a run, and return its id."""
    command_id = f"{time.time_ns():016x}-{secrets.token_hex(4)}"
    write_whole(_command_file(runlog, command_id), command.model_dump_json(exclude_none=True), durable=True)
    return command_id


def withdraw(runlog: Path, command_id: str) -> bool:
    """Remove a command that was not taken. Return False if the run has taken it: only one process can remove the file."""
    try:
        _command_file(runlog, command_id).unlink()
    except FileNotFoundError:
        return False
    return True


def _command_file(runlog: Path, command_id: str) -> Path:
    return runlog / FOLDER / f"{command_id}.json"


def is_waiting(runlog: Path) -> bool:
    """Return whether there is a command that the run has not taken."""
    with _open_folder(runlog) as folder:
        return folder is not None and bool(_list_names(folder))


def take_oldest(runlog: Path) -> Received | None:
    """Remove the oldest command from the folder, and return it; None if there is none."""
    # An error of the disk does not end the training. The command then stays, or is lost.
    with _open_folder(runlog) as folder, suppress(OSError):
        if folder is None:
            return None
        for name in _list_names(folder):
            user, content, problem = _read_file(name, folder, owner=os.stat(runlog / EVENTS).st_uid)
            try:
                os.unlink(name, dir_fd=folder)
            except OSError:
                # The command was withdrawn, or the entry cannot be removed, such as a folder.
                continue
            command = None
            if problem is None:
                command, problem = _parse_command(content)
            return Received(name.removesuffix(".json"), user, command, problem)
    return None


@contextmanager
def _open_folder(runlog: Path) -> Iterator[int | None]:
    """Return a context with the file descriptor of the folder of commands; None if the folder cannot be opened."""
    try:
        # A link is refused, since files in another folder would be removed.
        folder = os.open(runlog / FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        # A missing folder or a broken disk does not end the training.
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


# Return the names of the files of commands, oldest first.
def _list_names(folder: int) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_FILES)]
    except OSError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name))


def _read_file(name: str, folder: int, owner: int) -> tuple[str, bytes, str | None]:
    """Return (name of the file's owner, content, why the file is refused; None if it is not).

    Args:
        owner: user id of the runlog's owner. The file must belong to this user, or to the user of this process. The two differ
            if a file server maps user ids to others. It does so for the files of commands as for the runlog.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        return "somebody", b"", f"it cannot be read ({error.strerror})"
    try:
        facts = os.fstat(file)
        user = _user_name(facts.st_uid)
        if not stat.S_ISREG(facts.st_mode):
            return user, b"", "it is not a regular file"
        if facts.st_uid not in (owner, os.geteuid()):
            return user, b"", f"only {_user_name(owner)}, who runs this, may command it"
        if facts.st_size > MOST_BYTES:
            return user, b"", f"it is larger than {MOST_BYTES} bytes"
        return user, os.read(file, MOST_BYTES), None
    finally:
        os.close(file)


def _parse_command(content: bytes) -> tuple[Command | None, str | None]:
    try:
        return Command.model_validate_json(content), None
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"]))
        # An error of the command as a whole has no field.
        problem = f"{field}: {detail['msg']}" if field else detail["msg"]
        return None, f"it is malformed: {problem}"[:300]


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        # A container may not know the users of a shared disk.
        return f"user {user_id}"
