"""Tasks of lm-evaluation-harness: its own model and ours agree, on one process and spread, from YAML files and local data."""

from __future__ import annotations

import copy
import json
import random
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.alone import train
from tests.harness import ROOT, launch
from zerobook.cli import eval as cli_eval
from zerobook.cli import export as cli_export
from zerobook.cli.eval import evaluate
from zerobook.errors import ConfigError, DivergenceError
from zerobook.evaluation.harness import HarnessScorer, _harness_model, load_tasks
from zerobook.evaluation.scorers import fetch_tasks
from zerobook.evaluation.tasks import TaskScorer, read_task

QUESTIONS = ROOT / "tests" / "fixtures" / "tasks"
CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Task files of the harness: one of choices, whose letters are indices, and one of running text."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    questions = [q for file in sorted(QUESTIONS.glob("*.jsonl")) for q in read_task(file).questions]
    lines = [{"question": q.question, "choices": [*q.choices], "answer": q.answer} for q in questions]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (
        ("choices", CHOICES),
        ("text", TEXT),
        ("spoken", TEXT.replace("loglikelihood_rolling", "generate_until")),
    ):
        (folder / f"{name}.yaml").write_text(text.format(name=f"zerobook_{name}", data=data))
    return folder


@pytest.fixture(scope="module")
def llama(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny / "llama").eval(), AutoTokenizer.from_pretrained(tiny / "llama")


def test_it_computes_what_the_harness_own_model_computes(llama, tasks):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = llama
    names = ["zerobook_choices", "zerobook_text"]
    theirs = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=512), tasks=names, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]  # fmt: skip
    state, drawn = torch.get_rng_state(), random.getstate()
    files = [str(tasks / "choices.yaml"), str(tasks / "text.yaml")]
    ours, table = HarnessScorer(files, tokenizer, 4, max_length=512)(None, model)
    assert table == [] and not model.training
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == drawn, "training goes on as without it"
    wanted = {f"task/{name}/{key.removesuffix(',none')}": value for name in names for key, value in theirs[name].items()
              if key.endswith(",none") and "stderr" not in key}  # fmt: skip
    assert {name.rsplit("/")[-1] for name in wanted} == {"acc", "acc_norm", "word_perplexity", "bits_per_byte"}
    assert ours == pytest.approx(wanted, rel=1e-5)


@pytest.fixture(scope="module")
def bos_tokenizer():
    """A tokenizer that puts BOS before a text, with a chat template that writes BOS, too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = (
        "{{ bos_token }}{% for m in messages %}[user]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("max_length", [16, 512])
@pytest.mark.parametrize("chat", [False, True])
def test_likelihoods_are_those_of_the_harness_own_model(bos_tokenizer, tasks, chat, max_length):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    config = LlamaConfig(
        vocab_size=len(bos_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    scorer = HarnessScorer([str(tasks / "text.yaml")], bos_tokenizer, 4, max_length=max_length, apply_chat_template=chat)
    ours = _harness_model(scorer, None, model, False)
    theirs = HFLM(pretrained=model, tokenizer=bos_tokenizer, device="cpu", batch_size=4, max_length=max_length)
    prompt = "The quick brown fox jumps over the lazy"
    if chat:
        prompt = ours.apply_chat_template([{"role": "user", "content": prompt}])
    choices = [Instance("loglikelihood", {}, (prompt, choice), 0) for choice in (" dog", " cat.", " of")]
    text = [Instance("loglikelihood_rolling", {}, (3 * prompt,), 0)]

    likelihoods = [likelihood for likelihood, _ in ours.loglikelihood(choices)]
    rolling = ours.loglikelihood_rolling(text)

    assert likelihoods == pytest.approx([likelihood for likelihood, _ in theirs.loglikelihood(choices)], rel=1e-5)
    assert rolling == pytest.approx(theirs.loglikelihood_rolling(text), rel=1e-5)
    assert scorer.truncated_count == (3 if max_length == 16 else 0), "windows of a text lose nothing"


def test_a_model_of_nan_has_no_accuracy(llama, tasks):
    model = copy.deepcopy(llama[0])
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(DivergenceError, match="nan"):
        HarnessScorer([str(tasks / "choices.yaml")], llama[1], 4, limit=2)(None, model)


@pytest.mark.parametrize("ending", ["yaml", "yml"])
def test_the_task_is_read_from_the_file_that_is_named(tasks, tmp_path, ending):
    definition = (tasks / "choices.yaml").read_text()
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "mine.yaml").write_text(definition.replace("Answer:", "Old:"))
    (tmp_path / f"mine.{ending}").write_text(definition)

    _, names, objects = load_tasks([str(tmp_path / f"mine.{ending}")])

    assert names == ["zerobook_choices"]
    assert objects[0].config.doc_to_text.endswith("Answer:")


SHUFFLE = """
import random


