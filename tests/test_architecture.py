"""The rules of ARCHITECTURE.md: data flows one way, only workers import torch, imports are at the top, names are unique."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from support.sources import PACKAGE, TREES

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "transformer_engine", "torchao", "ray"}
IMPORTS_AT_THE_TOP = ("cli", "commands", "job", "sweep", "document", "results", "compare", "writers")
BY_NAME = {  # modules that load others when they are used
    *("cli/main.py", "commands/__init__.py", "document/__init__.py", "writers/__init__.py"),
    *("writers/tables.py", "results/base.py", "results/keep.py", "results/read.py"),
}
OUTSIDE = {"__init__", "__main__"}  # the package itself, and the program
MOST_LINES = 700
VAGUE = {"each", "found", "words", "made", "held", "look", "together"}  # names that do not say what a value is


def rules() -> dict[str, set[str]]:
    """The table of ARCHITECTURE.md: folder or module → what it may import."""
    rows = re.findall(r"^\| `(\w+)/?` \|[^|]*\| ([^|]*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.MULTILINE)
    allowed: dict[str, set[str]] = {}
    for folder, text in rows:
        named = set(re.findall(r"`(\w+)/?`", text))
        allowed[folder] = set(allowed) - named if text.startswith("every folder above") else named
    return allowed


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a piece of code imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def stage(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that a file imports."""
    return tuple(imports(TREES[path]))


def folders(path: Path) -> set[str]:
    """Which other folders and modules of the package a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("gemmscope.")} - {stage(path), "__version__"}


def test_imports_only_from_stages_above() -> None:
    known = rules()
    paths = [path for path in TREES if stage(path) not in OUTSIDE]
    assert {name_of(path): wrong for path in paths if (wrong := folders(path) - known[stage(path)])} == {}


def test_every_folder_has_a_rule_without_what_it_does_not_need() -> None:
    used: dict[str, set[str]] = {}
    for path in TREES:
        used.setdefault(stage(path), set()).update(folders(path))
    assert used.keys() - OUTSIDE == rules().keys()
    assert {folder: unused for folder, may in rules().items() if folder != "commands" and (unused := may - used[folder])} == {}


@cache
def loads(module: str) -> list[str]:
    """What a module imports at run time, without imports for type checkers."""
    tree = TREES[MODULES[module]]
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = [name for block in blocks for name in imports(block)]
    return list((Counter(imported(MODULES[module])) - Counter(for_types)).elements())


def reached(start: Iterable[str]) -> set[str]:
    """Modules of the package that these import, and that those import in turn."""
    modules: set[str] = set()
    waiting = list(start)
    while waiting:
        module = waiting.pop()
        if module in MODULES and module not in modules:
            modules.add(module)
            waiting += [part for name in (*loads(module), module) for part in (name, name.rpartition(".")[0])]
    return modules


def test_the_parent_never_imports_torch() -> None:
    """Neither commands nor the Python API import torch; only worker processes and the user's own training do."""
    parent = reached(name for name, path in MODULES.items() if stage(path) in ("cli", "commands", "api", "show", "__main__"))
    heavy = {name: used for name in parent if (used := {part.split(".")[0] for part in loads(name)} & HEAVY)}
    in_functions_of_workers = {"gemmscope.model.hub": {"transformers"}, "gemmscope.numerics.safetensors": {"torch"}}
    assert heavy == in_functions_of_workers


def test_the_rooms_of_numerics_do_not_import_each_other() -> None:
    """What runs in the user's training, and what both rooms share, must not load what evaluates; nor the other way round."""
    inside, evaluating = (f"gemmscope.numerics.{room}" for room in ("in_training", "evaluation"))
    shared = [name for name in MODULES if name.startswith("gemmscope.numerics.") and not name.startswith((inside, evaluating))]
    for room, other in ((inside, evaluating), (evaluating, inside)):
        modules = [name for name in MODULES if name.startswith(room)]
        assert modules
        assert [name for name in reached([*modules, *shared]) if name.startswith(other)] == []


