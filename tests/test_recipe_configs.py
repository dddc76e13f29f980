"""Configs for well-known models: each is read, resolved, and planned on the hardware that its header names."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from scripts import recipes_table
from tests.harness import ROOT
from tests.planning import MODELS
from zerobook.cli.doctor import inspect_launch
from zerobook.constants import IGNORE
from zerobook.data import formats
from zerobook.data.samples import BadSample
from zerobook.data.templates import CausalEncoder
from zerobook.launch.resolve import Hardware
from zerobook.training import run as recipe_run
from zerobook.training.recipe_file import recipe_class

FILES = recipes_table.files()

PARAMETERS = {
    "falcon_7b": 6_921_720_704,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "smollm2_1.7b": 1_711_376_384,
}
"""Model -> its parameters, as its card on the hub counts them; tied embeddings once."""
FLAN_T5 = {"flan_t5_base": 247_577_856, "flan_t5_xl": 2_849_757_184, "flan_t5_xxl": 11_135_332_352}
"""The same with an output layer of its own, which transformers 5 builds tied to the embedding, and loads as the file has it."""


EARLIER = {"falcon_40b": 41_303_293_952, "falcon_180b": 178_557_088_768, "llama2_70b": 68_976_648_192}


def parameters(name: str) -> tuple[int, int]:
    """Return the parameters of a model, and those of its embedding."""
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json")
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    return sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("name", PARAMETERS | EARLIER)
def test_parameters_are_those_of_the_published_model(name):
    assert parameters(name)[0] == (PARAMETERS | EARLIER)[name]


@pytest.mark.parametrize("name", FLAN_T5)
def test_parameters_of_flan_t5(name):
    assert sum(parameters(name)) == FLAN_T5[name]


CONFIGS = {
    "falcon": ["7b_full_8xa100", "7b_lora_8xa100", "7b_lora_a10g", "40b_lora_8xa100", "180b_lora_8xa100", "180b_lora_2x8xa100"],
    "flan_t5": ["base_a10g", "xl_8xa100", "xxl_8xa100"],
    "llama2": [
        "7b_full_8xa100", "7b_lora_8xa100", "7b_qlora_a10g", "13b_full_8xa100", "13b_lora_8xa100", "13b_qlora_a10g",
        "70b_full_2x8xa100", "70b_lora_8xa100", "70b_lora_2x8xa100", "70b_qlora_a6000",
    ],
    "llama3": ["8b_full_8xa100", "8b_lora_8xa100", "8b_qlora_a10g", "70b_lora_8xa100", "70b_qlora_a100"],
    "mistral": ["7b_full_8xa100", "7b_lora_8xa100", "7b_qlora_a10g"],
    "mixtral": ["8x7b_lora_8xa100"],
    "qwen2": ["0.5b_full_a10g", "7b_full_8xa100", "7b_qlora_a10g", "14b_lora_8xa100", "32b_lora_8xa100", "32b_qlora_a6000"],
    "qwen3": [
        "0.6b_full_a10g", "4b_lora_a10g", "8b_full_8xa100", "8b_qlora_a10g", "14b_qlora_a10g", "32b_lora_8xa100",
    ],
    "smollm2": ["1.7b_full_8xa100", "1.7b_lora_a10g"],
}  # fmt: skip


def test_the_files_are_those_that_are_listed():
    assert [file.name for file in FILES] == [f"{family}/{name}.yaml" for family in CONFIGS for name in sorted(CONFIGS[family])]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_header_and_dry_run(file, monkeypatch, capsys, tmp_path):
    """The launch line resolves on the hardware that is named, and its dry run prints the arithmetic of the header."""
    said = file.header
    assert all(said[key] for key in ("Purpose", "Source", "Model", "Hardware", "Status", "Launch", "Batch", "Plan", "Limits"))
    assert said["Status"] == "planned, not run" and "http" in said["Source"]
    path = f"recipes/configs/{file.name}"
    assert f"recipes/{file.recipe}.py --config {path}" in said["Launch"]
    billions = {**PARAMETERS, **FLAN_T5, **EARLIER}[file.model.stem] / 1e9
    assert said["Model"] == f"benchmarks/models/{file.model.stem}.json, {billions:.2f} billion parameters"
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    where = file.hardware
    hardware = Hardware(gpus=where.gpus, gpu_name=where.device.name, bf16=True, flash_attention=True)
    plan, problems, config, _ = inspect_launch(file.launch, hardware)
    assert not problems and not plan.problems and plan.world_size == where.ranks and plan.precision == "bf16"
    micro, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    batch = f"{micro} micro x {accumulation} accumulation x {where.ranks} processes = {file.global_batch(config)} "
    assert said["Batch"].startswith(batch)
    assert f"{config.row_length:,} tokens" in said["Batch"] or file.recipe == "seq2seq_chatbot"
    assert config.output_dir == "outputs/" + file.name.removesuffix(".yaml").replace("/", "_")
    assert read_data(file, config, tmp_path)
    override = shlex.split(said["Override"].partition(":")[0])
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", path, "--dry-run", *override])
    recipe_run.run(recipe_class(f"recipes/{file.recipe}.py"))
    assert "samples a step" in capsys.readouterr().out


ROWS = {
    "databricks/databricks-dolly-15k": {"instruction": "a", "context": "b", "response": "c", "category": "d"},
    "HuggingFaceH4/ultrachat_200k": {
        "prompt": "a", "prompt_id": "b", "messages": [{"content": "a", "role": "user"}, {"content": "c", "role": "assistant"}],
    },
    "abisee/cnn_dailymail": {"article": "a", "highlights": "c", "id": "d"},
    "knkarthick/samsum": {"id": "d", "dialogue": "a", "summary": "c"},
}  # fmt: skip
"""Data -> a row with the columns that its card on the hub names."""
UNREADABLE_ROWS = {"knkarthick/samsum": {"id": "13828807", "dialogue": None, "summary": "problem"}}
"""Data -> a row of it that has no text."""


def read_data(file, config, folder) -> bool:
    """Return whether a row of the config's data, in a local file, is read as a sample with a target."""
    (data,) = config.dataset_specs()
    if data.path in UNREADABLE_ROWS:
        row = UNREADABLE_ROWS[data.path]
        with pytest.raises(BadSample):
            formats.parse(formats.detect(ROWS[data.path]), row)
        assert config.on_bad_sample == "skip"
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[data.path]) + "\n")
    row = json.loads((folder / "rows.jsonl").read_text())
    sample = formats.parse(formats.detect(row), row)
    return (sample.target if isinstance(sample, formats.Pair) else sample.messages[-1]["content"]) == "c"


