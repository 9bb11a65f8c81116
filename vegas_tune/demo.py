"""`apply --run`: one prompt at a profile's setting beside plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.metrics import acceptance_length, acceptance_rate, decode_throughput
from vegas_runtime.profile import WILDCARD, Profile
from vegas_runtime.records import StepRecord
from vegas_tune.apply import MatchFinding, match_profile, raise_on_hard

# Forth and back, so that a drift of the machine's speed hits both alike.
_ORDER = ("plain", "profile", "profile", "plain")


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """What `apply --run` shows.

    Attributes:
        text: the answer, decoded at the profile's setting.
        config: that setting.
        num_tokens: tokens generated.
        tok_s: decode throughput at the profile's setting, tokens per second (median of two).
        plain_tok_s: the same for plain decoding.
        acceptance_rate: accepted over drafted tokens; NaN at gamma 0.
        acceptance_length: tokens emitted per verification.
        same_output: whether both gave the same tokens; meaningful when greedy.
        is_greedy: whether sampling was greedy.
        dtype: of the model; in bfloat16 near-ties may flip between any two batch shapes.
        findings: what differs from where the profile was measured.
    """

    text: str
    config: SpeculationConfig
    num_tokens: int
    tok_s: float
    plain_tok_s: float
    acceptance_rate: float
    acceptance_length: float
    same_output: bool
    is_greedy: bool
    dtype: str
    findings: list[MatchFinding]

    @property
    def speedup(self) -> float:
        """Over plain decoding, same prompt, same engine."""
        return self.tok_s / self.plain_tok_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        drafted = self.config.num_speculative_tokens > 0
        return {
            "text": self.text,
            "config": self.config.to_dict(),
            "num_tokens": self.num_tokens,
            "decode_tok_s": round(self.tok_s, 2),
            "plain_decode_tok_s": round(self.plain_tok_s, 2),
            "speedup": round(self.speedup, 3),
            "acceptance_rate": round(self.acceptance_rate, 4) if drafted else None,
            "acceptance_length": round(self.acceptance_length, 3) if drafted else None,
            "same_output": self.same_output,
            "greedy": self.is_greedy,
            "dtype": self.dtype,
        }

    def to_text(self, _: object = None) -> str:
        """For a person: the answer, then the figures."""
        gamma = self.config.num_speculative_tokens
        lines = [self.text, "", f"{self.num_tokens} tokens"]
        if gamma == 0:
            lines.append(f"plain decoding {self.plain_tok_s:.1f} tok/s; the profile drafts nothing")
            return "\n".join(lines)
        lines += [
            f"gamma {gamma}, ratio {self.config.sparsity_ratio:g}: {self.tok_s:.1f} tok/s",
            f"plain decoding: {self.plain_tok_s:.1f} tok/s",
            f"speed-up on this one request: {self.speedup:.2f}x",
            f"accepted {self.acceptance_rate:.0%} of the drafts, "
            f"{self.acceptance_length:.2f} tokens per verification",
        ]
        if self.is_greedy:
            lines.append(
                "same tokens as plain decoding"
                if self.same_output
                else f"other tokens than plain decoding: near-ties in {self.dtype} depend on the "
                "shape of a batch; use --dtype float32 to see them equal"
            )
        return "\n".join(lines)


def run_prompt(
    profile: Profile,
    prompt: str,
    *,
    model: str | None,
    max_new_tokens: int,
    dtype: str,
    device: str,
    report: Callable[[str], None],
) -> PromptRun:
    """Generate from one prompt at the profile's setting and plainly.

    Args:
        profile: gives model, setting and sampling.
        prompt: text; goes through the chat template where the model has one.
        model: what to load, when not the profile's.
        max_new_tokens: output limit.
        dtype: see `ReferenceEngine.open`.
        device: see `ReferenceEngine.open`.
        report: told what takes long.

    Raises:
        ModelError: the model cannot be loaded.
        ProfileMismatchError: the profile is for something else than what was loaded.
    """
    from vegas_runtime.engine.reference import Generation, ReferenceEngine
    from vegas_tune.prompts import PromptEncoder

    setting = profile.selected.default
    name = model or profile.match.model.id
    engine = ReferenceEngine.open(
        model=str(name),
        max_num_speculative_tokens=setting.num_speculative_tokens,
        dtype=dtype,
        device=device,
        report=report,
    )
    try:
        findings = match_profile(profile, engine.info)
        raise_on_hard(findings)
        encoder = PromptEncoder(engine.tokenizer)
        tokens = encoder.user(prompt) if encoder.has_template else encoder.raw(prompt)
        sampling = _sampling(profile)
        plain = setting.replace(num_speculative_tokens=0)
        runs: dict[str, list[Generation]] = {"plain": [], "profile": []}
        for arm in _ORDER:
            engine.configure(plain if arm == "plain" else setting)
            report(f"generating ({arm})")
            runs[arm].append(
                engine.generate([tokens], max_new_tokens=max_new_tokens, sampling=sampling)
            )
        return _summarise(runs["profile"], runs["plain"], engine, setting, sampling, findings)
    finally:
        engine.close()


def _summarise(
    ours: list[Any],
    plain: list[Any],
    engine: Any,
    setting: SpeculationConfig,
    sampling: SamplingConfig,
    findings: list[MatchFinding],
) -> PromptRun:
    output = ours[0].outputs[0]
    steps = [step for step in ours[0].steps if step.kind == "decode"]
    accepted = sum(sum(step.num_accepted_tokens) for step in steps)
    drafted = sum(sum(step.num_draft_tokens) for step in steps)
    return PromptRun(
        text=engine.tokenizer.decode(output, skip_special_tokens=True),
        config=setting,
        num_tokens=len(output),
        tok_s=median(_rate(run.steps) for run in ours),
        plain_tok_s=median(_rate(run.steps) for run in plain),
        acceptance_rate=acceptance_rate(accepted, drafted),
        acceptance_length=acceptance_length(accepted, len(steps)),
        same_output=output == plain[0].outputs[0],
        is_greedy=sampling.is_greedy,
        dtype=str(engine.info.model["dtype"]),
        findings=findings,
    )


def _rate(steps: tuple[StepRecord, ...]) -> float:
    decode = [step for step in steps if step.kind == "decode"]
    emitted = sum(sum(step.num_emitted_tokens) for step in decode)
    duration_s = sum(step.duration_s for step in decode)
    return decode_throughput(emitted, duration_s) if decode else float("nan")


def _sampling(profile: Profile) -> SamplingConfig:
    facts = profile.match.sampling.to_facts()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    known = {key: facts[key] for key in names if facts.get(key) not in (None, WILDCARD)}
    return SamplingConfig(**known)
