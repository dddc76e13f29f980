"""Decide what is done about a spike: a ladder of measures, each stronger than the one before.

    replay       Go back to the last proven good checkpoint and do the same steps again with nothing changed. A spike that
                 does not come again was caused by hardware or chance, and no data is lost. Otherwise data or rate caused it.
    skip         Go back to that checkpoint again and leave the samples of those steps out, in all later epochs too.
    lower_rate   Go back further and lower the learning rate, which then rises back to its schedule.
    stop         Stop with a report and an exit code; a person has to decide.

``--on_spike rollback`` climbs this ladder. ``--on_spike lower_rate`` goes back and lowers the rate each time, and leaves no
samples out. Only findings that ask for it (`Finding.asks`) lead to a measure; all others are only logged. The decision
depends on the arguments alone, so ranks that get the same arguments decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from zerobook.monitor.detector import Finding

OnSpike = Literal["log", "skip", "rollback", "lower_rate", "stop"]
EXIT_CODE = 76
"""Exit code of a run that stopped for a person to decide. The same launch again would meet the same spike."""
LEAD = 2
"""A high loss at step k is caused by earlier updates: the batch of step k - 1 and a checkpoint of step k - 1 are suspect."""
NEAR = 16
"""Steps after a treated range of steps in which a new spike counts as the same trouble."""


@dataclass(frozen=True, kw_only=True)
class RecoveryAction:
    """A measure against a spike. ``to_step``: the checkpoint's step; ``steps``: first and last whose samples are left out."""

    kind: Literal["replay", "skip", "lower_rate", "leave_out", "stop", "none"]
    rule: str
    reason: str
    options: tuple[str, ...]
    onset: int
    noticed: int
    to_step: int | None = None
    steps: tuple[int, int] | None = None
    rate_factor: float | None = None

    @property
    def goes_back(self) -> bool:
        return self.to_step is not None


@dataclass
class Trouble:
    """A place in the run with a spike, and the measures tried there. ``onset``, ``last`` and ``to_step`` are steps."""

    onset: int
    last: int
    tried: list[str] = field(default_factory=list)
    to_step: int | None = None


