"""What a collector is made of: the paths taken, and every buffer, sized for the largest step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin import paths
from vegas_runtime.vllm_plugin.after_acceptance import AfterAcceptance
from vegas_runtime.vllm_plugin.draft_attention import DraftPath
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.listing import Listing
from vegas_runtime.vllm_plugin.methods import ROW_SETS
from vegas_runtime.vllm_plugin.quest_pages import QuestPages
from vegas_runtime.vllm_plugin.switches import Switches
from vegas_runtime.vllm_plugin.verification import Scoring, StepLengths, VerifyPath


@dataclass(frozen=True, kw_only=True)
class CollectorParts:
    """Everything between the verify pass's attention and the lists that draft steps read.

    Attributes:
        path: the collection path taken.
        reason: why that one.
        verify: that path.
        scoring: reads scores off where full attention ran elsewhere.
        draft_path: the draft attention taken.
        draft_reason: why that one.
        draft: that attention.
        lengths: of the largest step.
        listings: lists by shape; true for those with one per KV head.
        after: makes the lists that wait for acceptance.
        pages: Quest's bounds, None where no method needs them.
    """

    path: str
    reason: str
    verify: VerifyPath
    scoring: Scoring
    draft_path: str
    draft_reason: str
    draft: DraftPath
    lengths: StepLengths
    listings: dict[bool, Listing]
    after: AfterAcceptance
    pages: QuestPages | None

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes; more once Quest's bounds have a cache to be of."""
        held = 5 * self.lengths.rows.nbytes
        held += sum(listing.num_bytes for listing in self.listings.values())
        held += 0 if self.pages is None else self.pages.num_bytes
        return held + sum(part.num_bytes for part in (self.after, self.verify, self.draft))


def make_parts(
    shape: AttentionShape,
    limits: Limits,
    switches: Switches,
    *,
    device: torch.device,
    ratio: Tensor,
    min_tokens: Tensor,
    path: str,
    draft_path: str,
) -> CollectorParts:
    """Choose the paths and make every buffer.

    Args:
        shape: the layers that draft sparsely.
        limits: the largest step.
        switches: methods and row sets that may be chosen, at those the engine starts with.
        device: where.
        ratio: float64[1] on the device, fraction of entries kept.
        min_tokens: int32[1] on the device.
        path: how scores are collected: `auto`, or a key of `paths.VERIFY_PATHS`.
        draft_path: how draft steps attend: `auto`, or a key of `paths.DRAFT_PATHS`.

    Raises:
        ConfigError: a path that cannot run here, or lists that the model's attention rules out.
    """
    _refuse_heads_with_sinks(shape, switches)
    scoring = Scoring(row_set=switches.row_set, scale=shape.scale)
    path, reason = paths.choose_verify(
        path,
        shape,
        limits,
        device,
        rows=switches.held_rows if switches.held_rows in ROW_SETS else "two",
        is_scored=switches.is_scored,
    )
    verify = paths.make_verify(
        path, shape, limits, device, scoring=scoring, per_head=switches.scores_per_head
    )
    draft_path, draft_reason = paths.choose_draft(
        draft_path, shape, limits, device, has_long_tail=switches.has_long_tail
    )
    draft = paths.make_draft(draft_path, shape, limits, device)
    lengths = _step_lengths(limits, device)
    listings = {
        per_head: Listing(
            shape,
            limits,
            source=switches.listed_from,
            per_head=per_head,
            is_ranked=switches.collects,
            in_pages=switches.in_pages,
            draft=draft,
            lengths=lengths,
            device=device,
        )
        for per_head in switches.shapes
    }
    after = AfterAcceptance(
        shape,
        limits,
        switches=switches,
        listings=listings,
        lengths=lengths,
        ratio=ratio,
        min_tokens=min_tokens,
        device=device,
    )
    bounds = {"is_in_force": switches.bounded, "ratio": ratio, "min_tokens": min_tokens}
    return CollectorParts(
        path=path,
        reason=reason,
        verify=verify,
        scoring=scoring,
        draft_path=draft_path,
        draft_reason=draft_reason,
        draft=draft,
        lengths=lengths,
        listings=listings,
        after=after,
        pages=QuestPages(shape, limits, device, **bounds) if "query" in switches.sources else None,
    )


def _refuse_heads_with_sinks(shape: AttentionShape, switches: Switches) -> None:
    if True in switches.shapes and shape.sinks:
        raise ConfigError(
            f"{switches.named_per_head} reads a list per KV head and the model has attention "
            "sinks, which draft attention cannot combine yet.",
            hint="Use scope 'layer'.",
        )


def _step_lengths(limits: Limits, device: torch.device) -> StepLengths:
    rows, candidates, counts, tail_start, row_mask = torch.zeros(
        (5, limits.max_batch), dtype=torch.int32, device=device
    )
    return StepLengths(
        rows=rows,
        candidates=candidates,
        counts=counts,
        tail_start=tail_start,
        row_mask=row_mask,
    )
