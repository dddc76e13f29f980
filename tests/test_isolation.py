"""Samples that share a row do not see each other."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zerobook import head
from zerobook.constants import IGNORE
from zerobook.data.collate import CausalCollator, PackedCollator, to_device
from zerobook.errors import ConfigError
from zerobook.models.isolation import choose_isolating_collator, choose_packed_collator
from zerobook.objective import causal_lm_loss

A, B = list(range(10, 19)), list(range(30, 43))


def packed(*samples):
    labels = [[IGNORE, *s[1:]] for s in samples]
    positions = [np.arange(len(s)) for s in samples]
    return {"input_ids": np.concatenate(samples), "labels": np.concatenate(labels), "position_ids": np.concatenate(positions)}


def load(tiny, name, attention):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / name, attn_implementation=attention, dtype=torch.float32)
    model.config.use_cache = False  # as in training
    return model


def run(model, row, start, flatten=False):
    """(logits, loss, gradients) of the tokens of B, which stands at ``start``."""
    batch = choose_packed_collator(strategy(model), PackedCollator(0, pad_to_multiple_of=8, flatten=flatten))([row, packed(A)])
    batch = to_device(batch, model.device)
    labels = batch.pop("labels")
    labels[0, :start] = labels[0, start + len(B) :] = labels[1:] = IGNORE
    model.zero_grad()
    logits = model(**batch).logits
    loss = causal_lm_loss(logits, labels)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits[0, start : start + len(B)].detach(), loss.item(), gradients.clone()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_another_neighbour_changes_nothing(tiny, name, attention):
    model = load(tiny, name, attention)
    logits, loss, gradients = run(model, packed(A, B), len(A))
    others = [run(model, packed([50 + i for i in range(len(A))], B), len(A)), run(model, packed(B), 0)]
    for other_logits, other_loss, other_gradients in others:
        assert (logits - other_logits).abs().max() < 1e-5
        assert abs(loss - other_loss) < 1e-5 * loss
        assert (gradients - other_gradients).abs().max() < 1e-5 * gradients.abs().max()
    # the control: one running text of the same tokens does see what stands before
    joined = packed(A, B) | {"position_ids": np.arange(len(A) + len(B))}
    assert (logits - run(model, joined, len(A))[0]).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: flash and flex attention need a GPU")
@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_another_neighbour_changes_nothing_on_a_gpu(tiny, attention):
    """In bf16, so within its rounding; the control differs by far more."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="not run: flash-attn is not installed")
    model = load(tiny, "llama", attention).to("cuda", torch.bfloat16)
    flat = attention == "flash_attention_2"
    logits, loss, gradients = run(model, packed(A, B), len(A), flat)
    for other in (packed([50 + i for i in range(len(A))], B), packed(B)):
        start = len(other["input_ids"]) - len(B)
        other_logits, other_loss, other_gradients = run(model, other, start, flat)
        assert (logits - other_logits).abs().max() < 2e-2 * logits.abs().max()
        assert abs(loss - other_loss) < 1e-2 * loss
        assert (gradients - other_gradients).abs().max() < 2e-2 * gradients.abs().max()
    joined = packed(A, B) | {"position_ids": np.arange(len(A) + len(B))}
    assert (logits - run(model, joined, len(A), flat)[0]).abs().max() > 5e-2 * logits.abs().max()


def strategy(model):
    return SimpleNamespace(
        model=model,
        unwrapped=model,
        device=model.device,
        plan=SimpleNamespace(precision="no"),
        sum_over_ranks=lambda t: t,
        release_gathered_parameters=lambda: None,
        is_main=True,
        world_size=1,
    )


