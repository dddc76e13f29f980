"""Task files, likelihoods by hand and by a naive loop, and the same numbers on any number of ranks."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tests.harness import ROOT, launch
from zerobook.data.formats import Pair, Text
from zerobook.data.templates import CausalEncoder
from zerobook.errors import ConfigError, DataError, DivergenceError
from zerobook.evaluation import held_out
from zerobook.evaluation.scorers import check_causal
from zerobook.evaluation.tasks import Encoder, Question, Scored, Task, TaskScorer, likelihoods, read_task
from zerobook.health.position import here

FIXTURES = sorted((ROOT / "tests" / "fixtures" / "tasks").glob("*.jsonl"))
GOOD = {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}


def log_likelihoods(*args, **kwargs):
    return [score.log_probability for score in likelihoods(None, *args, **kwargs)]


def write(folder: Path, *lines: object, name: str = "task") -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


@pytest.fixture(scope="module")
def llama(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny / "llama").eval(), AutoTokenizer.from_pretrained(tiny / "llama")


@pytest.fixture(scope="module")
def tasks():
    return [read_task(file) for file in FIXTURES]


# --- files
def test_answers_are_indices_or_letters(tmp_path):
    lines = [GOOD | {"answer": "B", "subject": "sums"}, "", GOOD | {"answer": 0, "extra": 1}, GOOD | {"choices": list("abc")}]
    task = read_task(write(tmp_path, *lines, name="mix"))
    assert task.name == "mix"
    assert [q.answer for q in task.questions] == [1, 0, 1]
    assert [q.subject for q in task.questions] == ["sums", None, None]
    assert task.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "the line: Invalid JSON"),
        ("[1]", "the line: "),
        ({"question": "?"}, "choices: Field required"),
        (GOOD | {"question": " "}, "question: "),
        (GOOD | {"choices": ["4"]}, "choices: "),
        (GOOD | {"choices": ["3", 4]}, "choices.1: "),
        (GOOD | {"choices": ["3", ""]}, "choices.1: "),
        (GOOD | {"choices": ["3", "\ud800"]}, "the line: Invalid JSON"),
        (GOOD | {"answer": 2}, "answer: Value error, 2; expected an index from 0 to 1 or a letter from A to B"),
        (GOOD | {"answer": -1}, "answer: Value error, -1"),
        (GOOD | {"answer": "C"}, "answer: Value error, 'C'"),
        (GOOD | {"answer": ""}, "answer: Value error, ''"),
        (GOOD | {"answer": True}, "answer: Value error, True"),
        (GOOD | {"subject": 3}, "subject: "),
        ("[" * 100_000, "the line: Invalid JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path, line, reason):
    file = write(tmp_path, GOOD, "", line)
    with pytest.raises(DataError) as caught:
        read_task(file)
    assert f"{file}: 1 of 2 questions are bad" in str(caught.value)
    assert f"{file}, line 3: {reason}" in str(caught.value)


def test_many_bad_lines_are_counted_and_the_first_listed(tmp_path):
    with pytest.raises(DataError) as caught:
        read_task(write(tmp_path, *[{}] * 9))
    text = str(caught.value)
    assert "9 of 9 questions" in text and "line 5" in text and "line 6" not in text and text.endswith("and 4 more")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: the task cannot be read: No such file"):
        read_task(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="the task is empty"):
        read_task(write(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(DataError, match=r"not UTF-8 text \(byte 0\)"):
        read_task(tmp_path / "latin.jsonl")


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(values, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
rows = st.fixed_dictionaries({}, optional=dict.fromkeys(("question", "choices", "answer", "subject"), values))


@given(st.lists(rows.map(json.dumps) | st.text(max_size=20), max_size=4))
@example(['{"question": "?", "choices": ["a", "b"], "answer": ' + "9" * 5000 + "}"])
def test_any_file_is_a_task_or_a_data_error(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("any") / "any.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    try:
        task = read_task(file)
    except DataError as error:
        assert str(file) in str(error)
    else:
        assert all(0 <= q.answer < len(q.choices) for q in task.questions)


# --- likelihoods
def test_a_question_is_read_as_training_reads_it(llama):
    """Running text, pairs and questions all begin with a BOS if the tokenizer begins a text with one."""
    made = copy.deepcopy(llama[1])
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    for tokenizer in (llama[1], made):
        scored = Encoder(tokenizer)("Is it open?", "Until nine.")
        trained = CausalEncoder(tokenizer, length=None).encode([
            Text("Is it open?\nAnswer: Until nine."), Pair("Is it open?\nAnswer:", " Until nine.")
        ])  # fmt: skip
        assert [encoded.input_ids.tolist() for encoded in trained] == [[*scored.ids, 2]] * 2
        assert (scored.ids[0] == 1) is (tokenizer is made)


def test_a_question_that_names_a_special_token_is_refused(llama):
    for question, choice in (("a<|im_end|>", "b"), ("a", "<|im_start|>b")):
        with pytest.raises(
            DataError, match=r"has the text '<\|im_(start|end)\|>', which the tokenizer reads as a special token"
        ):
            Encoder(llama[1])(question, choice)


def test_no_task_is_measured_on_an_encoder_decoder():
    check_causal([], "seq2seq")
    check_causal(["mine.jsonl"], "causal")
    with pytest.raises(ConfigError, match=r"mine\.jsonl"):
        check_causal(["mine.jsonl"], "seq2seq")


class Bigram(torch.nn.Module):
    """Logits of the next token from the last one alone, so that likelihoods can be added up by hand."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = torch.nn.Parameter(table)
        self.forwards = 0

    def forward(self, input_ids, attention_mask, use_cache):
        self.forwards += 1
        assert use_cache is False and not torch.is_grad_enabled() and not self.training
        return SimpleNamespace(logits=self.table[input_ids])


