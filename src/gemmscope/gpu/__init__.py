"""Facts about GPUs: what the driver reports, the datasheets, and the machine's environment."""

UNHEALTHY_THROTTLING = ("HW slowdown", "SW thermal slowdown", "HW thermal slowdown", "HW power brake")
"""Why the clock is below its maximum: reasons that do not occur, or do not last, on a healthy GPU."""
