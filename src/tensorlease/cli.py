"""The command `tensorlease`: runs a command line and turns every failure into one line and a code.

Exit codes: 0 done; 1 it failed, and the line on stderr says why; 2 it cannot work as called (a
wrong option, a wrong setting, an extra that is not installed); 130 interrupted. A command may
return a code of its own. What remains is a defect, and shows its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .protocol.errors import ConfigError, TensorleaseError

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

_PIP_LINES = {
    "click": "pip install 'tensorlease[broker]'",
    "prometheus_client": "pip install 'tensorlease[broker]'",
    "rich": "pip install 'tensorlease[broker]'",
    "safetensors": "pip install 'tensorlease[broker,files]'",
    "uvloop": "pip install 'tensorlease[broker]'",
    "numpy": "pip install numpy",
    "torch": "pip install torch",
}
"""Packages that an install may lack, and the line that brings each."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        args: The words after `tensorlease`; None takes those of this process.

    Returns:
        The exit code of the process.

    Raises:
        ModuleNotFoundError: A module is missing that no extra would bring.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PIP_LINES:
            raise
        _say(f"this needs {missing}, which is not installed: {_PIP_LINES[missing]}")
        return MISUSED
    except ConfigError as error:
        _say(str(error))
        return MISUSED
    except TensorleaseError as error:
        _say(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`tensorlease status | head`): nothing is left to say, and
        # the flush at exit must not say it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(words: list[str]) -> int:
    import click

    from .command_table import build

    try:
        outcome: object = build().main(words, prog_name="tensorlease", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return MISUSED
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    return outcome if isinstance(outcome, int) else 0


def _say(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
