"""Architectures: metadata in, plan out.  No arithmetic, no files, no dies."""
