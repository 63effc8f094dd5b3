"""The Hugging Face hub: whether it can be reached, so that libraries need not retry for it."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from tpcompile.json_files import shortened

_TIMEOUT_S = 5.0
_VALID_S = 60
"""The seconds for which an answer is used again."""


def unreachable(model: str) -> str:
    """Return a clause with the reason why the hub provides no model, or an empty text.

    Without an answer, pass `local_files_only=True` to functions that take a hub id: they would
    retry for half a minute for each file that is not in the cache.
    """
    return _ask(model, int(time.monotonic()) // _VALID_S)


def is_cached(model: str, name: str) -> bool:
    """Return whether a file of a model is in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, name), str)


def cached_directory(model: str) -> Path | None:
    """Return the directory of a model in the cache of the hub, or None."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, "config.json")
    return Path(path).parent if isinstance(path, str) else None


@lru_cache(maxsize=16)
def _ask(model: str, period: int) -> str:
    """Ask once for a file of the model. A new period invalidates old answers."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_TIMEOUT_S)
    except (EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, ValueError):
        return ""  # the caller gets the same error, which says more
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except HfHubHTTPError as error:
        return f"the hub answers with status {error.response.status_code}"
    except Exception as error:  # requests and httpx raise different errors
        reason = " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
        return f"the hub cannot be reached ({shortened(reason)})"
    return ""
