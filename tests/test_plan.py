"""The planner: what it traces against real tensors, what it says of known models, and what it refuses."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerobook.cli import main
from zerobook.config import Resolved
from zerobook.doctor import _config_class
from zerobook.errors import ConfigError
from zerobook.plan import formulas
from zerobook.plan.hardware import DEVICES, cluster, known
from zerobook.plan.job import Job, Shape, job, read_config
from zerobook.plan.rows import Row, Traced, rank, row
from zerobook.plan.trace import Follow, Saved, _autocast, _kernels, trace

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "benchmarks" / "models"
FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def made(recipe: str, model: str | Path, **flags) -> Job:
    config = _config_class(str(ROOT / "recipes" / f"{recipe}.py"))(model_name_or_path=str(model), **flags)
    return job(config)


# --- activations
CASES = {
    "llama": ("causal_lm", "llama", {}),
    "gpt2": ("causal_lm", "gpt2", {}),
    "falcon, whose heads share keys": ("causal_lm", "falcon", {}),
    "t5, whose bias is trained": ("seq2seq_chatbot", "t5", {}),
    "bart": ("seq2seq_chatbot", "bart", {}),
    "autocast": ("causal_lm", "llama", {"mixed_precision": "bf16"}),
    "checkpointing": ("causal_lm", "gpt2", {"activation_checkpointing": True}),
    "both": ("causal_lm", "llama", {"activation_checkpointing": True, "mixed_precision": "bf16"}),
    "eager attention": ("causal_lm", "llama", {"attn_implementation": "eager"}),
    "packed": ("causal_lm", "llama", {"packing": True}),
    "lora, padded": ("lora_finetune", "llama", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_what_real_tensors_do(tiny, name):
    recipe, model, flags = CASES[name]
    planned = made(recipe, tiny / model, **flags)
    shape = Shape(2, 48, 24 if planned.seq2seq else 0, planned.shape.padded)
    precision = flags.get("mixed_precision", "no")
    with planned.made(shape) as (fake, batch):
        found = trace(fake, batch, planned.objective.loss, precision, kernels="cpu")
    real, batch = real_model(planned, shape)
    gc.disable()  # what is freed by itself, and when, is what counts
    try:
        measured = trace(real, batch, planned.objective.loss, precision)
    finally:
        gc.enable()
    # a decoder without a mask: fake tensors cannot tell that there is nothing to mask
    exact = planned.model_config.model_type != "bart"
    assert found.saved == measured.saved if exact else found.saved == pytest.approx(measured.saved, rel=0.02)
    assert found.peak == pytest.approx(measured.peak, rel=0.001 if exact else 0.02)
    assert found.flops == pytest.approx(measured.flops, rel=0.35)  # real attention is not counted on a CPU
    if flags.get("attn_implementation") == "eager":
        assert found.flops == measured.flops
    assert [done for done, _ in found.timeline] == [done for done, _ in measured.timeline]
    trained = sum(w.numel for w in planned.weights()[0] if w.trained)
    assert found.timeline[-1][0] == trained, "every trained weight got a gradient"


def real_model(planned: Job, shape: Shape):
    import transformers

    from zerobook.modeling import enable_activation_checkpointing

    kind = transformers.AutoModelForSeq2SeqLM if planned.seq2seq else transformers.AutoModelForCausalLM
    config = planned.config
    options = {"attn_implementation": "eager"} if config.attn_implementation == "eager" else {}
    torch.manual_seed(0)
    model = kind.from_config(planned.model_config, **options)
    model.config.use_cache = False
    if config.activation_checkpointing:
        enable_activation_checkpointing(model)
    if planned.lora:
        model = planned._adapted(model)
    batch = {key: torch.ones_like(value) for key, value in planned._batch(shape).items()}
    if "attention_mask" in batch:
        batch["attention_mask"][0, -3:] = 0
    if "position_ids" in batch:
        batch["position_ids"] = torch.cat([torch.arange(shape.source // 2)] * 2).expand(shape.rows, -1).contiguous()
    return model.train(), batch


def test_saved_counts_each_storage_once_and_no_weights():
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(2, 4)
    with Saved(lambda: [weight]) as saved:
        y = x @ weight  # keeps x, and the weight, which does not count
        (y * y).sum()  # keeps y twice
    assert saved.bytes == x.nbytes + y.nbytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_casts_what_attention_takes(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), _kernels(device, Follow()), _autocast("cpu", torch.bfloat16):
        x = torch.ones(1, 2, 8, 4)
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16


def test_what_cuda_does_otherwise_is_traced(tiny):
    """A dropout's mask is a byte there, and autocast runs layer norms in fp32."""
    plain = made("causal_lm", tiny / "gpt2")
    dropping = Job(plain.config, type(plain.model_config)(**plain.model_config.to_dict() | {"resid_pdrop": 0.1}), "gpt2")
    shape, found = Shape(2, 48, 0, False), {}
    for name, planned, kernels, precision in [
        ("plain", plain, "cuda", "no"), ("cpu", dropping, "cpu", "no"), ("cuda", dropping, "cuda", "no"),
        ("autocast on cpu", plain, "cpu", "bf16"), ("autocast", plain, "cuda", "bf16"),
    ]:  # fmt: skip
        with planned.made(shape) as (model, batch):
            found[name] = trace(model, batch, planned.objective.loss, precision, kernels=kernels).saved
    elements = 2 * 48 * 64
    assert found["cuda"] - found["plain"] == 4 * elements, "two layers of two dropouts, a byte an element"
    assert found["cpu"] - found["plain"] == 4 * 4 * elements, "of four bytes on a CPU"
    assert found["autocast"] > found["autocast on cpu"]
    import torch.nn.functional as functional

    assert functional.dropout.__module__ == "torch.nn.functional" and torch.Tensor.pow is torch._C.TensorBase.pow


