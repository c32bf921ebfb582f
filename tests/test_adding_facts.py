"""What CONTRIBUTING.md says about a recipe, a GPU and collectives, done in a copy: commands work, or name what is missing."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gemmscope.errors import MissingFactError
from gemmscope.recipe.precisions import precision_shown, precision_with, precisions
from support.command import Outcome
from support.package_copy import PackageCopy, package_copy

MODEL = "--preset llama-3.2-1b --micro-batch-size 1 --sequence-length 1k"
SIZES = {"hidden-size": 64, "intermediate-size": 128, "num-attention-heads": 4, "num-hidden-layers": 1, "sequence-length": 64}
SMALL = "--micro-batch-size 1 " + " ".join(f"--{name} {size}" for name, size in SIZES.items())
MISSING = re.compile(r"a fact is missing: (\S+) has no (.+)\n")
RECIPES, PRECISIONS, QUANTIZERS = "recipe/recipes.toml", "recipe/precisions.toml", "recipe/quantizers.toml"
TRAINING, TRANSFER = "forecast/coefficients/training.toml", "forecast/coefficients/transfer.toml"

MXFP6 = """
[MXFP6]
title = "6-bit values with a power-of-two scale per 32 values"
backends = ["transformer_engine", "torch"]
operands = { fprop = ["e3m2", "e3m2"], dgrad = ["e3m2", "e3m2"], wgrad = ["e3m2", "e3m2"] }
scales = "block32"
multiple_of = 32
experts_multiple_of = 32
bytes_read = 2
bytes_written = 1.56
weight_copy_bytes = 1.56
"""
SUPPORT = """
[MXFP6]
yes = ["10.0", "10.3"]
otherwise = "MXFP6 GEMMs need compute capability 10.0"
"""
PRECISION = """
[precision.mxfp6]
title = "MXFP6"
operands = ["e3m2"]
scales = ["block32"]
bytes = 0.75
operand_bytes = 0.78
rates = ["fp8"]
timed_as = "mxfp6"
usual = true
usual_ratio = 1.7

