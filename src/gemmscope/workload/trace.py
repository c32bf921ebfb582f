"""The real thing: a live module's matrix products, recorded in a worker process that imports torch.

`trace_huggingface` and `trace_module` start the worker and return a `Trace`; `as_workload` gives it the form of a derived
workload, so that every table and file is made the same way from both.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.model.spec import RunSpec
from gemmscope.process import worker_command, worker_environment
from gemmscope.workload.derive import Workload
from gemmscope.workload.ops import ELEMENT_BYTES, PASSES, Direction, Gemm, Linear, Op, Pass, Work, linear_size


@dataclass(frozen=True)
class Trace:
    """What the worker saw in one forward and backward pass of one micro-batch.

    `gemms` are the products with a weight, their `op` the module's path with layer numbers folded. `products` are those
    without one (attention), `remainder` what is no matrix product (convolutions). `explicit_masks` is how many attentions were
    given a mask whose values nobody knows. Of a Hugging Face model, as far as it can be told: the sliding `windows` of its
    layers (None: a layer without one) and whether its attention is `causal`.
    """

    class_name: str
    parameters: int
    gemms: tuple[Gemm, ...]
    products: tuple[TracedProduct, ...]
    remainder: tuple[Remainder, ...]
    versions: Mapping[str, str]
    explicit_masks: int = 0
    windows: tuple[int | None, ...] | None = None
    causal: bool | None = None


@dataclass(frozen=True, kw_only=True)
class TracedLinear(Linear):
    """A linear as it was seen: each pass with its own count, because a frozen weight or a first layer skips some.

    `forward_runs` times `count` is how often it ran forward. `backward` is the average over the `count` instances.
    """

    seen: tuple[Gemm, ...] = ()
    rows_of: int = 1

    @property
    def groups(self) -> int:
        return self.rows_of

    def gemms(self) -> Iterator[Gemm]:
        """Only the passes that ran."""
        yield from self.seen

    def backward(self) -> Work:
        """As many products as were seen: two, or fewer where a gradient is not needed."""
        products = sum(gemm.count for gemm in self.seen if gemm.pass_name != "fprop")
        return self._one_product().times(products / self.count)


@dataclass(frozen=True, kw_only=True)
class TracedProduct(Op):
    """A product of two activations, `batch` times M x K x N; `visible` is the share of it that a causal mask lets through."""

    kind: ClassVar[str] = "product"
    direction: Direction
    m: int
    k: int
    n: int
    batch: int
    visible: Fraction = Fraction(1)

    def _work(self) -> Work:
        elements = self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)
        return Work(int(2 * self.batch * self.m * self.k * self.n * self.visible), elements * ELEMENT_BYTES)

    def forward(self) -> Work:
        """All of it, if it ran forward."""
        return self._work() if self.direction == "forward" else Work()

    def backward(self) -> Work:
        """All of it, if it ran backward."""
        return self._work() if self.direction == "backward" else Work()


@dataclass(frozen=True, kw_only=True)
class Remainder(Op):
    """What is no matrix product but has FLOPs: a convolution."""

    kind: ClassVar[str] = "convolution"
    direction: Direction
    flops: int

    def forward(self) -> Work:
        """Its FLOPs, if it ran forward; its bytes are not recorded."""
        return Work(self.flops) if self.direction == "forward" else Work()

    def backward(self) -> Work:
        """Its FLOPs, if it ran backward."""
        return Work(self.flops) if self.direction == "backward" else Work()


def trace_huggingface(config: Mapping[str, Any], run: RunSpec) -> Trace:
    """Trace the model that transformers builds from a config."""
    _require("transformers", "to build this model from its config")
    try:
        return _ask_worker({"config": dict(config)}, run)
    except UserError as error:
        hint = "to trace it with inputs of your own: --module FILE.py:FACTORY, a function that returns (module, inputs)"
        raise UserError(error.message, error.hint or hint) from error


def trace_module(reference: str, run: RunSpec) -> Trace:
    """Trace the module that `file.py:factory` makes."""
    path, colon, name = reference.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise UserError(f"--module {reference!r} is not FILE.py:FACTORY", "for example --module my_model.py:build")
    return _ask_worker({"module": reference}, run)


def _require(package: str, why: str) -> None:
    for name in ("torch", package):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"{name} is needed {why}, and is not installed", f"pip install {name}, in the environment of gemmscope"
            )


def _ask_worker(request: dict[str, Any], run: RunSpec) -> Trace:
    _require("torch", "to trace a module")
    request |= {"micro_batch": run.micro_batch_size, "sequence": run.sequence_length}
    with tempfile.TemporaryDirectory(prefix="gemmscope-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = worker_command("gemmscope.workload.trace_worker", str(asked), str(answered))
        child = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, check=False)
        if not answered.is_file():
            lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
            raise UserError(f"the tracing process ended without an answer: {lines[-1]}")
        answer = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UserError(answer["error"])
    return _parse(answer)


def _parse(answer: dict[str, Any]) -> Trace:
    return Trace(
        class_name=answer["class"],
        parameters=answer["parameters"],
        gemms=tuple(
            Gemm(row["module"] or "(root)", row["pass"], row["m"], row["k"], row["n"], row["groups"], row["count"])
            for row in answer["gemms"]
        ),
        products=tuple(
            TracedProduct(
                name=row["module"] or "(root)", direction=row["pass"], m=row["m"], k=row["k"], n=row["n"],
                batch=row["batch"], count=row["count"], visible=Fraction(row["visible"]),
            )
            for row in answer["products"]
        ),
        remainder=tuple(
            Remainder(name=row["module"] or "(root)", direction=row["pass"], flops=row["flops"], count=row["count"])
            for row in answer["remainder"]
        ),
        versions=answer["versions"],
        explicit_masks=answer["masks"].get("explicit", 0),
        windows=tuple(answer["windows"]) if answer.get("windows") is not None else None,
        causal=answer.get("causal"),
    )  # fmt: skip


def as_workload(trace: Trace) -> Workload:
    """The trace as a workload: linears by module, with the passes that each ran."""
    by_layer: dict[tuple[str, int, int, int, int], list[Gemm]] = {}
    for gemm in trace.gemms:
        tokens, inputs, outputs = linear_size(gemm.m, gemm.k, gemm.n, gemm.pass_name)
        by_layer.setdefault((gemm.op, tokens, inputs, outputs, gemm.groups), []).append(gemm)
    linears = [_linear(*sizes, seen) for sizes, seen in by_layer.items()]
    findings = [finding("traced")]
    if trace.remainder:
        findings.append(finding("convolutions", count=sum(op.count for op in trace.remainder)))
    if trace.explicit_masks:
        findings.append(finding("explicit-masks"))
    return Workload((*linears, *trace.products, *trace.remainder), stage=0, findings=tuple(findings))


def _linear(name: str, tokens: int, inputs: int, outputs: int, groups: int, seen: list[Gemm]) -> TracedLinear:
    """One linear with its passes. What ran forward several times as often as backward was recomputed."""
    ran: dict[Pass, int] = {which: sum(gemm.count for gemm in seen if gemm.pass_name == which) for which in PASSES}
    count = max(ran["dgrad"], ran["wgrad"])
    if not count or ran["fprop"] % count:
        count = ran["fprop"]
    in_order = tuple(sorted(seen, key=lambda gemm: PASSES.index(gemm.pass_name)))
    return TracedLinear(
        name=name, tokens=tokens, inputs=inputs, outputs=outputs, rows_of=groups, seen=in_order,
        count=count, forward_runs=ran["fprop"] // count,
    )  # fmt: skip


def gemm_counts(gemms: list[Gemm] | tuple[Gemm, ...]) -> Counter[tuple[str, int, int, int, int]]:
    """(pass, m, k, n, groups) → how often: what two lists of GEMMs must agree on."""
    counts: Counter[tuple[str, int, int, int, int]] = Counter()
    for gemm in gemms:
        counts[(gemm.pass_name, gemm.m, gemm.k, gemm.n, gemm.groups)] += gemm.count
    return counts
