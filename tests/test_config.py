"""Flags and YAML: every problem at once, each with its source and the way out."""

from __future__ import annotations

import pytest
import yaml

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig
from tests.harness import ROOT
from zerobook.config import ALIASES, DatasetSpec
from zerobook.config_sources import changed, parse, read
from zerobook.data.sources import open_source
from zerobook.errors import ConfigError
from zerobook.optimizer import optimizer_spec
from zerobook.training.recipe_file import recipe_class
from zerobook.utils import other_trainers
from zerobook.utils.nearest import nearest

BASE = ["--model_name_or_path", "m", "--dataset_name", "d"]


def problems(argv, kind=CausalLMConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(kind, argv)
    return caught.value.problems


def test_published_command_line_parses_as_printed():
    line = (
        "--config_name gpt2-xl --tokenizer_name gpt2-xl --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 "
        "--block_size 128 --output_dir /tmp/clm --learning_rate 5e-4 --per_device_train_batch_size 16 "
        "--per_device_eval_batch_size 1 --num_train_epochs 1"
    )
    config, sources, dry_run = parse(CausalLMConfig, line.split())
    assert (config.learning_rate, config.block_size, config.num_train_epochs) == (5e-4, 128, 1.0)
    assert config.config_name == "gpt2-xl" and config.model_name_or_path is None and not dry_run
    assert sources["learning_rate"] == "flag --learning_rate" and sources["seed"] == "default"


def test_flags_override_yaml_and_sources_say_so(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-3\nseed: 7\nmodel_name_or_path: m\ndataset_name: d\nactivation_checkpointing: true\n")
    config, sources, dry_run = parse(CausalLMConfig, ["--config", str(file), "--seed", "9", "--dry-run"])
    assert (config.learning_rate, config.seed, config.activation_checkpointing, dry_run) == (1e-3, 9, "full", True)
    assert sources["learning_rate"] == str(file) and sources["seed"] == "flag --seed"


def test_a_policy_is_an_order_of_recovery_actions(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("policy: [skip, lower_rate, stop]\n")
    config, *_ = parse(CausalLMConfig, [*BASE, "--config", str(file)])
    assert config.policy == ["skip", "lower_rate", "stop"]
    config, *_ = parse(CausalLMConfig, [*BASE, "--policy", "further_back", "replay"])
    assert config.policy == ["further_back", "replay"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--policy", "skip", "replay", "skip"], "skip occurs 2 times"),
        (["--policy", "skipp"], "'skip'"),
        (["--policy", "stop", "skip"], "Put it last"),
        (["--policy", "skip", "--on_spike", "log"], "on_spike log follows no order"),
        (["--policy"], "at least 1"),
        (["--expect", "the mixture changes"], "is not one step"),
        (["--expect", "200 the mixture changes, 300 the rate falls"], "an entry for each event"),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(words, expected):
    (problem,) = problems([*BASE, *words])
    assert problem.startswith(("policy", "expect")) and expected in problem


def test_an_expected_event_may_name_other_numbers_than_steps():
    config, *_ = parse(CausalLMConfig, [*BASE, "--expect", "200 mix of 70 percent, 30 percent", "9 rate cut, 2 times"])
    assert len(config.expect) == 2


def test_everything_wrong_is_reported_at_once(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1e-3\nseed: many\n")
    found = problems(["--config", str(file), "--per_device_train_batch", "4", "--num_warmup_steps", "-1"])
    text = "\n".join(found)
    assert len(found) == 6 and "model_name_or_path: it is None" in found[-1] and "no training data" in found[-2]
    assert "learning_rat: no such key. Did you mean learning_rate?" in text
    assert "Did you mean --per_device_train_batch_size?" in text
    assert f"seed: got 'many' (from {file}), expected a valid integer" in text
    assert "num_warmup_steps: got '-1' (from flag --num_warmup_steps), expected greater than or equal to 0" in text


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--dataset_name", "d"], "model_name_or_path: it is None and config_name is None"),
        (["--model_name_or_path", "m"], "no training data is named"),
        ([*BASE, "--train_file", "x.jsonl"], "dataset_name='d' and train_file='x.jsonl' are set together"),
        (["--model_name_or_path", "m", "--train_file", "nowhere.jsonl"], "train_file: no such file or folder: nowhere.jsonl"),
        ([*BASE, "--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint: no such folder: nowhere"),
        ([*BASE, "--max_train_steps", "5", "--num_warmup_steps", "9"], "9 warm-up steps do not fit into max_train_steps=5"),
        ([*BASE, "--lr_scheduler_type", "sine"], "lr_scheduler_type: got 'sine'"),
        ([*BASE, "--chat_template", "{% for m in messages %}" + "{{ m.content }}" * 40], "write the template into FILE.jinja"),
        ([*BASE, "--chat_template", "x" * 300], "expected a path"),
        (["--model_name_or_path", "m", "--train_file", "x" * 300], "train_file: got"),
        ([*BASE, "--output_dir", "x" * 300], "output_dir: got"),
        ([*BASE, "--output_dir", ""], "output_dir: got ''"),
        ([*BASE, "--validation_file", ""], "validation_file: got ''"),
        ([*BASE, "5"], "5: a value without a flag"),
        ([*BASE, "--config", "nowhere.yaml"], "nowhere.yaml: the config cannot be read (No such file"),
    ],
)
def test_each_mistake_has_its_sentence(argv, expected):
    assert any(expected in p for p in problems(argv))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a: caf\udce9", "cannot be read (it is not UTF-8 text)"),
        ("a: [1", "not a valid config"),
        ("- 1", "found a list"),
        ("max_steps: 3\nmax_train_steps: 4", "twice"),
        ("seed: 1\nlearning_rate: 1e-3\nseed: 2", "bad.yaml, line 3: not a valid config: the key seed is given twice"),
        ("num_train_epochs: .inf", "num_train_epochs: got '.inf'"),
        ("learning_rate: .nan", "learning_rate: got '.nan'"),
    ],
)
def test_bad_yaml(tmp_path, text, expected):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert any(expected in p and str(file) in p for p in problems([*BASE, "--config", str(file)]))


def test_yaml_values_that_yaml_reads_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: no\noutput_dir: ~/runs\nmodel_name_or_path: m\ndataset_name: d\n")
    config, sources, _ = parse(CausalLMConfig, ["--config", str(file)])
    assert config.mixed_precision == "no" and sources.is_set("mixed_precision") and not sources.is_flag("mixed_precision")
    assert config.output_dir == str(tmp_path / "runs")
    file.write_text("mixed_precision: yes\n")
    assert any("got 'yes'" in p for p in problems([*BASE, "--config", str(file)]))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # null, in the words of YAML and of Python
        ("report_to: none", []),
        ("report_to: [none]", []),
        ("report_to:", []),
        ("report_to: false", []),
        ("eval_tasks: None", []),
        ("max_train_steps: None", None),
        ("chat_template: null", None),
        ("profile: none", None),
        ("eval_steps: no", 0),
        ("save_steps: false", 0),
        # booleans
        ("packing: yes", True),
        ("packing: off", False),
        ("mixed_precision: no", "no"),
        ("mixed_precision: false", "no"),
        ("mixed_precision: none", "no"),
        ("activation_checkpointing: on", "full"),
        ("activation_checkpointing: no", "none"),
        ("resume_from_checkpoint: true", "auto"),
        ("resume_from_checkpoint: False", None),
        # one value for a list, and a list in one text
        ("lora_target_modules: q_proj", ["q_proj"]),
        ("lora_target_modules: q_proj, v_proj", ["q_proj", "v_proj"]),
        (r"lora_target_modules: .*\.[0-3]{1,2}\.q_proj", [r".*\.[0-3]{1,2}\.q_proj"]),
        ("new_tokens: ','", [","]),
        ("new_tokens: ['a,b']", ["a,b"]),
        ("new_tokens: [none]", ["none"]),
        ("new_tokens: 1", ["1"]),
        ("new_tokens: <|a|>, <|b c|>,[PAD]", ["<|a|>", "<|b c|>", "[PAD]"]),
        ("expect: 200 the mixture changes, as planned", ["200 the mixture changes, as planned"]),
        # numbers
        ("learning_rate: 1e-4", 1e-4),
        ("learning_rate: '1e-4'", 1e-4),
        ("warmup_ratio: .1", 0.1),
        ("max_train_steps: 1e3", 1000),
        ("max_train_steps: 1_000", 1000),
        ("seed: 010", 10),
        ("eval_steps: 0.1", 0.1),
        # text that YAML takes for something else
        ("run_name: 2026-01-02", "2026-01-02"),
        ("run_name: 1:30", "1:30"),
        ("dataset_config_name: no", "no"),
        ("model_revision: 0123456", "0123456"),
    ],
)
def test_a_yaml_value_means_what_a_person_wrote(tmp_path, line, expected):
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: m\ndataset_name: d\n{line}\n")

    config, sources, _ = parse(LoraConfig, ["--config", str(file)])

    key = line.partition(":")[0]
    assert getattr(config, key) == expected and sources[key] == str(file)


