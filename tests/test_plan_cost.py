"""The whole run: ranges of rates, hours, costs, and machines compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.planning import WIDE, made, rows_of
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.plan.hardware import cluster
from zerobook.plan.roofline import StepSeconds
from zerobook.plan.rows import Row
from zerobook.plan.sample_lengths import read_lengths
from zerobook.plan.whole_run import parse_prices, plan_whole_run

pytestmark = pytest.mark.usefixtures("traced_once")


def test_each_rate_has_a_range_which_is_wider_where_several_nodes_send():
    flags = {"per_device_train_batch_size": 1}
    node = cluster(gpus="2")
    alone = rows_of("causal_lm", WIDE, node, ("ddp",), **flags)["ddp"]
    together = rows_of("causal_lm", WIDE, cluster(nodes="2", interconnect="400Gbps"), ("ddp",), **flags)["ddp"]
    low, high = alone.rates
    assert low < alone.tokens_per_second < high
    assert together.rates[0] / together.tokens_per_second < low / alone.tokens_per_second
    cpu = rows_of("causal_lm", WIDE, replace(node, cpu=True), ("ddp",), **flags)["ddp"]
    assert cpu.rates == (cpu.tokens_per_second, cpu.tokens_per_second), "assumed rates have no known range"


def test_the_range_stands_beside_the_rate_in_all_outputs(tiny, tmp_path, capsys):
    target = tmp_path / "plan.json"
    line = ["plan", "--strategies", "single", "--recommend", "--json", str(target), str(tiny / "llama"), "--block_size", "64"]
    assert main(line) == 0
    text = " ".join(capsys.readouterr().out.split())
    planned = json.loads(target.read_text())
    for values in (planned["rows"][0], planned["advice"]):
        low, high = values["tokens_per_second_range"]
        assert low < values["tokens_per_second"] < high
    assert f"{low:,.0f} - {high:,.0f}" in text and f"({low:,.0f} to {high:,.0f}) tokens/s" in text


def fitting_row() -> Row:
    seconds = StepSeconds(compute=2, launches=0, links=0, network=0, optimizer=0, offload=0)
    return Row(file="ddp", name="DDP", time=seconds, tokens_per_step=1000, rate_range=(0.8, 1.25))


def test_hours_and_cost_have_the_range_of_the_rate():
    where = cluster(gpus="4", gpu="l40s")
    run = plan_whole_run(fitting_row(), made("causal_lm", WIDE).config, 8, where, 1_800_500, 2.0)
    assert run is not None and run.steps == 1801, "the last step is not full"
    assert run.seconds == 3602 and run.seconds_range == pytest.approx((3602 / 1.25, 3602 / 0.8))
    assert run.cost == pytest.approx(2 * 4 * 3602 / 3600)
    assert run.cost_range == pytest.approx((run.cost / 1.25, run.cost / 0.8))
    assert all(f"${dollars:,.2f}" in run.describe() for dollars in (run.cost, *run.cost_range))


def test_the_length_follows_from_tokens_then_steps_then_data(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("x" * 4 * 51200)
    flags = {"train_file": str(file), "block_size": 512, "num_train_epochs": 2, "validation_split_percentage": 0}

    def steps(tokens=None, price=None, **flags):
        run = plan_whole_run(fitting_row(), made("causal_lm", WIDE, **flags).config, 5, cluster(), tokens, price)
        return run and run.steps

    assert steps(3000, max_train_steps=7, **flags) == 3 and steps(max_train_steps=7, **flags) == 7
    assert steps(**flags) == 2 * 20, "100 rows of 512 tokens, 5 a step"
    assert steps() is None and steps(price=1.0) == 10**6, "for 10^9 tokens"


@pytest.mark.parametrize(
    "name, header, line",
    [
        ("a.jsonl", "", '{"text": "%s"}\n'),
        ("a.jsonl", "{broken\n", '{"text": "%s"}\n'),
        ("a.csv", "text\n", "%s\n"),
        ("a.txt", "", "%s\n"),
    ],
)
def test_documents_of_every_kind_of_file_fill_blocks(tmp_path, name, header, line):
    file = tmp_path / name
    file.write_text(header + 2048 * (line % "a short text"))
    flags = {"train_file": str(file), "block_size": 512, "num_train_epochs": 1, "validation_split_percentage": 0}

    run = plan_whole_run(fitting_row(), made("causal_lm", WIDE, **flags).config, 1, cluster(), None, None)

    assert run.steps == math.ceil(file.stat().st_size / 4 / 512)


def test_prices_are_of_every_gpu_or_of_named_ones():
    assert parse_prices("1.9") == {"": 1.9}
    assert parse_prices("rtx-4090=.4,a100-80gb=2") == {"rtx-4090": 0.4, "a100-80gb": 2.0}
    for text in ("cheap", "a100=2", "l40s=", "nan", "l40s=-1", "1.9,", "inf"):
        with pytest.raises(ConfigError, match="--price"):
            parse_prices(text)


def test_a_misspelt_gpu_is_answered_with_the_nearest_ones():
    for name, near, far in (("h10-80gb", "h100-80gb", "rtx-3090"), ("a100", "a100-40gb, a100-40gb-pcie, a100-80gb", "h100")):
        with pytest.raises(ConfigError, match=near) as refused:
            cluster(gpu=name)
        assert far not in str(refused.value)


MACHINES = ["plan", "--gpu", "l40s,rtx-4090", "--gpus", "1,2", "--nodes", "1-1", "--strategies", "single,ddp", "--tokens", "1M"]


def test_machines_are_compared_by_cost_as_each_is_advised_on(tiny, capsys):
    model = [str(tiny / "llama"), "--block_size", "64"]
    assert main([*MACHINES, "--json", "-", "--price", "l40s=2,rtx-4090=0.5", *model]) == 0
    machines = json.loads(capsys.readouterr().out)
    costs = [machine["run"]["cost"] for machine in machines]
    assert costs == sorted(costs)
    by_name = {(machine["hardware"]["device"]["name"], machine["hardware"]["gpus"]): machine for machine in machines}
    assert set(by_name) == {("l40s", 1), ("l40s", 2), ("rtx-4090", 1), ("rtx-4090", 2)}
    line = ["plan", "--json", "-", "--recommend", "--gpu", "l40s", "--strategies", "single,ddp", "--tokens", "1M"]
    assert main([*line, *model]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    alone = by_name["l40s", 1]
    assert alone["tokens_per_second"] == advice["tokens_per_second"] and alone["run"]["seconds"] == advice["run"]["seconds"]


def test_machines_are_compared_for_a_gigatoken_where_the_data_does_not_say_its_size(tiny, capsys):
    line = ["plan", "--json", "-", "--gpu", "l40s,rtx-4090", "--strategies", "single", str(tiny / "llama")]
    assert main([*line, "--block_size", "64", "--dataset_name", "somebody/data"]) == 0
    machines = json.loads(capsys.readouterr().out)
    seconds = [machine["run"]["seconds"] for machine in machines]
    assert seconds == sorted(seconds) and machines[0]["run"]["cost"] is None
    assert seconds[0] == pytest.approx(1e9 / machines[0]["tokens_per_second"], rel=1e-5)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_machines_names_the_cheapest_and_the_fastest(tiny, capsys, monkeypatch, columns):
    monkeypatch.setattr("zerobook.plan.machines.WIDTH", columns)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*MACHINES, "--price", "l40s=2", str(tiny / "llama"), "--block_size", "64"]) == 0
    text = capsys.readouterr().out
    assert "cheapest" in text and "fastest" in text and "1.00M tokens" in " ".join(text.split())
    assert all(len(line) <= columns for line in text.splitlines())
    rows = [line.split() for line in text.splitlines() if " x " in line and " yes " in line]
    assert [row[3] for row in rows] == ["l40s", "l40s", "rtx-4090", "rtx-4090"], "machines without a price come last"


@pytest.mark.parametrize(
    "line, words",
    [
        (["--gpu", "l40s,a100", "{tiny}/llama"], ["--gpu", "a100-40gb"]),
        (["--nodes", "1-2", "{tiny}/llama"], ["--interconnect"]),
        (["--gpus", "1,2", "--failures", "llama3", "{tiny}/llama"], ["--failures", "one machine"]),
        (["--gpus", "1,2", "{tiny}/llama", "--max_train_steps", "9"], ["max_train_steps", "--tokens"]),
        (["--recommend", "--tokens", "many", "{tiny}/llama"], ["--tokens", "'many'"]),
        (["--recommend", "--price", "many", "{tiny}/llama"], ["--price", "'many'"]),
        (["--price", "1", "{tiny}/llama"], ["--price", "--recommend"]),
        (["--gpus", "2-1", "{tiny}/llama"], ["--gpus", "'2-1'"]),
    ],
)
def test_bad_questions_about_money_are_refused(tiny, capsys, line, words):
    assert main(["plan", *(word.format(tiny=tiny) for word in line)]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text


def write_chats(folder, words):
    file = folder / "chats.jsonl"
    chats = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes " * count}] for count in words]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(file)


def test_samples_are_counted_in_the_tokens_of_the_models_tokenizer(tiny, tmp_path, monkeypatch):
    file = write_chats(tmp_path, [1, 2, 40])
    config = made("lora_finetune", tiny / "llama", train_file=file).config
    lengths = read_lengths(config)
    assert len(lengths) == 3 and lengths[0] < lengths[1] < lengths[2]
    packed = made("lora_finetune", tiny / "llama", train_file=file, packing=True, max_seq_length=8, num_train_epochs=8).config
    run = plan_whole_run(fitting_row(), packed, 1, cluster(), None, None, lengths)
    rows = sum(min(length, 8) for length in lengths) / 8 * 0.95
    assert run.steps == 8 * math.ceil(rows), "five in a hundred samples are held out"
    assert read_lengths(made("lora_finetune", WIDE, train_file=file).config) is None, "no tokenizer beside a config.json"
    monkeypatch.setattr("zerobook.plan.sample_lengths.READ_BYTES", 10)
    assert read_lengths(config) is None


@pytest.mark.parametrize(
    "flags, rows", [({}, 38), ({"max_train_samples": 10}, 10), ({"max_train_samples": 39}, 38), ({"validation_file": "x"}, 40)]
)
def test_rows_that_are_held_out_or_left_out_are_not_trained_on(tmp_path, flags, rows):
    file = write_chats(tmp_path, [1] * 40)
    config = made("lora_finetune", WIDE, train_file=file, num_train_epochs=1, **flags).config
    run = plan_whole_run(fitting_row(), config, 1, cluster(), None, None)
    assert run is not None and run.steps == rows


def test_a_limit_of_samples_counts_samples_where_rows_are_packed(tiny, tmp_path):
    file = write_chats(tmp_path, [20] * 40)
    flags = {"train_file": file, "packing": True, "max_seq_length": 512, "num_train_epochs": 100}

    def rows(lengths, **more):
        config = made("lora_finetune", tiny / "llama", validation_split_percentage=0, **flags, **more).config
        return plan_whole_run(fitting_row(), config, 1, cluster(), None, None, lengths).steps / 100

    lengths = read_lengths(made("lora_finetune", tiny / "llama", train_file=file).config)
    assert rows(lengths) == math.ceil(sum(lengths) / 512) > 3
    assert rows(lengths, max_train_samples=4) == 1, "four short samples share a row"
    assert rows(None, max_train_samples=4) == 1 < rows(None), "as many bytes as four of the lines have"


def test_padded_rows_are_planned_as_long_as_the_longest_sample(tiny, tmp_path, capsys):
    file = write_chats(tmp_path, [1, 2, 40])
    longest = max(read_lengths(made("lora_finetune", tiny / "llama", train_file=file).config))
    line = ["plan", "--json", "-", "--strategies", "single", "recipes/lora_finetune.py", "--max_seq_length", "512"]
    flags = ["--model_name_or_path", str(tiny / "llama"), "--train_file", file, "--per_device_train_batch_size", "1"]
    assert main([*line, *flags]) == 0
    printed = capsys.readouterr()
    assert longest <= json.loads(printed.out)["rows"][0]["tokens_per_step"] < longest + 8 and "longest" not in printed.out
    assert main([*line, *flags, "--packing", "true"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["tokens_per_step"] == 512
