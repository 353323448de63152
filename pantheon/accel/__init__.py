"""Dies and executors: where plans run.  An executor knows ops, never architectures."""
