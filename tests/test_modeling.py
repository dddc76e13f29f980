"""Models fit their attention, their data and their exported files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig
from tests.harness import launch, staged
from zerobook.checkpoint import store
from zerobook.data.store import Ragged, TokenStore, TokenWriter
from zerobook.data.views import Documents, PreparedRows
from zerobook.errors import ConfigError, LockedError
from zerobook.launch.resolve import Hardware
from zerobook.models.load import ORIGIN_FILE, absolute_positions, check_fit, choose_attention, fuse_tanh_gelu, load_model
from zerobook.models.save import save_model
from zerobook.strategy import Strategy

SMALL = {
    "bloom": dict(hidden_size=32, n_layer=1, n_head=2, vocab_size=64),
    "gemma2": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                   intermediate_size=32, vocab_size=64),
    "mamba": dict(hidden_size=32, num_hidden_layers=1, vocab_size=64, state_size=4),
    "gptj": dict(n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=128, vocab_size=64),
    "opt": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=32,
                max_position_embeddings=128, vocab_size=64),
}  # fmt: skip
"""Architectures without SDPA, and with tables of positions of their own, as small as they go."""


PLAN = SimpleNamespace(precision="no", copies_at_load=lambda processes: 0)


def alone(**more):
    return SimpleNamespace(
        rank=0, world_size=1, is_main=True, device=torch.device("cpu"), from_main=lambda value: value, barrier=lambda: None,
        plan=PLAN, initialising_complete_weights=lambda: Strategy.initialising_complete_weights(None),
        once_per_node=lambda work: work(), on_main=lambda work, takes_long=False: work(),
        load=lambda load, options: load(options), prepare_to_load=lambda new_model: None, **more,
    )  # fmt: skip


def config(**keys):
    return CausalLMConfig(dataset_name="x", **keys)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    for name, keys in SMALL.items():
        AutoConfig.for_model(name, **keys).save_pretrained(folder / name)
    return folder


def fresh(small, name):
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small / name))


@pytest.mark.parametrize("name", ["bloom", "gemma2", "mamba"])
def test_models_without_sdpa_load(small, tmp_path, name):
    model = load_model(config(config_name=str(small / name), output_dir=str(tmp_path)), alone())
    # Gemma 2 has no sdpa in the newest transformers, and had it before.
    assert type(model).__name__.lower().startswith(name)
    assert (model.config._attn_implementation == "sdpa") == type(model)._supports_sdpa


def attends(kind: str, hardware: Hardware, config=None, precision: str = "bf16", **keys) -> str | None:
    """Return the choice of `choose_attention` for a model whose config has ``keys``."""
    model_config = AutoConfig.for_model(kind, **keys)
    model_class = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    return choose_attention(config or causal(), model_config, model_class, hardware, precision)


def causal(**keys):
    return config(**({"model_name_or_path": "x"} | keys))


def test_attention_is_what_model_and_device_have(tiny):
    gpu, plain = Hardware(gpus=1, flash_attention=True), Hardware(gpus=1)
    assert attends("llama", gpu) == "flash_attention_2"
    assert attends("llama", gpu, precision="no") is None
    assert attends("llama", gpu, causal(dtype="bfloat16"), precision="no") is None, "what is trained is fp32"
    adapters = LoraConfig(dataset_name="x", model_name_or_path="x", dtype="auto")
    assert attends("llama", gpu, adapters, precision="no", dtype="bfloat16") == "flash_attention_2"
    assert attends("llama", gpu, adapters, precision="no", dtype="float32") is None
    assert attends("llama", plain) is None
    assert attends("llama", plain, causal(packing=True)) == "flex_attention"
    assert attends("gpt2", plain, causal(packing=True)) is None
    for without in ("bloom", "gpt_oss"):
        assert attends(without, gpu) is None
    assert choose_attention(causal(), AutoConfig.for_model("llama"), None, gpu, "bf16") is None, "code of its own"
    assert attends("llama", gpu, causal(attn_implementation="eager")) == "eager"
    loaded = load_model(causal(model_name_or_path=str(tiny / "llama")), alone())
    assert loaded.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "kind, keys, why",
    [
        ("bart", {}, "encoder-decoder"),
        ("pegasus", {}, "encoder-decoder"),
        ("gpt_neo", {}, "local window"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("gemma", {"head_dim": 512}, "heads of 512"),
    ],
)
def test_flash_attention_is_not_for_models_that_train_wrong_with_it(kind, keys, why):
    """Their classes say that they support it."""
    gpu = Hardware(gpus=1, flash_attention=True)
    assert attends(kind, gpu, **keys) is None
    with pytest.raises(ConfigError, match=why):
        attends(kind, gpu, causal(attn_implementation="flash_attention_2"), **keys)


def test_flash_attention_is_for_their_like():
    gpu = Hardware(gpus=1, flash_attention=True)
    assert attends("falcon", gpu) == attends("gemma", gpu) == "flash_attention_2"


@pytest.mark.parametrize(
    "kind, keys",
    [
        ("llama", {"attention_dropout": 0.1}),
        ("roberta", {}),  # 0.1 by itself, as attention_probs_dropout_prob
        ("dbrx", {"attn_config": {"attn_pdrop": 0.1}}),
    ],
)
def test_packed_rows_take_no_flex_attention_where_attention_drops_out(kind, keys):
    """transformers raises at the first training step there."""
    plain = Hardware(gpus=1)
    assert attends(kind, plain, causal(packing=True), **keys) is None
    with pytest.raises(ConfigError, match=r"flex_attention.*0\.1"):
        attends(kind, plain, causal(attn_implementation="flex_attention"), **keys)
    gpu = Hardware(gpus=1, flash_attention=True)
    assert attends(kind, gpu, causal(packing=True), **keys) == "flash_attention_2", "which has dropout"


def test_flash_attention_is_refused_before_an_fp32_model_loads(tiny):
    """A frozen model's own dtype is known only when its config is read."""
    asked = LoraConfig(
        dataset_name="x", model_name_or_path=str(tiny / "llama"), dtype="auto", attn_implementation="flash_attention_2"
    )
    with pytest.raises(ConfigError, match="fp32"):
        load_model(asked, alone())


