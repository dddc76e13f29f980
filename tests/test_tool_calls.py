"""Calls of tools under templates of many habits: what they are rendered as, and what of it is supervised."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from tests.tiny import CHAT_TEMPLATE as CHATML
from zerobook.constants import IGNORE
from zerobook.data.formats import BadSample, Chat, parse
from zerobook.data.templates import CausalEncoder, Encoded, Seq2SeqEncoder, end_tokens
from zerobook.utils.chat_template import READ_TOOLS, template_file

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def calling(written: str, *, marked: bool = False, result: str = "") -> str:
    """A template in ChatML that writes each call as ``written``, and ``result`` before the content of a tool turn."""
    answer = "{{ m.content }}{% for c in m.tool_calls or [] %}" + written + "{% endfor %}<|im_end|>"
    if marked:
        answer = "{% generation %}" + answer + "{% endgeneration %}"
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "{% if m.role == 'tool' %}" + result + "{% endif %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + PROMPT
    )


AS_OBJECT = "[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
JOINED = "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}"
PRINTED = "[{{ c.function.name }} {{ c.function.arguments }}]"
ONLY_TEXT = "{% if c.function.arguments is not string %}{{ raise_exception('text, please') }}{% endif %}" + PRINTED
STRICT = "{% if c.id | length != 2 %}{{ raise_exception('an id has 2 characters') }}{% endif %}" + AS_OBJECT
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def call(city: str, identifier: str | None = None, name: str = "look") -> dict:
    made = {"type": "function", "function": {"name": name, "arguments": {"city": city}}}
    return made if identifier is None else {"id": identifier, **made}


def answer(*calls: dict, content: str | None = None) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def result(content: str, identifier: str | None = None, name: str | None = None) -> dict:
    identifiers = {"tool_call_id": identifier, "name": name}
    return {"role": "tool", "content": content} | {key: value for key, value in identifiers.items() if value is not None}


ASK = {"role": "user", "content": "Rain?"}
SAY = {"role": "assistant", "content": "No."}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


def encode(tokenizer, messages: list[dict], *, template: str | None = None, tools=None, unsupervised=()) -> Encoded | BadSample:
    sample = Chat(messages, frozenset(unsupervised), tools)
    (encoded,) = CausalEncoder(tokenizer, length=None, chat_template=template).encode([sample])
    return encoded


def said(tokenizer, encoded: Encoded | BadSample) -> list[str]:
    """The supervised stretches of a row, as text."""
    assert isinstance(encoded, Encoded), encoded
    supervised = encoded.labels != IGNORE
    assert (encoded.labels[supervised] == encoded.input_ids[supervised]).all()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]])))
    return [tokenizer.decode(encoded.labels[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("written", [AS_OBJECT, JOINED, PRINTED, ONLY_TEXT])
def test_arguments_are_written_as_json_whatever_form_the_template_reads(tokenizer, written, marked):
    template = calling(written, marked=marked)

    encoded = encode(tokenizer, [ASK, answer(call("Oslo")), result("wet"), SAY], template=template)

    assert said(tokenizer, encoded) == ['[look {"city": "Oslo"}]<|im_end|>', "No.<|im_end|>"]


@pytest.mark.parametrize("written", [AS_OBJECT, JOINED, PRINTED])
def test_a_turn_with_a_call_that_is_context_only_is_not_supervised(tokenizer, written):
    for marked in (False, True):
        template = calling(written, marked=marked)
        messages = [ASK, answer(call("Oslo")), result("wet"), SAY]
        assert said(tokenizer, encode(tokenizer, messages, template=template, unsupervised=[1])) == ["No.<|im_end|>"]
        assert said(tokenizer, encode(tokenizer, messages, template=template, unsupervised=[3])) == [
            '[look {"city": "Oslo"}]<|im_end|>'
        ]


def test_a_template_that_refuses_both_forms_gives_its_reason(tokenizer):
    template = calling("{{ raise_exception('no calls here') }}{{ m.tool_calls }}")

    refused = encode(tokenizer, [ASK, answer(call("Oslo")), result("wet"), SAY], template=template)

    assert isinstance(refused, BadSample) and "no calls here" in str(refused)


def test_a_content_that_quotes_python_does_not_change_the_form_of_the_arguments(tokenizer):
    messages = [{"role": "user", "content": "{'city': 'Oslo'}"}, answer(call("Oslo")), result("wet"), SAY]

    encoded = encode(tokenizer, messages, template=calling(AS_OBJECT + "{{ c.function.arguments is mapping }}"))

    assert said(tokenizer, encoded)[0] == '[look {"city": "Oslo"}]True<|im_end|>'


TWO_ANSWERS = (  # as DeepSeek-R1's distillations: a call is a turn, and so is a content that is not null
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}<|im_start|>assistant\n"
    "{% for c in m.tool_calls %}" + JOINED + "{% endfor %}{{ eos_token }}{% endif %}"
    "{% if m.content is not none %}<|im_start|>assistant\n{{ m.content }}{{ eos_token }}{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + PROMPT
)
ONE_ANSWER = TWO_ANSWERS.replace("{% if m.tool_calls %}", "{% if m.content is none %}")  # as the same ones, earlier


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("template", [TWO_ANSWERS, ONE_ANSWER])
def test_a_call_without_content_is_one_turn(tokenizer, template, content):
    row = {"messages": [ASK, answer(call("Oslo"), content=content), result("wet"), SAY]}

    encoded = encode(tokenizer, parse("messages", row).messages, template=template)

    assert said(tokenizer, encoded) == ['[look {"city": "Oslo"}]<|im_end|>', "No.<|im_end|>"]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    "written", ["{{ '!' + m.content }}", "!{{ m.content }}", "!{{ m.content | tojson | replace('\"', '') }}"]
)
def test_a_template_that_takes_no_null_gets_an_empty_content(tokenizer, written, marked):
    template = calling(JOINED, marked=marked).replace("{{ m.content }}", written, 1)

    encoded = encode(tokenizer, [ASK, answer(call("None")), result("wet"), SAY], template=template)

    assert said(tokenizer, encoded) == ['![look {"city": "None"}]<|im_end|>', "!No.<|im_end|>"]


@pytest.mark.parametrize(
    "template, turn",
    [
        (TWO_ANSWERS, answer(call("Oslo"), content="I look.")),
        (ONE_ANSWER, answer(call("Oslo"), content="I ask.")),
        (calling("{% if loop.first %}" + AS_OBJECT + "{% endif %}"), answer(call("Oslo"), call("Rome"))),
        (calling("{% if loop.first %}" + AS_OBJECT + "{% endif %}", marked=True), answer(call("Oslo"), call("Rome"))),
    ],
)
def test_a_turn_that_lacks_a_call_or_is_two_turns_is_refused(tokenizer, template, turn):
    refused = encode(tokenizer, [ASK, turn, result("wet"), SAY], template=template, tools=None)

    assert isinstance(refused, BadSample) and "turn 2" in str(refused)


def test_identifiers_reach_the_template(tokenizer):
    template = calling(STRICT, result="({{ m.tool_call_id }} {{ m.name }}) ")
    row = {
        "messages": [
            ASK,
            answer(call("Oslo", "a1"), call("Rome", "a2")),
            result("dry", "a2", "look"),
            result("wet", "a1", "look"),
            SAY,
        ]
    }

    encoded = encode(tokenizer, parse("messages", row).messages, template=template)

    assert said(tokenizer, encoded) == ['[look {"city": "Oslo"}][look {"city": "Rome"}]<|im_end|>', "No.<|im_end|>"]
    text = tokenizer.decode(encoded.input_ids)
    assert "(a2 look) dry" in text and "(a1 look) wet" in text


@pytest.fixture
def with_named_templates(tokenizer):
    named = copy.deepcopy(tokenizer)
    named.chat_template = {"default": CHATML, "tool_use": calling(AS_OBJECT)}
    return named


def test_chats_with_tools_are_rendered_as_transformers_renders_them(with_named_templates):
    named = with_named_templates
    messages = [ASK, answer(call("Oslo")), result("wet"), SAY]
    encoder = pickle.loads(pickle.dumps(CausalEncoder(named, length=None)))

    with_tools, without = encoder.encode([Chat(messages, tools=[TOOL]), Chat([ASK, SAY])])

    # transformers before 5.23 lets this template write the null beside a call.
    written = [message | {"content": message["content"] or ""} for message in messages]
    assert named.decode(with_tools.input_ids) == named.apply_chat_template(written, tools=[TOOL], tokenize=False)
    assert named.decode(without.input_ids) == named.apply_chat_template([ASK, SAY], tokenize=False)
    assert said(named, with_tools) == ['[look {"city": "Oslo"}]<|im_end|>', "No.<|im_end|>"]


def test_calls_without_tools_name_the_template_that_would_read_them(with_named_templates):
    refused = encode(with_named_templates, [ASK, answer(call("Oslo")), result("wet"), SAY])

    assert isinstance(refused, BadSample) and "tool_use" in str(refused)


def test_a_given_template_is_taken_for_chats_with_tools_too(with_named_templates):
    encoded = encode(with_named_templates, [ASK, answer(call("Oslo")), SAY], template=calling("!" + AS_OBJECT), tools=[TOOL])

    assert said(with_named_templates, encoded)[0].startswith("![look")


def test_the_end_of_the_template_for_tools_stops_a_generation(with_named_templates):
    named = with_named_templates
    other = "<|im_start|>"
    named.chat_template["tool_use"] = calling(AS_OBJECT).replace("<|im_end|>", other).replace("<|im_start|>{{", "{{")

    assert end_tokens(named) >= {named.convert_tokens_to_ids("<|im_end|>"), named.convert_tokens_to_ids(other)}


@pytest.mark.parametrize(
    "name, calls, after",
    [
        (
            "chatml-tools",
            '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
            "No.<|im_end|>",
        ),
        (
            "llama-3-tools",
            '{"name": "look", "parameters": {"city": "Oslo"}}; {"name": "look", "parameters": {"city": "Rome"}}<|eot_id|>',
            "No.<|eot_id|>",
        ),
    ],
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_shipped_templates_read_tools(tokenizer, name, calls, after, system):
    made = copy.deepcopy(tokenizer)
    made.add_tokens(["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], special_tokens=True)
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = [*first, ASK, answer(call("Oslo"), call("Rome")), result("wet"), result("dry"), SAY]

    encoded = encode(made, messages, template=template_file(name).read_text(), tools=[TOOL])

    assert said(made, encoded) == [calls, after]
    text = made.decode(encoded.input_ids)
    assert '{"name": "look", "parameters": {}}' in text.split("Rain?")[0]
    assert text.index("wet") < text.index("dry")
    assert system is None or text.index(system) < text.index('"look"')


@pytest.mark.parametrize("name", READ_TOOLS)
def test_without_tools_a_shipped_template_writes_what_the_plain_one_does(tokenizer, name):
    messages = [{"role": "system", "content": "Be brief."}, ASK, SAY, ASK, SAY]
    plain = encode(tokenizer, messages, template=template_file(name.removesuffix("-tools")).read_text())

    encoded = encode(tokenizer, messages, template=template_file(name).read_text())

    assert encoded.input_ids.tolist() == plain.input_ids.tolist()
    assert encoded.labels.tolist() == plain.labels.tolist()


def test_a_template_without_tools_names_shipped_ones_that_read_them(tokenizer):
    for refused in (
        encode(tokenizer, [ASK, SAY], tools=[TOOL]),
        encode(tokenizer, [ASK, answer(call("Oslo")), result("wet"), SAY]),
    ):
        assert isinstance(refused, BadSample)
        assert all(name in str(refused) for name in READ_TOOLS)


# As Phi-4-mini's: tools are read from the system turn, and not from the list that every trainer gives.
OF_A_TURN = "{% for m in messages %}{% if 'tools' in m %}{{ m['tools'] }}{% endif %}{% endfor %}" + CHATML
# As Phi-3.5's: turns of other roles are left out.
TWO_ROLES = CHATML.replace("<|im_start|>{{", "{% if m['role'] in ('user', 'assistant') %}<|im_start|>{{", 1).replace(
    "{% endfor %}", "{% endif %}{% endfor %}", 1
)
# As SmolLM3's: the word stands in a system turn.
IN_PROSE = "<|im_start|>system\nShow your thinking, if thinking helps.<|im_end|>\n" + CHATML
# As Idefics3's: a content is a list of parts, and a text is none.
OF_PARTS = CHATML.replace(
    "{{ m['content'] }}", "{% for part in m['content'] %}{{ part.text if part.type == 'text' }}{% endfor %}"
)
RESULT_AS_TEXT = Chat([ASK, SAY, result("It is wet."), SAY])
THOUGHTFUL = {"role": "assistant", "content": "No.", "thinking": "Look out of the window."}


@pytest.mark.parametrize("assistant_only_loss", [True, False])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    "template, sample, part",
    [
        *((template_file(name).read_text(), RESULT_AS_TEXT, "turn 3") for name in ("falcon", "gemma", "mistral")),
        (OF_A_TURN, Chat([ASK, SAY], tools=[TOOL]), "tools"),
        (TWO_ROLES, RESULT_AS_TEXT, "turn 3"),
        (TWO_ROLES, Chat([{"role": "system", "content": "Be brief."}, ASK, SAY]), "turn 1"),
        (IN_PROSE, Chat([ASK, THOUGHTFUL, ASK, SAY]), "turn 2"),
    ],
)
def test_a_part_that_the_template_leaves_out_is_refused(tokenizer, template, sample, part, marked, assistant_only_loss):
    if marked:
        answer = "{% generation %}{{ m['content'] }}{% endgeneration %}"
        template = template.replace(
            "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}" + answer + "{% else %}{{ m['content'] }}{% endif %}"
        )
    encoder = CausalEncoder(tokenizer, length=None, chat_template=template, assistant_only_loss=assistant_only_loss)

    refused, plain = encoder.encode([sample, Chat([ASK, SAY])])

    assert isinstance(refused, BadSample) and part in str(refused)
    assert isinstance(plain, Encoded)


def test_a_template_that_reads_lists_of_parts_writes_no_text(tokenizer):
    refused = encode(tokenizer, [ASK, SAY], template=OF_PARTS)

    assert isinstance(refused, BadSample) and "turn 1 (user) has content" in str(refused)


def test_a_part_that_the_template_changes_is_context(tokenizer):
    """Llama 3.1 writes a result as JSON, and Qwen3 forgets the thoughts of earlier turns."""
    template = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | tojson if m['role'] == 'tool' else m['content'] }}")
    forgets = CHATML.replace("{{ m['content'] }}", "{{ m.thinking if loop.last }}{{ m['content'] }}")

    escaped = encode(tokenizer, [ASK, SAY, result('{"a": 1}'), SAY], template=template)
    forgotten = encode(tokenizer, [ASK, THOUGHTFUL, ASK, SAY], template=forgets)

    assert said(tokenizer, escaped) == ["No.<|im_end|>", "No.<|im_end|>"]
    assert [said(tokenizer, row) for row in (forgotten, *forgotten.others)] == [
        ["No.<|im_end|>"],
        ["Look out of the window.No.<|im_end|>"],
    ]


LOOKS_AT_THE_FIRST = "{% if messages[0].role == 'system' %}{% endif %}" + CHATML
DEFAULT_SYSTEM = "{% if messages %}<|im_start|>system\nYou are helpful. Welcome!<|im_end|>\n{% endif %}" + CHATML


@pytest.mark.parametrize(
    "template", [CHATML, calling(AS_OBJECT), calling(AS_OBJECT, marked=True), LOOKS_AT_THE_FIRST, DEFAULT_SYSTEM]
)
def test_a_greeting_is_supervised_and_so_is_the_answer_after_it(tokenizer, template):
    greeting = {"role": "assistant", "content": "Welcome!"}

    encoded = encode(tokenizer, [greeting, ASK, SAY], template=template)

    assert said(tokenizer, encoded) == ["Welcome!<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("template", [DEFAULT_SYSTEM, LOOKS_AT_THE_FIRST])
def test_a_greeting_with_a_thought_before_it_is_supervised_from_the_thought_on(tokenizer, template):
    greeting = {"role": "assistant", "content": "Welcome!", "thinking": "hm"}
    thoughtful = template.replace("{{ m['content'] }}", "{{ m.thinking }}{{ m['content'] }}")

    encoded = encode(tokenizer, [greeting, ASK, SAY], template=thoughtful)

    assert said(tokenizer, encoded) == ["hmWelcome!<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, calling(AS_OBJECT), calling(AS_OBJECT, marked=True)])
def test_an_empty_result_and_a_question_after_it_are_context(tokenizer, template):
    call_as_text = {"role": "assistant", "content": "look()"}

    encoded = encode(tokenizer, [ASK, call_as_text, result(""), ASK, SAY], template=template)

    assert said(tokenizer, encoded) == ["look()<|im_end|>", "No.<|im_end|>"]


def test_a_seq2seq_model_takes_identified_results_and_refuses_a_chat_that_is_an_answer_alone(tokenizer):
    encoder = Seq2SeqEncoder(tokenizer, max_source_length=64, max_target_length=64)
    as_text = [ASK, {"role": "assistant", "content": "look()"}, result("wet", "a1", "look"), SAY]

    encoded, refused = encoder.encode([Chat(as_text), Chat([SAY])])

    assert "Rain?\nlook()\nwet" in tokenizer.decode(encoded.input_ids)
    assert isinstance(refused, BadSample)


# The tool turn needs a name, so a chat with a stand-in for it cannot be rendered.
NAMED_RESULTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ '[' + m.name + '] ' }}{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    + PROMPT
)


@pytest.fixture(scope="module")
def with_marks(tokenizer):
    """The tokenizer with tokens around calls and thoughts."""
    made = copy.deepcopy(tokenizer)
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return made


def test_the_calls_behind_a_content_are_supervised_where_turns_cannot_be_rendered_with_stand_ins(with_marks):
    messages = [ASK, answer(call("Oslo")), result("wet", name="look"), answer(call("Rome"), content="Again.")]
    messages += [result("dry", name="look"), SAY]

    spans = said(with_marks, encode(with_marks, messages, template=NAMED_RESULTS))

    assert [("Oslo" in spans[0], "Rome" in spans[1]), spans[2]] == [(True, True), "No.<|im_end|>"]


def test_an_answer_is_supervised_to_its_end_if_the_thought_before_it_has_the_same_text(with_marks):
    thinking = SAY | {"reasoning_content": "It is dry, so No."}
    messages = [ASK, answer(call("Oslo")), result("wet", name="look"), thinking]

    spans = said(with_marks, encode(with_marks, messages, template=NAMED_RESULTS))

    assert spans[-1].endswith("</think>No.<|im_end|>")


@pytest.mark.parametrize("quoting", ["thought", "tool"])
def test_a_thought_or_a_tool_that_quotes_python_does_not_change_the_form_of_the_arguments(tokenizer, quoting):
    template = calling("{{ m.reasoning_content }}" + AS_OBJECT + "{{ c.function.arguments is mapping }}")
    turn = answer(call("Oslo")) | {"reasoning_content": "I look."}
    tool = copy.deepcopy(TOOL)
    if quoting == "thought":
        turn["reasoning_content"] = "I look with {'city': 'Oslo'}."
    else:
        tool["function"]["description"] = "for example {'city': 'Oslo'}"

    encoded = encode(tokenizer, [ASK, turn, result("wet"), SAY], template=template, tools=[tool])

    assert said(tokenizer, encoded)[0].endswith('[look {"city": "Oslo"}]True<|im_end|>')


def test_a_thought_that_is_not_read_is_refused_if_other_turns_have_its_text(tokenizer):
    thinking = {"role": "assistant", "content": "It is wet.", "reasoning_content": "wet"}

    refused = encode(tokenizer, [ASK, thinking], template=CHATML)

    assert isinstance(refused, BadSample) and "reasoning_content" in str(refused)


def test_a_content_that_is_not_read_is_refused_if_the_call_has_its_text(tokenizer):
    template = calling(AS_OBJECT).replace(
        "{{ m.content }}{% for c", "{% if not m.tool_calls %}{{ m.content }}{% endif %}{% for c"
    )

    refused = encode(tokenizer, [ASK, answer(call("Oslo"), content="look"), result("wet"), SAY], template=template)

    assert isinstance(refused, BadSample) and "content" in str(refused)


def test_a_control_token_in_the_tools_is_said_to_be_there(tokenizer):
    tool = copy.deepcopy(TOOL)
    tool["function"]["description"] = "ends with <|im_end|>"

    refused = encode(tokenizer, [ASK, answer(call("Oslo")), result("wet"), SAY], template=calling(AS_OBJECT), tools=[tool])

    assert (
        isinstance(refused, BadSample) and "tools" in str(refused) and "turn" not in str(refused).partition("has the text")[0]
    )


# As Command A's: an answer ends with a token of its own, and then with the end of text, which also ends the user's turns.
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<answer>{{ m.content }}</answer>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}" + PROMPT
)
# As Phi-4-mini's: the end of text is written only behind the last turn.
LAST_END = TWO_ENDS.replace("<|im_end|>{% endfor %}", "{% endfor %}").replace(
    PROMPT, PROMPT.replace("{% endif %}", "{% else %}<|im_end|>{% endif %}")
)


@pytest.mark.parametrize(("template", "end"), [(TWO_ENDS, "</answer><|im_end|>"), (LAST_END, "</answer>")])
@pytest.mark.parametrize("marked", [False, True])
def test_a_turn_of_two_end_tokens_is_supervised_up_to_the_one_that_ends_every_turn(tokenizer, template, end, marked):
    with_answers = copy.deepcopy(tokenizer)
    with_answers.add_tokens(["<answer>", "</answer>"])
    if marked:
        template = template.replace("<answer>", "<answer>{% generation %}").replace("</answer>", "{% endgeneration %}</answer>")

    spans = said(with_answers, encode(with_answers, [ASK, SAY, ASK, SAY], template=template))

    assert [span.removeprefix("<answer>") for span in spans] == [f"No.{end}", f"No.{end}"]


# As QwQ's: the prompt begins a thought, which the template leaves out of the rendered turn.
LEAVES_THOUGHTS_OUT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_calls_behind_a_thought_that_names_the_function_are_supervised(with_marks):
    thinking = answer(call("Oslo"), content="<think>\nI look there.\n</think>\n\nOne moment.")

    (span,) = said(with_marks, encode(with_marks, [ASK, thinking], template=LEAVES_THOUGHTS_OUT))

    assert span.startswith("I look there.\n</think>\n\nOne moment.<tool_call>") and '"Oslo"' in span
    assert span.endswith("</tool_call><|im_end|>")


# As Nemotron 3's: a thought in the content is written as it is, and otherwise an empty one.
WRITES_EMPTY_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '<think>' not in m.content %}"
    "<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_tag_that_the_template_and_the_content_have_is_written_once(with_marks):
    thinking = {"role": "assistant", "content": "<think>Dry.</think>No."}

    encoded = encode(with_marks, [ASK, thinking], template=WRITES_EMPTY_THOUGHTS)

    assert with_marks.decode(encoded.input_ids).count("<think>") == 1
    assert said(with_marks, encoded)[-1].endswith("Dry.</think>No.<|im_end|>")


def test_a_token_that_takes_the_white_space_before_a_turn_is_not_supervised(tokenizer):
    from tokenizers import AddedToken

    taking = copy.deepcopy(tokenizer)
    taking.add_tokens([AddedToken("<|assistant|>", rstrip=True, normalized=False, special=True)], special_tokens=True)
    template = CHATML.replace("<|im_start|>assistant\n", "<|assistant|>").replace(
        "<|im_start|>{{ m['role'] }}\n", "<|{{ m['role'] }}|>"
    )

    spans = said(taking, encode(taking, [ASK, {"role": "assistant", "content": "\n\nNo."}], template=template))

    assert [span.strip() for span in spans] == ["No.<|im_end|>"]
