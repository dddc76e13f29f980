"""Write a checkpoint in the form of another trainer, so that this trainer can continue it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import ADAM_STEPS
from zerobook.checkpoint.state import Reader, read_progress
from zerobook.errors import CheckpointError
from zerobook.interop.checkpoints.model_names import list_weight_orders, make_empty_model
from zerobook.interop.checkpoints.sharded import MODEL_FOLDER, OPTIMIZER_FOLDER
from zerobook.interop.checkpoints.source import MOMENTS
from zerobook.interop.checkpoints.zero import STAGE_3, STAGES_1_2
from zerobook.runlog.facts import trains_adapters
from zerobook.runlog.history import History
from zerobook.utils import files

# kind of tensor, as a checkpoint of Zerobook names it -> its file in DeepSpeed's universal checkpoint
_UNIVERSAL_FILES = {"weight": "fp32.pt"} | {key: f"{key}.pt" for key in MOMENTS}
# version of DeepSpeed whose universal checkpoint is written
_DEEPSPEED_VERSION = "0.19.8"
# maximum number of groups of weights that DeepSpeed's optimizer may have
_MOST_GROUPS = 64


def export_state(checkpoint: Path, output: Path, form: str) -> None:
    """Write the weights, AdamW's state and the position in the schedule of a checkpoint into the new folder ``output``.

    Args:
        form: a key of `FORMS`.

    Raises:
        CheckpointError: the checkpoint is damaged or not of AdamW.
        ConfigError: ``output`` holds something.
    """
    damage = store.find_damage(checkpoint, thorough=True)
    if damage is not None:
        raise CheckpointError(damage)
    files.require_new(output, "--output")
    reader = Reader(checkpoint)
    if ADAM_STEPS not in reader.index:
        raise CheckpointError(f"{checkpoint}: it is not of AdamW, whose state alone can be exported. See zerobook export.")
    with files.staged(output) as staging:
        FORMS[form](checkpoint, reader, staging)


def _write_trainer(checkpoint: Path, reader: Reader, folder: Path) -> None:
    """Write a ``checkpoint-N`` of transformers' Trainer. The moments are held in memory while they are written."""
    from zerobook.models.export import export_checkpoint

    if store.read_json(checkpoint / "config.json")["config"].get("adapter") == "pissa":
        raise CheckpointError(
            f"{checkpoint}: its adapter is of PiSSA, and is saved with twice its rank. Its optimizer's state does not fit that."
        )

    # Write the model or adapter, with its config and tokenizer, as `zerobook export` does.
    model_folder = folder / "model"
    export_checkpoint(checkpoint, model_folder, dtype=torch.float32, merge=False)
    for file in model_folder.iterdir():
        file.rename(folder / file.name)
    model_folder.rmdir()

    # Write the optimizer's state, with the weights numbered as Trainer numbers them.
    model = make_empty_model(folder)
    # The first order is that of Trainer: a group of names with weight decay, and one without.
    order = next(list_weight_orders(model))
    settings = _read_adamw_settings(checkpoint)
    groups = []
    for names, decay in zip(order, (settings["weight_decay"], 0.0), strict=True):
        parameters = [model.get_parameter(name) for name in names]
        groups.append({"params": parameters, **settings, "initial_lr": settings["lr"], "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups).state_dict()
    states: dict[int, dict[str, torch.Tensor]] = {}
    for number, name in enumerate([*order[0], *order[1]]):
        # The checkpoint lacks weights that text does not use, such as those of a vision tower. Trainer makes no state for them.
        if name in reader.index["shapes"]:
            states[number] = _read_adamw_state(reader, name)
    progress = read_progress(checkpoint)
    rate = _get_next_rate(progress, settings)
    for group in optimizer["param_groups"]:
        group["lr"] = rate
    torch.save({"state": states, "param_groups": optimizer["param_groups"]}, folder / "optimizer.pt")

    schedule = _make_schedule_state(progress, rate) | {"base_lrs": [settings["lr"]] * len(groups)}
    _write_position(checkpoint, progress, schedule, folder)


def _write_universal(checkpoint: Path, reader: Reader, folder: Path) -> None:
    """Write DeepSpeed's universal checkpoint, with the files that Trainer needs beside it. One tensor is in memory at a time.

    DeepSpeed divides each tensor among any number of ranks when it loads it. The files of ZeRO-1 to 3 have different names,
    and all of them are written. Weight decay and the peak of the rate are not written: DeepSpeed takes them from its config.
    """
    progress = read_progress(checkpoint)
    settings = _read_adamw_settings(checkpoint)
    tag = f"global_step{progress.step}"
    zero_folder = folder / tag / "zero"
    optimizer_steps = int(reader.index[ADAM_STEPS])
    for name in reader.index["shapes"]:
        # The checkpoint may come from somebody else, and the name becomes that of a folder.
        if Path(name).name != name:
            raise CheckpointError(f"{checkpoint}: {name!r} is not the name of a weight.")
        weight_folder = zero_folder / name
        weight_folder.mkdir(parents=True)
        for key, file_name in _UNIVERSAL_FILES.items():
            torch.save({"param": reader.read_tensor(f"{key}/{name}")}, weight_folder / file_name)
        # Write the number of steps as a tensor: torch's optimizers need one, and DeepSpeed's accept it.
        torch.save(torch.tensor(float(optimizer_steps)), weight_folder / "step.pt")
    # ZeRO-3 applies the settings of one group to all groups. Leave out weight decay, which only some groups have.
    rate = _get_next_rate(progress, settings)
    group = {"lr": rate, "betas": settings["betas"], "eps": settings["eps"]}
    optimizer = {
        "ds_version": _DEEPSPEED_VERSION,
        # ZeRO-1 and 2 pair their groups with these, and load nothing into a group without a partner.
        "param_groups": [group] * _MOST_GROUPS,
        # In ZeRO-3, all flat groups share this state. If the step were a tensor, each group would increase it in every step.
        "optimizer_state_dict": {"state": {0: {"step": optimizer_steps}}, "param_groups": [group]},
    }
    torch.save(optimizer, zero_folder / "optimizer_state.pt")

    schedule = _make_schedule_state(progress, rate)
    model_state = {
        # A scheduler of DeepSpeed reads this key, which counts from 0. Trainer's scheduler does not read it.
        "lr_scheduler": schedule | {"last_batch_iteration": progress.step - 1},
        "global_steps": progress.step,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
    }
    for names in (STAGES_1_2, STAGE_3):
        torch.save(model_state, folder / tag / names.model_file)
    (folder / "latest_universal").write_text(tag)
    _write_position(checkpoint, progress, schedule, folder)


def _write_sharded(checkpoint: Path, reader: Reader, folder: Path) -> None:
    """Write the two folders of accelerate's ``save_state`` under FSDP. One tensor is in memory at a time."""
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex

    class Planner(DefaultSavePlanner):
        """Reads a tensor when it is written. Until then it is on the meta device, without values."""

        # torch calls this for each tensor that it writes.
        def lookup_object(self, index: MetadataIndex) -> Any:
            value = super().lookup_object(index)
            if isinstance(value, torch.Tensor) and value.is_meta:
                return reader.read_tensor(tensor_names[index.fqn])
            return value

    recorded = store.read_json(checkpoint / "config.json")
    if trains_adapters(recorded["config"]):
        raise CheckpointError(f"{checkpoint}: it holds adapters, and --to dcp is for models of which all is trained.")
    # Key of a tensor in the state dict -> its name in this checkpoint.
    tensor_names: dict[str, str] = {}
    weights = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in reader.index["shapes"].items():
        weights[name] = torch.empty(shape, device="meta")
        tensor_names[f"model.{name}"] = f"weight/{name}"
        states[name] = {"step": torch.tensor(float(reader.index[ADAM_STEPS]))}
        for key in MOMENTS:
            states[name][key] = torch.empty(shape, device="meta")
            tensor_names[f"optimizer.state.{name}.{key}"] = f"{key}/{name}"
    # Let AdamW make the group, since a loader expects all its settings, and a run's config has only some.
    groups = torch.optim.AdamW([torch.empty(0)], **_read_adamw_settings(checkpoint)).state_dict()["param_groups"]
    groups[0]["params"] = list(weights)
    if recorded["base"]:
        # A weight that the model uses twice has two names in a state dict. Write it under both.
        (folder / "config.json").write_text(json.dumps(recorded["base"]["config"]))
        # ``id`` of a weight -> its first name.
        first_names: dict[int, str] = {}
        for name, parameter in make_empty_model(folder).named_parameters(remove_duplicate=False):
            first_name = first_names.setdefault(id(parameter), name)
            if first_name not in weights:
                raise CheckpointError(f"{checkpoint}: it lacks {first_name}; --to dcp is for models of which all is trained.")
            weights[name] = weights[first_name]
            tensor_names[f"model.{name}"] = f"weight/{first_name}"
    parts: dict[str, dict[str, Any]] = {
        MODEL_FOLDER: {"model": weights},
        OPTIMIZER_FOLDER: {"optimizer": {"state": states, "param_groups": groups}},
    }
    for name, state_dict in parts.items():
        save(state_dict, storage_writer=FileSystemWriter(folder / name), planner=Planner(), no_dist=True)


def _read_adamw_state(reader: Reader, name: str) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a weight, as torch keeps it."""
    state = {"step": torch.tensor(float(reader.index[ADAM_STEPS]))}
    for key in MOMENTS:
        state[key] = reader.read_tensor(f"{key}/{name}")
    return state


def _read_adamw_settings(checkpoint: Path) -> dict[str, Any]:
    """Return the settings of AdamW in a run's config, by torch's names."""
    config = store.read_json(checkpoint / "config.json")["config"]
    return {
        "lr": config["learning_rate"],
        "betas": (config["adam_beta1"], config["adam_beta2"]),
        "eps": config["adam_epsilon"],
        "weight_decay": config["weight_decay"],
    }


def _get_next_rate(progress: Progress, settings: dict[str, Any]) -> float:
    """Return the learning rate of the next step."""
    return float(progress.following.get("learning rate", settings["lr"]))


def _make_schedule_state(progress: Progress, rate: float) -> dict[str, Any]:
    """Return the state of Trainer's schedule without its base rates, of which there is one for each group."""
    return {
        "last_epoch": progress.step,
        "_step_count": progress.step + 1,
        # Trainer logs the first rate. Those of all groups are equal.
        "_last_lr": [rate],
        "lr_lambdas": [],
    }


def _write_position(checkpoint: Path, progress: Progress, schedule: dict[str, Any], folder: Path) -> None:
    """Write Trainer's ``scheduler.pt`` and ``trainer_state.json``."""
    from transformers import TrainerControl, TrainerState

    torch.save(schedule, folder / "scheduler.pt")
    config = store.read_json(checkpoint / "config.json")["config"]
    trainer_state = TrainerState(
        global_step=progress.step,
        epoch=progress.epoch,
        max_steps=progress.total_steps,
        train_batch_size=config["per_device_train_batch_size"],
        logging_steps=config["logging_steps"],
        log_history=_read_log_history(checkpoint),
        # Trainer requires the state of its `TrainerControl`.
        stateful_callbacks=cast("Any", [TrainerControl()]),
    )
    trainer_state.save_to_json(str(folder / "trainer_state.json"))


def _read_log_history(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the steps of the run up to its checkpoint, as transformers logs them; none if there is no runlog beside it."""
    run = checkpoint.absolute().parent.parent
    if not (run / "runlog").is_dir():
        return []
    entries = []
    for record in History.read(run).steps(current=True):
        if record["step"] <= store.step_of(checkpoint):
            entries.append({key: record[key] for key in ("step", "loss", "grad_norm", "learning_rate")})
    return entries


# ``--to`` -> the function that writes it.
FORMS: dict[str, Callable[[Path, Reader, Path], None]] = {
    "trainer": _write_trainer,
    "deepspeed": _write_universal,
    "dcp": _write_sharded,
}
