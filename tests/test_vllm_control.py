"""Run-time control: what can change in a running engine, and that it is read back, not assumed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_process import VllmProcess

from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.vllm_plugin import control
from vegas_runtime.vllm_plugin.config import translate, with_settings

RFC = {
    "method": "sparse_attn",
    "sparse_attn_ratio": 0.07,
    "sparse_attn_min_tokens": 64,
    "num_speculative_tokens": 6,
    "sparse_attn_num_speculative_tokens_set": [0, 4, 6],
}
MAX_NUM_SEQS = 8


class Core:
    """An engine core with the parts that control touches; workers take what they are told."""

    def __init__(self, ranks: int = 1, **changes: Any) -> None:
        _, settings = translate({**RFC, **changes}, model="m")
        self.vllm_config = SimpleNamespace(
            additional_config=with_settings({}, settings),
            model_config=SimpleNamespace(max_model_len=8192),
            scheduler_config=SimpleNamespace(max_num_active_seqs=None),
        )
        self.scheduler = SimpleNamespace(
            dynamic_sd_lookup=[settings.config.num_speculative_tokens] * (MAX_NUM_SEQS + 1),
            num_spec_tokens=settings.max_num_speculative_tokens,
            max_num_running_reqs=MAX_NUM_SEQS,
            max_num_active_reqs=MAX_NUM_SEQS,
        )
        self.workers = [settings.config.to_dict() for _ in range(ranks)]
        self.told: list[dict[str, Any]] = []
        self.deaf: dict[str, Any] = {}

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "vegas_status":
            return [{"collection": "fa3"} for _ in self.workers]
        (values,) = args
        if values:
            self.told.append(values)
        for worker in self.workers:
            worker.update(values)
            worker.update(self.deaf)
        return [dict(worker) for worker in self.workers]


def test_reading_back_changes_nothing() -> None:
    core = Core(ranks=2)
    found = control.configure(core, {})
    assert core.told == []
    assert found == {
        "algorithm": "vegas",
        "sparsity_ratio": 0.07,
        "min_tokens": 64,
        "rows": "two",
        "metric": "weight",
        "scope": "layer",
        "granularity": "token",
        "num_speculative_tokens": 6,
        "num_speculative_tokens_by_batch": [6] * (MAX_NUM_SEQS + 1),
        "max_num_running": None,
        "gammas": [0, 4, 6],
        "warnings": [],
    }


def test_gamma_changes_in_the_scheduler_for_every_batch_size() -> None:
    core = Core()
    found = control.configure(core, {"num_speculative_tokens": 4})
    assert core.scheduler.dynamic_sd_lookup == [4] * (MAX_NUM_SEQS + 1)
    assert found["num_speculative_tokens"] == 4
    assert control.configure(core, {"num_speculative_tokens": 0})["num_speculative_tokens"] == 0


def test_gamma_by_batch_size_and_back() -> None:
    core = Core()
    rows = [[1, 2, 6], [5, 5, 4], [7, 8, 0]]
    found = control.configure(core, {"num_speculative_tokens_per_batch_size": rows})
    assert found["num_speculative_tokens"] is None
    assert found["num_speculative_tokens_by_batch"][1:] == [6, 6, 6, 6, 4, 4, 0, 0]
    assert control.configure(core, {"sparsity_ratio": 0.1})["num_speculative_tokens"] is None
    assert control.configure(core, {"num_speculative_tokens": 6})["num_speculative_tokens"] == 6


def test_devices_are_told_and_asked() -> None:
    core = Core(ranks=2)
    change = {"sparsity_ratio": 0.25, "min_tokens": 16, "algorithm": "streaming_llm"}
    found = control.configure(core, {**change, "num_speculative_tokens": 4})
    assert {name: found[name] for name in change} == change
    assert len(core.told) == 1
    assert core.told[0]["num_speculative_tokens"] == 4
    assert core.workers[0] == core.workers[1]


def test_a_device_that_did_not_take_it_is_an_error() -> None:
    core = Core()
    core.deaf = {"sparsity_ratio": 0.07}
    with pytest.raises(BackendError, match=r"hold sparsity_ratio 0\.07 after 0\.1 was set"):
        control.configure(core, {"sparsity_ratio": 0.1})


def test_ranks_that_disagree_are_an_error() -> None:
    core = Core(ranks=2)
    core.workers[1]["min_tokens"] = 1
    with pytest.raises(BackendError, match="worker 1 drafts with"):
        control.configure(core, {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_speculative_tokens": 5}, "was not declared"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 5]]}, "was not declared"),
        ({"sparsity_ratio": 0.31}, "buffers were sized for"),
        ({"sparsity_ratio": 0}, r"must be in \(0, 1\]"),
        ({"min_tokens": 4000}, "does not fit"),
        ({"algorithm": "quest"}, "'quest' in `sparse_attn_algorithm_set`"),
        ({"max_num_running": 0}, "1 to 8 requests fit"),
        ({"max_num_running": 9}, "1 to 8 requests fit"),
        ({"max_num_running": True}, "1 to 8 requests fit"),
        ({"temperature": 0.6}, "unknown speculation key"),
        (
            {
                "num_speculative_tokens": 4,
                "num_speculative_tokens_per_batch_size": [[1, 8, 6]],
            },
            "only one can hold",
        ),
    ],
)
def test_a_refused_change_changes_nothing(values: dict[str, Any], said: str) -> None:
    core = Core()
    before = control.configure(core, {})
    with pytest.raises(ConfigError, match=said):
        control.configure(core, {"rows": "all", **values})
    assert core.told == []
    assert control.configure(core, {}) == before


def test_a_cap_on_running_requests_and_its_end() -> None:
    core = Core()
    assert control.configure(core, {"max_num_running": 3})["max_num_running"] == 3
    assert core.scheduler.max_num_active_reqs == 3
    assert control.configure(core, {"max_num_running": 8})["max_num_running"] == 8
    assert control.configure(core, {"max_num_running": None})["max_num_running"] is None
    assert core.scheduler.max_num_active_reqs == MAX_NUM_SEQS


def test_a_ratio_without_effect_is_said() -> None:
    said = control.configure(Core(), {"sparsity_ratio": 0.005})["warnings"]
    assert len(said) == 1
    assert "the ratio changes nothing" in said[0]


def test_what_slows_a_method_is_said_when_it_is_chosen() -> None:
    core = Core(sparse_attn_algorithm_set=["spec_extend"], sparse_attn_rows_set=["last_accepted"])
    (said,) = control.configure(core, {"algorithm": "spec_extend"})["warnings"]
    assert said.startswith("'spec_extend' does not run at full speed")
    assert "second pass over K" in said
    late = {"algorithm": "vegas", "rows": "last_accepted"}
    assert "rows 'last_accepted'" in control.configure(core, late)["warnings"][0]
    assert control.configure(core, {"num_speculative_tokens": 0})["warnings"] == []
    fast = {"rows": "two", "num_speculative_tokens": 6}
    assert control.configure(core, fast)["warnings"] == []


def test_status_tells_the_paths() -> None:
    found = control.status(Core(ranks=2))
    assert found["workers"] == [{"collection": "fa3"}] * 2
    assert found["sparsity_ratio"] == 0.07


def test_an_engine_without_the_plugin_says_so() -> None:
    core = Core()
    core.vllm_config.additional_config = {}
    with pytest.raises(BackendError, match="without the Vegas plugin"):
        control.configure(core, {})


def test_a_client_reaches_a_core_in_its_own_process_and_in_another() -> None:
    core = SimpleNamespace(vegas_status=lambda: {"sparsity_ratio": 0.07})
    assert control.call(SimpleNamespace(engine_core=core), "vegas_status") == {
        "sparsity_ratio": 0.07
    }
    asked: list[Any] = []
    remote = SimpleNamespace(call_utility=lambda *order: asked.append(order) or {"ok": 1})
    assert control.call(remote, "vegas_configure", {"rows": "all"}) == {"ok": 1}
    assert asked == [("vegas_configure", {"rows": "all"})]


def test_a_refusal_from_another_process_stays_a_sentence() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Call to vegas_configure method failed: gamma 5 was not declared")

    with pytest.raises(BackendError, match=r"did not carry out vegas_configure: .* not declared"):
        control.call(SimpleNamespace(call_utility=refuse), "vegas_configure", {})


# ------------------------------------------------- with vLLM's own engine core and scheduler


def play(vllm: VllmProcess, llama: str, script: list[list[Any]], **more: Any) -> list[Any]:
    arguments = {"model": llama, "speculative_config": RFC, "max_num_seqs": MAX_NUM_SEQS, **more}
    answers: list[Any] = vllm.ask("play", arguments=arguments, script=script)
    return answers


@pytest.mark.vllm
def test_gamma_changes_between_two_steps_of_a_running_engine(vllm: VllmProcess, llama: str) -> None:
    """A step verifies what the one before drafted, so a change shows one step later in the rows."""
    steps = play(
        vllm,
        llama,
        [
            ["is_async"],
            ["add", 3],
            ["schedule"],
            ["schedule"],
            ["utility", "vegas_configure", {"num_speculative_tokens": 4}],
            ["schedule"],
            ["schedule"],
            ["utility", "vegas_configure", {"num_speculative_tokens": 0}],
            ["schedule"],
            ["schedule"],
            ["utility", "vegas_configure", {"num_speculative_tokens": 6}],
            ["schedule"],
            ["schedule"],
        ],
    )
    assert steps[0] == "AsyncScheduler"
    seen = [({*step["rows"].values()}, step["drafts"]) for step in steps if step and "rows" in step]
    assert seen == [
        ({20}, 6),
        ({7}, 6),
        ({7}, 4),
        ({5}, 4),
        ({5}, 0),
        ({1}, 0),
        ({1}, 6),
        ({7}, 6),
    ]
    changed = [
        step["result"]["num_speculative_tokens"] for step in steps if step and "result" in step
    ]
    assert changed == [4, 0, 6]


@pytest.mark.vllm
def test_gamma_follows_the_batch_size_where_a_schedule_holds(vllm: VllmProcess, llama: str) -> None:
    speculative = {**RFC, "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 8, 4]]}
    steps = play(
        vllm,
        llama,
        [
            ["add", 2],
            ["schedule"],
            ["add", 2, 2],
            ["schedule"],
            ["finish", "1", "2"],
            ["schedule"],
            ["utility", "vegas_configure", {}],
        ],
        speculative_config=speculative,
    )
    assert [steps[index]["drafts"] for index in (1, 3, 5)] == [6, 4, 6]
    assert steps[-1]["result"]["num_speculative_tokens"] is None


@pytest.mark.vllm
def test_a_cap_keeps_requests_waiting_and_stops_nobody(vllm: VllmProcess, llama: str) -> None:
    steps = play(
        vllm,
        llama,
        [
            ["add", 8],
            ["utility", "vegas_configure", {"max_num_running": 5}],
            ["schedule"],
            ["utility", "vegas_configure", {"max_num_running": 2}],
            ["schedule"],
            ["finish", "0", "1", "2", "3"],
            ["schedule"],
            ["utility", "vegas_configure", {"max_num_running": None}],
            ["schedule"],
        ],
    )
    assert [step["running"] for step in steps if step and "running" in step] == [5, 5, 2, 4]


@pytest.mark.vllm
def test_refusals_cross_the_process_boundary_as_sentences(vllm: VllmProcess, llama: str) -> None:
    answers = play(
        vllm,
        llama,
        [
            ["utility", "vegas_configure", {"num_speculative_tokens": 5}],
            ["utility", "vegas_configure", {"sparsity_ratio": 0.2}],
            ["utility", "vegas_status"],
            ["tamper", 1, {"sparsity_ratio": 0.1}],
            ["utility", "vegas_configure", {}],
        ],
    )
    assert "was not declared when this engine started" in answers[0]["failed"]
    assert answers[1]["result"]["sparsity_ratio"] == 0.2
    assert answers[2]["result"]["workers"] == [{"collection": "triton"}] * 2
    assert "worker 1 drafts with" in answers[4]["failed"]