@pytest.mark.parametrize("line", ["max_train_steps: 1.5e0", "learning_rate:", "seed: none", "report_to: all", "packing: 2",
                                  "lora_target_modules: {a: b}", "max_train_steps: 1e999", "save_steps: none",
                                  "new_tokens: a b, c", "new_tokens: <a>,b>", f"seed: {2**32}"])  # fmt: skip
def test_a_yaml_value_without_a_meaning_is_refused(tmp_path, line):
    file = tmp_path / "run.yaml"
    file.write_text(line)

    (problem,) = problems([*BASE, "--config", str(file)], LoraConfig)

    assert problem.startswith(line.partition(":")[0]) and str(file) in problem


@pytest.mark.parametrize("odd", [[], {}, [1, "a"], [{}], {"a": 1}, None, -1, True, float("nan"), 10**30, ""], ids=repr)
def test_any_value_of_any_key_is_read_or_refused(tmp_path, odd):
    file = tmp_path / "run.yaml"
    for key in LoraConfig.model_fields:
        file.write_text(yaml.safe_dump({key: odd}))
        try:
            _, sources, _ = parse(LoraConfig, [*BASE, "--config", str(file)])
        except ConfigError as error:
            assert any(key in problem for problem in error.problems)
        else:
            # The flags in ``BASE`` are stronger than the file.
            assert sources[key] == str(file) or f"--{key}" in BASE


