"""Events as sentences. They may hold text from data or people, so code that puts them into HTML must escape them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerobook.health.stragglers import Slow
from zerobook.health.stragglers import describe as describe_slow
from zerobook.utils.terminal import plain
from zerobook.utils.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

Event = dict[str, Any]
QUIET = ("runlog", "metrics", "machine", "env", "memory", "shard")
"""Types of events that the logbook leaves out"""


def duration(seconds: float) -> str:
    """Format seconds as ``3 d 4 h``, ``2 h 5 min``, ``41 s`` or ``0.3 s``.

    >>> duration(7512), duration(0.31)
    ('2 h 5 min', '0.3 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    parts: list[str] = []
    left = round(seconds)
    for name, size in units:
        if left >= size and len(parts) < 2:
            parts.append(f"{left // size} {name}")
        left %= size
        if parts and len(parts) == 2:
            break
    return " ".join(parts)


def figure(value: float | None, form: str) -> str:
    """Format a number that may be None, which stands for NaN and infinities in JSON.

    >>> figure(1.25, ".4f"), figure(None, ".4f")
    ('1.2500', 'not finite')
    """
    return "not finite" if value is None else format(value, form)


def sentence(event: Event) -> str:
    """Return one event in words, on one line and without control characters."""
    maker = _WORDS.get(event["type"])
    return plain(maker(event) if maker else f"{event['type']}: {_rest(event)}", lines=False)


def _rest(event: Event) -> str:
    known = ("seq", "attempt", "branch", "type", "utc", "monotonic", "parent")
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in known)


def _start(e: Event) -> str:
    live, batch = e["live"], e["batch"]
    processes, steps = counted(live["world_size"], "process"), counted(e["total_steps"], "step")
    begun = f"goes on from step {e['step']}" if e["step"] else "begins"
    return f"The run {begun}: {live['strategy']} on {processes}, {batch}, {steps} in all."


def _checkpoint(e: Event) -> str:
    step, state = e["step"], e["state"]
    return {
        "complete": f"Checkpoint of step {step} saved in {duration(e.get('seconds') or 0)}.",
        "proven_good": f"Checkpoint of step {step} is proven good: training continued without a spike.",
        "pinned": f"Checkpoint of step {step} is pinned: it is not pruned.",
        "unpinned": f"Checkpoint of step {step} is not pinned any more: no spike followed.",
        "not_saved": f"No checkpoint of step {step}: {e.get('reason')}.",
    }.get(state, f"Checkpoint of step {step}: {state}.")


def _finding(e: Event) -> str:
    name = {
        "armed": "Something may be coming",
        "outlier": "Odd data",
        "spike": "SPIKE",
        "spike_end": "The spike is over",
        "damage": "DAMAGE",
        "divergence": "DIVERGENCE",
        "level_shift": "A new level",
        "reset": "The beginning over again",
        "chronic": "Spikes again and again",
    }[e["kind"]]
    return f"{name} at step {e['onset']}: {e['reason']}."


def _decision(e: Event) -> str:
    names = {
        "replay": "go back and do the same steps again, with nothing changed",
        "skip": "go back and leave the samples of those steps out",
        "lower_rate": "go back and lower the learning rate",
        "leave_out": "leave the samples out from now on",
        "stop": "stop, and hand over to people",
        "none": "nothing",
    }
    left = [names[o] for o in e["options"] if o != e["measure"]]
    rest = f" Still left: {'; '.join(left)}." if left else ""
    return f"Decision: {names[e['measure']]} ({e['rule']}). Why: {e['why']}.{rest}"


def _rollback(e: Event) -> str:
    if e["phase"] == "intent":
        return f"Going back from step {e['from_step']} to the checkpoint of step {e['to_step']} ({e['measure']})."
    checked = f"as recorded: {', '.join(e['verified'])}" if e["verified"] else "nothing could be compared"
    differs = f"; changed: {', '.join(e['differing'])}" if e["differing"] else ""
    return (
        f"Back at step {e['step']} after {duration(e['seconds'])}; given up: {counted(e['steps_given_up'], 'step')}. "
        f"{checked[0].upper()}{checked[1:]}{differs}. Branch {e['branch']} begins."
    )


