"""The RFC's keys -> vLLM's configuration: every way to write them, and what comes out."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_process import VllmProcess

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin.config import (
    PluginSettings,
    is_ours,
    read_schedule,
    schedule_at,
    settings_of,
    translate,
    with_settings,
)
from vegas_runtime.vllm_plugin.graph_sizes import (
    GRAPH_REQUESTS,
    capture_sizes,
    full_graphs,
    graph_batches,
    mixed_graphs,
)
from vegas_runtime.vllm_plugin.setting_warnings import floor_warning

RFC = {
    "method": "sparse_attn",
    "sparse_attn_algorithm": "vegas",
    "sparse_attn_ratio": 0.07,
    "sparse_attn_min_tokens": 64,
    "num_speculative_tokens": 6,
}


def settings(**changes: Any) -> PluginSettings:
    return translate({**RFC, **changes}, model="m")[1]


# ---------------------------------------------------------------------------- without vLLM


def test_the_target_becomes_its_own_draft_model() -> None:
    ours, found = translate(RFC, model="org/model")
    assert ours["method"] == "draft_model"
    assert ours["model"] == "org/model"
    assert ours["num_speculative_tokens"] == 6
    assert ours["draft_sample_method"] == "probabilistic"
    assert not [key for key in ours if key.startswith("sparse_attn")]
    assert found.config == SpeculationConfig(
        algorithm="vegas", num_speculative_tokens=6, sparsity_ratio=0.07, min_tokens=64
    )
    assert found.gammas == (0, 6)


def test_every_setting_a_profile_writes_is_read_back() -> None:
    for algorithm in ("vegas", "streaming_llm"):
        config = SpeculationConfig(
            algorithm=algorithm,
            num_speculative_tokens=5,
            sparsity_ratio=0.2,
            rows="all",
            metric="logit",
            scope="kv_head",
            granularity="page",
        )
        assert translate(config.to_rfc(), model="m")[1].config == config


def test_declared_gammas_include_none_and_the_initial_one() -> None:
    declared = settings(sparse_attn_num_speculative_tokens_set=[8, 2, 8])
    assert declared.gammas == (0, 2, 6, 8)
    assert declared.max_num_speculative_tokens == 8
    scheduled = settings(num_speculative_tokens_per_batch_size=[[1, 16, 8], [17, 64, 3]])
    assert scheduled.gammas == (0, 3, 6, 8)


def test_starting_with_plain_decoding_needs_another_declared_gamma() -> None:
    with pytest.raises(ConfigError, match="nothing would ever be drafted"):
        settings(num_speculative_tokens=0)
    declared = settings(num_speculative_tokens=0, sparse_attn_num_speculative_tokens_set=[4])
    assert declared.gammas == (0, 4)
    assert declared.vllm_schedule()[0] == (1, 1_000_000, 0)


def test_the_largest_ratio_sizes_the_buffers() -> None:
    assert settings().max_ratio == 0.3
    assert settings(sparse_attn_ratio=0.5).max_ratio == 0.5
    assert settings(sparse_attn_max_ratio=1).max_ratio == 1
    small = settings(sparse_attn_max_ratio=0.1)
    assert small.max_kv_budget(10_000) == math.ceil(0.1 * 10_007)
    assert small.max_kv_budget(100) == 64
    assert small.max_kv_budget(30) == 31


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparse_attn_ratio": 1.4}, "sparsity_ratio"),
        ({"sparse_attn_max_ratio": 0.05}, "above `sparse_attn_max_ratio`"),
        ({"sparse_attn_max_ratio": 2}, "must be in"),
        ({"sparse_attn_max_ratio": "much"}, "a fraction in"),
        ({"sparse_attn_algorithm": "quests"}, "supports vegas, streaming_llm"),
        ({"sparse_attn_collection": "fa2"}, "supports auto, fused, fused_exact, fa3, triton"),
        ({"sparse_attn_draft_attention": "fa2"}, "supports auto, kernel, fa3, triton"),
        (
            {"sparse_attn_collection": "fused", "num_speculative_tokens": 17},
            "at most 17 rows",
        ),
        ({"sparse_attn_num_speculative_tokens_set": 4}, "a list of whole numbers"),
        ({"sparse_attn_num_speculative_tokens_set": [True]}, "a list of whole numbers"),
        ({"sparse_attn_num_speculative_tokens_set": [65]}, "0 to 64 are supported"),
        ({"sparse_attn_algorithm_set": "vegas"}, "a list of names"),
        ({"sparse_attn_algorithm_set": ["spec_extent"]}, "supports vegas, streaming_llm"),
        ({"sparse_attn_rows_set": ["last"]}, "supports two, all, last_accepted"),
        ({"num_speculative_tokens_per_batch_size": [[2, 4, 3]]}, "for a batch of 1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 2]]}, "without overlap"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, "each entry is"),
        ({"num_speculative_tokens_per_batch_size": []}, "for a batch of 1"),
        ({"sparse_attn_ration": 0.1}, "means nothing"),
        ({"draft_tensor_parallel_size": 1}, "means nothing"),
        ({"model": "other/model"}, "the target itself"),
        ({"draft_sample_method": "greedy"}, "needs 'probabilistic'"),
        ({"rejection_sample_method": "fly"}, "needs 'standard'"),
        ({"rejection_sample_method": "synthetic"}, "needs 'standard'"),
    ],
)
def test_a_value_that_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


@pytest.mark.parametrize("key", ["num_speculative_tokens", "sparse_attn_ratio"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"`{key}` is missing"):
        translate({name: value for name, value in RFC.items() if name != key}, model="m")


def test_keys_beside_another_method_are_not_swallowed() -> None:
    assert is_ours(RFC)
    assert not is_ours({"method": "ngram", "prompt_lookup_max": 4})
    for values in ({"method": "ngram"}, {}):
        with pytest.raises(ConfigError, match="belongs to method 'sparse_attn'"):
            is_ours({**values, "sparse_attn_ratio": 0.1})


def test_a_change_while_running_is_checked_against_what_was_declared() -> None:
    start = settings(sparse_attn_num_speculative_tokens_set=[4], sparse_attn_max_ratio=0.2)
    changed = start.change({"num_speculative_tokens": 4, "sparsity_ratio": 0.2}, max_model_len=8192)
    assert changed == start.config.replace(num_speculative_tokens=4, sparsity_ratio=0.2)
    for values, said in (
        ({"num_speculative_tokens": 5}, "was not declared"),
        ({"sparsity_ratio": 0.21}, "buffers were sized for"),
        ({"min_tokens": 1642}, "selection buffers of 1640"),
        ({"algorithm": "quests"}, "supports vegas"),
        ({"algorithm": "spec_extend"}, "'spec_extend' in `sparse_attn_algorithm_set`"),
        ({"rows": "last_accepted"}, "'last_accepted' in `sparse_attn_rows_set`"),
        ({"temperature": 1}, "unknown speculation key"),
    ):
        with pytest.raises(ConfigError, match=said):
            start.change(values, max_model_len=8192)


def test_declared_methods_and_rows_may_be_changed_to() -> None:
    start = settings(
        sparse_attn_algorithm_set=["spec_extend"], sparse_attn_rows_set=["last_accepted"]
    )
    for values in (
        {"algorithm": "spec_extend"},
        {"algorithm": "streaming_llm"},
        {"rows": "last_accepted"},
        {"rows": "all"},
    ):
        assert start.change(values, max_model_len=8192) == start.config.replace(**values)
    window = settings(sparse_attn_algorithm="streaming_llm")
    with pytest.raises(ConfigError, match="buffers and graphs for streaming_llm"):
        window.change({"algorithm": "vegas"}, max_model_len=8192)


def test_settings_ride_in_a_plain_dict_and_look_the_same_whatever_they_hold() -> None:
    one, other = settings(), settings(sparse_attn_ratio=0.2, num_speculative_tokens=3)
    user = {"kda_prefill_backend": "triton"}
    carried = with_settings(user, one)
    assert user == {"kda_prefill_backend": "triton"}
    assert settings_of(SimpleNamespace(additional_config=carried)) == one
    assert json.dumps(carried) == json.dumps(with_settings(user, other))
    copied = pickle.loads(pickle.dumps(carried))
    assert settings_of(SimpleNamespace(additional_config=copied)) == one
    for without in ({}, {"vegas": {"settings": 1}}, object()):
        assert settings_of(SimpleNamespace(additional_config=without)) is None


def test_a_floor_that_decides_everywhere_is_said() -> None:
    config = SpeculationConfig(num_speculative_tokens=6, sparsity_ratio=0.02, min_tokens=256)
    said = floor_warning(config, max_model_len=8192)
    assert said is not None
    assert "at most 164 of 8192" in said
    assert floor_warning(config, max_model_len=12_801) is None
    assert floor_warning(config.replace(num_speculative_tokens=0), max_model_len=8192) is None


@given(
    ranges=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=6),
    gamma=st.integers(1, 8),
    max_num_seqs=st.integers(1, 60),
)
def test_the_schedule_means_to_vllm_what_it_means_here(
    ranges: list[tuple[int, int]], gamma: int, max_num_seqs: int
) -> None:
    """The same table for the batch sizes that can run, the rest declared but out of reach."""
    rows, first = [], 1
    for length, drafted in ranges:
        rows.append([first, first + length - 1, drafted])
        first += length + (length % 3)  # some ranges leave a gap, which the one before fills
    found = settings(num_speculative_tokens=gamma, num_speculative_tokens_per_batch_size=rows)
    table = found.vllm_schedule()
    assert {drafted for _, _, drafted in table} == {*found.gammas}
    assert [start for start, _, _ in table] == sorted(start for start, _, _ in table)
    for batch in range(1, max_num_seqs + 1):
        reached = [drafted for start, _, drafted in table if start <= batch]
        assert reached[-1] == schedule_at(read_schedule(rows), batch)


# --------------------------------------------------------------------------- graph sizes


@pytest.mark.parametrize("gammas", [(0, 6), (0, 3, 8), tuple(range(0, 16))])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 32, 100, 256, 700])
def test_every_gamma_has_a_graph_for_every_batch(
    gammas: tuple[int, ...], max_num_seqs: int
) -> None:
    sizes = capture_sizes(gammas, max_num_seqs, max_tokens=100_000)
    graphs = full_graphs(gammas, max_num_seqs, sizes)
    for gamma in gammas:
        assert graphs[gamma][-1] == min(max_num_seqs, GRAPH_REQUESTS)
        assert {batch * (gamma + 1) for batch in graphs[gamma]} <= {*sizes}
    # Steps that prefill as well keep exactly what vLLM would give them.
    assert [size for size in sizes if size <= 512 and size % 8 == 0 and size < 256] == list(
        range(8, 256, 8)
    )
    assert mixed_graphs(sizes)[-1] == 512


def test_many_gammas_take_fewer_batches_but_never_more_than_half_padding() -> None:
    coarse = graph_batches(256, 11)
    assert len(coarse) == 16
    assert all(after <= 2 * before for before, after in itertools.pairwise(coarse))
    assert graph_batches(33, 11)[-2:] == [32, 33]
    assert len(graph_batches(256, 2)) == 35


def test_a_lower_ceiling_leaves_out_graphs_beyond_it() -> None:
    assert full_graphs((0, 3), 64, [1, 2, 4, 8, 16]) == {0: [1, 2, 4, 8, 16], 3: [1, 2, 4]}
    assert capture_sizes((0, 6), 256, max_tokens=1000)[-1] == 952
    assert mixed_graphs([5, 10]) == [5, 10]


# -------------------------------------------------------------------------------- with vLLM


SETTING = {
    "algorithm": "vegas",
    "num_speculative_tokens": 6,
    "sparsity_ratio": 0.07,
    "min_tokens": 64,
    "rows": "two",
    "metric": "weight",
    "scope": "layer",
    "granularity": "token",
}


@pytest.mark.vllm
def test_python_arguments_become_vllms_own(vllm: VllmProcess, llama: str) -> None:
    found = vllm.ask("pickled", arguments={"model": llama, "speculative_config": RFC})
    assert found["settings"]["config"] == SETTING
    assert found["worker_cls"] == "vegas_runtime.vllm_plugin.worker.VegasWorker"
    assert found["speculative"]["method"] == "draft_model"
    assert found["speculative"]["draft_sample_method"] == "probabilistic"
    assert found["num_lookahead_tokens"] == 6
    assert found["backend"] == "FLASH_ATTN"
    assert found["is_v2"]
    assert found["async_scheduling"]
    assert found["max_model_len"] == 8192


@pytest.mark.vllm
def test_json_dotted_flags_and_yaml_say_the_same(
    vllm: VllmProcess, llama: str, tmp_path: Path
) -> None:
    dotted = [f"--speculative-config.{key}" for key in RFC]
    values = [str(value) for value in RFC.values()]
    written = tmp_path / "serve.yaml"
    written.write_text(
        "speculative-config:\n" + "".join(f"  {key}: {value}\n" for key, value in RFC.items())
    )
    rest = {key: RFC[key] for key in RFC if key not in ("method", "num_speculative_tokens")}
    ways = {
        "json": ["--speculative-config", json.dumps(RFC)],
        "dashes": ["-sc", json.dumps({key.replace("_", "-"): RFC[key] for key in RFC})],
        "dotted": [part for pair in zip(dotted, values, strict=True) for part in pair],
        "yaml": ["--config", str(written)],
        "spec-method": [
            *("--spec-method", "sparse_attn", "--spec-tokens", "6"),
            *("--speculative-config", json.dumps(rest)),
        ],
    }
    for name, way in ways.items():
        found = vllm.ask("build", arguments={}, argv=["--model", llama, *way])
        assert found["settings"]["config"] == SETTING, name
        assert found["worker_cls"].endswith("VegasWorker"), name


@pytest.mark.vllm
def test_a_flag_and_a_key_that_say_the_same_are_refused(vllm: VllmProcess, llama: str) -> None:
    argv = ["--model", llama, "--speculative-config", json.dumps(RFC), "--spec-tokens", "6"]
    with pytest.raises(Exception, match=r"--spec-tokens and `num_speculative_tokens`"):
        vllm.ask("build", arguments={}, argv=argv)


@pytest.mark.vllm
def test_a_ratio_does_not_recompile_the_model(vllm: VllmProcess, llama: str) -> None:
    hashes = {
        vllm.ask(
            "build",
            arguments={
                "model": llama,
                "speculative_config": {**RFC, "sparse_attn_ratio": ratio, **more},
            },
        )["hash"]
        for ratio in (0.05, 0.2)
        for more in ({}, {"sparse_attn_algorithm": "streaming_llm"}, {"sparse_attn_max_ratio": 0.9})
    }
    assert len(hashes) == 1
    stock = vllm.ask("build", arguments={"model": llama, "attention_backend": "FLASH_ATTN"})
    assert stock["hash"] not in hashes  # a draft model is part of it: the check is not blind


@pytest.mark.vllm
def test_other_configurations_stay_as_they_are(vllm: VllmProcess, llama: str) -> None:
    stock = vllm.ask("build", arguments={"model": llama})
    assert stock["worker_cls"] == "vllm.v1.worker.gpu_worker.Worker"
    assert stock["max_capture_size"] == 512
    assert "settings" not in stock
    assert stock["additional_keys"] == []
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    found = vllm.ask("build", arguments={"model": llama, "speculative_config": ngram})
    assert found["speculative"]["method"] == "ngram"
    assert found["backend"] is None


@pytest.mark.vllm
def test_the_same_arguments_can_be_used_twice(vllm: VllmProcess, llama: str) -> None:
    """An API server builds the configuration anew in every process it starts."""
    arguments = {"model": llama, "speculative_config": RFC}
    first, second = vllm.ask("twice", arguments=arguments)
    assert first == second
    assert second["worker_cls"].endswith("VegasWorker")


@pytest.mark.vllm
def test_graphs_cover_verification_of_the_full_batch(vllm: VllmProcess, llama: str) -> None:
    spec = {**RFC, "sparse_attn_num_speculative_tokens_set": [4, 8]}
    base = {"model": llama, "speculative_config": spec, "max_num_seqs": 128}
    found = vllm.ask("build", arguments=base)
    assert found["max_capture_size"] == 128 * 9
    assert found["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert {5 * 128, 7 * 128, 9 * 128} <= {*found["capture_sizes"]}
    assert found["num_lookahead_tokens"] == 8
    # vLLM's default of 8,192 tokens a step would not hold 1,024 requests of 9 rows.
    wide = vllm.ask("build", arguments={**base, "max_num_seqs": 1024})
    assert wide["max_num_batched_tokens"] == 1024 * 9
    chosen = vllm.ask("build", arguments={**base, "cudagraph_capture_sizes": [8, 16]})
    assert chosen["capture_sizes"] == [8, 16]
    eager = vllm.ask("build", arguments={**base, "enforce_eager": True})
    assert eager["capture_sizes"] == []


@pytest.mark.vllm
def test_a_longer_context_by_override_holds_for_drafts_too(vllm: VllmProcess, llama: str) -> None:
    overridden = {
        "model": llama,
        "speculative_config": RFC,
        "hf_overrides": {"max_position_embeddings": 32_768},
    }
    found = vllm.ask("build", arguments=overridden)
    assert found["max_model_len"] == 32_768
    assert found["speculative"]["drafts_with_target"]


@pytest.mark.vllm
def test_disappointing_settings_are_printed(vllm: VllmProcess, llama: str) -> None:
    base = {"model": llama, "speculative_config": {**RFC, "sparse_attn_min_tokens": 1000}}
    assert any("the ratio changes nothing" in line for line in vllm.ask("warned", arguments=base))
    eager = {"model": llama, "speculative_config": RFC, "enforce_eager": True}
    assert any("expect no speed-up" in line for line in vllm.ask("warned", arguments=eager))
    few = {
        "model": llama,
        "speculative_config": RFC,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 1024,
    }
    assert any("raise it to 1792" in line for line in vllm.ask("warned", arguments=few))
    small = {"model": llama, "speculative_config": RFC, "cudagraph_capture_sizes": [8]}
    assert any("CUDA graphs cover 8 tokens" in line for line in vllm.ask("warned", arguments=small))
    slow = {"model": llama, "speculative_config": {**RFC, "sparse_attn_algorithm": "spec_extend"}}
    assert any("not run at full speed" in line for line in vllm.ask("warned", arguments=slow))
    assert vllm.ask("warned", arguments={"model": llama, "speculative_config": RFC}) == []


@pytest.mark.vllm
def test_vllm_reads_the_schedule_as_meant(vllm: VllmProcess) -> None:
    rows = [[1, 3, 4], [6, 9, 2]]
    found = settings(num_speculative_tokens_per_batch_size=rows)
    looked_up = vllm.ask("lookup", table=found.vllm_schedule(), max_batch=16, most=6)
    assert looked_up[1:] == [schedule_at(found.schedule, batch) for batch in range(1, 17)]


def test_settings_from_anywhere_but_translate_are_held_to_their_invariants() -> None:
    with pytest.raises(AssertionError, match="declared"):
        replace(settings(), gammas=(0, 3))
