"""Strategies in one process: fp32 masters, the loss scaler, clipping, skipped steps."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from recipes.causal_lm import CausalLMConfig
from tests.test_host_waits import never_waiting
from zerobook.checkpoint import state
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import Saver
from zerobook.errors import ConfigError
from zerobook.launch.resolve import Hardware
from zerobook.optimizer import AdamW
from zerobook.strategy import ReplicatedStrategy, Strategy
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.strategy.mesh import Mesh
from zerobook.strategy.norm import total_norm
from zerobook.strategy.replicas import ReplicaDifference, compare_replicas
from zerobook.strategy.zero import ZeroStrategy


class Fp16OnCpu(ReplicatedStrategy):
    """A real gradient scaler, which accelerate gives to GPUs only."""

    def prepare(self, model, config, total_steps):
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        super().prepare(model, config, total_steps)
        self.accelerator.native_amp = True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"


@pytest.fixture
def make():
    def made(kind=ReplicatedStrategy, model=None, **settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        plan = LaunchPlan(kind="single", world_size=1, device="cpu", backend=None, precision="no", precision_source="default")
        plan.optimizer = settings.get("optimizer", plan.optimizer)
        strategy = kind(Accelerator(cpu=True), plan)
        config = CausalLMConfig(model_name_or_path="x", dataset_name="x", **settings)
        strategy.prepare(model or two_layers(), config, total_steps=10)
        return strategy

    yield made
    AcceleratorState._reset_state(reset_partial_state=True)


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))


def step(strategy, before_apply=lambda strategy: None, scale=1.0):
    with strategy.micro_batch(last=True):
        strategy.backward(strategy.model(torch.full((2, 4), scale)).sum())
    seen = before_apply(strategy)
    return seen, strategy.optimizer_step(1e-2)


def test_the_norm_of_an_embedding_of_a_real_vocabulary_is_exact():
    torch.manual_seed(0)
    table, vector = torch.randn(49152, 576), torch.randn(4097)
    exact = math.sqrt(sum(t.double().square().sum().item() for t in (table, vector)))
    assert abs(total_norm([table, vector]).item() / exact - 1) < 1e-7
    assert total_norm([table.t()]).item() == pytest.approx(total_norm([table]).item(), rel=1e-7), "not contiguous"
    assert total_norm([vector, torch.full((2,), math.nan)]).isnan() and total_norm([torch.tensor([math.inf])]).isinf()
    assert total_norm([]).item() == 0


def test_the_norm_of_offloaded_gradients_stays_in_host_memory_while_their_mesh_is_of_gpus():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gradient(mesh, *placements):
        whole = TensorMeta(torch.Size([6, 4]), (4, 1), torch.float32)
        return DTensor(torch.ones(3, 4), DTensorSpec(mesh, placements, tensor_meta=whole), requires_grad=False)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        full = DeviceMesh("cuda", [0, 1, 2, 3])
        hybrid = DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
        norm = total_norm([gradient(full, Shard(0)), gradient(hybrid, Replicate(), Shard(0))])
    finally:
        dist.destroy_process_group()
    assert norm.device.type == "cpu" and norm.dtype == torch.float32
    # The fake group gives each rank a copy of this rank's values: four copies of 12 ones, and two.
    assert norm.item() == pytest.approx(math.sqrt(4 * 12 + 2 * 12))


def test_half_precision_weights_get_fp32_masters_and_frozen_ones_stay_half(make):
    model = two_layers().to(torch.bfloat16)
    model[0].requires_grad_(False)
    before = model[1].weight.detach().float().clone()
    strategy = make(model=model, learning_rate=1e-7)
    assert strategy.describe()["master_dtype"] == "float32"
    assert model[0].weight.dtype == torch.bfloat16
    with strategy.micro_batch(last=True):
        strategy.backward(model[1](torch.ones(2, 8)).sum())
    strategy.optimizer_step(1e-7)
    moved = (model[1].weight - before).abs().max()
    assert 0 < moved < 1e-5, "half precision would round so small a step away"


def test_the_norm_may_be_looked_at_before_the_step_under_a_loss_scaler(make):
    plain, scaled = make(max_grad_norm=0.5), make(Fp16OnCpu, max_grad_norm=0.5)
    _, wanted = step(plain)
    for _ in range(2):  # and again in the next step
        seen, applied = step(scaled, lambda strategy: strategy.gradient_norm())
        assert seen == applied
    assert scaled.accelerator.scaler.get_scale() == 1024.0
    again = make(Fp16OnCpu, max_grad_norm=0.5)
    seen, applied = step(again, lambda strategy: strategy.gradient_norm())
    torch.testing.assert_close(seen, wanted)
    for a, b in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_overflow_in_fp16_changes_nothing_and_counts_no_step(make):
    strategy = make(Fp16OnCpu, weight_decay=0.1)
    strategy.materialise_optimizer()
    strategy.set_optimizer_steps(6)  # as behind a resume
    step(strategy)

    def held():
        return [
            strategy.get_tensor(p, key).clone() for _, p in strategy.trainable() for key in (None, *strategy.state_shapes(p))
        ]

    before, scale = held(), strategy.accelerator.scaler.get_scale()
    _, norm = step(strategy, scale=float("inf"))
    assert not math.isfinite(norm) and strategy.optimizer_steps() == 7
    assert all(torch.equal(a, b) for a, b in zip(held(), before, strict=True))
    assert strategy.accelerator.scaler.get_scale() == scale / 2
    step(strategy)
    assert strategy.optimizer_steps() == 8 and not any(torch.equal(a, b) for a, b in zip(held(), before, strict=True))


def test_a_step_under_a_loss_scaler_does_not_wait(make):
    strategy = make(Fp16OnCpu)
    step(strategy)
    with strategy.micro_batch(last=True):
        strategy.backward(strategy.model(torch.ones(2, 4)).sum())
    before = [p.detach().clone() for p in strategy.model.parameters()]
    with never_waiting():  # raises where the host would wait
        strategy.optimizer_step(1e-2)
    assert not any(torch.equal(p, b) for p, b in zip(strategy.model.parameters(), before, strict=True)), "the step was taken"


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_adam_is_fused_in_every_precision(make, precision):
    """``fused=False`` is more than not fused: torch then takes no foreach kernels either."""
    strategy = make()
    strategy.plan.precision = precision
    config = CausalLMConfig(model_name_or_path="x", dataset_name="x")
    optimizer = strategy._build_optimizer(strategy.model, config)
    assert optimizer.defaults["fused"] and optimizer._step_supports_amp_scaling
    strategy.plan.offload_optimizer = "cpu"
    offloaded = strategy._build_optimizer(strategy.model, config)
    assert offloaded.defaults["fused"] and not offloaded._step_supports_amp_scaling, "the scaler itself waits for its word"


def zero_like(dynamic):
    """Return an object with the parts of a ZeRO strategy that its loss scaler needs."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    scaler = CreateLossScaler(
        torch.float16, static_loss_scale=8.0, dynamic_scaling=dynamic,
        dynamic_loss_args={"init_scale": 65536.0, "scale_window": 7, "min_scale": 1, "delayed_shift": 2,
                           "consecutive_hysteresis": False},
    )  # fmt: skip
    strategy = ZeroStrategy.__new__(ZeroStrategy)
    strategy.plan, strategy.deepspeed_optimizer = SimpleNamespace(precision="fp16"), SimpleNamespace(loss_scaler=scaler)
    return strategy


