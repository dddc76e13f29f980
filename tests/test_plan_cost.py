"""Ranges of planned rates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planning import WIDE, rows_of
from zerobook.cli.main import main
from zerobook.plan.hardware import cluster

pytestmark = pytest.mark.usefixtures("traced_once")


def test_each_rate_has_a_range_which_is_wider_where_several_nodes_send():
    flags = {"per_device_train_batch_size": 1}
    node = cluster(gpus="2")
    alone = rows_of("causal_lm", WIDE, node, ("ddp",), **flags)["ddp"]
    together = rows_of("causal_lm", WIDE, cluster(nodes="2", interconnect="400Gbps"), ("ddp",), **flags)["ddp"]
    low, high = alone.rates
    assert low < alone.tokens_per_second < high
    assert together.rates[0] / together.tokens_per_second < low / alone.tokens_per_second
    cpu = rows_of("causal_lm", WIDE, replace(node, cpu=True), ("ddp",), **flags)["ddp"]
    assert cpu.rates == (cpu.tokens_per_second, cpu.tokens_per_second), "assumed rates have no known range"


def test_the_range_stands_beside_the_rate_in_all_outputs(tiny, tmp_path, capsys):
    target = tmp_path / "plan.json"
    line = ["plan", "--strategies", "single", "--recommend", "--json", str(target), str(tiny / "llama"), "--block_size", "64"]
    assert main(line) == 0
    text = " ".join(capsys.readouterr().out.split())
    planned = json.loads(target.read_text())
    for values in (planned["rows"][0], planned["advice"]):
        low, high = values["tokens_per_second_range"]
        assert low < values["tokens_per_second"] < high
    assert f"{low:,.0f} - {high:,.0f}" in text and f"({low:,.0f} to {high:,.0f}) tokens/s" in text
