"""Upload of an exported folder to the Hugging Face hub."""

from pathlib import Path

from zerobook.errors import ConfigError


def check_push(name: str) -> None:
    """Check that this machine may upload to the hub, before anything is exported.

    Raises:
        ConfigError: ``name`` is no name of a repository, there is no token, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name}: it is no name of a repository, such as me/my-model: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push: HF_HUB_OFFLINE is set, which forbids every request to the hub. Unset it.")
    if get_token() is None:
        raise ConfigError("--push: this machine has no token for the hub. Run hf auth login, or set HF_TOKEN.")


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload ``folder`` to the model repository ``name``, which is created if it does not exist. Return its address.

    Raises:
        ConfigError: the hub cannot be reached, or refuses, or ``private`` is set and the repository exists and is public.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        # The repository may exist from an earlier upload.
        address = api.create_repo(name, private=private, exist_ok=True)
        # `create_repo` does not make an existing repository private.
        if private and not api.model_info(address.repo_id).private:
            raise ConfigError(
                f"--private: {address} is there already, and public, so nothing was uploaded. Make it private, or give another "
                f"name. {_later_upload(folder)}"
            )
        api.upload_folder(
            # If the name has no owner, the hub has added the owner of the token.
            repo_id=address.repo_id,
            folder_path=folder,
            commit_message="Exported by zerobook",
            # Delete files of an earlier upload that would be read in place of the new ones.
            delete_patterns=["model*.safetensors*", "adapter_*", "config.json", "chat_template.jinja"],
        )
    except HfHubHTTPError as error:
        advice = {401: " Run hf auth login.", 403: " The token needs write access to that name."}.get(
            error.response.status_code, ""
        )
        raise ConfigError(
            f"--push {name}: the hub refuses: {str(error).splitlines()[0]}.{advice} {_later_upload(folder)}"
        ) from error
    except Exception as error:
        # An error of the network comes from httpx, or from a module whose name begins so: it depends on the client's version.
        if not type(error).__module__.startswith("httpx"):
            raise
        raise ConfigError(f"--push {name}: the hub cannot be reached: {error}. {_later_upload(folder)}") from error
    return str(address)


# Return a sentence for messages: the export can still be uploaded.
def _later_upload(folder: Path) -> str:
    return f"The export is in {folder}: hf upload NAME {folder} uploads it later."
