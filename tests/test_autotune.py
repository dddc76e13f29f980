"""The search for the fastest cut of a global batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.plan import autotune
from zerobook.plan.autotune import Candidate, Tuned, split_batch
from zerobook.plan.measure import Measurement
from zerobook.plan.rows import Row
from zerobook.plan.sharding import ShardingSpec

ROOT = Path(__file__).resolve().parents[1]


@given(st.integers(1, 512), st.integers(1, 16))
def test_cuts_make_up_the_global_batch(samples, ranks):
    if samples % ranks:
        with pytest.raises(ConfigError, match=f"{samples} samples do not divide among {ranks}"):
            list(split_batch(samples, ranks))
        return
    found = list(split_batch(samples, ranks))
    assert all(micro * accumulation * ranks == samples for micro, accumulation in found)
    micros = [micro for micro, _ in found]
    assert micros[0] == 1 and all(micro & (micro - 1) == 0 for micro in micros) and len(set(micros)) == len(micros)


@pytest.mark.parametrize(
    "curve, knee",
    [([], None), ([(1, 10.0)], 1), ([(1, 10.0), (2, 19.0), (4, 36.0)], 4), ([(1, 10.0), (2, 19.6), (4, 20.0), (8, 19.9)], 2)],
)
def test_the_knee_is_where_the_rate_stops_rising(curve, knee):
    assert Tuned([], curve).knee == knee


def test_a_search_in_which_every_run_died_has_no_best():
    dead = Candidate(Path("ddp.yaml"), 1, 1, False, None, failure="exit status 1: out of memory")
    assert Tuned([dead]).best is None and Tuned([]).best is None


def test_a_file_that_comes_to_the_same_as_another_is_not_run(monkeypatch):
    same = ShardingSpec(kind="deepspeed", name="ZeRO-3", ranks=2, ranks_per_node=2, stage=3, shard_ranks=2)
    made = [
        Candidate(Path(f"{name}.yaml"), 1, 1, False, Row(file=name, name=name, sharding=same))
        for name in ("zero3", "zero3_hpz")
    ]
    ran = []
    monkeypatch.setattr(autotune, "list_candidates", lambda *_: made)

    def measure(file, *_):
        ran.append(file.stem)
        return Measurement(file.stem, 2, failure="not measured")

    monkeypatch.setattr(autotune, "measure", measure)
    job = SimpleNamespace(with_config=lambda **_: None)
    autotune.autotune(job, Path("recipe.py"), [], [], None, {}, 2, lambda words: None)
    assert ran == ["zero3"]


@pytest.mark.parametrize(
    "line, said",
    [
        (["--autotune", "out", "{tiny}/llama"], ["--here"]),
        (["--here", "--autotune", "out", "{tiny}/llama", "--dataset_name", "embedded:chatterbot"], ["--global_batch", "None"]),
        (["--here", "--gpus", "2", "--autotune", "out", "--global_batch", "7", "{tiny}/llama", "--dataset_name",
          "embedded:chatterbot"], ["--global_batch", "7 samples", "2 processes"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(tiny, capsys, line, said):
    assert main(["plan", *(word.format(tiny=tiny) for word in line)]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in said), text


@pytest.mark.launch
@pytest.mark.full
def test_the_fastest_is_found_by_running_it(tiny, tmp_path, capsys):
    line = [
        "plan",
        "--here",
        "--gpus",
        "2",
        "--autotune",
        str(tmp_path / "tuned"),
        "--global_batch",
        "4",
        "--strategies",
        "ddp,zero3",
    ]
    assert main([*line, str(tiny / "llama"), "--train_file", str(tiny / "text.txt"), "--block_size", "64"]) == 0
    said = capsys.readouterr().out
    rates = [float(row.split()[0]) for row in said.splitlines() if "samples a micro-batch" in row]
    assert rates == sorted(rates, reverse=True) and len(rates) >= 4 and rates[0] > 0
    override = yaml.safe_load((tmp_path / "tuned" / "recipe.yaml").read_text())
    assert override["per_device_train_batch_size"] * override["gradient_accumulation_steps"] * 2 == 4
    (strategy,) = [file for file in (tmp_path / "tuned").glob("*.yaml") if file.name != "recipe.yaml"]
    assert strategy.read_text() == (ROOT / "accelerate_configs" / strategy.name).read_text()
