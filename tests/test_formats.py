"""Rows of every format to canonical samples, end to end to ids, and rows that cannot be used."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobook.constants import IGNORE
from zerobook.data.formats import (
    FORMATS,
    PAIR_COLUMNS,
    BadSample,
    Chat,
    EmptyText,
    Format,
    Pair,
    Text,
    Tokens,
    check_unread,
    detect,
    list_unread,
    parse,
    read_preference,
)
from zerobook.data.templates import CausalEncoder
from zerobook.data.tokens import LOSS_MASKS, read_tokens
from zerobook.errors import DataError

FIXTURES = Path(__file__).parent / "fixtures" / "formats"


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines()]


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    made = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *made] if system else made


# file -> format, the samples, and what of each the causal model learns to say (None: every token, and the end)
EXPECTED = {
    "text": (
        "text",
        [
            Text("Bread needs flour, water, salt and time.\nMost of it is time."),
            Text("A café in Zürich, naïve façade: ünïcödé counts as text."),
        ],
        [
            "Bread needs flour, water, salt and time.\nMost of it is time.<|im_end|>",
            "A café in Zürich, naïve façade: ünïcödé counts as text.<|im_end|>",
        ],
    ),
    "content": (
        "text",
        [Text("def double(x):\n    return 2 * x\n"), Text("# A list\n\n- one\n- two\n")],
        ["def double(x):\n    return 2 * x\n<|im_end|>", "# A list\n\n- one\n- two\n<|im_end|>"],
    ),
    "instruction": (
        "instruction",
        [
            Chat(turns("Name a colour.", "Blue.")),
            Chat(turns("Translate into French.\n\nGood morning", "Bonjour")),
            Chat(turns("Count to three.", "One, two, three.", system="Be brief.")),
        ],
        ["Blue.<|im_end|>", "Bonjour<|im_end|>", "One, two, three.<|im_end|>"],
    ),
    "dolly": (
        "instruction",
        [
            Chat(turns("When did it open?\n\nThe station opened in 1884.", "In 1884.")),
            Chat(turns("Why is the sky blue?", "Air scatters blue light more than red.")),
        ],
        ["In 1884.<|im_end|>", "Air scatters blue light more than red.<|im_end|>"],
    ),
    "sharegpt": (
        "sharegpt",
        [
            Chat(turns("Hello?", "Hi there.")),
            Chat(
                [
                    {"role": "system", "content": "You keep the weather."},
                    {"role": "user", "content": "Rain today?"},
                    {"role": "assistant", "content": "<ask>rain</ask>"},
                    {"role": "tool", "content": '{"rain": 0.8}'},
                    {"role": "assistant", "content": "Most likely."},
                    {"role": "user", "content": "Thank you."},
                ]
            ),
        ],
        ["Hi there.<|im_end|>", "<ask>rain</ask><|im_end|>Most likely.<|im_end|>"],
    ),
    "messages": (
        "messages",
        [
            Chat(turns("Two and two?", "Four.", system="Answer in one word.")),
            Chat(turns("Who are you?", "A book.", "Of what?", "Recipes.")),
        ],
        ["Four.<|im_end|>", "A book.<|im_end|>Recipes.<|im_end|>"],
    ),
    "prompt_completion": (
        "prompt_completion",
        [Pair("The capital of France is", " Paris."), Chat(turns("The capital of Italy?", "Rome."), frozenset({0}))],
        [" Paris.<|im_end|>", "Rome.<|im_end|>"],
    ),
    "pairs": (
        "pairs",
        [
            Pair(
                "The town council met on Monday. It voted to plant forty trees along the river.", "Council plants forty trees."
            ),
            Pair("The library stays open until nine on Thursdays, starting next month.", "Library opens longer."),
        ],
        ["Council plants forty trees.<|im_end|>", "Library opens longer.<|im_end|>"],
    ),
    "dialogues": (
        "pairs",
        [
            Pair("My printer does not print.", "Is it switched on?"),
            Pair("I forgot my password.", "Use the link below the login form."),
        ],
        ["Is it switched on?<|im_end|>", "Use the link below the login form.<|im_end|>"],
    ),
    "tokenized": (
        "tokenized",
        [
            Tokens([3, 40, 5, 60, 2], [3, 40, 5, 60, 2]),
            Tokens([7, 8, 9], [IGNORE, 8, 9]),
            Tokens([7, 8, 9], [7, 8, 9]),
        ],
        [[3, 40, 5, 60, 2], [8, 9], [7, 8, 9]],
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


def test_every_fixture_and_every_format_is_looked_at():
    assert {file.stem for file in FIXTURES.glob("*")} == set(EXPECTED)
    assert {format for format, _, _ in EXPECTED.values()} == set(FORMATS)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_each_format_end_to_end(name, tokenizer):
    format, samples, said = EXPECTED[name]
    rows = read(name)
    assert {detect(row) for row in rows} == {format}
    parsed = [parse(format, row) for row in rows]
    assert parsed == samples
    for encoded, expected in zip(CausalEncoder(tokenizer, length=128).encode(parsed), said, strict=True):
        supervised = encoded.labels[encoded.labels != IGNORE]
        assert (supervised == encoded.input_ids[encoded.labels != IGNORE]).all()
        assert (tokenizer.decode(supervised) if isinstance(expected, str) else supervised.tolist()) == expected


@pytest.mark.parametrize(
    "columns, format",
    [
        (["text", "input_ids", "attention_mask"], "tokenized"),
        (["prompt", "prompt_id", "messages"], "messages"),
        (["conversations", "text"], "sharegpt"),
        (["prompt", "completion", "text"], "prompt_completion"),
        (["instruction", "input", "output", "text"], "instruction"),
        (["instruction", "context", "response", "category"], "instruction"),
        (["text", "summary", "title"], "pairs"),
        (["text", "source", "id"], "text"),
        (["content", "path"], "text"),
        *((list(pair), "pairs") for pair in PAIR_COLUMNS),
    ],
)
def test_the_format_follows_from_the_columns(columns, format):
    assert detect(columns) == detect(columns[::-1]) == format


def test_columns_that_fit_nothing_are_named_with_the_way_out():
    with pytest.raises(DataError) as caught:
        detect(["headline", "body"])
    message = str(caught.value)
    assert "the columns body, headline" in message and "--format" in message and "messages: messages" in message
    with pytest.raises(DataError, match=r"--format alpaca: no such format\. There are: tokenized, messages"):
        parse("alpaca", {"text": "a"})


def test_a_pair_named_by_hand_comes_first():
    row = {"text": "a", "headline": "b", "body": "c"}
    named = {"text_column": "body", "summary_column": "headline"}
    assert detect(row, **named) == "pairs"
    assert parse("pairs", row, **named) == Pair("c", "b")
    assert parse("text", row, **named) == Text("a"), "only pairs look at them"
    with pytest.raises(DataError, match="--summary_column head: the samples have the columns body, headline, text"):
        detect(row, text_column="body", summary_column="head")
    for function, first in ((detect, ()), (parse, ("pairs",))):
        with pytest.raises(DataError, match="Give both, or neither"):
            function(*first, row, text_column="body")
    with pytest.raises(BadSample, match=r"expected body \+ headline, it has body"):
        parse("pairs", {"body": "c"}, **named)


ASK, SAY, SYSTEM, TOOL = (
    {"role": role, "content": "x"} for role in ("user", "assistant", "system", "tool")
)  # fmt: skip


def test_keys_of_a_turn_that_change_nothing_are_ignored():
    keys = {"weight": 1, "train": True, "reasoning_content": "", "tool_calls": None}
    assert parse("messages", {"messages": [{**ASK, "weight": 0}, {**SAY, **keys}]}) == Chat([ASK, SAY])


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]}, Chat([ASK, SAY, ASK, SAY], frozenset({1}))),
        ({"messages": [ASK, {**SAY, "train": False}]}, Chat([ASK, SAY], frozenset({1}))),
        ({"messages": [ASK, SAY], "system": "x"}, Chat([SYSTEM, ASK, SAY])),
        ({"messages": [ASK, {**SAY, "training": False}], "system": "x"}, Chat([SYSTEM, ASK, SAY], frozenset({2}))),
        ({"messages": [{"role": "developer", "content": "x"}, ASK, SAY]}, Chat([SYSTEM, ASK, SAY])),
        ({"messages": [{"role": "user", "content": [{"type": "text", "value": "x"}]}, SAY]}, Chat([ASK, SAY])),
        ({"messages": [ASK, SAY], "tools": '[{"name": "add"}]'}, Chat([ASK, SAY], tools=[{"name": "add"}])),
        ({"messages": [ASK, SAY], "tools": []}, Chat([ASK, SAY])),
        ({"messages": [ASK, {**SAY, "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]}]},
         Chat([ASK, {"role": "assistant", "tool_calls": [CALL], "content": None}])),
        ({"messages": [ASK, {**SAY, "function_call": CALL["function"]}, {**TOOL, "role": "function"}, SAY]},
         Chat([ASK, {"role": "assistant", "tool_calls": [CALL], "content": "x"}, TOOL, SAY])),
        ({"conversations": [{"from": "human", "value": "x"},
                            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                            {"from": "observation", "value": "x"}, {"from": "gpt", "value": "x"}]},
         Chat([ASK, {"role": "assistant", "tool_calls": [CALL], "content": None}, TOOL, SAY])),
        ({"messages": [ASK, {**SAY, "reasoning_content": "hm"}]},
         Chat([ASK, {"role": "assistant", "reasoning_content": "hm", "content": "x"}])),
        ({"prompt": [ASK, SAY, ASK], "completion": [SAY]}, Chat([ASK, SAY, ASK, SAY], frozenset({0, 1, 2}))),
        ({"instruction": "x", "output": "x", "history": [["x", "x"]], "system": "x"}, Chat([SYSTEM, ASK, SAY, ASK, SAY])),
        ({"instruction": "x", "input": "y", "response": "x"}, Chat([{**ASK, "content": "x\n\ny"}, SAY])),
        ({"instruction": "x", "context": "y", "output": "x"}, Chat([{**ASK, "content": "x\n\ny"}, SAY])),
    ],
)  # fmt: skip
def test_marks_and_parts_of_a_chat_are_read(row, expected):
    format = detect(row)
    assert parse(format, row) == expected and list_unread(format, [row]) == []


@pytest.mark.parametrize(
    "mark",
    [
        {"loss": False},
        {"loss": 0},
        {"loss": 0.0},
        {"loss": "false"},
        {"loss_mask": 0},
        {"loss_scale": 0},
        {"loss_weight": 0.0},
        {"step_loss_mask": 0},
        {"train": 0},
        {"train": "False"},
        {"trainable": False},
        {"training": 0},
        {"weight": "0"},
        {"weight": 0.0, "mask": None},
        {"mask": True},
        {"mask": 1},
        {"masked": "true"},
        {"train": False, "masked": True},
        {"train": True, "mask": True},
    ],
)
def test_a_turn_is_context_only_by_the_marks_of_other_trainers(mark):
    turns = [ASK, {**SAY, **mark}, ASK, SAY]
    assert parse("messages", {"messages": turns}) == Chat([ASK, SAY, ASK, SAY], frozenset({1}))
    assert list_unread("messages", [{"messages": turns}]) == []


@pytest.mark.parametrize(
    "mark",
    [{"loss": True}, {"loss": 1.0}, {"train": "1"}, {"weight": 1, "mask": False}, {"mask": 0}, {"masked": ""}, {"loss": None}],
)
def test_a_turn_is_supervised_by_the_marks_of_other_trainers(mark):
    assert parse("messages", {"messages": [ASK, {**SAY, **mark}]}) == Chat([ASK, SAY])


@pytest.mark.parametrize(
    "mark, key",
    [
        ({"loss": 0.37}, "loss 0.37"),
        ({"mask": "User"}, "mask 'User'"),
        ({"loss_mask": [0, 1]}, "loss_mask"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail"),
    ],
)
def test_marks_of_a_turn_that_cannot_be_followed_refuse_the_sample(mark, key):
    with pytest.raises(BadSample) as caught:
        parse("messages", {"messages": [ASK, {**SAY, **mark}]})
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps([ASK, SAY])},
        {"conversations": json.dumps([{"from": "human", "value": "x"}, {"from": "gpt", "value": "x"}])},
        {"messages": [ASK, SAY], "tools": "null"},
        {"messages": [ASK, SAY], "tools": float("nan"), "system": float("nan")},
        {"messages": [{"role": "system", "content": ""}, ASK, SAY]},
        {"messages": [{"role": "system", "content": None}, ASK, SAY]},
        {"instruction": "", "input": "x", "output": "x"},
        {"instruction": None, "input": "x", "output": "x"},
        {"instruction": "x", "input": float("nan"), "output": "x", "system": float("nan")},
    ],
)
def test_json_text_and_empty_parts_give_the_chat_that_they_stand_for(row):
    assert parse(detect(row), row) == Chat([ASK, SAY])


def test_tools_and_calls_are_read_from_json_text():
    tool = {"name": "add"}
    for tools in (json.dumps([tool]), [json.dumps(tool)], json.dumps(tool), tool):
        assert parse("messages", {"messages": [ASK, SAY], "tools": tools}) == Chat([ASK, SAY], tools=[tool])
    for calls in (json.dumps([CALL]), [json.dumps(CALL)], CALL):
        answer = {"role": "assistant", "tool_calls": calls}
        assert parse("messages", {"messages": [ASK, answer]}).messages[1]["tool_calls"] == [CALL]


def test_deeply_nested_json_text_is_a_bad_sample():
    with pytest.raises(BadSample, match="nested too deeply"):
        parse("messages", {"messages": [ASK, SAY], "tools": "[" * 100_000})


def test_a_mark_stays_with_its_turn_where_an_empty_system_turn_is_dropped():
    turns = [{"role": "system", "content": " "}, ASK, {**SAY, "loss": False}, ASK, SAY]
    assert parse("messages", {"messages": turns}) == Chat([ASK, SAY, ASK, SAY], frozenset({1}))


@pytest.mark.parametrize("nothing", ["", None])
def test_a_tool_that_prints_nothing_is_context(nothing):
    empty = {"role": "tool", "content": ""}
    assert parse("messages", {"messages": [ASK, SAY, {**TOOL, "content": nothing}, SAY]}) == Chat([ASK, SAY, empty, SAY])


def test_calls_and_their_results_keep_their_identifiers():
    answer = {**SAY, "tool_calls": [{"id": "a1", **CALL}, {"id": 2, **CALL}]}
    results = [{**TOOL, "tool_call_id": 2, "name": "add"}, {**TOOL, "tool_call_id": "a1", "name": None}]
    turns = parse("messages", {"messages": [ASK, answer, *results, SAY]}).messages
    assert [call["id"] for call in turns[1]["tool_calls"]] == ["a1", "2"]
    assert turns[2:4] == [{**TOOL, "tool_call_id": "2", "name": "add"}, {**TOOL, "tool_call_id": "a1"}]


def test_a_text_that_is_nan_is_an_empty_text():
    with pytest.raises(EmptyText):
        parse("text", {"text": float("nan")})


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"instruction": "", "input": "", "output": "x"}, "instruction is empty"),
        ({"instruction": "x", "output": float("nan")}, "output is NaN"),
        ({"messages": [SYSTEM, ASK, SAY], "system": "x"}, "begins with a system turn, and there is a column system"),
        ({"messages": [ASK, SAY], "tools": "{"}, "is not valid JSON"),
        ({"messages": [ASK, SAY], "tools": [3]}, "tools has a number in it, expected a list of objects"),
        ({"instruction": "x", "output": "x", "history": ["x"]}, "history is a list, expected a list of pairs"),
    ],
)
def test_columns_beside_a_chat_that_cannot_be_read(row, reason):
    with pytest.raises(BadSample) as caught:
        parse(detect(row), row)
    assert reason in str(caught.value)


def test_preference_data_and_prompts_without_answers_are_named():
    for row in ({"chosen": "a", "rejected": "b"}, {"messages": [ASK, SAY], "chosen": "a", "rejected": "b"}):
        with pytest.raises(DataError, match="preference data"):
            detect(row)
    encoder_formats = {"preferences": Format((("chosen", "rejected"),), lambda row, columns: row)}
    assert detect({"chosen": "a", "rejected": "b"}, encoder_formats=encoder_formats) == "preferences"
    with pytest.raises(DataError, match="prompts without answers"):
        detect({"prompt": "a", "id": 1})


def test_columns_that_are_ignored():
    rows = [{"messages": [], "system": "", "id": 1}, {"messages": [], "source": "x"}]
    assert list_unread("messages", rows) == ["id", "source"]
    assert list_unread("messages", [{"": 0, "messages": []}]) == [], "the index that pandas writes"
    assert list_unread("pairs", [{"body": 1, "head": 2, "n": 3}], text_column="body", summary_column="head") == ["n"]


@pytest.mark.parametrize("as_text", [False, True])
def test_keys_of_turns_that_are_not_read_are_named_once(as_text):
    chat = [{**ASK, "tool_calls": [CALL]}, {**SAY, "weight": 1, "grade": 3}, ASK, {**SAY, "grade": 4, "refusal": None}]
    rows = [{"messages": [ASK, SAY]}, {"messages": json.dumps(chat) if as_text else chat}]
    assert list_unread("messages", rows) == ["messages[].tool_calls", "messages[].grade"]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": [ASK, SAY], "images": ["a.png"]}, "the column images is not read"),
        ({"messages": [ASK, SAY], "images": []}, None),
        ({"prompt": "a", "completion": "b", "label": False}, "the column label is false, a verdict on the answer"),
        ({"question": "a", "answer": "b", "label": 1}, None),
        ({"messages": [{"role": "user", "content": "<image>\nWhat is it?"}, SAY]}, "the text has <image>"),
        ({"text": "an <image> tag"}, None),
        ({"query": "a", "response": "b", "history": [["c", "d"]]}, "the column history is not read"),
        ({"query": "a", "response": "b", "history": []}, None),
        ({"instruction": "a", "response": "b", "history": [["c", "d"]]}, None),
        ({"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, "seq_lengths"),
        ({"input_ids": [5, 6, 7], "seq_lengths": [3]}, None),
        ({"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, "position_ids"),
        ({"input_ids": [5, 6, 7], "position_ids": [0, 1, 2]}, None),
    ],
)
def test_what_a_row_has_besides_its_text_is_refused(row, reason):
    format = detect(row)
    sample = parse(format, row)
    if reason is None:
        check_unread(row, sample)
    else:
        with pytest.raises(BadSample) as caught:
            check_unread(row, sample)
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    "good",
    [
        [ASK, SAY],
        [SYSTEM, ASK, SAY, TOOL, TOOL, SAY, ASK],
        [ASK, SAY, TOOL],
        [SAY],
        [SYSTEM, SAY, ASK, SAY],
        [ASK, SAY, TOOL, ASK, SAY],
    ],
)
def test_orders_of_turns_that_are_allowed(good):
    assert parse("messages", {"messages": good}) == Chat(good)


@pytest.mark.parametrize(
    "chat, reason",
    [
        ([SYSTEM, SYSTEM, ASK, SAY], "turn 2 is system after system: a chat may have one system turn, as its first"),
        ([ASK, SAY, SYSTEM], "turn 3 is system after assistant: a chat may have one system turn"),
        ([ASK, SAY, SAY], "turn 3 is assistant after assistant: user and assistant must alternate"),
        ([ASK, ASK, SAY], "turn 2 is user after user"),
        ([ASK, TOOL, SAY], "turn 2 is tool after user: a tool turn follows an assistant"),
        ([SYSTEM, ASK], "none of the 2 turns is the assistant's"),
        ([], "none of the 0 turns"),
        ([ASK, {"role": "robot", "content": "x"}], "turn 2 of messages has the role 'robot', expected one of system, dev"),
        ([ASK, {"role": 3, "content": "x"}], "turn 2 of messages has the role a number"),
        ([ASK, {"role": "assistant"}], "turn 2 of messages has role, expected role and content"),
        ([ASK, {"role": "assistant", "content": " \n"}], "the content of turn 2 of messages is empty"),
        ([ASK, {"role": "assistant", "content": None}], "the content of turn 2 of messages is null, expected a string"),
        ([ASK, {**SAY, "tool_calls": [{"arguments": "{}"}]}], "turn 2 of messages has a tool call without a function's name"),
        ([ASK, {**SAY, "tool_calls": [{"name": "f", "arguments": "{x"}]}], "the tool call of turn 2 of messages is not valid"),
        ([ASK, {**SAY, "tool_calls": [{"name": "f", "arguments": "3"}]}], "whose arguments are a number, expected an object"),
        ([ASK, {**SAY, "reasoning_content": 3}], "reasoning_content of turn 2 of messages is a number"),
        ([ASK, {**SAY, "weight": 0.5}], "turn 2 of messages has the weight 0.5; a turn is supervised (1) or not (0)"),
        ([ASK, {"role\nDataError: forged": "x"}], r"turn 2 of messages has 'role\nDataError: forged', expected"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}, SAY], "a part that is of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}, SAY], "a part that is a string; only parts of type 'text'"),
        (["x"], "turn 1 of messages is a string, expected an object"),
        ("x", "messages is a string, expected a list of turns"),
        ("[{'role': 'user'}]", "messages is a string, expected a list of turns, or the JSON text of one"),
        ("3", "messages is a number, expected a list of turns"),
    ],
)
def test_chats_that_cannot_be_used(chat, reason):
    with pytest.raises(BadSample) as caught:
        parse("messages", {"messages": chat})
    assert reason in str(caught.value)


TURNS_AS_TEXT = json.dumps([ASK])


def test_turns_of_a_prompt_and_a_completion_may_be_json_text():
    row = {"prompt": TURNS_AS_TEXT, "completion": json.dumps([SAY])}

    assert parse("prompt_completion", row) == Chat([ASK, SAY], frozenset({0}))


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '[{"role": "x"}]', '{"role": "user", "content": "x"}', "4", "[x"])
def test_other_json_text_of_a_prompt_is_a_text(text):
    assert parse("prompt_completion", {"prompt": text, "completion": text}) == Pair(text, text)
    # Turns beside a text are meant literally, as in a prompt that shows a chat.
    assert parse("prompt_completion", {"prompt": TURNS_AS_TEXT, "completion": "x"}) == Pair(TURNS_AS_TEXT, "x")


NO = {"role": "assistant", "content": "no"}
LATER = {"role": "user", "content": "later"}


@pytest.mark.parametrize(
    "row, shared, chosen, rejected",
    [
        ({"chosen": [ASK, SAY], "rejected": [ASK, NO]}, [ASK], [SAY], [NO]),
        ({"chosen": [ASK, SAY, LATER, SAY], "rejected": [ASK, SAY, LATER, NO]}, [ASK, SAY, LATER], [SAY], [NO]),
        ({"chosen": [ASK, SAY, LATER, SAY], "rejected": [ASK, NO]}, [ASK], [SAY, LATER, SAY], [NO]),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, [ASK], [SAY], [SAY]),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}, [ASK], [SAY], [NO]),
        ({"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [ASK, NO]}, [ASK], [SAY], [NO]),
        ({"prompt": "x", "chosen": [SAY], "rejected": [NO]}, [ASK], [SAY], [NO]),
        ({"prompt": "x", "chosen": [ASK, SAY], "rejected": [ASK, NO]}, [ASK], [SAY], [NO]),
        ({"prompt": None, "chosen": [ASK, SAY], "rejected": [ASK, NO]}, [ASK], [SAY], [NO]),
        ({"prompt": "", "chosen": [ASK, SAY], "rejected": [ASK, NO]}, [ASK], [SAY], [NO]),
        ({"prompt": TURNS_AS_TEXT, "chosen": json.dumps([SAY]), "rejected": json.dumps([NO])}, [ASK], [SAY], [NO]),
    ],
)
def test_preference_chats_have_their_prompt_as_context(row, shared, chosen, rejected):
    context = frozenset(range(len(shared)))

    samples = read_preference(row, ("chosen", "rejected"))

    assert samples == [Chat(shared + chosen, context), Chat(shared + rejected, context)]


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, [Pair("2 + 2 =", " 4"), Pair("2 + 2 =", " 5")]),
        ({"prompt": "2", "chosen": "4", "rejected": "5"}, [Pair("2", "4"), Pair("2", "5")]),
        ({"chosen": "Q: a A: no", "rejected": "Q: a A: none"}, [Pair("Q: a A:", " no"), Pair("Q: a A:", " none")]),
        ({"prompt": "", "chosen": "Q\nno", "rejected": "Q\nno"}, [Pair("Q", "\nno"), Pair("Q", "\nno")]),
    ],
)
def test_preference_texts_are_pairs(row, expected):
    assert read_preference(row, ("chosen", "rejected")) == expected


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"chosen": [ASK, SAY], "rejected": None}, "chosen and rejected are a list and null"),
        ({"chosen": [ASK, SAY], "rejected": "x"}, "rejected is a string"),
        ({"prompt": 3, "chosen": "x", "rejected": "y"}, "prompt is a number"),
        ({"prompt": "y", "chosen": [ASK, SAY], "rejected": [ASK, NO]}, "turn 2 is user after user"),
        ({"chosen": "x", "rejected": "y"}, "prompt is empty"),
        ({"chosen": [], "rejected": []}, "none of the 0 turns"),
    ],
)
def test_preference_data_that_cannot_be_used(row, reason):
    with pytest.raises(BadSample) as caught:
        read_preference(row, ("chosen", "rejected"))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "format, row, reason",
    [
        ("text", ["x"], "it is a list, expected an object with text or content"),
        ("text", 3, "it is a number, expected"),
        ("text", {"title": "x", "body": "y"}, "expected text or content, it has body, title"),
        ("text", {}, "it has nothing"),
        ("text", {"text": None}, "text is empty"),
        ("text", {"text": ""}, "text is empty"),
        ("text", {"text": "ab\0c"}, "text has a NUL character at position 2"),
        ("text", {"text": "ab\ud800c"}, "text has an unpaired surrogate at position 2"),
        ("instruction", {"instruction": "x"}, "it has instruction"),
        ("instruction", {"instruction": "x", "input": 3, "output": "y"}, "input is a number"),
        ("instruction", {"instruction": "x", "output": "y", "system": ["z"]}, "system is a list"),
        ("prompt_completion", {"prompt": "x", "completion": [SAY]}, "prompt is a string and completion is a list"),
        ("prompt_completion", {"prompt": "x", "completion": True}, "completion is a boolean"),
        ("prompt_completion", {"prompt": [ASK], "completion": [ASK]}, "turn 2 is user after user"),
        ("pairs", {"source": "x", "target": " "}, "target is empty"),
        ("tokenized", {"input_ids": []}, "input_ids is empty"),
        ("tokenized", {"input_ids": [1, -1]}, "input_ids has the negative id -1"),
        ("tokenized", {"input_ids": [1, True]}, "input_ids has a boolean in it"),
        ("tokenized", {"input_ids": [[1]]}, "input_ids has a list in it"),
        ("tokenized", {"input_ids": "12"}, "input_ids is a string, expected a list of integers"),
        ("tokenized", {"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
        ("tokenized", {"input_ids": [1, 2], "labels": [1, -1]}, "labels has -1; negative labels other than -100"),
    ],
)
def test_rows_that_cannot_be_used(format, row, reason):
    with pytest.raises(BadSample) as caught:
        parse(format, row)
    assert reason in str(caught.value)


def test_arrays_of_ids_are_as_good_as_lists():
    import numpy as np

    assert parse("tokenized", {"input_ids": np.array([1, 2])}) == Tokens([1, 2], [1, 2])


strings = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["x", "user", "gpt", "assistant", "text"])
numbers = st.integers() | st.integers(-101, 9) | st.floats()
scalars = st.none() | st.booleans() | numbers | strings
turn_like = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | scalars,
        "content": strings | scalars | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": scalars}), max_size=2),
        "from": strings,
        "value": scalars,
    },
)
json_like = st.recursive(
    scalars | turn_like, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=3), max_leaves=8
)
values = json_like | st.lists(turn_like, max_size=5) | st.lists(st.integers(-101, 9), max_size=4)
names = sorted({column for entry in FORMATS.values() for needed in entry.columns for column in needed})
rows_like = st.dictionaries(st.sampled_from([*names, "labels", "system", "context"]) | strings, values, max_size=4)

# rows that are right but for a value here and there, so that many get through
plain = st.text("ab \n", min_size=1, max_size=4).map(lambda text: f"x{text}")
odd = st.sampled_from([None, "", "a\0", "\ud800", 3, []])
text_like = st.integers(0, 11).flatmap(lambda number: odd if number == 11 else plain)
roles_like = st.sampled_from([["user", "assistant"], ["system", "user", "assistant", "tool", "assistant", "user"]]) | st.lists(
    st.sampled_from(["user", "assistant", "tool", "gpt"]), min_size=1, max_size=4
)
chat_like = roles_like.flatmap(
    lambda roles: st.tuples(*(st.fixed_dictionaries({"role": st.just(role), "content": text_like}) for role in roles)).map(list)
)
ids_like = st.lists(st.integers(0, 9) | st.sampled_from([1, 2, -1, IGNORE]), min_size=3, max_size=3)


def nearly_right(columns):
    chats = {"messages": chat_like, "conversations": chat_like, "prompt": chat_like | text_like}
    needed = {column: (chats | {"input_ids": ids_like}).get(column, text_like) for column in columns}
    more = {"labels": ids_like, "system": text_like, "context": text_like}
    return st.fixed_dictionaries(needed, optional={column: more[column] for column in more if column not in needed})


def kind_of_any_row(format, data) -> str:
    """Parses a row that is drawn; says what became of it, which must be a valid sample or a `BadSample`."""
    needed = data.draw(st.sampled_from(FORMATS[format].columns))
    anything = rows_like | json_like | st.fixed_dictionaries(dict.fromkeys(needed, values))
    # drawn apart, since a union is flattened and nearly right rows would be a small part of it
    row = data.draw(nearly_right(needed) if data.draw(st.booleans()) else anything)
    try:
        sample = parse(format, row)
    except BadSample as error:
        assert str(error)
        return "bad"
    match sample:
        case Text(text):
            said = [text]
        case Pair(source, target):
            said = [source, target]
        case Chat(messages):
            roles = [message["role"] for message in messages]
            assert "assistant" in roles and set(roles) <= {"system", "user", "assistant", "tool"}
            assert "system" not in roles[1:] and all(set(message) == {"role", "content"} for message in messages)
            assert ("user", "user") not in itertools.pairwise(roles)
            said = [message["content"] for message in messages if message["role"] != "tool"] or ["x"]
        case Tokens(ids, labels):
            said = ["x"]
            assert len(ids) == len(labels) > 0
            assert min(ids) >= 0 and all(label >= 0 or label == IGNORE for label in labels)
    assert said and all(text.strip() and "\0" not in text and text.encode() for text in said)
    return type(sample).__name__


def test_any_row_is_a_valid_sample_or_a_bad_one():
    seen = Counter()

    @settings(max_examples=400)
    @given(st.sampled_from(list(FORMATS)), st.data())
    def look(format, data):
        seen[kind_of_any_row(format, data)] += 1

    look()
    assert set(seen) == {"bad", "Text", "Chat", "Pair", "Tokens"}, "the rows that are drawn do not reach every kind"


@given(st.lists(st.sampled_from(names) | strings, max_size=4))
def test_any_columns_have_a_format_that_can_read_them_or_an_error(columns):
    try:
        format = detect(columns)
    except DataError as error:
        assert "--format" in str(error) or "prompts without answers" in str(error)
    else:
        assert any(set(needed) <= set(columns) for needed in FORMATS[format].columns)
        assert set(list_unread(format, [dict.fromkeys(columns)])) <= set(columns)


IDS = [7, 8, 9, 10]


@pytest.mark.parametrize("columns, labels", [
    ({"attention_mask": [1, 1, 1, 0]}, [7, 8, 9]), ({"attention_mask": [0, 1, 1, 1]}, [8, 9, 10]),
    ({"labels": [-100, 8, 9, 10], "attention_mask": [1, 1, 1, 0]}, [-100, 8, 9]),
    *[({name: [0, 0, 1, 1]}, [-100, -100, 9, 10]) for name in LOSS_MASKS],
    ({"completion_mask": [False, True, True, True], "assistant_masks": [1, 1, 0, 1.0]}, [-100, 8, -100, 10]),
    ({"loss_mask": None, "attention_mask": None}, IDS),
])  # fmt: skip
def test_masks_of_token_ids_decide_the_labels(columns, labels):
    sample = parse("tokenized", {"input_ids": IDS, **columns})
    assert sample.labels == labels and len(sample.input_ids) == len(labels)


@pytest.mark.parametrize("columns", [
    {"attention_mask": [1, 0, 1, 1]}, {"attention_mask": [1, 2, 2, 2]}, {"attention_mask": [0, 0, 0, 0]},
    {"loss_mask": [1, 1]}, {"loss_scale": [0.5, 1, 1, 1]}, {"completion_mask": "0011"},
])  # fmt: skip
def test_masks_that_mean_something_else_are_refused(columns):
    with pytest.raises(BadSample, match=next(iter(columns))):
        parse("tokenized", {"input_ids": IDS, **columns})


def test_the_first_token_of_a_vocabulary_is_a_token():
    tokens = read_tokens({"input_ids": [0, 1], "labels": [-100, 0]}, ("labels",))
    assert (list(tokens.input_ids), list(tokens.labels)) == ([0, 1], [-100, 0])
