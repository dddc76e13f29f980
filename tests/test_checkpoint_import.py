"""Checkpoints of other trainers, read into ours: every number at its place, and nothing that is half or hostile."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig

from tests.alone import train
from tests.distributed.other_trainer import collate, model_of, rows_of
from tests.harness import read_tensors
from tests.test_checkpoint_faults import Calls
from zerobook.checkpoint import origin, save, state, store
from zerobook.checkpoint.progress import Progress
from zerobook.cli.main import main
from zerobook.errors import CheckpointError, ConfigError
from zerobook.interop.checkpoints import exporter, importer
from zerobook.interop.checkpoints.importer import flags_of, import_checkpoint
from zerobook.runlog.jsonl import stream
from zerobook.training.resume import check_data

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def make_trainer(tiny, folder, lora):
    """transformers' Trainer, which saves the third of six steps."""
    from transformers import AutoTokenizer, Trainer, TrainingArguments

    spec = {"model": str(tiny / "llama"), "data": str(tiny / "few.jsonl"), "lora": LORA if lora else None}
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=8, max_steps=6, save_steps=3, logging_steps=1,
        learning_rate=1e-3, weight_decay=0.1, adam_epsilon=1e-6, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    return Trainer(
        model=model_of(spec), args=arguments, train_dataset=rows_of(spec), data_collator=collate, processing_class=tokenizer
    )


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request, tiny, tmp_path_factory):
    """transformers' Trainer after six steps."""
    trainer = make_trainer(tiny, tmp_path_factory.mktemp(request.param), request.param == "lora")
    trainer.train()
    return trainer


def test_a_trainers_weights_moments_and_log_are_taken_over(trained, tmp_path, capsys):
    checkpoint = Path(trained.args.output_dir) / "checkpoint-6"
    assert main(["checkpoint", "import", str(checkpoint), "--output", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert "--learning_rate 0.001" in output and "--weight_decay 0.1" in output
    assert "norm gains" not in output, "Trainer's groups are ours"
    imported = store.folder_of(tmp_path / "run") / store.name_of(6)
    assert store.find_damage(imported, thorough=True) is None
    expected = {}
    for name, parameter in trained.model.named_parameters():
        if parameter.requires_grad:
            moments = trained.optimizer.state[parameter]
            expected |= {f"weight/{name}": parameter, f"exp_avg/{name}": moments["exp_avg"]}
            expected[f"exp_avg_sq/{name}"] = moments["exp_avg_sq"]
    assert_same(read_tensors(imported), expected)
    progress = state.read_progress(imported)
    assert progress.step == 6 and progress.epoch == 6.0 and progress.total_steps == 6
    assert json.loads((imported / "tensors.json").read_text())["adam_steps"] == 6
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    steps = list(stream(tmp_path / "run" / "runlog" / "steps.jsonl"))
    assert [step["loss"] for step in steps] == [entry["loss"] for entry in logged]
    assert [step["learning_rate"] for step in steps] == [entry["learning_rate"] for entry in logged]


@pytest.mark.parametrize("trained", ["full"], indirect=True)
def test_a_pad_token_that_trainer_took_from_the_tokenizer_is_no_other_model(trained, tiny, tmp_path):
    checkpoint = shutil.copytree(Path(trained.args.output_dir) / "checkpoint-6", tmp_path / "checkpoint-6")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"pad_token_id": 5}))
    imported = import_checkpoint(checkpoint, tmp_path / "run").checkpoint
    recorded = store.read_json(imported / "config.json")["base"]
    base = AutoConfig.from_pretrained(tiny / "llama")
    assert origin.difference(recorded, origin.facts(base, None)) is None
    base.rms_norm_eps = 0.1
    assert "rms_norm_eps" in origin.difference(recorded, origin.facts(base, None))


@pytest.mark.parametrize(
    ("facts", "adapter"),
    [
        ({"peft_type": "LORA", "use_rslora": False, "use_dora": False}, "lora"),
        ({"peft_type": "LORA", "use_rslora": True}, "rslora"),
        ({"peft_type": "LORA", "use_dora": True}, "dora"),
        ({"peft_type": "IA3"}, "ia3"),
    ],
)
def test_a_run_has_to_go_on_with_the_method_of_an_imported_adapter(tmp_path, facts, adapter):
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": "me/base"}))
    assert importer._make_config(tmp_path, {})["config"]["adapter"] == adapter


def test_an_adapter_that_changed_its_base_is_refused(tmp_path):
    facts = {"peft_type": "LORA", "init_lora_weights": "pissa_niter_16"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="pissa_niter_16"):
        importer._make_config(tmp_path, {})