def test_the_loss_scale_goes_from_any_strategy_to_any_other(make):
    torch_like, zero = make(Fp16OnCpu), zero_like(dynamic=True)
    assert torch_like.scaler_state()["scale"] == 1024.0 and zero.scaler_state()["scale"] == 65536.0

    torch_like.load_scaler_state(zero.scaler_state())
    assert torch_like.accelerator.scaler.get_scale() == 65536.0
    step(torch_like)

    other = make(Fp16OnCpu)
    other.accelerator.scaler.load_state_dict(other.accelerator.scaler.state_dict() | {"scale": 256.0, "growth_interval": 3})
    before = set(vars(zero.deepspeed_optimizer.loss_scaler))
    zero.load_scaler_state(other.scaler_state())
    scaler = zero.deepspeed_optimizer.loss_scaler
    assert scaler.cur_scale == 256.0 and scaler.scale_window == 7
    assert set(vars(scaler)) == before, "the other kind's fields mean nothing here"

    scaler.cur_iter = 5
    same = zero_like(dynamic=True)
    same.load_scaler_state(zero.scaler_state())
    assert vars(same.deepspeed_optimizer.loss_scaler) == vars(scaler)
    again = make(Fp16OnCpu)
    again.load_scaler_state(other.scaler_state())
    assert again.scaler_state() == other.scaler_state()

    changed = zero_like(dynamic=True)
    changed.deepspeed_optimizer.loss_scaler.scale_window = 100
    changed.load_scaler_state(zero.scaler_state())
    assert vars(changed.deepspeed_optimizer.loss_scaler) == vars(scaler) | {"scale_window": 100}, "the file has another one now"

    fixed = zero_like(dynamic=False)
    fixed.load_scaler_state(zero.scaler_state())
    assert fixed.deepspeed_optimizer.loss_scaler.cur_scale == 8.0, "the file fixes it"