def _verify(e: Event) -> str:
    if e["after"] == "replay":
        again = "comes again: the data or the learning rate" if e["reproduced"] else "does not come again: hardware, or chance"
        return f"Done again from the same state, what happened {again}."
    first, last = e["steps"]
    apart = figure(e["largest_relative_difference"], ".1e")
    steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
    words = f"{steps} done again: the largest relative difference of the losses is {apart}"
    if e.get("first_apart") is not None:
        words += f"; step {e['first_apart']} is the first that differs"
    return f"{words}."


def _skip(e: Event) -> str:
    first, last = e["steps"]
    verb = "is" if e["samples"] == 1 else "are"
    return f"{counted(e['samples'], 'sample')} of steps {first} to {last} {verb} left out of all that follows."


def _profile(e: Event) -> str:
    first = e["ranks"][0]
    parts = ", ".join(f"{first[part]:.0%} {part}" for part in ("compute", "communication", "idle"))
    return f"Steps {e['steps'][0]} to {e['steps'][1]} were profiled; rank 0: {parts}. Traces: {e['folder']}."


def _crash(e: Event) -> str:
    who = f"Attempt {e['of_attempt']}: " if e.get("of_attempt") else "CRASH: "
    return f"{who}{e['reason']}."


def _eval(e: Event) -> str:
    words = [f"held-out loss {figure(e['loss'], '.4f')}"] if "loss" in e else []
    words += [f"{name} {figure(value, '.4g')}" for name, value in (e.get("metrics") or {}).items()]
    return f"Step {e['step']}: {', '.join(words)}."


def far_above_best(far: dict[str, list[float | None]]) -> str:
    """Return the warning about losses that ended far above their best.

    >>> far_above_best({"loss": [6.2, 3.38]})
    'The run ended far above its best: loss 6.2, was 3.38. Look at the curve before you use this model.'
    """
    pairs = ", ".join(
        f"{name} {'not finite' if now is None else f'{now:.4g}'}, was {best:.4g}" for name, (now, best) in far.items()
    )
    return f"The run ended far above its best: {pairs}. Look at the curve before you use this model."


def _run_end(e: Event) -> str:
    ended = f"The run ended at step {e['progress']['step']}."
    return f"{ended} {far_above_best(e['far_above_best'])}" if e.get("far_above_best") else ended


def _differs(what: str) -> Callable[[Event], str]:
    return lambda e: f"{what}: " + "; ".join(f"{k} {was} -> {now}" for k, (was, now) in e["differing"].items()) + "."


_WORDS = {
    "run_start": _start,
    "resume": lambda e: f"Resumed from step {e['step']}; as recorded: {', '.join(e['verified'])}.",
    "checkpoint": _checkpoint,
    "save_failed": lambda e: f"Checkpoint of step {e['step']} FAILED: {e['reason']}.",
    "anomaly": _finding,
    "spike": _finding,
    "spike_end": _finding,
    "decision": _decision,
    "rollback": _rollback,
    "verify": _verify,
    "skip": _skip,
    "lr_change": lambda e: (
        f"From step {e['cut'][0]} on, the learning rate is {e['cut'][1]:g} of its schedule; it rises back to it over "
        f"{counted(e['cut'][2], 'step')}."
    ),
    "eval": _eval,
    "profile": _profile,
    "note": lambda e: f"Note by {e['by']}: {e['text']}",
    "crash": _crash,
    "straggler": lambda e: f"Step {e['step']}: {describe_slow(Slow(*(e[key] for key in Slow._fields)))}.",
    "preempted": lambda e: (
        f"{'Ctrl-C' if e['signal'] == 'SIGINT' else e['signal']} received at step {e['step']}: "
        f"{'saved' if e.get('saved', True) else 'not saved'}, left with exit code {e['exit_code']}."
    ),
    "stop": lambda e: f"STOPPED: {e.get('why') or e.get('reason')}.",
    "run_end": _run_end,
    "config_diff": _differs("Other settings than before"),
    "early_stop": lambda e: (
        f"Early stopping at step {e['step']}: {counted(e['evaluations'], 'evaluation')} without a lower held-out loss than "
        f"{figure(e['best'], '.4f')}; not done: {counted(e['steps_left'], 'step')}."
    ),
    "launch_diff": _differs("Another launch than before"),
    "env_diff": _differs("Another environment than before"),
    "memory_warning": lambda e: f"WARNING: {e['reason']} in use.",
    "repaired": lambda e: (
        f"A torn line of {e['file']} was cut and kept aside." if "torn_bytes" in e else f"Damaged: {_rest(e)}."
    ),
    "written_late": lambda e: "The disk was full; the events of that time are written now.",
}
