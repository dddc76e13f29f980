"""The comparison of hosts before a run: what is refused, what is a warning, and what may differ."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from recipes.causal_lm import CausalLMConfig
from tests.harness import ROOT
from zerobook.errors import ConfigError
from zerobook.launch import accelerate_cli, host_check, links
from zerobook.launch.preflight import check, check_data, code, differences, facts


@pytest.fixture(scope="module")
def host():
    return facts(CausalLMConfig(model_name_or_path="gpt2", dataset_name="wikitext"), "ZeRO-3") | {"host": "a"}


def others(host, **changes):
    """Three hosts, of which the last differs by ``changes``: a dotted key to its value."""
    found = [copy.deepcopy(host) | {"host": name} for name in "abc"]
    for dotted, value in changes.items():
        *path, key = dotted.split("__")
        place = found[2]
        for part in path:
            place = place[part]
        place[key] = value
    return found


def test_equal_hosts_are_not_mentioned(host):
    assert differences(others(host)) == ([], [])
    assert differences([host]) == ([], [])


@pytest.mark.parametrize("change, said", [
    ({"versions__torch": "1.0"}, r"version of torch: \S+ on a, b; 1.0 on c. Install"),
    ({"code__zerobook": "123"}, r"code of zerobook: \w{12} on a, b; 123 on c. Update"),
    ({"config__learning_rate": 1.0}, r"config: learning_rate: 5e-05 on a, b; 1.0 on c. Start"),
    ({"config__hooks": ["x.py:Y"]}, r"config: hooks: \[\] on a, b; \['x.py:Y'\] on c"),
    ({"strategy": "DDP"}, "strategy: ZeRO-3 on a, b; DDP on c"),
])  # fmt: skip
def test_what_would_train_something_else_is_refused(host, change, said):
    problems, warnings = differences(others(host, **change))
    assert len(problems) == 1 and not warnings
    assert re.match(said, problems[0]), problems


@pytest.mark.parametrize("change, said", [
    ({"environment__NCCL_ALGO": "Tree"}, "environment variable NCCL_ALGO: not set on a, b; Tree on c."),
    ({"gpus": "8 x H100"}, "GPUs: none on a, b; 8 x H100 on c."),
    ({"driver": "550"}, "GPU driver: "), ({"cores": 1024}, "CPU cores: "), ({"disk_free": 10**6}, "free disk"),
    ({"memory_free": 10**6}, "free memory: 1.00 MB on c and "), ({"clock": 1e6}, "clocks: "),
])  # fmt: skip
def test_what_makes_a_run_slow_or_hard_to_read_is_a_warning(host, change, said):
    problems, warnings = differences(others(host, **change))
    assert not problems and len(warnings) == 1 and warnings[0].startswith(said), warnings


@pytest.mark.parametrize(("clock", "said"), [(-40, "a is 40 s ahead of c"), (40, "c is 40 s ahead of a"), (20, None)])
def test_the_clock_that_is_ahead_is_named(host, clock, said):
    _, warnings = differences(others(host, clock=host["clock"] + clock))
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


class Hosts(SimpleNamespace):
    """Rank 0 of a run on several hosts, of which the others send ``sent``."""

    is_main = True

    def barrier(self):
        pass

    def gather(self, value):
        return [value, *self.sent]


@pytest.mark.parametrize("nodes", [1, 2])
def test_prepared_data_is_compared_where_there_are_several_hosts(nodes):
    strategy = Hosts(nodes=nodes, sent=[{"host": "b", "data": {"train": "2"}}])
    with pytest.raises(ConfigError, match="train: the fingerprint") if nodes > 1 else nullcontext():
        check_data(strategy, {"train": "1"})
    check_data(Hosts(nodes=nodes, sent=[{"host": "b", "data": {"train": "1"}}]), {"train": "1"})


@pytest.mark.parametrize("nodes", [1, 2])
def test_hosts_are_compared_where_there_are_several(nodes, host):
    other = copy.deepcopy(host) | {"host": "b", "strategy": "DDP"}
    config = CausalLMConfig(model_name_or_path="gpt2", dataset_name="wikitext")
    strategy = Hosts(nodes=nodes, sent=[other], plan=SimpleNamespace(name="ZeRO-3"))
    with pytest.raises(ConfigError, match="strategy: ZeRO-3 on") if nodes > 1 else nullcontext():
        check(strategy, config)


def test_two_hosts_of_one_name_are_told(host):
    assert "a is the name of several hosts" in differences([host, host])[1][0]


def test_many_hosts_make_short_sentences(host):
    hosts = [copy.deepcopy(host) | {"host": f"node{number:04d}"} for number in range(1024)]
    hosts[700]["versions"]["torch"] = "1.0"
    (problem,), _ = differences(hosts)
    assert "node0003 and 1019 more; 1.0 on node0700" in problem and len(problem) < 300


def test_a_changed_file_changes_the_code(tmp_path):
    recipe = tmp_path / "own.py"
    recipe.write_text("1")
    before = code(recipe)
    recipe.write_text("2")
    after = code(recipe)
    assert before["own.py"] != after["own.py"] and before["zerobook"] == after["zerobook"]


def measured(*rates, core_wait=0.0):
    return [(10**8, 1e8 / rate, core_wait) for rate in rates]


def test_slow_links_are_compared_with_links_of_their_kind():
    between, inside = links.build_links(["a", "a", "b", "b"], measured(1e9, 8e9, 1e8, 4e9))
    assert [link[:3] for link in between] == [("b", "a", 1e9), ("a", "b", 1e8)]
    assert [link[:3] for link in inside] == [("a", "a", 8e9), ("b", "b", 4e9)]
    (said,) = links.warn_of_slow_links(between)
    assert said.startswith("slow link: a sends 800 Mbit/s to b; the fastest link has 8.00 Gbit/s")
    assert not links.warn_of_slow_links(inside)
    rates = ("800 Mbit/s to 8.00 Gbit/s", "32.0 Gbit/s to 64.0 Gbit/s")
    assert links.summarize(between, inside) == f"links between hosts: {rates[0]}, inside hosts: {rates[1]}"


def test_a_link_of_a_busy_host_is_not_called_slow():
    """The second message took a second, in which the sending process waited for a core nearly all the time."""
    idle, busy = measured(1e9, 1e8), measured(1e9, core_wait=0.8) + measured(1e8)
    assert links.warn_of_slow_links(links.build_links(["a", "b"], idle)[0])
    between, _ = links.build_links(["a", "b"], busy)
    assert between[1].rate == 1e8 and not links.warn_of_slow_links(between)


MEASURE = """
import json, sys, time
import torch, torch.distributed as dist
from zerobook.launch import links
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
send, messages = dist.batch_isend_irecv, []
def delayed(operations):
    # The first message, and one of the later ones.
    if len(messages) in (0, 6):
        time.sleep(1)
    messages.append(operations[0].tensor.numel())
    return send(operations)
