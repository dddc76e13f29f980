"""Saved models, and exports of checkpoints, answer outside of the run as they were trained to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import zerobook.models.save
from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig
from recipes.seq2seq_chatbot import Seq2SeqConfig
from tests.alone import train
from tests.harness import ROOT, disk_of, reseal
from zerobook.checkpoint import origin, store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resume import find_earlier_result
from zerobook.cli.chat import Conversation
from zerobook.cli.doctor import doctor
from zerobook.cli.export import export
from zerobook.errors import CheckpointError, ConfigError, LockedError
from zerobook.models.adapters import add_adapter, save_adapter
from zerobook.models.generation_config import RULES, save_decoding_settings
from zerobook.models.load import load_model, load_tokenizer
from zerobook.models.result import export_if_checkpoint, load_result
from zerobook.models.save import save_model
from zerobook.runlog.history import History
from zerobook.runlog.report import write as write_report
from zerobook.runlog.summary import summary
from zerobook.runlog.writer import RunLog
from zerobook.strategy import ReplicatedStrategy
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import files
from zerobook.utils.files import staged
from zerobook.utils.terminal import plain

END_OF_TEXT, END_OF_TURN = 0, 2


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def base(tiny, tmp_path) -> Path:
    """A model that ends its turns with <|im_end|>, while its configs name only the end of a document."""
    folder = tmp_path / "base"
    shutil.copytree(tiny / "llama", folder)
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=END_OF_TEXT, pad_token_id=END_OF_TEXT)
    edit(folder / "generation_config.json", temperature=0.6)  # without do_sample: transformers does not save it once changed
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    return folder


@pytest.fixture
def trained(tmp_path):
    """Saves a model as its recipe does at the end of a run, and a checkpoint of it; returns the run's output_dir."""

    def train(config) -> Path:
        AcceleratorState._reset_state(reset_partial_state=True)
        plan = LaunchPlan(kind="single", world_size=1, device="cpu", backend=None, precision="no", precision_source="default")
        strategy = ReplicatedStrategy(Accelerator(cpu=True), plan)
        tokenizer = load_tokenizer(config, strategy)
        if isinstance(config, Seq2SeqConfig):
            model = load_model(config, strategy, encoder_decoder=True)
            save_decoding_settings(
                model, tokenizer, source_prefix=config.source_prefix, num_beams=config.num_beams,
                max_tokens=config.max_generated, min_tokens=config.val_min_target_length,
                **{name: getattr(config, name) for name in RULES},
            )  # fmt: skip
        else:
            model = load_model(config, strategy)
        if isinstance(config, LoraConfig):
            lora = dict(rank=2, alpha=4, dropout=0.0, targets=["all-linear"], seed=0)
            model = add_adapter(model, "lora", **lora, revision=config.model_revision)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=1e-4)
        strategy.prepare(model, config, total_steps=1)
        save_model(strategy, tokenizer, config)
        progress = Progress(step=1, samples=1, tokens=1, global_batch=1, data_fingerprint="x")
        log = RunLog(config.output_dir)
        CheckpointManager(strategy, config).save(progress, log)
        log.close()
        return Path(config.output_dir)

    yield train
    AcceleratorState._reset_state(reset_partial_state=True)


