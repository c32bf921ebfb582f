"""Roles of ops: no number depends on a display name, and what has no role or lacks a fact is said where it is kinds."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import gemmscope
from gemmscope import roles
from gemmscope.errors import MissingFactError, UserError
from gemmscope.job.load import load_model, model_run
from gemmscope.model import presets
from gemmscope.model.layer_spec import LinearSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.numerics.evaluation.requests import model_linears
from gemmscope.numerics.names import name_linears
from gemmscope.recipe.recipes import recipe
from gemmscope.results.base import Result
from gemmscope.roles import Role
from gemmscope.step.stack_plan import check_kept, kept_parts, plan_step
from gemmscope.toml import FactTable, load_data
from gemmscope.workload import derive as derivation
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Linear, Op, Work
from support.commands import forecast
from support.plan_files import planned
from support.traced_files import TRACE

SOURCE = Path(roles.__file__).parent
KNOWN: dict[str, Role] = dict(roles._roles())
CHIPS = ["h200"]

Roles = Callable[[dict[str, Role]], None]


@pytest.fixture
def with_roles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Roles]:
    """Replace the table of roles."""

    def change(known: dict[str, Role]) -> None:
        monkeypatch.setattr(roles, "_roles", lambda: FactTable(known, "roles.toml"))
        roles._by_name.cache_clear()

    yield change
    monkeypatch.undo()
    roles._by_name.cache_clear()


# --- names are for people -----------------------------------------------------------------------------------------------------


RENAMED = {key: replace(known, name=f"{place:03} renamed") for place, (key, known) in enumerate(KNOWN.items())}


def facts(result: Result) -> Any:
    """A result without what differs from run to run; renamed ops have their usual names again."""
    text = result.to_json()
    for key, renamed in RENAMED.items():
        text = text.replace(renamed.name, KNOWN[key].name)
    data = json.loads(text)
    return {name: value for name, value in data.items() if name not in ("created", "command")}


def forecast_of(preset: str, **settings: Any) -> Any:
    keep = settings.pop("keep_higher", None)
    job = model_run(load_model(preset=preset), **{"micro_batch_size": 1, "sequence_length": 2048, **settings})
    return facts(forecast(job, CHIPS, keep_higher=keep))


FORECASTS: dict[str, Callable[[], Any]] = {
    "one GPU": lambda: forecast_of("llama-3.1-8b"),
    "tensor parallel": lambda: forecast_of("llama-3.1-8b", tp=2, sequence_parallel=True, recompute="selective"),
    "separate projections": lambda: forecast_of("llama-3.1-8b", separate_projections=True),
    "a mix": lambda: forecast_of("llama-3.1-8b", keep_higher="first=1,mlp.down_proj,q_proj"),
    "experts": lambda: forecast_of("qwen3-30b-a3b", ep=8, tp=2, etp=1),
    "latent attention": lambda: forecast_of("deepseek-v2-lite", tp=2),
    "sparse attention": lambda: forecast_of("deepseek-v3.2", ep=8),
    "compressed attention": lambda: forecast_of("deepseek-v4-flash", ep=8),
    "Mamba-2": lambda: forecast_of("nemotron-h-8b", tp=2),
    "Mamba": lambda: forecast_of("jamba-1.5-mini"),
    "shared blocks": lambda: forecast_of("zamba2-7b"),
    "delta rule": lambda: forecast_of("qwen3-next-80b-a3b", separate_projections=True),
    "KDA": lambda: forecast_of("kimi-linear-48b-a3b", tp=2),
    "lightning attention": lambda: forecast_of("minimax-text-01"),
    "short convolution": lambda: forecast_of("lfm2-1.2b"),
    "residual streams": lambda: forecast_of("gemma-3n-e4b"),
    "encoder": lambda: forecast_of("bert-base", sequence_length=512),
    "plan": lambda: facts(planned("llama-3.2-1b", "h100", 2, 8, 2048, restrict={"recompute": ("none",)})),
    "shapes": lambda: facts(gemmscope.load("qwen3-next-80b-a3b").on(1, 2048, tp=2).shapes()),
}


def unlike(before: Any, after: Any, path: str = "") -> list[str]:
    """Where two results differ."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return [one for key in before for one in unlike(before[key], after[key], f"{path}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [one for place, pair in enumerate(zip(before, after, strict=True)) for one in unlike(*pair, f"{path}/{place}")]
    return [] if before == after else [f"{path}: {before} -> {after}"]


