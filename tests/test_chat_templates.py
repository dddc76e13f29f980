"""Templates that treat a chat as those of released models do. The loss is on what the model is asked to say."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _compile_jinja_template

from zerobook.config import RecipeConfig
from zerobook.constants import IGNORE
from zerobook.data.formats import BadSample, Chat, read_preference
from zerobook.data.prepare import Library
from zerobook.data.templates import CausalEncoder, paired, render_prompt
from zerobook.errors import DataError
from zerobook.objective import NextToken

# As Qwen3's: only turns behind the last question keep their thoughts; the last turn gets an empty one if it has none.
QWEN3 = """
{%- set ns = namespace(asked=0) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.asked = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought, answer = '', m.content -%}
{%- if '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""
# As DeepSeek-R1's distillations: thoughts are always left out, and the generation prompt begins a thought.
R1 = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<|user|>' + m.content }}{% endif -%}
{%- if m.role == 'assistant' -%}
{%- set answer = m.content.split('</think>')[-1] if '</think>' in m.content else m.content -%}
{{- '<|assistant|>' + answer + '<|eos|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif -%}
"""
# As QwQ's: the same in ChatML.
QWQ = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{{- (m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""
# As Nemotron 3's: the generation prompt begins a thought, of which a turn without one has an empty form without line ends.
NEMOTRON3 = """
{%- for m in messages -%}
{%- if m.role == 'assistant' and '</think>' not in m.content -%}
{{- '<|im_start|>assistant\\n<think></think>' + m.content + '<|im_end|>\\n' -}}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""
# As Phi-3's: a chat rendered without a generation prompt ends with an end-of-text token.
PHI3 = """
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif -%}
"""
# As Llama-3.1's: contents are trimmed, and there is always a system turn.
LLAMA31 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set told, messages = messages[0].content | trim, messages[1:] -%}
{%- else %}{% set told = '' %}{% endif -%}
{{- '<|start|>system<|stop|>\\n\\nToday Date: 26 Jul 2024\\n\\n' + told + '<|eot|>' -}}
{%- for m in messages %}{{ '<|start|>' + m.role + '<|stop|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif -%}
"""
# As Gemma's: no system turn, another name for the assistant, trimmed.
GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages -%}
{{- '<|start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<|eot|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>model\\n' }}{% endif -%}
"""
# As gpt-oss's: the last turn ends with another token than those before it.
RETURNS = """
{%- for m in messages -%}
{{- '<|start|>' + m.role + '\\n' + m.content + ('<|eos|>' if loop.last and m.role == 'assistant' else '<|end|>') -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif -%}
"""
TEMPLATES = {
    "qwen3": QWEN3, "r1": R1, "qwq": QWQ, "nemotron3": NEMOTRON3,
    "phi3": PHI3, "llama31": LLAMA31, "gemma": GEMMA, "returns": RETURNS,
}  # fmt: skip
ENDS = {
    "qwen3": "<|im_end|>", "r1": "<|eos|>", "qwq": "<|im_end|>", "nemotron3": "<|im_end|>",
    "phi3": "<|end|>", "llama31": "<|eot|>", "gemma": "<|eot|>",
    "returns": "<|eos|>",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    made = copy.deepcopy(AutoTokenizer.from_pretrained(tiny / "llama"))
    names = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|stop|>", "<|eot|>")
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    made.bos_token, made.eos_token = "<|bos|>", "<|endoftext|>"
    return made


def chat(*contents: str) -> Chat:
    return Chat([{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)])


def supervised(tokenizer, name: str, sample: Chat) -> list[tuple[str, str]]:
    """(what stands before it in its row, what is supervised) of every stretch, in the order of the turns."""
    (encoded,) = CausalEncoder(tokenizer, length=None, chat_template=TEMPLATES[name]).encode([sample])
    assert not isinstance(encoded, BadSample), encoded
    found = []
    for row in (encoded, *encoded.others):
        kept = row.labels != IGNORE
        assert kept.any() and (row.labels[kept] == row.input_ids[kept]).all()
        edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]])))
        found += [
            (tokenizer.decode(row.input_ids[:a]), tokenizer.decode(row.input_ids[a:b]))
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
    return sorted(found, key=lambda pair: len(pair[0]))


def prompt(tokenizer, name: str, messages: list) -> str:
    return tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True)


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    "name, contents, expected",
    [
        ("qwen3", ["a", "b"], ["<think>\n\n</think>\n\nb<|im_end|>"]),
        ("qwen3", ["a", "b", "c", "d"], ["<think>\n\n</think>\n\nb<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]),
        ("qwen3", ["a", THOUGHT + "b", "c", THOUGHT + "d"], [f"{THOUGHT}b<|im_end|>", f"{THOUGHT}d<|im_end|>"]),
        ("qwen3", ["a", THOUGHT + "b", "c"], [f"{THOUGHT}b<|im_end|>"]),
        ("qwen3", ["a", "think", "c", "k"], ["<think>\n\n</think>\n\nthink<|im_end|>", "<think>\n\n</think>\n\nk<|im_end|>"]),
        ("r1", ["a", "b"], ["b<|eos|>"]),
        ("r1", ["a", THOUGHT + "b", "c", "hm</think>d"], ["hm\n</think>\n\nb<|eos|>", "hm</think>d<|eos|>"]),
        ("r1", ["a", "<think>hm</think>b", "c", "d"], ["hm</think>b<|eos|>", "d<|eos|>"]),
        ("r1", ["a", "<b>", "c", "<think"], ["<b><|eos|>", "<think<|eos|>"]),
        ("qwq", ["a", THOUGHT + "b", "c", "d"], ["hm\n</think>\n\nb<|im_end|>", "d<|im_end|>"]),
        ("nemotron3", ["a", "b", "c", THOUGHT + "d"], ["</think>b<|im_end|>", "hm\n</think>\n\nd<|im_end|>"]),
        ("phi3", ["a", "b"], ["b<|end|>"]),
        ("phi3", ["a", "b", "c", "e"], ["b<|end|>", "e<|end|>"]),
        ("llama31", ["a", "b\n", "c", "\n d "], ["b<|eot|>", "d<|eot|>"]),
        ("gemma", ["a", " b", "c", "d"], ["b<|eot|>", "d<|eot|>"]),
        ("returns", ["a", "b", "c", "d"], ["b<|eos|>", "d<|eos|>"]),
    ],
)
def test_what_is_supervised_is_what_the_model_is_asked_for(tokenizer, name, contents, expected):
    sample = chat(*contents)
    found = supervised(tokenizer, name, sample)
    assert [said for _, said in found] == expected
    turns = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    for (before, said), i in zip(found, turns, strict=True):
        asked = prompt(tokenizer, name, sample.messages[:i])
        if name in ("r1", "qwq") and "</think>" not in said:
            asked = asked.removesuffix("<think>\n")  # the template does not render a turn without thoughts behind it
        if said.startswith("</think>"):
            asked = asked.removesuffix("\n")  # an empty thought has no line end
        assert before == asked


texts = st.text(st.sampled_from("abk<>/ thin\n"), min_size=1, max_size=8).filter(str.strip)
answers = st.builds(lambda thought, answer: thought + answer, st.sampled_from(["", THOUGHT, "<think>k</think>"]), texts)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(turns=st.lists(st.tuples(texts, answers), min_size=1, max_size=4), more=st.lists(texts, max_size=1))
def test_every_turn_is_supervised_once_behind_its_own_prompt(tokenizer, name, turns, more):
    sample = chat(*[content for turn in turns for content in turn], *more)
    found = supervised(tokenizer, name, sample)
    assert len(found) == len(turns)
    for (before, said), i in zip(found, range(1, 2 * len(turns), 2), strict=True):
        assert prompt(tokenizer, name, sample.messages[:i]).startswith(before)
        answer = sample.messages[i]["content"].split("</think>")[-1].strip()
        assert said.removesuffix(ENDS[name]).strip().endswith(answer)
        assert said.endswith(ENDS[name]) and said.count(ENDS[name]) == 1


MARKED = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


@pytest.mark.parametrize(
    "template, ends",
    [
        (MARKED, "<|im_end|>"),
        (MARKED.replace("<|im_end|>\\n", "\\n<|im_end|>"), "\n<|im_end|>"),
        (MARKED.replace("{% endgeneration %}", "{{ '<|im_end|>' }}{% endgeneration %}"), "<|im_end|>"),
        (MARKED.replace("<|im_end|>\\n", "{{ eos_token }}"), "<|endoftext|>"),
        (MARKED.replace("'<|im_end|>\\n'", "'<|eos|>' if loop.last else '<|end|>'"), None),
        (MARKED.replace("<|im_end|>", ""), "<|endoftext|>"),
        (  # as the template of gpt-oss for training
            MARKED.replace("{% endgeneration %}", "{{ '<|eos|>' if loop.last else '<|end|>' }}{% endgeneration %}", 1).replace(
                "'<|im_end|>\\n'", "'' if m.role == 'assistant' else '<|end|>'"
            ),
            None,
        ),
    ],
)
def test_a_marked_turn_ends_with_the_token_that_the_template_ends_it_with(tokenizer, monkeypatch, template, ends):
    """Also where the token is not the tokenizer's end of text, and where the marks leave it out."""
    if "{{ eos_token }}" in template:
        template = template.replace("'{{ eos_token }}'", "eos_token")
    monkeypatch.setitem(TEMPLATES, "marked", template)
    found = [said for _, said in supervised(tokenizer, "marked", chat("a", "b\n", "c", "<think>d"))]
    assert found == (["b\n" + ends, "<think>d" + ends] if ends else ["b\n<|end|>", "<think>d<|eos|>"])


GREETED_QWEN = QWEN3.replace(
    "{%- for m in messages -%}",
    "{{- '<|bos|>' + ('<|im_start|>system\\nb<|im_end|>\\n' if messages else '') -}}\n{%- for m in messages -%}",
    1,
)


@pytest.mark.parametrize(
    "template, greeting, expected",
    [
        (GREETED_QWEN, "b", "b<|im_end|>"),
        (R1, "b", "b<|eos|>"),
        (R1, THOUGHT + "b", "hm\n</think>\n\nb<|eos|>"),
        (LLAMA31, "b", "b<|eot|>"),
    ],
)
def test_a_greeting_is_supervised_and_no_turn_before_it(tokenizer, monkeypatch, template, greeting, expected):
    monkeypatch.setitem(TEMPLATES, "greeted", template)
    sample = Chat([{"role": "assistant", "content": greeting}, {"role": "user", "content": "c"}])

    spans = supervised(tokenizer, "greeted", sample)

    assert [text for _, text in spans] == [expected]


def test_a_template_that_keeps_turns_needs_no_further_row(tokenizer):
    for name in ("phi3", "llama31", "gemma"):
        (encoded,) = CausalEncoder(tokenizer, length=None, chat_template=TEMPLATES[name]).encode([chat(*"abcdef")])
        assert not encoded.others and not encoded.shortened
    (encoded,) = CausalEncoder(tokenizer, length=None, chat_template=QWEN3).encode([chat(*"abcdef")])
    assert len(encoded.others) == 2


def test_a_preference_pair_is_one_row_though_the_template_rewrites_earlier_turns(tokenizer):
    rows = [
        {"chosen": chat("a", "b", "c", "d").messages, "rejected": chat("a", "b", "c", "e").messages},
        {"chosen": chat("a", "b", "c", "d").messages, "rejected": chat("a", "e", "c", "e").messages},
    ]
    encoder = CausalEncoder(tokenizer, length=None, chat_template=QWEN3)
    pairs = [read_preference(row, ("chosen", "rejected")) for row in rows]
    chosen = encoder.encode([pair[0] for pair in pairs])
    rejected = encoder.encode([pair[1] for pair in pairs])

    pair, refused = paired(chosen, rejected, "rejected_")

    assert tokenizer.decode(pair.labels[pair.labels != IGNORE]) == "<think>\n\n</think>\n\nd<|im_end|>"
    labels = pair.extra["rejected_labels"]
    assert tokenizer.decode(labels[labels != IGNORE]) == "<think>\n\n</think>\n\ne<|im_end|>"
    assert not pair.others
    assert isinstance(refused, BadSample)


def test_what_a_template_leaves_out_is_counted(tokenizer):
    forgets = QWQ.replace("<think>\\n' }}", "' }}")
    assert forgets != QWQ
    encoder = CausalEncoder(tokenizer, length=None, chat_template=forgets)
    thinks, plain = encoder.encode([chat("a", THOUGHT + "b", "c", "d"), chat("a", "b")])
    assert (thinks.shortened, plain.shortened) == (1, 0)


def test_a_thought_that_a_marked_template_forgets_is_counted(tokenizer):
    """The templates of Nemotron 3 for training forget thoughts of earlier turns."""
    forgets = MARKED.replace("{{ m.content }}", "{{ m.thinking if loop.last }}{{ m.content }}", 1)
    messages = chat("a", "b", "c", "d").messages
    messages[1]["thinking"] = "hm"

    (encoded,) = CausalEncoder(tokenizer, length=None, chat_template=forgets).encode([Chat(messages)])

    assert encoded.shortened == 1


@pytest.mark.parametrize("marks", ["", "{% generation %}"])
def test_a_template_that_writes_the_date_gives_the_same_tokens_every_day(tokenizer, monkeypatch, marks):
    answer = f"{marks}{{{{ message.content }}}}<|im_end|>{marks.replace('gen', 'endgen')}"
    dated = f"Today is {{{{ strftime_now('%d %b %Y') }}}}.{{% for message in messages %}}{answer}{{% endfor %}}"
    monkeypatch.setattr(chat_template_utils, "datetime", None)  # no clock
    encoder = CausalEncoder(tokenizer, length=None, chat_template=dated)
    _compile_jinja_template.cache_clear()  # as in another process, which gets the encoder
    (encoded,) = encoder.encode([Chat([dict(role="assistant", content="hi")])])
    assert tokenizer.decode(encoded.input_ids).startswith("Today is 26 Jul 2024.")


def test_the_date_of_training_data_is_that_of_evaluations_and_not_of_a_conversation(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%Y') }}"
    turns = [dict(role="user", content="hi")]
    CausalEncoder(tokenizer, length=None)  # renders with the same compiled template

    assert render_prompt(tokenizer, turns) == "2024"
    assert int(render_prompt(tokenizer, turns, fixed_date=False)) > 2024


def prepared(tmp_path, tokenizer, template, lines, **keys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat(*line).messages}) + "\n" for line in lines))
    config = RecipeConfig(cache_dir=str(tmp_path / "cache"), train_file=str(tmp_path / "a.jsonl"), **keys)
    library = Library(config, tokenizer, CausalEncoder(tokenizer, length=256, chat_template=template), NextToken())
    return library.open(library.tokenize(1))