class RecoveryPolicy:
    """Decides on measures and remembers what was tried where.

    Args:
        on_spike: log only logs the finding; skip leaves the samples out and goes on; rollback climbs the ladder; lower_rate
            goes back and lowers the rate each time; stop stops.
        max_rollbacks: rollbacks in the whole run; after them the run stops.
        rate_factor: share of the scheduled learning rate after a cut.
    """

    def __init__(
        self,
        on_spike: OnSpike,
        *,
        max_rollbacks: int,
        rate_factor: float,
        state: dict[str, Any] | None = None,
    ):
        self.on_spike = on_spike
        self.max_rollbacks = max_rollbacks
        self.rate_factor = rate_factor
        self.rollbacks = 0
        self.trouble: Trouble | None = None
        self.restore(state or {})

    def state(self) -> dict[str, Any]:
        """Return the complete state, JSON-ready."""
        return {"rollbacks": self.rollbacks, "trouble": asdict(self.trouble) if self.trouble else None}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; an empty state is a new run's."""
        self.rollbacks = state.get("rollbacks", 0)
        self.trouble = Trouble(**state["trouble"]) if state.get("trouble") else None

    def decide(
        self, finding: Finding, good: Sequence[int], others: Sequence[int] = (), hardware: str | None = None
    ) -> RecoveryAction:
        """Return the measure against a finding that asks for one.

        Args:
            good: steps of checkpoints that were proven good.
            others: steps of complete checkpoints that were not.
            hardware: a known hardware fault, in words.
        """
        onset, noticed = finding.onset, finding.step
        same = self.trouble is not None and self.trouble.onset - LEAD <= onset <= self.trouble.last + NEAR
        trouble = self.trouble if same else None
        tried = trouble.tried if trouble else []
        reason = f"{finding.kind} since step {onset}: {finding.reason}"
        if hardware:
            reason += f"; {hardware}"

        def measure(kind: Any, rule: str, **facts: Any) -> RecoveryAction:
            return RecoveryAction(
                kind=kind, rule=rule, reason=reason, onset=onset, noticed=noticed, options=tuple(self._options(tried)), **facts
            )

        if self.on_spike == "log":
            return measure("none", "on_spike is log")
        if self.on_spike == "stop":
            return measure("stop", "on_spike is stop")
        window = (max(1, onset - LEAD + 1), noticed)
        if self.on_spike == "skip":
            return measure("leave_out", "on_spike is skip", steps=window)
        if self.rollbacks >= self.max_rollbacks:
            return measure("stop", f"{self.rollbacks} rollbacks, and max_rollbacks is {self.max_rollbacks}")
        first = min(onset, trouble.onset) if trouble else onset
        before = [step for step in good if step <= first - LEAD]
        proven = "the last proven good checkpoint"
        if not before:
            before = [step for step in others if step <= first - LEAD]
            proven = "the last checkpoint before it, which is not proven good yet"
        if not before:
            rule = f"there is no checkpoint from before step {first - LEAD + 1}"
            # Finite weights may recover by themselves; a faulty rank and NaN do not.
            hopeless = hardware is not None or not finding.finite
            return measure("stop" if hopeless else "none", rule if hopeless else f"{rule}; training goes on")
        target = max(before)
        kind = "replay" if hardware and tried.count("replay") < 2 else self._rung(tried)
        if kind == "stop":
            return measure("stop", f"all was tried at step {first}: {', '.join(tried)}")
        facts: dict[str, Any] = {"to_step": target}
        if kind != "replay" and self.on_spike == "rollback":
            since = min(window[0], trouble.onset - LEAD + 1) if trouble else window[0]
            facts["steps"] = (max(1, since), max(noticed, trouble.last if trouble else 0))
        if kind == "lower_rate":
            further = [step for step in before if trouble and trouble.to_step is not None and step < trouble.to_step]
            facts |= {"to_step": max(further) if further else target, "rate_factor": self.rate_factor}
        self.rollbacks += 1
        last = max(noticed, trouble.last) if trouble else noticed
        self.trouble = Trouble(onset=first, last=last, tried=[*tried, kind], to_step=facts["to_step"])
        return measure(kind, f"{kind}: {proven}, step {facts['to_step']}", **facts)

    def _rung(self, tried: list[str]) -> str:
        if self.on_spike == "lower_rate":
            return "lower_rate"
        if "replay" not in tried:
            return "replay"
        if "skip" not in tried:
            return "skip"
        if tried.count("lower_rate") < 2:
            return "lower_rate"
        return "stop"

    def _options(self, tried: list[str]) -> list[str]:
        if self.on_spike == "lower_rate":
            return ["lower_rate", "stop"]
        rungs = ["replay", "skip", "lower_rate", "stop"]
        return [rung for rung in rungs if rung not in tried or rung == "lower_rate"]


def rate_share(cuts: Sequence[Sequence[float]], step: int) -> float:
    """Return the factor on the scheduled learning rate at ``step`` (steps done before it).

    Args:
        cuts: [step, factor, steps of the way back] each. At ``step``, the rate is ``factor`` times the scheduled one; then it
            rises linearly back to it.
    """
    share = 1.0
    for start, factor, back in cuts:
        if step >= start:
            share *= min(1.0, factor + (1 - factor) * (step - start) / back)
    return share


def ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return the sorted [start, end) ranges that cover exactly ``numbers``.

    >>> ranges([7, 3, 4, 5, 9, 4])
    [[3, 6], [7, 8], [9, 10]]
    """
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def joined(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the union of two lists of [start, end) ranges, sorted.

    >>> joined([[0, 3], [8, 9]], [[2, 5]])
    [[0, 5], [8, 9]]
    """
    found: list[list[int]] = []
    for start, end in sorted([*map(tuple, first), *map(tuple, second)]):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found
