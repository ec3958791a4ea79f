"""Resolve the name of a model to a directory: a local one, or a snapshot from the Hugging Face Hub or a bucket."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from minisgl.errors import HubError
from minisgl.hub.files import CONFIG_FILES, WEIGHT_FILES
from minisgl.hub.places import is_hub_id, is_in_bucket, origin
from minisgl.hub.repository import offline
from minisgl.hub.snapshots import snapshot
from minisgl.models.checkpoint import SERVED_WEIGHTS

_SUBFOLDERS: Final = tuple(f"{folder}/*.{kind}" for folder in ("[!0-9]*", "?[!_]*") for kind in ("json", "safetensors"))
"""Everything in subfolders but chat templates, and what sentence-transformers has behind a model (`1_Pooling`)."""
_DENSE_WEIGHTS: Final = "[0-9]_*/model.safetensors"
"""Weights of layers behind the pooling (`2_Dense`)."""
_CACHE_ERRORS: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def resolve(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Directory of `model`, which is downloaded first if it is a Hub id (`owner/name`), with the token of HF_TOKEN or
    `hf auth login`, or in a bucket (`s3://BUCKET/PREFIX`), into the cache at HF_HOME.

    HF_HUB_OFFLINE restricts a Hub id to that cache. Raises HubError `model_not_found`, `model_access_denied`,
    `hub_unreachable`, `hub_offline` or `cache_not_writable`, and for a bucket what `snapshot` raises.
    """
    if is_in_bucket(model):
        # Checked before the cache is asked.
        origin(model, revision)
        return snapshot(model, with_weights=with_weights)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise HubError(
                "model_not_found", f"{path} has no config.json; give the directory of a Hugging Face checkpoint"
            )
        return path.resolve()
    if not is_hub_id(model):
        raise HubError(
            "model_not_found",
            f"{model!r} is neither a directory nor a Hugging Face Hub id, which has the form owner/name, nor "
            "s3://BUCKET/PREFIX",
        )
    return _download(model, revision, with_weights)


def _download(model: str, revision: str | None, with_weights: bool) -> Path:
    # Imported here: a local directory does not need it.
    from huggingface_hub import errors, snapshot_download

    name = model if revision is None else f"{model} at revision {revision}"
    patterns = [*CONFIG_FILES, SERVED_WEIGHTS, _DENSE_WEIGHTS] if with_weights else list(CONFIG_FILES)
    try:
        path = snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=list(_SUBFOLDERS))
        if with_weights and not any(Path(path).glob(WEIGHT_FILES)):
            # Weights under other names. The snapshot's directory is called after its commit.
            commit = Path(path).name
            snapshot_download(model, revision=commit, allow_patterns=WEIGHT_FILES, ignore_patterns=list(_SUBFOLDERS))
    except errors.GatedRepoError as error:
        raise HubError(
            "model_access_denied",
            f"{name} is gated; accept its terms on its page on the Hub, then set HF_TOKEN to a token of that account",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            "model_not_found", f"{model} has no revision {revision!r}; check it on the model's page on the Hub"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            "model_not_found",
            f"{name} is neither a local directory nor a model on the Hub that you can access; check the spelling, or "
            "set HF_TOKEN if the model is private",
        ) from error
    except errors.HfHubHTTPError as error:
        raise HubError("hub_unreachable", f"the Hub did not return {name}: {error}") from error
    except (errors.LocalEntryNotFoundError, OSError) as error:
        if error.errno in _CACHE_ERRORS:
            raise HubError(
                "cache_not_writable",
                f"{name} cannot be stored at {error.filename} ({error.strerror}); set HF_HOME to a directory with "
                "enough space, or give the path of a downloaded checkpoint",
            ) from error
        if offline():
            raise HubError(
                "hub_offline",
                f"{name} is not in the Hub's cache at HF_HOME, and HF_HUB_OFFLINE is set; unset it, or give the path "
                "of a downloaded checkpoint",
            ) from error
        raise HubError(
            "hub_unreachable",
            f"{model} is not a local directory, and the Hub cannot be reached; check the network, or give the path "
            "of a downloaded checkpoint",
        ) from error
    return Path(path)
