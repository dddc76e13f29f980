"""Tensor and expert parallelism: sizes, what is refused before a launch, and what accelerate cannot do yet."""

from __future__ import annotations

import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Ernie4_5_MoeConfig
from transformers.distributed import DistributedConfig

from tests.harness import ROOT
from tests.planning import MODELS, rows_of
from tests.test_resolve import A100, WORKER, deepspeed, plan_for
from tests.versions import NEEDS_MODEL_PARALLELISM
from zerobook.launch.accelerate_cli import read_hidden_settings
from zerobook.launch.groups import find_config_problems
from zerobook.launch.worker_environment import worker_environment
from zerobook.plan.hardware import cluster
from zerobook.strategy.model_parallel import ModelParallelStrategy
from zerobook.training.recipe_file import recipe_class

SIZES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
FSDP = WORKER | SIZES | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
TENSOR, EXPERTS = FSDP | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, FSDP | {"PARALLELISM_CONFIG_EP_SIZE": "2"}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2}


@NEEDS_MODEL_PARALLELISM
def test_sizes_are_read():
    plan, _ = plan_for(TENSOR | {"WORLD_SIZE": "8"}, A100)
    assert not plan.problems and (plan.tensor, plan.shard, plan.data_parallel_size) == (2, 4, 4)
    assert plan.name == "FSDP2 tensor 2" and not plan.copies_at_load(8)
    plan, _ = plan_for(EXPERTS | {"WORLD_SIZE": "8"}, A100)
    assert not plan.problems and (plan.experts, plan.shard, plan.data_parallel_size) == (2, 8, 8)
    assert plan.name == "FSDP2 experts 2" and not plan.copies_at_load(8)


def test_the_shipped_files_say_the_sizes_to_a_launch_and_to_doctor():
    """accelerate does not pass the expert-parallel size on, so it is read from the file that the launch names."""
    for name, variable in (("fsdp_tensor", "PARALLELISM_CONFIG_TP_SIZE"), ("fsdp_experts", "PARALLELISM_CONFIG_EP_SIZE")):
        flags = ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml")]
        assert worker_environment(flags)[0][variable] == "2"
        unsaid = read_hidden_settings([*flags, "recipes/causal_lm.py"])[1]
        assert ("PARALLELISM_CONFIG_EP_SIZE" in unsaid) == (name == "fsdp_experts")


@pytest.mark.parametrize("sizes, name", [(TENSOR, "tp"), (EXPERTS, "ep")])
def test_sizes_that_do_not_fit_are_problems(tmp_path, sizes, name):
    variable, key = f"PARALLELISM_CONFIG_{name.upper()}_SIZE", f"parallelism_config_{name}_size"
    file = {"tp": "fsdp_tensor", "ep": "fsdp_experts"}[name]
    (problem,) = plan_for(sizes | {variable: "3"})[0].problems
    assert f"{key}: 3; groups of 3 do not divide 2 processes" in problem and "--num_processes 3" in problem
    for size in ("0", "-1", "two"):
        (problem,) = plan_for(sizes | {variable: size})[0].problems
        assert f"{key}: {size}, expected" in problem
    for environ in (WORKER | SIZES, SIZES, deepspeed(tmp_path) | SIZES):
        (problem,) = plan_for(environ | {variable: "2"})[0].problems
        assert f"{key}: 2" in problem and f"accelerate_configs/{file}.yaml" in problem
        assert not plan_for(environ | {variable: "1"})[0].problems


@pytest.mark.parametrize("sizes", [TENSOR, EXPERTS], ids=["tensor", "experts"])
def test_a_transformers_that_cannot_divide_a_model_is_a_problem(monkeypatch, sizes):
    monkeypatch.delitem(DistributedConfig.__dataclass_fields__, "ep_size", raising=False)
    (problem,) = plan_for(sizes | {"WORLD_SIZE": "8"}, A100)[0].problems
    assert "transformers 5.20 or newer" in problem and version("transformers") in problem


