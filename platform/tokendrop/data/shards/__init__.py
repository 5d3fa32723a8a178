"""Token shards on disk: their format, their manifest, and whether they are whole."""
