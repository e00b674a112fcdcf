"""What the documents name exists, and what they must list is listed."""

import builtins
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.exceptions import PluginError

from deep_moe import errors
from deep_moe.emulator import errors as emulator_errors
from deep_moe.heuristics import preset_shape
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.targets import target_of
from docs import diagrams, generate_memory, site_hooks
from tests.everyday import parametrize

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_has_every_document_and_every_public_name(site: Path):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {f"{path.stem}.html" for path in DOCUMENTS if path.name != "README.md"} <= pages
    assert {"index.html", "benchmarks/LOG.html", "examples/demo.html"} <= pages
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    for module in site_hooks.modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                assert f'.{name}" class="doc doc-heading"' in text, f"{module.__name__}.{name}"


def test_docstrings_describe_every_parameter_of_public_calls():
    """In the form that tools parse: Google's."""
    assert len(list(site_hooks.public_callables())) > 150
    assert site_hooks.undocumented_parameters() == {}


def test_docstrings_list_errors_that_exist():
    known = {**vars(builtins), **vars(errors), **vars(emulator_errors)}
    listed = {
        name: site_hooks.documented_errors(function)
        for name, function, _ in site_hooks.public_callables()
    }
    assert listed["deep_moe.mega_moe"] >= {"TypeError", "ValueError", "MegaMoETimeoutError"}
    for name, names in listed.items():
        for error in names:
            assert issubclass(known.get(error, object), Exception), f"{name}: {error}"


def test_a_link_that_leads_nowhere_is_refused():
    with pytest.raises(PluginError, match=r"docs/weights\.md links to \.\./nowhere\.md"):
        site_hooks.for_site("[a](../nowhere.md)", "weights.md")


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_diagram_is_what_its_code_draws(name: str):
    drawn = (diagrams.IMAGES / name).read_text(encoding="utf-8")
    assert drawn == diagrams.DIAGRAMS[name]().svg(), "run python -m docs.diagrams"


def program(document: Path, *, gpu: bool) -> str:
    """A document's blocks of Python one behind the other, on the lines where they stand there. A
    block that needs a GPU begins with ```python gpu."""
    text = document.read_text(encoding="utf-8")
    result = ""
    for block in re.finditer(r"^```python( gpu)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if gpu or not block[1]:
            line = text.count("\n", 0, block.start(2))
            result += "\n" * (line - result.count("\n")) + block[2]
    return result


PROGRAMS = [path for path in DOCUMENTS if program(path, gpu=True)]
EVERYDAY = ("README.md", "serving.md", "porting-from-deep-gemm.md")


def run_program(document: Path, folder: Path, *, gpu: bool) -> None:
    run_code(program(document, gpu=gpu), folder / f"{document.stem}_md.py", gpu=gpu)


def run_code(code: str, path: Path, *, gpu: bool) -> str:
    """What it prints. path: where it is written, in the folder where it runs."""
    path.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [sys.executable, str(path)],
        cwd=path.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    other_engine = re.search(r"DeepMoEError: (\w+ must be at least .* got .*)", result.stderr)
    if gpu and other_engine:  # what a GPU machine has installed is not ours to choose
        pytest.skip(other_engine[1])
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_readmes_program_prints(tmp_path: Path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    assert "norm of each token" in run_code(blocks[0], tmp_path / "block.py", gpu=False)
    assert [path.name for path in tmp_path.iterdir()] == ["block.py"]


@parametrize(
    "document",
    PROGRAMS,
    everyday=[path for path in PROGRAMS if path.name in EVERYDAY],
    ids=lambda path: path.name,
)
def test_the_code_in_a_document_runs(document: Path, tmp_path: Path):
    run_program(document, tmp_path, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("document", PROGRAMS, ids=lambda path: path.name)
def test_the_code_in_a_document_runs_on_a_gpu(document: Path, tmp_path: Path):
    run_program(document, tmp_path, gpu=True)


def test_the_table_of_memory_is_what_buffers_and_weights_take():
    text = generate_memory.OUTPUT.read_text(encoding="utf-8")
    assert text == generate_memory.page(), "run python -m docs.generate_memory"


@pytest.mark.parametrize(
    ("num_max_tokens", "num_pool_tokens"), [(128, None), (8192, None), (8192, 24_576)]
)
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_the_formulas_of_memory_hold(
    num_ranks: int, num_max_tokens: int, num_pool_tokens: int | None
):
    """Those of docs/memory.md: exactly for weights, and all but a little for the buffer."""
    shape = preset_shape(
        "deepseek-v4-pro", num_ranks=num_ranks, num_max_tokens_per_rank=num_max_tokens
    )
    shape = replace(shape, num_pool_tokens=num_pool_tokens)
    hidden, intermediate, topk = shape.hidden, shape.intermediate_hidden, shape.num_topk
    experts, tokens = shape.num_experts_per_rank, num_max_tokens
    weights = target_of("sm_100a").weights_of().tensors(shape).values()
    assert sum(math.prod(sizes) * dtype.itemsize for dtype, sizes in weights) == (
        experts * 3 * hidden * intermediate * 17 // 32
    )
    pool, scales_share = -(-(num_ranks * tokens * topk + experts * 191) // 384) * 384, 4
    if num_pool_tokens is not None:
        pool, scales_share = num_pool_tokens, 16
    list_page = max(-(-4 * tokens * topk // (experts * num_ranks)), min(tokens, 128))
    num_bytes = (
        pool * (hidden + intermediate) * (1 + scales_share) // scales_share
        + 2 * topk * tokens * hidden
        + 4 * num_ranks * (tokens * topk + experts * list_page)
        + tokens * (hidden + hidden // 32 + 12 * topk)
    )
    assert 0 <= symm_buffer_layout(shape).num_bytes - num_bytes < 0.01 * num_bytes
