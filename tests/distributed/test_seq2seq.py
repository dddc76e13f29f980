"""The chatbot recipe as published, under any strategy: the same losses, the same texts, the same scores."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.distributed.test_parity import TOLERANCE, largest_difference
from tests.harness import ROOT, launch, sampled
from tests.test_generation import PUBLISHED_RULES

full = pytest.mark.full
STRATEGIES = sampled(["zero2", "fsdp", "ddp", "zero1", "zero3", "zero3_offload"], "zero2")


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    """The published command with a tiny BlenderBot and real dialogues, launched once per strategy and model."""
    folder, done = tmp_path_factory.mktemp("published"), {}

    def run(strategy: str, processes: int, model: str = "blenderbot"):
        if (strategy, model) not in done:
            done[strategy, model] = launch(
                strategy, processes, "seq2seq_chatbot", folder / f"{strategy}_{model}",
                dataset_name="embedded:chatterbot", model_name_or_path=tiny / model, max_source_length=128,
                source_prefix="chatbot: ", max_target_length=64, val_max_target_length=64, val_min_target_length=20,
                n_val_batch_generations=2, n_train=75, n_val=10, pad_to_max_length=True, num_beams=10,
                per_device_train_batch_size=8 // processes, per_device_eval_batch_size=4 // processes,
                learning_rate=2e-2, weight_decay=0.0, num_train_epochs=1, gradient_accumulation_steps=1,
                num_warmup_steps=100, seed=25, logging_steps=100, dataloader_num_workers=1, **PUBLISHED_RULES,
            )  # fmt: skip
        return done[strategy, model]

    return run


@pytest.mark.launch
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_published_command(published, strategy):
    one, run = published("single", 1), published(strategy, 2)
    assert len(run.steps) == 10, "75 samples, the last step not full, and a warm-up longer than the run"
    assert "100 warm-up steps are more than the run has" in run.text
    assert [s["ids"] for s in run.steps] == [s["ids"] for s in one.steps]
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert largest_difference(run.norms, one.norms) < TOLERANCE
    assert run.losses[-1] < 0.95 * run.losses[0]
    ours, reference = run.event("eval"), one.event("eval")
    assert abs(ours["loss"] - reference["loss"]) < 1e-5
    assert ours["metrics"] == reference["metrics"] and ours["samples"] == reference["samples"]
    assert 20 <= ours["metrics"]["generated_tokens"] <= 64
    assert set(ours["metrics"]) == {"rouge1", "rouge2", "rougeL", "bleu", "chrf", "generated_tokens"}
    assert all(sample["source"].startswith("chatbot: ") for sample in ours["samples"])
    seconds = run.event("run_end")["seconds"]
    assert seconds["evaluation"] == pytest.approx(sum(e["seconds"] for e in run.events if e["type"] == "eval"), abs=0.01)


@pytest.mark.launch
@full
@pytest.mark.parametrize("strategy, model", [("fsdp", "bart"), ("fsdp", "pegasus"), ("fsdp", "t5")])
def test_fsdp2_takes_shared_embeddings_and_buffers(published, tiny, strategy, model):
    """BART's folder has a final_logits_bias that is not 0: a buffer that only rank 0 reads, and that nobody trains."""
    from safetensors.torch import load_file
    from transformers import AutoModelForSeq2SeqLM

    one, run = published("single", 1, model), published("fsdp", 2, model)
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert run.event("eval")["samples"] == one.event("eval")["samples"]
    before = load_file(tiny / model / "model.safetensors")
    after = load_file(run.output / "model" / "model.safetensors")
    assert set(after) == set(before), "tied weights once, buffers too"
    if model == "bart":
        assert before["final_logits_bias"].abs().max() > 0
        assert (after["final_logits_bias"] == before["final_logits_bias"]).all()
    # each layer is sharded by itself: no rank holds more than its half of the weights
    whole = sum(4 * tensor.numel() for tensor in after.values())
    assert all(rank["parameters"] < 0.55 * whole for rank in run.event("memory")["per_rank_bytes"])
    AutoModelForSeq2SeqLM.from_pretrained(run.output / "model")


