"""``zerobook runlog act``: give a command to a live run, and wait for its answer."""

import argparse
import re
import socket
import time
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from zerobook.config import OnSpike
from zerobook.errors import RunLogError
from zerobook.runlog import commands
from zerobook.runlog.commands import Command
from zerobook.runlog.events import Event, ending_types, sentence
from zerobook.runlog.history import folder_of, is_being_written
from zerobook.runlog.jsonl import backwards
from zerobook.runlog.writer import EVENTS
from zerobook.utils.terminal import say

# Seconds that the command waits for an answer, if ``--wait`` is not given.
WAIT_S = 300.0
# Seconds between two looks for the answer.
_POLL_S = 0.5


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the commands, each with its argument, ``--reason`` and ``--wait``."""
    parser.add_argument("run", help="output_dir of a run that trains")
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    rollback = _add_command(actions, "rollback", "go back to a checkpoint")
    rollback.add_argument("--to", dest="step", type=int, required=True, metavar="STEP", help="step of a complete checkpoint")
    lower_rate = _add_command(
        actions, "lower-rate", "lower the learning rate; it rises back over --rollback_lr_steps steps of the run"
    )
    lower_rate.add_argument("factor", type=float, help="factor of the learning rate, between 0 and 1")
    skip = _add_command(actions, "skip", "from now on, leave out the samples of some completed steps, without going back")
    skip.add_argument("steps", type=_parse_steps, metavar="FIRST-LAST", help="steps, as 120-128")
    _add_command(actions, "save", "save a checkpoint")
    _add_command(actions, "stop", "save a checkpoint, and end the run with exit code 76")
    policy = _add_command(actions, "policy", "set --on_spike to another value")
    policy.add_argument("on_spike", choices=get_args(OnSpike))


def _add_command(actions: Any, name: str, meaning: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, prog=f"zerobook runlog act {name}", description=meaning, help=meaning)
    parser.add_argument("--reason", default="", help="why; it is recorded")
    parser.add_argument("--wait", type=float, default=WAIT_S, metavar="SECONDS", help=f"for the answer (default {WAIT_S:.0f})")
    return parser


# Return the first and the last step of ``120-128``, or of ``120``.
def _parse_steps(text: str) -> tuple[int, int]:
    steps = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if steps is None:
        raise argparse.ArgumentTypeError(f"{text} is not FIRST-LAST")
    # The second number is missing for a single step.
    return int(steps[1]), int(steps[2] or steps[1])


def act(flags: argparse.Namespace) -> int:
    """Send a command to a live run, which takes it at its next log point, and print the answer.

    Exit code: 0 if the run accepts it, and 1 if the run refuses it, ends, or has not answered after ``--wait`` seconds.
    """
    folder = folder_of(flags.run)
    # A damaged line is read as None.
    newest = next((event for event in backwards(folder / EVENTS) if event is not None), None)
    if newest is None or not _is_live(folder, newest):
        raise RunLogError(f"{flags.run}: the run is not live, so it takes no commands. `zerobook runlog status` has its state.")
    command_id = commands.send(folder, _make_command(flags, newest))
    answer = _wait_for_answer(folder, command_id, newest["seq"], flags.wait)
    if answer is not None:
        say(sentence(answer))
        return 0 if answer["accepted"] else 1
    # The command is a file. If this process removes it, the run cannot have taken it, since the run removes what it takes.
    if commands.withdraw(folder, command_id):
        state = f"has taken no command for {flags.wait:g} s" if is_being_written(folder) else "has ended"
        say(f"The run {state}: the command is withdrawn, and nothing is done.")
    else:
        say("The run has taken the command, and has not answered yet: `zerobook runlog show RUN events` will have the answer.")
    return 1


def _is_live(folder: Path, newest: Event) -> bool:
    """Return whether a process trains and takes commands.

    On a file system without locks, `is_being_written` is not certain, so the newest event must not be the end of an attempt.
    """
    return is_being_written(folder) and newest["type"] not in ending_types() and (folder / commands.FOLDER).is_dir()


def _make_command(flags: argparse.Namespace, newest: Event) -> Command:
    # An action takes at most one argument, under one of these names.
    arguments = {name: value for name, value in vars(flags).items() if name in ("step", "factor", "steps", "on_spike")}
    try:
        return Command(
            **arguments,
            action=flags.action.replace("-", "_"),
            reason=flags.reason,
            host=socket.gethostname()[:255],
            # By these three, the run refuses a command that was meant for an earlier state of it.
            attempt=newest["attempt"],
            branch=newest["branch"],
            newest_seq=newest["seq"],
        )
    except ValidationError as error:
        raise RunLogError(f"{flags.action}: {error.errors()[0]['msg']}") from None


def _wait_for_answer(folder: Path, command_id: str, newest_seq: int, wait_s: float) -> Event | None:
    """Return the event that answers the command; None if there is none after ``wait_s`` seconds, or when the run has ended."""
    deadline = time.monotonic() + wait_s
    answer = None
    while answer is None and time.monotonic() < deadline and is_being_written(folder):
        time.sleep(_POLL_S)
        answer = _find_answer(folder, command_id, newest_seq)
    # The run may have answered just before it ended, so look once more.
    return answer or _find_answer(folder, command_id, newest_seq)


def _find_answer(folder: Path, command_id: str, newest_seq: int) -> Event | None:
    """Return the event that answers the command; None if there is none among the events after number ``newest_seq``."""
    for event in backwards(folder / EVENTS):
        # A damaged line.
        if event is None:
            continue
        if event["seq"] <= newest_seq:
            return None
        if event["type"] == "command" and event["id"] == command_id:
            return event
    return None
