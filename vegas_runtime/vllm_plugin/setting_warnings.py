"""What is allowed and will disappoint, in sentences: printed at start, returned when it is set."""

from __future__ import annotations

import math

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.vllm_plugin.methods import slowed_by


def setting_warnings(config: SpeculationConfig, *, max_model_len: int) -> list[str]:
    """Sentences about a setting; none about one that drafts nothing.

    Args:
        config: the setting.
        max_model_len: longest request, in tokens.
    """
    found = [floor_warning(config, max_model_len=max_model_len), speed_warning(config)]
    return [sentence for sentence in found if sentence]


def speed_warning(config: SpeculationConfig) -> str | None:
    """A sentence when a method does not run at full speed here; None when it does."""
    why = slowed_by(config.algorithm, config.rows)
    if config.num_speculative_tokens == 0 or not why:
        return None
    rows = f" with rows {config.rows!r}" if config.algorithm == "vegas" else ""
    return f"{config.algorithm!r}{rows} does not run at full speed on vLLM: {why}."


def floor_warning(config: SpeculationConfig, *, max_model_len: int) -> str | None:
    """A sentence when the floor decides what is kept at every length; None when it does not.

    Args:
        config: the setting.
        max_model_len: longest request, in tokens.
    """
    longest = math.ceil(config.sparsity_ratio * max_model_len)
    if config.num_speculative_tokens == 0 or longest > config.min_tokens:
        return None
    return (
        f"a ratio of {config.sparsity_ratio:g} keeps at most {longest} of {max_model_len} tokens, "
        f"but the floor of {config.min_tokens} tokens keeps at least as many: the ratio changes "
        "nothing. Lower `sparse_attn_min_tokens` (`min_tokens`) or serve longer contexts."
    )
