"""The learning rate as a pure function of the optimizer step, the same on every strategy."""

from collections.abc import Callable

from zerobook.constants import POLYNOMIAL_END


def learning_rate_schedule(
    name: str, *, peak: float, warmup: int, total: int, from_zero: bool = False
) -> Callable[[int], float]:
    """Return transformers' schedule ``name`` as a function step -> rate, with another warm-up.

    Of W warm-up steps, the k-th trains at k/W of the peak. transformers begins at 0, so that its first step changes nothing,
    and a run of one step would not train.

    Args:
        name: as ``lr_scheduler_type``.
        peak: rate after the warm-up.
        warmup: steps to the peak, which the last of them has; if it is ``total`` or more, the run ends during the warm-up.
        total: length of the schedule in steps; a decaying schedule ends at ``total``.
        from_zero: transformers' own warm-up.

    Returns:
        Function of the number of steps done: step k (from 0) trains with ``rate(k)``.
    """
    import torch
    from transformers import get_scheduler

    # transformers requires an optimizer. Only the schedule's factor is used, so this optimizer never takes a step.
    placeholder = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    options = {}
    if name == "polynomial":
        options["lr_end"] = POLYNOMIAL_END
        # The last save needs the rate after the last step. There, transformers divides by the number of decay steps.
        total = max(total, warmup + 1)
    scheduler = get_scheduler(
        name, placeholder, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=options
    )
    factor = scheduler.lr_lambdas[0]
    # Without this warm-up, the rate is that of transformers, with its warm-up from 0.
    warms_up = name != "constant" and not from_zero

    def rate(step: int) -> float:
        if warms_up and step < warmup:
            return peak * (step + 1) / warmup
        return peak * float(factor(step))

    return rate
