"""Messages between the notebook's process and its worker: length, then JSON. Never a pickle, never without a limit."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

from labkit.errors import WorkerError
from labkit.text import plain

MAX_FRAME_BYTES = 64 * 2**20
_HEADER = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """`message` as one frame.

    Raises:
        WorkerError: it is larger than a frame may be.
    """
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WorkerError(
            "a message to or from the worker is too large",
            needed=f"{len(body):,} bytes",
            available=f"{MAX_FRAME_BYTES:,} bytes",
            works="fewer requests in one run",
        )
    return _HEADER.pack(len(body)) + body


def send(connection: socket.socket, message: dict[str, Any], timeout_s: float) -> None:
    """Send one frame on a non-blocking socket.

    Raises:
        WorkerError: the other side takes nothing for `timeout_s`.
        OSError: the other side is gone.
    """
    data = memoryview(encode(message))
    deadline = time.monotonic() + timeout_s
    while data:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([], [connection], [], left_s)[1]:
            raise WorkerError(f"the worker took no message for {timeout_s:g} s", works="running again: it is restarted")
        data = data[connection.send(data) :]


class FrameReader:
    """Puts frames together from what arrives; holds at most one frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._began_at = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """Seconds for which a half frame has been open; 0 where none is."""
        return time.monotonic() - self._began_at if self._buffer else 0.0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            WorkerError: a length over the limit, or content that is not a JSON object with a type.
        """
        if not self._buffer:
            self._began_at = time.monotonic()
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WorkerError(
                    "the worker announced a message that is too long",
                    needed=f"{length:,} bytes",
                    available=f"{MAX_FRAME_BYTES:,} bytes",
                    works="running again: it is restarted",
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
            self._began_at = time.monotonic()
        return messages


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WorkerError(
            f"the worker sent something that is not JSON: {plain(repr(body[:40]), 60)}",
            works="running again: it is restarted",
        ) from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WorkerError("the worker sent a message without a type", works="running again: it is restarted")
    return message