# --- known models on known machines
@pytest.mark.parametrize(
    "name, billions, tolerance",
    [("gpt2_xl", 1.5576, 1e-4), ("blenderbot_400m", 0.365, 0.01), ("falcon_40b", 41.3, 0.001), ("llama2_70b", 68.98, 1e-3),
     ("falcon_180b", 179, 0.005), ("llama_65b", 65.3, 0.002)],
)  # fmt: skip
def test_parameters_of_known_models(name, billions, tolerance):
    weights, groups = made("seq2seq_chatbot" if "blender" in name else "causal_lm", MODELS / f"{name}.json").weights()
    total = sum(w.numel for w in weights)
    assert total / 1e9 == pytest.approx(billions, rel=tolerance)
    assert sum(w.numel for group in groups for w in group) == total


def rows_of(recipe: str, model: str, where, files=None, **flags) -> dict[str, Row]:
    """The planned rows, the best first."""
    planned = made(recipe, MODELS / f"{model}.json", **flags)
    traced = Traced.of(planned, "cuda")
    sources = Resolved({key: f"flag --{key}" if key in flags else "default" for key in type(planned.config).model_fields})
    chosen = [file for file in FILES if files is None or file.stem in files]
    return {made.file: made for made in rank([row(file, traced, where, sources) for file in chosen])}


def test_gpt2_xl():
    on_large = rows_of("causal_lm", "gpt2_xl", cluster(gpus="8", gpu="a100-80gb"), mixed_precision="bf16",
                       per_device_train_batch_size=1)  # fmt: skip
    assert all(made.fits for made in on_large.values())
    assert next(iter(on_large)) in ("zero1", "ddp")
    alone = rows_of("causal_lm", "gpt2_xl", cluster(gpus="1", gpu="titan-rtx"), mixed_precision="fp16",
                    per_device_train_batch_size=1, block_size=128)  # fmt: skip
    # as published: out of memory at batch 1 without ZeRO, and trained by ZeRO-3 with offload
    assert not alone["single"].fits and not alone["ddp"].fits and alone["zero3_offload"].fits
    assert alone["single"].memory.total > 16 * 1.5576e9
    # where the states alone are too much, nobody waits for a trace
    assert alone["single"].bare and alone["single"].time is None and not alone["zero3_offload"].bare
    assert alone["zero3_offload"].memory.device["activations"] > 0 and alone["zero3_offload"].tokens_per_second > 0
    # the most that replicas of 16 bytes a parameter and buckets of 4 leave room for on 32 GB is 1.4 billion
    v100 = cluster(gpus="8", gpu="v100-32gb")
    flags = {"mixed_precision": "fp16", "per_device_train_batch_size": 1, "activation_checkpointing": True}
    on_v100 = rows_of("causal_lm", "gpt2_xl", v100, files=("ddp", "zero1"), **flags)
    assert not on_v100["ddp"].fits and on_v100["zero1"].fits, "1.5 billion: ZeRO-1 on 8 V100"


def test_blenderbot_as_published():
    """Two Titan RTX with 24 GB: DDP took 100 dialogues at a time, ZeRO-2 200."""
    two = cluster(gpus="2", gpu="titan-rtx", host_memory="60GB")
    flags = {"mixed_precision": "fp16", "max_source_length": 128, "max_target_length": 64}
    at_100 = rows_of(
        "seq2seq_chatbot", "blenderbot_400m", two, files=("ddp", "zero2"), per_device_train_batch_size=100, **flags
    )
    at_200 = rows_of(
        "seq2seq_chatbot", "blenderbot_400m", two, files=("ddp", "zero2"), per_device_train_batch_size=200, **flags
    )
    assert at_100["ddp"].fits and at_100["zero2"].fits
    assert not at_200["ddp"].fits and at_200["zero2"].fits
    assert next(iter(at_200)) == "zero2"
    assert at_200["ddp"].remedies, "and it says what would help"


