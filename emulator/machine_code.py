"""What a kernel's machine code says of its instructions: issue, pipes and stalls, by PTX line.

The compiler writes into each machine instruction how many cycles its warp waits before the next one
and which results it waits for. `nvdisasm` shows both, and which line of PTX the instruction comes
from, if the kernel was compiled with line information.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .chips import Chip
from .errors import DisassemblyError

DISASSEMBLER_VARIABLE = "WARPCHECK_NVDISASM"


@lru_cache(maxsize=1)
def _in_packages() -> str | None:
    """nvdisasm of the package nvidia-cuda-nvdisasm, which has it in nvidia/cu13/bin."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    folders.append(str(Path(sysconfig.get_path("purelib")) / "nvidia"))
    for folder in folders:
        for found in sorted(Path(folder).glob("*/bin/nvdisasm"), reverse=True):
            if os.access(found, os.X_OK):
                return str(found)
    return None


def find_disassembler() -> str | None:
    """nvdisasm, by its path: what WARPCHECK_NVDISASM names, else that of the Python package
    `nvidia-cuda-nvdisasm`, else that in PATH. None if there is none, or the variable is empty.
    """
    named = os.environ.get(DISASSEMBLER_VARIABLE)
    if named is not None:
        return named or None
    return _in_packages() or shutil.which("nvdisasm")


@dataclass(frozen=True)
class Instruction:
    """A machine instruction.

    Attributes:
        address: in its function.
        text: as nvdisasm writes it.
        line: of PTX, 0 if unknown.
        stall: cycles before its warp's next one.
        sets: the counter that tells of its result, or None.
        frees: the counter that tells when its operands have been read, or None.
        waits: counters that it waits for, a bit each.
    """

    address: int
    text: str
    line: int
    stall: int
    sets: int | None
    frees: int | None
    waits: int

    @property
    def opcode(self) -> str:
        words = self.text.split()
        return words[1 if words[0].startswith("@") and len(words) > 1 else 0].rstrip(";")

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass
class LineCost:
    """What a line of PTX costs when a warp executes it once.

    Attributes:
        issue: machine instructions in all.
        alu: of them those of the ALU.
        fma: those of the FMA pipe.
        xu: those of the special-function unit.
        cycles: that the warp takes by itself.
        has_branch: whether some of its instructions jump.
    """

    issue: float = 0
    alu: float = 0
    fma: float = 0
    xu: float = 0
    cycles: float = 0
    has_branch: bool = False


_LINE = re.compile(r'\s*//## File "\.nv_debug_ptx_txt(?:\.\d+)?", line (\d+)')
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_CODE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_REST = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_FUNCTION = re.compile(r"\s*\.section\s+\.text\.([^,]+),")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_NO_COUNTER = 7


def read_costs(cubin: bytes, ptx: str, kernel: str, chip: Chip) -> dict[int, LineCost]:
    """What each line of a kernel's PTX costs, as its machine code says, for `Machine.load`.

    Args:
        cubin: the machine code, compiled with line information.
        ptx: the text that it was compiled from.
        kernel: its name in the PTX.
        chip: whose latencies count for results that always come as late.

    Raises:
        DisassemblyError: there is no nvdisasm, or it fails; or no instruction has a line of PTX.
    """
    disassembler = find_disassembler()
    if disassembler is None:
        raise DisassemblyError(
            "there is no nvdisasm: install nvidia-cuda-nvdisasm, or name its path in "
            + DISASSEMBLER_VARIABLE
        )
    blocks = disassemble(cubin, kernel, disassembler=disassembler)
    if not any(one.line for block in blocks for one in block):
        raise DisassemblyError(
            f"the machine code of {kernel!r} has no line information (-lineinfo)"
        )
    latencies = Latencies(
        chip.value("shared_latency_cycles"),
        chip.value("shuffle_latency_cycles"),
        chip.value("xu_latency_cycles"),
    )
    return line_costs(ptx, blocks, latencies)