def test_the_measurement_computes_no_logits_of_complete_rows(tiny, monkeypatch):
    """With flex attention rows are as long as in training, which never has all of their logits."""
    model = load(tiny, "llama", "sdpa")
    assert head.install(model) is not None
    lengths = []
    forward = model.forward

    def recorded(*args, **kwargs):
        output = forward(*args, **kwargs)
        lengths.append((kwargs["input_ids"].shape[1], output.logits.shape[1]))
        return output

    monkeypatch.setattr(model, "forward", recorded)
    choose_isolating_collator(strategy(model), PackedCollator(0, pad_to_multiple_of=8, min_length=64))
    rows, logits = zip(*lengths, strict=True)
    assert min(rows) >= 64 and max(logits) < 64
    # The head computes complete rows again.
    assert forward(input_ids=torch.zeros(1, 64, dtype=torch.int64)).logits.shape[1] == 64


def ignoring_positions(model):
    """The model, which does not look at ``position_ids``, as Falcon before transformers 5.24."""
    without = lambda _, args, options: (args, options | {"position_ids": None})  # noqa: E731
    model.register_forward_pre_hook(without, with_kwargs=True)
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_is_measured_before_it_is_trained(tiny, attention):
    model = load(tiny, "llama", attention).train()
    collate = PackedCollator(0)
    assert choose_packed_collator(strategy(model), collate) is collate
    assert model.training, "it is left as it was"
    without_positions = ignoring_positions(load(tiny, "falcon", attention))
    expected = torch.bool if attention == "sdpa" else torch.float32
    assert choose_packed_collator(strategy(without_positions), collate).mask is expected


def test_flex_attention_that_cannot_train_gives_way_to_sdpa_unless_it_was_named(tiny, capsys):
    """On a CPU, flex attention has a forward pass alone, as on a GPU whose shared memory is too small for the backward pass."""
    named = load(tiny, "llama", "flex_attention").train()
    chosen = load(tiny, "llama", "flex_attention").train()

    with pytest.raises(ConfigError, match=r"flex_attention.*--attn_implementation"):
        choose_packed_collator(strategy(named), PackedCollator(0))
    collate = choose_packed_collator(strategy(chosen), PackedCollator(0), chooses_attention=True)

    assert chosen.config._attn_implementation == "sdpa"
    assert "WARNING: flex attention does not run" in capsys.readouterr().out
    assert choose_packed_collator(strategy(chosen), collate) is collate
    assert all(weight.grad is None for weight in chosen.parameters())


def test_what_cannot_isolate_is_refused(tiny):
    class Ones(PackedCollator):
        """Imitates a collator that does not know of packs."""

        def __call__(self, rows):
            batch = super().__call__(rows)
            return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    model = load(tiny, "llama", "sdpa")
    with pytest.raises(ConfigError, match="packing: in LlamaForCausalLM with attn_implementation sdpa"):
        choose_packed_collator(strategy(model), Ones(0))
    falcon = ignoring_positions(load(tiny, "falcon", "sdpa"))
    falcon.config.sliding_window = 8  # a mask spelt out would do away with it
    with pytest.raises(ConfigError, match="packing: in FalconForCausalLM"):
        choose_packed_collator(strategy(falcon), PackedCollator(0))


def deep(kind, **changes):
    """A narrow model of 24 layers in bf16."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes | changes), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    return model


def test_rounding_in_a_deep_model_is_no_leak():
    """In bf16 this one's logits differ by 13 % from those of the sample alone, whose attention sums in another order."""
    from transformers import MixtralConfig

    model = deep(MixtralConfig, initializer_range=0.1, num_local_experts=8)
    collate = PackedCollator(0)
    assert choose_packed_collator(strategy(model), collate) is collate


def test_a_faint_leak_in_bf16_is_found():
    from transformers import LlamaConfig

    model = deep(LlamaConfig)

    def carry(layer, args):
        hidden = args[0].clone()
        hidden[:, 12:] += 0.01 * hidden[:, :1]
        return (hidden, *args[1:])

    model.model.layers[-1].register_forward_pre_hook(carry)
    with pytest.raises(ConfigError, match="packing: in LlamaForCausalLM"):
        choose_packed_collator(strategy(model), PackedCollator(0))


