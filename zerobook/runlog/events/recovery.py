"""Events of spikes, and of what was done against them."""

from __future__ import annotations

from zerobook.runlog.events.event_type import Event, Mark, declare
from zerobook.runlog.formatting import figure
from zerobook.utils.units import counted, duration

_FINDING_FIELDS = {
    "kind": "kind of the finding, see `zerobook.monitor.finding.Finding`",
    "alarm": "true if `kind` is spike, damage (after a spike, the loss falls back only slowly), divergence or slow_rise",
    "step": "step at which it was noticed",
    "onset": "step at which it began",
    "points": "number of losses since the onset, of which each step has one; for an outlier, of the high ones only",
    "base": "level of the loss before it, nats per supervised token",
    "peak": "highest loss since the onset; for `armed`, the loss at `step`; for `slow_rise`, the level to which it has risen",
    "reason": "the reason in words",
}
# Kind of a finding -> the beginning of its sentence.
_FINDING_TITLES = {
    "armed": "Something may be coming",
    "outlier": "Odd data",
    "spike": "SPIKE",
    "spike_end": "The spike is over",
    "damage": "DAMAGE",
    "divergence": "DIVERGENCE",
    "level_shift": "A new level",
    "slow_rise": "A SLOW RISE",
    "reset": "The beginning over again",
    "chronic": "Spikes again and again",
}
# Action of a decision -> what it does.
_ACTIONS = {
    "replay": "go back and do the same steps again, with nothing changed",
    "skip": "go back and leave the samples of those steps out",
    "lower_rate": "go back and lower the learning rate",
    "further_back": "go back one checkpoint further and leave the samples of those steps out",
    "leave_out": "leave the samples out from now on",
    "rollback": "go back to an earlier checkpoint",
    "cut_rate": "lower the learning rate from now on",
    "save": "save a checkpoint",
    "stop": "stop, and hand over to people",
    "none": "nothing",
}


@declare(
    "anomaly",
    when="The detector was armed, or found an outlier.",
    fields=_FINDING_FIELDS,
    # The detector arms at many harmless log points.
    is_quiet=lambda event: event["kind"] == "armed",
    mark=Mark(colour="grey", symbol="○", step=lambda event: event["onset"] if event["kind"] == "outlier" else None),
)
@declare(
    "spike",
    when="The detector found a spike, a divergence, or another change of the loss that lasts.",
    fields=_FINDING_FIELDS,
    style=lambda event: "bad" if event["kind"] in ("damage", "divergence") else "warn",
    mark=Mark(colour="red", symbol="▲", step=lambda event: event["onset"]),
)
@declare(
    "spike_end",
    when="The loss came back to its level.",
    fields=_FINDING_FIELDS,
)
def _finding(event: Event) -> str:
    return f"{_FINDING_TITLES[event['kind']]} at step {event['onset']}: {event['reason']}."


@declare(
    "command",
    when="A command of `zerobook runlog act` was taken.",
    fields={
        "id": "name of its file",
        "step": "step at which it was taken",
        "action": "rollback, lower_rate, skip, save, stop or policy; null if it was malformed",
        "argument": "step, factor, first and last step, or value of on_spike",
        "by": "user who owned the file, and the host that it names",
        "why": "reason that was given",
        "accepted": "true if it is carried out",
        "refused_because": "why it is not",
    },
    style=lambda event: "good" if event["accepted"] else "warn",
)
def _command(event: Event) -> str:
    action = event["action"] or "a command"
    argument = event["argument"]
    # First and last step, of the command ``skip``.
    if isinstance(argument, list):
        argument = "-".join(map(str, argument))
    command = action
    if argument is not None:
        command += f" {argument}"
    if event["why"]:
        command += f" ({event['why']})"
    answer = "accepted" if event["accepted"] else f"REFUSED, since {event['refused_because']}"
    return f"{event['by']} asked at step {event['step']} for {command}: {answer}."


