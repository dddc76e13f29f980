"""Quantised bases: what trains, what is sharded, and what is refused because it still fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig, LoraFinetune
from tests.distributed.test_parity import largest_difference
from tests.harness import ROOT, launch
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.models.quantise import check_base, check_layers, int8, nf4, quantisable_layers
from zerobook.plan.hardware import cluster
from zerobook.plan.job import make_job
from zerobook.plan.rows import plan_row
from zerobook.plan.traced_job import TracedJob
from zerobook.strategy.launch_plan import LaunchPlan

PLANS = {
    "single": {"kind": "single"}, "ddp": {"kind": "ddp"}, "zero1": {"kind": "deepspeed", "zero_stage": 1},
    "zero2": {"kind": "deepspeed", "zero_stage": 2}, "zero3": {"kind": "deepspeed", "zero_stage": 3}, "fsdp": {"kind": "fsdp"},
}  # fmt: skip
UNREFUSED = ROOT / "tests" / "distributed" / "unrefused.py"


def plan(strategy: str) -> LaunchPlan:
    return LaunchPlan(world_size=2, device="cpu", backend="gloo", precision="no", precision_source="default", **PLANS[strategy])


@pytest.fixture(scope="session")
def quantised(tiny, tmp_path_factory):
    """Name -> the folder of a tiny Llama that was saved quantised."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    packed = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    kinds = {"nf4_uint8": BitsAndBytesConfig(**packed), "nf4_float32": nf4("no"), "int8": int8()}
    made = {}
    for name, kind in kinds.items():
        made[name] = tmp_path_factory.mktemp("quantised") / name
        AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=kind).save_pretrained(made[name])
        AutoTokenizer.from_pretrained(tiny / "llama").save_pretrained(made[name])
    return made


def problem(folder: Path | dict, strategy: str, kind=LoraConfig, **flags) -> str | None:
    """Return what `check_base` says about the model in ``folder``, or about a quantisation config."""
    facts = folder if isinstance(folder, dict) else json.loads((folder / "config.json").read_text())["quantization_config"]
    try:
        config = kind(model_name_or_path="hub/name", dataset_name="x", **flags)
        check_base(SimpleNamespace(quantization_config=facts), config, plan(strategy))  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return None