def test_a_schedule_of_the_strategys_own_goes_on_after_the_steps_that_were_applied(make, tmp_path):
    """fp16 skips a step that overflowed: the loop counts it, Adam and the schedule do not."""
    strategy = make(Fp16OnCpu)
    step(strategy)
    step(strategy, scale=float("inf"))
    step(strategy)
    saver = Saver(strategy, str(tmp_path), keep=None)
    saver.save(Progress(step=3), {})
    (saved,) = saver.results()

    class Scheduled(ReplicatedStrategy):
        schedule_step = None

        def set_schedule_step(self, step):
            self.schedule_step = step

    resumed = make(Scheduled, copy.deepcopy(two_layers()))
    assert state.load(resumed, saved.checkpoint)[0].step == 3
    assert resumed.optimizer_steps() == resumed.schedule_step == 2


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_lowered_rate_leaves_deepspeeds_schedule_as_it_is(kind):
    """Every schedule that a strategy file may bring; an overflow, at step 4, moves none of them."""
    from deepspeed.runtime import lr_schedules

    def made():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
        total = {} if kind == "WarmupLR" else {"total_num_steps": 9}
        return optimizer, getattr(lr_schedules, kind)(optimizer, warmup_num_steps=3, **total)

    class Engine:
        def __init__(self):
            self.optimizer, self.lr_scheduler = made()
            self.steps, self.used = 0, []

        def step(self):
            self.steps += 1
            self.used.append(self.optimizer.param_groups[0]["lr"])
            if self.was_step_applied():
                self.lr_scheduler.step()

        def was_step_applied(self):
            return self.steps != 4

        def get_global_grad_norm(self):
            return 1.0

    optimizer, schedule = made()
    scheduled = []
    for step in range(1, 10):
        scheduled.append(optimizer.param_groups[0]["lr"])
        if step != 4:
            optimizer.step()
            schedule.step()
    zero = ZeroStrategy.__new__(ZeroStrategy)
    zero.model, zero.owns_schedule = Engine(), True
    zero.optimizer = zero.deepspeed_optimizer = zero.model.optimizer
    shares = [1, 0.5, 0.25, 0.5, 0.5, 0.75, 1, 1, 0.5]
    for share in shares:
        zero.optimizer_step(zero.learning_rate() * share)
    assert zero.model.used == pytest.approx([a * b for a, b in zip(scheduled, shares, strict=True)])
    assert max(scheduled) > 0