@declare(
    "decision",
    when="A recovery action was chosen after a finding of kind `damage` or `divergence`, or a person or a hook asked for it.",
    fields={
        "action": "replay, skip, lower_rate, further_back, stop, none, or leave_out (samples are left out without a rollback). "
        "If a command caused it, also rollback, save, or cut_rate (the rate is lowered without a rollback)",
        "rule": "why this action was chosen and not another, in words",
        "why": "finding in words, or the reason that was given",
        "options": "recovery actions that were still possible, from which `action` was chosen",
        "to_step": "step of the checkpoint that the run goes back to",
        "leaves_out_steps": "first and last step whose samples are left out",
        "hardware": "which rank's copy of the weights differs, in words",
        "policy": "number of rollbacks so far, and the actions that were tried against spikes near these steps",
    },
)
def _decision(event: Event) -> str:
    words = f"Decision: {_ACTIONS[event['action']]} ({event['rule']}). Why: {event['why']}."
    other_actions = [_ACTIONS[option] for option in event["options"] if option != event["action"]]
    if other_actions:
        words += f" Still left: {'; '.join(other_actions)}."
    return words


@declare(
    "rollback",
    when="The run goes back to a checkpoint. Written twice: before the rollback (phase `intent`) and after it (`outcome`).",
    fields={
        "phase": "`intent` or `outcome`",
        "action": "recovery action that is carried out",
        "from_step": "step before the rollback",
        "to_step": "step of the checkpoint",
        "why": "finding in words, or the reason that was given",
        "step": "step after the rollback",
        "steps_given_up": "number of abandoned steps, which will be done again",
        "seconds": "seconds of the rollback",
        "bytes_read": "bytes of tensors that each rank read",
        "set_aside": "checkpoints of the branch that was abandoned, which were renamed",
        "verified": "which of learning rate, samples and random numbers of the next step are as the checkpoint recorded them",
        "differing": "name: [recorded, found], for each of these three that differs",
    },
    style="bad",
    mark=Mark(colour="red", symbol="←", step=lambda event: event["from_step"] if event["phase"] == "intent" else None),
)
def _rollback(event: Event) -> str:
    if event["phase"] == "intent":
        return f"Going back from step {event['from_step']} to the checkpoint of step {event['to_step']} ({event['action']})."
    verified = f"Same as recorded: {', '.join(event['verified'])}" if event["verified"] else "Nothing could be compared"
    differing = f"; changed: {', '.join(event['differing'])}" if event["differing"] else ""
    return (
        f"Back at step {event['step']} after {duration(event['seconds'])}; abandoned: "
        f"{counted(event['steps_given_up'], 'step')}. {verified}{differing}. Branch {event['branch']} begins."
    )


@declare(
    "skip",
    when="Samples are left out from now on.",
    fields={
        "ranges": "[start, end) of sample ids",
        "samples": "how many samples these are",
        "steps": "first and last step that took them",
        "why": "finding in words, or the reason that was given",
    },
    mark=Mark(colour="violet", symbol="✕", step=lambda event: event["steps"][0]),
)
def _skip(event: Event) -> str:
    first, last = event["steps"]
    verb = "is" if event["samples"] == 1 else "are"
    return f"{counted(event['samples'], 'sample')} of steps {first} to {last} {verb} left out of all that follows."


@declare(
    "lr_change",
    when="The learning rate is lowered.",
    fields={
        "cut": "[step, factor, steps until the rate is back on its schedule]",
        "why": "finding in words, or the reason that was given",
    },
    mark=Mark(colour="teal", symbol="▼", step=lambda event: event["cut"][0]),
)
def _lr_change(event: Event) -> str:
    step, factor, recovery_steps = event["cut"]
    return (
        f"From step {step} on, the learning rate is {factor:g} of its schedule; it rises back to it over "
        f"{counted(recovery_steps, 'step')}."
    )


@declare(
    "verify",
    when="Steps were done again, after a resume or in a replay.",
    fields={
        "after": "`steps done again` or `replay`",
        "steps": "first and last step that were compared",
        "largest_relative_difference": "largest relative difference of their losses",
        "first_apart": "first step whose loss is not the same, bit for bit; null if all losses are the same",
        "step": "after a replay: step whose loss showed whether the spike came again",
        "reproduced": "true if the spike came again",
        "loss": "loss now",
        "loss_before": "loss of the step when it was done first",
    },
    style="good",
)
def _verify(event: Event) -> str:
    if event["after"] == "replay":
        if event["reproduced"]:
            return "In the replay from the same state, the spike came again, so the data or the learning rate caused it."
        return "In the replay from the same state, the spike did not come again, so hardware or chance caused it."
    first, last = event["steps"]
    difference = figure(event["largest_relative_difference"], ".1e")
    steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
    words = f"{steps} done again: the largest relative difference of the losses is {difference}"
    if event.get("first_apart") is not None:
        words += f"; step {event['first_apart']} is the first that differs"
    return f"{words}."