def test_falcon_40b():
    eight = cluster(gpus="8", gpu="a100-80gb", host_memory="1TB")
    flags = {"mixed_precision": "bf16", "dtype": "bfloat16", "per_device_train_batch_size": 1}
    lora = rows_of("lora_finetune", "falcon_40b", eight, files=("ddp", "zero2", "zero3", "fsdp"), **flags)
    assert not lora["ddp"].fits and not lora["zero2"].fits and lora["zero3"].fits and lora["fsdp"].fits
    weights = sum(w.numel for w in made("causal_lm", MODELS / "falcon_40b.json").weights()[0])
    assert 2 * weights / 2**30 == pytest.approx(74, rel=0.05)  # printed for 40 x 10^9
    # every rank its own copy: DeepSpeed's estimator, and fp32 copies counted
    assert formulas.deepspeed_zero2(weights, 8, 1, offload=True).host > 1.5e12
    whole = rows_of("causal_lm", "falcon_40b", eight, files=("zero2",), mixed_precision="bf16", per_device_train_batch_size=1)
    assert whole["zero2"].memory.host_at_load == 4 * weights * 8 > 1.3e12
    assert any("host RAM while loading" in reason for reason in whole["zero2"].over)


@pytest.mark.full  # ten seconds a trace
def test_falcon_180b_and_llama_70b_and_65b():
    eight = cluster(gpus="8", gpu="a100-80gb", host_memory="1TB")
    flags = {"mixed_precision": "bf16", "dtype": "bfloat16", "per_device_train_batch_size": 1, "activation_checkpointing": True}
    falcon = rows_of("lora_finetune", "falcon_180b", eight, files=("zero2", "zero3", "fsdp_hybrid"), **flags)
    assert falcon["zero3"].fits and next(iter(falcon)) == "zero3"
    assert not falcon["zero2"].fits and not falcon["fsdp_hybrid"].fits
    nodes = cluster(gpus="8", nodes="4", gpu="a100-80gb", interconnect="400Gbps", host_memory="1TB")
    del flags["dtype"]
    llama = rows_of("causal_lm", "llama2_70b", nodes, files=("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_hybrid"), **flags)
    assert llama["zero3"].fits and llama["fsdp"].fits
    assert not any(llama[name].fits for name in ("ddp", "zero1", "zero2"))
    assert llama["fsdp_hybrid"].between < llama["fsdp"].between
    one = cluster(gpus="1", gpu="a6000")
    quantised = rows_of("lora_finetune", "llama_65b", one, files=("single", "zero3_offload"), load_in_4bit=True,
                        max_seq_length=512, **flags)  # fmt: skip
    assert quantised["single"].fits, "65 billion with QLoRA on 48 GB"
    assert any("load_in_4bit" in problem for problem in quantised["zero3_offload"].problems)


def test_what_the_paper_fits():
    """ZeRO's own claims, by its own formulas, on V100 with 32 GB."""
    assert formulas.model_states(10e9, 2, 32, mixed=True).total < 32e9
    assert formulas.model_states(1e12, 3, 512, mixed=True).total < 32e9
    assert formulas.model_states(1e12, 2, 512, mixed=True).total > 32e9


# --- machines
@pytest.mark.parametrize(
    "flags, said",
    [
        ({"gpus": "0"}, ["--gpus", "'0'", "1 or more"]),
        ({"gpus": "many"}, ["--gpus", "'many'"]),
        ({"gpu": "a1000"}, ["--gpu", "a1000", "a100-80gb"]),
        ({"gpu_memory": "80"}, ["--gpu_memory", "80GB"]),
        ({"gpu": "t4", "gpu_memory": "80GB"}, ["--gpu_memory", "80 GB", "16"]),
        ({"nodes": "2"}, ["--interconnect", "400Gbps"]),
        ({"nodes": "2", "interconnect": "fast"}, ["--interconnect", "'fast'"]),
        ({"gpu": "l4", "intra_node": "nvlink"}, ["--intra_node", "no NVLink", "pcie"]),
        ({"gpus": "0", "host_memory": "lots"}, ["--gpus", "--host_memory"]),
    ],
)
def test_impossible_machines_are_refused(flags, said):
    with pytest.raises(ConfigError) as caught:
        cluster(**flags)
    assert all(word in str(caught.value) for word in said), str(caught.value)


