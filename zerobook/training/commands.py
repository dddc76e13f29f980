"""Take the commands that people give to a live run, and turn them into recovery actions, or refuse them."""

from collections.abc import Callable
from typing import Any

from zerobook.checkpoint.manager import CheckpointManager
from zerobook.monitor.policy import LEAD, ActionKind, RecoveryAction
from zerobook.runlog import commands
from zerobook.runlog.commands import Command, Received
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.training.rollback import Recovery
from zerobook.training.spikes import SpikeHandler
from zerobook.training.state import RunState

# Action of a command -> kind of the recovery action. If the monitor decides on ``skip`` or ``lower_rate``, the run first goes
# back to a checkpoint. For a command it does not, so that these have other kinds.
_KINDS: dict[str, ActionKind] = {
    "rollback": "rollback",
    "lower_rate": "cut_rate",
    "skip": "leave_out",
    "save": "save",
    "stop": "stop",
}


class OperatorCommands:
    """Takes commands at log points. Every rank has one; rank 0 reads the files and writes the events.

    Args:
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        state: RunState,
        strategy: Strategy,
        manager: CheckpointManager,
        spikes: SpikeHandler,
        recovery: Recovery,
        log: RunLog,
        say: Callable[[str], None],
    ):
        self.state = state
        self.strategy = strategy
        self.manager = manager
        self.spikes = spikes
        self.recovery = recovery
        self.log = log
        self.say = say
        # Number of the event of the last accepted command, on rank 0; -1 if there is none.
        self._last_accepted_event = -1
        strategy.on_main(lambda: commands.make_folder(log.folder))

    def is_waiting(self) -> bool:
        """Return whether a command waits. Only rank 0 can know: the others return False, and learn it at the log point."""
        return self.strategy.is_main and commands.is_waiting(self.log.folder)

    def take(self) -> RecoveryAction | None:
        """Accept or refuse the oldest command. Return the action to carry out; None if there is none. Collective."""
        # Finish a save in progress first: it may complete or prune the checkpoint to which the command goes back.
        self.manager.finish(self.log)
        received = self.strategy.on_main(self._receive)
        if received is None:
            return None
        command_id, user, fields, problem = received
        # A malformed command has a problem and no fields.
        command = None if fields is None else Command(**fields)
        action = None
        if command is not None and problem is None:
            action = self._make_action(command, f"{user}@{command.host}")
            problem = self._why_impossible(command, action)
        event_number = self._record_answer(Received(command_id, user, command, problem))
        if command is None or problem is not None:
            return None
        self._last_accepted_event = event_number
        if command.on_spike is not None:
            self.spikes.change_policy(command.on_spike)
        if action is not None:
            self.spikes.report_command(action, event_number)
        return action

    def refuse_waiting(self, reason: str) -> None:
        """Refuse, on rank 0, all commands that still wait when the run ends."""
        if not self.strategy.is_main:
            return
        # The number is limited, since new commands may keep coming.
        for _ in range(commands.MOST_FILES):
            received = commands.take_oldest(self.log.folder)
            if received is None:
                return
            self._record_answer(received._replace(problem=received.problem or reason))

    def _receive(self) -> list[Any] | None:
        """Take a command on rank 0, and check what only rank 0 knows.

        Returns:
            [id, user, fields of the command, problem], since messages between ranks hold plain values only; None if no command
                waits.
        """
        received = commands.take_oldest(self.log.folder)
        if received is None:
            return None
        command = received.command
        if command is None:
            return [received.command_id, received.user, None, received.problem]
        return [received.command_id, received.user, command.model_dump(), self._why_outdated(command)]

    def _why_outdated(self, command: Command) -> str | None:
        """Return why a command was meant for an earlier state of the run; None if it is still meant for the present one."""
        if command.attempt != self.log.attempt:
            return f"it was given to attempt {command.attempt}, and this is attempt {self.log.attempt}"
        # A command to save, to stop or to change the policy has the same meaning in every state.
        if command.action not in ("rollback", "lower_rate", "skip"):
            return None
        if command.branch != self.log.branch:
            return "the run has gone back to an earlier step since it was given"
        # The user had seen the events up to `newest_seq`. If the last accepted command is later, the user did not know of it.
        if command.newest_seq < self._last_accepted_event:
            return f"another command (event {self._last_accepted_event}) was carried out since it was given"
        return None

    def _make_action(self, command: Command, author: str) -> RecoveryAction | None:
        """Return the recovery action of a command; None for a change of the policy, which needs none."""
        if command.action == "policy":
            return None
        step = self.state.progress.step
        return RecoveryAction(
            kind=_KINDS[command.action],
            rule=f"{author} asked for it",
            reason=command.reason or "no reason was given",
            options=(),
            # Checkpoints of the last steps before the onset count as suspect. With this onset, that of ``step`` does not.
            onset=step + LEAD,
            noticed=step,
            to_step=command.step,
            steps=command.steps,
            rate_factor=command.factor,
            by=author,
        )

    def _why_impossible(self, command: Command, action: RecoveryAction | None) -> str | None:
        """Return why a command cannot be carried out; None if it can. Collective, with the same answer on every rank."""
        step = self.state.progress.step
        if command.step is not None:
            return self._why_no_rollback(command.step)
        if command.steps is not None:
            first, last = command.steps
            if last > step:
                return f"step {last} is in the future: the run is at step {step}"
            # Steps of earlier attempts, and steps long ago, are not in memory.
            if len(self.spikes.list_cursors(first, last)) < last - first + 1:
                return f"this attempt does not remember the samples of all steps from {first} to {last}"
            assert action is not None
            # The check turns an action that would leave out all samples into a stop.
            if self.recovery.check_samples_left(action).kind == "stop":
                return "no samples would be left"
        if command.action == "save" and not self.spikes.monitor.last_is_finite:
            return "the loss or the gradient of this step is not finite"
        return None

    # Collective, like `_why_impossible`.
    def _why_no_rollback(self, to_step: int) -> str | None:
        step = self.state.progress.step
        if to_step > step:
            return f"step {to_step} is in the future: the run is at step {step}"
        if to_step == step:
            return f"the run is at step {step}"
        proven, unproven = self.strategy.on_main(self.manager.steps)
        steps = sorted([*proven, *unproven])
        if to_step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            return f"there is no checkpoint of step {to_step}; complete checkpoints: {listed}"
        if not self.manager.is_undamaged(to_step):
            return f"the checkpoint of step {to_step} is damaged"
        return None

    def _record_answer(self, received: Received) -> int:
        """Log a command and its answer, and print a refusal or a change of the policy. Return the number of the event."""
        command = received.command
        step = self.state.progress.step
        # A malformed command names neither a host nor an action.
        host = "an unknown host"
        facts: dict[str, Any] = dict.fromkeys(("action", "argument", "why"))
        if command is not None:
            host = command.host
            facts = {"action": command.action, "argument": command.argument, "why": command.reason}
        author = f"{received.user}@{host}"
        event_number = self.log.event(
            "command",
            id=received.command_id,
            step=step,
            by=author,
            **facts,
            accepted=received.problem is None,
            refused_because=received.problem,
        )
        if received.problem is not None:
            self.say(f"step {step}: a command of {author} is refused: {received.problem}")
        elif command is not None and command.on_spike is not None:
            self.say(f"step {step}: {author} sets --on_spike {command.on_spike} for this run")
        return event_number
