"""Bytes between hosts in a step, against what the planner says for gloo."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.test_parity import record
from tests.harness import ROOT
from tests.nodes.bytes_sent import RESULT, TO
from tests.nodes.hosts import Network, missing
from tests.nodes.runs import NodeRun
from zerobook.config_sources import parse
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import make_job
from zerobook.plan.rows import plan_row
from zerobook.plan.traced_job import TracedJob
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.devices import DEVICES

NEEDS = missing()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.launch,
    pytest.mark.full,
    pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS)),
]
CASES = [
    ("ddp", 1),
    ("ddp", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 1),
    ("zero3", 2),
    ("zero3_hpz", 2),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp_hybrid", 2),
]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("strategy, per_host", CASES)
def test_bytes_between_hosts_are_those_of_the_plan(tmp_path, tiny, monkeypatch, strategy, per_host, lora):
    monkeypatch.setenv(RESULT, str(tmp_path / "sent"))
    recipe = "lora_finetune" if lora else "causal_lm"
    flags: dict[str, Any] = {
        "model_name_or_path": tiny / "wide", "hang_timeout": 60, "max_train_steps": TO + 1, "logging_steps": 100,
        "save_steps": 1000, "hooks": "tests.nodes.bytes_sent:BytesSent", "validation_split_percentage": 0,
    }  # fmt: skip
    if lora:
        flags |= {"train_file": tiny / "chats.jsonl", "format": None, "block_size": None, "max_seq_length": 64}
    with Network(tmp_path) as hosts:
        run = NodeRun.begin(hosts, tmp_path, tiny, strategy, per_host, recipe=recipe, **flags)
        run.until(lambda: len(list(tmp_path.glob("sent.*.json"))) == run.world_size, 120)
        line = run.line(0)
    measured = max(json.loads(path.read_text()) for path in tmp_path.glob("sent.*.json"))
    words = line[line.index(str(ROOT / "recipes" / f"{recipe}.py")) + 1 :]
    kind = recipe_class(f"recipes/{recipe}.py")
    config, sources, _ = parse(kind.config_class, words)
    where = Cluster(gpus=per_host, nodes=2, device=DEVICES["a100-80gb"], link=1e9, network=1e9, cpu=True)
    planned = plan_row(
        ROOT / "accelerate_configs" / f"{strategy}.yaml", TracedJob.of(make_job(kind(config)), "cpu"), where, sources
    )
    record("traffic", strategy=strategy, recipe=recipe, ranks=f"{per_host} + {per_host}", sent=(planned.between, measured))
    assert abs(measured / planned.between - 1) < 0.05
