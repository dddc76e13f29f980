"""Sources and targets of unlike lengths: the loss, the decoder's input, what is generated and how it is scored."""

from __future__ import annotations

import doctest
import pickle
import shlex
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from recipes.seq2seq_chatbot import Seq2SeqChatbot, Seq2SeqConfig
from tests.harness import ROOT
from zerobook.config_sources import parse
from zerobook.constants import IGNORE
from zerobook.data import collate as collate_module
from zerobook.data.collate import DecoderInput, Seq2SeqCollator
from zerobook.errors import ConfigError
from zerobook.evaluation import text_metrics as metrics_module
from zerobook.evaluation.answers import AnswerSampler
from zerobook.evaluation.generation import GenerationScorer
from zerobook.evaluation.text_metrics import text_metrics
from zerobook.health.position import here
from zerobook.models.generation_config import RULES, decoding
from zerobook.models.load import check_positions, load_model
from zerobook.objective import TargetTokens
from zerobook.objective import _sum_cross_entropy as seq2seq_loss
from zerobook.strategy import ReplicatedStrategy, Strategy
from zerobook.strategy.launch_plan import LaunchPlan

MODELS = ["blenderbot", "bart", "pegasus", "t5"]
PLAN = SimpleNamespace(precision="no", copies_at_load=lambda processes: 0)
ALONE = SimpleNamespace(
    rank=0, world_size=1, is_main=True, device=torch.device("cpu"), generation_in_step=False, from_main=lambda value: value,
    barrier=lambda: None, gather=lambda value: [value], plan=PLAN,
    inference=lambda: Strategy.inference(None),
    initialising_complete_weights=lambda: Strategy.initialising_complete_weights(None),
    once_per_node=lambda work: work(), on_main=lambda work: work(),
    load=lambda load, options: load(options), prepare_to_load=lambda new_model: None,
    mesh=SimpleNamespace(token_parallel_rank=0, token_parallel_size=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "bart")


@pytest.fixture(scope="module")
def rows(tokenizer):
    """Real questions and answers, the longest pair 12 times the shortest."""
    from tests.tiny import seq2seq_rows

    return seq2seq_rows(tokenizer, 24)


def load(folder):
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def loss_of(model, batch):
    batch = dict(batch)
    labels = batch.pop("labels")
    return seq2seq_loss(model(**batch).logits, labels)


def test_the_loss_sums_what_is_supervised_and_shifts_nothing():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[4, 0, IGNORE], [2, IGNORE, 1]])
    naive = 0.0
    for row in range(2):
        for position in range(3):
            if labels[row, position] != IGNORE:
                scores = logits[row, position].double()
                naive -= (scores[labels[row, position]] - scores.exp().sum().log()).item()
    assert seq2seq_loss(logits, labels).item() == pytest.approx(naive, rel=1e-6)
    nothing = seq2seq_loss(logits, torch.full((2, 3), IGNORE))
    nothing.backward()
    assert nothing.item() == 0 and logits.grad.abs().sum() == 0
    assert TargetTokens().weight({"labels": np.array([4, IGNORE, 1])}) == 2


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_reads_what_the_model_itself_would_give_it(tiny, rows, name):
    model = load(tiny / name)
    rule = DecoderInput(model)
    sent = pickle.dumps(rule)
    assert len(sent) < 10_000, "a DataLoader worker must not be sent the weights"
    batch = Seq2SeqCollator(2, pickle.loads(sent))(rows[:4])
    assert (batch["labels"] == IGNORE).any(), "rows of one length would not show how padding is shifted"
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        assert torch.equal(batch["decoder_input_ids"], model.prepare_decoder_input_ids_from_labels(batch["labels"]))
    with torch.no_grad():
        # what transformers computes from labels alone, through its own shift
        own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        count = (batch["labels"] != IGNORE).sum()
        assert loss_of(model, batch).item() == pytest.approx(float(own * count), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_loss(tiny, rows, name):
    model = load(tiny / name)
    collate = Seq2SeqCollator(2, DecoderInput(model), 8, source_length=60, target_length=50)
    batch = collate(rows[:6])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (6, 64)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (6, 56)
    tight = Seq2SeqCollator(2, DecoderInput(model))
    with torch.no_grad():
        alone = sum(loss_of(model, tight([row])).item() for row in rows[:6])
        assert loss_of(model, batch).item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_on_real_dialogues_lower_the_loss(tiny, rows, name):
    torch.set_num_threads(1)
    model = load(tiny / name).train()
    collate = Seq2SeqCollator(2, DecoderInput(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    tokens = sum(len(row["labels"]) for row in rows)
    losses = []
    for _ in range(10):
        loss = loss_of(model, collate(rows)) / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0], losses


def test_a_models_own_lengths_and_beams_do_not_win(tiny, rows, tokenizer, tmp_path):
    from transformers import GenerationConfig

    model = load(tiny / "blenderbot")
    own = model.generation_config
    assert (own.min_length, own.max_length, own.num_beams) == (20, 60, 10), "as the released one has it"
    model.generation_config = decoding(own, num_beams=2, max_tokens=6, min_tokens=3)
    assert model.generation_config.no_repeat_ngram_size == 3, "what nobody asked to change stays"
    scorer = GenerationScorer(
        rows, tokenizer, Seq2SeqCollator(2, DecoderInput(model)), decoding=model.generation_config, batch_size=8
    )
    before = here().since
    predictions = scorer.generate(SimpleNamespace(unwrapped=model, **vars(ALONE)))
    assert here().since > before, "a long evaluation hangs in no call"
    assert len(predictions) == len(rows)
    assert {len(ids) for ids in predictions} == {6}, "an untrained model does not stop by itself"
    for beams in (1, 2):  # what was used is what a reader of the folder gets
        used = decoding(own, num_beams=beams, max_tokens=6)
        used.save_pretrained(tmp_path)
        saved = GenerationConfig.from_pretrained(tmp_path)
        assert (saved.num_beams, saved.max_new_tokens, saved.max_length, saved.do_sample) == (beams, 6, None, False)


def answers(tiny, tokenizer, rows, **flags) -> list[list[int]]:
    """Return what the recipe generates for rows, without the end of text."""
    config = Seq2SeqConfig(
        model_name_or_path=str(tiny / "bart"), dataset_name="d", max_target_length=24, per_device_eval_batch_size=8,
        **{"num_beams": 2, **flags},
    )  # fmt: skip
    recipe = Seq2SeqChatbot(config)
    model = recipe.model(tokenizer, ALONE).eval()
    (scorer,) = recipe.scorers(tokenizer, model, SimpleNamespace(held_out={"": rows}), recipe.collator(tokenizer, model))
    found = scorer.generate(SimpleNamespace(unwrapped=model, **vars(ALONE)))
    return [[token for token in ids if token != tokenizer.eos_token_id] for ids in found]


def repeated(ids: list[int], n: int) -> bool:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) < len(grams)


def test_the_rules_of_a_search_change_what_is_generated(tiny, rows, tokenizer):
    torch.set_num_threads(1)
    plain = answers(tiny, tokenizer, rows[:2])
    assert all(repeated(ids, 2) for ids in plain), "an untrained model repeats itself"
    for n in (1, 2):
        ruled = answers(tiny, tokenizer, rows[:2], no_repeat_ngram_size=n)
        assert not any(repeated(ids, n) for ids in ruled) and all(len(ids) == 23 for ids in ruled)
    penalised = answers(tiny, tokenizer, rows[:2], repetition_penalty=5.0)
    assert all(len(set(ids)) > len(set(before)) for ids, before in zip(penalised, plain, strict=True))
    said = [{"input_ids": [*sorted({*ids}), 2], "labels": [2]} for ids in plain]  # sources of what it likes to say
    assert all({*ids} & {*row["input_ids"]} for ids, row in zip(answers(tiny, tokenizer, said), said, strict=True))
    ruled = answers(tiny, tokenizer, said, encoder_no_repeat_ngram_size=1)
    assert not any({*ids} & {*row["input_ids"]} for ids, row in zip(ruled, said, strict=True))
    long, short = (answers(tiny, tokenizer, rows[:2], num_beams=4, length_penalty=penalty) for penalty in (8.0, -8.0))
    assert all(len(ids) == 23 for ids in long) and all(len(ids) < 5 for ids in short)


def test_a_rule_that_is_not_given_stays_the_models_own(tiny):
    own = load(tiny / "blenderbot").generation_config
    before = {name: getattr(own, name) for name in RULES}
    assert before == {"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 3, "repetition_penalty": None,
                      "length_penalty": 0.65}  # fmt: skip
    kept = decoding(own, num_beams=2, max_tokens=6, **dict.fromkeys(RULES))
    assert {name: getattr(kept, name) for name in RULES} == before
    off = decoding(own, num_beams=2, max_tokens=6, no_repeat_ngram_size=0, length_penalty=0.0)
    assert (off.no_repeat_ngram_size, off.encoder_no_repeat_ngram_size, off.length_penalty) == (0, 3, 0.0), "0 is a value"


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--no_repeat_ngram_size", "-1"], "no_repeat_ngram_size"),
        (["--encoder_no_repeat_ngram_size", "-1"], "encoder_no_repeat_ngram_size"),
        (["--encoder_no_repeat_ngram_size", "1.5"], "encoder_no_repeat_ngram_size"),
        (["--repetition_penalty", "0"], "repetition_penalty"),
        (["--length_penalty", "inf"], "length_penalty"),
        (["--length_penalty", "0.5", "--num_beams", "1"], "length_penalty: 0.5 ranks beams, and num_beams is 1"),
    ],
)
def test_rules_that_cannot_be(flags, said):
    with pytest.raises(ConfigError, match=said):
        parse(Seq2SeqConfig, [*PUBLISHED, *flags])


