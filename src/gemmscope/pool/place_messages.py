"""The lines that a pool and a place worker exchange: one JSON object each.

To the place worker: how it is set up, then units; the end of its input means that it should end. From the
place worker: `hello` or `refused`, then `alive`, `progress`, `outcome` and `failure`. What a unit is goes to the place worker
as a pickle, since it holds Python values; nothing that comes back is unpickled.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemmscope.pool.pool import Event, Place, PlaceFound, PlaceRefused, Unit, UnitDone, UnitFailed, UnitProgress

PLACE_WORKER = "gemmscope.pool.place_worker"  # the module that a place worker runs
START_S = 90.0  # a place that has not said hello by then never will: it imports nothing heavy
RESTART_S = 1.0  # after a death: the memory of its measuring process is released by then
ALIVE_S = 5.0  # how often a place worker gives a sign of life


@dataclass(frozen=True)
class PlaceSetup:
    """How a place worker is set up. Its GPU is the one that CUDA_VISIBLE_DEVICES shows it."""

    cpu: bool = False
    """Measure on the CPU."""
    share_gpu: bool = False
    """Measure also on a GPU that others use."""
    cores: Sequence[int] = ()
    """The CPU cores that it and its measuring processes run on; empty: all."""
    near: bool = False
    """Without `cores`: those near its GPU, divided among the GPUs of its machine that are near the same ones."""
    folder: str = ""
    """For its journals, on a local disk; empty: a temporary folder of its own."""
    alive_s: float = ALIVE_S

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def unit_line(unit: Unit) -> bytes:
    """Asks a place worker for a unit."""
    content = base64.b64encode(pickle.dumps(unit.content)).decode()
    return json.dumps({"key": unit.key, "content": content}).encode() + b"\n"


def content_of(data: Mapping[str, Any]) -> Any:
    """What a unit is, from its line. Only for a place worker: it trusts whoever started it."""
    return pickle.loads(base64.b64decode(data["content"]))


def event_of(place: str, text: str | bytes, *, name: str = "") -> Event:
    """The event that a line of the place worker at `place` (its key) tells. `name`: what to call it if it refuses.

    A `ValueError` if it is not a line of a place worker.

    >>> event_of("a", '{"type": "progress", "text": "round 3"}')
    UnitProgress(place='a', text='round 3')
    """
    try:
        data = json.loads(text)
        match data["type"]:
            case "hello":
                return PlaceFound(Place(place, str(data["node"]), data["gpu"], str(data["uuid"]), dict(data["facts"])))
            case "refused":
                return PlaceRefused(name or str(data["node"]), str(data["why"]), str(data["hint"]), place)
            case "alive" | "progress" as kind:
                return UnitProgress(place, str(data["text"]) if kind == "progress" else "")
            case "outcome":
                return UnitDone(place, str(data["unit"]), data["outcome"])
            case "failure":
                return UnitFailed(place, str(data["unit"]), str(data["why"]), str(data["hint"]), unfit=bool(data.get("unfit")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not a line of a place worker: {error}") from error
    raise ValueError("not a line of a place worker")
