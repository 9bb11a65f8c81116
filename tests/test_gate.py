from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import HOPELESS, PLATEAU, Shape, SyntheticEngine, make_blocks

from profiles import make_profile
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import StorageError, WorkloadError
from vegas_runtime.profile import Profile
from vegas_runtime.record_arrays import read_arrays, write_arrays
from vegas_runtime.records import write_json_lines
from vegas_tune.evidence import (
    OLD_RECORDS_NAME,
    RECORDS_NAME,
    pack_records,
    unpack_records,
)
from vegas_tune.gate import judge, recorded_result, replay_decisions
from vegas_tune.laboratory import Laboratory, MemoryStore
from vegas_tune.measure import Counts, Estimate, mean_ratio
from vegas_tune.plan import Plan, make_plan
from vegas_tune.recheck import (
    against_recorded,
    check_acceptance,
    check_speedup,
    paired_acceptance,
)
from vegas_tune.sweep import SweepResult, run_sweep

BLOCKS = make_blocks(3)
GREEDY = make_blocks(3, sampling=SamplingConfig(temperature=0.0))
LEVEL = 1 - 0.05 / 4
LOOKS = (6, 10, 16, 24)


@cache
def _swept(
    shape: Shape = PLATEAU, is_greedy: bool = False, preparation_share: float = 1e6
) -> tuple[Plan, MemoryStore, SweepResult]:
    base = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
    blocks = GREEDY if is_greedy else BLOCKS
    share = preparation_share
    plan = make_plan(base, blocks, budget_s=3500.0, tokens=1500, preparation_share=share)
    store = MemoryStore()
    result = run_sweep(plan, Laboratory(plan, SyntheticEngine(shape), blocks, store=store))
    return plan, store, result


def _published(folder: Path, *sweep: Any, **changes: Any) -> Profile:
    plan, store, result = _swept(*sweep)
    digest = pack_records(folder / RECORDS_NAME, plan, store.outcomes.values())
    return make_profile(
        **{
            "status": result.status,
            "decisions": [decision.to_dict() for decision in result.decisions],
            "selected": {"default": result.selected.to_dict(), "buckets": []},
            "serving": None,
            "artifacts": [{"name": RECORDS_NAME, "sha256": digest}],
        }
        | changes
    )


# ------------------------------------------------------------------ tier 1


def test_the_records_lead_to_the_published_decisions(tmp_path: Path) -> None:
    verdict = replay_decisions(_published(tmp_path), tmp_path)
    assert verdict.status == "ok", verdict.why
    assert verdict.tier == "replay"


