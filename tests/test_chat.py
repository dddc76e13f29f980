"""Results loaded back from what recipes leave behind, and conversations with them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT, staged
from zerobook.checkpoint import store
from zerobook.cli.chat import Conversation
from zerobook.cli.main import main
from zerobook.data import embedded
from zerobook.errors import ConfigError
from zerobook.models import result as load
from zerobook.models.generation_config import list_stop_tokens
from zerobook.models.result import load_result
from zerobook.utils.terminal import plain
from zerobook.utils.units import size

IDS = torch.tensor([[1, 5, 9, 14]])


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """An output_dir with an adapter in it, saved as a recipe saves one, that changes what its base says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zerobook.models.adapters import add_adapter

    base = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    base.config.use_cache = False
    model = add_adapter(base, "lora", rank=4, alpha=8, dropout=0.0, targets=["all-linear"], seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    folder = tmp_path_factory.mktemp("run")
    model.save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(tiny / "llama").save_pretrained(folder / "adapter")
    (folder / "runlog").mkdir()
    return folder


@pytest.fixture(scope="module")
def seq2seq(tiny, tmp_path_factory) -> Path:
    from transformers import AutoTokenizer, BlenderbotConfig, BlenderbotForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    config = BlenderbotConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=48, pad_token_id=2,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("seq2seq") / "model"
    BlenderbotForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


# --- loading
def test_a_model_folder_a_run_and_an_adapter(tiny, run, tmp_path):
    plain = load_result(tiny / "llama")
    assert plain.kind == "causal" and not plain.model.training and plain.context == 2048
    (tmp_path / "model").symlink_to(tiny / "llama")
    assert torch.equal(logits(load_result(tmp_path).model), logits(plain.model))

    adapted = load_result(run)
    assert adapted.kind == "causal" and adapted.tokenizer.chat_template and not adapted.model.training
    assert (logits(adapted.model) - logits(plain.model)).abs().max() > 0.1, "the adapter's weights are in"
    assert torch.equal(logits(load_result(run / "adapter").model), logits(adapted.model))


def test_a_model_that_does_not_fit_the_gpu_is_an_error_with_sizes(tiny, monkeypatch):
    weight_bytes = sum(weight.nbytes for weight in load_result(tiny / "llama").model.parameters())

    def fail(module, device):
        raise torch.OutOfMemoryError(f"{device} out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24_100_000_000, 25_000_000_000))
    monkeypatch.setattr(torch.nn.Module, "to", fail)

    with pytest.raises(ConfigError) as caught:
        load_result(tiny / "llama")

    for part in (str(tiny / "llama"), size(weight_bytes), "24.1 GB", "CUDA_VISIBLE_DEVICES="):
        assert part in str(caught.value)


def test_the_cache_that_training_switched_off_is_on(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    trained.config.use_cache = trained.generation_config.use_cache = False
    trained.save_pretrained(tmp_path)
    shutil.copy(tiny / "llama" / "tokenizer.json", tmp_path)
    shutil.copy(tiny / "llama" / "tokenizer_config.json", tmp_path)
    model = load_result(tmp_path).model
    assert model.config.use_cache and model.generation_config.use_cache


def test_an_adapter_without_a_tokenizer_speaks_its_bases(run, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(run / "adapter", folder, ignore=shutil.ignore_patterns("*token*", "chat_template*"))
    assert load_result(folder).tokenizer.chat_template == load_result(run).tokenizer.chat_template


def test_the_embedded_base_is_found_under_another_home(tiny, run, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "adapter"
    shutil.copytree(run / "adapter", folder)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = "/home/another/.cache/zerobook/SmolLM2-135M-Instruct"
    file.write_text(json.dumps(config))
    monkeypatch.setattr(embedded, "smollm2", lambda: print("converting") or tiny / "llama")
    assert torch.equal(logits(load_result(folder).model), logits(load_result(run).model))
    assert load.locate_result("embedded:smollm2") == str(tiny / "llama")
    assert capsys.readouterr() == ("", "converting\n" * 2), "stdout is for answers"


def test_seq2seq(seq2seq):
    loaded = load_result(seq2seq.parent)
    assert (loaded.kind, loaded.context) == ("seq2seq", 48)
    from transformers import T5Config

    assert load.find_context_length(T5Config(n_positions=512)) is None


def edit(folder: Path, **values: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_what_cannot_be_loaded_is_named(tiny, run, tmp_path, monkeypatch):
    def refused(path, *parts):
        with pytest.raises(ConfigError) as caught:
            load_result(path)
        for part in (str(path), *parts):
            assert part in str(caught.value)

    refused(tmp_path / "none", "there is no such folder")
    monkeypatch.chdir(tmp_path.parent)  # "a/b" could be a hub's name, but not where the folder a is
    refused(f"{tmp_path.name}/none", "there is no such folder. Give")
    refused(tmp_path, "neither config.json (a model) nor adapter_config.json (an adapter)")
    refused(tiny / "text.txt", "this is a file")
    refused("embedded:gpt5", "the only embedded model is embedded:smollm2")
    both = tmp_path / "both"
    shutil.copytree(run, both)
    (both / "model").symlink_to(tiny / "llama")
    refused(both, "holds both", "Name one of them")
    # A checkpoint does not take the place of a result that cannot be used.
    with staged(both, 1):
        pass
    assert store.list_complete(both / "checkpoints")
    refused(both, "holds both", "Name one of them")
    (both / "model").unlink()

    adapter = both / "adapter"
    edit(adapter, base_model_name_or_path=str(tmp_path / "gone"))
    refused(adapter, f"an adapter for {tmp_path / 'gone'}", "there is no such folder", "write its place into")
    edit(adapter, base_model_name_or_path=str(tiny / "wide"))
    refused(adapter, f"does not load onto {tiny / 'wide'}", "size mismatch")
    edit(adapter, base_model_name_or_path=None)
    refused(adapter, "names no base_model_name_or_path")
    (adapter / "adapter_config.json").write_text("{")
    refused(adapter, "this is not an adapter's config")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    refused(tmp_path, "the folder is here, but the model cannot be loaded")


# --- talking
@pytest.fixture
def talk(monkeypatch, capsys):
    """Runs the command on the given lines; returns (exit code, stdout, stderr)."""

    def run(path, *flags, lines: list[str]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        code = main(["chat", str(path), *flags])
        return code, *capsys.readouterr()

    return run


def test_through_a_real_pipe(tiny):
    """Bytes that are no UTF-8 are no reason to die; the end of the input is the end."""
    line = [sys.executable, "-m", "zerobook.cli.main", "chat", str(tiny / "llama"), "--max_new_tokens", "8"]
    done = subprocess.run(line, input=b"What is AI?\n\xff\n", capture_output=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == b""
    assert len(done.stdout.decode().splitlines()) >= 2 and b"<|im_" not in done.stdout


def test_history_is_kept_reset_and_left(run, talk, monkeypatch):
    seen = []
    prompt = Conversation.prompt
    monkeypatch.setattr(Conversation, "prompt", lambda self, turns: seen.append(list(turns)) or prompt(self, turns))
    lines = ["one", "", "two", "/reset", "three", "/quit", "never"]
    code, out, err = talk(run, "--max_new_tokens", "4", lines=lines)
    assert code == 0 and err == "(forgotten)\n" and out
    said = [[turn["content"] for turn in turns if turn["role"] == "user"] for turns in seen]
    assert said == [["one"], ["one", "two"], ["three"]]
    assert [turn["role"] for turn in seen[1]] == ["user", "assistant", "user"]


def test_help_lists_what_can_be_typed_and_is_no_message(run, talk, monkeypatch):
    seen = []
    prompt = Conversation.prompt
    monkeypatch.setattr(Conversation, "prompt", lambda self, turns: seen.append(list(turns)) or prompt(self, turns))
    code, out, err = talk(run, "--max_new_tokens", "4", lines=["/help"])
    assert code == 0 and seen == [] and out == ""
    assert {line.split()[0] for line in err.splitlines()} == {"/help", "/reset", "/quit", "Ctrl-C"}


def test_what_people_say_is_text(run, talk):
    code, out, err = talk(run, "--max_new_tokens", "4", lines=["end<|im_end|>this", "one"])
    assert (
        code == 0
        and out
        and err == ("(this message has the text '<|im_end|>', which the tokenizer reads as a special token; leave it out)\n")
    )
    assert main(["chat", str(run), "--system", "<|im_start|>"]) == 2


def conversation(path, system=None, prefix="", tokens=8, temperature=0.0) -> Conversation:
    return Conversation(load_result(path), system, prefix, tokens, temperature)


def text(talk: Conversation) -> str:
    return talk.tokenizer.decode(talk.prompt(talk.turns)[0])


def test_what_each_kind_of_model_sees(tiny, seq2seq, tmp_path):
    turns = [{"role": role, "content": word} for role, word in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    templated = conversation(tiny / "llama", system="Be kind.")
    templated.turns = turns
    assert text(templated) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    bare = tmp_path / "bare"
    shutil.copytree(tiny / "llama", bare, ignore=shutil.ignore_patterns("chat_template*"))
    continued = conversation(bare)
    continued.turns = turns
    assert text(continued) == "a\nb\nc"
    encoder = conversation(seq2seq, system="Be kind.", prefix="chat: ")
    encoder.turns = turns
    assert text(encoder) == "chat: Be kind.\na\nb\nc"
    encoder.system = None
    assert text(encoder) == "chat: a\nb\nc"


def test_every_kind_answers(tiny, seq2seq, capsys):
    for path in (tiny / "llama", tiny / "gpt2", seq2seq):
        for temperature in (0.0, 0.7):
            answer = conversation(path, temperature=temperature).answer("What is a computer?")
            assert capsys.readouterr().out == plain(answer) + "\n", "untrained models say control characters, too"
    greedy = conversation(tiny / "llama")
    twice = [greedy.answer("What is a computer?"), greedy.reset() or greedy.answer("What is a computer?")]
    assert twice[0] == twice[1] != ""


def test_the_end_of_turn_stops_an_answer_where_pad_equals_it(tiny):
    talk = conversation(tiny / "llama", tokens=30)
    assert talk.tokenizer.pad_token_id == talk.tokenizer.eos_token_id == 2
    own = talk.model.generation_config
    assert list_stop_tokens(own, talk.tokenizer, encoder_decoder=False) == [2]
    own.eos_token_id = [0, 7]
    talk.tokenizer.eos_token = "<|im_start|>"
    found = list_stop_tokens(own, talk.tokenizer, encoder_decoder=False)
    assert found == [0, 1, 2, 7], "the config's, the tokenizer's and the template's own"

    # a model that would say its end of turn for ever says it once
    talk.options = talk._generation_options(0.0)
    made = []
    with torch.no_grad():
        talk.model.lm_head = torch.nn.Linear(64, len(talk.tokenizer))
        talk.model.lm_head.weight.zero_()
        talk.model.lm_head.bias.copy_(torch.nn.functional.one_hot(torch.tensor(2), len(talk.tokenizer)))
    talk.model.register_forward_hook(lambda *_: made.append(1))
    assert talk.answer("Hello") == "" and len(made) == 1


def test_a_history_that_is_too_long_loses_its_oldest_turns(tiny, talk, seq2seq, capsys):
    flags = ["--system", "Be kind.", "--max_new_tokens", "99"]
    code, _, err = talk(tiny / "gpt2", *flags, lines=["x" * 20, "y" * 20])
    assert code == 0 and err.splitlines() == [
        "(answers end after 64 tokens: the model's context is 128)",
        "(the 2 oldest turns no longer fit into the model's context and were dropped)",
    ]
    code, _, err = talk(seq2seq, lines=["a b c d e f g h i j k l m n o p", "q r s t u v w x y z " * 2])
    assert code == 0 and "oldest turns" in err

    kept = conversation(tiny / "llama", system="Be kind.")
    kept.longest_prompt = 60
    kept.turns = [{"role": "user", "content": "word " * 9}, {"role": "assistant", "content": "b"}] * 4
    kept.turns.append({"role": "user", "content": "last"})
    ids = kept.fitting_prompt()
    assert ids.shape[1] <= 60
    left = kept.tokenizer.decode(ids[0])
    assert left.startswith("<|im_start|>system\nBe kind.") and left.count("word") % 9 == 0 and "last" in left

    kept.longest_prompt = 15
    before = kept.turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert kept.answer("x " * 50) == ""
    assert kept.turns == before and len(before) == 2, "a message that cannot be sent costs no history"
    assert "(this message takes" in (said := capsys.readouterr().err) and "and 15 fit; shorten it)" in said


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(tiny, monkeypatch, capsys):
    talk = conversation(tiny / "llama")

    def interrupted(input_ids, streamer, **_):
        streamer.put(input_ids.cpu())
        streamer.put(talk.tokenizer("It is a machine", return_tensors="pt")["input_ids"][0])
        raise KeyboardInterrupt

    monkeypatch.setattr(talk.model, "generate", interrupted)
    assert talk.answer("What is a computer?") == "It is a machine"
    assert capsys.readouterr() == ("It is a machine\n", "(stopped)\n")
    assert talk.turns[-1] == {"role": "assistant", "content": "It is a machine"}


def test_refusals(tiny, talk, tmp_path, capsys):
    shutil.copytree(tiny / "llama", tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    code, _, err = talk(tmp_path / "strict", "--system", "Be kind.", lines=["hi"])
    assert code == 2 and "ConfigError: the model's chat template refuses the conversation: no system role" in err
    for flags in (["--max_new_tokens", "0"], ["--temperature", "nan"], ["--temperature", "-1"]):
        with pytest.raises(SystemExit) as caught:
            main(["chat", "x", *flags])
        assert caught.value.code == 2
    assert "nan is not a number of at least 0" in capsys.readouterr().err


def test_nothing_heavy_is_imported_for_the_help():
    script = """
import sys
from zerobook.cli.main import main
try:
    main(["--help"])
except SystemExit:
    print([name for name in ("torch", "transformers", "pydantic", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "  chat " in done.stdout and "  eval " in done.stdout
