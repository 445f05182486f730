"""The mirrors against the headers themselves: what a C++ compiler says of every struct, field and function."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.domain.request import MAX_ALTERNATIVES
from weft_kernels.cpu import ABI, BF16, CODES, FP32, INT4, INT8, LEVELS, SIGNATURES, SOURCES, draft, sampling, structs

HEADER, OF_SAMPLING, OF_DRAFTS = (SOURCES.folder / f"weft_{name}.h" for name in ("cpu", "sampling", "draft"))
TEXT = re.sub(r"//.*", "", HEADER.read_text())
WHOLE = TEXT + re.sub(r"//.*", "", OF_SAMPLING.read_text() + OF_DRAFTS.read_text())
STRUCTS = {name: body for body, name in re.findall(r"typedef struct \{([^}]*)\} (\w+);", WHOLE)}
FUNCTIONS = {
    name: (result, arguments) for result, name, arguments in re.findall(r"(?m)^(\w+\*?) (weft_\w+)\(([^)]*)\);", TEXT)
}
MIRRORS = {
    (mirror.__doc__ or "").split("`")[1]: mirror
    for mirror in vars(structs).values()
    if isinstance(mirror, type) and issubclass(mirror, ctypes.Structure) and mirror is not ctypes.Structure
} | {
    "weft_draw": sampling.SAMPLING_ARGS, "weft_sampled": sampling.SAMPLED,
    "weft_draft_query": draft.DRAFT_QUERY, "weft_draft_found": draft.DraftFoundStruct,
}  # fmt: skip
NUMBERS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "double": ctypes.c_double, "void": None}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")


def field_names(body: str) -> list[str]:
    """`const int32_t* rows, n` and `void (*done)(int32_t layer)` -> names in order."""
    body = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"\1", body)
    declared = [part for line in body.split(";") for part in line.split(",") if part.strip()]
    return [re.sub(r"\[\w+\]", "", part).split()[-1].lstrip("*") for part in declared]


def fields(mirror: Any) -> dict[str, tuple[int, int]]:
    """(offset, size) of each, in order."""
    if isinstance(mirror, np.dtype):
        return {name: (offset, field.itemsize) for name, (field, offset, *_) in (mirror.fields or {}).items()}
    declared = [(name, getattr(mirror, name)) for name, *_ in mirror._fields_]
    return {name: (field.offset, field.size) for name, field in declared}


def printed(folder: Path, statements: list[str]) -> list[str]:
    """What a C++ program prints that knows the header."""
    source = folder / "ask.cpp"
    included = ["<cstddef>", "<cstdio>", *(f'"{file}"' for file in (HEADER, OF_SAMPLING, OF_DRAFTS))]
    lines = [*(f"#include {header}" for header in included), "int main() {", *statements, "}"]
    source.write_text("\n".join(lines))
    subprocess.run(["g++", "-std=c++17", source, "-o", folder / "ask"], check=True, capture_output=True)
    return subprocess.run([folder / "ask"], check=True, capture_output=True, text=True).stdout.splitlines()


def test_every_struct_of_the_header_has_a_mirror_and_no_other():
    assert set(STRUCTS) == set(MIRRORS)


@pytest.mark.parametrize("name", MIRRORS)
def test_a_mirror_has_the_same_fields_in_the_same_order(name: str):
    assert [*fields(MIRRORS[name])] == field_names(STRUCTS[name])


@needs_compiler
def test_every_size_and_offset_is_what_the_compiler_says(tmp_path: Path):
    ours, statements = [], []
    for name, mirror in MIRRORS.items():
        ours.append(f"{name} {mirror.itemsize if isinstance(mirror, np.dtype) else ctypes.sizeof(mirror)}")
        statements.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, (offset, size) in fields(mirror).items():
            ours.append(f"{name}.{field} {offset} {size}")
            statements.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            )
    assert printed(tmp_path, statements) == ours


@needs_compiler
def test_constants_are_those_of_the_header(tmp_path: Path):
    numbers = (
        "WEFT_ABI WEFT_BF16 WEFT_FP32 WEFT_INT8 WEFT_INT4 WEFT_MAX_TOP WEFT_MAX_MATCH WEFT_MAX_PLACES WEFT_MAX_DRAFT"
        " WEFT_GUESS_LENGTHS WEFT_GUESS_CLASSES"
    )
    names = f"{numbers} WEFT_E_LEVEL WEFT_E_SIZE WEFT_E_WORKSPACE WEFT_E_RANKS WEFT_E_MEMORY".split()
    theirs = printed(tmp_path, [f'printf("%d\\n", {name});' for name in names])
    assert sampling.MAX_TOP == MAX_ALTERNATIVES
    limits = [sampling.MAX_TOP, draft.MAX_MATCH, draft.MAX_PLACES, draft.MAX_DRAFT]
    limits += [draft.GUESS_LENGTHS, draft.GUESS_CLASSES]
    assert [int(value) for value in theirs] == [ABI, BF16, FP32, INT8, INT4, *limits, *CODES]


@needs_compiler
def test_levels_stand_in_the_order_of_the_header(tmp_path: Path):
    theirs = printed(tmp_path, [f'printf("%d\\n", WEFT_{name.upper()});' for name in LEVELS])
    assert [int(value) for value in theirs] == list(range(len(LEVELS)))
    assert printed(tmp_path, ['printf("%d\\n", WEFT_LEVELS);']) == [str(len(LEVELS))]


def test_every_function_of_the_header_is_declared():
    ours = {name for name in SIGNATURES if name not in ("weft_source_hash", "weft_compiled_levels")}  # version.cpp's
    assert ours == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_and_gives_what_the_header_says(name: str):
    result, arguments = SIGNATURES[name]
    declared_result, declared = FUNCTIONS[name]
    assert result is (ctypes.c_void_p if "*" in declared_result else NUMBERS[declared_result])
    expected = [] if declared == "void" else [" ".join(argument.split()) for argument in declared.split(",")]
    assert len(arguments) == len(expected)
    for ours, theirs in zip(arguments, expected, strict=True):
        if "*" in theirs:
            assert ctypes.sizeof(ours) == ctypes.sizeof(ctypes.c_void_p)
            if ours is not ctypes.c_void_p:
                assert f"{ours._type_.__name__.removesuffix('Struct').lower()}*" in theirs.replace("weft_", "")
        else:
            assert ours is NUMBERS[theirs.split()[0]]
