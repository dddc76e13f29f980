"""Known models on known machines, of one node and of several."""

from __future__ import annotations

import json

import pytest

from benchmarks.published.formulas import activations
from tests.planning import FILES, HALF, MODELS, UNPLANNED, WIDE, logits_bytes, made, rows_of, shortened
from zerobook.cli.main import main
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.plan import formulas
from zerobook.plan.hardware import cluster
from zerobook.plan.literature import paper_figures
from zerobook.plan.memory import CONTEXT_BYTES, DeviceBytes, PeakMemory
from zerobook.plan.roofline import StepSeconds
from zerobook.plan.rows import Row, plan_row, rank_rows
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights, Weight, count_elements
from zerobook.plan.traced_job import TracedJob
from zerobook.plan.traffic import count_sent_between_nodes, list_transfers

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.mark.parametrize(
    "name, billions, tolerance",
    [("gpt2_xl", 1.5576, 1e-4), ("blenderbot_400m", 0.365, 0.01), ("falcon_40b", 41.3, 0.001), ("llama2_70b", 68.98, 1e-3),
     pytest.param("falcon_180b", 179, 0.005, marks=pytest.mark.full),
     pytest.param("llama_65b", 65.3, 0.002, marks=pytest.mark.full)],
)  # fmt: skip
def test_parameters_of_known_models(name, billions, tolerance):
    recipe, lengths = ("seq2seq_chatbot", BLENDERBOT) if "blender" in name else ("causal_lm", {})
    model = made(recipe, MODELS / f"{name}.json", **lengths).weights()
    total = count_elements(model.weights)
    assert total / 1e9 == pytest.approx(billions, rel=tolerance)
    assert model.trained_elements == total


BLENDERBOT = {"max_source_length": 128, "max_target_length": 64}


def test_files_that_fit_come_first_and_the_simplest_of_those():
    on_large = rows_of(
        "causal_lm", WIDE, cluster(gpus="8", gpu="a100-80gb"), mixed_precision="bf16", per_device_train_batch_size=1
    )
    assert {name for name, made in on_large.items() if not made.fits} == UNPLANNED
    assert next(iter(on_large)) == "fsdp"


def test_where_the_states_alone_are_too_much_nothing_is_traced():
    small = cluster(gpus="1", gpu="titan-rtx", gpu_memory="24GB")
    alone = rows_of("causal_lm", WIDE, small, ("single", "zero3_offload"), **HALF | FP16)
    assert alone["single"].bare and alone["single"].time is None and not alone["single"].fits
    assert not alone["zero3_offload"].bare and alone["zero3_offload"].fits
    assert alone["zero3_offload"].memory.device.activations > 0 and alone["zero3_offload"].tokens_per_second > 0


FP16 = {"mixed_precision": "fp16"}


@pytest.mark.full  # five traces of 48 layers
def test_gpt2_xl():
    on_large = rows_of("causal_lm", "gpt2_xl", cluster(gpus="8", gpu="a100-80gb"), mixed_precision="bf16",
                       per_device_train_batch_size=1)  # fmt: skip
    assert {name for name, made in on_large.items() if not made.fits} == UNPLANNED, "not planned"
    assert next(iter(on_large)) == "fsdp", "the strategy that hides most of its communication"
    alone = rows_of("causal_lm", "gpt2_xl", cluster(gpus="1", gpu="titan-rtx"), mixed_precision="fp16",
                    per_device_train_batch_size=1, block_size=128)  # fmt: skip
    # as published: out of memory at batch 1 without ZeRO, and trained by ZeRO-3 with offload
    assert not alone["single"].fits and not alone["ddp"].fits and alone["zero3_offload"].fits
    assert next(iter(alone)).endswith("_offload"), "nothing else fits"
    assert alone["single"].memory.total > 16 * 1.5576e9
    assert alone["zero3_offload"].memory.device.activations > 0 and alone["zero3_offload"].tokens_per_second > 0
    v100 = cluster(gpus="8", gpu="v100-32gb")
    # with accumulation, DDP keeps earlier gradients beside its buckets
    flags = {"mixed_precision": "fp16", "per_device_train_batch_size": 1, "activation_checkpointing": True,
             "gradient_accumulation_steps": 2}  # fmt: skip
    on_v100 = rows_of("causal_lm", "gpt2_xl", v100, files=("ddp", "zero1"), **flags)
    assert on_v100["ddp"].tight and not on_v100["zero1"].tight and next(iter(on_v100)) == "zero1", "ZeRO-1 on 8 V100"