def test_pieces_of_zero3_stay_where_the_optimizer_is(monkeypatch):
    """DeepSpeed's getters copy them to its accelerator. On the device meta, they would lose their values."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape, weight.ds_tensor, weight.ds_process_group = torch.Size([2, 3]), torch.empty(4), None
    flat = torch.arange(12.0)  # the weight is its second third, and begins a rank's part of 4 numbers
    zero = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    zero.swap_optimizer, zero.fp32_partitioned_groups_flat, zero.grad_position = False, [flat], {0: (0, 4, 4)}
    zero.optimizer = SimpleNamespace(state={flat: {"exp_avg": flat + 100, "exp_avg_sq": flat + 200}})
    zero.get_param_id = lambda parameter: 0
    zero.reduce_and_partition_stream = SimpleNamespace(synchronize=lambda: None)
    weight.ds_id, weight._z3_optimizer = 0, zero
    strategy = ZeroStrategy.__new__(ZeroStrategy)
    strategy.plan, strategy.deepspeed_optimizer = SimpleNamespace(zero_stage=3), zero
    strategy.optimizer_spec = AdamW()
    strategy.mesh = Mesh(SimpleNamespace(process_index=0, num_processes=2))
    strategy.model = torch.nn.ParameterDict({"w": weight})
    monkeypatch.setattr(type(get_accelerator()), "current_device_name", lambda self: "meta")
    found = [(piece.name, piece.key, *piece.offset, piece.values.device.type) for piece in strategy.pieces()]
    assert found == [("w", key, 0, "cpu") for key in (None, "exp_avg", "exp_avg_sq")]
    values = torch.stack([piece.values for piece in strategy.pieces()])
    assert torch.equal(values, torch.arange(4.0, 8) + torch.tensor([[0], [100], [200]]))


def test_an_emulated_bf16_is_not_called_supported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an older card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not Hardware.detect().bf16


def test_the_odd_copy_is_named_by_the_majority_and_by_the_checkpoint_where_there_is_none():
    three = ReplicaDifference("w", 1, [0, 1, 2], [7, 9, 7], [5], [[0.5], [2e30], [0.5]])
    assert three.describe(None).startswith(
        "rank 1's copy of w differs from those of the other ranks (element 5: 0.5 on rank 0, 2e+30 on rank 1"
    )
    two = ReplicaDifference("w", 3, [0, 1], [7, 9], [5], [[math.nan], [0.5]])
    assert two.describe(lambda name, place: 0.49).startswith("rank 0's copy of w") and "2 more tensors differ" in two.describe(
        None
    )
    near = ReplicaDifference("w", 1, [0, 1], [7, 9], [5], [[0.5], [0.7]])
    assert near.describe(lambda name, place: 0.51).startswith("rank 1's copy")
    assert near.describe(lambda name, place: 0.6).startswith("the copies of w on ranks [0, 1] differ"), "that is not clear"
    assert "the copies of w on ranks [0, 1] differ" in near.describe(None)


def _compare_on_a_rank(rank, ranks, folder, queue, compare):
    """A process of the tests below: puts what ``compare`` returns into the queue."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    accelerator = SimpleNamespace(
        process_index=rank, num_processes=ranks, is_main_process=rank == 0, device=torch.device("cpu")
    )
    queue.put((rank, compare(Mesh(accelerator))))
    dist.destroy_process_group()


def compare_on_ranks(ranks, folder, compare):
    """Return what ``compare`` of a `Mesh` returns, by rank."""
    import torch.multiprocessing as mp

    queue = mp.get_context("fork").SimpleQueue()
    mp.start_processes(_compare_on_a_rank, (ranks, folder, queue, compare), nprocs=ranks, start_method="fork")
    return dict(queue.get() for _ in range(ranks))


def _compare_in_every_precision(mesh):
    differences = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        copy = torch.ones(2, 4, dtype=dtype)
        assert compare_replicas(mesh, [[0, 1]], [("same", copy)]) is None
        copy[0, 3] += mesh.rank
        differences.append(compare_replicas(mesh, [[0, 1]], [("same", torch.ones(2)), ("odd", copy)]))
    return differences


