"""Models by their Hugging Face id, where a hub can be reached or was reached before."""

from __future__ import annotations

import re
from pathlib import Path

from pdlab.models.cache import FetchError

FILES = ["*.json", "*.safetensors", "*.jinja"]
_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether the name looks like `organization/model`."""
    return _ID.fullmatch(name) is not None


def fetch_from_hub(model_id: str) -> Path:
    """Directory of the model's files, in the hub's own cache; resumed and checked by its client.

    Raises:
        FetchError: the hub cannot be reached, has no such model, or does not let this user have it.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise FetchError(
            f"cannot get {model_id!r} from the Hugging Face hub: {reason}\n"
            "If the model is on this machine, give the path of its directory. A mirror is set with "
            "HF_ENDPOINT, a gated model needs HF_TOKEN. The default model needs no hub: "
            'load("smollm2-135m").'
        ) from error