@pytest.mark.parametrize(
    "layers, billions, accumulation, fits", [(47, 1.41, 2, True), (54, 1.61, 2, False), (54, 1.61, 1, True)]
)
@pytest.mark.full  # a trace of 50 layers each
def test_the_most_that_ddp_fits_on_a_v100(tmp_path, layers, billions, accumulation, fits):
    """The published figure is 1.4 billion, in mixed precision with checkpointing. The V100 has 32 GiB.

    It is of a DDP that keeps its buckets apart from gradients, as ours does with accumulation alone.
    """
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_embd": 1536, "n_layer": layers, "n_head": 16}))
    flags = {"mixed_precision": "fp16", "per_device_train_batch_size": 1, "activation_checkpointing": True,
             "gradient_accumulation_steps": accumulation}  # fmt: skip
    planned = made("causal_lm", file, **flags)
    sources = ConfigSources(dict.fromkeys(type(planned.config).model_fields, "default"))
    traced = TracedJob.of(planned, "cuda")
    v100 = cluster(gpus="8", gpu="v100-32gb", gpu_memory="32GiB")
    (ddp,) = [plan_row(file, traced, v100, sources) for file in FILES if file.stem == "ddp"]
    assert traced.model.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert ddp.fits is fits, ddp.exceeded
    # by the formulas, even of 32 x 10^9 bytes: 16 a parameter, and 4 of buckets beside gradients that are kept
    buckets = 4 * traced.model.parameters * (accumulation - 1)
    held = formulas.model_states(traced.model.parameters, 0, 8, mixed=True).total + buckets
    held += activations(layers, 1, 1024, 1536, 16, fused=False, checkpointing=True)
    held += logits_bytes(1, 1024, 50257)
    assert (held + CONTEXT_BYTES < 32e9) is fits


@pytest.mark.full  # four traces of 14 layers
def test_blenderbot_as_published():
    """Two Titan RTX with 24 GB: DDP took 100 dialogues at a time, ZeRO-2 200. DDP with 200 is as near as a plan can tell."""
    two = cluster(gpus="2", gpu="titan-rtx", host_memory="60GB")
    flags = {"mixed_precision": "fp16", "max_source_length": 128, "max_target_length": 64}
    at_100, at_200 = (
        rows_of("seq2seq_chatbot", "blenderbot_400m", two, per_device_train_batch_size=rows, **flags) for rows in (100, 200)
    )
    assert at_100["ddp"].fits and at_100["zero2"].fits
    assert at_200["zero2"].fits and at_200["zero2"].memory.total < two.device.memory
    assert at_200["ddp"].tight and at_200["ddp"].memory.total > two.device.memory
    assert next(iter(at_100)) == "fsdp", "it hides most of its communication"
    assert at_200["ddp"].remedies, "and it says what would help"


@pytest.mark.full  # five traces of 60 layers
def test_falcon_40b():
    eight = cluster(gpus="8", gpu="a100-80gb", host_memory="1TB")
    flags = {"mixed_precision": "bf16", "dtype": "bfloat16", "per_device_train_batch_size": 1}
    lora = rows_of("lora_finetune", "falcon_40b", eight, **flags)
    assert next(iter(lora)) == "fsdp", "it hides more of its communication than ZeRO-3"
    assert not lora["ddp"].fits and not lora["zero2"].fits and lora["zero3"].fits and lora["fsdp"].fits
    on_disk, on_host = lora["zero3_nvme"].memory, lora["zero3_offload"].memory
    assert on_disk.disk > 82e9 and on_disk.host < 10e9 < 82e9 < on_host.host, "the adapters alone would stay"
    # 10.4 GB of each rank's, read of one disk forward and backward
    assert lora["zero3_nvme"].time.offload - lora["zero3_offload"].time.offload > 2 * 82e9 / 3e9
    weights = sum(w.numel for w in made("causal_lm", MODELS / "falcon_40b.json").weights().weights)
    assert 2 * weights / 2**30 == pytest.approx(74, rel=0.05)  # printed for 40 x 10^9
    # every rank loads its own copy
    whole = rows_of("causal_lm", "falcon_40b", eight, files=("zero2",), mixed_precision="bf16", per_device_train_batch_size=1)
    assert whole["zero2"].memory.host_at_load == 4 * weights * 8 > 1.3e12
    assert any("host RAM while loading" in reason for reason in whole["zero2"].exceeded)