def test_copies_that_differ_are_told_in_every_precision(tmp_path):
    differences = compare_on_ranks(2, tmp_path, _compare_in_every_precision)
    assert set(differences) == {0, 1}
    for replicas in (*differences[0], *differences[1]):
        assert replicas.name == "odd" and replicas.tensors == 1
        assert replicas.positions == [3] and replicas.values == [[1.0], [2.0]] and not replicas.is_shard


def _compare_shards(mesh):
    # Ranks 0, 2, 4 hold one shard, and ranks 1, 3, 5 another of another size.
    groups = [[0, 2, 4], [1, 3, 5]]
    shard = torch.arange(5.0 if mesh.rank % 2 == 0 else 3.0)
    assert compare_replicas(mesh, groups, [("w", shard)]) is None
    if mesh.rank == 3:
        shard[2] += 1e-6
    return compare_replicas(mesh, groups, [("w", shard)])


def test_the_odd_shard_of_hybrid_sharding_is_named_by_its_replicas(tmp_path):
    differences = compare_on_ranks(6, tmp_path, _compare_shards)
    for rank in range(6):
        replicas = differences[rank]
        assert (replicas.ranks, replicas.positions, replicas.is_shard) == ([1, 3, 5], [2], True)
        assert replicas.describe(None).startswith("rank 3's shard of w differs")


@pytest.mark.parametrize(
    ("plan", "groups"),
    [
        ({"kind": "single", "world_size": 1}, []),
        ({"kind": "ddp", "world_size": 3}, [[0, 1, 2]]),
        ({"kind": "deepspeed", "world_size": 2, "zero_stage": 2}, [[0, 1]]),
        ({"kind": "deepspeed", "world_size": 2, "zero_stage": 3}, []),
        ({"kind": "fsdp", "world_size": 4, "shard": 4}, []),
        ({"kind": "fsdp", "world_size": 4, "replicate": 2, "shard": 2}, [[0, 2], [1, 3]]),
    ],
)
def test_ranks_that_hold_the_same_weights(plan, groups):
    assert LaunchPlan(device="cpu", backend=None, precision="no", precision_source="", **plan).replica_groups == groups


def mesh_of(rank, processes, *, data_parallel_size, tensor_parallel_size=1):
    accelerator = SimpleNamespace(num_processes=processes, process_index=rank)
    return Mesh(accelerator, data_parallel_size, tensor_parallel_size)


def test_a_loss_is_scaled_by_the_processes_that_gradients_are_averaged_over(make):
    """Six processes, of which two share each sample. Where they compute the same, gradients are averaged over three."""
    plain, spread = make(), make()
    spread.mesh = mesh_of(5, 6, data_parallel_size=3, tensor_parallel_size=2)
    for strategy in (plain, spread):
        with strategy.micro_batch(last=True):
            strategy.backward(strategy.model(torch.ones(2, 4)).sum())
    for one, other in zip(plain.model.parameters(), spread.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, 3 * one.grad)
    scaled, zero = [], ZeroStrategy.__new__(ZeroStrategy)
    zero.model = SimpleNamespace(backward=lambda loss, scale_wrt_gas: scaled.append(loss))
    zero.mesh = mesh_of(5, 6, data_parallel_size=3)  # each has tokens of its own
    for stage in (2, 3):  # DeepSpeed averages over groups, and over processes
        zero.plan = SimpleNamespace(zero_stage=stage)
        zero.backward(torch.tensor(2.0))
    assert scaled == [6.0, 12.0]