class Echo:
    """Answers with the source, between a start and an end token; keeps the size of each call."""

    def __init__(self):
        self.sizes = []

    def generate(self, input_ids, attention_mask, generation_config, synced_gpus):
        self.sizes.append(len(input_ids))
        texts = [[9, *ids[mask.bool()].tolist(), 2] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        longest = max(map(len, texts))
        return torch.tensor([text + [2] * (longest - len(text)) for text in texts])


@pytest.mark.parametrize("count, limit, expected", [(8, None, 8), (7, None, 7), (5, None, 5), (8, 1, 3), (2, 4, 2)])
def test_each_row_counts_once_in_dataset_order(rows, tokenizer, count, limit, expected):
    model = Echo()
    scorer = GenerationScorer(
        rows[:count], tokenizer, Seq2SeqCollator(2, lambda labels: labels), batch_size=3, batches=limit, samples=2,
        decoding=SimpleNamespace(eos_token_id=2),
    )  # fmt: skip
    strategy = SimpleNamespace(unwrapped=model, **vars(ALONE))
    answers = [[*row["input_ids"], 2] for row in rows[:expected]]
    assert scorer.generate(strategy) == answers
    assert set(model.sizes) == {3}, "a short batch is filled, so that shapes and calls are alike on all ranks"
    metrics, table = scorer(strategy, model, 0)
    assert metrics["generated_tokens"] == pytest.approx(sum(map(len, answers)) / expected)
    assert [line["prediction"] for line in table] == [line["source"] for line in table]
    assert len(table) == 2 and all(line["target"] for line in table)


class Cast:
    """Records inside of generation whether autocast is on in the encoder and decoder, and how often it is entered."""

    def __init__(self, model, monkeypatch):
        self.seen: dict[str, set] = {"encoder": set(), "decoder": set()}
        self.outermost = 0
        for name, part in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
            part.register_forward_pre_hook(lambda *_, name=name: self.seen[name].add(torch.is_autocast_enabled("cpu")))
        enter = torch.autocast.__enter__

        def entered(context):
            self.outermost += not torch.is_autocast_enabled("cpu")
            return enter(context)

        monkeypatch.setattr(torch.autocast, "__enter__", entered)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_generation_runs_in_the_runs_precision_from_end_to_end(tiny, rows, tokenizer, monkeypatch, precision):
    """accelerate casts in ``forward`` only, and ``generate`` calls the encoder by itself, which flash attention refuses in
    fp32. And an autocast for each token casts all weights for each token."""
    model = load(tiny / "bart")
    collate = Seq2SeqCollator(tokenizer.pad_token_id, DecoderInput(model))
    scorer = GenerationScorer(
        rows[:4], tokenizer, collate, decoding=decoding(model.generation_config, num_beams=1, max_tokens=4, min_tokens=4),
        batch_size=2,
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        plan = LaunchPlan(kind="single", world_size=1, device="cpu", backend=None, precision=precision, precision_source="test")
        strategy = ReplicatedStrategy(Accelerator(cpu=True, mixed_precision=precision), plan)
        strategy.prepare(model, Seq2SeqConfig(model_name_or_path="x", dataset_name="x"), total_steps=1)
        strategy.model.eval()
        cast = Cast(model, monkeypatch)
        texts = scorer.generate(strategy)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert [len(ids) for ids in texts] == [4] * 4
    half = precision == "bf16"
    assert cast.seen == {"encoder": {half}, "decoder": {half}}
    assert cast.outermost == (2 if half else 0), "once for each call of generate"


def test_scores():
    same = text_metrics(["A cat sat on the mat."], ["A cat sat on the mat."])
    assert all(score == pytest.approx(100) for score in same.values())
    # 3 words of 4 and of 3: F = 2 * (3/4 * 3/3) / (3/4 + 3/3); pairs of words: 1 of 3 and of 2
    some = text_metrics(["the cat the dog", "x"], ["the dog the", "y"])
    assert some["rouge1"] == pytest.approx(50 * 2 * 0.75 / 1.75)
    assert some["rouge2"] == pytest.approx(50 * 2 * (1 / 3 * 1 / 2) / (1 / 3 + 1 / 2))
    # corpus BLEU is not a mean over texts: one pool of n-grams
    one, two = ["a b c d e f"], ["z"]
    assert text_metrics(one + two, [*one, "y"])["bleu"] > text_metrics(two, ["y"])["bleu"] == 0


@pytest.mark.parametrize("module", [collate_module, metrics_module])
def test_examples_in_docstrings_hold(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


PUBLISHED = shlex.split("""
    --dataset_name smangrul/MuDoConv --model_name_or_path facebook/blenderbot-400M-distill --output_dir out
    --max_source_length 128 --max_target_length 64 --val_max_target_length 64 --val_min_target_length 20
    --n_val_batch_generations 5 --n_train 10000 --n_val 1000 --pad_to_max_length --num_beams 10
    --per_device_train_batch_size 200 --per_device_eval_batch_size 100 --learning_rate 1e-6 --weight_decay 0.0
    --num_train_epochs 1 --gradient_accumulation_steps 1 --num_warmup_steps 100 --seed 25 --logging_steps 100
    --source_prefix "chatbot: "
""")
PUBLISHED_RULES = {
    "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "length_penalty": 0.0,
}  # fmt: skip
"""Fixed in the published script; ``length_penalty`` is False there."""


def test_the_shipped_config_says_what_the_published_line_says():
    line, _, _ = parse(Seq2SeqConfig, PUBLISHED)
    file, sources, _ = parse(Seq2SeqConfig, ["--config", str(ROOT / "recipes/configs/seq2seq_blenderbot.yaml")])
    # ds_configs/published/README.md names what differs in the data.
    free = {"output_dir": "", "on_bad_sample": ""}
    assert line.model_dump() | free | PUBLISHED_RULES == file.model_dump() | free
    assert (line.max_train_samples, line.max_eval_samples, line.source_prefix) == (10000, 1000, "chatbot: ")
    assert line.pad_to_max_length and sources.is_set("max_train_samples")


def test_lengths_that_cannot_be():
    with pytest.raises(ConfigError, match="val_min_target_length: 64 tokens at least do not fit into"):
        parse(Seq2SeqConfig, [*PUBLISHED, "--val_min_target_length", "64"])
    with pytest.raises(ConfigError, match="model_name_or_path: no model is named"):
        parse(Seq2SeqConfig, ["--dataset_name", "d"])


def test_a_model_that_cannot_do_it_is_named(tiny):
    with pytest.raises(ConfigError, match="128 positions, and texts of 129 tokens"):
        check_positions(load(tiny / "bart").config, "bart", 129)
    check_positions(load(tiny / "bart").config, "bart", 128)
    check_positions(load(tiny / "t5").config, "t5", 10_000)  # relative positions have no end
    config, _, _ = parse(Seq2SeqConfig, ["--model_name_or_path", str(tiny / "llama"), "--dataset_name", "d"])
    with pytest.raises(ConfigError, match="AutoModelForSeq2SeqLM cannot load it"):
        load_model(config, ALONE, encoder_decoder=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_answer_goes_beyond_the_positions_on_any_rank(tiny, rank):
    """A rank whose answer has ended computes along until those of all ranks have, where they share weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny / "gpt2").eval()
    mesh = SimpleNamespace(token_parallel_rank=rank, token_parallel_size=2)
    strategy = SimpleNamespace(**vars(ALONE) | {"unwrapped": model, "mesh": mesh})
    rows = []
    for prompt_length in (124, 100, 20, 30, 50):
        ids = np.arange(3, prompt_length + 7)
        rows.append({"input_ids": ids, "labels": np.where(ids < prompt_length + 3, IGNORE, ids)})
    sampler = AnswerSampler(rows, AutoTokenizer.from_pretrained(tiny / "gpt2"), count=5, ends=[])

    with mock.patch.object(model, "generate", wraps=model.generate) as generate:
        _, table = sampler(strategy, model, 1)

    assert len(table) == (3, 2)[rank]
    lengths = [call.kwargs["input_ids"].shape[1] for call in generate.call_args_list]
    limits = [call.kwargs["generation_config"].max_new_tokens for call in generate.call_args_list]
    assert lengths == [[124, 20, 50], [100, 30, 50]][rank]
    assert limits == [4, 64, 64]