@pytest.mark.full  # ten seconds a trace
def test_falcon_180b_and_llama_70b_and_65b():
    eight = cluster(gpus="8", gpu="a100-80gb", host_memory="1TB")
    flags = {"mixed_precision": "bf16", "dtype": "bfloat16", "per_device_train_batch_size": 1, "activation_checkpointing": True}
    falcon = rows_of("lora_finetune", "falcon_180b", eight, **flags)
    assert falcon["zero3"].fits and next(iter(falcon)) == "fsdp"
    assert not falcon["zero2"].fits and not falcon["fsdp_hybrid"].fits
    nodes = cluster(gpus="8", nodes="4", gpu="a100-80gb", interconnect="400Gbps", host_memory="1TB")
    del flags["dtype"]
    files = ("ddp", "zero1", "zero2", "zero3", "zero3_hpz", "fsdp", "fsdp_hybrid")
    llama = rows_of("causal_lm", "llama2_70b", nodes, files=files, **flags)
    assert llama["zero3"].fits and llama["zero3_hpz"].fits and llama["fsdp"].fits
    assert next(iter(llama)) == "zero3_hpz", "the network is what it waits for"
    assert not llama["fsdp_hybrid"].fits, "a copy a node leaves no room"
    assert not any(llama[name].fits for name in ("ddp", "zero1", "zero2"))
    assert llama["zero3_hpz"].between < llama["fsdp"].between
    assert llama["zero3_hpz"].between == pytest.approx(2 / 3 * llama["zero3"].between, rel=0.01), "as in ZeRO++"
    one = cluster(gpus="1", gpu="a6000")
    quantised = rows_of("lora_finetune", "llama_65b", one, files=("single", "zero3_offload"), load_in_4bit=True,
                        max_seq_length=512, **flags)  # fmt: skip
    assert quantised["single"].fits and next(iter(quantised)) == "single", "65 billion with QLoRA on 48 GB"
    assert any("load_in_4bit" in problem for problem in quantised["zero3_offload"].problems)


def test_packed_weights_are_parameters_by_their_own_number(tmp_path):
    """QLoRA's layers hold their weights in a third of as many elements; the bytes are those elements'."""
    short = shortened(tmp_path, "llama_65b", num_hidden_layers=4, vocab_size=512)
    traced = TracedJob.of(made("lora_finetune", short, load_in_4bit=True, mixed_precision="bf16"), "cuda")
    model = traced.model
    frozen = model.parameters - model.trained_elements
    assert frozen == sum(w.numel for w in made("causal_lm", short).weights().weights)
    spread = ShardingSpec(kind="single", name="", ranks=1, ranks_per_node=1, precision="bf16")
    said = paper_figures(model.parameters, model.trained_elements, spread, 1, density=model.density)
    stored = 2 * count_elements(model.weights)
    assert said.states.parameters == pytest.approx(stored) and 0.5 * frozen < stored < 0.6 * frozen
    each, letter = said.formula["states"].split()[:2]
    assert letter == "P" and float(each) * model.parameters == pytest.approx(stored, rel=1e-4)


@pytest.mark.parametrize(
    "recipe, model, flags, said",
    [
        ("causal_lm", "gpt2_xl", {"block_size": 4096}, "GPT2LMHeadModel has 1024 positions"),
        ("seq2seq_chatbot", "blenderbot_400m", {"max_source_length": 256}, "blenderbot_400m.* has 128 positions"),
    ],
)
def test_lengths_that_the_recipe_refuses_are_not_planned(recipe, model, flags, said):
    with pytest.raises(ConfigError, match=said):
        TracedJob.of(made(recipe, MODELS / f"{model}.json", **flags), "cuda")


@pytest.mark.parametrize("kind", ["bert", "distilbert"])  # one class of which can be told to be a decoder, and one without
def test_encoders_are_refused_in_words(tmp_path, capsys, kind):
    file = tmp_path / "encoder.json"
    file.write_text(json.dumps({"model_type": kind}))
    assert main(["plan", "--strategies", "ddp", str(file)]) == 2
    text = capsys.readouterr().err
    assert f"{kind} is an encoder" in text and "no language-modelling head" in text


def test_what_the_paper_fits():
    """ZeRO's own claims, by its own formulas, on V100 with 32 GB."""
    assert formulas.model_states(10e9, 2, 32, mixed=True).total < 32e9
    assert formulas.model_states(1e12, 3, 512, mixed=True).total < 32e9
    assert formulas.model_states(1e12, 2, 512, mixed=True).total > 32e9


def test_what_smaller_activations_would_fit_goes_before_what_nothing_would():
    def row_of(name: str, total: int, **facts) -> Row:
        held = PeakMemory(
            device=DeviceBytes(parameters=total), when="step", host_at_load=0, host=0, disk=0, low=total, high=total
        )
        return Row(file=name, name=name, memory=held, **facts)

    rows = [
        Row(file="impossible", name="", problems=["it cannot run"]),
        row_of("states alone", 90, exceeded=["GPU memory"], bare=True),
        row_of("near", 100, exceeded=["GPU memory"]), row_of("far", 120, exceeded=["GPU memory"]),
        row_of("fits", 70, time=StepSeconds(1, 0, 0, 0, 0, 0), tokens_per_step=10),
    ]  # fmt: skip
    assert [made.file for made in rank_rows(rows)] == ["fits", "near", "far", "states alone", "impossible"]


