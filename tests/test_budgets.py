"""Every file from elsewhere goes through `reading.py`, whose limits keep the time and memory that `reading.toml` promises."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmscope.reading import ANY, LIMITS
from gemmscope.results.base import SCHEMA_VERSION
from support.sources import PACKAGE, TREES

OPENS = {"open", "read_text", "read_bytes", "fromfile", "memmap", "load_file", "safe_open", "ZipFile", "connect", "fdopen"}
OWN = {  # what these files open is no file from elsewhere
    "reading.py": "the reader itself",
    "explain/trace_file.py": "through reading.InputFile",
    "files.py": "writes",
    "folders.py": "folders of gemmscope",
    "toml.py": "facts of the package",
    "writers/html.py": "assets of the package",
    "cli/commands.py": "templates of the package",
    "cli/main.py": "standard streams",
    "__main__.py": "standard streams",
    "forecast/coefficients.py": "facts of the package",
    "forecast/calibration.py": "facts of the package; a user's calibration through reading.read_text",
    "process.py": "/proc, and the pipe between processes of gemmscope",
    "gpu/environment.py": "/proc",
    "pool/gpus.py": "/sys",
    "pool/place_worker.py": "/sys, and the pipe between processes of gemmscope",
    "pool/ray_actor.py": "/proc, folders of gemmscope, and its own package",
    "pool/ray_bridge.py": "the pipe between processes of gemmscope, and its own package",
    "pool/measure_unit.py": "the code of the user's module, limited there; it is run, not parsed",
    "job/load.py": "the code of the user's module, limited there; it is hashed, not parsed",
    "model/python_code.py": "the sources that a recipe of the user's imports, limited there; a file that cannot be read is none",
    "step/worker.py": "/proc",
    "workload/factory.py": "the code of the user's module; it is run, not parsed",
    "workload/trace.py": "the answer of its own worker",
    "workload/trace_worker.py": "the request of its own parent",
    "engine/journal.py": "the journal of gemmscope, through SQLite",
}


def opened(tree: ast.AST) -> Iterator[str]:
    """The calls that open a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            imported = isinstance(node.func, ast.Name) and name != "open"  # reading.read_text and reading.read_bytes
            if name in OPENS and not imported:
                yield name


def test_only_the_reader_opens_files_from_elsewhere() -> None:
    """A new place that opens files goes through `reading.py`, or says here whose files they are."""
    opening = {str(path.relative_to(PACKAGE)): names for path, tree in TREES.items() if (names := sorted({*opened(tree)}))}
    assert {file: names for file, names in opening.items() if file not in OWN} == {}
    assert set(OWN) - set(opening) == set()


LARGEST = """
import json, resource, sys
from pathlib import Path
from gemmscope.errors import UserError
from gemmscope.forecast import calibration, gemm_list
from gemmscope.model.readers import read_config
from gemmscope.numerics.safetensors import read_header
from gemmscope.results.read import read_result
for kind in ("bench", "fleet"):
    try:
        read_result(sys.argv[1], [kind])  # loads what it needs
    except UserError:
        pass
read = {"config": read_config, "run": read_result, "gemms": gemm_list.read_rows, "tensors": read_header}
for line in sys.stdin:
    name, path = json.loads(line)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, -1))
    begin = resource.getrusage(resource.RUSAGE_SELF)
    try:
        value, outcome = read[name](path), "read"
    except UserError as error:
        outcome = error.message
    value, end = None, resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([outcome, end.ru_utime - begin.ru_utime]), flush=True)
""".replace("MEMORY", str(ANY["memory"]))


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def at_the_limits() -> Iterator[tuple[str, bytes]]:
    """Files that are as large as their limits allow, with as many entries as possible: the reader, and the content."""
    lists = ANY["entries"] - 10
    yield "config", b'{"model_type": "llama", "x": [' + b"[]," * lists + b"1]}"
    yield "config", b'{"model_type": "llama", "x": "' + b"x" * (LIMITS["config"]["bytes"] - 100) + b'"}'
    yield "config", b"--num-layers 4 " * (LIMITS["config_text"]["bytes"] // 15)
    yield "gemms", b"m,k,n,format\n" + b"1,1,1,bf16\n" * (LIMITS["gemm_list"]["entries"] // 4)
    entry = b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    yield "tensors", header(b"{" + b",".join(entry % number for number in range(lists // 3)) + b"}")
    yield "tensors", header(b'{"__metadata__":{"a":"' + b"x" * (LIMITS["tensors"]["bytes"] - 100) + b'"}}')
    run, fleet = (b'{"kind": "%s", "schema_version": %d, ' % (kind, SCHEMA_VERSION) for kind in (b"bench", b"fleet"))
    yield "run", run + b'"findings": [' + b"0," * (LIMITS["run_file"]["entries"] - 10) + b"0]}"
    yield "run", run + b'"command": "' + b"\\ud800" * ((LIMITS["run_file"]["bytes"] - 100) // 6) + b'"}'
    yield "run", fleet + b'"gpus": [' + b"{}," * (LIMITS["fleet"]["entries"] // 5 - 10) + b"{}]}"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of processes as Linux has them")
def test_files_at_the_limits_keep_the_promise(tmp_path: Path) -> None:
    run, path = tmp_path / "run.json", tmp_path / "file"
    run.write_text("{}")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LARGEST, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name, content in at_the_limits():
            path.write_bytes(content)
            process.stdin.write(json.dumps([name, str(path)]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, f"{name}: the process ended"
            outcome, seconds = json.loads(answer)
            assert "memory" not in outcome, (name, outcome)
            assert seconds <= ANY["seconds"], (name, outcome)