@pytest.fixture(scope="module")
def own_head(tiny, tmp_path_factory):
    """A T5 like Flan-T5: its config ties the output layer to the embedding, and its file has another output layer."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "own_head"
    shutil.copytree(tiny / "t5", folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["shared.weight"].flip(1).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=full), pytest.param("zero3_nvme", marks=full)])
def test_an_output_layer_that_the_config_ties_and_the_file_does_not(tiny, tmp_path, own_head, strategy):
    from safetensors.torch import load_file

    flags = dict(
        model_name_or_path=own_head, dataset_name="embedded:chatterbot", max_source_length=64, max_target_length=32, n_train=16,
        n_val=4, per_device_eval_batch_size=2, max_train_steps=3, logging_steps=1, learning_rate=1e-2, new_tokens=["<new>"],
    )  # fmt: skip
    one, run = (
        launch(name, processes, "seq2seq_chatbot", tmp_path / name, per_device_train_batch_size=4 // processes, **flags)
        for name, processes in (("single", 1), (strategy, 2))
    )
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    weights = load_file(run.output / "model" / "model.safetensors")
    assert weights["lm_head.weight"].shape == weights["shared.weight"].shape
    assert (weights["lm_head.weight"] != weights["shared.weight"]).any()


@pytest.mark.launch
def test_the_saved_folder_answers_as_it_was_measured(published):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    run = published("zero2", 2)
    model = AutoModelForSeq2SeqLM.from_pretrained(run.output / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.output / "model")
    state = run.state()
    for name, tensor in model.named_parameters():
        assert (tensor - state[f"weight/{name}"]).abs().max() < 1e-6
    assert model.lm_head.weight is model.model.shared.weight
    used = model.generation_config
    assert (used.num_beams, used.max_new_tokens, used.min_new_tokens, used.max_length) == (10, 64, 20, None)
    assert {name: getattr(used, name) for name in PUBLISHED_RULES} == PUBLISHED_RULES
    assert model.config.task_specific_params["chatbot"] == {"prefix": "chatbot: "}
    sample = run.event("eval")["samples"][0]
    ids = tokenizer(sample["source"], return_tensors="pt")
    (answer,) = model.generate(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"])
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == sample["prediction"]


@pytest.mark.launch
@pytest.mark.full
def test_a_half_precision_file_is_trained_in_fp32_under_fsdp2(tiny, tmp_path):
    """Rank 0 alone reads it, in fp32; the others take over dtypes of weights and buffers."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    shutil.copytree(tiny / "bart", tmp_path / "half", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    AutoModelForSeq2SeqLM.from_pretrained(tiny / "bart", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    runs = [
        launch(
            strategy, processes, "seq2seq_chatbot", tmp_path / strategy, dataset_name="embedded:chatterbot",
            model_name_or_path=tmp_path / "half", max_source_length=32, max_target_length=16, n_train=16, n_val=4, num_beams=1,
            per_device_train_batch_size=4 // processes, max_train_steps=4, learning_rate=1e-3, val_min_target_length=1,
            val_max_target_length=4, n_val_batch_generations=1,
        )
        for strategy, processes in (("single", 1), ("fsdp", 2))
    ]  # fmt: skip
    assert largest_difference(runs[1].losses, runs[0].losses) < TOLERANCE
    from safetensors.torch import load_file

    one, two = (load_file(run.output / "model" / "model.safetensors") for run in runs)
    assert {name: tensor.dtype for name, tensor in two.items()} == {name: tensor.dtype for name, tensor in one.items()}