@pytest.mark.parametrize(("flags", "key", "expected"), [
    (["--report_to", "none"], "report_to", []),
    (["--lora_target_modules", "q_proj,v_proj"], "lora_target_modules", ["q_proj", "v_proj"]),
    (["--lora_target_modules", "q_proj", "v_proj"], "lora_target_modules", ["q_proj", "v_proj"]),
    (["--max_train_steps", "1e3"], "max_train_steps", 1000),
    (["--resume_from_checkpoint", "False"], "resume_from_checkpoint", None),
])  # fmt: skip
def test_a_flag_reads_values_as_yaml_does(flags, key, expected):
    assert getattr(parse(LoraConfig, [*BASE, *flags])[0], key) == expected


def test_embedded_data_are_files_too():
    flags = ["--model_name_or_path", "m", "--train_file", "embedded:chatterbot", "--validation_file", "embedded:stdlib"]

    config, *_ = parse(CausalLMConfig, flags)

    specs = (*config.dataset_specs(), config.validation_spec())
    assert [open_source(spec.path).train.name for spec in specs] == ["embedded:chatterbot", "embedded:stdlib"]


def test_a_dataset_in_the_working_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DatasetSpec(path=".").name == tmp_path.name
    assert DatasetSpec(path="Salesforce/wikitext").name == "wikitext"


