"""Reference engine: the draft-verify-accept loop on transformers' own models, CPU or CUDA."""
