"""Memory and operations of a step, found by running the model on tensors without contents."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.published.formulas import activations
from tests.planning import FILES, ROOT, logits_bytes, made, rows_of
from zerobook import head
from zerobook.cli.main import main
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.models.load import DTYPES, fuse_tanh_gelu
from zerobook.plan.advise import Request, advise
from zerobook.plan.hardware import cluster
from zerobook.plan.job import Job
from zerobook.plan.rows import Row, check_limits, plan_recipe
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.trace import (
    SavedTensors,
    StorageCounter,
    _simulate_attention,
    trace_evaluation,
    trace_step,
)
from zerobook.plan.traced_job import TracedJob, trace_job
from zerobook.training.recipe import BatchShape
from zerobook.training.recipe_file import recipe_class

CASES = {
    "llama": ("causal_lm", "llama", {}),
    "gpt2": ("causal_lm", "gpt2", {}),
    "falcon, whose heads share keys": ("causal_lm", "falcon", {}),
    "t5, whose bias is trained": ("seq2seq_chatbot", "t5", {}),
    "bart": ("seq2seq_chatbot", "bart", {}),
    "autocast": ("causal_lm", "llama", {"mixed_precision": "bf16"}),
    "checkpointing": ("causal_lm", "gpt2", {"activation_checkpointing": True}),
    "selective": ("causal_lm", "gpt2", {"activation_checkpointing": "selective"}),
    "selective adapters": ("lora_finetune", "llama", {"activation_checkpointing": "selective", "mixed_precision": "bf16"}),
    "every second layer": ("causal_lm", "llama", {"activation_checkpointing": "every:2"}),
    "both": ("causal_lm", "llama", {"activation_checkpointing": True, "mixed_precision": "bf16"}),
    "eager attention": ("causal_lm", "llama", {"attn_implementation": "eager"}),
    "packed": ("causal_lm", "llama", {"packing": True}),
    "joined": ("causal_lm", "llama", {"padding_free": True}),
    "lora, padded": ("lora_finetune", "llama", {}),
    "lora on a base in half precision": ("lora_finetune", "llama", {"mixed_precision": "bf16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_what_real_tensors_do(tiny, name):
    recipe, model, flags = CASES[name]
    lengths = {"causal_lm": {"block_size": 48}, "lora_finetune": {"max_seq_length": 48},
               "seq2seq_chatbot": {"max_source_length": 48, "max_target_length": 24}}  # fmt: skip
    planned = made(recipe, tiny / model, **flags, **lengths[recipe])
    shape = BatchShape(2, 48, 24 if planned.recipe.encoder_decoder else 0, planned.shape.padded)
    precision = flags.get("mixed_precision", "no")
    with planned.build(shape) as (fake, batch):
        found = trace_step(fake, batch, planned.objective.loss, precision, device="cpu")
    real, batch = real_model(planned, shape)
    gc.disable()  # what is freed by itself, and when, is what counts
    try:
        measured = trace_step(real, batch, planned.objective.loss, precision)
    finally:
        gc.enable()
    # a decoder without a mask: fake tensors cannot tell that there is nothing to mask
    exact = planned.model_config.model_type != "bart"
    assert (
        found.saved_bytes == measured.saved_bytes
        if exact
        else found.saved_bytes == pytest.approx(measured.saved_bytes, rel=0.02)
    )
    # T5's peak is in its attention, whose kernel with a trained bias is simulated
    close = exact and planned.model_config.model_type != "t5"
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001 if close else 0.02)
    assert found.work.flops == pytest.approx(measured.work.flops, rel=0.35)  # real attention is not counted on a CPU
    if flags.get("attn_implementation") == "eager":
        assert found.work.flops == measured.work.flops
    assert [done for done, _ in found.timeline] == [done for done, _ in measured.timeline]
    trained = sum(w.numel for w in planned.weights().weights if w.trained)
    assert found.timeline[-1][0] == trained, "every trained weight got a gradient"
    gc.disable()
    try:
        measured = trace_evaluation(real, batch, planned.objective.loss, precision)
    finally:
        gc.enable()
    with planned.build(shape) as (fake, batch):
        most = trace_evaluation(fake, batch, planned.objective.loss, precision, device="cpu")
    assert most == pytest.approx(measured, rel=0.001 if exact else 0.02) and most < found.peak_bytes


def test_packed_rows_need_no_mask_on_gpus_whose_attention_separates_the_samples(tiny):
    """Flash and flex attention compute what SDPA, which reads a mask of all pairs of tokens, computes and discards."""

    def trace(device: str, **flags):
        flags |= {"block_size": 48, "mixed_precision": "bf16", "per_device_train_batch_size": 2}
        return trace_job(made("causal_lm", tiny / "llama", **flags), "no", "bf16", device)

    packed = trace("cuda", packing=True)
    masked = trace("cuda", packing=True, attn_implementation="sdpa")

    assert (packed.work, packed.timeline) == (trace("cuda").work, trace("cuda").timeline)
    assert masked.work.flops > packed.work.flops and masked.peak_bytes > packed.peak_bytes
    assert trace("cuda without flash", packing=True).work.flops > packed.work.flops


def real_model(planned: Job, shape: BatchShape):
    import transformers

    from zerobook.models import recompute

    kind = transformers.AutoModelForSeq2SeqLM if planned.recipe.encoder_decoder else transformers.AutoModelForCausalLM
    config = planned.config
    options = {"attn_implementation": "eager"} if config.attn_implementation == "eager" else {}
    torch.manual_seed(0)
    dtype = DTYPES[config.loaded_dtype(config.mixed_precision or "no")]
    model = kind.from_config(planned.model_config, dtype=dtype, **options)
    model.config.use_cache = False
    fuse_tanh_gelu(model)
    recompute.enable(model, config.activation_checkpointing)
    if planned.config.trains_adapters:
        model = planned.recipe.adapt(model)
    head.install(model)
    batch = {key: torch.ones_like(value) for key, value in planned.recipe.example_batch(shape).items()}
    if "attention_mask" in batch:
        batch["attention_mask"][0, -3:] = 0
    if "position_ids" in batch:
        positions = torch.arange(batch["input_ids"].size(1)) % (shape.source // 2)
        batch["position_ids"] = positions.expand_as(batch["input_ids"]).contiguous()
    return model.train(), batch


def test_an_evaluation_of_more_rows_than_training_has_counts(tmp_path):
    """One row is trained, and more are evaluated: their logits alone are more than the step has."""
    # Granite scales its logits, so its output layer cannot compute the loss
    sizes = {"vocab_size": 50_257, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "granite", **sizes}))
    model, where = tmp_path / "small.json", cluster(gpus="1", gpu="a100-80gb")
    flags = {
        "mixed_precision": "bf16",
        "per_device_train_batch_size": 1,
        "max_seq_length": 512,
        "activation_checkpointing": True,
    }

    def row_with(**more) -> Row:
        return rows_of("lora_finetune", model, where, ("single",), **flags, **more)["single"]

    alike, none = (row_with(**more).memory for more in ({"per_device_eval_batch_size": 1}, {"validation_split_percentage": 0}))
    assert alike.total == none.total and "evaluation" not in none.moments
    assert alike.moments["evaluation"] < none.device.allocated
    row = row_with(per_device_eval_batch_size=24)
    more, logits = row.memory, 24 * 512 * 50257
    assert more.when == "evaluation" and more.device.allocated == more.moments["evaluation"] > none.device.allocated
    assert more.device.activations > 6 * logits, "bf16, and the fp32 copy that accelerate returns"
    assert more.device.gradients == 0
    between = cluster(gpu_memory=f"{(none.total + more.total) // 2}B")
    check_limits(row, made("lora_finetune", model, **flags).config, between)
    assert row.remedies == ["a smaller --per_device_eval_batch_size"]

    kind = recipe_class(str(ROOT / "recipes" / "lora_finetune.py"))
    config = kind.config_class(model_name_or_path=str(model), **flags | {"per_device_eval_batch_size": 24})
    files = [file for file in FILES if file.stem == "single"]
    request = Request(
        ROOT / "recipes" / "lora_finetune.py",
        kind(config),
        ConfigSources(dict.fromkeys(config.model_fields_set, "flag")),
        files,
    )
    best = advise(request, between).best
    assert best is not None and best.flags["per_device_eval_batch_size"] == 1


def test_saved_counts_each_storage_once_and_no_weights():
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(2, 4)
    with SavedTensors(lambda: [weight]) as saved:
        y = x @ weight  # keeps x, and the weight, which does not count
        (y * y).sum()  # keeps y twice
    assert saved.bytes == x.nbytes + y.nbytes


def test_what_was_saved_is_freed_as_the_backward_pass_goes(tiny):
    """Counting must not keep it: each layer's gradients come when the layers after it have freed theirs."""
    planned = made("causal_lm", tiny / "llama")
    planned.model_config.num_hidden_layers, planned.model_config.tie_word_embeddings = 8, False
    with planned.build(BatchShape(2, 48, 0, False)) as (model, batch):
        found = trace_step(model, batch, planned.objective.loss, "no", device="cpu")
    assert found.timeline[-1][1] < 0.5 * found.peak_bytes, "the embedding's gradient is the last"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_casts_what_attention_takes(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), _simulate_attention(device, StorageCounter()), torch.autocast("cpu", torch.bfloat16):
        x = torch.ones(1, 2, 8, 4)
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16