def _edited_outside(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [_edited_outside, _cut_off])
def test_records_that_were_changed_are_not_evidence(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    profile = _published(tmp_path)
    damage(tmp_path / RECORDS_NAME)
    verdict = replay_decisions(profile, tmp_path)
    assert verdict.status == "regressed"
    assert "changed or cut off" in verdict.why


def _resealed(profile: Profile, path: Path, rows: list[dict[str, Any]]) -> Profile:
    """Records changed by someone who also put the new hash into the profile."""
    import hashlib

    write_arrays(path, rows)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    artifacts = [{"name": RECORDS_NAME, "sha256": digest}]
    values = profile.to_dict() | {"artifacts": artifacts, "profile_id": "unsealed"}
    return Profile.model_validate(values)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    profile, path = _published(tmp_path), tmp_path / RECORDS_NAME
    rows = read_arrays(path)
    profile = _resealed(profile, path, rows[:-1])
    verdict = replay_decisions(profile, tmp_path)
    assert verdict.status == "regressed"
    assert "no measurement '4-validate." in verdict.why


def test_a_record_with_other_times_leads_to_other_figures(tmp_path: Path) -> None:
    profile, path = _published(tmp_path), tmp_path / RECORDS_NAME
    rows = read_arrays(path)
    plain = _swept()[0].plain.to_dict()
    for row in rows[1:]:
        if row["point"]["step"] == "4-validate" and row["point"]["config"] == plain:
            for step in row["run"]["steps"]:
                step["verify_s"] = round(step["verify_s"] * 1.001, 6)
    verdict = replay_decisions(_resealed(profile, path, rows), tmp_path)
    assert verdict.status == "regressed"
    assert "(4-validate) has other figures" in verdict.why


@pytest.mark.parametrize("key", ["point", "run", "cost_s"])
def test_a_damaged_record_is_not_evidence(tmp_path: Path, key: str) -> None:
    profile, path = _published(tmp_path), tmp_path / RECORDS_NAME
    rows = read_arrays(path)
    del rows[3][key]
    verdict = replay_decisions(_resealed(profile, path, rows), tmp_path)
    assert verdict.status == "regressed"
    assert "damaged" in verdict.why


def test_an_edited_decision_is_found(tmp_path: Path) -> None:
    _, _, result = _swept()
    decisions = [decision.to_dict() for decision in result.decisions]
    decisions[1]["chosen"]["num_speculative_tokens"] += 1
    verdict = replay_decisions(_published(tmp_path, decisions=decisions), tmp_path)
    assert verdict.status == "regressed"
    assert verdict.why.startswith("decision 2 (2-gamma) is")

    figures = [decision.to_dict() for decision in result.decisions]
    figures[-1]["alternatives"][0]["speedup_vs_gamma0"]["est"] += 0.0001
    verdict = replay_decisions(_published(tmp_path, decisions=figures), tmp_path)
    assert "other figures" in verdict.why

    short = replay_decisions(_published(tmp_path, decisions=decisions[:1]), tmp_path)
    assert "holds 1 decisions" in short.why


def test_an_edited_selection_is_found(tmp_path: Path) -> None:
    _, _, result = _swept()
    other = result.selected.replace(sparsity_ratio=0.33).to_dict()
    profile = _published(tmp_path, selected={"default": other, "buckets": []})
    verdict = replay_decisions(profile, tmp_path)
    assert verdict.status == "regressed"
    assert "selects" in verdict.why


def test_absent_records_cannot_be_replayed(tmp_path: Path) -> None:
    profile = _published(tmp_path)
    (tmp_path / RECORDS_NAME).unlink()
    assert replay_decisions(profile, tmp_path).status == "inconclusive"
    unnamed = _published(tmp_path, artifacts=[])
    assert replay_decisions(unnamed, tmp_path).status == "inconclusive"


def test_records_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / RECORDS_NAME, [{"kind": "grid"}])
    with pytest.raises(StorageError, match="not a file of records"):
        unpack_records(tmp_path / RECORDS_NAME)
    write_arrays(tmp_path / RECORDS_NAME, [])
    with pytest.raises(StorageError):
        unpack_records(tmp_path / RECORDS_NAME)


def test_records_of_profiles_from_before_are_still_replayed(tmp_path: Path) -> None:
    import hashlib

    profile, old = _published(tmp_path), tmp_path / OLD_RECORDS_NAME
    write_json_lines(old, read_arrays(tmp_path / RECORDS_NAME))
    (tmp_path / RECORDS_NAME).unlink()
    digest = hashlib.sha256(old.read_bytes()).hexdigest()
    values = profile.to_dict() | {"artifacts": [{"name": OLD_RECORDS_NAME, "sha256": digest}]}
    profile = Profile.model_validate(values | {"profile_id": "unsealed"})
    verdict = replay_decisions(profile, tmp_path)
    assert verdict.status == "ok", verdict.why
    assert recorded_result(tmp_path).selected == profile.selected.default


# ------------------------------------------------------------------ tier 2


def _slipped(by: float) -> Shape:
    """A fault in the code: selection is worse, so that each draft is accepted less often."""
    return replace(PLATEAU, agreement=lambda ratio: PLATEAU.agreement(ratio) - by)


def test_unchanged_code_passes(tmp_path: Path) -> None:
    _published(tmp_path)
    engine = SyntheticEngine(PLATEAU, run_cv=0.3)
    verdict = check_acceptance(tmp_path, engine, BLOCKS, budget_s=1e6)
    assert verdict.status == "ok", verdict.why
    assert verdict.ratio is not None
    assert verdict.ratio.est == pytest.approx(1.0)
    assert verdict.to_dict()["margin"] >= 0.03