@pytest.mark.parametrize("trained", ["full"], indirect=True)
def test_trainer_continues_what_was_exported(trained, tiny, tmp_path):
    import_checkpoint(Path(trained.args.output_dir) / "checkpoint-3", tmp_path / "run")
    checkpoint = store.folder_of(tmp_path / "run") / store.name_of(3)
    exported = tmp_path / "checkpoint-3"
    assert main(["checkpoint", "export", str(checkpoint), "--to", "trainer", "--output", str(exported)]) == 0
    trainer = make_trainer(tiny, tmp_path / "theirs", lora=False)
    trainer.train(resume_from_checkpoint=str(exported))
    assert trainer.state.global_step == 6
    continued = dict(trainer.model.named_parameters())
    for name, parameter in trained.model.named_parameters():
        assert torch.allclose(continued[name], parameter, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("trained", ["full"], indirect=True)
def test_a_sharded_state_dict_has_every_name_of_a_shared_weight(trained, tmp_path):
    imported = import_checkpoint(Path(trained.args.output_dir) / "checkpoint-6", tmp_path / "run").checkpoint
    assert main(["checkpoint", "export", str(imported), "--to", "dcp", "--output", str(tmp_path / "state")]) == 0
    expected = trained.model.state_dict()
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "state" / "pytorch_model_fsdp_0", no_dist=True)
    assert "lm_head.weight" in expected, "the embedding is used twice"
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("trained", ["lora"], indirect=True)
@pytest.mark.parametrize("command", [["export"], ["checkpoint", "export", "--to", "trainer"]])
def test_an_imported_adapter_is_exported_only_after_it_was_continued(trained, tmp_path, capsys, command):
    imported = import_checkpoint(Path(trained.args.output_dir) / "checkpoint-3", tmp_path / "run").checkpoint
    assert main([*command, str(imported), "--output", str(tmp_path / "exported")]) == 2
    assert "Continue it here first" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


def test_an_untrained_part_of_a_model_has_no_state_in_an_export(tiny, tmp_path, capsys):
    model = {"model_name_or_path": tiny / "gemma3_composite", "train_file": tiny / "few.jsonl"}
    shape = {"validation_split_percentage": 0, "max_train_steps": 1, "per_device_train_batch_size": 2, "block_size": 32}
    train(tmp_path / "run", **model, **shape)
    checkpoint = str(store.folder_of(tmp_path / "run") / store.name_of(1))
    exported = tmp_path / "checkpoint-1"
    assert main(["checkpoint", "export", checkpoint, "--to", "trainer", "--output", str(exported)]) == 0
    trained = json.loads((Path(checkpoint) / "tensors.json").read_text())["shapes"]
    optimizer = torch.load(exported / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(trained) < sum(len(group["params"]) for group in optimizer["param_groups"])
    assert main(["checkpoint", "export", checkpoint, "--to", "dcp", "--output", str(tmp_path / "state")]) == 2
    assert "vision_tower" in capsys.readouterr().err


def test_the_state_of_an_adapter_that_is_saved_in_another_form_is_not_exported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"adapter": "pissa"}}))
    with pytest.raises(CheckpointError, match="PiSSA"):
        exporter.FORMS["trainer"](tmp_path, None, tmp_path / "out")


def test_an_exported_sharded_state_dict_is_imported_again(tmp_path):
    write_zero(tmp_path / "global_step3", make_state(), 2, 2)
    first = import_checkpoint(tmp_path / "global_step3", tmp_path / "run").checkpoint
    assert main(["checkpoint", "export", str(first), "--to", "dcp", "--output", str(tmp_path / "state")]) == 0
    again = import_checkpoint(tmp_path / "state", tmp_path / "again").checkpoint
    assert_same(read_tensors(again), make_state())
    names = [name for group in SHAPES for name in group]
    loaded = {"model": {name: torch.zeros_like(make_state()[f"weight/{name}"]) for name in names}}
    dcp.load(loaded, checkpoint_id=tmp_path / "state" / "pytorch_model_fsdp_0", no_dist=True)
    assert all(torch.equal(loaded["model"][name], make_state()[f"weight/{name}"]) for name in names)