[precision.fp8]
"""
FORMAT = "[format]\ne3m2 = { bits = 6, mantissa = 2, least_exponent = -2, largest = 28 }\n"
QUANTIZER = """
[recipes.MXFP6.transformer_engine]
checked = "nothing"
fprop = ["te_mx", "te_mx"]
dgrad = ["te_mx", "te_mx"]
wgrad = ["te_mx", "te_mx"]
"""


@pytest.fixture
def copy(tmp_path: Path) -> PackageCopy:
    return package_copy(tmp_path)


def missing(outcome: Outcome) -> tuple[str, str] | None:
    """The file and the key that a command names; None if it worked."""
    assert "Traceback" not in outcome.err, outcome.err
    fact = MISSING.search(outcome.err)
    assert (outcome.code == 2) == (fact is not None), outcome.err
    return (fact[1], fact[2]) if fact else None


def test_add_a_recipe(copy: PackageCopy) -> None:
    """Without Python: what is missing is asked for, and with all of it every command works."""
    forecast = f"forecast {MODEL} --gpu b200 --recipes mxfp6"
    copy.add(RECIPES, MXFP6)
    assert missing(copy.outcomes(forecast)[0]) == (RECIPES, "MXFP6.kept_bytes")
    copy.change(RECIPES, "weight_copy_bytes = 1.56\n", "weight_copy_bytes = 1.56\nkept_bytes = 0.78\n")
    copy.add("recipe/support.toml", SUPPORT)
    assert missing(copy.outcomes(forecast)[0]) == (PRECISIONS, "precision with e3m2 values and block32 scales")
    copy.change(PRECISIONS, "\n[precision.fp8]\n", PRECISION.replace('rates = ["fp8"]\n', ""))
    copy.change(TRAINING, "NVFP4 = {", "MXFP6 = { bandwidth = 0.6, kernels = 1, in_step = 1.0 }\nNVFP4 = {")
    assert missing(copy.outcomes(forecast)[0]) == (PRECISIONS, "precision.mxfp6.rates")
    copy.change(PRECISIONS, 'timed_as = "mxfp6"\n', 'timed_as = "mxfp6"\nrates = ["fp8"]\n')
    assert missing(copy.outcomes(forecast)[0]) == (TRANSFER, "stands_for.mxfp6")
    copy.change(TRANSFER, "[stands_for]\n", '[stands_for]\nmxfp6 = ["fp8"]\n')
    for others in ("bf16 = 0.15, fp8 = 0.20", "bf16 = 0.15, fp8 = 0.15", "bf16 = 0.60"):
        copy.change(TRANSFER, f"other = {{ {others}", f"other = {{ mxfp6 = 0.5, {others}")
    copy.change(TRANSFER, "[slower_than_stand_in]\n", "[slower_than_stand_in]\nmxfp6 = 1.05\n")
    copy.change(TRANSFER, "[quantize]\n", "[quantize]\nmxfp6 = [0.004, 1.1]\n")
    for kind in ("library", "version"):
        copy.change(TRANSFER, f"[uncertainty.other_{kind}]\n", f"[uncertainty.other_{kind}]\nmxfp6 = 0.69\n")
    copy.change(TRAINING, "uncertainty = { bf16 = 0.07", "uncertainty = { mxfp6 = 0.15, bf16 = 0.07")
    drawn = copy.outcomes(
        "forecast --shapes 4096 --gpu b200 --recipes mxfp6 --json drawn.json", "report drawn.json -o drawn.html"
    )
    assert [missing(outcome) for outcome in drawn] == [None, ("document/palette.toml", "recipe.MXFP6")]
    copy.change("document/palette.toml", "[recipe]\n", '[recipe]\nMXFP6 = { light = "#123456", dark = "#654321" }\n')
    outcomes = copy.outcomes(
        f"shapes {MODEL}",
        f"forecast {MODEL} --gpu b200,h200 --tp 2 --json forecast.json",
        "forecast --shapes 4096 --gpu b200 --recipes mxfp6,mxfp8 --json gemms.json",
        f"plan {MODEL} --gpu b200 --gpus 8 --global-batch 64 --recipes mxfp6 --detail",
        "report forecast.json -o page.html --markdown page.md",
        "report gemms.json -o gemms.html",
        f"bench {MODEL} --recipes mxfp6 --backend torchao",
    )
    assert [missing(outcome) for outcome in outcomes[:-1]] == [None] * 6
    assert outcomes[-1].code == 2  # there is no GPU, or torchao does not have the recipe
    assert "MXFP6" in outcomes[3].out
    for page in ("page.html", "page.md", "gemms.html"):
        assert "MXFP6" in (copy.folder / page).read_text()


def test_add_a_recipe_to_numerics(copy: PackageCopy) -> None:
    copy.add(RECIPES, MXFP6 + "kept_bytes = 0.78\n")
    copy.change(PRECISIONS, "\n[precision.fp8]\n", PRECISION)
    copy.add(QUANTIZERS, QUANTIZER)
    numerics = f"numerics --synthetic normal {SMALL} --recipes mxfp6,mxfp8"
    assert missing(copy.outcomes(numerics)[0]) == (PRECISIONS, "format.e3m2")
    copy.change(PRECISIONS, "[format]\n", FORMAT)
    outcome = copy.outcomes(numerics)[0]
    assert missing(outcome) is None
    assert "MXFP6" in outcome.out


def test_a_missing_fact_reaches_the_process_that_asks_for_it() -> None:
    """Plans are searched in several processes."""
    error = pickle.loads(pickle.dumps(MissingFactError("gpu/specs.toml", "b400.sms")))
    assert (error.file, error.key) == ("gpu/specs.toml", "b400.sms")
    assert "specs.toml has no b400.sms" in str(error)


def test_a_precision_of_several_widths_is_no_neighbor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 4 bits and activations of 8: recipes with 8 bits everywhere keep theirs."""
    mixed = replace(precisions()["mxfp8"], name="mxfp84", operands=("e2m1", "e4m3"))
    monkeypatch.setattr("gemmscope.recipe.precisions.precisions", lambda: {"mxfp84": mixed, **known})
    known = dict(precisions())
    chosen = [precision_with.__wrapped__(frozenset(operands), "block32").name for operands in ({"e4m3"}, {"e2m1", "e4m3"})]
    assert chosen == ["mxfp8", "mxfp84"]
    assert precision_shown.__wrapped__("e4m3", "block32").name == "mxfp8"