@pytest.mark.parametrize("name", FORECASTS)
def test_no_number_depends_on_a_display_name(name: str, with_roles: Roles) -> None:
    before = FORECASTS[name]()
    with_roles(RENAMED)
    assert unlike(before, FORECASTS[name]()) == []


def test_a_traced_module_without_display_names(monkeypatch: pytest.MonkeyPatch, with_roles: Roles) -> None:
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_module", lambda *_: TRACE)
    job = model_run(load_model(module="tower.py:build"))
    before = facts(forecast(job, CHIPS))
    with_roles(RENAMED)
    assert unlike(before, facts(forecast(job, CHIPS))) == []


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "nemotron-h-8b"])
def test_a_measured_step_keeps_the_same_parts(preset: str, with_roles: Roles) -> None:
    run = RunSpec(1, 2048, tp=2)

    def seen() -> Any:
        ops = [op for op in derive(spec(preset), run).ops if isinstance(op, Linear) and roles.kit_part(op.key)]
        mix = f"FP8Current (in BF16: first 1, {', '.join(dict.fromkeys(op.name for op in ops))})"
        check_kept(mix, [op.key for op in ops])
        return plan_step(spec(preset), run)[0], kept_parts(recipe(mix).kept), model_linears(spec(preset))

    before = seen()
    with_roles(RENAMED)
    assert seen() == before


def test_modules_have_roles_whatever_they_are_called(with_roles: Roles) -> None:
    paths = ("layers.0.mlp.gate_proj", "layers.0.mlp.down_proj", "layers.0.mlp.experts.1.up_proj", "layers.0.mlp.gate", "lm_head")
    before = {path: name.role for path, name in name_linears(dict.fromkeys(paths, (64, 64))).items()}
    with_roles(RENAMED)
    after = name_linears(dict.fromkeys(paths, (64, 64)))
    assert {path: name.role for path, name in after.items()} == before
    assert after["lm_head"].op == RENAMED["lm-head"].name


def spec(preset: str) -> ModelSpec:
    model = presets.load(preset).model
    assert model is not None
    return model


def test_names_of_ops_are_only_in_the_table() -> None:
    """Names of several words: one word may mean something else, such as a class of PyTorch."""
    names = {known.name for known in KNOWN.values() if " " in known.name}
    repeated = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                repeated += [(path.name, node.lineno, name) for name in names if name in node.value]
    assert repeated == []


def test_names_identify_roles_and_are_no_paths() -> None:
    linears = [known for known in KNOWN.values() if known.block or known.reads or known.kit_part]
    assert len({known.name for known in linears}) == len(linears)
    assert not [key for key, known in KNOWN.items() if known in linears and key.isidentifier()]
    assert all("," not in known.name for known in KNOWN.values())  # which separates them in the name of a mix
    assert {piece for known in linears for piece in known.consists_of} <= KNOWN.keys()


@pytest.mark.parametrize(
    ("package", "file", "tables"),
    [
        ("gemmscope.numerics", "names.toml", ("ops", "of_experts", "of_shared_expert")),
        ("gemmscope.paste", "modules.toml", ("ops",)),
        ("gemmscope.document", "palette.toml", ("ops",)),
    ],
)
def test_other_tables_name_roles_that_exist(package: str, file: str, tables: tuple[str, ...]) -> None:
    data = load_data(package, file)
    assert {key for table in tables for key in data[table]} <= KNOWN.keys()