def test_a_universal_checkpoint_has_every_tensor_for_all_stages(tmp_path, capsys):
    write_zero(tmp_path / "checkpoint-3" / "global_step3", make_state(), 2, 2)
    imported = import_checkpoint(tmp_path / "checkpoint-3", tmp_path / "run").checkpoint
    exported = tmp_path / "exported"
    assert main(["checkpoint", "export", str(imported), "--to", "deepspeed", "--output", str(exported)]) == 0
    assert "load_universal" in capsys.readouterr().out
    folder = exported / (exported / "latest_universal").read_text()
    files = {"weight": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    for name, tensor in make_state().items():
        key, _, weight = name.partition("/")
        # Files of plain tensors and values: nothing else is unpickled.
        loaded = torch.load(folder / "zero" / weight / f"{files[key]}.pt", weights_only=True)
        assert torch.equal(loaded["param"], tensor), name
        assert torch.load(folder / "zero" / weight / "step.pt", weights_only=True) == 3
    optimizer = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert type(optimizer["optimizer_state_dict"]["state"][0]["step"]) is int, "ZeRO-3 gives all groups one object"
    assert all("weight_decay" not in group for group in optimizer["param_groups"])
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert torch.load(folder / name, weights_only=True)["global_steps"] == 3
    assert json.loads((exported / "trainer_state.json").read_text())["global_step"] == 3
    assert torch.load(exported / "scheduler.pt", weights_only=True)["last_epoch"] == 3


def test_a_weight_whose_name_leads_elsewhere_is_refused_at_an_export(tmp_path, capsys, monkeypatch):
    named_elsewhere = [{name.replace("wide", "../../elsewhere"): shape for name, shape in group.items()} for group in SHAPES]
    monkeypatch.setitem(globals(), "SHAPES", named_elsewhere)
    write_zero(tmp_path / "checkpoint-3" / "global_step3", make_state(), 2, 2)
    imported = import_checkpoint(tmp_path / "checkpoint-3", tmp_path / "run").checkpoint
    assert main(["checkpoint", "export", str(imported), "--to", "deepspeed", "--output", str(tmp_path / "out")]) == 2
    assert "elsewhere" in capsys.readouterr().err
    assert not list(tmp_path.rglob("elsewhere*"))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.detach().float()), name


SHAPES = [{"wide": [5, 7], "tall": [11, 3], "embed": [13, 4]}, {"bias": [3], "norm": [1]}]
"""Weights of two groups, of which none can be divided evenly."""


def make_state(scale=1):
    """Weights and moments by name, all numbers different."""
    tensors = {}
    for number, (name, shape) in enumerate((name, shape) for group in SHAPES for name, shape in group.items()):
        for place, key in enumerate(("weight", "exp_avg", "exp_avg_sq")):
            count = math.prod(shape) * scale
            values = torch.arange(count, dtype=torch.float32) + 1000 * number + 1_000_000 * place
            tensors[f"{key}/{name}"] = values.view([shape[0] * scale, *shape[1:]])
    return tensors


