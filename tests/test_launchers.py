"""The launch scripts for clusters, against stubs of the commands that they call."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from zerobook.constants import STOPPED
from zerobook.errors import ConfigError
from zerobook.health import watch
from zerobook.monitor import preemption

ROOT = Path(__file__).resolve().parents[1]
SLURM, SSH = ROOT / "scripts" / "slurm" / "train.sbatch", ROOT / "scripts" / "launch.sh"
RECIPE, CONFIG, STRATEGY = "recipes/causal_lm.py", "recipes/configs/causal_lm_gpt2_xl.yaml", "accelerate_configs/zero3.yaml"
JOB = [RECIPE, CONFIG, STRATEGY, "--max_train_steps", "5"]
STUBS = {
    # starts node.sh once for every node, and sends signals on, as srun does
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
echo "$SRUN_CPUS_PER_TASK" >> "$RECORD/srun"
nodes=()
for ((id = 0; id < SLURM_NNODES; id++)); do SLURM_NODEID=$id "$@" & nodes+=($!); done
echo "${nodes[@]}" > "$RECORD/nodes"
trap 'kill -USR1 "${nodes[@]}"' USR1
code=0
for node in "${nodes[@]}"; do
  wait "$node" || code=$? # also if it has ended already
  while kill -0 "$node" 2>/dev/null; do wait "$node" || code=$?; done
done
exit $code
""",
    "scontrol": """#!/bin/bash
case "$1 $2" in
"show hostnames") printf 'node-a\\nnode-b\\n' ;;
"show job") echo "   JobState=COMPLETING Reason=$REASON Dependency=(null)" ;;
*) echo "$@" >> "$RECORD/scontrol" ;;
esac
""",
    # two ranks that save at SIGUSR1 and end with 75, as their launcher then does
    "zerobook": f"""#!{sys.executable}
import os, signal, subprocess, sys
rank = "import os,signal,sys,time\\nfile=sys.argv[1]\\ndef save(*_):\\n  open(file,'a').write('saved ');sys.exit(75)\\n"
rank += "signal.signal(signal.SIGUSR1,save)\\nopen(file,'a').write('ready ')\\ntime.sleep(float(os.environ['LASTS']))\\n"
record = os.environ["RECORD"]
machine = sys.argv[sys.argv.index("--machine_rank") + 1]
with open(f"{{record}}/launches-{{machine}}", "a") as file:
    file.write("launch\\n")
with open(f"{{record}}/launch-{{machine}}", "w") as file:
    file.write("\\n".join(sys.argv[1:]))
with open(f"{{record}}/variables-{{machine}}", "w") as file:
    file.write("\\n".join(f"{{name}}={{value}}" for name, value in os.environ.items()))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
ranks = [subprocess.Popen([sys.executable, "-c", rank, f"{{record}}/rank-{{machine}}-{{i}}"]) for i in range(2)]
codes = [r.wait() for r in ranks]
sys.exit(max(*codes, int(os.environ.get("CODE", 0))))
""",
    "ssh": """#!/bin/bash
[[ $1 == -tt ]] && shift
echo "$1" >> "$RECORD/hosts"
# It passes no variables on. The stubs find what they need in these.
exec env -i RECORD="$RECORD" LASTS="$LASTS" HOME="$HOME" bash -c "$2"
""",
}  # fmt: skip


