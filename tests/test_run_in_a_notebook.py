"""Runs that a script or a notebook starts one after another in one process, also after a run that was refused."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState

from recipes.causal_lm import CausalLM, CausalLMConfig
from zerobook.errors import CheckpointError, DataError
from zerobook.training.run import train


@pytest.fixture
def run(tiny, tmp_path):
    """Train a tiny model for a step, as a script does."""

    def start(**values):
        defaults = {
            "model_name_or_path": str(tiny / "llama"),
            "train_file": str(tiny / "few.jsonl"),
            "validation_split_percentage": 0,
            "block_size": 64,
            "max_train_steps": 1,
            "output_dir": str(tmp_path / "run"),
        }
        return train(CausalLM(CausalLMConfig(**(defaults | values))))

    yield start
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_folder_is_free_again_after_a_resume_that_was_refused(tiny, run):
    run()
    # The error keeps the trainer alive, as a notebook's last traceback does.
    with pytest.raises(CheckpointError, match="fingerprint") as refused:
        run(train_file=str(tiny / "chats.jsonl"), resume_from_checkpoint="auto")

    progress = run(resume_from_checkpoint="auto", max_train_steps=2)

    assert refused.tb is not None and progress.step == 2


def test_a_run_has_its_own_precision_after_one_whose_data_were_refused(tmp_path, run):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 3}\n')
    with pytest.raises(DataError):
        run(train_file=str(bad), mixed_precision="bf16")

    assert run(mixed_precision="no").step == 1
