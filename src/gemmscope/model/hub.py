"""Resolves a Hugging Face hub ID with the user's own transformers, in a separate process.

gemmscope itself never imports transformers. This file is also what that process runs: it sends the config, or ends with
the reason why it cannot.
"""

import importlib.util
import json
import os
import re
import sys

from gemmscope.errors import UserError, option
from gemmscope.process import messages_to_parent, run_worker

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


def looks_like_hub_id(name: str) -> bool:
    """Whether this is `owner/model` or a bare model name.

    >>> looks_like_hub_id("meta-llama/Llama-3.1-8B"), looks_like_hub_id("../configs/config.json")
    (True, False)
    """
    is_file_name = name.lower().endswith((".json", ".toml", ".yaml", ".yml", ".sh", ".txt", ".log", ".args"))
    return bool(_HUB_ID.fullmatch(name)) and not is_file_name


def resolve(name: str) -> str:
    """The text of a hub ID's config.json, from the local cache or from the hub."""
    instead = f"give the path of its config.json instead: {option('config', 'PATH')}"
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            f"there is no file or folder {name!r}, and looking it up as a hub ID needs transformers, which is not installed",
            f"pip install transformers, or {instead}",
        )
    worker = run_worker(__name__, name)
    if worker.ending.code != 0 or worker.cut:
        reason = "its config is too large" if worker.cut else worker.reason
        raise UserError(f"there is no file or folder {name!r}, and it cannot be resolved as a hub ID: {reason}", instead)
    return worker.text


def _main(name: str) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):
        if not _hub_reachable():
            raise SystemExit("it is not in the local cache, and the hub cannot be reached from here") from None
        try:
            config, _ = PretrainedConfig.get_config_dict(name)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise SystemExit(reason[0]) from None
    if not config:
        raise SystemExit("it has no config.json")
    with messages_to_parent() as out:
        out.write(json.dumps(config) + "\n")


def _hub_reachable() -> bool:
    """Whether the hub's host name resolves. Without this check, transformers would retry for half a minute."""
    import socket
    from urllib.parse import urlparse

    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return bool(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"))
    return True


if __name__ == "__main__":
    _main(sys.argv[1])