def test_the_template_supervises_the_response_and_its_end(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    template = (ROOT / "recipes" / "configs" / "instruction.jinja").read_text()
    row = {"instruction": "Say it", "context": "Quietly", "response": "Yes"}
    encoder = CausalEncoder(tokenizer, length=None, chat_template=template)
    (encoded,) = encoder.encode([formats.parse("instruction", row)])
    supervised = encoded.input_ids[encoded.labels != IGNORE]
    assert tokenizer.decode(supervised) == "Yes" + tokenizer.eos_token
    text = tokenizer.decode(encoded.input_ids)
    assert text.startswith(tokenizer.bos_token + "### Instruction:\nSay it\n\nQuietly\n\n### Response:\nYes")


def test_the_page_is_made_of_the_headers():
    assert recipes_table.PAGE.read_text() == recipes_table.page(), "run scripts/recipes_table.py"


SAMPLE = "llama2/7b_full_8xa100.yaml"
"""The config that is planned in every test run; all are planned nightly."""


@pytest.mark.parametrize(
    "file", [pytest.param(f, id=f.name, marks=[] if f.name == SAMPLE else [pytest.mark.full]) for f in FILES]
)
def test_the_plan_of_a_header_is_what_the_planner_says(file):
    """A config that does not fit on its hardware fails."""
    assert file.header["Plan"] == file.figures(file.plan()), f"run scripts/recipes_table.py --plan recipes/configs/{file.name}"
