"""What the parser refuses: with the line, whatever the text is, and never by the process's end."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import InvalidPtx, Machine, OutOfBounds, Unsupported

from .raw_ptx import HEADER, entry, run_body

DEEP = 100_000
UNFINISHED = {
    "pragma of a module": HEADER + '.pragma "x"',
    "pragma of a function": HEADER + '.visible .entry k() .pragma "x"',
    "pragma in a body": HEADER + '.visible .entry k() { .pragma "x"',
    "attribute": HEADER + ".global .attribute( .b8 x;",
    "call targets": HEADER + ".visible .entry k() { l: .calltargets f",
    "call prototype": HEADER + ".visible .entry k() { l: .callprototype _",
    "section": HEADER + ".section .debug_str {",
    "string": HEADER + '.visible .entry k() { .pragma "x',
    "comment": HEADER + ".visible .entry k() { /* x",
    "body": HEADER + ".visible .entry k() { ret;",
    "instruction": HEADER + ".visible .entry k() { ret",
    "vector": HEADER + ".visible .entry k() { mov.b64 {",
    "address": HEADER + ".visible .entry k() { ld.u32 x, [x",
    "parameters": HEADER + ".visible .entry k(",
    "initializer": HEADER + ".global .b32 x[4] = {1, 2",
    "array": HEADER + ".global .b32 x[",
    "registers": HEADER + ".visible .entry k() { .reg .b32 %r<",
    "location": HEADER + ".visible .entry k() { .loc 1 2",
}


@pytest.mark.parametrize("text", UNFINISHED.values(), ids=UNFINISHED)
def test_a_text_that_ends_early_is_an_error(text: str) -> None:
    with pytest.raises(InvalidPtx, match=r"PTX line 4: .*(does not end|the end of the text)"):
        Machine().load(text)


@pytest.mark.parametrize("length", range(0, 700, 7))
def test_a_text_cut_anywhere_is_an_error_or_complete(length: int) -> None:
    text = entry("ld.global.v2.u32 {%r1, %r2}, [%p0+8]; @!%c1 bra L; L: ret;", 1)
    try:
        Machine().load(text[:length])
    except InvalidPtx:
        assert length < len(text)


@pytest.mark.parametrize(
    "body",
    [
        "{" * DEEP + "}" * DEEP,
        "mov.u32 %r1, " + "(" * DEEP + "1" + ")" * DEEP + ";",
        "mov.u32 %r1, " + "[%r1," * DEEP + ";",
        "mov.u32 %r1, " + "{" * DEEP + "%r1" + "}" * DEEP + ";",
        "mov.u32 %r1, " + "!" * DEEP + "%r1;",
    ],
    ids=["blocks", "parentheses", "brackets", "braces", "negations"],
)
def test_nesting_has_a_limit(body: str) -> None:
    with pytest.raises(InvalidPtx, match="PTX line 6: brackets are nested more than 256 deep"):
        Machine().load(entry(body, 0))


def test_nesting_of_an_initializer_has_a_limit() -> None:
    text = f".global .b32 z[1] = {'{' * DEEP}1{'}' * DEEP};\n"
    with pytest.raises(InvalidPtx, match="PTX line 4: brackets are nested more than 256 deep"):
        Machine().load(entry("", 0, module=text))


def test_nesting_within_the_limit_is_fine() -> None:
    out = np.zeros(1, np.uint32)
    run_body("{" * 200 + "st.global.u32 [%p0], 7;" + "}" * 200, out, threads=1)
    assert out[0] == 7


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (".global .b32 x[2] = {1, 2, 3};", "the initializer of 'x' has 3 entries, the variable 2"),
        (".global .u64 x[1] = {x, x};", "has 2 entries, the variable 1"),
        (".global .b32 x = {1, 2};", "has 2 entries, the variable 1"),
        (".global .pred x[] = {1};", "a variable cannot be of type .pred"),
        (".global .pred x[4];", "a variable cannot be of type .pred"),
        (".global .b128 x = 1;", "an initializer cannot be of type .b128"),
        (".global .b16 x = 0f3F800000;", "a floating number does not fit into a .b16"),
        (".shared .b32 x = 1;", "a variable in .shared has no initializer"),
        (".global .b8 x[18446744073709551615];", "an array's size must be 0 to"),
        (".global .b64 x[2305843009213693953];", "an array's size must be 0 to"),
        (".global .b32 x[4294967296][4294967296];", "an array's size must be 0 to"),
        (".global .b32 x[-1];", "an array's size must be 0 to .*, not -1"),
        (".global .b32 x[99999999999999999999];", "an integer of at most 64 bits"),
        (".global .align 3 .b32 x;", r"\.align must be a power of two, not 3"),
        (".global .align 0 .b32 x;", r"\.align must be 1 to 65536, not 0"),
        (".global .align 4294967296 .b32 x;", r"\.align must be 1 to 65536, not 4294967296"),
        (".global .b32 x;\n.global .b32 x;", "variable 'x' is defined twice"),
        (".func f() { ret; }\n.func f() { ret; }", "function 'f' is defined twice"),
    ],
)
def test_a_variable_that_cannot_be_is_refused(variable: str, message: str) -> None:
    with pytest.raises(InvalidPtx, match=message):
        Machine().load(entry("", 0, module=variable + "\n"))


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".local .b8 z[4294967295]; .local .b8 y[64];", "the local memory of kernel ends at byte"),
        (".local .b8 z[524289];", "ends at byte 524289; a thread has 524288"),
        (".local .b8 z[8]; .local .b8 z[8];", "variable 'z' is defined twice"),
        (".reg .b32 %q<4294967297>;", "the number of registers must be 0 to 2147483647"),
        (".reg .b32 %q<-1>;", "the number of registers must be 0 to 2147483647, not -1"),
        ("call kernel;", "a kernel cannot be called"),
        ("@%r1 bra L; L:", "the guard is not a predicate register"),
        ("ld.global.u32 %r1, [%h1];", "register %h1 is no address"),
        ("ld.global.u32 %r1, [%c1];", "register %c1 is no address"),
        ("mov.u32 %r1, 12q;", "a number of at most 64 bits, found '12q'"),
        ("mov.b64 %rd1, 99999999999999999999;", "a number of at most 64 bits"),
        ("mma.sync.aligned.m16n8kx.row.col.f32.f16.f16.f32 %r1, %r1, %r1, %r1;", "cannot be read"),
        ("call;", "an operand is missing"),
        ("ld.shared.u32 %r1, [%r2+4294967296];", "the offset of an address has more than 32 bits"),
        ("ld.shared.u32 %r1, [%r2+-2147483649];", "the offset of an address has more than 32 bits"),
        ("cp.async.wait_group 4294967296;", "4294967296 does not fit into 32 bits"),
        ("cp.async.bulk.wait_group.read 4294967296;", "4294967296 does not fit into 32 bits"),
        ("wgmma.wait_group.sync.aligned -1;", "-1 does not fit into 32 bits"),
        ("mov.u32 %r1;", "expected 2 operands, found 1"),
        ("add.u32 %r1, {" + "%r1," * 2000 + "%r1}, %r1;", "a list has too many elements"),
    ],
)
def test_a_statement_that_cannot_be_is_refused(declaration: str, message: str) -> None:
    with pytest.raises(InvalidPtx, match=f"PTX line 6: .*{message}"):
        Machine().load(entry(declaration, 0))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (".shared .b8 z[4294967295];", "take 4294967295 bytes; a CTA has at most 232448"),
        (".shared .b8 y[232448];\n.shared .b8 z[1];", "a CTA has at most 232448"),
    ],
)
def test_shared_variables_that_no_cta_holds_are_refused(use: str, message: str) -> None:
    names = "mov.u32 %r1, z; " + ("mov.u32 %r2, y;" if " y[" in use else "")
    with pytest.raises(InvalidPtx, match=message):
        Machine().load(entry(names, 0, module=use + "\n"))


@pytest.mark.parametrize(
    ("directive", "message"),
    [
        (".maxntid 4294967297", r"\.maxntid must be 1 to 1024"),
        (".maxntid 1024, 2, 1", r"\.maxntid has 2048 in all; at most 1024"),
        (".reqntid 65536, 65536, 1", r"\.reqntid must be 1 to 1024"),
        (".reqnctapercluster 4294967297", r"\.reqnctapercluster must be 1 to 16"),
        (".reqnctapercluster 8, 8", r"\.reqnctapercluster has 64 in all; at most 16"),
        (".maxnreg 256", r"\.maxnreg must be 1 to 255, not 256"),
    ],
)
def test_a_directive_beyond_the_hardware_is_refused(directive: str, message: str) -> None:
    with pytest.raises(InvalidPtx, match=message):
        Machine().load(entry("", 0, directives=directive))


def test_parameters_beyond_the_hardware_are_refused() -> None:
    text = HEADER + ".visible .entry k(.param .align 8 .b8 p[32768]) { ret; }"
    with pytest.raises(InvalidPtx, match="the parameters of k end at byte 32768; at most 32764"):
        Machine().load(text)


def test_what_is_no_parameter_cannot_be_passed() -> None:
    module = ".shared .b8 s[64];\n.func f(.param .b8 p[64]) { ret; }\n"
    with pytest.raises(InvalidPtx, match=r"'s' is no .param variable of the function that calls"):
        Machine().load(entry("mov.u32 %r1, s; call f, (s);", 0, module=module))


def test_a_driver_function_reads_its_parameters_from_the_frame_only() -> None:
    module = ".extern .func free(.param .b64 p);\n"
    with pytest.raises(OutOfBounds, match=r"read of 8 bytes at local address 0xf00000"):
        run_body("mov.u32 %r1, 15728640; call free, (%r1);", module=module, threads=1)


@pytest.mark.parametrize("size", ["4294967295", "18446744073709551615", "524289"])
def test_the_stack_does_not_wrap(size: str) -> None:
    with pytest.raises(OutOfBounds, match="stack overflow"):
        run_body(f"mov.b64 %rd1, {size}; alloca.u64 %rd2, %rd1;", threads=1)


def test_initializers_keep_their_bits() -> None:
    module = (
        ".global .b32 a[4] = {0f3F800000, 1065353216, -1};\n"
        ".global .f64 b[2] = {1.5, 0f3F800000};\n"
    )
    out = np.zeros(8, np.uint32)
    body = "mov.u64 %rd1, a;" + "".join(
        f"ld.global.u32 %r{i}, [%rd1+{4 * i}]; st.global.u32 [%p0+{4 * i}], %r{i};"
        for i in range(4)
    )
    body += "mov.u64 %rd2, b;" + "".join(
        f"ld.global.u32 %r{i}, [%rd2+{4 * i}]; st.global.u32 [%p0+{16 + 4 * i}], %r{i};"
        for i in range(4)
    )
    run_body(body, out, module=module, threads=1)
    assert out[:4].tolist() == [0x3F800000, 0x3F800000, 0xFFFFFFFF, 0]
    assert out[4:].view(np.float64).tolist() == [1.5, 1.0]


def test_an_initializer_names_what_is_there() -> None:
    module = ".global .u64 x[1] = {nowhere};\n"
    machine = Machine()
    loaded = machine.load(entry("mov.u64 %rd1, x;", 0, module=module))
    for _ in range(2):  # the first failure leaves nothing behind
        with pytest.raises(Unsupported, match="the initializer of x refers to nowhere"):
            machine.launch(loaded, grid=(1, 1, 1), block=(1, 1, 1))