def test_what_cuda_does_otherwise_is_traced(tiny):
    """A dropout's mask is a byte there, and autocast runs layer norms in fp32."""
    plain = made("causal_lm", tiny / "gpt2")
    dropping = Job(plain.recipe, type(plain.model_config)(**plain.model_config.to_dict() | {"resid_pdrop": 0.1}), "gpt2")
    shape, found = BatchShape(2, 48, 0, False), {}
    # A tanh GELU of several operations, of which autocast runs one in fp32 on CUDA.
    unfused = replace(plain, is_plain=True)
    for name, planned, kernels, precision in [
        ("plain", plain, "cuda", "no"), ("cpu", dropping, "cpu", "no"), ("cuda", dropping, "cuda", "no"),
        ("autocast on cpu", unfused, "cpu", "bf16"), ("autocast", unfused, "cuda", "bf16"),
    ]:  # fmt: skip
        with planned.build(shape) as (model, batch):
            found[name] = trace_step(model, batch, planned.objective.loss, precision, device=kernels).saved_bytes
    elements = 2 * 48 * 64
    assert found["cuda"] - found["plain"] == 4 * elements, "two layers of two dropouts, a byte an element"
    assert found["cpu"] - found["plain"] == 4 * 4 * elements, "of four bytes on a CPU"
    assert found["autocast"] > found["autocast on cpu"]
    import torch.nn.functional as functional

    assert functional.dropout.__module__ == "torch.nn.functional" and torch.Tensor.pow is torch._C.TensorBase.pow


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_kernels_other_than_flash_attention_keep_repeated_keys(tiny, precision):
    """A T4 has none, and no GPU has one in fp32."""
    planned = made("causal_lm", tiny / "llama")
    saved_bytes = {}
    for gpu in ("t4", "a100-40gb"):
        with planned.build(BatchShape(2, 48, 0, False)) as (model, batch):
            trace = trace_step(model, batch, planned.objective.loss, precision, device=cluster(gpu=gpu).kernels)
        saved_bytes[gpu] = trace.saved_bytes
    with planned.build(BatchShape(2, 48, 0, False)) as (model, batch):
        shared = trace_step(model, batch, planned.objective.loss, precision, device="cpu").work
    # Two layers; keys and values of 2 heads with 16 numbers become 4 heads.
    repeated = 2 * 2 * (2 * 48) * 2 * 16 * (4 if precision == "no" else 2)
    expected = {"no": 0, "fp16": repeated}
    assert saved_bytes["t4"] - saved_bytes["a100-40gb"] == expected[precision]
    assert shared.attention == trace.work.attention


