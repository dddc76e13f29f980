"""Rows split among processes: the cut of a batch, what is refused before a launch, and which losses can work on a part."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.planning import rows_of, shortened
from tests.test_resolve import A100, WORKER, deepspeed, plan_for
from zerobook.constants import IGNORE
from zerobook.errors import ConfigError
from zerobook.launch.groups import find_config_problems
from zerobook.models.whole_rows import check_split
from zerobook.objective import TARGETS, NextToken, TargetTokens, causal_lm_loss
from zerobook.plan.hardware import cluster
from zerobook.strategy.token_split import TokenSplit, without_masks

SIZES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
CONTEXT = WORKER | SIZES | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_CP_SIZE": "2"}


def sequence(tmp_path, size=2, world=2, **config):
    environ = deepspeed(tmp_path, **{"zero_optimization": {"stage": 3}} | config)
    return environ | SIZES | {"PARALLELISM_CONFIG_SP_SIZE": str(size), "WORLD_SIZE": str(world)}


class Split(TokenSplit):
    """One process's part, without other processes."""

    def __init__(self, chunks, of):
        self.chunks, self.chunk_count, self.size = chunks, of, 2

    def attention(self, rows=None):
        raise NotImplementedError


@pytest.mark.parametrize("parts", [[([0], 2), ([1], 2)], [([0, 3], 4), ([1, 2], 4)]], ids=["ulysses", "ring"])
def test_labels_are_shifted_before_they_are_split(parts):
    """Together, the processes predict each supervised token once, from the position before it."""
    ids = torch.tensor([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26, 27]])
    labels = ids.clone()
    labels[1, 4] = IGNORE
    found = []
    for chunks, of in parts:
        part = Split(chunks, of).cut({"input_ids": ids, "labels": labels})
        assert set(part) == {"input_ids", "position_ids", TARGETS} and part["input_ids"].shape == (2, 4), "padded to 8 tokens"
        for row in range(2):
            for token, position, target in zip(*(part[key][row].tolist() for key in part), strict=True):
                if target != IGNORE:
                    assert token == ids[row, position]
                    found.append((row, position, target))
    expected = [(row, at, int(labels[row, at + 1])) for row in range(2) for at in range(6) if labels[row, at + 1] != IGNORE]
    assert sorted(found) == expected


def test_the_loss_of_all_parts_is_the_loss_of_the_row():
    generator = torch.Generator().manual_seed(0)
    table, labels = torch.randn(9, 9, generator=generator), torch.randint(0, 9, (2, 7), generator=generator)

    def model(input_ids, position_ids=None):
        return SimpleNamespace(logits=table[input_ids])

    model.training, batch = False, {"input_ids": labels, "labels": labels}
    parts = [Split(chunks, 4).cut(batch) for chunks in ([0, 3], [1, 2])]
    assert NextToken().loss(model, batch) == causal_lm_loss(table[labels], labels)
    total = sum(NextToken().loss(model, part) for part in parts)
    torch.testing.assert_close(total, NextToken().loss(model, batch))


def test_what_cannot_be_split_is_not_dropped():
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "labels": torch.ones(1, 4, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="attention_mask, token_type_ids"):
        Split([0], 2).cut(batch | {"attention_mask": torch.ones(1, 4), "token_type_ids": torch.ones(1, 4)})


def test_masks_and_attention_come_back():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    before = [table["sdpa"] for table in tables]
    with pytest.raises(ZeroDivisionError), without_masks(min):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is min and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](1, q_length=2) is None
        raise ZeroDivisionError
    assert [table["sdpa"] for table in tables] == before


class Pairs(NextToken):
    """A loss that needs whole rows, which inherits from one that does not."""

    def loss(self, model, batch):
        return super().loss(model, batch)


def test_only_sums_over_tokens_are_split():
    model = SimpleNamespace(training=True, config=SimpleNamespace())
    experts = SimpleNamespace(training=True, config=SimpleNamespace(router_aux_loss_coef=0.01, output_router_logits=True))
    assert NextToken().splits_tokens(model) and NextToken(router_weight=0.0).splits_tokens(experts)
    for objective, whole in ((Pairs(), model), (TargetTokens(), model), (NextToken(), experts)):
        assert not objective.splits_tokens(whole)
        strategy = SimpleNamespace(token_split=Split([0], 2), plan=SimpleNamespace(name="ZeRO-3 sequence 2"), model=whole)
        with pytest.raises(ConfigError, match=f"ZeRO-3 sequence 2 .*{type(objective).__name__} needs whole rows"):
            check_split(strategy, objective)


def test_sizes_are_read(tmp_path):
    plan, config = plan_for(sequence(tmp_path, 2, 8), A100, per_device_train_batch_size=3)
    assert not plan.problems and (plan.sequence, plan.data_parallel_size, plan.name) == (2, 4, "ZeRO-3 sequence 2")
    assert config.attn_implementation == "sdpa" and plan.deepspeed_config["train_batch_size"] == 12
    plan, _ = plan_for(CONTEXT | {"WORLD_SIZE": "8"}, A100)
    assert not plan.problems and (plan.context, plan.shard, plan.data_parallel_size) == (2, 8, 4)
    assert plan.name == "FSDP2 context 2"


