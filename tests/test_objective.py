"""Objectives and encoders of one's own: weights, metrics, padding, fingerprints; and `zerobook.train` from Python."""

from __future__ import annotations

import json
import signal

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

import zerobook
from recipes.causal_lm import CausalLM, CausalLMConfig
from recipes.seq2seq_chatbot import Seq2SeqChatbot
from tests.alone import train
from tests.versions import needs_transformers
from zerobook.data.collate import CausalCollator
from zerobook.data.prepare import Library
from zerobook.data.templates import CausalEncoder, Encoded
from zerobook.errors import ConfigError, DataError
from zerobook.models.load import open_tokenizer
from zerobook.objective import NextToken


def flags(tiny, **more):
    return dict(model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", block_size=64, max_train_steps=2,
                logging_steps=2, validation_split_percentage=0, **more)  # fmt: skip


class Sometimes(NextToken):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch), {"extra": torch.zeros(())} if self.calls > 1 else {"other": torch.zeros(())}


class WithSometimes(CausalLM):
    def objective(self):
        return Sometimes()


def test_metrics_that_come_and_go_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"Sometimes.loss returned the metrics \['other'\] in one step and \['extra'\]"):
        train(tmp_path / "run", WithSometimes, **flags(tiny))


class Nothing(NextToken):
    def weight(self, row):
        return 0


class Shares(CausalEncoder):
    def __init__(self, tokenizer, share, has_extra=lambda index: False):
        super().__init__(tokenizer, length=64)
        self.share = share
        self.has_extra = has_extra

    def encode(self, samples):
        documents = []
        for index, row in enumerate(super().encode(samples)):
            extra = {"more": row.input_ids} if self.has_extra(index) else {}
            documents.append(Encoded(row.input_ids, row.labels, extra=extra))
        return documents


@pytest.fixture
def tokenizer(tiny):
    return open_tokenizer(str(tiny / "llama"), template=None, revision="main", trust_remote_code=False)[0]


def library(tiny, tmp_path, tokenizer, encoder=None, objective=None, file="few.jsonl"):
    config = CausalLMConfig(model_name_or_path="x", train_file=str(tiny / file), cache_dir=str(tmp_path), block_size=64)
    return Library(config, tokenizer, encoder or CausalEncoder(tokenizer, length=64), objective or NextToken())


def test_a_block_of_text_that_weighs_nothing_is_refused(tiny, tmp_path, tokenizer):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "word " * 200}) + "\n" for _ in range(9)))
    books = library(tmp_path, tmp_path / "cache", tokenizer, objective=Nothing(), file="text.jsonl")
    with pytest.raises(ConfigError, match=r"Nothing.weight gave 0 for a block of 64 tokens"):
        books.open(books.tokenize(1))


def test_a_setting_of_an_encoder_is_part_of_what_is_prepared(tiny, tmp_path, tokenizer):
    names = set()
    for share in (0.5, 0.9, 0.5):
        ((train, _),) = library(tiny, tmp_path, tokenizer, Shares(tokenizer, share)).tokenize(1)
        names.add(train)
    assert len(names) == 2, "one folder for each share"


@pytest.mark.parametrize(
    "has_extra, message",
    [
        (lambda index: index > 0, r"the arrays \[\] and others with \['more'\]"),
        (lambda index: index == 0, r"the arrays \['more'\] and others with \[\]"),
    ],
)
def test_arrays_of_some_documents_alone_are_refused(tiny, tmp_path, tokenizer, has_extra, message):
    with pytest.raises(DataError, match=message):
        library(tiny, tmp_path, tokenizer, Shares(tokenizer, 0.5, has_extra)).tokenize(1)


def test_a_class_without_a_file_is_refused(tiny, tmp_path, tokenizer):
    namespace: dict = {"CausalEncoder": CausalEncoder, "__name__": "__typed__"}
    exec("class Typed(CausalEncoder): pass", namespace)
    with pytest.raises(ConfigError, match="Typed is not defined in a file"):
        library(tiny, tmp_path, tokenizer, namespace["Typed"](tokenizer, length=64)).tokenize(1)


# --- a mixture of experts
def mixture():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    config = MixtralConfig(
        vocab_size=64, num_local_experts=4, router_aux_loss_coef=0.5, output_router_logits=True, **sizes
    )  # fmt: skip
    return MixtralForCausalLM(config).train()


