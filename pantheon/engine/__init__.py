"""One loaded model made usable: load, state, forward, sampling, generation.  Knows no sockets and no other models."""