SIZES = {"hidden_size": 32, "vocab_size": 512, "max_position_embeddings": 64}


def test_joined_rows_of_a_model_that_looks_ahead_get_a_mask():
    """In one joined row such a model sees every change, so all differences would look like noise."""
    from transformers import BertConfig, BertLMHeadModel

    model = BertLMHeadModel(BertConfig(**SIZES, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)).eval()
    collate = choose_packed_collator(strategy(model), PackedCollator(0, flatten=True), "padding_free")
    assert collate.flatten
    with torch.no_grad():
        logits = [
            model(**to_device({key: value for key, value in collate([packed(A), packed(other)]).items() if key != "labels"},
                              torch.device("cpu"))).logits[0, : len(A)]
            for other in (B, B[::-1])
        ]  # fmt: skip
    assert torch.equal(*logits)


def test_joined_rows_are_refused_where_the_model_counts_places():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(**SIZES, num_layers=2, num_heads=4, attention_types=[[["global"], 2]], window_size=16)
    with pytest.raises(ConfigError, match="padding_free: GPTNeoForCausalLM has the mask"):
        choose_packed_collator(strategy(GPTNeoForCausalLM(config)), PackedCollator(0, flatten=True), "padding_free")


@pytest.mark.parametrize("key", ["attention_chunk_size", "attn_temperature_tuning"])
def test_joined_rows_are_refused_where_attention_depends_on_the_place(tiny, key):
    model = load(tiny, "llama", "sdpa")
    setattr(model.config, key, 8)
    with pytest.raises(ConfigError, match=f"padding_free: .* {key}"):
        choose_packed_collator(strategy(model), PackedCollator(0, flatten=True), "padding_free")


def test_joined_rows_of_experts_have_no_padding(tiny):
    collate = PackedCollator(0, 8, flatten=True)
    assert choose_isolating_collator(strategy(load(tiny, "llama", "sdpa")), collate, keep_mask=True).pad_to_multiple_of == 1


def test_positions_that_run_on_are_refused(tiny):
    model = load(tiny, "gpt2", "sdpa")
    table = model.transformer.wpe
    table.register_forward_pre_hook(lambda _, args: (torch.arange(args[0].size(-1)).expand_as(args[0]),))
    with pytest.raises(ConfigError, match="positions do not begin anew"):
        choose_packed_collator(strategy(model), PackedCollator(0))


def test_logits_that_are_no_numbers_are_not_taken_for_isolated(tiny):
    model = load(tiny, "llama", "sdpa")
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="packing"):
        choose_packed_collator(strategy(model), PackedCollator(0))


def test_a_model_whose_positions_come_from_the_mask_is_refused():
    """Bloom takes a sample's positions from a mask of padding, which tells no samples apart."""
    from transformers import AutoModelForCausalLM, BloomConfig

    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    model.config.use_cache = False
    measured, given_up = strategy(model), []
    measured.release_gathered_parameters = lambda: given_up.append(model.training)
    with pytest.raises(ConfigError, match=r"packing: in \w+ with attn_implementation eager.* --packing false"):
        choose_packed_collator(measured, PackedCollator(0))
    assert model.training, "it is left as it was"
    assert given_up == [True, True], "what a failed forward left gathered is given up too"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("joined, flag", [(False, "packing"), (True, "padding_free")])
