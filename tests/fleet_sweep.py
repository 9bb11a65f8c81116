"""The deciding side of a sweep over a recorded grid, for workers of a shared storage.

    python fleet_sweep.py URL FOLDER PLACES

Decisions are printed as JSON. A second call goes on where a killed one stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.grid import GRID_FILE, Grid
from vegas_runtime.replay import ReplayEngine
from vegas_tune.board import Board
from vegas_tune.fleet import FleetLab
from vegas_tune.plan import Plan, make_plan
from vegas_tune.storage import open_storage
from vegas_tune.study import RunFolder
from vegas_tune.sweep import run_sweep

GAMMAS = (2, 3, 4)
RATIOS = (0.03, 0.07, 0.15)


def grid_plan(places: int) -> Plan:
    """A short sweep; its budget is no part of the question."""
    grid = Grid.open()
    engine = ReplayEngine.open(GRID_FILE)
    return make_plan(
        grid.plain,
        engine.blocks,
        budget_s=1e6,
        tokens=grid.header["tokens"],
        ratios=RATIOS,
        gammas=GAMMAS,
        places=places,
        looks=(6,),
        race_looks=(6,),
    )


def main(url: str, folder: str, places: int) -> None:
    """Post, wait, decide."""
    plan = grid_plan(places)
    board = Board.create(open_storage(url, num_workers=places), Path(folder).name)
    board.set_fact(
        "request",
        {
            "backend": "replay", "model": str(GRID_FILE), "dtype": "auto",
            "max_gamma": max(GAMMAS), "tensor_parallel_size": 1,
        },
    )  # fmt: skip
    board.set_fact("plan", plan.to_dict())
    board.reap()
    board.offer_places(places)
    with RunFolder.open(Path(folder), plan) as store:
        result = run_sweep(plan, FleetLab(plan, board, store))
    board.set_fact("is_over", True)
    sys.stdout.write(json.dumps([decision.to_dict() for decision in result.decisions]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
