"""What pyproject.toml cannot express: the packages are found, not listed; the emulator is compiled
into one of them (emulator/setup.py); and the description is the README without links that lead
nowhere outside the repository."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from setuptools import setup

ROOT = Path(__file__).parent
# The top-level folders jit, heuristics, emulator and include are installed below deep_moe, so that
# no generic name lands in site-packages. include is data, not Python: it keeps its own folder name,
# because #include <deep_moe/...> needs a folder deep_moe inside the include path.
FOLDERS = {
    "deep_moe": "deep_moe",
    "deep_moe.jit": "jit",
    "deep_moe.heuristics": "heuristics",
    "deep_moe.emulator": "emulator",
    "deep_moe.include": "include",
}


def description() -> str:
    """The README as a package index shows it: files of the repository are named, not linked, and
    its pictures are left out."""
    title, text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n", 1)
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\(\1\)", r"`\1`", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", r"\1 (`\2`)", text)
    where = "Files named here are in the source distribution; `make` runs in its folder."
    return f"{title}\n\n{where}\n{text}"


def load_emulator_setup() -> ModuleType:
    """The setup of the emulator, which is a distribution of its own, too."""
    spec = importlib.util.spec_from_file_location("emulator_setup", ROOT / "emulator" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


emulator_setup = load_emulator_setup()
setup(
    packages=list(emulator_setup.packages(FOLDERS)),
    package_dir=FOLDERS,
    long_description=description(),
    long_description_content_type="text/markdown",
    **emulator_setup.COMMANDS,
)