@pytest.mark.parametrize(
    "name, key",
    [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A10", "a10"), ("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA RTX A6000", "a6000"), ("Tesla V100-SXM2-32GB", "v100-32gb"),
     ("Radeon", None)],
)  # fmt: skip
def test_a_drivers_name_is_known(name, key):
    assert known(name) == (DEVICES[key] if key else None)


def test_machines():
    two = cluster(gpus="8", nodes="2", gpu_memory="80GB", interconnect="400Gbps", intra_node="pcie")
    assert two.ranks == 16 and two.network == 50e9 and two.link == 32e9 and two.device.flops == DEVICES["a100-80gb"].flops
    assert cluster(gpu="h200").device.memory == 141e9


@pytest.mark.launch
def test_measured_links_are_planned_with(tmp_path):
    file = tmp_path / "links.json"
    line = [sys.executable, "scripts/allreduce_bench.py", "--megabytes", "0.25", "1", "--rounds", "3", "--out", str(file)]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["ranks"] == 2 and found["backend"] == "gloo" and len(found["rows"]) == 6
    for measured in found["rows"]:
        worth = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}[measured["operation"]]
        assert measured["bus_bytes_per_s"] == pytest.approx(worth * measured["bytes"] / measured["seconds"])
    (largest,) = [r for r in found["rows"] if r["operation"] == "all_reduce" and r["bytes"] == 1_000_000]
    assert cluster(gpus="8", nodes="2", interconnect=str(file)).network == largest["bus_bytes_per_s"]
    file.write_text("{}")
    with pytest.raises(ConfigError, match="allreduce_bench"):
        cluster(gpus="8", nodes="2", interconnect=str(file))


@pytest.mark.launch
@pytest.mark.full
def test_the_gpu_bench_goes_through_on_a_cpu(tmp_path):
    line = [sys.executable, "benchmarks/gpu.py", "planner", "--device", "cpu", "--scale", "tiny", "--limit", "3"]
    line += ["--out", str(tmp_path / "gpu.json")]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["summary"] == {"cases": 3, "run": 3, "died": 0} and found["device"] == "CPU"
    assert {measured["model"] for measured in found["rows"]} == {"gpt2", "llama", "bart"}
    for measured in found["rows"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert measured["figures"][kind]["planned"] == measured["figures"][kind]["measured"]


# --- the command
def test_the_command_prints_every_strategy(tiny, tmp_path, capsys):
    target, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    line = ["plan", "--gpus", "2", "--gpu_memory", "24GB", "--json", str(target), "--png", str(picture), "--recommend"]
    assert main([*line, str(tiny / "llama"), "--mixed_precision", "bf16", "--block_size", "64"]) == 0
    said = capsys.readouterr().out
    assert all(file.stem in said for file in FILES) and "best: " in said and "recommended: accelerate_configs/" in said
    found = json.loads(target.read_text())
    assert len(found["rows"]) == len(FILES) and found["parameters"] == 106_816
    zero2 = next(made for made in found["rows"] if made["file"] == "zero2")
    assert zero2["fits"] and sum(zero2["memory"]["device"].values()) < 24e9
    assert zero2["memory"]["device"]["parameters"] == 2 * 106_816
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "line, said",
    [
        (["--gpus", "2"], ["no model is named"]),
        (["nowhere/at-all.json"], ["nowhere/at-all.json", "no model config"]),
        (["--formulas"], ["--parameters"]),
        (["--here", "--gpus", "0", "{tiny}/llama"], ["--gpus", "'0'", "1 or more"]),
        (["--formulas", "--parameters", "7.5GB"], ["--parameters", "'7.5GB'"]),
        (["{tiny}/llama", "--learning_rat", "1"], ["--learning_rat", "--learning_rate"]),
        (["{tiny}/llama", "--packing", "--group_by_length"], ["group_by_length"]),
    ],
)
def test_bad_input_is_refused(tiny, capsys, line, said):
    assert main(["plan", *(word.format(tiny=tiny) for word in line)]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in said), text


def test_an_unknown_class_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "of-tomorrow"}')
    with pytest.raises(ConfigError, match="of-tomorrow"):
        read_config(str(file))


def test_formulas_alone_print_the_papers_table(capsys):
    assert main(["plan", "--formulas", "--parameters", "7.5B", "--gpus", "64"]) == 0
    said = capsys.readouterr().out
    for name, total in (("DDP", "120"), ("ZeRO-1", "31.4"), ("ZeRO-2", "16.6"), ("ZeRO-3", "1.88")):
        assert next(line for line in said.splitlines() if line.startswith(name)).split()[4] == total