def test_inputs_that_wait_in_host_memory_are_counted_there(tiny):
    """On a GPU; a CPU's activations are there anyway."""
    found, shape = {}, BatchShape(2, 48, 0, False)
    for mode in ("full", "offload"):
        planned = made("causal_lm", tiny / "gpt2", activation_checkpointing=mode)
        for kernels in ("cpu", "cuda"):
            with planned.build(shape) as (model, batch):
                found[mode, kernels] = trace_step(model, batch, planned.objective.loss, "no", device=kernels)
    inputs = 2 * (2 * 48 * 64 * 4)
    assert [found[case].host_bytes for case in found] == [0, 0, 0, inputs]
    # Two inputs of 24 KiB, each in a pinned block of 32 KiB.
    assert found["offload", "cuda"].pinned_bytes == 2 * 32 * 1024
    assert found["full", "cuda"].saved_bytes - found["offload", "cuda"].saved_bytes == inputs
    assert found["offload", "cuda"].peak_bytes < found["full", "cuda"].peak_bytes
    assert found["offload", "cpu"].peak_bytes == found["full", "cpu"].peak_bytes


def saved(tmp_path: Path, facts: dict, cast: str, **flags) -> tuple[float, float]:
    """(bytes that a GPU would keep for the backward pass, what the formula says) of 4 rows of 256 tokens."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts))
    planned = made("causal_lm", file, **flags)
    with planned.build(BatchShape(4, 256, 0, False), cast=cast) as (model, batch):
        found = trace_step(model, batch, planned.objective.loss, "no", device="cuda")
    fused = flags.get("attn_implementation") != "eager"
    said = activations(8, 4, 256, 512, 8, element=4 if cast == "no" else 2, fused=fused, checkpointing=False)
    # of the head the formula knows nothing: the logits, once as computed and once in fp32 for the loss
    return found.saved_bytes - 4 * 256 * facts["vocab_size"] * 4, said


GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 512,
        "bos_token_id": 1, "eos_token_id": 1, "activation_function": "gelu_pytorch_tanh"}  # fmt: skip

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
         "intermediate_size": 1376, "vocab_size": 512}  # fmt: skip


@pytest.mark.parametrize(
    "changes, cast, flags, low, high",
    [
        ({}, "bf16", {}, 0.96, 1.04),
        ({}, "no", {}, 0.96, 1.04),
        ({}, "bf16", {"attn_implementation": "eager"}, 0.96, 1.04),
        # two bytes of the paper's 34 are masks of dropout
        ({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, "bf16", {}, 0.93, 0.98),
        # written as single operations in transformers, and one kernel in a run
        ({"activation_function": "gelu_new"}, "bf16", {}, 0.96, 1.04),
    ],
)
def test_the_formula_of_activations_checks_the_trace(tmp_path, changes, cast, flags, low, high):
    """The paper's 34 bytes a token and width, and 5 a head and pair of tokens, for a model of the kind that it was made for."""
    traced, said = saved(tmp_path, GPT2 | changes, cast, **flags)
    assert low < traced / said < high