def test_other_random_numbers_raise_no_alarm(tmp_path: Path) -> None:
    # As on another machine: the same requests, each draft drawn afresh.
    _published(tmp_path)

    class Elsewhere(SyntheticEngine):
        shift = 0

        def run(self, block: Any, *, replicate: int, **options: Any) -> Any:
            return super().run(block, replicate=replicate + self.shift, **options)

    statuses = []
    for shift in (1000, 2000, 3000, 4000):
        engine = Elsewhere(PLATEAU)
        engine.shift = shift
        verdict = check_acceptance(tmp_path, engine, BLOCKS, budget_s=1e6)
        statuses.append(verdict.status)
        assert verdict.ratio is not None
        assert verdict.ratio.low < verdict.ratio.est < verdict.ratio.high
    assert "regressed" not in statuses
    assert "ok" in statuses


def test_a_loss_of_acceptance_is_found(tmp_path: Path) -> None:
    _published(tmp_path)
    verdict = check_acceptance(tmp_path, SyntheticEngine(_slipped(0.15)), BLOCKS, budget_s=1e6)
    assert verdict.status == "regressed", verdict.why
    dead = replace(PLATEAU, agreement=lambda ratio: 1e-9)
    verdict = check_acceptance(tmp_path, SyntheticEngine(dead), BLOCKS, budget_s=1e6)
    assert verdict.status == "regressed", verdict.why


def test_greedy_text_is_measured_once_per_block(tmp_path: Path) -> None:
    _published(tmp_path, PLATEAU, True)
    engine = SyntheticEngine(PLATEAU)
    verdict = check_acceptance(tmp_path, engine, GREEDY, budget_s=1e6)
    assert verdict.status == "ok", verdict.why
    assert engine.num_passes <= len(GREEDY)


def test_a_setting_that_drafts_guards_a_profile_that_does_not(tmp_path: Path) -> None:
    _published(tmp_path, HOPELESS)
    assert recorded_result(tmp_path).selected.num_speculative_tokens == 0
    engine = SyntheticEngine(HOPELESS)
    verdict = check_acceptance(tmp_path, engine, BLOCKS, budget_s=1e6)
    assert engine.config.num_speculative_tokens > 0
    assert verdict.status == "ok", verdict.why


def test_other_text_proves_nothing(tmp_path: Path) -> None:
    _published(tmp_path)
    other = make_blocks(3, prompt_tokens=100)
    for check in (check_acceptance, check_speedup):
        with pytest.raises(WorkloadError, match="not those"):
            check(tmp_path, SyntheticEngine(PLATEAU), other, budget_s=1e6)


def test_a_spent_budget_is_inconclusive(tmp_path: Path) -> None:
    _published(tmp_path)
    for check in (check_acceptance, check_speedup):
        verdict = check(tmp_path, SyntheticEngine(PLATEAU), BLOCKS, budget_s=0.1)
        assert verdict.status == "inconclusive"
        assert "budget" in verdict.why


def _requests(
    loss: float, seed: int, count: int = 24
) -> tuple[dict[int, Counts], dict[int, Counts]]:
    """Recorded and measured counters of requests that differ, 60 iterations of 7 drafts each."""
    random = np.random.default_rng(seed)
    chance = random.beta(12, 4, count)
    sides = []
    for scale in (1.0, 1.0 - loss):
        drawn = random.binomial(7, chance[:, None] * scale, (count, 60)).sum(axis=1)
        sides.append({i: Counts(int(total), 60) for i, total in enumerate(drawn)})
    return sides[0], sides[1]


def _acceptance_verdicts(loss: float, trials: int = 300) -> dict[str, float]:
    found = []
    for seed in range(trials):
        recorded, measured = _requests(loss, seed)
        ratio = paired_acceptance(measured, recorded, level=0.975)
        assert ratio is not None
        found.append(judge(ratio, 0.03))
    return {status: found.count(status) / trials for status in ("ok", "regressed", "inconclusive")}


def test_acceptance_alarms_are_rare_and_losses_are_seen() -> None:
    same, slight, clear = (_acceptance_verdicts(loss) for loss in (0.0, 0.03, 0.08))
    assert same["regressed"] <= 0.01
    assert same["ok"] >= 0.9
    assert slight["regressed"] <= 0.03  # a loss of just the margin: the nominal error
    assert clear["regressed"] >= 0.9
    assert clear["ok"] <= 0.01


def test_acceptance_needs_requests_to_compare() -> None:
    two = {0: Counts(5, 9), 1: Counts(6, 9)}
    assert paired_acceptance(two, two, level=0.95) is None
    nothing = {i: Counts(0, 9) for i in range(5)}
    assert paired_acceptance(nothing, nothing, level=0.95) is None


