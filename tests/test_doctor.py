"""Reading of the launcher's flags and its YAML by doctor and by a worker. Mistakes there are named, never a traceback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.harness import ROOT
from zerobook.cli.doctor import doctor, inspect_launch
from zerobook.cli.main import main
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch import account, ops
from zerobook.launch import build as launch
from zerobook.launch.accelerate_cli import has_automatic_threads, launcher_flags, read_hidden_settings
from zerobook.launch.resolve import Hardware
from zerobook.launch.worker_environment import worker_environment
from zerobook.strategy.launch_plan import LaunchPlan

ZERO3 = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
use_cpu: {use_cpu}
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: nvme
  offload_param_device: nvme
  offload_optimizer_nvme_path: /fast/optimizer
  offload_param_nvme_path: /fast/parameters
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="accelerate.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    "content, expected",
    [
        ("a: [1", "accelerate.yaml, line 1: not a valid Accelerate config"),
        (
            "num_processes: 2\nnum_processes: 4",
            "accelerate.yaml, line 2: not a valid Accelerate config: the key num_processes is given",
        ),
        ("fsdp_config:\n  version: 2\n  version: 2", "accelerate.yaml, line 3"),
        ("- 1", "expected the Accelerate config, a mapping of keys to values, found a list"),
        ("", "found a NoneType"),
        ("num_processes: 2", "A `distributed_type` must be specified"),
        (None, "accelerate.yaml: the Accelerate config cannot be read (No such file or directory)"),
    ],
)
def test_an_accelerate_config_that_cannot_work_is_named(written, tmp_path, content, expected):
    file = written(content) if content is not None else str(tmp_path / "accelerate.yaml")
    for flags in (["--config_file", file], [f"--config_file={file}"], ["--config-file", file]):
        plan, problems, _, _ = inspect_launch(flags, Hardware())
        assert plan is None
        assert len(problems) == 1 and expected in problems[0]


def test_json_and_a_flag_without_its_value(written):
    with pytest.raises(ConfigError, match=r"accelerate\.json: not a valid Accelerate config: Expecting"):
        worker_environment(["--config_file", written("{", "accelerate.json")])
    with pytest.raises(ConfigError, match="does not take --num_processes 2 --config_file"):
        worker_environment(["--num_processes", "2", "--config_file"])
    with pytest.raises(ConfigError, match="invalid int value: 'two'"):
        worker_environment(["--num_processes", "two"])


@pytest.mark.parametrize("name, code", [("zero2", 0), ("none", 1)])
def test_the_findings_as_json(capsys, name, code):
    """The same problems and exit code as in the text, and nothing else on stdout."""
    line = ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), "--num_processes", "2"]
    assert doctor([*line, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert bool(found["problems"]) == bool(code) and (found["strategy"] is None) == bool(code)
    assert doctor(line) == code
    text = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(problem.split()) in text for problem in found["problems"])


TWO_NODES = [
    "--num_processes", "4", "--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "10.0.0.1",
    "--main_process_port", "29500",
]  # fmt: skip


MANY = ["--num_machines", "2", "--num_processes", "4"]


@pytest.mark.parametrize("flags, said", [
    (["ddp", "--num_processes", "2", "--deepspeed_config_file", "ds.json"], "--deepspeed_config_file ds.json has no effect"),
    (["", "--deepspeed_config_file", "ds.json", "--num_processes", "1"], "Add --use_deepspeed"),
    (["ddp", "--num_processes", "2", "--fsdp_offload_params", "true"], "--fsdp_offload_params true has no effect"),
    (["fsdp", "--num_processes", "2", "--gradient_clipping", "0.5"], "--gradient_clipping 0.5 has no effect"),
    (["", "--num_processes", "2"], "no strategy file is named"),
    (["ddp", "--cpu", "--num_processes", "2"], "--cpu is given"),
    (["zero2", *MANY, "--machine_rank", "0", "--main_process_ip", "0.0.0.0"], "as the others reach it"),
    (["ddp", "--num_processes", "2", "--mixed_precision", "fp8"], "fp8 is not supported"),
    (["zero2", "--num_processes", "2", "--mixed_precision", "fp8"], "fp8 is not supported"),
    (["", "--mixed_precision", "fp8", "--num_processes", "1"], "fp8 is not supported"),
    (["ddp", "--num_processes", "2", "--gpu_ids", "0"], "accelerate refuses this launch"),
    (["ddp", "--num_processes", "2", "--use_deepspeed", "--use_fsdp"], "accelerate refuses this launch"),
    (["ddp", *MANY, "--machine_rank", "0"], "--main_process_ip: not given"),
    (["ddp", *MANY, "--machine_rank", "0", "--main_process_ip", "YOUR_MAIN_IP"], "this host cannot resolve it"),
    (["ddp", *MANY, "--machine_rank", "0", "--main_process_ip", "xxx.xxx.xxx.xxx"], "this host cannot resolve it"),
    (["ddp", *MANY, "--machine_rank", "2", "--main_process_ip", "10.0.0.1"], "2 machines have ranks 0 to 1"),
    (["ddp", "--num_machines", "2", "--num_processes", "5", "--machine_rank", "0", "--main_process_ip", "10.0.0.1"],
     "5 is no multiple of num_machines 2"),
    (["", "--use_deepspeed", "--zero_stage", "2", *MANY, "--machine_rank", "0", "--main_process_ip", "10.0.0.1"],
     "deepspeed_multinode_launcher is pdsh"),
])  # fmt: skip
def test_what_accelerate_would_drop_or_wait_for_is_one_problem(monkeypatch, flags, said):
    monkeypatch.chdir(ROOT)

    def resolve(name, *_):
        # Addresses need no server for names.
        if not name[0].isdigit():
            raise OSError("no such name")

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    file = ["--config_file", f"accelerate_configs/{flags[0]}.yaml"] if flags[0] else []
    plan, found, _, _ = inspect_launch([*file, *flags[1:]], Hardware())
    found += plan.problems if plan else []
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize("name, content, said", [
    ("ds.json", '{"zero_optimization": {"stage": 2}}', "zero_optimization belong to a DeepSpeed config"),
    ("run.yaml", "model_name_or_path: gpt2\nlearning_rate: 1e-4\n", "learning_rate, model_name_or_path belong to a"),
])  # fmt: skip
def test_another_programs_file_as_the_strategy_file_is_recognised(written, name, content, said):
    plan, found, _, _ = inspect_launch(["--config_file", written(content, name)], Hardware())
    assert plan is None and len(found) == 1 and said in found[0]


def test_zerobook_launch_says_what_accelerate_would_show_a_traceback_of(capsys):
    line = ["launch", "--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml"), "--mixed_precision", "fp8", "a.py"]
    assert main(line) == 2
    assert "fp8 is not supported" in " ".join(capsys.readouterr().err.split())


def test_problems_of_all_stages_are_told_at_once(written, tmp_path, tiny):
    (tmp_path / "chats.jsonl").write_text("{}")
    strategy = written("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_ofload_params: true}\n")
    recipe = [str(ROOT / "recipes" / "causal_lm.py"), "--train_file", str(tmp_path / "chat.jsonl"), "--lerning_rate", "1"]
    recipe += ["--global_batch_size", "9", "--mixed_precision", "fp16", "--model_name_or_path", str(tiny / "llama")]
    plan, found, config, _ = inspect_launch(["--config_file", strategy, *recipe], Hardware())
    said = "\n".join(found + plan.problems)
    for words in (
        "Did you mean fsdp_offload_params?",
        "chats.jsonl?",
        "--learning_rate?",
        "no multiple",
        "fp16 does not train",
    ):
        assert words in said
    assert len(found + plan.problems) == 5 and config.global_batch_size == 9


@pytest.mark.parametrize(("flags", "hint"), [
    (["--mixed_precison=bf16", "--num_processes", "2"], "--mixed_precison: accelerate launch has no such flag. Did you mean"),
    (["--num_processes", "2", "--train_file", "x.jsonl"], "write it after the recipe"),
    (["--num_machines", "one"], "invalid int value: 'one'"),
    (["a_recipe", "--num_processes", "2"], "a_recipe: neither a flag"),
])  # fmt: skip
def test_a_wrong_flag_of_the_launcher_is_a_problem_and_the_recipe_is_checked(flags, hint, tiny):
    recipe = [str(ROOT / "recipes" / "causal_lm.py"), "--dataset_name", "d", "--model_name_or_path", str(tiny / "llama")]
    plan, found, _, _ = inspect_launch([*flags, *recipe, "--lerning_rate", "1"], Hardware())
    assert plan is None
    assert len(found) == 2 and "--learning_rate?" in found[0] and hint in found[1]


def test_zerobook_launch_tells_all_problems_of_a_line_that_cannot_start(capsys, tmp_path):
    strategy = str(ROOT / "accelerate_configs" / "zero2.yml")
    lines = {
        "recipes/causal_lm.py --lerning_rate 1": ["zero2.yaml?", "--learning_rate?"],
        "recipes/causal_lmm.py": ["zero2.yaml?", "causal_lm.py?"],
        "setup.py --lerning_rate 1": ["zero2.yaml?"],
    }
    for line, hints in lines.items():
        script, *flags = line.split()
        assert main(["launch", "--config_file", strategy, str(ROOT / script), *flags]) == 2
        told = capsys.readouterr().err
        assert [hint for hint in ("zero2.yaml?", "--learning_rate?", "causal_lm.py?") if hint in told] == hints


def test_doctor_counts_the_processes_of_one_machine(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "8", *TWO_NODES[2:]]
    plan, _, _, _ = inspect_launch(flags, Hardware(gpus=2, gpu_name="A100"))
    assert any("4 processes on this machine, which has 2 GPUs" in p for p in plan.problems)


@pytest.mark.parametrize(
    "command, expected",
    [
        (["python", "/venv/bin/accelerate", "launch", "--mixed-precision", "no", "a.py"], ["--mixed-precision", "no", "a.py"]),
        (["python", "-m", "accelerate.commands.launch", "a.py", "--x"], ["a.py", "--x"]),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "a.py"], ["a.py"]),
        (["python", "/venv/bin/accelerate-launch", "a.py"], ["a.py"]),
        (["python", "/lib/accelerate/commands/launch.py", "a.py"], ["a.py"]),
        (["bash", "-c", "make"], None),
        (["torchrun", "a.py", "--mixed_precision", "no"], None),
    ],
)
def test_the_launchers_own_flags_are_found(command, expected):
    assert launcher_flags(command) == expected


@pytest.mark.parametrize(
    "file, gpus, address, interface, said",
    [
        ("ddp", 0, "127.0.1.1", "", "resolves to 127.0.1.1"),
        ("fsdp", 2, "::1", "", "resolves to ::1"),  # gloo stands beside NCCL there
        ("fsdp", 2, None, "", "resolves to no address"),
        ("fsdp", 2, "127.0.1.1", "eth0", None),
        ("fsdp", 2, "10.0.0.1", "", None),
        ("zero2", 2, "127.0.1.1", "", None),
    ],
)
def test_a_host_name_that_others_cannot_reach_is_said(monkeypatch, file, gpus, address, interface, said):
    def addresses(name, port):
        if address is None:
            raise OSError("Name or service not known")
        return [(0, 0, 0, "", (address, 0))]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("socket.getaddrinfo", addresses)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    flags = ["--config_file", f"accelerate_configs/{file}.yaml"]
    plan, _, _, _ = inspect_launch([*flags, *TWO_NODES], Hardware(gpus=gpus, gpu_name="A100"))
    found = [note for note in plan.notes if "GLOO_SOCKET_IFNAME" in note]
    assert (len(found) == 1 and "node7" in found[0] and said in found[0]) if said else not found
    plan, _, _, _ = inspect_launch([*flags, "--num_processes", "2"], Hardware(gpus=gpus, gpu_name="A100"))
    assert not any("GLOO_SOCKET_IFNAME" in note for note in plan.notes), "one machine"


ACCELERATE = ["python", "-m", "accelerate.commands.launch"]


@pytest.mark.parametrize(
    "command, before, expected",
    [
        ([*ACCELERATE, "a.py"], {}, True),
        ([*ACCELERATE, "a.py", "--num_cpu_threads_per_process", "4"], {}, True),
        ([*ACCELERATE, "a.py"], {"OMP_NUM_THREADS": "1"}, False),
        ([*ACCELERATE, "--num_cpu_threads_per_process", "1", "a.py"], {}, False),
        (["python", "/venv/bin/torchrun", "--nproc_per_node", "2", "a.py"], {}, True),
        (["python", "-m", "torch.distributed.run", "a.py"], {"OMP_NUM_THREADS": "2"}, False),
        (["bash"], {}, False),
    ],
)
def test_threads_that_a_person_chose_stay(monkeypatch, command, before, expected):
    parent = SimpleNamespace(cmdline=lambda: command, environ=lambda: before)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parent=lambda: parent))
    assert has_automatic_threads() is expected


def test_an_optimizer_in_host_memory_gets_this_processs_share_of_the_cores(clean, written, tmp_path):
    clean.setenv("LOCAL_WORLD_SIZE", "4")
    clean.setattr(launch, "has_automatic_threads", lambda: True)
    clean.setattr(launch, "usable_cores", lambda: 22)
    config, sources = RecipeConfig(output_dir=str(tmp_path)), ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default"))
    for flags, expected in ((["--config_file", written(ZERO3.format(use_cpu="true")), "a.py"], 5), (["a.py"], None)):
        clean.setattr(launch, "parent_flags", lambda flags=flags: flags)
        for name, value in worker_environment(flags[:-1])[0].items():
            clean.setenv(name, value)
        clean.setenv("LOCAL_WORLD_SIZE", "4")
        assert launch.resolve_this_process(config, sources)[0].host_threads == expected
        for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU"):
            clean.delenv(name, raising=False)


def test_what_accelerate_does_not_hand_over(written):
    assert read_hidden_settings(["--mixed-precision", "bf16", "a.py", "--mixed_precision", "no"])[0] == "bf16"
    assert read_hidden_settings(["--mixed_precision=no", "a.py"])[0] == "no"
    assert read_hidden_settings(["a.py", "--mixed_precision", "no"])[0] is None
    file = written(ZERO3.format(use_cpu="true"))
    paths = {
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/fast/optimizer",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/fast/parameters",
    }
    assert read_hidden_settings(["--config_file", file, "a.py"]) == (None, paths | {"ACCELERATE_USE_CPU": "true"})
    _, environ = read_hidden_settings(["--config_file", file, "--offload_param_nvme_path", "/typed", "a.py"])
    assert environ["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] == "/typed"
    plan, problems, _, _ = inspect_launch(["--config_file", file], Hardware(gpus=8, gpu_name="A100"))
    assert not problems and not plan.problems
    assert (plan.kind, plan.device, plan.backend) == ("deepspeed", "cpu", "gloo")
    assert Path(plan.deepspeed_config["zero_optimization"]["offload_param"]["nvme_path"]).parent == Path("/fast/parameters")


FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
"""
INLINE_ZERO2 = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 2
use_cpu: true
deepspeed_config:
  zero_stage: 2
  gradient_clipping: 1.0
  gradient_accumulation_steps: 1
  offload_optimizer_device: none
