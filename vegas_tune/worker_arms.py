"""What a worker measures with: one engine, or vLLM's two arms in turn on the same GPUs."""

from __future__ import annotations

import hashlib
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from vegas_runtime.backend import (
    find_checkpoint,
    open_backend,
    open_vllm,
    resolve_backend,
)
from vegas_runtime.config import SamplingConfig, SpeculationConfig, visible_gpus
from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck
from vegas_runtime.protocol import Capacity, Engine, EngineInfo, PromptBlock
from vegas_tune.board import Board
from vegas_tune.performer import Performer
from vegas_tune.plan import STOCK
from vegas_tune.split import check_gpus, check_split
from vegas_tune.stock import EngineUse
from vegas_tune.workload_spec import WorkloadSpec

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine
    from vegas_tune.workload import Workload

# Facts of a board: the tuned engine's, once one is open, and what each worker's engines took.
TUNED_INFO: Final = "tuned_info"
_USE: Final = "use/"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What a worker tells the sweep about its engine and its prompts, plain values.

    The sweep itself opens no engine and reads no text. Of vLLM it is told what stock vLLM is first,
    and `TUNED_INFO` once that engine is open.

    Attributes:
        info: `EngineInfo`.
        workload: `Workload.describe()`.
        blocks: per block its hash, prompt lengths, batch size, output limit and sampling.
        mix: share of the prompts by kind.
        replays: times that the most used prompt is used.
    """

    info: dict[str, Any]
    workload: dict[str, Any]
    blocks: list[dict[str, Any]]
    mix: dict[str, float]
    replays: int


class Arms(Protocol):
    """What a worker needs of its engines."""

    @property
    def blocks(self) -> Sequence[PromptBlock]:
        """The workload."""

    def performer(self, step: str) -> Performer:
        """What carries out a step's measurements; starts an engine where need be.

        Raises:
            BackendError: it does not start.
            GpuMemoryError: the memory of the one before did not come back.
        """

    def close(self) -> None:
        """Free the engines. Idempotent."""


class OneEngine:
    """`Arms` of an engine that is open and does every step.

    Args:
        engine: open.
        blocks: the workload.
        load_s: what opening them took; part of the cost of what is measured first.
    """

    def __init__(
        self, engine: Engine, blocks: Sequence[PromptBlock], *, load_s: float = 0.0
    ) -> None:
        self._engine = engine
        self._performer = Performer(engine, blocks, where=_where(engine.info), load_s=load_s)
        self.blocks = blocks

    def performer(self, step: str) -> Performer:
        """See `Arms`."""
        return self._performer

    def close(self) -> None:
        """See `Arms`."""
        self._engine.close()


class VllmArms:
    """`Arms` of vLLM: stock for its own step, the tuned engine for the others, one at a time.

    What they take of their GPUs is kept with the run as they come and go; what a start takes is
    part of the cost of what it measures first.

    Args:
        start: starts vLLM; told whether stock.
        blocks: the workload.
        board: of the run.
    """

    def __init__(
        self,
        start: Callable[[bool], VllmEngine],
        blocks: Sequence[PromptBlock],
        board: Board,
    ) -> None:
        self._start = start
        self._board = board
        self._name = f"{_USE}{uuid.uuid4().hex[:12]}"
        self._open: tuple[bool, VllmEngine, Performer] | None = None
        self._starts = {False: 0, True: 0}
        self._held_s = 0.0
        self._memory = UNKNOWN
        self.blocks = blocks

    def performer(self, step: str) -> Performer:
        """See `Arms`."""
        is_stock = step == STOCK
        if self._open is None or self._open[0] != is_stock:
            self.close()
            self._memory.refuse_held("vLLM")
            opened_s = time.monotonic()
            engine = self._start(is_stock)
            load_s = time.monotonic() - opened_s
            performer = Performer(engine, self.blocks, where=_where(engine.info), load_s=load_s)
            self._open = (is_stock, engine, performer)
            if not is_stock:
                self._board.set_fact(TUNED_INFO, asdict(engine.info))
        self._tell_use()
        return self._open[2]

    def info_of(self, step: str) -> EngineInfo:
        """The engine of a step; started where need be."""
        self.performer(step)
        assert self._open is not None
        return self._open[1].info

    def close(self) -> None:
        """See `Arms`."""
        if self._open is None:
            return
        (is_stock, engine, _), self._open = self._open, None
        engine.close()
        self._memory = engine.memory
        self._starts[is_stock] += engine.num_starts
        self._held_s += engine.held_s
        self._tell_use()

    def _tell_use(self) -> None:
        starts, held_s = dict(self._starts), self._held_s
        if self._open is not None:
            is_stock, engine, _ = self._open
            starts[is_stock] += engine.num_starts
            held_s += engine.held_s
        values = {
            "plugin_starts": starts[False],
            "stock_starts": starts[True],
            "held_s": round(held_s, 3),
        }
        self._board.set_fact(self._name, values)


def use_of(board: Board, memory: MemoryCheck = UNKNOWN) -> EngineUse | None:
    """What engines of all workers took of their GPUs, over every call of the run.

    A worker that was killed counts up to its last measurement.

    Args:
        board: of the run.
        memory: what became of the GPUs' memory.

    Returns:
        None where no worker ran vLLM.
    """
    told = board.facts(_USE)
    if not told:
        return None
    return EngineUse(
        plugin_starts=sum(one["plugin_starts"] for one in told),
        stock_starts=sum(one["stock_starts"] for one in told),
        held_s=sum(one["held_s"] for one in told),
        memory=memory,
    )


# --------------------------------------------------------------------------- opening them


def open_arms(
    board: Board, *, model: str | None, data: Path | None, device: str, report: Report
) -> Arms:
    """The engines and prompts that the run is about; the first worker tells the sweep of them.

    Args:
        board: of the run.
        model: where the model lies here, if not where the sweep says.
        data: where the workload's file lies here, if not where the sweep says.
        device: where the engine runs.
        report: told what goes on.

    Raises:
        VegasError: an engine cannot be opened, or the prompts cannot be made.
    """
    request = {**board.fact("request")}
    request["model"] = model or request["model"]
    backend, reason = resolve_backend(request["backend"])
    report(f"backend: {reason}")
    check_split(request["tensor_parallel_size"], backend, reason)
    if backend == "vllm":
        return _open_vllm(board, request, data, report)
    opened_s = time.monotonic()
    engine, _ = open_backend(
        backend,
        model=request["model"],
        max_num_speculative_tokens=request["max_gamma"],
        dtype=request["dtype"],
        device=device,
        report=report,
    )
    if backend == "replay":
        return _replayed(board, engine)
    workload = _workload(request, data, engine.tokenizer, engine.info.model)
    load_s = time.monotonic() - opened_s
    _tell(board, engine.info, workload.blocks, workload)
    return OneEngine(engine, workload.blocks, load_s=load_s)


def _open_vllm(
    board: Board, request: Mapping[str, Any], data: Path | None, report: Report
) -> VllmArms:
    """vLLM, sized for the prompts, which are therefore made first."""
    check_gpus(request["tensor_parallel_size"])
    checkpoint = find_checkpoint(request["model"], dtype=request["dtype"], report=report)
    workload = _workload(request, data, checkpoint.tokenizer, checkpoint.facts)
    capacity = Capacity.of(
        workload.blocks,
        gammas=request["gammas"],
        ratios=request["ratios"],
        config=SpeculationConfig.from_dict(request["base"]),
        tensor_parallel_size=request["tensor_parallel_size"],
    )

    def start(is_stock: bool) -> VllmEngine:
        return open_vllm(checkpoint, capacity, is_stock=is_stock, report=report)

    arms = VllmArms(start, workload.blocks, board)
    if board.fact("facts") is None:
        # The sweep begins with stock vLLM, so that is the engine to begin with here.
        _tell(board, arms.info_of(STOCK), workload.blocks, workload)
    return arms


def _workload(
    request: Mapping[str, Any], data: Path | None, tokenizer: Any, model: Mapping[str, Any]
) -> Workload:
    from vegas_tune.workload import build_workload

    values = dict(request["spec"])
    values["sampling"] = SamplingConfig(**values["sampling"])
    path = data or values["path"]
    values["path"] = Path(path) if path else None
    return build_workload(
        WorkloadSpec(**values), tokenizer, max_model_len=model.get("max_model_len")
    )


def _replayed(board: Board, engine: Engine) -> OneEngine:
    from vegas_runtime.replay import ReplayEngine

    assert isinstance(engine, ReplayEngine)
    _tell(board, engine.info, engine.blocks, None)
    return OneEngine(engine, engine.blocks)


def _tell(
    board: Board, info: EngineInfo, blocks: Sequence[PromptBlock], workload: Workload | None
) -> None:
    """Tell the sweep of engine and prompts, unless another worker has."""
    if board.fact("facts") is not None:
        return
    facts = Facts(
        info=asdict(info),
        workload={} if workload is None else workload.describe(),
        blocks=_block_facts(blocks),
        mix={} if workload is None else workload.mix,
        replays=1 if workload is None else workload.replays,
    )
    board.set_fact("facts", asdict(facts))


def _block_facts(blocks: Sequence[PromptBlock]) -> list[dict[str, Any]]:
    return [
        {
            "sha256": block.sha256,
            "prompt_lens": [len(prompt) for prompt in block.prompts],
            "batch_size": block.batch_size,
            "max_new_tokens": block.max_new_tokens,
            "sampling": block.sampling.to_dict(),
        }
        for block in blocks
    ]


def _where(info: EngineInfo) -> str:
    """Name of this device among the run's, without saying which host it is."""
    device = info.device
    which = ",".join(visible_gpus() or ())
    text = f"{socket.gethostname()}/{device.get('class')}/{which}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