# ------------------------------------------------------------------ tier 3


def test_the_speedup_is_measured_on_the_text_that_was_validated(tmp_path: Path) -> None:
    for share, blocks in ((1e6, {2}), (0.001, {0, 1})):
        folder = tmp_path / f"{share:g}"
        folder.mkdir()
        _published(folder, PLATEAU, False, share)
        engine = SyntheticEngine(PLATEAU, seed=5)
        assert check_speedup(folder, engine, BLOCKS, budget_s=1e6).status == "ok"
        assert engine._prepared == blocks


def test_the_speedup_is_compared_not_the_throughput(tmp_path: Path) -> None:
    _published(tmp_path)
    # A machine at half the speed, the same speed-up.
    half = replace(
        PLATEAU,
        draft_s=lambda ratio: 2 * PLATEAU.draft_s(ratio),
        verify_s=lambda gamma: 2 * PLATEAU.verify_s(gamma),
        select_s=2 * PLATEAU.select_s,
        other_s=2 * PLATEAU.other_s,
    )
    verdict = check_speedup(tmp_path, SyntheticEngine(half, seed=5), BLOCKS, budget_s=1e6)
    assert verdict.status == "ok", verdict.why
    slow_drafts = replace(PLATEAU, draft_s=lambda ratio: 1.8 * PLATEAU.draft_s(ratio))
    verdict = check_speedup(tmp_path, SyntheticEngine(slow_drafts), BLOCKS, budget_s=1e6)
    assert verdict.status == "regressed", verdict.why


def _speedup_verdicts(truth: float, trials: int = 400) -> dict[str, float]:
    """Share of verdicts at a run-to-run CV of 1.5 %, 10 recorded pairs, looks at 6, 10, 16, 24."""
    random = np.random.default_rng(round(truth * 1000))
    pair_sd = 0.015 * math.sqrt(2)
    found = []
    for _ in range(trials):
        recorded = mean_ratio(list(math.log(1.4) + random.normal(0, pair_sd, 10)), LEVEL)
        logs = list(math.log(1.4 * truth) + random.normal(0, pair_sd, LOOKS[-1]))
        for look in LOOKS:
            ratio = against_recorded(logs[:look], recorded, level=LEVEL, recorded_level=LEVEL)
            status = judge(ratio, 0.03)
            if status != "inconclusive":
                break
        found.append(status)
    return {status: found.count(status) / trials for status in ("ok", "regressed", "inconclusive")}


def test_speedup_alarms_are_rare_and_losses_are_seen() -> None:
    # Against a stored number a single run alarmed in 14 % and missed half of the 5 % losses.
    same, two, five, eight = (_speedup_verdicts(truth) for truth in (1.0, 0.98, 0.95, 0.92))
    assert same["regressed"] == 0.0
    assert two["regressed"] <= 0.01
    assert five["regressed"] >= 0.2
    assert five["ok"] <= 0.02
    assert eight["regressed"] >= 0.97
    assert same["ok"] >= 0.7


def test_the_recorded_speedups_own_doubt_widens_the_comparison() -> None:
    logs = [0.30, 0.31, 0.29, 0.30, 0.32, 0.28]
    sure = mean_ratio([0.30, 0.301] * 5, 0.95)
    unsure = mean_ratio([0.25, 0.35] * 5, 0.95)
    narrow = against_recorded(logs, sure, level=0.95, recorded_level=0.95)
    wide = against_recorded(logs, unsure, level=0.95, recorded_level=0.95)
    assert narrow.high / narrow.low < wide.high / wide.low
    assert narrow.est == pytest.approx(math.exp(0.30 - 0.3005))


def test_there_are_three_verdicts() -> None:
    def ratio(low: float, high: float) -> Estimate:
        return Estimate(est=(low + high) / 2, low=low, high=high, n=6)

    assert judge(ratio(0.98, 1.02), 0.03) == "ok"
    assert judge(ratio(0.90, 0.96), 0.03) == "regressed"
    assert judge(ratio(0.90, 1.02), 0.03) == "inconclusive"
    assert judge(ratio(0.90, 1.02), 0.12) == "ok"
