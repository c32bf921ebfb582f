"""Launch scripts with functions, conditions without `if`, here-documents and lengths: only executed code counts."""

from __future__ import annotations

import pytest

from gemmscope.model import megatron
from gemmscope.model.shell import in_order
from support.reading import codes

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
HYBRID = r"""
#!/bin/bash
set -euxo pipefail
: "${MBS:=2}"
PATTERN="MEM*E"
EXPERTS=$(( 4 * 2 ))
usage() {
  cat <<EOF
usage: $0 [--num-layers 99] [--micro-batch-size 7]
EOF
  exit 1
}
if [ "${1:-}" = "--help" ]; then usage; fi
launch () {
    local tp="${1:-1}" seq=${2}
    torchrun pretrain_mamba.py "${MODEL_ARGS[@]}" \
        --tensor-model-parallel-size $tp --seq-length $seq --micro-batch-size ${MBS}
}
MODEL_ARGS=(
    --hybrid-override-pattern ${PATTERN} --num-layers ${#PATTERN}   # one letter for each layer
    --hidden-size 256 --num-attention-heads 4 --vocab-size 1000
)
MODEL_ARGS+=(--num-experts "$EXPERTS" --moe-router-topk 2 --moe-ffn-hidden-size $((EXPERTS*16)))
SEQ=$((4*1024))
launch 2 $SEQ 2>&1 | tee run.log
"""


def test_a_hybrid_script() -> None:
    source = megatron.read(HYBRID, "train.sh")
    assert source.model is not None
    assert source.model.pattern() == "2 Mamba-2, 2 MoE, 1 attention"
    expected = {"tp": 2, "sequence_length": 4096, "micro_batch_size": 2}
    assert {name: source.run_settings[name] for name in expected} == expected
    assert "setting-repeated" not in codes(source)


@pytest.mark.parametrize(
    "script",
    [
        "f() { run ARGS --micro-batch-size $1; }\nf 3",
        "function f {\n  run ARGS --micro-batch-size ${1:-9}\n}\nf 3 # three",
        "f()\n{\n  M=${2:-3}\n}\nf 1\nrun ARGS --micro-batch-size $M",
        "f() {\n  g $1\n}\ng() {\n  run ARGS --micro-batch-size $1\n}\nf 3",
        'f() {\ncase $1 in\n a) echo "--micro-batch-size 9";;\n *) echo "--micro-batch-size 3";;\nesac\n}\nrun ARGS $(f b)',
        'log() { echo "$@"; }\nlog run ARGS --micro-batch-size 3',
        "later() {\n  run ARGS --micro-batch-size 3\n}",
        'echo "usage: --micro-batch-size N"\nrun ARGS --micro-batch-size 3\necho Usage: --micro-batch-size N',
        "cat > job.sh <<EOF\nrun ARGS --micro-batch-size 3\nEOF",
        "run ARGS --micro-batch-size 3\ncat <<EOF\n--micro-batch-size 9\nEOF",
        "case $1 in\n  -h) cat <<EOF\n--micro-batch-size 9\nEOF\n  exit;;\nesac\nrun ARGS --micro-batch-size 3",
        "cat <<EOF\nnot closed\nrun ARGS --micro-batch-size 3",
        "A=1\n[ $A = 1 ] && M=3\n[[ $A == 2 ]] && M=4\nrun ARGS --micro-batch-size $M",
        "A=1\n[ $A = 1 ] && M=3 || M=4\n[ $A = 1 ] || M=5\nrun ARGS --micro-batch-size $M",
        "A=0\nrun ARGS --micro-batch-size 3\n[ $A = 1 ] && X+=(\n  --micro-batch-size 9\n)",
        "A=0\nrun ARGS --micro-batch-size 3\n[ $A = 1 ] && { M=4; run --micro-batch-size 9; }",
        "A=2\nif (( A > 1 )); then M=3; else M=4; fi\nrun ARGS --micro-batch-size $M",
    ],
)
def test_what_runs_counts(script: str) -> None:
    assert megatron.read(script.replace("ARGS", MODEL), "x.sh").run_settings["micro_batch_size"] == 3


def test_a_condition_that_nobody_knows() -> None:
    script = f"run {MODEL} --micro-batch-size 3\n[ -n $FAST ] && ARGS+=(--tensor-model-parallel-size 2)"
    source = megatron.read(script, "x.sh")
    assert source.run_settings["tp"] == 2
    assert "settings-in-condition" in codes(source)


def test_text_in_brackets_is_no_array() -> None:
    script = f'DENSE=1\nFREQ="([0]*${{DENSE}}+[1]*$((4-DENSE)))"\nrun {MODEL} --num-experts 4 --moe-layer-freq $FREQ'
    model = megatron.read(script, "x.sh").model
    assert model is not None
    assert model.pattern() == "1 dense, 3 MoE"


def test_functions_that_call_themselves_end() -> None:
    assert len(in_order("f() {\n  f\n  f\n}\n" + "f\n" * 1000)) < 10_000
    assert in_order("f() {\nopen") == "f() {\nopen"


@pytest.mark.parametrize(
    ("script", "micro_batch"),
    [
        ("if $A; then MBS=${MBS:-1}; else MBS=${MBS:-2}; fi", None),  # either
        ("case $A in a) MBS=${MBS:-1};; *) MBS=${MBS:-1};; esac", 1),
        ("if $A; then MBS=1; fi\nMBS=${MBS:-2}", None),  # 1 or 2
        ("if $A; then MBS=1; fi\nMBS=${MBS:-1}", 1),
        ("MBS=1\nif $A; then MBS=${MBS:-2}; fi", 1),
        ("if $A; then MBS=1; fi", 1),  # the script works only so
        ("if $A; then MBS=1; fi\nMBS=4", 4),
    ],
)
def test_defaults_of_variables_that_only_a_condition_sets(script: str, micro_batch: int | None) -> None:
    source = megatron.read(f"{script}\npretrain_gpt.py {MODEL} --micro-batch-size $MBS", "file.sh")
    assert source.run_settings.get("micro_batch_size") == micro_batch
    assert ("setting-without-value" in codes(source)) == (micro_batch is None)


def test_a_setting_of_both_branches_counts_whatever_holds() -> None:
    both = "if $A; then R+=(--micro-batch-size 2); else R+=(--micro-batch-size 2); fi\npretrain_gpt.py ${R[@]} " + MODEL
    assert "settings-in-condition" not in codes(megatron.read(both, "file.sh"))
    assert "settings-in-condition" in codes(megatron.read(both.replace("size 2", "size 4", 1), "file.sh"))