def test_processes_with_other_tokens_of_a_sample_draw_other_random_numbers():
    shared = [mesh_of(rank, 4, data_parallel_size=2) for rank in range(4)]
    assert [mesh.data_parallel_rank for mesh in shared] == [0, 0, 1, 1]
    assert [mesh.token_parallel_rank for mesh in shared] == [0, 1, 2, 3] and shared[0].token_parallel_size == 4
    alike = [mesh_of(rank, 4, data_parallel_size=2, tensor_parallel_size=2) for rank in range(4)]
    assert [mesh.token_parallel_rank for mesh in alike] == [0, 0, 1, 1] and alike[0].token_parallel_size == 2


@pytest.mark.parametrize("where", ["none", "cpu"])
def test_the_loss_scale_lies_where_offloaded_gradients_do(monkeypatch, where):
    from zerobook.strategy.fsdp import FullyShardedStrategy

    monkeypatch.setattr(Strategy, "_distribute", lambda self, model, optimizer: (model, optimizer))
    scaler, model = torch.amp.GradScaler("cpu", init_scale=8.0), torch.nn.Linear(2, 2)
    model.config = SimpleNamespace()
    strategy = FullyShardedStrategy.__new__(FullyShardedStrategy)
    strategy.accelerator = SimpleNamespace(scaler=scaler, num_processes=2, device=torch.device("cpu"))
    strategy.mesh = Mesh(strategy.accelerator)
    strategy.plan = SimpleNamespace(offload_optimizer=where, context=1)
    strategy._distribute(model, None)
    scaler.scale(torch.ones((), device="meta"))  # a loss on another device
    assert scaler._scale.device.type == ("cpu" if where == "cpu" else "meta")


def zero_on(stage):
    """A ZeRO strategy of four processes, before `prepare`."""
    plan = LaunchPlan(
        kind="deepspeed", world_size=4, device="cpu", backend=None, precision="no", precision_source="default", zero_stage=stage
    )
    return ZeroStrategy(SimpleNamespace(num_processes=4, process_index=1), plan)


@pytest.mark.parametrize(("stage", "is_third"), [(0, False), (1, False), (2, False), (3, True)])
def test_only_stage_3_shards_the_weights_and_takes_its_own_ways_to_gradients(stage, is_third):
    strategy = zero_on(stage)
    cleared = []
    func = SimpleNamespace(cache_clear=lambda: cleared.append(stage))
    coordinator = type("Coordinator", (), {"is_invalid_trace": lambda self: True})
    coordinator._PartitionedParameterCoordinator__params_to_release = lambda self: func
    strategy.deepspeed_optimizer = SimpleNamespace(
        loss_scale=4.0,
        parameter_offload=SimpleNamespace(get_param_coordinator=coordinator),
        scaled_global_norm=lambda: torch.tensor(8.0),
        _get_norm_groups=lambda: [torch.tensor(12.0)],
        get_local_fp32_grad_for_param=lambda parameter: torch.full((3,), 8.0),
    )
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.ds_tensor, weight.ds_process_group, weight.ds_shape = torch.zeros(3), None, torch.Size([5])
    weight._hp_mapping = None

    assert strategy.shards_parameters is strategy.generation_in_step is is_third
    assert strategy.gradient_norm().item() == (3.0 if is_third else 2.0)
    gradient = strategy._gradient(0, weight)
    assert gradient.tolist() == [2.0, 2.0] if is_third else gradient is None
    strategy.release_gathered_parameters()
    assert cleared == ([3] if is_third else [])


def test_a_second_model_is_refused_where_weights_are_on_nvme():
    """DeepSpeed empties the folder of swapped weights when it begins to shard a model."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for device, is_refused in (("cpu", False), ("nvme", True)):
        plan = LaunchPlan(
            kind="deepspeed",
            world_size=1,
            device="cpu",
            backend="gloo",
            precision="no",
            precision_source="default",
            zero_stage=3,
            offload_param=device,
        )
        strategy = ZeroStrategy(Accelerator(cpu=True), plan)
        strategy.load(lambda options: two_layers(), {})
        with pytest.raises(ConfigError, match="second") if is_refused else nullcontext():
            strategy.load(lambda options: two_layers(), {})