def test_alibi_is_refused_where_it_counts_from_the_start_of_the_row(attention, joined, flag):
    """Its biases are rounded to bf16. Far from the start of a row, they tell few of a sample's tokens apart."""
    from transformers import AutoModelForCausalLM, FalconConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 64, "initializer_range": 0.2}
    config = FalconConfig(**sizes, alibi=True, multi_query=False, new_decoder_architecture=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.config.use_cache = False
    with torch.no_grad():
        alone, late = (
            model(**to_device(PackedCollator(0)([packed(*samples)]), model.device)).logits[0, -len(B) :]
            for samples in ([B], [A * 100, B])
        )
    assert (late - alone).norm() > 0.02 * alone.norm(), "the reason for which it is refused"

    with pytest.raises(ConfigError, match=f"{flag}: Falcon.* alibi .*--{flag} false"):
        choose_packed_collator(strategy(model), PackedCollator(0, flatten=joined), flag)


def test_a_model_that_fails_with_text_alone_is_refused(tiny):
    model = load(tiny, "llama", "sdpa")

    def without_an_image(*_, **__):
        raise ValueError("You have to specify pixel_values")

    model.forward = without_an_image
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*pixel_values"):
        choose_isolating_collator(strategy(model), CausalCollator(0))


def test_an_error_that_is_not_of_the_mask_is_not_taken_for_one(tiny):
    model = load(tiny, "llama", "sdpa")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.lm_head.forward = full
    with pytest.raises(torch.OutOfMemoryError):
        choose_packed_collator(strategy(model), PackedCollator(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_mask_is_built_where_the_model_is(dtype, workers):
    rows = [packed(A, B), packed(B)]
    plain = PackedCollator(0)(rows)
    collate = PackedCollator(0, mask=dtype)
    [batch] = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=workers)
    mask = batch.pop("attention_mask")
    assert not isinstance(mask, torch.Tensor)
    length = plain["input_ids"].size(1)
    assert len(pickle.dumps(mask)) < 4 * 2 * length + 2_000, "an int32 a token travels"
    there = mask.to("meta")
    assert (there.device.type, there.dtype, tuple(there.shape)) == ("meta", dtype, (2, 1, length, length))
    here = to_device({"attention_mask": mask}, torch.device("cpu"))["attention_mask"]
    attends = here if dtype is torch.bool else here == 0
    assert dtype is torch.bool or here.min() == torch.finfo(dtype).min
    for row, sizes in enumerate(([len(A), len(B)], [len(B), length - len(B)])):
        blocks = torch.block_diag(*(torch.ones(n, n).tril() for n in sizes)).bool()
        assert torch.equal(attends[row, 0], blocks)


def test_flex_attention_sees_one_shape(tiny):
    """It is compiled anew for every length."""
    from zerobook.data.collate import choose_causal_collator
    from zerobook.data.pack import best_fit_decreasing

    capacity, rng = 48, np.random.default_rng(0)
    lengths = rng.integers(2, capacity, 60)
    plan = best_fit_decreasing(lengths, capacity)
    samples = [rng.integers(3, 99, n) for n in lengths]
    rows = [packed(*(samples[i] for i in plan.members[a:b])) for a, b in itertools.pairwise(plan.offsets)]
    short = [row for row in rows if len(row["input_ids"]) < capacity]
    assert short, "some rows are not full"
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flex_attention"))
    collate = choose_causal_collator(SimpleNamespace(pad_token_id=0), model, packed=True, length=capacity)
    batches = [collate([row]) for row in rows]
    assert {tuple(batch[key].shape) for batch in batches for key in batch} == {(1, capacity)}
    for row, batch in zip(rows, batches, strict=True):
        size = len(row["input_ids"])
        assert (batch["labels"][0, size:] == IGNORE).all()
        assert batch["position_ids"][0, size:].tolist() == list(range(capacity - size)), "padding is a sample of its own"


def test_flattened_rows_keep_their_borders():
    batch = PackedCollator(0, flatten=True)([packed(A, B), packed(B)])
    assert batch["input_ids"].tolist() == [[*A, *B, *B]]
    assert (batch["position_ids"][0] == 0).nonzero().flatten().tolist() == [0, len(A), len(A) + len(B)]
    text = {"input_ids": np.array(A), "labels": np.array(A)}
    assert PackedCollator(0)([text])["position_ids"].tolist() == [list(range(len(A)))]
    joined = PackedCollator(0, flatten=True)([text, text])["labels"][0].tolist()
    assert joined == 2 * [IGNORE, *A[1:]], "no token of a sample predicts its first token"
    assert text["labels"].tolist() == A