def test_values_of_datasets_are_read_as_others(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\ndatasets: {path: d, split: none, limit: 1e3, weight: 1e-1, config_name: no}\n")

    (spec,) = parse(LoraConfig, ["--config", str(file)])[0].datasets

    assert (spec.split, spec.limit, spec.weight, spec.config_name) == (None, 1000, 0.1, "no")


def test_an_output_dir_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    found = problems([*BASE, "--output_dir", str(tmp_path / "file" / "run")])
    assert found == [f"output_dir: {tmp_path}/file/run cannot be a folder: {tmp_path}/file is a file. Give another output_dir."]
    # the superuser may write anywhere, so the answer of the system is given here
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    (found,) = problems([*BASE, "--output_dir", str(tmp_path / "new" / "run")])
    assert f"{tmp_path} is not writable" in found


def test_lists_booleans_and_aliases():
    argv = [
        *BASE,
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "--load_in_4bit",
        "--max_steps",
        "3",
        "--gradient_checkpointing",
    ]
    config, _, _ = parse(LoraConfig, argv)
    assert config.lora_target_modules == ["q_proj", "v_proj"] and config.load_in_4bit
    assert config.max_train_steps == 3 and config.activation_checkpointing
    config, _, _ = parse(LoraConfig, [*BASE, "--load_in_4bit", "false"])
    assert config.load_in_4bit is False


def test_another_recipes_config_is_checked_as_if_it_were_given():
    config, sources, _ = parse(CausalLMConfig, ["--model_name_or_path", "m", "--train_file", __file__, "--block_size", "64"])
    other, origins = changed(config, sources, LoraConfig, {"lora_r": 4})
    assert (other.lora_r, other.train_file) == (4, __file__) and origins["lora_r"] == "advice"
    with pytest.raises(ConfigError, match=r"lora_r: got 0 \(from advice\), expected greater"):
        changed(config, sources, LoraConfig, {"lora_r": 0})


def test_a_yaml_boolean_is_no_number(tmp_path):
    """pydantic takes true for 1."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: true\nmax_train_steps: true\nmodel_name_or_path: m\npacking: true\nmixed_precision: no\n"
        "datasets:\n- {path: d, weight: true}\n"
    )
    found = problems(["--config", str(file)])
    assert found == [f"{key}: got True (from {file}), expected a number."
                     for key in ("datasets.0.weight", "max_train_steps", "learning_rate")]  # fmt: skip


@pytest.mark.parametrize("theirs, ours", [
    ("--optim", "--optimizer"), ("--bf16", "--mixed_precision bf16"), ("--lora_rank", "--lora_r"),
    ("--cutoff_len", "--max_seq_length"), ("--eval_strategy", "--eval_steps"),
])  # fmt: skip
def test_flags_of_other_trainers_are_known(theirs, ours):
    (said, *_) = problems([*BASE, theirs, "x"], LoraConfig)
    assert said == f"{theirs}: no such flag. Did you mean {ours}?"


@pytest.mark.parametrize(
    "name, answer",
    [
        ("dataset_val", "--validation_file"),
        ("run_val_every_n_steps", "--eval_steps"),
        ("enable_activation_offloading", "--activation_checkpointing offload"),
        ("nproc_per_node", "--num_processes"),
        ("num_processes", "accelerate launch --num_processes N RECIPE"),
        ("strategy", "zerobook launch --strategy NAME RECIPE"),
        ("config_file", "accelerate launch --config_file FILE RECIPE"),
        ("tensor_parallel_dim", "fsdp_tensor.yaml"),
        ("max_epochs", "--num_train_epochs"),
        ("eval_sample_packing", "no such setting here"),
        ("port", "no such setting here"),
    ],
)
def test_a_name_that_is_spelt_like_another_setting_gets_no_hint_to_that(name, answer):
    (problem, *_) = problems([*BASE, f"--{name}", "x"], LoraConfig)

    assert answer in problem


def test_settings_that_exclude_each_other():
    text = "\n".join(problems([*BASE, "--warmup_ratio", "0.1", "--num_warmup_steps", "3", "--early_stopping_patience", "2"]))
    assert (
        "warmup_ratio: it is 0.1, and num_warmup_steps is 3" in text
        and "early_stopping_patience: it counts evaluations" in text
    )
    (said,) = problems([*BASE, "--lora_target_modules", "*_proj"], LoraConfig)
    assert "'*_proj' is no regular expression: nothing to repeat" in said


def test_the_warm_up_is_a_share_of_the_steps():
    config, *_ = parse(CausalLMConfig, [*BASE, "--warmup_ratio", "0.1"])
    assert [config.warmup_steps(total) for total in (1, 10, 101)] == [1, 1, 11]


def test_paths_in_a_yaml_start_beside_it_too(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "data").mkdir(parents=True)
    elsewhere.mkdir()
    for name in ("data/train.jsonl", "held.jsonl", "mine.py", "task.jsonl", "sgd"):
        (project / name).write_text("class Mine: ...\n")
    (elsewhere / "held.jsonl").write_text("x")
    (project / "run.yaml").write_text(
        "model_name_or_path: m/n\ntrain_file: data/train.jsonl\nvalidation_file: held.jsonl\nhooks: [mine.py:Mine]\n"
        "eval_tasks: task.jsonl, task.jsonl\noptimizer: mine.py:Mine\n"
    )
    monkeypatch.chdir(elsewhere)
    config, *_ = parse(CausalLMConfig, ["--config", "../project/run.yaml"])
    assert config.train_file == "../project/data/train.jsonl" and config.eval_tasks == ["../project/task.jsonl"] * 2
    assert config.validation_file == "held.jsonl", "the working folder comes first"
    assert config.hooks == ["../project/mine.py:Mine"] and config.model_name_or_path == "m/n"
    assert config.optimizer == "../project/mine.py:Mine"
    (project / "run.yaml").write_text(
        "model_name_or_path: m\noptimizer: sgd\ndatasets: [{path: data/train.jsonl}, {path: hub/name, name: b}]\n"
    )
    config, *_ = parse(CausalLMConfig, ["--config", "../project/run.yaml"])
    assert [spec.path for spec in config.datasets] == ["../project/data/train.jsonl", "hub/name"]
    assert config.optimizer == "sgd", "a name of a shipped optimizer is no path"
    (project / "run.yaml").write_text("model_name_or_path: m\ntrain_file: gone.jsonl\n")
    (said,) = problems(["--config", "../project/run.yaml"])
    assert f"gone.jsonl, looked for in {elsewhere}" in said


RECIPES = {name: recipe_class(str(ROOT / "recipes" / f"{name}.py")).config_class
           for name in ("causal_lm", "lora_finetune", "seq2seq_chatbot")}  # fmt: skip


@pytest.mark.parametrize("recipe, name, meant", [
    ("causal_lm", "deepspeed", "accelerate_configs/zero2.yaml"),
    ("causal_lm", "fsdp", "accelerate_configs/fsdp.yaml"),
    ("causal_lm", "data_path", "Did you mean --train_file?"),
    ("causal_lm", "val_set_size", "Did you mean --validation_split_percentage?"),
    ("causal_lm", "max_length", "Did you mean --block_size?"),
    ("causal_lm", "max_seq_length", "Did you mean --block_size?"),
    ("seq2seq_chatbot", "cutoff_len", "Did you mean --max_source_length?"),
    ("lora_finetune", "model_max_length", "Did you mean --max_seq_length?"),
    ("lora_finetune", "quantization_bit", "Did you mean --load_in_4bit?"),
    ("causal_lm", "load_in_4bit", "recipes/lora_finetune.py takes --load_in_4bit"),
    ("causal_lm", "use_dora", "recipes/lora_finetune.py takes --adapter dora"),
    ("lora_finetune", "peft_use_dora", "Did you mean --adapter dora?"),
    ("lora_finetune", "tuner_type", "Did you mean --adapter?"),
    ("lora_finetune", "neftune_noise_alpha", "no such setting here"),
    ("causal_lm", "train_on_inputs", "unless assistant_only_loss is false"),
    ("lora_finetune", "dataset_text_field", "is named text or content"),
    ("lora_finetune", "lerning_rate", "Did you mean --learning_rate?"),
])  # fmt: skip
def test_a_name_of_another_trainer_is_answered_with_what_does_it_here(recipe, name, meant):
    (problem,) = [problem for problem in problems([f"--{name}", "x"], RECIPES[recipe]) if problem.startswith(f"--{name}")]
    assert meant in problem


@pytest.mark.parametrize(
    "flag, value, meant",
    [
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "fp32", "float32"),
        ("dtype", "bfloat_16", "bfloat16"),
        ("mixed_precision", "bfloat16", "bf16"),
        ("lr_scheduler_type", "cosine_with_restarts", "cosine"),
        ("attn_implementation", "fa2", "flash_attention_2"),
        ("adapter", "qlora", "lora, with load_in_4bit"),
        ("report_to", "tensorbord", "tensorboard"),
    ],
)
def test_a_wrong_value_is_answered_with_the_value_that_is_meant(flag, value, meant):
    (problem,) = problems([*BASE, f"--{flag}", value], RECIPES["lora_finetune"])
    assert problem.startswith(flag) and problem.endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize("name, meant", [("adamw_torch_fused", "adamw"), ("adamw_bnb_8bit", "adamw_8bit"), ("admw", "adamw")])
def test_an_optimizer_of_another_trainer_is_answered_with_the_one_here(name, meant):
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\?"):
        optimizer_spec(name)


def test_every_value_that_other_trainers_values_lead_to_is_taken():
    for flag, values in other_trainers.VALUES.items():
        for value in set(values.values()):
            parsed = read(RECIPES["lora_finetune"], [*BASE, f"--{flag}", value.partition(",")[0]])
            assert not parsed.problems
    for value in other_trainers.VALUES["optimizer"].values():
        optimizer_spec(value)


def test_every_flag_that_other_trainers_names_lead_to_is_one_of_a_recipe():
    known = set().union(*(config.model_fields for config in RECIPES.values()))
    led_to = {candidate.split()[0] for candidates in other_trainers.FLAGS.values() for candidate in candidates}
    assert led_to <= known and set().union(*other_trainers.OTHER_RECIPES.values()) <= known
    assert not other_trainers.ABSENT & (known | other_trainers.FLAGS.keys() | other_trainers.SENTENCES.keys())


def test_each_name_of_transformers_trainer_has_an_answer_of_its_own():
    """A name that is only spelt like one of ours would be answered with a flag that means something else."""
    from transformers import TrainingArguments

    flags = set(RECIPES["lora_finetune"].model_fields) | ALIASES.keys()
    for name in TrainingArguments.__dataclass_fields__.keys() - flags:
        answer = other_trainers.translate(name, flags, "--")
        assert answer or not nearest(name, flags), name


LORA = ["--model_name_or_path", "m", "--dataset_name", "d"]


@pytest.mark.parametrize(
    ("flags", "rate", "warmup"),
    [
        ([], 2e-4, 0.03),
        (["--adapter", "ia3"], 3e-3, 0.03),
        (["--num_warmup_steps", "5"], 2e-4, 0.0),
        (["--num_warmup_steps", "0"], 2e-4, 0.0),
        (["--learning_rate", "1e-5", "--warmup_ratio", "0.1"], 1e-5, 0.1),
    ],
)
def test_adapters_have_one_default_rate_and_warm_up_in_flags_and_python(flags, rate, warmup):
    from recipes.lora_finetune import LoraConfig

    parsed, sources, _ = parse(LoraConfig, [*LORA, *flags])
    keys = {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    python = LoraConfig(model_name_or_path="m", dataset_name="d", **keys)

    assert (parsed.learning_rate, parsed.warmup_ratio) == (python.learning_rate, python.warmup_ratio) == (rate, warmup)
    assert sources.is_set("learning_rate") == ("--learning_rate" in flags)


def test_the_defaults_of_adapters_are_those_of_the_fields():
    from recipes.lora_finetune import LoraConfig
    from recipes.seq2seq_chatbot import Seq2SeqConfig

    fields = {key: LoraConfig.model_fields[key].default for key in ("learning_rate", "warmup_ratio")}

    assert fields == {"learning_rate": 2e-4, "warmup_ratio": 0.03}
    assert Seq2SeqConfig(adapter="lora").learning_rate == 2e-4 and Seq2SeqConfig().learning_rate == 5e-5


def test_a_folder_that_is_not_there_is_a_problem_with_its_nearest_neighbour(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    found = problems(["--model_name_or_path", "./lama", "--tokenizer_name", "/no/where", "--dataset_name", "../a/b"])
    assert [problem.partition(":")[0] for problem in found] == ["model_name_or_path", "tokenizer_name", "dataset_name"]
    assert "Did you mean llama?" in found[0]
    assert not read(CausalLMConfig, ["--model_name_or_path", "hub/lama", "--dataset_name", "hub/data"]).problems


@pytest.mark.parametrize(
    "flags, hints",
    [
        (["--config", "rum.yaml", "--lerning_rate", "1", "--dtype", "bf16"], ["run.yaml?", "--learning_rate?", "bfloat16?"]),
        (["--config", "broken.yaml", "--lerning_rate", "1"], ["broken.yaml, line 2", "--learning_rate?"]),
        (["--model", "m", "--data_path", "d", "--seed", "x"], ["--model_name_or_path?", "--train_file?", "seed: got 'x'"]),
        (["--model_name_or_path", "--train_file", "--seed"], ["--model_name_or_path: ", "--train_file: ", "--seed: "]),
    ],
)
def test_what_follows_from_a_problem_is_no_other_problem(tmp_path, monkeypatch, flags, hints):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    (tmp_path / "broken.yaml").write_text("seed: [1\nmodel: 2\n")
    found = problems(flags)
    assert len(found) == len(hints)
    for hint in hints:
        assert any(hint in problem for problem in found)
