"""What a trace shows about the message of a collective: its process group, its elements and their type."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

NCCL_MARK = "nccl:"
MOST_RANKS = 100_000
DTYPE_BYTES = (
    ("64", 8), ("double", 8), ("long", 8), ("complex", 8), ("bfloat16", 2), ("float8", 1), ("half", 2), ("16", 2), ("short", 2),
    ("32", 4), ("float", 4), ("int8", 1), ("byte", 1), ("char", 1), ("bool", 1), ("8", 1), ("int", 4),
)  # fmt: skip
# A pattern in the names of operators, annotations and kernels -> the collective
KINDS = (
    ("reduce_?scatter", "reduce-scatter"), ("all_?reduce", "all-reduce"), ("all_?gather", "all-gather"),
    ("all_?to_?all", "all-to-all"), ("broadcast", "broadcast"), ("send_?recv|send|recv", "send/receive"), ("barrier", "barrier"),
    ("reduce", "reduce"), ("gather", "gather"), ("scatter", "scatter"),
)  # fmt: skip
# Bytes on each link over the bytes of the message, of n ranks: the bus bandwidth of NCCL's tests
BUS_FACTORS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True, slots=True)
class CollectiveMessage:
    """`bytes_in`, `bytes_out`: of one rank; `ranks`: the members of the process group, empty if unknown; `size`: how many they
    are, 0 if unknown."""

    kind: str
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    group: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0

    @property
    def bytes_counted(self) -> float:
        """As NCCL's tests count them: the whole buffer, whichever side holds it."""
        return max(self.bytes_in, self.bytes_out)


def message_of(arguments: dict[str, Any]) -> CollectiveMessage:
    """The message that the profiler describes in the arguments of a collective's kernel."""
    width = element_bytes(arguments.get("dtype"))
    ranks = _ranks(arguments.get("Process Group Ranks"))
    description = arguments.get("Process Group Description")
    group = description if isinstance(description, str) and description not in ("", "undefined") else ""
    name = arguments.get("Process Group Name")
    return CollectiveMessage(
        kind=kind_of(str(arguments.get("Collective name", ""))),
        bytes_in=width * _count(arguments.get("In msg nelems")),
        bytes_out=width * _count(arguments.get("Out msg nelems")),
        group=(group or str(name if name is not None else ""))[:100],
        ranks=ranks,
        size=int(_count(arguments.get("Group size"))) or len(ranks),
    )


def message_of_mark(name: str, shapes: Sequence[Any], types: Sequence[Any]) -> CollectiveMessage:
    """From the annotation `nccl:all_reduce` that PyTorch sets around the launch, with the shape of the first tensor.

    >>> message_of_mark("nccl:all_reduce", [[1024, 2]], ["float"]).bytes_in
    8192.0
    """
    shape = shapes[0] if shapes and isinstance(shapes[0], list) else None
    known = shape is not None and shape and all(isinstance(size, int) and 0 <= size < 1 << 40 for size in shape)
    size = float(prod(shape)) * element_bytes(types[0] if types else None) if known and shape is not None else 0.0
    return CollectiveMessage(kind_of(name.removeprefix(NCCL_MARK)), size, size)


def kind_of(name: str) -> str:
    """The collective that a name shows; empty if it shows none.

    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kind_of("_reduce_scatter_base"), kind_of("ncclDevKernel_Generic")
    ('all-reduce', 'reduce-scatter', '')
    """
    return next((kind for pattern, kind in KINDS if re.search(pattern, name.lower())), "")


def element_bytes(dtype: Any) -> int:
    """Bytes of one element; 0 if the type is unknown.

    >>> [element_bytes(name) for name in ("BFloat16", "c10::Half", "float", "Float8_e4m3fn", "Long", "Byte", None)]
    [2, 2, 4, 1, 8, 1, 0]
    """
    text = dtype.lower() if isinstance(dtype, str) else ""
    return next((width for part, width in DTYPE_BYTES if part in text), 0)


def _ranks(value: Any) -> tuple[int, ...]:
    """The profiler writes a list as text, and shortens long ones with "...".

    >>> _ranks("[0, 1, 2]"), _ranks("[0, 1, ...]"), _ranks(None)
    ((0, 1, 2), (), ())
    """
    text = value if isinstance(value, str) else ",".join(map(str, value)) if isinstance(value, list) else ""
    if not re.fullmatch(r"\[?[0-9, ]+\]?", text) or len(text) > 8 * MOST_RANKS:
        return ()
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", text))


def _count(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e18 else 0.0
