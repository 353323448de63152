"""The commands of the command line, one module each: `add_parser(subparsers)` and `run(args) -> exit code`.

Whatever is heavy (the engine, kernels) is imported inside `run`, so that `--help` answers at once.
"""
