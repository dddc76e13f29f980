"""Decide what is done about a spike: recovery actions, each stronger than the one before.

    replay       Go back to the last proven good checkpoint and do the same steps again with nothing changed. A spike that
                 does not come again was caused by hardware or chance, and no data is lost. One that comes again was caused
                 by the data or the learning rate.
    skip         Go back to that checkpoint again and leave the samples of those steps out, in all later epochs too.
    lower_rate   Go back further and lower the learning rate, which then rises back to its schedule.
    stop         Stop with a report and an exit code; a person has to decide.

``--on_spike rollback`` takes them in that order, or in the one of ``--policy``, which may have one more:

    further_back   As skip, from one checkpoint further back.

Without ``--policy``, a replay that costs too much is left out, see `MOST_REPLAYED`. ``--on_spike lower_rate`` goes back and
lowers the rate each time, and leaves no samples out. Only findings that need an action (`Finding.needs_action`) lead to one.
All others are only logged. The decision depends on the arguments and on the actions so far, so ranks that get the same
arguments decide the same.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zerobook.config import OnSpike, PolicyAction
from zerobook.monitor.finding import Finding
from zerobook.utils.units import counted

ActionKind = PolicyAction | Literal["leave_out", "none", "rollback", "cut_rate", "save"]
DEFAULT_ORDER: tuple[PolicyAction, ...] = ("replay", "skip", "lower_rate", "stop")
# Action -> how often it is taken against the same trouble; an action that is not listed is taken once. If lowering the rate
# twice has not helped, the rate is not the cause.
MOST_TIMES = {"lower_rate": 2}
# Largest share of the run's steps that a replay may abandon. If the data are the cause, the next action abandons the same
# steps again. If hardware is the cause, leaving samples out costs less than a replay: only the good samples of a few steps.
MOST_REPLAYED = 0.1
# If the loss is high at step k, the newest checkpoint that is not suspect is that of step k - LEAD. A high loss is caused by
# earlier updates, so the batch of step k - 1 and a checkpoint of step k - 1 are suspect.
LEAD = 2
# A spike that begins at most this many steps after the last step of a trouble belongs to that trouble.
NEAR = 16


@dataclass(frozen=True, kw_only=True)
class RecoveryAction:
    """A recovery action against a spike.

    Attributes:
        rule: why this action was chosen, in words.
        reason: what happened, in words.
        options: the actions that were left to choose from.
        onset: first step of the spike.
        noticed: step at which the spike was noticed.
        to_step: step of the checkpoint to go back to; None if the run does not go back.
        steps: first and last step whose samples are left out; None if none are.
        rate_factor: share of the scheduled learning rate after the action; None if the rate stays.
        by: the user who commanded the action; None if the monitor decided.
    """

    kind: ActionKind
    rule: str
    reason: str
    options: tuple[ActionKind, ...]
    onset: int
    noticed: int
    to_step: int | None = None
    steps: tuple[int, int] | None = None
    rate_factor: float | None = None
    by: str | None = None

    @property
    def goes_back(self) -> bool:
        return self.to_step is not None

    @property
    def goes_on(self) -> bool:
        """True if the action changes something, and the run continues with the next step."""
        return not self.goes_back and self.kind not in ("none", "stop", "save")


@dataclass
class Trouble:
    """A range of steps with one or more spikes, and the actions taken against them.

    ``onset`` and ``last`` are its first and last step. ``to_step`` is the step that the last action went back to, or None.
    """

    onset: int
    last: int
    tried: list[ActionKind]
    to_step: int | None


@dataclass(frozen=True)
class _Case:
    """A spike to decide on, and the trouble that it belongs to.

    ``step`` is the newest step that the run has done. ``is_hardware``: a hardware fault is known.
    """

    finding: Finding
    trouble: Trouble
    step: int
    is_hardware: bool


class RecoveryPolicy:
    """Decides on recovery actions and remembers which were taken where.

    Args:
        on_spike: log only logs the finding; skip leaves the samples out and goes on; rollback takes the actions in order;
            lower_rate goes back and lowers the rate each time; stop stops.
        max_rollbacks: rollbacks in the whole run; after them the run stops.
        rate_factor: share of the scheduled learning rate after a cut.
        order: of the actions of rollback; None for the default.
        total_steps: of the run; None if they are not known.
        state: as `state` returned it; None for a new run.
    """

    def __init__(
        self,
        on_spike: OnSpike,
        *,
        max_rollbacks: int,
        rate_factor: float,
        order: Sequence[PolicyAction] | None = None,
        total_steps: int | None = None,
        state: dict[str, Any] | None = None,
    ):
        state = state or {}
        self._flag = on_spike
        self.on_spike: OnSpike = on_spike
        # A command may have changed on_spike during an earlier attempt. Its value stays until the user changes the flag.
        if state.get("flag") == on_spike:
            self.on_spike = state["on_spike"]
        self.max_rollbacks = max_rollbacks
        self.rate_factor = rate_factor
        self.order = order or DEFAULT_ORDER
        self._has_own_order = order is not None
        self.total_steps = total_steps
        self.rollbacks: int = state.get("rollbacks", 0)
        self.trouble: Trouble | None = None
        if state.get("trouble"):
            self.trouble = Trouble(**state["trouble"])

    def state(self) -> dict[str, Any]:
        """Return the complete state, JSON-ready."""
        trouble = None if self.trouble is None else asdict(self.trouble)
        return {"rollbacks": self.rollbacks, "trouble": trouble, "flag": self._flag, "on_spike": self.on_spike}

    def decide(
        self,
        finding: Finding,
        proven: Sequence[int],
        unproven: Sequence[int] = (),
        hardware: str | None = None,
        step: int = 0,
    ) -> RecoveryAction:
        """Return the action against a finding that needs one. If the action is taken, pass it to `record`.

        Args:
            proven: steps of the checkpoints that were proven good.
            unproven: steps of the other complete checkpoints.
            hardware: a known hardware fault, in words; None if none is known.
            step: the newest step that the run has done, if that is later than the step at which the finding was noticed.
        """
        reason = f"{finding.kind} since step {finding.onset}: {finding.reason}"
        if hardware:
            reason += f"; {hardware}"
        # The action to return is a copy of this one, with what is decided below.
        undecided = RecoveryAction(
            kind="none",
            rule="",
            reason=reason,
            options=(),
            onset=finding.onset,
            noticed=finding.step,
        )
        if self.on_spike in ("log", "stop", "skip"):
            return self._decide_without_checkpoint(undecided, finding)
        if self.rollbacks >= self.max_rollbacks:
            rule = f"{self.rollbacks} rollbacks, and max_rollbacks is {self.max_rollbacks}"
            return replace(undecided, kind="stop", rule=rule)

        # Find the checkpoints from before the trouble that the spike belongs to. Those in it are suspect, too.
        trouble = self._find_trouble(finding.onset, finding.step)
        newest_sound = trouble.onset - LEAD
        checkpoints = [step for step in proven if step <= newest_sound]
        quality = "the last proven good checkpoint"
        if not checkpoints:
            checkpoints = [step for step in unproven if step <= newest_sound]
            quality = "the last checkpoint before it, which is not proven good yet"
        if checkpoints:
            case = _Case(finding, trouble, max(step, finding.step), is_hardware=hardware is not None)
            return self._decide_rollback(case, undecided, checkpoints, quality)
        rule = f"there is no checkpoint from before step {newest_sound + 1}"
        # Finite weights may recover by themselves. With faulty hardware or NaN they cannot.
        if hardware is not None or not finding.finite:
            return replace(undecided, kind="stop", rule=rule)
        return replace(undecided, rule=f"{rule}; training goes on")

    def _decide_without_checkpoint(self, undecided: RecoveryAction, finding: Finding) -> RecoveryAction:
        """Return the action if on_spike is log, stop or skip, which need no checkpoint."""
        rule = f"on_spike is {self.on_spike}"
        if self.on_spike == "log":
            return replace(undecided, rule=rule)
        if self.on_spike == "stop":
            return replace(undecided, kind="stop", rule=rule)
        if finding.is_slow:
            return replace(undecided, rule=f"{rule}, and after a slow rise no samples are suspect")
        # With on_spike skip, the run leaves samples out and does not go back. The action skip goes back, so this one is of the
        # kind leave_out. It begins at the step before the spike, whose update is suspect.
        steps = (max(1, finding.onset - LEAD + 1), finding.step)
        return replace(undecided, kind="leave_out", rule=rule, steps=steps)

    def _decide_rollback(self, case: _Case, undecided: RecoveryAction, checkpoints: list[int], quality: str) -> RecoveryAction:
        """Return the next action in the order: a rollback, or a stop if all were taken.

        Args:
            checkpoints: steps of the checkpoints from before the trouble.
            quality: how good the newest of them is, in words.
        """
        trouble = case.trouble
        to_step = max(checkpoints)
        kind = self._choose_action(case, abandoned_steps=case.step - to_step)
        if kind == "stop":
            rule = f"all was tried at step {trouble.onset}: {', '.join(trouble.tried)}"
            return replace(undecided, kind="stop", rule=rule)
        steps_left_out = None
        rate_factor = None
        # With on_spike lower_rate, or after a slow rise, no samples are left out.
        if kind != "replay" and self.on_spike == "rollback" and not case.finding.is_slow:
            steps_left_out = (max(1, trouble.onset - LEAD + 1), trouble.last)
        if kind == "lower_rate":
            rate_factor = self.rate_factor
        # These actions go back to the checkpoint before the one of the last action, if there is another.
        if kind in ("lower_rate", "further_back") and trouble.to_step is not None:
            to_step = max((step for step in checkpoints if step < trouble.to_step), default=to_step)
        cost = f"{counted(case.step - to_step, 'step')} abandoned"
        if self.total_steps is not None:
            cost += f", {max(0, self.total_steps - case.step)} left"
        return replace(
            undecided,
            kind=kind,
            options=self._list_options(case),
            rule=f"{kind}: {quality}, step {to_step}; {cost}",
            to_step=to_step,
            steps=steps_left_out,
            rate_factor=rate_factor,
        )

    def record(self, action: RecoveryAction) -> None:
        """Remember an action that is taken, so that the next one against the same trouble is stronger."""
        if action.to_step is None:
            return
        self.rollbacks += 1
        trouble = self._find_trouble(action.onset, action.noticed)
        self.trouble = replace(trouble, tried=[*trouble.tried, action.kind], to_step=action.to_step)

    def _find_trouble(self, onset: int, noticed: int) -> Trouble:
        """Return the last trouble, extended by a spike that is near to it; a new trouble if the spike is not near."""
        trouble = self.trouble
        if trouble is None or not trouble.onset - LEAD <= onset <= trouble.last + NEAR:
            return Trouble(onset=onset, last=noticed, tried=[], to_step=None)
        return replace(trouble, onset=min(onset, trouble.onset), last=max(noticed, trouble.last))

    def _choose_action(self, case: _Case, *, abandoned_steps: int) -> ActionKind:
        """Return the first action in the order that may help and was not taken yet; stop if none is left.

        Args:
            abandoned_steps: number of steps that going back to the newest checkpoint would abandon.
        """
        tried_actions = case.trouble.tried
        # If a hardware fault is known, try two replays before the data or the rate count as the cause.
        if case.is_hardware and tried_actions.count("replay") < 2:
            return "replay"
        if self.on_spike == "lower_rate":
            return "lower_rate"
        order = self._list_useful_actions(is_slow=case.finding.is_slow)
        # In the default order, a replay is only the first action, and only if it is cheap. After another action, the samples of
        # the spike are left out already, and a replay would show nothing.
        is_expensive = self.total_steps is not None and abandoned_steps > MOST_REPLAYED * self.total_steps
        has_useless_replay = is_expensive or len(tried_actions) > 0
        if has_useless_replay and "replay" in order and not self._has_own_order:
            order.remove("replay")
        for action in order:
            if tried_actions.count(action) < MOST_TIMES.get(action, 1):
                return action
        return "stop"

    def _list_useful_actions(self, *, is_slow: bool) -> list[PolicyAction]:
        """Return the actions that may help, in order."""
        if not is_slow:
            return list(self.order)
        # A slow rise has no step that a replay could compare, and no suspect samples that could be left out.
        return [action for action in self.order if action not in ("replay", "skip")]

    def _list_options(self, case: _Case) -> tuple[ActionKind, ...]:
        """Return the actions that are left. Lowering the rate always is."""
        if self.on_spike == "lower_rate":
            return ("lower_rate", "stop")
        order = self._list_useful_actions(is_slow=case.finding.is_slow)
        return tuple(action for action in order if action not in case.trouble.tried or action == "lower_rate")


def compute_rate_share(cuts: Sequence[Sequence[float]], step: int) -> float:
    """Return the factor on the scheduled learning rate at ``step``, the number of steps done.

    Args:
        cuts: [step, factor, number of steps] of each cut. At its step, the rate is ``factor`` times the scheduled one. Over the
            following number of steps, it rises back linearly to the scheduled one.
    """
    # Multiply the cuts: a later cut lowers the rate that the earlier ones have left.
    share = 1.0
    for start, factor, recovery_steps in cuts:
        if step >= start:
            share *= min(1.0, factor + (1 - factor) * (step - start) / recovery_steps)
    return share
