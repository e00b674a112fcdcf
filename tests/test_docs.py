"""What the documents name exists, and what they must list is listed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PYTHON_FOLDERS = ("deep_moe", "jit", "heuristics", "emulator")
# Folders that a document may leave out when it names a file below them.
IMPLIED_FOLDERS = ("", "include/deep_moe", "docs")
ENVIRONMENT_READ = re.compile(
    r"""environ(?:\.get\(|\.setdefault\(|\[)\s*["']([A-Z_0-9]+)["']"""
    r"""|_VARIABLE = ["']([A-Z_0-9]+)["']|\(\(?["']([A-Z_0-9]+_(?:INCLUDE|PATH))["'],"""
)


def names_of_files(document: Path) -> set[str]:
    """Paths with a folder and a known ending, in backticks or as link targets."""
    text = document.read_text()
    return set(re.findall(r"[`(]((?:[\w.]+/)+[\w{},.*-]*\.(?:py|cuh|h|cpp|md|j2|toml))[`)#]", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_a_document_exist(document: Path):
    missing = [
        name
        for name in names_of_files(document)
        if not any((ROOT / folder / name).exists() for folder in IMPLIED_FOLDERS)
    ]
    assert missing == []


def test_the_table_of_environment_variables_is_complete():
    read = set()
    for folder in PYTHON_FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for names in ENVIRONMENT_READ.findall(path.read_text()):
                read.update(name for name in names if name)
    listed = set(re.findall(r"^\| (.+?) \|", (ROOT / "docs/environment.md").read_text(), re.M))
    listed = set(re.findall(r"`([A-Z_0-9]+)`", " ".join(listed)))
    assert "DEEP_MOE_CACHE_DIR" in read
    assert read == listed


def test_every_test_named_in_a_document_exists():
    named = {
        match
        for document in DOCUMENTS
        for match in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
    }
    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []
