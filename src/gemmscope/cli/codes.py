"""The exit codes of single commands, described in `commands.toml`. Every command also has 0 and 2."""

NOTHING_MEASURED = 1
CHECK_FAILED = 1  # of `shapes --check` and `compare --fail-if-slower`
FALLBACK = 3  # with --strict, another precision than requested
UNWRITTEN = 2  # run files of `fleet --folder`
OUTLIERS = 3  # with --fail-if-outlier
POINTS_LOST = 4  # of a sweep: GPUs were lost before all points were measured
TOO_NOISY = 4  # to tell whether a run is slower
