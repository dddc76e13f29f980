"""Silence messages of libraries about which a user can do nothing."""

import logging
import os
import warnings
from importlib import import_module

_LIBRARIES = r"(transformers|peft|torch|accelerate|deepspeed|bitsandbytes|huggingface_hub)(\.|$)"


def hush() -> None:
    """Silence messages that concern the code of libraries or of Zerobook. Call this before the libraries are imported.

    Deprecation warnings of libraries concern Zerobook, and not its users. Other warnings are shown only by rank 0.
    """
    # bitsandbytes warns that it would load kernels for a CPU from the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Under tensor parallelism, torch warns that sharded weights are gathered for a checkpoint by several collectives in turn.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_not_about_cpu)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_missing_gpu)
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
    # The warning concerns code that changes the output in place. Nothing changes logits in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", module=_LIBRARIES)


def hush_loading() -> None:
    """Silence the messages and progress bars of transformers when a model is loaded, and what `hush` silences."""
    from transformers.utils import logging as transformers_logging

    hush()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def hush_deepspeed_builds() -> None:
    """Silence the line that DeepSpeed prints on each rank about its op for communication between CPUs."""
    # DeepSpeed prints the line without a logger or an option, so its module gets a ``print`` that does nothing. import_module
    # is used because the attribute `deepspeed.comm.torch` is torch itself, and not this module.
    import_module("deepspeed.comm.torch").__dict__["print"] = lambda *_: None


def _is_not_about_cpu(record: logging.LogRecord) -> bool:
    # Zerobook's own line about the strategy names the device.
    return not record.getMessage().startswith("Setting accelerator to CPU")


def _is_not_about_missing_gpu(record: logging.LogRecord) -> bool:
    # A CUDA build of torch logs this on a machine without a GPU if a compiler for CUDA is installed.
    return not record.getMessage().startswith("No CUDA runtime is found")
