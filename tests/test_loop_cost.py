"""Cost that the trainer's loop adds to a step: counts of calls, which no other job on the machine changes."""

from __future__ import annotations

import cProfile
import pstats
from unittest import mock

import torch

from recipes.lora_finetune import LoraFinetune
from tests.alone import train
from zerobook.training.trainer import Trainer

STEP = 12
"""Between two log points."""


def calls(work, *given):
    """Return (result, number of Python and C calls that ``work`` makes)."""
    profile = cProfile.Profile()
    result = profile.runcall(work, *given)
    return result, pstats.Stats(profile).total_calls


def bare_step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_makes_few_calls_besides_those_of_the_model_and_the_optimizer(tiny, tmp_path):
    counted = {}
    real = Trainer.train_step

    def step(trainer, plan, batches):
        if trainer.progress.step != STEP:
            return real(trainer, plan, batches)
        record, counted["recipe"] = calls(real, trainer, plan, batches)
        counted["batch"] = next(iter(trainer.state.loader))[1]
        return record

    def ended(trainer):
        (batch, *_) = list(counted.pop("batch"))
        optimizer = torch.optim.AdamW([p for p in trainer.strategy.model.parameters() if p.requires_grad], fused=True)
        for _ in range(3):  # the first makes the optimizer's state
            _, counted["bare"] = calls(bare_step, trainer.strategy.model, optimizer, batch)
        return real_close(trainer)

    real_close = Trainer.close
    # accelerate looks for this library on the whole import path in each step: the calls depend on the path's length
    without_lomo = mock.patch("accelerate.optimizer.is_lomo_available", lambda: False)
    with without_lomo, mock.patch.object(Trainer, "train_step", step), mock.patch.object(Trainer, "close", ended):
        train(
            tmp_path, LoraFinetune, model_name_or_path=str(tiny / "llama"), train_file=str(tiny / "chats.jsonl"),
            max_seq_length=64, max_train_steps=20, logging_steps=10, per_device_train_batch_size=4, on_spike="log",
        )  # fmt: skip
    added = counted["recipe"] - counted["bare"]
    assert added < 400, counted