def test_rows_of_one_chat_are_held_out_together(tmp_path, tokenizer):
    lines = [[f"q{i}", f"a{i}", f"r{i}", f"b{i}"] for i in range(20)]
    data = prepared(tmp_path, tokenizer, QWEN3, lines, validation_split_percentage=20)
    assert data.report["a"]["rows added for turns that the chat template rewrites later on"] == 20
    assert (len(data.train), len(data.held_out["a"])) == (32, 8)

    def asked(part):
        return {tokenizer.decode(row["input_ids"]).split("user\n")[1].split("<")[0] for row in part.views[0]}

    train, held = asked(data.train), asked(data.held_out["a"])
    assert not train & held and train | held == {f"q{i}" for i in range(20)}


def test_a_file_of_which_nothing_can_be_used_is_an_error(tmp_path, tokenizer):
    refuses = GEMMA.replace("== 'system'", "== 'user'")
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, tokenizer, refuses, [["a", "b"], ["c", "d"]], on_bad_sample="skip")
    assert "not one sample can be used (2 bad samples skipped)" in str(
        caught.value
    ) and "2 x the chat template refuses it: System role" in str(caught.value)


def test_a_reason_that_quotes_a_sample_forges_no_line(tmp_path, tokenizer, capsys):
    quotes = GEMMA + "{% if 'forged' in messages[0]['content'] %}{{ raise_exception(messages[0]['content']) }}{% endif %}"
    lines = [["a", "b"], ["c\nDataError: forged\x1b[2J", "d"]]
    data = prepared(tmp_path, tokenizer, quotes, lines, on_bad_sample="skip", validation_split_percentage=0)
    assert data.bad_samples["a"] == ["line 2: the chat template refuses it: c DataError: forged"]
    assert "\nDataError" not in capsys.readouterr().out


def test_samples_that_are_skipped_are_counted_by_reason(tmp_path, tokenizer, capsys):
    lines = [
        ["a", "b"],
        ["a<|eot|>", "b"],
        ["a", "b<|eot|>"],
        ["a", "b<|end|>", "c<|end|>", "d"],
        ["a", "b"],
        ["a<|eot|>", "c"],
    ]
    data = prepared(tmp_path, tokenizer, GEMMA, lines, on_bad_sample="skip", validation_split_percentage=0)
    assert len(data.train) == 2 and len(data.bad_samples["a"]) == 4
    out = capsys.readouterr().out
    assert "4 bad samples skipped" in out and "2 x turn 1 has the text '<|eot|>'" in out and "line 2" in out


def test_templates_here_are_valid(tokenizer):
    for template in TEMPLATES.values():
        assert _compile_jinja_template(template).render(messages=chat("a", "b").messages, bos_token="", eos_token="")