def test_likelihoods_by_hand():
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    rows = [Scored([0, 1, 2], 1), Scored([2, 2, 0, 1, 1], 3), Scored([1, 2], 1)]
    before = here().since
    scores = log_likelihoods(Bigram(probabilities.log()).eval(), rows, pad_token_id=0, batch_size=2)
    assert scores == pytest.approx([math.log(0.25 * 0.7), math.log(0.25 * 0.2), math.log(0.7)])
    assert here().since > before, "a long evaluation hangs in no batch"


def naive(model, tokenizer, task: Task) -> list[float]:
    """One choice at a time, token by token, where the prompt's tokens do not depend on what follows."""
    found = []
    for q in task.questions:
        for choice in q.choices:
            prompt = tokenizer(f"{q.question}\nAnswer:", add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{q.question}\nAnswer: {choice}", add_special_tokens=False)["input_ids"]
            assert ids[: len(prompt)] == prompt
            total = 0.0
            for end in range(len(prompt), len(ids)):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids[:end]])).logits[0, -1]
                total += logits.log_softmax(-1)[ids[end]].item()
            found.append(total)
    return found


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batches_and_padding_change_nothing(llama, tasks, batch_size):
    model, tokenizer = llama
    task = Task("short", (*tasks[0].questions[:2], *tasks[1].questions[7:9]))
    scorer = TaskScorer([task], tokenizer, batch_size)
    scores = log_likelihoods(model, scorer.sequences, pad_token_id=2, batch_size=batch_size)
    assert len({len(row.ids) for row in scorer.sequences}) > 3, "the rows must differ in length for this to prove anything"
    assert scores == pytest.approx(naive(model, tokenizer, task), abs=1e-5)


