"""``zerobook plan``: its table, JSON, advice and refusals, and the probe of ``--measure``."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from benchmarks.published.formulas import ring
from tests.planning import FILES, HALF, ROOT, WIDE, made, rows_of, shortened
from zerobook.cli.main import main
from zerobook.config_sources import ConfigSources, parse
from zerobook.errors import ConfigError
from zerobook.plan import formulas
from zerobook.plan.hardware import cluster
from zerobook.plan.job import read_config
from zerobook.plan.memory import DeviceBytes, PeakMemory
from zerobook.plan.rows import Row, check_limits, count_checkpoints, rank_rows, resolve_launch_plan
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.trace import SavedTensors
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.devices import DEVICES
from zerobook.utils.units import size

pytestmark = pytest.mark.usefixtures("traced_once")


def test_the_command_prints_every_strategy(tiny, tmp_path, capsys):
    target = tmp_path / "plan.json"
    line = ["plan", "--gpus", "2", "--gpu_memory", "24GB", "--json", str(target), "--recommend"]
    assert main([*line, str(tiny / "llama"), "--mixed_precision", "bf16", "--block_size", "64"]) == 0
    said = capsys.readouterr().out
    assert all(file.stem in said for file in FILES) and "best: " in said and "strategy     accelerate_configs/" in said
    assert "bf16, activation checkpointing none, fused attention" in " ".join(said.split())
    found = json.loads(target.read_text())
    assert len(found["rows"]) == len(FILES) and found["parameters"] == 106_816
    zero2 = next(made for made in found["rows"] if made["file"] == "zero2")
    assert zero2["fits"] and sum(zero2["memory"]["device"].values()) < 24e9
    assert zero2["memory"]["device"]["parameters"] == 2 * 106_816


def test_a_strategy_that_the_model_cannot_take_has_a_row_that_says_so(tiny, tmp_path, capsys):
    target = tmp_path / "plan.json"
    line = [
        "plan",
        "--gpus",
        "2",
        "--json",
        str(target),
        "recipes/lora_finetune.py",
        "--model_name_or_path",
        str(tiny / "llama"),
    ]
    assert main([*line, "--load_in_4bit", "--max_seq_length", "64", "--mixed_precision", "bf16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    rows = {made["file"]: made for made in json.loads(target.read_text())["rows"]}
    for name in ("zero3_offload", "zero3_nvme", "fsdp_offload"):
        (problem,) = rows[name]["problems"]
        assert problem.startswith("load_in_4bit: ") and "quantisation state" in problem and "without offload" in problem
        assert not rows[name]["fits"] and rows[name]["memory"] is None
        assert f"{name} cannot run: {problem}" in said
    assert rows["zero2"]["fits"] and not rows["zero2"]["problems"]


def test_one_process_has_ddps_buckets_on_a_cpu_alone():
    """accelerate wraps the model of one process there, and not on a GPU."""
    from zerobook.plan.sharding import sharding_spec

    made_job = made("causal_lm", WIDE)
    ddp = next(file for file in FILES if file.stem == "ddp")
    sources = ConfigSources(dict.fromkeys(type(made_job.config).model_fields, "default"))
    gpu = cluster(gpus="1", gpu="a100-80gb")
    for where, kind in ((gpu, "single"), (replace(gpu, gpus=2), "ddp"), (replace(gpu, cpu=True), "ddp")):
        assert sharding_spec(resolve_launch_plan(ddp, where, made_job.config, sources), made_job.model_config).kind == kind


def test_the_papers_figures_stand_beside_what_is_counted(tiny, capsys):
    line = ["plan", "--gpus", "2", "--nodes", "2", "--interconnect", "100Gbps"]
    flags = [str(tiny / "llama"), "--mixed_precision", "bf16", "--block_size", "64"]
    assert main([*line, "--json", "-", *flags]) == 0
    parameters = 106_816
    planned = json.loads(capsys.readouterr().out)
    rows = {made["file"]: made for made in planned["rows"]}
    assert planned["failures"]["gpus"] == 4 and 0 < planned["failures"]["save"] < 0.01
    for name, stage, counted in [("ddp", 0, 4), ("zero1", 1, 3), ("zero2", 2, 3)]:
        paper = rows[name]["paper"]
        assert paper["sent"] == paper["between"] == pytest.approx(ring(formulas.traffic(stage), 4) * 2 * parameters)
        assert rows[name]["sent"] == pytest.approx(counted * 2 * parameters * 3 / 4, rel=1e-3)
        assert paper["rule"] is None
    paper = rows["zero3"]["paper"]
    assert paper["sent"] == pytest.approx(4.5 * parameters) and paper["rule"] == formulas.between_nodes_rule(parameters, 2)
    assert paper["formula"] == {"states": "2 P/4 + 2 P/4 + 12 P/4 bytes", "sent": "3 x 2 P x 3/4 bytes",
                                "between": "3 x 2 P x 3/4 bytes", "rule": "48 P/2 bits"}  # fmt: skip
    hybrid = rows["fsdp_hybrid"]["paper"]
    assert hybrid["between"] == pytest.approx(2 * parameters), "both halves' rings leave the node"
    assert "4 x 2 P/2 x 1/2" in hybrid["formula"]["between"] and "2 x 2 P/2 x 1/2" in hybrid["formula"]["sent"]
    assert hybrid["rule"] is None, "it counts whole weights gathered over the nodes"
    assert rows["zero2_offload"]["paper"]["formula"]["states"] == "2 P + 2 P/4 (host) + 12 P/4 (host) bytes"
    assert main([*line, *flags]) == 0
    said = capsys.readouterr().out
    assert "by paper" in " ".join(said.split()) and "48 P/N" in said and "never run here" in said and "goodput" in said
    assert all(len(text) <= 150 for text in said.splitlines())
    ddp = [text.split() for text in said.splitlines() if text.strip().startswith("ddp ")]
    assert ddp[1][2:10] == ["641", "kB", "320", "kB", "641", "kB", "320", "kB"]


def test_alone_nothing_is_sent_and_its_time_is_told(tiny, capsys):
    assert main(["plan", "--strategies", "single", str(tiny / "llama"), "--block_size", "64"]) == 0
    said = capsys.readouterr().out
    assert "nothing is sent" in said and "tokens/s" in said and "by 48 P/N" not in said


@pytest.mark.parametrize("files, told", [("zero3,zero3_nvme", True), ("zero3,zero3_offload", False)])
def test_the_disk_is_told_where_one_is_used(tiny, capsys, files, told):
    assert main(["plan", "--gpus", "2", "--strategies", files, str(tiny / "wide"), "--block_size", "64"]) == 0
    said = capsys.readouterr().out
    assert ("disk in" in said) is told
    assert all(len(text) <= 150 for text in said.splitlines())


def test_frozen_weights_are_gathered_in_the_papers_figures_too(tiny, capsys):
    line = ["plan", "--json", "-", "--gpus", "4", "--strategies", "zero3", "recipes/lora_finetune.py"]
    assert main([*line, "--model_name_or_path", str(tiny / "llama"), "--mixed_precision", "bf16"]) == 0
    found = json.loads(capsys.readouterr().out)
    (zero3,) = found["rows"]
    assert zero3["paper"]["formula"]["states"] == "2 P/4 + 2 T/4 + 12 T/4 bytes"
    assert zero3["paper"]["formula"]["sent"] == "2 x 2 P x 3/4 + 1 x 2 T x 3/4 bytes"
    assert zero3["paper"]["sent"] == pytest.approx((4 * found["parameters"] + 2 * found["trained"]) * 3 / 4)


@pytest.mark.parametrize(
    "line, said",
    [
        (["--gpus", "2"], ["no model is named"]),
        (["--nodes", "-1", "{tiny}/llama"], ["--nodes", "'-1'"]),
        (["--gpu_memory", "80", "--interconnect", "400", "--nodes", "2", "{tiny}/llama"], ["2 problems", "'80'", "'400'"]),
        (["--formulas", "--parameters", "1e999"], ["--parameters", "'1e999'"]),
        (["nowhere/at-all.json"], ["nowhere/at-all.json", "no model config"]),
        (["--formulas"], ["--parameters"]),
        (["--here", "--gpus", "0", "{tiny}/llama"], ["--gpus", "'0'", "1 or more"]),
        (["--formulas", "--parameters", "7.5GB"], ["--parameters", "'7.5GB'"]),
        (["{tiny}/llama", "--learning_rat", "1"], ["--learning_rat", "--learning_rate"]),
        (["{tiny}/llama", "--packing", "--group_by_length"], ["group_by_length"]),
        (["--here", "--nodes", "3", "--gpu_memory", "3", "{tiny}/llama"], ["--here and --nodes", "--here and --gpu_memory"]),
        (
            ["--formulas", "--parameters", "7B", "--recommend", "{tiny}/llama"],
            ["--formulas and --recommend", "llama: formulas"],
        ),
        (["--parameters", "7B", "--measure", "{tiny}/llama"], ["--parameters", "--formulas", "--measure", "--here"]),
        (["{tiny}/llama", "--gpus", "8", "--json=x"], ["--gpus: it is zerobook plan's own", "--json: it is", "in front of"]),
        (["--json", "{tiny}/nowhere/x.json", "{tiny}/llama"], ["--json", "a folder", "nowhere"]),
        (
            ["recipes/causal_lm.py", "--model_name_or_path", "{tiny}/bart"],
            ["bart: it is an encoder-decoder", "seq2seq_chatbot"],
        ),
        (["recipes/seq2seq_chatbot.py", "--model_name_or_path", "{tiny}/llama"], ["no encoder-decoder", "causal_lm"]),
    ],
)
def test_bad_input_is_refused(tiny, capsys, line, said):
    assert main(["plan", *(word.format(tiny=tiny) for word in line)]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in said), text


def test_help_is_no_model(capsys):
    with pytest.raises(SystemExit) as left:
        main(["plan", "-h"])
    assert left.value.code == 0 and "--gpu_memory" in capsys.readouterr().out


def test_json_on_the_terminal_is_alone_and_has_the_advice(tiny, tmp_path, capsys):
    line = ["plan", "--json", "-", "--recommend", "--gpu_memory", "24GB", str(tiny / "llama")]
    assert main([*line, "--block_size", "64"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    advice = found["advice"]
    assert advice["strategy"] == "single" and advice["recipe"] is None
    assert advice["flags"] == {"mixed_precision": "bf16", "activation_checkpointing": "none", "per_device_train_batch_size": 8,
                               "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}  # fmt: skip
    assert "accelerate launch " in printed.err
    assert found["hardware"]["device"]["like"] == "titan-rtx" or found["hardware"]["device"]["like"] in DEVICES


def test_a_gpu_that_is_not_named_has_bf16_and_a_known_ones_speed(tiny, capsys):
    for amount in ("16GB", "32GB", "80GB"):
        device = cluster(gpu_memory=amount).device
        assert device.bf16 and device.fused and DEVICES[device.like].flops == device.flops
    assert cluster(gpu_memory="80GB").device.like == "a100-80gb" and not cluster(gpu="t4", gpu_memory="15GB").device.like
    assert (
        main(["plan", "--gpu_memory", "32GB", "--strategies", "single", str(tiny / "llama"), "--mixed_precision", "bf16"]) == 0
    )
    assert f"of {cluster(gpu_memory='32GB').device.like}'s listed speed" in " ".join(capsys.readouterr().out.split())


def test_checkpoints_are_counted_as_the_run_keeps_them():
    def kept(**flags):
        config = made("causal_lm", WIDE, **{"on_spike": "log", "eval_steps": 0} | flags).config
        checkpoint_bytes, checkpoints = count_checkpoints(300, config)
        assert checkpoint_bytes == 1200 * (checkpoints or 1)
        return checkpoints

    assert kept(max_train_steps=1000, save_steps=300) == 4, "three on the way, and the end"
    assert kept(max_train_steps=900, save_steps=300) == 3
    assert kept(max_train_steps=10, save_total_limit=5) == 6, "the run decides when it saves: no more than the limit is sure"
    assert kept(max_train_steps=10, save_steps=0) == 1 and kept(max_train_steps=50, save_steps=0.5) == 3
    assert kept(save_steps="epoch", num_train_epochs=4) == 4
    assert kept(max_train_steps=1000, save_steps=10, save_total_limit=2) == 3, "one more while it is written"
    assert kept(max_train_steps=1000, save_steps=10, save_total_limit=2, eval_steps="auto") == 4, "and the best"
    assert kept(save_steps=10) is None, "epochs have no length here"
    assert kept(save_steps=10, save_total_limit=2) == 3 and kept() == 3 and kept(save_steps=0) == 1


def test_the_head_of_a_plan_has_the_accumulation_that_follows_from_a_global_batch(tiny, capsys):
    line = ["plan", "--gpus", "2", "--strategies", "ddp", str(tiny / "llama"), "--block_size", "64"]
    assert main([*line, "--global_batch_size", "64", "--per_device_train_batch_size", "8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "accumulation 4 |" in text and "one micro-batch's" in text


def test_what_is_tight_goes_behind_what_is_not_and_as_fast():
    facts = {"tokens_per_step": 100, "memory": SimpleNamespace(host=0)}
    roomy = Row(file="zero3", name="zero3", time=SimpleNamespace(step=1.01), **facts)
    tight = Row(file="zero1", name="zero1", time=SimpleNamespace(step=1.0), tight=True, **facts)
    assert rank_rows([tight, roomy]) == [roomy, tight]
    roomy.time.step = 1.2
    assert rank_rows([roomy, tight]) == [tight, roomy], "a fifth slower is too much to pay for room"


def test_of_rows_that_are_as_fast_the_one_that_keeps_nothing_on_the_host_is_first_and_then_the_faster_one():
    plain, host, faster = (
        Row(file=file, name=file, tokens_per_step=100, time=SimpleNamespace(step=step), memory=SimpleNamespace(host=host))
        for file, step, host in (("fsdp", 1.0, 0), ("zero3_offload", 1.05, 1), ("zero3_offload_optimizer", 1.01, 1))
    )
    offloaded = Row(file="ddp", name="", tokens_per_step=100, time=SimpleNamespace(step=1.0), memory=SimpleNamespace(host=1))

    assert rank_rows([offloaded, host, faster, plain]) == [plain, offloaded, faster, host]


def remedies_of(held: DeviceBytes, config, *, when: str = "", host_at_load: int = 0, gpus: int = 1, **sharding) -> list[str]:
    """Return what is named as help where GPUs of 100 bytes and a host of 100 bytes are too small."""
    spread = ShardingSpec(**{"kind": "deepspeed", "name": "", "ranks": 1, "ranks_per_node": 1, "stage": 3} | sharding)
    memory = PeakMemory(device=held, when=when, host_at_load=host_at_load, host=0, disk=0, low=held.total, high=held.total)
    row = Row(file="zero3", name="ZeRO-3", sharding=spread, memory=memory)
    check_limits(row, config, cluster(gpus=str(gpus), gpu_memory="100B", host_memory="100B"))
    return row.remedies


def test_no_remedy_is_named_that_cannot_help():
    full = made("causal_lm", WIDE, per_device_train_batch_size=8).config
    states = DeviceBytes(parameters=120)
    eight = {"gpus": 8, "ranks": 8, "ranks_per_node": 8}

    assert remedies_of(states, full, **eight) == ["more sharding", "offload", "LoRA"]
    assert remedies_of(states, full, **eight, shard_ranks=8) == ["offload", "LoRA"], "all ranks share the states"
    assert remedies_of(states, full) == ["offload", "LoRA"], "one GPU has nothing to share"
    assert remedies_of(states, full, gpus=8) == ["more sharding", "offload", "LoRA"], "seven GPUs are idle"
    quantised = made("lora_finetune", WIDE, load_in_4bit=True).config
    assert remedies_of(states, quantised) == ["more or larger GPUs"], "a quantised base is not offloaded"
    assert remedies_of(states, quantised, **eight, when="load") == ["larger GPUs"], "each GPU holds the base at first"


def test_activations_are_named_where_room_remains_for_them():
    full = made("causal_lm", WIDE, per_device_train_batch_size=8).config
    checkpointing = "--activation_checkpointing"

    assert remedies_of(DeviceBytes(parameters=99, activations=100), full) == ["offload", "LoRA"]
    # With what the allocator keeps of freed blocks, one of eight rows has 15 bytes.
    tight = DeviceBytes(parameters=70, activations=100, cached=34)
    assert remedies_of(tight, full) == [
        checkpointing,
        "a smaller --per_device_train_batch_size, with --gradient_accumulation_steps",
    ]


@pytest.mark.parametrize(
    "sharding, remedy",
    [
        ({"kind": "ddp", "stage": 0, "ranks": 2}, "zero3, whose ranks do not load a copy each"),
        ({"kind": "single", "stage": 0}, "more host RAM"),
        ({"ranks": 2, "shard_ranks": 2}, "more host RAM"),
        ({"kind": "fsdp", "ranks": 2, "shard_ranks": 2, "rank_0_loads": True}, "more host RAM"),
    ],
)
def test_zero3_is_named_only_where_it_loads_fewer_copies(sharding, remedy):
    config = made("causal_lm", WIDE).config
    assert remedies_of(DeviceBytes(parameters=10), config, host_at_load=120, **sharding) == [remedy]


def test_remedies_name_what_is_in_the_way():
    where = cluster(gpus="8", gpu="a100-80gb", host_memory="45GB", disk="1GB")
    rows = rows_of("causal_lm", WIDE, where, ("zero2", "zero3"), **HALF, block_size=1000, save_steps=0)
    assert rows["zero2"].exceeded[0].startswith("host RAM while loading") and "zero3" in rows["zero2"].remedies[0]
    assert rows["zero3"].exceeded == [f"disk: {size(rows['zero3'].checkpoint)} of 1.00 GB"]
    assert rows["zero3"].remedies == ["a larger --disk"]
    (large,) = rows_of("seq2seq_chatbot", "blenderbot_400m", cluster(gpu_memory="2GB"), ("zero2",), max_source_length=128,
                       max_target_length=64, **HALF).values()  # fmt: skip
    assert large.remedies == ["offload", "LoRA"], "one rank has nothing to share"

    def for_the_gpu(activations: int, recipe: str = "causal_lm", **flags) -> list[str]:
        held = DeviceBytes(activations=activations, parameters=10)
        return remedies_of(held, made(recipe, WIDE, **flags).config)

    assert for_the_gpu(150, per_device_train_batch_size=8, activation_checkpointing=True)[0].startswith(
        "a smaller --per_device"
    )
    assert for_the_gpu(150, per_device_train_batch_size=1, activation_checkpointing=True) == ["a smaller --block_size"]
    assert for_the_gpu(9000, per_device_train_batch_size=8) == ["--activation_checkpointing", "a smaller --block_size"]


V100 = {"gpus": "8", "gpu": "v100-32gb"}


@pytest.mark.parametrize(
    "where, flags, method, checkpointing",
    [
        ({"gpus": "8"}, ["--block_size=1024", "--per_device_train_batch_size", "2"], "full", "none"),
        pytest.param({"gpu": "v100-16gb"}, ["--config", "{yaml}"], "lora", "none", marks=pytest.mark.full),
    ],
)
def test_advice_can_be_followed(tmp_path, capsys, where, flags, method, checkpointing):
    (tmp_path / "run.yaml").write_text("block_size: 512\nper_device_train_batch_size: 1\n")
    flags = [word.format(yaml=tmp_path / "run.yaml") for word in flags]
    hardware = [word for key, value in where.items() for word in (f"--{key}", value)]
    line = ["plan", *hardware, "--strategies", "single,zero1,zero3", "--json", "-"]
    model = ["--model_name_or_path", str(WIDE)]
    main([*line, "--recommend", str(ROOT / "recipes" / "causal_lm.py"), *model, *flags])
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert (advice["method"], advice["flags"]["activation_checkpointing"]) == (method, checkpointing)
    assert advice["flags"]["mixed_precision"] == ("bf16" if method == "full" else "fp16")
    followed = [f"--{key}={value}" for key, value in advice["flags"].items()]
    if advice["recipe"]:
        assert advice["recipe"] == "lora_finetune" and advice["flags"]["max_seq_length"] == 512
        followed += ["--per_device_train_batch_size=1"]
    else:
        followed = [*flags, *followed]
    assert main([*line, str(ROOT / "recipes" / f"{advice['recipe'] or 'causal_lm'}.py"), *model, *followed]) == 0
    rows = {made["file"]: made for made in json.loads(capsys.readouterr().out)["rows"]}
    assert rows[advice["strategy"]]["fits"] and rows[advice["strategy"]]["memory"]["device"]["activations"] > 0


@pytest.mark.parametrize("memory, recipe", [("80GB", "causal_lm"), ("9GB", "lora_finetune")])
def test_the_advice_ends_with_a_launch_line_that_can_be_typed(capsys, memory, recipe):
    line = ["plan", "--gpus", "2", "--gpu_memory", memory, "--strategies", "zero2", "--recommend"]
    given = ["--block_size", "256", "--per_device_train_batch_size", "1", "--learning_rate", "1e-4"]
    assert main([*line, str(WIDE), *given]) == 0
    said = capsys.readouterr().out
    assert ("no strategy file fits with these settings" in said) == (recipe == "lora_finetune")
    words = shlex.split(said.rstrip().splitlines()[-1])
    place = words.index(f"recipes/{recipe}.py")
    assert words[:place] == ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml", "--num_processes", "2"]
    flags = [word.replace("$TRAIN_FILE", str(ROOT / "README.md")) for word in words[place + 1 :]]
    config, *_ = parse(recipe_class(str(ROOT / "recipes" / f"{recipe}.py")).config_class, flags)
    assert config.learning_rate == 1e-4 and config.row_length == 256 and config.mixed_precision == "bf16"


@pytest.mark.parametrize("memory, recipe", [("80GB", "mine"), ("9GB", "lora_finetune")])
def test_the_launch_line_names_files_from_any_folder(tmp_path, monkeypatch, capsys, memory, recipe):
    own = tmp_path / "own" / "recipes" / "mine.py"
    own.parent.mkdir(parents=True)
    own.write_text((ROOT / "recipes" / "causal_lm.py").read_text())
    monkeypatch.chdir(tmp_path)
    line = ["plan", "--gpus", "2", "--gpu_memory", memory, "--strategies", "zero2", "--recommend", "own/recipes/mine.py"]

    code = main([*line, "--model_name_or_path", str(WIDE), "--block_size", "256", "--per_device_train_batch_size", "1"])

    words = shlex.split(capsys.readouterr().out.rstrip().splitlines()[-1])
    assert code == 0 and Path(words[6]).stem == recipe
    assert Path(words[3]).is_file() and Path(words[6]).is_file()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_headers(capsys, monkeypatch, width):
    from zerobook.plan import table

    monkeypatch.setattr(table, "WIDTH", width)
    line = ["plan", "--gpus", "8", "--nodes", "2", "--interconnect", "400Gbps", "--host_memory", "900GB"]
    assert main([*line, str(WIDE), "--per_device_train_batch_size", "1"]) == 0
    said = capsys.readouterr().out
    tables = [text for text in said.splitlines() if text.startswith((" zero", " ddp", " fsdp", " single", " strategy file"))]
    assert len(tables) > 20 and max(map(len, tables)) <= width and "…" not in said
    for header in ("card", "weights", "optim.", "tokens/s", "each rank"):
        assert header in said
    assert width > 80 or "left out on 80 columns: by paper, all states" in said
    assert all(number in said for number in ("zero3_offload", "fsdp_hybrid"))


def test_lengths_that_nobody_set_are_at_most_the_models_positions(tmp_path, capsys):
    model = shortened(tmp_path, "blenderbot_400m", encoder_layers=1, decoder_layers=1)
    assert main(["plan", "--gpus", "2", "--gpu_memory", "24GB", "--strategies", "ddp", "--recommend", str(model)]) == 0
    printed = capsys.readouterr()
    assert "128 positions" in printed.err and "128 + 128 tokens" in printed.out
    assert "--max_source_length 128" in printed.out.rstrip().splitlines()[-1]
    assert main(["plan", "--strategies", "ddp", str(model), "--max_source_length", "256"]) == 2, "a length that was asked for"


def test_where_the_host_alone_is_short_the_advice_says_that(capsys):
    line = ["plan", "--gpus", "8", "--host_memory", "4GB", "--strategies", "zero1,zero2", "--recommend"]
    assert main([*line, str(WIDE), "--per_device_train_batch_size", "1"]) == 1
    said = " ".join(capsys.readouterr().out.partition("does not fit  all weights")[2].split())
    assert "host RAM while loading" in said and "GPU memory" not in said
    line = ["plan", "--gpu", "v100-32gb", "--strategies", "zero2", "--recommend", str(WIDE)]
    assert main([*line, "--mixed_precision", "bf16"]) == 1
    assert "v100-32gb" in capsys.readouterr().out.partition("does not fit  all weights")[2]


def test_adapters_are_not_advised_for_weights_that_were_never_trained(capsys):
    line = ["plan", "--gpu_memory", "8GB", "--strategies", "single", "--recommend", str(ROOT / "recipes" / "causal_lm.py")]
    assert main([*line, "--config_name", str(WIDE), "--per_device_train_batch_size", "1"]) == 1
    assert "LoRA" not in capsys.readouterr().out.partition("does not fit  all weights: ")[2]


def test_an_unknown_class_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "of-tomorrow"}')
    with pytest.raises(ConfigError, match="of-tomorrow"):
        read_config(str(file))


def test_formulas_alone_print_the_papers_table(capsys):
    assert main(["plan", "--formulas", "--parameters", "7.5B", "--gpus", "64"]) == 0
    states, traffic = capsys.readouterr().out.split("sent in a step")
    for name, total, formula in [
        ("DDP", "120 GB", "2 P + 2 P + 12 P bytes"), ("ZeRO-1", "31.4 GB", "2 P + 2 P + 12 P/64 bytes"),
        ("ZeRO-2", "16.6 GB", "2 P + 2 P/64 + 12 P/64 bytes"), ("ZeRO-3", "1.88 GB", "2 P/64 + 2 P/64 + 12 P/64 bytes"),
    ]:  # fmt: skip
        line = next(line for line in states.splitlines() if line.startswith(name))
        less = {"DDP": "1/1", "ZeRO-1": "1/3.82", "ZeRO-2": "1/7.21", "ZeRO-3": "1/64"}[name]
        assert " ".join(line.split()).endswith(f"{total} {less} = {formula}"), "every row has its unit and formula"
    assert "29.5 GB = 2 x 2 P x 63/64 bytes" in traffic and "44.3 GB = 3 x 2 P x 63/64 bytes" in traffic
    assert "105 GB = 14 P bytes" in traffic


def test_a_file_that_cannot_be_written_is_refused_before_the_plan(tmp_path, capsys):
    assert main(["plan", "--formulas", "--parameters", "7B", "--json", str(tmp_path)]) == 2
    assert "--json" in capsys.readouterr().err


def test_formulas_alone_in_json(capsys):
    line = ["plan", "--formulas", "--parameters", "10B", "--gpus", "8", "--nodes", "2", "--interconnect", "400Gbps"]
    assert main([*line, "--precision", "fp32", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    ddp, *_, zero3 = found["rows"]
    assert found["unit"] == "bytes" and ddp["total"] == 160e9 and ddp["formula"]["states"] == "4 P + 4 P + 8 P bytes"
    assert zero3["sent"] == zero3["between"] == 3 * 4 * 10e9 * 15 / 16 and zero3["rule"] is None, "the rule counts 16 bits"
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "56.2 GB as a ring, 30.0 GB by the rule 48 P/2 bits" in said


def test_formulas_alone_need_nothing_heavy():
    code = (
        "import sys; from zerobook.cli.main import main; main(['plan', '--formulas', '--parameters', '7B']);"
        "assert not {'torch', 'transformers', 'numpy', 'rich', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_the_step_that_is_timed_is_not_the_one_whose_saved_tensors_are_watched(tmp_path, monkeypatch):
    from zerobook.plan import measure, probe

    file, weight = tmp_path / "result.json", torch.ones(4, requires_grad=True)

    class Slow(SavedTensors):
        def _pack(self, tensor):
            sleep(0.3)
            return super()._pack(tensor)

    monkeypatch.setattr("zerobook.plan.trace.SavedTensors", Slow)
    monkeypatch.setenv(probe.RESULT, str(file))
    strategy = SimpleNamespace(
        model=torch.nn.Linear(1, 1), device=torch.device("cpu"), rank=0, memory=lambda: {"parameters": 1}
    )  # fmt: skip
    trainer = SimpleNamespace(progress=SimpleNamespace(step=0), strategy=strategy, save_results=True)
    hook, batch = probe.Probe(), {"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 4)}
    hook.on_start(trainer)
    assert not trainer.save_results, "what a few steps trained is not saved"
    for step in range(1, measure.STEPS + 1):
        assert not file.with_suffix(".0.json").exists()
        hook.before_step(trainer, step)
        with hook.around_loss(trainer, batch):
            loss = (weight * weight).sum()
        loss.backward()
        hook.on_gradients_ready(trainer)
        trainer.progress.step += 1
        hook.after_step(trainer, SimpleNamespace(step=step))
    found = json.loads(file.with_suffix(".0.json").read_text())
    assert found["saved"] == 16 and found["held"] == {"parameters": 1} and found["batch"]["labels"] == [1, 4]
    assert 0 < found["seconds"] < 0.2
