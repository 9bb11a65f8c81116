"""Vegas in stock vLLM 0.33: `--speculative-config '{"method": "sparse_attn", ...}'`.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in every process.
"""

from __future__ import annotations


def register() -> None:
    """Make vLLM understand method `sparse_attn`; idempotent, imports no CUDA module.

    A vLLM of another version is left as it is: asking it for `sparse_attn` is refused with one
    sentence, and everything else works.
    """
    from vegas_runtime.vllm_plugin.patches import install

    install()
