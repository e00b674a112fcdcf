"""What pyproject.toml cannot express: the packages are found, not listed; the emulator is compiled
into one of them; the wheel's tag says which glibc that library needs; and the description is the
README without links that lead nowhere outside the repository."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

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
PROCESSORS = {62: "x86_64", 183: "aarch64"}  # by ELF's number
OLDEST_GLIBC = 28  # 2.28: Debian 10, Ubuntu 20.04, RHEL 8 and newer


def packages() -> Iterator[str]:
    """Every folder of FOLDERS, and every folder below one that holds a Python file."""
    for package, folder in FOLDERS.items():
        root = ROOT / folder
        below = {path.parent.relative_to(root) for path in root.rglob("*.py")} | {Path()}
        yield from sorted(".".join((package, *path.parts)) for path in below)


def description() -> str:
    """The README as a package index shows it: files of the repository are named, not linked, and
    its pictures are left out."""
    title, text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n", 1)
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\(\1\)", r"`\1`", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", r"\1 (`\2`)", text)
    where = "Files named here are in the source distribution; `make` runs in its folder."
    return f"{title}\n\n{where}\n{text}"


def load_emulator_builder() -> ModuleType:
    """emulator/library.py by itself: while building, the package's dependencies are not there."""
    spec = importlib.util.spec_from_file_location("library", ROOT / "emulator" / "library.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def needed_glibc(library: Path) -> int | None:
    """The N of the oldest glibc 2.N that a library runs on, by the versions of the symbols that it
    needs, which are strings in it. None: it needs no glibc."""
    minors = re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())
    return max(map(int, minors), default=None)


def processor_of(library: Path) -> str:
    """The processor that a library is for, as tags of wheels name it, by its ELF header. A compiler
    for another one than this machine's may have made it."""
    header = library.read_bytes()[:20]
    number = int.from_bytes(header[18:20], "little")
    if header[:4] != b"\x7fELF" or number not in PROCESSORS:
        raise SystemExit(
            f"deep_moe runs on {' and '.join(PROCESSORS.values())}; CXX made a library for "
            f"processor number {number} of ELF"
        )
    return PROCESSORS[number]


class BuildPyWithEmulator(build_py):
    def run(self) -> None:
        super().run()
        # An editable install runs from the checkout, which builds the library on first use.
        if not self.editable_mode:
            builder = load_emulator_builder()
            folder = Path(self.build_lib) / "deep_moe" / "emulator"
            builder.build(folder / builder.LIBRARY_NAME)
            builder.build_stand_in(
                folder / "cuda" / builder.STAND_IN_NAME, library=folder / builder.LIBRARY_NAME
            )


class BinaryDistribution(Distribution):
    """Its files belong to one platform, although none is an extension module."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, and any Linux on the libraries' processor with the glibc that they need."""
        platform = super().get_tag()[2]
        builder = load_emulator_builder()
        libraries = [
            library
            for name in (builder.LIBRARY_NAME, builder.STAND_IN_NAME)
            for library in Path(self.bdist_dir).rglob(name)
        ]
        needed = [glibc for glibc in map(needed_glibc, libraries) if glibc is not None]
        for library in libraries:
            platform = f"linux_{processor_of(library)}"
        if needed:
            glibc = max(*needed, OLDEST_GLIBC)
            platform = platform.replace("linux_", f"manylinux_2_{glibc}_", 1)
        return ("py3", "none", platform)


setup(
    packages=list(packages()),
    package_dir=FOLDERS,
    long_description=description(),
    long_description_content_type="text/markdown",
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildPyWithEmulator, "bdist_wheel": PlatformWheel},
)