"""


def with_each_value_replaced(content, value):
    """Yield copies of a file's content, in each of which one key, of the file or of a section, has the value."""
    for key, old in content.items():
        yield content | {key: value}
        if isinstance(old, dict):
            for name in old:
                yield content | {key: old | {name: value}}


@pytest.mark.parametrize("odd", [{}, [], None, "x", -1, True, 1.5], ids=repr)
@pytest.mark.parametrize("text", [FSDP, INLINE_ZERO2], ids=["fsdp", "zero2"])
def test_any_value_of_any_key_is_taken_or_is_a_problem(written, text, odd):
    for content in with_each_value_replaced(yaml.safe_load(text), odd):
        file = written(yaml.safe_dump(content))

        plan, problems, config, sources = inspect_launch(["--config_file", file], Hardware())

        assert plan is not None or problems
        if plan is not None and not problems and not plan.problems:
            assert account.entries(plan, config, sources, flags=["--config_file", file, "script.py"])


@pytest.mark.parametrize(
    "text, key, value",
    [
        (INLINE_ZERO2, "gradient_clipping: 1.0", "gradient_clipping: abc"),
        (FSDP, "num_processes: 2", "num_processes: null"),
        (FSDP, "mixed_precision: bf16", "mixed_precision: -1"),
    ],
)
def test_a_value_without_a_meaning_is_named(written, text, key, value):
    file = written(text.replace(key, value))

    plan, problems, _, _ = inspect_launch(["--config_file", file], Hardware())

    problems = problems + (plan.problems if plan else [])
    name, _, content = value.partition(": ")
    assert any(name in problem and (content in problem or content == "null") for problem in problems)


