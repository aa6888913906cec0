"""The project's own files say the truth: version, licence, README, Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import stretto

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_version_has_one_place() -> None:
    assert version("stretto") == stretto.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_public_name_is_importable() -> None:
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = stretto.Nothing


def test_importing_stretto_needs_no_torch() -> None:
    code = "import sys, stretto; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_make_refuses_an_old_python_in_words(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "Python 3.9.2"; else exit 1; fi\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(ROOT), "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_python_of_the_readme_compiles_and_names_what_exists() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
        for names in re.findall(r"^from stretto import (.+)$", block, flags=re.MULTILINE):
            assert set(names.replace(" ", "").split(",")) <= set(stretto.__all__)


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
