"""Pages picked for each draft step's own query: MagicDec-Quest.

Quest (Tang et al., 2024) used as a drafter; `algorithms.md` section 4.3. Metadata are the
elementwise bounds m and M of each page's keys after RoPE, so that

    u[h, P] = sum over d of max(q[h, d] * M[P, d], q[h, d] * m[P, d])

bounds every query-key product in page P from above. A layer reads n = floor(B / 16) pages: the
last one, which holds the query's own token and may be partial, always, and the n - 1 others with
the largest u. A text that fits the budget is read whole.

What differs from Quest's own kernel path:

* Heads. That path picks pages per query head, on models without grouped queries. Here one list
  serves all heads of a layer (scope `layer`), as a block table without a head axis forces, or
  one KV head's group (scope `kv_head`). Heads vote with the softmax of their bounds over the
  competing pages, scaled by 1/sqrt(D), and the votes are averaged: bare bounds of a head with
  large queries would outvote all others. How the paper's testbed reduced heads is not published.
* Layers 0 and 1 are sparse like the rest, else the budget would not be the other methods'.

Equal budget: B is the rule that all methods share, `SpeculationConfig.kv_budget`, at the current
length. As in Quest, the last page counts towards it, drafted tokens in it included.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.policies.base import KVSelection, KVSelectionPolicy, Needs, SelectionInput
from vegas_runtime.policies.topk import PAGE_SIZE, top_pages


class QuestPolicy(KVSelectionPolicy):
    """Reads the pages that may hold the largest query-key products, and the last page.

    Switch: `scope`.
    """

    name: ClassVar[str] = "quest"

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._refuse_switches("rows", "metric", "granularity")

    def _needs(self) -> Needs:
        return Needs(query=True, page_size=PAGE_SIZE)

    def select(self, given: SelectionInput) -> KVSelection:
        """Top pages among the full ones before the query's; the query's page is the tail."""
        lens = given.current_lens
        others = lens // PAGE_SIZE
        budget = torch.tensor([self._num_others(n) for n in lens.tolist()], device=lens.device)
        positions = top_pages(self._votes(given, others), others, budget)
        return KVSelection(positions=positions, tail_starts=others * PAGE_SIZE)

    def _num_others(self, current_len: int) -> int:
        """Pages to read besides the last, for a query at position `current_len`."""
        budget = self.config.kv_budget(current_len)
        others = current_len // PAGE_SIZE
        if budget > current_len:
            return others
        return min(max(budget // PAGE_SIZE - 1, 0), others)

    def _votes(self, given: SelectionInput, others: Tensor) -> Tensor:
        """Mean softmax of the bounds over the first `others` pages, [..., B, 1 or Hkv, P]."""
        assert given.query is not None
        assert given.page_low is not None
        assert given.page_high is not None
        low, high = given.page_low.float(), given.page_high.float()
        shape = given.query.shape
        grouped = (*shape[:-2], low.shape[-3], shape[-2] // low.shape[-3], shape[-1])
        query = given.query.float().reshape(grouped)
        bounds = query.clamp(min=0) @ high.mT + query.clamp(max=0) @ low.mT
        pages = torch.arange(low.shape[-2], device=low.device)
        competing = (pages < others[:, None])[:, None, None]
        scaled = (bounds * query.shape[-1] ** -0.5).masked_fill(~competing, -torch.inf)
        votes: Tensor = scaled.softmax(dim=-1).mean(dim=-2)
        return votes if self.config.scope == "kv_head" else votes.mean(dim=-2, keepdim=True)
