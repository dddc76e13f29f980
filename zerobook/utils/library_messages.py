"""Messages of libraries that a user can do nothing about."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module

_LIBRARIES = r"(transformers|peft|torch|accelerate|deepspeed|bitsandbytes|huggingface_hub)(\.|$)"


def hush() -> None:
    """Silence messages of libraries about their own and each other's code, before those libraries are imported.

    Deprecation notices are for this project. Other warnings of libraries are shown by rank 0 alone.
    """
    # Kernels that bitsandbytes would load from the hub for a CPU.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # The order in which sharded weights are gathered for a checkpoint, under tensor parallelism.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_says_more_than_the_device)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_says_more_than_the_absence_of_a_gpu)
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
    # Nothing changes logits in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", module=_LIBRARIES)


def hush_loading() -> None:
    """Silence the messages and progress bars of models that are loaded, besides what `hush` silences."""
    from transformers.utils import logging as transformers_logging

    hush()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def hush_deepspeed_builds() -> None:
    """Silence the line that DeepSpeed prints on each rank for its op of communication between CPUs."""
    # There is no logger and no option. `deepspeed.comm.torch` by attribute is torch itself.
    import_module("deepspeed.comm.torch").__dict__["print"] = lambda *_: None


def _says_more_than_the_device(record: logging.LogRecord) -> bool:
    # The line about the strategy names the device too.
    return not record.getMessage().startswith("Setting accelerator to CPU")


def _says_more_than_the_absence_of_a_gpu(record: logging.LogRecord) -> bool:
    # A CUDA build of torch says so if a compiler for CUDA is installed.
    return not record.getMessage().startswith("No CUDA runtime is found")
