"""From the MODEL of the command line to a directory: a local one, or a snapshot from the Hugging Face Hub."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final

from minisgl.hub.errors import HubError

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NO_PLACE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
CHECKPOINT_FILES: Final = ["*.json", "*.jinja", "*.safetensors"]
_WANTED_WITHOUT_WEIGHTS: Final = ["*.json", "*.jinja"]


def resolve(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The directory of `model`, downloaded first when it is a Hub id (`owner/name`). The token of HF_TOKEN or of
    `hf auth login` is used, the Hub's cache is kept where HF_HOME says.

    Raises HubError: model_not_found, model_access_denied, hub_unreachable, cache_not_writable.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise HubError(
                "model_not_found", f"{path} has no config.json: give the directory of a Hugging Face checkpoint"
            )
        return path.resolve()
    if not _HUB_ID.fullmatch(model):
        raise HubError(
            "model_not_found", f"there is no directory {model!r}, and a Hugging Face Hub id has the form owner/name"
        )
    return _download(model, revision, with_weights)


def _download(model: str, revision: str | None, with_weights: bool) -> Path:
    # Imported here: most starts find a local directory and need none of it.
    from huggingface_hub import errors, snapshot_download

    name = model if revision is None else f"{model} at revision {revision}"
    try:
        path = snapshot_download(
            model, revision=revision, allow_patterns=CHECKPOINT_FILES if with_weights else _WANTED_WITHOUT_WEIGHTS
        )
    except errors.GatedRepoError as error:
        raise HubError(
            "model_access_denied",
            f"{name} is gated: accept its terms on its page on the Hub, then set HF_TOKEN to a token of that account",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError("model_not_found", f"{model} exists, but it has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            "model_not_found",
            f"{name} is neither a directory here nor a model on the Hub that you may see: check the spelling, "
            "or set HF_TOKEN if it is private",
        ) from error
    except errors.HfHubHTTPError as error:
        raise HubError("hub_unreachable", f"the Hub did not give {name}: {error}") from error
    except (errors.LocalEntryNotFoundError, OSError) as error:
        if error.errno in _NO_PLACE:
            raise HubError(
                "cache_not_writable",
                f"{name} cannot be stored at {error.filename} ({error.strerror}): set HF_HOME to a directory with room "
                "for it, or give the path of a downloaded checkpoint",
            ) from error
        raise HubError(
            "hub_unreachable",
            f"{model} is no directory here, and the Hub cannot be reached: give the path of a downloaded checkpoint, "
            "or check the network",
        ) from error
    return Path(path)
