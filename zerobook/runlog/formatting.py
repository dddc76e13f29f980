"""Texts with losses and advice that the page, the terminal and the sentences of events share."""

from __future__ import annotations

from pathlib import Path


def figure(value: float | None, form: str) -> str:
    """Return a number as text, or ``not finite`` for None, which a log has in place of NaN and infinities.

    Args:
        form: format specification, as for `format`.

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
    texts = []
    for name, (last, best) in losses.items():
        # The training loss is noisy, so a median of the last points is compared. It may not be the loss of the last step.
        note = " (median of its end)" if name == "loss" else ""
        texts.append(f"{name} {figure(last, '.4g')}{note}, was {best:.4g}")
    return f"The run ended far above its best: {', '.join(texts)}. Look at the curve before you use this model."


def next_step_after_stop(checkpoint: Path | str | None) -> str:
    """Return what a person can do after a spike has stopped a run.

    Args:
        checkpoint: the newest complete one from before the spike; None if there is none.
    """
    if checkpoint is None:
        beginning = "There is no checkpoint from before it to go on from, so start again with"
    else:
        beginning = f"Go on from {checkpoint} with --resume_from_checkpoint auto and"
    return f"{beginning} a lower --learning_rate, more --num_warmup_steps, or other data; or with --on_spike log."