# --- without a role, or without a fact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda: Linear(role="mlp-dwn", tokens=1, inputs=1, outputs=1), lambda: LinearSpec("mlp-dwn", 64, 64)],
)
def test_an_op_without_a_role_raises_where_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(MissingFactError, match=r"roles\.toml has no mlp-dwn"):
        make()


def test_a_role_without_a_part_or_with_a_fact_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"x": {"name": "X"}}
    monkeypatch.setattr(roles, "load_data", lambda *_: FactTable(tables, "roles.toml"))
    read = roles._roles.__wrapped__
    with pytest.raises(MissingFactError, match=r"roles\.toml has no x\.part"):
        read()
    tables["x"] = {"name": "X", "part": "attention", "kitpart": "qkv"}
    with pytest.raises(ValueError, match="kitpart"):
        read()


# --- an operation is added as CONTRIBUTING says -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sort(Op):
    """An op of a new kind."""

    kind: ClassVar[str] = "sort"
    rows: int

    def forward(self) -> Work:
        return Work(self.rows, 4 * self.rows)


@dataclass(frozen=True, kw_only=True)
class KeptSort(Sort):
    def kept_bytes(self) -> float:
        return 4 * self.rows


def add(monkeypatch: pytest.MonkeyPatch, make: Callable[[RunSpec], Op]) -> None:
    """Run one more op after attention."""
    before = derivation._attention
    monkeypatch.setattr(derivation, "_attention", lambda model, spec, run: iter((*before(model, spec, run), make(run))))


def test_add_a_linear(monkeypatch: pytest.MonkeyPatch, with_roles: Roles) -> None:
    """Without a role, every command names what is missing; with one, all of them have it."""
    before = {name: FORECASTS[name]() for name in ("one GPU", "plan")}
    sizes = {"inputs": 4096, "outputs": 4096, "parameters": 4096 * 4096}
    add(monkeypatch, lambda run: Linear(role="sink-proj", tokens=run.tokens, **sizes))
    for name in ("one GPU", "plan", "shapes"):
        with pytest.raises(MissingFactError, match=r"roles\.toml has no sink-proj"):
            FORECASTS[name]()
    with_roles({**KNOWN, "sink-proj": Role("Sink Proj", "GEMMs", block="attention", reads="attention input")})
    assert all(unlike(before[name], FORECASTS[name]()) for name in before)
    job = gemmscope.load("llama-3.1-8b").on(1, 2048)
    shapes = job.shapes()
    assert [gemm.count for gemm in shapes.gemms if gemm.op == "Sink Proj"] == [32, 32, 32]
    step = job.forecast("h200", recipes=["fp8current"], keep_higher="sink proj").gpus[0].step
    assert step is not None
    assert step.recipes[-1].recipe == "FP8Current (in BF16: Sink Proj)"
    assert model_linears(spec("llama-3.1-8b")).sizes["sink-proj"] == ((4096, 4096),)
    with pytest.raises(UserError, match="a step cannot keep Sink Proj in a different precision"):
        check_kept("FP8Current (in BF16: Sink Proj)", ["sink-proj"])


def test_add_an_op_of_a_new_kind(monkeypatch: pytest.MonkeyPatch, with_roles: Roles) -> None:
    """What backward keeps of it, and how fast it runs, is asked for."""
    with_roles({**KNOWN, "sort": Role("Sort", "routing")})
    kinds: list[type[Sort]] = [Sort]
    add(monkeypatch, lambda run: kinds[-1](role="sort", rows=run.tokens))
    with pytest.raises(NotImplementedError, match="Sort must say what it keeps for backward"):
        FORECASTS["plan"]()
    kinds.append(KeptSort)
    with pytest.raises(MissingFactError, match=r"training\.toml has no bandwidth\.sort"):
        FORECASTS["one GPU"]()
    with_roles({**KNOWN, "sort": Role("Sort", "routing", bandwidth="elementwise")})
    assert "routing" in FORECASTS["one GPU"]()["gpus"][0]["step"]["recipes"][0]["parts_ms"]
