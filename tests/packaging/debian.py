"""What Debian's packages hold, unpacked into a folder: nothing is installed on this machine, and
its own packages stay as they are."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def unpack(
    packages: Sequence[str], folder: Path, architecture: str, suite: str | None = None
) -> None:
    """Unpack packages, and those that they need, into `folder`, which is complete once it is there.

    architecture: Debian's name for it. suite: of Debian's, such as "sid"; None: as this machine.

    Raises FileNotFoundError where there is no apt, subprocess.CalledProcessError where apt fails.
    """
    # apt with a state of its own takes no notice of what this machine has installed.
    own = folder.with_name(f"{folder.name}-packages")
    for below in ("state/lists/partial", "cache/archives/partial"):
        (own / below).mkdir(parents=True, exist_ok=True)
    (own / "status").touch()
    options = {
        "Dir::State": own / "state",
        "Dir::State::status": own / "status",
        "Dir::Cache": own / "cache",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true",
    }
    if suite is not None:
        (own / "sources").write_text(f"deb [signed-by={_KEYS}] {_mirror()} {suite} main\n")
        options |= {"Dir::Etc::sourcelist": own / "sources", "Dir::Etc::sourceparts": "/dev/null"}
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    _run([*apt, "update"])
    _run([*apt, "-y", "--download-only", "install", *packages])
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for package in sorted((own / "cache" / "archives").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(unfinished)])
    unfinished.rename(folder)


def python(version: str, folder: Path, with_torch: bool = False) -> Path:
    """Debian's newest Python of a version, such as "3.14", with venv and pip, as a script: it runs
    with the C library that it was built for, which may be newer than this machine's.

    with_torch: the libraries of Debian's PyTorch are there, too, for `torch_for`."""
    root = folder / f"python{version}{'-torch' if with_torch else ''}"
    if not root.exists():
        packages = [f"python{version}", f"python{version}-venv", "libstdc++6", "ca-certificates"]
        more = ["python3-torch"] if with_torch else []
        unpack([*packages, *more], root, ARCHITECTURES[platform.machine()], "sid")
    # Python finds its files by where argument 0 lies: the script has the name of what it runs.
    script = root / "usr" / "bin" / f"python{version}"
    program = script.with_name(f"{script.name}-program")
    if not program.exists():
        # Where venv finds pip.
        wheels = "/usr/share/python-wheels"
        for build in (root / "usr" / "lib" / script.name).glob("_sysconfigdata_*.py"):
            build.write_text(build.read_text().replace(f"'{wheels}", f"'{root}{wheels}"))
        script.rename(program)
    libraries = root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    (loader,) = libraries.glob("ld-linux-*.so.*")
    # In the last two Debian's installation would choose one of several by a link.
    places = (libraries, libraries.parent, libraries / "blas", libraries / "lapack")
    search = ":".join(map(str, places))
    script.write_text(
        f'#!/bin/sh\nexec {loader} --argv0 "$0" --library-path {search} {program} "$@"\n'
    )
    script.chmod(0o755)
    return script


def torch_for(script: Path) -> Path | None:
    """A folder with Debian's PyTorch alone, which has no CUDA, for a `python` with its libraries;
    None if Debian made it for another version of Python."""
    root = script.parents[2]
    packages = root / "usr" / "lib" / "python3" / "dist-packages"
    version = script.name.removeprefix("python").replace(".", "")
    if not list(packages.glob(f"torch/_C.cpython-{version}-*.so")):
        return None
    alone = root / "torch"
    alone.mkdir(exist_ok=True)
    for path in [packages / "torch", packages / "torchgen", *packages.glob("torch-*.dist-info")]:
        link = alone / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return alone


def _mirror() -> str:
    """Where this machine has its packages from. Raises FileNotFoundError if it says nothing."""
    places = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
    for place in places.split():
        if place.rstrip("/").endswith("/debian"):
            return place
    raise FileNotFoundError("apt's sources name no archive of Debian's")


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
