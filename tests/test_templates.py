"""Samples to ids and labels: what is supervised, under templates of many habits."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHAT_TEMPLATE as CHATML
from zerobook.constants import IGNORE
from zerobook.data.formats import BadSample, Chat, Pair, Text, Tokens, parse
from zerobook.data.templates import CausalEncoder, Encoded, Seq2SeqEncoder
from zerobook.errors import ConfigError
from zerobook.utils.chat_template import FOLDER, NAMES, template_file

END = 2  # <|im_end|>, which is also the pad token
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
) + PROMPT
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TRIMS = CHATML.replace("m['content']", "m['content'] | trim")
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}" + CHATML
FORGETS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}")
LOOKS_BACK = "{{ messages | length }}\n" + CHATML
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|im_start|>' + message['role'] + "
    "'\n\n' + message['content'] | trim + '<|im_end|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
# The text between turns depends on their contents.
NEVER_THE_SAME = CHATML.replace("{% endfor %}", "{{ '#' * (m['content'] | length % 7) }}\n{% endfor %}")
# The text behind a content depends on the content.
PADS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ '#' * (m['content'] | length % 7) }}")
ONLY_SYSTEM = "{% set only = messages[0]['role'] == 'system' %}" + CHATML.replace(
    "m['content']", "m['content'] if m['role'] == 'system' or not only"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


@pytest.fixture(scope="module")
def with_bos(tokenizer):
    """The same tokenizer, but it begins what it is given by a BOS, as Llama's do."""
    from tokenizers.processors import TemplateProcessing

    made = copy.deepcopy(tokenizer)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    assert made("a")["input_ids"][0] == 1
    return made


@pytest.fixture(scope="module")
def trimming(tokenizer):
    """The same tokenizer, but white space belongs to no token by its offsets, as in most released byte-level ones."""
    from tokenizers.processors import ByteLevel

    made = copy.deepcopy(tokenizer)
    made.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert made.backend_tokenizer.encode("a b").char_to_token(1) is None
    return made


def chat(*contents: str, system: str | None = None) -> Chat:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return Chat([{"role": "system", "content": system}, *turns] if system else turns)


TALK = chat("Hello?", "Hi there.", "Who are you?", "A book.")


def one(tokenizer, sample, length=None, template=None) -> Encoded:
    (encoded,) = CausalEncoder(tokenizer, length=length, chat_template=template).encode([sample])
    assert isinstance(encoded, Encoded), encoded
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32
    return encoded


def reason(tokenizer, sample, template=None) -> str:
    (bad,) = CausalEncoder(tokenizer, length=None, chat_template=template).encode([sample])
    assert isinstance(bad, BadSample)
    return str(bad)


