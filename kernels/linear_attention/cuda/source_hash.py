"""The hash of the kernels' source, which a record of GPU tests refers to (tests/gpu_record.py)."""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

from lingpt.kernels.linear_attention.cuda.compile import SOURCE_FOLDER


def source_hash(folder: Path = SOURCE_FOLDER) -> str:
    """A hash of the CUDA source, of the Python that compiles and launches it, and of the constants that it is
    compiled with. Comments in CUDA, docstrings and comment lines in Python, and blank space do not count, so
    that only changes of code make a record of GPU tests stale."""
    digest = hashlib.sha256()
    for path in [*sorted(folder.rglob("*")), *folder.parents[1].glob("numerics.py")]:
        if path.suffix in (".cu", ".cuh", ".h"):
            text = strip_cuda(path.read_text())
        elif path.suffix == ".py":
            text = strip_python(path.read_text())
        else:
            continue
        digest.update(f"{path.name}\0{text}\0".encode())
    return digest.hexdigest()[:16]


def strip_cuda(text: str) -> str:
    """C++ source as tokens separated by single blanks, without comments (strings are kept whole)."""
    string_or_comment = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    bare = string_or_comment.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)
    return " ".join(re.findall(r'"(?:\\.|[^"\\])*"|\w+|\S', bare))


def strip_python(text: str) -> str:
    """Python source without docstrings, lines that are only a comment, and blank lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            end = first.end_lineno or first.lineno
            lines[first.lineno - 1 : end] = [""] * (end - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
