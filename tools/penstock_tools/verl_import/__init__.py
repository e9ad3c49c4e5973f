"""Reads the configuration of a verl run and writes ours: `penstock import-verl`.

    script or command line -> shell                           -> words of the verl command
    words, YAML files      -> hydra                           -> verl keys and their values
    verl keys              -> keys.csv and convert, then run  -> our configuration, and what changed or was lost

verl itself is neither needed nor imported. Scripts are read, never run.
"""
