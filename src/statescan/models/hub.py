# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's files are: in a folder, or on the Hugging Face hub under ``owner/name``.

Nothing is parsed here but the index of shards, which names further files to fetch.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from statescan.errors import ArgumentError, CheckpointError, MissingExtraError
from statescan.models.safe_files import exists, one_line, reason
from statescan.models.tensor_files import WEIGHT_NAMES, shard_names

CONFIG_NAME = "config.json"

_log = logging.getLogger(__name__)
_ID = re.compile(r"\w[\w.\-]*/\w[\w.\-]*", re.ASCII)


def find_model_folder(source: str | os.PathLike[str], revision: str | None) -> Path:
    """The folder with config.json and weights, downloaded first where ``source`` is a hub id.

    Raises:
        CheckpointError: there is no such folder, and no such checkpoint within reach.
        MissingExtraError: it is a hub id and huggingface_hub is not installed.
    """
    folder = local_folder(source, revision)
    if folder is not None:
        return folder
    repository = _Repository(str(source), revision)
    config = repository.fetch(CONFIG_NAME)
    if config is None:
        raise CheckpointError(f"{source} on the hub has no {CONFIG_NAME}: not a model's repository")
    for name in WEIGHT_NAMES:
        path = repository.fetch(name)
        if path is None:
            continue
        for shard in sorted(shard_names(path)) if name.endswith(".index.json") else ():
            if repository.fetch(shard) is None:
                raise CheckpointError(f"{source} on the hub lacks {shard}, which {name} names")
        repository.tell_where_from()
        return config.parent
    raise repository.lacking(", ".join(WEIGHT_NAMES))


def find_optional_file(
    source: str | os.PathLike[str], name: str, revision: str | None
) -> Path | None:
    """A file of a checkpoint, None where the checkpoint has none."""
    folder = local_folder(source, revision)
    if folder is None:
        return _Repository(str(source), revision).fetch(name)
    return folder / name if exists(folder / name) else None


def why_offline(source: str | os.PathLike[str]) -> str:
    """A remark for messages about a file of a hub checkpoint that was not found offline."""
    if local_folder(source, None) is not None:
        return ""
    why = _why_unreachable(_import_hub(str(source)).constants.ENDPOINT)
    return f" in the local cache, and the hub is out of reach ({why})" if why else ""


def local_folder(source: str | os.PathLike[str], revision: str | None) -> Path | None:
    """The folder that ``source`` names, None where it is an id to look up on the hub."""
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ArgumentError(
                f"{source} is a folder, and revision={revision!r} was given.\n"
                "Only checkpoints on the hub have revisions.\n"
                "Leave revision out."
            )
        return folder
    if isinstance(source, str) and _ID.fullmatch(source) and not exists(folder):
        return None
    raise CheckpointError(
        f"{one_line(folder)} is not a folder: give one with {CONFIG_NAME} in it, "
        "or the id of a checkpoint on the hub, such as state-spaces/mamba-130m"
    )


class _Repository:
    """One checkpoint on the hub; goes on with the local cache once the hub is out of reach."""

    def __init__(self, name: str, revision: str | None) -> None:
        self._hub = _import_hub(name)
        self._name, self._revision = name, revision
        self._unreachable = _why_unreachable(self._hub.constants.ENDPOINT)

    def fetch(self, file: str) -> Path | None:
        """Path of a file in the local cache, None where the checkpoint has no such file."""
        errors = self._hub.utils
        try:
            return self._download(file)
        except errors.LocalEntryNotFoundError as error:
            # The first of these may have cost many retries; further ones would cost the same.
            self._unreachable = self._unreachable or reason(error)
            if file == CONFIG_NAME:
                raise self.lacking(file) from error
            return None
        except errors.GatedRepoError as error:
            raise CheckpointError(
                f"{self._name} is open only to those who accepted its terms on the hub: accept "
                "them, then log in with `hf auth login`"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{self._name} is neither a folder nor a checkpoint on the hub: check the "
                "spelling, or log in with `hf auth login` if it is private"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CheckpointError(
                f"{self._name} on the hub has no revision {self._revision!r}"
            ) from error
        except errors.EntryNotFoundError:
            return None
        except Exception as error:
            # Names of the network's errors depend on the version: requests', httpx's, OSError.
            raise CheckpointError(f"{self._name}: the hub answered {reason(error)}") from error

    def tell_where_from(self) -> None:
        """Say so where the checkpoint was taken from the cache and may be out of date."""
        if self._unreachable:
            _log.warning("%s: %s is taken from the local cache", self._unreachable, self._name)

    def lacking(self, what: str) -> CheckpointError:
        """The error for files that were not found; offline they may exist all the same."""
        if self._unreachable:
            return CheckpointError(
                f"{self._name} is no folder and not complete in the local cache ({what}), and the "
                f"hub is out of reach ({self._unreachable}): connect, or give the path of a folder"
            )
        return CheckpointError(f"{self._name} on the hub holds none of {what}")

    def _download(self, file: str) -> Path:
        download: Callable[..., str] = self._hub.hf_hub_download
        return Path(
            download(
                self._name,
                file,
                revision=self._revision,
                library_name="statescan",
                local_files_only=bool(self._unreachable),
            )
        )


def _import_hub(name: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingExtraError(
            f"{name} is no folder, and to look it up on the hub needs huggingface_hub, which is "
            "not installed: pip install 'statescan[models]'"
        ) from error
    return huggingface_hub


def _why_unreachable(endpoint: str) -> str:
    """Why the hub cannot be asked, "" if perhaps it can.

    Asking for the address first turns half a minute of retries without a network into an instant.
    """
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urllib.parse.urlsplit(endpoint)
    proxies = urllib.request.getproxies()
    if address.scheme in proxies or "all" in proxies:
        # Behind a proxy names are resolved by the proxy.
        return ""
    try:
        socket.getaddrinfo(address.hostname, address.port or 443)
    except OSError as error:
        return f"{address.hostname}: {error.strerror or reason(error)}"
    return ""