def as_another(text: str, gpu: str, name: str) -> str:
    """A GPU's table under another name."""
    table = re.search(rf"^\[{gpu}\]\n(?:.+\n)+", text, re.MULTILINE)
    assert table is not None
    return re.sub(r"(?m)^device = .*$", f"device = '{name.upper()}'", table[0]).replace(f"[{gpu}]", f"[{name}]")


def test_add_a_gpu_of_a_new_architecture(copy: PackageCopy) -> None:
    specs, support = "gpu/specs.toml", "recipe/support.toml"
    new = as_another((copy.package / specs).read_text(), "b300", "r100").replace('"10.3"', '"11.0"')
    copy.add(specs, new + 'collectives_of = "b300"\n')
    commands = [f"forecast {MODEL} --gpu r100 --tp 2", f"plan {MODEL} --gpu r100 --gpus 8 --global-batch 64"]
    assert [missing(outcome) for outcome in copy.outcomes(*commands)] == [(support, 'architectures."11.0"')] * 2
    copy.change(support, "[architectures]\n", '[architectures]\n"11.0" = "A new one"\n')
    assert [missing(outcome) for outcome in copy.outcomes(*commands)] == [(TRANSFER, 'relatives."11.0"')] * 2
    copy.change(TRANSFER, "[relatives]\n", '[relatives]\n"11.0" = ["10.3"]\n')
    assert [missing(outcome) for outcome in copy.outcomes(*commands)] == [None] * 2


def test_add_a_gpu_and_its_collectives(copy: PackageCopy) -> None:
    specs, collectives = "gpu/specs.toml", "forecast/coefficients/collectives.toml"
    new = as_another((copy.package / specs).read_text(), "b300", "b400")
    copy.add(specs, new.replace('network = "infiniband-xdr"\n', ""))
    assert missing(copy.outcomes(f"forecast {MODEL} --gpu b400")[0]) == (specs, "b400.network")
    copy.change(specs, new.replace('network = "infiniband-xdr"\n', ""), new)
    layouts = ("", "--tp 2", "--tp 8 --gpus 64")
    commands = [
        *(f"forecast {MODEL} --gpu b400 {layout}" for layout in layouts),
        f"plan {MODEL} --gpu b400 --gpus 8 --global-batch 64",
    ]
    assert [missing(outcome) for outcome in copy.outcomes(*commands)] == [None, *[(collectives, "b400")] * 3]
    copy.add(specs, 'collectives_of = "b300"\n')
    nearest = copy.outcomes(*commands)
    assert [missing(outcome) for outcome in nearest] == [None] * 4
    copy.change(specs, 'collectives_of = "b300"\n', "")
    own = as_another((copy.package / collectives).read_text(), "b300", "b400")
    copy.add(collectives, own)
    assert [outcome.out for outcome in copy.outcomes(*commands)] == [outcome.out for outcome in nearest]
    copy.add(collectives, "[b400.broadcast]\n2 = [0.01, 3e-06, 9e-10]\n")
    code = (
        "from gemmscope.forecast.communication import collective_ms, network_of; from gemmscope.gpu.specs import gpu\n"
        "for name in ('b400', 'b300'):\n"
        "    try: print(collective_ms(gpu(name), network_of(gpu(name)), 'broadcast', 2, 1e8) > 0.05)\n"
        "    except Exception as error: print(type(error).__name__, error.key)\n"
    )
    assert copy.python(code).splitlines() == ["True", "MissingFactError b300.broadcast"]
