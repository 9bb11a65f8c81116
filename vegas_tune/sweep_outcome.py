"""What a `sweep` leaves behind: a profile beside its evidence, and words on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.errors import EXIT_CODES

if TYPE_CHECKING:
    from vegas_runtime.profile import Profile
    from vegas_runtime.protocol import EngineInfo, PromptBlock
    from vegas_tune.progress import SweepProgress
    from vegas_tune.stock import EngineUse, StockFigures
    from vegas_tune.study import RunFolder
    from vegas_tune.sweep import SweepResult

PROFILE_FILE: Final = "profile.yaml"


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """What `sweep` leaves behind.

    Attributes:
        result: the sweep's.
        profile: as written.
        path: the profile's file.
        backend_reason: which engine was taken, and why.
        use: engine starts and GPU time of a sweep on vLLM.
    """

    result: SweepResult
    profile: Profile
    path: Path
    backend_reason: str
    use: EngineUse | None = None

    @property
    def exit_code(self) -> int:
        """0 when the setting was validated, else 6."""
        return EXIT_CODES["ok" if self.result.status == "validated" else "inconclusive"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "status": self.result.status,
            "reason": self.result.reason,
            "selected": self.result.selected.to_dict(),
            "profile": str(self.path),
            "profile_id": self.profile.profile_id,
            "num_settings": self.result.num_settings,
            "num_measurements": len(self.result.outcomes),
            "spent_s": round(self.result.spent_s, 1),
            "backend": self.backend_reason,
            "results": self.profile.to_dict().get("results"),
            **({} if self.use is None else {"engine_use": self.use.to_dict()}),
        }

    def to_text(self, _: object = None) -> str:
        """For a person: the answer, what it rests on, what to do next."""
        selected = self.result.selected
        setting = (
            "plain decoding (gamma 0)"
            if selected.num_speculative_tokens == 0
            else f"gamma {selected.num_speculative_tokens}, "
            f"sparsity ratio {selected.sparsity_ratio:g} ({selected.algorithm})"
        )
        return "\n".join(
            [
                f"{self.result.status}: {setting}",
                self.result.reason,
                f"{len(self.result.outcomes)} measurements of {self.result.num_settings} settings "
                f"in {self.result.spent_s:.0f} s",
                *self._vllm_lines(),
                f"profile: {self.path}",
                f"next: vegas-tune apply {self.path}    vegas-tune report {self.path} --format "
                "html --out report.html",
            ]
        )

    def _vllm_lines(self) -> Iterator[str]:
        """The figure to publish, and what it took; nothing on an engine without another arm."""
        results = self.profile.results
        if results is not None and results.speedup_vs_stock is not None:
            ratio = results.speedup_vs_stock
            yield f"against stock vLLM: {ratio.est:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
        if self.use is not None:
            yield self.use.to_text()


def publish_run(
    result: SweepResult,
    info: EngineInfo,
    blocks: Sequence[PromptBlock],
    workload: Mapping[str, Any],
    store: RunFolder,
    reason: str,
    progress: SweepProgress,
    *,
    stock: StockFigures | None = None,
    use: EngineUse | None = None,
) -> SweepOutcome:
    """Pack the evidence of a run into its folder, and write the profile beside it.

    Args:
        result: of the sweep.
        info: of the engine that measured.
        blocks: the workload.
        workload: its description.
        store: the run's folder.
        reason: which engine was taken, and why.
        progress: told what the user should know.
        stock: measured before and after, where the engine is vLLM.
        use: what it took of the machine, where that is known.
    """
    from vegas_runtime.profile import write_profile
    from vegas_tune.evidence import RECORDS_NAME
    from vegas_tune.publish import build_profile, creation_time

    artifacts = {RECORDS_NAME: store.pack(store.path / RECORDS_NAME)}
    path = store.path / PROFILE_FILE
    profile = build_profile(
        result,
        info,
        blocks,
        workload,
        artifacts=artifacts,
        created=creation_time(path, artifacts),
        rejected=store.rejected,
        stock=stock,
        use=use,
    )
    write_profile(profile, path)
    if stock is not None:
        warn_of_stock(stock, progress)
    warn_of_gpu(profile, progress)
    return SweepOutcome(result=result, profile=profile, path=path, backend_reason=reason, use=use)


def warn_of_stock(stock: StockFigures, progress: SweepProgress) -> None:
    """Tell which passes of stock vLLM gave no figure."""
    for failure in stock.failures:
        progress.note(f"WARNING: a pass of stock vLLM failed: {failure.reason}")


def warn_of_gpu(profile: Profile, progress: SweepProgress) -> None:
    """Tell what casts doubt on figures of a GPU."""
    from vegas_tune.publish import gpu_warnings

    for warning in gpu_warnings(profile):
        progress.note(warning)
