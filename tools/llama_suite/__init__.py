"""llama-server's own black-box tests, run against Pantheon."""