def disassemble(cubin: bytes, kernel: str, *, disassembler: str) -> list[list[Instruction]]:
    """The basic blocks of the kernel's machine code, in the order of their addresses.

    Raises DisassemblyError.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [disassembler, "-c", "-hex", "-gp", str(file)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise DisassemblyError(f"{disassembler} cannot be run: {error}") from error
    if result.returncode:
        raise DisassemblyError(f"{disassembler} failed: {result.stderr.strip()}")
    return parse_listing(result.stdout.splitlines(), kernel)


def parse_listing(listing: Iterable[str], kernel: str) -> list[list[Instruction]]:
    """`disassemble` of what `nvdisasm -c -hex -gp` printed."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    fresh: list[str] = []
    line, function, low = 0, None, None
    for text in listing:
        if found := _FUNCTION.match(text):
            function, line = found[1], 0
        if function != kernel:
            continue
        if found := _LINE.match(text):
            line = int(found[1])
        elif found := _LABEL.match(text):
            fresh.append(found[1])
        elif found := _CODE.match(text):
            low = int(found[1], 16), found[2]
            labels.update(dict.fromkeys(fresh, low[0]))
            fresh.clear()
        elif low and (found := _REST.match(text)):
            instructions.append(_decoded(*low, line, int(found[1], 16)))
            low = None
    if not instructions:
        raise DisassemblyError(f"the listing has no code of {kernel!r}")
    return _in_blocks(instructions, labels)


def _decoded(address: int, text: str, line: int, high: int) -> Instruction:
    """high: the upper half of the instruction, whose upper bits say how it is issued."""
    sets, frees = high >> 46 & 7, high >> 49 & 7
    return Instruction(
        address,
        text,
        line,
        high >> 41 & 15,
        None if sets == _NO_COUNTER else sets,
        None if frees == _NO_COUNTER else frees,
        high >> 52 & 63,
    )


_JUMPS = ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BREAK")


def _in_blocks(
    instructions: Sequence[Instruction], labels: Mapping[str, int]
) -> list[list[Instruction]]:
    targets = {
        labels[found[1]]
        for one in instructions
        if one.name in _JUMPS and (found := _TARGET.search(one.text)) and found[1] in labels
    }
    blocks: list[list[Instruction]] = [[]]
    for one in instructions:
        if blocks[-1] and (one.address in targets or blocks[-1][-1].name in _JUMPS):
            blocks.append([])
        blocks[-1].append(one)
    return blocks


# ---- pipes

