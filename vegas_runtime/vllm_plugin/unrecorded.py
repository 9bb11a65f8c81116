"""Steps of an engine that records nothing (stock vLLM's), told from what it put out."""

from __future__ import annotations

from collections.abc import Sequence

from vegas_runtime.vllm_plugin.core import CoreOutput
from vegas_runtime.vllm_plugin.recording import EngineStep


def steps_of_outputs(outputs: Sequence[CoreOutput], num_draft_tokens: int = 0) -> list[EngineStep]:
    """Steps of an engine that records nothing, from what it put out.

    The first output has no beginning to be timed from and is left out. A prompt that was computed
    over several steps is seen only when its first token comes, so every step since its admission
    is counted as processing it.

    Args:
        outputs: in order.
        num_draft_tokens: what the engine drafts per request and iteration. A method that drafts
            fewer now and then is counted as having had the rest rejected: what it did not draft
            it did not gain. A request's first token comes from its prompt, without drafts, and
            its last tokens may have been cut by its output limit; neither counts as a
            verification.
    """
    contexts = [0] * len(outputs)
    for index, output in enumerate(outputs):
        for one in output.emissions:
            earlier = index
            while one.num_context_tokens and outputs[earlier].end_s > one.scheduled_s:
                contexts[earlier] = max(contexts[earlier], one.num_context_tokens)
                if earlier == 0:
                    break
                earlier -= 1
    steps = []
    for index in range(1, len(outputs)):
        output = outputs[index]
        emissions = [one for one in output.emissions if one.token_ids]
        drafted = [
            0 if one.num_prompt_tokens or one.finish_reason else num_draft_tokens
            for one in emissions
        ]
        emitted = [len(one.token_ids) for one in emissions]
        steps.append(
            EngineStep(
                number=index,
                duration_s=output.end_s - outputs[index - 1].end_s,
                num_running=output.num_took_part,
                num_waiting=output.num_waiting,
                num_context_tokens=contexts[index],
                request_ids=[one.request_id for one in emissions],
                num_draft_tokens=drafted,
                # One of the tokens is the target's own.
                num_accepted_tokens=[
                    tokens - 1 if drafts else 0
                    for tokens, drafts in zip(emitted, drafted, strict=True)
                ],
                num_emitted_tokens=emitted,
            )
        )
    return steps
