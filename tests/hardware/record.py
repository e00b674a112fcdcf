"""Records what a GPU makes of the cases: `python -m tests.hardware.record --out DIR [--full DIR]`.

Each family runs in a process of its own, and goes on in a new one behind a case that fails, because
a fault ends the process's context. `--missing` keeps what DIR holds of cases that have not changed.
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


def run_wanted(family: str, folder: Path) -> None:
    """In the child: the cases that the file `wanted` lists, each to a file of its own."""
    from .gpu import Gpu

    gpu = Gpu()
    (folder / "information").write_bytes(pickle.dumps(gpu.describe()))
    for index in map(int, (folder / "wanted").read_text().split()):
        case = families()[family][index]
        (folder / "current").write_text(str(index))
        arrays = case.make_arrays()
        outputs = gpu.run(case, arrays)
        (folder / f"{index}.result").write_bytes(pickle.dumps((case.digest(arrays), outputs)))


def still_valid(family: str, old: Recording) -> dict[str, str]:
    """The cases of `old` whose PTX and operands are what they were, with their digests."""
    return {
        case.name: digest
        for case in families()[family]
        if (digest := case.digest(case.make_arrays())) == old.digests.get(case.name)
    }


def record(
    family: str, out: Path, full: Path | None, limit_s: float, *, only_missing: bool = False
) -> list[str]:
    """Records a family; what failed, with the reason."""
    cases = families()[family]
    file = out / f"{family}.npz"
    old = Recording.load(file) if only_missing and file.exists() else Recording({}, {}, {})
    valid = still_valid(family, old)
    wanted = [index for index, case in enumerate(cases) if case.name not in valid]
    failures: list[str] = []
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_a_row = 0
        while wanted and in_a_row < MANY_FAILURES:
            (folder / "wanted").write_text(" ".join(map(str, wanted)))
            command = [sys.executable, "-m", __spec__.name, "--child", family, temporary]
            left = deadline - time.monotonic()
            if left < 5:
                failures.append(f"{cases[wanted[0]].name} and what follows: no time left")
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
            failed = int(current.read_text()) if current.exists() else wanted[0]
            failures.append(f"{cases[failed].name}: {reason[0]}")
            in_a_row = in_a_row + 1 if failed == wanted[0] else 1
            wanted = wanted[wanted.index(failed) + 1 :]
        information = folder / "information"
        if not information.exists():
            return failures
        details = pickle.loads(information.read_bytes())
        if valid and details["device"] != old.information["device"]:
            return [*failures, f"{file} is of another device: {old.information['device']}"]
        digests, kept, whole = {}, {}, {}
        for index, case in enumerate(cases):
            result = folder / f"{index}.result"
            if result.exists():
                digests[case.name], outputs = pickle.loads(result.read_bytes())
                kept[case.name] = [keep(case, output) for output in outputs]
                whole |= {f"{case.name}#{i}": output for i, output in enumerate(outputs)}
            elif case.name in valid:
                digests[case.name], kept[case.name] = valid[case.name], old.kept[case.name]
        details["date"] = datetime.date.today().isoformat()
        Recording(details, digests, kept).save(file)
        if full is not None:
            np.savez_compressed(full / f"{family}.npz", **whole)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the recordings, one file per family")
    parser.add_argument("--full", type=Path, help="folder for whole outputs, to look at")
    parser.add_argument("--family", nargs="*", help="only these")
    parser.add_argument(
        "--missing", action="store_true", help="keep valid results, run the other cases"
    )
    parser.add_argument("--jobs", type=int, default=4, help="families at once")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a family")
    parser.add_argument("--child", nargs=2, metavar=("FAMILY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        family, folder = options.child
        run_wanted(family, Path(folder))
        return
    if options.out is None:
        parser.error("--out is missing")
    for folder in (options.out, options.full):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    chosen = options.family or list(families())
    with ThreadPoolExecutor(options.jobs) as pool:
        all_failures = pool.map(
            lambda family: record(
                family,
                options.out,
                options.full,
                options.limit,
                only_missing=options.missing,
            ),
            chosen,
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