def test_a_quantised_model_is_refused_where_it_would_not_be_sharded(quantised):
    for strategy in PLANS:
        sharded = strategy in ("zero3", "fsdp")
        for name, refused in (("nf4_uint8", strategy == "fsdp"), ("int8", sharded), ("nf4_float32", False)):
            said = problem(quantised[name], strategy)
            assert (said is not None) == refused, (strategy, name, said)
            if said is not None:
                assert said.startswith("model_name_or_path: hub/name") and plan(strategy).name in said and "Use ZeRO-" in said
                assert ("uint8" in said) == (name == "nf4_uint8")
    # a config that names no storage is bitsandbytes' default, uint8
    assert "uint8" in str(problem({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fsdp"))


def test_other_formats_and_the_training_of_quantised_weights_are_refused(quantised):
    for method in ("gptq", "awq", "fp8", "mxfp4"):
        said = problem({"quant_method": method, "bits": 4}, "single")
        assert said is not None and method in said and "--load_in_4bit" in said
    said = problem(quantised["nf4_uint8"], "single", CausalLMConfig)
    assert said is not None and "cannot be trained" in said and "recipes/lora_finetune.py" in said
    said = problem(quantised["nf4_uint8"], "single", load_in_8bit=True)
    assert said is not None and "4 bits already" in said and "load_in_8bit" in said
    assert problem(quantised["nf4_uint8"], "single", load_in_4bit=True) is None


def test_the_planner_knows_a_model_that_is_quantised_already(quantised, tiny):
    for name, flag in (("nf4_uint8", "load_in_4bit"), ("int8", "load_in_8bit")):
        flags = {"dataset_name": "embedded:chatterbot", "max_seq_length": 64}
        found = make_job(LoraFinetune(LoraConfig(model_name_or_path=str(quantised[name]), **flags)))
        asked = make_job(LoraFinetune(LoraConfig(model_name_or_path=str(tiny / "llama"), **flags, **{flag: True})))
        assert found.weights() == asked.weights()
        assert sum(weight.scale_bytes for weight in found.weights().weights) > 0
    sources = ConfigSources(dict.fromkeys(LoraConfig.model_fields, "default"))
    where, traced = cluster(gpus="2", gpu="a100-80gb"), TracedJob.of(found, "cuda")
    rows = {name: plan_row(ROOT / "accelerate_configs" / f"{name}.yaml", traced, where, sources) for name in ("zero2", "fsdp")}
    assert rows["zero2"].fits and "quantised to 8 bits" in rows["fsdp"].problems[0]


def test_a_base_has_one_format():
    config = LoraConfig(model_name_or_path="x", dataset_name="x", load_in_4bit=True, load_in_8bit=True)
    assert any(p.startswith("load_in_8bit: ") and "load_in_4bit" in p for p in config.problems())


@pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
def test_a_model_none_of_whose_layers_is_quantised_is_refused(tiny, flag):
    """transformers leaves a subclass of linear layers as it is; if it no longer does, the refusal can go."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(**{flag: True})
    model = AutoModelForCausalLM.from_pretrained(tiny / "falcon", quantization_config=config)
    assert not [module for module in model.modules() if type(module).__module__.startswith("bitsandbytes.")]
    base = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}[flag]
    with pytest.raises(ConfigError, match=f"{flag}: .*FalconLinear"):
        check_layers(model, base)
    for name in ("llama", "gpt2"):
        check_layers(AutoModelForCausalLM.from_pretrained(tiny / name, quantization_config=config), base)


def test_falcon_is_built_of_layers_that_are_quantised_with_equal_values(tiny):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    ids = torch.arange(8)[None]
    expected = AutoModelForCausalLM.from_pretrained(tiny / "falcon")(ids).logits
    with quantisable_layers():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tiny / "falcon")(ids).logits, expected)
        config = BitsAndBytesConfig(load_in_4bit=True)
        check_layers(AutoModelForCausalLM.from_pretrained(tiny / "falcon", quantization_config=config), "nf4")
    job = make_job(LoraFinetune(LoraConfig(model_name_or_path=str(tiny / "falcon"), dataset_name="x", load_in_4bit=True)))
    assert sum(weight.scale_bytes for weight in job.weights().weights) > 0, "the planner packs them too"


WHOLE = 0.57
"""Share of one process's bytes that a rank of two holds: less where the packed weights, an eighth of all, are sharded."""


def held(run) -> list[int]:
    return [rank["parameters"] for rank in run.event("memory")["per_rank_bytes"]]


def lora(folder: Path, tiny: Path) -> dict:
    """Flags for a short run on a saved model."""
    return dict(
        model_name_or_path=folder, train_file=tiny / "few.jsonl", max_train_samples=4, validation_split_percentage=0,
        max_seq_length=64, max_train_steps=3, logging_steps=1, learning_rate=5e-3, adam_epsilon=1e-6,
    )  # fmt: skip


@pytest.mark.launch
@pytest.mark.full
def test_a_quantised_model_trains_where_weights_are_whole_and_is_refused_elsewhere(quantised, tiny, tmp_path):
    for name in ("nf4_uint8", "int8"):
        flags = lora(quantised[name], tiny)
        one = launch("single", 1, "lora_finetune", tmp_path / name / "one", per_device_train_batch_size=4, **flags)
        two = launch("zero2", 2, "lora_finetune", tmp_path / name / "two", per_device_train_batch_size=2, **flags)
        assert largest_difference(two.losses, one.losses) < 1e-5 and one.losses[-1] < one.losses[0]
        run = launch("fsdp", 2, "lora_finetune", tmp_path / name / "refused", per_device_train_batch_size=2, expect=1, **flags)
        assert "ConfigError" in run.text and "FSDP2" in run.text and not run.steps


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("strategy, name", [("zero3", "nf4_float32"), ("zero3", "nf4_uint8"), ("fsdp", "nf4_float32")])
def test_a_quantised_model_is_sharded(quantised, tiny, tmp_path, strategy, name):
    flags = lora(quantised[name], tiny)
    one = launch("single", 1, "lora_finetune", tmp_path / "one", per_device_train_batch_size=4, **flags)
    two = launch(strategy, 2, "lora_finetune", tmp_path / "two", per_device_train_batch_size=2, **flags)
    assert largest_difference(two.losses, one.losses) < 1e-5
    # ZeRO-3 keeps weights of few elements gathered, as the plan of test_plan_measured.py counts to the byte
    if (strategy, name) != ("zero3", "nf4_float32"):
        assert max(held(two)) < WHOLE * held(one)[0]


def int8_bytes(tiny: Path) -> int:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=int8())
    return sum(p.numel() for p in model.parameters() if p.dtype == torch.int8)


@pytest.mark.launch
@pytest.mark.full
def test_fsdp2_still_cannot_shard_int8(launches):
    """If this fails, a newer bitsandbytes or torch can: see `zerobook.launch.quantised`."""
    run = launches("fsdp", 2, 2, 1, "lora_finetune", load_in_8bit=True, through=UNREFUSED, expect=None)
    assert run.returncode and "Creating a Parameter from an instance of type Int8Params" in run.text and not run.steps


@pytest.mark.launch
@pytest.mark.full
def test_zero3_still_leaves_int8_whole_on_every_rank(launches):
    """The parameters are sharded, but bitsandbytes' layers multiply with a copy of their own."""
    one = launches("single", 1, 4, 1, "lora_finetune", load_in_8bit=True)
    run = launches("zero3", 2, 2, 1, "lora_finetune", load_in_8bit=True, through=UNREFUSED)
    assert largest_difference(run.losses, one.losses) < 1e-5
    assert min(held(run)) > 0.5 * held(one)[0] + 0.4 * int8_bytes(launches.tiny)


@pytest.mark.launch
@pytest.mark.full
def test_fsdp2_still_leaves_weights_that_are_packed_in_uint8_whole(quantised, tiny, tmp_path):
    flags = lora(quantised["nf4_uint8"], tiny)
    one = launch("single", 1, "lora_finetune", tmp_path / "one", per_device_train_batch_size=4, **flags)
    run = launch("fsdp", 2, "lora_finetune", tmp_path / "run", per_device_train_batch_size=2, through=UNREFUSED, expect=None,
                 **flags)  # fmt: skip
    assert run.returncode or min(held(run)) > WHOLE * held(one)[0]


def test_scales_of_quantised_layers_are_counted(tiny):
    from transformers import AutoModelForCausalLM

    from zerobook.strategy.weights import quantisation_state, storage_bytes

    four = AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=nf4("no"))
    state = four.model.layers[0].self_attn.q_proj.weight.quant_state
    each = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    found = list(quantisation_state(four))
    assert len(found) == 5 * 14 and all(any(t is f for f in found) for t in each)
    eight = AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=int8())
    with torch.no_grad():
        eight(torch.arange(8)[None])
    weights = [p for p in eight.parameters() if p.dtype == torch.int8]
    rows = sum(len(w) for w in weights)
    assert len(weights) == 14 and storage_bytes(quantisation_state(eight)) == 4 * rows + sum(w.numel() for w in weights)
    assert storage_bytes([*weights, *quantisation_state(eight)]) == storage_bytes(quantisation_state(eight)), "the same memory"
