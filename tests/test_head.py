"""The loss that a model's output layer computes, against the loss of all logits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, linear

from recipes.lora_finetune import LoraFinetune
from tests.alone import train
from tests.harness import launch, sampled
from tests.test_host_waits import MODELS, SIDES, WORDS, made
from zerobook import head
from zerobook.constants import IGNORE
from zerobook.data.collate import CausalCollator, supervised_positions
from zerobook.models.isolation import choose_isolating_collator
from zerobook.objective import NextToken, shifted
from zerobook.training.trainer import Trainer

CHANGED = {"Gemma2", "RecurrentGemma", "Cohere", "Granite", "Bart", "Blenderbot"}
"""They cap, scale or shift what their output layer returns."""
OTHERS = {"Cohere": {"logit_scale": 0.5}, "Granite": {"logits_scaling": 2.0}}
SEQ2SEQ = {"T5": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
           "Bart": SIDES, "Blenderbot": SIDES}  # fmt: skip


def model_of(name):
    if name in MODELS:
        return made(name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    kind = transformers.AutoModelForSeq2SeqLM if name in SEQ2SEQ else transformers.AutoModelForCausalLM
    config = getattr(transformers, f"{name}Config")(**(SEQ2SEQ.get(name) or sizes | OTHERS[name]), **WORDS)
    torch.manual_seed(0)
    return kind.from_config(config, dtype=torch.float32)


def gradients(model, loss):
    model.zero_grad()
    (loss / 7).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*MODELS, *OTHERS, *SEQ2SEQ])
def test_loss_and_gradients_are_those_of_all_logits(name, monkeypatch):
    monkeypatch.setitem(head.CHUNK, "cpu", 128 * 3)  # several chunks, the last one shorter
    model = model_of(name).eval()  # without dropout
    ids = torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[0, :4], targets[1, 7:] = IGNORE, IGNORE
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name in SEQ2SEQ else {})
    expected = cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    wanted = gradients(model, expected)
    keys = set(model.state_dict())
    found = head.install(model)
    assert (found is None) == (name in CHANGED)
    assert set(model.state_dict()) == keys
    assert model(**inputs).logits.shape == (2, 10, 128), "outside of the context, they are logits"
    if found is None:
        assert not hasattr(model, "loss_head")
        return
    for positions in (None, (targets.flatten() != IGNORE).nonzero().flatten()):
        with found.computing(targets, positions):
            loss = model(**inputs).logits
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        got = gradients(model, loss)
        assert got.keys() == wanted.keys()
        for parameter, gradient in got.items():
            assert (gradient - wanted[parameter]).abs().max() <= 2e-6 * max(1e-3, wanted[parameter].abs().max()), parameter


@given(
    positions=st.integers(0, 9), chunk=st.integers(1, 40), trained=st.booleans(), with_bias=st.booleans(),
    half=st.sampled_from([None, torch.bfloat16, torch.float16]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_any_number_of_positions_and_any_chunk(positions, chunk, trained, with_bias, half):
    random = torch.Generator().manual_seed(positions)
    hidden = torch.randn(positions, 6, generator=random).requires_grad_()
    weight = torch.randn(13, 6, generator=random).requires_grad_(trained)
    bias = torch.randn(13, generator=random).requires_grad_(trained) if with_bias else None
    targets = torch.randint(0, 13, (positions,), generator=random)
    targets[::3] = IGNORE
    leaves = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    expected = cross_entropy(linear(hidden, weight, bias), targets, ignore_index=IGNORE, reduction="sum")
    wanted = torch.autograd.grad(expected / 3, leaves)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=half, enabled=half is not None):
        patch.setitem(head.CHUNK, "cpu", chunk)
        loss = head.linear_cross_entropy(hidden, weight, bias, targets)
    near = {"rel": 1e-5, "abs": 1e-5} if half is None else {"rel": 0.05, "abs": 0.05}
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), **near)
    for got, gradient in zip(torch.autograd.grad(loss / 3, leaves), wanted, strict=True):
        assert torch.allclose(got, gradient, rtol=near["rel"], atol=near["abs"])


def test_small_probabilities_have_a_gradient_in_fp16():
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.zeros(4, 2)
    bias = torch.tensor([0.0, -18.0, 0.0, 0.0])  # a probability of 5e-9, which fp16 alone rounds to 0
    weight[1, 0] = 100.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head.linear_cross_entropy(hidden, weight, bias, torch.tensor([0]))
    assert torch.autograd.grad(loss, hidden)[0][0, 0].item() == pytest.approx(100 * 0.5e-8, rel=0.2)


def multiply(multiplied, a, b, out_dtype, alpha, out):
    """Add half-precision products in fp32, as CUDA's addmm does."""
    assert out is multiplied and a.dtype == b.dtype != out_dtype == multiplied.dtype
    return out.addmm_(a.float(), b.float(), alpha=alpha)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_products_of_a_gpu_have_the_gradients_of_all_logits(monkeypatch, half):
    """On CUDA, tensor cores multiply in half precision and sum in fp32."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=random).requires_grad_()
    weight = torch.randn(23, 16, generator=random).requires_grad_()
    bias = torch.randn(23, generator=random).requires_grad_()
    targets = torch.randint(0, 23, (300,), generator=random)
    targets[::3] = IGNORE
    expected = cross_entropy(linear(hidden, weight, bias), targets, ignore_index=IGNORE, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight, bias))
    plain_mm = torch.mm
    monkeypatch.setattr(head, "has_fp32_products", lambda tensor: True)
    monkeypatch.setattr("torch.mm", lambda a, b, out_dtype: plain_mm(a.to(out_dtype), b.to(out_dtype)))
    monkeypatch.setattr("torch.addmm", multiply)
    monkeypatch.setitem(head.CHUNK, "cpu", 23 * 200)
    with torch.autocast("cpu", dtype=half):
        loss = head.linear_cross_entropy(hidden, weight, bias, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    for got, gradient in zip(torch.autograd.grad(loss, (hidden, weight, bias)), wanted, strict=True):
        assert (got - gradient).norm() < 0.01 * gradient.norm()


def test_products_are_summed_in_fp32_where_torch_can():
    with FakeTensorMode():
        assert head.has_fp32_products(torch.empty(1, device="cuda", dtype=torch.float16))
        assert head.has_fp32_products(torch.empty(1, device="cuda", dtype=torch.bfloat16))
        assert not head.has_fp32_products(torch.empty(1, device="cuda"))
        assert not head.has_fp32_products(torch.empty(1, dtype=torch.float16))


def test_chunks_are_whole_tiles_where_one_fits(monkeypatch):
    lengths = []
    plain = head.linear

    def noting(inputs, weight, bias):
        lengths.append(len(inputs))
        return plain(inputs, weight, bias)

    monkeypatch.setattr(head, "linear", noting)
    for positions in (300, 100):
        monkeypatch.setitem(head.CHUNK, "cpu", 5 * positions)
        head.linear_cross_entropy(torch.ones(400, 3), torch.ones(5, 3), None, torch.zeros(400, dtype=torch.int64))
    assert lengths == [256, 144, 100, 100, 100, 100]


def test_the_gradient_is_computed_once():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = head.linear_cross_entropy(hidden, weight, None, torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_an_evaluation_computes_no_gradients():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    targets, made = torch.tensor([1, IGNORE, 2, 3]), []

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append((func._schema.name, getattr(func(*args, **(kwargs or {})), "shape", None)))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Shapes():
        head.linear_cross_entropy(hidden, weight, None, targets)
    assert sum(name in ("aten::mm", "aten::addmm_") for name, _ in made) == 1, "the logits alone"


def test_what_is_not_finite_where_nothing_is_supervised_does_not_count():
    hidden = torch.randn(2, 3)
    hidden[1] = float("nan")
    weight, targets = torch.randn(5, 3), torch.tensor([1, IGNORE])
    expected = cross_entropy(linear(hidden, weight), targets, reduction="sum")
    assert head.linear_cross_entropy(hidden, weight, None, targets).item() == pytest.approx(expected.item())


def test_large_weights_do_not_overflow_in_fp16():
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[200.0, 0.0], [-200.0, 0.0]])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head.linear_cross_entropy(hidden, weight, None, torch.tensor([1]))
    assert torch.autograd.grad(loss, hidden)[0][0, 0].item() == pytest.approx(400, rel=1e-2)


def test_a_layer_with_a_hook_keeps_it():
    model = made("Gemma2")
    before = model.lm_head.forward = lambda hidden: hidden  # as accelerate does for a device map
    assert head.install(model) is None and model.lm_head.forward is before


@dataclass(frozen=True)
class PadsAgain(CausalCollator):
    def __call__(self, rows):
        batch = super().__call__(rows)
        return {key: torch.nn.functional.pad(value, (0, 3)) for key, value in batch.items()}


def test_collators_of_others_get_no_positions():
    from tests.test_host_waits import strategy

    model = strategy(made("Llama"))
    assert choose_isolating_collator(model, CausalCollator(0), supervised=True).supervised
    assert not choose_isolating_collator(model, PadsAgain(0), supervised=True).supervised


def test_no_tensor_of_all_logits_is_made():
    positions, vocabulary, width = 64, 4096, 4
    hidden = torch.randn(positions, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with pytest.MonkeyPatch.context() as patch, Sizes():
        patch.setitem(head.CHUNK, "cpu", vocabulary * 8)
        head.linear_cross_entropy(hidden, weight, None, torch.zeros(positions, dtype=torch.int64)).backward()
    assert largest == vocabulary * 8


def test_a_layer_that_is_no_plain_linear_is_left_as_it_is():
    model = made("Llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert head.install(model) is None


def test_positions_are_those_with_a_target():
    labels = torch.tensor([[IGNORE, 5, IGNORE, 7], [3, IGNORE, 4, IGNORE]])
    positions = supervised_positions(labels)
    assert (shifted(labels).flatten()[positions] != IGNORE).all()
    assert len(positions) == (shifted(labels) != IGNORE).sum() == 3


RECIPE = """
import torch
from zerobook.recipes.lora_finetune import LoraFinetune
from zerobook.objective import NextToken
from zerobook.training.run import run


