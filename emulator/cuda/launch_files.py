"""A kernel without a program: PTX, and a file that says how to launch it.

    kernel = "scale"          # by default the PTX's only one
    grid = [4, 1, 1]
    block = [128, 1, 1]
    args = ["x", 500, 2.0]    # names of arrays, and numbers

    [arrays.x]
    dtype = "float32"
    shape = [500]
    fill = "random"           # or "zeros", a number, or the name of a .npy file
    save = "x.npy"            # where to write it afterwards

`cluster` and `shared_bytes` are as for `Machine.launch`. Several launches, one after the other, are
tables `[[launch]]` with these keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..machine import Machine
from .options import GpuOptions
from .programs import ProgramRun

LAUNCH_KEYS = ("kernel", "grid", "block", "cluster", "shared_bytes", "args")
ARRAY_KEYS = ("dtype", "shape", "fill", "save")
FAILED = 1


def read_launch_file(path: Path) -> dict[str, Any]:
    """What a launch file says.

    Args:
        path: a TOML file, or a JSON file with the same content.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        content = json.loads(text)
    else:
        try:
            import tomllib  # type: ignore[import-not-found]
        except ImportError:
            raise ValueError(
                f"{path}: TOML needs Python 3.11 or newer; a .json file with the same content does"
            ) from None
        content = tomllib.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a table; got {content!r}")
    return content


def run_launch_file(ptx: Path, launch_file: Path, options: GpuOptions) -> ProgramRun:
    """Run the launches of a file, and what the checks found.

    Args:
        ptx: file with the PTX.
        launch_file: as described above.
        options: of the GPU.
    """
    content = read_launch_file(launch_file)
    tables = content.pop("arrays", {})
    launches = content.pop("launch", None)
    if launches is None:
        launches = [content]
    elif content:
        raise ValueError(f"{launch_file}: {', '.join(content)} must stand in a [[launch]]")
    folder = launch_file.parent
    arrays = {
        name: _make_array(f"{launch_file}: arrays.{name}", table, folder, options.seed)
        for name, table in tables.items()
    }
    machine = Machine(
        seed=options.seed,
        schedule=options.schedule,
        checks=options.checks,
        stop_at_findings=options.stop_at_findings,
        strict_tcgen05=options.strict_tcgen05,
    )
    for name, array in arrays.items():
        machine.add_array(array, name)
    stopped = []
    description = launch_file.name
    try:
        module = machine.load(ptx.read_text(encoding="utf-8"), name=ptx.name)
        for number, launch in enumerate(launches):
            where = f"{launch_file}: launch {number}" if len(launches) > 1 else str(launch_file)
            _check_keys(where, launch, LAUNCH_KEYS)
            for key in ("grid", "block"):
                if key not in launch:
                    raise ValueError(f"{where} has no {key}")
            machine.launch(
                module,
                launch.get("kernel"),
                grid=launch["grid"],
                block=launch["block"],
                cluster=launch.get("cluster"),
                shared_bytes=launch.get("shared_bytes", 0),
                args=[_argument(where, value, arrays) for value in launch.get("args", [])],
                in_order=True,
            )
        machine.run()
    except EmulatorError as error:
        if error.finding is None:
            raise
        stopped.append(error.finding)
    for name, table in tables.items():
        if "save" in table:
            np.save(folder / table["save"], arrays[name])
    found = [*machine.findings, *stopped]
    return ProgramRun(
        FAILED if stopped else 0,
        tuple((finding, description) for finding in found),
        (),
        len(launches),
        machine.statistics.warp_instructions,
    )


def _check_keys(where: str, table: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table; got {table!r}")
    for key in table:
        if key not in allowed:
            raise ValueError(f"{where}: {key!r} must be one of {', '.join(allowed)}")


def _make_array(where: str, table: Any, folder: Path, seed: int) -> np.ndarray:
    _check_keys(where, table, ARRAY_KEYS)
    fill = table.get("fill", "zeros")
    if isinstance(fill, str) and fill.endswith(".npy"):
        return np.ascontiguousarray(np.load(folder / fill))
    try:
        dtype = np.dtype(table["dtype"])
        shape = tuple(table["shape"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} needs a dtype and a shape: {error}") from None
    if fill == "random":
        generator = np.random.default_rng(seed)
        if dtype.kind == "f":
            return generator.standard_normal(shape).astype(dtype)
        return generator.integers(0, 100, shape).astype(dtype)
    if isinstance(fill, str) and fill != "zeros":
        raise ValueError(f"{where}: fill must be a number, random, zeros or a .npy; got {fill!r}")
    return np.full(shape, 0 if fill == "zeros" else fill, dtype)


def _argument(where: str, value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, str):
        return value
    if value not in arrays:
        raise ValueError(f"{where}: args: there is no array {value!r}, only {', '.join(arrays)}")
    return arrays[value]