def write_zero(folder, tensors, stage, ranks, alignment=0):
    """Write what DeepSpeed writes of ``tensors``: a file of the model, and one of each rank."""
    folder.mkdir(parents=True)
    shapes = [{name: tensors[f"weight/{name}"].shape for name in group} for group in SHAPES]
    parts = [[flat_parts(tensors, key, group, stage, ranks, alignment) for group in SHAPES] for key in KEYS]
    for rank in range(ranks):
        masters, averages, squares = ([group[rank] for group in groups] for groups in parts)
        moments = {n: {"step": 3, "exp_avg": averages[n], "exp_avg_sq": squares[n]} for n in range(len(SHAPES))}
        optimizer = {"state": moments, "param_groups": [{"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}]}
        values = {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * len(SHAPES)}
        if stage == 3:
            values |= {"fp32_flat_groups": masters, "optimizer_state_dict": optimizer}
        else:
            if rank == ranks - 1:  # the padding of the last rank's masters is left out
                ends = [sum(t.numel() + alignment for t in weights(tensors, "weight", group)) for group in SHAPES]
                masters = [m[: max(0, end - rank * m.numel())] for m, end in zip(masters, ends, strict=True)]
            values |= {"single_partition_of_fp32_groups": masters, "base_optimizer_state": optimizer}
            values["param_alignment_paddings"] = [[alignment] * len(group) for group in SHAPES]
        torch.save({"optimizer_state_dict": values}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    torch.save({"param_shapes": shapes, "buffer_names": [], "module": {}, "global_steps": 3}, folder / name)


KEYS = ("weight", "exp_avg", "exp_avg_sq")


def weights(tensors, key, group):
    return [tensors[f"{key}/{name}"] for name in group]


def flat_parts(tensors, key, group, stage, ranks, alignment):
    """The flat partition of each rank."""
    if stage == 3:
        cut = [pad(t.flatten(), math.ceil(t.numel() / ranks) * ranks).chunk(ranks) for t in weights(tensors, key, group)]
        return [torch.cat([parts[rank] for parts in cut]) for rank in range(ranks)]
    flat = torch.cat([pad(t.flatten(), t.numel() + alignment) for t in weights(tensors, key, group)])
    return list(pad(flat, math.ceil(flat.numel() / (2 * ranks)) * 2 * ranks).chunk(ranks))


def pad(flat, length):
    return torch.nn.functional.pad(flat, (0, length - flat.numel()), value=-1)


@pytest.mark.parametrize(("stage", "ranks", "alignment"), [(1, 1, 0), (2, 2, 0), (2, 3, 2), (3, 1, 0), (3, 2, 0), (3, 4, 0)])
def test_flat_partitions_of_any_number_of_ranks_are_put_together(tmp_path, stage, ranks, alignment):
    tensors = make_state()
    write_zero(tmp_path / "step" / "global_step3", tensors, stage, ranks, alignment)
    (tmp_path / "step" / "latest").write_text("global_step3\n")
    imported = import_checkpoint(tmp_path / "step", tmp_path / "run").checkpoint
    assert store.find_damage(imported, thorough=True) is None
    assert_same(read_tensors(imported), tensors)


def test_what_trainer_wrote_beside_deepspeeds_folder_is_read(tmp_path):
    write_zero(tmp_path / "checkpoint-4" / "global_step4", make_state(), 2, 2)
    trainer_state = {"global_step": 4, "epoch": 0.5, "max_steps": 8, "log_history": []}
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(trainer_state))
    imported = import_checkpoint(tmp_path / "checkpoint-4" / "global_step4", tmp_path / "run")
    assert (imported.position.step, imported.position.total_steps) == (4, 8)
    assert imported.decays_vectors, "one group has all weights"


def test_chunks_of_a_sharded_state_dict_become_slices(tmp_path):
    tensors = make_state()
    names = [name for group in SHAPES for name in group]
    (tmp_path / "state").mkdir()
    model = {"model": {name: tensors[f"weight/{name}"] for name in names}}
    states = {name: {"step": torch.tensor(3.0)} | {key: tensors[f"{key}/{name}"] for key in KEYS[1:]} for name in names}
    optimizer = {"optimizer": {"state": states, "param_groups": [{"params": names, "lr": 1e-3, "betas": (0.9, 0.99)}]}}
    dcp.save(model, checkpoint_id=tmp_path / "state" / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save(optimizer, checkpoint_id=tmp_path / "state" / "optimizer_0", no_dist=True)
    torch.save({"scale": 512.0, "_growth_tracker": 3}, tmp_path / "state" / "scaler.pt")
    imported = import_checkpoint(tmp_path / "state", tmp_path / "run")
    assert_same(read_tensors(imported.checkpoint), tensors)
    assert state.read_progress(imported.checkpoint).scaler["scale"] == 512.0
    assert imported.position.step == 3
    assert flags_of(imported.source, imported.position) == {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.99}


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE"],)


@pytest.mark.parametrize("place", ["rank", "model", "index"])
def test_no_class_of_a_file_is_ever_made(tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOSTILE", str(tmp_path / "ran"))
    folder = tmp_path / "global_step3"
    if place == "index":
        folder = tmp_path / "state"
        (folder / "optimizer_0").mkdir(parents=True)
        (folder / "pytorch_model_fsdp_0").mkdir()
        (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    else:
        write_zero(folder, make_state(), 2, 2)
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt" if place == "rank" else "mp_rank_00_model_states.pt"
        content = torch.load(folder / name, weights_only=True)
        torch.save(content | {"more": Hostile()}, folder / name)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def spoil(folder, how):
    ranks = sorted(folder.glob("*_optim_states.pt"))
    if how == "a rank is missing":
        ranks[1].unlink()
    elif how == "a file is cut":
        ranks[0].write_bytes(ranks[0].read_bytes()[:1000])
    elif how == "no model":
        (folder / "mp_rank_00_model_states.pt").unlink()
    elif how == "a rank of another save":
        content = torch.load(ranks[0], weights_only=True)
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(2)
        torch.save(content, ranks[0])
    elif how == "another optimizer":
        content = torch.load(ranks[0], weights_only=True)
        for moments in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            moments["momentum_buffer"] = moments.pop("exp_avg")
        torch.save(content, ranks[0])
    elif how == "more state":
        content = torch.load(ranks[0], weights_only=True)
        for moments in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            moments["max_exp_avg_sq"] = moments["exp_avg_sq"]
        torch.save(content, ranks[0])
    elif how == "nothing":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "no folder":
        shutil.rmtree(folder)
    elif how == "weights alone":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "model.safetensors").touch()
    elif how == "a run":
        shutil.rmtree(folder)
        (folder / "checkpoint-20").mkdir(parents=True)
    elif how == "another program's file":
        torch.save([1, 2], ranks[0])
    elif how == "a key is missing":
        content = torch.load(ranks[0], weights_only=False)
        del content["optimizer_state_dict"]["base_optimizer_state"]
        torch.save(content, ranks[0])
    elif how == "two steps":
        shutil.rmtree(folder)
        for step in (1, 2):
            (folder / f"global_step{step}").mkdir(parents=True)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("a rank is missing", "2 ranks"),
        ("a file is cut", "damaged"),
        ("no model", "missing"),
        ("a rank of another save", "whole tensors"),
        ("another optimizer", "momentum_buffer"),
        ("more state", "max_exp_avg_sq"),
        ("nothing", "optimizer.pt"),
        ("no folder", "no such folder"),
        ("weights alone", "--model_name_or_path"),
        ("a run", "checkpoint-20"),
        ("another program's file", "content"),
        ("a key is missing", "base_optimizer_state"),
        ("two steps", "global_step2"),
    ],
)
def test_a_wrong_or_half_folder_is_refused_and_leaves_nothing(tmp_path, how, word):
    folder = tmp_path / "global_step3"
    write_zero(folder, make_state(), 2, 2)
    spoil(folder, how)
    with pytest.raises(CheckpointError, match=word):
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_content_is_not_written_to(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    write_zero(tmp_path / "global_step3", make_state(), 3, 2)
    with pytest.raises(ConfigError, match="--output"):
        import_checkpoint(tmp_path / "global_step3", tmp_path / "run")
    assert os.listdir(tmp_path / "run") == ["mine"]


def _import_in_child(folder, output, counter, fatal):
    importer.WORKERS = 1  # calls of threads would be counted in any order
    Calls(counter, fatal)
    import_checkpoint(folder, output)
    os._exit(0)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_an_import_killed_at_any_call_leaves_a_whole_run_or_none(tmp_path, every):
    tensors = make_state()
    write_zero(tmp_path / "global_step3", tensors, 2, 2)
    context = multiprocessing.get_context("fork")

    def run(output, fatal):
        counter = context.Value("i", 0)
        child = context.Process(target=_import_in_child, args=(tmp_path / "global_step3", output, counter, fatal))
        child.start()
        child.join()
        return counter.value, child.exitcode

    calls, code = run(tmp_path / "unharmed", 10**6)
    assert code == 0 and calls > 20
    for fatal in range(1, calls + 1, every):
        output = tmp_path / f"run{fatal}"
        assert run(output, fatal)[1] == -signal.SIGKILL
        if not output.exists():
            import_checkpoint(tmp_path / "global_step3", output)
        imported = store.folder_of(output) / store.name_of(3)
        assert store.find_damage(imported, thorough=True) is None
        assert_same(read_tensors(imported), tensors)


def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def test_an_import_holds_one_weight_at_most(tmp_path, monkeypatch):
    """Pages of the mapped files are page cache, which the system takes back."""
    tensors = make_state(scale=100_000)
    write_zero(tmp_path / "global_step3", tensors, 3, 2)
    total = sum(4 * tensor.numel() for tensor in tensors.values())
    assert total > 100e6
    del tensors
    peaks = []
    add = save._File.add

    def measured(file, name, values):
        add(file, name, values)
        peaks.append(anonymous_bytes())

    monkeypatch.setattr(save._File, "add", measured)
    before = anonymous_bytes()
    import_checkpoint(tmp_path / "global_step3", tmp_path / "run")
    assert max(peaks) - before < total / 10


@pytest.mark.parametrize(("epoch", "cursor"), [(0.0, 0), (1.5, 12), (2.0, 16)])
def test_an_imported_run_goes_on_with_as_many_passes_done(tmp_path, epoch, cursor):
    class Rows(list):
        fingerprint = "of these rows"

    progress = Progress(step=6, epoch=epoch)
    check_data(tmp_path, progress, SimpleNamespace(train=Rows(range(8))), SimpleNamespace(seed=7))
    assert (progress.cursor, progress.seed) == (cursor, 7)
    assert (progress.data_size, progress.data_fingerprint) == (8, "of these rows")
