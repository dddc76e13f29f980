"""Strategy files of many kinds through ``zerobook doctor``, and mutations of the shipped ones: one clear problem, or none."""

from __future__ import annotations

import json
import random

import pytest
import yaml

from tests.harness import ROOT, launch, sampled
from tests.strategy_corpus import CORPUS, DEEPSPEED, ZERO2, Case
from tests.versions import NEEDS_MODEL_PARALLELISM
from zerobook.cli.doctor import inspect_launch
from zerobook.launch import deepspeed_keys
from zerobook.launch.resolve import Hardware

REST = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "main_training_function": "main",
        "rdzv_backend": "static", "same_network": True, "use_cpu": False}  # fmt: skip


def written(folder, case: Case) -> str:
    """Write a case's files, and return the path of the YAML."""
    content = REST | {"num_processes": case.processes} | case.yaml
    if case.json is not None:
        (folder / "ds.json").write_text(json.dumps(case.json))
        section = content.get("deepspeed_config", {}) | {"deepspeed_config_file": str(folder / "ds.json")}
        content = content | {"deepspeed_config": section}
    (folder / "strategy.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "strategy.yaml")


# An older transformers is one more problem of this file.
BOTH_PARALLEL = "tensor and expert parallel"
OTHERS = [name for name in CORPUS if name != BOTH_PARALLEL]


@pytest.mark.parametrize("name", [*OTHERS, pytest.param(BOTH_PARALLEL, marks=NEEDS_MODEL_PARALLELISM)])
def test_doctor_says_what_a_file_is(name, tmp_path, tiny, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    case = CORPUS[name]
    problems = said_by_doctor(written(tmp_path, case), case.processes, tiny, tmp_path / "run", *case.flags)
    assert len(problems) == (case.said is not None), problems
    assert case.said is None or case.said in problems[0], problems[0]


def test_deepspeeds_own_check_is_done_beside_other_problems(tmp_path, tiny, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    settings = {
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": "auto", "opt_level": "O2"},
    }

    problems = said_by_doctor(written(tmp_path, Case(DEEPSPEED, settings)), 2, tiny, tmp_path / "run")

    assert len(problems) == 2
    assert "offload_param" in problems[0] and "bf16.opt_level" in problems[1]


@pytest.mark.parametrize(
    "flag, value", [("zero_stage", "3"), ("offload_optimizer_device", "cpu"), ("offload_param_nvme_path", "/disk")]
)
def test_a_flag_of_the_launcher_that_the_json_contradicts_is_a_problem(flag, value, tmp_path, tiny, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    launch_flags = ["--config_file", written(tmp_path, Case(DEEPSPEED, ZERO2)), f"--{flag}", value]
    recipe_flags = ["--model_name_or_path", str(tiny / "llama"), "--train_file", str(tiny / "text.txt")]

    plan, problems, *_ = inspect_launch([*launch_flags, str(ROOT / "recipes/causal_lm.py"), *recipe_flags], Hardware())

    assert not problems and plan is not None
    assert len(plan.problems) == 1 and f"--{flag}, says {value}" in plan.problems[0]


SAMPLE = ["stage 3 of the Trainer's docs", "another stage in the YAML"]
"""One that trains, and one that the recipe refuses: all such refusals come from what doctor calls."""
LAUNCHED = [name for name, case in CORPUS.items() if case.said is None or case.refused_by_launcher or name in SAMPLE]


@pytest.mark.launch
@pytest.mark.parametrize("name", sampled(LAUNCHED, *SAMPLE))
def test_a_launch_ends_as_doctor_says(name, tmp_path, tiny):
    """The launch ends with doctor's problem before anything starts; without one, a step is trained."""
    case = CORPUS[name]
    flags = dict(zip((flag.removeprefix("--") for flag in case.flags[::2]), case.flags[1::2], strict=True))
    flags = {"max_train_steps": "1"} | flags
    run = launch(
        written(tmp_path, case), case.processes, "causal_lm", tmp_path / "run", expect=None, model_name_or_path=tiny / "llama",
        train_file=tiny / "text.txt", format="text", validation_split_percentage=0, block_size=32, **flags,
    )  # fmt: skip
    if case.refused_by_launcher:
        assert run.returncode and not run.steps and "ConfigError" not in run.text
    elif case.said is None:
        assert run.returncode == 0 and [step["step"] for step in run.steps] == [1], run.text[-2000:]
    else:
        assert run.returncode and not run.steps and "Traceback" not in run.text.partition("ConfigError")[0]
        assert "ConfigError" in run.text and case.said in " ".join(run.text.split()), run.text[-2000:]


@pytest.mark.launch
@pytest.mark.full
def test_a_dry_run_prints_what_becomes_of_each_key(tmp_path, tiny):
    file = written(tmp_path, CORPUS["fsdp 2, keys of version 1"])
    run = launch(
        file, 2, "causal_lm", tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "text.txt", dry_run=True,
    )  # fmt: skip
    said = " ".join(run.text.split())
    assert "FSDP2 always keeps" in said
    assert not (tmp_path / "run").exists()


def said_by_doctor(file, processes, tiny, output, *flags) -> list[str]:
    """Return the problems of a launch of `causal_lm`."""
    line = ["--config_file", str(file), "--num_processes", str(processes), str(ROOT / "recipes" / "causal_lm.py")]
    line += ["--model_name_or_path", str(tiny / "llama"), "--train_file", str(tiny / "text.txt"), "--format", "text"]
    plan, problems, _, _ = inspect_launch([*line, "--output_dir", str(output), *flags], Hardware())
    return problems + (plan.problems if plan else [])


class Watched(dict):
    """A dictionary that notes which keys were looked for."""

    def __init__(self, items):
        super().__init__(items)
        self.requested = set()

    def get(self, key, default=None):
        self.requested.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.requested.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.requested.add(key)
        return super().__contains__(key)

    def keys(self):
        return self


def test_every_key_of_the_installed_deepspeed_has_been_looked_at():
    """If this fails, a new version of DeepSpeed reads another key: see what it does, and enter it where it belongs."""
    from deepspeed.runtime.config import DeepSpeedConfig

    sections = {key: Watched({}) for key in deepspeed_keys.KNOWN_KEYS if key}
    root = Watched(dict.fromkeys(deepspeed_keys.INTEGER_KEYS, 1) | {"zero_optimization": {"stage": 2}} | sections)
    DeepSpeedConfig(root)

    listed = [deepspeed_keys.KNOWN_KEYS[""], set(deepspeed_keys.REFUSED), set(deepspeed_keys.WITHOUT_EFFECT)]
    assert root.requested | deepspeed_keys.KEYS_READ_ELSEWHERE == set().union(*listed)
    assert {key: section.requested for key, section in sections.items()} == {
        key: deepspeed_keys.KNOWN_KEYS[key] for key in sections
    }


ODD = [None, True, False, -1, 0, 2, 1e9, 0.5, "", "auto", "two", "true", [], [1], {}, {"device": "cpu"}, {"enabled": True}]
"""Values that keys do not expect."""


def places(content, path=()):
    """Yield the path of every key of nested objects."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def mutated(content: dict, luck: random.Random) -> dict:
    """Return a copy with one change: another value, a typo, a key removed, or a section inside of another."""
    content = json.loads(json.dumps(content))
    *above, leaf = luck.choice(list(places(content)))
    inside = content
    for key in above:
        inside = inside[key]
    how = luck.choice(["value", "value", "typo", "removed", "nested"])
    value = inside[leaf]
    if how == "value":
        inside[leaf] = luck.choice(ODD)
    else:
        del inside[leaf]
        at = luck.randrange(len(leaf))
        if how == "typo":
            inside[leaf[:at] + luck.choice("xyz") + leaf[at + 1 :]] = value
        elif how == "nested":
            inside[luck.choice(list(content) or ["more"])] = {leaf: value}
    return content


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 40 else pytest.mark.full) for seed in range(200)])
def test_a_changed_file_ends_in_problems_or_in_none(seed, tmp_path, tiny, monkeypatch):
    """Never in a traceback. A key that DeepSpeed or accelerate would drop is a problem."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    luck = random.Random(seed)
    base = yaml.safe_load(luck.choice(sorted((ROOT / "accelerate_configs").glob("*.yaml"))).read_text())
    named = (base.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if named:
        settings = json.loads((ROOT / named).read_text())
        settings = mutated(settings, luck) if luck.random() < 0.7 else settings
        text = json.dumps(settings)
        if luck.random() < 0.1:
            text = text.replace("{", '{"zero_optimization": {}, ', 1)  # a key that stands twice
        (tmp_path / "ds.json").write_bytes(text.encode(luck.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16"])))
        base["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "ds.json")
    if not named or luck.random() < 0.5:
        base = mutated(base, luck)
    (tmp_path / "strategy.yaml").write_text(yaml.safe_dump(base))
    for problem in said_by_doctor(tmp_path / "strategy.yaml", luck.choice([1, 2, 4]), tiny, tmp_path / "run"):
        assert problem.strip()
