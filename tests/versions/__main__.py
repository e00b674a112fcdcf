"""The adapter of transformers with each version that an engine asks for: `make test-versions`.

    python -m tests.versions [VERSION ...]

Each is installed into a folder of its own below build/versions, with what it needs, and comes
before the one of the environment. The tests are those of how the adapter meets transformers; a
version's own gaps are skips with a reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "versions"
# Who asks for it.
VERSIONS = {
    "5.16.1": "the oldest of vLLM 0.33",
    "5.19.0": "SGLang 0.5.23",
    "5.20.2": "the newest of vLLM 0.33",
    "5.24.0": "the newest",
}
TESTS = "tests/integrations/test_transformers.py"
CHOSEN = (
    "generates_what_the_eager and sm_90a or fp8_experts_are or fp4_experts_are or rounded_if"
    " or can_be_saved or left_to or two_ranks or needs_the_experts"
)


def main(versions: list[str]) -> int:
    failed = False
    for version in versions:
        packages = installed(version)
        search = f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", TESTS, "-k", CHOSEN]
        result = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": search},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        failed |= result.returncode != 0
        if result.returncode:
            print(result.stdout[-8000:])
        counts = re.findall(r"(\d+ (?:passed|failed|skipped|error)\w*)", result.stdout)
        who = VERSIONS.get(version, "")
        print(f"{version:8} {who:26} {', '.join(counts[-3:])}", flush=True)
    return int(failed)


def installed(version: str) -> Path:
    folder = FOLDER / f"transformers-{version}"
    ready = folder / ".ready"
    if not ready.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, f"transformers=={version}"], check=True)
        ready.touch()
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(VERSIONS)))
