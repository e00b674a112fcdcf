"""The Python packages that deep_moe imports, and what to do about one that is missing."""

from __future__ import annotations

# What pip is told, by the module that is imported.
REQUIREMENTS = {
    "torch": "torch>=2.9",
    "numpy": "numpy",
    "jinja2": "jinja2",
    "typer": "typer",
    "rich": "rich",
    "safetensors": "safetensors",
    "filelock": "filelock",
    "platformdirs": "platformdirs",
    "cuda.core": "cuda-core>=1.2",
    "cuda.bindings": "cuda-bindings>=13,<14",
}


def remedy(error: ImportError) -> str | None:
    """What to say of a package that cannot be imported; None if it is none of the above.

    >>> remedy(ModuleNotFoundError("No module named 'jinja2'", name="jinja2"))
    "the package jinja2 is not installed; run: pip install 'jinja2'"
    """
    for module, requirement in REQUIREMENTS.items():
        if error.name is None or not f"{error.name}.".startswith(f"{module}."):
            continue
        if isinstance(error, ModuleNotFoundError):
            return f"the package {module} is not installed; run: pip install '{requirement}'"
        return (
            f"the package {module} is broken ({error}); "
            f"run: pip install --force-reinstall '{requirement}'"
        )
    return None