class Checked(NextToken):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        assert loss.dtype == torch.float32, loss.dtype
        return loss


class CheckedFinetune(LoraFinetune):
    def objective(self):
        return Checked()


run(CheckedFinetune)
"""


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["ddp", "fsdp", "zero3"], "fsdp"))
def test_the_loss_of_a_run_in_half_precision_is_fp32(strategy, tiny, tmp_path):
    """FSDP2 casts what a model returns, if it is told to."""
    (tmp_path / "checked.py").write_text(RECIPE)
    launch(
        strategy, 2, str(tmp_path / "checked.py"), tmp_path / "run", model_name_or_path=tiny / "llama", mixed_precision="bf16",
        train_file=tiny / "chats.jsonl", max_seq_length=64, max_train_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip


class OwnLoss(NextToken):
    def loss(self, model, batch):
        assert head.SUPERVISED not in batch, "a subclass may pass the whole batch to the model"
        return super().loss(model, batch)


class OwnLossFinetune(LoraFinetune):
    def objective(self):
        return OwnLoss()


@pytest.mark.parametrize("recipe", [LoraFinetune, OwnLossFinetune])
def test_a_run_computes_logits_of_supervised_tokens_only(recipe, tiny, tmp_path, monkeypatch):
    rows, tokens = [], []
    real, step = head.linear_cross_entropy, Trainer.train_step

    def counted(hidden, *rest):
        rows.append(len(hidden))
        return real(hidden, *rest)

    def noted(trainer, plan, batches):
        tokens.append(plan.tokens)
        return step(trainer, plan, batches)

    monkeypatch.setattr(head, "linear_cross_entropy", counted)
    monkeypatch.setattr(Trainer, "train_step", noted)
    train(
        tmp_path, recipe, model_name_or_path=str(tiny / "llama"), train_file=str(tiny / "chats.jsonl"), max_seq_length=64,
        max_train_steps=3, per_device_train_batch_size=4, validation_split_percentage=0,
    )  # fmt: skip
    assert len(tokens) == 3
    if recipe is LoraFinetune:
        assert rows == tokens
    else:
        assert all(all_rows > supervised for all_rows, supervised in zip(rows, tokens, strict=True))
