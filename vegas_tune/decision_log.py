"""A sweep's choices as decision records: rule, figures, and one sentence of reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vegas_runtime.config import SpeculationConfig
from vegas_tune.decide import Choice, Decision, Plateau, Validation
from vegas_tune.plan import SPARSITY, VALIDATE, Plan


def named(config: SpeculationConfig) -> str:
    """A setting in words."""
    if not config.num_speculative_tokens:
        return "plain decoding"
    return f"gamma {config.num_speculative_tokens} at ratio {config.sparsity_ratio:g}"


def sparsity_decision(
    plan: Plan, gamma: int, plateau: Plateau, instead: SpeculationConfig | None
) -> Decision:
    """Step 1's ratio.

    Args:
        plan: gives the tolerance.
        gamma: tokens drafted while the ladder was measured.
        plateau: what the ladder shows.
        instead: the setting whose ratio is handed on where there is no plateau.
    """
    largest = max(plateau.relative)
    if instead is None:
        chosen = plateau.ratio
        bound = "lower 10 % bound is" if plateau.resolved else "estimate is"
        why = (
            f"smallest ratio whose {bound} within {plan.plateau_tolerance:.0%} of the tokens "
            f"accepted at ratio {largest:g}."
        )
    else:
        chosen = instead.sparsity_ratio
        why = (
            f"accepted tokens still rise at ratio {largest:g}: no plateau. Handed on: the ratio of "
            f"{named(instead)}, predicted to be the fastest of all."
        )
    if not plateau.resolved:
        why += " Unresolved: more data was wanted when time, rounds or text ended."
    return Decision(
        step=SPARSITY,
        rule="isotonic-bootstrap-plateau",
        chosen={"sparsity_ratio": chosen},
        why=why,
        resolved=plateau.resolved,
        outcome=plateau.outcome,
        alternatives=tuple(
            {
                "sparsity_ratio": ratio,
                "relative_accepted": relative,
                "undetermined": ratio in plateau.undetermined,
            }
            for ratio, relative in plateau.relative.items()
        ),
        data={
            "num_speculative_tokens": gamma,
            "tolerance": plan.plateau_tolerance,
            "bounds": "one-sided 10 %",
        },
    )


def choice_decision(
    step: str,
    rule: str,
    choice: Choice,
    predicted: Mapping[SpeculationConfig, float],
    noise_cv: float,
    dropped: Mapping[SpeculationConfig, int],
) -> Decision:
    """A search step's setting, with what was predicted beside what was measured.

    Args:
        step: of the sweep.
        rule: its name.
        choice: what was chosen from what.
        predicted: throughput expected of each setting.
        noise_cv: run-to-run coefficient of variation met.
        dropped: after how many rounds of a race settings dropped out.
    """
    why = f"{named(choice.leader)} is the fastest of {len(choice.relative)} measured"
    if choice.chosen != choice.leader:
        share = choice.relative[choice.chosen].est
        why += f"; {named(choice.chosen)} is cheaper and ties with it ({share:.3f} of its rate)"
    return Decision(
        step=step,
        rule=rule,
        chosen=_setting(choice.chosen),
        why=f"{why}.",
        resolved=choice.resolved,
        alternatives=tuple(
            _setting(config)
            | {"relative_tok_s": relative, "predicted_tok_s": predicted[config]}
            | ({"dropped_after_rounds": dropped[config]} if config in dropped else {})
            for config, relative in choice.relative.items()
        ),
        data={"noise_cv": noise_cv},
    )


def validation_decision(
    plan: Plan,
    status: str,
    reason: str,
    selected: SpeculationConfig,
    verdict: Validation | None,
    *,
    num_rounds: int,
    noise_cv: float,
    is_held_out: bool,
) -> Decision:
    """The final setting, with each finalist's interval against plain decoding."""
    data: dict[str, Any] = {
        "rounds": num_rounds,
        "noise_cv": noise_cv,
        "held_out_text": is_held_out,
        "interval_level": plan.look_level,
        "precision": plan.precision,
    }
    alternatives: tuple[dict[str, Any], ...] = ()
    if verdict is not None:
        alternatives = tuple(
            _setting(config) | {"speedup_vs_gamma0": speedup}
            for config, speedup in verdict.speedups.items()
        )
        data["clear_winner"] = verdict.is_clear_winner
        if verdict.between is not None:
            data["winner_vs_other"] = verdict.between
    return Decision(
        step=VALIDATE,
        rule="paired-rounds-vs-gamma0",
        chosen=_setting(selected),
        why=reason,
        resolved=status == "validated",
        outcome=status,
        alternatives=alternatives,
        data=data,
    )


def _setting(config: SpeculationConfig) -> dict[str, Any]:
    return {
        "num_speculative_tokens": config.num_speculative_tokens,
        "sparsity_ratio": config.sparsity_ratio,
    }
