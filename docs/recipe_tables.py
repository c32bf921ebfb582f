"""The tables of `recipes.md`, generated from `src/gemmscope/recipe/`: a recipe that is added there appears here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemmscope.recipe.frameworks import backends as measuring_backends
from gemmscope.recipe.frameworks import frameworks
from gemmscope.recipe.recipes import Recipe, recipes
from gemmscope.recipe.support import Support, architectures, support
from gemmscope.workload.ops import PASSES

ON_GPU = measuring_backends("cuda")
GEMMS_ONLY = [name for name in ON_GPU if frameworks()[name].gemms_only]
FORMATS = {"bf16": "BF16", "e4m3": "E4M3", "e5m2": "E5M2", "e2m1": "E2M1"}


def on_gpus() -> list[Recipe]:
    """All recipes that run on a GPU."""
    return [recipe for recipe in recipes().values() if set(recipe.backends) & set(ON_GPU)]


def where() -> str:
    """Which architecture runs which recipe; below the table, the reasons and restrictions."""
    names = architectures()
    rows = [[recipe.name, *(_answer(_on(recipe, chip)) for chip in names)] for recipe in on_gpus()]
    table = _table(["recipe", *(f"{name}, {chip}" for chip, name in names.items())], rows)
    return "\n".join([table, "", *(f"* {line}" for line in _reasons())])


def _on(recipe: Recipe, chip: str) -> Support:
    major, minor = chip.split(".")
    return support(recipe.name, (int(major), int(minor)))


def _answer(answer: Support) -> str:
    return "no" if not answer.runs else "emulated" if answer.emulated_by else "limited" if answer.note else "yes"


def _reasons() -> list[str]:
    """Each reason once, with its recipes and architectures."""
    about: dict[str, dict[str, list[str]]] = {}
    for recipe in on_gpus():
        for chip in architectures():
            note = _on(recipe, chip).note
            if note:
                about.setdefault(note, {}).setdefault(recipe.name, []).append(chip)
    lines = []
    for note, names in about.items():
        chips = dict.fromkeys(chip for of_recipe in names.values() for chip in of_recipe)
        lines.append(f"{', '.join(names)} on {', '.join(chips)}: {note}.")
    return lines


def backends() -> str:
    """The name of each recipe in each backend, and the flags of Megatron-LM."""
    rows = []
    for recipe in on_gpus():
        cells = [_name_in(recipe, backend) if backend in recipe.backends else "" for backend in ON_GPU]
        flags = recipe.settings.get("megatron", {}).get("flags", "")
        rows.append([recipe.name, *cells, f"`{flags}`" if flags else ""])
    return _table(["recipe", *(f"`{name}`" for name in ON_GPU), "Megatron-LM"], rows)


def _name_in(recipe: Recipe, backend: str) -> str:
    facts = recipe.settings.get(backend, {})
    if backend in GEMMS_ONLY:
        return "GEMMs only"
    if "config" in facts:
        prototype = " (prototype)" if ".prototype." in facts["config"] else ""
        return f"`{facts['config'].rsplit('.', 1)[-1]}`{prototype}"
    name = facts.get("class") or facts.get("float8")
    return f"`{name}`" if name else "yes"


def operands() -> str:
    """The formats of the inputs of each pass, their scales, and the alignment of sizes."""
    rows = []
    for recipe in on_gpus():
        passes = ("·".join(FORMATS.get(name, name.upper()) for name in recipe.operands[which]) for which in PASSES)
        rows.append([recipe.name, *passes, recipe.title, _multiple(recipe)])
    return _table(["recipe", *PASSES, "what it is", "sizes a multiple of"], rows)


def _multiple(recipe: Recipe) -> str:
    """The multiple for tokens, input and output features; backends that need a larger one are named."""
    more = [f"{backend}: {recipe.settings[backend]['multiple_of']}" for backend in _with(recipe, "multiple_of")]
    own = str(recipe.multiple_of) if recipe.multiple_of > 1 else "any"
    return "; ".join([own, *more])


def _with(recipe: Recipe, fact: str) -> list[str]:
    return [backend for backend in recipe.backends if fact in recipe.settings.get(backend, {})]


def quantized() -> str:
    """How often tensors are cast, and the bytes that this moves and keeps."""
    rows = [
        [
            recipe.name,
            _casts(recipe),
            f"{recipe.bytes_read:g} + {recipe.bytes_written:g}",
            f"{recipe.weight_copy_bytes:g}",
            f"{recipe.kept_bytes:g}",
            recipe.seen or "never run",
        ]
        for recipe in on_gpus()
        if recipe.quantizes
    ]
    columns = ["recipe", "X, W and dY are cast", "bytes read + written", "copies of W", "kept from X", "run on"]
    return _table(columns, rows)


PER_GEMM = {"per product": "per GEMM"}


def _casts(recipe: Recipe) -> str:
    """How often each backend casts; the backends are named where they differ."""
    casts = {}
    for backend in recipe.backends:
        if backend not in GEMMS_ONLY:
            often = recipe.settings[backend].get("casts", "once")
            casts[backend] = PER_GEMM.get(often, often)
    if len(set(casts.values())) == 1:
        return next(iter(casts.values()))
    return "; ".join(f"{backend}: {often}" for backend, often in casts.items())


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
