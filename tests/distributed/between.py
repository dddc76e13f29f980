"""Runs a recipe with everything between its steps that a real run has: generation at every evaluation, and one rollback.

    ZEROBOOK_BETWEEN_BACK_AT=6 accelerate launch ... tests/distributed/between.py recipes/NAME.py [flags]

At the first log point at or after that step, the run goes back to its newest checkpoint before it. On every CPU,
bitsandbytes believes that it can compute with repacked 4-bit weights, as it does on one with AVX512-BF16.
"""

import importlib.util
import os
import runpy
import sys

from zerobook.monitor.policy import RecoveryAction
from zerobook.training.hooks import Hook

BACK_AT = int(os.environ["ZEROBOOK_BETWEEN_BACK_AT"])


def generated(strategy, model, step):
    """Score nothing, but generate greedily, and show the tokens."""
    import torch

    prompts = torch.tensor([[1, 300 + row, 301, 302 + 7 * row] for row in range(2)], device=strategy.device)
    mask = torch.ones_like(prompts)
    mask[1, 0] = 0  # padded on the left
    with torch.no_grad(), strategy.inference():
        tokens = strategy.unwrapped.generate(
            input_ids=prompts, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False,
            synced_gpus=strategy.generation_in_step,
        )  # fmt: skip
    answers = tokens if strategy.unwrapped.config.is_encoder_decoder else tokens[:, prompts.shape[1] :]
    return {}, [{"generated": str(answers.tolist())}]


class Between(Hook):
    def __init__(self):
        self.back = False

    def before_prepare(self, trainer, model):
        trainer.scorers = [*trainer.scorers, generated]

    def on_log(self, trainer, records):
        step = records[-1].step
        if step < BACK_AT or self.back:
            return None
        self.back = True
        good, others = trainer.strategy.on_main(trainer.manager.steps)
        to = max(s for s in (*good, *others) if s < step)
        return RecoveryAction(kind="replay", rule="a test", reason="a test", options=(), onset=step, noticed=step, to_step=to)


def main():
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes.nn.modules

        bitsandbytes.nn.modules.has_avx512bf16 = lambda: True
    recipe = sys.argv[1]
    sys.argv = [*sys.argv[1:], "--hooks", f"{__file__}:Between"]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