_FMA = {"FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HMUL2", "HADD2", "FFMA2", "FMUL2", "FADD2"}
_XU = {"MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV", "I2FP", "I2I"}
_NEITHER = {
    *("BRA", "BRX", "EXIT", "RET", "CALL", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "NOP", "YIELD"),
    *("ENDCOLLECTIVE", "NANOSLEEP", "S2R", "S2UR", "CS2R", "B2R", "R2B", "BAR", "DEPBAR", "SHFL"),
    *("LD", "LDG", "LDS", "LDSM", "LDL", "LDC", "LDCU", "LDTM", "ST", "STG", "STS", "STSM", "STL"),
    *("STTM", "ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDUX", "CREDUX", "SYNCS", "SYNCSU"),
    *("MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "FENCE", "WARPGROUP", "QGMMA", "HGMMA", "IGMMA"),
    *("ELECT", "R2UR", "MEMSET", "LDGSTS", "LDGDEPBAR", "ACQBULK", "PREEXIT", "WARPGROUPSET"),
}


def _pipe(name: str) -> str:
    if name in _FMA:
        return "fma"
    if name in _XU:
        return "xu"
    return "" if name in _NEITHER or name.startswith("U") else "alu"


# ---- from machine code to PTX

# What stands for a line of PTX one to one. Memory, barriers and products cannot be left out or
# joined, and so tell which block of PTX a block of machine code is.
_ANCHORS = {
    *("LDG", "LDS", "LDSM", "LDTM", "LD", "STG", "STS", "STSM", "STTM", "ST", "ATOM", "ATOMG"),
    *("ATOMS", "RED", "REDG", "SYNCS", "BAR", "SHFL", "REDUX", "QGMMA", "HGMMA", "IGMMA", "HMMA"),
    *("IMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCBAR", "UTCCP", "UTMALDG", "UTMASTG", "UBLKCP"),
}
_ONE_TO_ONE = _ANCHORS | {"MUFU", "FFMA", "FMUL", "FADD"}
_ANCHOR_VOTES = 4
_LEAST_SHARE = 0.05  # of a block's votes, that a line's own block must have to be charged there

_STATEMENT = re.compile(r"\s*(?:@!?[%\w]+\s+)?([a-z][\w.:]*)\b[^:]*;?")
_PTX_LABEL = re.compile(r"\s*[$%\w.]+:\s*$")
_ENDS_BLOCK = ("bra", "brx", "ret", "exit", "trap", "call")


def _ptx_blocks(ptx: str) -> dict[int, int]:
    """By line of the text, from 1: the first line of its basic block."""
    blocks: dict[int, int] = {}
    leader, fresh = 0, True
    for number, text in enumerate(ptx.splitlines(), 1):
        stripped = text.strip()
        if not stripped or stripped.startswith((".", "//", "{", "}", "(", ")")):
            continue
        if _PTX_LABEL.match(text):
            fresh = True
            continue
        found = _STATEMENT.match(text)
        if not found:
            continue
        if fresh:
            leader, fresh = number, False
        blocks[number] = leader
        if found[1].partition(".")[0] in _ENDS_BLOCK:
            fresh = True
    return blocks


@dataclass(frozen=True)
class Latencies:
    """Cycles until a result is there that comes as late each time.

    Attributes:
        shared: loads of shared memory.
        shuffle: exchanges between lanes.
        xu: special functions.
        constant: parameters and special registers; an estimate, no measurement is known.
    """

    shared: float
    shuffle: float
    xu: float
    constant: float = 24


def _latency(name: str, latencies: Latencies) -> float:
    if name in ("LDS", "LDSM"):
        return latencies.shared
    if name in ("SHFL", "REDUX"):
        return latencies.shuffle
    if name in _XU:
        return latencies.xu
    if name in ("S2R", "S2UR", "LDC", "LDCU", "B2R"):
        return latencies.constant
    return 0  # known only when it happens


def _own_cycles(blocks: Iterable[Sequence[Instruction]], latencies: Latencies) -> Iterable[float]:
    """For each instruction, what its warp takes from it to the next, with waits for results that
    always come as late."""
    for block in blocks:
        now = 0.0
        ready: dict[int, float] = defaultdict(float)
        for one in block:
            start = max([now, *(ready[bit] for bit in range(6) if one.waits >> bit & 1)])
            if one.sets is not None:
                ready[one.sets] = max(ready[one.sets], start + _latency(one.name, latencies))
            end = start + max(one.stall, 1)
            yield end - now
            now = end


def line_costs(
    ptx: str, blocks: Sequence[Sequence[Instruction]], latencies: Latencies
) -> dict[int, LineCost]:
    """What each line of PTX costs; lines that are not named cost nothing.

    A block of machine code belongs to the blocks of PTX whose lines it has. What comes from
    elsewhere, because the compiler moved it, is charged where most of its block comes from. Where
    the compiler wrote a block of PTX more than once, as in an unrolled loop, the mean counts.
    """
    of_line = _ptx_blocks(ptx)
    copies = _copies(blocks, of_line)
    costs: dict[int, LineCost] = defaultdict(LineCost)
    cycles = iter(_own_cycles(blocks, latencies))
    for block in blocks:
        votes: Counter[int] = Counter()
        for one in block:
            if one.line in of_line:
                votes[of_line[one.line]] += _ANCHOR_VOTES if one.name in _ANCHORS else 1
        own = [next(cycles) for _ in block]
        if not votes:
            continue
        total = votes.total()
        home = votes.most_common(1)[0][0]
        for one, taken in zip(block, own, strict=True):
            leader = of_line.get(one.line)
            stays = leader is not None and votes[leader] >= _LEAST_SHARE * total
            line, leader = (one.line, leader) if stays and leader else (home, home)
            share = 1 / copies.get(leader, 1)
            cost = costs[line]
            cost.issue += share
            is_jump = one.name in _JUMPS
            # What a taken branch costs is a parameter of the chip.
            cost.cycles += share * (1 if is_jump else taken)
            cost.has_branch |= is_jump
            pipe = _pipe(one.name)
            if pipe:
                wide = 2 if one.opcode.startswith("IMAD.WIDE") else 1
                setattr(cost, pipe, getattr(cost, pipe) + share * wide)
    return dict(costs)


def _copies(
    blocks: Iterable[Sequence[Instruction]], of_line: Mapping[int, int]
) -> dict[int, float]:
    """How often the machine code has each block of PTX, by the block's first line: as often as what
    stands for a line one to one, else as often as the branch at its end."""
    counts: Counter[tuple[int, str]] = Counter()
    branches: Counter[int] = Counter()
    for one in (one for block in blocks for one in block if one.line in of_line):
        if one.name in _ONE_TO_ONE:
            counts[one.line, one.name] += 1
        elif one.name == "BRA":
            branches[of_line[one.line]] += 1
    seen: dict[int, list[int]] = defaultdict(list)
    for (line, _), count in counts.items():
        seen[of_line[line]].append(count)
    by_mark = {leader: max(1, statistics.median(found)) for leader, found in seen.items()}
    return {**branches, **by_mark}


__all__ = ["LineCost", "find_disassembler", "read_costs"]