@pytest.fixture
def stubs(tmp_path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2"}
    return os.environ | slurm | {
        "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(tmp_path), "LASTS": "0.2", "PROCESSES_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "64", "REASON": "None",
    }  # fmt: skip


def test_slurm_starts_a_launcher_on_every_node(tmp_path, stubs):
    done = subprocess.run(["bash", SLURM, *JOB], cwd=ROOT, env=stubs, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [(tmp_path / f"launch-{machine}").read_text().split("\n") for machine in (0, 1)]
    for machine, line in enumerate(lines):
        said = " ".join(line)
        assert said.startswith("launch --config_file accelerate_configs/zero3.yaml --num_machines 2 --num_processes 4 ")
        assert f"--machine_rank {machine} --main_process_ip node-a --main_process_port 24711 {RECIPE}" in said
        assert said.endswith(f"{RECIPE} --config {CONFIG} --resume_from_checkpoint auto --max_train_steps 5")
    assert (tmp_path / "srun").read_text() == "64\n", "srun does not take the job's cores by itself"
    assert not (tmp_path / "scontrol").exists(), "a run that is done is not queued again"


SMI = """#!/bin/bash
echo "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)"
echo "  MIG 3g.20gb     Device  0: (UUID: MIG-1)"
echo "  MIG 3g.20gb     Device  1: (UUID: MIG-2)"
echo "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)"
"""


@pytest.mark.parametrize("visible, processes", [(None, 2), ("0,1,2,3", 4), ("GPU-1", 1), ("MIG-1,MIG-2", 1), ("", 1)])
def test_slurm_starts_a_process_for_each_gpu_of_the_job_and_none_for_mig_instances(tmp_path, stubs, visible, processes):
    smi = Path(stubs["PATH"].split(":")[0]) / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    for name in ("PROCESSES_PER_NODE", "CUDA_VISIBLE_DEVICES"):
        stubs.pop(name, None)
    if visible is not None:
        stubs["CUDA_VISIBLE_DEVICES"] = visible
    subprocess.run(["bash", SLURM, *JOB], cwd=ROOT, env=stubs, check=True, timeout=60)
    words = (tmp_path / "launch-0").read_text().split("\n")
    assert words[words.index("--num_processes") + 1] == str(2 * processes)


@pytest.mark.parametrize("code, launches", [(3, 4), (77, 4), (2, 1), (76, 1)])
def test_slurm_starts_a_failed_run_again_unless_a_person_is_needed(tmp_path, stubs, code, launches):
    done = subprocess.run(["bash", SLURM, *JOB], cwd=ROOT, env=stubs | {"CODE": str(code)}, timeout=60)
    assert done.returncode == code
    for machine in (0, 1):
        assert (tmp_path / f"launches-{machine}").read_text() == "launch\n" * launches
    assert not (tmp_path / "scontrol").exists()


def test_slurm_queues_a_run_again_that_somebody_else_has_warned(tmp_path, stubs):
    done = subprocess.run(["bash", SLURM, *JOB], cwd=ROOT, env=stubs | {"CODE": "75"}, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"


def test_slurm_gives_each_task_of_an_array_its_number(tmp_path, stubs):
    line = ["bash", SLURM, *JOB, "--seed", "%a", "--output_dir", "outputs/seed-%a"]
    done = subprocess.run(line, cwd=ROOT, env=stubs | {"SLURM_ARRAY_TASK_ID": "3"}, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "launch-0").read_text().endswith("--seed\n3\n--output_dir\noutputs/seed-3")


@pytest.mark.parametrize("script", ["slurm", "ssh"])
@pytest.mark.parametrize("has_venv", [True, False])
def test_the_environment_of_the_clone_is_used_where_no_other_is_active(tmp_path, stubs, script, has_venv):
    """The clone here is a folder with the files that the scripts look for."""
    clone = tmp_path / "clone"
    for name in (RECIPE, CONFIG, STRATEGY, "scripts/slurm/node.sh", "scripts/slurm/train.sbatch", "scripts/launch.sh"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    stub = Path(stubs["PATH"].split(":")[0]) / "zerobook"
    if has_venv:
        (clone / ".venv" / "bin").mkdir(parents=True)
        stub.rename(clone / ".venv" / "bin" / "zerobook")
    else:
        stub.unlink()
    (clone / "hosts").write_text("10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    line = {"slurm": ["bash", "scripts/slurm/train.sbatch", *JOB], "ssh": ["bash", "scripts/launch.sh", "hosts", *JOB]}[script]
    environment = stubs | {"PATH": f"{stub.parent}:/usr/bin:/bin", "PWD": str(clone)}
    done = subprocess.run(line, cwd=clone, env=environment, capture_output=True, text=True, timeout=60)
    if has_venv:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "launch-1").exists()
    else:
        assert done.returncode == 2
        assert "zerobook is not on PATH" in done.stderr
        assert f"{clone}/.venv" in done.stderr


def test_slurms_warning_reaches_all_ranks_and_the_job_is_queued_again(tmp_path, stubs):
    with subprocess.Popen(["bash", SLURM, *JOB], cwd=ROOT, env=stubs | {"LASTS": "60"}) as job:
        ranks = [tmp_path / f"rank-{machine}-{rank}" for machine in (0, 1) for rank in (0, 1)]
        wait_for(ranks)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 0
    assert [file.read_text() for file in ranks] == ["ready saved "] * 4
    for machine in (0, 1):
        assert (tmp_path / f"launches-{machine}").read_text() == "launch\n", "the run was not started again"
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"


@pytest.mark.parametrize("reason, is_queued_again", [("None", False), ("TimeLimit", True)])
def test_a_slurm_job_saves_at_sigterm_and_is_queued_again_only_at_the_end_of_its_time(tmp_path, stubs, reason, is_queued_again):
    """With proctrack/cgroup, Slurm sends SIGTERM to the batch script and to the tasks, and to none of their processes."""
    with subprocess.Popen(["bash", SLURM, *JOB], cwd=ROOT, env=stubs | {"LASTS": "60", "REASON": reason}) as job:
        ranks = [tmp_path / f"rank-{machine}-{rank}" for machine in (0, 1) for rank in (0, 1)]
        wait_for(ranks)
        job.send_signal(signal.SIGTERM)
        for node in (tmp_path / "nodes").read_text().split():
            os.kill(int(node), signal.SIGTERM)
        assert job.wait(30) == 75
    assert [file.read_text() for file in ranks] == ["ready saved "] * 4
    commands = tmp_path / "scontrol"
    assert (commands.read_text() if commands.exists() else "") == ("requeue 4711\n" if is_queued_again else "")


def test_slurm_jobs_meet_at_a_port_that_no_connection_takes(tmp_path, stubs):
    """Linux takes ports from 32768 on for connections, unless it is told otherwise."""
    for number in ("12767", "12768", "31999"):
        subprocess.run(["bash", SLURM, *JOB], cwd=ROOT, env=stubs | {"SLURM_JOB_ID": number}, check=True, timeout=60)
        words = (tmp_path / "launch-0").read_text().split("\n")
        assert 20_000 <= int(words[words.index("--main_process_port") + 1]) < 32_768


def wait_for(files: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("words, why", [([], "usage"), ([*JOB[:2], "nowhere.yaml"], "nowhere.yaml: no such file in")])
def test_slurm_refuses_what_cannot_run(stubs, words, why):
    done = subprocess.run(["bash", SLURM, *words], cwd=ROOT, env=stubs, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and why in done.stderr


def test_a_launcher_on_every_host_of_a_file(tmp_path, stubs):
    (tmp_path / "hosts").write_text("")
    file = tmp_path / "hostfile"
    file.write_text("# ours\n10.0.0.1 slots=2\n\n10.0.0.2 slots=2")
    line = ["bash", SSH, file, *JOB[:3], "--run_name", "two words"]
    environment = stubs | {"NCCL_SOCKET_IFNAME": "eth 0", "HF_TOKEN": "secret"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "hosts").read_text().split()) == ["10.0.0.1", "10.0.0.2"]
    for machine in (0, 1):
        words = (tmp_path / f"launch-{machine}").read_text().split("\n")
        assert words[-2:] == ["--run_name", "two words"]
        said = " ".join(words)
        assert f"--num_machines 2 --num_processes 4 --machine_rank {machine} --main_process_ip 10.0.0.1" in said
        variables = (tmp_path / f"variables-{machine}").read_text().split("\n")
        assert {"NCCL_SOCKET_IFNAME=eth 0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600"} <= set(variables)
        assert not any(variable.startswith("HF_TOKEN") for variable in variables)


def test_a_host_that_fails_ends_the_others(tmp_path, stubs):
    file = tmp_path / "hostfile"
    file.write_text("10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    ssh = Path(stubs["PATH"].split(":")[0]) / "ssh"
    ssh.write_text(STUBS["ssh"].replace("exec env", "[[ $1 == 10.0.0.2 ]] && { sleep 1; exit 9; }\nexec env"))
    begun = time.monotonic()
    done = subprocess.run(["bash", SSH, file, *JOB], cwd=ROOT, env=stubs | {"LASTS": "50"}, timeout=40)
    assert done.returncode == 9 and time.monotonic() - begun < 30


TERMINAL = f"""#!{sys.executable}
import os, pty, select, sys
host, command = sys.argv[2:4]
child, terminal = pty.fork()
if child == 0:
    os.execvp("bash", ["bash", "-c", "HOST_NAME=" + host + "; export HOST_NAME; " + command])
watched = [0, terminal]
while True:
    for file in select.select(watched, [], [])[0]:
        try:
            data = os.read(file, 4096)
        except OSError:  # the terminal's last process has ended
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if not data:
            watched.remove(file)
        os.write(1 if file == terminal else terminal, data)
"""
"""ssh -tt: the command has a terminal, to which what is typed goes."""
SAVES = f"""#!{sys.executable}
import os, signal, sys, time
host = os.environ["HOST_NAME"]
def save(*_):
    time.sleep(0 if host == "10.0.0.1" else 2)
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, save)
open(os.environ["RECORD"] + "/ready-" + host, "w").close()
time.sleep(60)
"""


def _heed_interrupts() -> None:
    """A shell that is started in the background ignores Ctrl-C, and cannot trap it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_reaches_the_launchers_of_all_hosts_and_each_has_time_to_save(tmp_path, stubs):
    file = tmp_path / "hostfile"
    file.write_text("10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    folder = Path(stubs["PATH"].split(":")[0])
    (folder / "ssh").write_text(TERMINAL)
    (folder / "zerobook").write_text(SAVES)
    line = ["bash", SSH, file, *JOB]
    with subprocess.Popen(line, cwd=ROOT, env=stubs, stdout=subprocess.PIPE, text=True, start_new_session=True,
                          preexec_fn=_heed_interrupts) as script:  # fmt: skip
        wait_for([tmp_path / f"ready-10.0.0.{number}" for number in (1, 2)])
        # A terminal sends it to all processes in its foreground.
        os.killpg(script.pid, signal.SIGINT)
        printed, _ = script.communicate(timeout=40)
    assert script.returncode == 130
    for number in (1, 2):
        assert f"10.0.0.{number}: saved" in printed.replace("^C", "")


@pytest.mark.parametrize("content, why", [
    ("", "no hosts"), ("a 8\n", "'a 8' is not of the form"), ("a slots=2\nb slots=4\n", "b has 4 processes and a has 2"),
])  # fmt: skip
def test_a_hostfile_that_cannot_be_used_is_refused(tmp_path, stubs, content, why):
    file = tmp_path / "hostfile"
    file.write_text(content)
    done = subprocess.run(["bash", SSH, file, *JOB], cwd=ROOT, env=stubs, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and why in done.stderr


# --- manifests
def launched(command: list[str], stubs: dict[str, str], tmp_path: Path, **environment: str) -> str:
    """Run a manifest's command with a stub of zerobook; return what it launched on machine 1."""
    done = subprocess.run(command, cwd=ROOT, env=stubs | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return " ".join((tmp_path / "launch-1").read_text().split("\n"))


def manifest(name: str) -> dict:
    return yaml.safe_load((ROOT / "scripts" / name).read_text())


def check_manifest(said: str, main: str, output: str, given: dict[str, str]) -> None:
    launch = f"launch --config_file {given['STRATEGY']} --num_machines 2 --num_processes 16 --machine_rank 1"
    assert said.startswith(f"{launch} --main_process_ip {main} --main_process_port 29500 {given['RECIPE']} ")
    assert said.endswith(f"--config {given['CONFIG']} --output_dir {output} --resume_from_checkpoint auto")
    assert all((ROOT / given[name]).is_file() for name in ("RECIPE", "CONFIG", "STRATEGY"))


def test_the_jobset_is_valid_and_starts_a_launcher_in_every_pod(stubs, tmp_path):
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    content = manifest("kubernetes/jobset.yaml")
    assert JobsetV1alpha2JobSet.from_dict(content).to_dict() == content, "a key that JobSet does not have would be lost"
    job = content["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    said = launched([*container["command"], *container["args"]], stubs, tmp_path, JOB_COMPLETION_INDEX="1", **given)
    check_manifest(said, "zerobook-node-0-0.zerobook", "/shared/run", given)
    assert job["parallelism"] == job["completions"] == int(given["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["GPUS"])


def test_the_jobset_leaves_ranks_the_time_to_save():
    """torchrun kills its ranks 30 s after SIGTERM, or after the seconds of this variable."""
    content = manifest("kubernetes/jobset.yaml")
    pod = content["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert 60 <= int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


def test_a_pod_of_the_jobset_that_starts_again_finds_its_model_and_its_data():
    """Without the model, a restart while the hub does not answer would be refused for good."""
    content = manifest("kubernetes/jobset.yaml")
    pod = content["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    program = "from huggingface_hub import constants; from zerobook.data import embedded; "
    program += "print(constants.HF_HUB_CACHE, embedded.cache_dir())"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | given
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    folders = done.stdout.split()
    (volume,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared"]
    assert len(folders) == 2
    assert all(folder.startswith(f"{volume}/") for folder in folders)


@pytest.mark.parametrize(
    "code, action",
    [
        (preemption.EXIT_CODE, "RestartJobSetAndIgnoreMaxRestarts"),
        (128 + signal.SIGTERM, "RestartJobSetAndIgnoreMaxRestarts"),
        (ConfigError.exit_code, "FailJobSet"),
        (STOPPED, "FailJobSet"),
        (1, "RestartJobSet"),
        (watch.EXIT_CODE, "RestartJobSet"),
    ],
)
def test_what_the_jobset_does_when_a_pod_ends(code, action):
    """Kubernetes and JobSet apply the first rule that matches."""
    spec = manifest("kubernetes/jobset.yaml")["spec"]
    (pod_rule, evicted) = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    if code in pod_rule["onExitCodes"]["values"]:
        reason = "PodFailurePolicy"
    else:
        reason = "BackoffLimitExceeded"
    # The form of the message is that of Kubernetes' controller of jobs.
    message = (
        f"Container ranks for pod default/zerobook-node-0-0-x failed with exit code {code} matching FailJob rule at index 0"
    )
    matching = []
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            matching.append(rule["action"])
    # Without a rule, JobSet restarts and counts.
    assert [*matching, "RestartJobSet"][0] == action


def test_the_skypilot_task_starts_a_launcher_on_every_machine(stubs, tmp_path):
    content = manifest("skypilot.yaml")
    machine = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    folder = Path(stubs["PATH"].split(":")[0])
    run = content["run"].replace("$PWD/.venv/bin", str(folder))
    said = launched(["bash", "-c", run], stubs, tmp_path, SKYPILOT_NUM_GPUS_PER_NODE="8", **machine, **content["envs"])
    check_manifest(said, "10.0.0.1", content["envs"]["OUTPUT"], content["envs"])
    recovery = content["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [preemption.EXIT_CODE, 128 + signal.SIGTERM]


UV = """#!/bin/bash
[[ -d .venv && " $* " != *" --allow-existing "* ]] && { echo "a virtual environment already exists" >&2; exit 2; }
mkdir -p .venv/bin
printf '#!/bin/bash\\necho "$@" >> installed\\n' > .venv/bin/pip
chmod +x .venv/bin/pip
"""
"""Makes an environment as uv does, which refuses to make it a second time."""


def test_the_skypilot_task_sets_a_machine_up_again_and_leaves_its_own_python_alone(tmp_path):
    folder = tmp_path / ".local" / "bin"
    folder.mkdir(parents=True)
    for name, text in {"uv": UV, "python3": "#!/bin/bash\necho 'externally-managed-environment' >&2; exit 1\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": f"{folder}:/usr/bin:/bin"}
    for _ in range(2):
        line = ["bash", "-c", manifest("skypilot.yaml")["setup"]]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "requirements.txt" in (tmp_path / "installed").read_text()


ZEROBOOK = [sys.executable, "-m", "zerobook.cli.main"]
DDP = ["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml")]


@pytest.mark.parametrize("codes", [[1, 1, 1], [2], [STOPPED], [1, STOPPED], [1, 2, 2]])
def test_ranks_are_started_again_but_where_another_start_would_end_alike(codes, tmp_path):
    """Ranks that have run before may be refused for a reason that ends before another start: a lock, or another machine."""
    # Rank 1 lives until the launcher ends it.
    text = f"""
import os, time
if os.environ["RANK"] == "1":
    time.sleep(60)
print("started", flush=True)
raise SystemExit({codes}[int(os.environ['TORCHELASTIC_RESTART_COUNT'])])
"""
    (tmp_path / "failing.py").write_text(text)
    flags = [*DDP, "--num_processes", "2", "--main_process_port", "0", "--max_restarts", "2", "--monitor_interval", "0.1"]
    done = subprocess.run(
        [*ZEROBOOK, "launch", *flags, str(tmp_path / "failing.py")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("started") == len(codes), done.stderr
    assert done.returncode == codes[-1]


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())  # one write: the other rank writes too
time.sleep(100)
"""


def test_a_launcher_that_gets_a_second_signal_leaves_no_rank_behind(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    line = [*ZEROBOOK, "launch", *DDP, "--num_processes", "2", "--main_process_port", "0", str(tmp_path / "stubborn.py")]
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    with subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGTERM)
        time.sleep(1)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
        assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


SLOW_SAVE = """
import os, signal, sys, time
def save(*_):
    time.sleep(5)
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print(os.environ["WORLD_SIZE"], flush=True)
time.sleep(int(os.environ["WORLD_SIZE"]) == 1 and 60)
"""


@pytest.mark.parametrize("seconds, saves", [("60", True), ("1", False)])
def test_ranks_have_the_seconds_of_the_variable_if_a_machine_joins(seconds, saves, tmp_path):
    (tmp_path / "saving.py").write_text(SLOW_SAVE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    line = [*ZEROBOOK, "launch", "--min_machines", "1", *DDP, "--num_machines", "2", "--num_processes", "2"]
    line += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank"]
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}
    launchers = []
    try:
        for rank in ("0", "1"):
            launchers.append(
                subprocess.Popen(
                    [*line, rank, str(tmp_path / "saving.py")], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
                    start_new_session=True,
                )
            )  # fmt: skip
            if rank == "0":
                assert launchers[0].stdout.readline() == "1\n"
        said = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert ("saved" in said[0]) == saves
    assert all("2\n" in text for text in said), "both go on together"


SAVING = """
import os, signal, sys, time
def save(*_):
    signals.append("saved")
    time.sleep(1)
    # Not print: the signal may come in the print below.
    os.write(1, (" ".join(signals) + "\\n").encode())
    sys.exit(75)
signals = []
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
print("begun", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number, send", [(signal.SIGTERM, os.kill), (signal.SIGINT, os.kill), (signal.SIGINT, os.killpg)])
def test_a_launcher_of_one_process_ends_with_it_and_not_before(number, send, tmp_path):
    """Docker, Kubernetes and ``kill`` send a signal to the launcher alone, a terminal SIGINT to both: the process gets one."""
    (tmp_path / "saving.py").write_text(SAVING)
    single = str(ROOT / "accelerate_configs" / "single.yaml")
    command = [sys.executable, "-m", "zerobook.cli.main", "launch", "--config_file", single, str(tmp_path / "saving.py")]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert launcher.stdout.readline() == "begun\n"
        send(launcher.pid, number)
        assert launcher.wait(60) == preemption.EXIT_CODE
        assert launcher.stdout.read() == "saved\n"
    finally:
        # A process that its launcher has left behind, too.
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch")]
    assert len(scripts) >= 3
    done = subprocess.run(["shellcheck", "--shell=bash", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