def test_a_gated_mlp_keeps_more_than_the_formula(tmp_path):
    traced, said = saved(tmp_path, LLAMA, "bf16")
    assert 1.3 < traced / said < 1.5


def test_a_checkpointed_model_peaks_where_the_formula_says(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2))
    planned = made("causal_lm", file, activation_checkpointing=True)
    with planned.build(BatchShape(4, 256, 0, False), cast="bf16") as (model, batch):
        found = trace_step(model, batch, planned.objective.loss, "no", device="cuda")
    said = activations(8, 4, 256, 512, 8, fused=True, checkpointing=True) + logits_bytes(4, 256, 512)
    assert found.peak_bytes == pytest.approx(said, rel=0.15)


def mixture(tmp_path: Path, recipe: str = "causal_lm", changes: dict | None = None, **flags) -> Job:
    file = tmp_path / "mixtral.json"
    file.write_text(json.dumps(MIXTRAL | (changes or {})))
    return made(recipe, file, **flags)


MIXTRAL = {"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
           "tie_word_embeddings": False}  # fmt: skip


def operations(planned: Job, shape: BatchShape, cast: str, precision: str, implementation: str = "grouped_mm") -> float:
    with planned.build(shape, cast=cast) as (model, batch):
        assert model.config._experts_implementation == "grouped_mm", "what transformers takes by itself"
        model.config._experts_implementation = implementation
        found = trace_step(model, batch, planned.objective.loss, precision, device="cuda")
    assert not found.uncounted
    return found.work.flops


@pytest.mark.parametrize(
    "cast, precision, implementation",
    [
        ("bf16", "no", "grouped_mm"),
        ("fp16", "no", "grouped_mm"),
        ("no", "bf16", "grouped_mm"),
        ("bf16", "no", "batched_mm"),
        pytest.param("no", "no", "grouped_mm", marks=pytest.mark.full),
        pytest.param("fp16", "no", "batched_mm", marks=pytest.mark.full),
        pytest.param("no", "no", "batched_mm", marks=pytest.mark.full),
        pytest.param("no", "bf16", "batched_mm", marks=pytest.mark.full),
    ],
)
def test_experts_cost_what_their_tokens_do(tmp_path, cast, precision, implementation):
    """By the formula: 6 for each parameter that a token meets, and 8 with checkpointing."""
    shape = BatchShape(2, 128, 0, False)
    tokens, attention = 2 * 128, 2 * 2 * 4 * 128**2 * 32 * 2  # of both layers, half of the pairs

    def layers(experts: int, met: int) -> int:
        return 2 * (3 * 128**2 + 128 * experts + met * 3 * 128 * 256)

    for experts, met in [(8, 2), (8, 4), (16, 2)]:
        changes = {"num_local_experts": experts, "num_experts_per_tok": met}
        found = operations(mixture(tmp_path, changes=changes), shape, cast, precision, implementation)
        assert found == pytest.approx(6 * (layers(experts, met) + 512 * 128) * tokens + 3.5 * attention, rel=0.01)
    again = operations(mixture(tmp_path, activation_checkpointing=True), shape, cast, precision, implementation)
    assert again == pytest.approx((8 * layers(8, 2) + 6 * 512 * 128) * tokens + 4.5 * attention, rel=0.01)


