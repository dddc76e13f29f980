from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import hypothesis
import pytest

# Seconds are for benchmarks: an example that takes long on a busy machine is no failure.
hypothesis.settings.register_profile("zerobook", deadline=None)
hypothesis.settings.load_profile("zerobook")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests, which expect what a CPU does, unless those marked ``gpu`` are asked for."""
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def tiny() -> Path:
    from tests.tiny import folder

    return folder()


class Launches:
    """Runs that several tests look at are launched once per session."""

    def __init__(self, folder: Path, tiny: Path):
        self.folder = folder
        self.tiny = tiny
        self._done: dict = {}
        self._number = itertools.count()

    def __call__(self, strategy, processes, micro, accumulation, recipe="causal_lm", model="llama", between=False, **flags):
        """Ten steps of 4 samples (or as ``flags`` say) on chats of uneven lengths; cached by all arguments.

        ``between``: with evaluation, generation, saves and a rollback between the steps, see tests/distributed/between.py.
        """
        from tests.harness import ROOT, launch

        key = (str(strategy), processes, micro, accumulation, recipe, model, between, str(sorted(flags.items())))
        if key not in self._done:
            defaults = dict(
                model_name_or_path=self.tiny / model,
                cache_dir=self.folder / "cache",
                validation_split_percentage=0,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=accumulation,
                max_train_steps=10,
                num_warmup_steps=2,
                weight_decay=0.1,
                logging_steps=5,
            )
            if recipe == "lora_finetune":
                # Half of an adapter has no gradient at the first step; Adam would blow its rounding up to whole steps.
                defaults |= dict(
                    train_file=self.tiny / "few.jsonl", max_train_samples=4, max_seq_length=64, lora_r=32, lora_alpha=32,
                    learning_rate=5e-3, adam_epsilon=1e-6,
                )  # fmt: skip
            else:
                defaults |= dict(train_file=self.tiny / "chats.jsonl", max_train_samples=8, block_size=64, learning_rate=3e-3)
            if between:
                defaults |= dict(
                    validation_file=self.tiny / "few.jsonl", max_eval_samples=3, eval_on_start=True, eval_steps=2, save_steps=4,
                    through=ROOT / "tests" / "distributed" / "between.py", environment={"ZEROBOOK_BETWEEN_BACK_AT": 6},
                )  # fmt: skip
            output = self.folder / f"run{next(self._number)}"
            self._done[key] = launch(strategy, processes, recipe, output, **(defaults | flags))
        return self._done[key]


@pytest.fixture(scope="session")
def launches(tmp_path_factory, tiny) -> Launches:
    return Launches(tmp_path_factory.mktemp("launches"), tiny)
