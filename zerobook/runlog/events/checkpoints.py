"""Events of checkpoints."""

from __future__ import annotations

from zerobook.runlog.events.event_type import Event, Mark, declare
from zerobook.utils.units import duration


@declare(
    "checkpoint",
    when="The state of a checkpoint changed.",
    fields={
        "state": "complete, proven_good or not_saved",
        "step": "its step",
        "folder": "its folder",
        "seconds": "seconds of the save",
        "background": "true if the steps went on meanwhile (`--async_save`)",
        "reason": "why it was not saved",
    },
    mark=Mark(colour="green", symbol="|", step=lambda event: event["step"] if event["state"] == "complete" else None),
)
def _checkpoint(event: Event) -> str:
    step = event["step"]
    state = event["state"]
    sentences = {
        "complete": f"Checkpoint of step {step} saved in {duration(event.get('seconds') or 0)}.",
        "proven_good": f"Checkpoint of step {step} is proven good: training continued without a spike.",
        "not_saved": f"No checkpoint of step {step}: {event.get('reason')}.",
    }
    # Earlier versions wrote further states.
    return sentences.get(state, f"Checkpoint of step {step}: {state}.")


@declare(
    "save_failed",
    when="A save failed.",
    fields={"step": "step of the save", "reason": "error in words", "last_complete": "newest complete checkpoint"},
    style="bad",
)
def _save_failed(event: Event) -> str:
    return f"Checkpoint of step {event['step']} FAILED: {event['reason']}."


@declare(
    "imported",
    when="A checkpoint of another trainer was imported. The steps before it are those that its trainer logged.",
    fields={
        "folder": "the other trainer's checkpoint",
        "trainer": "what wrote it",
        "world_size": "number of its processes",
        "step": "its step",
        "epoch": "passes over the data that were done",
    },
    ending="imported",
)
def _imported(event: Event) -> str:
    return f"Step {event['step']} imported from {event['folder']}, of {event['trainer']}."