def test_flex_attention_may_be_compiled_for_many_shapes(tiny):
    settings: Any = torch._dynamo.config
    with settings.patch(recompile_limit=8):
        load_model(causal(model_name_or_path=str(tiny / "llama"), attn_implementation="sdpa"), alone())
        assert settings.recompile_limit == 8
        load_model(causal(model_name_or_path=str(tiny / "llama"), attn_implementation="flex_attention"), alone())
        assert settings.recompile_limit > 30


@pytest.mark.parametrize("gpu, positions, multiple", [(True, 1024, 8), (True, 100, 1), (False, 1024, 1)])
def test_rows_are_not_padded_beyond_a_models_positions(monkeypatch, gpu, positions, multiple):
    from zerobook.data.collate import choose_causal_collator

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    model = SimpleNamespace(config=AutoConfig.for_model("gpt2", n_positions=positions))
    collate = choose_causal_collator(SimpleNamespace(pad_token_id=0), model, packed=False, length=positions)
    batch = collate([{"input_ids": [5] * 99, "labels": [5] * 99}])
    assert batch["input_ids"].shape[1] == -(-99 // multiple) * multiple


def test_a_hub_that_cannot_be_reached_is_left_to_what_loads(monkeypatch):
    """The model may be in the cache. The network's errors are of no class that Python knows."""
    import huggingface_hub

    from zerobook.utils import hub

    class ConnectError(Exception):
        pass

    asked = []

    def refuse(self, name, **options):
        asked.append(name)
        raise ConnectError("Connection refused")

    monkeypatch.setattr(hub, "check_reachable", lambda *name: None)  # it lets a model in the cache pass
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    hub.fetch("somebody/model", "main", weights=True)
    assert asked == ["somebody/model"]


def prepared(folder, documents):
    writer = TokenWriter(folder)
    ids = Ragged.join([np.asarray(d, np.int32) for d in documents])
    writer.append(ids, None, ids.lengths, begins=np.ones(len(documents), bool), extra={})
    writer.close({})
    part = PreparedRows((Documents(TokenStore(folder), np.arange(len(documents))),), "")
    return SimpleNamespace(train=part, held_out={})


def test_samples_longer_than_a_models_positions_are_refused(tiny, small, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "gpt2")
    gpt2, llama = (AutoModelForCausalLM.from_pretrained(tiny / name) for name in ("gpt2", "llama"))
    llama.config.max_position_embeddings = 128
    fits = prepared(tmp_path / "fits", [[1] * 5, [2] * 128])
    longer = prepared(tmp_path / "longer", [[1] * 129, [2] * 5])
    check_fit(gpt2, tokenizer, fits)
    check_fit(llama, tokenizer, longer)  # rotary positions have no end
    with pytest.raises(ConfigError, match=r"128 positions, and the longest sample has 129 tokens\. Lower --block_size"):
        check_fit(gpt2, tokenizer, longer)
    held_out = SimpleNamespace(train=fits.train, held_out={"x": longer.train})
    with pytest.raises(ConfigError, match="129 tokens"):
        check_fit(gpt2, tokenizer, held_out)
    assert [absolute_positions(fresh(small, name)) for name in SMALL] == [None, None, None, 128, 128]


def test_a_model_whose_file_lacks_weights_is_refused(tiny, tmp_path):
    """They would begin at other random values under another strategy. Fixed weights, and those of a vision tower, may lack."""
    from safetensors.torch import load_file, save_file

    for name, lost in (("llama", "model.layers.0.mlp.up_proj.weight"), ("gemma3_composite", "multi_modal_projector")):
        shutil.copytree(tiny / name, tmp_path / name)
        weights = load_file(tmp_path / name / "model.safetensors")
        kept = {key: tensor for key, tensor in weights.items() if lost not in key}
        assert len(kept) < len(weights)
        save_file(kept, tmp_path / name / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of .*layers\.0\.mlp\.up_proj\.weight"):
        load_model(config(model_name_or_path=str(tmp_path / "llama")), alone())
    load_model(config(model_name_or_path=str(tmp_path / "gemma3_composite")), alone())


def test_a_model_whose_library_is_not_installed_is_an_error_in_words(tiny, monkeypatch):
    def needs_timm(*_, **__):
        raise ImportError("\nTimmWrapperModel requires the timm library but it was not found in your environment.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", needs_timm)
    with pytest.raises(ConfigError, match="timm library"):
        load_model(config(model_name_or_path=str(tiny / "llama")), alone())


def test_ids_beyond_a_models_embeddings_are_refused_where_they_occur(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    model = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    rows = len(tokenizer)
    seen, unseen = prepared(tmp_path / "seen", [[1, rows]]), prepared(tmp_path / "unseen", [[1, rows - 1]])
    tokenizer.add_tokens(["<image>"])
    check_fit(model, tokenizer, unseen)  # as Gemma 3, whose tokenizer has a token for images that its text model lacks
    with pytest.raises(ConfigError, match=f"it has {rows + 1} tokens, .* uses id {rows}; .* embeddings for {rows}"):
        check_fit(model, tokenizer, seen)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(ConfigError, match=f"uses id {rows + 1}"):
        check_fit(model, tokenizer, unseen)


def test_a_start_from_scratch_is_of_the_config_and_seed_that_are_asked_for(tiny, tmp_path):
    def start(name, seed):
        return load_model(config(config_name=str(tiny / name), output_dir=str(tmp_path), seed=seed), alone())

    first, again, other = start("llama", 1), start("llama", 1), start("llama", 2)
    weights = [next(model.parameters()) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert type(start("gpt2", 2)).__name__ == "GPT2LMHeadModel"


def test_an_edited_config_is_another_start_and_a_moved_one_is_not(tiny, tmp_path):
    def start(name):
        model = load_model(config(config_name=str(tmp_path / name), output_dir=str(tmp_path / "run")), alone())
        return model.config.num_hidden_layers

    def edit(name, **values):
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    shutil.copytree(tiny / "llama", tmp_path / "mine")
    weights, note = (tmp_path / "run" / "initial_model" / name for name in ("model.safetensors", ORIGIN_FILE))
    assert start("mine") == 2
    edit("mine", num_hidden_layers=1)
    assert start("mine") == 1
    made = weights.stat().st_mtime_ns
    edit("mine", transformers_version="0.0")
    (tmp_path / "mine").rename(tmp_path / "moved")
    assert start("moved") == 1 and weights.stat().st_mtime_ns == made, "what it says is the same"
    edit("moved", num_hidden_layers=2)
    assert start("moved") == 2
    before = json.loads(note.read_text())
    assert before.pop("config_digest")
    note.write_text(json.dumps(before))  # as it was written before
    made = weights.stat().st_mtime_ns
    assert start("moved") == 2 and weights.stat().st_mtime_ns == made
    shutil.rmtree(tmp_path / "moved")
    assert start("moved") == 2, "a config that is gone is not asked"


@pytest.mark.parametrize("left", ["whole", "abandoned", "unreadable"])
def test_the_start_of_a_runs_checkpoints_is_not_replaced(tiny, tmp_path, left):
    def start(name, **more):
        asked = config(config_name=str(tiny / name), output_dir=str(tmp_path), resume_from_checkpoint="auto", **more)
        return load_model(asked, alone())

    start("llama", seed=1)
    with staged(tmp_path, 2):
        pass
    checkpoint = store.folder_of(tmp_path) / "step-000002"
    if left != "whole":
        checkpoint.rename(checkpoint.with_name(f"step-000002.{left}"))
    folder = tmp_path / "initial_model"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, seed, words in (
        ("gpt2", 1, r"config_name .*/llama.* this run has config_name .*/gpt2"),
        ("llama", 3, "made with seed 1, and this run has seed 3"),
    ):
        with pytest.raises(ConfigError, match=rf"1 checkpoint of this run.*{words}.*another --output_dir"):
            start(name, seed=seed)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    start("llama", seed=1)
    (folder / ORIGIN_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"made with config_name unknown.*this run has config_name .*/llama"):
        start("llama", seed=1)


def test_only_a_models_folder_that_a_run_made_is_replaced_and_only_by_its_holder(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_GRACE_S", 0)

    def start(run, seed):
        return load_model(config(config_name=str(tiny / "gpt2"), output_dir=str(run), seed=seed), alone())

    mine = tmp_path / "mine" / "initial_model"
    mine.mkdir(parents=True)
    (mine / "weights.bin").write_bytes(b"a person's")
    with pytest.raises(ConfigError, match=r"mine/initial_model was not made by a run.*--output_dir"):
        start(tmp_path / "mine", 1)
    assert [f.name for f in mine.iterdir()] == ["weights.bin"]

    words = "import sys; from pathlib import Path; from zerobook.checkpoint import store\n"
    words += "store.lock_until_exit(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    folder = store.folder_of(tmp_path / "other")
    (tmp_path / "other" / "initial_model").mkdir(parents=True)
    (tmp_path / "other" / "initial_model" / ORIGIN_FILE).write_text("{}")
    line = [sys.executable, "-c", words, str(folder)]
    other = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"process {other.pid}"):
            start(tmp_path / "other", 1)
        assert (tmp_path / "other" / "initial_model" / ORIGIN_FILE).read_text() == "{}"
    finally:
        other.communicate("", timeout=60)
    (tmp_path / "other" / "initial_model" / ORIGIN_FILE).write_text(
        "{"
    )  # a note that cannot be read was still written by a run
    start(tmp_path / "other", 1)
    assert json.loads((tmp_path / "other" / "initial_model" / ORIGIN_FILE).read_text())["seed"] == 1
    with pytest.raises(LockedError, match="uses this folder"), store.locked(folder):
        pass  # the lock is held until the process ends, not only while the model is made


@pytest.mark.parametrize("dtype, written", [("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "float32")])
def test_an_exported_model_says_what_its_tensors_are(tiny, tmp_path, dtype, written):
    """Whatever the strategy computes in: DeepSpeed casts the live model to bf16 and keeps the masters itself."""
    from safetensors.torch import load_file

    asked = config(model_name_or_path=str(tiny / "llama"), dtype=dtype, output_dir=str(tmp_path))
    model = load_model(asked, alone())
    model.config.dtype = model.dtype
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    strategy = alone(unwrapped=model, saved=lambda: ((n, n) for n in masters), get_tensor=lambda name: masters[name],
                     loaded_dtypes={}, buffers=dict)  # fmt: skip
    folder = save_model(strategy, AutoTokenizer.from_pretrained(tiny / "llama"), asked)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["dtype"] == written and saved["use_cache"] is True
    assert {str(t.dtype) for t in load_file(folder / "model.safetensors").values()} == {f"torch.{written}"}
    assert json.loads((folder / "generation_config.json").read_text()).get("use_cache", True) is True
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert again.dtype == getattr(torch, written) and again.config.use_cache


@pytest.mark.launch
@pytest.mark.full
def test_a_start_from_scratch_on_the_embedded_models_architecture(tiny, tmp_path, monkeypatch):
    """Converting it is every rank's business; on rank 0 alone, it waited for the others for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "zerobook").mkdir()
    (tmp_path / "zerobook" / "SmolLM2-135M-Instruct").symlink_to(tiny / "llama")
    run = launch(
        "ddp", 2, "causal_lm", tmp_path / "run", config_name="embedded:smollm2", tokenizer_name="embedded:smollm2",
        train_file=tiny / "few.jsonl", block_size=64, max_train_steps=2, per_device_train_batch_size=2,
        dtype="bfloat16",
    )  # fmt: skip
    assert len(run.steps) == 2
    assert run.event("run_start")["live"]["master_dtype"] == "float32"


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_fast", "gelu_accurate"])
def test_a_tanh_gelu_in_single_operations_becomes_one_kernel_of_the_same_values(activation):
    facts = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    config = AutoConfig.for_model("gpt2", **facts, activation_function=activation)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(24)[None]

    def loss_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    before = loss_and_gradients()
    fuse_tanh_gelu(model)
    after = loss_and_gradients()

    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-6)
    kernels = {type(block.mlp.act) for block in model.transformer.h}
    assert kernels == {torch.nn.GELU}
