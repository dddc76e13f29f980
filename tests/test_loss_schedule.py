"""The loss and the learning rate against transformers' own: nothing here is compared with itself."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, get_scheduler

from recipes.causal_lm import CausalLMConfig
from tests.tiny import causal_rows, seq2seq_rows
from zerobook.config import RecipeConfig
from zerobook.config_sources import parse
from zerobook.constants import IGNORE
from zerobook.data.collate import CausalCollator, DecoderInput, Seq2SeqCollator
from zerobook.data.embedded import rows as embedded_rows
from zerobook.errors import ConfigError
from zerobook.objective import _sum_cross_entropy as seq2seq_loss
from zerobook.objective import causal_lm_loss
from zerobook.training.schedule import learning_rate_schedule


def test_causal_loss_is_the_models_own_times_the_supervised_tokens(tiny):
    """Through the collator, so that the labels still belong to the ids they stand beside."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    model = AutoModelForCausalLM.from_pretrained(tiny / "llama").eval()
    rows = causal_rows(tokenizer, [row["messages"] for row in embedded_rows("chatterbot")][:6])
    assert len({len(row["input_ids"]) for row in rows}) > 2, "some must be padded"
    batch = CausalCollator(tokenizer.pad_token_id)(rows)
    supervised = sum((torch.as_tensor(row["labels"][1:]) != -100).sum().item() for row in rows)
    assert 0 < supervised < sum(len(row["input_ids"]) - 1 for row in rows)
    with torch.no_grad():
        output = model(**batch)
        ours = causal_lm_loss(output.logits, batch["labels"])
        # each row alone, without the collator: padding and masking change nothing
        alone = 0.0
        for row in rows:
            ids, labels = (torch.as_tensor(row[key]).long()[None] for key in ("input_ids", "labels"))
            alone += model(input_ids=ids, labels=labels).loss.item() * (labels[:, 1:] != -100).sum().item()
    assert ours.item() == pytest.approx(output.loss.item() * supervised, rel=1e-6)
    assert ours.item() == pytest.approx(alone, rel=1e-5)


def test_seq2seq_loss_is_the_models_own_times_the_supervised_tokens(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "bart")
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny / "bart").eval()
    rows = seq2seq_rows(tokenizer, 6)
    batch = Seq2SeqCollator(tokenizer.pad_token_id, DecoderInput(model))(rows)
    supervised = sum(len(row["labels"]) for row in rows)
    with torch.no_grad():
        own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        labels = batch.pop("labels")
        ours = seq2seq_loss(model(**batch).logits, labels)
    assert ours.item() == pytest.approx(own.loss.item() * supervised, rel=1e-6)


@pytest.mark.parametrize("loss", [causal_lm_loss, seq2seq_loss])
def test_nothing_supervised_is_0_with_a_gradient_of_0(loss):
    logits = torch.randn(2, 3, 5, requires_grad=True)
    value = loss(logits, torch.full((2, 3), -100))
    value.backward()
    assert value.item() == 0 and logits.grad.abs().max() == 0


class Largest(TorchDispatchMode):
    """Counts the elements of the largest fp32 tensor that operations make inside, and the bytes of all storages they make."""

    def __init__(self):
        super().__init__()
        self.fp32 = 0
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.bytes += tensor.untyped_storage().nbytes()
                if tensor.dtype == torch.float32:
                    self.fp32 = max(self.fp32, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [causal_lm_loss, seq2seq_loss])
def test_a_loss_without_a_gradient_holds_a_bounded_number_of_fp32_logits(loss, dtype):
    """It may not make an fp32 tensor of a quarter of the 34 million logits. The sum is that of all at once."""
    torch.manual_seed(0)
    logits = torch.randn(4, 128, 2**16, dtype=torch.float32).to(dtype)
    labels = torch.randint(0, 2**16, (4, 128))
    labels[0, :64] = labels[2, 100:] = IGNORE
    shifted = loss is causal_lm_loss
    predicted, expected = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    with torch.no_grad():
        with Largest() as largest:
            value = loss(logits, labels)
        plain = cross_entropy(predicted.flatten(0, 1).double(), expected.flatten(), ignore_index=IGNORE, reduction="sum")
    assert 0 < largest.fp32 <= logits.numel() // 4
    assert value.item() == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("loss", [causal_lm_loss, seq2seq_loss])
def test_training_copies_no_logits_but_into_fp32(loss):
    """Beside the log-probabilities that cross-entropy saves, fp32 logits are not copied, and bf16 ones are copied once."""
    logits = torch.randn(2, 32, 1000, requires_grad=True)
    labels = torch.randint(0, 1000, (2, 32))
    room = 1.1  # small tensors of labels and masks
    with Largest() as found:
        loss(logits, labels)
    assert found.bytes < room * 4 * logits.numel()
    with Largest() as found:
        loss(logits.bfloat16(), labels)
    assert found.bytes < room * (2 + 4 + 4) * logits.numel()  # its own cast to bf16, the fp32 copy, the log-probabilities


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup", "polynomial"])
def test_schedule_is_transformers_own_stepped(name, warmup):
    total, peak = 20, 3e-3
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    stepped = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rate = learning_rate_schedule(name, peak=peak, warmup=warmup, total=total)
    expected = []
    for _ in range(total + 1):
        expected.append(stepped.get_last_lr()[0])
        optimizer.step()
        stepped.step()
    warms = warmup > 0 and name != "constant"
    if warms:  # the k-th of W steps trains at k/W, where transformers begins at 0
        expected[:warmup] = [peak * (step + 1) / warmup for step in range(warmup)]
    assert [rate(step) for step in range(total + 1)] == pytest.approx(expected, rel=1e-12)
    # and what anybody knows of the shapes, without transformers
    assert rate(0) == pytest.approx(peak / warmup if warms else peak) and rate(warmup) == peak
    end = {"constant": peak, "constant_with_warmup": peak, "linear": 0, "cosine": 0, "polynomial": 1e-7}
    assert rate(total) == pytest.approx(end[name], abs=1e-12)
    middle = {"linear": peak / 2, "cosine": peak / 2, "polynomial": (peak + 1e-7) / 2}
    assert rate((warmup + total) // 2) == pytest.approx(middle.get(name, peak), abs=1e-12)


@pytest.mark.parametrize("name", get_args(RecipeConfig.model_fields["lr_scheduler_type"].annotation))
def test_every_step_of_every_schedule_has_a_rate(name):
    """The rate behind the last step is asked for too, when the run is saved: nothing may fail there."""
    peak = 3e-3
    for total in range(1, 8):
        for warmup in range(10):
            rate = learning_rate_schedule(name, peak=peak, warmup=warmup, total=total)
            rates = [rate(step) for step in range(total + 1)]
            assert all(0 <= r <= peak * (1 + 1e-12) for r in rates), (total, warmup, rates)
            warming = 0 if name == "constant" else warmup
            assert rates[:warming] == pytest.approx([peak * (step + 1) / warming for step in range(warming)][: total + 1])
            if warming < total:
                assert rates[warming] == pytest.approx(peak)
                assert rates[total] < 1e-4 * peak or name.startswith("constant")


def test_a_peak_below_the_end_of_a_polynomial_is_refused_before_the_run(tiny):
    line = ["--model_name_or_path", str(tiny / "llama"), "--dataset_name", "embedded:chatterbot", "--learning_rate", "1e-7"]
    with pytest.raises(ConfigError, match=r"learning_rate: 1e-07 .* polynomial"):
        parse(CausalLMConfig, [*line, "--lr_scheduler_type", "polynomial"])
    parse(CausalLMConfig, [*line, "--lr_scheduler_type", "linear"])
