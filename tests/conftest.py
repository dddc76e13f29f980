from __future__ import annotations

import gc
import itertools
import os
import re
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# Seconds are for benchmarks: an example that takes long on a busy machine is no failure.
hypothesis.settings.register_profile("zerobook", deadline=None)
hypothesis.settings.load_profile("zerobook")
os.environ.setdefault("OMP_NUM_THREADS", "1")

REAL = {
    "test_checkpoint_runs.py::test_a_launcher_that_ignores_a_warning_leaves_its_ranks_the_time_to_save": "inherited signals",
    "test_collectives.py::test_an_optimizer_in_host_memory_shares_the_cores": "OMP_NUM_THREADS",
    "test_host_memory.py::test_ranks_together_hold_while_loading_what_is_planned": "forked ranks share memory",
    "test_hub.py": "variables that libraries read at their import",
    "test_strategy_corpus.py::test_a_dry_run_prints_what_becomes_of_each_key": "the launcher's own environment",
    "test_rollback.py::test_twenty_rollbacks_take_no_memory_and_little_more_than_a_load": "resident memory",
    "test_rollback.py::test_what_was_decided_outlives_a_kill": "ranks that kill themselves",
}
"""Tests whose launches are ``accelerate launch`` itself, where others are forked (tests/rank_server.py), and what for.

A name without brackets stands for all its cases. Journeys, and other programs that launch (the demo, the tables), never fork.
``ZEROBOOK_REAL_LAUNCH=1`` forks nothing at all.
"""


LONG_FILES = (
    "test_tables.py",
    "test_rollback.py",
    "test_parity.py",
    "test_readme.py",
    "test_models.py",
    "test_resume.py",
    "test_kills.py",
    "test_gpu_bench.py",
)
"""Files that take longest. They begin first, so that no worker is left alone with one of them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests, which expect what a CPU does, unless those marked ``gpu`` are asked for."""
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> int:
        return LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES)

    items.sort(key=order)


def pytest_collection_finish() -> None:
    """Leave what imports and collection have made out of garbage collections, of which in-process runs make many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny() -> Path:
    from tests.tiny import folder

    return folder()


@pytest.fixture
def traced_once(monkeypatch) -> None:
    """Let plans of one job, on whatever machine, trace its model and parse each strategy file once in a session."""
    from tests import planning
    from zerobook.plan import rows
    from zerobook.plan.traced_job import TracedJob

    monkeypatch.setattr(TracedJob, "of", planning.traced_once)
    monkeypatch.setattr(rows, "worker_environment", planning.worker_environment_once)


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
        from tests import harness
        from tests.harness import ROOT, launch

        # One process is what the others are compared with: a forked one does for that.
        real = harness.real and processes > 1
        key = (real, str(strategy), processes, micro, accumulation, recipe, model, between, str(sorted(flags.items())))
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
            given = {name: value for name, value in (defaults | flags).items() if value is not None or name == "expect"}
            self._done[key] = launch(strategy, processes, recipe, output, forked=not real, **given)
        return self._done[key]


@pytest.fixture(scope="session")
def launches(tmp_path_factory, tiny) -> Launches:
    return Launches(tmp_path_factory.mktemp("launches"), tiny)


def is_real(nodeid: str) -> bool:
    """Return whether `REAL` names that test."""
    path, _, test = nodeid.partition("::")
    file = Path(path).name
    return bool({f"{file}::{test}", f"{file}::{test.partition('[')[0]}", file} & set(REAL))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tell the harness, before fixtures launch anything, whether this test may fork."""
    from tests import harness

    harness.real, harness.real_launches = is_real(item.nodeid), 0
    try:
        return (yield)
    finally:
        harness.real = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of `REAL` that launched nothing itself: another test's forked run was at hand."""
    from tests import harness

    result = yield
    if is_real(item.nodeid) and not harness.real_launches:
        pytest.fail("this test is one of tests/conftest.py's REAL, and every run that it looked at was forked")
    return result
