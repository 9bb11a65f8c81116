"""Operations on attention scores and KV entries; plain PyTorch is the truth."""
