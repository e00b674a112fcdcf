"""The two build steps that pyproject.toml cannot express: compile the emulator into the package,
and say in the wheel's tag that it holds a Linux shared library which any Python 3 can load."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def load_emulator_builder() -> ModuleType:
    """emulator/library.py by itself: while building, the package's dependencies are not there."""
    spec = importlib.util.spec_from_file_location("library", ROOT / "emulator" / "library.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildPyWithEmulator(build_py):
    def run(self) -> None:
        super().run()
        # An editable install runs from the checkout, which builds the library on first use.
        if not self.editable_mode:
            builder = load_emulator_builder()
            folder = Path(self.build_lib) / "deep_moe" / "emulator"
            builder.build(folder / builder.LIBRARY_NAME)


class BinaryDistribution(Distribution):
    """Its files belong to one platform, although none is an extension module."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildPyWithEmulator, "bdist_wheel": PlatformWheel},
)
