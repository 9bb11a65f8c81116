"""A process that claims and finishes whatever waits, in one run after the other.

    python claiming_worker.py URL RUN_PREFIX NUM_RUNS NUM_POINTS

Each run starts with its fact `go` and ends when all of its measurements are done, by whomever.
What this process measured is printed as one line of JSON per run.
"""

from __future__ import annotations

import json
import sys
import time

from board_points import measured

from vegas_tune.board import Board
from vegas_tune.storage import open_storage

PATIENCE_S = 120.0


def main(url: str, prefix: str, num_runs: int, num_points: int) -> None:
    """Claim until all is done."""
    shared = open_storage(url, num_workers=1)
    for number in range(num_runs):
        board = Board.find_run(shared, f"{prefix}{number}", wait_s=PATIENCE_S)
        deadline_s = time.monotonic() + PATIENCE_S
        while board.fact("go") is None and time.monotonic() < deadline_s:
            time.sleep(0.002)
        mine = []
        while (task := board.claim()) is not None:
            mine.append(task.point.key)
            assert board.finish(task, measured(task.point, task.attempt))
        assert board.num_finished() <= num_points
        sys.stdout.write(json.dumps(mine) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
