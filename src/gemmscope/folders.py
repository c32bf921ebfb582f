"""The folders in which gemmscope keeps its own files.

On Linux they are the XDG folders: `$XDG_STATE_HOME`, `$XDG_CACHE_HOME` and `$XDG_CONFIG_HOME`, or the defaults for these.
"""

from pathlib import Path

from platformdirs import PlatformDirs

_DIRS = PlatformDirs("gemmscope", appauthor=False)


def state_folder() -> Path:
    """Journals of measurements: $XDG_STATE_HOME/gemmscope or ~/.local/state/gemmscope."""
    return _DIRS.user_state_path


def cache_folder() -> Path:
    """Files that can be made again: $XDG_CACHE_HOME/gemmscope or ~/.cache/gemmscope."""
    return _DIRS.user_cache_path


def config_folder() -> Path:
    """Calibrations: $XDG_CONFIG_HOME/gemmscope or ~/.config/gemmscope."""
    return _DIRS.user_config_path