dist.batch_isend_irecv = delayed
print(json.dumps([links.measure_ring(torch.device("cpu")), messages]))
dist.barrier()
"""


def test_neither_the_first_message_nor_a_single_slow_one_makes_a_link_slow(tmp_path):
    """NCCL connects ranks at their first message. Two processes over gloo, where the first and a later message wait."""
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "store"), str(rank)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    for rank in ranks:
        measurement, messages = json.loads(rank.communicate(timeout=100)[0])
        assert measurement[0] > links.PROBE_BYTES, "the payload follows the measured probe, not the first message"
        assert measurement[1] < 0.5 and measurement[0] == messages[-1]


@pytest.mark.parametrize("flags, said", [
    (["--num_machines", "1"], "num_machines is 1"),
    (["--num_machines", "2"], "main_process_ip is None"),
])  # fmt: skip
def test_a_place_that_there_is_not_is_refused_before_any_connection(flags, said):
    with pytest.raises(ConfigError, match=said):
        host_check.place(["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml"), *flags])


@pytest.mark.parametrize(
    ("device", "kind", "restarts", "is_told"),
    [("cpu", "ddp", "0", True), ("cuda", "fsdp", "0", True), ("cuda", "ddp", "3", True), ("cuda", "ddp", "0", False)],
)
def test_a_host_name_on_loopback_is_told_where_gloo_is_used(monkeypatch, device, kind, restarts, is_told):
    """Debian writes 127.0.1.1 for the host's name. Groups that ranks form again after a restart have gloo beside NCCL."""
    monkeypatch.setattr(accelerate_cli.socket, "getaddrinfo", lambda *_: [(None, None, None, None, ("127.0.1.1", 0))])
    plan = SimpleNamespace(device=device, kind=kind, backend="nccl", world_size=16)
    environ = {"LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": restarts}
    note = accelerate_cli.describe_unreachable_host(plan, environ)
    assert (note is not None and "127.0.1.1" in note) == is_told
