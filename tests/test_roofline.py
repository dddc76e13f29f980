"""Time of a step from traced operations, by part."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.planning import made, shortened
from zerobook.plan.hardware import cluster
from zerobook.plan.roofline import (
    HOOK_SECONDS,
    LAUNCH_SECONDS,
    MEMORY_SHARE,
    StepSeconds,
    compute_seconds,
    product_seconds,
    step_seconds,
)
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights, Weight
from zerobook.plan.traced_job import trace_job
from zerobook.plan.work import Product, Work

A100 = cluster(gpu="a100-80gb")


def sharding(**changes) -> ShardingSpec:
    return ShardingSpec(**{"kind": "single", "name": "", "ranks": 1, "ranks_per_node": 1, "precision": "bf16"} | changes)


def test_the_longer_of_kernels_and_their_launches_decides():
    one_second = Work(moved_bytes=A100.device.bandwidth * MEMORY_SHARE)
    few = StepSeconds(compute=1.0, launches=0.1, links=0, network=0, optimizer=0, offload=0)
    many = StepSeconds(compute=0.1, launches=1.0, links=0, network=0, optimizer=0, offload=0)

    assert compute_seconds(one_second, A100.device, is_fp32=False) == pytest.approx(1.0)
    assert few.step == many.step == pytest.approx(1.0, rel=1e-3)
    assert (few.bound, many.bound) == ("compute", "launches")


@pytest.mark.parametrize("communication", [0.25, 1.0, 4.0])
def test_communication_hides_behind_the_passes_in_part(communication):
    hidden = {}
    for overlap in (0.0, 0.5, 1.0):
        time = StepSeconds(1.0, 0, links=communication, network=0, optimizer=0, offload=0, overlap=overlap)
        hidden[overlap] = time.step

    assert hidden[0.0] == 1.0 + communication
    assert hidden[1.0] == max(1.0, communication)
    assert hidden[0.5] == (hidden[0.0] + hidden[1.0]) / 2


def test_small_products_reach_a_smaller_share():
    large = Product(1, 8192, 8192, 8192, element_bytes=2)
    for smaller in (large._replace(rows=64), large._replace(depth=64), large._replace(columns=64)):
        assert product_seconds(smaller, A100.device) > 1.5 * product_seconds(large, A100.device) / 128

    # A product of vectors waits for its matrix.
    vector = Product(1, 1, 8192, 8192, element_bytes=2)
    assert product_seconds(vector, A100.device) >= 2 * 8192 * 8192 / A100.device.bandwidth


def test_deepspeeds_hooks_take_time_of_the_host():
    trained = [Weight(str(number), (8,), 4, True) for number in range(10)]
    model = ModelWeights(trained, [trained])

    def launches(**changes) -> float:
        work = Work(kernels=100)
        return step_seconds(work, 30, [], model, sharding(**changes), A100, accumulation=2).launches

    assert launches() == pytest.approx(2 * 100 * LAUNCH_SECONDS)
    assert launches(kind="deepspeed", stage=2) - launches() == pytest.approx(2 * 10 * HOOK_SECONDS)
    assert launches(kind="deepspeed", stage=3) - launches() == pytest.approx(2 * 30 * HOOK_SECONDS)


def test_geforce_cards_send_through_the_host():
    assert cluster(gpu="rtx-4090", gpus="2").rate("link") < cluster(gpu="l40s", gpus="2").rate("link") / 4


def test_operations_grow_in_proportion_to_the_layers(tmp_path):
    works = {}
    for layers in (2, 4, 6):
        job = made("causal_lm", shortened(tmp_path, "gpt2_xl", n_layer=layers), block_size=64, activation_checkpointing="full")
        works[layers] = trace_job(job, "bf16", "no", "cuda").work

    assert works[2].kernels > 0 and works[2].attention and works[2].flops > 0
    for name in ("kernels", "moved_bytes", "flops"):
        few, more, most = (getattr(works[layers], name) for layers in (2, 4, 6))
        assert most - more == pytest.approx(more - few) and more > few
    expected: Counter[Product] = Counter(works[4].products)
    for product, times in works[4].products.items():
        expected[product] += times - works[2].products[product]
    assert works[6].products == expected
