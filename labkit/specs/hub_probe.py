"""Whether the model hub can be reached: asked once, quickly, since its library retries for half a minute offline."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

_TRUE = ("1", "true", "yes", "on")


def hub_answers(timeout_s: float = 3.0) -> bool:
    """True when the hub's host accepts a connection within `timeout_s`, or when a proxy stands in between.

    HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE switch it off; HF_ENDPOINT names another host.
    """
    if any(os.environ.get(name, "").casefold() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        port = address.port or (80 if address.scheme == "http" else 443)
        with socket.create_connection((address.hostname or "huggingface.co", port), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False