def said(tokenizer, encoded) -> list[str]:
    """The supervised stretches, as text."""
    kept = encoded.labels != IGNORE
    assert (encoded.labels[kept] == encoded.input_ids[kept]).all()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]])))
    return [tokenizer.decode(encoded.labels[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("template", [None, MARKED, NEVER_THE_SAME])
def test_without_assistant_only_loss_all_of_a_chat_is_supervised(tokenizer, trimming, template):
    """Also the line end behind the last turn, which the offsets of one of the tokenizers leave out."""
    for made in (tokenizer, trimming):
        encoder = CausalEncoder(made, length=None, chat_template=template, assistant_only_loss=False)
        (encoded,) = encoder.encode([TALK])
        whole = made.apply_chat_template(TALK.messages, tokenize=False, chat_template=template)
        assert said(made, encoded) == [whole]
        assert encoded.others == ()


def test_without_assistant_only_loss_turns_end_with_a_token_too(tokenizer):
    encoder = CausalEncoder(tokenizer, length=None, chat_template=NO_END, assistant_only_loss=False)

    (encoded,) = encoder.encode([TALK])

    assert said(tokenizer, encoded) == [
        "user: Hello?\nassistant: Hi there.<|im_end|>\nuser: Who are you?\nassistant: A book.<|im_end|>\n"
    ]
    assert encoded.added_eos == 2


def test_marks_of_turns_and_completions_say_what_is_supervised_also_without_assistant_only_loss(tokenizer):
    encoder = CausalEncoder(tokenizer, length=None, assistant_only_loss=False)
    marked = Chat(TALK.messages, frozenset({1}))
    completion = parse("prompt_completion", {"prompt": TALK.messages[:3], "completion": TALK.messages[3:]})
    assert [said(tokenizer, encoded) for encoded in encoder.encode([marked, completion])] == [["A book.<|im_end|>"]] * 2


@pytest.mark.parametrize(
    "template, expected, whole",
    [
        (None, ["Hi there.<|im_end|>", "A book.<|im_end|>"], None),
        (MARKED, ["Hi there.<|im_end|>", "A book.<|im_end|>"], None),
        (MARKED_WITHOUT_END, ["Hi there.<|im_end|>", "A book.<|im_end|>"], None),
        (TRIMS, ["Hi there.<|im_end|>", "A book.<|im_end|>"], None),
        (
            NEVER_THE_SAME,
            ["Hi there.<|im_end|>", "A book.<|im_end|>"],
            "<|im_start|>user\nHello?<|im_end|>\n######\n<|im_start|>assistant\nHi there.<|im_end|>\n##\n"
            "<|im_start|>user\nWho are you?<|im_end|>\n#####\n<|im_start|>assistant\nA book.<|im_end|>\n\n",
        ),
        (
            INST,
            [" Hi there. <|im_end|>", " A book. <|im_end|>"],
            "<|im_start|>[INST] Hello? [/INST] Hi there. <|im_end|><|im_start|>[INST] Who are you? [/INST] A book. <|im_end|>",
        ),
        (
            NO_END,
            [" Hi there.<|im_end|>", " A book.<|im_end|>"],
            "user: Hello?\nassistant: Hi there.<|im_end|>\nuser: Who are you?\nassistant: A book.<|im_end|>\n",
        ),
        (
            NO_PROMPT,
            ["<|im_start|>assistant\nHi there.<|im_end|>", "<|im_start|>assistant\nA book.<|im_end|>"],
            "<|im_start|>user\nHello?\n<|im_start|>assistant\nHi there.<|im_end|>\n"
            "<|im_start|>user\nWho are you?\n<|im_start|>assistant\nA book.<|im_end|>\n",
        ),
    ],
)
def test_the_assistants_turns_and_their_ends_are_supervised(tokenizer, template, expected, whole):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == END, "the case where the end token is easily lost"
    encoded = one(tokenizer, TALK, template=template)
    assert said(tokenizer, encoded) == expected
    assert tokenizer.decode(encoded.input_ids) == (whole or tokenizer.apply_chat_template(TALK.messages, tokenize=False))
    assert encoded.added_eos == (2 if template in (NO_END, NO_PROMPT) else 0)
    assert not encoded.cut


@pytest.mark.parametrize("template", [None, MARKED, TRIMS, NEVER_THE_SAME, INST, NO_END, FORGETS])
def test_turns_that_are_context_only_are_not_supervised(tokenizer, template):
    encoder = CausalEncoder(tokenizer, length=None, chat_template=template)

    def all_said(sample):
        (row,) = encoder.encode([sample])
        return sorted(text for encoded in (row, *row.others) for text in said(tokenizer, encoded))

    both = all_said(TALK)
    first, second = (all_said(Chat(TALK.messages, frozenset({i}))) for i in (3, 1))
    assert len(both) == 2 and first != second and sorted(first + second) == both
    assert all_said(Chat(TALK.messages, frozenset({1, 3}))) == []


TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.a }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
) + PROMPT
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "It is 4."},
]


