"""Host and die memory: signals, levels, the watcher, admission and the degradation ladder.  Knows bytes, not models."""