def test_a_mixtral_8x7b_computes_with_12_9_billion(tmp_path):
    """A token uses two of eight experts: 12.88 of 46.7 billion parameters, as published, less the embedding."""
    changes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 8, "vocab_size": 32000}  # fmt: skip
    found = operations(mixture(tmp_path, changes=changes), BatchShape(1, 1024, 0, False), "bf16", "no")
    assert found == pytest.approx(6 * 12.88e9 * 1024 + 3.5 * 32 * 2 * 32 * 1024**2 * 128, rel=0.02)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_trace_of_experts_is_what_real_tensors_do(tmp_path, precision):
    """autocast leaves products in groups in the weights' fp32, which torch has no shapes for, and kernels."""
    planned, shape = mixture(tmp_path), BatchShape(2, 48, 0, False)
    with planned.build(shape) as (fake, batch):
        found = trace_step(fake, batch, planned.objective.loss, precision, device="cpu")
    real, batch = real_model(planned, shape)
    gc.disable()
    try:
        measured = trace_step(real, batch, planned.objective.loss, precision)
    finally:
        gc.enable()
    assert found.saved_bytes == measured.saved_bytes and found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
    assert found.work.flops == pytest.approx(measured.work.flops, rel=0.1)  # real attention is not counted on a CPU


def test_products_without_a_law_are_named():
    with StorageCounter() as follow:
        torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8))
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert follow.uncounted == {"aten::_int_mm"} and follow.work.flops == 2 * 2 * 3 * 4


def test_a_trace_that_fails_is_the_problem_of_its_rows(tmp_path, capsys, monkeypatch):
    """And not of the plan, nor a traceback."""
    import logging

    from zerobook.plan import trace as traces

    mixture(tmp_path)
    plan = ["plan", "--gpus", "8", "--gpu", "a100-80gb", "--strategies", "single,ddp,zero3,fsdp"]
    model = [str(tmp_path / "mixtral.json"), "--mixed_precision", "bf16", "--block_size", "64"]
    assert main([*plan, "--json", "-", *model]) == 0
    rows = {row["file"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert all(row["fits"] for row in rows.values())
    said: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = said.append

    def refuse_fp32(func, a, b, *args, **kwargs):
        """Let torch's own shape rule refuse these products: no version of it takes fp64."""
        if a.dtype == torch.float32:
            a, b = a.double(), b.double()
        return func(a, b, *args, **kwargs)

    monkeypatch.setattr(traces, "_run_grouped_product", refuse_fp32)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(listener)
    try:
        assert main([*plan, "--json", str(tmp_path / "plan.json"), *model]) == 0
    finally:
        log.removeHandler(listener)
    assert not said
    text, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    assert "ddp cannot be planned" in text and "not traced" in text
    for row in found["rows"]:
        failed = row["file"] in ("single", "ddp")  # whose weights are fp32
        assert row["untraced"] is failed and row["fits"] is not failed
        assert failed == any("float64" in problem for problem in row["problems"])
    monkeypatch.setattr(traces, "_run_grouped_product", lambda *_, **__: 1 / 0)
    assert main([*plan, *model]) == 2
    assert "division by zero" in capsys.readouterr().err


def test_code_that_looks_at_values_is_told_in_words(tmp_path):
    planned = mixture(tmp_path)
    planned.model_config._experts_implementation = "eager"
    traced = TracedJob.of(planned, "cuda")
    with pytest.raises(ConfigError, match="reads the values of tensors, as a loop over experts does"):
        traced.trace(ShardingSpec(kind="single", name="", ranks=1, ranks_per_node=1))
    assert traced.failure is not None


def test_a_model_is_built_once_for_all_micro_batches_and_traced_as_alone(tiny, monkeypatch):
    builds = []
    build = Job.build_on_meta

    def build_and_count(job, precision=None):
        builds.append(job)
        return build(job, precision)

    jobs = {rows: made("causal_lm", tiny / "llama", per_device_train_batch_size=rows, block_size=64) for rows in (4, 2)}
    sharding = ShardingSpec(kind="single", name="single", ranks=1, ranks_per_node=1)
    alone = {rows: TracedJob.of(job, "cuda").trace(sharding) for rows, job in jobs.items()}
    monkeypatch.setattr(Job, "build_on_meta", build_and_count)
    models: dict[str, TracedJob] = {}
    for rows, job in jobs.items():
        sources = ConfigSources(dict.fromkeys(type(job.config).model_fields, "default"))
        traced, _ = plan_recipe(job.recipe, sources, cluster(), [], models)
        trace = traced.trace(sharding)
        assert (trace.timeline, trace.work) == (alone[rows].timeline, alone[rows].work)
    assert len(builds) == 1 and alone[4].work != alone[2].work