def test_a_forward_takes_fewer_choices_where_their_logits_would_be_too_many(llama, tasks, monkeypatch):
    model, tokenizer = llama
    seen = []

    def scored():
        seen.clear()
        with monkeypatch.context() as patch:
            own = type(model).forward

            def forward(self, *args, **kwargs):
                output = own(self, *args, **kwargs)
                seen.append(output.logits.numel())
                return output

            patch.setattr(type(model), "forward", forward)
            return TaskScorer(tasks[:1], tokenizer, 16)(None, model)

    whole, most = scored(), max(seen)
    monkeypatch.setattr(held_out, "LOGITS", most // 3)
    assert scored() == whole and max(seen) <= most // 3


def test_a_token_over_the_boundary_belongs_to_the_choice():
    from tokenizers import Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.train_from_iterator(["Answer: yes", "Answer: no"] * 9, trainers.BpeTrainer(vocab_size=40, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="r")
    yes = Encoder(tokenizer)("e", "yes")
    tokens = tokenizer.convert_ids_to_tokens(yes.ids)
    assert tokens[yes.first].startswith(": "), "the merge across the boundary is what this is about"
    assert "".join(tokens[yes.first :]) == ": yes"


def test_choices_of_many_bytes_and_a_start_token(llama):
    _, tokenizer = llama
    row = Encoder(tokenizer)("Which?", "é 世界")
    assert tokenizer.decode(row.ids[row.first :]) == " é 世界" and tokenizer.decode(row.ids) == "Which?\nAnswer: é 世界"

    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    starting = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    starting.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    lead = Encoder(starting)("Which?", "é 世界")
    assert (lead.ids, lead.first) == ([1, *row.ids], row.first + 1), "a start token and no end token"


def test_a_chat_template_makes_the_prompt_a_users_turn(llama):
    _, tokenizer = llama
    row = Encoder(tokenizer, apply_chat_template=True)("Who?", "Me")
    assert tokenizer.decode(row.ids[: row.first]) == "<|im_start|>user\nWho?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.ids[row.first :]) == "Me"


def test_long_prompts_lose_their_beginning(llama):
    model, tokenizer = llama
    task = Task("long", (Question("long " * 99 + "now?", ("no", "yes, now"), 0),))
    scorer = TaskScorer([task], tokenizer, 4, max_length=16)
    assert scorer.truncated_count == 2 and [len(row.ids) for row in scorer.sequences] == [16, 16]
    assert [tokenizer.decode(row.ids[row.first :]) for row in scorer.sequences] == [" no", " yes, now"]
    assert scorer(None, model)[0].keys() == {"task/long/acc", "task/long/acc_norm"}
    with pytest.raises(DataError, match="leaves no room for its question: the model takes 3 tokens"):
        TaskScorer([task], tokenizer, 4, max_length=3)


# --- accuracy
def test_accuracies_by_hand(llama):
    _, tokenizer = llama
    # every token has the same likelihood, so fewest tokens win acc and most bytes a token win acc_norm
    uniform = Bigram(torch.zeros(len(tokenizer), len(tokenizer))).eval()
    short, long, rare = "x", " your computer", "żółć"
    length = {text: len(tokenizer(" " + text, add_special_tokens=False)["input_ids"]) for text in (short, long, rare)}
    weight = {text: length[text] / len(text.encode()) for text in length}
    assert min(length, key=length.get) == short and min(weight, key=weight.get) == long
    task = Task(
        "uniform",
        (
            Question("a", (short, long, rare), 0, "first"),
            Question("b", (long, rare, short), 0, "second"),
            Question("c", (rare, long, short), 2, "second"),
            Question("d", (rare, rare), 0),  # equal choices: the first is picked
            Question("e", (rare, short), 0),  # letters of two bytes: more bytes a token, but fewer letters
        ),
    )
    metrics, table = TaskScorer([task], tokenizer, 4)(None, uniform, step=7)
    assert metrics == {"task/uniform/acc": 3 / 5, "task/uniform/acc_norm": 3 / 5}
    assert [(row["subject"], row["questions"], row["acc"], row["acc_norm"]) for row in table] == [
        (None, 5, 0.6, 0.6), ("first", 1, 1.0, 0.0), ("second", 2, 0.5, 0.5)
    ]  # fmt: skip
    assert table[0]["acc_stderr"] == pytest.approx(math.sqrt(0.6 * 0.4 / 5))
    assert table[0]["chance"] == pytest.approx((3 * 1 / 3 + 2 * 1 / 2) / 5)
    assert {row["step"] for row in table} == {7} and {row["task"] for row in table} == {"uniform"}


def test_broken_weights_are_an_error_and_names_are_unique(llama, tasks):
    _, tokenizer = llama
    broken = Bigram(torch.full((len(tokenizer), len(tokenizer)), math.nan)).eval()
    with pytest.raises(DivergenceError, match="48 of 48 likelihoods are nan"):
        TaskScorer(tasks[:1], tokenizer, 4)(None, broken)
    with pytest.raises(ConfigError, match="two task files are called arithmetic"):
        TaskScorer([tasks[0], tasks[0]], tokenizer, 4)


class Ranks:
    """A strategy of ``world_size`` ranks that run one after another in this process."""

    device = torch.device("cpu")

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.rank = 0
        self.parts: list[torch.Tensor] = []

    @property
    def mesh(self):
        # Each rank computes tokens of its own.
        return SimpleNamespace(
            token_parallel_rank=self.rank, token_parallel_size=self.world_size, sum_over_samples=self.sum_over_ranks
        )

    def sum_over_ranks(self, values):
        self.parts.append(values)
        return torch.stack(self.parts).sum(0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_the_work_and_find_the_same(llama, tasks, world_size):
    model, tokenizer = llama
    scorer = TaskScorer(tasks, tokenizer, 7)  # 14 batches: 3 and 4 ranks must fill up
    expected = scorer(None, model)
    strategy, forwards = Ranks(world_size), []
    hook = model.register_forward_hook(lambda *_: forwards.append(strategy.rank))
    for strategy.rank in range(world_size):
        found = scorer(strategy, model)
    hook.remove()
    counts = [forwards.count(rank) for rank in range(world_size)]
    assert counts == [math.ceil(14 / world_size)] * world_size, "a gather of weights waits for every rank"
    assert found == expected, "not nearly: the same numbers"
    alone = log_likelihoods(model, scorer.sequences, pad_token_id=2, batch_size=7)
    assert torch.stack(strategy.parts).sum(0)[:, 0].tolist() == alone


@pytest.mark.launch
def test_real_ranks_that_hold_pieces_of_the_weights(llama, tasks, tiny, tmp_path):
    """ZeRO-3 on two processes: every forward gathers weights from both, so an odd one out would hang."""
    model, tokenizer = llama
    scorer = TaskScorer(tasks, tokenizer, 32)  # 3 batches
    expected = scorer(None, model, step=3)
    scores = log_likelihoods(model, scorer.sequences, pad_token_id=2, batch_size=32)
    flags = dict(model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl")
    launch("zero3", 2, str(Path(__file__).with_suffix("")), tmp_path, **flags)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["forwards"] == 2
        assert found["table"] == expected[1] and found["metrics"] == expected[0]
        assert found["scores"] == pytest.approx(scores, abs=1e-5)


def score_in_a_launch() -> None:
    """Run in the launched processes of the test above."""
    from zerobook.config import RecipeConfig
    from zerobook.config_sources import parse
    from zerobook.launch.build import build, resolve_this_process
    from zerobook.models.load import load_model, load_tokenizer

    config, sources, _ = parse(RecipeConfig)
    plan, config, _ = resolve_this_process(config, sources)
    strategy = build(config, plan)
    tokenizer = load_tokenizer(config, strategy)
    strategy.prepare(load_model(config, strategy), config, total_steps=1)
    assert strategy.shards_parameters
    forwards, scores = [], []
    strategy.model.register_forward_hook(lambda *_: forwards.append(1))
    real = strategy.mesh.sum_over_samples
    strategy.mesh.sum_over_samples = lambda values: scores.append(real(values).tolist()) or values
    strategy.model.eval()
    metrics, table = TaskScorer([read_task(file) for file in FIXTURES], tokenizer, 32)(strategy, strategy.model, 3)
    result = {"metrics": metrics, "table": table, "forwards": len(forwards)}
    result["scores"] = [value for value, _ in scores[-1]]
    (Path(config.output_dir) / f"rank{strategy.rank}.json").write_text(json.dumps(result))
    strategy.barrier()


# --- the command
def test_the_command_prints_a_table_or_one_object(tiny, capsys):
    from zerobook.cli.main import main

    line = ["eval", str(tiny / "llama"), "--tasks", f"{FIXTURES[0]},{FIXTURES[1]}"]
    assert main([*line, "--json", "--batch_size", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["tasks"]) == ["arithmetic", "geography"]
    geography = found["tasks"]["geography"]
    assert geography["questions"] == 12 and geography["chance"] == 0.25 and 0 <= geography["acc"] <= 1
    assert {subject: row["questions"] for subject, row in geography["subjects"].items()} == {
        "capitals": 4, "continents": 4, "waters": 4
    }  # fmt: skip
    assert main(line) == 0
    text = capsys.readouterr().out
    assert f"{geography['acc']:.3f} ± {geography['acc_stderr']:.3f}" in text and "sqrt(p (1 - p) / n)" in text
    assert main(["eval", str(tiny / "llama"), "--tasks", "none.jsonl"]) == 2
    assert "DataError: none.jsonl: the task cannot be read" in capsys.readouterr().err


def test_examples_before_a_question_are_not_left_out_in_silence(capsys):
    from zerobook.cli.main import main

    with pytest.raises(SystemExit):
        main(["eval", "model", "--tasks", str(FIXTURES[0]), "--num_fewshot", "5"])
    assert "--num_fewshot" in capsys.readouterr().err


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from zerobook.launch.process import exit_on_error, leave

    with exit_on_error():
        score_in_a_launch()
    leave()
