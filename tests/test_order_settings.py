"""The settings that decide the order of the samples, and that a run cannot change when it resumes."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from zerobook.checkpoint.progress import Progress
from zerobook.config import OrderSettings, RecipeConfig
from zerobook.data.batch_loader import BatchLayout
from zerobook.data.sampler import SampleOrder
from zerobook.errors import CheckpointError
from zerobook.training import resume
from zerobook.training.state import RunState

BEFORE = {"datasets": [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 1.0}]}
CHANGES = {
    "group_by_length": True,
    "datasets": [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 3.0}],
}
"""Another value for each of the settings."""


class Rows:
    """Ten rows of two datasets, as the loader sees them."""

    fingerprint = "f"

    def __len__(self):
        return 10

    def without_samples(self, ranges):
        return self

    def order(self, settings, *, seed, weights, passed):
        lengths = np.arange(10) if settings.group_by_length else None
        return SampleOrder([5, 5], seed=seed, weights=weights, lengths=lengths)


class Recording:
    """A config that notes which of its attributes are read."""

    def __init__(self, config):
        self.config = config
        self.names = set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.config, name)


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path, RecipeConfig(**BEFORE).model_dump())
    return tmp_path


def write(folder, config):
    (folder / "config.json").write_text(json.dumps({"config": config}))


def check(checkpoint, **settings):
    data = SimpleNamespace(train=Rows())
    progress = Progress(data_fingerprint=Rows.fingerprint, data_size=10)
    resume.check_data(checkpoint, progress, data, RecipeConfig(**BEFORE | settings))


def test_a_run_resumes_with_other_settings_than_those_of_the_order(checkpoint):
    others = RecipeConfig(**BEFORE, learning_rate=1e-3, num_train_epochs=7)

    assert others.order_settings == RecipeConfig(**BEFORE).order_settings
    # Raises nothing.
    check(checkpoint, learning_rate=1e-3, num_train_epochs=7)


@pytest.mark.parametrize("name", [field.name for field in fields(OrderSettings)])
def test_each_setting_that_decides_the_order_is_compared(checkpoint, name):
    with pytest.raises(CheckpointError, match=f"depends on {name}"):
        check(checkpoint, **{name: CHANGES[name]})


@pytest.mark.parametrize("name", [field.name for field in fields(OrderSettings)])
def test_a_setting_that_the_checkpoint_lacks_had_its_default(tmp_path, name):
    saved = RecipeConfig(train_file="a.jsonl").model_dump()
    del saved[name]
    write(tmp_path, saved)

    check(tmp_path, datasets=None, train_file="a.jsonl")
    with pytest.raises(CheckpointError, match=f"depends on {name}"):
        check(tmp_path, **{"datasets": None, "train_file": "a.jsonl", name: CHANGES[name]})


def test_the_order_is_made_of_no_other_settings():
    config = Recording(RecipeConfig(**BEFORE))
    data = SimpleNamespace(train=Rows(), weights=[1.0, 1.0])
    layout = BatchLayout(world_size=1, rank=0, micro=2)

    RunState(config, data, layout, Progress(seed=3), list)

    # The other settings say where the run ends, and which processes read the rows.
    assert config.names - {"order_settings"} == {"max_train_steps", "num_train_epochs", "dataloader_num_workers"}