def answer(model, tokenizer) -> list[int]:
    turns = [{"role": "user", "content": "What is a computer?"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    found = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=120, do_sample=False, temperature=None)
    return found[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("adapter", [False, True])
def test_what_is_saved_and_exported_stops_where_its_chats_end(base, trained, tmp_path, adapter):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.eos_token_id == END_OF_TEXT
    without = answer(AutoModelForCausalLM.from_pretrained(base), tokenizer)
    assert END_OF_TURN in without[:-1], "the base says its end of turn, and goes on"

    settings = dict(model_name_or_path=str(base), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"))
    run = trained(LoraConfig(lora_r=2, lora_alpha=4, **settings) if adapter else CausalLMConfig(**settings))
    export([str(run), "--output", str(tmp_path / "exported")])
    folders = [tmp_path / "exported"]
    if adapter:
        export([str(run), "--output", str(tmp_path / "kept"), "--keep_adapter"])
        for folder in (run / "adapter", tmp_path / "kept"):
            assert GenerationConfig.from_pretrained(folder).eos_token_id == [END_OF_TEXT, END_OF_TURN]
            loaded = load_result(folder)
            assert isinstance(loaded.model, PeftModel)
            found = answer(loaded.model, loaded.tokenizer)
            assert found.index(END_OF_TURN) == len(found) - 1
    else:
        folders.append(run / "model")
    for folder in folders:
        found = answer(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
        assert found.index(END_OF_TURN) == len(found) - 1, f"{folder} does not stop"
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [END_OF_TEXT, END_OF_TURN]


def test_an_encoder_decoder_answers_everywhere_as_its_run_measured_it(tiny, trained, tmp_path, capsys):
    from transformers import GenerationConfig

    run = trained(
        Seq2SeqConfig(
            model_name_or_path=str(tiny / "blenderbot"), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"),
            source_prefix="chat: ", num_beams=3, max_target_length=32, val_max_target_length=20, val_min_target_length=4,
            no_repeat_ngram_size=2, repetition_penalty=1.5, length_penalty=0.0,
        )
    )  # fmt: skip
    export([str(run), "--output", str(tmp_path / "exported")])
    configs = [GenerationConfig.from_pretrained(folder).to_dict() for folder in (run / "model", tmp_path / "exported")]
    assert configs[0] == configs[1]
    assert [configs[1][key] for key in ("num_beams", "max_new_tokens", "min_new_tokens")] == [3, 20, 4]
    assert [configs[1][name] for name in RULES] == [2, 3, 1.5, 0.0], "the second is the model's own"
    answers = []
    for folder in (run / "model", tmp_path / "exported"):
        loaded = load_result(folder)
        assert loaded.source_prefix == "chat: "
        source = loaded.tokenizer("chat: What is a computer?", return_tensors="pt")
        measured = loaded.tokenizer.decode(loaded.model.generate(**source)[0], skip_special_tokens=True)
        capsys.readouterr()
        said = Conversation(loaded, None, loaded.source_prefix, None, 0.0).answer("What is a computer?")
        assert said == measured and capsys.readouterr().out == plain(measured) + "\n"
        answers.append(said)
    assert answers[0] == answers[1]


def test_an_export_in_half_precision_keeps_what_transformers_loads_in_fp32(tiny, trained, tmp_path):
    settings = {"dataset_name": "embedded:chatterbot", "dtype": "float16"}
    run = trained(Seq2SeqConfig(model_name_or_path=str(tiny / "t5"), output_dir=str(tmp_path / "run"), **settings))

    export([str(run), "--output", str(tmp_path / "exported"), "--dtype", "float16"])

    saved, exported = (load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "exported"))
    dtypes = {name: tensor.dtype for name, tensor in exported.items()}
    assert dtypes == {name: torch.float32 if ".wo." in name else torch.float16 for name in saved}
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def test_an_export_whose_logits_are_no_numbers_is_refused(base, trained, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight.mul_(1e6)
    model.save_pretrained(base)
    run = trained(
        CausalLMConfig(model_name_or_path=str(base), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"))
    )

    with pytest.raises(CheckpointError, match="differ by nan"):
        export([str(run), "--output", str(tmp_path / "exported"), "--dtype", "float16"])

    assert not (tmp_path / "exported").exists()


def test_adapters_are_not_merged_into_quantised_weights(tiny, trained, tmp_path):
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    quantised = tmp_path / "quantised"
    AutoModelForCausalLM.from_pretrained(tiny / "llama", quantization_config=nf4).save_pretrained(quantised)
    load_result(tiny / "llama").tokenizer.save_pretrained(quantised)
    settings = {"lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "dataset_name": "embedded:chatterbot"}
    run = trained(LoraConfig(model_name_or_path=str(quantised), output_dir=str(tmp_path / "run"), **settings))

    with pytest.raises(CheckpointError, match="--keep_adapter"):
        export([str(run), "--output", str(tmp_path / "merged")])
    export([str(run), "--output", str(tmp_path / "kept"), "--keep_adapter"])

    assert not (tmp_path / "merged").exists()


# --- what a checkpoint says is not to be trusted
REMOTE = """
open({mark!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_export_and_loading_run_no_code_on_a_checkpoints_word(base, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = trained(
        CausalLMConfig(model_name_or_path=str(base), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"))
    )
    mark = tmp_path / "it-was-run"
    (base / "own.py").write_text(REMOTE.format(mark=str(mark)))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit(base / "config.json", auto_map=auto, model_type="own-llama", architectures=["OwnModel"])
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    kept = json.loads((checkpoint / "config.json").read_text())
    kept["config"]["trust_remote_code"] = True
    kept.pop("base", None)  # as in checkpoints from before: the run did not begin with that code
    (checkpoint / "config.json").write_text(json.dumps(kept))
    reseal(checkpoint)
    with pytest.raises(CheckpointError, match="Pass --trust_remote_code"):
        export([str(run), "--output", str(tmp_path / "exported")])
    with pytest.raises(CheckpointError, match="Pass --trust_remote_code"):
        load_result(checkpoint)
    assert not mark.exists() and not (tmp_path / "exported").exists()
    assert type(load_result(checkpoint, trust_remote_code=True).model).__name__ == "OwnModel"
    mark.unlink()
    assert export([str(run), "--output", str(tmp_path / "exported"), "--trust_remote_code"]) == 0
    assert mark.exists() and (tmp_path / "exported" / "own.py").exists()


def test_the_chat_template_is_in_the_checkpoint_and_no_file_is_read_at_export(base, trained, tmp_path, capsys):
    from transformers import AutoTokenizer

    template = tmp_path / "mine.jinja"
    text = "{% for m in messages %}MINE {{ m['content'] }}<|im_end|>{% endfor %}"
    template.write_text(text)
    settings = dict(model_name_or_path=str(base), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"))
    config = CausalLMConfig(chat_template=str(template), **settings)
    run = trained(config)
    template.write_text("a secret of this machine")
    export([str(run), "--output", str(tmp_path / "exported")])
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template == text
    assert config.chat_template_text == text, "a run reads it once"

    (checkpoint,) = (run / "checkpoints").glob("step-*")
    kept = json.loads((checkpoint / "config.json").read_text())
    del kept["chat_template"]  # as checkpoints were written before
    (checkpoint / "config.json").write_text(json.dumps(kept))
    reseal(checkpoint)
    export([str(run), "--output", str(tmp_path / "older")])
    own = AutoTokenizer.from_pretrained(base).chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "older").chat_template == own
    assert f"does not hold the text of {template}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"chat_template: .* not a regular file"):
        _ = CausalLMConfig(chat_template=str(tmp_path), **settings).chat_template_text


def test_export_finds_the_tokenizer_as_training_does(base, trained, tmp_path, monkeypatch, tiny):
    """The embedded model's, by its short name, for a model that was made from a bare config."""
    from transformers import AutoTokenizer

    from zerobook.data import embedded

    bare = tmp_path / "tokenizer"  # no pad token, as many base models': the run gives it one
    shutil.copytree(tiny / "llama", bare, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation*"))
    facts = json.loads((bare / "tokenizer_config.json").read_text())
    del facts["pad_token"]
    (bare / "tokenizer_config.json").write_text(json.dumps(facts))
    monkeypatch.setattr(embedded, "smollm2", lambda: bare)
    (tmp_path / "bare").mkdir()
    shutil.copy(tiny / "llama" / "config.json", tmp_path / "bare")
    run = trained(
        CausalLMConfig(
            config_name=str(tmp_path / "bare"), tokenizer_name="embedded:smollm2", dataset_name="embedded:chatterbot",
            output_dir=str(tmp_path / "run"),
        )
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as here:  # a checkpoint is found by any path that leads to it
        here.chdir(store.list_complete(store.folder_of(run))[-1])
        export([".", "--output", str(tmp_path / "exported")])
    found, saved = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "exported", run / "model"))
    assert found.chat_template == saved.chat_template and found.pad_token == saved.pad_token == "<|im_end|>"


# --- revisions
@pytest.fixture
def hub(tiny, tmp_path, monkeypatch) -> str:
    """A hub's cache as it lies on a disk, offline: two revisions of one model, of which ``main`` is another one."""
    from huggingface_hub import constants
    from safetensors.torch import load_file, save_file

    cache = tmp_path / "hub"
    folder = cache / "models--somebody--base"
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        shutil.copytree(tiny / "llama", folder / "snapshots" / commit)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
    weights = folder / "snapshots" / ("a" * 40) / "model.safetensors"
    save_file({name: value.flip(0) for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    edit(weights.with_name("tokenizer_config.json"), eos_token="<|endoftext|>")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "somebody/base"


def test_an_adapter_is_put_onto_the_revision_that_it_was_trained_on(hub, trained, tmp_path, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = LoraConfig(
        model_name_or_path=hub, model_revision="v1", lora_r=2, lora_alpha=4, dataset_name="embedded:chatterbot",
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    run = trained(config)
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tiny / "llama")(tokens).logits
        other = AutoModelForCausalLM.from_pretrained(hub)(tokens).logits
    assert (wanted - other).abs().max() > 1, "main is another model"
    export([str(run), "--output", str(tmp_path / "merged")])
    export([str(run), "--output", str(tmp_path / "kept"), "--keep_adapter"])
    for folder in (run / "adapter", tmp_path / "kept"):
        assert json.loads((folder / "adapter_config.json").read_text())["revision"] == "b" * 40
        for file in ("tokenizer_config.json", "tokenizer.json"):
            (folder / file).unlink()  # then it takes its base's tokenizer, of that revision too
    for folder in (run / "adapter", tmp_path / "kept", tmp_path / "merged"):
        loaded = load_result(folder)
        with torch.no_grad():
            assert (loaded.model(tokens).logits - wanted).abs().max() < 0.1, f"{folder} is on another revision"
        assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<|im_end|>"


def test_adapters_stay_on_the_commit_that_they_were_trained_beside(hub, trained, tmp_path, tiny):
    from huggingface_hub import constants

    from recipes.lora_finetune import LoraFinetune

    flags = dict(
        recipe=LoraFinetune, model_name_or_path=hub, model_revision="v1", lora_r=2, lora_alpha=4, max_seq_length=64,
        train_file=tiny / "few.jsonl", validation_split_percentage=0, save_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip
    run = train(tmp_path / "run", **flags, max_train_steps=2).output
    refs = Path(constants.HF_HUB_CACHE) / "models--somebody--base" / "refs"
    (refs / "v1").write_text("a" * 40)  # the branch moves on
    with pytest.raises(CheckpointError, match=f"--model_revision {'b' * 40}"):
        train(run, **flags, max_train_steps=4, resume_from_checkpoint="auto")
    train(run, **flags | {"model_revision": "b" * 40}, max_train_steps=4, resume_from_checkpoint="auto")
    export([str(run), "--output", str(tmp_path / "merged")])
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        wanted = load_result(run / "adapter").model(tokens).logits
        assert (load_result(tmp_path / "merged").model(tokens).logits - wanted).abs().max() < 1e-4


# --- the model that a checkpoint's weights were trained from
def other_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({name: value.flip(0) for name, value in load_file(file).items()}, file, {"format": "pt"})


def test_adapters_go_on_beside_their_base_alone_and_as_they_were_weighed(base, tmp_path, tiny):
    from recipes.lora_finetune import LoraFinetune

    flags = dict(
        recipe=LoraFinetune, lora_r=2, lora_alpha=4, max_seq_length=64, train_file=tiny / "few.jsonl",
        validation_split_percentage=0, save_steps=2, per_device_train_batch_size=2, num_warmup_steps=0,
    )  # fmt: skip
    run = train(tmp_path / "run", **flags, model_name_or_path=base, max_train_steps=2).output
    on = flags | {"max_train_steps": 4, "resume_from_checkpoint": "auto"}
    for change, words in (
        ({"lora_alpha": 64}, "lora_alpha, which was 4.0 and is 64.0"),
        ({"lora_r": 4}, "lora_r, which was 2 and is 4"),
        ({"lora_target_modules": "q_proj"}, r"lora_target_modules, which was \['all-linear'\] and is \['q_proj'\]"),
    ):
        with pytest.raises(CheckpointError, match=words):
            train(run, **on | change, model_name_or_path=base)
    moved, other = tmp_path / "moved", tmp_path / "other"
    for folder in (moved, other):
        shutil.copytree(base, folder)
    other_weights(other)
    with pytest.raises(CheckpointError, match=f"the digest of its weights was .* and is .*{base}"):
        train(run, **on, model_name_or_path=other)
    assert train(run, **on, model_name_or_path=moved).event("resume")["step"] == 2
    other_weights(moved)
    with pytest.raises(CheckpointError, match="the digest of its weights was"):
        export([str(run), "--output", str(tmp_path / "exported")])
    assert not (tmp_path / "exported").exists()


def test_a_whole_model_goes_on_as_the_function_that_its_config_makes_of_it(base, tmp_path, tiny):
    flags = dict(
        block_size=64, train_file=tiny / "few.jsonl", validation_split_percentage=0, save_steps=2, num_warmup_steps=0,
        per_device_train_batch_size=2,
    )  # fmt: skip
    run = train(tmp_path / "run", **flags, model_name_or_path=base, max_train_steps=2).output
    on = flags | {"max_train_steps": 4, "resume_from_checkpoint": "auto"}
    moved = base.rename(tmp_path / "moved")
    other_weights(moved)  # the checkpoint holds all of them
    was = json.loads((moved / "config.json").read_text())
    theta = was["rope_parameters"]["rope_theta"]
    edit(moved / "config.json", rope_parameters=was["rope_parameters"] | {"rope_theta": 5e5}, hidden_act="gelu")
    words = f"hidden_act was 'silu' and is 'gelu' now; rope_parameters.rope_theta was {theta} and is 500000.0 now"
    with pytest.raises(CheckpointError, match=words):
        train(run, **on, model_name_or_path=moved)
    edit(moved / "config.json", **was | {"use_cache": False, "dtype": "bfloat16", "eos_token_id": 2, "attention_dropout": 0.1})
    assert train(run, **on, model_name_or_path=moved).event("resume")["step"] == 2
    edit(moved / "config.json", rms_norm_eps=1e-2)
    with pytest.raises(CheckpointError, match=r"rms_norm_eps was 1e-06 and is 0.01 now"):
        export([str(run), "--output", str(tmp_path / "exported")])


def test_a_base_is_known_by_its_weights_and_by_what_its_config_computes(tmp_path):
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    one, other = tmp_path / "one", tmp_path / "other"
    digests = []
    for change in (None, "path", "number", "name", "file"):
        folder = other if change else one
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        values = torch.arange(3_000_000, dtype=torch.float32)  # larger than what is read of it
        if change == "number":
            values *= 1.001
        file = folder / ("model-00001-of-00001.safetensors" if change == "file" else "model.safetensors")
        save_file({"b" if change == "name" else "a": values}, file)
        (folder / "README.md").write_text(str(change))
        digests.append(origin.weights_digest(folder))
    assert digests[0] == digests[1] and len(set(digests)) == 4
    (one / "model.safetensors").unlink()
    assert origin.weights_digest(one) is None

    def differ(was, now, versions=("5", "5")):
        found = [origin.facts(LlamaConfig(**values), None) for values in (was, now)]
        for facts, version in zip(found, versions, strict=True):
            facts["config"]["transformers_version"] = version
        return origin.difference(*found)

    assert differ({}, dict(use_cache=False, dtype="bfloat16", bos_token_id=7, attention_dropout=0.5, name_or_path="x")) is None
    assert differ({}, {"hidden_act": "gelu"}) == "hidden_act was 'silu' and is 'gelu' now"
    assert differ({}, {"pad_token_id": 7}) is not None, "training does not move its row of the embedding"
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    more = {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}
    assert "partial_rotary_factor was None and is 0.5" in differ({"rope_parameters": rope}, more)
    assert differ({"rope_parameters": rope}, more, ("5", "6")) is None, "a later version may write down what was implied"
    assert differ({"own": 1}, {}) is None
    assert differ({"rope_parameters": rope}, {"rope_parameters": rope | {"rope_theta": 5e5}}, ("5", "6")) is not None


@pytest.mark.parametrize("adapter", [False, True])
def test_export_takes_no_weight_from_anywhere_but_the_run(base, trained, tmp_path, adapter):
    """Checkpoints from before do not say what their model was."""
    settings = dict(model_name_or_path=str(base), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"))
    run = trained(LoraConfig(lora_r=2, lora_alpha=4, **settings) if adapter else CausalLMConfig(**settings))
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    kept = json.loads((checkpoint / "config.json").read_text())
    kept.pop("base", None)
    (checkpoint / "config.json").write_text(json.dumps(kept))
    reseal(checkpoint)
    export([str(checkpoint), "--output", str(tmp_path / "exported")])
    edit(base / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"does not hold \S*layers\.2\S* \(and \d+ more\)"):
        export([str(checkpoint), "--output", str(tmp_path / "wrong")])
    assert not (tmp_path / "wrong").exists()


# --- modes
@pytest.mark.parametrize("umask", [0o027, 0o002])
def test_files_and_folders_have_the_modes_of_the_umask(tiny, trained, tmp_path, monkeypatch, umask):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zerobook.data import embedded

    before = os.umask(umask)
    try:
        (tmp_path / "bare").mkdir()
        shutil.copy(tiny / "llama" / "config.json", tmp_path / "bare")
        data = dict(dataset_name="embedded:chatterbot")
        names = dict(config_name=str(tmp_path / "bare"), tokenizer_name=str(tiny / "llama"))
        run = trained(CausalLMConfig(output_dir=str(tmp_path / "all/run"), **names, **data))
        write_report(run)
        export([str(run), "--output", str(tmp_path / "all" / "exported")])
        base = str(tiny / "llama")
        lora = LoraConfig(model_name_or_path=base, lora_r=2, lora_alpha=4, output_dir=str(tmp_path / "all/lora"), **data)
        export([str(trained(lora)), "--output", str(tmp_path / "all" / "kept"), "--keep_adapter"])

        # converting the real file takes half a minute
        model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
        monkeypatch.setattr(
            AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model
        )  # the real file takes half a minute
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "all"))
        monkeypatch.setattr(embedded, "_package", lambda *_: tmp_path / "bare")
        (tmp_path / "bare" / "model.gguf").touch()
        assert (embedded.smollm2() / "model.safetensors").exists()
    finally:
        os.umask(before)
    there = list((tmp_path / "all").rglob("*"))
    wrong = {
        str(path.relative_to(tmp_path)): oct(path.stat().st_mode & 0o777)
        for path in there
        if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert not wrong and len([path for path in there if path.suffix == ".safetensors"]) == 10


# --- what is there already
def short(tiny, **more):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", block_size=64, validation_split_percentage=0,
        per_device_train_batch_size=4, max_train_steps=2,
    ) | more  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_finished_model_is_not_written_over(tiny, tmp_path, capsys):
    """Its checkpoints were deleted to save room, or it is the model that is trained from."""
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, **short(tiny))
    train(other, **short(tiny))
    shutil.rmtree(run / "checkpoints")
    before = content(run)
    for more in ({}, {"resume_from_checkpoint": "auto"}, {"resume_from_checkpoint": other}, {"dry-run": True}):
        with pytest.raises(
            ConfigError, match=r"run/model exists already.*would overwrite it\. Give another --output_dir, or move"
        ):
            train(run, **short(tiny, learning_rate=1e-3) | more)
    with pytest.raises(
        ConfigError, match=r"writing .*run/model, and that is model_name_or_path .*run/model, which it is trained"
    ):
        train(run, **short(tiny, model_name_or_path=run / "model"))
    line = [f"--{key}={value}" for key, value in short(tiny, output_dir=run).items()]
    assert doctor(["--cpu", str(ROOT / "recipes" / "causal_lm.py"), *line]) == 1
    assert "model exists already" in " ".join(capsys.readouterr().out.split())
    assert content(run) == before, "nothing was begun"
    train(run / "again", **short(tiny, model_name_or_path=run / "model"))
    with pytest.raises(ConfigError, match="which it is trained from"):  # not even to go on
        train(other, **short(tiny, model_name_or_path=other / "model", max_train_steps=4, resume_from_checkpoint="auto"))


def test_an_empty_folder_and_another_result_are_in_nobodys_way(tiny, tmp_path):
    (tmp_path / "model").mkdir()
    config = CausalLMConfig(model_name_or_path=str(tiny / "llama"), dataset_name="x", output_dir=str(tmp_path))
    lora = LoraConfig(model_name_or_path=str(tmp_path / "model"), dataset_name="x", output_dir=str(tmp_path))
    assert find_earlier_result(config) is None
    (tmp_path / "model" / "config.json").touch()
    assert "model exists already" in find_earlier_result(config) and find_earlier_result(lora) is None
    (tmp_path / "adapter").symlink_to(tmp_path / "model")
    assert "which it is trained from" in find_earlier_result(lora)


def test_the_model_of_an_earlier_attempt_stays_until_the_new_one_is_whole(tiny, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(run, **short(tiny))
    before = content(run / "model")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zerobook.models.save, "modes_by_umask", full)
    longer = short(tiny, max_train_steps=4, resume_from_checkpoint="auto")
    with pytest.raises(ConfigError, match="No space"):
        train(run, **longer)
    assert content(run / "model") == before
    assert summary(run / "runlog").startswith("CRASHED: step 4 of 4")
    monkeypatch.undo()
    (run / ".model.partial").mkdir()  # of a process that was killed
    (run / ".model.partial" / "half").touch()
    train(run, **longer)
    after = content(run / "model")
    assert set(after) == set(before) and after["model.safetensors"] != before["model.safetensors"]
    assert not [file.name for file in run.iterdir() if file.name.startswith(".model")]


# --- a model that cannot be written, or is only half written
def killed(*_):
    """Ends the run as a kill does: the runlog gets no last word."""
    raise SystemExit(9)


def test_a_run_that_is_killed_while_it_writes_its_model_is_not_finished_and_writes_it_when_it_resumes(
    tiny, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    monkeypatch.setattr(zerobook.models.save, "put_in_place", killed)
    with pytest.raises(SystemExit):
        train(run, **short(tiny))
    history = History.read(run)
    assert history.of("run_end") == [] and [history.ending(attempt) for attempt in history.attempts()] == ["killed"]
    assert not summary(run / "runlog").startswith("Finished") and not (run / "model").exists()
    monkeypatch.undo()

    train(run, **short(tiny, resume_from_checkpoint="auto"))

    history = History.read(run)
    assert [history.ending(attempt) for attempt in history.attempts()] == ["killed", "finished"]
    assert summary(run / "runlog").startswith("Finished: step 2 of 2")
    assert load_result(run).model.num_parameters() > 0


def test_everything_of_a_model_is_on_the_disk_before_its_run_counts_as_finished(tiny, tmp_path, monkeypatch):
    order = []
    fsync, event = files.fsync, RunLog.event
    monkeypatch.setattr(files, "fsync", lambda path: (order.append(Path(path).name), fsync(path)))
    monkeypatch.setattr(RunLog, "event", lambda log, kind, **facts: (order.append(kind), event(log, kind, **facts))[1])
    train(tmp_path / "run", **short(tiny))
    before_the_end = order[: order.index("run_end")]
    assert {file.name for file in (tmp_path / "run" / "model").iterdir()} <= set(before_the_end)
    # The last sample of the memory may come in between.
    flushed = [name for name in before_the_end if name != "machine"]
    assert flushed[-1] == "run", "the new name in the folder is flushed last"


def test_a_run_without_room_for_its_model_is_refused_before_it_trains(tiny, tmp_path, monkeypatch):
    train(tmp_path / "first", **short(tiny))
    (checkpoint,) = store.list_complete(store.folder_of(tmp_path / "first"))
    usage = shutil.disk_usage(tmp_path)
    room = store.bytes_of(checkpoint) + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    with pytest.raises(ConfigError, match=r"1 checkpoint of .* and the model of"):
        train(tmp_path / "second", **short(tiny, save_steps=0))
    assert not (tmp_path / "second" / "runlog" / "steps.jsonl").read_bytes()


@pytest.mark.parametrize("background", [False, True])
def test_the_model_is_written_where_the_last_checkpoint_does_not_fit(tiny, tmp_path, monkeypatch, background):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "publish", full)
    with pytest.raises(CheckpointError, match="could not be saved"):
        train(tmp_path / "run", **short(tiny), **({"async_save": True} if background else {}))

    assert not store.list_complete(store.folder_of(tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists(), "what was trained is not lost"


def test_an_export_onto_a_full_disk_ends_in_one_sentence_and_leaves_nothing(tiny, tmp_path):
    train(tmp_path / "run", **short(tiny))
    with disk_of(tmp_path / "small", "64k") as disk:
        with pytest.raises(ConfigError, match=r"No space left on device.*--output"):
            export([str(tmp_path / "run"), "--output", str(disk / "model")])
        assert [*disk.iterdir()] == []


def test_of_two_exports_into_one_folder_the_second_ends_in_one_sentence(tiny, tmp_path):
    run, folder = tmp_path / "run", tmp_path / "out" / "model"
    train(run, **short(tiny))
    with staged(folder) as staging:
        with pytest.raises(LockedError, match=f"another process.*delete {folder.parent}/.model.lock"):
            export([str(run), "--output", str(folder)])
        (staging / "config.json").write_text("of the first one")
    assert (folder / "config.json").read_text() == "of the first one"
    assert [*folder.parent.iterdir()] == [folder]
    with pytest.raises(ConfigError, match="not empty"):
        export([str(run), "--output", str(folder)])


def test_the_folder_of_a_run_has_a_card_that_says_what_was_trained(tiny, tmp_path):
    from recipes.lora_finetune import LoraFinetune

    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "few.jsonl", max_seq_length=64, lora_r=4, max_train_steps=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    run = train(tmp_path / "run", LoraFinetune, **flags)
    card = (run.output / "adapter" / "README.md").read_text()
    assert "| trained on | few.jsonl |" in card and "| adapter rank | 4 |" in card and "| steps | 2 |" in card
    assert "1 process |" in card and "More Information Needed" not in card
    assert run.event("run_start")["code"]["file"] == "lora_finetune.py"
    export([str(run.output), "--output", str(tmp_path / "out"), "--keep_adapter"])
    assert "| adapter rank | 4 |" in (tmp_path / "out" / "README.md").read_text()


def test_an_adapter_alone_has_no_card_of_a_library(tiny, tmp_path):
    model = add_adapter(
        AutoModelForCausalLM.from_pretrained(tiny / "llama"), "lora", rank=2, alpha=4, dropout=0.0, targets=["all-linear"],
        seed=0, revision="main",
    )  # fmt: skip
    save_adapter(model, tmp_path / "adapter", dict(model.named_parameters()))
    assert not (tmp_path / "adapter" / "README.md").exists()


def test_a_checkpoint_is_a_model_on_a_disk_without_locks(base, trained, tmp_path, monkeypatch):
    def flock(handle, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    config = CausalLMConfig(model_name_or_path=str(base), dataset_name="embedded:chatterbot", output_dir=str(tmp_path / "run"))
    (checkpoint,) = store.list_complete(store.folder_of(trained(config)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fcntl, "flock", flock)
    assert (Path(export_if_checkpoint(str(checkpoint))) / "config.json").exists()


def test_of_the_models_that_were_made_of_checkpoints_those_in_use_are_kept(base, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    exports = tmp_path / "cache" / "zerobook" / "exports"
    settings = {"model_name_or_path": str(base), "dataset_name": "embedded:chatterbot"}
    runs = [trained(CausalLMConfig(output_dir=str(tmp_path / name), **settings)) for name in ("first", "second", "third")]
    first, second, third = (store.list_complete(store.folder_of(run))[0] for run in runs)
    export_if_checkpoint(str(first))
    for checkpoint in (first, second):
        load_result(checkpoint)
    for folder in exports.iterdir():
        os.utime(folder, (0, 0))

    load_result(second)
    load_result(third)

    kept = sorted(folder.name.rpartition("-step")[0] for folder in exports.iterdir() if folder.is_dir())
    assert kept == ["first", "loaded-second", "loaded-third"], "a run may have started from the first"
