"""The same global batch, cut in any way, is the same step: loss, gradient norm, learning rate."""

from __future__ import annotations

import pytest

from tests.distributed.test_parity import TOLERANCE, largest_difference

SPLITS = [(1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2)]
"""(world, micro, accumulation), all of 4 samples a step."""

SAMPLE = {("ddp", (2, 1, 2)), ("zero1", (2, 1, 2)), ("zero2", (1, 1, 4)), ("fsdp", (2, 1, 2))}


def cases():
    for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        for split in SPLITS:
            marks = [] if (strategy, split) in SAMPLE else [pytest.mark.full]
            name = f"{strategy}-{'x'.join(map(str, split))}"
            yield pytest.param(strategy, split, marks=[pytest.mark.launch, *marks], id=name)


@pytest.mark.parametrize("strategy, split", list(cases()))
def test_split_does_not_change_the_training(launches, strategy, split):
    one = launches("single", 1, 4, 1)
    run = launches(strategy, *split)
    tokens = [s["tokens"] for s in run.steps]
    assert len(set(tokens)) > 3, "the steps must differ in length for this to prove anything"
    assert tokens == [s["tokens"] for s in one.steps]
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert largest_difference(run.norms, one.norms) < TOLERANCE
    rates = [s["learning_rate"] for s in run.steps]
    assert rates == [s["learning_rate"] for s in one.steps]
    # linear over 10 steps with 2 of warm-up: the second step has the peak, and the rate is 0 once the last step is done
    assert rates[:2] == [1.5e-3, 3e-3] and max(rates) == 3e-3 and rates[-1] > 0
    assert run.event("run_end")["learning_rate_after"] == 0
