"""Records what a GPU makes of the cases: `python -m tests.hardware.record --out DIR [--full DIR]`.

Each family runs in a process of its own, and goes on in a new one behind a case that fails, because
a fault ends the process's context.
"""

from __future__ import annotations

import argparse
import datetime
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .recording import Recording, keep
from .suite import families

MANY_FAILURES = 8  # in a row: the machine cannot run the family


def run_from(family: str, first: int, folder: Path) -> None:
    """In the child: cases from `first` on, each to a file of its own."""
    from .gpu import Gpu

    gpu = Gpu()
    (folder / "information").write_bytes(pickle.dumps(gpu.describe()))
    for index, case in enumerate(families()[family][first:], first):
        (folder / "current").write_text(str(index))
        arrays = case.make_arrays()
        outputs = gpu.run(case, arrays)
        (folder / f"{index}.result").write_bytes(pickle.dumps((case.digest(arrays), outputs)))


def record(family: str, out: Path, full: Path | None, limit_s: float) -> list[str]:
    """Records a family; what failed, with the reason."""
    cases = families()[family]
    failures: list[str] = []
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        first = in_a_row = 0
        while first < len(cases) and in_a_row < MANY_FAILURES:
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--child",
                family,
                str(first),
                temporary,
            ]
            left = deadline - time.monotonic()
            if left < 5:
                failures.append(f"{cases[first].name} and what follows: no time left")
                break
            try:
                child = subprocess.run(
                    command, capture_output=True, text=True, timeout=min(left, 30 + len(cases) / 5)
                )
                reason = child.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
                if child.returncode == 0:
                    break
            except subprocess.TimeoutExpired:
                reason = ["it did not end"]
            current = folder / "current"
            failed = int(current.read_text()) if current.exists() else first
            failures.append(f"{cases[failed].name}: {reason[0]}")
            in_a_row = in_a_row + 1 if failed == first else 1
            first = failed + 1
        information = folder / "information"
        if not information.exists():
            return failures
        digests, kept, whole = {}, {}, {}
        for index, case in enumerate(cases):
            file = folder / f"{index}.result"
            if not file.exists():
                continue
            digests[case.name], outputs = pickle.loads(file.read_bytes())
            kept[case.name] = [keep(case, output) for output in outputs]
            whole |= {f"{case.name}#{i}": output for i, output in enumerate(outputs)}
        details = pickle.loads(information.read_bytes())
        details["date"] = datetime.date.today().isoformat()
        Recording(details, digests, kept).save(out / f"{family}.npz")
        if full is not None:
            np.savez_compressed(full / f"{family}.npz", **whole)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the recordings, one file per family")
    parser.add_argument("--full", type=Path, help="folder for whole outputs, to look at")
    parser.add_argument("--family", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=4, help="families at once")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a family")
    parser.add_argument(
        "--child", nargs=3, metavar=("FAMILY", "FIRST", "FOLDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.child:
        family, first, folder = options.child
        run_from(family, int(first), Path(folder))
        return
    if options.out is None:
        parser.error("--out is missing")
    for folder in (options.out, options.full):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    chosen = options.family or list(families())
    with ThreadPoolExecutor(options.jobs) as pool:
        all_failures = pool.map(
            lambda family: record(family, options.out, options.full, options.limit), chosen
        )
        num_failures = 0
        for family, failures in zip(chosen, all_failures, strict=True):
            print(f"{family}: {len(families()[family])} cases, {len(failures)} failed", flush=True)
            for failure in failures:
                print(f"  {failure}", flush=True)
            num_failures += len(failures)
    sys.exit(1 if num_failures else 0)


if __name__ == "__main__":
    main()