@NEEDS_MODEL_PARALLELISM
@pytest.mark.parametrize(
    "more, config, said",
    [
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, {}, "context parallelism (2)"),
        ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, {}, "2 replicas"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {}, "fsdp_offload_params"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}, "fsdp_reshard_after_forward"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "fp16"),
        ({}, {"optimizer": "adafactor"}, "adafactor"),
    ],
)
@pytest.mark.parametrize("sizes", [TENSOR, EXPERTS], ids=["tensor", "experts"])
def test_what_is_not_supported_beside_them_is_a_problem(sizes, more, config, said):
    (problem,) = plan_for(sizes | {"WORLD_SIZE": "8"} | more, A100, **config)[0].problems
    assert said in problem


@NEEDS_MODEL_PARALLELISM
def test_both_together_and_adapters_are_problems():
    lora = recipe_class(str(ROOT / "recipes" / "lora_finetune.py")).config_class
    (problem,) = plan_for(TENSOR | EXPERTS | {"WORLD_SIZE": "4"})[0].problems
    assert "expert parallelism (2)" in problem
    for environ in (TENSOR, EXPERTS):
        (problem,) = plan_for(environ, kind=lora)[0].problems
        assert "adapters" in problem and "accelerate_configs/fsdp.yaml" in problem


@NEEDS_MODEL_PARALLELISM
@pytest.mark.parametrize(
    "facts, tensor, experts",
    [
        (LLAMA | {"num_key_value_heads": 3}, "2 processes do not divide num_key_value_heads 3", None),
        (LLAMA | {"num_attention_heads": 9}, "2 processes do not divide num_attention_heads 9", None),
        (LLAMA | {"num_local_experts": 3}, None, "2 processes do not divide num_local_experts 3"),
        (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder", "encoder-decoder"),
        (LLAMA, None, None),
    ],
)
def test_models_that_cannot_be_divided_are_problems_before_a_launch(tmp_path, facts, tensor, experts):
    (tmp_path / "config.json").write_text(json.dumps(facts))
    for environ, said in ((TENSOR, tensor), (EXPERTS, experts)):
        problems = plan_for(environ, model_name_or_path=str(tmp_path))[0].problems
        assert len(problems) == (said is not None) and (said is None or said in problems[0])


@pytest.mark.parametrize(
    "model, tensor, experts",
    [
        ("llama2_7b", None, "no base_model_ep_plan for llama"),
        ("qwen3_8b", None, "no base_model_ep_plan for qwen3"),
        ("mixtral_8x7b", "experts.gate_up_proj into parts of several ranges", None),
        ("gpt2_xl", "no base_model_tp_plan for gpt2", "no base_model_ep_plan for gpt2"),
    ],
)
def test_models_that_transformers_does_not_divide_are_refused(model, tensor, experts):
    config = AutoConfig.from_pretrained(MODELS / f"{model}.json")
    one = plan_for(WORKER)[0]
    assert find_config_problems(one, config) == []
    for environ, said in ((TENSOR, tensor), (EXPERTS, experts)):
        problems = find_config_problems(plan_for(environ)[0], config)
        assert len(problems) == (said is not None) and (said is None or said in problems[0])


def test_noise_of_a_router_is_refused_under_zero3(tmp_path):
    """tests/distributed/test_model_parallel.py sees it fail."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"router_jitter_noise": 0.1}))
    zero3 = deepspeed(tmp_path, zero_optimization={"stage": 3})
    (problem,) = plan_for(zero3, model_name_or_path=str(tmp_path))[0].problems
    assert "router_jitter_noise 0.1" in problem and "accelerate_configs/fsdp.yaml" in problem
    assert not plan_for(deepspeed(tmp_path), model_name_or_path=str(tmp_path))[0].problems, "ZeRO-2"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"router_jitter_noise": 0.0}))
    assert not plan_for(zero3, model_name_or_path=str(tmp_path))[0].problems


def test_an_led_is_refused_under_zero3_alone(tmp_path):
    """Its encoder calls its embedding once more for a batch that it pads, which other processes may not do."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "led", "is_encoder_decoder": True}))
    (problem,) = plan_for(deepspeed(tmp_path, zero_optimization={"stage": 3}), model_name_or_path=str(tmp_path))[0].problems
    assert "LED" in problem and "accelerate_configs/fsdp.yaml" in problem
    assert not plan_for(deepspeed(tmp_path), model_name_or_path=str(tmp_path))[0].problems, "ZeRO-2"


@NEEDS_MODEL_PARALLELISM
def test_the_planner_gives_no_figures_for_parts():
    rows = rows_of("causal_lm", "llama2_7b", cluster(gpus="8", gpu="a100-80gb"), ("fsdp_tensor", "fsdp_experts"))
    made = rows["fsdp_tensor"]
    assert made.untraced and made.memory is None and not made.fits and "are not computed" in made.problems[0]
    assert "base_model_ep_plan" in rows["fsdp_experts"].problems[0] and not rows["fsdp_experts"].fits


def test_one_process_of_a_group_writes_what_all_of_it_hold():
    def mesh(names, ranks):
        return SimpleNamespace(mesh_dim_names=names, get_local_rank=lambda dimension: ranks[dimension])

    shard = SimpleNamespace(is_replicate=lambda: False)
    written = {}
    for rank in range(4):  # tensor 2 x fsdp 2
        strategy = ModelParallelStrategy.__new__(ModelParallelStrategy)
        strategy.mesh, strategy.plan = SimpleNamespace(rank=rank), SimpleNamespace(tensor=2)
        for name, tensor in {
            "matrix": SimpleNamespace(device_mesh=mesh(("fsdp", "tp"), (rank // 2, rank % 2)), placements=(shard, shard)),
            "norm": SimpleNamespace(device_mesh=mesh(("fsdp",), (rank // 2,)), placements=(shard,)),
        }.items():
            written.setdefault(name, []).append(not strategy._is_copy(tensor))
    assert written == {"matrix": [True] * 4, "norm": [True, False, True, False]}


@NEEDS_MODEL_PARALLELISM
def test_weights_are_saved_in_the_dtypes_that_the_recipe_would_load():
    """ERNIE's router is in fp32, also in a model that is loaded in bf16."""
    sizes = dict(hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2, vocab_size=64)
    config = Ernie4_5_MoeConfig(num_attention_heads=2, num_key_value_heads=2, moe_num_experts=4, moe_k=2, **sizes)

    def load(options):
        # The sizes need processes, and a device map needs a file.
        with torch.device(options.get("device_map", "cpu")):
            model = AutoModelForCausalLM.from_config(config, dtype=options["dtype"])
        model.config.distributed_config = options.get("distributed_config")
        return model

    strategy = ModelParallelStrategy.__new__(ModelParallelStrategy)
    strategy.plan = SimpleNamespace(precision="bf16", tensor=1, experts=2, shard=2, device="cpu")
    model = strategy.load(load, {"dtype": torch.bfloat16})
    strategy._record_loaded(model)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.bfloat16
    in_fp32 = {name for name, dtype in strategy.loaded_dtypes.items() if dtype == torch.float32}
    assert "model.layers.1.mlp.gate.weight" in in_fp32 and len(in_fp32) < len(strategy.loaded_dtypes) / 2


def test_accelerates_own_way_is_still_broken():
    """If this fails, accelerate's tensor parallelism may work: see whether `ModelParallelStrategy` is still needed."""
    with pytest.raises(ImportError):
        from transformers.integrations.tensor_parallel import ReplicateParallel  # noqa: F401  what accelerate 1.15 imports


def test_a_norm_over_several_meshes_is_that_of_all_numbers(tmp_path):
    """One process: meshes of one rank each, which torch's own function does not take together."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from zerobook.strategy.norm import total_norm

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = [torch.randn(8, 4) for _ in range(3)]
        grid, line = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp")), init_device_mesh("cpu", (1,))
        on_grid = distribute_tensor(whole[1], grid, [Shard(0), Shard(1)])
        parts = [whole[0], on_grid, distribute_tensor(whole[2], line, [Shard(0)])]
        assert torch.allclose(total_norm(parts), torch.linalg.vector_norm(torch.cat(whole)))
    finally:
        dist.destroy_process_group()
