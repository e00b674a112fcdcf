"""Which statement a mark stands for, however the code is laid out."""

from __future__ import annotations

from pathlib import Path

import pytest

from .marks import find_marks


@pytest.mark.parametrize(
    ("code", "statement"),
    [
        pytest.param("a(); b(); //~ x\nc();", "b();", id="behind"),
        pytest.param("a();\n//~ x\nb(\n  1);\nc();", "b(\n  1);", id="in front"),
        pytest.param("a();\nb(1,\n  2);  //~ x: why\nc();", "b(1,\n  2);", id="several lines"),
        pytest.param("{ if (p) b();  //~ x\n}", "if (p) b();", id="condition"),
        pytest.param("a();\nif (p &&\n q()) {  //~ x\n b(); }", "if (p &&\n q()) {", id="block"),
        pytest.param("//~ x\nif (p) {\n b(); }", "if (p) {", id="in front of a block"),
        pytest.param(
            "#pragma unroll\nfor (i = 0; i < n; ++i) {  //~ x\n",
            "for (i = 0; i < n; ++i) {",
            id="loop",
        ),
        pytest.param(
            "a();\nwait([&] { return b(); });  //~ x\n", "wait([&] { return b(); });", id="lambda"
        ),
        pytest.param(
            "wait(1, [&] {\n  return b();  //~ x\n});", "return b();", id="inside a lambda"
        ),
        pytest.param(
            "a();\nwait(1, [&] {  //~ x\n return b(); });", "wait(1, [&] {", id="head of a lambda"
        ),
        pytest.param("a();\nt = {1, 2};  //~ x\n", "t = {1, 2};", id="initializer"),
        pytest.param("a();\nb |= T{1} << 2;  //~ x\n", "b |= T{1} << 2;", id="constructor"),
        pytest.param(
            "a();\n//~ x\nt = {1, 2};\nb();", "t = {1, 2};", id="in front of an initializer"
        ),
        pytest.param(
            "a();\nint f() { return 1; }  //~ x\n", "int f() { return 1; }", id="function"
        ),
        pytest.param('a();\nasm("b; {" : :);  //~ x\n', 'asm("b; {" : :);', id="string"),
        pytest.param("a();  // not; this\nb();  //~ x\n", "b();", id="comment before"),
    ],
)
def test_statement_of_a_mark(tmp_path: Path, code: str, statement: str) -> None:
    path = tmp_path / "header.cuh"
    path.write_text(code)
    (place,) = find_marks(tmp_path)["x"]
    assert code[place.begin : place.end] == statement
