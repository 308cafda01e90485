"""CPU seconds (user + system, least of several runs) of what must start fast.  Prints one JSON object.

python tests/benchmarks/import_cost.py [RUNS]
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

COMMANDS = {
    "python": ["-c", "pass"],
    "import difflora": ["-c", "import difflora"],
    "difflora --help": ["-m", "difflora", "--help"],
    "difflora --version": ["-m", "difflora", "--version"],
    "difflora generate --help": ["-m", "difflora", "generate", "--help"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """What one run of the interpreter costs."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{arguments} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    least = {name: round(min(cpu_seconds(command) for _ in range(runs)), 3) for name, command in COMMANDS.items()}
    print(json.dumps({"cpu_seconds": least, "runs": runs, "python": platform.python_version(), "limit_help": 0.5}))


if __name__ == "__main__":
    main()
