"""What pyproject.toml cannot express of `warpcheck`: this folder is the package, its libraries are
compiled into it, and the wheel's tag says which glibc they need.

deep_moe's setup.py, which installs this folder as a part of deep_moe, has its commands from here.
"""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path(__file__).resolve().parent
PROCESSORS = {62: "x86_64", 183: "aarch64"}  # by ELF's number
OLDEST_GLIBC = 28  # 2.28: Debian 10, Ubuntu 20.04, RHEL 8 and newer


def packages(folders: Mapping[str, str]) -> Iterator[str]:
    """Each package, and those below it. folders: by the package's name."""
    for package, folder in folders.items():
        yield package
        yield from (f"{package}.{name}" for name in find_packages(folder))


def load_builder() -> ModuleType:
    """library.py by itself: while building, the package's dependencies are not there."""
    spec = importlib.util.spec_from_file_location("library", FOLDER / "library.py")
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
            f"the emulator runs on {' and '.join(PROCESSORS.values())}; CXX made a library for "
            f"processor number {number} of ELF"
        )
    return PROCESSORS[number]


class BuildWithLibraries(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """All but this file."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if Path(module[2]).resolve() != Path(__file__).resolve()]

    def run(self) -> None:
        super().run()
        # An editable install runs from the checkout, which builds the libraries on first use.
        if not self.editable_mode:
            builder = load_builder()
            (package,) = (
                name
                for name, folder in self.distribution.package_dir.items()
                if Path(folder).resolve() == FOLDER
            )
            folder = Path(self.build_lib, *package.split("."))
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
        builder = load_builder()
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


# For setup().
COMMANDS = {
    "distclass": BinaryDistribution,
    "cmdclass": {"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel},
}

if __name__ == "__main__":
    folders = {"warpcheck": "."}
    # Elsewhere: a build folder here would be one in deep_moe's package.
    with tempfile.TemporaryDirectory() as build_base:
        setup(
            packages=list(packages(folders)),
            package_dir=folders,
            options={"build": {"build_base": build_base}},
            **COMMANDS,
        )