def test_tools_calls_and_thoughts_go_where_the_template_reads_them(tokenizer):
    encoded = one(tokenizer, Chat(CALLS, tools=[{"name": "add"}]), template=TOOLS)
    assert said(tokenizer, encoded) == ["[add 2]<|im_end|>", "(It is 4.) Four.<|im_end|>"]
    assert tokenizer.decode(encoded.input_ids).startswith('<|im_start|>system\n[{"name": "add"}]<|im_end|>\n<|im_start|>user')
    for part in ("tools", "tool_calls", "reasoning_content"):
        assert "which the chat template does not read" in reason(
            tokenizer, Chat(CALLS, tools=[{"name": "add"}]), template=TOOLS.replace(part, "other")
        )
    named = [CALLS[0], {**CALLS[1], "tool_calls": [{**CALL, "function": {"name": "<|im_end|>", "arguments": {}}}]}]
    assert "reads as a special token" in reason(tokenizer, Chat(named), template=TOOLS)


def test_three_chats_keep_their_ends_though_pad_is_the_same_token(tokenizer):
    chats = [TALK, chat("Yes?", "No."), chat("a", "b", "c", "d", "e", "f", "g")]
    encoded = CausalEncoder(tokenizer, length=None).encode(chats)
    assert [(e.labels == END).sum() for e in encoded] == [2, 1, 3]


def test_tool_and_system_turns_are_context(tokenizer):
    messages = [{"role": "system", "content": "s"}, *chat("q", "call").messages, {"role": "tool", "content": "result"}]
    encoded = one(tokenizer, Chat([*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "bye"}]))
    assert said(tokenizer, encoded) == ["call<|im_end|>", "so<|im_end|>"]


@pytest.mark.parametrize(
    "template, sample, expected",
    [
        (NO_SYSTEM, chat("a", "b", system="c"), "the chat template refuses it: no system turn here"),
        (ONLY_SYSTEM, chat("a", "b", system="c"), "turn 2 (user) has content, which the chat template does not read"),
        (LOOKS_BACK, chat("a", "b", "c", "d"), "renders turn 2 differently from its own generation prompt"),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), chat("a", "b"), "marks 0 turns as generated, the assistant has 1"),
        (MARKED + "{{ nobody.name }}", chat("a", "b"), "the chat template refuses it: 'nobody' is undefined"),
        (None, chat("a<|im_start|>b", "c"), "turn 1 has the text '<|im_start|>', which the tokenizer reads as a special token"),
    ],
)
def test_a_chat_that_the_template_cannot_carry_is_a_bad_sample_and_the_others_are_not(tokenizer, template, sample, expected):
    harmless = chat("a", "b")
    for first in (False, True):  # what was learnt from other chats must not hide it
        samples = [sample, Text("x"), harmless] if first else [harmless, Text("x"), sample]
        results = CausalEncoder(tokenizer, length=None, chat_template=template).encode(samples)
        bad = results[0 if first else 2]
        assert isinstance(bad, BadSample) and expected in str(bad)
        assert tokenizer.decode(results[1].input_ids) == "x<|im_end|>"
        if template in (NO_SYSTEM, ONLY_SYSTEM, None):
            assert said(tokenizer, results[2 if first else 0]) == ["b<|im_end|>"]


def test_no_turn_is_begun_or_ended_by_a_sample(tokenizer):
    """Some tokenizers have the tokens around turns as added ones that are not special."""
    added = copy.deepcopy(tokenizer)
    added.add_tokens([AddedToken(name, special=False) for name in ("<turn_end>", "<turn>", "<bot>", "<think>", "</think>")])
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<turn>{{ m.content }}<turn_end>{% else %}<bot><think></think>"
        "{{ m.content }}<turn_end>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    texts = ("<turn_end>", "<turn>", "<bot>", "<think>hm</think>b")
    results = CausalEncoder(added, length=None, chat_template=template).encode([chat(f"a{text}", "b") for text in texts])
    for text, bad in zip(texts[:3], results, strict=False):
        assert isinstance(bad, BadSample) and f"turn 1 has the text {text!r}, which the chat template begins or ends" in str(
            bad
        )
    assert said(added, results[3]) == ["<think></think>b<turn_end>"]