def test_the_loss_that_balances_experts_is_trained_and_leaves_out_padding():
    model, objective = mixture(), NextToken()
    rows = [{"input_ids": list(range(3, 27)), "labels": list(range(3, 27))}, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
    assert objective.needs_attention_mask(model) and not NextToken(0).needs_attention_mask(model)
    assert not objective.needs_attention_mask(model.eval()), "evaluations leave the loss out"
    model.train()
    batch = CausalCollator(0)(rows)
    loss, metrics = objective.loss(model, dict(batch))
    plain = NextToken(0).loss(model, dict(batch))
    supervised = 23 + 2
    assert loss.item() == pytest.approx(plain.item() + 0.5 * metrics["router_aux_loss"].item(), rel=1e-6)
    expected = model(**batch, output_router_logits=True)
    assert metrics["router_aux_loss"].item() == pytest.approx(supervised * expected.aux_loss.item(), rel=1e-6)
    loss.backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)


needs_router_loss = needs_transformers("5.20", "gives no router loss of DBRX")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("Dbrx", {
            "vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 2, "output_router_logits": True,
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.5},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        }, marks=needs_router_loss),
        ("JetMoe", {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
            "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "aux_loss_coef": 0.5,
            "output_router_logits": True,
        }),
        ("Olmoe", {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5,
            "output_router_logits": True, "pad_token_id": 0, "eos_token_id": 1,
        }),
    ],
)  # fmt: skip
def test_the_factor_has_another_name_in_other_models(name, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    batch = CausalCollator(0)([{"input_ids": list(range(3, 27)), "labels": list(range(3, 27))}])
    loss, metrics = NextToken().loss(model, dict(batch))
    own = model(**batch, output_router_logits=True)  # transformers' own loss is a mean
    assert loss.item() / 23 == pytest.approx(own.loss.item(), rel=1e-5)
    assert 1 <= metrics["expert_load"].item() / 23 <= 2


def test_a_run_of_a_mixture_keeps_the_mask_and_logs_the_router(tiny, tmp_path):
    seen = []

    class Watched(NextToken):
        def loss(self, model, batch):
            seen.append("attention_mask" in batch)
            return super().loss(model, batch)

    class Experts(CausalLM):
        def objective(self):
            return Watched(self.config.router_aux_loss_coef)

    folder = tmp_path / "mixture"
    given = flags(tiny) | {"tokenizer_name": tiny / "llama", "model_name_or_path": folder}
    model = mixture()
    model.resize_token_embeddings(512)
    model.save_pretrained(folder)
    run = train(tmp_path / "run", Experts, **given)
    assert all(seen) and all(step["metrics"]["router_aux_loss"] > 0 for step in run.steps)
    assert all(1 <= step["metrics"]["expert_load"] <= 2 for step in run.steps), "two of four experts take all tokens at most"
    seen.clear()
    run = train(tmp_path / "off", Experts, router_aux_loss_coef=0, **given)
    assert not any(seen) and "metrics" not in run.steps[0]


def test_a_dense_model_has_no_experts_to_balance(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef: it is 0.01, and no loss that balances experts"):
        train(tmp_path / "run", router_aux_loss_coef=0.01, **flags(tiny))


def test_no_encoder_decoder_balances_its_experts(tiny, tmp_path):
    transformers.SwitchTransformersConfig(vocab_size=512).save_pretrained(tmp_path / "switch")
    given = flags(tiny) | {"model_name_or_path": tmp_path / "switch", "tokenizer_name": tiny / "t5"}
    given = {key: value for key, value in given.items() if key != "block_size"}
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        train(tmp_path / "run", Seq2SeqChatbot, router_aux_loss_coef=0.01, **given)


# --- from Python
def test_train_runs_again_in_one_process(tiny, tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    AcceleratorState._reset_state(reset_partial_state=True)
    given = {key: str(value) if key.endswith(("path", "file")) else value for key, value in flags(tiny).items()}
    given |= {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 2}
    first = zerobook.train(CausalLM(CausalLMConfig(**given)))
    assert first.step == 2 and handlers == {number: signal.getsignal(number) for number in handlers}
    longer = given | {"max_train_steps": 4, "resume_from_checkpoint": "auto", "mixed_precision": "bf16"}
    assert zerobook.train(CausalLM(CausalLMConfig(**longer))).step == 4
    with pytest.raises(ConfigError, match="no training data is named"):
        zerobook.train(CausalLM(CausalLMConfig(model_name_or_path="x")))
