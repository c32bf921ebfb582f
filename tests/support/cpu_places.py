"""The command line on a machine whose CPU is several places, as several GPUs are: `python -m support.cpu_places 2 fleet …`.

Silence is noticed sooner than in real use, so that stopped processes do not hold up those who wait.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from gemmscope.commands import fleet
from gemmscope.engine import campaign
from gemmscope.pool.gpus import open_pool
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.pool import Pool
from gemmscope.pool.schedule import Limits, Schedule
from gemmscope.sweep import run as sweep_run

SILENCE_S, STOPPED_S = 15.0, 3.0


def _opened(places: int, *, ray: str | None = None, **asked: Any) -> Pool:
    return open_pool(ray=ray, **asked) if ray is not None else LocalPool([LocalPlace()] * places, alive_s=1.0)


def main() -> None:
    """Run the command with so many places."""
    from gemmscope.__main__ import run  # here, because it takes Ctrl-C: pytest imports this module too

    places = int(sys.argv.pop(1))
    campaign.STOPPED_S = STOPPED_S
    for module in (fleet, sweep_run):
        module.open_pool = partial(_opened, places)  # type: ignore[attr-defined]
        module.Schedule = partial(Schedule, limits=Limits(silence_s=SILENCE_S))  # type: ignore[attr-defined]
    run()


if __name__ == "__main__":
    main()