def process_docs(dataset):
    def shuffle(question):
        choices = list(question["choices"])
        random.shuffle(choices)
        return question | {"choices": choices}

    return dataset.map(shuffle)
"""


def test_shuffled_choices_do_not_depend_on_the_random_state_of_a_process(tasks, tmp_path, monkeypatch):
    # Another process does not find the choices in the cache of this one.
    monkeypatch.setattr("datasets.fingerprint._CACHING_ENABLED", False)
    (tmp_path / "utils.py").write_text(SHUFFLE)
    (tmp_path / "shuffled.yaml").write_text((tasks / "choices.yaml").read_text() + "process_docs: !function utils.process_docs")
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        _, _, [task] = load_tasks([str(tmp_path / "shuffled.yaml")])
        orders.append([question["choices"] for question in task.task_docs])

    assert orders[0] == orders[1]
    _, _, [task] = load_tasks([str(tasks / "choices.yaml")])
    assert orders[0] != [question["choices"] for question in task.task_docs]


def test_two_files_of_one_task_name_are_an_error(tasks, tmp_path):
    copied = shutil.copy(tasks / "choices.yaml", tmp_path / "copy.yaml")
    with pytest.raises(ConfigError, match="zerobook_choices"):
        load_tasks([str(tasks / "choices.yaml"), str(copied)])


def test_the_file_of_a_group_is_an_error_that_says_so(tmp_path):
    file = tmp_path / "group.yaml"
    file.write_text("group: both\ntask: [zerobook_choices, zerobook_text]\n")
    with pytest.raises(ConfigError, match="the file of a group"):
        load_tasks([str(file)])


def test_a_task_file_and_the_harness_agree(llama, tasks):
    model, tokenizer = llama
    found = HarnessScorer([str(tasks / "choices.yaml")], tokenizer, 4)(None, model)[0]
    files = [read_task(file) for file in sorted(QUESTIONS.glob("*.jsonl"))]
    metrics, _ = TaskScorer(files, tokenizer, 4)(None, model)
    count = sum(len(file.questions) for file in files)
    right = sum(metrics[f"task/{file.name}/acc"] * len(file.questions) for file in files)
    assert found["task/zerobook_choices/acc"] == pytest.approx(right / count)


@pytest.mark.parametrize(
    "task, words",
    [
        pytest.param("arc_eazy", "no such task. Did you mean .*arc_easy", marks=pytest.mark.full),  # all of its files are read
        ("spoken.yaml", "generates text"),
        ("none.yaml", "is not a task file"),
    ],
)
def test_what_cannot_be_measured_is_an_error(llama, tasks, task, words):
    with pytest.raises(ConfigError, match=words):
        HarnessScorer([str(tasks / task) if task.endswith("yaml") else task], llama[1], 4)


def test_a_task_is_loaded_before_the_data_of_its_run_are_prepared(tiny, tasks, tmp_path):
    flags = {"model_name_or_path": tiny / "llama", "train_file": tiny / "few.jsonl", "block_size": 64, "max_train_steps": 1}
    with mock.patch("zerobook.data.prepare.prepare", side_effect=AssertionError("data are prepared")) as prepare:
        with pytest.raises(ConfigError, match="generates text"):
            train(tmp_path / "causal", eval_tasks=tasks / "spoken.yaml", **flags)
        with pytest.raises(ConfigError, match="encoder-decoder"):
            fetch_tasks([str(tasks / "choices.yaml")], encoder_decoder=True)
        prepare.assert_not_called()

        with pytest.raises(AssertionError, match="data are prepared"):
            train(tmp_path / "measured", eval_tasks=tasks / "choices.yaml", **flags)


def test_a_name_that_the_harness_does_not_know_gets_the_nearest(llama, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: SimpleNamespace(all_tasks=["arc_easy", "piqa"]))
    with pytest.raises(ConfigError, match=r"no such task. Did you mean arc_easy\?"):
        HarnessScorer(["arc_eazy"], llama[1], 4)


def test_an_evaluation_does_not_read_the_harness_own_tasks(llama, tasks, monkeypatch):
    from lm_eval.tasks import TaskManager

    indexes = []

    class Index(TaskManager):
        def __init__(self, **options):
            indexes.append(options["include_defaults"])
            super().__init__(**options)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Index)
    monkeypatch.setattr("lm_eval.evaluator.TaskManager", Index)
    scorer = HarnessScorer([str(tasks / "choices.yaml")], llama[1], 4, limit=1)
    for step in (1, 2):
        scorer(None, llama[0], step)
    assert indexes == [False]


def test_the_command_prints_a_table_or_one_object(tiny, tasks, capsys):
    names = f"{tasks / 'choices.yaml'},{tasks / 'text.yaml'}"
    questions = sorted(QUESTIONS.glob("*.jsonl"))[0]
    line = [str(tiny / "llama"), "--limit", "3", "--tasks"]
    assert evaluate([*line, f"{names},{questions}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["task"] for row in found["lm_evaluation_harness"]} == {"zerobook_choices", "zerobook_text"}
    accuracy = next(row for row in found["lm_evaluation_harness"] if row["metric"] == "acc")
    share = accuracy["value"]
    assert accuracy["stderr"] == pytest.approx((share * (1 - share) / 2) ** 0.5), "of a mean over three questions"
    assert found["tasks"]
    assert evaluate([*line, names]) == 0
    assert "zerobook_choices" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["arc_easy", str(QUESTIONS / "arithmetic.jsonl")])
def test_a_tokenizer_without_a_chat_template_is_an_error_where_one_is_asked_for(task, monkeypatch):
    loaded = SimpleNamespace(kind="causal", tokenizer=SimpleNamespace(chat_template=None))
    monkeypatch.setattr(cli_eval, "load_result", lambda *_, **__: loaded)
    with pytest.raises(ConfigError, match="no chat template"):
        evaluate(["model", "--tasks", task, "--apply_chat_template"])


def test_a_skipped_checkpoint_is_not_named_in_the_results(tmp_path, monkeypatch, capsys):
    resolution = SimpleNamespace(skipped={tmp_path: "the newest one"}, checkpoint=tmp_path)
    monkeypatch.setattr(cli_export, "resolve_resume", lambda *_, **__: resolution)
    monkeypatch.setattr(cli_eval, "_score_tasks", lambda *_: {"tasks": {}})
    assert evaluate([str(tmp_path), "--checkpoint", "auto", "--tasks", "arc_easy", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tasks"] == {} and "the newest one" in err


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    "strategy, rows", [("zero3", 1), ("fsdp", 1), ("fsdp_tensor", 2), ("fsdp_context", 2), ("zero3_sequence", 2)]
)
def test_spread_over_ranks_is_one_process(tiny, tasks, tmp_path, strategy, rows):
    """``rows``: of a micro-batch. Processes that share rows take two, so that the batch of a step is always two rows."""
    given = dict(
        model_name_or_path=tiny / "llama", dataset_name="embedded:stdlib", block_size=64, max_train_samples=32,
        max_train_steps=4, eval_steps=2, logging_steps=1, max_eval_samples=4, per_device_eval_batch_size=4,
        eval_tasks=[tasks / "choices.yaml", tasks / "text.yaml"],
    )  # fmt: skip
    alone = launch("single", 1, "causal_lm", tmp_path / "alone", per_device_train_batch_size=2, **given)
    run = launch(strategy, 2, "causal_lm", tmp_path / "run", per_device_train_batch_size=rows, **given)
    plain = launch("single", 1, "causal_lm", tmp_path / "plain", per_device_train_batch_size=2, **given | {"eval_tasks": []})
    assert plain.losses == alone.losses, "measuring does not change the training"
    measured = [[event["metrics"] for event in one.events if event["type"] == "eval"] for one in (alone, run)]
    assert len(measured[0]) >= 2 and "task/zerobook_choices/acc" in measured[0][0]
    for theirs, ours in zip(*measured, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
