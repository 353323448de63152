"""Programs for people who work on Pantheon; never installed."""
