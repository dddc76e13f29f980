"""Show what the spike monitor would have found and done in a run of another program: as a table, and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.log_detector import LogDetector
from scripts.other_logs import OtherLog, read_log
from zerobook.config import RecipeConfig
from zerobook.monitor.finding import Finding, Point
from zerobook.monitor.policy import LEAD, RecoveryAction
from zerobook.monitor.spike_monitor import SpikeMonitor
from zerobook.runlog import figures
from zerobook.runlog.events import Event
from zerobook.runlog.formatting import far_above_best, figure
from zerobook.runlog.report import PAGE, render_page
from zerobook.runlog.tables import Table
from zerobook.training.intervals import FIRST_STEP, SAVES_A_RUN
from zerobook.utils.units import counted
from zerobook.utils.writing import write_whole

NOTE = (
    "What would have been done is what a run of Zerobook does with --on_spike rollback and the checkpoints that it saves by "
    "itself: the first within ten steps, then ten in a run. The curve itself is as it was logged."
)
_REACTIONS = {
    "outlier": "note it",
    "spike": "wait",
    "spike_end": "go on",
    "level_shift": "note it, and take the new level",
    "slow_rise": "warn",
    "reset": "note it",
    "chronic": "advise a lower learning rate",
}
"""Kind of a finding that needs no action -> what a run does about it, to be read after "would"."""


class Judgement(NamedTuple):
    """A finding, and what a run with ``--on_spike rollback`` would do about it: in words, and the recovery action if any.

    ``number`` counts from 0 the point at which the finding was noticed.
    """

    number: int
    finding: Finding
    reaction: str
    action: RecoveryAction | None


class Hindsight(NamedTuple):
    """All judgements on a curve, and the warning at its end, as `SpikeMonitor.far_above_best` returns it."""

    judgements: list[Judgement]
    far_above_best: dict[str, list[float | None]]


def points_of(records: Iterable[dict[str, Any]]) -> list[Point]:
    """Return records with step, loss, grad_norm and learning_rate as points for the detector."""
    points = []
    for record in records:
        values = {name: record[name] for name in ("step", "loss", "grad_norm", "learning_rate")}
        points.append(Point(**values))
    return points


def judge_run(points: Sequence[Point], saved_steps: Sequence[int], held_out: Sequence[float] = ()) -> Hindsight:
    """Return what the spike monitor finds on a curve, and what would be done about it.

    A rollback that would have been done does not change the rest of the curve. So after it, nothing more is done until the
    detector is calm again.

    Args:
        saved_steps: steps of the checkpoints that the run would have had, in order.
        held_out: losses on held-out data, in order.
    """
    defaults = RecipeConfig.model_fields
    monitor = SpikeMonitor(
        "rollback",
        max_rollbacks=defaults["max_rollbacks"].default,
        rate_factor=defaults["rollback_lr_factor"].default,
        detector={},
        policy={},
    )
    # This detector allows for a log with several runs in it.
    monitor.detector = LogDetector()
    judgements: list[Judgement] = []
    # Steps of the checkpoints so far: all, those that may become proven good, and those that are.
    saved: list[int] = []
    candidates: list[int] = []
    proven: list[int] = []
    # Whether an action would have been taken since the detector was last calm.
    is_treated = False
    for number, point in enumerate(points):
        findings = monitor.update(point).findings
        if number == len(points) - 1:
            findings = [*findings, *monitor.detector.finish()]
        for finding in findings:
            # The detector arms at many harmless points, so that is left out.
            if finding.kind == "armed" or (finding.needs_action and is_treated):
                continue
            action = None
            if finding.needs_action:
                unproven = [step for step in saved if step not in proven]
                action = monitor.decide(finding, proven, unproven, None)
                monitor.policy.record(action)
                is_treated = True
            # A checkpoint from shortly before a spike may hold the cause, so it never becomes proven good.
            if finding.kind == "spike":
                candidates = [step for step in candidates if step < finding.onset - LEAD]
            reaction = _REACTIONS.get(finding.kind) or _describe(action)
            judgements.append(Judgement(number, finding, reaction, action))
        new_saves = [step for step in saved_steps[len(saved) :] if step <= point.step]
        saved += new_saves
        if monitor.detector.is_calm:
            is_treated = False
            candidates += new_saves
            newest_proven = points[max(0, number - monitor.settings.patience - LEAD)].step
            proven += [step for step in candidates if step <= newest_proven]
            candidates = [step for step in candidates if step > newest_proven]
    last_held_out = held_out[-1] if held_out else None
    return Hindsight(judgements, monitor.far_above_best(last_held_out, min(held_out, default=None)))


def _describe(action: RecoveryAction | None) -> str:
    """Return what a run would do, to be read after "would". ``action`` is None only for findings in `_REACTIONS`."""
    assert action is not None
    # The steps that the action skips; if it does not skip yet, those that a later skip would leave out.
    first, last = action.steps or (max(1, action.onset - LEAD + 1), action.noticed)
    samples = f"leave out the samples of steps {first} to {last}"
    reactions: dict[str, str] = {
        "replay": f"go back to step {action.to_step} and repeat the steps; if it comes again, {samples}",
        "skip": f"go back to step {action.to_step} and {samples}",
        "lower_rate": f"go back to step {action.to_step}, {samples} and lower the learning rate",
        "stop": f"stop: {action.rule}",
    }
    return reactions.get(action.kind, f"warn: {action.rule}")


@dataclass(frozen=True)
class OtherRun:
    """The log of another program, and what the spike monitor would have done in that run."""

    log: OtherLog
    hindsight: Hindsight

    @classmethod
    def read(cls, path: str | Path) -> OtherRun:
        log = read_log(path)
        points = points_of(log.records)
        steps = [point.step for point in points]
        # The steps at which a run saves by itself, as far as that does not depend on its speed.
        interval = max(1, (max(steps) - min(steps)) // SAVES_A_RUN)
        saved_steps = range(min(steps) - 1 + FIRST_STEP, max(steps) + 1, interval)
        return cls(log, judge_run(points, saved_steps, list(log.held_out.values())))

    def summary(self) -> str:
        steps = [record["step"] for record in self.log.records]
        findings = [judgement.finding for judgement in self.hindsight.judgements]
        # What is not finite is a divergence without a spike before it.
        alarms = sum(finding.kind == "spike" or (finding.needs_action and finding.points == 1) for finding in findings)
        rollbacks = sum(action is not None and action.goes_back for *_, action in self.hindsight.judgements)
        outliers = sum(finding.kind == "outlier" for finding in findings)
        words = (
            f"{counted(len(steps), 'point')}, steps {min(steps):,} to {max(steps):,}: {counted(alarms, 'alarm')}, "
            f"{counted(rollbacks, 'rollback')}, {counted(outliers, 'outlier')}."
        )
        far = self.hindsight.far_above_best
        return f"{words} {far_above_best(far)}" if far else words

    def table(self) -> Table:
        rows = []
        for number, (_, finding, reaction, _) in enumerate(self.hindsight.judgements):
            loss = f"{figure(finding.base, '.4g')} -> {figure(finding.peak, '.4g')}"
            position = [f"[{number}]", str(finding.step), str(finding.onset)]
            rows.append([*position, finding.kind.replace("_", " "), loss, finding.reason, reaction])
        columns = ["seq", "step", "began at", "what", "loss", "why", "Zerobook would"]
        return Table("What was found, and what would have been done", columns, rows)

    def events(self) -> list[Event]:
        """Return the findings and rollbacks as the events that a run writes about them, to be drawn."""
        events: list[Event] = []
        for number, (point_number, finding, _, action) in enumerate(self.hindsight.judgements):
            place = {"seq": number, "branch": self.log.records[point_number]["branch"]}
            event_type = {"outlier": "anomaly", "spike_end": "spike_end"}.get(finding.kind, "spike")
            events.append({**place, "type": event_type, **asdict(finding)})
            if action is not None and action.goes_back:
                positions = {"from_step": action.noticed, "to_step": action.to_step, "action": action.kind}
                events.append({**place, "type": "rollback", "phase": "intent", **positions})
        return events

    def write_page(self) -> Path:
        """Write the page beside the log, or into its folder. Return its path."""
        log = self.log
        name = log.path.resolve().name
        page = log.path / PAGE if log.path.is_dir() else log.path.with_name(f"{name}.{PAGE}")
        columns = [f"{quantity} from {column}" for quantity, column in log.columns.items()]
        held_out = {"held out": log.held_out} if log.held_out else {}
        chart = figures.make_steps_chart(log.records, log.last_current_steps(), held_out, self.events())
        text = render_page(
            name=name,
            state=self.summary(),
            facts={"read as": log.file_format, "columns": ", ".join(columns)},
            cards=self.cards(),
            charts={"curves": figures.chart_as_json(chart)},
            hint="",
            tables=[self.table()],
            days=[],
            note=NOTE,
        )
        write_whole(page, text)
        return page

    def cards(self) -> list[tuple[str, str]]:
        """Return the large numbers at the top of the page: (text, label)."""
        cards = [(f"{self.log.records[-1]['step']:,}", "last step"), (f"{len(self.log.records):,}", "logged points")]
        losses = {"loss": [record["loss"] for record in self.log.records], "held-out loss": list(self.log.held_out.values())}
        for name, values in losses.items():
            # A NaN has no place in an order.
            lowest = min(filter(math.isfinite, values), default=None)
            if values:
                cards += [(f"{values[-1]:.4g}", f"last {name}"), (figure(lowest, ".4g"), f"lowest {name}")]
        return cards
