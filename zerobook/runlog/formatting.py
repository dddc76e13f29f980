"""Losses and warnings as the page, the terminal and the sentences of events write them."""

from __future__ import annotations

from pathlib import Path


def figure(value: float | None, form: str) -> str:
    """Format a number that may be None, which stands for NaN and infinities in JSON.

    >>> figure(1.25, ".4f"), figure(None, ".4f")
    ('1.2500', 'not finite')
    """
    return "not finite" if value is None else format(value, form)


def far_above_best(losses: dict[str, list[float | None]]) -> str:
    """Return the warning about losses that ended far above their best.

    Args:
        losses: name -> [last value, best].

    >>> far_above_best({"loss": [6.2, 3.38]})
    'The run ended far above its best: loss 6.2 (median of its end), was 3.38. Look at the curve before you use this model.'
    """
    # The loss of the very last step may be another one.
    notes = {"loss": " (median of its end)"}
    pairs = ", ".join(
        f"{name} {figure(last, '.4g')}{notes.get(name, '')}, was {best:.4g}" for name, (last, best) in losses.items()
    )
    return f"The run ended far above its best: {pairs}. Look at the curve before you use this model."


def next_step_after_stop(checkpoint: Path | str | None) -> str:
    """Return what a person can do after a spike has stopped a run.

    Args:
        checkpoint: the newest complete one from before the spike; None if there is none.
    """
    advice = f"Go on from {checkpoint} with --resume_from_checkpoint auto and"
    if checkpoint is None:
        advice = "There is no checkpoint from before it to go on from, so start again with"
    return f"{advice} a lower --learning_rate, more --num_warmup_steps, or other data; or with --on_spike log."
