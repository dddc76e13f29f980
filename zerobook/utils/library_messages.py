"""Messages of libraries that a user can do nothing about."""

import logging
import os
import warnings
from importlib import import_module

_LIBRARIES = r"(transformers|peft|torch|accelerate|deepspeed|bitsandbytes|huggingface_hub)(\.|$)"


def hush() -> None:
    """Silence messages of libraries about the code of libraries. Call it before they are imported.

    Deprecation warnings of libraries concern this project, and not its users. Their other warnings are shown only by rank 0.
    """
    # It warns that it would load kernels for a CPU from the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Under tensor parallelism, it warns about the order in which sharded weights are gathered for a checkpoint.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_says_more_than_the_device)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_says_more_than_the_absence_of_a_gpu)
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
    # The warning is about changes in place, and nothing changes logits in place.
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