@pytest.mark.parametrize(
    "environ, config, said",
    [
        ({"PARALLELISM_CONFIG_SP_SIZE": "3"}, {}, "parallelism_config_sp_size: 3; groups of 3 do not divide 2 processes"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "0"}, {}, "parallelism_config_sp_size: 0"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "1", "PARALLELISM_CONFIG_CP_SIZE": "2"}, {}, "accelerate_configs/fsdp_context.yaml"),
        ({}, {"sequence_parallel_size": 4}, "sequence_parallel_size is 4"),
        ({}, {"zero_optimization": {"stage": 3, "reduce_scatter": False}}, "reduce_scatter is false"),
        ({}, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "ZeRO++"),
    ],
)
def test_sizes_that_do_not_fit_are_problems(tmp_path, environ, config, said):
    plan, _ = plan_for(sequence(tmp_path, **config) | environ)
    assert [problem for problem in plan.problems if said in problem], plan.problems


def test_other_strategies_have_no_groups():
    ddp = WORKER | SIZES | {"PARALLELISM_CONFIG_SP_SIZE": "2"}
    for environ in (ddp, CONTEXT | {"PARALLELISM_CONFIG_CP_SIZE": "1", "PARALLELISM_CONFIG_SP_SIZE": "2"}):
        (problem,) = plan_for(environ)[0].problems
        assert "parallelism_config_sp_size: 2" in problem and "accelerate_configs/zero3_sequence.yaml" in problem
    (problem,) = plan_for(CONTEXT | {"WORLD_SIZE": "8", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"})[0].problems
    assert "context 2 together with 2 replicas" in problem


def test_packing_and_other_attention_are_problems(tmp_path):
    for environ in (sequence(tmp_path), CONTEXT):
        (problem,) = plan_for(environ, packing=True)[0].problems
        assert problem.startswith("packing: ") and "--packing false" in problem
        (problem,) = plan_for(environ, attn_implementation="eager")[0].problems
        assert problem.startswith("attn_implementation: eager (from flag --attn_implementation)")
    assert not plan_for(WORKER, packing=True)[0].problems


LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "facts, both, said",
    [
        (LLAMA | {"num_key_value_heads": 3}, False, "do not divide num_key_value_heads 3"),
        (LLAMA | {"num_attention_heads": 9}, False, "do not divide num_attention_heads 9"),
        (LLAMA | {"sliding_window": 4096}, True, "sliding window of 4096 tokens"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, True, "sliding_attention"),
        (LLAMA | {"is_encoder_decoder": True}, True, "encoder-decoder"),
    ],
)
def test_models_that_cannot_be_split_are_problems_before_a_launch(tmp_path, facts, both, said):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    (problem,) = plan_for(sequence(tmp_path), model_name_or_path=str(folder))[0].problems
    assert said in problem
    problems = plan_for(CONTEXT, model_name_or_path=str(folder))[0].problems
    assert len(problems) == both


def test_models_that_can_be_split_are_none(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for facts in (LLAMA, LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, {"n_head": 12}):
        (folder / "config.json").write_text(json.dumps(facts))
        for environ in (sequence(tmp_path), CONTEXT):
            assert not plan_for(environ, model_name_or_path=str(folder))[0].problems
    (folder / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.1}))
    assert "attention dropout of 0.1" in plan_for(CONTEXT, model_name_or_path=str(folder))[0].problems[0]
    assert not plan_for(sequence(tmp_path), model_name_or_path=str(folder))[0].problems


@pytest.mark.parametrize(
    "model_type, kind",
    [
        ("falcon_h1", "hybrid"),
        ("jamba", "linear_attention"),
        ("bamba", "linear_attention"),
        ("zamba", "hybrid"),
        ("zamba2", "hybrid"),
        ("nemotron_h", "linear_attention"),
        ("recurrent_gemma", "linear_attention"),
        ("mamba2", "linear_attention"),
        ("qwen3_next", "linear_attention"),
        ("rwkv", "no sdpa"),
        ("xlstm", "no sdpa"),
        ("gptj", "no sdpa"),
    ],
)
def test_models_whose_layers_need_whole_rows_are_refused(tmp_path, model_type, kind):
    config = CONFIG_MAPPING[model_type]()
    for environ in (sequence(tmp_path), CONTEXT):
        problems = find_config_problems(plan_for(environ)[0], config)
        assert any(kind in problem for problem in problems)
        assert not any("fsdp_context" in problem for problem in problems), "the advice would be refused too"


def test_the_planner_halves_the_activations_of_rows_that_two_processes_share(tmp_path):
    model = shortened(tmp_path, "llama2_70b", num_hidden_layers=2)
    files = ("zero3", "zero3_sequence", "fsdp", "fsdp_context")
    flags = {"mixed_precision": "bf16", "block_size": 4096, "per_device_train_batch_size": 1, "validation_split_percentage": 0}
    rows = rows_of("causal_lm", model, cluster(gpus="8", gpu="a100-80gb"), files, **flags)
    for whole, split in (("zero3", "zero3_sequence"), ("fsdp", "fsdp_context")):
        share = rows[split].memory.device.activations / rows[whole].memory.device.activations
        assert 0.5 < share < 0.7, "the logits of a chunk of tokens are as large"
        assert 2 * rows[split].tokens_per_step == rows[whole].tokens_per_step, "groups of two read the same row"
        assert rows[split].sent > rows[whole].sent, "attention needs the other process's tokens"
        assert rows[split].states == rows[whole].states
