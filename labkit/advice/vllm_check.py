"""vLLM's own parser on an exported command, in the Python where vLLM is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.errors import LabkitError
from labkit.text import plain

# Importing vLLM takes from 5 to 40 s, more from a cold disk.
TIMEOUT_S = 180

# Runs in the other Python: parses, prints one JSON object, and starts nothing.
_SCRIPT = """
import contextlib, io, json, sys
try:
    from vllm import __version__ as version
except ImportError:
    print(json.dumps({"installed": False})); sys.exit(0)
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
from vllm.engine.arg_utils import AsyncEngineArgs
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
parser.add_argument("model_tag", nargs="?")
words, errors = json.loads(sys.argv[1]), io.StringIO()
try:
    with contextlib.redirect_stderr(errors):
        parser.parse_args(words)
    answer = ""
except SystemExit:
    answer = errors.getvalue().strip().splitlines()[-1]
print(json.dumps({"installed": True, "version": version, "error": answer}))
"""


@dataclass(frozen=True)
class ParserAnswer:
    """What the installed vLLM says: its version, and its error text, "" when it takes the command."""

    version: str
    error: str


def check_with_vllm(words: Sequence[str], python: str = sys.executable) -> ParserAnswer | None:
    """The answer of vLLM's parser to the words after `vllm serve`; None where `python` has no vLLM.

    Raises:
        LabkitError: the interpreter cannot be run, does not answer in time, or vLLM fails to import.
    """
    try:
        done = subprocess.run(
            [python, "-c", _SCRIPT, json.dumps(list(words))],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabkitError(f"cannot ask vLLM in {plain(python)}: {plain(error)}", works="its Python's path") from error
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1] if lines else "")
    except ValueError:
        cause = plain(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no answer")
        raise LabkitError(
            f"vLLM in {plain(python)} does not start: {cause}", works="a Python in which `import vllm` succeeds"
        ) from None
    return ParserAnswer(plain(answer["version"]), plain(answer["error"])) if answer["installed"] else None