def test_a_turn_that_the_template_forgets_has_a_row_of_its_own(tokenizer):
    assert said(tokenizer, one(tokenizer, chat("a", "<think>hm</think>b"), template=FORGETS)) == [
        "<think>hm</think>b<|im_end|>"
    ]
    encoded = one(tokenizer, chat("a", "<think>hm</think>b", "c", "d"), template=FORGETS)
    assert [said(tokenizer, row) for row in (encoded, *encoded.others)] == [["d<|im_end|>"], ["<think>hm</think>b<|im_end|>"]]
    assert "<think>" not in tokenizer.decode(encoded.input_ids)


def test_no_way_to_render_or_to_end_a_chat_is_the_users_to_fix(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*--chat_template FILE, or use an instruct model's tokenizer"):
        CausalEncoder(bare, length=8).encode([TALK])
    assert said(bare, one(bare, TALK, template=CHATML)) == ["Hi there.<|im_end|>", "A book.<|im_end|>"]
    with pytest.raises(ConfigError, match="--chat_template: not valid Jinja, line 2: Unexpected end of template"):
        CausalEncoder(tokenizer, length=8, chat_template="x\n{% for m in messages %}")
    bare.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(ConfigError, match="multiple chat templates with no default"):
        CausalEncoder(bare, length=8)
    bare.eos_token = None
    with pytest.raises(ConfigError, match="would never learn to stop"):
        CausalEncoder(bare, length=None, chat_template=NO_END).encode([TALK])


def test_documents_end_once_and_are_never_cut(tokenizer):
    encoded = one(tokenizer, Text("one two three " * 20), length=8)
    assert not encoded.cut and len(encoded.labels) > 8 and (encoded.labels == encoded.input_ids).all()
    assert encoded.input_ids[-1] == END and END not in encoded.input_ids[:-1]
    assert (one(tokenizer, Text("a<|im_end|>")).input_ids == one(tokenizer, Text("a")).input_ids).all()


def test_chats_and_tokens_lose_their_end(tokenizer):
    whole = one(tokenizer, TALK)
    for sample in (TALK, Tokens(whole.input_ids.tolist(), whole.labels.tolist())):
        assert not one(tokenizer, sample, length=len(whole.input_ids)).cut
        encoded = one(tokenizer, sample, length=len(whole.input_ids) - 3)
        assert encoded.cut
        assert (encoded.input_ids == whole.input_ids[:-3]).all() and (encoded.labels == whole.labels[:-3]).all()


def test_a_pair_loses_the_left_of_its_source_first(tokenizer):
    pair = Pair("abcdefghijkl", "xyz")
    whole = one(tokenizer, pair)
    size, learnt = len(whole.input_ids), int((whole.labels != IGNORE).sum())
    assert said(tokenizer, whole) == ["xyz<|im_end|>"] and tokenizer.decode(whole.input_ids) == "abcdefghijklxyz<|im_end|>"
    for length in range(1, size + 1):
        encoded = one(tokenizer, pair, length=length)
        assert len(encoded.input_ids) == length and encoded.cut == (length < size)
        if length >= learnt:
            assert said(tokenizer, encoded) == ["xyz<|im_end|>"]
            assert (encoded.input_ids == whole.input_ids[size - length :]).all()
        else:
            assert (encoded.labels == whole.labels[-learnt:][:length]).all()


def spaced_tokenizer(splitter, **parts):
    """A tokenizer that puts a space before a text, with words as tokens."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = splitter
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "\n"]
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["It is open until nine. Paris Hello"] * 20, trainer)
    for name, part in parts.items():
        setattr(core, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize("target", [" Paris", "Paris", "\nParis", "  Paris", "Hello until"])
@pytest.mark.parametrize(("splitter", "parts"), [
    (pre_tokenizers.Metaspace(), {"normalizer": LLAMA_2, "pre_tokenizer": None}),
    (pre_tokenizers.Metaspace(prepend_scheme="first"), {}), (pre_tokenizers.Metaspace(prepend_scheme="always"), {}),
    (pre_tokenizers.ByteLevel(add_prefix_space=True), {}), (pre_tokenizers.ByteLevel(add_prefix_space=False), {}),
])  # fmt: skip
def test_a_target_follows_its_source_without_a_space_that_it_does_not_have(splitter, parts, target):
    tokenizer = spaced_tokenizer(splitter, **parts)
    source = "It is open."

    encoded = one(tokenizer, Pair(source, target))

    joined = tokenizer(source + target)["input_ids"]
    assert encoded.input_ids[:-1].tolist() == joined
    assert (encoded.labels == IGNORE).sum() == len(tokenizer(source)["input_ids"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_seq2seq_chat_keeps_its_question_and_the_beginning_of_its_answer(tokenizer, side):
    tokenizer = copy.copy(tokenizer)
    tokenizer.truncation_side = side
    turns = [("user", "old " * 30), ("assistant", "yes"), ("user", "What now?"), ("assistant", "This answer is long")]
    chat = Chat([{"role": role, "content": content} for role, content in turns])
    pair = Pair("What now? " + "old " * 30, "This answer is long")
    instruction = Chat([{"role": "user", "content": pair.source}, {"role": "assistant", "content": pair.target}])

    encoder = Seq2SeqEncoder(tokenizer, max_source_length=12, max_target_length=4)
    of_chat, *others = encoder.encode([chat, pair, instruction])

    assert tokenizer.decode(of_chat.input_ids).endswith("\nyes\nWhat now?")
    for encoded in others:
        assert tokenizer.decode(encoded.input_ids).startswith("What now? old")
    for encoded in (of_chat, *others):
        assert len(encoded.input_ids) == 12 and encoded.cut
        assert tokenizer.decode(encoded.labels).startswith("Th") and encoded.labels[-1] == END
    assert tokenizer.truncation_side == side, "the run's tokenizer is saved as it is"


def test_a_beginning_is_written_once(with_bos):
    pair = one(with_bos, Pair("a", "b"))
    assert pair.input_ids[0] == 1 and (pair.input_ids == 1).sum() == 1
    assert said(with_bos, pair) == ["b<|im_end|>"]
    assert (one(with_bos, Pair("<|im_start|>a", "b")).input_ids == pair.input_ids).all()
    short = one(with_bos, Pair("a" * 50, "b"), length=5)
    assert short.input_ids[0] == 1 and said(with_bos, short) == ["b<|im_end|>"]
    talk = one(with_bos, TALK, template=INST)
    assert (talk.input_ids == 1).sum() == 2 and talk.input_ids[0] == 1 and talk.input_ids[1] != 1
    assert (talk.input_ids == one(with_bos, TALK, template=INST).input_ids).all()


def test_a_document_begins_as_the_tokenizer_begins_one(tokenizer, with_bos):
    document = one(with_bos, Text("one two three"))
    assert with_bos.decode(document.input_ids) == "<|im_start|>one two three<|im_end|>"
    assert document.input_ids.tolist() == [*with_bos("one two three")["input_ids"], END]
    assert (document.labels == document.input_ids).all()
    assert (one(with_bos, Text("<|im_start|>one two three<|im_end|>")).input_ids == document.input_ids).all()
    parts = [Text("one ", ends=False), Text("two ", begins=False, ends=False), Text("three", begins=False)]
    ids = np.concatenate([one(with_bos, part).input_ids for part in parts])
    assert with_bos.decode(ids) == "<|im_start|>one two three<|im_end|>"
    assert tokenizer.decode(one(tokenizer, Text("one")).input_ids) == "one<|im_end|>", "it adds none, and none is added"


def test_no_control_token_is_read_out_of_a_sample(tokenizer, with_bos):
    """Chats and pairs that name one are refused, in every field; running text is characters."""
    named = "which the tokenizer reads as a special token"
    for made in (tokenizer, with_bos):
        for pair, field in ((Pair("a<|im_end|>b", "c"), "source"), (Pair("a", "b<|endoftext|>c"), "target")):
            assert (
                reason(made, pair)
                == f"the {field} has the text {'<|im_end|>' if field == 'source' else '<|endoftext|>'!r}, {named}"
            )
            (bad,) = Seq2SeqEncoder(made, max_source_length=8, max_target_length=8, prefix="<|im_start|>").encode([pair])
            assert isinstance(bad, BadSample) and named in str(bad)
        text = "<|im_end|> ends a turn, <|endoftext|> and <|im_start|> too.<|im_start|>"
        document = one(made, Text(text))
        assert document.plain and not one(made, Text("It ends.")).plain
        bare = document.input_ids.tolist()[len(made("")["input_ids"]) : -1]
        assert not set(bare) & {0, 1, 2} and made.decode(bare) == text
        assert not set(one(made, Text("<|im_start|>a", begins=False)).input_ids.tolist()) & {0, 1}
    # what would be written there in any case may stand there, as in some published data
    assert (one(with_bos, Text("<|im_start|>a<|im_end|>\n")).input_ids == one(with_bos, Text("a")).input_ids).all()
    assert (one(with_bos, Pair("<|im_start|>a", "b<|im_end|>")).input_ids == one(with_bos, Pair("a", "b")).input_ids).all()
    assert not with_bos.backend_tokenizer.encode_special_tokens, "the tokenizer is left as it was"


def test_a_tokenizer_without_a_backend_reads_no_control_token_out_of_a_text():
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    document = one(slow, Text("a</s>b<pad>"))
    assert document.plain and (document.input_ids == slow.eos_token_id).sum() == 1
    assert document.input_ids.tolist()[:-1] == [byte + 3 for byte in b"a</s>b<pad>"]


def test_a_beginning_of_several_tokens_is_kept_whole(tokenizer):
    from tokenizers.processors import TemplateProcessing

    made = copy.deepcopy(tokenizer)
    special = [("<|endoftext|>", 0), ("<|im_start|>", 1)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> <|im_start|> $A", special_tokens=special)
    assert one(made, Text("one two")).input_ids.tolist() == [*made("one two")["input_ids"], END]
    pair = one(made, Pair("one", "two"), length=6)
    assert pair.input_ids[:2].tolist() == [0, 1] and said(made, pair) == ["two<|im_end|>"]


def test_ids_that_the_tokenizer_does_not_have(tokenizer):
    assert reason(tokenizer, Tokens([1, 99999], [1, 2])) == "token id 99999 is outside the tokenizer's 512 ids"
    assert "token id 512 is outside" in reason(tokenizer, Tokens([1, 2], [1, 512]))
    assert one(tokenizer, Tokens([1, 511], [IGNORE, 511])).labels.tolist() == [IGNORE, 511]


def test_a_tokenizers_own_truncation_and_padding_do_not_reach_the_samples(tokenizer):
    set_up = copy.deepcopy(tokenizer)
    encoders = [CausalEncoder(t, length=None) for t in (set_up, tokenizer)]
    set_up.backend_tokenizer.enable_truncation(4)
    set_up.backend_tokenizer.enable_padding(length=64)
    samples = [TALK, Text("one two three"), Pair("a", "b")]
    for ours, theirs in zip(*(encoder.encode(samples) for encoder in encoders), strict=True):
        assert (ours.input_ids == theirs.input_ids).all() and (ours.labels == theirs.labels).all()


def test_encoders_are_pickled_before_and_after_use(tokenizer):
    samples = [TALK, Text("x"), Pair("a", "b"), Tokens([1], [1])]
    encoder = CausalEncoder(tokenizer, length=64)
    unused = pickle.dumps(encoder)
    expected = encoder.encode(samples)
    for pickled in (unused, pickle.dumps(encoder)):
        for ours, theirs in zip(pickle.loads(pickled).encode(samples), expected, strict=True):
            assert (ours.input_ids == theirs.input_ids).all() and (ours.labels == theirs.labels).all()
    seq2seq = pickle.loads(pickle.dumps(Seq2SeqEncoder(tokenizer, max_source_length=8, max_target_length=8)))
    assert len(seq2seq.encode([TALK])) == 1


def test_chats_need_a_tokenizer_that_tells_the_characters_of_a_token():
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    with pytest.raises(ConfigError, match=r"ByT5Tokenizer .*tokenizer\.json"):
        one(slow, TALK, template=NO_END)
    assert said(slow, one(slow, Pair("a", "b"))) == ["b</s>"]


def test_seq2seq(tokenizer, with_bos):
    encoder = Seq2SeqEncoder(with_bos, max_source_length=16, max_target_length=6, prefix="say: ")
    pair, talk, long, text, ready = encoder.encode([Pair("a", "b"), TALK, Pair("a" * 99, "b"), Text("x"), Tokens([1], [1])])
    assert with_bos.decode(pair.input_ids) == "<|im_start|>say: a" and with_bos.decode(pair.labels) == "<|im_start|>b<|im_end|>"
    assert not pair.cut and pair.input_ids.dtype == pair.labels.dtype == np.int32
    assert long.cut and len(long.input_ids) == 16
    assert isinstance(text, BadSample) and "a document has no target" in str(text)
    assert isinstance(ready, BadSample) and "for causal models" in str(ready)
    assert talk.cut
    roomy = Seq2SeqEncoder(tokenizer, max_source_length=64, max_target_length=64)
    (talk,) = roomy.encode([chat("Hello?", "Hi there.", "Who are you?", "A book.", "Oh", system="Be kind.")])
    assert tokenizer.decode(talk.input_ids) == "Be kind.\nHello?\nHi there.\nWho are you?"
    assert tokenizer.decode(talk.labels) == "A book.<|im_end|>" and not talk.cut
    (talk,) = roomy.encode([Chat(TALK.messages, frozenset({3}))])
    assert tokenizer.decode(talk.labels) == "Hi there.<|im_end|>", "the last turn that is supervised"
    no_target, calls = roomy.encode([Chat(TALK.messages, frozenset({1, 3})), Chat(CALLS)])
    assert "there is no target" in str(no_target) and "tool calls" in str(calls)
    target = len(tokenizer("b" * 30)["input_ids"])
    for length in range(2, target + 3):
        (encoded,) = Seq2SeqEncoder(tokenizer, max_source_length=8, max_target_length=length).encode([Pair("a", "b" * 30)])
        assert encoded.labels[-1] == END, "the end survives the cut"
        assert len(encoded.labels) == min(length, target + 1) and encoded.cut == (length < target + 1)


def test_seq2seq_leaves_the_end_where_the_tokenizer_writes_it(tokenizer):
    from tokenizers.processors import TemplateProcessing

    ends = copy.deepcopy(tokenizer)
    ends.backend_tokenizer.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", END)])
    encoder = Seq2SeqEncoder(ends, max_source_length=8, max_target_length=4)
    short, long = encoder.encode([Pair("a", "b"), Pair("a", "b" * 30)])
    assert ends.decode(short.labels) == "b<|im_end|>" and not short.cut
    assert len(long.labels) == 4 and long.labels[-1] == END and long.cut


@pytest.mark.parametrize(
    "sample, expected",
    [
        (chat("fives", "fives"), ["fives#####<|im_end|>"]),
        (chat("fives", "four"), ["four####<|im_end|>"]),
        (chat("sixsix", "four", "fives", "fives"), ["four####<|im_end|>", "fives#####<|im_end|>"]),
    ],
)
def test_what_a_template_writes_behind_a_content_is_supervised(tokenizer, sample, expected):
    assert said(tokenizer, one(tokenizer, sample, template=PADS)) == expected


contents = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20).filter(str.strip)
chats = st.builds(
    lambda turns, system, more: chat(*[text for turn in turns for text in turn], *more, system=system),
    st.lists(st.tuples(contents, contents), min_size=1, max_size=4),
    st.none() | contents,
    st.lists(contents, max_size=1),
)


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WITHOUT_END, TRIMS, NO_END, INST, NEVER_THE_SAME])
@settings(max_examples=60)
@given(batch=st.lists(chats, min_size=1, max_size=3))
@example(batch=[chat("0", "#")])  # some of these templates write this character behind the turn, too
@example(batch=[chat("0", "\x02")])
def test_any_chat_is_supervised_on_whole_turns_and_their_ends(tokenizer, trimming, template, batch):
    results = [CausalEncoder(t, length=None, chat_template=template).encode(batch) for t in (tokenizer, trimming)]
    for sample, encoded, other in zip(batch, *results, strict=True):
        assert (encoded.labels == other.labels).all()
        spoken = [m["content"] for m in sample.messages if m["role"] == "assistant"]
        found = said(tokenizer, encoded)
        assert len(found) == len(spoken) == (encoded.labels == END).sum()
        for turn, content in zip(found, spoken, strict=True):
            content = content.strip() if template == TRIMS else content
            assert content in turn and turn.endswith("<|im_end|>")
            assert turn.removesuffix("<|im_end|>").strip() == content.strip()


@pytest.mark.parametrize("name, ends, begins", [
    ("chatml", "<|im_end|>", "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nHi there."),
    ("llama-3", "<|eot_id|>",
     "BOS<|start_header_id|>user<|end_header_id|>\n\nHello?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi"),
    ("mistral", "EOS", "BOS[INST] Hello? [/INST] Hi there.EOS[INST] Who are you? [/INST] A book.EOS"),
    ("gemma", "<end_of_turn>", "BOS<start_of_turn>user\nHello?<end_of_turn>\n<start_of_turn>model\nHi there.<end_of_turn>\n"),
    ("falcon", "EOS", "User: Hello?\nFalcon: Hi there.EOS\nUser: Who are you?\nFalcon: A book.EOS\n"),
    ("zephyr", "EOS", "BOS<|user|>\nHello?EOS\n<|assistant|>\nHi there.EOS\n<|user|>\nWho are you?EOS\n"),
])  # fmt: skip
def test_templates_by_name(tokenizer, name, ends, begins):
    """Each turn of the assistant is supervised with its end, also where the end is no token of this tokenizer."""
    text = template_file(name).read_text()
    marks = {"BOS": tokenizer.bos_token or "", "EOS": tokenizer.eos_token}
    for mark, token in marks.items():
        ends, begins = ends.replace(mark, token), begins.replace(mark, token)
    made = copy.deepcopy(tokenizer)
    made.chat_template = text
    rendered = made.apply_chat_template(TALK.messages, tokenize=False)
    assert rendered.startswith(begins)
    encoded = one(tokenizer, TALK, template=text)
    assert tokenizer.decode(encoded.input_ids).replace(tokenizer.eos_token, "") == rendered.replace(tokenizer.eos_token, "")
    for answer, supervised in zip(("Hi there.", "A book."), said(tokenizer, encoded), strict=True):
        assert supervised.strip().startswith(answer) and ends in supervised and supervised.endswith(tokenizer.eos_token)
    prompt = made.apply_chat_template(TALK.messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt), "a chat goes on as it was trained"
    with_system = made.apply_chat_template(chat("Hello?", "Hi.", system="Be brief.").messages, tokenize=False)
    assert "Be brief." in with_system and with_system.index("Be brief.") < with_system.index("Hello?")


def test_every_template_that_is_shipped_has_a_name():
    assert {file.stem for file in FOLDER.glob("*.jinja")} == set(NAMES)
