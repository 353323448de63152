"""Plans: what a model computes, as data.

An architecture file turns metadata into a `Plan`; an executor runs plans; nothing here does arithmetic on
activations.  May import floor 0 only.
"""