def nodes(count: int, interconnect: str = "50Gbps"):
    return cluster(gpus="8", nodes=str(count), gpu="a100-80gb", interconnect=interconnect)


def test_a_replica_for_each_node_sends_no_weights_between_nodes():
    """The file has two replicas, and the planned launch line one for each node."""
    rows = rows_of("causal_lm", WIDE, nodes(4), ("fsdp", "fsdp_hybrid"), **HALF)
    assert rows["fsdp_hybrid"].name == "FSDP2 hybrid 4x8"
    assert rows["fsdp_hybrid"].between < rows["fsdp"].between


def test_a_model_that_leaves_out_layers_is_planned_with_all_of_them(tmp_path):
    """M2M100 draws a number for each layer, of which a trace knows nothing; in runs, too, it is turned off."""
    from transformers import M2M100Config

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = M2M100Config(d_model=32, vocab_size=64, **sizes)
    assert config.encoder_layerdrop > 0
    (tmp_path / "m2m.json").write_text(config.to_json_string())
    lengths = {"max_source_length": 16, "max_target_length": 16}
    rows = rows_of("seq2seq_chatbot", str(tmp_path / "m2m"), cluster(gpu_memory="8GB"), ("single",), **lengths)
    assert rows["single"].fits and rows["single"].memory.device.activations > 0


def test_hpz_between_two_nodes_and_on_one():
    two = rows_of("causal_lm", WIDE, nodes(2), ("zero3", "zero3_hpz"), **HALF)
    assert two["zero3_hpz"].between < two["zero3"].between and two["zero3_hpz"].name == "ZeRO-3 hpZ 2x8"
    weights = sum(w.numel for w in made("causal_lm", WIDE).weights().weights)
    more = two["zero3_hpz"].memory.device.parameters - two["zero3"].memory.device.parameters
    assert more == pytest.approx(2 * weights / 8, rel=0.001)
    one = rows_of("causal_lm", WIDE, cluster(gpus="8", gpu="a100-80gb"), ("zero3", "zero3_hpz"), **HALF)
    assert one["zero3_hpz"].sharding == one["zero3"].sharding and next(iter(one)) == "zero3"


@pytest.mark.parametrize("secondary, near", [(8, True), (4, True), (16, False), (3, False)])
def test_what_hpz_sends_where(secondary, near):
    """Trained weights are gathered from all ranks once a step, and frozen ones never."""
    weights = [Weight("trained", (48, 100), 2, True), Weight("frozen", (48, 200), 2, False), Weight("small", (10,), 2, False)]
    spread = ShardingSpec(
        kind="deepspeed", name="", ranks=48, ranks_per_node=8, stage=3, shard_ranks=48, secondary_ranks=secondary,
        precision="bf16", persistence_threshold=10, max_reuse_elements=0, prefetch_bucket_elements=0,
    )  # fmt: skip
    found = {
        transfer.content: (transfer.size_bytes, transfer.ranks, transfer.within_node)
        for transfer in list_transfers(ModelWeights(weights, [weights[:1]]), spread, 3)
    }
    assert found == {
        "weights, forward": (2 * 4800, 48, False),
        "weights, forward, second copy": (2 * (2 * 4800 + 3 * 9600), secondary, near),
        "weights, backward": (2 * 3 * (4800 + 9600), secondary, near),
        "gradients": (2 * 3 * 4800, 48, False),
        "small weights": (2 * 48, 48, False),
    }


def test_every_ring_between_two_nodes_counts():
    """Hybrid sharding reduces each of a node's shards over a ring of its own."""
    weights = [Weight("w", (64, 100), 4, True, "layer")]
    spread = ShardingSpec(kind="fsdp", name="", ranks=16, ranks_per_node=8, stage=3, shard_ranks=8)
    assert count_sent_between_nodes(list_transfers(ModelWeights(weights, [weights]), spread), 2) == 4 * 6400, (
        "all gradients, from each node once"
    )


def test_fsdp_reduces_in_fp32_and_over_replicas_once_a_step():
    weights = [Weight("w", (64, 100), 4, True, "layer")]
    spread = ShardingSpec(kind="fsdp", name="", ranks=16, ranks_per_node=8, stage=3, shard_ranks=8, precision="bf16")
    sizes = {transfer.content: transfer.size_bytes for transfer in list_transfers(ModelWeights(weights, [weights]), spread, 3)}
    assert sizes["weights, forward"] == sizes["weights, backward"] == 3 * 2 * 6400
    assert sizes["gradients"] == 3 * 4 * 6400
    assert sizes["gradients, copies"] == 4 * 6400 / 8