@pytest.fixture
def clean(monkeypatch):
    """Variables that a launch sets are put back after the test."""
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "PARALLELISM_CONFIG_DP_SHARD_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    return monkeypatch


def test_use_cpu_hides_the_gpus_before_anyone_looks(clean, written, tmp_path):
    seen = []

    def detect():
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return Hardware()

    clean.setattr(launch.Hardware, "detect", detect)
    config = RecipeConfig(output_dir=str(tmp_path))
    sources = ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default"))
    for use_cpu, expected in (("false", None), ("true", "")):
        flags = ["--config_file", written(ZERO3.format(use_cpu=use_cpu)), "a.py"]
        clean.setattr(launch, "parent_flags", lambda flags=flags: flags)
        launch.resolve_this_process(config, sources)
        assert seen[-1] == expected


@pytest.mark.parametrize("replicate, shard", [(1, 2), (2, 2)])
def test_accelerate_is_told_the_shards_that_fit_the_processes(clean, replicate, shard):
    clean.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    plan = LaunchPlan(
        kind="fsdp", world_size=replicate * shard, device="cpu", backend="gloo", precision="no", precision_source="default",
        replicate=replicate, shard=shard,
    )  # fmt: skip
    launch.set_environment(plan)
    assert os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == str(shard)


def test_deepspeed_starts_no_program_to_count_the_devices_of_a_cpu(clean):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.utils import numa

    clean.setattr(numa, "get_numa_cores", lambda: pytest.fail("it asks numactl"))
    clean.setenv("LOCAL_WORLD_SIZE", "2")
    # Put back after the test.
    clean.setenv("LOCAL_SIZE", "")
    del os.environ["LOCAL_SIZE"]
    launch.set_environment(
        LaunchPlan(kind="deepspeed", world_size=2, device="cpu", backend="gloo", precision="no", precision_source="default")
    )
    assert CPU_Accelerator().device_count() == 2


def test_ops_are_built_with_this_environments_ninja_and_kept_in_it_though_it_is_not_active(clean):
    own = os.path.dirname(sys.executable)
    clean.setenv("PATH", "/usr/bin:/bin")
    clean.setenv("TORCH_EXTENSIONS_DIR", "")
    ops.use_own_tools()
    ops.use_own_tools()
    assert os.environ["PATH"] == f"{own}:/usr/bin:/bin"
    assert os.path.dirname(os.environ["TORCH_EXTENSIONS_DIR"]) == os.path.join(sys.prefix, "torch_extensions")
    clean.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    ops.use_own_tools()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/elsewhere", "the user's word"