def test_what_runs_in_the_training_starts_no_process() -> None:
    """It needs no engine, no command and no forecast, and its entry loads torch only when the first step is recorded."""
    modules = reached(name for name in MODULES if name.startswith("gemmscope.numerics.in_training"))
    processes = {"gemmscope.process", "gemmscope.signals"}
    assert [name for name in modules if name in processes or stage(MODULES[name]) in ("engine", "app", "forecast")] == []
    entry = TREES[MODULES["gemmscope.numerics.in_training.record_tensors"]]
    at_the_top = [name for node in entry.body for name in imports(node) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any(name.startswith(("torch", "gemmscope.numerics")) for name in at_the_top)


def test_only_the_bridge_and_its_actors_import_ray() -> None:
    users = {name_of(path) for path in TREES if "ray" in {name.split(".")[0] for name in imported(path)}}
    assert users == {"pool/ray_bridge.py", "pool/ray_actor.py"}


def test_imports_are_at_the_top() -> None:
    """Modules are loaded when they are used in a few places, by name, not import by import."""
    by_name: set[str] = set()
    inside: dict[str, set[str]] = {}
    for path in (path for path in TREES if stage(path) in IMPORTS_AT_THE_TOP):
        functions = [node for node in ast.walk(TREES[path]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        if names := {name.split(".")[0] for function in functions for name in imports(function)}:
            inside[name_of(path)] = names
        if "importlib.import_module" in imported(path):
            by_name.add(name_of(path))
    assert inside == {}
    assert by_name == BY_NAME


FILES_WRITTEN = {  # every call that writes a file, and what it writes
    "results/keep.py": ["replacing"],  # the files of a result: nothing else writes them
    "files.py": ["fdopen", "open", "open", "open", "replace", "replacing"],
    "writers/__init__.py": ["replacing"],  # pages and figures of several run files, and what a command computes for one file
    "writers/figure.py": ["save", "savefig"],
    "api/functions.py": ["save"],
    "api/models.py": ["save"],  # the page of explore
    "explain/trace_file.py": ["replacing"],
    "numerics/safetensors.py": ["replacing"],  # a recording
    "forecast/calibration.py": ["write_text"],
    "engine/journal.py": ["open"],  # a lock
    "pool/measure_unit.py": ["write_bytes"],  # the rest is for processes: pipes, and files in folders that are removed
    "pool/ray_actor.py": ["extractall", "touch"],
    "workload/trace.py": ["write_text"],
    "workload/trace_worker.py": ["write_text"],
    "process.py": ["fdopen"],
    "cli/main.py": ["fdopen", "fdopen"],
}
WRITING = {
    *("replacing", "write_text", "write_bytes", "savefig", "extractall", "touch", "copyfile", "copy2", "rename"),
    *("dump", "savez", "tofile", "to_csv"),
}


def writes(call: ast.Call) -> bool:
    """Whether a call writes a file, by its name and its mode."""
    name, text = called(call), ast.unparse(call)
    if name in ("open", "fdopen"):
        modes = [
            str(value.value) for value in [*call.args, *(word.value for word in call.keywords)] if isinstance(value, ast.Constant)
        ]
        return any(re.fullmatch(r"[rwxab+t]*[wxa+][rwxab+t]*", mode) for mode in modes)
    return name in WRITING or text.startswith(("writers.save(", "save(written", "beside.replace("))


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_files_of_results_are_written_by_the_keeper() -> None:
    """A result never replaces a file that holds more: `results/keep.py` decides, and writes. Whoever writes files is listed."""
    calls = {name_of(path): [node for node in ast.walk(tree) if isinstance(node, ast.Call)] for path, tree in TREES.items()}
    writing = {name: sorted(called(call) for call in inside if writes(call)) for name, inside in calls.items()}
    assert {name: names for name, names in writing.items() if names} == FILES_WRITTEN
    given = [ast.unparse(call) for inside in calls.values() for call in inside]
    run_files = [text for text in given if re.match(r"[\w.]+\(.*\bresult\.to_json\(\)", text)]
    assert len(run_files) == 3
    assert [text for text in run_files if "keeper.write" not in text] == []


def test_no_class_is_defined_twice() -> None:
    names = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_files_are_of_readable_length() -> None:
    long = [f"{name_of(path)}: {count}" for path in TREES if (count := len(path.read_text().splitlines())) > MOST_LINES]
    assert long == []


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Every name that a piece of code gives to a value: variables and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_names_say_what_a_value_is() -> None:
    vague = [f"{name_of(path)}: {name}" for path, tree in TREES.items() for name in bound_names(tree) if name.strip("_") in VAGUE]
    assert vague == []


def test_names_in_tests_and_scripts_say_what_a_value_is() -> None:
    files = [path for folder in ("tests", "benchmarks", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    vague = [f"{path}: {name}" for path in files for name in bound_names(ast.parse(path.read_text())) if name.strip("_") in VAGUE]
    assert vague == []