@pytest.fixture(scope="module")
def answering(tiny, tmp_path_factory):
    """A tiny BlenderBot that has learnt five answers of unlike lengths by heart, and the file of them."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from tests.tiny import seq2seq_rows
    from zerobook.data.collate import DecoderInput, Seq2SeqCollator
    from zerobook.objective import _sum_cross_entropy as seq2seq_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("answering")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "blenderbot")
    rows = seq2seq_rows(tokenizer, 5)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny / "blenderbot").train()
    batch = Seq2SeqCollator(2, DecoderInput(model))(rows)
    labels = batch.pop("labels")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        (seq2seq_loss(model(**batch).logits, labels) / (labels >= 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.update(no_repeat_ngram_size=None, encoder_no_repeat_ngram_size=None)  # an answer may repeat
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    texts = [{key: tokenizer.decode(ids, skip_special_tokens=True) for key, ids in row.items()} for row in rows]
    lines = [json.dumps({"source": text["input_ids"], "target": text["labels"]}) + "\n" for text in texts]
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder, texts


@pytest.mark.launch
def test_zero3_generates_in_step_whatever_the_number_of_rows(answering, tmp_path):
    """Five rows on two processes, two a batch: in the second call one row is real, and rank 1 has none at all.

    The answers end after 4 to 40 tokens, so ranks finish at different steps; nothing stays whole between the steps.
    """
    folder, texts = answering
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    strict = tmp_path / "strict.json"
    strict.write_text(json.dumps(config))
    launcher = ["--use_deepspeed", "--zero3_init_flag", "true", "--deepspeed_config_file", str(strict)]
    flags = dict(
        model_name_or_path=folder, train_file=folder / "pairs.jsonl", validation_file=folder / "pairs.jsonl",
        max_source_length=64, max_target_length=64, num_beams=2, max_train_steps=2, learning_rate=1e-8, eval_on_start=True,
    )  # fmt: skip
    one = launch(
        "single", 1, "seq2seq_chatbot", tmp_path / "one",
        per_device_train_batch_size=4, per_device_eval_batch_size=8, **flags,
    )  # fmt: skip
    run = launch(
        launcher, 2, "seq2seq_chatbot", tmp_path / "run",
        per_device_train_batch_size=2, per_device_eval_batch_size=2, **flags,
    )  # fmt: skip

    assert largest_difference(run.losses, one.losses) < TOLERANCE
    whole = 4 * run.event("memory")["trained_parameters"]
    assert all(rank["parameters"] < 0.55 * whole for rank in run.event("memory")["per_rank_bytes"])
    evaluations = [event for event in run.events if event["type"] == "eval"]
    assert [event["step"] for event in evaluations] == [0, 2], "training goes on between two generations"
    for event in evaluations:
        assert [sample["source"] for sample in event["samples"]] == [text["input_ids"] for text in texts]
        assert [sample["prediction"] for sample in event["samples"]] == [text["labels"] for text in texts]
        assert event["metrics"] == one.event("eval")["metrics"]
    assert len({len(text["labels"]) for text in texts}) > 3


@pytest.mark.launch
def test_no_layers_are_left_out_at_random(tiny, tmp_path):
    """M2M100 does so while it is trained. Under ZeRO-3, two ranks that leave out different layers would fail."""
    dropping = tmp_path / "dropping"
    shutil.copytree(tiny / "bart", dropping)
    config = json.loads((dropping / "config.json").read_text()) | {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.4}
    (dropping / "config.json").write_text(json.dumps(config))
    flags = dict(
        train_file=tiny / "chats.jsonl", max_source_length=64, max_target_length=32, validation_split_percentage=0,
        learning_rate=1e-2, max_train_steps=6, logging_steps=1,
    )  # fmt: skip
    one, run = (
        launch(
            *where, "seq2seq_chatbot", tmp_path / where[0], model_name_or_path=model, per_device_train_batch_size=rows, **flags
        )
        for where, model, rows in ((("single", 1), tiny / "bart", 4), (("zero3", 2), dropping, 2))
    )
    assert largest_difference(run.losses, one.losses) < TOLERANCE
    assert "layerdrop: 0.5 in the model's config, 0 here" in run.text and "layerdrop" not in one.text
    assert json.loads((run.output / "model" / "config.json").read_text())["encoder_layerdrop"] == 0.5
