"""Warnings of a run with default flags whose data will be used badly. Whole runs in one process."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from recipes.causal_lm import CausalLM
from recipes.lora_finetune import LoraFinetune
from recipes.seq2seq_chatbot import Seq2SeqChatbot
from tests.alone import train
from zerobook.checkpoint import store
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.utils.chat_template import template_file


def chats(path, words):
    """Write a file with one chat for each number of words that an answer has."""
    turns = [("hello", " ".join(["green"] * count)) for count in words]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def output(capfd, run, recipe=LoraFinetune, model="llama", **flags):
    tiny, folder = run
    train(folder / "run", recipe, model_name_or_path=tiny / model, max_train_steps=1, **flags)
    captured = capfd.readouterr()
    return captured.out + captured.err


@pytest.fixture
def run(tiny, tmp_path):
    return tiny, tmp_path


@pytest.mark.parametrize(("words", "warns"), [([60] * 24, True), ([60] * 8 + [2] * 16, False)])
def test_a_run_warns_where_most_samples_lose_a_part_to_the_maximum_length(run, capfd, words, warns):
    said = output(capfd, run, train_file=chats(run[1] / "chats.jsonl", words), max_seq_length=32)

    assert ("24 of 24 samples do not fit into a row" in said) == warns
    assert ("--max_seq_length is 32: raise it" in said) == warns


def test_samples_of_which_nothing_is_left_count_as_cut(run, capfd):
    few, rest = [2] * 4, [2] * 4
    file = chats(run[1] / "chats.jsonl", few + rest)
    lines = file.read_text().splitlines()
    questions = [json.loads(line) for line in lines[:4]]
    for chat in questions:
        chat["messages"][0]["content"] = " ".join(["green"] * 60)
    file.write_text("".join(f"{json.dumps(chat)}\n" for chat in questions) + "\n".join(lines[4:]))

    assert "4 of 8 samples do not fit" in output(capfd, run, train_file=file, max_seq_length=32)


UNEVEN = [2, 2, 2, 2, 2, 2, 2, 90]


def test_a_run_names_the_flags_against_padding_where_that_is_most_of_a_batch(run, capfd):
    file = chats(run[1] / "chats.jsonl", UNEVEN * 4)

    said = output(capfd, run, train_file=file)

    assert "--packing" in said and "--group_by_length" in said


def test_flags_that_are_set_or_cannot_be_are_not_advised(run, capfd):
    file = chats(run[1] / "chats.jsonl", UNEVEN * 4)

    assert "--packing" not in output(capfd, run, train_file=file, packing=True)


def test_an_encoder_decoder_is_not_told_to_pack(tiny, tmp_path, capfd):
    said = output(capfd, (tiny, tmp_path), Seq2SeqChatbot, "bart", train_file=chats(tmp_path / "chats.jsonl", UNEVEN * 4),
                  max_source_length=64, max_target_length=120)  # fmt: skip

    assert "--packing" not in said


def test_even_samples_need_no_advice(run, capfd):
    said = output(capfd, run, train_file=chats(run[1] / "chats.jsonl", [8] * 24))

    assert "--packing" not in said and "WARNING" not in said


def test_a_held_out_share_of_no_row_is_said_with_what_does_not_work_then(run, capfd):
    text = run[1] / "text.txt"
    text.write_text("green tea and a cup of hot water\n" * 30)

    said = output(capfd, run, CausalLM, train_file=text, block_size=64)

    assert "less than one row" in said and "--validation_file" in said and "evaluations:" not in said


@pytest.fixture
def base(tiny, tmp_path):
    """A model whose tokenizer has no chat template."""
    folder = shutil.copytree(tiny / "llama", tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    return folder


def test_chats_for_a_base_model_are_rendered_by_a_template_that_is_said_and_kept(base, tmp_path, capfd):
    flags = {"train_file": chats(tmp_path / "chats.jsonl", [8] * 24), "max_seq_length": 64}
    train(tmp_path / "run", LoraFinetune, model_name_or_path=base, max_train_steps=1, **flags)

    (note,) = [line for line in capfd.readouterr().out.splitlines() if "no chat template" in line]
    assert "zephyr" in note and "--chat_template" in note
    expected = template_file("zephyr").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter").chat_template == expected
    (checkpoint,) = store.list_complete(store.folder_of(tmp_path / "run"))
    assert store.read_json(checkpoint / "config.json")["chat_template"] == expected

    more = train(
        tmp_path / "run", LoraFinetune, model_name_or_path=base, max_train_steps=2, resume_from_checkpoint="auto", **flags
    )
    assert more.event("run_end")["progress"]["step"] == 2, "the same rows"


def test_a_stream_of_chats_needs_a_template_that_a_person_names(base, tmp_path):
    file = chats(tmp_path / "chats.jsonl", [8] * 24)

    with pytest.raises(ConfigError, match="no chat template"):
        train(tmp_path / "run", LoraFinetune, model_name_or_path=base, train_file=file, streaming=True, max_train_steps=1)


def test_a_model_that_is_trained_on_text_gets_no_chat_template(base, tmp_path, capfd):
    text = tmp_path / "text.txt"
    text.write_text("green tea and a cup of hot water\n" * 30)

    train(tmp_path / "run", CausalLM, model_name_or_path=base, train_file=text, block_size=32, max_train_steps=1)

    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template is None
    assert "chat template" not in capfd.readouterr().out


def test_data_inspect_names_the_template_that_a_run_would_take(base, tmp_path, capfd):
    assert main(["data", "inspect", str(chats(tmp_path / "chats.jsonl", [8] * 24)), "--model", str(base)]) == 0

    captured = capfd.readouterr()
    assert "zephyr" in captured.err and "<|user|>" in captured.out
