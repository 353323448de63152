"""Bytes on disk: GGUF files, the quant block table, dequantisers.

Knows nothing of architectures, tokens or executors.  May import floor 0 only.
"""
